"""The CUDA driver, called by ctypes for what a bench copies: memory, streams, events, and peer access switched on and
off, which a framework does once and for good. Only the driver's library is needed: neither torch nor a CUDA toolkit.

The names are the driver API's (cuda.h), `_v2` where the header says so. A context is current by thread, so each call
that wants one makes it current first.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from kvredis.storage.memory.page_lock import cuda_driver

from .core.errors import BenchError

_SUCCESS: Final = 0
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: beside the default stream
_PORTABLE: Final = 1  # CU_MEMHOSTALLOC_PORTABLE: page-locked for every context
_NAME_BYTES: Final = 256
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_TYPES: Final[dict[str, list[Any]]] = {
    "cuDeviceCanAccessPeer": [_POINTER, ctypes.c_int, ctypes.c_int],
    "cuCtxSetCurrent": [_POINTER],
    "cuCtxSynchronize": [],
    "cuCtxEnablePeerAccess": [_POINTER, ctypes.c_uint],
    "cuCtxDisablePeerAccess": [_POINTER],
    "cuMemAlloc_v2": [_POINTER, _SIZE],
    "cuMemFree_v2": [_POINTER],
    "cuMemHostAlloc": [_POINTER, _SIZE, ctypes.c_uint],
    "cuMemFreeHost": [_POINTER],
    "cuMemsetD8_v2": [_POINTER, ctypes.c_ubyte, _SIZE],
    "cuMemcpyHtoDAsync_v2": [_POINTER, _POINTER, _SIZE, _POINTER],
    "cuMemcpyDtoHAsync_v2": [_POINTER, _POINTER, _SIZE, _POINTER],
    "cuMemcpyDtoDAsync_v2": [_POINTER, _POINTER, _SIZE, _POINTER],
    "cuMemcpyPeerAsync": [_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER],
    "cuStreamCreate": [_POINTER, ctypes.c_uint],
    "cuStreamDestroy_v2": [_POINTER],
    "cuStreamSynchronize": [_POINTER],
    "cuEventCreate": [_POINTER, ctypes.c_uint],
    "cuEventDestroy_v2": [_POINTER],
    "cuEventRecord": [_POINTER, _POINTER],
    "cuEventElapsedTime": [_POINTER, _POINTER, _POINTER],
}


@dataclass(frozen=True, slots=True)
class Place:
    """Memory of a GPU, or of the CPU where `gpu` is None."""

    address: int
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """A queue of a GPU's work."""

    handle: int
    gpu: int


