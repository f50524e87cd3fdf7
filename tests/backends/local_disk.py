"""A local backend over 1 MiB of memory and a disk, and the shortest ways to have blocks on that disk alone."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvredis.backends.local import LocalBackend
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.entry import PAYLOAD_OFFSET_BYTES, SLACK_BYTES
from kvredis.storage.tiering.manager import Tiering

from .conftest import small_store
from .verbs import content, put

LENGTH = 64 * 1024 - PAYLOAD_OFFSET_BYTES - SLACK_BYTES
FIT = 16
"""How many of them fill the arena, of which 4 are a quarter."""
DRAIN_S = 20


def open_local(
    directory: Path, *, keep: bool = True, spill_wait_s: float = 20.0, load_wait_s: float = 20.0
) -> LocalBackend:
    """A backend over 1 MiB of memory and 16 MiB of disk, with time enough for the disk."""
    store = small_store(1 << 20)
    disk = DiskTier.open(DiskOptions(directory, 16 << 20, direct=False, segment_bytes=1 << 20))
    store.add_disk(disk, io_threads=3, spill_wait_s=spill_wait_s, keep=keep)
    return LocalBackend(store, keep=keep, load_wait_s=load_wait_s)


def tiering_of(backend: LocalBackend) -> Tiering:
    assert backend.store.tiering is not None
    return backend.store.tiering


def drain(backend: LocalBackend) -> None:
    assert tiering_of(backend).io.drain(DRAIN_S)


def save(backend: LocalBackend) -> None:
    """Have everything on disk, in memory too or not."""
    over = threading.Event()
    tiering_of(backend).saving.save(0, lambda _: over.set())
    assert over.wait(DRAIN_S)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    """The one under test; at the end nothing is held."""
    with closing(open_local(tmp_path)) as backend:
        yield backend
        drain(backend)  # what is being written to disk is leased as well
        backend.store.check_integrity()
        assert backend.store.leases == 0
        assert backend.store.reserved_bytes == 0


def put_all(backend: LocalBackend, keys: list[bytes]) -> None:
    for key in keys:
        assert put(backend, key, content(key, LENGTH))


def put_away(backend: LocalBackend, keys: list[bytes]) -> None:
    """Store blocks, and others behind them that push them out to the disk, where all of them are in the end."""
    put_all(backend, keys)
    for number in range(FIT):
        drain(backend)  # so that the coldest are on disk, and it is they who leave
        put_all(backend, [b"other:%d" % number])
    save(backend)
    assert all(not resident(backend, key) for key in keys)


@contextmanager
def stuck_disk(backend: LocalBackend) -> Iterator[None]:
    """No job of the disk begins in here."""
    tiering_of(backend).io.pause()
    try:
        yield
    finally:
        tiering_of(backend).io.resume()


def resident(backend: LocalBackend, key: bytes) -> bool:
    entry = backend.store.find(key)
    assert entry is not None
    return entry.is_resident


def promoted(backend: LocalBackend) -> int:
    drain(backend)
    return tiering_of(backend).stats.promoted
