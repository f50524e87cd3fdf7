"""A real Server on a real event loop, and raw clients of it on the same loop, so that a test decides what comes when.

Nothing here waits for time to pass: a client sends and reads what it is told, and `until` lets the loop turn until a
condition holds.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import uvloop

from kvredis.server.client.session import Session
from kvredis.server.server import Server, ServerOptions
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.feed import Word, request

T = TypeVar("T")
LOOPS: Final = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
LIMIT_S: Final = 20
MIB: Final = 1024 * 1024
OPTIONS: Final[dict[str, Any]] = {"port": 0}
"""What each server has that is told nothing else."""
OOM: Final = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"


def run_on(loop: str, story: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on a fresh loop of that kind; it must end by itself."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(asyncio.wait_for(story, LIMIT_S))


def run_test(test: Callable[..., Coroutine[Any, Any, None]], arguments: Mapping[str, Any]) -> None:
    """Run a test that is a coroutine on the loop that its arguments name; each LiveServer among them has started."""

    async def story() -> None:
        async with AsyncExitStack() as servers:
            for each in arguments.values():
                if isinstance(each, LiveServer):
                    await servers.enter_async_context(each)
            await test(**arguments)

    run_on(arguments.get("loop", "uvloop"), story())


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until the condition holds; `run_on` bounds it."""
    while not condition():
        await asyncio.sleep(0)


def pattern(length: int, seed: int = 0) -> bytes:
    """Bytes in which a shift, and a mixture with another seed's, shows."""
    row = bytes((n + seed * 37) % 251 for n in range(251))
    return row * (length // 251) + row[: length % 251]


class Client:
    """One connection, nothing buffered on our side: what is not read stays in the kernel and with the server."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, *words: Word) -> None:
        """One command."""
        await self.send_raw(request(*words))

    async def send_raw(self, data: bytes | memoryview) -> None:
        """Bytes as they are, all of them."""
        await self._loop.sock_sendall(self._socket, data)

    async def read(self, length: int) -> bytes:
        """Exactly so many bytes; fewer only at the end of the stream."""
        data = bytearray(length)
        view = memoryview(data)
        filled = 0
        while filled < length:
            received = await self._loop.sock_recv_into(self._socket, view[filled:])
            if not received:
                break
            filled += received
        return bytes(view[:filled])

    async def read_line(self) -> bytes:
        """The bytes up to and with the next LF."""
        line = b""
        while not line.endswith(b"\n") and (byte := await self.read(1)):
            line += byte
        return line

    async def read_bulk(self) -> bytes | None:
        """A bulk's bytes, None for nil."""
        head = await self.read_line()
        if head in (b"$-1\r\n", b"_\r\n"):
            return None
        assert head[:1] == b"$", head
        body = await self.read(int(head[1:]) + 2)
        assert body[-2:] == b"\r\n"
        return body[:-2]

    async def read_all(self) -> bytes:
        """Everything until the server hangs up."""
        data = b""
        while piece := await self._loop.sock_recv(self._socket, MIB):
            data += piece
        return data

    async def ask(self, *words: Word) -> bytes:
        """One command whose reply is one line."""
        await self.send(*words)
        return await self.read_line()

    async def say_hello(self) -> None:
        """HELLO 2, its answer read and dropped: from here on this is a client that reads errors."""
        await self.send("HELLO", "2")
        await self.send("ECHO", "hello-has-ended")
        while await self.read_line() != b"hello-has-ended\r\n":
            pass

    async def get(self, key: Word) -> bytes | None:
        """GET."""
        await self.send("GET", key)
        return await self.read_bulk()

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Vanish with a RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class Closes(Protocol):
    """A client of any protocol."""

    def close(self) -> None:
        """Hang up."""


class LiveServer:
    """`async with LiveServer(folder) as live`: a store, a server, clients; at its end no client may hold anything and
    no error may have been logged."""

    def __init__(self, folder: Path, arena_bytes: int = 16 * MIB, **options: Any) -> None:
        options = {**OPTIONS, "unixsocket": str(folder / "kvredis.sock"), **options}
        self.clock_ms = 1_700_000_000_000
        self.store = Store(Arena.create(arena_bytes, HugepageMode.OFF), clock_ms=lambda: self.clock_ms)
        self.server = Server(self.store, ServerOptions(**options))
        self.complaints: list[str] = []
        self.clients: list[Closes] = []
        self._log = _Complaints(self.complaints)

    async def connect(self, kind: str = "unix", receive_bytes: int = 0) -> Client:
        """A new client over "unix" or "tcp"; `receive_bytes` makes the kernel's receive buffer small."""
        sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        sock.setblocking(False)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        address = str(self.server.unixsocket) if kind == "unix" else ("127.0.0.1", self.server.tcp_port)
        client = Client(sock)
        self.clients.append(client)
        await asyncio.get_running_loop().sock_connect(sock, address)
        return client

    def sessions(self) -> Sequence[Session]:
        """The server's side of the clients, in the order in which they came."""
        return [cast(Session, each) for each in self.server.sessions.values()]

    async def __aenter__(self) -> "LiveServer":
        logging.getLogger().addHandler(self._log)
        asyncio.get_running_loop().set_exception_handler(lambda _, told: self.complaints.append(str(told)))
        await self.server.start()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        for client in self.clients:
            client.close()
        if error is None:
            await until(lambda: not self.server.sessions)
        for session in self.sessions():  # the test has failed: what its clients were waiting for does not matter
            session.close()
        await self.server.stop()
        logging.getLogger().removeHandler(self._log)
        if error is None:
            assert not self.complaints, self.complaints
            await until(lambda: self.store.leases == 0)  # a disk's thread may be about to end its own
            assert self.store.reserved_bytes == 0
            assert self.store.retired_bytes == 0
            self.store.check_integrity()
        self.store.close()


class _Complaints(logging.Handler):
    def __init__(self, complaints: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._complaints = complaints

    def emit(self, record: logging.LogRecord) -> None:
        self._complaints.append(record.getMessage())
