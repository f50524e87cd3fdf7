"""What `kvredis bench swap` runs beside KV that moves: a prefill, and copies of a few bytes as an engine makes them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.prompts import PromptPlan, prompts
from kvredis.bench.core.statistics import GB, middle, rotated
from kvredis.bench.store_overhead.compute import Modelled

from .arms import Arm, Link, Swap
from .result import (
    ALONE,
    GRAPH,
    LAUNCHES,
    OURS,
    ROW,
    WAITERS,
    Direction,
    Launch,
    PrefillRow,
    PrefillSample,
    Waiter,
    WaitRow,
    WaitSample,
    prefill_row,
    wait_row,
)

if TYPE_CHECKING:
    from kvredis.adapters.transfer.base import Part

_SEED: Final = 5
_COPIES: Final = 20
"""Of an engine, timed in a repeat."""
_PAUSE_S: Final = 4e-3
"""Before each at most, by lot: the next of a row without pauses finds the copy engine still with that stream."""
COPY_BYTES: Final[dict[Direction, int]] = {"out": 64, "in": 1 << 20}
"""A step's tokens, and what a step may be given: a few bytes into a GPU do not wait for others, 1 MiB does (H100)."""


def prefill_beside(
    swap: Swap, arm: Arm, parts: Any, direction: Direction, repeats: int
) -> tuple[list[PrefillRow], int]:
    """Prefill with a model of the shape, alone and while another thread moves the parts again and again: as a CUDA
    graph, and launched kernel by kernel, in turns. Gives the bytes compared, too: what moves in was moved out before.
    """
    prompt = list(prompts(PromptPlan(swap.tokens, 0.0, 1, seed=_SEED)))
    model = Modelled(swap.shape, prompt * len(LAUNCHES))
    model.prepare(swap.tokens, prompts=1 + LAUNCHES.index(GRAPH))
    samples: dict[Launch, list[PrefillSample]] = {launch: [] for launch in LAUNCHES}

    def moving(launch: Launch, move: Callable[[], None]) -> tuple[float, float]:
        """Milliseconds of a prefill beside it, and GB/s."""
        with Moving(move, swap.nbytes) as mover:
            took_ms = _prefill_ms(model, LAUNCHES.index(launch), swap.tokens)
        return took_ms, mover.gb_per_s

    def move() -> None:
        arm(parts, direction)

    for number in [*range(len(LAUNCHES))] * 2:
        _prefill_ms(model, number, swap.tokens)
    swap.spoil(parts, direction)
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
    verified = swap.check(parts, direction)
    rows = [prefill_row((swap.shape.name, direction, launch), swap.tokens, each) for launch, each in samples.items()]
    return rows, verified


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


def copies_beside(
    swap: Swap, moves: tuple[Arm, Link], parts: Sequence[Part], direction: Direction, repeats: int
) -> tuple[list[WaitRow], int]:
    """Time an engine's copies of a few bytes in that direction: alone, beside large copies in a row on one stream, and
    beside ours, in turns. Gives the bytes compared, too."""
    arm, link = moves
    arm(parts, "out")
    copy, lot = _EngineCopy(direction, swap.paged.device), random.Random(_SEED)
    samples: dict[Waiter, list[WaitSample]] = {waiter: [] for waiter in WAITERS}
    verified = 0
    for repeat in range(repeats):
        for waiter in rotated(WAITERS, repeat):
            if waiter == OURS:
                swap.spoil(parts, direction)
            move, nbytes = {
                ALONE: (lambda: time.sleep(1e-3), 0),
                ROW: (lambda: link.row(direction), link.nbytes),
                OURS: (lambda: arm(parts, direction), swap.nbytes),
            }[waiter]
            with Moving(move, nbytes) as mover:
                times_us = [copy.time_us(lot.uniform(0, _PAUSE_S)) for _ in range(_COPIES)]
            if waiter == OURS:
                verified += swap.check(parts, direction)
            samples[waiter].append(
                WaitSample(repeat=repeat, us=middle(times_us), most_us=max(times_us), gb_per_s=mover.gb_per_s)
            )
    of = (swap.shape.name, direction, COPY_BYTES[direction])
    return [wait_row(of, waiter, each) for waiter, each in samples.items()], verified


class _EngineCopy:
    """A copy of a few bytes on the stream that is the current one, an engine's."""

    def __init__(self, direction: Direction, device: Any) -> None:
        import torch

        self._on_gpu = device.type == "cuda"
        there = torch.zeros(COPY_BYTES[direction], dtype=torch.uint8, device=device)
        here = torch.zeros(COPY_BYTES[direction], dtype=torch.uint8, pin_memory=self._on_gpu)
        self._target, self._source = (here, there) if direction == "out" else (there, here)

    def time_us(self, pause_s: float) -> float:
        """Microseconds from the call until the bytes are there, on a stream that has had nothing to do for so long."""
        import torch

        time.sleep(pause_s)
        began_s = time.perf_counter()
        self._target.copy_(self._source, non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return 1e6 * (time.perf_counter() - began_s)


class Moving:
    """A thread that moves the same parts over and over, from before the block begins until it ends."""

    def __init__(self, move: Any, nbytes: int) -> None:
        self._move = move
        self._nbytes = nbytes
        self._begun = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvredis bench swap", daemon=True)
        self._failure: Exception | None = None
        self.gb_per_s = 0.0

    def __enter__(self) -> Moving:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise BenchError(f"nothing was moved beside the engine: {self._failure}") from self._failure

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
