"""One direction of the ring (ring.py): its streams, its staging buffers, and what is enqueued in which order.

A buffer is filled behind the event that says that what was in it is where it belongs. Loads may be staged: their bytes
wait in buffers for an engine that has not given its pages away yet.

A GPU's copy engine stays with a stream that has a copy ready, whatever the priority of others. Beside a store of 1 GiB
on one stream an engine's copy of one token waited for all of it, 18 ms. Where each buffer has a stream of its own, and
its copies come behind those of the buffer before, it takes 0.8 ms (H100, `kvredis bench swap --beside-copies`), and as
much is moved, to half a percent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final
from weakref import ref

import torch

from kvredis.storage.memory.copy import address_of

from .checksum_rows import RingSums
from .device import Device, Event
from .job import RingMoving
from .plan import Launch, LayerPlan, Numbers, Plan, Span

logger = logging.getLogger(__name__)

FIRST_OUT: Final = 8
"""The first buffer of a store that finds the ring at rest is filled to an eighth: nothing is copied before it is
gathered. Copying as much takes as long as planning and gathering the next."""
FIRST_IN: Final = 3
"""A load's to a third: it waits for no kernel, only until its copies are listed, but the next one's take 0.3 ms to be
asked for, in which 16 MiB are copied. Of 9 MiB, one chunk of 3b, that left 0.1 ms without a copy: its 302 MB came at
94.5 % of the link, with a third at 95.5, with half at 95.7, where 7b lost as much (medians of 15 and more in turns, two
H200s)."""
LAST_IN: Final = 8
"""Where checksums are waited for, a load's last buffers are filled by halves of what is left, down to an eighth. Of a
chunk one part is summed up behind the other, 32 MiB in 0.5 ms: beside the copies, if it comes in pieces. To enqueue a
piece takes twice as long as to copy 8 MiB, so only few are that small."""

PACE_BYTES_PER_S: Final = 100e9
"""While all buffers are under way chunks are enqueued no faster, twice as fast as PCIe 5 moves them: who launches an
engine's kernels from Python gets no turn of the interpreter beside a thread that calls the runtime again and again. The
first layer of an eager 8k prefill ended 1.5 to 2.3 ms later beside a load of 17 buffers at once, 0.5 so (H200). Layers,
and a load's last buffers that are filled to less and less, are not kept waiting."""
PACED_BYTES: Final = 512 * 1024 * 1024
"""Of a job that has pauses, at least. A smaller one takes the interpreter for less than a millisecond, and ends later
where a thread wakes late: 3b's 302 MB took 0.2 ms longer with pauses in two of three pairs (H200)."""
PACED_PARTS: Final = 48
"""Of a job that has pauses, at most. To list more is slow by itself, and slower behind a pause: 3b in chunks of 16
tokens moved 7 % slower (H200). More go in two, each of which would count for itself (transfer_cuda.HEAD_PARTS)."""

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


@dataclass(frozen=True, slots=True)
class Staged:
    """A buffer that is filled, behind `copied`, with what is loaded next: a span of a job. `beside` is the same object
    for jobs that are loaded one behind the other. Neither is kept: who gives them up gives up host memory with them."""

    job: ref[AnyPlan]
    beside: ref[object]
    span: Span
    slot: Slot
    copied: Event


