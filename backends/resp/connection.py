"""Our own RESP2 client on one socket: payloads go from and to the caller's memory without a copy in between.

General clients read a reply into buffers of their own and then copy it; for blocks of a megabyte that costs two to
nine times what the kernel's copy does. Here SET is one `sendmsg` of [header, the caller's views, CRLF], and GET is one
small send, one short receive that brings the header, and one receive of the body and its CRLF into the caller's view.

A failure of socket or protocol raises BackendError and ends the connection. An error that the server replies is an
ordinary value: a BackendError that is returned, with Redis' text, and the connection goes on.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from kvredis.backends.config.url import Address, parse_url
from kvredis.storage.errors import BackendError

from .sockets import open_socket
from .tls_wire import TlsWire
from .wire import CRLF, Buffer, Scattered, Wire

Reply = str | int | bytes | BackendError | list["Reply"] | None
"""A simple string, an integer, a bulk string, an error that the server replied, an array of these, nil."""

Allocate = Callable[[int], memoryview | Scattered | None]
"""Lends writable memory for a body of that many bytes, exactly as long; None when there is no room for it."""

JOIN_BYTES_MAX: Final = 4 * 1024
"""Arguments up to this are copied into the command's header; longer ones are lent to the kernel."""
BULK_BYTES_MAX: Final = 512 * 1024 * 1024
"""A longer bulk string for which memory is taken here breaks the protocol (Redis' proto-max-bulk-len)."""
BODY_BYTES_MAX: Final = 10**10 - 1
"""The same of one that comes into lent memory. Servers may be told to take more than Redis does; who lends the memory
bounds what is kept, and the time what is dropped."""
ARRAY_ITEMS_MAX: Final = 1024 * 1024
OPTIONAL: Final = (b"HELLO", b"KV.SPLICE")
"""Greetings that may fail: Redis 5 does not know the one, and none but kvredis the other."""
FULL: Final = "ERR max number of clients"
"""What a server says to one connection too many, before it hangs up."""
DEPTH_MAX: Final = 16
"""Arrays within arrays."""


class ServerFull(BackendError):
    """Raised when the server has as many connections as it takes."""


