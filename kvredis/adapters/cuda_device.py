"""A CUDA device as the ring (transfer_cuda.py) needs it: torch's streams and memory, Triton's or torch's kernels, and
the runtime's copies."""

import ctypes
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvredis.storage.errors import LayoutError

from .cudart import Addresses, cuda_runtime
from .paged import PagedKV
from .ring_index import Index, TorchIndex
from .ring_plan import Extents, Launch

logger = logging.getLogger(__name__)

_HIGH_PRIORITY = -1
"""Kernels of ours are short and few; behind those of a prefill they would keep the copy engine waiting."""


class CudaDevice:
    """Device (transfer_cuda.py) for the GPU that `paged` is on. `kernels` is triton, torch, or None: Triton where it is
    installed and the layers are alike."""

    def __init__(self, paged: PagedKV, kernels: str | None = None) -> None:
        self._device = paged.device
        self._runtime = cuda_runtime()
        with torch.cuda.device(self._device):
            self._index = _index(paged, kernels)
            self.upload(np.zeros(1, np.int64), self.stream())  # host memory for page numbers is made now, not later
            torch.cuda.synchronize(self._device)

    @property
    def kernels(self) -> str:
        """Who gathers: triton or torch."""
        return "torch" if isinstance(self._index, TorchIndex) else "triton"

    def stream(self) -> torch.cuda.Stream:
        """As Device.stream; ahead of an engine's kernels, not of its copies."""
        return torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]

    def buffer(self, nbytes: int) -> torch.Tensor:
        """As Device.buffer; waits for the current stream once, from whose memory it is taken."""
        made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()
        return made

    def upload(self, numbers: npt.NDArray[np.int64], stream: torch.cuda.Stream) -> torch.Tensor:
        """As Device.upload; through page-locked memory that torch keeps until it has been copied."""
        with torch.cuda.stream(stream):
            return torch.from_numpy(numbers).pin_memory().to(self._device, non_blocking=True)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """As Device.record."""
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """As Device.wait."""
        stream.wait_event(event)

    def gather(
        self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        """As Device.gather."""
        with torch.cuda.stream(stream):
            for launch in launches:
                self._index.gather(launch, slot, pages)

    def scatter(
        self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        """As Device.scatter."""
        with torch.cuda.stream(stream):
            for launch in launches:
                self._index.scatter(launch, slot, pages)

    def copy_out(self, slot: torch.Tensor, extents: Extents, stream: torch.cuda.Stream, *, locked: bool) -> None:
        """As Device.copy_out."""
        if self._runtime is None:
            self._copy(slot, extents, stream, out=True)
            return
        with torch.cuda.device(self._device):
            places = extents.place + np.uint64(slot.data_ptr())
            self._runtime.copy(extents.host, places, extents.nbytes, stream.cuda_stream, batch=locked)

    def copy_in(self, slot: torch.Tensor, extents: Extents, stream: torch.cuda.Stream, *, locked: bool) -> None:
        """As Device.copy_in."""
        if self._runtime is None:
            self._copy(slot, extents, stream, out=False)
            return
        with torch.cuda.device(self._device):
            places = extents.place + np.uint64(slot.data_ptr())
            self._runtime.copy(places, extents.host, extents.nbytes, stream.cuda_stream, batch=locked)

    def page_locked(self, address: int) -> bool:
        """As Device.page_locked."""
        if self._runtime is not None:
            return self._runtime.page_locked(address)
        return bool(_host(address, 1).is_pinned())

    def synchronize(self, stream: torch.cuda.Stream) -> None:
        """As Device.synchronize."""
        stream.synchronize()

    def _copy(self, slot: torch.Tensor, extents: Extents, stream: torch.cuda.Stream, *, out: bool) -> None:
        with torch.cuda.stream(stream):
            for address, place, nbytes in zip(*(_numbers(column) for column in extents), strict=True):
                held, host = slot[place : place + nbytes], _host(address, nbytes)
                if out:
                    host.copy_(held, non_blocking=True)
                else:
                    held.copy_(host, non_blocking=True)


def _numbers(column: Addresses) -> list[int]:
    return [int(number) for number in column]


def _host(address: int, nbytes: int) -> torch.Tensor:
    """Host memory as a tensor; the job that it belongs to holds it."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def _index(paged: PagedKV, kernels: str | None) -> Index:
    if kernels == "torch" or (kernels is None and find_spec("triton") is None):
        return TorchIndex(paged)
    if kernels not in (None, "triton"):
        raise ValueError(f"kernels are triton or torch, not {kernels!r}")
    from .transfer_kernels import TritonIndex  # compiles

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
