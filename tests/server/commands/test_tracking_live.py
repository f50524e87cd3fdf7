"""Client-side caching over real connections: no change may go untold, whatever way it comes about."""

import socket
from pathlib import Path

import pytest

from kvredis.server.client.tracking import TrackingTable
from tests.server.live import MIB, Client, LiveServer, pattern, until
from tests.server.pushes import invalidation, speak_resp3


async def connect_reader(live: LiveServer, *options: str, receive_bytes: int = 0) -> Client:
    """A RESP3 client with tracking."""
    client = await live.connect(receive_bytes=receive_bytes)
    await speak_resp3(client)
    assert await client.ask("CLIENT", "TRACKING", "ON", *options) == b"+OK\r\n"
    return client


async def read_told(client: Client, *keys: bytes) -> None:
    """The client is told of exactly these keys next."""
    expected = invalidation(*keys)
    assert await client.read(len(expected)) == expected


@pytest.mark.parametrize("length", [1, 2 * MIB], ids=["small", "in-the-arena"])
async def test_a_value_that_was_read_is_invalidated_by_the_next_write(loop: str, length: int, live: LiveServer) -> None:
    reader, writer = await connect_reader(live), await live.connect()
    for seed in range(3):
        assert await writer.ask("SET", "k", pattern(length, seed)) == b"+OK\r\n"
        if seed:
            await read_told(reader, b"k")
        assert await reader.get("k") == pattern(length, seed)


async def test_an_invalidation_waits_for_the_value_that_is_under_way(loop: str, live: LiveServer) -> None:
    reader, writer = await connect_reader(live, receive_bytes=4096), await live.connect()
    old, new = pattern(4 * MIB), pattern(4 * MIB, seed=1)
    assert await writer.ask("SET", "k", old) == b"+OK\r\n"
    await reader.send("GET", "k")
    await until(lambda: live.store.leases == 1)
    assert await writer.ask("SET", "k", new) == b"+OK\r\n"
    assert await reader.read_bulk() == old
    await read_told(reader, b"k")
    assert await reader.get("k") == new


async def test_a_key_that_expires_unread_is_invalidated(live: LiveServer) -> None:
    reader, writer = await connect_reader(live, "NOLOOP"), await live.connect()
    assert await writer.ask("SET", "k", "v", "PX", "1000") == b"+OK\r\n"
    assert await reader.get("k") == b"v"
    live.clock_ms += 1000
    await read_told(reader, b"k")
    assert await reader.get("k") is None


async def test_a_key_that_is_evicted_is_invalidated_even_by_ones_own_write(tmp_path: Path) -> None:
    async with LiveServer(tmp_path, arena_bytes=4 * MIB) as live:
        reader = await connect_reader(live, "NOLOOP")
        assert await reader.ask("SET", "old", pattern(3 * MIB)) == b"+OK\r\n"
        assert await reader.get("old") == pattern(3 * MIB)
        await reader.send("SET", "new", pattern(3 * MIB))
        expected = {b"+OK\r\n" + invalidation(b"old"), invalidation(b"old") + b"+OK\r\n"}
        assert await reader.read(len(min(expected))) in expected
        assert await reader.get("old") is None


async def test_broadcast_tells_of_a_pipeline_in_one_message(live: LiveServer) -> None:
    reader = await connect_reader(live, "BCAST", "PREFIX", "block:")
    writer = await live.connect()
    await writer.send_raw(b"SET block:2 v\r\nSET other v\r\nSET block:1 v\r\nDEL block:2\r\nPING\r\n")
    await read_told(reader, b"block:1", b"block:2")
    await reader.send_raw(b"SET block:3 v\r\nPING\r\n")
    assert await reader.read_line() == b"+OK\r\n"
    assert await reader.read_line() == b"+PONG\r\n"
    await read_told(reader, b"block:3")


@pytest.mark.parametrize("options", [(), ("BCAST",)], ids=["default", "broadcast"])
async def test_a_client_with_the_reply_to_its_write_finds_every_copy_invalidated(
    loop: str, options: tuple[str, ...], live: LiveServer
) -> None:
    live.server.tracking = TrackingTable(live.server, lambda turn: None)  # nothing is put off
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for sock in sockets:
        sock.connect(str(live.server.unixsocket))
        sock.setblocking(False)
    reader, writer = map(Client, sockets)
    for client in (reader, writer):
        await speak_resp3(client)
        assert await client.ask("CLIENT", "TRACKING", "ON", *options) == b"+OK\r\n"
        assert await client.get("k") is None
    assert await writer.ask("SET", "k", "v") == b"+OK\r\n"
    assert [sock.recv(MIB) for sock in sockets] == [invalidation(b"k")] * 2
    for client in (reader, writer):
        client.close()


async def test_a_client_that_vanishes_is_forgotten_and_the_plain_way_is_open_again(loop: str, live: LiveServer) -> None:
    reader, writer = await connect_reader(live), await live.connect()
    broadcast = await connect_reader(live, "BCAST")
    await reader.get("k")
    assert live.server.observed
    broadcast.reset()
    reader.reset()
    await until(lambda: len(live.server.sessions) == 1)
    assert await writer.ask("SET", "k", "v") == b"+OK\r\n"
    assert not live.server.observed
    assert live.server.tracking.total_keys == 0
    assert not live.server.tracking.prefixes


async def test_own_invalidations_follow_their_replies_in_a_pipeline(live: LiveServer) -> None:
    reader = await connect_reader(live)
    await reader.send_raw(b"GET k\r\nSET k 1\r\nGET k\r\nMULTI\r\nSET k 2\r\nGET k\r\nEXEC\r\nSET k 3\r\nQUIT\r\n")
    told = invalidation(b"k")
    assert await reader.read_all() == (
        b"_\r\n+OK\r\n" + told + b"$1\r\n1\r\n+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n+OK\r\n$1\r\n2\r\n" + told
        + b"+OK\r\n" + told + b"+OK\r\n"
    )  # fmt: skip
