"""A TLS client on the test's own loop: the test decides when a byte is sent and when one is taken from the kernel."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.server.feed import Word, request
from tests.server.live import MIB, LiveServer

PIECE = 16 * 1024


class TlsClient:
    """A TLS client that takes no more from the kernel than it is asked to read: a slow reader when it is not asked."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out, server_hostname="localhost")

    async def until_done(self, step: Callable[[], Any]) -> Any:
        """Call `step` with what it lacks of the server's bytes; its own bytes go out. SSLEOFError at their end."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                await self.send_out()
                piece = await self._loop.sock_recv(self.sock, PIECE)
                self._in.write(piece) if piece else self._in.write_eof()
            finally:
                await self.send_out()

    async def send_out(self) -> None:
        """Hand what is encrypted to the kernel."""
        if self._out.pending:
            await self._loop.sock_sendall(self.sock, self._out.read())

    async def shake_hands(self, and_send: bytes = b"") -> None:
        """Do the handshake; `and_send` goes out together with its last words."""

        def step() -> None:
            self.tls.do_handshake()
            if and_send:
                self.tls.write(and_send)

        await self.until_done(step)

    async def send(self, *words: Word) -> None:
        """One command."""
        data = memoryview(request(*words))
        for at in range(0, len(data), MIB):
            self.tls.write(data[at : at + MIB])
            await self.send_out()

    async def read(self, length: int) -> bytes:
        """So many bytes; fewer only at the end of the stream, however it came."""
        data = bytearray()
        while len(data) < length:
            try:
                piece = await self.until_done(partial(self.tls.read, min(PIECE, length - len(data))))
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError):
                break
            if not piece:
                break
            data += piece
        return bytes(data)

    async def ask(self, *words: Word) -> bytes:
        """One command whose reply is one line."""
        await self.send(*words)
        line = b""
        while not line.endswith(b"\n") and (byte := await self.read(1)):
            line += byte
        return line

    async def get(self, key: str) -> bytes:
        """GET of a key that is there."""
        head = await self.ask("GET", key)
        return (await self.read(int(head[1:]) + 2))[:-2]

    async def close(self) -> None:
        """Say goodbye as a library does, and hang up."""
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            await self.until_done(self.tls.unwrap)
        self.sock.close()


async def connect_plain(live: LiveServer, receive_bytes: int = 0) -> socket.socket:
    """A TCP connection to the TLS port, and not a word yet."""
    sock = socket.socket()
    sock.setblocking(False)
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", live.server.listeners.tls_port))
    return sock


async def connect(live: LiveServer, context: ssl.SSLContext, receive_bytes: int = 0) -> TlsClient:
    """A client that has shaken hands."""
    client = TlsClient(await connect_plain(live, receive_bytes), context)
    await client.shake_hands()
    return client


async def read_to_end(sock: socket.socket) -> bytes:
    """What still comes until the server hangs up."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := await asyncio.get_running_loop().sock_recv(sock, PIECE):
            data += piece
    sock.close()
    return bytes(data)
