"""Several clients at a store whose disk has threads of its own: a reader gets what it wrote last, or nothing where
blocks may be lost; no client waits for ever, and in the end all agrees.

Each client writes keys of its own and reads all. A value's first bytes tell its number, so that a reader knows what the
rest must be.
"""

import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from kvredis.storage.disk.tier import DiskOptions
from kvredis.storage.entry import Lease
from kvredis.storage.memory.arena import HugepageMode
from kvredis.storage.options import StoreOptions
from kvredis.storage.store import Store
from kvredis.storage.tiering.manager import Bringing, Tiering
from tests.storage.small_store import content

MIB: Final = 1024 * 1024
CLIENTS: Final = 4
KEYS: Final = 24
"""Of each client."""
VERSIONS: Final = 40
OPERATIONS: Final = 700
LONGEST_WAIT_S: Final = 60.0

NUMBERS: Final = {content(number, 16): number for number in range(CLIENTS * KEYS * VERSIONS)}


@dataclass(frozen=True, slots=True)
class Terrain:
    """What kind of store it is; with `lossless` nothing may be missing in the end."""

    policy: str = "LRU"
    keep: bool = True
    disk_bytes: int = 64 * MIB
    lossless: bool = True
    io_threads: int = 3


def open_store(directory: Path, terrain: Terrain) -> Store:
    disk = DiskOptions(directory, terrain.disk_bytes, False, 2 * MIB)
    return Store.open(
        StoreOptions(MIB, HugepageMode.OFF, terrain.policy, disk=disk, keep=terrain.keep, io_threads=terrain.io_threads)
    )


class Client(threading.Thread):
    """One client, with what it has written last under each of its keys."""

    def __init__(self, number: int, store: Store, terrain: Terrain) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.number = number
        self.store = store
        self.terrain = terrain
        self.rng = random.Random(number)
        self.model: dict[bytes, int] = {}
        self.versions = dict.fromkeys(range(KEYS), 0)
        self.read_own = 0
        self.error: BaseException | None = None

    @property
    def tiering(self) -> Tiering:
        assert self.store.tiering is not None
        return self.store.tiering

    def run(self) -> None:
        steps = [self.write] * 5 + [self.read] * 8 + [self.delete, self.rename, self.prefetch, self.save, self.look]
        try:
            for _ in range(OPERATIONS):
                self.rng.choice(steps)()
        except BaseException as error:
            self.error = error

    def key(self, number: int | None = None) -> bytes:
        return b"%d:%d" % (self.number, self.rng.randrange(KEYS) if number is None else number)

    def write(self) -> None:
        at = self.rng.randrange(KEYS)
        self.versions[at] = (self.versions[at] + 1) % VERSIONS
        number = (self.number * KEYS + at) * VERSIONS + self.versions[at]
        data = content(number, int(1000 * 200 ** self.rng.random()))
        room = None
        while room is None:
            room = self.store.reserve(self.key(at), len(data), drop=not self.terrain.lossless)
            if room is None:
                self.tiering.wait_for_room(0.01)
        room.view[:] = data
        room.commit()
        self.model[self.key(at)] = number

    def read(self) -> None:
        """Any key; of our own we know what it must be."""
        own = self.rng.random() < 0.6
        key = self.key() if own else b"%d:%d" % (self.rng.randrange(CLIENTS), self.rng.randrange(KEYS))
        found = self.get(key)
        if found is not None:
            number = NUMBERS[found[:16]]
            assert found == content(number, len(found)), "bytes of several blocks"
        if own:
            self.read_own += found is not None
            expected = self.model.get(key)
            assert found is not None or expected is None or not self.terrain.lossless, f"{key!r} was lost"
            assert found is None or NUMBERS[found[:16]] == expected, f"{key!r} is an older one, or another's"

    def get(self, key: bytes) -> bytes | None:
        """As a server does: bring, ask again when there was no room, read."""
        while True:
            come = threading.Event()
            bringing: Bringing | None = self.tiering.bring([(key, 0)], lambda _, come=come: come.set())  # type: ignore[misc]
            try:
                if bringing is not None:
                    assert come.wait(LONGEST_WAIT_S), "no client was told"
                found = self.store.fetch(key)
                if isinstance(found, Lease):
                    with found:
                        return bytes(found.view)
                if found is not None:
                    return found
                entry = self.store.find(key)
                if entry is None:
                    return None
            finally:
                if bringing is not None:
                    bringing.release()

    def delete(self) -> None:
        key = self.key()
        self.store.delete([key])
        self.model.pop(key, None)

    def rename(self) -> None:
        """Rename to another of our names, for any reader; only we know what it was."""
        old = self.key()
        if old in self.model and self.store.move((old, 0), (b"renamed", self.number + 1)):
            self.store.move((b"renamed", self.number + 1), (old, 0))

    def prefetch(self) -> None:
        job = self.tiering.prefetch([self.key(number) for number in range(KEYS)])
        if job is not None and self.rng.random() < 0.3:
            job.cancel()

    def save(self) -> None:
        saved = threading.Event()
        self.tiering.saving.save(self.rng.choice((0, self.store.writes)), lambda _: saved.set())
        assert saved.wait(LONGEST_WAIT_S), "no client was told"

    def look(self) -> None:
        """What the server's loop does beside."""
        self.store.match([self.key(number) for number in range(KEYS)])
        self.store.collect_expired()
        self.tiering.tick()


@pytest.mark.parametrize(
    "terrain",
    [
        Terrain(),
        Terrain(keep=False),
        Terrain("MRU", io_threads=1),
        Terrain("LFU", disk_bytes=2 * MIB, lossless=False),
        Terrain("S3FIFO", lossless=False),
    ],
    ids=str,
)
def test_many_clients_and_the_threads_of_a_disk_agree(tmp_path: Path, terrain: Terrain) -> None:
    store = open_store(tmp_path, terrain)
    clients = [Client(number, store, terrain) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(LONGEST_WAIT_S)
    assert [client.error for client in clients] == [None] * CLIENTS
    assert not any(client.is_alive() for client in clients), "a client waits for ever"
    tiering = clients[0].tiering
    assert tiering.io.drain(LONGEST_WAIT_S)
    store.check_integrity()
    tiering.disk.check_integrity()
    assert store.leases == store.reserved_bytes == store.retired_bytes == tiering._listed_bytes == 0
    assert tiering.disk.stats.quarantined == 0
    assert tiering.stats.promoted > 0
    assert min(client.read_own for client in clients) > 0
    if terrain.lossless:
        assert store.stats.evicted == tiering.stats.lost == 0
        assert len(store.index) == sum(len(client.model) for client in clients)
    store.close()

    store = open_store(tmp_path, terrain)
    for client in clients:
        client.store = store
        for key, number in client.model.items():
            found = client.get(key)
            assert found is not None or not terrain.lossless
            assert found is None or (NUMBERS[found[:16]] == number and found == content(number, len(found)))
    store.close(save=False)
