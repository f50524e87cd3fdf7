"""`kvredis bench swap`: a prompt's KV between an engine's pages and the host, as part of what PCIe gives.

One task moves random pages out to blocks of page-locked memory, or back in: by one cudaMemcpyAsync for each layer,
page and K/V, as engines began; gathered by torch's index operations; and as kvredis does it. The link is measured in
the same repeat. On the GPU a real prefill may run beside it. Every byte is compared, each time, where the KV is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import BenchError
from .figures import GB, middle, rotated
from .machine import machine_facts
from .prompts import PromptPlan, prompts
from .shapes import BLOCK_TOKENS, SHAPES, ModelShape
from .store_overhead_compute import DTYPES, Modelled
from .swap_arms import ARMS, ONE_BYTES, Arm, HostMemory, Link, Swap, arm_of, settle
from .swap_result import (
    DIRECTIONS,
    GRAPH,
    LAUNCHES,
    OURS,
    SCHEMA,
    Direction,
    Launch,
    LinkSample,
    PrefillRow,
    PrefillSample,
    SwapResult,
    SwapRow,
    SwapSample,
    gate_lines,
    prefill_row,
    swap_row,
)
from .transfer import MIB, Progress

_SEED = 5
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

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        each = len(self.chunk_tokens) * (self.repeats + 1) * len(ARMS) * len(DIRECTIONS)
        return len(self.shapes) * (each + len(DIRECTIONS) * self.beside_prefill)


QUICK = SwapPlan(repeats=2)


def run(plan: SwapPlan, progress: Progress) -> SwapResult:
    """Measure; VerificationError at a wrong byte, BenchError for what cannot be moved."""
    import torch

    from kvredis.adapters.cuda_device import choices

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
        links=[], rows=[], prefill=[], gate=[], verified_bytes=0, seconds=0.0,
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
                rows, verified = _beside(swap, arms[OURS][0], parts, direction, plan.repeats)
                result["prefill"] += rows
                result["verified_bytes"] += verified
        elif plan.beside_prefill and not any("prefill" in note for note in result["notes"]):
            result["notes"].append("There is no GPU: no prefill to slow down")
        arms |= {name: arm_of(name, swap.paged) for name in ARMS if name != OURS}
        link = Link(host, swap.paged.device, link_bytes)
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
    _spoil(swap, parts, direction)
    began_s = time.perf_counter()
    arm(parts, direction)
    seconds = time.perf_counter() - began_s
    settle(swap.paged.device)
    verified = _check(swap, parts, direction)
    rate = swap.nbytes / GB / seconds
    link = next(each for each in links if each["direction"] == direction)
    return SwapSample(
        repeat=link["repeat"], seconds=seconds, gb_per_s=rate,
        percent=100 * rate / max(link["one_gb_per_s"], link["row_gb_per_s"]), verified_bytes=verified,
    )  # fmt: skip


def _beside(swap: Swap, arm: Arm, parts: Any, direction: Direction, repeats: int) -> tuple[list[PrefillRow], int]:
    """Prefill with a model of the shape, alone and while another thread moves the parts again and again: as a CUDA
    graph, and launched kernel by kernel, in turns. Gives the bytes compared, too: what moves in was moved out before.
    """
    prompt = list(prompts(PromptPlan(swap.tokens, 0.0, 1, seed=_SEED)))
    model = Modelled(swap.shape, prompt * len(LAUNCHES))
    model.prepare(swap.tokens, prompts=1 + LAUNCHES.index(GRAPH))
    samples: dict[Launch, list[PrefillSample]] = {launch: [] for launch in LAUNCHES}

    def moving(launch: Launch, move: Callable[[], None]) -> tuple[float, float]:
        """Milliseconds of a prefill beside it, and GB/s."""
        with _Moving(move, swap.nbytes) as mover:
            took_ms = _prefill_ms(model, LAUNCHES.index(launch), swap.tokens)
        return took_ms, mover.gb_per_s

    def move() -> None:
        arm(parts, direction)

    for number in [*range(len(LAUNCHES))] * 2:
        _prefill_ms(model, number, swap.tokens)
    _spoil(swap, parts, direction)
    began_s = time.perf_counter()
    move()
    moved_s = time.perf_counter() - began_s
    for launch in LAUNCHES:
        moving(launch, move)  # the first beside anything is 9 % slower, whichever way bytes go

    def rest() -> None:
        """A prefill begins behind the first move, in which nothing computes. Behind such a rest one alone was 2 %
        faster on an H200, so each has it."""
        time.sleep(moved_s)

    for repeat in range(repeats):
        for launch in rotated(LAUNCHES, repeat):
            before_ms, _ = moving(launch, rest)
            beside_ms, gb_per_s = moving(launch, move)
            alone_ms = middle([before_ms, moving(launch, rest)[0]])
            samples[launch].append(
                PrefillSample(
                    repeat=repeat,
                    alone_ms=alone_ms,
                    beside_ms=beside_ms,
                    slowed_percent=100 * (beside_ms / alone_ms - 1),
                    gb_per_s=gb_per_s,
                )
            )
    verified = _check(swap, parts, direction)
    rows = [prefill_row((swap.shape.name, direction, launch), swap.tokens, each) for launch, each in samples.items()]
    return rows, verified


def _spoil(swap: Swap, parts: Any, direction: Direction) -> None:
    """Overwrite what is to be moved to; what moves in has been stored and compared just before."""
    if direction == "out":
        swap.blank(parts)
    else:
        swap.wipe()
    settle(swap.paged.device)


def _check(swap: Swap, parts: Any, direction: Direction) -> int:
    """Compare what was moved to; gives the bytes."""
    return swap.check_out(parts) if direction == "out" else swap.check_in()


def _prefill_ms(model: Modelled, number: int, tokens: int) -> float:
    """Milliseconds of a prefill of the prompt of that number, on the GPU's clock where there is one."""
    import torch

    model.begin(number)
    if not torch.cuda.is_available():
        began_s = time.perf_counter()
        model.enqueue(0, tokens)
        return 1e3 * (time.perf_counter() - began_s)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    model.enqueue(0, tokens)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


class _Moving:
    """A thread that moves the same parts over and over, from before the block begins until it ends."""

    def __init__(self, move: Any, nbytes: int) -> None:
        self._move = move
        self._nbytes = nbytes
        self._begun = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvredis bench swap", daemon=True)
        self._failure: Exception | None = None
        self.gb_per_s = 0.0

    def __enter__(self) -> _Moving:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise BenchError(f"nothing was moved beside the prefill: {self._failure}") from self._failure

    def _run(self) -> None:
        times, began_s = 0, time.perf_counter()
        try:
            while not self._stop.is_set():
                self._move()
                times += 1
                self._begun.set()
        except Exception as error:
            self._failure = error
        finally:
            self._begun.set()
        self.gb_per_s = times * self._nbytes / GB / (time.perf_counter() - began_s)
