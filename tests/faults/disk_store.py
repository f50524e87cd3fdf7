"""A Store over a small arena and a fake disk, whose jobs run when the script says so, and what is read back from it."""

from pathlib import Path
from typing import Final

from kvredis.storage.disk.files import Files
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.entry import Lease
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from kvredis.storage.tiering.manager import Tiering
from tests.faults.crash_model import NOTHING, Held, Name, Seen, ident_of
from tests.storage.small_store import Clock
from tests.storage.tiering.fake_io import ManualIo

KIB: Final = 1024
ARENA_BYTES: Final = 256 * KIB
SEGMENT_BYTES: Final = 256 * KIB
TRIES: Final = 3
"""Who waits for a block may have joined a transfer that was about something else: then he asks again."""


def open_store(directory: Path, files: Files | None, clock: Clock, segments: int) -> Store:
    """A store over what is in `directory`; nothing runs by itself. It is ended by `bury` or by close."""
    disk = DiskTier.open(DiskOptions(directory, segments * SEGMENT_BYTES, False, SEGMENT_BYTES), files, clock.ms())
    store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF), clock_ms=clock.ms, clock_s=clock.seconds)
    io = ManualIo()
    io.threads = 1  # so many hands share the work of a WAITAOF; none is started
    store.tiering = Tiering(store, disk, io, 0.0)
    store.tiering.load()
    return store


def tiering_of(store: Store) -> Tiering:
    """The ways between its memory and its disk."""
    assert store.tiering is not None
    return store.tiering


def run_jobs(store: Store, jobs_max: int = 1 << 30) -> int:
    """Let the disk's threads do so much of what they have been asked for; gives how many jobs that were."""
    io = tiering_of(store).io
    assert isinstance(io, ManualIo)
    return io.run(jobs_max)


def save(store: Store, since: int = 0) -> bool | None:
    """WAITAOF: whether everything from write number `since` on is safe; None when the store does not say."""
    answers: list[bool] = []
    tiering_of(store).saving.save(since, answers.append)
    run_jobs(store)
    return answers[0] if answers else None


def look(store: Store, name: Name) -> Held | None:
    """What a GET finds under a name, brought from disk if need be; None for what is there and cannot be had.
    AssertionError for wrong bytes."""
    found = None
    for _ in range(TRIES):
        bringing = tiering_of(store).bring([name], lambda _: None)
        if bringing is not None:
            run_jobs(store)
        found = store.fetch(*name)
        if bringing is not None:
            bringing.release()
        if found is not None or store.find(*name) is None:
            break
    if found is None:
        return NOTHING if store.find(*name) is None else None
    expire_at_ms = entry.expire_at_ms if (entry := store.find(*name)) is not None else 0
    if isinstance(found, Lease):
        with found as lease:
            return Held(ident_of(lease.view), expire_at_ms)
    return Held(ident_of(found), expire_at_ms)


def look_at_all(store: Store, names: list[Name], clock: Clock) -> dict[Name, Seen]:
    """What is under each name."""
    seen = {}
    for name in names:
        held = look(store, name)
        assert held is not None, f"{name} is there and cannot be had"
        seen[name] = Seen(held, clock.ms(), clock.ms())
    return seen


def bury(store: Store) -> None:
    """Let go of a dead process' descriptors and memory, as the kernel would."""
    disk = tiering_of(store).disk
    disk._index.abandon()
    for file in disk._segments.values():
        file.close()
    disk._held.close()
    store._memory.release()
    store.arena.close()
