"""The bench's client: the product's zero-copy socket, speaking RESP or memcached's text protocol.

A comparison is fair only when every server is driven by the same code. The languages differ in a few constant strings
(a Dialect); all bytes of all arms go through `backends.resp.wire`: one sendmsg([head, value, tail]), one receive of the
body into the caller's memory. The bench knows the length of every value it asks for, so it knows each reply's exact
first line: an error, a miss or a wrong length is a WireError that shows what came instead.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from kvredis.backends.config.url import Address
from kvredis.backends.resp import wire as sockets
from kvredis.backends.resp.connection import encode, promise_to_receive
from kvredis.backends.resp.wire import CRLF

from .errors import BenchError

_ERROR_BYTES_SHOWN = 120


class WireError(BenchError):
    """The peer answered something else than the one expected reply."""


class Dialect(Protocol):
    """The constant strings of one protocol. `key` has no spaces (memcached) and at most 250 bytes.

    Requests are whole; what is received are lines without their CRLF. A value is followed by CRLF in both protocols.
    """

    name: str
    ping: bytes
    pong: bytes
    flush: bytes
    flushed: bytes
    stored: bytes
    value_end: bytes | None  # the line behind a value, None when there is none

    def set_head(self, key: bytes, length: int) -> bytes: ...
    def get_request(self, key: bytes) -> bytes: ...
    def value_line(self, key: bytes, length: int) -> bytes: ...
    def many_request(self, keys: Sequence[bytes]) -> bytes: ...
    def many_line(self, count: int) -> bytes | None: ...


class Resp:
    """RESP2 as Redis speaks it."""

    name = "resp"
    ping, pong = b"*1\r\n$4\r\nPING\r\n", b"+PONG"
    flush, flushed = b"*1\r\n$8\r\nFLUSHALL\r\n", b"+OK"
    stored = b"+OK"
    value_end: bytes | None = None

    def set_head(self, key: bytes, length: int) -> bytes:
        return b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, length)

    def get_request(self, key: bytes) -> bytes:
        return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)

    def value_line(self, key: bytes, length: int) -> bytes:
        return b"$%d" % length

    def many_request(self, keys: Sequence[bytes]) -> bytes:
        return b"*%d\r\n$4\r\nMGET\r\n" % (1 + len(keys)) + b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys)

    def many_line(self, count: int) -> bytes | None:
        return b"*%d" % count


class MemcachedText:
    """memcached's text protocol (its doc/protocol.txt)."""

    name = "memcached"
    ping, pong = b"mn\r\n", b"MN"
    flush, flushed = b"flush_all\r\n", b"OK"
    stored = b"STORED"
    value_end: bytes | None = b"END"

    def set_head(self, key: bytes, length: int) -> bytes:
        return b"set %b 0 0 %d\r\n" % (key, length)

    def get_request(self, key: bytes) -> bytes:
        return b"get %b\r\n" % key

    def value_line(self, key: bytes, length: int) -> bytes:
        return b"VALUE %b 0 %d" % (key, length)

    def many_request(self, keys: Sequence[bytes]) -> bytes:
        return b"get %b\r\n" % b" ".join(keys)

    def many_line(self, count: int) -> bytes | None:
        return None


class Wire(sockets.Wire):
    """One blocking connection. Never owns or copies a value: callers lend the views.

    Every method raises BackendError when the connection breaks or the peer is silent for too long.
    """

    __slots__ = ("dialect",)

    def __init__(self, sock: socket.socket, dialect: Dialect, *, silence_s: float = 60.0) -> None:
        """Take `sock`, connected, and close it in the end."""
        super().__init__(sock, silence_s)
        self.dialect = dialect

    @classmethod
    def connect(cls, address: Address, dialect: Dialect) -> Wire:
        """Open a TCP (TCP_NODELAY) or unix connection; raises OSError as socket does. Over a unix socket a RESP server
        is told that this client only receives, as the product's connections tell it; to others that means nothing."""
        sock = socket.socket(socket.AF_UNIX if address.path else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if address.path:
                sock.connect(address.path)
            else:
                sock.connect((address.host, address.port))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire = cls(sock, dialect)
            if address.path and dialect.name == Resp.name:
                wire.send_buffers(encode(promise_to_receive()))
                wire.begin()
                wire.line()
            return wire
        except BaseException:
            sock.close()
            raise

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, key: bytes, value: memoryview) -> None:
        """SET: returns when the server has said that it is stored."""
        self.send_buffers([self.dialect.set_head(key, len(value)), value, CRLF])
        self.expect(self.dialect.stored)

    def get(self, key: bytes, out: memoryview) -> None:
        """GET a value of exactly len(out) bytes into `out`."""
        self.ask([key])
        self.take(key, out)

    def ask(self, keys: Sequence[bytes]) -> None:
        """Send one GET per key, in one write; each is to be answered by one take() in the same order."""
        self.send_buffers([b"".join(map(self.dialect.get_request, keys))])

    def take(self, key: bytes, out: memoryview) -> None:
        """Receive the reply to an earlier ask() into `out`."""
        self.expect(self.dialect.value_line(key, len(out)))
        self.body(out)
        if self.dialect.value_end is not None:
            self.expect(self.dialect.value_end)

    def put_many(self, pairs: Sequence[tuple[bytes, memoryview]]) -> None:
        """Pipeline one SET per (key, value), all sent before the first answer is read."""
        buffers: list[sockets.Buffer] = []
        for key, value in pairs:
            buffers += (self.dialect.set_head(key, len(value)), value, CRLF)
        self.send_buffers(buffers)
        for _ in pairs:
            self.expect(self.dialect.stored)

    def get_many(self, pairs: Sequence[tuple[bytes, memoryview]]) -> None:
        """Ask for all keys in one request (MGET, memcached's get of several), each value received into its view."""
        self.send_buffers([self.dialect.many_request([key for key, _ in pairs])])
        first = self.dialect.many_line(len(pairs))
        if first is not None:
            self.expect(first)
        for key, out in pairs:
            self.expect(self.dialect.value_line(key, len(out)))
            self.body(out)
        if self.dialect.value_end is not None:
            self.expect(self.dialect.value_end)

    def ping(self) -> None:
        """One round trip without a payload."""
        self.call(self.dialect.ping, self.dialect.pong)

    def flush(self) -> None:
        """Drop every value of the server."""
        self.call(self.dialect.flush, self.dialect.flushed)

    def call(self, request: bytes, reply: bytes) -> None:
        """Send `request` as it is; raises WireError unless the line `reply` comes back."""
        self.send_buffers([request])
        self.expect(reply)

    def expect(self, reply: bytes) -> None:
        """Read one line; raises WireError unless it is `reply`."""
        line = self.line()
        if line != reply:
            self.close()
            raise WireError(f"expected {reply!r}, the server answered {line[:_ERROR_BYTES_SHOWN]!r}")
