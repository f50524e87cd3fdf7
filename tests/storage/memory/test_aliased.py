"""Memory at more than one address: of the host, and of a GPU whose driver is stand_in_cuda.c, where bytes are real."""

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvredis.storage.errors import ArenaError, DeviceError
from kvredis.storage.memory import cuda
from kvredis.storage.memory.aliased import DevicePages, HostPages, Run
from kvredis.storage.memory.cuda import Device
from tests.stand_in_cuda import stand_in_cuda

Pages = HostPages | DevicePages
MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, str(stand_in_cuda()))


both = pytest.mark.parametrize("make", [HostPages, lambda: DevicePages(1)], ids=["host", "GPU"])


def written(run: Run, offset: int, value: bytes) -> None:
    ctypes.memmove(run.address + offset, value, len(value))


def read(run: Run, offset: int, nbytes: int) -> bytes:
    return ctypes.string_at(run.address + offset, nbytes)


@both
def test_what_is_written_through_one_run_is_read_through_another(make: Callable[[], Pages]) -> None:
    pages = make()
    shared, first, second = (pages.piece(pages.granularity_bytes) for _ in range(3))
    grain = shared.nbytes
    runs = [pages.run([shared, own]) for own in (first, second)]
    written(runs[0], grain - 3, b"abcdef")
    assert read(runs[1], grain - 3, 6) == b"abc\0\0\0"
    written(runs[1], grain, b"xyz")
    assert read(runs[0], grain - 3, 6) == b"abcdef"
    assert read(runs[1], grain - 3, 6) == b"abcxyz"


@both
def test_a_piece_is_a_multiple_of_the_granularity_and_has_what_was_asked_for(make: Callable[[], Pages]) -> None:
    pages = make()
    grain = pages.granularity_bytes
    assert [pages.piece(nbytes).nbytes for nbytes in (0, 1, grain, grain + 1)] == [grain, grain, grain, 2 * grain]
    assert pages.run([pages.piece(1), pages.piece(grain + 1)]).nbytes == 3 * grain


@both
def test_memory_is_kept_by_what_uses_it_and_then_given_back(make: Callable[[], Pages]) -> None:
    gc.collect()  # what earlier tests have left would go meanwhile
    open_before = len(os.listdir("/proc/self/fd"))
    maps_before = Path("/proc/self/maps").read_text().count("kvredis-aliased") + _stand_ins()
    pages = make()
    run = pages.run([pages.piece(1), pages.piece(1)])
    del pages
    gc.collect()
    written(run, 0, b"still there")
    assert read(run, 0, 11) == b"still there"
    del run
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert Path("/proc/self/maps").read_text().count("kvredis-aliased") + _stand_ins() == maps_before


def _stand_ins() -> int:
    return Path("/proc/self/maps").read_text().count("stand-in-gpu")


def test_a_gpu_that_has_not_so_much_says_how_much_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_CUDA_BYTES", str(4 * MIB))
    pages = DevicePages(0)
    held = pages.piece(2 * MIB)
    with pytest.raises(DeviceError, match=r"GPU 0 has 0\.00 GiB of 0\.00 GiB free, 0\.00 GiB are wanted"):
        pages.piece(4 * MIB)
    del held
    gc.collect()
    assert pages.piece(4 * MIB).nbytes == 4 * MIB


def test_a_run_that_the_gpu_may_not_use_leaves_nothing_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = DevicePages(0)
    before = _stand_ins()
    monkeypatch.setenv("STAND_IN_CUDA_NO_PEER", "1")
    with pytest.raises(DeviceError, match="cuMemSetAccess: peer access is not supported"):
        pages.run([pages.piece(1), pages.piece(1)])
    gc.collect()
    assert _stand_ins() == before


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, "/nowhere/libcuda.so")
    with pytest.raises(DeviceError, match="no CUDA driver"):
        DevicePages(0)


def test_addresses_that_the_kernel_does_not_give_are_an_error() -> None:
    pages = HostPages()
    piece = pages.piece(1)
    piece.nbytes = 1 << 62
    with pytest.raises(ArenaError, match="cannot be mapped"):
        pages.run([piece])


def test_the_context_is_given_back_with_the_last_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = Device.close

    def counted(device: Device) -> None:
        closed.append(device.number)
        close(device)

    monkeypatch.setattr(Device, "close", counted)
    pages = DevicePages(1)
    run = pages.run([pages.piece(1)])
    del pages
    gc.collect()
    assert not closed
    del run
    gc.collect()
    assert closed == [1]
