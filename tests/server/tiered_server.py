"""A live server over 16 blocks of memory and a disk whose jobs run when the test lets them, on clocks it moves.

The jobs run on the loop's own thread, one a turn, while `disk_runs`; held, the disk is as slow as the test likes and
nothing else is. The files are those of fake_files.py: each step can be seen, and made to fail. With `threads` there are
real ones instead, for what must hold in any order.
"""

import asyncio
from pathlib import Path
from time import monotonic
from typing import Any, Final, Self

from kvredis.storage.background import IoThreads
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.tiering.manager import Tiering
from tests.server.live import Client, LiveServer, until
from tests.storage.fake_files import FakeFiles
from tests.storage.small_store import ARENA_BYTES, BLOCK_BYTES, Clock, content
from tests.storage.tiering.fake_io import ManualIo

MIB: Final = 1024 * 1024
DISK_BYTES: Final = 8 * MIB
SPILL_WAIT_S: Final = 0.5


def block(key: str) -> bytes:
    """The bytes of the block that tests keep under this key: 64 KiB in the arena, and no other key's."""
    return content(sum((at + 1) * byte for at, byte in enumerate(key.encode())))


assert len(block("a")) == BLOCK_BYTES


class TieredServer(LiveServer):
    """`async with TieredServer(folder) as live`: at its end nothing may be held or on its way."""

    def __init__(
        self,
        folder: Path,
        *,
        threads: int = 0,
        arena_bytes: int = ARENA_BYTES,
        disk_bytes: int = DISK_BYTES,
        keep: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(folder, arena_bytes, **options)
        self.clock = Clock()
        self.clock.now_s = monotonic()
        self.store.now_s = self.server.now_s = self.clock.seconds
        self.files = FakeFiles()
        self.disk = DiskTier.open(DiskOptions(folder / "disk", disk_bytes, False, MIB), self.files, self.clock_ms)
        self.store.keep = keep
        self.disk_runs = True
        self.manual = ManualIo()
        self.manual.threads = 2  # as far as others are told
        self.io: IoThreads = IoThreads(threads, 8192, 1 << 30, clock_s=self.clock.seconds) if threads else self.manual
        self.tiering = self.store.tiering = Tiering(self.store, self.disk, self.io, SPILL_WAIT_S)
        self.tiering.load()
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if self.io is self.manual:
            self._pump = asyncio.create_task(self._run_jobs())
        else:
            self.io.start()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self.server.now_s = monotonic  # it waits for its clients by this
        try:
            if error is None:
                self.let_go()
                await self.quiet()
                self.check()
        finally:
            if self._pump is not None:
                self._pump.cancel()
            self.io.close()  # or the store would wait for its blocks to be saved
            await super().__aexit__(kind, error, trace)

    async def _run_jobs(self) -> None:
        while True:
            if self.disk_runs:
                self.manual.run(1)
            await asyncio.sleep(0)

    # ---- the disk ------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Let the disk begin nothing more."""
        self.disk_runs = False

    def let_go(self) -> None:
        """Let it go on."""
        self.disk_runs = True

    async def quiet(self) -> None:
        """Wait until the disk has nothing to do."""
        await until(lambda: self.io.drain(0.0) if self.io is not self.manual else not self.jobs())

    def jobs(self) -> int:
        """How many disk jobs are queued."""
        return sum(figures.queued + figures.running for figures in self.io.figures().values())

    def steps(self, words: str) -> int:
        """How many steps of the disk there were that begin with these words: "pwrite", "pread", "sync"."""
        return sum(step.startswith(words) for step in self.files.words)

    def saved(self) -> None:
        """Have everything on disk, here and now; it stays in memory."""
        answers: list[bool] = []
        self.tiering.saving.save(0, answers.append)
        self.manual.run()
        assert answers == [True]

    def put(self, *keys: str) -> None:
        """Store each key's block."""
        for key in keys:
            assert self.store.put(key.encode(), block(key))

    def send_away(self, *keys: str, space: int = 0) -> None:
        """Have these on disk alone."""
        self.tiering.saving.save(0, lambda _: None)
        self.manual.run()
        with self.store.lock:
            for key in keys:
                entry = self.store.index.get(key.encode(), space)
                assert entry is not None
                if entry.is_resident:
                    self.store._unload(entry)
        assert all(self.tier(key, space) == "disk" for key in keys)

    def put_away(self, *keys: str) -> None:
        """Store each key's block and leave it on disk alone."""
        self.put(*keys)
        self.send_away(*keys)

    def tier(self, key: str, space: int = 0) -> str | None:
        """Where a block is; None: nowhere."""
        entry = self.store.find(key.encode(), space)
        return None if entry is None else entry.tier

    def tick(self) -> None:
        """What the server does ten times a second, for who waits."""
        self.tiering.tick()
        self.server.disk_reads.tick()
        self.server.admission.disk_room.tick()
        self.server.admission.admit()

    def check(self) -> None:
        """All that must agree when nothing is under way."""
        self.store.check_integrity()
        self.disk.check_integrity()
        self.tiering.transfers.check_integrity()
        self.io.check_integrity()
        assert len(self.tiering.transfers) == 0
        assert not len(self.server.admission.disk_room)
        recorded = [entry for entry in self.store.index if entry.record is not None]
        assert all(self.disk.get(entry.key, entry.space) is entry.record for entry in recorded)
        assert len(recorded) == len(self.disk), "the disk holds what no lookup can find"


async def info(client: Client, *sections: str) -> dict[str, str]:
    """The fields of INFO, or of some of its sections."""
    await client.send("INFO", *(sections or ("everything",)))
    text = await client.read_bulk()
    assert text is not None
    return dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)


def bulk(value: bytes) -> bytes:
    """A value as it is sent."""
    return b"$%d\r\n%b\r\n" % (len(value), value)