class Cuda:
    """Every GPU that this process sees, up to `limit`. `close` gives back what was taken. Raises BenchError, with the
    call's name and the driver's words, where a call fails."""

    def __init__(self, library: Any, limit: int) -> None:
        self._library = library
        for name, types in _TYPES.items():
            getattr(library, name).argtypes = types
        self._undo = ExitStack()
        self._contexts: dict[int, int] = {}
        count = ctypes.c_int(0)
        self._call("cuInit", 0)
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self._devices = [self._device(ordinal) for ordinal in range(min(limit, count.value))]
        self.names = [self._name(device) for device in self._devices]
        self.peers = [[at == to or self._reaches(at, to) for to in self._devices] for at in self._devices]
        """Whether a GPU reaches another one's memory directly, once it is allowed to."""

    def close(self) -> None:
        """Wait for what was begun, and free everything; what fails at that is not said."""
        for gpu in self._contexts:
            self._enter(gpu)
            self._library.cuCtxSynchronize()
        self._undo.close()
        self._contexts.clear()

    def host_memory(self, nbytes: int) -> Place:
        """Take page-locked memory of the CPU."""
        self._enter(0)
        address = self._made("cuMemHostAlloc", nbytes, _PORTABLE)
        self._later(0, "cuMemFreeHost", address)
        return Place(address)

    def device_memory(self, gpu: int, nbytes: int) -> Place:
        """Take memory of a GPU."""
        self._enter(gpu)
        address = self._made("cuMemAlloc_v2", nbytes)
        self._later(gpu, "cuMemFree_v2", address)
        return Place(address, gpu)

    def stream(self, gpu: int) -> Stream:
        """Make a stream that waits for no other."""
        self._enter(gpu)
        handle = self._made("cuStreamCreate", _NON_BLOCKING)
        self._later(gpu, "cuStreamDestroy_v2", handle)
        return Stream(handle, gpu)

    def event(self, gpu: int) -> int:
        """Make an event that tells times."""
        self._enter(gpu)
        handle = self._made("cuEventCreate", 0)
        self._later(gpu, "cuEventDestroy_v2", handle)
        return handle

    def allow_peer(self, gpu: int, other: int, allowed: bool) -> None:
        """Let a GPU reach another one's memory from now on, or no more: copies go through the CPU's memory then."""
        peer = self._context(other)
        self._enter(gpu)
        if allowed:
            self._call("cuCtxEnablePeerAccess", peer, 0)
        else:
            self._call("cuCtxDisablePeerAccess", peer)

    def copy(self, target: Place, source: Place, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy; from or to pageable memory it is as good as done when this returns."""
        self._enter(stream.gpu)
        if target.gpu is None:
            self._call("cuMemcpyDtoHAsync_v2", target.address, source.address, nbytes, stream.handle)
        elif source.gpu is None:
            self._call("cuMemcpyHtoDAsync_v2", target.address, source.address, nbytes, stream.handle)
        elif source.gpu == target.gpu:
            self._call("cuMemcpyDtoDAsync_v2", target.address, source.address, nbytes, stream.handle)
        else:
            to, near = self._contexts[target.gpu], self._contexts[source.gpu]
            self._call("cuMemcpyPeerAsync", target.address, to, source.address, near, nbytes, stream.handle)

    def fill(self, place: Place, byte: int, nbytes: int) -> None:
        """Set memory to a byte, and wait until it is."""
        if place.gpu is None:
            ctypes.memset(place.address, byte, nbytes)
        else:
            self._enter(place.gpu)
            self._call("cuMemsetD8_v2", place.address, byte, nbytes)
            self._call("cuCtxSynchronize")

    def wait(self, stream: Stream) -> None:
        """Block until all that a stream was given is done."""
        self._enter(stream.gpu)
        self._call("cuStreamSynchronize", stream.handle)

    def record(self, event: int, stream: Stream) -> None:
        """Have an event mark when the stream gets there."""
        self._enter(stream.gpu)
        self._call("cuEventRecord", event, stream.handle)

    def elapsed_us(self, start: int, end: int) -> float:
        """Give the time between two events that have been passed, by the GPU's clock."""
        elapsed_ms = ctypes.c_float(0)
        self._call("cuEventElapsedTime", ctypes.byref(elapsed_ms), start, end)
        return elapsed_ms.value * 1e3

    def _device(self, ordinal: int) -> int:
        device = ctypes.c_int(0)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def _name(self, device: int) -> str:
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("cuDeviceGetName", name, _NAME_BYTES, device)
        return name.value.decode()

    def _reaches(self, device: int, other: int) -> bool:
        reaches = ctypes.c_int(0)
        self._call("cuDeviceCanAccessPeer", ctypes.byref(reaches), device, other)
        return bool(reaches.value)

    def _context(self, gpu: int) -> int:
        """Give a GPU's primary context, made when it is first asked for: it takes half a GiB of the GPU."""
        if gpu not in self._contexts:
            self._contexts[gpu] = self._made("cuDevicePrimaryCtxRetain", self._devices[gpu])
            self._undo.callback(self._library.cuDevicePrimaryCtxRelease_v2, self._devices[gpu])
        return self._contexts[gpu]

    def _enter(self, gpu: int) -> None:
        self._call("cuCtxSetCurrent", self._context(gpu))

    def _later(self, gpu: int, name: str, handle: int) -> None:
        """Undo a call when this is closed, with the GPU's context current: the last one in is the first out."""
        self._undo.callback(getattr(self._library, name), handle)
        self._undo.callback(self._library.cuCtxSetCurrent, self._contexts[gpu])

    def _made(self, name: str, *arguments: int) -> int:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return made.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        if (code := getattr(self._library, name)(*arguments)) != _SUCCESS:
            words = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(words))
            raise BenchError(f"{name}: error {code}, {words.value.decode() if words.value else 'unknown'}")


def open_cuda(limit: int, library: Any = None) -> Cuda | str:
    """Give the machine's GPUs, or say in a line why there are none."""
    library = cuda_driver() if library is None else library
    if library is None:
        return "no GPU: there is no CUDA driver"
    try:
        cuda = Cuda(library, limit)
    except BenchError as error:
        return f"no GPU: {error}"
    return cuda if cuda.names else "no GPU: the driver sees none"
