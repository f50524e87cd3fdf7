"""The TLS port under fuzz: plain bytes, damaged handshakes, and mutated sessions within TLS that end rudely."""

import asyncio
import contextlib
import random
import socket
import ssl
from pathlib import Path

from tests.fuzz.corpus import session
from tests.fuzz.mutator import BYTE_DAMAGES, mutate
from tests.fuzz.served import is_own_doing
from tests.server.certificates import Papers
from tests.server.live import MIB, LiveServer, pattern, until
from tests.server.tls_client import TlsClient, connect, connect_plain

BATCHES = 25
BATCH = 8
NOISE = {"socket.send() raised exception.", "SSL connection is closed"}
"""asyncio's TLS hands over one record after another without asking whether the client is still there, and says so."""

CANARY = pattern(300_000, 3)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Some bytes of a handshake or of a record changed, repeated or lost."""
    stream = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        rng.choice(BYTE_DAMAGES)(rng, stream)
    return bytes(stream)


def client_hello(context: ssl.SSLContext) -> bytes:
    """The first thing that a client says."""
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


async def leave(sock: socket.socket, rng: random.Random) -> None:
    """Say no more and wait for the server to hang up, or hang up first."""
    with contextlib.suppress(OSError):
        if rng.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
            while await asyncio.get_running_loop().sock_recv(sock, MIB):
                pass
    sock.close()


async def visit(live: LiveServer, context: ssl.SSLContext, rng: random.Random) -> None:
    """One stranger at the TLS port."""
    loop = asyncio.get_running_loop()
    kind = rng.randrange(4)
    stream = mutate(rng, session(rng), session(rng))
    if kind < 2:
        sock = await connect_plain(live)
        with contextlib.suppress(OSError):
            await loop.sock_sendall(sock, stream if kind == 0 else damaged(rng, client_hello(context)))
        await leave(sock, rng)
        return
    client = await connect(live, context)
    with contextlib.suppress(OSError):
        for at in range(0, len(stream), MIB):
            client.tls.write(stream[at : at + MIB])
            await send(client, rng, damage=kind == 3)
    await leave(client.sock, rng)


async def send(client: TlsClient, rng: random.Random, damage: bool) -> None:
    """Hand over what is encrypted, whole or damaged; who does not read may have to stop half way."""
    if not damage:
        sending = asyncio.ensure_future(client.send_out())
    else:
        record = damaged(rng, client._out.read())
        sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(client.sock, record))
    for _ in range(200):
        await asyncio.sleep(0)
        if sending.done():
            break
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def test_strangers_at_the_tls_port_do_no_harm(loop: str, papers: Papers, tmp_path: Path) -> None:
    rng = random.Random(f"tls {loop}")
    context = papers.client_context()
    async with LiveServer(tmp_path, 64 * MIB, **papers.options()) as live:
        keeper = await live.connect()
        assert await keeper.ask("SET", "canary", CANARY) == b"+OK\r\n"
        for _ in range(BATCHES):
            crowd = asyncio.gather(*(visit(live, context, rng) for _ in range(BATCH)))
            assert await keeper.ask("PING") == b"+PONG\r\n"
            await crowd
            await until(lambda: len(live.sessions()) == 1)
            assert await keeper.get("canary") == CANARY
            live.store.check_integrity()
            assert (live.store.leases, live.store.reserved_bytes, live.store.retired_bytes) == (0, 0, 0)
            assert live.server.stats.handler_exceptions == 0
            assert {each for each in live.complaints if not is_own_doing(each)} <= NOISE
            live.complaints.clear()
