"""A client of the same-host lane on the test's own loop: attached, with the arena mapped, and with memory to lend."""

import array
import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import hiredis

from tests.server.feed import Word, request
from tests.server.live import LiveServer

SHRINK: Final = fcntl.F_SEAL_SHRINK


class LaneClient:
    """A connection over a unix socket. What `attach` brings is in `facts`, `arena` (the mapping) and `side`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.facts: dict[bytes, Any] = {}
        self.arena_fd = -1
        self.arena: mmap.mmap | None = None
        self.side: socket.socket | None = None
        self._reader = hiredis.Reader()
        self._loop = asyncio.get_running_loop()

    async def ask(self, *words: Word | int) -> Any:
        """One command's reply as Python objects, an error as hiredis.ReplyError."""
        await self._loop.sock_sendall(self.sock, request(*(str(w) if isinstance(w, int) else w for w in words)))
        return await self.read()

    async def read(self) -> Any:
        """The next reply; EOFError when the server has hung up."""
        while (reply := self._reader.gets()) is False:
            data = await self._loop.sock_recv(self.sock, 65536)
            if not data:
                raise EOFError
            self._reader.feed(data)
        return reply

    async def attach(self) -> Any:
        """KV.ATTACH: the map, or the error. Descriptors that come are taken."""
        await self._loop.sock_sendall(self.sock, request("KV.ATTACH"))
        data, descriptors = await receive_with_descriptors(self.sock)
        self._reader.feed(data)
        reply = await self.read()
        if isinstance(reply, list):
            self.facts = dict(zip(reply[::2], reply[1::2], strict=True))
            self.arena_fd, side = descriptors
            self.side = socket.socket(fileno=side)
            self.arena = mmap.mmap(self.arena_fd, self.facts[b"arena-bytes"], mmap.MAP_SHARED, mmap.PROT_READ)
        else:
            assert not descriptors
        return reply

    def bytes_at(self, place: list[int]) -> bytes:
        """What lies in the arena at [offset, length]."""
        assert self.arena is not None
        return self.arena[place[0] : sum(place)]

    async def lend(self, *descriptors: int, data: bytes = b"m") -> Any:
        """Send descriptors over the side channel and say KV.LEND."""
        assert self.side is not None
        socket.send_fds(self.side, [data], descriptors)
        return await self.ask("KV.LEND")

    @property
    def is_open(self) -> bool:
        """Whether the server has not hung up, as a reader finds out after it has read."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    def close(self) -> None:
        """Hang up and let go of all."""
        self.sock.close()
        self.let_go()

    def let_go(self) -> None:
        """Give up what `attach` has brought."""
        if self.arena is not None and self.side is not None:
            self.arena.close()
            self.side.close()
            os.close(self.arena_fd)
            self.arena = self.side = None


async def receive_with_descriptors(sock: socket.socket) -> tuple[bytes, list[int]]:
    """The next bytes of a socket that does not block, and the descriptors that come with them."""
    while True:
        try:
            data, ancillary, _, _ = sock.recvmsg(65536, socket.CMSG_SPACE(64), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            await asyncio.sleep(0)
            continue
        descriptors = array.array("i")
        for _level, _kind, body in ancillary:
            descriptors.frombytes(body)
        return data, list(descriptors)


@contextlib.asynccontextmanager
async def connected(live: LiveServer, address: str | None = None) -> AsyncIterator[LaneClient]:
    """A client on the server's unix socket, or on another address (@name: an abstract one), not yet attached."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        address = address or str(live.server.unixsocket)
        await asyncio.get_running_loop().sock_connect(sock, "\0" + address[1:] if address[0] == "@" else address)
        client = LaneClient(sock)
        try:
            yield client
        finally:
            client.close()


@contextlib.asynccontextmanager
async def attached(live: LiveServer) -> AsyncIterator[LaneClient]:
    """The same, attached."""
    async with connected(live) as client:
        assert isinstance(await client.attach(), list)
        yield client


@contextlib.contextmanager
def memory(content: bytes, seals: int = SHRINK, nbytes: int = 0) -> Iterator[int]:
    """A memfd with that content, of `nbytes` if that is more, sealed."""
    fd = os.memfd_create("lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, max(nbytes, len(content)))
        os.pwrite(fd, content, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def open_descriptors(pid: int | str = "self") -> int:
    """How many descriptors a process has, without the one of /dev/null that uvloop keeps in reserve."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            count += os.readlink(f"/proc/{pid}/fd/{name}") != "/dev/null"
    return count
