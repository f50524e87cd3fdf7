"""Streams for kernels that wait for copies, chosen so that their waiting does not hold up what an engine launches.

A GPU fetches what its streams were given through a few units (PBDMA in NVIDIA's open-gpu-doc), each of which serves
several streams in turn. One whose head waits for an event makes the others of its unit wait for their next turn, kernel
by kernel: on an H200 one of an engine's that is launched by itself takes 6.9 us beside a stream that waits for copies,
instead of 1.9, and an eager prefill beside loads is slowed by 4 to 5 % instead of 3. It was every second stream, in the
order in which they were given their first kernels, whatever their priorities. No call tells which streams share a unit:
it is tried out.

A process has eight queues for kernels (CUDA_DEVICE_MAX_CONNECTIONS), and streams beyond that share these as it comes:
then a trial says nothing. So no stream is made for the trial alone: those that disturb others are used for copies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from statistics import median
from typing import Final, Generic, TypeVar

import torch

from .tuning import TUNING, Tuning

logger = logging.getLogger(__name__)


_REPEATS: Final = 3
_KERNELS: Final = 64
_HELD_BACK_CYCLES: Final = 3_000_000
"""Of the GPU's clock, 1.5 ms: what Python needs to launch these kernels, so that the GPU never waits for one."""

Stream = TypeVar("Stream")


class QuietStreams(Generic[Stream]):
    """Streams of `make`; `slowed` gives how many times as long as by themselves the engine's kernels take while that
    one waits. What it raises is said in the log, and streams are taken as they come from then on."""

    def __init__(self, make: Callable[[], Stream], slowed: Callable[[Stream], float], tuning: Tuning = TUNING) -> None:
        self._tuning = tuning
        self._make = make
        self._slowed = slowed
        self._loud: deque[Stream] = deque()

    def quiet(self) -> Stream:
        """One that waits without the engine's noticing; of `quiet_tries` the least noticed where none does."""
        tried: list[tuple[float, Stream]] = []
        while len(tried) < self._tuning.quiet_tries:
            stream = self._make()
            factor = self._measured(stream)
            if factor <= self._tuning.quiet_factor:
                self._loud.extend(other for _, other in tried)
                return stream
            tried.append((factor, stream))
        logger.info("the GPU holds the engine up for each of %d streams of kvredis", len(tried))
        (_, least), *others = sorted(tried, key=itemgetter(0))
        self._loud.extend(other for _, other in others)
        return least

    def any(self) -> Stream:
        """One for copies, which wait elsewhere, or whatever need not be quiet: of those that were tried, as long as any
        is left."""
        return self._loud.popleft() if self._loud else self._make()

    def _measured(self, stream: Stream) -> float:
        try:
            factor = self._slowed(stream)
        except Exception as error:  # of another release of torch, or another device
            logger.info("streams of kvredis are taken as they come: %s", error)
            self._slowed = lambda _: 1.0
            return 1.0
        logger.debug("kernels of the engine take %.2f times as long beside a stream that waits", factor)
        return factor


class EngineKernels:
    """Tiny kernels on the stream that is the current one now, an engine's, which has nothing else to do meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._engine = torch.cuda.current_stream(device)
        self._number = torch.zeros(1, device=device)

    def slowed(self, waiting: torch.cuda.Stream) -> float:
        """How many times as long as by themselves they take while `waiting` is there with a kernel that comes behind
        them; on return nothing is under way. Each way in turns: the clock of a GPU that had nothing to do rises."""
        with torch.no_grad(), torch.cuda.stream(waiting):
            self._number.add_(1)  # one whose first kernel waits is not served as it will be later
        waiting.synchronize()
        return median(self.time_ms(waiting) / self.time_ms() for _ in range(_REPEATS))

    def time_ms(self, waiting: torch.cuda.Stream | None = None) -> float:
        """How long a row of them takes."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.cuda.stream(self._engine):
            torch.cuda._sleep(_HELD_BACK_CYCLES)  # type: ignore[no-untyped-call]
            began.record()
            for _ in range(_KERNELS):
                self._number.add_(1)
            ended.record()
        if waiting is not None:
            waiting.wait_event(ended)
            with torch.no_grad(), torch.cuda.stream(waiting):
                self._number.add_(1)
            waiting.synchronize()
        ended.synchronize()
        return float(began.elapsed_time(ended))
