"""Readers who do not read hold what was lent to them: the arena fills with leases, and empties when they go."""

import asyncio
from pathlib import Path

import pytest

from tests.faults.clients import standing_at
from tests.server.feed import request
from tests.server.live import MIB, OOM, Client, LiveServer, pattern, until

pytestmark = pytest.mark.usefixtures("threads")

VALUE_BYTES = 3 * MIB - 8192
"""More than a socket takes in, so that a reader who is deaf keeps its lease; five fit into the arena."""


async def fill_with_leases(live: LiveServer, keeper: Client) -> list[Client]:
    """Five values and a deaf reader of each."""
    deaf = []
    for n in range(5):
        assert await keeper.ask("SET", f"v{n}", pattern(VALUE_BYTES, n)) == b"+OK\r\n"
        deaf.append(await live.connect(receive_bytes=4096))
        await deaf[n].send("GET", f"v{n}")
        while live.store.leases <= n:
            await asyncio.sleep(0)
    return deaf


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    return LiveServer(tmp_path, 16 * MIB)


async def test_a_set_goes_on_as_far_as_room_exists_and_is_then_refused(loop: str, live: LiveServer) -> None:
    keeper = await live.connect()
    deaf = await fill_with_leases(live, keeper)
    writer = await live.connect()
    assert await writer.ask("PING") == b"+PONG\r\n"
    live.sessions()[-1].said_hello = True  # it reads errors: not closed for one
    assert await writer.ask("SET", "fits", pattern(MIB // 2)) == b"+OK\r\n"
    assert await writer.ask("SET", "fits", pattern(MIB // 2, 1)) == b"+OK\r\n"
    assert await writer.ask("SET", "small", "s") == b"+OK\r\n"
    assert await writer.ask("SET", "large", pattern(VALUE_BYTES)) == OOM
    assert live.store.leases == 5
    live.store.check_integrity()
    for client in deaf:
        client.close()
    await until(lambda: live.store.leases == 0)
    again = await live.connect()
    assert await again.ask("SET", "large", pattern(VALUE_BYTES)) == b"+OK\r\n"
    assert await again.get("large") == pattern(VALUE_BYTES)
    assert await again.get("small") == b"s"


async def test_deaf_readers_get_their_old_bytes_after_delete_and_refusal(loop: str, live: LiveServer) -> None:
    keeper = await live.connect()
    deaf = await fill_with_leases(live, keeper)
    assert await keeper.ask("DEL", *[f"v{n}" for n in range(5)]) == b":5\r\n"
    assert live.store.retired_bytes >= 5 * VALUE_BYTES
    assert await keeper.ask("SET", "large", pattern(VALUE_BYTES, 9)) == OOM
    for n, client in enumerate(deaf):
        assert await client.read_bulk() == pattern(VALUE_BYTES, n)
    await until(lambda: live.store.retired_bytes == 0)


async def test_a_reader_that_has_been_deaf_for_long_is_closed_when_its_blocks_are_needed(
    loop: str, live: LiveServer
) -> None:
    keeper = await live.connect()
    deaf = await fill_with_leases(live, keeper)
    began_s = live.server.now_s()
    live.server.now_s = standing_at(began_s + 3600)
    assert await keeper.ask("SET", "large", pattern(VALUE_BYTES, 9)) == b"+OK\r\n"
    assert len(live.sessions()) < 6
    assert await keeper.get("large") == pattern(VALUE_BYTES, 9)
    for client in deaf:
        client.close()
    live.complaints.clear()


async def test_one_deaf_client_with_a_long_pipeline_holds_few_blocks(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 64 * MIB) as live:
        keeper = await live.connect()
        for n in range(16):
            assert await keeper.ask("SET", f"v{n}", pattern(2 * MIB, n)) == b"+OK\r\n"
        deaf = await live.connect(receive_bytes=4096)
        await deaf.send_raw(b"".join(request("GET", f"v{n}") for n in range(16)))
        await deaf.send_raw(request("MGET", *[f"v{n}" for n in range(16)]))
        await until(lambda: live.store.leases)
        assert await keeper.ask("PING") == b"+PONG\r\n"
        assert live.store.leases <= 2
        for n in range(16):
            assert await deaf.read_bulk() == pattern(2 * MIB, n)
        assert await deaf.read_line() == b"*16\r\n"
        for n in range(16):
            assert await deaf.read_bulk() == pattern(2 * MIB, n)
