"""Engines of several tensor-parallel ranks and pipeline stages over one store, without vLLM: what one has stored one of
more or fewer ranks loads, head by head, and what a stage lacks no stage loads."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvredis.adapters.paged.jobs import MovingOptions
from kvredis.adapters.vllm.config import groups_of
from kvredis.adapters.vllm.handshake import Handshake, agreed_groups, engine_facts
from kvredis.adapters.vllm.kv_layout import other_sizes
from kvredis.adapters.vllm.request import Prompt, SchedulingOptions
from kvredis.adapters.vllm.scheduler import Scheduling
from kvredis.adapters.vllm.worker import PagedWorker
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import LayoutError
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.vllm.paged_specs import (
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from tests.adapters.vllm.test_config import engine

PAGES, PAGE, CHUNK, HEADS, DIM, LAYERS = 40, 16, 64, 8, 4, 4
TOKENS = list(range(300))
FOUND = 256
WINDOW = 100
WAIT_S = 30


class Engine:
    """Both halves of an engine of so many ranks in each of its stages. A model's layers are all of one kind of `specs`,
    which take turns; `cut` is how many layers the first stage has. Heads are those of the whole model."""

    def __init__(
        self,
        backend: FakeBackend,
        ranks: int = 1,
        cut: int | None = None,
        specs: Sequence[str] = ("full",),
        **options: Any,
    ) -> None:
        self.ranks, self.backend = ranks, backend
        self.stages = [range(LAYERS)] if cut is None else [range(cut), range(cut, LAYERS)]
        self.kinds = specs
        parallel = {"tensor_parallel_size": ranks, "pipeline_parallel_size": len(self.stages)}
        described, config = engine(parallel=parallel), Config(chunk_size=CHUNK)
        told, self.workers, self.caches = {}, [], []
        for number, (stage, rank) in enumerate((stage, rank) for stage in self.stages for rank in range(ranks)):
            caches = SimpleNamespace(kv_cache_groups=self.described(stage), num_blocks=PAGES)
            groups = groups_of(described, caches, config, rank)
            told[number] = Handshake(tuple(groups), engine_facts(caches, groups))
            width = {"full": (HEADS // ranks, 2 * DIM), "window": (HEADS // ranks, 2 * DIM), "latent": (1, DIM)}
            tensors = {
                name: torch.zeros(PAGES, width[kind][0], PAGE, width[kind][1], dtype=torch.float32)
                for name, kind in ((f"model.layers.{at}.attn", self.kinds[at % len(specs)]) for at in stage)
            }
            self.caches.append(tensors)
            self.workers.append(PagedWorker(backend, groups, tensors, PAGES, MovingOptions(), rank=number))
        self.groups = agreed_groups(told[0].facts, told, len(self.stages), ranks)
        self.scheduling = Scheduling(self.groups, backend, SchedulingOptions(**options))

    def described(self, stage: range) -> list[KVCacheGroup]:
        """vLLM's groups, as one stage is shown them: one of each kind."""
        heads = HEADS // self.ranks
        specs = {
            "full": FullAttentionSpec(PAGE, heads, DIM, torch.float32),
            "window": SlidingWindowSpec(PAGE, heads, DIM, torch.float32, sliding_window=WINDOW),
            "latent": MLAAttentionSpec(PAGE, 1, DIM, torch.float32),
        }
        by_kind = [[at for at in stage if at % len(self.kinds) == place] for place in range(len(self.kinds))]
        return [
            KVCacheGroup([f"model.layers.{at}.attn" for at in layers], specs[kind])
            for layers, kind in zip(by_kind, self.kinds, strict=True)
        ]

    def compute(self, tables: list[list[int]], start: int, stop: int) -> None:
        """What a forward pass writes: for every layer, head and page another number."""
        for place, name, at, page in self.places(tables, start, stop):
            self.caches[place][name][page] = self.right(place, name, at)

    def places(self, tables: list[list[int]], start: int, stop: int) -> list[tuple[int, str, int, int]]:
        return [
            (place, name, at, tables[int(name.split(".")[2]) % len(self.kinds)][at])
            for place, tensors in enumerate(self.caches)
            for name in tensors
            for at in range(start // PAGE, stop // PAGE)
        ]

    def right(self, place: int, name: str, at: int) -> torch.Tensor:
        layer, shape = int(name.split(".")[2]), self.caches[place][name].shape
        is_latent = self.kinds[layer % len(self.kinds)] == "latent"
        first = 0 if is_latent else place % self.ranks * shape[1]
        heads = torch.arange(first, first + shape[1]).view(-1, 1, 1)
        plane = (torch.arange(shape[3]) >= DIM).view(1, 1, -1) * 0.5
        return (16 * layer + heads + plane + 64 * at).to(torch.float32).expand(shape[1:])

    def holds(self, tables: list[list[int]], tokens: int) -> bool:
        return all(
            torch.equal(self.caches[place][name][page], self.right(place, name, at))
            for place, name, at, page in self.places(tables, 0, tokens)
            if page
        )

    def match(self, name: str = "r") -> int:
        found = self.scheduling.match(Prompt(name, TOKENS), 0)
        assert found is not None
        return found

    @torch.inference_mode()
    def step(self) -> None:
        """As vLLM runs one."""
        step = self.scheduling.step()
        for worker in self.workers:
            worker.before(step)
            jobs = worker.stores(step)
            worker.load(step)
            worker.store(step, jobs)

    def load(self, tables: list[list[int]], found: int, name: str = "r") -> set[int]:
        """Load what was found, and say which pages have failed on any rank."""
        self.scheduling.allocated(name, tables, found)
        self.step()
        failed: set[int] = set()
        for worker in self.workers:
            deadline = time.monotonic() + WAIT_S
            while name not in (results := worker.results()).loaded:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            failed |= results.failed_pages
        self.scheduling.loaded(name, failed=bool(failed))
        return failed

    def prompt(self, found: int = 0, name: str = "r") -> list[list[int]]:
        """Have a prompt found, loaded, computed and stored; where its pages are."""
        tables = [list(range(1 + 18 * place, 19 + 18 * place)) for place in range(len(self.kinds))]
        assert self.match(name) == found
        if found:
            for table, kind in zip(tables, self.kinds, strict=True):
                if kind == "window":
                    table[: (found - WINDOW + 1) // PAGE] = [0] * ((found - WINDOW + 1) // PAGE)
            assert self.load(tables, found, name) == set()
        self.compute(tables, found, len(TOKENS))
        self.scheduling.scheduled(name, tables, found, len(TOKENS) - found, anew=True)
        self.step()
        for worker in self.workers:
            assert worker.mover.settle(WAIT_S)
        return tables

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        assert self.backend.leases == 0


def stored(backend: FakeBackend) -> dict[bytes, int]:
    """How many blocks there are of each shard."""
    shards = [key.split(b"{")[1].split(b"@")[0] for key in backend.values]
    return {shard: shards.count(shard) for shard in sorted(set(shards))}


SIZES = [1, 2, 4, 8]


@pytest.mark.parametrize("specs", [("full",), ("full", "window"), ("latent", "full")])
@pytest.mark.parametrize(("before", "behind"), [(one, two) for one in SIZES for two in SIZES])
def test_what_an_engine_of_some_ranks_has_stored_is_in_the_pages_of_one_of_others_head_by_head(
    before: int, behind: int, specs: tuple[str, ...]
) -> None:
    backend = FakeBackend(100_000)
    first = Engine(backend, before, specs=specs)
    first.prompt()
    first.close()
    there = stored(backend)
    second = Engine(backend, behind, specs=specs)
    tables = second.prompt(FOUND)
    assert second.holds(tables, FOUND)
    assert stored(backend) == there, "what was found is not stored again"
    second.close()


@pytest.mark.parametrize(("before", "behind"), [(1, 1), (2, 2), (2, 1), (1, 4)])
@pytest.mark.parametrize("specs", [("full",), ("full", "window")])
def test_each_stage_of_a_pipeline_loads_and_stores_its_own_layers(
    before: int, behind: int, specs: tuple[str, ...]
) -> None:
    backend = FakeBackend(100_000)
    first = Engine(backend, before, cut=2, specs=specs)
    first.prompt()
    first.close()
    assert sum(stored(backend).values()) == 4 * len(specs) * 2 * before
    second = Engine(backend, behind, cut=2, specs=specs)
    assert second.holds(second.prompt(FOUND), FOUND)
    second.close()


def test_what_one_stage_or_rank_lacks_is_missing_on_all() -> None:
    backend = FakeBackend(100_000)
    first = Engine(backend, 2, cut=1)
    first.prompt()
    assert stored(backend) == {b"0/2:0-0": 4, b"0/2:1-3": 4, b"1/2:0-0": 4, b"1/2:1-3": 4}
    chunks = sorted(key for key in backend.values if b"{1/2:1-3@" in key)
    order = [chunk.key.split(b"}")[1] for chunk in first.scheduling.follow(Prompt("r", TOKENS)).keys[0]]
    (lost,) = (key for key in chunks if key.endswith(order[2]))
    backend.delete([lost])
    first.close()
    for ranks in (1, 2):
        second = Engine(backend, ranks, cut=1)
        assert second.match() == 2 * CHUNK
        second.close()


def test_a_pipeline_that_is_cut_elsewhere_finds_nothing_and_nor_does_one_engine_of_all_layers() -> None:
    backend = FakeBackend(100_000)
    first = Engine(backend, cut=2)
    first.prompt()
    first.close()
    for cut in (1, 3, None):
        second = Engine(backend, cut=cut)
        assert second.match() == 0
        second.close()


def test_a_prefix_of_which_engines_of_several_sizes_have_stored_parts_is_loaded_whole() -> None:
    together = FakeBackend(100_000)
    for place, ranks in enumerate((2, 1, 8, 4)):
        alone = FakeBackend(100_000)
        one = Engine(alone, ranks)
        one.prompt()
        one.close()
        chunk = one.scheduling.follow(Prompt("r", TOKENS)).keys[0][place].key.split(b"}")[1]
        for key in [key for key in alone.values if key.endswith(chunk)]:
            together.put(key, alone.values[key])
    assert len(together.values) == 2 + 1 + 8 + 4
    for ranks in SIZES:
        last = Engine(together, ranks)
        assert last.holds(last.prompt(FOUND), FOUND)
        last.close()


def test_a_damaged_part_of_a_chunk_fails_its_pages_and_what_is_computed_in_its_place_is_this_engines_own() -> None:
    backend = FakeBackend(100_000)
    first = Engine(backend, 4)
    first.prompt()
    first.close()
    damaged = sorted(key for key in backend.values if b"{3/4@" in key)
    backend.values |= {key: backend.values[key][:-4] + b"????" for key in damaged}
    second = Engine(backend, 1)
    tables = [list(range(1, 19))]
    assert second.match() == FOUND
    assert second.load(tables, FOUND) == set(tables[0][:16])
    assert not any(second.caches[0][name][tables[0][:16]].any() for name in second.caches[0])
    second.compute(tables, 0, len(TOKENS))
    second.scheduling.scheduled("r", tables, 0, len(TOKENS), anew=True)
    second.step()
    assert second.workers[0].mover.settle(WAIT_S)
    assert stored(backend)[b"0"] == 4
    second.close()


class Asked(FakeBackend):
    """Notes how many keys each question has."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.questions: list[int] = []

    def match(self, keys: Sequence[bytes]) -> int:
        self.questions.append(len(keys))
        return super().match(keys)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        self.questions.append(len(keys))
        return super().present(keys)


def test_a_hit_takes_one_question_as_ever_and_a_miss_a_small_one_more() -> None:
    backend = Asked()
    only = Engine(backend)
    only.prompt()
    assert backend.questions[0] == 4
    assert backend.questions[1] == 3, "two, four and eight ranks"
    backend.questions.clear()
    assert only.match("hit") == FOUND
    assert backend.questions == [4]
    only.close()


def test_a_load_in_parts_counts_as_so_many_chunks() -> None:
    backend = FakeBackend(100_000)
    first = Engine(backend, 8)
    first.prompt()
    first.close()
    second = Engine(backend, 2, max_load_chunks=12)
    assert second.match() == 3 * CHUNK, "each of them in four parts"
    second.scheduling.allocated("r", [list(range(1, 19))], 3 * CHUNK)
    assert second.scheduling.chunks_loading == 12
    assert second.scheduling.match(Prompt("other", TOKENS[:CHUNK] + TOKENS), 0) is None, "no room beside it"
    second.close()


STATES = KVCacheGroup(["model.layers.1.mixer"], MambaSpec(PAGE))
PACKED = KVCacheGroup(["model.layers.1.attn"], FullAttentionSpec(PAGE, 8, 64, torch.uint8, state_content_bytes=96))
FP8 = KVCacheGroup(["model.layers.1.attn"], FullAttentionSpec(PAGE, 8, 64, torch.float8_e4m3fn))
LATENT = KVCacheGroup(["model.layers.1.attn"], MLAAttentionSpec(PAGE))
FULL = KVCacheGroup(["model.layers.0.attn"], FullAttentionSpec(PAGE, 4))


@pytest.mark.parametrize(
    ("described", "found"),
    [
        ([FULL], [1, 4, 8]),
        ([FULL, LATENT], [1, 4, 8]),
        ([FULL, STATES], []),
        ([FULL, PACKED], []),
        ([FULL, FP8], []),
        ([LATENT], []),
        ([KVCacheGroup(["model.layers.0.attn"], FullAttentionSpec(PAGE, 1))], [1]),
    ],
)
def test_blocks_of_other_sizes_are_looked_for_where_ranks_split_the_heads_and_nothing_else(
    described: list[KVCacheGroup], found: list[int]
) -> None:
    caches = SimpleNamespace(kv_cache_groups=described, num_blocks=PAGES)
    groups = groups_of(engine(parallel={"tensor_parallel_size": 2}), caches, Config(chunk_size=CHUNK), 0)
    assert other_sizes(groups) == found


def test_a_pipeline_whose_stages_have_layers_of_other_kinds_does_not_start_and_says_how_to_cut_it() -> None:
    with pytest.raises(LayoutError, match=r"stage 1 of the pipeline has layers of 1 kinds, stage 0 of 2, .* cut"):
        Engine(FakeBackend(), cut=3, specs=("full", "window"))


def test_a_vllm_that_hands_over_one_stage_alone_is_told_by_how_many_workers_there_are() -> None:
    caches = SimpleNamespace(kv_cache_groups=[FULL], num_blocks=PAGES)
    described = engine(parallel={"pipeline_parallel_size": 2})
    groups = groups_of(described, caches, Config(chunk_size=CHUNK), 0)
    told = Handshake(tuple(groups), engine_facts(caches, groups))
    for count, ranks in ((1, 1), (2, 2)):
        with pytest.raises(
            LayoutError, match=f"{count} workers have told .* has {2 * ranks}: this vLLM hands over one"
        ):
            agreed_groups(told.facts, dict.fromkeys(range(count), told), 2, ranks)


@pytest.mark.parametrize(("before", "behind"), [(2, 1), (1, 4)])
def test_layers_that_all_have_windows_are_shared_too(before: int, behind: int) -> None:
    backend = FakeBackend(100_000)
    first = Engine(backend, before, specs=("window",))
    first.prompt()
    first.close()
    second = Engine(backend, behind, specs=("window",))
    assert second.holds(second.prompt(FOUND), FOUND)
    second.close()
