"""Clients whose replies are spliced, on one loop with their server."""

import os

from kvredis.server.client.session import Session
from tests.server.feed import Word
from tests.server.live import MIB, Client, LiveServer

ARENA = 32 * MIB


def promise() -> tuple[Word, ...]:
    """KV.SPLICE as this very process says it."""
    return "KV.SPLICE", str(os.getpid()), str(os.stat("/proc/self/ns/pid").st_ino)


async def promising(live: LiveServer) -> Client:
    """A client that is served by splicing, smaller values too than those for which it pays."""
    live.server.splicing.value_bytes_min = 64 * 1024
    client = await live.connect()
    assert await client.ask(*promise()) == b"+OK\r\n"
    return client


def has_sent(session: Session, nbytes: int) -> bool:
    return session.output_bytes >= nbytes
