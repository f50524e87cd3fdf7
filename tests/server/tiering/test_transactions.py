"""MULTI, EXEC and WATCH over blocks on disk: all of it is brought first, nothing is half done, a move is no change."""

from pathlib import Path

import pytest

from tests.server.feed import request
from tests.server.live import Client, until
from tests.server.tiered_server import TieredServer, block, bulk

EXEC_OOM = b"-EXECABORT Transaction discarded because of: OOM command not allowed when used memory > 'maxmemory'.\r\n"
TOO_LONG_S = 6.0


async def queue(client: Client, *lines: str) -> None:
    """MULTI and the lines, up to EXEC."""
    assert await client.ask("MULTI") == b"+OK\r\n"
    for line in lines:
        assert await client.ask(*line.split(" ")) == b"+QUEUED\r\n"


async def executed(client: Client, *lines: str, wanted: bytes) -> None:
    """Run a transaction and compare its replies."""
    await queue(client, *lines)
    await client.send("EXEC")
    reply = b"*%d\r\n" % len(lines) + wanted
    assert await client.read(len(reply)) == reply
    assert await client.ask("PING") == b"+PONG\r\n"


async def test_a_transaction_reads_and_changes_blocks_on_disk(loop: str, live: TieredServer) -> None:
    live.put("a", "b", "c")
    assert live.store.put(b"number", b"41")
    live.send_away("a", "b", "c", "number")
    client = await live.connect()
    wanted = bulk(block("a")) + b"*2\r\n" + bulk(block("b")) + b"$-1\r\n" + b":42\r\n"
    wanted += b":%d\r\n" % (len(block("c")) + 1) + b":1\r\n" + b"$-1\r\n"
    lines = ("GET a", "MGET b nothing", "INCR number", "APPEND c x", "DEL a", "GET a")
    await executed(client, *lines, wanted=wanted)
    assert live.steps("pread") == 4
    assert await client.get("c") == block("c") + b"x"


NAMING = {
    "select": (("SELECT 3", "GET moved"), b"+OK\r\n", "moved"),
    "rename": (("RENAME a to", "GET to"), b"+OK\r\n", "a"),
    "renamenx": (("RENAMENX a to", "GET to"), b":1\r\n", "a"),
    "rename twice": (("RENAME a to", "RENAME to from", "GET from"), b"+OK\r\n+OK\r\n", "a"),
    "move": (("MOVE a 5", "SELECT 5", "GET a"), b":1\r\n+OK\r\n", "a"),
    "swapdb": (("SWAPDB 0 3", "GET moved"), b"+OK\r\n", "moved"),
    "swapdb and select": (("SWAPDB 3 5", "SELECT 5", "GET moved"), b"+OK\r\n+OK\r\n", "moved"),
    "copy": (("COPY a to", "GET to"), b":1\r\n", "a"),
}


@pytest.mark.parametrize("how", NAMING)
async def test_a_transaction_finds_a_block_on_disk_under_the_name_that_it_gave_it(
    loop: str, how: str, live: TieredServer
) -> None:
    lines, replies, key = NAMING[how]

    live.put("a")
    assert live.store.put(b"moved", block("moved"), 3)
    live.send_away("a")
    live.send_away("moved", space=3)
    await executed(await live.connect(), *lines, wanted=replies + bulk(block(key)))


@pytest.mark.parametrize("number", ["16", "99999999999999999999", "-1", "x"])
async def test_a_select_that_fails_leaves_the_transaction_where_it_was(
    loop: str, number: str, live: TieredServer
) -> None:
    live.put_away("a")
    client = await live.connect()
    await queue(client, f"SELECT {number}", "GET a")
    await client.send("EXEC")
    assert await client.read_line() == b"*2\r\n"
    assert (await client.read_line()).startswith(b"-ERR ")
    assert await client.read_bulk() == block("a")


async def test_a_watched_block_may_be_spilled_and_promoted(loop: str, live: TieredServer) -> None:
    live.put("a")
    client, other = await live.connect(), await live.connect()
    assert await client.ask("WATCH", "a") == b"+OK\r\n"
    live.send_away("a")
    assert await other.get("a") == block("a")
    live.send_away("a")
    await executed(client, "STRLEN a", wanted=b":%d\r\n" % len(block("a")))
    assert await client.ask("WATCH", "a") == b"+OK\r\n"
    assert await other.ask("SET", "a", "new") == b"+OK\r\n"
    await queue(client, "STRLEN a")
    assert await client.ask("EXEC") == b"*-1\r\n"


async def test_a_watched_block_that_leaves_the_disk_for_good_breaks_the_watch(loop: str, tmp_path: Path) -> None:
    async with TieredServer(tmp_path, disk_bytes=2 * 1024 * 1024) as live:
        live.put_away("a")
        client = await live.connect()
        assert await client.ask("WATCH", "a") == b"+OK\r\n"
        for number in range(60):
            live.put_away(f"flood{number}")
        assert live.tier("a") is None
        await queue(client, "PING")
        assert await client.ask("EXEC") == b"*-1\r\n"


async def test_a_transaction_that_wants_more_than_memory_holds_is_refused_whole(loop: str, live: TieredServer) -> None:
    keys = [f"key{number}" for number in range(20)]
    live.put_away("number")
    assert live.store.put(b"number", b"41")
    for key in keys:
        live.put_away(key)
    client, other = await live.connect(), await live.connect()
    await queue(client, "INCR number", *(f"GET {key}" for key in keys))
    await client.send("EXEC")
    await until(lambda: live.steps("pread") >= 15)
    await live.quiet()
    assert await other.get(keys[0]) == block(keys[0])
    live.clock.now_s += TOO_LONG_S
    live.tick()
    assert await client.read_line() == EXEC_OOM
    assert await client.get("number") == b"41"
    assert await client.ask("DISCARD") == b"-ERR DISCARD without MULTI\r\n"


async def test_a_broken_transaction_is_refused_without_a_read(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    client = await live.connect()
    await queue(client, "GET a")
    assert (await client.ask("NOPE")).startswith(b"-ERR unknown command")
    assert await client.ask("EXEC") == b"-EXECABORT Transaction discarded because of previous errors.\r\n"
    assert live.steps("pread") == 0


async def test_a_transaction_that_waits_can_be_broken_by_its_watch_meanwhile(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b")
    client, other = await live.connect(), await live.connect()
    assert await client.ask("WATCH", "b") == b"+OK\r\n"
    await queue(client, "GET a", "SET c 1")
    live.hold()
    await client.send("EXEC")
    await until(lambda: live.jobs())
    assert await other.ask("SET", "b", "new") == b"+OK\r\n"
    live.let_go()
    assert await client.read_line() == b"*-1\r\n"
    assert live.tier("c") is None


async def test_what_is_sent_behind_exec_is_answered_behind_it(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b")
    client = await live.connect()
    lines = (("MULTI",), ("GET", "a"), ("EXEC",), ("GET", "b"), ("PING",))
    await client.send_raw(b"".join(request(*line) for line in lines))
    wanted = b"+OK\r\n+QUEUED\r\n*1\r\n" + bulk(block("a")) + bulk(block("b")) + b"+PONG\r\n"
    assert await client.read(len(wanted)) == wanted
