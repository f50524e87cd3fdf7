"""A GPU that does nothing before it must: streams are queues, and which of them goes on next is drawn by lot.

A transfer is right on it for every seed only when the events that it records and waits for are enough.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvredis.adapters.transfer.cuda.device import TorchIndex
from kvredis.adapters.transfer.cuda.plan import Extents, Launch
from kvredis.adapters.transfer.kv_cache import PagedKV


@dataclass(eq=False)
class LazyEvent:
    """Passed when its stream has come to it."""

    gpu: LazyGpu
    passed: bool = False

    def query(self) -> bool:
        """Asking takes time, in which the GPU does something."""
        self.gpu.step()
        return self.passed

    def synchronize(self) -> None:
        while not self.passed:  # another thread may make it go on, too
            assert self.gpu.step() or self.passed, "all streams wait for one another"


@dataclass(eq=False)
class LazyStream:
    queue: deque[Callable[[], object] | LazyEvent] = field(default_factory=deque)
    """Work, and events that must be passed before the stream goes on."""
    uploads: bool = False


class LazyGpu:
    """Device (cuda/device.py) in the CPU's memory. `copies_until_failure` counts down; at zero copies raise."""

    def __init__(self, paged: PagedKV, seed: int = 0) -> None:
        self._index = TorchIndex(paged)
        self._lot = random.Random(seed)
        self.streams: list[LazyStream] = []
        self._stepping = threading.RLock()
        self._threads = threading.local()  # each has a current device of its own, as CUDA's have
        self._numbers: dict[int, torch.Tensor] = {}
        self.locked = True
        self.asked_about = 0
        self.holds_both_ends = False
        self.uploads = 0
        self.copies: list[int] = []
        self.copies_until_failure = -1

    def step(self) -> bool:
        """One stream does one thing; false when none can. A thread that waits makes it go on, one at a time."""
        with self._stepping:
            return self._step()

    def _step(self) -> bool:
        ready = []
        for stream in self.streams:
            while stream.queue and isinstance(stream.queue[0], LazyEvent) and stream.queue[0].passed:
                stream.queue.popleft()
            if stream.queue and not isinstance(stream.queue[0], LazyEvent):
                ready.append(stream)
        if not ready:
            return False
        work = self._lot.choice(ready).queue.popleft()
        assert not isinstance(work, LazyEvent)
        work()
        return True

    def stream(self, *, uploads: bool = False) -> LazyStream:
        self.streams.append(LazyStream(uploads=uploads))
        return self.streams[-1]

    def here(self) -> AbstractContextManager[None]:
        return self._within("here")

    def on(self, stream: LazyStream) -> AbstractContextManager[None]:
        return self._within("here", "on")

    @contextmanager
    def _within(self, *names: str) -> Iterator[None]:
        before = self._held
        self._threads.held = before | set(names)
        try:
            yield
        finally:
            self._threads.held = before

    @property
    def _held(self) -> set[str]:
        held: set[str] = getattr(self._threads, "held", set())
        return held

    def buffer(self, nbytes: int) -> torch.Tensor:
        assert "on" in self._held
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)

    def upload(self, numbers: npt.NDArray[np.int64], stream: LazyStream) -> torch.Tensor:
        assert stream.uploads
        assert "here" in self._held
        self.uploads += 1
        there = self._numbers.setdefault(id(stream), torch.zeros(4096, dtype=torch.int64))[: len(numbers)]  # as a GPU's
        kept = torch.from_numpy(numbers.copy())
        stream.queue.append(partial(there.copy_, kept))
        return there

    def record(self, stream: LazyStream) -> LazyEvent:
        event = LazyEvent(self)
        stream.queue.append(partial(setattr, event, "passed", True))
        return event

    def wait(self, stream: LazyStream, event: Any) -> None:
        stream.queue.append(event)

    def behind(self, stream: LazyStream, other: LazyStream) -> None:
        self.wait(stream, self.record(other))

    def gather(self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: LazyStream) -> None:
        assert "here" in self._held
        stream.queue.extend(partial(self._index.gather, launch, slot, pages) for launch in launches)

    def scatter(self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: LazyStream) -> None:
        assert "here" in self._held
        stream.queue.extend(partial(self._index.scatter, launch, slot, pages) for launch in launches)

    def copy_out(self, slot: torch.Tensor, extents: Extents, stream: LazyStream, *, locked: bool) -> None:
        self._copy(slot, extents, stream, out=True, locked=locked)

    def copy_in(self, slot: torch.Tensor, extents: Extents, stream: LazyStream, *, locked: bool) -> None:
        self._copy(slot, extents, stream, out=False, locked=locked)

    def _copy(self, slot: torch.Tensor, extents: Extents, stream: LazyStream, *, out: bool, locked: bool) -> None:
        assert locked == self.locked
        assert "here" in self._held
        if self.copies_until_failure == 0:
            raise RuntimeError("this GPU has fallen off the bus")
        self.copies_until_failure -= 1
        self.copies.append(len(extents.host))
        for host, place, nbytes in zip(*extents, strict=True):
            assert 0 <= place <= place + nbytes <= slot.nbytes
            ends = (host, slot.data_ptr() + place) if out else (slot.data_ptr() + place, host)
            stream.queue.append(partial(ctypes.memmove, *ends, nbytes))

    def summing(self, paged: PagedKV, rows: int) -> LazySums:
        return LazySums(paged, rows)

    def page_locked(self, address: int) -> bool:
        self.asked_about += 1
        return self.locked

    def on_gpu(self, address: int) -> bool:
        return self.holds_both_ends

    def synchronize(self, stream: LazyStream) -> None:
        self.record(stream).synchronize()


