"""Clients that reserve room and bring nothing, too little or too much: others are served, and in the end it is free."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvredis.server.client.blocked import Reason
from tests.faults.clients import standing_at
from tests.server.commands.test_multipart import GONE, reserve
from tests.server.feed import request
from tests.server.live import MIB, OOM, LiveServer, pattern, until
from tests.server.tiered_server import TieredServer, block, info
from tests.server.tiering.test_stores import fill, storing

pytestmark = pytest.mark.usefixtures("threads")

ARENA = 16 * MIB
LENGTH = 2 * MIB
KIB64 = 64 * 1024


@asynccontextmanager
async def stopped_clock(folder: Path) -> AsyncIterator[LiveServer]:
    """A server for which no time passes unless the test says so."""
    async with LiveServer(folder, ARENA, body_timeout=30.0) as live:
        live.server.now_s = standing_at(1000.0)
        yield live
        live.server.now_s = live.store.now_s  # it waits for its clients by this


def at_time(live: LiveServer, time_s: float) -> None:
    """Let it be that late, and the server look for who has stalled."""
    live.server.now_s = standing_at(time_s)
    live.server.parts.give_up_stalled()
    live.server.admission.give_up_stalled()


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    return LiveServer(tmp_path, ARENA)


async def test_a_reservation_that_nothing_comes_for_is_given_up_and_its_client_stays(loop: str, tmp_path: Path) -> None:
    async with stopped_clock(tmp_path) as live:
        client = await live.connect()
        old = pattern(1000)
        assert await client.ask("SET", "k", old) == b"+OK\r\n"
        number = await reserve(client, "k", LENGTH)
        assert await client.ask("KV.WRITE", number, "0", pattern(1000)) == b"+OK\r\n"
        at_time(live, 1030.0)
        assert len(live.server.parts) == 1
        at_time(live, 1030.1)
        assert (len(live.server.parts), live.store.reserved_bytes) == (0, 0)
        assert (await client.ask("KV.WRITE", number, "0", pattern(LENGTH))).startswith(GONE)
        assert (await client.ask("KV.COMMIT", number)).startswith(GONE)
        assert await client.get("k") == old
        told = await info(client, "kv")
        assert (told["reservations_given_up"], told["bodies_given_up"]) == ("1", "0")
        assert len(live.complaints) == 1
        live.complaints.clear()


async def test_a_client_that_brings_enough_in_time_keeps_its_reservation_and_one_that_writes_the_same_again_does_not(
    tmp_path: Path,
) -> None:
    async with stopped_clock(tmp_path) as live:
        client = await live.connect()
        busy, idle = await reserve(client, "busy", LENGTH), await reserve(client, "idle", LENGTH)
        for turn in range(4):
            assert await client.ask("KV.WRITE", busy, str(turn * KIB64), pattern(KIB64)) == b"+OK\r\n"
            told = await client.ask("KV.WRITE", idle, "0", pattern(KIB64))
            assert told.startswith(b"+OK" if turn < 3 else GONE)
            at_time(live, 1025.0 + 25 * turn)
        assert (await client.ask("KV.COMMIT", idle)).startswith(GONE)
        assert await client.ask("KV.WRITE", busy, "0", pattern(LENGTH)) == b"+OK\r\n"
        assert await client.ask("KV.COMMIT", busy) == b"+OK\r\n"
        live.complaints.clear()


async def test_while_the_server_holds_all_clients_up_no_reservation_is_given_up(tmp_path: Path) -> None:
    async with stopped_clock(tmp_path) as live:
        client, operator = await live.connect(), await live.connect()
        whole, begun = await reserve(client, "whole", LENGTH), await reserve(client, "begun", LENGTH)
        assert await client.ask("KV.WRITE", whole, "0", pattern(LENGTH)) == b"+OK\r\n"
        at_time(live, 1001.0)
        assert await operator.ask("CLIENT", "PAUSE", "3600000") == b"+OK\r\n"
        await client.send("KV.COMMIT", whole)
        await until(lambda: live.server.blocked.count(Reason.PAUSE))
        at_time(live, 1500.0)
        live.server.pause.end()
        assert await client.read_line() == b"+OK\r\n"
        at_time(live, 1529.0)
        assert await client.ask("KV.WRITE", begun, "0", pattern(KIB64)) == b"+OK\r\n"
        assert await client.ask("KV.ABORT", begun) == b":1\r\n"


async def test_a_part_that_stops_coming_ends_its_client_and_with_it_all_it_reserved(tmp_path: Path) -> None:
    async with stopped_clock(tmp_path) as live:
        client = await live.connect()
        number = await reserve(client, "k", LENGTH)
        await reserve(client, "l", LENGTH)
        await client.send_raw(request("KV.WRITE", number, "5", pattern(MIB))[: MIB // 2])
        await until(lambda: live.sessions()[0].input_bytes > MIB // 2)
        live.server.admission.give_up_stalled()
        at_time(live, 1031.0)
        (part,) = live.server.parts.of(live.sessions()[0])
        assert part.id == int(number)
        assert live.store.reserved_bytes >= LENGTH, "as long as the kernel may write there it is not given away"
        assert await client.read_all() == b""
        await until(lambda: not (live.server.sessions or live.server.io_pool.under_way))
        assert (live.store.reserved_bytes, len(live.server.parts), live.server.admission.given_up) == (0, 0, 1)
        live.store.check_integrity()
        live.complaints.clear()


async def test_client_kill_frees_what_a_client_has_reserved(live: LiveServer) -> None:
    client, operator = await live.connect(), await live.connect()
    await reserve(client, "k", LENGTH)
    await client.send_raw(request("KV.WRITE", "1", "5", pattern(MIB))[: MIB // 2])
    await until(lambda: live.sessions()[0].input_bytes > MIB // 2)
    assert live.store.reserved_bytes > LENGTH
    assert await operator.ask("CLIENT", "KILL", "ID", str(live.sessions()[0].id)) == b":1\r\n"
    await until(lambda: not live.store.reserved_bytes)
    assert (await info(operator, "kv"))["reservations_aborted"] == "1"
    live.store.check_integrity()


async def test_others_wait_their_turn_for_room_and_are_told_once_that_they_ran(loop: str, live: LiveServer) -> None:
    """Reservations and values that come at once share a quarter of the arena; one that waits counts when it has run."""
    first, second, setter, watcher = [await live.connect() for _ in range(4)]
    for careful in (False, True):
        if careful:
            assert await watcher.ask("MONITOR") == b"+OK\r\n"
        number = await reserve(first, "a", 3 * MIB)
        await second.send_raw(request("KV.RESERVE", "b", str(2 * MIB)) + request("PING"))
        await until(lambda: len(live.server.admission.queue) == 1)
        whole = request("SET", "c", pattern(3 * MIB // 2))
        await setter.send_raw(whole[:1000])
        await until(lambda: len(live.server.admission.queue) == 2)
        assert await first.ask("KV.WRITE", number, "0", pattern(3 * MIB)) == b"+OK\r\n"
        assert await first.ask("KV.COMMIT", number) == b"+OK\r\n"
        told = await second.read_line()
        assert told[:1] == b":"
        assert await second.read_line() == b"+PONG\r\n"
        assert len(live.server.admission.queue) == 0
        await setter.send_raw(whole[1000:])
        assert await setter.read_line() == b"+OK\r\n"
        assert await second.ask("KV.ABORT", told[1:-2]) == b":1\r\n"
    calls = live.server.stats.commands["kv.reserve"].calls
    assert calls == 4
    seen = b""
    while seen.count(b"KV.ABORT") < 1:
        seen += await watcher.read_line()
    assert seen.count(b'"KV.RESERVE" "b"') == 1
    watcher.close()


async def test_a_client_that_holds_room_is_refused_more_and_never_made_to_wait_with_it(live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    await client.say_hello()
    number = await reserve(client, "a", 3 * MIB)
    more = await reserve(client, "b", 4 * MIB)
    assert await client.ask("KV.RESERVE", "c", str(2 * MIB)) == OOM, "half of the arena, also when alone"
    assert await client.ask("KV.ABORT", more) == b":1\r\n"
    await reserve(other, "d", MIB // 2)
    assert await client.ask("SET", "e", pattern(6 * MIB)) == OOM
    assert await client.ask("KV.ABORT", number) == b":1\r\n"
    alone = await reserve(client, "f", 3 * MIB)
    assert await client.ask("KV.ABORT", alone) == b":1\r\n"


async def test_a_client_that_goes_while_it_waits_for_room_leaves_its_place(live: LiveServer) -> None:
    first, second, third = [await live.connect() for _ in range(3)]
    number = await reserve(first, "a", 3 * MIB)
    await second.send("KV.RESERVE", "b", str(3 * MIB))
    await until(lambda: len(live.server.admission.queue) == 1)
    await third.send("KV.RESERVE", "c", str(3 * MIB))
    await until(lambda: len(live.server.admission.queue) == 2)
    second.reset()
    await until(lambda: len(live.server.admission.queue) == 1)
    assert await first.ask("KV.ABORT", number) == b":1\r\n"
    assert (await third.read_line())[:1] == b":"
    assert len(live.server.parts) == 1


async def test_room_that_the_disk_must_make_is_waited_for(loop: str, tmp_path: Path) -> None:
    async with TieredServer(tmp_path) as live:
        fill(live)
        client = await storing(live, ("KV.RESERVE", "new", str(len(block("new")))), ("PING",))
        live.let_go()
        told = await client.read_line()
        assert told[:1] == b":"
        assert await client.read_line() == b"+PONG\r\n"
        assert await client.ask("KV.WRITE", told[1:-2], "0", block("new")) == b"+OK\r\n"
        assert await client.ask("KV.COMMIT", told[1:-2]) == b"+OK\r\n"
        assert await client.get("new") == block("new")
        assert live.tiering.stats.spill_dropped == 0
