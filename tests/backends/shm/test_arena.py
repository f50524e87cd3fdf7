"""The mapping of a server's arena: one for all connections, read-only, gone with its last reader, known to the GPU."""

import ctypes
import gc
import os
import threading
from collections.abc import Iterator

import pytest

from kvredis.backends.shm import arena as module
from kvredis.backends.shm.arena import SharedArena, shared_arena
from kvredis.storage.errors import BackendError
from kvredis.storage.memory.arena import Arena, HugepageMode
from tests.storage.memory.test_page_lock import FakeDriver

from .lane_server import mapped

NBYTES = 1 << 20


@pytest.fixture
def theirs() -> Iterator[Arena]:
    """A server's arena, with something in it."""
    with Arena.create(NBYTES, HugepageMode.OFF) as arena:
        arena.view[:5] = b"block"
        yield arena


@pytest.fixture
def descriptor(theirs: Arena) -> Iterator[int]:
    """What comes with KV.ATTACH."""
    descriptor = theirs.share()
    yield descriptor
    os.close(descriptor)


def test_what_is_written_there_is_seen_here_and_cannot_be_written_here(theirs: Arena, descriptor: int) -> None:
    arena = SharedArena(descriptor, NBYTES)
    part = arena.part(0, 5)
    assert bytes(part) == b"block"
    theirs.view[:5] = b"later"
    assert bytes(part) == b"later"
    with pytest.raises(TypeError):
        part[0] = 0
    with pytest.raises(BackendError):
        arena.part(NBYTES - 4, 5)


def test_all_connections_to_one_server_share_a_mapping_that_goes_with_the_last_view(
    theirs: Arena, descriptor: int
) -> None:
    one, two = shared_arena("run", descriptor, NBYTES), shared_arena("run", descriptor, NBYTES)
    assert one is two
    assert shared_arena("another run", descriptor, NBYTES) is not one
    gc.collect()
    assert mapped() == 1
    view = two.part(0, 5)
    del one, two
    gc.collect()
    assert mapped() == 1, "a reader is left"
    assert bytes(view) == b"block"
    del view
    gc.collect()
    assert mapped() == 0
    assert bytes(shared_arena("run", descriptor, NBYTES).part(0, 5)) == b"block"


def test_the_gpu_is_told_of_read_only_memory_once_and_forgets_it_before_it_is_unmapped(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, registered = FakeDriver(), threading.Event()
    unregister, lock = driver.cuMemHostUnregister, SharedArena.lock

    def locked(arena: SharedArena) -> None:
        lock(arena, driver)
        registered.set()

    def unregistered(address: ctypes.c_void_p) -> int:
        assert address.value is not None
        assert ctypes.string_at(address.value, 5) == b"block", "still mapped"
        return unregister(address)

    monkeypatch.setattr(SharedArena, "lock", locked)
    monkeypatch.setattr(driver, "cuMemHostUnregister", unregistered)
    arena = shared_arena("run", descriptor, NBYTES, page_lock=True)
    assert shared_arena("run", descriptor, NBYTES, page_lock=True) is arena
    assert registered.wait(30)
    ((address, (nbytes, flags)),) = driver.registered.items()
    assert ctypes.string_at(address, 5) == b"block"
    assert nbytes == NBYTES
    assert flags == 0x01 | 0x02 | 0x08, "portable, mapped, and read-only: else the driver refuses"
    assert arena.page_locked == "cuda"
    del arena
    for thread in threading.enumerate():
        if thread.name == "kvredis page lock":
            thread.join()
    gc.collect()
    assert driver.registered == {}
    assert driver.retained == 0


@pytest.mark.parametrize("driver", [FakeDriver(devices=0), FakeDriver(register_code=801), None])
def test_memory_that_the_gpu_cannot_be_told_of_is_read_all_the_same(
    descriptor: int, driver: FakeDriver | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cuda_driver", lambda: None)
    arena = SharedArena(descriptor, NBYTES)
    arena.lock(driver)
    assert arena.page_locked == "no"
    assert bytes(arena.part(0, 5)) == b"block"
    assert driver is None or driver.retained == 0
