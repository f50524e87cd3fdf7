"""Large values under way: slow readers keep what they asked for, writers stop no other client, and every hold ends."""

import asyncio
from pathlib import Path

import pytest

from kvredis.server.client.session import REPLY_BYTES_HIGH
from tests.server.feed import request
from tests.server.live import MIB, OOM, Client, LiveServer, pattern, until

pytestmark = pytest.mark.usefixtures("threads")

LARGE = 32 * MIB
RECEIVE_BYTES = 16 * 1024


async def begin_to_read(live: LiveServer, key: str, length: int) -> tuple[Client, bytes]:
    """A client that has asked for a value and read the header and `length` bytes of it, and no more for now."""
    reader = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
    await reader.send("GET", key)
    await reader.read_line()
    return reader, await reader.read(length)


async def test_a_slow_reader_gets_the_old_value_whole(loop: str, tmp_path: Path) -> None:
    """Although it is overwritten, deleted and its room wanted by a flood while the reader is in the middle of it."""
    async with LiveServer(tmp_path, 80 * MIB) as live:
        writer = await live.connect()
        old, new = pattern(LARGE, 1), pattern(LARGE, 2)
        assert await writer.ask("SET", "k", old) == b"+OK\r\n"
        reader, seen = await begin_to_read(live, "k", MIB)
        assert live.store.leases == 1
        assert await writer.ask("SET", "k", new) == b"+OK\r\n"
        assert await writer.get("k") == new
        assert await writer.ask("DEL", "k") == b":1\r\n"
        for n in range(30):  # 120 MiB into the 48 that are not leased
            assert await writer.ask("SET", f"flood{n}", pattern(4 * MIB, n + 3)) == b"+OK\r\n"
        live.store.check_integrity()
        assert live.store.leases == 1
        assert live.store.stats.evicted > 15
        seen += await reader.read(LARGE - MIB + 2)
        assert seen == old + b"\r\n"
        assert await reader.ask("PING") == b"+PONG\r\n"
        assert live.store.leases == 0


@pytest.mark.parametrize("end", ["reset", "close"])
async def test_a_reader_that_vanishes_releases_its_leases(loop: str, end: str, live: LiveServer) -> None:
    writer = await live.connect()
    assert await writer.ask("SET", "k", pattern(8 * MIB)) == b"+OK\r\n"
    readers = [(await begin_to_read(live, "k", 1000))[0] for _ in range(3)]
    assert live.store.leases == 3
    await writer.ask("DEL", "k")
    assert live.store.retired_bytes > 8 * MIB
    for reader in readers:
        reader.reset() if end == "reset" else reader.close()
    await until(lambda: live.store.leases == 0)
    assert live.store.retired_bytes == 0
    assert live.store.allocator.free_bytes == live.store.arena.nbytes


async def test_when_everything_is_leased_a_set_is_refused_and_nothing_is_lost(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 16 * MIB) as live:
        writer = await live.connect()
        await writer.say_hello()
        value = pattern(7 * MIB + 500_000)
        assert await writer.ask("MSET", "a", value, "b", value, "small", "s") == b"+OK\r\n"
        readers = [await begin_to_read(live, key, 1000) for key in "ab"]
        large = pattern(4 * MIB, 1)
        assert await writer.ask("SET", "c", large) == OOM
        assert await writer.ask("SET", "a", large, "EX", "100", "GET") == OOM
        assert await writer.ask("SETNX", "c", large) == OOM
        assert await writer.ask("MSET", "c", "1", "d", large, "e", large) == OOM
        # Refused for another reason: the connection owes no error to the command after it.
        assert await writer.ask("SETNX", "c", large, "x") == (b"-ERR wrong number of arguments for 'setnx' command\r\n")
        assert await writer.ask("PING") == b"+PONG\r\n"
        assert await writer.ask("SET", "small", "t") == b"+OK\r\n"
        assert await writer.ask("SET", "c", large, "EX", "nonsense") == OOM
        await writer.send_raw(request("SET", "c", large) + request("GET", "small") + request("EXISTS", *"abcde"))
        wanted = OOM + b"$1\r\nt\r\n:2\r\n"
        assert await writer.read(len(wanted)) == wanted
        assert live.store.stats.evicted == 0
        assert live.store.reserved_bytes == 0
        live.store.check_integrity()
        for reader, seen in readers:
            assert seen + await reader.read(len(value) - 1000 + 2) == value + b"\r\n"
        await until(lambda: live.store.leases == 0)
        assert await writer.ask("SET", "c", large) == b"+OK\r\n"
        assert await writer.get("c") == large


