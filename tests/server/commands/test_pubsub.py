"""Publish and subscribe on sessions without connections: who gets what, and what subscribing answers."""

from pathlib import Path
from typing import cast

import pytest

from kvredis.server.client.session import Session
from kvredis.server.commands import pubsub as pubsub
from kvredis.server.server import Server
from tests.server.fake_session import FakeSession
from tests.server.live import MIB, LiveServer, pattern, until
from tests.server.pushes import message, read_message, speak_resp3, subscribe


@pytest.fixture
def other(server: Server) -> FakeSession:
    return FakeSession(server, 2)


def test_confirmations_are_messages_that_client_reply_off_does_not_silence(session: FakeSession) -> None:
    session.reply_mode = "off"
    assert session.ask("SUBSCRIBE a") == b""
    assert session.pushed == [b"*3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n"]


def test_each_subscriber_gets_a_message_in_its_own_protocol(session: FakeSession, other: FakeSession) -> None:
    other.speak(3)
    session.ask("SUBSCRIBE c")
    other.ask("SUBSCRIBE c")
    assert other.ask("PUBLISH c m") == b":2\r\n"
    assert session.pushed == [message("message", "c", "m")]
    assert other.pushed == [message("message", "c", "m", resp=3)]


def test_a_client_that_has_gone_leaves_no_trace(server: Server, session: FakeSession, other: FakeSession) -> None:
    session.ask("SUBSCRIBE a b")
    session.ask("PSUBSCRIBE p*")
    session.ask("SSUBSCRIBE s")
    other.ask("SUBSCRIBE a")
    server.pubsub.forget(cast(Session, session))
    assert session.subscriptions == 0
    assert server.pubsub.channels.keys() == {b"a"}
    assert not server.pubsub.patterns
    assert not server.pubsub.shard_channels
    assert other.ask("PUBLISH a m") == b":1\r\n"
    assert other.ask("PUBLISH p1 m") == b":0\r\n"
    assert session.pushed == []
    server.pubsub.forget(cast(Session, other))
    assert not any(vars(server.pubsub).values())


def test_the_session_looks_again_when_it_begins_and_ends_to_listen(session: FakeSession) -> None:
    session.ask("SUBSCRIBE a b")
    assert session.reconsidered == 1
    session.ask("UNSUBSCRIBE a")
    assert session.reconsidered == 1
    session.ask("UNSUBSCRIBE b")
    assert session.reconsidered == 2


def test_pubsub_tells_which_clients_listen_to_what(session: FakeSession, other: FakeSession) -> None:
    session.ask("SUBSCRIBE a ab b")
    other.ask("SUBSCRIBE a")
    other.ask("PSUBSCRIBE x* y*")
    session.ask("PSUBSCRIBE x*")
    session.ask("SSUBSCRIBE s")
    assert session.ask("PUBSUB CHANNELS") == b"*3\r\n$1\r\na\r\n$2\r\nab\r\n$1\r\nb\r\n"
    assert session.ask("PUBSUB channels a*") == b"*2\r\n$1\r\na\r\n$2\r\nab\r\n"
    assert session.ask("PUBSUB NUMSUB a nope") == b"*4\r\n$1\r\na\r\n:2\r\n$4\r\nnope\r\n:0\r\n"
    assert session.ask("PUBSUB NUMSUB") == b"*0\r\n"
    assert session.ask("PUBSUB NUMPAT") == b":2\r\n"
    assert session.ask("PUBSUB SHARDCHANNELS") == b"*1\r\n$1\r\ns\r\n"
    assert session.ask("PUBSUB SHARDNUMSUB s a") == b"*4\r\n$1\r\ns\r\n:1\r\n$1\r\na\r\n:0\r\n"


