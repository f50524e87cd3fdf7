"""What fault tests do with a client that the server sends away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from tests.server.live import MIB, Client


def standing_at(time_s: float) -> Callable[[], float]:
    """A clock that stands still, for Server.now_s."""
    return lambda: time_s


async def last_words(client: Client) -> bytes:
    """What comes until the connection ends; a RST, which follows when the server has not read it all, ends it too."""
    words = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.get_running_loop().sock_recv(client._socket, MIB):
            words += piece
    return words


@contextlib.asynccontextmanager
async def sending(client: Client, data: bytes) -> AsyncIterator[asyncio.Task[None]]:
    """The client sends in the background, as far as the server lets it."""
    task = asyncio.ensure_future(client.send_raw(data))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