async def test_a_value_larger_than_the_arena_is_refused_and_the_stream_stays_in_step(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 4 * MIB) as live:
        client = await live.connect()
        await client.say_hello()
        assert await client.ask("SET", "k", "old") == b"+OK\r\n"
        giant = request("SET", "k", b"*1\r\n$4\r\nQUIT\r\n" * 1_000_000)
        reply, _ = await asyncio.gather(client.read(len(OOM)), client.send_raw(giant + giant))
        assert reply == OOM
        assert await client.read_line() == OOM
        assert await client.get("k") == b"old"


async def test_a_pipeline_of_large_reads_holds_few_leases_at_a_time(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 48 * MIB) as live:
        client = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
        values = [pattern(2 * MIB, n) for n in range(16)]
        for n, value in enumerate(values):
            assert await client.ask("SET", f"k{n}", value) == b"+OK\r\n"
        await client.send_raw(b"".join(request("GET", f"k{n}") for n in range(16)))
        most = 0
        for value in values:
            assert await client.read_line() == b"$%d\r\n" % len(value)
            for at in range(0, len(value), MIB // 2):
                assert await client.read(MIB // 2) == value[at : at + MIB // 2]
                most = max(most, live.store.leases)
            assert await client.read(2) == b"\r\n"
        assert 1 <= most <= 2
        assert await client.ask("PING") == b"+PONG\r\n"


async def test_small_lent_values_are_gathered_up_to_a_bound(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 16 * MIB) as live:
        client = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
        value = pattern(100_000)
        assert await client.ask("SET", "k", value) == b"+OK\r\n"
        await client.send_raw(request("GET", "k") * 200)
        await until(lambda: live.store.leases)
        most = 0
        for _ in range(200):
            assert await client.read_bulk() == value
            most = max(most, live.store.leases)
        assert 1 < most <= REPLY_BYTES_HIGH // len(value) + 1


async def test_another_client_is_answered_in_the_middle_of_a_large_set(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 80 * MIB) as live:
        writer, other = await live.connect(), await live.connect()
        old, new = pattern(LARGE, 1), pattern(LARGE, 2)
        assert await writer.ask("SET", "k", old) == b"+OK\r\n"
        data = memoryview(request("SET", "k", new))
        for at in range(0, len(data), 8 * MIB):
            await writer.send_raw(data[at : at + 8 * MIB])
            if at + 8 * MIB < len(data):
                assert await other.ask("PING") == b"+PONG\r\n"
                assert await other.ask("GETRANGE", "k", "0", "0") == b"$1\r\n"
                assert await other.read(3) == old[:1] + b"\r\n"
        assert await writer.read_line() == b"+OK\r\n"
        assert await other.get("k") == new


async def test_another_client_is_answered_in_the_middle_of_a_large_get(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 48 * MIB) as live:
        writer = await live.connect()
        assert await writer.ask("SET", "k", pattern(LARGE)) == b"+OK\r\n"
        reader, seen = await begin_to_read(live, "k", MIB)
        for _ in range(4):
            assert await writer.ask("PING") == b"+PONG\r\n"
            assert live.store.leases == 1
            seen += await reader.read(MIB)
        assert seen == pattern(LARGE)[: 5 * MIB]
        reader.reset()


async def test_two_writers_of_one_key_leave_the_value_of_one(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 64 * MIB) as live:
        first, second = await live.connect(), await live.connect("tcp")
        one, two = pattern(3 * MIB, 1), pattern(2 * MIB, 2)
        begun = request("SET", "k", one)
        await first.send_raw(begun[:MIB])
        assert await second.ask("SET", "k", two) == b"+OK\r\n"
        assert await second.get("k") == two
        await first.send_raw(begun[MIB:])
        assert await first.read_line() == b"+OK\r\n"
        assert await second.get("k") == one


async def test_a_read_and_an_overwrite_in_one_pipeline_do_not_mix(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 12 * MIB) as live:
        client = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
        values = [pattern(3 * MIB, n) for n in range(8)]
        assert await client.ask("SET", "k", values[0]) == b"+OK\r\n"
        sent = b"".join(request("GET", "k") + request("SET", "k", value) for value in values[1:])
        sending = asyncio.ensure_future(client.send_raw(sent))
        for value in values[:-1]:
            assert await client.read_bulk() == value
            assert await client.read_line() == b"+OK\r\n"
        await sending
