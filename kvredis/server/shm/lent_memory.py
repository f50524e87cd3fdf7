"""Memory that a client lends to the server, and the copy out of it into the arena.

WHY it is not simply mapped and read: a page of a client's memfd that cannot be had (it lies behind a new end or in a
hole, no hugepage is left, the control group is full) kills the process that touches it in a mapping, and is an error to
preadv. So a mapping is used only for memory whose seals forbid its owner to shorten it or to punch holes, as our own
engines' arenas have them, and only after the kernel has said that every page of the range is there (MADV_POPULATE_READ,
Linux 5.14). It is worth that, because the streaming stores of storage/memory/copy.py take half the time of preadv's
copy. Nor is another user's memory mapped: to have a page that was never written to would cost us one. Either way the
bytes go straight into the extent, long ones without the GIL.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import stat
from functools import partial
from typing import Final

from kvredis.storage.background import start_thread
from kvredis.storage.memory.copy import KIND, address_of, copy
from kvredis.storage.memory.sched import take_long_slices

READ_BYTES_MAX: Final = 1 << 30
"""What one preadv is asked for; the kernel gives at most 2 GiB less a page."""

MESSAGES_MAX: Final = 16
"""What may lie in the side channel before a KV.LEND; a client that sends more does not mean it."""

_F_SEAL_SHRINK: Final = fcntl.F_SEAL_SHRINK
_NO_HOLES: Final = fcntl.F_SEAL_WRITE | 0x10
"""Either of F_SEAL_WRITE and F_SEAL_FUTURE_WRITE, which the fcntl module does not name, forbids to punch holes."""
_MADV_DONTNEED: Final = 4
_MADV_POPULATE_READ: Final = 22
_libc: Final = ctypes.CDLL(None, use_errno=True)


class LendError(Exception):
    """What was sent is not memory that can be lent; the text says why."""


class _Mapped:
    """A client's memory, of which no page can be taken away, mapped to be read. Unmapped with its last LentMemory."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """OSError."""
        self._view = memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
        self._address = address_of(self._view)

    def take_out(self) -> None:
        """Have no page in the mapping any more, until the server reads there. This is what takes time when a mapping
        goes (30 ms/GB), and Python's own unmapping keeps the GIL meanwhile."""
        _libc.madvise(ctypes.c_void_p(self._address), ctypes.c_size_t(len(self._view)), _MADV_DONTNEED)

    def copy(self, target: memoryview, offset: int) -> bool:
        """Fill `target` from `offset` on. False: not all pages can be had, or this kernel cannot say so."""
        start = self._address + offset
        begin = start - start % mmap.PAGESIZE
        length = start + len(target) - begin
        if _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_POPULATE_READ):
            return False
        copy(target, self._view[offset : offset + len(target)])
        return True


class LentMemory:
    """A client's memfd, `nbytes` long, which can grow and not shrink."""

    def __init__(self, fd: int, nbytes: int, mapped: _Mapped | None = None) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self._mapped = mapped

    def another(self) -> LentMemory:
        """The same memory for a copy that is under way and outlives the lending. OSError."""
        return LentMemory(os.dup(self._fd), self.nbytes, self._mapped)

    def copy(self, target: memoryview, offset: int) -> bool:
        """Fill `target` with the bytes from `offset` on. May block while pages come in. False: they cannot be had."""
        if self._mapped is not None and self._mapped.copy(target, offset):
            return True
        done = 0
        while done < len(target):
            try:
                read = os.preadv(self._fd, [target[done : done + READ_BYTES_MAX]], offset + done)
            except OSError:
                return False
            if not read:
                return False
            done += read
        return True

    def copy_and_close(self, target: memoryview, offset: int) -> bool:
        """`copy`, and let go of it at once: for a thread, which may be the last to have it. Others go before it."""
        try:
            take_long_slices()
            return self.copy(target, offset)
        finally:
            fd, self._fd = self._fd, -1
            self._mapped = None
            os.close(fd)

    def close(self) -> None:
        """Let go of it; again is nothing."""
        fd, self._fd = self._fd, -1
        mapped = [] if self._mapped is None else [self._mapped]
        self._mapped = None
        if fd >= 0:
            close_elsewhere(fd, mapped)


def receive(side: socket.socket, *, own_user: bool) -> LentMemory:
    """Take the memory whose descriptor lies in the side channel: exactly one message of one byte with one descriptor.
    Whatever else came with it is closed. LendError, and what was lent before stays lent. `own_user`: the client runs as
    the server's own user."""
    found: list[int] = []
    well_formed, messages = True, 0
    try:
        while messages <= MESSAGES_MAX:
            data, descriptors, truncated = _take_message(side)
            if data is None:
                break
            messages += 1
            found += descriptors
            well_formed = well_formed and len(data) == 1 and len(descriptors) == 1 and not truncated
        if messages > MESSAGES_MAX:
            side.close()  # and with it what still lies there
            raise LendError("too much was sent over the side channel, which is closed now")
        if messages != 1 or not well_formed:
            raise LendError("want one message of one byte with one descriptor in the side channel, and nothing else")
        nbytes = _size(found[0])
        memory = LentMemory(found[0], nbytes, _mapped(found[0], nbytes) if own_user else None)
        found.clear()
        return memory
    finally:
        for fd in found:
            close_elsewhere(fd, [])


def close_elsewhere(fd: int, mapped: list[_Mapped]) -> None:
    """Close a descriptor that a client has made, and let go of its mapping, if there is one in `mapped`, which is
    empty then: that frees gigabytes when we are the last to have them, and may wait for the client when it is a file of
    a file system of its own. A thread can wait."""
    try:
        start_thread(partial(_close, fd, mapped), "kvredis-closing")
    except RuntimeError:  # no thread to be had
        _close(fd, mapped)


def _mapped(fd: int, nbytes: int) -> _Mapped | None:
    """The memory mapped, if that is safe and of use: without streaming stores it is not."""
    if KIND in ("python", "memcpy") or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NO_HOLES:
        return None
    try:
        return _Mapped(fd, nbytes)
    except OSError:  # hugepages that are not reserved, or no address space
        return None


def _close(fd: int, mapped: list[_Mapped]) -> None:
    """The descriptor is closed last, as that frees the memory without the GIL."""
    try:
        while mapped:
            mapped.pop().take_out()
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def _take_message(side: socket.socket) -> tuple[bytes | None, list[int], bool]:
    """The next message, its descriptors, and whether there were more than room for; None when there is none."""
    room = socket.CMSG_LEN(2 * array.array("i").itemsize)  # what does not fit is closed by the kernel
    try:
        data, ancillary, flags, _ = side.recvmsg(2, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    except OSError:  # nothing there, or the channel is closed
        return None, [], False
    descriptors = array.array("i")
    for level, kind, body in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(body[: len(body) - len(body) % descriptors.itemsize])
    if not data and not descriptors:
        return None, [], False  # the client has closed its end
    return data, list(descriptors), bool(flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC))


def _size(fd: int) -> int:
    """The size of memory that can be lent. Its seals are asked for first: only memory has any, so that no client's
    own file system is asked anything. LendError."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise LendError("what was sent is not a memfd") from None
    if not seals & _F_SEAL_SHRINK:
        raise LendError("the memfd must be sealed against shrinking (F_SEAL_SHRINK)")
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or not found.st_size:
        raise LendError("the memfd is empty")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        raise LendError("the memfd cannot be read")
    return found.st_size
