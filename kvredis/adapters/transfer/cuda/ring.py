"""Chunks between an engine's pages on a GPU and host memory, at the rate of PCIe and beside the engine's own work.

Pages are gathered into staging buffers on the GPU, which its copy engine then moves: few large copies, and no kernel
that writes over PCIe (those stall an engine that computes). For each direction a ring of buffers, one stream for
kernels and for each buffer one for its copies, so that a buffer is filled while the one before it is copied, and an
engine's own copies come in between. Nothing waits for the engine's streams, and nothing on them for us: a store begins
behind the event that the caller recorded.

A job is enqueued as a whole, a long one with pauses (ring_way.PACE_BYTES_PER_S), and the device works it off. For that
the caller's thread waits only in `Moving.wait`. Where checksums are wanted (checksum_rows.py) the device finds them out
of the buffers, on streams of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import torch

from kvredis.adapters.transfer.base import Moving, Part, check_writable
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.storage.errors import LayoutError

from .checksum_rows import RingSum, RingSums
from .device import Device
from .direction import AnyPlan, RingWay
from .job import RingMoving
from .plan import LayerPlans, Plan, plan

SLOT_BYTES: Final = 64 * 1024 * 1024
SLOTS: Final = 2
"""Three buffers of 32 MiB a direction move as much and take a quarter less of the GPU's memory, but asking takes twice
as long, and that takes the interpreter from the engine: beside vLLM 1.7 ms for 60 MiB of a step's layer (profiled)."""
HEAD_PARTS: Final = 48
"""Of more parts than that, so many go first: 512 take 0.2 ms to plan, in which nothing was copied. In three jobs it
takes longer than in two (3b in chunks of 16, by 1 % in turns)."""
FIRST_STAGED_BYTES: Final = 24 * 1024 * 1024
"""Of small layers so much is staged in the first buffer: who needs layer 0 waits for all that is in there."""
ROWS: Final = 4096
"""Chunks whose checksums are found at a time, both ways together; 64 bytes each."""


class RingTransfer:
    """Transfer (transfer/base.py) by rings of staging buffers, which it takes at the first job of a direction: `slots`
    of `slot_bytes`, less when the KV is smaller. Making one compiles the kernels."""

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
        self._store = RingWay(device, slots, nbytes, self._sums, out=True)
        self._load = RingWay(device, slots, nbytes, self._sums, out=False)
        self._closed = False
        self.slots = slots
        """Staging buffers of each direction."""
        self.slot_bytes = nbytes
        """Of each staging buffer."""

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        """As Transfer.store."""
        return self._begin(self._store, parts, self._plans(parts, check_writable), after)

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None, is_last: bool = False) -> Moving:
        """As Transfer.load."""
        return self._begin(self._load, parts, self._plans(parts), after, sums=True, is_last=is_last)

    def layers(self, parts: Sequence[Part]) -> RingLayers:
        """As Transfer.layers."""
        return RingLayers(self, parts)

    def store_planned(self, jobs: Sequence[AnyPlan], parts: Sequence[Part], after: Any) -> Moving:
        """What was planned already, each job the next layers of the same `parts`: these have moved with the last."""
        return self._begin(self._store, parts, iter(jobs), after, before=-len(parts) * (len(jobs) - 1))

    def load_planned(self, jobs: Sequence[AnyPlan], parts: Sequence[Part], after: Any) -> Moving:
        """The same, without the last of its checksums."""
        return self._begin(self._load, parts, iter(jobs), after, before=-len(parts) * (len(jobs) - 1))

    def sum_up(self) -> None:
        """As Layers.sum_up."""
        self._load.sum_up()

    def stage(self, job: AnyPlan, parts: Sequence[Part], beside: object) -> Moving:
        """Bring what was planned into staging buffers, as far as they have room `beside` what is there for the same."""
        moving = RingMoving(parts)
        try:
            if self._closed:
                raise RuntimeError("the transfer is closed")
            self._load.stage(job, moving, beside)
            moving.add(len(parts), None)
        except Exception as error:  # as with a job: what is enqueued goes on, and the caller has to wait for it
            moving.failure = error
            self._load.settle(moving)
        except BaseException:
            self._load.synchronize()
            raise
        return moving

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

    def _begin(
        self,
        way: RingWay,
        parts: Sequence[Part],
        jobs: Iterator[AnyPlan],
        after: Any,
        *,
        before: int = 0,
        sums: bool = False,
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
            if sums:
                way.sum_up()
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
    """Layers (transfer/base.py) by rings. Several that are small are one job: what adjoins in a chunk is one copy
    then."""

    def __init__(self, ring: RingTransfer, parts: Sequence[Part]) -> None:
        self._ring = ring
        self._plans = LayerPlans(ring.paged, parts)
        self._staged: dict[range, AnyPlan] = {}
        self._are_small = 2 * self._plans.nbytes <= ring.slot_bytes

    @property
    def rows(self) -> list[range]:
        """As Layers.rows: small layers share a buffer, of which the first holds less, so that it is there sooner."""
        layers, slots, nbytes = len(self._ring.paged.layers), self._ring.slots, max(self._plans.nbytes, 1)
        if not self._are_small:
            held = max(slots // len(self._plans.slots(self._ring.slot_bytes, 1)), 1)
            return [range(layer, layer + 1) for layer in range(min(held, layers))]
        most = self._ring.slot_bytes // nbytes
        first = max(min(FIRST_STAGED_BYTES // nbytes, most), 1)
        starts = [0, *(first + row * most for row in range(slots))]
        return [range(start, min(stop, layers)) for start, stop in pairwise(starts) if start < layers]

    def stage(self, layer: int, count: int = 1) -> Moving:
        """As Layers.stage."""
        row = range(layer, layer + count)
        job = self._plans.together(row) if count > 1 else self._plans.at(layer)
        self._staged[row] = job
        return self._ring.stage(job, self._plans.parts, self)

    def store(self, layer: int, count: int = 1, *, after: torch.cuda.Event | None = None) -> Moving:
        """As Layers.store."""
        check_writable(self._plans.parts)
        jobs = self._jobs(range(layer, layer + count))
        return self._ring.store_planned(jobs, self._plans.parts, after)

    def load(self, layer: int, count: int = 1, *, after: torch.cuda.Event | None = None) -> Moving:
        """As Layers.load."""
        row = range(layer, layer + count)
        staged = self._staged.pop(row, None)
        jobs = self._jobs(row) if staged is None else [staged]
        return self._ring.load_planned(jobs, self._plans.parts, after)

    def sum_up(self) -> None:
        """As Layers.sum_up."""
        self._ring.sum_up()

    def _jobs(self, layers: range) -> Sequence[AnyPlan]:
        if len(layers) > 1 and self._are_small:
            return [self._plans.together(layers)]
        return [self._plans.at(layer) for layer in layers]
