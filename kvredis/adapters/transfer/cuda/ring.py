"""Chunks between an engine's pages on a GPU and host memory, at the rate of PCIe and beside the engine's own work.

Pages are gathered into staging buffers on the GPU, which its copy engine then moves: few large copies, and no kernel
that writes over PCIe (those stall an engine that computes). For each direction (RingWay) a ring of buffers, one stream
for kernels and for each buffer one for its copies, so that a buffer is filled while the one before it is copied, and an
engine's own copies come in between. Nothing waits for the engine's streams, and nothing on them waits for the ring: a
store begins behind the event that the caller recorded. A buffer is filled behind the event that says that what was in
it is where it belongs.

A job is enqueued as a whole, a long one with pauses (Tuning.pace_bytes_per_s), and the device works it off. For that
the caller's thread waits only in `Moving.wait`. Where checksums are wanted (checksum.py) the device finds them out of
the buffers, on streams of their own.

A GPU's copy engine stays with a stream that has a copy ready, whatever the priority of others. Beside a store of 1 GiB
on one stream an engine's copy of one token waited for all of it, 18 ms. Where each buffer has a stream of its own, and
its copies come behind those of the buffer before, it takes 0.8 ms (H100, `kvredis bench swap --beside-copies`), and as
much is moved, to half a percent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvredis.adapters.transfer.base import Event, Moving, Part, check_writable
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.storage.errors import LayoutError
from kvredis.storage.memory.copy import address_of

from .checksum import RingSum, RingSums
from .device import Device
from .plan import Launch, LayerPlan, LayerPlans, Numbers, Plan, Span, plan
from .tuning import TUNING, Tuning

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RingMoving:
    """Moving (transfer/base.py): how many parts have moved when an event has been passed, in order.

    `hold` is what must not be freed before. One thread enqueues and publishes; others may ask meanwhile.
    """

    parts: Sequence[Part]
    hold: list[object] = field(default_factory=list)
    failure: Exception | None = None
    began_s: float = field(default_factory=time.perf_counter)
    """When it was asked for."""
    _marks: deque[tuple[int, Event]] = field(default_factory=deque)
    _moved: int = 0
    _over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, parts: int, event: Event | None) -> None:
        """The first `parts` have moved behind this event, none if that is below 0; None: behind the last one that was
        added."""
        parts = max(parts, 0)
        if event is not None:
            self._marks.append((parts, event))
        elif not self._marks:
            self._moved, self._over = parts, True
        else:
            self._marks[-1] = (parts, self._marks[-1][1])

    def end(self, events: Sequence[Event]) -> None:
        """End a job that has failed: behind these events its memory is the caller's again, and no more parts have
        moved."""
        moved = self._marks[-1][0] if self._marks else self._moved
        self._marks.extend((moved, event) for event in events)
        self._over = not self._marks

    @property
    def parts_done(self) -> int:
        self._look()
        return self._moved

    @property
    def done(self) -> bool:
        """As Moving.done; true behind a failure too, as soon as nothing of it is under way."""
        self._look()
        return self._over

    def wait(self, parts: int | None = None) -> None:
        """As Moving.wait. Waits for all that was enqueued before it raises; for all parts it raises too when only a
        checksum could not be asked for, which would be another one."""
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
        if self.failure is not None and (parts is None or self._moved < wanted):
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
        """Note that the device is lost: nothing runs on it any more."""
        with self._lock:
            self.failure = self.failure or error
            self._marks.clear()
            self._settle()

    def _settle(self) -> None:
        if not self._marks:
            self._over = True
            self.hold.clear()


AnyPlan = Plan | LayerPlan


@dataclass(slots=True)
class Slot:
    """A staging buffer, the stream of its copies, and the event behind which it may be filled anew. Where checksums are
    found, another stream does the slow part of that, out of a scratch, which is free behind `summed`."""

    buffer: torch.Tensor
    copies: Any
    free: Event | None = None
    sums: Any = None
    scratch: torch.Tensor | None = None
    summed: Event | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A span of a job that has been scattered out of a buffer, where its checksums are not asked for yet."""

    job: AnyPlan
    span: Span
    launches: Sequence[Launch]
    slot: Slot
    pages: torch.Tensor


