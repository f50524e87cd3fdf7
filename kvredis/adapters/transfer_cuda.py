"""Chunks between an engine's pages on a GPU and host memory, at the rate of PCIe and beside the engine's own work.

Pages are gathered into staging buffers on the GPU, which its copy engine then moves: few large copies, and no kernel
that writes over PCIe (those stall an engine that computes). For each direction a ring of buffers and two streams, one
for kernels and one for copies, so that a buffer is filled while the one before it is copied. Nothing waits for the
engine's own streams, and nothing on them for us: a store begins behind the event that the caller recorded.

A job is enqueued at once, as a whole; the device works it off. The caller's thread waits only in `Moving.wait`. Where
checksums are wanted (ring_sums.py) the device finds them out of the buffers, on streams of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvredis.storage.addresses import address_of
from kvredis.storage.errors import LayoutError

from .paged import PagedKV
from .ring_device import Device, Event
from .ring_moving import RingMoving
from .ring_plan import Launch, LayerPlan, LayerPlans, Numbers, Plan, Span, plan
from .ring_sums import RingSum, RingSums
from .transfer import Moving, Part, check_writable, layer_parts

logger = logging.getLogger(__name__)

SLOT_BYTES: Final = 64 * 1024 * 1024
SLOTS: Final = 2
"""Three buffers of 32 MiB a direction move as much and take a quarter less of the GPU's memory, but asking takes twice
as long, and that takes the interpreter from the engine: beside vLLM 1.7 ms for 60 MiB of a step's layer (profiled)."""
HEAD_PARTS: Final = 48
"""Of more parts than that, so many go first: 512 take 0.2 ms to plan, in which nothing was copied."""
ROWS: Final = 4096
"""Chunks whose checksums are found at a time, both ways together; 64 bytes each."""

FIRST_OUT: Final = 8
"""The first buffer of a store that finds the ring at rest is filled to an eighth: nothing is copied before it is
gathered. Copying as much takes as long as planning and gathering the next."""
FIRST_IN: Final = 4
"""A load's to a quarter: it waits for no kernel, only until its copies are listed."""

AnyPlan = Plan | LayerPlan


