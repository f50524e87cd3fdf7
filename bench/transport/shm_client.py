"""A raw client of the same-host lane, for timing: the server's arena mapped read-only, leases in batches.

It speaks the commands themselves and decides nothing: KV.ATTACH, KV.LEASE, KV.RELEASE, KV.LEND, KV.PUT over one unix
socket. The server keeps the bytes of a lease where they are until it is released or its time limit has passed; a reader
knows that what it read was valid when, after using it, that time has not passed and the socket is still open.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final

from kvredis.backends.resp.wire import CRLF
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.workload import Memory
from kvredis.storage.memory.arena import Arena
from kvredis.storage.memory.copy import copy

SILENCE_S: Final = 30
_REPLY_BYTES: Final = 64 * 1024
_ERROR_BYTES_SHOWN: Final = 120
_DESCRIPTORS: Final = 2

Place = tuple[int, int]
"""Offset and length in the arena, bytes."""


class LaneMissing(BenchError):
    """Raised when the server has no same-host lane, or gives this client none."""


class LentMemory:
    """A copy of `source` in memory as an engine's is that lends it: an arena, sealed as such, faulted in."""

    def __init__(self, source: Memory) -> None:
        self._arena = Arena.create(source.nbytes)
        self.nbytes = self._arena.nbytes
        """Whole pages, which may be large ones."""
        self.fd = self._arena.fd
        with self._arena.view[: source.nbytes] as room:
            copy(room, source.view)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._arena.close()
        self.fd = -1


