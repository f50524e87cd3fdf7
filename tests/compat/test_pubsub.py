"""redis-py as subscriber, as publisher and with its client-side cache, in both protocols, sync and asyncio."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.cache import CacheConfig

from tests.compat.conftest import RunningServer

WAIT_S = 10
"""Longer than any message takes: a test that waits so long has failed."""


@pytest.fixture(params=[2, 3])
def client(request: pytest.FixtureRequest, kvredis: RunningServer) -> Iterator[Any]:
    with redis.Redis(port=kvredis.port, protocol=request.param) as connected:
        yield connected
        connected.config_set("notify-keyspace-events", "")
    connected.connection_pool.disconnect()


def read(listener: Any) -> tuple[str, bytes | None, bytes | None, Any]:
    """The next message of a PubSub object: type, pattern, channel, data."""
    found = listener.get_message(timeout=WAIT_S)
    assert found is not None, "no message came"
    return found["type"], found["pattern"], found["channel"], found["data"]


def test_a_subscriber_reads_what_others_publish(client: Any) -> None:
    with client.pubsub() as listener:
        listener.subscribe("news")
        listener.psubscribe("n?ws")
        assert read(listener) == ("subscribe", None, b"news", 1)
        assert read(listener) == ("psubscribe", None, b"n?ws", 2)
        assert client.publish("news", b"\0\r\n") == 2
        assert read(listener) == ("message", None, b"news", b"\0\r\n")
        assert read(listener) == ("pmessage", b"n?ws", b"news", b"\0\r\n")
        assert client.pubsub_channels() == [b"news"]
        assert client.pubsub_numsub("news", "nope") == [(b"news", 1), (b"nope", 0)]
        assert client.pubsub_numpat() == 1
        listener.ping("still there?")
        assert read(listener)[0] == "pong"
        listener.unsubscribe()
        listener.punsubscribe()
        assert read(listener) == ("unsubscribe", None, b"news", 1)
        assert read(listener) == ("punsubscribe", None, b"n?ws", 0)
    assert client.publish("news", "x") == 0


def test_a_handler_is_called_for_each_message_in_its_order(client: Any) -> None:
    heard: list[bytes] = []
    with client.pubsub() as listener:
        listener.subscribe(channel=lambda found: heard.append(found["data"]))
        read(listener)
        for number in range(100):
            assert client.publish("channel", number) == 1
        while len(heard) < 100:
            listener.get_message(timeout=WAIT_S)
    assert heard == [b"%d" % number for number in range(100)]


def test_a_big_message_arrives_whole(client: Any) -> None:
    block = bytes(range(256)) * 8192
    with client.pubsub() as listener:
        listener.subscribe("blocks")
        read(listener)
        assert client.publish("blocks", block) == 1
        assert read(listener)[3] == block


def test_keyspace_events_tell_what_happens_to_keys(client: Any) -> None:
    client.config_set("notify-keyspace-events", "KEA")
    assert client.config_get("notify-keyspace-events") == {"notify-keyspace-events": "AKE"}
    with client.pubsub() as listener:
        listener.psubscribe("__keyevent@0__:*")
        read(listener)
        client.set("k", "v", ex=100)
        client.delete("k", "nope")
        client.set("short", "v", px=1)
        told = [read(listener)[2:] for _ in range(6)]
    assert told == [
        (b"__keyevent@0__:set", b"k"),
        (b"__keyevent@0__:expire", b"k"),
        (b"__keyevent@0__:del", b"k"),
        (b"__keyevent@0__:set", b"short"),
        (b"__keyevent@0__:expire", b"short"),
        (b"__keyevent@0__:expired", b"short"),
    ]


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_async_client_hears_many_channels_at_once(protocol: int, kvredis: RunningServer) -> None:
    async def run() -> None:
        client: Any = redis.asyncio.Redis(port=kvredis.port, protocol=protocol)
        async with client.pubsub() as listener:
            await listener.subscribe(*(f"channel{number}" for number in range(20)))
            for _ in range(20):
                assert (await listener.get_message(timeout=WAIT_S))["type"] == "subscribe"
            sent = await asyncio.gather(*(client.publish(f"channel{number}", number) for number in range(20)))
            assert sent == [1] * 20
            heard = [(await listener.get_message(timeout=WAIT_S))["data"] for _ in range(20)]
            assert sorted(map(int, heard)) == list(range(20))
        await client.aclose()

    asyncio.run(run())


@pytest.fixture
def caching(kvredis: RunningServer) -> Iterator[Any]:
    """A client that keeps copies of what it reads."""
    with redis.Redis(port=kvredis.port, protocol=3, cache_config=CacheConfig()) as connected:
        yield connected
    connected.connection_pool.disconnect()


@pytest.fixture
def writer(kvredis: RunningServer) -> Iterator[Any]:
    with redis.Redis(port=kvredis.port, protocol=3) as connected:
        yield connected
    connected.connection_pool.disconnect()


def calls_of_get(writer: Any) -> int:
    """How many GETs have reached the server."""
    return int(writer.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"])


def test_a_cached_value_is_read_without_the_server_until_it_changes(caching: Any, writer: Any) -> None:
    writer.set("k", "one")
    before = calls_of_get(writer)
    assert [caching.get("k") for _ in range(10)] == [b"one"] * 10
    assert calls_of_get(writer) - before == 1
    assert caching.get_cache().size == 1
    writer.set("k", "two")
    assert caching.get("k") == b"two"
    assert caching.get("k") == b"two"
    assert calls_of_get(writer) - before == 2


def test_a_cached_value_goes_when_its_key_is_deleted_expires_or_is_flushed(caching: Any, writer: Any) -> None:
    writer.mset({"deleted": "v", "flushed": "v"})
    writer.set("expires", "v", px=200)
    assert [caching.get(key) for key in ("deleted", "expires", "flushed")] == [b"v"] * 3
    writer.delete("deleted")
    assert caching.get("deleted") is None
    for _ in range(1_000_000):
        if caching.get("expires") is None:
            break
    else:
        pytest.fail("the copy of an expired value is still there")
    writer.flushall()
    assert caching.get("flushed") is None


def test_a_cached_value_follows_its_own_client_too(caching: Any, writer: Any) -> None:
    for number in range(100):
        caching.set("k", number)
        assert caching.get("k") == b"%d" % number
        assert caching.mget("k", "nope") == [b"%d" % number, None]


def test_info_counts_who_tracks_and_listens(caching: Any, writer: Any) -> None:
    caching.get("k")
    info = writer.info("everything")
    assert info["tracking_clients"] == 1
    assert info["tracking_total_keys"] == info["tracking_total_items"] == 1
    with writer.pubsub() as listener:
        listener.subscribe("a", "b")
        listener.psubscribe("c*")
        for _ in range(3):
            read(listener)
        info = writer.info("everything")
        assert (info["pubsub_channels"], info["pubsub_patterns"], info["pubsubshard_channels"]) == (2, 1, 0)
        flags = {each["id"]: each["flags"] for each in writer.client_list()}
        assert sorted("".join(flags.values()).replace("N", "")) == ["P", "t"]
