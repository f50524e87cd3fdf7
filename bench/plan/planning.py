"""What a cache can be worth before there is one: sizes, break-even and verdicts from a shape and a few speeds. No I/O.

A hit of n tokens takes latency + n x bytes_per_token / bandwidth to load and n / prefill_rate to compute. So

- break-even is bytes_per_token x prefill_rate (adapters/engine/break_even.py, where the engine lives by the same rule):
a slower tier
  makes a hit slower than no hit. A prefill makes KV at just this rate, so a tier that takes less delays its stores;
- the smallest hit worth loading is latency / (1 / prefill_rate - bytes_per_token / bandwidth) tokens;
- a request of s bytes reaches s / (latency + s / bandwidth), which is 90 % of the bandwidth at s = 9 x latency x
  bandwidth: that decides how large a chunk should be;
- a share `a` of the KV (M bytes) that a step reads may lie behind a link when bringing it, a x M / B_link + T_overhead,
  takes no longer than what goes on meanwhile, M / B_vram + T_other. So a_max = B_link x (1 / B_vram + (T_other -
  T_overhead) / M), between 0 and 1.

Speeds that are no positive numbers, and prompts without a whole chunk, are a ValueError where they are written down.
Units: GB = 1e9 bytes, GB/s, ms where a name says so, tokens. The result's schema is kvredis.plan/1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypedDict

from kvredis.adapters.engine.block import block_bytes
from kvredis.adapters.engine.break_even import TRIAL_TIMES, break_even_bytes_per_s
from kvredis.adapters.engine.layout import DTYPES, ChunkLayout
from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.core.statistics import GB
from kvredis.storage.entry import extent_length
from kvredis.storage.memory.hugepages import pages_needed

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


class PlanResult(TypedDict):
    schema: str
    shape: dict[str, int | str]
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
    arena = workload.prompts * (workload.prompt_tokens // workload.chunk_tokens) * block
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
    load_s = tier.latency_ms / 1e3 + hit * bytes_per_token / (tier.gb_per_s * GB)
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
    chunks = math.floor(tier.latency_ms / 1e3 / saved_s / workload.chunk_tokens) + 1
    return chunks * workload.chunk_tokens


def remote_share(pipeline: Pipeline, kv_gb: float) -> float:
    """Give a_max: how much of the `kv_gb` that a step reads may lie behind the link without slowing it; 0 to 1."""
    spare_s = (pipeline.other_ms - pipeline.overhead_ms) / 1e3
    share = pipeline.link_gb_per_s * (1 / pipeline.hbm_gb_per_s + spare_s / kv_gb)
    return min(1.0, max(0.0, share))


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
    )


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, not {value}")
