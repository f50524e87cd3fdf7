"""Bytes on a blocking socket, with bounds: lines into a small scratch buffer, bodies straight into a caller's memory.

The socket blocks in the kernel with the kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO) and not in Python's `poll`:
that saves a system call each time and lets MSG_WAITALL wait for a whole body at once. What is set in the kernel is
corrected only when it is no longer what is left of a reply's time, so that a reply that comes at once costs no call.

recvmsg(2) fills a view or several, natively where the extension (_recvmsg.c) was built, else through ctypes. Python's
own begins anew behind each signal, and the kernel then with the whole of SO_RCVTIMEO: with a timer that strikes more
often, as those of sampling profilers do, it never ends. A caller with a deadline must hear of the signal. Each reply of
a block takes two such calls, and one costs the kernel's part and 0.1 us natively, 2 us through ctypes.

A signal makes neither longer. A reply is received by recvmsg(2) itself (`receive` below), which is called again with
what is left. What has to wait to be sent waits in `poll` first: with room for a byte the kernel gives a call that is
interrupted back, and Python does not repeat it.

After any failure the position in the stream is lost: the wire closes itself and raises BackendError from then on.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvredis.backends.config.tls import told
from kvredis.storage.errors import BackendError
from kvredis.storage.memory.copy import NATIVE_WANTED

_receive_natively: Callable[[int, Sequence[memoryview], int], int] | None = None
if NATIVE_WANTED:
    with suppress(ImportError):  # not built here
        from ._recvmsg import receive as _receive_natively

VIEWS_MAX: Final = 16
"""Pieces of a body, and what ends it."""
_CALL: Final = struct.Struct("PIPNPNi0P")
"""struct msghdr of recvmsg(2). Behind it are the struct iovec that it points to: where each begins, its length."""
_recvmsg = ctypes.CDLL(None, use_errno=True).recvmsg
_recvmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_recvmsg.restype = ctypes.c_ssize_t


def receive_in_python(descriptor: int, views: Sequence[memoryview], flags: int) -> int:
    """What `receive` does, without the extension."""
    if len(views) > VIEWS_MAX:
        raise ValueError(f"receive() fills at most {VIEWS_MAX} views")
    places = [fact for view in views for fact in (ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))]
    buffers = struct.pack(f"{len(views) * 'PN'}", *places)
    # Of this call alone: a signal's handler or a finalizer may receive in its midst.
    call = bytearray(_CALL.size) + buffers
    at = ctypes.addressof(ctypes.c_char.from_buffer(call))
    _CALL.pack_into(call, 0, 0, 0, at + _CALL.size, len(views), 0, 0, 0)
    count: int = _recvmsg(descriptor, at, flags)
    return count if count >= 0 else -ctypes.get_errno()


receive: Final = _receive_natively or receive_in_python
"""receive(descriptor, views, flags): fill flat views of bytes, VIEWS_MAX at most, in order, by one system call. Gives
how many bytes came, 0 at the end of the stream, or an error's number (errno) below zero: -EINTR behind a signal, whose
handler runs before the caller's next line. Raises BufferError for memory that is not to be written."""


Buffer = bytes | bytearray | memoryview

SCRATCH_BYTES: Final = 8 * 1024
"""Receives lines, small replies and the first bytes of a body, which are then copied; also the bound on a line."""
SEND_BUFFER_BYTES: Final = 512 * 1024
"""Keeps what is in flight inside the caches: four megabytes were slower, and 64 KiB cost wake-ups."""
IOV_MAX: Final = 1024
"""Buffers in one sendmsg, on Linux."""
AT_ONCE: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
DISCARD_BYTES: Final = 256 * 1024
SLACK_S: Final = 0.01
"""How much longer than allowed the kernel may wait, rather than be told anew before each receive."""
CRLF: Final = b"\r\n"


