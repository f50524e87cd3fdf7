"""A raw HTTP client on the test's own loop: it sends what it is told and reads one answer, or all until the end."""

import asyncio
import base64
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.live import LiveServer, run_on, until

Story = Callable[[LiveServer], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Answer:
    """One answer. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpClient:
    """One connection to the HTTP door."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._received = b""

    async def send(self, data: bytes) -> None:
        """Bytes as they are."""
        await self._loop.sock_sendall(self.sock, data)

    async def ask(self, path: str, *headers: str, method: str = "GET") -> Answer:
        """One request and its answer."""
        lines = [f"{method} {path} HTTP/1.1", *([] if any("ost:" in each for each in headers) else ["Host: localhost"])]
        await self.send("\r\n".join([*lines, *headers, "", ""]).encode("latin-1"))
        return await self.answer(has_body=method != "HEAD")

    async def answer(self, *, has_body: bool = True) -> Answer:
        """The next answer."""
        while b"\r\n\r\n" not in self._received:
            piece = await self._receive()
            assert piece, f"hung up after {self._received!r}"
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        length = int(headers["content-length"]) if has_body else 0
        while len(self._received) < length:
            piece = await self._receive()
            assert piece, "hung up in the middle of a body"
        body, self._received = self._received[:length], self._received[length:]
        return Answer(int(status.split()[1]), headers, body)

    async def read_all(self) -> bytes:
        """Everything until the server hangs up, however it does."""
        while True:
            try:
                if not await self._receive():
                    break
            except ConnectionError:
                break
        received, self._received = self._received, b""
        return received

    def close(self) -> None:
        """Hang up."""
        self.sock.close()

    async def _receive(self) -> bytes:
        piece = await self._loop.sock_recv(self.sock, 65536)
        self._received += piece
        return piece


async def connect(live: LiveServer) -> HttpClient:
    """A new connection to the HTTP door of a server; the caller closes it."""
    assert live.server.http is not None
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", live.server.http.port))
    return HttpClient(sock)


async def ask(live: LiveServer, path: str, *headers: str, method: str = "GET") -> Answer:
    """One request on a connection of its own."""
    client = await connect(live)
    try:
        return await client.ask(path, *headers, method=method)
    finally:
        client.close()


def basic(user: str, password: str) -> str:
    """The header that says who asks."""
    return "Authorization: Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def serving(loop: str, folder: Path, story: Story, **options: Any) -> None:
    """Run a story against a server with a metrics port."""

    async def whole() -> None:
        async with LiveServer(folder, **{"metrics_port": -1, **options}) as live:
            await story(live)
            assert live.server.http is not None
            await until(lambda: not live.server.http.connections)  # type: ignore[union-attr]

    run_on(loop, whole())
