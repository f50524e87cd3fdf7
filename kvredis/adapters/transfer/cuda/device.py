"""What the ring (ring.py) needs of a GPU, as a protocol, and a CUDA device that gives it.

CudaDevice takes torch's streams and memory, Triton's (kernels.py) or torch's kernels, and the runtime's copies
(runtime.py). Tests hand in other devices. `Index` is how pages are gathered and scattered; TorchIndex, by torch's own
operations, is there where Triton is not.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvredis.adapters.engine.tensors import DeviceEvent, event_on
from kvredis.adapters.transfer.base import Event
from kvredis.adapters.transfer.kv_cache import INTEGERS, PagedKV
from kvredis.storage.errors import LayoutError

from .checksum import Summing
from .plan import Extents, Launch
from .runtime import CudaRuntime, cuda_runtime
from .streams import EngineKernels, QuietStreams
from .tuning import TUNING, Tuning

logger = logging.getLogger(__name__)

_NUMBERS = 8192
"""Pages of a job for which memory is kept from the beginning; more is taken when a job has more."""
_UPLOADS = 4
"""Memory for so many uploads: one on its way waits behind copies of KV."""
_NOTHING = nullcontext()


class Device(Protocol):
    """What the ring needs of a GPU. Everything but `page_locked`, `on_gpu` and `synchronize` only enqueues on `stream`,
    one that `stream()` has made. A thread takes buffers within `on`, and uploads, gathers, scatters and copies within
    `here`."""

    def stream(self, *, uploads: bool = False) -> Any:
        """Make one of our own. `upload` is for those that were made for it, while the engine computes nothing."""
        ...

    def here(self) -> AbstractContextManager[Any]:
        """Let this thread use the device: once a job, since it costs a launch."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The same, and let its memory be that stream's: of the engine's one might wait for all that it computes."""
        ...

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Give uint8 memory there that no other stream still uses."""
        ...

    def upload(self, numbers: npt.NDArray[np.int64], stream: Any) -> torch.Tensor:
        """Bring numbers there, at the head of what is returned; the array may go at once. They stay until more are
        uploaded on that stream, and what was given to it before then finds them."""
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

    def summing(self, paged: PagedKV, rows: int) -> Summing | None:
        """Make room for so many running checksums; None where the device finds none of that KV."""
        ...

    def page_locked(self, address: int) -> bool:
        """Whether copies from and to host memory there run by themselves."""
        ...

    def on_gpu(self, address: int) -> bool:
        """Whether the memory there is a GPU's, this one's or another's."""
        ...

    def synchronize(self, stream: Any) -> None:
        """Wait until the stream has nothing left to do."""
        ...


