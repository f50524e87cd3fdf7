"""Messages and keyspace events over real connections: their order among replies, and clients that come and go."""

from pathlib import Path

import pytest

from tests.server.live import LOOPS, MIB, LiveServer, pattern, run_on, until
from tests.server.pushes import message, read_message, speak_resp3, subscribe

HI = [b"message", b"c", b"hi"]


@pytest.mark.parametrize("loop", LOOPS)
def test_an_idle_subscriber_is_sent_a_message_at_once(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            listener, speaker = await live.connect(), await live.connect("tcp")
            await subscribe(listener, "SUBSCRIBE", "c")
            assert await speaker.ask("PUBLISH", "c", "hi") == b":1\r\n"
            assert await read_message(listener) == HI

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_message_waits_for_the_reply_that_is_under_way(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            listener, speaker = await live.connect(receive_bytes=4096), await live.connect()
            body = pattern(4 * MIB)
            await speaker.send("SET", "block", body)
            assert await speaker.read_line() == b"+OK\r\n"
            await speak_resp3(listener)
            await subscribe(listener, "SUBSCRIBE", "c")
            await listener.send("GET", "block")
            await until(lambda: live.store.leases == 1)
            assert await speaker.ask("PUBLISH", "c", "hi") == b":1\r\n"
            assert await listener.read_bulk() == body
            assert await read_message(listener) == HI

    run_on(loop, story())


def test_own_messages_follow_their_replies_in_a_pipeline(tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            client = await live.connect()
            await speak_resp3(client)
            await subscribe(client, "SUBSCRIBE", "c")
            await client.send_raw(b"PING\r\nPUBLISH c hi\r\nGET k\r\nPUBLISH c hi\r\nQUIT\r\n")
            own = message("message", "c", "hi", resp=3)
            assert await client.read_all() == b"+PONG\r\n:1\r\n" + own + b"_\r\n:1\r\n" + own + b"+OK\r\n"

    run_on("uvloop", story())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_subscriber_that_vanishes_is_forgotten(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            listener, speaker = await live.connect("tcp"), await live.connect()
            await listener.send("SUBSCRIBE", "c", "d")
            await listener.send("PSUBSCRIBE", "*")
            await until(lambda: live.server.pubsub.patterns)
            assert await speaker.ask("PUBLISH", "c", "hi") == b":2\r\n"
            listener.reset()
            await until(lambda: len(live.server.sessions) == 1)
            assert await speaker.ask("PUBLISH", "c", "hi") == b":0\r\n"
            assert not live.server.pubsub.channels
            assert not live.server.pubsub.patterns

    run_on(loop, story())


def test_reset_ends_subscriptions_and_their_restrictions(tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            client = await live.connect()
            await subscribe(client, "SUBSCRIBE", "c")
            assert (await client.ask("GET", "k")).startswith(b"-ERR Can't execute 'get': only (P|S)SUBSCRIBE")
            await client.send("PING")
            assert await read_message(client) == [b"pong", b""]
            assert await client.ask("RESET") == b"+RESET\r\n"
            assert await client.ask("PUBLISH", "c", "hi") == b":0\r\n"
            assert await client.ask("PING") == b"+PONG\r\n"

    run_on("uvloop", story())


def test_a_key_that_expires_unread_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            listener, writer = await live.connect(), await live.connect()
            assert await writer.ask("CONFIG", "SET", "notify-keyspace-events", "Ex") == b"+OK\r\n"
            await subscribe(listener, "SUBSCRIBE", "__keyevent@0__:expired")
            assert await writer.ask("SET", "k", "v", "PX", "1000") == b"+OK\r\n"
            live.clock_ms += 1000
            assert await read_message(listener) == [b"message", b"__keyevent@0__:expired", b"k"]

    run_on("uvloop", story())


def test_a_key_that_had_to_leave_is_told_before_the_one_it_left_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, arena_bytes=4 * MIB) as live:
            listener, writer = await live.connect(), await live.connect()
            assert await writer.ask("CONFIG", "SET", "notify-keyspace-events", "Ee$") == b"+OK\r\n"
            await subscribe(listener, "PSUBSCRIBE", "__keyevent@0__:*")
            for key in ("a", "b", "c"):
                assert await writer.ask("SET", key, pattern(3 * MIB // 2)) == b"+OK\r\n"
            told = [(await read_message(listener))[2:] for _ in range(4)]
            assert told == [
                [b"__keyevent@0__:set", b"a"],
                [b"__keyevent@0__:set", b"b"],
                [b"__keyevent@0__:evicted", b"a"],
                [b"__keyevent@0__:set", b"c"],
            ]

    run_on("uvloop", story())
