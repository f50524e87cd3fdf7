"""Memory that a client lends to the server, and the copy out of it into the arena.

WHY it is read with preadv and never mapped: a page of somebody else's memfd that cannot be had (no hugepage is left,
the control group is full) kills who touches it in a mapping, and is an error to who reads it. The bytes go straight
into the extent, without the GIL.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import stat
import threading
from typing import Final

READ_BYTES_MAX: Final = 1 << 30
"""What one preadv is asked for; the kernel gives at most 2 GiB less a page."""

MESSAGES_MAX: Final = 16
"""What may lie in the side channel before a KV.LEND; who sends more does not mean it."""

_F_SEAL_SHRINK: Final = fcntl.F_SEAL_SHRINK


class LendError(Exception):
    """What was sent is not memory that can be lent; the text says why."""


class LentMemory:
    """A client's memfd, `nbytes` long, which can grow and not shrink."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = fd

    def another(self) -> LentMemory:
        """The same memory for somebody who outlives the lending: a copy that is under way. OSError."""
        return LentMemory(os.dup(self._fd), self.nbytes)

    def copy(self, target: memoryview, offset: int) -> bool:
        """Fill `target` with the bytes from `offset` on. May block while pages come in. False: they cannot be had."""
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

    def close(self) -> None:
        """Let go of it; again is nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_elsewhere(fd)


def receive(side: socket.socket) -> LentMemory:
    """Take the memory whose descriptor lies in the side channel: exactly one message of one byte with one descriptor.
    Whatever else came with it is closed. LendError, and what was lent before stays lent."""
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
        memory = LentMemory(found[0], _size(found[0]))
        found.clear()
        return memory
    finally:
        for fd in found:
            close_elsewhere(fd)


def close_elsewhere(fd: int) -> None:
    """Close a descriptor that somebody else has made: that frees gigabytes when he was the last to have them, and may
    wait for him when it is a file of a file system of his own. A thread can wait."""
    try:
        threading.Thread(target=_close, args=(fd,), name="kvredis-closing", daemon=True).start()
    except RuntimeError:  # no thread to be had
        _close(fd)


def _close(fd: int) -> None:
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
    """The size of memory that can be lent. Its seals are asked for first: only memory has any, so that nobody's own
    file system is asked anything. LendError."""
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
