"""What each worker tells its scheduler before the first request: the layers it has, and what it knows of the engine.

A scheduler is not told all that its workers are. vLLM's generate_scheduler_kv_cache_config puts one layer's spec in the
place of UniformTypeKVCacheSpecs, so that layers of several widths, or full layers and sliding windows of one page size,
look like one group of alike layers there. Chunks are made of what workers have: the scheduler takes its groups from
them, and the engine does not start where scheduler and workers, or two workers, disagree. Each stage of a pipeline has
layers of its own, of which the scheduler is shown the first stage's: to it a group is what all stages have of one.

vLLM's EngineCore asks each worker for `get_handshake_metadata` when the KV cache is registered, in whatever process it
runs, and hands the answers to the scheduler's half before the first request; 0.33 does so again after each wake-up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvredis.storage.errors import LayoutError

from .kv_layout import LayerGroup
from .weights import Table

LAYERS = "layers of KV cache group "
DIFFERENCE_CHARS_MAX = 200
"""Of each side's value in an error."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """One worker's answer: its groups of layers, what it knows of the engine, by name, and its weights."""

    groups: tuple[LayerGroup, ...]
    facts: Mapping[str, Any]
    weights: Table = field(default_factory=dict)


def engine_facts(kv_cache_config: Any, groups: Sequence[LayerGroup]) -> dict[str, Any]:
    """What both halves must know alike, from vLLM's KVCacheConfig and from what was made of it."""
    layout = groups[0].layout
    facts: dict[str, Any] = {
        "model": layout.model,
        "chunk_size": layout.chunk_tokens,
        "num_blocks": kv_cache_config.num_blocks,
        "number of KV cache groups": len(kv_cache_config.kv_cache_groups),
    }
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        facts[f"block_size of KV cache group {number}"] = group.kv_cache_spec.block_size
        facts[f"{LAYERS}{number}"] = tuple(sorted(group.layer_names))
        facts[f"enable_kv_transfer of KV cache group {number}"] = bool(getattr(group, "enable_kv_transfer", True))
    return facts


def agreed_groups(
    facts: Mapping[str, Any], workers: Mapping[int, Handshake], stages: int = 1, ranks: int = 1
) -> list[LayerGroup]:
    """The groups of all workers (by rank, one stage of a pipeline behind the other), as each stage's first rank has
    them. `facts` are the scheduler's; of several stages each has so many `ranks`.

    Raises LayoutError that names the first difference between the scheduler and a worker, or between two workers.
    """
    if 0 not in workers:
        raise LayoutError(f"the workers of ranks {sorted(workers)} have told of their layers, and rank 0 has not")
    if stages > 1 and workers.keys() != set(range(stages * ranks)):
        raise LayoutError(
            f"{len(workers)} workers have told of their layers, and a pipeline of {stages} stages has"
            f" {stages * ranks}: this vLLM hands over one stage's alone, and 0.32 those of all"
        )
    for rank, worker in sorted(workers.items()):
        first = rank // ranks * ranks if stages > 1 else 0
        known = {name: workers[first].facts.get(name) if first and _is_stages(name) else facts[name] for name in facts}
        _compare("the scheduler", known, f"the worker of rank {rank}", worker.facts)
        ours, theirs = _by_number(workers[first].groups), _by_number(worker.groups)
        _compare(f"the worker of rank {first}", ours, f"the worker of rank {rank}", theirs)
    return _joined([workers[stage * ranks].groups for stage in range(stages)])


def _is_stages(name: str) -> bool:
    """Whether that fact is another one in each stage."""
    return name.startswith(LAYERS)


def _joined(stages: Sequence[Sequence[LayerGroup]]) -> list[LayerGroup]:
    """The groups of all stages. Raises LayoutError where a stage has no layer of a group that another has."""
    kinds = [[_kind(group) for group in groups] for groups in stages]
    for stage, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise LayoutError(
                f"stage {stage} of the pipeline has layers of {len(kind)} kinds, stage 0 of {len(kinds[0])}, and chunks"
                " are made of all kinds on each: cut the pipeline elsewhere (--pipeline-parallel-size,"
                " VLLM_PP_LAYER_PARTITION)"
            )
    joined = []
    for groups in zip(*stages, strict=True):
        layers, spans = sum(group.layout.layers for group in groups), tuple(group.layout.span for group in groups)
        names = tuple(name for group in groups for name in group.names)
        joined.append(replace(groups[0], names=names, layout=replace(groups[0].layout, layers=layers), spans=spans))
    return joined


def _kind(group: LayerGroup) -> LayerGroup:
    """A group without what tells the stages apart."""
    layout = replace(group.layout, layers=1, part="", span="")
    return replace(group, names=(), layout=layout, spans=())


def _by_number(groups: Sequence[LayerGroup]) -> dict[str, Any]:
    """The groups without what tells ranks apart."""
    found: dict[str, Any] = {"number of groups of alike layers": len(groups)}
    for number, group in enumerate(groups):
        layout = replace(group.layout, rank=0)
        found[f"group {number} of alike layers"] = replace(group, layout=layout, stored_by_another=False)
    return found


def _compare(one: str, ours: Mapping[str, Any], other: str, theirs: Mapping[str, Any]) -> None:
    for name in (*ours, *(theirs.keys() - ours.keys())):
        mine, its = ours.get(name), theirs.get(name)
        if mine == its:
            continue
        if isinstance(mine, tuple) and isinstance(its, tuple):  # of many layers those that only one side has
            mine, its = [tuple(each for each in a if each not in b) for a, b in ((mine, its), (its, mine))]
        said = [f"{value}"[:DIFFERENCE_CHARS_MAX] for value in (mine, its)]
        raise LayoutError(f"{one} and {other} disagree about {name}: {said[0]} and {said[1]}; nothing can be stored")
