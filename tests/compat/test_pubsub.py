"""redis-py as subscriber, as publisher and with its client-side cache, in both protocols, sync and asyncio."""

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.cache import CacheConfig

from tests.compat.conftest import RunningServer
from tests.compat.pubsub_scripts import (
    ALLOWED,
    EVENT_SCRIPTS,
    NO_EVENTS,
    PUBSUB_SCRIPTS,
    REORDERED,
    TRACKING_SCRIPTS,
    Step,
)
from tests.compat.wire import CommandLine, encode

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


def test_info_counts_the_clients_that_track_and_listen(caching: Any, writer: Any) -> None:
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


# Sessions of several clients with Debian's redis-server and with ours: what each client is sent must be equal byte
# for byte, messages that no client asked for included. When is a client done reading? After each step every client
# asks for something whose answer cannot be taken for another: what comes before it was sent because of the step. It
# is a subcommand of CLIENT, since those leave CLIENT CACHING alone.

SCRIPTS = {**PUBSUB_SCRIPTS, **EVENT_SCRIPTS, **TRACKING_SCRIPTS}


Heard = list[tuple[str, list[bytes]]]


"""Each client's name and what it was sent."""


class Conversation:
    """A script's clients at one server."""

    def __init__(self, server: RunningServer, resp: int, names: list[str]) -> None:
        self.wires = {name: server.connect() for name in names}
        self.ids = {name: int(wire.ask("CLIENT ID")[1:]) for name, wire in self.wires.items()}
        self._queueing: set[str] = set()
        self._numbers = count()
        if resp == 3:
            for wire in self.wires.values():
                wire.ask("HELLO 3")

    def take(self, step: Step) -> Heard:
        """Say what the step says; what every client has been sent."""
        name, lines = self._parsed(step)
        wire = self.wires[name]
        first = wire.exchange(b"".join(map(encode, lines)), len(lines))
        if lines == ["QUIT"]:
            assert wire.at_end()
            wire.close()
            del self.wires[name]
        self._note_queueing(name, lines)
        heard = [(name, first + self._rest(name))]
        heard += [(other, self._rest(other)) for other in self.wires if other != name]
        return [(who, [self._without_ids(lines, frame) for frame in frames]) for who, frames in heard]

    def _parsed(self, step: Step) -> tuple[str, list[CommandLine]]:
        """Who speaks, and the lines."""
        if isinstance(step, tuple):
            return step[0], [step[1]]
        name, _, said = step.partition(" ")
        return name, list(said.format(**self.ids).split(" ; "))

    def _note_queueing(self, name: str, lines: list[CommandLine]) -> None:
        if "MULTI" in lines:
            self._queueing.add(name)
        elif {"EXEC", "DISCARD"} & {line for line in lines if isinstance(line, str)}:
            self._queueing.discard(name)

    def _rest(self, name: str) -> list[bytes]:
        """What a client was sent besides; a client in MULTI is not asked, for that would be queued."""
        if name not in self.wires or name in self._queueing:
            return []
        token = b"nobody-%d" % next(self._numbers)
        frames = self.wires[name].exchange(encode([b"CLIENT", b"KILL", b"USER", token]))
        while token not in frames[-1] and b"'client|kill'" not in frames[-1]:
            frames.append(self.wires[name].read())
        return frames[:-1]

    def _without_ids(self, lines: list[CommandLine], frame: bytes) -> bytes:
        """A frame with names where it speaks of clients, whose numbers are each server's own."""
        for name, number in self.ids.items():
            if b"redir" in frame or "CLIENT GETREDIR" in lines:
                frame = frame.replace(b":%d\r\n" % number, b":{%b}\r\n" % name.encode())
        return frame

    def close(self) -> None:
        """Hang up."""
        for wire in self.wires.values():
            wire.close()


def converse(server: RunningServer, resp: int, script: list[Step]) -> Iterator[Heard]:
    """What every client was sent after each step of a script."""
    conversation = Conversation(server, resp, sorted({step[0] for step in script} | {"b"}))
    try:
        for step in script:
            yield conversation.take(step)
    finally:
        conversation.close()
        with server.connect() as wire:
            wire.ask(NO_EVENTS)


def in_any_order(heard: Heard) -> Heard:
    """What came, whatever came first; EXEC's reply is taken apart too."""
    return [(name, sorted(b"".join(frames).split(b"\r\n"))) for name, frames in heard]


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_both_servers_send_every_client_the_same_bytes(
    name: str, resp: int, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    script = SCRIPTS[name]
    theirs, ours = list(converse(redis_server, resp, script)), list(converse(kvredis, resp, script))
    for at, (step, their, our) in enumerate(zip(script, theirs, ours, strict=True)):
        place = (name, str(step))
        if place in REORDERED:
            assert in_any_order(our) == in_any_order(their), (at, step)
        elif place not in ALLOWED:
            assert our == their, (at, step)


@pytest.mark.parametrize("listed", [REORDERED, ALLOWED])
def test_every_exception_is_in_a_script(listed: dict[tuple[str, str], str]) -> None:
    assert set(listed) <= {(name, str(step)) for name, script in SCRIPTS.items() for step in script}


@pytest.mark.parametrize("resp", [2, 3])
def test_client_reply_off_silences_no_message(resp: int, redis_server: RunningServer, kvredis: RunningServer) -> None:
    lines: list[CommandLine] = ["CLIENT REPLY OFF", "GET k", "SUBSCRIBE x y", "UNSUBSCRIBE x y", "PUNSUBSCRIBE"]
    lines += ["CLIENT REPLY ON", "CLIENT REPLY SKIP", "SUBSCRIBE z", "PING"]
    heard = []
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            if resp == 3:
                wire.ask("HELLO 3")
            heard.append(wire.exchange(b"".join(map(encode, lines)), 5 + 1 + 1 + 1))
    assert heard[0] == heard[1]


def test_what_a_client_causes_itself_comes_after_the_reply_as_in_redis_7_2(kvredis: RunningServer) -> None:
    with kvredis.connect() as wire:
        wire.ask("HELLO 3")
        wire.ask("SUBSCRIBE y")
        pushed = b">3\r\n$7\r\nmessage\r\n$1\r\ny\r\n$3\r\n%b\r\n"
        assert wire.exchange(encode("PUBLISH y own"), 2) == [b":1\r\n", pushed % b"own"]
        request = b"".join(map(encode, ("PUBLISH y one", "PING", "PUBLISH y two", "PING")))
        assert wire.exchange(request, 6) == [
            b":1\r\n", pushed % b"one", b"+PONG\r\n", b":1\r\n", pushed % b"two", b"+PONG\r\n",
        ]  # fmt: skip
        wire.ask("MULTI")
        wire.ask("PUBLISH y own")
        wire.ask("PING")
        assert wire.exchange(encode("EXEC"), 2) == [b"*2\r\n:1\r\n+PONG\r\n", pushed % b"own"]


def test_a_resp2_client_gets_the_invalidation_of_a_resp3_client_in_its_own_protocol(kvredis: RunningServer) -> None:
    # Redis sends it the other one's nil, `_`, which no RESP2 parser knows.
    with kvredis.connect() as reader, kvredis.connect() as listener:
        number = listener.ask("CLIENT ID")[1:-2].decode()
        listener.ask("SUBSCRIBE __redis__:invalidate")
        reader.ask("HELLO 3")
        reader.ask(f"CLIENT TRACKING ON REDIRECT {number}")
        reader.ask("FLUSHALL")
        assert listener.read() == b"*3\r\n$7\r\nmessage\r\n$20\r\n__redis__:invalidate\r\n$-1\r\n"
