"""The arena: one shared mapping that every stored payload lives in, and the only file that asks the kernel for it.

A memfd rather than anonymous memory, so that an engine on the same host can map the very same pages and skip the
socket. It is sealed once we have mapped it: from then on no process, not even of the same user through /proc, can map
it writable, write to it, punch holes into it or change its size. So a process that is given it can neither damage it
nor be killed (SIGBUS) by what becomes of it, and it lives as long as a process maps it, also when this process is gone.

Hugepages, because a payload copied by the kernel from 4 KiB pages costs about half as much again and because
registering them with a GPU is three to ten times quicker; they do not change the speed of the GPU's copies.

What the arena got is told by name (`pages`, `fallback`, `page_locked`), never guessed: the kernel takes MADV_HUGEPAGE
on a memfd without complaint and then hands out 4 KiB pages wherever shmem THP is off.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from kvredis.storage.errors import ArenaError, HugepageShortage

from .hugepages import (
    HUGEPAGE_BYTES,
    PROC_ROOT,
    SYS_ROOT,
    HugepagePool,
    pages_needed,
    shmem_thp,
    shmem_thp_usable,
    shortage_text,
)
from .memory_limits import gib, hugetlb_obstacle, memory_obstacle
from .page_lock import PageLock, c_library, lock_pages

BASE_PAGE_BYTES = mmap.PAGESIZE
PREFAULT_THREADS_MAX = 16

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module does not name it. Mappings that exist stay writable.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it. Keeps what a page already holds.
# One madvise call holds the process's memory map for reading. Short calls (some ten milliseconds) let a serving thread
# that must grow the map (malloc) in between.
_PREFAULT_STEP_BYTES = 16 * 1024 * 1024
_TOUCH_STEP_BYTES = 4 * 1024 * 1024  # touched with the GIL held: about a millisecond a step


class HugepageMode(StrEnum):
    """What pages to ask for: the best there are, never large ones, THP only, or hugetlb and nothing else."""

    AUTO = "auto"
    OFF = "off"
    THP = "thp"
    REQUIRE = "require"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the facts about memory are read; tests hand in fixture trees."""

    sys_root: Path = SYS_ROOT
    proc_root: Path = PROC_ROOT


