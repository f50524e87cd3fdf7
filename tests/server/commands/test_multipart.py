"""KV.RESERVE, KV.WRITE, KV.COMMIT, KV.ABORT at a live server: a value is whole when it is seen, or is not seen."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from kvredis.server.multipart import RESERVATIONS_MAX
from tests.server.cluster_node import HALF, MOVED, OURS, THEIRS, topology_file
from tests.server.feed import request
from tests.server.live import MIB, OOM, Client, LiveServer, pattern, until
from tests.server.tiered_server import TieredServer, info

pytestmark = pytest.mark.usefixtures("threads")

GONE = b"-ERR no such reservation: "
TOO_LONG = b"-ERR string exceeds maximum allowed size (proto-max-bulk-len)\r\n"
LENGTH = 300_000


async def reserve(client: Client, key: str | bytes, length: int) -> str:
    """A reservation's id."""
    reply = await client.ask("KV.RESERVE", key, str(length))
    assert reply[:1] == b":", reply
    return reply[1:-2].decode()


@pytest.mark.parametrize("length", [0, 10, 16_383, 16_384, LENGTH, 3 * MIB])
async def test_parts_in_any_order_and_of_any_size_become_one_value(loop: str, length: int, live: LiveServer) -> None:
    client, value, rng = await live.connect("tcp"), pattern(length, 3), random.Random(length)
    cuts = sorted({0, length, *(rng.randrange(length + 1) for _ in range(8))})
    spans = [*pairwise(cuts)]
    rng.shuffle(spans)
    number = await reserve(client, "k", length)
    for at, (start, end) in enumerate(spans):
        assert await client.get("k") is None
        told = await client.ask("KV.COMMIT", number)
        so_far = sum(b - a for a, b in spans[:at])
        assert told == b"-ERR reservation %b holds %d of %d bytes\r\n" % (number.encode(), so_far, length)
        assert await client.ask("KV.WRITE", number, str(start), value[start:end]) == b"+OK\r\n"
    assert await client.ask("KV.COMMIT", number) == b"+OK\r\n"
    assert await client.get("k") == value
    assert (await client.ask("KV.COMMIT", number)).startswith(GONE)
    assert live.store.reserved_bytes == 0
    live.store.check_integrity()


@pytest.mark.parametrize("seed", range(4))
async def test_one_stream_of_overlapping_parts_leaves_what_was_written_last(
    loop: str, seed: int, live: LiveServer
) -> None:
    """Cut anywhere, also within the line end behind a part: for a moment it lies in the value's next two bytes."""
    client, rng = await live.connect(), random.Random(seed)
    number = await reserve(client, "k", LENGTH)
    wanted = bytearray(pattern(LENGTH, 1))
    stream = request("KV.WRITE", number, "0", bytes(wanted))
    for n in range(12):
        length = rng.choice([1, 100, 16_383, 16_384, 20_000, 100_000])
        at = rng.randrange(LENGTH - length + 1)
        if n % 4 == 0:
            at = LENGTH - length - rng.randrange(3)
        wanted[at : at + length] = pattern(length, n + 2)
        stream += request("KV.WRITE", number, str(at), pattern(length, n + 2))
    stream += request("KV.COMMIT", number)
    at = 0
    while at < len(stream):
        step = rng.choice([1, 2, 3, 1000, 50_000])
        await client.send_raw(stream[at : at + step])
        received = live.sessions()[0]
        at += step
        await until(lambda: received.input_bytes >= min(at, len(stream)))  # noqa: B023  # awaited right here
    assert await client.read(14 * 5) == b"+OK\r\n" * 14
    assert await client.get("k") == bytes(wanted)