class LaneClient:
    """One attached connection. Use it in a with-block. Raises BenchError when a reply is not the one expected."""

    def __init__(self, path: str) -> None:
        """Connect to the unix socket at `path` and attach. Raises LaneMissing when the server refuses."""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._side: socket.socket | None = None
        self._arena: mmap.mmap | None = None
        self.limit_s = 0.0
        self.facts: dict[str, int | str] = {}
        try:
            self._sock.connect(path)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # the kernel's own: no poll before each receive
                self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", SILENCE_S, 0))
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        self._sock.sendall(request(b"KV.ATTACH"))
        data, fds = self._reply_with_fds()
        try:
            if data[:1] == b"-":
                raise LaneMissing(f"the server gives no lane: {data[1:_ERROR_BYTES_SHOWN].decode(errors='replace')}")
            items = _items(data)
            if items is None:
                raise BenchError(f"KV.ATTACH was answered {data[:_ERROR_BYTES_SHOWN]!r}")
            self.facts = dict(zip(map(str, items[::2]), items[1::2], strict=True))
            if len(fds) != _DESCRIPTORS:
                raise BenchError(f"KV.ATTACH came with {len(fds)} descriptors instead of {_DESCRIPTORS}")
            self.limit_s = int(self.facts["lease-ms"]) / 1e3
            size = int(self.facts["arena-bytes"])
            self._arena = mmap.mmap(fds[0], size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
            self.view = memoryview(self._arena)
            self._side = socket.socket(fileno=fds.pop())
        finally:
            for fd in fds:
                os.close(fd)

    def _reply_with_fds(self) -> tuple[bytes, list[int]]:
        """Receive the reply to KV.ATTACH whole, and what came with its first byte."""
        data, fds = b"", array.array("i")
        while not (data[:1] == b"-" and data.endswith(CRLF)) and _items(data) is None:
            part, control, _flags, _address = self._sock.recvmsg(
                _REPLY_BYTES, socket.CMSG_SPACE(_DESCRIPTORS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, payload in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            if not part:
                raise BenchError("the server hung up on KV.ATTACH")
            data += part
        return data, list(fds)

    def lease(self, keys: Sequence[bytes], done: Sequence[Place] = ()) -> list[Place]:
        """Lease every key, all of which must be there and large enough to lie in the arena.

        Leases that are `done` are given back in the same write, before: a batch then costs one round trip.
        """
        given_back = _release(done) if done else b""
        self._sock.sendall(given_back + request(b"KV.LEASE", b"0", *keys))
        lines = self._lines(1 + 3 * len(keys) + bool(done))
        if done:
            self._same(lines.pop(0), b":%d" % len(done))
        if lines[0] != b"*%d" % len(keys) or lines[1::3].count(b"*2") != len(keys):
            raise BenchError(f"KV.LEASE was answered {CRLF.join(lines[:6])!r}")
        return [(int(at[1:]), int(size[1:])) for at, size in zip(lines[2::3], lines[3::3], strict=True)]

    def release(self, places: Sequence[Place]) -> None:
        """Give leases back; BenchError when one of them had ended before."""
        self._sock.sendall(_release(places))
        self._expect(b":%d" % len(places))

    def holds(self, since_s: float) -> bool:
        """Say whether what was leased after monotonic time `since_s` is valid still: in time, and the socket open."""
        if time.monotonic() >= since_s + self.limit_s:
            return False
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True

    def block(self, place: Place) -> memoryview:
        """View a lease's bytes."""
        return self.view[place[0] : place[0] + place[1]]

    def lend(self, memory: LentMemory) -> None:
        """Let the server read `memory` for KV.PUT."""
        assert self._side is not None, "attached"
        socket.send_fds(self._side, [b"m"], [memory.fd])
        self._sock.sendall(request(b"KV.LEND"))
        self._expect(b":%d" % memory.nbytes)

    def put_many(self, pieces: Sequence[tuple[bytes, int, int]]) -> None:
        """Pipeline one KV.PUT of lent memory per (key, offset, length)."""
        commands = [request(b"KV.PUT", key, b"%d" % at, b"%d" % length) for key, at, length in pieces]
        self._sock.sendall(b"".join(commands))
        lines = self._lines(len(pieces))
        if lines.count(b"+OK") != len(pieces):
            wrong = next(line for line in lines if line != b"+OK")
            raise BenchError(f"KV.PUT was answered {wrong[:_ERROR_BYTES_SHOWN]!r}")

    def _lines(self, count: int) -> list[bytes]:
        """Receive exactly `count` lines, or fewer that begin with an error."""
        data = b""
        while data.count(CRLF) < count and not (data[:1] == b"-" and data.endswith(CRLF)):
            try:
                part = self._sock.recv(_REPLY_BYTES)
            except BlockingIOError as error:
                raise BenchError(f"the lane was silent after {data[:_ERROR_BYTES_SHOWN]!r}") from error
            if not part:
                raise BenchError("the server hung up on the lane")
            data += part
        if not data.endswith(CRLF) or data[:1] == b"-":
            raise BenchError(f"the lane was answered {data[:_ERROR_BYTES_SHOWN]!r}")
        return data[:-2].split(CRLF)

    def _expect(self, reply: bytes) -> None:
        self._same(self._lines(1)[0], reply)

    def _same(self, line: bytes, reply: bytes) -> None:
        if line != reply:
            raise BenchError(f"expected {reply!r} on the lane, the server answered {line[:_ERROR_BYTES_SHOWN]!r}")

    def close(self) -> None:
        """Hang up, which ends every lease, and let go of the mapping. Idempotent."""
        self._sock.close()
        if self._side is not None:
            self._side.close()
        arena, self._arena = self._arena, None
        if arena is not None:
            with suppress(BufferError):  # an error on its way holds views, and is what the user must see
                self.view.release()
                arena.close()

    def __enter__(self) -> LaneClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def request(*words: bytes) -> bytes:
    """Encode one command."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def _release(places: Sequence[Place]) -> bytes:
    return request(b"KV.RELEASE", *[b"%d" % at for at, _ in places])


def _items(data: bytes) -> list[int | str] | None:
    """Read a map or an array of integers and strings; None while it is not whole. BenchError for anything else."""
    lines = data.split(CRLF)
    if len(lines) < 2:
        return None
    if data[:1] not in (b"*", b"%") or not lines[0][1:].isdigit():
        raise BenchError(f"want a map, the server answered {data[:_ERROR_BYTES_SHOWN]!r}")
    wanted, items, at = int(lines[0][1:]) * (2 if data[:1] == b"%" else 1), list[int | str](), 1
    while len(items) < wanted:
        strings = lines[at][:1] == b"$"
        if at + strings >= len(lines) - 1:  # the last one is what follows the last CRLF
            return None
        items.append(lines[at + 1].decode() if strings else int(lines[at][1:]))
        at += 1 + strings
    return items
