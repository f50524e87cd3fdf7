"""What plain commands do natively is what they do by the rules: the same replies, figures and order of leaving."""

import asyncio
import random
import select
import socket
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from kvredis.server.client.session import Session
from kvredis.server.commands.registry import Command
from kvredis.server.net.rcvlowat import LOW_WATER_BYTES
from kvredis.server.protocol.request import SCRATCH_BYTES
from kvredis.storage.entry import Entry
from kvredis.storage.eviction.lfu import LFU
from tests.server.feed import request
from tests.server.live import MIB, OOM, LiveServer, pattern, run_on, until

TURN_RECEIVES = 32
"""What uvloop receives of one client before it looks at the others; asyncio receives once."""
KEYS = [b"key:%d" % number for number in range(40)]
LARGE = b"L" * 20_000
ROUNDS = 120
END = request("ECHO", "the end")


class Seen(NamedTuple):
    """What a story has left behind."""

    replies: list[bytes]
    stats: dict[str, int]
    duplicates: int
    calls: dict[str, tuple[int, int, int]]
    values: dict[bytes, tuple[int, int, int, int]]
    order: list[bytes]
    order_of_large: list[bytes]
    last_command: str


def streams(seed: int) -> list[bytes]:
    """Pipelines, mostly of plain commands, over keys that are small, large, about to end or missing, in two databases;
    some are broken in the middle, or at the end."""
    rng = random.Random(seed)

    def key() -> bytes:
        return rng.choice(KEYS)

    def value() -> bytes:
        return rng.randbytes(
            rng.choice([0, 5, 44, 200, 5_000, 16_383, 16_384, 16_385, 40_000, 300_000, 700_000, 1_200_000])
        )

    def few() -> list[bytes]:
        return [key() for _ in range(rng.randrange(1, 9))]

    plain: list[Callable[[], bytes]] = [
        *[lambda: request(rng.choice(["GET", "get"]), key())] * 8,
        *[lambda: request(rng.choice(["SET", "set"]), key(), rng.randbytes(rng.randrange(200)))] * 5,
        lambda: request("SET", key(), value()),
        lambda: request("MGET", *few()),
        lambda: request("mset", *(word for each in few() for word in (each, rng.randbytes(rng.randrange(90))))),
        lambda: request("MSET", key(), LARGE, key(), "small"),
        lambda: request("EXISTS", *few()),
        lambda: request("exists", key()),
        lambda: request("DEL", *few()),
        lambda: request(rng.choice(["KV.MATCH", "kv.match"]), *few()),
        lambda: request("PING"),
    ]

    def some() -> bytes:
        return b"".join(rng.choice(plain)() for _ in range(rng.randrange(12)))

    others: list[Callable[[], bytes]] = [
        lambda: request("SET", key(), "x", "PX", "5000"),
        lambda: request("SET", key(), LARGE, "PX", "5000"),
        lambda: request("SELECT", "1") + some() + request("SET", key(), "other") + some() + request("SELECT", "0"),
        lambda: request("CLIENT", "NO-TOUCH", "ON") + some() + request("CLIENT", "NO-TOUCH", "OFF"),
        lambda: request("Get", key()),
        lambda: request("GET", key(), key()) + request("SET", key()) + request("MSET", key()) + request("EXISTS"),
        lambda: request("PING", "word"),
        lambda: request("MULTI") + some() + request("EXEC"),
        lambda: request("CLIENT", "REPLY", "SKIP") + request("GET", key()) * 2,
        lambda: request("APPEND", key(), "more") + request("GETRANGE", key(), "1", "3"),
        lambda: request(
            "KV.MATCH", *few(), *rng.choice([("WAIT", "1"), ("expected",), ("Wait",), ("EXPECTED", "WAIT", "x")])
        ),
        lambda: request("KV.MATCH") + request("KV.MATCH", "wait") + request("KV.MATCH", "expected", key()),
        lambda: b"PING\r\nEXISTS " + key() + b"\r\n",
        lambda: b"*0\r\n" + request("GET", key()),
    ]
    found = [b"".join(request("SET", key, key * 3) for key in KEYS)]
    for _ in range(ROUNDS):
        found.append(b"".join(some() + rng.choice(others)() + some() for _ in range(rng.randrange(1, 5))))
    return found


