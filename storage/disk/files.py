"""The thin layer between the disk tier and the kernel's files, so that a test can stand in for a disk.

Everything the tier does to the file system goes through `Files` and `File`, one method a system call: a fake can fail,
tear, corrupt or end the world at any of them. The index is SQLite's own business; its steps are announced through
`step`, which does nothing here.

O_DIRECT keeps blocks out of the page cache, which would only hold a second copy of what the arena held a moment ago,
and costs a tenth of the CPU time. Not every file system takes it: then files are opened buffered, and
`direct_obstacle` says why.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol

PROBE_BYTES = mmap.PAGESIZE

IOV_MAX = 1024
"""How many pieces Linux writes in one call."""


class File(Protocol):
    """An open file. Methods block, may be called from several threads at once and raise OSError as the kernel does."""

    def pread(self, into: memoryview, offset: int) -> int:
        """Read at `offset` until `into` is full or the file ends; gives the bytes read."""
        ...

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`: one system call, unless the kernel takes it in parts."""
        ...

    def pwritev(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Write pieces of memory, at most IOV_MAX, one behind the other from `offset` on, as `pwrite` does."""
        ...

    def sync(self) -> None:
        """Return once all that was written is on the device and can be read back after a loss of power."""
        ...

    def size_bytes(self) -> int:
        """How long the file is."""
        ...

    def allocate(self, nbytes: int) -> None:
        """Have the file be at least `nbytes` long and backed by the device, so that no later write lacks room."""
        ...

    def is_at(self, path: Path) -> bool:
        """Whether this very file is what is found at `path` now."""
        ...

    def close(self) -> None:
        """Close it; again is nothing."""
        ...


class Files(Protocol):
    """A file system. Methods block and raise OSError as the kernel does."""

    def open(self, path: Path, *, direct: bool) -> File:
        """Open for reading and writing; made if missing. With `direct` addresses, lengths and offsets are aligned."""
        ...

    def lock(self, path: Path) -> File | None:
        """Take the lock that this file stands for, until it is closed or the process ends; None: it is taken."""
        ...

    def make_directory(self, path: Path) -> None:
        """Make a directory and those above it, unless they are there."""
        ...

    def names(self, directory: Path) -> list[str]:
        """What a directory holds."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is nothing."""
        ...

    def sync_directory(self, directory: Path) -> None:
        """Return once the directory's names are on the device."""
        ...

    def direct_obstacle(self, directory: Path) -> str | None:
        """Why O_DIRECT cannot be had in this directory; None when it can."""
        ...

    def step(self, what: str) -> None:
        """Take note that the index is about to do `what`."""
        ...


class RealFile:
    """A file descriptor."""

    __slots__ = ("_fd", "path")

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    def pread(self, into: memoryview, offset: int) -> int:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def pwrite(self, data: memoryview, offset: int) -> None:
        self.pwritev([data], offset)

    def pwritev(self, pieces: Sequence[memoryview], offset: int) -> None:
        left = list(pieces)
        while left:
            count = os.pwritev(self._fd, left, offset)
            if count == 0:
                raise OSError(errno.EIO, "the kernel wrote nothing", str(self.path))
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def size_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def allocate(self, nbytes: int) -> None:
        """As File; a file system without fallocate gets a sparse file, and a later write may find the disk full."""
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            if self.size_bytes() < nbytes:
                os.ftruncate(self._fd, nbytes)

    def is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Lock(RealFile):
    """A file that this process has locked.

    WHY it is unlocked before it is closed: a process that was forked meanwhile has the descriptor too, and by that the
    lock would stay taken for as long as that one lives. It is not that one's to give back.
    """

    __slots__ = ("_pid",)

    def __init__(self, fd: int, path: Path) -> None:
        super().__init__(fd, path)
        self._pid = os.getpid()

    def close(self) -> None:
        if self._fd >= 0 and os.getpid() == self._pid:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        super().close()


class RealFiles:
    """The operating system's own."""

    def open(self, path: Path, *, direct: bool) -> File:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        return RealFile(os.open(path, flags, 0o600), path)

    def lock(self, path: Path) -> File | None:
        """As Files. flock, so that a lock never outlives its process and is not lost when another fd is closed."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return Lock(fd, path)

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self, directory: Path) -> list[str]:
        return os.listdir(directory)

    def remove(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)

    def sync_directory(self, directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def direct_obstacle(self, directory: Path) -> str | None:
        """As Files, found by writing a page: some file systems take the flag and refuse the write."""
        path = directory / "direct-probe"
        try:
            with closing(self.open(path, direct=True)) as file:
                _write_a_page(file)
        except OSError as error:
            return f"{directory} refuses O_DIRECT: {error.strerror}"
        finally:
            self.remove(path)  # also a file that was made and then not opened
        return None

    def step(self, what: str) -> None:
        """As Files: of no interest to a real disk."""


def _write_a_page(file: File) -> None:
    """Raises OSError where it is refused. For want of room it is not: then O_DIRECT was looked at before."""
    with mmap.mmap(-1, PROBE_BYTES) as page, memoryview(page) as view:
        try:
            file.pwrite(view, 0)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