async def test_a_large_part_is_received_into_its_place_without_a_copy(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    number = await reserve(client, "k", LENGTH)
    (session,) = live.sessions()
    value = pattern(LENGTH)
    half = request("KV.WRITE", number, "100000", value[100_000:200_000])
    await client.send_raw(half[:60_000])
    await until(lambda: session.input_bytes >= 60_000)
    part = live.server.parts.of(session).find(int(number))
    assert part is not None
    came = 60_000 - half.index(value[100_000:100_100])
    assert part.view[100_000 : 100_000 + came] == value[100_000 : 100_000 + came]
    assert (part.written_bytes, part.is_being_filled) == (0, True)
    await client.send_raw(half[60_000:])
    assert await client.read_line() == b"+OK\r\n"
    assert (part.written_bytes, part.is_being_filled) == (100_000, False)
    assert await client.ask("KV.ABORT", number) == b":1\r\n"


BAD_WRITES = {
    "another id": (("77", "0"), GONE),
    "no id": (("x", "0"), b"-ERR value is not an integer or out of range\r\n"),
    "no offset": (("N", "1.5"), b"-ERR value is not an integer or out of range\r\n"),
    "before its begin": (("N", "-1"), b"-ERR bytes -1 to "),
    "past its end": (("N", "299990"), b"-ERR bytes 299990 to "),
    "far past its end": (("N", "9223372036854775807"), b"-ERR bytes 9223372036854775807 to "),
}


@pytest.mark.parametrize("length", [100, 50_000, 2 * MIB])
@pytest.mark.parametrize("case", BAD_WRITES)
async def test_a_part_that_belongs_nowhere_is_refused_and_nothing_else_happens(
    case: str, length: int, live: LiveServer
) -> None:
    words, told = BAD_WRITES[case]

    client = await live.connect()
    number, value = await reserve(client, "k", LENGTH), pattern(LENGTH, 1)
    assert await client.ask("KV.WRITE", number, "0", value) == b"+OK\r\n"
    wrong = request("KV.WRITE", *(number if word == "N" else word for word in words), pattern(length, 2))
    await client.send_raw(wrong + request("PING"))
    assert (await client.read_line()).startswith(told)
    assert await client.read_line() == b"+PONG\r\n"
    assert await client.ask("KV.COMMIT", number) == b"+OK\r\n"
    assert await client.get("k") == value


async def test_a_reservation_belongs_to_one_connection(live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    number = await reserve(client, "k", 100)
    assert await reserve(other, "k", 100) != number
    assert (await other.ask("KV.WRITE", number, "0", bytes(100))).startswith(GONE)
    assert (await other.ask("KV.COMMIT", number)).startswith(GONE)
    assert await other.ask("KV.ABORT", number) == b":0\r\n"
    assert await client.ask("KV.ABORT", number) == b":1\r\n"
    assert await client.ask("KV.ABORT", number) == b":0\r\n"


async def test_the_conditions_and_times_of_set_hold_for_commit(live: LiveServer) -> None:
    client = await live.connect()

    async def commit(key: str, *options: str) -> bytes:
        number = await reserve(client, key, 20_000)
        assert await client.ask("KV.WRITE", number, "0", pattern(20_000, 1)) == b"+OK\r\n"
        reply = await client.ask("KV.COMMIT", number, *options)
        kept = await client.ask("KV.ABORT", number)
        assert kept == (b":1\r\n" if reply[:1] == b"-" else b":0\r\n"), "an error leaves it as it was"
        return reply

    assert await commit("k", "XX") == b"$-1\r\n"
    assert await client.ask("EXISTS", "k") == b":0\r\n"
    assert await commit("k", "NX", "PX", "5000") == b"+OK\r\n"
    assert await client.ask("PTTL", "k") == b":5000\r\n"
    assert await commit("k", "NX") == b"$-1\r\n"
    assert await commit("k", "xx", "keepttl") == b"+OK\r\n"
    assert await client.ask("PTTL", "k") == b":5000\r\n"
    assert await commit("k", "EXAT", "1700000007") == b"+OK\r\n"
    assert await client.ask("TTL", "k") == b":7\r\n"
    assert await commit("k") == b"+OK\r\n"
    assert await client.ask("TTL", "k") == b":-1\r\n"
    for wrong in (("NX", "XX"), ("EX", "5", "KEEPTTL"), ("GET",), ("EX",), ("FOO",)):
        assert await commit("k", *wrong) == b"-ERR syntax error\r\n"
    assert await commit("k", "EX", "0") == b"-ERR invalid expire time in 'kv.commit' command\r\n"
    told = await info(client, "kv")
    assert told["reservations"] == told["reservations_bytes"] == "0"
    assert (told["reservations_committed"], told["reservations_aborted"]) == ("4", "8")


async def test_a_commit_is_a_change_like_any_other(tmp_path: Path) -> None:
    """It breaks a WATCH, voids caches, is told as an event and to monitors, once; and goes where KV.RESERVE was."""
    async with LiveServer(tmp_path, notify_keyspace_events="KEA$n") as live:
        client, watcher, listener, monitor = [await live.connect() for _ in range(4)]
        await client.ask("SELECT", "3")
        number = await reserve(client, "k", 20_000)
        await client.ask("KV.WRITE", number, "0", pattern(20_000))
        await client.ask("SELECT", "0")
        await watcher.ask("SELECT", "3")
        await watcher.ask("WATCH", "k")
        await watcher.ask("MULTI")
        await listener.send("PSUBSCRIBE", "__keyevent@*")
        for _ in range(6):
            await listener.read_line()
        assert await monitor.ask("MONITOR") == b"+OK\r\n"
        assert await client.ask("KV.COMMIT", number, "EX", "9") == b"+OK\r\n"
        assert await client.ask("KV.WRITE", "99", "0", pattern(20_000)) != b"+OK\r\n"
        events: list[bytes] = []
        while len(events) < 3:
            line = await listener.read_line()
            if line.startswith(b"__keyevent@") and not line.endswith(b"*\r\n"):
                events.append(line[:-2])
        assert events == [b"__keyevent@3__:new", b"__keyevent@3__:set", b"__keyevent@3__:expire"]
        assert b'"KV.COMMIT" "%b" "EX" "9"' % number.encode() in await monitor.read_line()
        assert await watcher.ask("EXEC") == b"*-1\r\n"
        assert await client.get("k") is None
        assert await watcher.get("k") == pattern(20_000)
        monitor.close()


async def test_in_a_transaction_all_four_are_refused_and_the_reservation_stays(live: LiveServer) -> None:
    client = await live.connect()
    number = await reserve(client, "k", LENGTH)
    refused = b"-ERR Command not allowed inside a transaction\r\n"
    assert await client.ask("KV.WRITE", number, "0", pattern(LENGTH)) == b"+OK\r\n"
    assert await client.ask("MULTI") == b"+OK\r\n"
    for line in (
        ("KV.RESERVE", "l", "5"),
        ("KV.WRITE", number, "0", "small"),
        ("KV.WRITE", number, "0", pattern(LENGTH, 1)),
        ("KV.COMMIT", number),
        ("KV.ABORT", number),
    ):
        assert await client.ask(*line) == refused
    assert (await client.ask("EXEC")).startswith(b"-EXECABORT ")
    assert await client.ask("KV.COMMIT", number) == b"+OK\r\n"
    assert await client.get("k") == pattern(LENGTH)


async def test_a_part_with_a_word_too_many_counts_as_missing(live: LiveServer) -> None:
    """Its bytes lie in the value before the word is seen."""
    client = await live.connect()
    number = await reserve(client, "k", LENGTH)
    assert await client.ask("KV.WRITE", number, "0", pattern(LENGTH)) == b"+OK\r\n"
    told = await client.ask("KV.WRITE", number, "100", bytes(20_000), "x")
    assert told == b"-ERR wrong number of arguments for 'kv.write' command\r\n"
    told = await client.ask("KV.COMMIT", number)
    assert told == b"-ERR reservation %b holds 280000 of 300000 bytes\r\n" % number.encode()
    assert await client.ask("KV.WRITE", number, "100", pattern(LENGTH)[100:20_100]) == b"+OK\r\n"
    assert await client.ask("KV.COMMIT", number) == b"+OK\r\n"
    assert await client.get("k") == pattern(LENGTH)


async def test_lengths_that_cannot_be_and_too_many_reservations_are_refused(tmp_path: Path) -> None:
    async with LiveServer(tmp_path, proto_max_bulk_len=64 * MIB) as live:
        client = await live.connect()
        assert await client.ask("KV.RESERVE", "k", "x") == b"-ERR value is not an integer or out of range\r\n"
        assert await client.ask("KV.RESERVE", "k", "-1") == b"-ERR length is out of range\r\n"
        assert await client.ask("KV.RESERVE", "k", str(64 * MIB + 1)) == TOO_LONG
        assert await client.ask("KV.RESERVE", "k", str(17 * MIB)) == OOM
        for _ in range(RESERVATIONS_MAX):
            await reserve(client, "k", 5)
        told = b"-ERR 1024 reservations on this connection: commit or abort some first\r\n"
        assert await client.ask("KV.RESERVE", "k", "5") == told
        assert (await info(client, "kv"))["reservations"] == "1024"
        await client.send("CLIENT", "LIST")
        assert b" resv=1024 " in (await client.read_bulk() or b"")
        assert await client.ask("RESET") == b"+RESET\r\n"
        assert (await info(client, "kv"))["reservations"] == "0"


async def test_a_user_must_be_allowed_to_write_the_key_when_it_is_reserved(live: LiveServer) -> None:
    client, admin = await live.connect(), await live.connect()
    await admin.ask("ACL", "SETUSER", "u", "on", ">p", "%W~w*", "%R~r*", "+@all")
    assert await client.ask("AUTH", "u", "p") == b"+OK\r\n"
    denied = b"-NOPERM No permissions to access a key\r\n"
    assert await client.ask("KV.RESERVE", "r1", "100000") == denied
    number = await reserve(client, "w1", 100_000)
    assert await client.ask("KV.WRITE", number, "0", pattern(100_000)) == b"+OK\r\n"
    assert await client.ask("KV.COMMIT", number) == b"+OK\r\n"
    assert await admin.get("w1") == pattern(100_000)
    number = await reserve(client, "w2", 100_000)
    await admin.ask("ACL", "SETUSER", "u", "-kv.write")
    told = await client.ask("KV.WRITE", number, "0", pattern(100_000))
    assert told.startswith(b"-NOPERM User u has no permissions to run the 'kv.write' command")


async def test_in_a_cluster_the_slot_is_asked_for_when_room_is_reserved(tmp_path: Path) -> None:
    async with LiveServer(tmp_path, cluster_topology=topology_file(tmp_path, HALF), cluster_node="us") as live:
        client = await live.connect()
        assert await client.ask("KV.RESERVE", THEIRS, "20000") == MOVED
        number = await reserve(client, OURS, 20_000)
        assert await client.ask("KV.WRITE", number, "0", pattern(20_000)) == b"+OK\r\n"
        cluster = live.server.cluster
        assert cluster is not None
        were = bytes(cluster.ours)
        cluster.ours[:] = bytes(len(were))
        assert (await client.ask("KV.COMMIT", number)).startswith(b"-ERR the slot of this reservation's key")
        cluster.ours[:] = were
        assert await client.ask("KV.COMMIT", number) == b"+OK\r\n"
        assert await client.get(OURS) == pattern(20_000)


async def test_what_a_connection_has_committed_waitaof_waits_for(tmp_path: Path) -> None:
    async with TieredServer(tmp_path) as live:
        client = await live.connect()
        number = await reserve(client, "k", 50_000)
        await client.ask("KV.WRITE", number, "0", pattern(50_000))
        assert await client.ask("KV.COMMIT", number) == b"+OK\r\n"
        await client.send("WAITAOF", "1", "0", "0")
        assert await client.read(12) == b"*2\r\n:1\r\n:0\r\n"
        live.send_away("k")
        assert live.tier("k") == "disk"
        assert await client.get("k") == pattern(50_000)


async def test_a_small_value_that_finds_no_room_is_refused_and_stays_reserved(tmp_path: Path) -> None:
    async with LiveServer(tmp_path, MIB, maxmemory_policy="noeviction") as live:
        client = await live.connect()
        number = await reserve(client, "k", 10_000)
        await client.ask("KV.WRITE", number, "0", pattern(10_000))
        filled = 0
        while await client.ask("SET", f"fill{filled}", pattern(10_000)) == b"+OK\r\n":
            filled += 1
        assert await client.ask("KV.COMMIT", number) == OOM
        for edit in (("APPEND", "other", pattern(10_000)), ("SETRANGE", "other", "1", pattern(10_000))):
            assert await client.ask(*edit) == OOM
        assert await client.ask("EXISTS", "other") == b":0\r\n"
        await client.ask("DEL", "fill0", "fill1")
        assert await client.ask("KV.COMMIT", number) == b"+OK\r\n"
        assert await client.get("k") == pattern(10_000)
