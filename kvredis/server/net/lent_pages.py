"""From the arena into a unix socket without a copy, by way of a pipe: what zerocopy.py asks the kernel for.

Python has splice but no vmsplice, so that is called through ctypes, which gives up the GIL meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress
from typing import Final

PIPE_BYTES: Final = 1024 * 1024
PIPE_BYTES_MIN: Final = 256 * 1024
"""What a pipe is to hold, a page a slot (the most that an ordinary user may have), and what makes it worth while: who
has very many pipes is given tiny ones."""

_NONBLOCK: Final = 2  # SPLICE_F_NONBLOCK of <fcntl.h>
_PEERCRED: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_vmsplice = getattr(_libc, "vmsplice", None)
if _vmsplice is not None:
    _vmsplice.argtypes = (ctypes.c_int, ctypes.POINTER(_IoVec), ctypes.c_size_t, ctypes.c_uint)
    _vmsplice.restype = ctypes.c_ssize_t


def unread_bytes(sock: socket.socket) -> int:
    """At least what the peer has yet to receive of what was sent on a unix socket; 0 when that is nothing."""
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


CAN_LEND: Final = _vmsplice is not None
"""Whether this system can do it at all."""


class Pipe:
    """Where pages are on their way from an arena to a socket. OSError when there is none to be had."""

    def __init__(self) -> None:
        self._span = _IoVec()
        self._span_pointer = ctypes.pointer(self._span)
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with suppress(PermissionError):
                fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            if fcntl.fcntl(self.write_fd, fcntl.F_GETPIPE_SZ) < PIPE_BYTES_MIN:
                raise OSError(errno.EPERM, "the pipe is too short")
        except OSError:
            self.close()
            raise

    def put(self, piece: bytes | memoryview) -> int:
        """Copy the beginning of a piece in. Returns how many bytes; BlockingIOError when the pipe is full."""
        return os.write(self.write_fd, piece)

    def lend(self, address: int, nbytes: int) -> int:
        """Put in references to the pages of the beginning of a piece of memory, which must stay what it is. Returns how
        many bytes, 0 when the pipe is full; OSError when the kernel will not."""
        if _vmsplice is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        span = self._span
        span.base, span.length = address, nbytes
        lent = int(_vmsplice(self.write_fd, self._span_pointer, 1, _NONBLOCK))
        if lent < 0 and (code := ctypes.get_errno()) != errno.EAGAIN:
            raise OSError(code, os.strerror(code))
        return max(lent, 0)

    def move(self, sock: socket.socket, nbytes: int) -> int:
        """Move as much of `nbytes` into the socket as it takes; BlockingIOError when it is full, OSError when it is
        closed."""
        return os.splice(self.read_fd, sock.fileno(), nbytes, flags=_NONBLOCK)

    def close(self) -> None:
        """Close both ends; references to pages that are still inside end."""
        os.close(self.read_fd)
        os.close(self.write_fd)


def peer_pid(sock: socket.socket) -> int:
    """The process that has connected this unix socket, in our pid namespace; 0 for one outside of it."""
    return int(_PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))[0])
