"""Page-locking ("pinning") for a GPU's copy engine, and for nothing else: it never means "do not evict".

A copy between a GPU and pageable memory goes through the driver's own staging and reaches a sixth of PCIe; from
registered memory it reaches 99 %. cudaHostRegister is cuMemHostRegister in the device's primary context, so the driver
library is enough and the server needs no torch. A GPU framework in the same process shares that context and sees the
memory as pinned. Without a GPU, mlock at least keeps the pages from being swapped out.
"""

import ctypes
import logging
import os
import resource
from typing import Any, Protocol

from .cuda import SUCCESS as _SUCCESS
from .cuda import cuda_driver

log = logging.getLogger(__name__)

# cuda.h: CU_MEMHOSTREGISTER_PORTABLE (pinned for every context of the process) | CU_MEMHOSTREGISTER_DEVICEMAP.
_REGISTER_FLAGS = 0x01 | 0x02
_READ_ONLY = 0x08  # CU_MEMHOSTREGISTER_READ_ONLY: without it memory that is mapped to be read alone is refused
# One mlock call holds the process's memory map while it walks the pages; short ones let serving threads in between.
_MLOCK_STEP_BYTES = 64 * 1024 * 1024


class PageLock(Protocol):
    """A hold on page-locked memory; `release` gives it back and may be called twice."""

    name: str

    def release(self) -> None:
        """Unlock the pages."""
        ...


class CudaLock:
    """`nbytes` at `address` registered with the CUDA driver; it holds a device's primary context meanwhile. Registered
    memory is every context's, so any device will do: one that this process uses already, because a context of its own
    on another takes half a GiB of that one (a worker of tensor parallelism sees all GPUs and uses one)."""

    name = "cuda"

    def __init__(self, driver: Any, device: int, context: ctypes.c_void_p, address: int) -> None:
        self._driver = driver
        self._device = device
        self._context = context
        self._address: int | None = address

    @classmethod
    def take(cls, address: int, nbytes: int, driver: Any, read_only: bool = False) -> "CudaLock | str":
        """Register the memory, or say in one line why the driver would not. Blocks while untouched pages fault in.
        `read_only` memory can be copied from only."""
        flags = _REGISTER_FLAGS | (_READ_ONLY if read_only else 0)
        count, device, context = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_void_p()
        if (code := driver.cuInit(0)) != _SUCCESS:
            return f"cuInit: error {code}"
        if driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS or count.value < 1:
            return "no CUDA device"
        if (code := _device_in_use(driver, count.value, device)) != _SUCCESS:
            return f"cuDeviceGet: error {code}"
        if (code := driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)) != _SUCCESS:
            return f"cuDevicePrimaryCtxRetain: error {code}"
        lock = cls(driver, device.value, context, address)
        code = lock._in_context(
            lambda: driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags)
        )
        if code == _SUCCESS:
            return lock
        lock._address = None
        driver.cuDevicePrimaryCtxRelease_v2(device)
        return f"cuMemHostRegister: error {code}"

    def release(self) -> None:
        """Unregister; copies still in flight from this memory are the caller's to have waited for."""
        address, self._address = self._address, None
        if address is None:
            return
        code = self._in_context(lambda: self._driver.cuMemHostUnregister(ctypes.c_void_p(address)))
        if code != _SUCCESS:
            log.warning("cuMemHostUnregister: error %d", code)
        self._driver.cuDevicePrimaryCtxRelease_v2(ctypes.c_int(self._device))

    def _in_context(self, call: Any) -> int:
        """Run a driver call with our context current on this thread, and put back what was current before."""
        if (code := int(self._driver.cuCtxPushCurrent_v2(self._context))) != _SUCCESS:
            return code
        try:
            return int(call())
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _device_in_use(driver: Any, count: int, device: ctypes.c_int) -> int:
    """Make `device` the first of `count` whose primary context exists, the first of all if none does; a CUresult."""
    flags, is_active = ctypes.c_uint(0), ctypes.c_int(0)
    for ordinal in range(count):
        if (code := int(driver.cuDeviceGet(ctypes.byref(device), ordinal))) != _SUCCESS:
            return code
        code = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
        if code == _SUCCESS and is_active.value:
            return _SUCCESS
    return int(driver.cuDeviceGet(ctypes.byref(device), 0))


class MemoryLock:
    """`nbytes` at `address` locked with mlock(2): never swapped, of no help to a GPU."""

    name = "mlock"

    def __init__(self, libc: Any, address: int, nbytes: int) -> None:
        self._libc = libc
        self._range: tuple[int, int] | None = (address, nbytes)

    @classmethod
    def take(cls, address: int, nbytes: int, libc: Any) -> "MemoryLock | str":
        """Lock the pages, or say in one line why the kernel would not. Blocks while untouched pages fault in."""
        lock = cls(libc, address, nbytes)
        for start in range(address, address + nbytes, _MLOCK_STEP_BYTES):
            step = min(_MLOCK_STEP_BYTES, address + nbytes - start)
            if libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(step)) != 0:
                reason = os.strerror(ctypes.get_errno())
                lock.release()
                return f"mlock: {reason}"
        return lock

    def release(self) -> None:
        """Unlock the pages."""
        held, self._range = self._range, None
        if held is not None:
            self._libc.munlock(ctypes.c_void_p(held[0]), ctypes.c_size_t(held[1]))


def lock_pages(address: int, nbytes: int, driver: Any = None, libc: Any = None) -> PageLock | None:
    """Page-lock `nbytes` at `address` for a GPU if there is one, else against swapping; None if neither may be.

    Says once, as a warning, what was not to be had and what would change it. The bytes stay the caller's, who calls
    `release` before unmapping them. `driver` and `libc` default to this machine's libraries; tests hand in their own.
    """
    driver = cuda_driver() if driver is None else driver
    cuda = "no CUDA driver" if driver is None else CudaLock.take(address, nbytes, driver)
    if isinstance(cuda, CudaLock):
        return cuda
    memory = MemoryLock.take(address, nbytes, c_library() if libc is None else libc)
    if isinstance(memory, MemoryLock):
        if driver is not None and cuda != "no CUDA device":
            log.warning(
                "the arena is not registered with the GPU (%s): copies to it will be several times slower", cuda
            )
        return memory
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    log.warning(
        "the arena is not page-locked (%s; %s): RLIMIT_MEMLOCK is %s and %d KiB are needed. "
        "Raise it (ulimit -l, LimitMEMLOCK=) or pass --no-page-lock",
        cuda,
        memory,
        "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB",
        nbytes // 1024,
    )
    return None


def c_library() -> Any:
    """Give the C library of this process; its calls run without the GIL and leave errno for ctypes.get_errno."""
    return ctypes.CDLL(None, use_errno=True)
