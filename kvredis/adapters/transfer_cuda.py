"""Chunks between an engine's pages on a GPU and host memory, at the rate of PCIe and beside the engine's own work.

Pages are gathered into staging buffers on the GPU, which its copy engine then moves: few large copies, and no kernel
that writes over PCIe (those stall an engine that computes). For each direction a ring of buffers and two streams, one
for kernels and one for copies, so that a buffer is filled while the one before it is copied. Nothing waits for the
engine's own streams, and nothing on them for us: a store begins behind the event that the caller recorded.

A job is enqueued at once, as a whole; the device works it off. The caller's thread waits only in `Moving.wait`.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvredis.storage.addresses import address_of

from .paged import PagedKV
from .ring_plan import Extents, Launch, Plan, Span, plan
from .transfer import Moving, Part, check_writable

logger = logging.getLogger(__name__)

SLOT_BYTES: Final = 32 * 1024 * 1024
SLOTS: Final = 3
"""Three buffers of 32 MiB a direction are as fast as two of 64 (measured), and a quarter less of the GPU's memory."""

FIRST_OUT: Final = 4
"""A store's first buffer is filled to a quarter: nothing is copied before it is gathered. Copying as much takes as long
as planning and gathering the next."""
FIRST_IN: Final = 2
"""A load's to a half: it waits for no kernel, only until its copies are listed."""


class Event(Protocol):
    """A point in a stream: torch.cuda.Event."""

    def query(self) -> bool:
        """Whether it has been passed."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Device(Protocol):
    """What the ring needs of a GPU. Everything but `page_locked` and `synchronize` only enqueues on `stream`, one that
    `stream()` has made. A thread takes a buffer, uploads, gathers, scatters and copies within `on`."""

    def stream(self) -> Any:
        """Make one of our own."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Let this thread use the device, and give kernels to that stream: once a job, since it costs a launch."""
        ...

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Give uint8 memory there that no other stream still uses."""
        ...

    def upload(self, numbers: npt.NDArray[np.int64], stream: Any) -> torch.Tensor:
        """Bring numbers there; the array may go at once. They stay until more are uploaded on that stream, and what was
        given to it before then finds them."""
        ...

    def record(self, stream: Any) -> Event:
        """Mark what the stream has been given until now."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let what the stream is given from now on come behind an event."""
        ...

    def behind(self, stream: Any, other: Any) -> None:
        """Let what `stream` is given from now on come behind what `other` has been given until now."""
        ...

    def gather(self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: Any) -> None:
        """Copy from the engine's pages into a buffer."""
        ...

    def scatter(self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: Any) -> None:
        """Copy from a buffer into the engine's pages."""
        ...

    def copy_out(self, slot: torch.Tensor, extents: Extents, stream: Any, *, locked: bool) -> None:
        """Copy a buffer to host memory. What is not `locked` may keep the caller waiting."""
        ...

    def copy_in(self, slot: torch.Tensor, extents: Extents, stream: Any, *, locked: bool) -> None:
        """Copy host memory into a buffer."""
        ...

    def page_locked(self, address: int) -> bool:
        """Whether copies from and to host memory there run by themselves."""
        ...

    def synchronize(self, stream: Any) -> None:
        """Wait until the stream has nothing left to do."""
        ...