class Connection(Wire):
    """One connection to one server, for one thread at a time.

    Requests may be pipelined: replies come in the order of the requests, and the caller reads as many as it sent. A
    caller that sends without reading keeps what is owed to it small (a few hundred short replies, a few dozen long
    ones), or both sides end up waiting for the other to read.
    """

    __slots__ = ("io_threads",)

    def __init__(self, sock: socket.socket, timeout_s: float = 10.0) -> None:
        super().__init__(sock, timeout_s)
        self.io_threads = 1
        """By how many threads the server sends, as it has told: HELLO's `io-threads`."""

    @classmethod
    def open(cls, address: Address | str, timeout_s: float = 10.0) -> Connection:
        """Connect, authenticate and select the database, within `timeout_s` in all.

        Raises BackendError when the server is not there or refuses us (ServerFull: for others' sake), ConfigError for a
        URL that is none.
        """
        address = parse_url(address) if isinstance(address, str) else address
        deadline_s = time.monotonic() + timeout_s
        sock = open_socket(address, timeout_s)
        connection = cls(sock, timeout_s) if address.tls is None else TlsConnection(sock, timeout_s)
        try:
            connection._greet(address, deadline_s)
        except BaseException:
            connection.close()
            raise
        connection.set_timeout(timeout_s)
        return connection

    def _greet(self, address: Address, deadline_s: float) -> None:
        greetings: list[list[Buffer]] = []
        if address.password:
            user = [address.username.encode()] if address.username else []
            greetings.append([b"AUTH", *user, address.password.encode()])
        greetings.append([b"HELLO", b"2"])  # kvredis hangs up after -OOM on clients that have not said it
        if address.db:
            greetings.append([b"SELECT", b"%d" % address.db])
        if address.path and not address.tls:
            greetings.append(promise_to_receive())
        self.set_timeout(deadline_s - time.monotonic())
        words = b"".join([bytes(part) for greeting in greetings for part in encode(greeting)])
        with suppress(OSError):  # a server that has hung up may have said why before
            self._send(self._open_socket(), [words], len(words), deadline_s)
        self.bytes_out += len(words)
        for greeting in greetings:
            self.set_timeout(deadline_s - time.monotonic())
            reply = self.read()
            if greeting[0] == b"HELLO" and isinstance(threads := read_map(reply).get("io-threads"), int):
                self.io_threads = threads
            if isinstance(reply, BackendError):
                refused = f"{address}: {bytes(greeting[0]).decode()} refused: {reply}"
                if str(reply).startswith(FULL):
                    raise ServerFull(refused)
                if greeting[0] not in OPTIONAL:
                    raise BackendError(refused)

    # ---- requests ------------------------------------------------------------------------------------------------

    def send(self, args: Sequence[Buffer]) -> None:
        """Send one command. On return the kernel has all of it: the caller's buffers are its own again."""
        self.send_buffers(encode(args))

    def send_many(self, commands: Iterable[Sequence[Buffer]]) -> None:
        """Send several commands in as few system calls as the kernel takes."""
        buffers: list[Buffer] = []
        small: list[Buffer] = []
        for args in commands:
            encoded = encode(args)
            small.append(encoded[0])
            if len(encoded) > 1:
                buffers += (b"".join(small), *encoded[1:-1])
                small = [encoded[-1]]
        if small:
            buffers.append(b"".join(small))
        if buffers:
            self.send_buffers(buffers)

    def send_set(self, key: bytes, *views: Buffer) -> None:
        """Send SET of a value that is given as one or several buffers, lent to the kernel and not joined."""
        flat = [_flat(view) for view in views]
        header = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, sum(map(len, flat)))
        self.send_buffers([header, *flat, CRLF])

    # ---- replies -------------------------------------------------------------------------------------------------

    def read(self) -> Reply:
        """Read the next reply whole. A bulk string comes as bytes of its own; for payloads use read_bulk_into."""
        self.begin()
        return self._item(DEPTH_MAX)

    def _item(self, depth_max: int) -> Reply:
        line = self.line()
        if line[:1] == b"$":
            length = self._count(line, BULK_BYTES_MAX)
            if length is None:
                return None
            value = bytearray(length)
            self.body(memoryview(value))
            return bytes(value)
        if line[:1] == b"*":
            count = self._count(line, ARRAY_ITEMS_MAX)
            if count is None:
                return None
            if depth_max <= 0:
                raise self.broken(f"arrays nested more than {DEPTH_MAX} deep")
            return [self._item(depth_max - 1) for _ in range(count)]
        return self._scalar(line)

    def read_bulk_into(self, allocate: Allocate) -> int | BackendError | None:
        """Read a bulk string into the memory that `allocate(length)` lends, and return its length.

        When `allocate` gives None the body is read and dropped, and its length is returned all the same. nil gives
        None, and an error of the server its value.
        """
        self.begin()
        line = self.line()
        if line[:1] != b"$":
            return self._error(line, "a bulk string")
        length = self._count(line, BODY_BYTES_MAX)
        if length is None:
            return None
        try:
            memory = allocate(length)
            if memory is not None and len(memory) != length:
                raise ValueError(f"lent {len(memory)} bytes for a body of {length}")
        except BaseException:
            self.close()
            raise
        if memory is None:
            self.discard(length)
        else:
            self.body(memory)
        return length

    # ---- a request and its reply ---------------------------------------------------------------------------------

    def call(self, *args: Buffer) -> Reply:
        """Send one command and read its reply."""
        self.send(args)
        return self.read()

    def set(self, key: bytes, *views: Buffer) -> Reply:
        """SET; the reply is "OK" or an error."""
        self.send_set(key, *views)
        return self.read()

    @property
    def has_leases(self) -> bool:
        """Whether something is held by way of it that would end if it were closed."""
        return False

    def interrupt(self) -> None:
        """Make whatever waits on it fail at once, and all that is tried on it later: the one call for other threads. In
        a process that was forked from the one that opened it this does nothing."""
        sock = self._sock
        if sock is not None and self.is_ours:
            with suppress(OSError):  # closed meanwhile
                # Not SSLSocket's own, which forgets TLS first: a reader would take what is left for plain bytes.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _count(self, line: bytes, high: int) -> int | None:
        """Read the length in a header: None for nil, else 0 to `high`."""
        digits = line[1:]
        if digits == b"-1":
            return None
        if not digits.isdigit() or len(digits) > 10 or int(digits) > high:
            raise self.broken(f"a length that is none: {line[:40]!r}")
        return int(digits)

    def _scalar(self, line: bytes) -> str | int | BackendError:
        """Read a reply that is one line: status, integer or error."""
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode("utf-8", "replace")
        if kind == b"-":
            return BackendError(rest.decode("utf-8", "replace"))
        if kind == b":" and rest.removeprefix(b"-").isdigit() and len(rest) <= 20:
            return int(rest)
        raise self.broken(f"not a reply: {line[:40]!r}")

    def _error(self, line: bytes, wanted: str) -> BackendError:
        """Read an error where something else was due; anything but an error breaks the protocol."""
        if line[:1] == b"-":
            return BackendError(line[1:].decode("utf-8", "replace"))
        raise self.broken(f"want {wanted}, got {line[:40]!r}")


class TlsConnection(TlsWire, Connection):
    """The same over TLS."""

    __slots__ = ()


def encode(args: Sequence[Buffer]) -> list[Buffer]:
    """Write a command as buffers to send: short arguments joined with the headers, long ones lent as they are."""
    buffers: list[Buffer] = []
    pieces: list[Buffer] = [b"*%d\r\n" % len(args)]
    for arg in args:
        flat = _flat(arg)
        header = b"$%d\r\n" % len(flat)
        if len(flat) <= JOIN_BYTES_MAX:
            pieces += (header, flat, CRLF)
        else:
            pieces.append(header)
            buffers += (b"".join(pieces), flat)
            pieces = [CRLF]
    buffers.append(b"".join(pieces))
    return buffers


def promise_to_receive() -> list[Buffer]:
    """KV.SPLICE, for a unix socket that this process has just connected: whatever comes is copied out by recv and the
    like, never spliced on, so that a server may lend pages to the socket. Where it is refused nothing is different."""
    return [b"KV.SPLICE", b"%d" % os.getpid(), b"%d" % os.stat("/proc/self/ns/pid").st_ino]


def read_map(reply: Reply) -> dict[str, Reply]:
    """Read a map that came as RESP2's flat array; empty when it is none."""
    if not isinstance(reply, list) or len(reply) % 2:
        return {}
    names = [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in reply[::2]]
    return dict(zip(names, reply[1::2], strict=True))


def _flat(buffer: Buffer) -> Buffer:
    """View any contiguous buffer as bytes, so that len() counts bytes."""
    if isinstance(buffer, bytes | bytearray):
        return buffer
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
