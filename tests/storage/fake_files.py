"""A disk that does what a test wants: fails or dies at the n-th step, tears and corrupts writes, loses its power.

It works on a real directory, so that SQLite takes part. What a killed process leaves behind is a copy of the directory
as it is; what a loss of power leaves behind is that copy without some of what was not yet synced.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from kvredis.storage.disk.files import File, RealFiles
from kvredis.storage.disk.index import INDEX_NAME
from kvredis.storage.memory.allocator import GRAIN_BYTES


class Killed(BaseException):
    """The process ends here; not an Exception, so that nothing on the way thinks it could go on."""


class Fault(Enum):
    """What may happen at a step."""

    DIE = "die"
    TEAR = "tear"  # a write: half of it, then death; another step: death
    HALF = "half"  # a write: half of it, and no error
    FLIP = "flip"  # a write: one bit turned, and no error
    EIO = "eio"
    ENOSPC = "enospc"
    EMFILE = "emfile"


_ERRNO = {Fault.EIO: errno.EIO, Fault.ENOSPC: errno.ENOSPC, Fault.EMFILE: errno.EMFILE}

Plan = Callable[[int, str], Fault | None]
"""What happens at a step, given its number and its words ("pwrite segment-0000.kv", "index: commit")."""


def at(number: int, fault: Fault) -> Plan:
    """One fault, at one step."""
    return lambda step, _: fault if step == number else None


def on(words: str, fault: Fault) -> Plan:
    """A fault at every step that begins with these words."""
    return lambda _, what: fault if what.startswith(words) else None


class FakeFiles(RealFiles):
    """The real files, with a plan. `direct` False is a file system that refuses O_DIRECT."""

    def __init__(self, plan: Plan | None = None, *, direct: bool = False) -> None:
        self.plan = plan
        self.direct = direct
        self.words: list[str] = []
        """Every step so far; the first is number 1."""
        self.dead = False
        self.unsynced: list[tuple[str, int, bytes]] = []
        """Writes since their file was synced: its name, where, and what was there before."""
        self.wal_bytes_synced = 0
        self.directory: Path | None = None

    def happen(self, what: str) -> Fault | None:
        """Count a step and do what the plan says, unless it is for a write to do."""
        if self.dead:
            raise Killed(what)
        self.words.append(what)
        fault = None if self.plan is None else self.plan(len(self.words), what)
        if fault is Fault.DIE or (fault is Fault.TEAR and not what.startswith("pwrite")):
            self.dead = True
            raise Killed(what)
        if fault in _ERRNO:
            raise OSError(_ERRNO[fault], os.strerror(_ERRNO[fault]))
        return fault

    def open(self, path: Path, *, direct: bool) -> File:
        self.happen(f"open {path.name}")
        return FakeFile(self, super().open(path, direct=direct), path.name)

    def make_directory(self, path: Path) -> None:
        self.happen("make_directory")
        self.directory = path
        super().make_directory(path)

    def remove(self, path: Path) -> None:
        self.happen(f"remove {path.name}")
        super().remove(path)

    def sync_directory(self, directory: Path) -> None:
        self.happen("sync_directory")
        super().sync_directory(directory)

    def direct_obstacle(self, directory: Path) -> str | None:
        return super().direct_obstacle(directory) if self.direct else "the fake refuses O_DIRECT"

    def step(self, what: str) -> None:
        self.happen(what)
        if what == "index: durable":
            self.wal_bytes_synced = self._wal_bytes()

    def _wal_bytes(self) -> int:
        assert self.directory is not None
        wal = self.directory / f"{INDEX_NAME}-wal"
        return wal.stat().st_size if wal.exists() else 0

    def leave_behind(self, to: Path, rng: random.Random | None = None) -> None:
        """Copy the directory to `to` as a killed process leaves it; with `rng`, as a loss of power does."""
        assert self.directory is not None
        shutil.copytree(self.directory, to)
        if rng is None:
            return
        for name, offset, before in reversed(self.unsynced):
            with open(to / name, "r+b") as file:
                for start in range(0, len(before), GRAIN_BYTES):
                    if rng.random() < 0.5:
                        file.seek(offset + start)
                        file.write(before[start : start + GRAIN_BYTES])
        wal_bytes = self._wal_bytes()
        if wal_bytes > self.wal_bytes_synced:
            os.truncate(to / f"{INDEX_NAME}-wal", rng.randrange(self.wal_bytes_synced, wal_bytes + 1))


class FakeFile:
    """One file of FakeFiles."""

    def __init__(self, files: FakeFiles, real: File, name: str) -> None:
        self._files = files
        self._real = real
        self._name = name

    def pread(self, into: memoryview, offset: int) -> int:
        self._files.happen(f"pread {self._name}")
        return self._real.pread(into, offset)

    def pwrite(self, data: memoryview, offset: int) -> None:
        fault = self._files.happen(f"pwrite {self._name}")
        before = bytearray(len(data))
        self._real.pread(memoryview(before), offset)
        self._files.unsynced.append((self._name, offset, bytes(before)))
        if fault in (Fault.TEAR, Fault.HALF):
            data = data[: len(data) // 2]
        if fault is Fault.FLIP:
            flipped = bytearray(data)
            flipped[len(data) // 3] ^= 4
            data = memoryview(flipped)
        self._real.pwrite(data, offset)
        if fault is Fault.TEAR:
            self._files.dead = True
            raise Killed(self._name)

    def pwritev(self, pieces: Sequence[memoryview], offset: int) -> None:
        """As File: one step of the disk, so what is torn is torn as a whole."""
        self.pwrite(memoryview(b"".join(pieces)) if len(pieces) > 1 else pieces[0], offset)

    def sync(self) -> None:
        self._files.happen(f"sync {self._name}")
        self._files.unsynced = [write for write in self._files.unsynced if write[0] != self._name]

    def size_bytes(self) -> int:
        self._files.happen(f"size {self._name}")
        return self._real.size_bytes()

    def allocate(self, nbytes: int) -> None:
        self._files.happen(f"allocate {self._name}")
        self._real.allocate(nbytes)

    def is_at(self, path: Path) -> bool:
        return self._real.is_at(path)

    def close(self) -> None:
        self._real.close()
