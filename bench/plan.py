"""What can a cache be worth before there is one? `kvredis plan` answers from a shape and a few speeds: sizes,
break-even and verdicts.

A hit of n tokens takes latency + n x bytes_per_token / bandwidth to load and n / prefill_rate to compute. So

- break-even is bytes_per_token x prefill_rate (adapters/engine/break_even.py has the engine's side of the rule): a
  slower tier makes a hit slower than no hit. A prefill makes KV at just this rate, so a tier that takes less delays
  its stores;
- the smallest hit worth loading is latency / (1 / prefill_rate - bytes_per_token / bandwidth) tokens; a hybrid model
  loads the states behind the hit as well, one snapshot, which counts with the latency;
- a request of s bytes reaches s / (latency + s / bandwidth), which is 90 % of the bandwidth at s = 9 x latency x
  bandwidth: that decides how large a chunk should be;
- a share `a` of the KV (M bytes) that a step reads may lie behind a link when bringing it, a x M / B_link + T_overhead,
  takes no longer than what goes on meanwhile, M / B_vram + T_other. So a_max = B_link x (1 / B_vram + (T_other -
  T_overhead) / M), between 0 and 1. What comes is also written to the memory that the step reads, a x M / B_vram: from
  the share on at which that is LANDING_COST of the step, `landing_share`, it is slower even where the link would hide.

Speeds that are no positive numbers, and prompts without a whole chunk, are a ValueError where they are written down.
Units: GB = 1e9 bytes, GB/s, ms where a name says so, tokens. The result's schema is kvredis.plan/1.

`measured_tiers` reads tiers' speeds out of results of benches, so that a plan can stand on what a machine has shown.
From each file the figure is the median of one row, and `source` says which:

- kvredis.bench.server/1: `remote` (TCP) and `host` (unix socket): kvredis' pipelined GETs on all CPUs, of the value
  size nearest to a chunk, with the number of connections that was fastest; stores are the SETs beside it.
- kvredis.bench.disk/1: `disk`: the tier's cold reads and its writes, O_DIRECT if it was measured, with the fastest
  number of threads.
- kvredis.bench.transport/1: `remote`, `host`: stream_get over TCP and unix sockets, and `lane`, lane, copied; of the
  block size nearest to a chunk; stores are SET pipelined and lane, put.
- kvredis.bench.memory/1: `memory`: the fastest of memmove and kvredis copy by one thread, of the block size nearest to
  a chunk.
- kvredis.bench.links/1: `gpu link`, page-locked memory to the first GPU.

A tier's latency is what the smallest single GET took beyond its bytes at that bandwidth, and none is below 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

from kvredis.adapters.engine.block import HEADER_ALIGN_BYTES, block_bytes
from kvredis.adapters.engine.break_even import TRIAL_TIMES, break_even_bytes_per_s
from kvredis.adapters.engine.layout import DTYPES, ChunkLayout
from kvredis.storage.entry import extent_length
from kvredis.storage.memory.hugepages import pages_needed

from .core.errors import BenchError
from .core.servers import SUBJECT
from .core.shapes import ModelShape
from .core.statistics import GB, counted, size_text
from .disk.rates import TIER
from .disk.run import SCHEMA as DISK
from .links import SCHEMA as LINKS
from .memory import SCHEMA as MEMORY
from .server.run import SCHEMA as SERVER
from .transport.run import SCHEMA as TRANSPORT

SCHEMA: Final = "kvredis.plan/1"
_CHUNK_TIMES: Final = 9
"""0.9 / (1 - 0.9): a chunk is large enough when it is loaded at 90 % of the bandwidth."""
QUEUE_DEFAULT: Final = TRIAL_TIMES
"""The engine looks at a slow tier for this many times as long as computing takes; so many prompts are taken to be
waiting, and a tier that brings a prompt while they are computed can be prefetched from."""

Verdict = Literal["load", "prefetch only", "recompute"]


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """One tier: how fast it gives and takes, and how long a request waits for its first byte.

    `store_gb_per_s` None: as fast as it gives. `source` says where the figures are from.
    """

    name: str
    gb_per_s: float
    latency_ms: float = 0.0
    store_gb_per_s: float | None = None
    source: str = "given"

    def __post_init__(self) -> None:
        _positive(gb_per_s=self.gb_per_s, store_gb_per_s=self.store_gb_per_s)
        if not 0 <= self.latency_ms < math.inf:
            raise ValueError(f"latency_ms must not be negative, and is {self.latency_ms}")


@dataclass(frozen=True, slots=True)
class Workload:
    """What a model is asked: `prompt_tokens` found in a cache, `output_tokens` made behind them.

    `decode_tokens_per_s` is of one request; None leaves decoding out. `queue` prompts like it wait ahead of each. With
    `store_overlap` stores run beside the prefill, as kvredis' do; else behind it.
    """

    prefill_tokens_per_s: float
    chunk_tokens: int = 256
    prompt_tokens: int = 8192
    prompts: int = 1
    output_tokens: int = 1
    decode_tokens_per_s: float | None = None
    queue: int = QUEUE_DEFAULT
    store_overlap: bool = True

    def __post_init__(self) -> None:
        _positive(prefill_tokens_per_s=self.prefill_tokens_per_s, decode_tokens_per_s=self.decode_tokens_per_s)
        _positive(chunk_tokens=self.chunk_tokens, prompts=self.prompts)
        if self.prompt_tokens < self.chunk_tokens:
            raise ValueError(f"a prompt of {self.prompt_tokens} tokens has no whole chunk of {self.chunk_tokens}")


LANDING_COST: Final = 0.05
"""Of a step: what it may be slowed down by writing KV that comes from elsewhere."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a decoding step has: GPU memory and link bandwidth, and, per step, time beside reading KV and time that
    fetching costs by itself. `kv_gb` is the KV that a step reads; None: one prompt's."""

    hbm_gb_per_s: float
    link_gb_per_s: float
    other_ms: float = 0.0
    overhead_ms: float = 0.0
    kv_gb: float | None = None

    def __post_init__(self) -> None:
        _positive(hbm_gb_per_s=self.hbm_gb_per_s, link_gb_per_s=self.link_gb_per_s, kv_gb=self.kv_gb)


