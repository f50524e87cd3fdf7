"""What leaves for a client: streams that hold little, messages in their order, and the bounds on what may wait."""

import asyncio
import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from kvredis.server.client.session import PUSH_BYTES_MAX, UNSENT_BYTES_MAX
from kvredis.server.protocol.parser import Parser
from kvredis.server.protocol.request import GATHER_TRIES, SCRATCH_BYTES, Argument, QueryBufferLimit
from kvredis.storage.entry import Reservation
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.feed import feed, no_payload, request
from tests.server.live import MIB, LiveServer, pattern, until

RECEIVE_BYTES = 4096


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    return LiveServer(tmp_path, 64 * MIB)


async def test_mget_holds_few_of_many_values_for_a_client_that_does_not_read(loop: str, live: LiveServer) -> None:
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


async def test_commands_behind_a_stream_are_answered_behind_it(loop: str, live: LiveServer) -> None:
    client = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
    value = pattern(3 * MIB)
    await client.ask("SET", "k", value)
    await client.send_raw(request("MGET", "k", "k", "nope", "k") + request("PING") + request("MGET", "k", "k"))
    assert await client.read_line() == b"*4\r\n"
    assert [await client.read_bulk() for _ in range(4)] == [value, value, None, value]
    assert await client.read_line() == b"+PONG\r\n"
    assert await client.read_line() == b"*2\r\n"
    assert [await client.read_bulk() for _ in range(2)] == [value, value]


async def test_a_reader_that_vanishes_within_a_stream_leaves_no_lease(loop: str, live: LiveServer) -> None:
    client = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
    await client.ask("SET", "k", pattern(4 * MIB))
    await client.send("MGET", *["k"] * 50)
    await client.read(MIB)
    assert live.store.leases
    client.reset()
    await until(lambda: not live.store.leases)


async def test_a_message_goes_behind_the_reply_that_is_going_out(loop: str, live: LiveServer) -> None:
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


@pytest.mark.parametrize("subscribed", [False, True])
async def test_a_client_that_is_told_much_and_does_not_read_is_closed(
    loop: str, subscribed: bool, live: LiveServer
) -> None:
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


async def test_a_soft_limit_counts_from_the_moment_it_is_passed(live: LiveServer) -> None:
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


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_whole_pipeline_of_values_can_be_written_before_its_replies_are_read(
    loop: str, kind: str, live: LiveServer
) -> None:
    count, value = 3000, pattern(5000)

    client = await live.connect(kind)
    await client.send_raw(b"".join(request("SET", f"k{n}", value) for n in range(count)))
    await client.send("GET", f"k{count - 1}")  # a reply that lends a block, behind small ones
    await client.send("PING")
    assert await client.read(5 * count) == b"+OK\r\n" * count
    assert await client.read_bulk() == value
    assert await client.read_line() == b"+PONG\r\n"
    session = live.sessions()[0]
    await until(lambda: not session.unsent_bytes)
    assert session.is_caught_up


async def test_a_client_that_asks_on_without_reading_is_paused_at_the_bound_and_gets_every_reply(
    loop: str, live: LiveServer
) -> None:
    length, batch = 1000, 100
    reply = b"$%d\r\n%b\r\n" % (length, b"x" * length)

    client = await live.connect("unix", receive_bytes=RECEIVE_BYTES)
    questions = request("ECHO", b"x" * length) * batch
    sending = asyncio.ensure_future(client.send_raw(questions))
    sent = 0
    await until(live.sessions)
    session = live.sessions()[0]
    while not session._paused:
        await asyncio.sleep(0)
        if sending.done():
            sent, sending = sent + batch, asyncio.ensure_future(client.send_raw(questions))
    assert UNSENT_BYTES_MAX <= session.unsent_bytes < 4 * UNSENT_BYTES_MAX
    replies = await client.read(len(reply) * (sent + batch))
    assert replies == reply * (sent + batch)
    await sending


async def test_messages_and_the_end_keep_their_place_behind_replies_that_gather(loop: str, live: LiveServer) -> None:
    client = await live.connect("unix", receive_bytes=RECEIVE_BYTES)
    sent = 0
    await until(live.sessions)
    session = live.sessions()[0]
    while not session._unsent:
        await client.send("PING")
        sent += 1
        await asyncio.sleep(0)
    received = session.input_bytes
    session.push(b">1\r\n+news\r\n")
    await client.send("PING")
    await until(lambda: session.input_bytes > received)
    await client.send("QUIT")
    answered = await client.read_all()
    assert answered.replace(b">1\r\n+news\r\n", b"") == b"+PONG\r\n" * (sent + 1) + b"+OK\r\n"
    assert b">1\r\n+news\r\n+PONG\r\n" in answered
    assert answered.endswith(b"+PONG\r\n+OK\r\n")