class RingWay:
    """One direction: its streams and its ring. One thread at a time uses it."""

    def __init__(
        self, device: Device, tuning: Tuning, nbytes: int, linked_nbytes: int, sums: RingSums | None, *, out: bool
    ) -> None:
        """A job fills `nbytes` of each buffer, or `linked_nbytes` where its memory is another GPU's; the first of those
        makes buffers so long."""
        self._device = device
        self._tuning = tuning
        self._is_out = out
        self._sums = sums
        self._summed: Event | None = None
        self._host_nbytes = nbytes
        self._linked_nbytes = linked_nbytes
        self._nbytes = nbytes
        """Of a buffer, for the last job."""
        self._is_linked = False
        """Whether the far end of the last job is a GPU's memory: a copy there is sooner over than the next one is asked
        for."""
        self._kernels = device.stream(uploads=True)
        self._ring: list[Slot] = []
        self._next = 0
        self._loaded: Loaded | None = None
        """What was loaded last, while its checksums have not been asked for."""
        self._uploaded: tuple[Numbers, torch.Tensor] | None = None
        """The page numbers that came last, and where they are: those of layers of the same chunks are the same."""
        self._warned = False

    def run(self, job: AnyPlan, after: Any, moving: RingMoving, before: int = 0, *, is_last: bool = False) -> None:
        """Enqueue the whole job, parts of `moving` behind so many before; of a load all but its last checksums, which
        `sum_up` does. `is_last` as in Transfer.load. Raises RuntimeError from the device."""
        if job.units:
            self._is_linked = self._device.on_gpu(address_of(job.memories[0]))
            self._open(job)
            with self._device.here():
                if self._is_out:
                    self._out(job, after, moving, before)
                else:
                    is_waited_for = is_last and job.rows is not None and not self._is_linked
                    last_share = self._tuning.last_in_share if is_waited_for else 1
                    self._in(job, after, moving, before, last_share)

    def sum_up(self) -> None:
        """Enqueue what is left of a load's checksums: nothing that it brings waits for them. Raises RuntimeError from
        the device."""
        if self._loaded is not None:
            with self._device.here():
                self._sum_up()

    def _open(self, job: AnyPlan) -> None:
        self._nbytes = self._linked_nbytes if self._is_linked else self._host_nbytes
        if not self._ring:
            with self._device.on(self._kernels):
                self._ring = list(self._made_slots())
        elif self._ring[0].buffer.nbytes < self._nbytes:
            self._lengthen()
        if self._is_linked:
            self._separate_sums()

    def _lengthen(self) -> None:
        """Take longer buffers; where the GPU has no memory for them, those that are there do."""
        self.sum_up()  # of the half of a load before this one
        self.synchronize()  # what is let go may be another's at once
        short = self._ring[0].buffer.nbytes
        try:
            with self._device.on(self._kernels):
                made = [(self._device.buffer(self._nbytes), self._made_scratch()) for _ in self._ring]
        except RuntimeError as error:
            logger.info("staging buffers stay at %d bytes: %s", short, error)
            self._linked_nbytes = self._nbytes = short
            return
        for slot, (buffer, scratch) in zip(self._ring, made, strict=True):
            slot.buffer, slot.scratch, slot.free, slot.summed = buffer, scratch, None, None

    def _separate_sums(self) -> None:
        """Give each buffer a stream of its own for its checksums: those of 256 MiB take 1.2 to 1.8 ms beside copies
        over NVLink, and the copies 0.7. 60 chunks of 32 MiB were stored in 8.4 ms by one stream and in 5.8 by two,
        which is what the link takes (two H200s, behind 400 ms of matrix products, medians of 5)."""
        first, *others = self._ring
        for slot in others:
            if slot.sums is not None and slot.sums is first.sums:
                slot.sums = self._device.stream()

    def _out(self, job: AnyPlan, after: Any, moving: RingMoving, before: int) -> None:
        device = self._device
        pages = self._pages(job, after, moving)
        for span in job.slots(self._nbytes, self._first_share(self._tuning.first_out_share)):
            self._pace(job, span, moving)
            slot = self._slot()
            if slot.free is not None:
                device.wait(self._kernels, slot.free)
            launches = job.launches(span)
            device.gather(launches, slot.buffer, pages, self._kernels)
            device.behind(slot.copies, self._kernels)
            locked = self._locked(job, span)
            device.copy_out(slot.buffer, job.extents(span), slot.copies, locked=locked)
            slot.free = device.record(slot.copies)
            self._sum(job, span, launches, slot, pages)
            moving.add(before + job.parts_before(span.stop), slot.free)

    def _in(self, job: AnyPlan, after: Any, moving: RingMoving, before: int, last_share: int) -> None:
        device = self._device
        pages = None
        for span, slot in self._come(job, moving, last_share):
            if pages is None:  # not before the first copy is on its way
                pages = self._pages(job, after, moving)
            launches = job.launches(span)
            device.scatter(launches, slot.buffer, pages, self._kernels)
            slot.free = device.record(self._kernels)
            moving.add(before + job.parts_before(span.stop), slot.free)
            self._loaded = Loaded(job, span, launches, slot, pages)

    def _come(self, job: AnyPlan, moving: RingMoving, last_share: int) -> Iterator[tuple[Span, Slot]]:
        """Have what is loaded copied into buffers; kernels come behind that from now on."""
        for span in job.slots(self._nbytes, self._first_share(self._tuning.first_in_share), last_share):
            if last_share == 1:  # else the rest is in small pieces, and waited for
                self._pace(job, span, moving)
            slot = self._filled(job, span)
            self._sum_up()  # no sooner, which would delay the copy, nor later, when a kernel waits for that
            self._device.behind(self._kernels, slot.copies)
            yield span, slot

    def _pace(self, job: AnyPlan, span: Span, moving: RingMoving) -> None:
        """Leave the interpreter to others, if what was enqueued of a long job keeps the device busy for a while."""
        if not isinstance(job, Plan) or job.is_layered or len(moving.parts) > self._tuning.paced_parts:
            return
        if job.units * job.unit_bytes >= self._tuning.paced_bytes:
            early_s = moving.began_s + span.start * job.unit_bytes / self._tuning.pace_bytes_per_s - time.perf_counter()
            free = self._ring[self._next].free
            if early_s <= 0 or free is None or free.query():
                return
            if not self._is_linked:
                time.sleep(early_s)

    def _filled(self, job: AnyPlan, span: Span) -> Slot:
        """Copy what a buffer is to hold into the next one."""
        slot = self._slot()
        if self._loaded is not None and self._loaded.slot is slot:
            self._sum_up()
        if slot.free is not None:
            self._device.wait(slot.copies, slot.free)
        locked = self._locked(job, span)
        self._device.copy_in(slot.buffer, job.extents(span), slot.copies, locked=locked)
        return slot

    def _sum_up(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            read = self._sum(loaded.job, loaded.span, loaded.launches, loaded.slot, loaded.pages)
            loaded.slot.free = read or loaded.slot.free

    def _sum(
        self, job: AnyPlan, span: Span, launches: Sequence[Launch], slot: Slot, pages: torch.Tensor
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
        for summed in self._summed_before(job, launches[0]):
            device.wait(slot.sums, summed)
        try:
            self._sums.summing.chain(launches, slot.scratch, slot.sums)
        finally:  # a row is another chunk's only behind what was enqueued for it
            slot.summed = self._summed = device.record(slot.sums)
            held = job.held(span)
            self._sums.found(job.rows[held.start : held.stop], slot.summed)
        return read

    def _summed_before(self, job: AnyPlan, launch: Launch) -> list[Event]:
        """Behind what a buffer's checksums come: of a part that was cut the last buffer's, of layers whatever was
        enqueued for their chunks, with other jobs in between."""
        if job.is_layered:
            return [slot.summed for slot in self._ring if slot.summed is not None]
        return [self._summed] if launch.start and self._summed is not None else []

    def _made_slots(self) -> Iterator[Slot]:
        """A load's buffers have a stream each for their checksums, of which the last is waited for. A store's share one
        until its far end is a GPU (_separate_sums): with more a process that loads as well has as many streams with
        kernels as there are queues for them (streams.py)."""
        stream = None
        for _ in range(self._tuning.slots):
            slot = Slot(self._device.buffer(self._nbytes), self._device.stream())
            if self._sums is not None:
                stream = stream if stream is not None and self._is_out else self._device.stream()
                slot.sums, slot.scratch = stream, self._made_scratch()
            yield slot

    def _made_scratch(self) -> torch.Tensor | None:
        return None if self._sums is None else self._sums.summing.scratch(self._nbytes)

    def _pages(self, job: AnyPlan, after: Any, moving: RingMoving) -> torch.Tensor:
        """Have a job's page numbers there; kernels come behind `after` from now on."""
        pages = self._numbers(job)
        moving.hold.append(pages)
        if after is not None:
            self._device.wait(self._kernels, after)
        return pages

    def _numbers(self, job: AnyPlan) -> torch.Tensor:
        """Bring page numbers there, unless they are the last that were."""
        if self._uploaded is None or self._uploaded[0] is not job.numbers:
            self._uploaded = None  # on any error
            self._uploaded = job.numbers, self._device.upload(job.numbers, self._kernels)
        return self._uploaded[1]

    def _first_share(self, share: int) -> int:
        """What part of the first buffer is filled: all of it, unless nothing is under way, so that its copy is waited
        for."""
        last = self._ring[self._next - 1].free
        return 1 if self._is_linked or not (last is None or last.query()) else share

    def _slot(self) -> Slot:
        """The next buffer, whose copies come behind those of the one before it."""
        before, slot = self._ring[self._next - 1], self._ring[self._next]
        self._device.behind(slot.copies, before.copies)
        self._next = (self._next + 1) % len(self._ring)
        return slot

    def _locked(self, job: AnyPlan, span: Span) -> bool:
        """Whether all host memory of a buffer is page-locked: asked once a job for each object that lends it, since an
        arena may be locked by a thread of its own while it is used already."""
        lenders, known = job.lenders(span), job.locked  # held by views: no other objects have these ids
        for lender in lenders.keys() - known.keys():
            known[lender] = self._device.page_locked(address_of(lenders[lender]))
        every = all(map(known.__getitem__, lenders))
        if not every and not self._warned:
            self._warned = True
            logger.warning("KV is copied between the GPU and memory that is not page-locked: several times slower")
        return every

    def settle(self, moving: RingMoving) -> None:
        """Let a job that failed end with what of it was enqueued."""
        self._loaded = None
        events = []
        for stream in (self._kernels, *(slot.copies for slot in self._ring)):
            try:
                events.append(self._device.record(stream))
            except RuntimeError as error:  # the device is lost: nothing runs on it any more
                logger.warning("the GPU fails: %s", error)
        moving.end(events)

    def synchronize(self) -> None:
        """Wait for all streams; nothing is left to be done."""
        self._loaded = None
        of_slots = [stream for slot in self._ring for stream in (slot.copies, slot.sums) if stream is not None]
        for stream in (self._kernels, *of_slots):
            try:
                self._device.synchronize(stream)
            except RuntimeError as error:
                logger.warning("the GPU fails: %s", error)

    def close(self) -> None:
        """Wait for all streams and let the buffers go."""
        self.synchronize()
        self._ring = []


class RingTransfer:
    """Transfer (transfer/base.py) by rings of staging buffers, which it takes at the first job of a direction."""

    def __init__(self, paged: PagedKV, device: Device, tuning: Tuning = TUNING, *, sums: bool = False) -> None:
        self.paged = paged
        self.tuning = tuning
        unit = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize
        whole = unit * paged.planes * paged.pages * len(paged.layers)
        nbytes, linked_nbytes = (
            max(min(times * tuning.slot_bytes, whole) // unit, 1) * unit for times in (1, tuning.linked_factor)
        )
        summing = device.summing(paged, tuning.sum_rows) if sums else None
        self._sums = None if summing is None else RingSums(summing, tuning.sum_rows)
        self._store = RingWay(device, tuning, nbytes, linked_nbytes, self._sums, out=True)
        self._load = RingWay(device, tuning, nbytes, linked_nbytes, self._sums, out=False)
        self._closed = False
        self.slot_bytes = nbytes
        """Of each staging buffer, where the far end is host memory."""

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        return self._begin(self._store, parts, self._plans(parts, check_writable), after)

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None, is_last: bool = False) -> Moving:
        return self._begin(self._load, parts, self._plans(parts), after, is_last=is_last)

    def layers(self, parts: Sequence[Part]) -> RingLayers:
        return RingLayers(self, parts)

    def store_planned(self, jobs: Sequence[AnyPlan], parts: Sequence[Part], after: Any) -> Moving:
        """What was planned already, each job the next layers of the same `parts`: these have moved with the last."""
        return self._begin(self._store, parts, iter(jobs), after, before=-len(parts) * (len(jobs) - 1))

    def sum_of(self, nbytes: int) -> RingSum | None:
        return None if self._sums is None else self._sums.take(nbytes)

    def close(self) -> None:
        """As Transfer.close; what is asked for afterwards fails."""
        self._closed = True
        self._store.close()
        self._load.close()

    def _plans(self, parts: Sequence[Part], check: Callable[[Sequence[Part]], None] | None = None) -> Iterator[Plan]:
        """Plan a job of many parts in two: the rest while the first are copied."""
        head = self.tuning.head_parts
        for some in (parts[:head], parts[head:]) if len(parts) > head else (parts,):
            if check is not None:
                check(some)
            yield plan(self.paged, some)

    def _begin(
        self,
        way: RingWay,
        parts: Sequence[Part],
        jobs: Iterator[AnyPlan],
        after: Any,
        *,
        before: int = 0,
        is_last: bool = False,
    ) -> Moving:
        moving = RingMoving(parts)
        job = next(jobs)
        try:
            if self._closed:
                raise RuntimeError("the transfer is closed")
            way.run(job, after, moving, before, is_last=is_last and len(job.memories) == len(parts))
            for following in jobs:
                before, job = before + len(job.memories), following
                way.run(job, after, moving, before, is_last=is_last)
            way.sum_up()
            moving.add(len(parts), None)
        except LayoutError:  # of its pages, or of the second half: a copy is on its way
            way.synchronize()
            raise
        except Exception as error:  # what is enqueued goes on, and the caller has to wait for it
            moving.failure = error
            way.settle(moving)
        except BaseException:  # an interrupt: the caller learns of no Moving, and takes his memory back
            way.synchronize()
            raise
        return moving


class RingLayers:
    """Layers (transfer/base.py) by rings. Several that are small are one job: what adjoins in a chunk is one copy
    then."""

    def __init__(self, ring: RingTransfer, parts: Sequence[Part]) -> None:
        self._ring = ring
        self._plans = LayerPlans(ring.paged, parts)
        self._are_small = 2 * self._plans.nbytes <= ring.slot_bytes

    def store(self, layer: int, count: int = 1, *, after: torch.cuda.Event | None = None) -> Moving:
        check_writable(self._plans.parts)
        jobs = self._jobs(range(layer, layer + count))
        return self._ring.store_planned(jobs, self._plans.parts, after)

    def _jobs(self, layers: range) -> Sequence[AnyPlan]:
        if len(layers) > 1 and self._are_small:
            return [self._plans.together(layers)]
        return [self._plans.at(layer) for layer in layers]
