"""CLIENT PAUSE, UNBLOCK and REPLY over real connections, on the loop's own clock made short."""

import asyncio
import gc
from pathlib import Path

import pytest

from kvredis.server.client.blocked import Blocked, Reason
from kvredis.server.shm.commands import COPY_HERE_BYTES_MAX
from tests.server.feed import request
from tests.server.lane_client import attached, memory
from tests.server.live import MIB, LiveServer, pattern, until


async def test_a_paused_write_waits_and_reads_go_on(loop: str, live: LiveServer) -> None:
    admin, client = await live.connect(), await live.connect()
    await client.ask("SET", "k", "1")
    assert await admin.ask("CLIENT", "PAUSE", "100000", "WRITE") == b"+OK\r\n"
    assert await client.get("k") == b"1"
    await client.send("SET", "k", "2")
    await client.send("GET", "k")
    await until(lambda: live.server.blocked.count(Reason.PAUSE))
    assert await admin.get("k") == b"1"
    assert await admin.ask("CLIENT", "UNPAUSE") == b"+OK\r\n"
    assert await client.read(12) == b"+OK\r\n$1\r\n2\r\n"


async def test_a_write_that_waits_for_the_end_of_a_pause_is_a_blocked_client(live: LiveServer) -> None:
    admin, client = await live.connect(), await live.connect()
    await admin.ask("CLIENT", "PAUSE", "100000", "WRITE")
    await client.send("SET", "k", "2")
    await until(lambda: live.server.blocked.count(Reason.PAUSE))
    for count in (b"1", b"0"):
        await admin.send("INFO", "clients")
        assert b"\r\nblocked_clients:%b\r\n" % count in (await admin.read_bulk() or b"")
        await admin.ask("CLIENT", "UNPAUSE")