class SizesJson(TypedDict):
    """Bytes of payload, and pages for the blocks with their headers as an arena holds them."""

    bytes_per_token: int
    layer_chunk_bytes: int
    chunk_bytes: int
    prompt_bytes: int
    arena_bytes: int
    hugepages: int


class TierJson(TypedDict):
    """One tier's verdict. Times are of one prompt's whole chunks; `None` where there is no such number."""

    name: str
    source: str
    gb_per_s: float
    latency_ms: float
    quotient: float  # bandwidth / break-even
    load_ms: float
    compute_ms: float
    speed_up: float  # compute / load
    request_speed_up: float | None  # with decoding
    verdict: Verdict
    smallest_hit_tokens: int | None  # whole chunks; None: none is worth loading
    chunk_bytes_90: int
    chunk_tokens_90: int
    store_gb_per_s: float
    store_hides: bool
    prefill_slowed: float  # 1.0: not at all


class PipelineJson(TypedDict):
    hbm_gb_per_s: float
    link_gb_per_s: float
    other_ms: float
    overhead_ms: float
    kv_gb: float
    a_max: float
    landing_share: float


class PlanResult(TypedDict):
    schema: str
    shape: dict[str, int | str | None]
    workload: dict[str, float | int | bool | None]
    sizes: SizesJson
    break_even_gb_per_s: float
    tiers: list[TierJson]
    pipeline: PipelineJson | None


def plan(shape: ModelShape, workload: Workload, tiers: Sequence[TierSpeed], pipeline: Pipeline | None) -> PlanResult:
    """Work it all out."""
    sizes = sizes_of(shape, workload)
    return PlanResult(
        schema=SCHEMA,
        shape={
            "name": shape.name,
            "layers": shape.layers,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "dtype_bytes": shape.dtype_bytes,
            "planes": shape.planes,
            "states": shape.states,
            "snapshot_bytes": shape.snapshot_bytes,
        },
        workload={name: getattr(workload, name) for name in Workload.__slots__},
        sizes=sizes,
        break_even_gb_per_s=_break_even_gb_per_s(shape, workload),
        tiers=[judge(shape, workload, tier) for tier in tiers],
        pipeline=None if pipeline is None else _pipeline(pipeline, sizes),
    )