class Scattered:
    """Memory of one value that lies in several places, in the order of `views`; as long as they are together."""

    __slots__ = ("_nbytes", "views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = views
        self._nbytes = sum(map(len, views))

    def __len__(self) -> int:
        return self._nbytes


class Wire:
    """One connected stream socket, for one thread at a time.

    No call to send waits longer than the timeout, and no reply is waited for longer than that from `begin` on, whether
    nothing comes or too little at a time. `bytes_in` and `bytes_out` count all payload and protocol, without TLS' own.
    """

    __slots__ = (
        "_armed_in_s",
        "_armed_out_s",
        "_deadline_s",
        "_end",
        "_pid",
        "_scratch",
        "_sock",
        "_start",
        "_timeout_s",
        "_view",
        "bytes_in",
        "bytes_out",
    )

    def __init__(self, sock: socket.socket, timeout_s: float = 10.0) -> None:
        """Take over `sock`, which is closed with the wire."""
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sock: socket.socket | None = sock
        self._pid = os.getpid()
        self._timeout_s = timeout_s
        self._armed_in_s = self._armed_out_s = 0.0
        self._arm(sock, socket.SO_RCVTIMEO, timeout_s)
        self._arm(sock, socket.SO_SNDTIMEO, timeout_s)
        self.begin()
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0  # what scratch holds and was not read yet
        self.bytes_in = 0
        self.bytes_out = 0

    # ---- state ---------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Say whether it is open: closed neither by us nor after a failure."""
        return self._sock is not None

    @property
    def is_local(self) -> bool:
        """Say whether it is a unix socket."""
        return self._sock is not None and self._sock.family == socket.AF_UNIX

    @property
    def is_loopback(self) -> bool:
        """Say whether it is a TCP connection that does not leave this host: both ends have one address."""
        sock = self._sock
        if sock is None or sock.family == socket.AF_UNIX:
            return False
        try:
            return bool(sock.getpeername()[0] == sock.getsockname()[0])
        except OSError:
            return False

    def stale(self) -> bool:
        """Look, without waiting, whether an idle wire has been closed by the server or holds bytes that were not asked
        for."""
        if self._sock is None or self._start != self._end:
            return True
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    @property
    def timeout_s(self) -> float:
        """What set_timeout has set."""
        return self._timeout_s

    def set_timeout(self, timeout_s: float) -> None:
        """Bound each send, and each reply as a whole, from the next one on. Costs next to nothing, so that who has a
        budget for many replies may say before each what is left of it."""
        self._timeout_s = timeout_s

    def begin(self) -> None:
        """Start the time in which a reply must have come, header and body."""
        self._deadline_s = time.monotonic() + self._timeout_s

    @property
    def is_ours(self) -> bool:
        """Whether this process has opened it, and not the one that it was forked from, whose it still is."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Close the socket; a second call does nothing. Shut down first, so that the server knows of it even if a
        process that was forked from this one has the socket too: it would hold for that one what it has for us."""
        sock, self._sock = self._sock, None
        if sock is not None:
            if self.is_ours:
                with suppress(OSError):  # the server has hung up
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)  # as in Connection.interrupt
            sock.close()

    def broken(self, what: str) -> BackendError:
        """Close, for the place in the stream is lost, and return the error to raise."""
        self.close()
        return BackendError(what)

    # ---- sending -------------------------------------------------------------------------------------------------

    def send_buffers(self, buffers: list[Buffer]) -> None:
        """Send flat byte buffers in order. On return the kernel has copied them: they are the caller's own again."""
        sock = self._open_socket()
        wanted = sum(map(len, buffers))
        deadline_s = time.monotonic() + self._timeout_s
        try:
            if self._armed_out_s != self._timeout_s:
                self._arm(sock, socket.SO_SNDTIMEO, self._timeout_s)
            self._send(sock, buffers, wanted, deadline_s)
        except OSError as error:
            raise self.broken(_why(error, "sending")) from error
        except BaseException:
            self.close()
            raise
        self.bytes_out += wanted

    def _send(self, sock: socket.socket, buffers: list[Buffer], wanted: int, deadline_s: float) -> None:
        """Send all of the `wanted` bytes in `buffers`, or raise OSError."""
        try:  # mostly there is room for all
            sent = sock.sendmsg(buffers if len(buffers) <= IOV_MAX else buffers[:IOV_MAX], (), AT_ONCE)
        except BlockingIOError:
            sent = 0
        first, skip = 0, sent
        while sent < wanted:  # no room, a signal came, the timeout struck halfway, or there are too many buffers
            self._wait(sock, select.POLLOUT, deadline_s)
            self._arm_for(sock, socket.SO_SNDTIMEO, self._armed_out_s, deadline_s)
            while skip >= len(buffers[first]):
                skip -= len(buffers[first])
                first += 1
            window: list[Buffer] = [memoryview(buffers[first])[skip:], *buffers[first + 1 : first + IOV_MAX]]
            count = sock.sendmsg(window, (), socket.MSG_NOSIGNAL)
            sent += count
            skip += count

    # ---- receiving -----------------------------------------------------------------------------------------------

    def line(self) -> bytes:
        """Read a line of at most SCRATCH_BYTES and return it without its CRLF."""
        scanned = 0
        while True:
            at = self._scratch.find(CRLF, self._start + scanned, self._end)
            if at >= 0:
                line = self._view[self._start : at].tobytes()
                self._start = at + 2
                return line
            scanned = max(self._end - self._start - 1, 0)  # its CR may be there already
            self._fill()

    def body(self, memory: memoryview | Scattered) -> None:
        """Read as many bytes as `memory` has into it, and the CRLF behind them."""
        views = _behind(memory.views if isinstance(memory, Scattered) else [memory], 0)
        while views and self._start < self._end:  # came along with the header: copied
            count = min(self._end - self._start, len(views[0]))
            views[0][:count] = self._view[self._start : self._start + count]
            self._start += count
            views = _behind(views, count)
        if not views:
            while self._end - self._start < 2:
                self._fill()
            ending = self._view[self._start : self._start + 2].tobytes()
            self._start += 2
        else:
            crlf = self._view[:2]  # scratch is empty by now
            views = [*views, crlf]
            while views:  # less than all: a signal, or out of time
                views = _behind(views, self._receive(views[:VIEWS_MAX], socket.MSG_WAITALL))
            ending = crlf.tobytes()
            self._start = self._end = 0
        if ending != CRLF:
            raise self.broken("no CRLF behind a bulk string")

    def discard(self, length: int) -> None:
        """Read a body of `length` bytes, and its CRLF, and drop it."""
        waste = memoryview(bytearray(min(length, DISCARD_BYTES)))
        here = min(self._end - self._start, max(length - DISCARD_BYTES, 0))
        self._start += here
        left = length - here
        while left > DISCARD_BYTES:
            left -= self._receive([waste[: left - DISCARD_BYTES]])
        self.body(waste[:left])

    def _fill(self) -> None:
        """Receive into the free end of scratch, after moving what it holds to the front if there is none."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == SCRATCH_BYTES:
            kept = self._end - self._start
            if kept == SCRATCH_BYTES:
                raise self.broken(f"a line of more than {SCRATCH_BYTES} bytes")
            self._scratch[:kept] = self._scratch[self._start : self._end]
            self._start, self._end = 0, kept
        self._end += self._receive([self._view[self._end :]])

    def _receive(self, buffers: Sequence[memoryview], flags: int = 0) -> int:
        """Receive at least one byte into `buffers`: the one place where a reply is waited for."""
        sock = self._open_socket()
        try:
            if buffers[0].readonly:  # a system call does not ask
                raise TypeError("memory that is not to be written was lent for a body")
            count = self._receive_some(sock, buffers, flags)
        except OSError as error:
            raise self.broken(_why(error, "waiting for a reply")) from error
        except BaseException:
            self.close()
            raise
        if count == 0:
            raise self.broken("closed by the server")
        self.bytes_in += count
        return count

    def _receive_some(self, sock: socket.socket, buffers: Sequence[memoryview], flags: int) -> int:
        """Receive into `buffers`, VIEWS_MAX at most, what there is, all of it with MSG_WAITALL; 0 at the end of the
        stream."""
        while True:
            self._arm_for(sock, socket.SO_RCVTIMEO, self._armed_in_s, self._deadline_s)
            count = receive(sock.fileno(), buffers, flags)
            if count >= 0:
                return count
            if count == -errno.EAGAIN:
                self._armed_in_s = math.inf  # it was set for less than is left now
            elif count != -errno.EINTR:  # a signal, whose handler has run by now
                raise OSError(-count, os.strerror(-count))

    # ---- time ----------------------------------------------------------------------------------------------------

    def _arm_for(self, sock: socket.socket, option: int, armed_s: float, deadline_s: float) -> None:
        """See to it that the next call ends at `deadline_s`. Raises TimeoutError when that is past."""
        left_s = deadline_s - time.monotonic()
        if armed_s > left_s + SLACK_S or left_s <= 0:
            if left_s <= 0:
                raise TimeoutError
            self._arm(sock, option, left_s)

    def _wait(self, sock: socket.socket, event: int, deadline_s: float) -> None:
        """Wait for a `poll` event, or for the end of the connection. Raises TimeoutError at `deadline_s`."""
        waiting = select.poll()
        waiting.register(sock, event)
        if not waiting.poll(max(deadline_s - time.monotonic(), 0) * 1000):
            raise TimeoutError

    def _arm(self, sock: socket.socket, option: int, timeout_s: float) -> None:
        """Have the kernel end waits of one direction after `timeout_s`."""
        interval = struct.pack("ll", *divmod(max(int(timeout_s * 1e6), 1), 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, option, interval)
        if option == socket.SO_RCVTIMEO:
            self._armed_in_s = timeout_s
        else:
            self._armed_out_s = timeout_s

    def _open_socket(self) -> socket.socket:
        if self._sock is None:
            raise BackendError("the connection is closed")
        if not self.is_ours:  # what is read here the other process would lack, and take the next reply for this one
            raise self.broken("the connection is the process' that this one was forked from")
        return self._sock


def _behind(views: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of `views` behind their first `count` bytes; the first of them is not empty."""
    place = 0
    while place < len(views) and count >= len(views[place]):
        count -= len(views[place])
        place += 1
    return [views[place][count:], *views[place + 1 :]] if place < len(views) else ()


def _why(error: OSError, doing: str) -> str:
    if isinstance(error, BlockingIOError | TimeoutError):
        return f"timed out {doing}"
    return f"{told(error)} while {doing}"
