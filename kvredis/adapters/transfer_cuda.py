"""Chunks between an engine's pages on a GPU and host memory, at the rate of PCIe and beside the engine's own work.

Pages are gathered into staging buffers on the GPU, which its copy engine then moves: few large copies, and no kernel
that writes over PCIe (those stall an engine that computes). For each direction a ring of buffers and two streams, one
for kernels and one for copies, so that a buffer is filled while the one before it is copied. Nothing waits for the
engine's own streams, and nothing on them for us: a store begins behind the event that the caller recorded.

A job is enqueued at once, as a whole; the device works it off. The caller's thread waits only in `Moving.wait`. Where
checksums are wanted (ring_sums.py) the device finds them out of the buffers, on streams of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from kvredis.storage.errors import LayoutError

from .paged import PagedKV
from .ring_device import Device
from .ring_moving import RingMoving
from .ring_plan import LayerPlans, Plan, plan
from .ring_sums import RingSum, RingSums
from .ring_way import AnyPlan, RingWay
from .transfer import Moving, Part, check_writable, layer_parts

SLOT_BYTES: Final = 64 * 1024 * 1024
SLOTS: Final = 2
"""Three buffers of 32 MiB a direction move as much and take a quarter less of the GPU's memory, but asking takes twice
as long, and that takes the interpreter from the engine: beside vLLM 1.7 ms for 60 MiB of a step's layer (profiled)."""
HEAD_PARTS: Final = 48
"""Of more parts than that, so many go first: 512 take 0.2 ms to plan, in which nothing was copied."""
ROWS: Final = 4096
"""Chunks whose checksums are found at a time, both ways together; 64 bytes each."""


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
        self._store = RingWay(device, slots, nbytes, self._sums, out=True)
        self._load = RingWay(device, slots, nbytes, self._sums, out=False)
        self._closed = False
        self._slots = slots
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

    def store_layers(self, plans: LayerPlans, layers: range, after: Any) -> Moving:
        """Some layers of what was planned, one behind the other."""
        return self._begin(self._store, plans.parts * len(layers), map(plans.at, layers), after)

    def load_layers(self, plans: LayerPlans, layers: range, after: Any) -> Moving:
        """The same."""
        return self._begin(self._load, plans.parts * len(layers), map(plans.at, layers), after)

    def stage_layer(self, plans: LayerPlans, layer: int) -> Moving:
        """Bring a layer into staging buffers, as far as they have room."""
        moving = RingMoving(plans.parts)
        try:
            if self._closed:
                raise RuntimeError("the transfer is closed")
            self._load.stage(plans.at(layer), moving)
            moving.add(len(plans.parts), None)
        except Exception as error:  # as with a job: what is enqueued goes on, and the caller has to wait for it
            moving.failure = error
            self._load.settle(moving)
        except BaseException:
            self._load.synchronize()
            raise
        return moving

    def layers_staged(self, plans: LayerPlans) -> int:
        """How many layers the staging buffers hold, and 1 where they hold the head of one."""
        return max(self._slots // max(len(plans.slots(self.slot_bytes, 1)), 1), 1)

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

    def _begin(self, way: RingWay, parts: Sequence[Part], jobs: Iterator[AnyPlan], after: Any) -> Moving:
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

    @property
    def room(self) -> int:
        """As Layers.room. Of small layers the first alone: behind it several come as one."""
        return 1 if self._are_small else self._ring.layers_staged(self._plans)

    def stage(self, layer: int) -> Moving:
        """As Layers.stage."""
        return self._ring.stage_layer(self._plans, layer)

    def store(self, layer: int, count: int = 1, *, after: torch.cuda.Event | None = None) -> Moving:
        """As Layers.store. Several small ones are planned for themselves: what adjoins in a chunk is one copy then."""
        if count > 1 and self._are_small:
            return self._ring.store(layer_parts(self._ring.paged, self._chunks, layer, count), after=after)
        check_writable(self._plans.parts)
        return self._ring.store_layers(self._plans, range(layer, layer + count), after)

    def load(self, layer: int, count: int = 1, *, after: torch.cuda.Event | None = None) -> Moving:
        """As Layers.load, and small ones as with `store`."""
        if count == 1 or not self._are_small:
            return self._ring.load_layers(self._plans, range(layer, layer + count), after)
        return self._ring.load(layer_parts(self._ring.paged, self._chunks, layer, count), after=after)

    @property
    def _are_small(self) -> bool:
        return 2 * self._plans.nbytes <= self._ring.slot_bytes
