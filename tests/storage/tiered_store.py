"""A store of 16 blocks over a disk of 64, whose disk jobs run when the test says so.

The files are those of fake_files.py, so a test can see each step of the disk, make it fail, and do something of its own
in the middle of a write or a read (`during`): no lock is held there, as with real threads.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.eviction.base import make_policy
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from kvredis.storage.tiering.manager import Bringing, Tiering

from .fake_files import FakeFiles, Fault
from .small_store import ARENA_BYTES, Clock, content, read
from .tiering.fake_io import ManualIo

MIB: Final = 1024 * 1024
SEGMENT_BYTES: Final = MIB
DISK_BYTES: Final = 4 * MIB


class TieredStore:
    """Ends in a with-block, after a last look at whether all agrees."""

    def __init__(
        self,
        directory: Path,
        *,
        policy: str = "LRU",
        keep: bool = True,
        disk_bytes: int = DISK_BYTES,
        arena_bytes: int = ARENA_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self.io = ManualIo()
        self.io.threads = 2  # as far as others are told: they ask how many hands there are
        self.clock = self.io.clock if clock is None else clock
        self.files = FakeFiles()
        arena = Arena.create(arena_bytes, HugepageMode.OFF)
        self.store = Store(arena, policy=make_policy(policy), clock_ms=self.clock.ms, clock_s=self.clock.seconds)
        options = DiskOptions(directory, disk_bytes, False, SEGMENT_BYTES)
        self.disk = DiskTier.open(options, self.files, self.clock.ms())
        self.store.keep = keep
        self.tiering = self.store.tiering = Tiering(self.store, self.disk, self.io, 0.5)
        self.tiering.load()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.files.plan = None
        try:
            if kind is None:
                self.check()
        finally:
            self.store.close(save=False)

    # ---- blocks --------------------------------------------------------------------------------------------------

    def put(self, *keys: bytes) -> None:
        """Store a block of its own content under each key."""
        for key in keys:
            assert self.store.put(key, self.content(key))

    @staticmethod
    def content(key: bytes) -> bytes:
        """What `put` stores under a key: its own, for keys that end in different numbers or letters."""
        return content(sum((at + 1) * byte for at, byte in enumerate(key[-3:])))

    def put_away(self, *keys: bytes) -> None:
        """Store blocks and leave them on disk alone, with all else that is in memory and not held."""
        self.put(*keys)
        assert self.save()
        self.push_out()
        assert all(self.tier(key) == "disk" for key in keys)

    def push_out(self) -> None:
        """Have everything leave memory that can."""
        room = self.store.reserve(b"all of it", self.store.arena.nbytes - 4096)
        assert room is not None
        room.abort()

    def get(self, key: bytes, space: int = 0) -> bytes | None:
        """What a GET gives, which waits for the block if it is away."""
        bringing = self.bring((key, space))
        self.io.run()
        try:
            return read(self.store, key, space)
        finally:
            if bringing is not None:
                bringing.release()

    def bring(self, *names: tuple[bytes, int]) -> Bringing | None:
        """Send for blocks; the jobs are yet to run."""
        return self.tiering.bring(names, lambda _: None)

    def tier(self, key: bytes, space: int = 0) -> str | None:
        """Where a block is; None: nowhere."""
        entry = self.store.find(key, space)
        return None if entry is None else entry.tier

    # ---- the disk ------------------------------------------------------------------------------------------------

    def save(self, since: int = 0) -> bool:
        """WAITAOF: have the disk's threads write what was stored since, and say whether it is safe."""
        answers: list[bool] = []
        self.tiering.saving.save(since, answers.append)
        self.io.run()
        (answer,) = answers
        return answer

    def steps(self, words: str) -> int:
        """How many steps of the disk there were that begin with these words: "pwrite", "pread", "sync"."""
        return sum(step.startswith(words) for step in self.files.words)

    def during(self, words: str, act: Callable[[], object]) -> None:
        """Have `act` called once, in the middle of the next step that begins with these words."""

        def plan(_: int, what: str) -> Fault | None:
            if what.startswith(words):
                self.files.plan = None
                act()
            return None

        self.files.plan = plan

    def on_disk(self) -> list[bytes]:
        """The keys of the records, coldest first."""
        return [record.key for record in self.disk.records()]

    def check(self) -> None:
        """All that must agree. While small blocks are being written together, entries are yet to hear which records had
        to make room."""
        self.store.check_integrity()
        self.disk.check_integrity()
        self.tiering.transfers.check_integrity()
        self.io.check_integrity()
        if self.tiering.disk_io._writing:
            return
        recorded = [entry for entry in self.store.index if entry.record is not None]
        assert all(self.disk.get(entry.key, entry.space) is entry.record for entry in recorded)
        assert len(recorded) == len(self.disk), "the disk holds what no lookup can find"
        assert all(entry.record is None or entry.record.expire_at_ms == entry.expire_at_ms for entry in recorded)
