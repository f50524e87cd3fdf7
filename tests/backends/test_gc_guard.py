"""A load that its caller does not close and the garbage collector finds: it ends, and never in the middle of something
else."""

import gc
import threading
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

from kvredis.backends import base
from kvredis.backends.base import Backend
from kvredis.storage.store import Store

from .conftest import EXIT_S, Connect
from .fake_server import FakeServer, Shelf
from .local_disk import drain, open_local, put_away
from .tiered.layered_pair import open_layered
from .verbs import content, keys_of, put


class Knot:
    """Something in a reference cycle, as an exception is in that is kept by a frame of its own traceback."""

    def __init__(self, load: Generator[base.Lease | None, None, None]) -> None:
        self.load = load
        self.self = self


def forget_load(backend: Backend, keys: list[bytes]) -> None:
    """Begin a load, and leave it to the collector when the first block has come."""
    load = backend.load(keys)
    lease = next(load)
    assert lease is not None
    lease.release()
    Knot(load)


def collect_within(store: Store) -> None:
    """Collect garbage in a thread that holds the store's lock, as one that allocates there may do."""

    def collect() -> None:
        with store.lock:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(EXIT_S)
    assert not thread.is_alive(), "the end of the load waits for the lock that its own thread holds"


def test_a_load_from_disk_that_is_collected_while_the_store_is_locked_ends_with_the_next_question(
    tmp_path: Path,
) -> None:
    with closing(open_local(tmp_path)) as backend:
        keys = keys_of(4)
        put_away(backend, keys)
        forget_load(backend, keys)
        drain(backend)
        assert backend.store.leases
        collect_within(backend.store)
        assert backend.stats()["lookups"] == 1
        assert backend.store.leases == 0


def test_a_load_of_what_is_not_sent_that_is_collected_while_the_staging_is_locked_ends_with_the_next_question(
    fake: FakeServer, shelf: Shelf, connect: Connect, store: Store
) -> None:
    backend = connect(fake.url, timeout_s=60)
    keys = keys_of(3)
    assert all(put(backend, key, content(key)) for key in keys)
    forget_load(backend, keys)
    shelf.open.set()
    assert backend.flush() == 0
    assert store.reserved_bytes > 0  # what the load holds
    collect_within(store)
    assert backend.stats()["hits"] == 1
    assert store.reserved_bytes == 0


def test_a_load_over_two_tiers_that_is_collected_while_near_is_locked_ends_with_the_next_question(
    tmp_path: Path, fake: FakeServer
) -> None:
    with closing(open_layered(fake.url, blocks=16, disk=tmp_path / "disk")) as backend:
        keys = keys_of(4)
        put_away(backend.near, keys)
        forget_load(backend, keys)
        drain(backend.near)
        assert backend.near.store.leases
        collect_within(backend.near.store)
        assert backend.stats()["lookups"] == 1
        assert backend.near.store.leases == 0