async def story(folder: Path, seed: int) -> Seen:
    """Play the pipelines of `seed`, cut by chance, and look at what is there then."""
    rng = random.Random(seed)
    async with LiveServer(folder) as live:
        client = await live.connect()
        replies: list[bytes] = []

        async def read_all() -> None:
            while replies[-1:] != [b"the end\r\n"]:
                replies.append(await client.read_line())
                if replies[-1][:1] == b"$" and replies[-1] != b"$-1\r\n":
                    replies.append(await client.read(int(replies[-1][1:]) + 2))

        for number, stream in enumerate(streams(seed)):
            stream += END
            at = 0
            reading = asyncio.create_task(read_all())  # a client that does not read is served no further
            while at < len(stream):
                past = at + rng.choice([1, 7, 100, 5_000, 16_384, 100_000, 10**7])
                await client.send_raw(stream[at:past])
                at = past
            await reading
            replies.append(b"and on")
            live.clock_ms += 500 * (number % 3)
        store = live.store
        store.collect_expired()  # which the server's tick may have done or not
        store.catch_up()
        store.check_integrity()
        session = next(iter(live.server.sessions.values()))
        return Seen(
            replies,
            store.stats.as_dict(),
            live.server.stats.sets_duplicate,
            {
                name: (record.calls, record.failed_calls, record.rejected_calls)
                for name, record in live.server.stats.commands.items()
            },
            {
                key: (entry.length, entry.hits, entry.leases, entry.expire_at_ms)
                for key, entry in sorted(store.index.spaces[0].items())
            },
            [entry.key for entry in store.inline_policy.victims()],
            [entry.key for entry in store.policy.victims()],
            session.last_command,
        )


@pytest.fixture
def by_the_rules() -> Iterator[Callable[[], None]]:
    """Let sessions take the full path with everything, from when it is called."""
    with pytest.MonkeyPatch.context() as patch:

        def run(session: Session, nbytes: int) -> None:
            session.input_bytes += nbytes
            session.reads += 1
            session._run(nbytes)

        yield lambda: patch.setattr(Session, "buffer_updated", run)


