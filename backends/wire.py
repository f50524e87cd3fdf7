"""Bytes on a blocking socket, with bounds: lines into a small scratch buffer, bodies straight into a caller's memory.

The socket blocks in the kernel with the kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO) and not in Python's `poll`:
that saves a system call each time and lets MSG_WAITALL wait for a whole body at once.

After any failure the position in the stream is lost: the wire closes itself and raises BackendError from then on.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Final

from kvredis.storage.errors import BackendError

Buffer = bytes | bytearray | memoryview

SCRATCH_BYTES: Final = 8 * 1024
"""Receives lines, small replies and the first bytes of a body, which are then copied; also the bound on a line."""
SEND_BUFFER_BYTES: Final = 512 * 1024
"""Keeps what is in flight inside the caches: four megabytes were slower, and 64 KiB cost wake-ups."""
IOV_MAX: Final = 1024
"""Buffers in one sendmsg, on Linux."""
DISCARD_BYTES: Final = 256 * 1024
CRLF: Final = b"\r\n"


class Wire:
    """One connected stream socket, for one thread at a time.

    No call waits longer than about twice the timeout: once inside the kernel and once more for the rest of what came
    in part. `bytes_in` and `bytes_out` count all that went over the socket.
    """

    __slots__ = ("_end", "_scratch", "_sock", "_start", "_timeout_s", "_view", "bytes_in", "bytes_out")

    def __init__(self, sock: socket.socket, timeout_s: float = 10.0) -> None:
        """Take over `sock`, which is closed with the wire."""
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sock: socket.socket | None = sock
        self.set_timeout(timeout_s)
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0  # what scratch holds and nobody has read yet
        self.bytes_in = 0
        self.bytes_out = 0

    # ---- state ---------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Say whether it is open: closed neither by us nor after a failure."""
        return self._sock is not None

    def stale(self) -> bool:
        """Look, without waiting, whether an idle wire has been closed by the server or holds bytes nobody asked for."""
        if self._sock is None or self._start != self._end:
            return True
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def set_timeout(self, timeout_s: float) -> None:
        """Bound the waits from now on."""
        interval = struct.pack("ll", *divmod(max(int(timeout_s * 1e6), 1), 1_000_000))
        sock = self._open_socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        self._timeout_s = timeout_s

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        sock, self._sock = self._sock, None
        if sock is not None:
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
        try:
            sent = sock.sendmsg(buffers if len(buffers) <= IOV_MAX else buffers[:IOV_MAX], (), socket.MSG_NOSIGNAL)
            if sent != wanted:
                self._send_rest(sock, buffers, sent, wanted)
        except OSError as error:
            raise self.broken(_why(error, "sending")) from error
        except BaseException:
            self.close()
            raise
        self.bytes_out += wanted

    def _send_rest(self, sock: socket.socket, buffers: list[Buffer], sent: int, wanted: int) -> None:
        """Go on after a partial send: a signal came, the timeout struck halfway, or there are too many buffers."""
        deadline = time.monotonic() + self._timeout_s
        first, skip = 0, sent
        while sent < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError
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
        scanned, deadline = 0, 0.0
        while True:
            at = self._scratch.find(CRLF, self._start + scanned, self._end)
            if at >= 0:
                line = self._view[self._start : at].tobytes()
                self._start = at + 2
                return line
            scanned = max(self._end - self._start - 1, 0)  # its CR may be there already
            self._fill()
            deadline = self._in_time(deadline)

    def body(self, view: memoryview) -> None:
        """Read as many bytes as `view` has into it, and the CRLF behind them."""
        length = len(view)
        done = min(self._end - self._start, length)
        if done:
            view[:done] = self._view[self._start : self._start + done]  # came along with the header: copied
            self._start += done
        if done == length:
            while self._end - self._start < 2:
                self._fill()
            ending = self._view[self._start : self._start + 2].tobytes()
            self._start += 2
        else:
            crlf, deadline = self._view[:2], 0.0  # scratch is empty by now
            while done < length + 2:
                parts = [view[done:], crlf] if done < length else [crlf[done - length :]]
                done += self._receive(parts, socket.MSG_WAITALL)
                if done < length + 2:  # a signal or the timeout cut the wait short
                    deadline = self._in_time(deadline)
            ending = crlf.tobytes()
            self._start = self._end = 0
        if ending != CRLF:
            raise self.broken("no CRLF behind a bulk string")

    def discard(self, length: int) -> None:
        """Read a body of `length` bytes, and its CRLF, and drop it."""
        waste = memoryview(bytearray(min(length, DISCARD_BYTES)))
        here = min(self._end - self._start, max(length - DISCARD_BYTES, 0))
        self._start += here
        left, deadline = length - here, 0.0
        while left > DISCARD_BYTES:
            left -= self._receive([waste[: left - DISCARD_BYTES]])
            deadline = self._in_time(deadline)
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

    def _receive(self, buffers: list[memoryview], flags: int = 0) -> int:
        """Receive at least one byte into `buffers`: the one place where a reply is waited for."""
        sock = self._open_socket()
        try:
            count = sock.recvmsg_into(buffers, 0, flags)[0]
        except OSError as error:
            raise self.broken(_why(error, "waiting for a reply")) from error
        except BaseException:
            self.close()
            raise
        if count == 0:
            raise self.broken("closed by the server")
        self.bytes_in += count
        return count

    def _in_time(self, deadline: float) -> float:
        """Start a deadline (0.0: none yet) or check it; for what arrives in many small parts."""
        now = time.monotonic()
        if deadline == 0.0:
            return now + self._timeout_s
        if now > deadline:
            raise self.broken("timed out within a reply")
        return deadline

    def _open_socket(self) -> socket.socket:
        if self._sock is None:
            raise BackendError("the connection is closed")
        return self._sock


def _why(error: OSError, doing: str) -> str:
    if isinstance(error, BlockingIOError | TimeoutError):
        return f"timed out {doing}"
    return f"{error.strerror or error} while {doing}"