class LazySums:
    """Checksums by xxhash, where the bytes lie: a scratch is a copy of the buffer, and says whose each byte run is."""

    def __init__(self, paged: PagedKV, rows: int) -> None:
        self._unit_bytes = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize
        self._planes, self._layers = paged.planes, len(paged.layers)
        self._rows: list[Any] = [None] * rows
        self._done = [0] * rows

    def scratch(self, slot_bytes: int) -> torch.Tensor:
        return torch.zeros(2 * slot_bytes, dtype=torch.uint8)

    def fold(
        self, launches: Sequence[Launch], slot: torch.Tensor, scratch: torch.Tensor, pages: torch.Tensor,
        rows_at: int, stream: LazyStream,
    ) -> None:  # fmt: skip
        for launch in launches:
            stream.queue.append(partial(self._fold, launch, slot, scratch, pages, rows_at + launch.part))

    def chain(self, launches: Sequence[Launch], scratch: torch.Tensor, stream: LazyStream) -> None:
        for launch in launches:
            stream.queue.append(partial(self._chain, launch, scratch))

    def digest(self, row: int, nbytes: int) -> str:
        assert self._done[row] == nbytes
        return str(self._rows[row].hexdigest())

    def _fold(
        self, launch: Launch, slot: torch.Tensor, scratch: torch.Tensor, pages: torch.Tensor, rows_at: int
    ) -> None:
        half = slot.nbytes
        begin, end = (at * self._unit_bytes for at in (launch.slot_unit, launch.slot_unit + launch.total))
        scratch[begin:end] = slot[begin:end]
        for unit in range(launch.total):
            row = int(pages[rows_at + (launch.start + unit) // launch.units])
            at = half + (launch.slot_unit + unit) * self._unit_bytes
            scratch[at : at + 8] = torch.tensor([row]).view(torch.uint8)

    def _chain(self, launch: Launch, scratch: torch.Tensor) -> None:
        half = scratch.nbytes // 2
        for unit in range(launch.total):
            at = (launch.slot_unit + unit) * self._unit_bytes
            row = int(scratch[half + at : half + at + 8].view(torch.int64)[0])
            if row < 0:
                continue
            begins = (launch.start + unit) % launch.units == 0 and launch.layer == 0
            if begins or self._rows[row] is None:  # else what came before has failed: any sum will do
                self._rows[row], self._done[row] = xxhash.xxh3_64(), 0
            self._rows[row].update(scratch[at : at + self._unit_bytes].numpy().data)
            self._done[row] += self._unit_bytes