class Arena:
    """One memfd mapping of `nbytes`, zero-filled, writable by this process alone and readable by processes that are
    given it.

    `view` and its slices are lent, not given: after `close` they stay valid until their last holder lets go.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, pages: str, page_bytes: int, fallback: str | None) -> None:
        self.fd = fd
        self.nbytes = len(mapping)
        self.page_bytes = page_bytes
        self.pages = pages
        self.fallback = fallback
        self.page_locked = "no"
        self.view = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        """Whether others may be given it: on Linux before 5.1 it cannot be kept from being written to."""
        self._mapping: mmap.mmap | None = mapping
        self._lock: PageLock | None = None

    @classmethod
    def create(cls, nbytes: int, mode: HugepageMode = HugepageMode.AUTO, machine: Machine | None = None) -> Self:
        """Map at least `nbytes`, rounded up to whole pages. Nothing is touched yet; hugetlb pages are reserved.

        Raises HugepageShortage (REQUIRE only) and ArenaError, whose texts name the limit and what would lift it.
        """
        if nbytes <= 0:
            raise ArenaError(f"an arena needs at least one byte, not {nbytes}")
        machine = machine or Machine()
        fallback: str | None = None
        if mode in (HugepageMode.AUTO, HugepageMode.REQUIRE):
            mapped = _map_hugetlb(nbytes, machine)
            if not isinstance(mapped, str):
                return cls(*mapped, pages="hugetlb-2MiB", page_bytes=HUGEPAGE_BYTES, fallback=None)
            if mode is HugepageMode.REQUIRE:
                raise HugepageShortage(mapped)
            fallback = mapped
        if (obstacle := memory_obstacle(nbytes, machine.sys_root, machine.proc_root)) is not None:
            raise ArenaError(
                f"The arena needs {gib(nbytes)}, but {obstacle}. Lower max_local_cpu_size or lift that limit"
            )
        thp = mode is not HugepageMode.OFF and shmem_thp_usable(machine.sys_root)
        fd, mapping = _map_memfd(nbytes, HUGEPAGE_BYTES if thp else BASE_PAGE_BYTES)
        refusal = _advise(mapping, mmap.MADV_HUGEPAGE) if thp else f"shmem THP is {shmem_thp(machine.sys_root)}"
        if refusal is None:
            return cls(fd, mapping, pages="memfd-thp", page_bytes=HUGEPAGE_BYTES, fallback=fallback)
        if mode is HugepageMode.THP:
            fallback = refusal
        if mode is HugepageMode.OFF and shmem_thp_usable(machine.sys_root):
            _advise(mapping, mmap.MADV_NOHUGEPAGE)
        return cls(fd, mapping, pages="memfd-4KiB", page_bytes=BASE_PAGE_BYTES, fallback=fallback)

    def prefault(self, threads: int, stop: threading.Event | None = None) -> float:
        """Have every page backed by memory now, `threads` at a time, and give the seconds it took.

        Contents stay as they are, so it may run while the arena is in use; the GIL is free meanwhile. Raises ArenaError
        when the kernel has no page to give. Returns early when `stop` is set or the arena is closed while it runs.
        """
        started_s = time.monotonic()
        libc = c_library()

        def populate(start: int, end: int) -> None:
            for begin in range(start, end, _PREFAULT_STEP_BYTES):
                view = self._borrow()
                if view is None or (stop is not None and stop.is_set()):
                    return
                with view:
                    self._populate(libc.madvise, view, begin, min(begin + _PREFAULT_STEP_BYTES, end))

        count = max(1, min(threads, PREFAULT_THREADS_MAX, self.nbytes // self.page_bytes))
        share = -(-self.nbytes // count // self.page_bytes) * self.page_bytes
        starts = range(0, self.nbytes, share)
        with ThreadPoolExecutor(count, thread_name_prefix="kvredis-prefault") as pool:
            list(pool.map(populate, starts, (min(start + share, self.nbytes) for start in starts)))
        return time.monotonic() - started_s

    def lock(self) -> str:
        """Page-lock the arena: for the GPU if there is one, else with mlock, else "no" and one warning in the log.

        Faults in what is not there yet, on one thread: prefault first. Gives and keeps the outcome as `page_locked`.
        """
        if self._lock is None and (view := self._borrow()) is not None:
            with view:
                self._lock = lock_pages(self.address, self.nbytes)
            self.page_locked = "no" if self._lock is None else self._lock.name
        return self.page_locked

    def share(self) -> int:
        """A new descriptor, the caller's to close, that others may be given: it reads the arena and nothing else.

        Raises ArenaError when the arena is closed or could not be sealed, OSError when there are no more descriptors.
        """
        if not self.sealed or self.fd < 0:
            raise ArenaError("the arena is closed" if self.fd < 0 else "this kernel cannot seal the arena (Linux 5.1)")
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unlock, unmap and close the fd; again is nothing. Views still held keep the memory until they are let go.

        A GPU copy in flight must have ended, and a thread inside `lock` must have been joined.
        """
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self.page_locked = "no"
        with suppress(BufferError):
            self.view.release()
            mapping.close()
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _borrow(self) -> memoryview | None:
        """Give a view that keeps the mapping in place while another thread works on it, or None once closed."""
        mapping = self._mapping
        try:
            return None if mapping is None else memoryview(mapping)
        except ValueError:
            return None

    def _populate(self, madvise: Callable[..., int], view: memoryview, start: int, stop: int) -> None:
        if madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(stop - start), _MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise ArenaError(f"no memory for the arena's pages at {gib(start)}: {os.strerror(code)}")
        # An older kernel. Reading a page of a shared mapping makes it exist and, unlike writing, cannot disturb a value
        # that is being received into it.
        for begin in range(start, stop, _TOUCH_STEP_BYTES):
            view[begin : min(begin + _TOUCH_STEP_BYTES, stop) : self.page_bytes].tobytes()


def _map_hugetlb(nbytes: int, machine: Machine) -> tuple[int, mmap.mmap] | str:
    """Map hugetlb pages, or say why there are none. The mmap itself reserves them: a later touch cannot fail."""
    pool = HugepagePool.read(machine.sys_root, machine.proc_root)
    if not pool.supported:
        return "this kernel has no 2 MiB hugepages"
    if pool.available < pages_needed(nbytes):
        return shortage_text(pool, nbytes)
    if (obstacle := hugetlb_obstacle(nbytes, machine.sys_root, machine.proc_root)) is not None:
        return f"Failed to allocate huge pages: {gib(nbytes)} requested, but {obstacle}"
    try:
        return _map_memfd(nbytes, HUGEPAGE_BYTES, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except ArenaError:
        # Another process was quicker, or the pool's pages belong to memory nodes that this process may not use.
        return shortage_text(HugepagePool.read(machine.sys_root, machine.proc_root), nbytes)


def _map_memfd(nbytes: int, page_bytes: int, flags: int = 0) -> tuple[int, mmap.mmap]:
    """Make a memfd of whole pages, map it shared, seal it. On failure nothing is left behind, least of all the fd."""
    size = -(-nbytes // page_bytes) * page_bytes
    fd = -1
    try:
        fd = os.memfd_create("kvredis-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        os.fchmod(fd, 0o600)  # the kernel makes it 0777
        os.ftruncate(fd, size)
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        _seal(fd)
        return fd, mapping
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise ArenaError(f"The arena's {gib(nbytes)} could not be mapped: {error}") from error


def _seal(fd: int) -> None:
    """Have it shrunk, grown or written to no more but through mappings that exist. A kernel that cannot keep
    writers out keeps its size at least, which is what a server asks of memory that is lent to it."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS & ~_F_SEAL_FUTURE_WRITE)


def _advise(mapping: mmap.mmap, advice: int) -> str | None:
    """Advise the kernel about the whole mapping; give its refusal, if any."""
    try:
        mapping.madvise(advice)
    except OSError as error:
        return f"madvise: {error.strerror}"
    return None