async def test_a_key_whose_end_comes_in_a_pause_is_not_found_and_goes_when_it_is_over(live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("SET", "k", "v", "PX", "20")
    await client.ask("CLIENT", "PAUSE", "100000", "WRITE")
    live.clock_ms += 21
    assert await client.get("k") is None
    assert await client.ask("EXISTS", "k") == b":0\r\n"
    await client.send("RANDOMKEY")
    assert await client.read_bulk() == b"k", "as in Redis, when there are no others"
    assert await client.ask("DBSIZE") == b":1\r\n"
    assert live.store.stats.expired == 0
    await client.ask("CLIENT", "UNPAUSE")
    assert await client.get("k") is None
    assert live.store.stats.expired == 1
    assert await client.ask("DBSIZE") == b":0\r\n"


async def test_a_pause_ends_by_itself(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("CLIENT", "PAUSE", "50")
    assert live.server.pause.until_s
    assert await client.ask("PING") == b"+PONG\r\n"
    assert not live.server.pause.until_s


async def test_a_paused_payload_keeps_its_room_and_is_stored_in_the_end(live: LiveServer) -> None:
    admin, client = await live.connect(), await live.connect()
    await admin.ask("CLIENT", "PAUSE", "100000", "WRITE")
    value = pattern(MIB)
    await client.send("SET", "k", value)
    await until(lambda: live.server.blocked.count(Reason.PAUSE))
    assert live.store.reserved_bytes > MIB
    await admin.ask("CLIENT", "UNPAUSE")
    assert await client.read_line() == b"+OK\r\n"
    assert await client.get("k") == value


async def test_exec_of_a_write_waits_too(live: LiveServer) -> None:
    admin, writer, reader = [await live.connect() for _ in range(3)]
    for client, words in ((writer, ("SET", "k", "1")), (reader, ("GET", "k"))):
        await client.ask("MULTI")
        await client.ask(*words)
    await admin.ask("CLIENT", "PAUSE", "100000", "WRITE")
    await writer.send("EXEC")
    await reader.send("EXEC")
    assert await reader.read(9) == b"*1\r\n$-1\r\n"
    await until(lambda: live.server.blocked.count(Reason.PAUSE) == 1)
    await admin.ask("CLIENT", "UNPAUSE")
    assert await writer.read(9) == b"*1\r\n+OK\r\n"


async def test_clients_that_wait_or_go_while_paused_leave_nothing_behind(loop: str, live: LiveServer) -> None:
    admin, client = await live.connect(), await live.connect("tcp")
    await admin.ask("CLIENT", "PAUSE", "100000", "WRITE")
    await client.send("SET", "k", pattern(MIB))
    await until(lambda: live.server.blocked.count(Reason.PAUSE))
    live.sessions()[1].close()
    await until(lambda: len(live.server.sessions) == 1)
    assert not live.server.blocked.count(Reason.PAUSE)
    assert live.store.reserved_bytes == 0
    await admin.ask("CLIENT", "UNPAUSE")
    assert await admin.get("k") is None


async def test_of_two_pauses_the_later_end_and_the_stricter_kind_count(live: LiveServer) -> None:
    admin = await live.connect()
    await admin.ask("CLIENT", "PAUSE", "100000", "WRITE")
    until_s = live.server.pause.until_s
    await admin.ask("CLIENT", "PAUSE", "10", "ALL")
    assert live.server.pause.until_s == until_s
    assert not live.server.pause.writes_only
    live.server.pause.end()


async def test_a_client_that_wants_no_replies_gets_none_until_it_does(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.send("CLIENT", "REPLY", "OFF")
    await client.send("SET", "k", pattern(MIB))
    await client.send("GET", "k")
    await client.send("NO-SUCH-COMMAND")
    await client.send("MGET", "k", "k", "k")
    assert await client.ask("CLIENT", "REPLY", "ON") == b"+OK\r\n"
    assert live.store.leases == 0
    assert await client.ask("STRLEN", "k") == b":1048576\r\n"


@pytest.mark.parametrize("mode", ["SKIP", "OFF"])
async def test_a_reply_that_comes_later_is_left_out_too(mode: str, tmp_path: Path) -> None:
    """A copy out of lent memory that takes a thread: by the time it is done the next command may be waiting."""
    async with LiveServer(tmp_path, 32 * MIB) as live, attached(live) as client:
        value = pattern(COPY_HERE_BYTES_MAX + 1)
        with memory(value) as lent:
            assert await client.lend(lent) == len(value)
            lines = request("CLIENT", "REPLY", mode) + request("KV.PUT", "k", "0", str(len(value)))
            await asyncio.get_running_loop().sock_sendall(client.sock, lines)
            if mode == "OFF":
                assert await client.ask("CLIENT", "REPLY", "ON") == b"OK"
            assert await client.ask("STRLEN", "k") == len(value)
            assert await client.ask("PING") == b"PONG"


async def test_one_reply_is_skipped_and_the_next_is_not(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.send("CLIENT", "REPLY", "SKIP")
    await client.send("SET", "k", "1")
    assert await client.get("k") == b"1"
    await client.send("CLIENT", "REPLY", "SKIP")
    await client.send("NO-SUCH-COMMAND")
    assert await client.ask("PING") == b"+PONG\r\n"


def waits_in_memory() -> int:
    gc.collect()
    return sum(type(each) is Blocked for each in gc.get_objects())


async def test_nothing_is_left_of_a_wait_that_was_over_before_its_time(loop: str, live: LiveServer) -> None:
    before = waits_in_memory()

    client, keeper = await live.connect(), await live.connect()
    number = (await client.ask("CLIENT", "ID"))[1:-2]
    for _ in range(3):
        await client.send("WAIT", "1", "3600000")
        await until(lambda: live.server.blocked.timeouts)
        assert await keeper.ask("CLIENT", "UNBLOCK", number) == b":1\r\n"
        assert await client.read_line() == b":0\r\n"
    assert waits_in_memory() == before