def test_pubsub_refuses_what_it_does_not_know(session: FakeSession) -> None:
    assert session.ask("PUBSUB FOO") == b"-ERR unknown subcommand 'FOO'. Try PUBSUB HELP.\r\n"
    assert session.ask("PUBSUB CHANNELS a b") == (
        b"-ERR unknown subcommand or wrong number of arguments for 'CHANNELS'. Try PUBSUB HELP.\r\n"
    )
    assert session.ask("PUBSUB NUMPAT x") == b"-ERR wrong number of arguments for 'pubsub|numpat' command\r\n"
    for name in (b"CHANNELS", b"NUMSUB", b"NUMPAT", b"SHARDCHANNELS", b"SHARDNUMSUB", b"HELP"):
        assert b"\r\n+" + name in session.ask("PUBSUB HELP")


def test_subscriptions_of_a_client_have_a_bound(monkeypatch: pytest.MonkeyPatch, session: FakeSession) -> None:
    monkeypatch.setattr(pubsub, "SUBSCRIPTION_BYTES_MAX", 3 * (pubsub.SUBSCRIPTION_BYTES + 1))
    session.ask("SUBSCRIBE a b")
    assert session.ask("SUBSCRIBE c d").startswith(b"-ERR the subscriptions of this client")
    assert session.subscriptions == 2
    session.ask("UNSUBSCRIBE a")
    assert session.ask("PSUBSCRIBE c d").endswith(b":3\r\n")


# Messages and keyspace events over real connections: their order among replies, and clients that come and go.

HI = [b"message", b"c", b"hi"]


async def test_an_idle_subscriber_is_sent_a_message_at_once(loop: str, live: LiveServer) -> None:
    listener, speaker = await live.connect(), await live.connect("tcp")
    await subscribe(listener, "SUBSCRIBE", "c")
    assert await speaker.ask("PUBLISH", "c", "hi") == b":1\r\n"
    assert await read_message(listener) == HI


async def test_a_message_waits_for_the_reply_that_is_under_way(loop: str, live: LiveServer) -> None:
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


async def test_own_messages_follow_their_replies_in_a_pipeline(live: LiveServer) -> None:
    client = await live.connect()
    await speak_resp3(client)
    await subscribe(client, "SUBSCRIBE", "c")
    await client.send_raw(b"PING\r\nPUBLISH c hi\r\nGET k\r\nPUBLISH c hi\r\nQUIT\r\n")
    own = message("message", "c", "hi", resp=3)
    assert await client.read_all() == b"+PONG\r\n:1\r\n" + own + b"_\r\n:1\r\n" + own + b"+OK\r\n"


async def test_a_subscriber_that_vanishes_is_forgotten(loop: str, live: LiveServer) -> None:
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


async def test_reset_ends_subscriptions_and_their_restrictions(live: LiveServer) -> None:
    client = await live.connect()
    await subscribe(client, "SUBSCRIBE", "c")
    assert (await client.ask("GET", "k")).startswith(b"-ERR Can't execute 'get': only (P|S)SUBSCRIBE")
    await client.send("PING")
    assert await read_message(client) == [b"pong", b""]
    assert await client.ask("RESET") == b"+RESET\r\n"
    assert await client.ask("PUBLISH", "c", "hi") == b":0\r\n"
    assert await client.ask("PING") == b"+PONG\r\n"


async def test_a_key_that_expires_unread_is_told(live: LiveServer) -> None:
    listener, writer = await live.connect(), await live.connect()
    assert await writer.ask("CONFIG", "SET", "notify-keyspace-events", "Ex") == b"+OK\r\n"
    await subscribe(listener, "SUBSCRIBE", "__keyevent@0__:expired")
    assert await writer.ask("SET", "k", "v", "PX", "1000") == b"+OK\r\n"
    live.clock_ms += 1000
    assert await read_message(listener) == [b"message", b"__keyevent@0__:expired", b"k"]


async def test_a_key_that_had_to_leave_is_told_before_the_one_it_left_for(tmp_path: Path) -> None:
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
