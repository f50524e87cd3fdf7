"""The CUDA runtime that torch has loaded, called for what torch has no call for: many copies in one call.

Measured on an H200: a cudaMemcpyAsync of half a megabyte leaves 2 us to the next one, a fifth of PCIe;
cudaMemcpyBatchAsync leaves none. Its signature is that of the CUDA Runtime API: since 13.0 without, in 12.8 and 12.9
with an argument `failIdx`; what is older, or a driver that is, gets one call a copy.

What only enqueues is called with the GIL. Each time that a thread gives it away, one that runs an engine takes it, and
is asked to give it back after 5 ms (sys.getswitchinterval): beside vLLM on an H200 two buffers of 64 MiB took 2 to 3 ms
to be enqueued with some 25 such calls, and 0.4 ms where the engine had nothing to do.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

logger = logging.getLogger(__name__)

_SUCCESS: Final = 0
# cudaErrorInvalidValue is none of these: that is a fault of ours, not of the platform.
_NO_SUCH_CALL: Final = (35, 36, 801)  # InsufficientDriver, CallRequiresNewerDriver, NotSupported
_BATCH_SINCE: Final = 12080
_BATCH_WITHOUT_FAIL_INDEX_SINCE: Final = 13000
_KIND_BY_ADDRESS: Final = 4  # cudaMemcpyDefault
_STREAM_ORDER: Final = 1  # cudaMemcpySrcAccessOrderStream
_UNREGISTERED: Final = 0  # cudaMemoryTypeUnregistered
_DEVICE: Final = 2  # cudaMemoryTypeDevice
_NOT_READY: Final = 600  # cudaErrorNotReady
_NO_TIMING: Final = 2  # cudaEventDisableTiming
_HELD_COPIES_MAX: Final = 256
"""So many copies are listed within some 50 us; the GIL is given away for more."""


class CudaError(RuntimeError):
    """A call of the runtime failed; its words say which and how."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes; the locations are hints for managed memory, and none."""

    _fields_ = (
        ("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint),
    )  # fmt: skip


class _PointerAttributes(ctypes.Structure):
    """cudaPointerAttributes; CUDA 13 has reserved words behind it."""

    _fields_ = (
        ("type", ctypes.c_int), ("device", ctypes.c_int), ("on_device", ctypes.c_void_p),
        ("on_host", ctypes.c_void_p), ("reserved", ctypes.c_long * 16),
    )  # fmt: skip


class CudaRuntime:
    """Copies by address, and events by handle, on the calling thread's current device. `library` is called without the
    GIL, `held`, the same one, with it: by default the former is for both."""

    def __init__(self, library: Any, held: Any = None) -> None:
        self._library = library
        self._held = held = library if held is None else held
        for each in (library, held):
            each.cudaGetErrorString.restype = ctypes.c_char_p
            pointer, size = ctypes.c_void_p, ctypes.c_size_t
            each.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
        version = ctypes.c_int(0)
        self._check(library.cudaRuntimeGetVersion(ctypes.byref(version)), "cudaRuntimeGetVersion")
        has_fail_index = version.value < _BATCH_WITHOUT_FAIL_INDEX_SINCE
        self._fail_index = [ctypes.byref(ctypes.c_size_t(0))] * has_fail_index
        self._attributes = (_CopyAttributes * 1)(_CopyAttributes(order=_STREAM_ORDER))
        self._first = (ctypes.c_size_t * 1)(0)
        self._batch: tuple[Any, Any] | None = None
        """Without the GIL, and with it."""
        if version.value >= _BATCH_SINCE and hasattr(library, "cudaMemcpyBatchAsync"):
            self._batch = library.cudaMemcpyBatchAsync, held.cudaMemcpyBatchAsync
            for batch in self._batch:
                batch.argtypes = [
                    *[pointer] * 3, size, pointer, pointer, size, *[pointer] * has_fail_index, pointer,
                ]  # fmt: skip

    @property
    def batches(self) -> bool:
        """Whether many copies are one call."""
        return self._batch is not None

    def copy(
        self, targets: Sequence[int], sources: Sequence[int], nbytes: Sequence[int], stream: int, *, batch: bool
    ) -> None:
        """Enqueue copies, in no particular order, on a stream, which must not be the legacy default stream. With
        `batch` all are one call where there is such a call: their host memory must be page-locked then. Raises
        CudaError; what had been enqueued before goes on."""
        batched = self._batch  # once: another thread may find out meanwhile that there is none
        if batch and batched is not None and len(targets) > 1:
            arrays = [np.array(column, np.uint64) for column in (targets, sources, nbytes)]
            code = batched[len(targets) <= _HELD_COPIES_MAX](
                *[array.ctypes.data for array in arrays], len(targets),
                ctypes.byref(self._attributes), ctypes.byref(self._first), 1, *self._fail_index, stream,
            )  # fmt: skip
            if code not in _NO_SUCH_CALL:
                self._check(code, "cudaMemcpyBatchAsync")
                return
            self._library.cudaGetLastError()  # or torch would find it at its next call
            logger.info("the GPU's driver has no cudaMemcpyBatchAsync (error %d): one call a copy", code)
            self._batch = None
        library = self._held if batch and len(targets) == 1 else self._library
        for target, source, size in zip(targets, sources, nbytes, strict=True):
            code = library.cudaMemcpyAsync(target, source, size, _KIND_BY_ADDRESS, stream)
            self._check(code, "cudaMemcpyAsync")

    def copy_one(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue one copy, whose host memory is page-locked. Raises CudaError."""
        self.copy([target], [source], [nbytes], stream, batch=True)

    def event(self) -> int:
        """Make an event without a time. Raises CudaError."""
        made = ctypes.c_void_p()
        self._check(self._held.cudaEventCreateWithFlags(ctypes.byref(made), _NO_TIMING), "cudaEventCreateWithFlags")
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        """Have an event mark what the stream has been given until now. Raises CudaError."""
        self._check(self._held.cudaEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream)), "cudaEventRecord")

    def wait(self, stream: int, event: int) -> None:
        """Let what the stream is given from now on come behind what the event marks now. Raises CudaError."""
        code = self._held.cudaStreamWaitEvent(ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)
        self._check(code, "cudaStreamWaitEvent")

    def query(self, event: int) -> bool:
        """Whether an event has been passed. Raises CudaError, also of what failed before it."""
        code = self._held.cudaEventQuery(ctypes.c_void_p(event))
        if code == _NOT_READY:
            self._held.cudaGetLastError()
            return False
        self._check(code, "cudaEventQuery")
        return True

    def synchronize(self, event: int) -> None:
        """Block until an event has been passed. Raises CudaError."""
        self._check(self._library.cudaEventSynchronize(ctypes.c_void_p(event)), "cudaEventSynchronize")

    def page_locked(self, address: int) -> bool:
        """Whether the driver knows the memory there, page-locked or a GPU's, so that copies run by themselves and at
        full speed."""
        return self._memory_type(address) != _UNREGISTERED

    def on_gpu(self, address: int) -> bool:
        """Whether the memory there is a GPU's."""
        return self._memory_type(address) == _DEVICE

    def _memory_type(self, address: int) -> int:
        found = _PointerAttributes()
        code = self._held.cudaPointerGetAttributes(ctypes.byref(found), ctypes.c_void_p(address))
        if code != _SUCCESS:
            self._library.cudaGetLastError()
            return _UNREGISTERED
        return int(found.type)

    def _check(self, code: int, call: str) -> None:
        if code != _SUCCESS:
            self._library.cudaGetLastError()
            words = self._library.cudaGetErrorString(code)
            raise CudaError(f"{call}: error {code}, {words.decode() if words else 'unknown'}")


def cuda_runtime() -> CudaRuntime | None:
    """The libcudart that torch has loaded; None, and a line in the log, where it is linked in another way."""
    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libcudart.so.{major}"
    try:
        # By its soname the loader gives the one that this process has, wherever it lies.
        return CudaRuntime(ctypes.CDLL(name), ctypes.PyDLL(name))
    except (OSError, AttributeError, CudaError) as error:
        logger.info("no CUDA runtime to call (%s): torch copies instead, one call a copy", error)
        return None