@pytest.mark.parametrize("seed", range(3))
def test_commands_do_natively_what_they_do_by_the_rules(
    loop: str, seed: int, tmp_path: Path, by_the_rules: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    account = Session.account

    def counted(session: Session, command: Command | None, calls: int, began_ns: int) -> int:
        left.append(calls)
        return account(session, command, calls, began_ns)

    monkeypatch.setattr(Session, "account", counted)
    natively = run_on(loop, story(tmp_path, seed))
    few = sum(left)
    by_the_rules()
    assert natively == run_on(loop, story(tmp_path, seed))
    assert sum(left) - few > few, "too little was done natively for a comparison"


async def test_a_run_is_a_later_use_than_a_lookup_that_was_put_off(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    assert await client.ask("MSET", "a", "1", "b", "2", "c", "3") == b"+OK\r\n"
    assert await client.ask("KV.MATCH", "a", "b", "c") == b":3\r\n"
    await client.send_raw(2 * request("GET", "c"))
    assert await client.read(14) == 2 * b"$1\r\n3\r\n"
    live.store.catch_up()
    assert [entry.key for entry in live.store.inline_policy.victims()] == [b"b", b"a", b"c"]


async def test_an_answer_does_not_wait_for_the_rest_of_the_next_value(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    whole = request("SET", "k", LARGE)
    await client.send_raw(whole + whole[:5_000])
    assert await client.read_line() == b"+OK\r\n"
    await client.send_raw(whole[5_000:] + request("GET", "k"))
    assert await client.read_line() == b"+OK\r\n"
    assert await client.read_bulk() == LARGE


async def test_what_comes_behind_a_value_does_not_stay_behind_it_in_the_arena(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    secret = request("ECHO", b"only for the server " * 10)
    whole = request("SET", "k", b"L" * 100_000)
    await client.send_raw(whole[:50_000])
    await until(lambda: live.store.reserved_bytes)
    await client.send_raw(whole[50_000:] + secret)
    assert await client.read_line() == b"+OK\r\n"
    assert await client.read_bulk() == b"only for the server " * 10
    assert b"only for the server" not in bytes(live.store.arena.view)


async def test_many_values_of_the_arena_come_in_one_command(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    values = [
        bytes([65 + number]) * length for number, length in enumerate([5, 16_383, 16_384, 16_385, 99_999, 0, 300_000])
    ]
    words = [word for number, value in enumerate(values) for word in (b"k%d" % number, value)]
    for cut in (10**7, 1_000, 40_000):
        data = request("MSET", *words) + request("MSET", "a", LARGE, "a", "small")
        for at in range(0, len(data), cut):
            await client.send_raw(data[at : at + cut])
        assert await client.read(10) == b"+OK\r\n" * 2
        for number, value in enumerate(values):
            assert await client.get(f"k{number}") == value
        assert await client.get("a") == b"small"
    assert live.server.stats.sets_duplicate == 3
    assert live.sessions()[0].pending_bytes == 0
    live.store.check_integrity()


async def test_a_client_that_goes_in_the_middle_of_many_values_leaves_nothing_reserved(
    loop: str, live: LiveServer
) -> None:
    other, client = await live.connect(), await live.connect()
    data = request("MSET", "a", LARGE, "b", LARGE, "c", LARGE)
    await client.send_raw(data[:50_000])
    await until(lambda: live.store.reserved_bytes > 2 * len(LARGE))
    client.close()
    await until(lambda: not live.store.reserved_bytes)
    assert await other.ask("EXISTS", "a", "b", "c") == b":0\r\n"
    live.complaints.clear()


async def test_a_value_that_began_to_come_by_the_rules_is_refused_as_others_are(loop: str, live: LiveServer) -> None:
    other, client = await live.connect(), await live.connect()
    assert await other.ask("CONFIG", "SET", "maxmemory-policy", "noeviction") == b"+OK\r\n"
    assert await other.ask("CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"
    watching = await live.connect()
    assert await watching.ask("MONITOR") == b"+OK\r\n"
    await client.send_raw(request("SET", "k", "a value")[:-4])
    await until(lambda: any(session.pending_bytes for session in live.sessions()))
    watching.close()
    await until(lambda: not live.server.monitors)
    await client.send_raw(request("SET", "k", "a value")[-4:])
    assert await client.read_line() == OOM
    assert live.server.stats.command("set").failed_calls + live.server.stats.command("set").rejected_calls == 1


def short_values(seed: int) -> dict[bytes, bytes]:
    """Values of a few bytes to 32 KB, of more bytes in all than one receive brings."""
    rng = random.Random(seed)
    lengths = [rng.choice([3, 100, 9_000, 15_000, 16_383, 16_384, 20_000, 33_000]) for _ in range(120)]
    return {b"%d:%d" % (seed, number): rng.randbytes(length) for number, length in enumerate(lengths)}


async def test_pipelines_of_short_values_that_come_in_turns_of_their_clients_stay_apart(
    loop: str, live: LiveServer
) -> None:
    rng = random.Random(loop)
    clients = [await live.connect(kind) for kind in ("unix", "tcp", "unix")]
    values = [short_values(seed) for seed in range(len(clients))]
    streams = []
    for own in values:
        pairs = [[key, value] for key, value in own.items()]
        half = len(pairs) // 2
        streams.append(
            b"".join(request("SET", *pair) for pair in pairs[:half])
            + b"".join(request("MSET", *chain.from_iterable(pairs[at : at + 7])) for at in range(half, len(pairs), 7))
        )
    while any(streams):
        for number, client in enumerate(clients):
            cut = rng.choice([1, 30, 4_000, 25_000, 150_000, 400_000])
            await client.send_raw(streams[number][:cut])
            streams[number] = streams[number][cut:]
    for client in clients:
        assert await client.read(69 * 5) == b"+OK\r\n" * 69
    for own in values:
        for key, value in own.items():
            assert await clients[0].get(key) == value
    live.store.check_integrity()


async def test_a_long_pipeline_leaves_its_client_with_what_is_unread_and_no_more(loop: str, live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    assert await client.ask("CLIENT", "SETNAME", "long") == b"+OK\r\n"
    values = {b"k%d" % number: random.Random(number).randbytes(17_000) for number in range(40)}
    for rest in (b"*2\r\n$3\r\nGE", b""):
        await client.send_raw(b"".join(request("SET", *pair) for pair in values.items()) + rest)
        assert await client.read(40 * 5) == b"+OK\r\n" * 40
        await other.send("CLIENT", "LIST")
        (line,) = (line for line in (await other.read_bulk() or b"").splitlines() if b"name=long" in line)
        figures = dict(word.split(b"=", 1) for word in line.split())
        assert int(figures[b"qbuf"]) == len(rest)
        assert int(figures[b"qbuf-free"]) <= SCRATCH_BYTES
        await client.send_raw(b"T\r\n$2\r\nk0\r\n" if rest else request("GET", "k0"))
        assert await client.read_bulk() == values[b"k0"]
        for key, value in values.items():
            assert await other.get(key) == value


@pytest.mark.parametrize("length", [18_000, 100_000])
async def test_a_value_without_room_is_refused_and_counted_once(length: int, loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.say_hello()
    leases = []
    for number in range(20):
        if live.store.put(b"held:%d" % number, bytes(MIB)) and (lease := live.store.lease(b"held:%d" % number)):
            leases.append(lease)
    refused = live.store.stats.refused
    while live.store.put(b"rest", bytes(10_000)) and live.store.put(b"rest", bytes(20_000)):
        if lease := live.store.lease(b"rest"):
            leases.append(lease)
        live.store.delete([b"rest"])
    refused = live.store.stats.refused
    assert await client.ask("SET", "k", bytes(length)) == OOM
    assert live.store.stats.refused == refused + 1
    assert not live.store.reserved_bytes
    for lease in leases:
        lease.release()


async def test_a_short_value_waits_behind_those_that_wait_for_their_turn(loop: str, live: LiveServer) -> None:
    claims = live.server.admission
    first, second, third = [await live.connect() for _ in range(3)]
    values = [pattern(3 * MIB, 1), pattern(3 * MIB, 2), pattern(18_000, 3)]
    streams = [request("SET", f"k{number}", value) for number, value in enumerate(values)]
    await first.send_raw(streams[0][:20_000])
    await until(lambda: live.store.reserved_bytes)
    await second.send_raw(streams[1][:20_000])
    await until(lambda: len(claims.queue) == 1)
    await third.send_raw(streams[2])
    await until(lambda: len(claims.queue) == 2)
    for client, stream, value, number in zip((first, second), streams, values, range(2), strict=False):
        await client.send_raw(stream[20_000:])
        assert await client.read_line() == b"+OK\r\n"
        assert await client.get(f"k{number}") == value
    assert await third.read_line() == b"+OK\r\n"
    assert await third.get("k2") == values[2]


async def test_a_short_value_waits_behind_one_in_parts_that_waits_for_its_turn(loop: str, live: LiveServer) -> None:
    claims = live.server.admission
    first, second, third = [await live.connect() for _ in range(3)]
    stream = request("SET", "k", bytes(3 * MIB))
    await first.send_raw(stream[:20_000])
    await until(lambda: live.store.reserved_bytes)
    await second.send("KV.RESERVE", "parts", str(3 * MIB))
    await until(lambda: len(claims.queue) == 1)
    await third.send("SET", "short", LARGE)
    await until(lambda: len(claims.queue) == 2)
    await first.send_raw(stream[20_000:])
    assert await first.read_line() == b"+OK\r\n"
    assert (await second.read_line())[:1] in (b":", b"$", b"*", b"+")
    assert await third.read_line() == b"+OK\r\n"


async def test_a_long_value_that_is_only_announced_has_no_room(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.send_raw(request("SET", "k", bytes(3 * MIB))[:300])
    await until(lambda: any(session.pending_bytes > 200 for session in live.sessions()))
    assert not live.store.reserved_bytes


async def test_a_reply_of_many_long_values_is_looked_up_as_the_client_takes_it(live: LiveServer) -> None:
    client = await live.connect("tcp", receive_bytes=4096)
    keys = [f"k{number}" for number in range(10)]
    for number, key in enumerate(keys):
        assert await client.ask("SET", key, pattern(MIB, number)) == b"+OK\r\n"
    await client.send("MGET", *keys)
    await until(lambda: live.store.leases)
    assert live.store.leases < len(keys)
    assert await client.read_line() == b"*10\r\n"
    for number in range(10):
        assert await client.read_bulk() == pattern(MIB, number)


async def test_tokens_of_a_block_that_has_come_as_a_whole_are_counted(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    head = b'{"__metadata__": {"tokens": "256"}}'
    for length in (16_384, 18_000, 100_000):
        assert await client.ask("SET", "k", (bytes(8) + head).ljust(length)) == b"+OK\r\n"
        entry = live.store.find(b"k")
        assert entry is not None
        assert entry.tokens == 256


async def test_values_beside_each_other_keep_to_the_share_of_all(loop: str, live: LiveServer) -> None:
    clients = [await live.connect() for _ in range(8)]
    stream = request("SET", "k", bytes(900_000))
    for client in clients:
        await client.send_raw(stream[:20_000])
    await until(lambda: len(live.server.admission.queue) == 4)
    assert live.store.reserved_bytes <= live.server.admission.share_bytes
    for client in clients:
        await client.send_raw(stream[20_000:])
    for client in clients:
        assert await client.read_line() == b"+OK\r\n"


async def test_a_plain_set_that_stops_coming_is_given_up(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, body_timeout=0.2) as live:
        client = await live.connect()
        await client.send_raw(request("SET", "k", bytes(100_000))[:30_000])
        await until(lambda: live.store.reserved_bytes)
        assert await client.read_all() == b""
        await until(lambda: not live.store.reserved_bytes)
        assert live.server.admission.given_up == 1
        live.complaints.clear()


async def test_an_mset_that_has_come_before_a_bound_was_set_is_stored_as_a_whole_or_not_at_all(
    loop: str, live: LiveServer
) -> None:
    other, client = await live.connect(), await live.connect()
    await client.say_hello()
    stream = request("MSET", "a", LARGE, "b", "small")
    await client.send_raw(stream[:10_000])
    await until(lambda: live.store.reserved_bytes)
    assert await other.ask("CONFIG", "SET", "maxmemory-policy", "noeviction") == b"+OK\r\n"
    assert await other.ask("CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"
    await client.send_raw(stream[10_000:])
    assert await client.read_line() == OOM
    assert await other.ask("EXISTS", "a", "b") == b":0\r\n"
    assert not live.store.reserved_bytes


async def test_a_long_key_of_many_is_a_key(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    key = b"K" * 20_000
    for cut in (10**6, 7_000):
        stream = request("MSET", "a", LARGE, key, "x", "b", LARGE[::-1])
        for at in range(0, len(stream), cut):
            await client.send_raw(stream[at : at + cut])
        assert await client.read_line() == b"+OK\r\n"
        assert [await client.get(each) for each in (b"a", key, b"b")] == [LARGE, b"x", LARGE[::-1]]
        assert await client.ask("DEL", "a", key, "b") == b":3\r\n"


async def test_a_value_beyond_the_limit_of_a_query_ends_the_connection(loop: str, live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    assert await other.ask("CONFIG", "SET", "client-query-buffer-limit", str(MIB)) == b"+OK\r\n"
    await client.send_raw(request("SET", "k", bytes(MIB + 1))[:20_000])
    assert await client.read_all() == b""
    assert live.server.stats.query_limit_disconnections == 1


def receive(session: Session, data: bytes) -> None:
    """Have it receive these bytes, as many at a time as it has room for."""
    while data:
        room = memoryview(session.get_buffer(-1))
        received = min(len(room), len(data))
        room[:received] = data[:received]
        session.buffer_updated(received)
        data = data[received:]


def stop_reading(session: Session) -> None:
    """Have the loop receive nothing more of it."""
    assert session._transport is not None
    session._transport.pause_reading()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_what_has_come_of_a_value_is_received_in_the_turn_that_reads_its_header(
    kind: str, live: LiveServer
) -> None:
    client = await live.connect(kind)
    assert await client.ask("PING") == b"+PONG\r\n"
    (session,) = live.sessions()
    stop_reading(session)
    value = pattern(100_000)
    stream = request("SET", "k", value)
    await client.send_raw(stream[512:])
    before = session.input_bytes
    receive(session, stream[:512])
    assert live.store.find(b"k") is not None
    assert session.input_bytes == before + len(stream)
    session._resume_reading()
    assert await client.read_line() == b"+OK\r\n"
    assert await client.get("k") == value


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_values_that_have_come_are_received_three_at_a_time(kind: str, live: LiveServer) -> None:
    client = await live.connect(kind)
    assert await client.ask("PING") == b"+PONG\r\n"
    (session,) = live.sessions()
    stop_reading(session)
    values = [pattern(30_000, number) for number in range(5)]
    stream = b"".join(request("SET", str(number), value) for number, value in enumerate(values))
    await client.send_raw(stream[512:])
    receive(session, stream[:512])
    assert [live.store.find(b"%d" % number) is not None for number in range(5)] == [True, True, True, False, False]
    session._resume_reading()
    assert await client.read(5 * 5) == 5 * b"+OK\r\n"
    assert [await client.get(str(number)) for number in range(5)] == values


async def test_a_value_and_what_comes_behind_it_end_a_turn_of_the_wide_scratch_and_the_next_one_has_room(
    live: LiveServer,
) -> None:
    client = await live.connect("tcp")
    assert await client.ask("PING") == b"+PONG\r\n"
    (session,) = live.sessions()
    stop_reading(session)
    receive(session, b"".join(request("SET", f"short {number}", pattern(17_000, number)) for number in range(40)))
    long = request("SET", "long", pattern(60_000))
    await client.send_raw(long[512:] + request("PING"))
    receive(session, long[:512])
    assert live.store.find(b"long") is not None
    assert memoryview(session.get_buffer(-1)).nbytes > 0
    session._resume_reading()
    assert await client.read(41 * 5 + 7) == 41 * b"+OK\r\n" + b"+PONG\r\n"
    assert await client.get("long") == pattern(60_000)
    assert await client.get("short 39") == pattern(17_000, 39)


async def test_a_client_that_was_hung_up_on_gets_no_further_reply(live: LiveServer) -> None:
    client = await live.connect("tcp")
    assert await client.ask("PING") == b"+PONG\r\n"
    (session,) = live.sessions()
    session.close()
    receive(session, request("PING"))
    assert await client.read_all() == b""


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_reply_of_which_the_socket_takes_a_part_keeps_its_block_until_the_rest_is_taken(
    kind: str, live: LiveServer
) -> None:
    client = await live.connect(kind, receive_bytes=4096)
    value = pattern(400_000)
    assert await client.ask("SET", "k", value) == b"+OK\r\n"
    (session,) = live.sessions()
    assert session._transport is not None
    session._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * 1024)
    before = session.output_bytes
    await client.send_raw(request("GET", "k") + request("PING"))
    await until(lambda: session._is_behind)
    assert session.lent == 1
    wanted = b"$400000\r\n" + value + b"\r\n+PONG\r\n"
    assert await client.read(len(wanted)) == wanted
    await until(lambda: not session.lent)
    assert session.output_bytes == before + len(wanted)


async def test_nothing_more_is_run_for_a_client_of_which_a_reply_shows_that_it_has_gone(
    loop: str, live: LiveServer
) -> None:
    client = await live.connect("tcp")
    assert await client.ask("SET", "long", bytes(600_000)) == b"+OK\r\n"
    (session,) = live.sessions()
    client.reset()
    receive(session, 2 * request("GET", "long") + request("SET", "after", "x"))
    await until(lambda: not live.server.sessions)
    assert live.store.find(b"after") is None


async def test_an_answer_that_is_held_back_leaves_without_those_that_another_loop_is_gathering(
    loop: str, live: LiveServer
) -> None:
    """Wherever a command calls Python, the thread of another server's loop may come in between."""

    class Between(LFU):
        def touch(self, entry: Entry) -> None:
            super().touch(entry)
            held_back._send_held_back()

    live.store.set_eviction(Between())
    first, second = await live.connect("tcp"), await live.connect("tcp")
    for client in (first, second):
        assert await client.ask("PING") == b"+PONG\r\n"
    assert await first.ask("SET", "k", "small") == b"+OK\r\n"
    gathering, held_back = live.sessions()
    stream = request("SET", "before", "x") + request("SET", "long", pattern(20_000))
    receive(held_back, stream[:600])
    assert held_back._holds_back
    receive(gathering, request("PING") + request("GET", "k"))
    receive(held_back, stream[600:])
    assert await second.read(10) == 2 * b"+OK\r\n"
    assert await first.read(18) == b"+PONG\r\n$5\r\nsmall\r\n"


async def test_a_long_value_that_ends_in_one_receive_leaves_no_low_water_mark(live: LiveServer) -> None:
    client = await live.connect("tcp")
    assert await client.ask("PING") == b"+PONG\r\n"
    (session,) = live.sessions()
    assert session._transport is not None
    sock = session._transport.get_extra_info("socket")

    stream = request("SET", "k", bytes(3 * MIB))
    receive(session, stream[:20_000])
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == LOW_WATER_BYTES
    receive(session, stream[20_000:])
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    assert await client.read_line() == b"+OK\r\n"


async def test_a_client_that_sends_without_a_pause_keeps_others_waiting_for_no_more_than_a_turn(
    loop: str, live: LiveServer
) -> None:
    other = await live.connect("tcp")
    assert await other.ask("PING") == b"+PONG\r\n"
    (session,) = live.sessions()
    assert session._transport is not None
    arriving = select.poll()
    arriving.register(session._transport.get_extra_info("socket"), select.POLLIN)
    command = request("SET", "k", b"s" * 100)
    sets, pings = live.server.stats.command("set"), live.server.stats.command("ping")
    turns: list[int] = []
    waits: list[int] = []

    def has_answered(before: int) -> bool:
        return pings.calls > before

    async def count() -> None:
        while True:
            before = sets.calls
            await asyncio.sleep(0)  # a turn of the loop
            turns.append(sets.calls - before)

    counting = asyncio.create_task(count())
    with socket.create_connection(("127.0.0.1", live.server.tcp_port)) as flooding:
        sending = asyncio.get_running_loop().run_in_executor(None, flooding.sendall, command * 100_000)
        while not sending.done():
            answered = pings.calls
            await other.send("PING")
            while pings.calls == answered and not arriving.poll(0):  # on a busy machine it comes late
                await asyncio.sleep(0)
            before, has_come = sets.calls, pings.calls == answered
            await until(partial(has_answered, answered))
            if has_come:
                waits.append(sets.calls - before)
            assert await other.read_line() == b"+PONG\r\n"
        await sending
    counting.cancel()
    a_turn = TURN_RECEIVES * SCRATCH_BYTES // len(command)  # 5,120, and of 256 KiB each 65,536
    assert 0 < max(turns) <= a_turn
    assert waits, "no PING came while the other client sent"
    assert max(waits) <= a_turn
