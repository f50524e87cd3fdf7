"""A raw HTTP client on the test's own loop: it sends what it is told and reads one answer, or all until the end."""

import asyncio
import base64
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.live import LiveServer, until


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
    """A new connection to the HTTP endpoint of a server, which is closed with it at the latest."""
    assert live.server.http is not None
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", live.server.http.port))
    client = HttpClient(sock)
    live.clients.append(client)
    return client


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


class WebServer(LiveServer):
    """A server with a metrics port, which has forgotten its HTTP clients at the end."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **{"metrics_port": -1, **options})

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        for client in self.clients:
            client.close()
        if error is None:
            await until(lambda: self.server.http is None or not self.server.http.connections)
        await super().__aexit__(kind, error, trace)
