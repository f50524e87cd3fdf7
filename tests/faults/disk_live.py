"""A live server over a disk that does what a test wants: fails, fills up, or stops answering."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Self

from kvredis.storage.disk.files import File
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.tiering.manager import Tiering
from tests.server.feed import Word
from tests.server.live import MIB, Client, LiveServer, pattern
from tests.storage.fake_files import FakeFile, FakeFiles

SEGMENT_BYTES: Final = MIB
LENGTH: Final = 100 * 1024


class DiskServer(LiveServer):
    """A LiveServer with an arena of 2 MiB over a disk of `disk_bytes` in `folder`; warnings of the disk are no
    complaints, but kept in `warnings`."""

    def __init__(
        self,
        folder: Path,
        files: FakeFiles | None = None,
        *,
        disk_bytes: int = 8 * MIB,
        spill_wait_s: float = 0.2,
        **options: Any,
    ) -> None:
        super().__init__(folder, 2 * MIB, **options)
        self.files = FakeFiles() if files is None else files
        disk = DiskTier.open(
            DiskOptions(folder / "disk", disk_bytes, False, SEGMENT_BYTES), self.files, now_ms=self.clock_ms
        )
        self.store.add_disk(disk, spill_wait_s=spill_wait_s)
        self.warnings: list[str] = []

    @property
    def tiering(self) -> Tiering:
        """The ways between its memory and its disk."""
        assert self.store.tiering is not None
        return self.store.tiering

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self.warnings = [each for each in self.complaints if each.startswith("Disk tier: ")]
        self.complaints[:] = [each for each in self.complaints if not each.startswith("Disk tier: ")]
        await super().__aexit__(kind, error, trace)


class StuckFiles(FakeFiles):
    """A disk whose writes do not return until `released` is set; `stuck` is set once one does not."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = threading.Event()
        self.released = threading.Event()

    def open(self, path: Path, *, direct: bool) -> File:
        """As Files."""
        return StuckFile(self, super().open(path, direct=direct), path.name)


class StuckFile(FakeFile):
    """One file of StuckFiles."""

    def __init__(self, files: StuckFiles, real: File, name: str) -> None:
        super().__init__(files, real, name)
        self._stuck_files = files

    def pwrite(self, data: memoryview, offset: int) -> None:
        """As File, when it is let."""
        self._stuck_files.stuck.set()
        self._stuck_files.released.wait()
        super().pwrite(data, offset)


def body(number: int) -> bytes:
    """What `store_blocks` stores under key `number`."""
    return pattern(LENGTH + number % 5, number)


async def store_blocks(client: Client, numbers: Iterable[int]) -> None:
    """SET a block of some 100 KiB under each "block:number": each is answered with OK."""
    for number in numbers:
        assert await client.ask("SET", f"block:{number}", body(number)) == b"+OK\r\n"


async def found(client: Client, numbers: Iterable[int]) -> list[int]:
    """Which of those a GET finds; AssertionError for wrong bytes."""
    there = []
    for number in numbers:
        value = await client.get(f"block:{number}")
        assert value in (None, body(number)), f"block {number} has wrong bytes"
        there += [number] if value is not None else []
    return there


async def wait_saved(client: Client, wait_ms: int = 10_000) -> list[int]:
    """WAITAOF 1 0: how many logs have it, here and on replicas."""
    await client.send("WAITAOF", "1", "0", str(wait_ms))
    assert await client.read_line() == b"*2\r\n"
    return [int((await client.read_line())[1:]) for _ in range(2)]


async def info(client: Client, name: Word) -> int:
    """A figure of INFO."""
    await client.send("INFO", "everything")
    text = (await client.read_bulk() or b"").decode()
    wanted = name.decode() if isinstance(name, bytes) else name
    return next(int(line.partition(":")[2]) for line in text.splitlines() if line.startswith(f"{wanted}:"))
