"""Memory that lies at more than one address, of the host and of a GPU: "virtual aliasing" in CUDA's programming guide.

A run of addresses is laid over pieces of memory, and a piece may be in many runs. So what a kernel reads in one go,
such as a layer's keys, can begin with a buffer that other layers read theirs from in turn, and go on with what is the
layer's own, and no kernel knows. What is written through one run is seen through another by whatever is begun after
the write is done.

On a GPU the driver's virtual memory does it (cuMemCreate, cuMemMap); on the host memfds and mmap do.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kvredis.storage.errors import ArenaError, DeviceError

from .cuda import OUT_OF_MEMORY, Device, check
from .memory_limits import gib
from .page_lock import c_library

_MAP_FIXED: Final = 0x10  # mman.h of Linux, which Python's mmap leaves out
_PROT_NONE: Final = 0x0
_FAILED: Final = ctypes.c_void_p(-1).value


class Piece:
    """`nbytes` of memory, which have an address only in a run. It is given back when neither it nor a run of it is
    referred to any more; `of` lives as long."""

    def __init__(self, handle: int, nbytes: int, give_back: Callable[[int], Any], of: object) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self._of = of
        weakref.finalize(self, give_back, handle).atexit = False  # the end of a process gives all back by itself


class Run:
    """`nbytes` from `address` on: its pieces, one behind the other. It is unmapped when nothing refers to it any more,
    so what uses the address refers to it; `of` lives as long."""

    def __init__(
        self, address: int, pieces: Sequence[Piece], unmap: Callable[[int, Sequence[int]], Any], of: object
    ) -> None:
        self.address = address
        self.pieces = tuple(pieces)
        self.nbytes = _total(pieces)
        self._of = of
        sizes = [piece.nbytes for piece in pieces]
        weakref.finalize(self, unmap, address, sizes).atexit = False


class HostPages:
    """Pieces and runs of the host's memory. Raises ArenaError where the kernel gives none."""

    granularity_bytes: Final = mmap.PAGESIZE
    """What a piece's size is a multiple of."""

    def __init__(self) -> None:
        self._library = c_library()
        size, number = ctypes.c_size_t, ctypes.c_int
        self._library.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_long]
        self._library.mmap.restype = ctypes.c_void_p
        self._library.munmap.argtypes = [ctypes.c_void_p, size]

    def piece(self, nbytes: int) -> Piece:
        """Take at least so many bytes, all of them 0."""
        size = rounded_up(nbytes, self.granularity_bytes)
        try:
            fd = os.memfd_create("kvredis-aliased", os.MFD_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"no memory that can be mapped twice: {error}") from error
        piece = Piece(fd, size, os.close, self)
        os.ftruncate(fd, size)
        return piece

    def run(self, pieces: Sequence[Piece]) -> Run:
        """Lay a run of addresses over them."""
        anywhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = self._mapped(None, _total(pieces), _PROT_NONE, anywhere, -1)
        munmap = self._library.munmap
        run = Run(address, pieces, lambda address, sizes: munmap(address, sum(sizes)), self)
        for piece in pieces:
            self._mapped(
                address, piece.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, piece.handle
            )
            address += piece.nbytes
        return run

    def _mapped(self, address: int | None, nbytes: int, access: int, flags: int, fd: int) -> int:
        found: int | None = self._library.mmap(address, nbytes, access, flags, fd, 0)
        if found is None or found == _FAILED:
            raise ArenaError(f"{gib(nbytes)} cannot be mapped: {os.strerror(ctypes.get_errno())}")
        return found


class DevicePages:
    """Pieces and runs of the memory of GPU `number`, which that GPU reads and writes. Raises DeviceError, in a line
    that says what is missing. Giving a run back waits until the GPU has done all that it was asked."""

    def __init__(self, number: int, driver: Any = None) -> None:
        self.device = device = Device(number, driver)
        self.granularity_bytes = device.granularity_bytes
        """What a piece's size is a multiple of: 2 MiB, as a rule."""
        weakref.finalize(self, device.close).atexit = False

    def piece(self, nbytes: int) -> Piece:
        """Take at least so many bytes."""
        device = self.device
        size = rounded_up(nbytes, self.granularity_bytes)
        handle, properties = ctypes.c_ulonglong(), device.properties
        with device.current():
            code = device.driver.cuMemCreate(
                ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), ctypes.c_ulonglong(0)
            )
        if code == OUT_OF_MEMORY:
            free, total = device.free_bytes()
            raise DeviceError(f"GPU {device.number} has {gib(free)} of {gib(total)} free, {gib(size)} are wanted", code)
        check(device.driver, code, "cuMemCreate")
        return Piece(int(handle.value), size, lambda handle: _release(device, handle), self)

    def run(self, pieces: Sequence[Piece]) -> Run:
        """Lay a run of addresses over them."""
        device, driver = self.device, self.device.driver
        address, nbytes, zero = ctypes.c_ulonglong(), ctypes.c_size_t(_total(pieces)), ctypes.c_ulonglong(0)
        with device.current():
            code = driver.cuMemAddressReserve(ctypes.byref(address), nbytes, ctypes.c_size_t(0), zero, zero)
            check(driver, code, "cuMemAddressReserve")
            mapped: list[int] = []
            try:
                for piece in pieces:
                    at, size = ctypes.c_ulonglong(address.value + sum(mapped)), ctypes.c_size_t(piece.nbytes)
                    code = driver.cuMemMap(at, size, ctypes.c_size_t(0), ctypes.c_ulonglong(piece.handle), zero)
                    check(driver, code, "cuMemMap")
                    mapped.append(piece.nbytes)
                access = device.access
                code = driver.cuMemSetAccess(address, nbytes, ctypes.byref(access), ctypes.c_size_t(1))
                check(driver, code, "cuMemSetAccess")
            except BaseException:
                _unmap(device, address.value, mapped, nbytes.value)
                raise
        return Run(address.value, pieces, lambda address, sizes: _unmap(device, address, sizes, sum(sizes)), self)


def rounded_up(nbytes: int, granularity_bytes: int) -> int:
    """Give the least multiple of the granularity that has so many bytes, and at least one."""
    return max(-(-nbytes // granularity_bytes), 1) * granularity_bytes


def _total(pieces: Sequence[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)


def _release(device: Device, handle: int) -> None:
    with suppress(DeviceError), device.current():  # of a GPU that is lost the driver has taken back all
        device.driver.cuMemRelease(ctypes.c_ulonglong(handle))


def _unmap(device: Device, address: int, mapped: Sequence[int], reserved: int) -> None:
    with suppress(DeviceError), device.current():
        device.driver.cuCtxSynchronize()
        start = address
        for size in mapped:  # each as it was mapped: the driver takes no other ranges
            device.driver.cuMemUnmap(ctypes.c_ulonglong(start), ctypes.c_size_t(size))
            start += size
        device.driver.cuMemAddressFree(ctypes.c_ulonglong(address), ctypes.c_size_t(reserved))
