"""`kvredis bench swap`: a prompt's KV between an engine's pages and the host, as part of what PCIe gives.

One task moves random pages out to blocks of page-locked memory, or back in: by one cudaMemcpyAsync for each layer,
page and K/V, as engines began; gathered by torch's index operations; and as kvredis does it. The link is measured in
the same repeat. On the GPU a real prefill may run beside it, and an engine's own copies. Every byte is compared, each
time, where the KV is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.machine import machine_facts
from kvredis.bench.core.shapes import BLOCK_TOKENS, SHAPES, ModelShape
from kvredis.bench.core.statistics import GB, rotated
from kvredis.bench.server.transfer import MIB, Progress
from kvredis.bench.store_overhead.compute import DTYPES

from .arms import ARMS, ONE_BYTES, Arm, HostMemory, Link, Swap, arm_of, settle
from .interference import copies_beside, prefill_beside
from .result import (
    DIRECTIONS,
    OURS,
    SCHEMA,
    Direction,
    LinkSample,
    SwapResult,
    SwapRow,
    SwapSample,
    gate_lines,
    swap_row,
)

_CPU_TOKENS = 512
_CPU_LINK_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """What one call of the bench does; `tokens` None: 8192, without a GPU 512."""

    shapes: tuple[ModelShape, ...] = field(default_factory=lambda: tuple(SHAPES[name] for name in ("8b", "7b", "3b")))
    chunk_tokens: tuple[int, ...] = (16, 256)
    tokens: int | None = None
    repeats: int = 5
    beside_prefill: bool = False
    beside_copies: bool = False

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        each = len(self.chunk_tokens) * (self.repeats + 1) * len(ARMS) * len(DIRECTIONS)
        return len(self.shapes) * (each + len(DIRECTIONS) * (self.beside_prefill + self.beside_copies))


QUICK = SwapPlan(repeats=2)


def run(plan: SwapPlan, progress: Progress) -> SwapResult:
    """Measure; VerificationError at a wrong byte, BenchError for what cannot be moved."""
    import torch

    from kvredis.adapters.transfer.cuda.device import choices

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    tokens = plan.tokens or (8192 if on_gpu else _CPU_TOKENS)
    for shape in plan.shapes:
        if shape.dtype_bytes not in DTYPES:
            raise BenchError(f"{shape.name}: no KV of {shape.dtype_bytes} bytes an element")
    for chunk in plan.chunk_tokens:
        if chunk % BLOCK_TOKENS or tokens % chunk:
            raise BenchError(f"{tokens} tokens are not whole chunks of {chunk}, made of pages of {BLOCK_TOKENS}")
    began_s = time.perf_counter()
    result = SwapResult(
        schema=SCHEMA,
        machine=machine_facts(),
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name() if on_gpu else "No GPU",
        copies=choices() if on_gpu else {},
        options={
            "shapes": [shape.name for shape in plan.shapes], "chunk_tokens": list(plan.chunk_tokens),
            "tokens": tokens, "page_tokens": BLOCK_TOKENS, "repeats": plan.repeats,
        },
        notes=[] if on_gpu else ["There is no GPU: everything is copied within the CPU's memory, and no bar applies"],
        links=[], rows=[], prefill=[], waits=[], gate=[], verified_bytes=0, seconds=0.0,
    )  # fmt: skip
    for shape in plan.shapes:
        _measure(Swap(shape, tokens, device), plan, result, progress)
    if on_gpu:
        result["gate"] = gate_lines(result["rows"], result["prefill"])
    result["seconds"] = time.perf_counter() - began_s
    return result


def _measure(swap: Swap, plan: SwapPlan, result: SwapResult, progress: Progress) -> None:
    on_gpu = swap.paged.device.type == "cuda"
    link_bytes = ONE_BYTES if on_gpu else _CPU_LINK_BYTES
    host = HostMemory(max(link_bytes, *(swap.host_bytes(chunk) for chunk in plan.chunk_tokens)), lock=on_gpu)
    arms = {OURS: arm_of(OURS, swap.paged)}
    try:
        if on_gpu and not host.locked:
            result["notes"].append(f"{swap.shape.name}: the host's memory could not be registered with the GPU")
        if plan.beside_prefill and on_gpu:  # before others make streams, which an engine has not either
            for direction in DIRECTIONS:
                progress(f"{swap.shape.name}: prefill beside {direction}")
                parts = swap.parts(host.view, plan.chunk_tokens[-1])
                rows, verified = prefill_beside(swap, arms[OURS][0], parts, direction, plan.repeats)
                result["prefill"] += rows
                result["verified_bytes"] += verified
        elif plan.beside_prefill and not any("prefill" in note for note in result["notes"]):
            result["notes"].append("There is no GPU: no prefill to slow down")
        arms |= {name: arm_of(name, swap.paged) for name in ARMS if name != OURS}
        link = Link(host, swap.paged.device, link_bytes)
        if plan.beside_copies:
            for direction in DIRECTIONS:
                progress(f"{swap.shape.name}: an engine's copies beside {direction}")
                parts = swap.parts(host.view, plan.chunk_tokens[-1])
                waits, verified = copies_beside(swap, (arms[OURS][0], link), parts, direction, plan.repeats)
                result["waits"] += waits
                result["verified_bytes"] += verified
        turns = _Turns(plan, link, {name: arm for name, (arm, _) in arms.items()})
        for chunk in plan.chunk_tokens:
            result["rows"] += _rows(swap, host.view, chunk, turns, result, progress)
    finally:
        for _, close in arms.values():
            close()
        del arms
        host.close()


@dataclass(frozen=True, slots=True)
class _Turns:
    """Who takes turns in a repeat."""

    plan: SwapPlan
    link: Link
    arms: dict[str, Arm]


def _rows(
    swap: Swap, host: memoryview, chunk: int, turns: _Turns, result: SwapResult, progress: Progress
) -> list[SwapRow]:
    parts = swap.parts(host, chunk)
    samples: dict[tuple[str, Direction], list[SwapSample]] = {(arm, way): [] for arm in ARMS for way in DIRECTIONS}
    for repeat in range(-1, turns.plan.repeats):  # the first is a warm-up: checked, not told
        links = turns.link.sample(repeat)
        if repeat >= 0:
            result["links"] += links
        for name in rotated(ARMS, repeat + 1):
            for direction in DIRECTIONS:
                progress(f"{swap.shape.name}, chunks of {chunk}: {name} {direction}")
                sample = _sample(swap, parts, (turns.arms[name], direction), links)
                result["verified_bytes"] += sample["verified_bytes"]
                if repeat >= 0:
                    samples[name, direction].append(sample)
    return [swap_row(swap.shape.name, chunk, swap.nbytes, way, each) for way, each in samples.items()]


def _sample(swap: Swap, parts: Any, way: tuple[Arm, Direction], links: list[LinkSample]) -> SwapSample:
    arm, direction = way
    swap.spoil(parts, direction)
    began_s = time.perf_counter()
    arm(parts, direction)
    seconds = time.perf_counter() - began_s
    settle(swap.paged.device)
    verified = swap.check(parts, direction)
    rate = swap.nbytes / GB / seconds
    link = next(each for each in links if each["direction"] == direction)
    return SwapSample(
        repeat=link["repeat"], seconds=seconds, gb_per_s=rate,
        percent=100 * rate / max(link["one_gb_per_s"], link["row_gb_per_s"]), verified_bytes=verified,
    )  # fmt: skip
