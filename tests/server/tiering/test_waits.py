"""Clients that wait for a block on disk: the others are served, and one that goes leaves nothing behind."""

import asyncio
from pathlib import Path
from time import monotonic

import pytest

from kvredis.server.client.session import SEND_BUFFER_BYTES
from kvredis.storage.entry import Lease
from tests.server.feed import request
from tests.server.live import MIB, OOM, Client, until
from tests.server.tiered_server import TieredServer, block, bulk
from tests.storage.fake_files import Fault

A_WHILE_S = 6.0


async def borrow_everything(live: TieredServer) -> Client:
    """A client that has asked for all that memory can hold and does not read it."""
    reader = await live.connect("tcp", receive_bytes=4096)
    assert live.store.put(b"lent", bytes(live.store.arena.nbytes - 16 * 1024))
    await reader.send("GET", "lent")
    await until(lambda: live.store.leases)
    return reader


async def waiting(live: TieredServer, *words: str) -> Client:
    """A client that has asked for something on a disk that is held."""
    before = waits(live)
    client = await live.connect()
    await client.send(*words)
    await until(lambda: waits(live) > before)
    return client


def waits(live: TieredServer) -> int:
    """How many clients wait."""
    return sum(session.waiting is not None for session in live.sessions())


async def test_others_are_served_while_one_waits_for_the_disk(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    live.put("here")
    live.hold()
    waiter, other = await waiting(live, "GET", "a"), await live.connect()
    assert await other.ask("PING") == b"+PONG\r\n"
    assert await other.get("here") == block("here")
    assert await other.ask("SET", "new", "1") == b"+OK\r\n"
    assert await other.ask("EXISTS", "a") == b":1\r\n"
    assert live.steps("pread") == 0
    live.let_go()
    assert await waiter.read_bulk() == block("a")


async def test_all_that_wait_for_a_block_share_one_read(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    live.hold()
    clients = [await waiting(live, "GET", "a") for _ in range(5)]
    mget = await waiting(live, "MGET", "a", "a")
    assert live.jobs() == 1
    live.let_go()
    assert [await client.read_bulk() for client in clients] == [block("a")] * 5
    assert await mget.read_line() == b"*2\r\n"
    assert live.steps("pread") == 1


async def test_a_pipeline_sends_for_its_next_blocks_while_it_waits_for_the_first(loop: str, live: TieredServer) -> None:
    keys = [f"key{number}" for number in range(8)]
    live.put_away(*keys)
    live.hold()
    client = await live.connect()
    await client.send_raw(b"".join(request("GET", key) for key in keys))
    await until(lambda: live.jobs() == len(keys))
    live.let_go()
    assert [await client.read_bulk() for _ in keys] == [block(key) for key in keys]
    assert live.steps("pread") == len(keys)


LINES = [
    ("GET", "a"),
    ("MGET", "a", "b"),
    ("GETRANGE", "a", "0", "1"),
    ("APPEND", "a", "x"),
    ("LCS", "a", "b"),
    ("SET", "a", "x", "GET"),
]
ENDS = ["close", "reset", "kill"]


@pytest.mark.parametrize("words", LINES)
@pytest.mark.parametrize("end", ENDS)
async def test_a_client_that_goes_while_it_waits_leaves_nothing(
    loop: str, words: tuple[str, ...], end: str, live: TieredServer
) -> None:
    live.put_away("a", "b")
    other = await live.connect()
    await other.ask("PING")
    live.hold()
    client = await waiting(live, *words)
    if end == "kill":
        number = live.sessions()[1].id
        assert await other.ask("CLIENT", "KILL", "ID", str(number)) == b":1\r\n"
        assert await client.read_all() == (b"*2\r\n" if words[0] == "MGET" else b"")
    elif end == "close":
        client.close()
    else:
        client.reset()
    live.server._turns = 9  # the tick that looks for who has hung up
    await until(lambda: len(live.sessions()) == 1)
    assert live.jobs() == 0
    assert len(live.tiering.transfers) == 0
    assert live.steps("pread") == 0
    live.let_go()
    assert await other.get("a") == block("a")


async def test_a_client_that_goes_takes_no_block_from_another_that_waits(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    live.hold()
    stays = await waiting(live, "GET", "a")
    goes = await waiting(live, "GET", "a")
    goes.reset()
    await until(lambda: len(live.sessions()) == 1)
    live.let_go()
    assert await stays.read_bulk() == block("a")


async def test_a_server_that_stops_first_answers_those_that_wait_for_a_block(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    live.hold()
    client = await waiting(live, "GET", "a")
    live.server.now_s = monotonic
    stopped = asyncio.ensure_future(live.server.stop())
    await until(lambda: not live.server.listeners._open)
    assert not stopped.done()
    live.let_go()
    assert await client.read_bulk() == block("a")
    assert await client.read_all() == b""
    await stopped


async def test_a_server_stops_in_time_though_the_disk_does_not_answer(loop: str, live: TieredServer) -> None:
    live.server.drain_s = 0.0
    live.put_away("a")
    live.hold()
    clients = [await waiting(live, *words) for words in LINES]
    other = await live.connect()
    assert await other.ask("PING") == b"+PONG\r\n"
    await live.server.stop()
    assert [await client.read_all() for client in clients] == [b"", b"*2\r\n", *[b""] * 4]
    assert live.jobs() == 0


async def test_a_client_that_has_sent_its_last_byte_is_still_given_what_it_waits_for(
    loop: str, live: TieredServer
) -> None:
    live.put_away("a", "b")
    live.hold()
    client = await waiting(live, "GET", "a")
    await client.send("MGET", "b", "a")
    client.half_close()
    other = await live.connect()
    for _ in range(10):
        assert await other.ask("PING") == b"+PONG\r\n"
    turns = live.server._turns
    await until(lambda: live.server._turns // 10 > turns // 10)  # the tick that looks for who has hung up
    live.let_go()
    assert await client.read_all() == bulk(block("a")) + b"*2\r\n" + bulk(block("b")) + bulk(block("a"))


@pytest.mark.parametrize("how", ["deleted", "overwritten", "renamed", "flushed", "expired"])
async def test_a_client_that_waits_for_a_block_that_changes_is_given_what_is_there_then(
    loop: str, how: str, live: TieredServer
) -> None:
    live.put_away("a", "b")
    live.hold()
    other = await live.connect()
    client = await waiting(live, "GET", "a")
    if how == "deleted":
        assert await other.ask("DEL", "a") == b":1\r\n"
    elif how == "overwritten":
        assert await other.ask("SET", "a", "new") == b"+OK\r\n"
    elif how == "renamed":
        assert await other.ask("RENAME", "b", "a") == b"+OK\r\n"
    elif how == "flushed":
        assert await other.ask("FLUSHALL") == b"+OK\r\n"
    else:
        assert await other.ask("PEXPIRE", "a", "5") == b":1\r\n"
        live.clock_ms += 6
    live.let_go()
    wanted = {"overwritten": b"new", "renamed": block("b")}
    assert await client.read_bulk() == wanted.get(how)


@pytest.mark.parametrize("words", [("GET", "a"), ("GETRANGE", "a", "0", "-1"), ("MGET", "a")])
async def test_a_reader_waits_for_room_and_has_its_block_when_the_one_that_kept_it_goes(
    loop: str, words: tuple[str, ...], live: TieredServer
) -> None:
    live.put_away("a")
    slow = await borrow_everything(live)
    client = await waiting(live, *words)
    await until(lambda: live.server.disk_reads._refused)
    live.tick()
    await until(lambda: live.server.disk_reads._refused)
    slow.reset()
    await until(lambda: not live.store.leases)
    live.tick()
    if words[0] == "MGET":
        assert await client.read_line() == b"*1\r\n"
    assert await client.read_bulk() == block("a")


@pytest.mark.parametrize("words", [("GET", "a"), ("GETRANGE", "a", "0", "-1"), ("MGET", "a")])
async def test_a_reader_without_room_in_time_is_told_that_there_is_nothing(
    loop: str, words: tuple[str, ...], live: TieredServer
) -> None:
    live.put_away("a")
    slow = await borrow_everything(live)
    client = await waiting(live, *words)
    await until(lambda: live.server.disk_reads._refused)
    live.clock.now_s += A_WHILE_S
    live.tick()
    told = {"GET": b"$-1\r\n", "GETRANGE": b"$0\r\n\r\n", "MGET": b"*1\r\n$-1\r\n"}[words[0]]
    assert await client.read(len(told)) == told
    assert await client.ask("EXISTS", "a") == b":1\r\n"
    slow.reset()
    await until(lambda: not live.store.leases)
    assert await client.get("a") == block("a")


WRITES = [("APPEND", "a", "x"), ("SETRANGE", "a", "3", "x"), ("INCR", "a"), ("GETDEL", "a"), ("COPY", "a", "to")]
WRITES += [("SET", "a", "x", "GET"), ("GETSET", "a", "x"), ("GETEX", "a", "EX", "10"), ("INCRBYFLOAT", "a", "1")]


@pytest.mark.parametrize("words", WRITES)
async def test_a_write_that_cannot_see_its_value_is_refused_and_changes_nothing(
    loop: str, words: tuple[str, ...], live: TieredServer
) -> None:
    live.put_away("a")
    slow = await borrow_everything(live)
    client = await live.connect()
    await client.say_hello()
    await client.send(*words)
    await until(lambda: live.server.disk_reads._refused)
    live.clock.now_s += A_WHILE_S
    live.tick()
    assert await client.read_line() == OOM
    assert live.tier("a") == "disk"
    assert live.tier("to") is None
    slow.reset()
    await until(lambda: not live.store.leases)
    assert await client.get("a") == block("a")


@pytest.mark.parametrize("keys", [("a",), ("a", "b")])
async def test_a_block_that_arrives_just_after_it_was_looked_for_is_found(
    loop: str, keys: tuple[str, ...], live: TieredServer
) -> None:
    """Another thread brings it in between the miss and the question whether it is on disk; perhaps the last one."""
    live.put_away(*keys)
    live.hold()
    other = await waiting(live, "GET", "a")
    client = await live.connect()
    await client.ask("PING")
    session, fetch = live.sessions()[1], live.store.fetch

    def late(key: bytes, space: int) -> bytes | Lease | None:
        found = fetch(key, space)
        live.manual.run()
        return found

    session.fetch = late
    assert await client.get("a") == block("a")
    assert await other.read_bulk() == block("a")


@pytest.mark.parametrize("words", [("INCR", "number"), ("GETDEL", "number"), ("GETRANGE", "number", "0", "-1")])
async def test_a_value_does_not_leave_between_the_look_at_it_and_the_command(
    loop: str, words: tuple[str, ...], live: TieredServer
) -> None:
    """The disk's threads make room for others whenever they like, but not of what a command is about to read."""
    live.put_away("a")
    assert live.store.put(b"number", b"41")
    live.saved()
    client = await live.connect()
    await client.ask("PING")
    session, fetch = live.sessions()[0], live.store.fetch

    def early(key: bytes, space: int) -> bytes | Lease | None:
        with live.store.lock:
            for entry in list(live.store.inline_policy.victims()):
                live.store._evict(entry)
        return fetch(key, space)

    session.fetch = early
    await client.send(*words)
    if words[0] == "INCR":
        assert await client.read_line() == b":42\r\n"
    else:
        assert await client.read_bulk() == b"41"


async def test_a_block_that_cannot_be_read_is_a_miss_and_gone(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b")
    live.files.plan = lambda _, what: Fault.EIO if what.startswith("pread") else None
    client = await live.connect()
    assert await client.get("a") is None
    live.files.plan = None
    assert await client.ask("EXISTS", "a") == b":0\r\n"
    assert await client.get("b") == block("b")
    assert live.tiering.stats.lost == 1
    live.complaints.clear()


async def test_a_slow_reader_of_a_long_pipeline_has_each_block_in_its_turn(loop: str, tmp_path: Path) -> None:
    """What it waits for comes while it does not read."""
    async with TieredServer(tmp_path, arena_bytes=4 * MIB) as live:
        keys = [f"key{number}" for number in range(60)]
        for key in keys:
            live.put_away(key)
        client = await live.connect("tcp", receive_bytes=4096)
        await client.send_raw(b"".join(request("GET", key) for key in keys))
        await until(lambda: any(session.slow_since_s < float("inf") for session in live.sessions()))
        assert live.sessions()[0].output_bytes > SEND_BUFFER_BYTES
        for key in keys:
            assert await client.read_bulk() == block(key)
            await asyncio.sleep(0)