class RingTransfer:
    """Transfer (transfer.py) by rings of staging buffers, which it takes at the first job of a direction: `slots` of
    `slot_bytes`, less when the KV is smaller. Making one compiles the kernels."""

    def __init__(
        self, paged: PagedKV, device: Device | None = None, *, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS
    ) -> None:
        if device is None:
            from .cuda_device import CudaDevice  # the real one; tests hand in others

            device = CudaDevice(paged)
        self.paged = paged
        unit = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize
        whole = unit * paged.planes * paged.pages * len(paged.layers)
        nbytes = max(min(slot_bytes, whole) // unit, 1) * unit
        self._store = _Way(device, slots, nbytes, out=True)
        self._load = _Way(device, slots, nbytes, out=False)
        self._closed = False

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        """As Transfer.store."""
        job = plan(self.paged, parts)
        check_writable(parts)
        return self._begin(self._store, parts, job, after)

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        """As Transfer.load."""
        return self._begin(self._load, parts, plan(self.paged, parts), after)

    def close(self) -> None:
        """As Transfer.close; what is asked for afterwards fails."""
        self._closed = True
        self._store.close()
        self._load.close()

    def _begin(self, way: "_Way", parts: Sequence[Part], job: Plan, after: Any) -> Moving:
        moving = RingMoving(parts)
        try:
            if self._closed:
                raise RuntimeError("the transfer is closed")
            way.run(job, after, moving)
        except Exception as error:  # whoever's it is: what is enqueued goes on, and the caller has to wait for it
            moving.failure = error
            way.settle(moving)
        except BaseException:  # an interrupt: the caller learns of no Moving, and takes his memory back
            way.synchronize()
            raise
        return moving


@dataclass(slots=True)
class _Slot:
    """A staging buffer, and the event behind which it may be filled anew."""

    buffer: torch.Tensor
    free: Event | None = None


class _Way:
    """One direction: its streams and its ring. One thread at a time uses it."""

    def __init__(self, device: Device, slots: int, nbytes: int, *, out: bool) -> None:
        self._device = device
        self._is_out = out
        self._slots = slots
        self._nbytes = nbytes
        self._kernels = device.stream()
        self._copies = device.stream()
        self._ring: list[_Slot] = []
        self._next = 0
        self._warned = False

    def run(self, job: Plan, after: Any, moving: "RingMoving") -> None:
        """Enqueue the whole job. Raises RuntimeError from the device."""
        if job.pages.size:
            with self._device.on(self._kernels):
                if not self._ring:
                    self._ring = [_Slot(self._device.buffer(self._nbytes)) for _ in range(self._slots)]
                if self._is_out:
                    self._out(job, after, moving)
                else:
                    self._in(job, after, moving)
        moving.add(len(job.memories), None)

    def _out(self, job: Plan, after: Any, moving: "RingMoving") -> None:
        device, known = self._device, dict[int, bool]()
        pages = self._pages(job, after, moving)
        for span in job.slots(self._nbytes, FIRST_OUT):
            slot = self._slot()
            if slot.free is not None:
                device.wait(self._kernels, slot.free)
            device.gather(job.launches(span), slot.buffer, pages, self._kernels)
            device.behind(self._copies, self._kernels)
            locked = self._locked(job, span, known)
            device.copy_out(slot.buffer, job.extents(span), self._copies, locked=locked)
            slot.free = device.record(self._copies)
            moving.add(job.parts_before(span.stop), slot.free)

    def _in(self, job: Plan, after: Any, moving: "RingMoving") -> None:
        device, known = self._device, dict[int, bool]()
        pages = None
        for span in job.slots(self._nbytes, FIRST_IN):
            slot = self._slot()
            if slot.free is not None:
                device.wait(self._copies, slot.free)
            locked = self._locked(job, span, known)
            device.copy_in(slot.buffer, job.extents(span), self._copies, locked=locked)
            device.behind(self._kernels, self._copies)
            if pages is None:  # not before the first copy is on its way
                pages = self._pages(job, after, moving)
            device.scatter(job.launches(span), slot.buffer, pages, self._kernels)
            slot.free = device.record(self._kernels)
            moving.add(job.parts_before(span.stop), slot.free)

    def _pages(self, job: Plan, after: Any, moving: "RingMoving") -> torch.Tensor:
        """Bring page numbers there; kernels come behind `after` from now on."""
        pages = self._device.upload(job.pages, self._kernels)
        moving.hold.append(pages)
        if after is not None:
            self._device.wait(self._kernels, after)
        return pages

    def _slot(self) -> _Slot:
        slot = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        return slot

    def _locked(self, job: Plan, span: Span, known: dict[int, bool]) -> bool:
        """Whether all host memory of a buffer is page-locked: asked once a job for each object that lends it, since an
        arena may be locked by a thread of its own while it is used already."""
        held = job.held(span)
        memories = job.memories[held.start : held.stop]
        lenders = {id(memory.obj): memory for memory in memories}  # held by views: no other objects have these ids
        for lender in lenders.keys() - known.keys():
            known[lender] = self._device.page_locked(address_of(lenders[lender]))
        every = all(map(known.__getitem__, lenders))
        if not every and not self._warned:
            self._warned = True
            logger.warning("KV is copied between the GPU and memory that is not page-locked: several times slower")
        return every

    def settle(self, moving: "RingMoving") -> None:
        """Let a job that failed end with what of it was enqueued."""
        events = []
        for stream in (self._kernels, self._copies):
            try:
                events.append(self._device.record(stream))
            except RuntimeError as error:  # the device is lost: nothing runs on it any more
                logger.warning("the GPU fails: %s", error)
        moving.end(events)

    def synchronize(self) -> None:
        """Wait for both streams."""
        for stream in (self._kernels, self._copies):
            try:
                self._device.synchronize(stream)
            except RuntimeError as error:
                logger.warning("the GPU fails: %s", error)

    def close(self) -> None:
        """Wait for both streams and let the buffers go."""
        self.synchronize()
        self._ring = []


@dataclass(slots=True)
class RingMoving:
    """Moving (transfer.py): how many parts have moved when an event has been passed, in order.

    `hold` is what must not be freed before. One thread enqueues and publishes; others may ask meanwhile.
    """

    parts: Sequence[Part]
    hold: list[object] = field(default_factory=list)
    failure: Exception | None = None
    _marks: deque[tuple[int, Event]] = field(default_factory=deque)
    _moved: int = 0
    _over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, parts: int, event: Event | None) -> None:
        """The first `parts` have moved behind this event; None: behind the last one that was added."""
        if event is not None:
            self._marks.append((parts, event))
        elif not self._marks:
            self._moved, self._over = parts, True
        else:
            self._marks[-1] = (parts, self._marks[-1][1])

    def end(self, events: Sequence[Event]) -> None:
        """It failed: behind these events its memory is the caller's again, and no more parts have moved."""
        moved = self._marks[-1][0] if self._marks else self._moved
        self._marks.extend((moved, event) for event in events)
        self._over = not self._marks

    @property
    def parts_done(self) -> int:
        """As Moving.parts_done."""
        self._look()
        return self._moved

    @property
    def done(self) -> bool:
        """As Moving.done; true behind a failure too, as soon as nothing of it is under way."""
        self._look()
        return self._over

    def wait(self, parts: int | None = None) -> None:
        """As Moving.wait. Waits for all that was enqueued before it raises."""
        wanted = len(self.parts) if parts is None else parts
        while self._moved < wanted or self.failure is not None:
            mark = self._next()
            if mark is None:
                break
            try:
                mark[1].synchronize()
            except RuntimeError as error:
                self._fail(error)
            else:
                self._pass(mark)
        if self._moved < wanted and self.failure is not None:
            raise RuntimeError(f"copying KV failed: {self.failure}") from self.failure

    def _look(self) -> None:
        while (mark := self._next()) is not None:
            try:
                if not mark[1].query():
                    return
            except RuntimeError as error:
                self._fail(error)
            else:
                self._pass(mark)

    def _next(self) -> tuple[int, Event] | None:
        with self._lock:
            return None if self._over else self._marks[0]

    def _pass(self, mark: tuple[int, Event]) -> None:
        with self._lock:
            if self._marks and self._marks[0] is mark:  # another thread may have seen it first
                self._moved = mark[0]
                self._marks.popleft()
                self._settle()

    def _fail(self, error: Exception) -> None:
        """The device is lost, and nothing runs on it any more."""
        with self._lock:
            self.failure = self.failure or error
            self._marks.clear()
            self._settle()

    def _settle(self) -> None:
        if not self._marks:
            self._over = True
            self.hold.clear()
