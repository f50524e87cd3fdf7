"""What leaves for a client: streams that hold little, messages in their order, and the bounds on what may wait."""

from pathlib import Path

import pytest

from kvredis.server.client.output import PUSH_BYTES_MAX
from tests.server.feed import request
from tests.server.live import MIB, LiveServer, pattern, run_on, until

RECEIVE_BYTES = 4096


def test_mget_holds_few_of_many_values_for_a_client_that_does_not_read(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, 64 * MIB) as live:
            writer = await live.connect()
            for n in range(20):
                await writer.ask("SET", f"k{n}", pattern(2 * MIB, n))
            reader = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
            await reader.send("MGET", *(f"k{n}" for n in range(20)))
            assert await reader.read(5) == b"*20\r\n"
            assert 0 < live.store.leases <= 4
            assert await writer.ask("DEL", "k19") == b":1\r\n"  # found when its turn comes, which it has not
            for n in range(19):
                assert await reader.read_bulk() == pattern(2 * MIB, n)
                assert live.store.leases <= 4
            assert await reader.read_bulk() is None
            assert await reader.ask("PING") == b"+PONG\r\n"

    run_on(loop, story())


def test_commands_behind_a_stream_are_answered_behind_it(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, 64 * MIB) as live:
            client = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
            value = pattern(3 * MIB)
            await client.ask("SET", "k", value)
            await client.send_raw(request("MGET", "k", "k", "nope", "k") + request("PING") + request("MGET", "k", "k"))
            assert await client.read_line() == b"*4\r\n"
            assert [await client.read_bulk() for _ in range(4)] == [value, value, None, value]
            assert await client.read_line() == b"+PONG\r\n"
            assert await client.read_line() == b"*2\r\n"
            assert [await client.read_bulk() for _ in range(2)] == [value, value]

    run_on(loop, story())


def test_a_reader_that_vanishes_within_a_stream_leaves_no_lease(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, 64 * MIB) as live:
            client = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
            await client.ask("SET", "k", pattern(4 * MIB))
            await client.send("MGET", *["k"] * 50)
            await client.read(MIB)
            assert live.store.leases
            client.reset()
            await until(lambda: not live.store.leases)

    run_on(loop, story())


def test_a_message_goes_behind_the_reply_that_is_going_out(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, 64 * MIB) as live:
            client = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
            value = pattern(4 * MIB)
            await client.ask("SET", "k", value)
            await client.send("MGET", "k", "k")
            await client.read(4)
            live.sessions()[0].push(b">1\r\n+news\r\n")
            assert [await client.read_bulk() for _ in range(2)] == [value, value]
            assert await client.read(11) == b">1\r\n+news\r\n"
            live.sessions()[0].push(b">1\r\n+more\r\n")  # to an idle client: at once
            assert await client.read(11) == b">1\r\n+more\r\n"

    run_on(loop, story())


@pytest.mark.parametrize("subscribed", [False, True])
def test_a_client_that_is_told_much_and_does_not_read_is_closed(loop: str, subscribed: bool, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            if subscribed:
                live.server.output_limits["pubsub"] = (4 * MIB, 0, 0)
            deaf = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
            if subscribed:
                await deaf.send("SUBSCRIBE", "channel")
            await deaf.send("ECHO", "x") if not subscribed else None
            await until(lambda: live.sessions() and live.sessions()[0].input_bytes)
            session, sent = live.sessions()[0], 0
            while live.server.sessions and sent < 3 * PUSH_BYTES_MAX:
                session.push(bytes(MIB))
                sent += MIB
                await until(lambda: True)
                if session._transport is None or session._transport.is_closing():
                    break
            await until(lambda: not live.server.sessions)
            assert live.server.stats.output_limit_disconnections == 1
            assert sent <= (4 + 8 if subscribed else 32 + 8) * MIB
            assert any("client-output-buffer-limit" in line for line in live.complaints)
            live.complaints.clear()

    run_on(loop, story())


def test_a_soft_limit_counts_from_the_moment_it_is_passed(tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            live.server.output_limits["normal"] = (0, MIB, 0)
            deaf = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
            await deaf.ask("SET", "k", pattern(6 * MIB))
            await deaf.send("GET", "k")
            await until(lambda: live.sessions()[0].unsent_bytes > MIB)
            session = live.sessions()[0]
            while live.server.sessions:
                session.push(b"+x\r\n")
                await until(lambda: True)
                if session._transport is None or session._transport.is_closing():
                    break
            await until(lambda: not live.server.sessions)
            assert live.server.stats.output_limit_disconnections == 1
            live.complaints.clear()

    run_on("uvloop", story())
