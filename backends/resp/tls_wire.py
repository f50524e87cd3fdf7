"""The wire over TLS: decrypted straight into the caller's memory, encrypted straight out of it.

OpenSSL takes the kernel's own timeouts for a reason to ask again, for ever, so that here Python's timeout bounds the
waits; the sockets then do not block, and Python polls only when nothing has come yet. A receive gives one record of at
most 16 KiB: what MSG_WAITALL does on a plain socket is a loop here.
"""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from .wire import Buffer, Wire

RECORD_BYTES: Final = 16 * 1024
"""The most that TLS encrypts at once; shorter buffers are joined up to it, longer ones are lent as they are."""


class TlsWire(Wire):
    """A Wire whose socket is an ssl.SSLSocket, past its handshake."""

    __slots__ = ()

    def stale(self) -> bool:
        """As Wire.stale. Bytes on the socket are no sign here: a server may send session tickets at any time."""
        sock = self._sock
        if sock is None or self._start != self._end:
            return True
        self._start = self._end = 0
        try:
            sock.settimeout(0.0)
            self._end = sock.recv_into(self._view)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
        finally:
            self._arm(sock, socket.SO_RCVTIMEO, self._timeout_s)
        return True

    def _send(self, sock: socket.socket, buffers: list[Buffer], wanted: int, deadline_s: float) -> None:
        for buffer in _in_records(buffers):
            view = memoryview(buffer)
            while view:
                self._arm_for(sock, socket.SO_SNDTIMEO, self._armed_out_s, deadline_s)
                view = view[sock.send(view) :]

    def _receive_some(self, sock: socket.socket, buffers: Sequence[memoryview], flags: int) -> int:
        into, done = buffers[0], 0
        while done < (len(into) if flags & socket.MSG_WAITALL else 1):
            self._arm_for(sock, socket.SO_RCVTIMEO, self._armed_in_s, self._deadline_s)
            try:
                count = sock.recv_into(into[done:])
            except TimeoutError:
                self._armed_in_s = math.inf  # it was set for less than is left now, or nothing is left
                continue
            if count == 0:
                break
            done += count
        return done

    def _arm(self, sock: socket.socket, option: int, timeout_s: float) -> None:
        sock.settimeout(max(timeout_s, 1e-6))  # of both directions
        self._armed_in_s = self._armed_out_s = timeout_s


def _in_records(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """Join neighbours that fit into one record: a record of two bytes costs a system call, and a packet."""
    joined = bytearray()
    for buffer in buffers:
        if len(joined) + len(buffer) <= RECORD_BYTES:
            joined += buffer
            continue
        if joined:
            yield joined
        joined = bytearray()
        if len(buffer) > RECORD_BYTES:
            yield buffer
        else:
            joined += buffer
    if joined:
        yield joined