def sizes_of(shape: ModelShape, workload: Workload) -> SizesJson:
    """Give the sizes of a token, a chunk and a prompt, and what an arena needs for all prompts' whole chunks."""
    dtype = {dtype.nbytes: name for name, dtype in DTYPES.items()}[shape.dtype_bytes]
    layout = ChunkLayout(
        shape.layers, shape.kv_heads, shape.head_dim, dtype, workload.chunk_tokens, shape.name, planes=shape.planes
    )
    block = extent_length(block_bytes(layout, workload.chunk_tokens))
    each = workload.prompt_tokens // workload.chunk_tokens * block
    if shape.snapshot_bytes:
        each += extent_length(HEADER_ALIGN_BYTES + shape.snapshot_bytes)
    arena = workload.prompts * each
    return SizesJson(
        bytes_per_token=shape.bytes_per_token(),
        layer_chunk_bytes=shape.layer_bytes(workload.chunk_tokens),
        chunk_bytes=shape.block_bytes(workload.chunk_tokens),
        prompt_bytes=shape.block_bytes(workload.prompt_tokens),
        arena_bytes=arena,
        hugepages=pages_needed(arena),
    )


def judge(shape: ModelShape, workload: Workload, tier: TierSpeed) -> TierJson:
    """Say what one tier is good for: load when it is faster than computing, and prefetch only when a prompt comes
    while those ahead of it are computed."""
    bytes_per_token, rate = shape.bytes_per_token(), workload.prefill_tokens_per_s
    hit = workload.prompt_tokens // workload.chunk_tokens * workload.chunk_tokens
    load_s = _fixed_s(shape, tier) + hit * bytes_per_token / (tier.gb_per_s * GB)
    compute_s = hit / rate
    even = _break_even_gb_per_s(shape, workload)
    store = tier.gb_per_s if tier.store_gb_per_s is None else tier.store_gb_per_s
    chunk_90 = round(_CHUNK_TIMES * tier.latency_ms / 1e3 * tier.gb_per_s * GB)
    request = None
    if workload.decode_tokens_per_s is not None:
        decode_s = workload.output_tokens / workload.decode_tokens_per_s
        request = (compute_s + decode_s) / (load_s + decode_s)
    return TierJson(
        name=tier.name,
        source=tier.source,
        gb_per_s=tier.gb_per_s,
        latency_ms=tier.latency_ms,
        quotient=tier.gb_per_s / even,
        load_ms=load_s * 1e3,
        compute_ms=compute_s * 1e3,
        speed_up=compute_s / load_s,
        request_speed_up=request,
        verdict=_verdict(load_s, compute_s, workload.queue),
        smallest_hit_tokens=smallest_hit_tokens(shape, workload, tier),
        chunk_bytes_90=chunk_90,
        chunk_tokens_90=-(-chunk_90 // bytes_per_token),
        store_gb_per_s=store,
        store_hides=workload.store_overlap and even <= store,
        prefill_slowed=max(1.0, even / store) if workload.store_overlap else 1 + even / store,
    )


def smallest_hit_tokens(shape: ModelShape, workload: Workload, tier: TierSpeed) -> int | None:
    """Give the shortest hit, in tokens of whole chunks, that is faster to load than to compute; None: there is none."""
    saved_s = 1 / workload.prefill_tokens_per_s - shape.bytes_per_token() / (tier.gb_per_s * GB)  # by each token
    if saved_s <= 0:
        return None
    chunks = math.floor(_fixed_s(shape, tier) / saved_s / workload.chunk_tokens) + 1
    return chunks * workload.chunk_tokens


def _fixed_s(shape: ModelShape, tier: TierSpeed) -> float:
    """What a hit takes however long it is: the latency, and of a hybrid model one snapshot."""
    return tier.latency_ms / 1e3 + (shape.snapshot_bytes or 0) / (tier.gb_per_s * GB)


def remote_share(pipeline: Pipeline, kv_gb: float) -> float:
    """Give a_max: how much of the `kv_gb` that a step reads may lie behind the link without slowing it; 0 to 1."""
    spare_s = (pipeline.other_ms - pipeline.overhead_ms) / 1e3
    share = pipeline.link_gb_per_s * (1 / pipeline.hbm_gb_per_s + spare_s / kv_gb)
    return min(1.0, max(0.0, share))


def landing_share(pipeline: Pipeline, kv_gb: float) -> float:
    """Give how much of the `kv_gb` that a step reads may come from elsewhere before writing it to the GPU's memory
    takes LANDING_COST of the step; 0 to 1."""
    step_s = kv_gb / pipeline.hbm_gb_per_s + pipeline.other_ms / 1e3
    return min(1.0, LANDING_COST * step_s * pipeline.hbm_gb_per_s / kv_gb)


def _break_even_gb_per_s(shape: ModelShape, workload: Workload) -> float:
    return break_even_bytes_per_s(shape.bytes_per_token(), workload.prefill_tokens_per_s) / GB


def _verdict(load_s: float, compute_s: float, queue: int) -> Verdict:
    if load_s < compute_s:
        return "load"
    return "prefetch only" if load_s <= queue * compute_s else "recompute"


def _pipeline(pipeline: Pipeline, sizes: SizesJson) -> PipelineJson:
    kv_gb = sizes["prompt_bytes"] / GB if pipeline.kv_gb is None else pipeline.kv_gb
    return PipelineJson(
        hbm_gb_per_s=pipeline.hbm_gb_per_s,
        link_gb_per_s=pipeline.link_gb_per_s,
        other_ms=pipeline.other_ms,
        overhead_ms=pipeline.overhead_ms,
        kv_gb=kv_gb,
        a_max=remote_share(pipeline, kv_gb),
        landing_share=landing_share(pipeline, kv_gb),
    )


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, not {value}")


_Row = Mapping[str, Any]

_ARMS = (
    ("remote", "tcp", "stream_get", "SET pipelined"),
    ("host", "unix", "stream_get", "SET pipelined"),
    ("lane", "lane", "lane, copied", "lane, put"),
)
_COPIES = ("memmove", "kvredis copy")


def measured_tiers(path: Path, chunk_bytes: int) -> list[TierSpeed]:
    """Read the tiers that a result says something of. BenchError when it is no result, or says nothing of a tier."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot read a result: {error}") from error
    schema = str(found.get("schema")) if isinstance(found, dict) else "none"
    if schema not in _READERS:
        raise BenchError(f"{path}: schema {schema} tells no tier's speed; known: {', '.join(_READERS)}")
    try:
        tiers = _READERS[schema](found, chunk_bytes, path.name)
    except (LookupError, TypeError, ValueError) as error:
        raise BenchError(f"{path}: not a whole result of {schema}: {error!r}") from error
    if not tiers:
        raise BenchError(f"{path}: has no row of a tier; it was measured without that part")
    return tiers


def _server(found: Mapping[str, Any], chunk_bytes: int, file: str) -> list[TierSpeed]:
    tiers = []
    for name, transport in (("remote", "tcp"), ("host", "unix")):
        rows = [row for row in found["transfers"] if row["server"] == SUBJECT and row["transport"] == transport]
        rows = _unpinned(rows)
        best = _fastest(_nearest(_only(rows, op="GETP"), chunk_bytes))
        if best is None:
            continue
        size, connections = best["size_bytes"], best["connections"]
        store = _fastest(_only(rows, op="SET", size_bytes=size, connections=connections))
        tiers.append(
            TierSpeed(
                name,
                best["gb_per_s"],
                _latency_ms(_only(rows, op="GET", connections=1), "p50_ms", best["gb_per_s"]),
                None if store is None else store["gb_per_s"],
                f"{file}: GETP of {size_text(size)}, {transport}, {counted(connections, 'connection')}",
            )
        )
    return tiers


def _disk(found: Mapping[str, Any], chunk_bytes: int, file: str) -> list[TierSpeed]:
    own = _only(found["rates"], arm=TIER)
    rows = _only(own, mode="direct") or _only(own, mode="buffered")
    best, store = _fastest(_only(rows, op="read")), _fastest(_only(rows, op="write"))
    if best is None or store is None:
        return []
    source = f"{file}: tier, cold read, {best['mode']}, {counted(best['threads'], 'thread')}"
    latency_ms = _latency_ms(found["gets"], "spilled_ms", best["gb_per_s"])
    return [TierSpeed("disk", best["gb_per_s"], latency_ms, store["gb_per_s"], source)]


def _transport(found: Mapping[str, Any], chunk_bytes: int, file: str) -> list[TierSpeed]:
    tiers = []
    for name, transport, read, write in _ARMS:
        rows = _nearest(_only(found["arms"], transport=transport), chunk_bytes, "block_bytes")
        best, store = _fastest(_only(rows, arm=read)), _fastest(_only(rows, arm=write))
        if best is not None:
            source = f"{file}: {read} of {size_text(best['block_bytes'])}, {transport}"
            tiers.append(TierSpeed(name, best["gb_per_s"], 0.0, None if store is None else store["gb_per_s"], source))
    return tiers


def _memory(found: Mapping[str, Any], chunk_bytes: int, file: str) -> list[TierSpeed]:
    rows = [row for row in _only(found["rows"], threads=1) if row["arm"] in _COPIES]
    best = _fastest(_nearest(rows, chunk_bytes, "block_bytes"))
    if best is None:
        return []
    source = f"{file}: {best['arm']} of {size_text(best['block_bytes'])}, 1 thread"
    return [TierSpeed("memory", best["gb_per_s"], source=source)]


def _links(found: Mapping[str, Any], chunk_bytes: int, file: str) -> list[TierSpeed]:
    tiers = []
    rows = _only(found["copies"], part="gpu", direction="uni", way="pinned")
    link = _fastest(_only(rows, source="CPU", target="GPU 0"))
    if link is not None:
        store = _fastest(_only(rows, source="GPU 0", target="CPU"))
        back = None if store is None else store["gb_per_s"]
        tiers.append(TierSpeed("gpu link", link["gb_per_s"], 0.0, back, f"{file}: pinned, CPU to GPU 0"))
    return tiers


_READERS: Mapping[str, Callable[[Mapping[str, Any], int, str], list[TierSpeed]]] = {
    SERVER: _server,
    DISK: _disk,
    TRANSPORT: _transport,
    MEMORY: _memory,
    LINKS: _links,
}


def _only(rows: Iterable[_Row], **wanted: object) -> list[_Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _unpinned(rows: Sequence[_Row]) -> list[_Row]:
    return _only(rows, pinned=False) or list(rows)


def _nearest(rows: Sequence[_Row], nbytes: int, figure: str = "size_bytes") -> list[_Row]:
    """Give the rows whose size is the fewest times larger or smaller than `nbytes`."""
    if not rows:
        return []
    size = min((row[figure] for row in rows), key=lambda size: abs(math.log(size / nbytes)))
    return _only(rows, **{figure: size})


def _fastest(rows: Sequence[_Row]) -> _Row | None:
    return max(rows, key=lambda row: float(row["gb_per_s"]), default=None)


def _latency_ms(rows: Sequence[_Row], figure: str, gb_per_s: float) -> float:
    """Give what the smallest of `rows` took beyond its bytes; 0.0 when nothing was measured."""
    if not rows:
        return 0.0
    row = min(rows, key=lambda row: int(row["size_bytes"]))
    return max(0.0, float(row[figure]) - int(row["size_bytes"]) / (gb_per_s * GB) * 1e3)


_COLUMNS = ("tier", "GB/s", "latency", "x even", "load", "faster", "verdict", "smallest hit", "stores", "90 % chunk")


def table_lines(result: PlanResult) -> Iterator[str]:
    """Give the report, line by line."""
    yield from _sizes(result)
    yield ""
    yield (
        f"Break-even: {result['break_even_gb_per_s']:.3f} GB/s. A slower tier makes a hit slower than no hit;"
        " a prefill makes KV at this rate."
    )
    if result["tiers"]:
        yield ""
        yield from _tiers(result)
    if result["pipeline"] is not None:
        yield ""
        yield from _pipeline_lines(result["pipeline"])


def _sizes(result: PlanResult) -> Iterator[str]:
    shape, sizes, work = result["shape"], result["sizes"], result["workload"]
    chunk, prompt = int(work["chunk_tokens"] or 0), int(work["prompt_tokens"] or 0)
    kept = f"{shape['kv_heads']} KV heads x {shape['head_dim']} x {shape['dtype_bytes']} bytes, K and V"
    if shape["planes"] == 1:
        kept = f"a latent of {shape['head_dim']} x {shape['dtype_bytes']} bytes"
    rate = f"{work['prefill_tokens_per_s']:,.0f} tokens/s of prefill"
    yield f"{shape['name']}: {shape['layers']} layers x {kept}; {rate}"
    yield ""
    yield f"  a token                 {sizes['bytes_per_token']:>12,} bytes"
    yield f"  {f'a chunk ({chunk} tokens)':<23} {_size(sizes['chunk_bytes']):>12}"
    yield f"  a layer of a chunk      {_size(sizes['layer_chunk_bytes']):>12}"
    chunks = counted(prompt // chunk, "whole chunk")
    if shape["states"]:
        snapshot, states = shape["snapshot_bytes"], counted(int(shape["states"] or 0), "state")
        size = "unknown" if snapshot is None else _size(int(snapshot))
        yield f"  {'a snapshot':<23} {size:>12}, {states}{_as_tokens(snapshot, sizes['bytes_per_token'])}"
    yield f"  {f'a prompt ({prompt} tokens)':<23} {_size(sizes['prompt_bytes']):>12}, {chunks}"
    held = f"arena for {counted(int(work['prompts'] or 0), 'prompt')}"
    yield f"  {held:<23} {_size(sizes['arena_bytes']):>12} = {counted(sizes['hugepages'], 'hugepage')} of 2 MiB"


def _as_tokens(snapshot: int | str | None, bytes_per_token: int) -> str:
    return "" if snapshot is None else f", as much as the KV of {int(snapshot) // bytes_per_token} tokens"


def _tiers(result: PlanResult) -> Iterator[str]:
    rows = [_COLUMNS, *map(_cells, result["tiers"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        cells = [
            cell.ljust(width) if _COLUMNS[at] in ("tier", "verdict", "stores") else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
    yield ""
    yield "  x even: bandwidth / break-even. load: a prompt's whole chunks. faster: computing it / loading it."
    yield from _remarks(result["tiers"], result["workload"]["queue"])
    for tier in result["tiers"]:
        if tier["request_speed_up"] is not None:
            tokens = int(result["workload"]["output_tokens"] or 0)
            yield f"  {tier['name']}: a request with {counted(tokens, 'output token')}: {tier['request_speed_up']:.2f}x"


def _remarks(tiers: Sequence[TierJson], queue: object) -> Iterator[str]:
    if any(tier["verdict"] == "prefetch only" for tier in tiers):
        yield f"  prefetch only: slower than computing, but here by the time that {queue} prompts ahead are computed."
    for tier in tiers:
        if tier["prefill_slowed"] > 1:
            slowed = f"storing makes a prefill {tier['prefill_slowed']:.2f}x as long"
            yield f"  {tier['name']}: takes {tier['store_gb_per_s']:.3g} GB/s, so {slowed}."
    for tier in tiers:
        if tier["source"] != "given":
            yield f"  {tier['name']}: {tier['source']}"


def _cells(tier: TierJson) -> tuple[str, ...]:
    smallest, chunk = tier["smallest_hit_tokens"], tier["chunk_bytes_90"]
    return (
        tier["name"],
        f"{tier['gb_per_s']:.2f}",
        f"{tier['latency_ms']:.3g} ms",
        f"{tier['quotient']:.2f}x",
        f"{tier['load_ms']:,.1f} ms",
        f"{tier['speed_up']:.2f}x",
        tier["verdict"],
        "none" if smallest is None else f"{smallest} tokens",
        "hidden" if tier["store_hides"] else "seen",
        "any" if chunk == 0 else f"{tier['chunk_tokens_90']} tokens",
    )


def _pipeline_lines(pipeline: PipelineJson) -> Iterator[str]:
    yield (
        f"Layer pipeline: up to {pipeline['a_max'] * 100:.1f} % of a step's KV ({pipeline['kv_gb']:.3f} GB) may lie"
        f" behind a link of {pipeline['link_gb_per_s']:g} GB/s"
    )
    yield (
        f"  = {pipeline['link_gb_per_s']:g} x (1 / {pipeline['hbm_gb_per_s']:g} + ({pipeline['other_ms']:g} ms -"
        f" {pipeline['overhead_ms']:g} ms) / {pipeline['kv_gb']:.3f} GB), between 0 and 1"
    )
    yield (
        f"  From {pipeline['landing_share'] * 100:.1f} % on writing what comes takes {LANDING_COST:.0%} of a step or"
        " more"
    )


def _size(nbytes: int) -> str:
    """Write a size in the largest unit that leaves at least 1."""
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if nbytes >= scale:
            return size_text(nbytes) if nbytes % scale == 0 else f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