class RingTransfer:
    """Transfer (transfer.py) by rings of staging buffers, which it takes at the first job of a direction: `slots` of
    `slot_bytes`, less when the KV is smaller. Making one compiles the kernels."""

    def __init__(
        self,
        paged: PagedKV,
        device: Device | None = None,
        *,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        sums: bool = False,
    ) -> None:
        if device is None:
            from .cuda_device import CudaDevice  # the real one; tests hand in others

            device = CudaDevice(paged)
        self.paged = paged
        unit = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize
        whole = unit * paged.planes * paged.pages * len(paged.layers)
        nbytes = max(min(slot_bytes, whole) // unit, 1) * unit
        summing = device.summing(paged, ROWS) if sums else None
        self._sums = None if summing is None else RingSums(summing, ROWS)
        self._store = _Way(device, slots, nbytes, self._sums, out=True)
        self._load = _Way(device, slots, nbytes, self._sums, out=False)
        self._closed = False
        self.slot_bytes = nbytes
        """Of each staging buffer."""

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        """As Transfer.store."""
        return self._begin(self._store, parts, self._plans(parts, check_writable), after)

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        """As Transfer.load."""
        return self._begin(self._load, parts, self._plans(parts), after)

    def layers(self, parts: Sequence[Part]) -> RingLayers:
        """As Transfer.layers."""
        return RingLayers(self, parts)

    def store_layer(self, plans: LayerPlans, layer: int, after: Any) -> Moving:
        """One layer of what was planned."""
        return self._begin(self._store, plans.parts, iter([plans.at(layer)]), after)

    def load_layers(self, plans: LayerPlans, layers: range, after: Any) -> Moving:
        """The same of several, one behind the other."""
        return self._begin(self._load, plans.parts * len(layers), map(plans.at, layers), after)

    def sum_of(self, nbytes: int) -> RingSum | None:
        """As Transfer.sum_of."""
        return None if self._sums is None else self._sums.take(nbytes)

    def close(self) -> None:
        """As Transfer.close; what is asked for afterwards fails."""
        self._closed = True
        self._store.close()
        self._load.close()

    def _plans(self, parts: Sequence[Part], check: Callable[[Sequence[Part]], None] | None = None) -> Iterator[Plan]:
        """Plan a job of many parts in two: the rest while the first are copied."""
        for some in (parts[:HEAD_PARTS], parts[HEAD_PARTS:]) if len(parts) > HEAD_PARTS else (parts,):
            if check is not None:
                check(some)
            yield plan(self.paged, some)

    def _begin(self, way: _Way, parts: Sequence[Part], jobs: Iterator[AnyPlan], after: Any) -> Moving:
        moving = RingMoving(parts)
        job = next(jobs)
        try:
            if self._closed:
                raise RuntimeError("the transfer is closed")
            way.run(job, after, moving)
            before = 0
            for following in jobs:
                before, job = before + len(job.memories), following
                way.run(job, after, moving, before)
            moving.add(len(parts), None)
        except LayoutError:  # of its pages, or of the second half: a copy is on its way
            way.synchronize()
            raise
        except Exception as error:  # whoever's it is: what is enqueued goes on, and the caller has to wait for it
            moving.failure = error
            way.settle(moving)
        except BaseException:  # an interrupt: the caller learns of no Moving, and takes his memory back
            way.synchronize()
            raise
        return moving


class RingLayers:
    """Layers (transfer.py) by rings."""

    def __init__(self, ring: RingTransfer, parts: Sequence[Part]) -> None:
        self._ring = ring
        self._chunks = parts
        self._plans = LayerPlans(ring.paged, parts)

    def store(self, layer: int, *, after: torch.cuda.Event | None = None) -> Moving:
        """As Layers.store."""
        check_writable(self._plans.parts)
        return self._ring.store_layer(self._plans, layer, after)

    def load(self, layer: int, count: int = 1, *, after: torch.cuda.Event | None = None) -> Moving:
        """As Layers.load. Several small ones are planned for themselves: what adjoins in a chunk is one copy then."""
        if count == 1 or 2 * self._plans.nbytes > self._ring.slot_bytes:
            return self._ring.load_layers(self._plans, range(layer, layer + count), after)
        return self._ring.load(layer_parts(self._ring.paged, self._chunks, layer, count), after=after)


@dataclass(slots=True)
class _Slot:
    """A staging buffer, and the event behind which it may be filled anew. Where checksums are found, a stream of its
    own does the slow part of that, out of a scratch, which is free behind `summed`."""

    buffer: torch.Tensor
    free: Event | None = None
    sums: Any = None
    scratch: torch.Tensor | None = None
    summed: Event | None = None


class _Way:
    """One direction: its streams and its ring. One thread at a time uses it."""

    def __init__(self, device: Device, slots: int, nbytes: int, sums: RingSums | None, *, out: bool) -> None:
        self._device = device
        self._is_out = out
        self._sums = sums
        self._summed: Event | None = None
        self._slots = slots
        self._nbytes = nbytes
        self._kernels = device.stream(uploads=True)
        self._copies = device.stream()
        self._ring: list[_Slot] = []
        self._next = 0
        self._uploaded: tuple[Numbers, torch.Tensor] | None = None
        """The page numbers that came last, and where they are: those of layers of the same chunks are the same."""
        self._warned = False

    def run(self, job: AnyPlan, after: Any, moving: RingMoving, before: int = 0) -> None:
        """Enqueue the whole job, parts of `moving` behind so many before. Raises RuntimeError from the device."""
        if job.units:
            with self._device.on(self._kernels):
                if not self._ring:
                    self._ring = [self._made_slot() for _ in range(self._slots)]
                if self._is_out:
                    self._out(job, after, moving, before)
                else:
                    self._in(job, after, moving, before)

    def _out(self, job: AnyPlan, after: Any, moving: RingMoving, before: int) -> None:
        device, known = self._device, job.locked
        pages = self._pages(job, after, moving)
        for span in job.slots(self._nbytes, FIRST_OUT if self._rests else 1):
            slot = self._slot()
            if slot.free is not None:
                device.wait(self._kernels, slot.free)
            launches = job.launches(span)
            device.gather(launches, slot.buffer, pages, self._kernels)
            device.behind(self._copies, self._kernels)
            locked = self._locked(job, span, known)
            device.copy_out(slot.buffer, job.extents(span), self._copies, locked=locked)
            slot.free = device.record(self._copies)
            self._sum(job, span, launches, slot, pages)
            moving.add(before + job.parts_before(span.stop), slot.free)

    def _in(self, job: AnyPlan, after: Any, moving: RingMoving, before: int) -> None:
        device, known = self._device, job.locked
        pages = None
        for span in job.slots(self._nbytes, FIRST_IN if self._rests else 1):
            slot = self._slot()
            if slot.free is not None:
                device.wait(self._copies, slot.free)
            locked = self._locked(job, span, known)
            device.copy_in(slot.buffer, job.extents(span), self._copies, locked=locked)
            device.behind(self._kernels, self._copies)
            if pages is None:  # not before the first copy is on its way
                pages = self._pages(job, after, moving)
            launches = job.launches(span)
            device.scatter(launches, slot.buffer, pages, self._kernels)
            moved = slot.free = device.record(self._kernels)
            slot.free = self._sum(job, span, launches, slot, pages) or moved
            moving.add(before + job.parts_before(span.stop), moved)

    def _sum(
        self, job: AnyPlan, span: Span, launches: Sequence[Launch], slot: _Slot, pages: torch.Tensor
    ) -> Event | None:
        """Add the bytes of a buffer to their chunks' checksums: beside the copies and the next buffers' kernels, but
        behind what came before of the same chunk. Give the event behind which they have been read."""
        if job.rows is None or self._sums is None or slot.scratch is None:
            return None
        device = self._device
        if slot.summed is not None:
            device.wait(self._kernels, slot.summed)
        self._sums.summing.fold(launches, slot.buffer, slot.scratch, pages, job.rows_at, self._kernels)
        read = device.record(self._kernels)
        device.wait(slot.sums, read)
        if self._summed is not None and (launches[0].start or job.is_layered):
            device.wait(slot.sums, self._summed)
        try:
            self._sums.summing.chain(launches, slot.scratch, slot.sums)
        finally:  # a row is another chunk's only behind what was enqueued for it
            slot.summed = self._summed = device.record(slot.sums)
            held = job.held(span)
            self._sums.found(job.rows[held.start : held.stop], slot.summed)
        return read

    def _made_slot(self) -> _Slot:
        slot = _Slot(self._device.buffer(self._nbytes))
        if self._sums is not None:
            slot.sums, slot.scratch = self._device.stream(), self._sums.summing.scratch(self._nbytes)
        return slot

    def _pages(self, job: AnyPlan, after: Any, moving: RingMoving) -> torch.Tensor:
        """Bring page numbers there, unless they are the last that were; kernels come behind `after` from now on."""
        if self._uploaded is None or self._uploaded[0] is not job.numbers:
            self._uploaded = None  # whatever happens
            self._uploaded = job.numbers, self._device.upload(job.numbers, self._kernels)
        pages = self._uploaded[1]
        moving.hold.append(pages)
        if after is not None:
            self._device.wait(self._kernels, after)
        return pages

    @property
    def _rests(self) -> bool:
        """Whether nothing is under way, so that the first copy is waited for."""
        last = self._ring[self._next - 1].free
        return last is None or last.query()

    def _slot(self) -> _Slot:
        slot = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        return slot

    def _locked(self, job: AnyPlan, span: Span, known: dict[int, bool]) -> bool:
        """Whether all host memory of a buffer is page-locked: asked once a job for each object that lends it, since an
        arena may be locked by a thread of its own while it is used already."""
        lenders = job.lenders(span)  # held by views: no other objects have these ids
        for lender in lenders.keys() - known.keys():
            known[lender] = self._device.page_locked(address_of(lenders[lender]))
        every = all(map(known.__getitem__, lenders))
        if not every and not self._warned:
            self._warned = True
            logger.warning("KV is copied between the GPU and memory that is not page-locked: several times slower")
        return every

    def settle(self, moving: RingMoving) -> None:
        """Let a job that failed end with what of it was enqueued."""
        events = []
        for stream in (self._kernels, self._copies):
            try:
                events.append(self._device.record(stream))
            except RuntimeError as error:  # the device is lost: nothing runs on it any more
                logger.warning("the GPU fails: %s", error)
        moving.end(events)

    def synchronize(self) -> None:
        """Wait for all streams."""
        for stream in (self._kernels, self._copies, *(slot.sums for slot in self._ring if slot.sums is not None)):
            try:
                self._device.synchronize(stream)
            except RuntimeError as error:
                logger.warning("the GPU fails: %s", error)

    def close(self) -> None:
        """Wait for all streams and let the buffers go."""
        self.synchronize()
        self._ring = []
