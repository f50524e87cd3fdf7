"""The CUDA runtime that torch has loaded, called for what torch has no door to: many copies in one call.

Measured on an H200: a cudaMemcpyAsync of half a megabyte leaves 2 us to the next one, a fifth of PCIe;
cudaMemcpyBatchAsync leaves none. Its signature is that of the CUDA Runtime API: since 13.0 without, in 12.8 and 12.9
with an argument `failIdx`; what is older, or a driver that is, gets one call a copy.
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
    """Copies by address. Calls run without the GIL, on the calling thread's current device."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaMemcpyAsync.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip
        version = ctypes.c_int(0)
        self._check(library.cudaRuntimeGetVersion(ctypes.byref(version)), "cudaRuntimeGetVersion")
        self._batch: Any = getattr(library, "cudaMemcpyBatchAsync", None) if version.value >= _BATCH_SINCE else None
        has_fail_index = version.value < _BATCH_WITHOUT_FAIL_INDEX_SINCE
        self._fail_index = [ctypes.byref(ctypes.c_size_t(0))] * has_fail_index
        self._attributes = (_CopyAttributes * 1)(_CopyAttributes(order=_STREAM_ORDER))
        self._first = (ctypes.c_size_t * 1)(0)
        if self._batch is not None:
            pointer, size = ctypes.c_void_p, ctypes.c_size_t
            self._batch.argtypes = [
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
            code = batched(
                *[array.ctypes.data for array in arrays], len(targets),
                ctypes.byref(self._attributes), ctypes.byref(self._first), 1, *self._fail_index, stream,
            )  # fmt: skip
            if code not in _NO_SUCH_CALL:
                self._check(code, "cudaMemcpyBatchAsync")
                return
            self._library.cudaGetLastError()  # or torch would find it at its next call
            logger.info("the GPU's driver has no cudaMemcpyBatchAsync (error %d): one call a copy", code)
            self._batch = None
        for target, source, size in zip(targets, sources, nbytes, strict=True):
            self.copy_one(target, source, size, stream)

    def copy_one(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue one copy. Raises CudaError."""
        self._check(self._library.cudaMemcpyAsync(target, source, nbytes, _KIND_BY_ADDRESS, stream), "cudaMemcpyAsync")

    def page_locked(self, address: int) -> bool:
        """Whether the driver knows the host memory there, so that copies run by themselves and at full speed."""
        found = _PointerAttributes()
        code = self._library.cudaPointerGetAttributes(ctypes.byref(found), ctypes.c_void_p(address))
        if code != _SUCCESS:
            self._library.cudaGetLastError()
            return False
        return bool(found.type != _UNREGISTERED)

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
        return CudaRuntime(ctypes.CDLL(name))
    except (OSError, AttributeError, CudaError) as error:
        logger.info("no CUDA runtime to call (%s): torch copies instead, one call a copy", error)
        return None
