"""The bench's client reads both protocols right wherever the stream is cut, and takes no other reply for its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvredis.bench.core.wire import Dialect, MemcachedText, Resp, Wire, WireError
from kvredis.storage.errors import BackendError

KEY = b"bench:7:00001"
VALUE = b"a\r\nb\x00c$"
DIALECTS = [pytest.param(Resp(), id="resp"), pytest.param(MemcachedText(), id="memcached")]


class ChoppedSocket(socket.socket):
    """A socket whose first transfers each way move the given numbers of bytes at most."""

    pieces: Sequence[int] = ()
    calls = 0

    def piece(self) -> int:
        self.calls += 1
        return self.pieces[self.calls - 1] if self.calls <= len(self.pieces) else 1 << 30

    def sendmsg(self, buffers: Any, *rest: Any) -> int:
        return super().sendmsg(_first(buffers, self.piece()), *rest)


class ChoppedWire(Wire):
    """A wire over a ChoppedSocket."""

    __slots__ = ()

    def _receive_some(self, sock: socket.socket, buffers: Sequence[memoryview], flags: int) -> int:
        assert isinstance(sock, ChoppedSocket)
        return super()._receive_some(sock, _first(buffers, sock.piece()), flags)


def _first(buffers: Sequence[Any], nbytes: int) -> list[memoryview]:
    kept = []
    for buffer in buffers:
        kept.append(memoryview(buffer)[:nbytes])
        nbytes -= len(kept[-1])
    return [view for view in kept if len(view)]


@contextmanager
def chopped(
    dialect: Dialect, pieces: Sequence[int] = (), silence_s: float = 10
) -> Iterator[tuple[Wire, socket.socket]]:
    ours, theirs = socket.socketpair()
    sock = ChoppedSocket(fileno=ours.detach())
    sock.pieces = pieces
    with theirs, ChoppedWire(sock, dialect, silence_s=silence_s) as wire:
        yield wire, theirs


def reply(dialect: Dialect, value: bytes = VALUE) -> bytes:
    return dialect.value_line(KEY, len(value)) + b"\r\n" + value + b"\r\n" + (b"END\r\n" if dialect.value_end else b"")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_value_arrives_whole_wherever_its_reply_is_cut(dialect: Dialect) -> None:
    whole = reply(dialect)
    for first in range(1, len(whole) + 1):
        for second in range(1, len(whole) - first + 1):
            with chopped(dialect, (first, second)) as (wire, server):
                server.sendall(whole)
                out = bytearray(len(VALUE))
                wire.take(KEY, memoryview(out))
                assert out == VALUE, f"cut after {first} and {first + second} bytes"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_request_leaves_whole_wherever_the_socket_cuts_it(dialect: Dialect) -> None:
    request = dialect.set_head(KEY, len(VALUE)) + VALUE + b"\r\n"
    for first in range(1, len(request)):
        with chopped(dialect, (first, 1)) as (wire, server):
            server.sendall(dialect.stored + b"\r\n")
            wire.put(KEY, memoryview(VALUE))
            assert server.recv(4096) == request


@pytest.mark.parametrize("dialect", DIALECTS)
def test_pipelined_replies_never_run_into_each_other(dialect: Dialect) -> None:
    values = [bytes([letter]) * 5 for letter in b"abc"]
    stream = b"".join(reply(dialect, value) for value in values)
    for first in range(1, len(stream)):
        with chopped(dialect, (1 << 30, first)) as (wire, server):  # the first piece is the request
            server.sendall(stream)
            wire.ask([KEY] * 3)
            outs = [bytearray(5) for _ in values]
            for out in outs:
                wire.take(KEY, memoryview(out))
            assert outs == values


@pytest.mark.parametrize(
    ("dialect", "answer"),
    [
        (Resp(), b"$-1\r\n"),
        (Resp(), b"-ERR no\r\n"),
        (Resp(), b"$6\r\n"),
        (MemcachedText(), b"END\r\n"),
        (MemcachedText(), b"SERVER_ERROR out of memory storing object\r\n"),
        (MemcachedText(), b"VALUE another 0 7\r\n"),
    ],
)
def test_any_other_reply_is_an_error_that_shows_it_at_once(dialect: Dialect, answer: bytes) -> None:
    for first in range(1, len(answer) + 1):
        with chopped(dialect, (first,)) as (wire, server):
            server.sendall(answer)
            with pytest.raises(WireError, match="the server answered"):
                wire.take(KEY, memoryview(bytearray(len(VALUE))))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_value_that_is_longer_than_said_is_noticed_at_its_end(dialect: Dialect) -> None:
    with chopped(dialect) as (wire, server):
        server.sendall(dialect.value_line(KEY, len(VALUE)) + b"\r\n" + VALUE + b"extra bytes")
        with pytest.raises(BackendError, match="no CRLF"):
            wire.take(KEY, memoryview(bytearray(len(VALUE))))


def test_a_refused_set_is_an_error() -> None:
    with chopped(Resp()) as (wire, server):
        server.sendall(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
        with pytest.raises(WireError, match="OOM"):
            wire.put(KEY, memoryview(VALUE))


def test_a_server_that_hangs_up_in_the_middle_is_an_error() -> None:
    whole = reply(Resp())
    for sent in range(len(whole)):
        with chopped(Resp()) as (wire, server):
            server.sendall(whole[:sent])
            server.shutdown(socket.SHUT_WR)
            with pytest.raises(BackendError, match="closed by the server"):
                wire.take(KEY, memoryview(bytearray(len(VALUE))))


def test_a_silent_server_is_an_error_in_the_end() -> None:
    with chopped(Resp(), silence_s=0.01) as (wire, _server), pytest.raises(BackendError, match="timed out"):
        wire.ping()


def test_a_connection_that_is_gone_is_an_error_when_sending() -> None:
    with chopped(Resp()) as (wire, server):
        server.close()
        with pytest.raises(BackendError, match="sending"):
            wire.put(KEY, memoryview(VALUE))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_ping_and_flush_are_one_round_trip(dialect: Dialect) -> None:
    with chopped(dialect) as (wire, server):
        server.sendall(dialect.pong + b"\r\n" + dialect.flushed + b"\r\n")
        wire.ping()
        wire.flush()
        assert server.recv(100) == dialect.ping + dialect.flush
