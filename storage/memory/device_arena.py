"""Memory of a GPU that processes share: made by one, mapped by others on their own GPUs, addressed by offset.

The driver's virtual memory API hands memory out as a file descriptor, which goes over a unix socket as the arena's
memfd does. A process that has it maps it for its own GPU and reads at the speed of the link between the two (measured
between two H200: 390 GB/s by copies, 365 by a kernel, where host memory gives 52), also when CUDA_VISIBLE_DEVICES hides
the GPU that it lies on. Each process that maps it may write to it. It lives as long as a process has it: a client reads
on after its owner's end, and the driver takes it back when the last one lets go, or dies.
"""

import ctypes
import os
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from kvredis.storage.errors import DeviceError

from .copy import View, address_of
from .cuda import HANDLE_POSIX, OUT_OF_MEMORY, STREAM_NON_BLOCKING, Device, check
from .memory_limits import gib


class DeviceArena:
    """`nbytes` of GPU memory at `address`, which is valid on the GPU `device` alone. Any thread may copy to and from
    it; a copy blocks its thread and leaves the interpreter to others."""

    def __init__(self, device: Device, handle: ctypes.c_ulonglong, nbytes: int) -> None:
        """Map memory that there is. Raises DeviceError."""
        driver, address = device.driver, ctypes.c_ulonglong()
        self.device = device
        self.nbytes = nbytes
        self._driver: Any = driver
        self._handle = handle
        self._streams = threading.local()
        self._all_streams: list[ctypes.c_void_p] = []
        self._is_open = True
        with device.current():
            size, zero = ctypes.c_size_t(nbytes), ctypes.c_ulonglong(0)
            code = driver.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero)
            check(driver, code, "cuMemAddressReserve")
            try:
                check(driver, driver.cuMemMap(address, size, ctypes.c_size_t(0), handle, zero), "cuMemMap")
                try:
                    access = device.access
                    code = driver.cuMemSetAccess(address, size, ctypes.byref(access), ctypes.c_size_t(1))
                    check(driver, code, f"GPU {device.number} has no access to it (cuMemSetAccess)")
                except BaseException:
                    driver.cuMemUnmap(address, size)
                    raise
            except BaseException:
                driver.cuMemAddressFree(address, size)
                raise
        self.address = int(address.value)

    @classmethod
    def create(cls, nbytes: int, number: int = 0, driver: Any = None) -> Self:
        """Take at least `nbytes` of GPU `number`, rounded up to what can be mapped. Raises DeviceError with one line
        that says what is missing: a driver, the GPU, memory, or a way to share it."""
        device = Device(number, driver)
        try:
            granularity = device.granularity_bytes
            size = -(-nbytes // granularity) * granularity
            handle, properties = ctypes.c_ulonglong(), device.properties
            with device.current():
                code = device.driver.cuMemCreate(
                    ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), ctypes.c_ulonglong(0)
                )
            if code == OUT_OF_MEMORY:
                free, total = device.free_bytes()
                raise DeviceError(f"GPU {number} has {gib(free)} of {gib(total)} free, {gib(size)} are wanted", code)
            check(device.driver, code, "cuMemCreate")
            return cls._over(device, handle, size)
        except BaseException:
            device.close()
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int, number: int = 0, driver: Any = None) -> Self:
        """Map memory that another process has made, for GPU `number` of this one. The descriptor stays the caller's,
        who may close it. Raises DeviceError, also when that GPU has no access to the other."""
        device = Device(number, driver)
        try:
            handle = ctypes.c_ulonglong()
            with device.current():
                code = device.driver.cuMemImportFromShareableHandle(
                    ctypes.byref(handle), ctypes.c_void_p(fd), HANDLE_POSIX
                )
            check(device.driver, code, "cuMemImportFromShareableHandle")
            return cls._over(device, handle, nbytes)
        except BaseException:
            device.close()
            raise

    @classmethod
    def _over(cls, device: Device, handle: ctypes.c_ulonglong, nbytes: int) -> Self:
        try:
            return cls(device, handle, nbytes)
        except BaseException:
            with device.current():
                device.driver.cuMemRelease(handle)
            raise

    def share(self) -> int:
        """A new descriptor for another process, which may read and write all of it; the caller closes it. Raises
        DeviceError."""
        fd = ctypes.c_int(-1)
        with self.device.current():
            code = self._driver.cuMemExportToShareableHandle(
                ctypes.byref(fd), self._handle, HANDLE_POSIX, ctypes.c_ulonglong(0)
            )
        check(self._driver, code, "cuMemExportToShareableHandle")
        os.set_inheritable(fd.value, False)
        return fd.value

    def read(self, offset: int, into: View) -> None:
        """Fill host memory with the bytes from `offset` on. Raises DeviceError when the GPU does not give them."""
        self.begin_read(offset, into)
        self.settle()

    def write(self, offset: int, out_of: View) -> None:
        """Lay the bytes of host memory down from `offset` on. Raises DeviceError when the GPU does not take them."""
        self.begin_write(offset, out_of)
        self.settle()

    def begin_read(self, offset: int, into: View) -> None:
        """As `read`, but the bytes have come when this thread has called `settle`. `into` stays until then; a copy to
        memory that is not page-locked is waited for at once (CUDA, "API synchronization behavior")."""
        address, nbytes = self._place(offset, into)
        self._begin("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(address_of(into)), address, nbytes)

    def begin_write(self, offset: int, out_of: View) -> None:
        """As `write`, but the bytes are there when this thread has called `settle`. `out_of` stays until then, where it
        is page-locked; else the driver has a copy."""
        address, nbytes = self._place(offset, out_of)
        self._begin("cuMemcpyHtoDAsync_v2", address, ctypes.c_void_p(address_of(out_of)), nbytes)

    def settle(self) -> None:
        """Wait for what this thread has begun; nothing where that is nothing. Raises DeviceError when the GPU has not
        done it."""
        if getattr(self._streams, "is_busy", False):
            self._streams.is_busy = False
            with self.device.current():
                code = self._driver.cuStreamSynchronize(self._streams.stream)
                check(self._driver, code, "cuStreamSynchronize")

    def answers(self) -> bool:
        """Whether the GPU still does what it is asked: one word of it is read."""
        try:
            self.read(0, bytearray(4))
        except DeviceError:
            return False
        return True

    def close(self) -> None:
        """Unmap it and let go of it; again is nothing. Other processes that have mapped it keep it."""
        if not self._is_open:
            return
        self._is_open = False
        size, address = ctypes.c_size_t(self.nbytes), ctypes.c_ulonglong(self.address)
        with suppress(DeviceError), self.device.current():  # of a GPU that is lost the driver has taken back all
            for stream in self._all_streams:
                self._driver.cuStreamDestroy_v2(stream)
            self._driver.cuMemUnmap(address, size)
            self._driver.cuMemAddressFree(address, size)
            self._driver.cuMemRelease(self._handle)
        self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _place(self, offset: int, view: View) -> tuple[ctypes.c_ulonglong, ctypes.c_size_t]:
        nbytes = memoryview(view).nbytes
        if not self._is_open:
            raise DeviceError("the GPU's memory has been given back")
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not in the {self.nbytes} of this memory")
        return ctypes.c_ulonglong(self.address + offset), ctypes.c_size_t(nbytes)

    def _begin(self, name: str, *args: Any) -> None:
        with self.device.current():
            stream = self._stream()
            self._streams.is_busy = True
            check(self._driver, getattr(self._driver, name)(*args, stream), name)

    def _stream(self) -> ctypes.c_void_p:
        """This thread's own stream: copies of several threads go on beside each other."""
        stream: ctypes.c_void_p | None = getattr(self._streams, "stream", None)
        if stream is None:
            stream = ctypes.c_void_p()
            check(self._driver, self._driver.cuStreamCreate(ctypes.byref(stream), STREAM_NON_BLOCKING), "a stream")
            self._streams.stream = stream
            self._all_streams.append(stream)
        return stream
