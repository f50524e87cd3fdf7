"""A CUDA device as the ring (device.py) needs it: torch's streams and memory, Triton's or torch's kernels, and
the runtime's copies."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvredis.adapters.engine.tensors import DeviceEvent, event_on
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.storage.errors import LayoutError

from .device import Summing
from .index_kernels import Index, TorchIndex
from .plan import Extents, Launch
from .runtime import cuda_runtime
from .streams import EngineKernels, QuietStreams

logger = logging.getLogger(__name__)

_HIGH_PRIORITY = -1
"""Kernels of ours are short and few; behind those of a prefill they would keep the copy engine waiting."""

_NUMBERS = 8192
"""Pages of a job for which memory is kept from the beginning; more is taken when a job has more."""

_UPLOADS = 4
"""Memory for so many uploads: one on its way waits behind copies of KV."""


_NOTHING = nullcontext()


class _Numbers:
    """Memory for page numbers on their way: page-locked here, and there of `stream`. It is found by the stream's
    identity, and so holds it."""

    def __init__(self, stream: torch.cuda.Stream, count: int) -> None:
        self.stream = stream
        self.host = torch.empty(count, dtype=torch.int64, pin_memory=True)
        self.array: npt.NDArray[np.int64] = self.host.numpy()
        with torch.cuda.stream(stream):
            self.there = torch.empty(count, dtype=torch.int64, device=stream.device)
        self.addresses = self.there.data_ptr(), self.host.data_ptr()
        self.copied = event_on(stream)


class CudaDevice:
    """Device (device.py) for the GPU that `paged` is on. `kernels` is triton, torch, or None: Triton where it is
    installed and the layers are alike."""

    def __init__(self, paged: PagedKV, kernels: str | None = None) -> None:
        self._device = paged.device
        self._runtime = cuda_runtime()
        with torch.cuda.device(self._device):
            self._index = _index(paged, kernels)
            torch.cuda.synchronize(self._device)
            self._streams = QuietStreams(self._made_stream, EngineKernels(self._device).slowed)
        self._numbers: dict[int, deque[_Numbers]] = {}
        self._orders: dict[int, torch.cuda.Event] = {}

    @property
    def kernels(self) -> str:
        """Who gathers: triton or torch."""
        return "torch" if isinstance(self._index, TorchIndex) else "triton"

    def stream(self, *, uploads: bool = False) -> torch.cuda.Stream:
        """As Device.stream; ahead of an engine's kernels, not of its copies. Those that upload are given kernels too,
        which wait for copies: quiet ones. Memory for page numbers is made now, and not when a job is waited for."""
        if not uploads:
            return self._streams.any()
        with self.here():
            made = self._streams.quiet()
            self._numbers[id(made)] = deque(_Numbers(made, _NUMBERS) for _ in range(_UPLOADS))
        return made

    def _made_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]

    def here(self) -> AbstractContextManager[Any]:
        """As Device.here."""
        return torch.cuda.device(self._device)

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """As Device.on. The device comes first: a stream's context alone would go back to GPU 0 by making a context
        there, in a thread that has chosen no device."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def buffer(self, nbytes: int) -> torch.Tensor:
        """As Device.buffer; waits for the current stream once, from whose memory it is taken."""
        made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()
        return made

    def upload(self, numbers: npt.NDArray[np.int64], stream: torch.cuda.Stream) -> torch.Tensor:
        """As Device.upload; through page-locked memory that is kept, since taking it anew costs more than the copy. A
        tensor's copy_ would take the interpreter for longer than the runtime's call, while the first copy of KV runs
        out or has not begun."""
        every = self._numbers[id(stream)]
        kept, is_free = every[0], bool(every[0].copied.query())  # type: ignore[no-untyped-call]
        if not is_free or len(numbers) > len(kept.there):
            kept = _Numbers(stream, max(len(numbers), len(kept.there)))
        if is_free:  # else it is not let go: its memory would be another's while the copy reads it
            every.popleft()
        every.append(kept)
        kept.array[: len(numbers)] = numbers
        if self._runtime is None:
            with torch.cuda.stream(stream):
                kept.there.copy_(kept.host, non_blocking=True)
        else:
            self._runtime.copy_one(*kept.addresses, numbers.nbytes, stream.cuda_stream)
        kept.copied.record(stream)
        return kept.there

    def record(self, stream: torch.cuda.Stream) -> DeviceEvent:
        """As Device.record."""
        return DeviceEvent(event_on(stream), self._device)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event | DeviceEvent) -> None:
        """As Device.wait."""
        stream.wait_event(event.event if isinstance(event, DeviceEvent) else event)

    def behind(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """As Device.behind. One event for each stream: a wait is for what it marks at that moment."""
        event = self._orders.get(id(other))
        if event is None:
            event = self._orders[id(other)] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(other)
        stream.wait_event(event)

    def gather(
        self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        """As Device.gather."""
        with self._launching(stream):
            for launch in launches:
                self._index.gather(launch, slot, pages, stream.cuda_stream)

    def scatter(
        self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        """As Device.scatter."""
        with self._launching(stream):
            for launch in launches:
                self._index.scatter(launch, slot, pages, stream.cuda_stream)

    def _launching(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """What gives kernels to that stream: those that are launched by its handle need nothing."""
        return _NOTHING if self._index.takes_handle else torch.cuda.stream(stream)

    def copy_out(self, slot: torch.Tensor, extents: Extents, stream: torch.cuda.Stream, *, locked: bool) -> None:
        """As Device.copy_out."""
        if self._runtime is None:
            self._copy(slot, extents, stream, out=True)
            return
        places = _places(slot, extents)
        self._runtime.copy(extents.host, places, extents.nbytes, stream.cuda_stream, batch=locked)

    def copy_in(self, slot: torch.Tensor, extents: Extents, stream: torch.cuda.Stream, *, locked: bool) -> None:
        """As Device.copy_in."""
        if self._runtime is None:
            self._copy(slot, extents, stream, out=False)
            return
        places = _places(slot, extents)
        self._runtime.copy(places, extents.host, extents.nbytes, stream.cuda_stream, batch=locked)

    def summing(self, paged: PagedKV, rows: int) -> Summing | None:
        """As Device.summing, where Triton gathers."""
        if self.kernels != "triton":
            return None
        from .checksum_kernels import TritonSums  # compiles

        with torch.cuda.device(self._device):
            try:
                return TritonSums(paged, rows)
            except Exception as error:  # whatever another release of Triton says: cores hash as well
                logger.info("the GPU finds no checksums of KV: %s", error)
                return None

    def page_locked(self, address: int) -> bool:
        """As Device.page_locked."""
        if self._runtime is not None:
            with torch.cuda.device(self._device):
                return self._runtime.page_locked(address)
        return bool(_host(address, 1).is_pinned())

    def synchronize(self, stream: torch.cuda.Stream) -> None:
        """As Device.synchronize."""
        with torch.cuda.device(self._device):
            stream.synchronize()

    def _copy(self, slot: torch.Tensor, extents: Extents, stream: torch.cuda.Stream, *, out: bool) -> None:
        with torch.cuda.stream(stream):
            for address, place, nbytes in zip(*extents, strict=True):
                held, host = slot[place : place + nbytes], _host(address, nbytes)
                if out:
                    host.copy_(held, non_blocking=True)
                else:
                    held.copy_(host, non_blocking=True)


def _places(slot: torch.Tensor, extents: Extents) -> list[int]:
    """Where they are in the device's memory."""
    start = slot.data_ptr()
    return [start + place for place in extents.place]


def _host(address: int, nbytes: int) -> torch.Tensor:
    """Host memory as a tensor; the job that it belongs to holds it."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def _index(paged: PagedKV, kernels: str | None) -> Index:
    if kernels == "torch" or (kernels is None and find_spec("triton") is None):
        return TorchIndex(paged)
    if kernels not in (None, "triton"):
        raise ValueError(f"kernels are triton or torch, not {kernels!r}")
    from .kernels import TritonIndex  # compiles

    try:
        return TritonIndex(paged)
    except LayoutError as error:
        if kernels is not None:
            raise
        logger.info("torch gathers KV, not Triton: %s", error)
        return TorchIndex(paged)


def choices() -> dict[str, Any]:
    """Tell what there is to copy with: the runtime's batches, and Triton."""
    runtime = cuda_runtime()
    return {"batches": runtime is not None and runtime.batches, "triton": find_spec("triton") is not None}