class Index(Protocol):
    """Runs what a Launch says, on a GPU on the stream whose handle `stream` is. `slot` is a buffer's bytes, `pages` the
    job's page numbers, both where the KV is; the caller does not wait. Where not `takes_handle` that stream is
    the current one."""

    takes_handle: bool

    def gather(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        """Copy from the engine's pages into the buffer."""
        ...

    def scatter(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        """Copy from the buffer into the engine's pages."""
        ...


class TorchIndex:
    """Index by indexing and index_copy_; as many calls as layers where parts are whole or cut between layers."""

    takes_handle = False

    def __init__(self, paged: PagedKV) -> None:
        self._paged = paged
        self._integers = INTEGERS[paged.dtype.itemsize]
        self._by_plane = [layer.view(self._integers).transpose(0, 1) for layer in paged.layers]
        self._unit_shape = (paged.page_tokens, paged.kv_heads, paged.head_dim)
        self._unit_bytes = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize

    @torch.no_grad()
    def gather(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        for layer, units, chosen in self._steps(launch, slot, pages):
            found = layer[:, chosen]  # index_select may copy a whole layer first, where it is not contiguous
            parts, planes, some = units.shape[:3]
            units.copy_(found.view(planes, parts, some, *self._unit_shape).transpose(0, 1))

    @torch.no_grad()
    def scatter(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        for layer, units, chosen in self._steps(launch, slot, pages):
            layer.index_copy_(1, chosen, units.transpose(0, 1).flatten(1, 2))

    def _steps(
        self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Give (planes, all pages, ...) of a layer, the buffer's (parts, planes, pages, ...), and page numbers: for the
        rest of a part that was cut, for whole ones together, for the beginning of one."""
        steps, at = [], 0
        while at < launch.total:
            part, start = divmod(launch.start + at, launch.units)
            left = launch.total - at
            parts, units = (0, min(launch.units - start, left)) if start else divmod(left, launch.units)
            if parts:
                units = launch.units
            parts = max(parts, 1)
            begin, size = (launch.slot_unit + at) * self._unit_bytes, parts * units * self._unit_bytes
            held = slot[begin : begin + size].view(self._integers).view(parts, units, *self._unit_shape)
            first = launch.first_page + part * launch.pages
            numbers = pages[first : first + parts * launch.pages].view(parts, launch.pages)
            steps += self._layers(launch.layer, start, held, numbers)
            at += parts * units
        return steps

    def _layers(
        self, layer: int, start: int, held: torch.Tensor, numbers: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """As `_steps`, of parts of which all have the same units, from `start` on."""
        parts, units = held.shape[:2]
        count = numbers.shape[1]
        steps, at = [], start
        while at < start + units:
            above, inside = divmod(at, self._paged.planes * count)
            plane, page = divmod(inside, count)
            row = start + units - at
            if page or row < count:  # some pages of one plane
                planes, some = 1, min(count - page, row)
            else:
                planes, some = min(self._paged.planes - plane, row // count), count
            there = held[:, at - start : at - start + planes * some].view(parts, planes, some, *self._unit_shape)
            source = self._by_plane[layer + above][plane : plane + planes]
            steps.append((source, there, numbers[:, page : page + some].reshape(-1)))
            at += planes * some
        return steps


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
        self.copied: Event | None = None


class RuntimeEvent:
    """Event (transfer/base.py), of `device` by its handle, which goes to `free` when nothing here asks for it any more.
    Of torch's own each call, and letting it go, gives the GIL away (runtime.py)."""

    __slots__ = ("_device", "_free", "_handle", "_runtime")

    def __init__(self, runtime: CudaRuntime, handle: int, device: torch.device, free: deque[int]) -> None:
        self._runtime = runtime
        self._handle = handle
        self._device = device
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._handle)  # what waits for it waits for what it marked

    def query(self) -> bool:
        """As Event.query, of its own device (DeviceEvent)."""
        with torch.cuda.device(self._device):
            return self._runtime.query(self._handle)

    def synchronize(self) -> None:
        with torch.cuda.device(self._device):
            self._runtime.synchronize(self._handle)

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let what the stream is given from now on come behind it."""
        self._runtime.wait(stream.cuda_stream, self._handle)


class CudaDevice:
    """Device (device.py) for the GPU that `paged` is on. `kernels` is triton, torch, or None: Triton where it is
    installed and the layers are alike."""

    def __init__(self, paged: PagedKV, kernels: str | None = None, tuning: Tuning = TUNING) -> None:
        self._device = paged.device
        self._tuning = tuning
        self._runtime = cuda_runtime()
        with torch.cuda.device(self._device):
            self._index = _index(paged, kernels, tuning)
            torch.cuda.synchronize(self._device)
            self._streams = QuietStreams(self._made_stream, EngineKernels(self._device).slowed, tuning)
        self._numbers: dict[int, deque[_Numbers]] = {}
        self._free_events: deque[int] = deque()

    @property
    def kernels(self) -> str:
        """What gathers: triton or torch."""
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
        return torch.cuda.Stream(self._device, priority=self._tuning.stream_priority)  # type: ignore[no-untyped-call]

    def here(self) -> AbstractContextManager[Any]:
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
        kept = every[0]
        is_free = kept.copied is None or kept.copied.query()
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
        kept.copied = self.record(stream)
        return kept.there

    def record(self, stream: torch.cuda.Stream) -> RuntimeEvent | DeviceEvent:
        if self._runtime is None:
            return DeviceEvent(event_on(stream), self._device)
        try:
            handle = self._free_events.popleft()
        except IndexError:
            with self.here():
                handle = self._runtime.event()
        event = RuntimeEvent(self._runtime, handle, self._device, self._free_events)
        self._runtime.record(handle, stream.cuda_stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event | DeviceEvent | RuntimeEvent) -> None:
        event.wait(stream)

    def behind(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        self.record(other).wait(stream)

    def gather(
        self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        with self._launching(stream):
            for launch in launches:
                self._index.gather(launch, slot, pages, stream.cuda_stream)

    def scatter(
        self, launches: Sequence[Launch], slot: torch.Tensor, pages: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        with self._launching(stream):
            for launch in launches:
                self._index.scatter(launch, slot, pages, stream.cuda_stream)

    def _launching(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """What gives kernels to that stream: those that are launched by its handle need nothing."""
        return _NOTHING if self._index.takes_handle else torch.cuda.stream(stream)

    def copy_out(self, slot: torch.Tensor, extents: Extents, stream: torch.cuda.Stream, *, locked: bool) -> None:
        if self._runtime is None:
            self._copy(slot, extents, stream, out=True)
            return
        places = _places(slot, extents)
        self._runtime.copy(extents.host, places, extents.nbytes, stream.cuda_stream, batch=locked)

    def copy_in(self, slot: torch.Tensor, extents: Extents, stream: torch.cuda.Stream, *, locked: bool) -> None:
        if self._runtime is None:
            self._copy(slot, extents, stream, out=False)
            return
        places = _places(slot, extents)
        self._runtime.copy(places, extents.host, extents.nbytes, stream.cuda_stream, batch=locked)

    def summing(self, paged: PagedKV, rows: int) -> Summing | None:
        """As Device.summing, where Triton gathers."""
        if self.kernels != "triton":
            return None
        from .kernels import TritonSums  # compiles

        with torch.cuda.device(self._device):
            try:
                return TritonSums(paged, rows, self._tuning)
            except Exception as error:  # of another release of Triton: cores hash as well
                logger.info("the GPU finds no checksums of KV: %s", error)
                return None

    def page_locked(self, address: int) -> bool:
        if self._runtime is not None:
            with torch.cuda.device(self._device):
                return self._runtime.page_locked(address)
        return bool(_host(address, 1).is_pinned())

    def on_gpu(self, address: int) -> bool:
        if self._runtime is None:
            return False
        with torch.cuda.device(self._device):
            return self._runtime.on_gpu(address)

    def synchronize(self, stream: torch.cuda.Stream) -> None:
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


def _index(paged: PagedKV, kernels: str | None, tuning: Tuning) -> Index:
    if kernels == "torch" or (kernels is None and find_spec("triton") is None):
        return TorchIndex(paged)
    if kernels not in (None, "triton"):
        raise ValueError(f"kernels are triton or torch, not {kernels!r}")
    from .kernels import TritonIndex  # compiles

    try:
        return TritonIndex(paged, tuning)
    except LayoutError as error:
        if kernels is not None:
            raise
        logger.info("torch gathers KV, not Triton: %s", error)
        return TorchIndex(paged)


def choices() -> dict[str, Any]:
    """Tell what there is to copy with: the runtime's batches, and Triton."""
    runtime = cuda_runtime()
    return {"batches": runtime is not None and runtime.batches, "triton": find_spec("triton") is not None}
