"""The NVIDIA driver's library, libcuda, by ctypes: the calls and constants that kvredis uses, as cuda.h of CUDA 12 has
them. No torch, no CUDA toolkit: the driver alone.

Every call returns a CUresult, 0 being success, and runs without the interpreter's lock. KVREDIS_LIBCUDA in the
environment names another library that has these calls; tests name one of their own, which needs no GPU.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvredis.storage.errors import DeviceError

LIBRARY: Final = "libcuda.so.1"
LIBRARY_VARIABLE: Final = "KVREDIS_LIBCUDA"

SUCCESS: Final = 0
OUT_OF_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY

ATTRIBUTE_VIRTUAL_MEMORY: Final = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
ATTRIBUTE_POSIX_HANDLE: Final = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
HANDLE_POSIX: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
STREAM_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream
_ALLOCATION_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, the only type there is
_LOCATION_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_ACCESS_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_GRANULARITY_MINIMUM: Final = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp, its allocFlags spelled out."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def cuda_driver() -> Any:
    """Load the NVIDIA driver's library, or None on a machine without one."""
    try:
        return ctypes.CDLL(os.environ.get(LIBRARY_VARIABLE) or LIBRARY)
    except OSError:
        return None


def check(driver: Any, code: int, what: str) -> None:
    """Raise DeviceError, in the driver's own words, unless a call has succeeded."""
    if code != SUCCESS:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise DeviceError(f"{what}: {(text.value or b'unknown error').decode()} ({code})", code)


class Device:
    """One GPU, by its number among those that this process sees, and its primary context, which a GPU framework in the
    same process shares. The context takes about half a GiB of the GPU, and half a second to make."""

    def __init__(self, number: int, driver: Any = None) -> None:
        """Raises DeviceError, which says in one line what is missing. `driver` defaults to this machine's."""
        driver = cuda_driver() if driver is None else driver
        if driver is None:
            raise DeviceError(f"no CUDA driver ({os.environ.get(LIBRARY_VARIABLE) or LIBRARY})")
        self.driver = driver
        self.number = number
        self._handle, self._context, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        check(driver, driver.cuInit(0), "cuInit")
        check(driver, driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        if not 0 <= number < count.value:
            raise DeviceError(f"no GPU {number}: this process sees {count.value}")
        check(driver, driver.cuDeviceGet(ctypes.byref(self._handle), number), "cuDeviceGet")
        for attribute, what in (
            (ATTRIBUTE_VIRTUAL_MEMORY, "cannot map memory (virtual memory management)"),
            (ATTRIBUTE_POSIX_HANDLE, "cannot share memory by file descriptors"),
        ):
            supported = ctypes.c_int()
            code = driver.cuDeviceGetAttribute(ctypes.byref(supported), attribute, self._handle)
            if code != SUCCESS or not supported.value:
                raise DeviceError(f"GPU {number} {what}")
        raw = (ctypes.c_ubyte * 16)()
        check(driver, driver.cuDeviceGetUuid(raw, self._handle), "cuDeviceGetUuid")
        digits = bytes(raw).hex()
        self.uuid = f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
        """What names the GPU on this host whichever GPUs a process sees, as nvidia-smi writes it."""
        self.granularity_bytes = self._granularity()
        """What the size of memory that can be mapped is a multiple of: 2 MiB, as a rule."""
        check(
            driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self._handle), f"context of {number}"
        )

    @property
    def properties(self) -> AllocationProperties:
        """What memory is asked for: on this GPU, to be shared by a file descriptor."""
        return AllocationProperties(_ALLOCATION_PINNED, HANDLE_POSIX, Location(_LOCATION_DEVICE, self.number))

    @property
    def access(self) -> Access:
        """What this GPU may do with mapped memory: read and write."""
        return Access(Location(_LOCATION_DEVICE, self.number), _ACCESS_READ_WRITE)

    def free_bytes(self) -> tuple[int, int]:
        """How much of its memory is free, and how much it has."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.current():
            check(self.driver, self.driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
        return int(free.value), int(total.value)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The context as this thread's, and afterwards the one that was."""
        check(self.driver, self.driver.cuCtxPushCurrent_v2(self._context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def close(self) -> None:
        """Let go of the context; again is nothing."""
        context, self._context = self._context, ctypes.c_void_p()
        if context.value is not None:
            self.driver.cuDevicePrimaryCtxRelease_v2(self._handle)

    def _granularity(self) -> int:
        found, properties = ctypes.c_size_t(), self.properties
        code = self.driver.cuMemGetAllocationGranularity(
            ctypes.byref(found), ctypes.byref(properties), _GRANULARITY_MINIMUM
        )
        check(self.driver, code, "cuMemGetAllocationGranularity")
        return int(found.value)
