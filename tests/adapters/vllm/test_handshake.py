"""Scheduler and workers take one grouping of the model's layers, or the engine does not start and says why."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

from kvredis.adapters.vllm.config import groups_of
from kvredis.adapters.vllm.handshake import Handshake, agreed_groups, engine_facts
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import LayoutError
from tests.adapters.vllm.paged_specs import (
    FullAttentionSpec,
    KVCacheGroup,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    names,
)
from tests.adapters.vllm.test_config import engine

WINDOWS = {name: SlidingWindowSpec() for name in names(5) + names(5, start=6)}
FULL = {name: FullAttentionSpec() for name in (*names(1, start=5), *names(1, start=11))}
GEMMA = [KVCacheGroup(names(12), UniformTypeKVCacheSpecs(WINDOWS | FULL))]
"""Gemma 3 on a GPU: five layers with a sliding window, then one without, in one group."""
WIDTHS = {name: FullAttentionSpec(head_size=64 if at % 2 else 128) for at, name in enumerate(names(6))}
SEVERAL_WIDTHS = [KVCacheGroup(names(6), UniformTypeKVCacheSpecs(WIDTHS))]


def of_worker(groups: list[KVCacheGroup], pages: int = 40) -> SimpleNamespace:
    """A worker's KVCacheConfig."""
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=pages)


def of_scheduler(caches: SimpleNamespace) -> SimpleNamespace:
    """What vLLM's generate_scheduler_kv_cache_config makes of it."""
    made = deepcopy(caches)
    for group in made.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            group.kv_cache_spec = next(iter(group.kv_cache_spec.kv_cache_specs.values()))
    return made


def told(caches: SimpleNamespace, rank: int = 0, ranks: int = 1, chunk_size: int = 256) -> Handshake:
    described = engine(parallel={"tensor_parallel_size": ranks})
    groups = groups_of(described, caches, Config(chunk_size=chunk_size), rank)
    return Handshake(tuple(groups), engine_facts(caches, groups))


@pytest.mark.parametrize("groups", [GEMMA, SEVERAL_WIDTHS])
def test_the_scheduler_groups_layers_as_its_workers_do_though_it_is_shown_one_spec_for_all(
    groups: list[KVCacheGroup],
) -> None:
    caches = of_worker(groups)
    seen = told(of_scheduler(caches))
    worker = told(caches)
    assert len(seen.groups) == 1
    assert len(worker.groups) == 2
    assert agreed_groups(seen.facts, {0: worker}) == list(worker.groups)


@pytest.mark.parametrize("spec", [FullAttentionSpec(), MLAAttentionSpec()])
def test_ranks_that_differ_in_their_number_alone_agree(spec: Any) -> None:
    caches = of_worker([KVCacheGroup(names(4), spec)])
    workers = {rank: told(caches, rank, 4) for rank in range(4)}
    assert agreed_groups(told(caches, ranks=4).facts, workers) == list(workers[0].groups)


MORE_GROUPS = of_worker([*GEMMA, KVCacheGroup(["extra"], FullAttentionSpec())])
MORE_LAYERS = of_worker([KVCacheGroup([*names(12), "draft"], FullAttentionSpec())])
CHANGES: dict[str, tuple[SimpleNamespace, int, str]] = {
    "pages": (of_worker(GEMMA, 41), 256, "num_blocks: 40 and 41"),
    "groups": (MORE_GROUPS, 256, "number of KV cache groups: 1 and 2"),
    "a layer": (MORE_LAYERS, 256, "layers of KV cache group 0: () and ('draft',)"),
    "blocks": (
        of_worker([KVCacheGroup(names(12), FullAttentionSpec(16))]),
        256,
        "block_size of KV cache group 0: 32 and 16",
    ),
    "chunks": (of_worker(GEMMA), 512, "chunk_size: 256 and 512"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_engine_whose_halves_know_it_differently_does_not_start_and_says_in_what(change: str) -> None:
    facts = told(of_scheduler(of_worker(GEMMA))).facts
    caches, chunk_size, text = CHANGES[change]
    with pytest.raises(LayoutError) as raised:
        agreed_groups(facts, {0: told(caches, chunk_size=chunk_size)})
    assert f"the scheduler and the worker of rank 0 disagree about {text}; nothing can be stored" in str(raised.value)


def test_an_engine_two_ranks_of_which_have_other_layers_does_not_start_and_names_them() -> None:
    caches = of_worker(GEMMA)
    seen = told(of_scheduler(caches), ranks=2).facts
    other = of_worker([KVCacheGroup(names(12), UniformTypeKVCacheSpecs(dict.fromkeys(names(12), FullAttentionSpec())))])
    with pytest.raises(
        LayoutError, match="the worker of rank 0 and the worker of rank 1 disagree about number of groups"
    ):
        agreed_groups(seen, {0: told(caches, 0, 2), 1: told(other, 1, 2)})
    with pytest.raises(LayoutError, match="rank 0 has not"):
        agreed_groups(seen, {1: told(caches, 1, 2)})
    with pytest.raises(LayoutError, match="rank 0 has not"):
        agreed_groups(seen, {})
