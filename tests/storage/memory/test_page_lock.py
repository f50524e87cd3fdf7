"""Page-locking against a fake CUDA driver and a fake C library, and mlock for real where it is allowed."""

import ctypes
import errno
import logging
import mmap
from typing import Any

import pytest

from kvredis.storage.memory.page_lock import c_library, lock_pages

ADDRESS, NBYTES = 0x10000, 1 << 20


class FakeDriver:
    """Speaks the part of the CUDA driver API that we use; keeps what is registered and retained."""

    def __init__(self, devices: int = 1, register_code: int = 0, init_code: int = 0, active: int | None = None) -> None:
        self.devices, self.register_code, self.init_code, self.active = devices, register_code, init_code, active
        self.registered: dict[int, tuple[int, int]] = {}
        self.retained = 0
        self.retained_of: list[int] = []
        self.current: list[int | None] = []

    def cuInit(self, flags: int) -> int:  # noqa: N802  the names are CUDA's
        return self.init_code

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.devices
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:  # noqa: N802
        active._obj.value = device.value == self.active
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        self.retained += 1
        self.retained_of.append(device.value)
        context._obj.value = 0xC0
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:  # noqa: N802
        self.retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.current.pop()
        return 0

    def cuMemHostRegister_v2(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t, flags: int) -> int:  # noqa: N802
        assert self.current == [0xC0], "registered in the primary context"
        if self.register_code == 0 and address.value is not None:
            self.registered[address.value] = (nbytes.value, flags)
        return self.register_code

    def cuMemHostUnregister(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        assert self.current == [0xC0]
        assert address.value is not None
        del self.registered[address.value]
        return 0


class FakeLibc:
    """mlock that succeeds up to a number of bytes and then fails with an errno."""

    def __init__(self, code: int = 0, bytes_max: int = 0) -> None:
        self.code = code
        self.bytes_max = bytes_max
        self.locked: dict[int, int] = {}

    def mlock(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t) -> int:
        if self.code and sum(self.locked.values()) + nbytes.value > self.bytes_max:
            ctypes.set_errno(self.code)
            return -1
        assert address.value is not None
        self.locked[address.value] = nbytes.value
        return 0

    def munlock(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t) -> int:
        assert address.value is not None
        inside = range(address.value, address.value + nbytes.value)
        self.locked = {start: length for start, length in self.locked.items() if start not in inside}
        return 0


def test_a_gpu_gets_the_pages_registered_in_its_primary_context() -> None:
    driver, libc = FakeDriver(), FakeLibc()
    lock = lock_pages(ADDRESS, NBYTES, driver, libc)
    assert lock is not None
    assert lock.name == "cuda"
    assert driver.registered == {ADDRESS: (NBYTES, 3)}
    assert (driver.retained, driver.current, libc.locked) == (1, [], {})
    lock.release()
    lock.release()
    assert (driver.registered, driver.retained, driver.current) == ({}, 0, [])


@pytest.mark.parametrize(("active", "expected"), [(None, 0), (0, 0), (3, 3)])
def test_the_context_is_that_of_the_gpu_which_the_process_uses_already(active: int | None, expected: int) -> None:
    driver = FakeDriver(devices=4, active=active)
    lock = lock_pages(ADDRESS, NBYTES, driver, FakeLibc())
    assert lock is not None
    assert driver.retained_of == [expected]
    lock.release()
    assert driver.retained == 0


@pytest.mark.parametrize("driver", [FakeDriver(register_code=2), FakeDriver(init_code=100)])
def test_a_driver_that_refuses_falls_back_to_mlock_with_one_warning(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    libc = FakeLibc()
    lock = lock_pages(ADDRESS, NBYTES, driver, libc)
    assert lock is not None
    assert lock.name == "mlock"
    assert (driver.registered, driver.retained, driver.current) == ({}, 0, [])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    lock.release()
    assert libc.locked == {}


def test_a_driver_without_a_device_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    lock = lock_pages(ADDRESS, NBYTES, FakeDriver(devices=0), FakeLibc())
    assert lock is not None
    assert lock.name == "mlock"
    assert caplog.records == []
    lock.release()


def test_when_mlock_is_refused_one_warning_says_what_to_change(caplog: pytest.LogCaptureFixture) -> None:
    assert lock_pages(ADDRESS, NBYTES, FakeDriver(devices=0), FakeLibc(errno.ENOMEM)) is None
    assert len(caplog.records) == 1
    text = caplog.text
    assert "RLIMIT_MEMLOCK" in text
    assert "1024 KiB are needed" in text
    assert "Cannot allocate memory" in text


def test_a_large_arena_is_locked_in_steps_that_add_up() -> None:
    libc, nbytes = FakeLibc(), 1000 * NBYTES + 4096
    lock = lock_pages(ADDRESS, nbytes, FakeDriver(devices=0), libc)
    assert lock is not None
    assert sum(libc.locked.values()) == nbytes
    assert len(libc.locked) > 1
    starts = sorted(libc.locked)
    assert [start + libc.locked[start] for start in starts] == [*starts[1:], ADDRESS + nbytes], "no gap, no overlap"
    lock.release()
    assert libc.locked == {}


def test_a_lock_that_ends_half_way_is_let_go_of(caplog: pytest.LogCaptureFixture) -> None:
    libc = FakeLibc(errno.ENOMEM, bytes_max=600 * NBYTES)
    assert lock_pages(ADDRESS, 1000 * NBYTES, FakeDriver(devices=0), libc) is None
    assert libc.locked == {}
    assert len(caplog.records) == 1


def test_the_real_mlock_holds_and_lets_go() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        lock = lock_pages(address, mmap.PAGESIZE, FakeDriver(devices=0), c_library())
        if lock is None:
            pytest.skip("mlock: not even one page may be locked here")
        assert lock.name == "mlock"
        lock.release()