class RingWay:
    """One direction: its streams and its ring. One thread at a time uses it."""

    def __init__(self, device: Device, slots: int, nbytes: int, sums: RingSums | None, *, out: bool) -> None:
        self._device = device
        self._is_out = out
        self._sums = sums
        self._summed: Event | None = None
        self._slots = slots
        self._nbytes = nbytes
        self._kernels = device.stream(uploads=True)
        self._ring: list[Slot] = []
        self._next = 0
        self._staged: list[Staged] = []
        """In the order in which they were filled, and are loaded."""
        self._loaded: Loaded | None = None
        """What was loaded last, while nobody has asked for its checksums."""
        self._uploaded: tuple[Numbers, torch.Tensor] | None = None
        """The page numbers that came last, and where they are: those of layers of the same chunks are the same."""
        self._warned = False

    def run(self, job: AnyPlan, after: Any, moving: RingMoving, before: int = 0, *, is_last: bool = False) -> None:
        """Enqueue the whole job, parts of `moving` behind so many before; of a load all but its last checksums, which
        `sum_up` does. `is_last` as in Transfer.load. Raises RuntimeError from the device."""
        if job.units:
            self._open()
            with self._device.here():
                if self._is_out:
                    self._out(job, after, moving, before)
                else:
                    self._in(job, after, moving, before, LAST_IN if is_last and job.rows is not None else 1)

    def stage(self, job: AnyPlan, moving: RingMoving, beside: object) -> None:
        """Fill buffers with a job, behind what is staged `beside` the same; nothing else stays staged. Raises
        RuntimeError from the device, LayoutError for pages that there are not."""
        if self._staged and (self._staged[-1].beside() is not beside or len(self._staged) == self._slots):
            self._staged = []
        self._open()
        with self._device.here():
            self._sum_up()
            for span in islice(job.slots(self._nbytes), self._slots - len(self._staged)):
                slot = self._filled(job, span)
                slot.free = self._device.record(slot.copies)
                self._staged.append(Staged(ref(job), ref(beside), span, slot, slot.free))
                moving.add(0, slot.free)
            self._numbers(job)

    def sum_up(self) -> None:
        """Enqueue what is left of a load's checksums: nothing that it brings waits for them. Raises RuntimeError from
        the device."""
        if self._loaded is not None:
            with self._device.here():
                self._sum_up()

    def _open(self) -> None:
        if not self._ring:
            with self._device.on(self._kernels):
                self._ring = list(self._made_slots())

    def _out(self, job: AnyPlan, after: Any, moving: RingMoving, before: int) -> None:
        device = self._device
        pages = self._pages(job, after, moving)
        for span in job.slots(self._nbytes, FIRST_OUT if self._rests else 1):
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
        """Have what is loaded copied into buffers, where it is not staged; kernels come behind that from now on."""
        staged = self._taken(job)
        for each in staged:
            self._sum_up()
            self._device.wait(self._kernels, each.copied)
            yield each.span, each.slot
        spans = job.slots(self._nbytes, FIRST_IN if self._rests and not staged else 1, last_share)
        for span in islice(spans, len(staged), None):
            if last_share == 1:  # else the rest is in small pieces, and waited for
                self._pace(job, span, moving)
            slot = self._filled(job, span)
            self._sum_up()  # no sooner, which would delay the copy, nor later, when a kernel waits for that
            self._device.behind(self._kernels, slot.copies)
            yield span, slot

    def _pace(self, job: AnyPlan, span: Span, moving: RingMoving) -> None:
        """Leave the interpreter to others, if what was enqueued of a long job keeps the device busy for a while."""
        if not isinstance(job, Plan) or job.is_layered or len(moving.parts) > PACED_PARTS:
            return
        if job.units * job.unit_bytes >= PACED_BYTES:
            early_s = moving.began_s + span.start * job.unit_bytes / PACE_BYTES_PER_S - time.perf_counter()
            free = self._ring[self._next].free
            if early_s > 0 and free is not None and not free.query():
                time.sleep(early_s)

    def _taken(self, job: AnyPlan) -> list[Staged]:
        """What is staged of that job, which is no more; nothing else stays staged but what is loaded behind it."""
        staged, self._staged = self._staged, []
        if not staged or staged[0].job() is not job:
            return []
        mine = [each for each in staged if each.job() is job]
        self._staged = staged[len(mine) :]
        return mine

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
        """A load's buffers have a stream each for their checksums, of which the last is waited for. A store's share
        one: with more a process would have more streams with kernels than queues for them (streams.py)."""
        stream = None
        for _ in range(self._slots):
            slot = Slot(self._device.buffer(self._nbytes), self._device.stream())
            if self._sums is not None:
                stream = stream if stream is not None and self._is_out else self._device.stream()
                slot.sums, slot.scratch = stream, self._sums.summing.scratch(self._nbytes)
            yield slot

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
            self._uploaded = None  # whatever happens
            self._uploaded = job.numbers, self._device.upload(job.numbers, self._kernels)
        return self._uploaded[1]

    @property
    def _rests(self) -> bool:
        """Whether nothing is under way, so that the first copy is waited for."""
        last = self._ring[self._next - 1].free
        return last is None or last.query()

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
        """Let a job that failed end with what of it was enqueued. Nothing stays staged: the next buffer to be filled
        may be one that is."""
        self._loaded, self._staged = None, []
        events = []
        for stream in (self._kernels, *(slot.copies for slot in self._ring)):
            try:
                events.append(self._device.record(stream))
            except RuntimeError as error:  # the device is lost: nothing runs on it any more
                logger.warning("the GPU fails: %s", error)
        moving.end(events)

    def synchronize(self) -> None:
        """Wait for all streams; nothing is left to be done, or staged."""
        self._loaded, self._staged = None, []
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