async def test_replies_that_gather_count_for_the_output_limit(live: LiveServer) -> None:
    live.server.output_limits["normal"] = (8192, 0, 0)
    client = await live.connect("unix", receive_bytes=RECEIVE_BYTES)
    await until(live.sessions)
    with contextlib.suppress(OSError):
        while live.server.sessions:
            await client.send("PING")
    await until(lambda: not live.server.sessions)
    assert live.server.stats.output_limit_disconnections == 1
    live.complaints.clear()


# Commands of many small arguments are gathered whole and split in one step, within bounds.


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(Arena.create(4 * 1024 * 1024, HugepageMode.OFF))
    yield store
    assert store.reserved_bytes == 0
    store.close()


def receive(parser: Parser, data: bytes) -> None:
    """Bytes as they come, and every command that they complete."""
    while data:
        buffer = parser.buffer()
        received = min(len(buffer), len(data))
        buffer[:received] = data[:received]
        data = data[received:]
        commands = parser.take(received)
        while commands:
            commands = parser.take()


def test_a_command_of_many_keys_is_gathered_and_split_at_once() -> None:
    asked: list[bytes] = []

    def takes_payload(name: bytes) -> bool:
        asked.append(name)
        return False

    keys = [b"%064d" % n for n in range(1000)]
    data = request("EXISTS", *keys) + request("PING")
    for step in (1448, 16384, 65536, len(data)):
        parser = Parser(no_payload, takes_payload=takes_payload)
        assert feed(parser, data, range(step, len(data), step)) == [[b"EXISTS", *keys], [b"PING"]]
        assert len(parser.buffer()) <= SCRATCH_BYTES, "the scratch that had to grow is given up"
    assert set(asked) == {b"EXISTS"}


def test_a_long_command_that_brings_payloads_is_not_gathered(store: Store) -> None:
    def into_arena(args: list[Argument], length: int) -> Reservation | None:
        return store.reserve(b"k", length) if len(args) > 1 else None

    parser = Parser(into_arena, takes_payload=lambda name: name == b"MSET")
    words = [word for n in range(20) for word in (b"k%d" % n, bytes(50_000))]
    data = request("MSET", *words)
    (found,) = feed(parser, data, range(10_000, len(data), 10_000))
    assert found == [b"MSET", *words]


def test_gathering_costs_a_bounded_number_of_tries() -> None:
    parser = Parser(no_payload, takes_payload=lambda name: False)
    keys = [b"%04d" % n for n in range(500)]
    data = request("EXISTS", *keys)
    cuts = [at for at in range(len(data)) if data[at - 2 : at] == b"\r\n"]  # each piece looks like an end
    assert feed(parser, data, cuts) == [[b"EXISTS", *keys]]
    parser = Parser(no_payload, takes_payload=lambda name: False)
    for at, end in pairwise([0, *cuts[:50]]):
        receive(parser, data[at:end])
    assert parser._gather_tries <= GATHER_TRIES


def test_arguments_beyond_the_query_buffer_limit_end_the_connection_without_a_word() -> None:
    parser = Parser(no_payload, query_bytes_max=1_000_000)
    words = [bytes(9_000)] * 112
    with pytest.raises(QueryBufferLimit, match=r"^$"):
        receive(parser, request("ECHO", *words))
    parser = Parser(no_payload, query_bytes_max=1_000_000)
    assert feed(parser, request("ECHO", *words[:100]) * 3) == [[b"ECHO", *words[:100]]] * 3


@pytest.mark.parametrize("end", ["silence", "goodbye"])
async def test_a_long_command_that_is_broken_is_told_so_before_it_is_complete(
    loop: str, end: str, live: LiveServer
) -> None:
    client = await live.connect()
    await client.send_raw(b"*42\r\n$6\r\nEXISTS\r\n$1\r\nn\r\n*1\r\n")
    if end == "goodbye":
        client.half_close()
    assert await client.read_all() == b"-ERR Protocol error: expected '$', got '*'\r\n"


def test_a_silent_client_gives_back_a_scratch_that_had_to_grow() -> None:
    parser = Parser(no_payload, takes_payload=lambda name: False)
    receive(parser, request("EXISTS", *[b"%064d" % n for n in range(1000)]))
    assert len(parser.buffer()) > SCRATCH_BYTES
    assert not parser.rest()
    assert len(parser.buffer()) == SCRATCH_BYTES


def test_a_command_that_comes_slowly_is_whole_in_the_end() -> None:
    words: list[bytes] = [b"EXISTS", *[b"%04d" % n for n in range(100)]]
    data = request(*words)
    parser = Parser(no_payload, takes_payload=lambda name: False)
    found: list[list[Argument]] = []
    for byte in range(len(data)):
        parser.buffer()[:1] = data[byte : byte + 1]
        found += parser.take(1)
        if byte % 100 == 0 and parser.rest():
            found += parser.take()
    assert found == [words]
