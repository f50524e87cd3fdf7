"""Every bound on a client, reached: it closes that client or refuses it, and says so in INFO."""

import asyncio
import contextlib
import itertools
from pathlib import Path

import pytest

from tests.faults.clients import last_words, sending, standing_at
from tests.server.feed import request
from tests.server.live import MIB, LiveServer, pattern, until

pytestmark = pytest.mark.usefixtures("threads")

FULL = b"-ERR max number of clients reached\r\n"


ARGUMENTS = {
    "long then short": b"$100000\r\n" + b"x" * 100_000 + b"\r\n" + b"$4\r\nxxxx\r\n" * 999_999,
    "of two bytes": b"$2\r\nxx\r\n" * 999_999,
    "empty": b"$0\r\n\r\n" * 999_999,
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
async def test_a_million_arguments_are_bounded_by_what_they_take_in_memory(
    loop: str, arguments: str, tmp_path: Path
) -> None:
    async with LiveServer(tmp_path, client_query_buffer_limit=2 * MIB) as live:
        other, greedy = await live.connect(), await live.connect()
        async with sending(greedy, b"*1000000\r\n" + ARGUMENTS[arguments]):
            assert await last_words(greedy) == b""
        await until(lambda: len(live.sessions()) == 1)
        assert await other.ask("PING") == b"+PONG\r\n"
        assert live.server.stats.query_limit_disconnections == 1
        live.complaints.clear()


async def test_one_long_argument_is_bounded_too_in_the_arena_or_not(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, client_query_buffer_limit=MIB) as live:
        writer = await live.connect()
        assert await writer.ask("SET", "k", pattern(MIB // 2)) == b"+OK\r\n"
        for words in (("ECHO", pattern(2 * MIB)), ("SET", "k", pattern(2 * MIB))):
            greedy = await live.connect()
            async with sending(greedy, request(*words)):
                assert await last_words(greedy) == b""
        assert await writer.get("k") == pattern(MIB // 2)
        live.complaints.clear()


async def test_a_lower_limit_reaches_clients_that_are_connected(loop: str, live: LiveServer) -> None:
    other, greedy = await live.connect(), await live.connect()
    assert await other.ask("CONFIG", "SET", "client-query-buffer-limit", str(MIB)) == b"+OK\r\n"
    async with sending(greedy, request("ECHO", pattern(2 * MIB))):
        assert await last_words(greedy) == b""
    assert await other.ask("CONFIG", "SET", "proto-max-bulk-len", str(MIB)) == b"+OK\r\n"
    await other.send_raw(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1048577\r\n")
    assert await other.read_all() == b"-ERR Protocol error: invalid bulk length\r\n"
    live.complaints.clear()


async def test_a_deaf_subscriber_over_its_output_limit_is_closed_and_no_longer_counted(
    loop: str, live: LiveServer
) -> None:
    publisher, hearing, deaf = [await live.connect() for _ in range(3)]
    for subscriber in (hearing, deaf):
        await subscriber.send("SUBSCRIBE", "news")
    await until(lambda: all(session.subscriptions for session in live.sessions()[1:]))
    await hearing.read(len(b"*3\r\n$9\r\nsubscribe\r\n$4\r\nnews\r\n:1\r\n"))
    message = pattern(MIB)
    counts = []
    for _ in range(40):
        counts.append(await publisher.ask("PUBLISH", "news", message))
        await hearing.read(len(request("message", "news", message)))
        await asyncio.sleep(0)
    assert counts[:30] == [b":2\r\n"] * 30
    assert counts[-1] == b":1\r\n"
    assert len(live.sessions()) == 2
    assert live.server.stats.output_limit_disconnections == 1
    live.complaints.clear()


async def test_a_deaf_monitor_is_bounded_as_well(loop: str, live: LiveServer) -> None:
    talker, deaf = await live.connect(), await live.connect()
    assert await deaf.ask("MONITOR") == b"+OK\r\n"
    word = pattern(16_000)
    for _ in range(1000):
        await talker.send_raw(request("ECHO", word) * 10)
        await talker.read(10 * (len(word) + 10))
        if len(live.sessions()) == 1:
            break
    else:
        assert sum(session.unsent_bytes for session in live.sessions()) < 64 * MIB
    assert await talker.ask("PING") == b"+PONG\r\n"
    live.complaints.clear()


async def test_clients_beyond_maxclients_are_told_and_places_come_free(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, maxclients=5) as live:
        inside = [await live.connect() for _ in range(5)]
        for client in inside:
            assert await client.ask("PING") == b"+PONG\r\n"
        for kind in ("unix", "tcp") * 5:
            surplus = await live.connect(kind)
            assert await surplus.read_all() == FULL
        assert live.server.stats.connections_rejected == 10
        inside[0].close()
        await until(lambda: len(live.sessions()) == 4)
        assert await (await live.connect()).ask("PING") == b"+PONG\r\n"
        assert await inside[1].ask("PING") == b"+PONG\r\n"


async def test_an_idle_client_is_hung_up_on_and_a_listening_one_is_not(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, timeout=300) as live:
        idle, busy, listening = [await live.connect() for _ in range(3)]
        await listening.send("SUBSCRIBE", "news")
        await listening.read(len(b"*3\r\n$9\r\nsubscribe\r\n$4\r\nnews\r\n:1\r\n"))
        for client in (idle, busy):
            assert await client.ask("PING") == b"+PONG\r\n"
        for session in live.sessions():
            session.last_command_s -= 301
        assert await busy.ask("PING") == b"+PONG\r\n"
        assert await idle.read_all() == b""
        assert len(live.sessions()) == 2
        assert await busy.ask("PUBLISH", "news", "x") == b":1\r\n"


async def test_a_client_that_is_slow_to_send_a_value_or_to_take_one_is_not_idle(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, timeout=300, body_timeout=1e6) as live:
        sender, reader, silent, idle = [await live.connect() for _ in range(4)]
        big, small = pattern(4 * MIB), pattern(MIB)
        sent = request("SET", "small", small)
        assert await idle.ask("SET", "big", big) == b"+OK\r\n"
        await reader.send("GET", "big")
        for client in (sender, silent):
            await client.send_raw(sent[: MIB // 2])
        receiving, replying = live.sessions()[:2]
        await until(lambda: replying.unsent_bytes and sum(each.is_receiving for each in live.sessions()) == 2)
        began_s, taken = live.server.now_s(), b""
        for step in range(1, 5):
            live.server.now_s = standing_at(began_s + 200 * step)
            unsent, received = replying.unsent_bytes, receiving.input_bytes
            while replying.unsent_bytes == unsent:
                taken += await reader.read(1024)
            await sender.send_raw(sent[received : received + 1000])
            while receiving.input_bytes == received:
                await asyncio.sleep(0)
            live.server._hang_up_idle()
        assert await last_words(idle) == b""
        assert await last_words(silent) == b""
        await sender.send_raw(sent[receiving.input_bytes :])
        assert await sender.read_line() == b"+OK\r\n"
        whole = b"$%d\r\n%b\r\n" % (len(big), big)
        assert taken + await reader.read(len(whole) - len(taken)) == whole


async def test_a_value_that_stops_coming_is_given_up_and_a_slow_one_is_not(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, body_timeout=30.0) as live:
        other, stalled, slow = [await live.connect() for _ in range(3)]
        value = pattern(MIB)
        sent = request("SET", "k", value)
        for client in (stalled, slow):
            await client.send_raw(sent[: MIB // 4])
        await until(lambda: live.store.reserved_bytes > 2 * MIB)
        session = live.sessions()[2]
        began_s = live.server.now_s()
        for step in range(1, 7):
            live.server.now_s = standing_at(began_s + 20 * step)
            await slow.send_raw(sent[MIB // 4 + (step - 1) * 100_000 : MIB // 4 + step * 100_000])
            while session.input_bytes < MIB // 4 + step * 100_000:
                await asyncio.sleep(0)
            live.server.admission.give_up_stalled()
        assert await last_words(stalled) == b""
        await until(lambda: len(live.sessions()) == 2 and not live.server.io_pool.under_way)
        await slow.send_raw(sent[MIB // 4 + 600_000 :])
        assert await slow.read_line() == b"+OK\r\n"
        assert await other.get("k") == value
        assert live.store.reserved_bytes == 0
        assert live.server.admission.given_up == 1
        live.complaints.clear()


@pytest.mark.parametrize("end", ["given up", "vanish", "finish"])
async def test_a_client_that_waits_for_a_turn_gets_it_when_those_before_are_done(
    loop: str, end: str, tmp_path: Path
) -> None:
    async with LiveServer(tmp_path, body_timeout=30.0) as live, contextlib.AsyncExitStack() as stack:
        sent = request("SET", "k", pattern(2 * MIB))
        first = await live.connect()
        await first.send_raw(sent[: MIB // 4])
        await until(lambda: live.store.reserved_bytes)
        before = [await live.connect() for _ in range(6)]
        for client in before:
            await stack.enter_async_context(sending(client, sent[: MIB // 2]))
        await until(lambda: sum(session.waiting is not None for session in live.sessions()) == 6)
        assert live.store.reserved_bytes <= live.server.admission.share_bytes
        patient = await live.connect()
        task = await stack.enter_async_context(sending(patient, request("SET", "mine", pattern(2 * MIB, 7))))
        if end == "vanish":
            for client in (*before, first):
                client.reset()
        elif end == "finish":
            await first.send_raw(sent[MIB // 4 :])
            assert await first.read_line() == b"+OK\r\n"
            for client in before:
                client.close()
        began_s = live.server.now_s()
        for step in itertools.count(1):
            if task.done():
                break
            if end == "given up":
                live.server.now_s = standing_at(began_s + 10 * step)
                live.server.admission.give_up_stalled()
            for _ in range(20):
                await asyncio.sleep(0)
            await until(lambda: not live.server.io_pool.under_way)
        assert await patient.read_line() == b"+OK\r\n"
        assert await patient.get("mine") == pattern(2 * MIB, 7)
        live.complaints.clear()
