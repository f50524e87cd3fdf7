"""Spliced replies: the same bytes in the same order, and lent pages stay as they are until the client has received."""

import os
import random
import resource
from functools import partial
from pathlib import Path

import pytest

from kvredis.server.client.admission import SLOW_READER_S
from kvredis.server.net.zerocopy import SHARE, VALUE_BYTES_MIN, Splicer
from tests.gate import diagonal
from tests.server.feed import request
from tests.server.live import MIB, OOM, Client, LiveServer, pattern, until
from tests.server.net.spliced import ARENA, has_sent, promise, promising


async def flood(live: LiveServer, writer: Client, seed: int = 7, values: int = 40) -> None:
    """Write more than the arena holds, so that every extent that is free gets used."""
    for n in range(values):
        assert await writer.ask("SET", f"flood:{n % 9}", pattern(MIB + 4096 * n, seed + n)) in (b"+OK\r\n", OOM)


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    return LiveServer(tmp_path, ARENA)


@pytest.mark.parametrize("length", [16 * 1024, 64 * 1024 + 1, 300_000, MIB - 512, MIB, 2 * MIB + 1, 7 * MIB])
async def test_a_spliced_value_is_the_value_in_full_and_in_parts(length: int, live: LiveServer) -> None:
    client, value = await promising(live), pattern(length)
    await client.ask("SET", "k", value)
    for _ in range(3):
        assert await client.get("k") == value
    await client.send("GETRANGE", "k", "777", "-5000")
    assert await client.read_bulk() == value[777:-4999]
    await client.send("GETDEL", "k")
    assert await client.read_bulk() == value
    assert await client.ask("EXISTS", "k") == b":0\r\n"


async def test_replies_keep_their_order_around_spliced_ones(live: LiveServer) -> None:
    client = await promising(live)
    long, short = pattern(3 * MIB, 1), pattern(100_000, 2)
    await client.ask("SET", "long", long)
    await client.ask("SET", "short", short)
    calls = [("GET", "long"), ("PING",), ("MGET", "short", "nope", "long"), ("GET", "short"), ("ECHO", "end")]
    await client.send_raw(b"".join(request(*call) for call in calls) * 3)
    for _ in range(3):
        assert await client.read_bulk() == long
        assert await client.read_line() == b"+PONG\r\n"
        assert await client.read_line() == b"*3\r\n"
        assert [await client.read_bulk() for _ in range(3)] == [short, None, long]
        assert await client.read_bulk() == short
        assert await client.read_bulk() == b"end"


async def test_a_message_goes_behind_the_spliced_reply_that_is_going_out(live: LiveServer) -> None:
    client, value = await promising(live), pattern(3 * MIB)
    await client.ask("SET", "k", value)
    await client.send("GET", "k")
    await until(lambda: live.server.splicing.held_bytes)
    session = live.sessions()[0]
    assert session.unsent_bytes > MIB
    session.push(b">1\r\n+news\r\n")
    assert await client.read_bulk() == value
    assert await client.read(11) == b">1\r\n+news\r\n"


async def test_what_is_in_the_socket_are_the_very_pages_of_the_arena(live: LiveServer) -> None:
    """Why all the others are needed."""
    client = await promising(live)
    await client.ask("SET", "k", pattern(200_000))
    await client.send("GET", "k")
    await until(lambda: live.server.splicing.held_bytes)
    extent = live.store.index.spaces[0][b"k"].extent
    live.store.arena.view[extent.offset + 512 + 100_000] = 255  # only this test writes there
    value = await client.read_bulk()
    assert value is not None
    assert value[100_000] == 255


@pytest.mark.parametrize(
    ("loss", "length"), diagonal(("overwritten", "deleted", "flushed", "evicted"), (100_000, 600_000, 5 * MIB))
)
async def test_a_slow_reader_gets_what_was_there_when_it_asked(loss: str, length: int, live: LiveServer) -> None:
    reader, writer = await promising(live), await live.connect()
    value = pattern(length, 3)
    await writer.ask("SET", "k", value)
    await reader.send("GET", "k")
    await until(lambda: live.server.splicing.held_bytes)
    words = {"overwritten": ("SET", "k", bytes(length)), "deleted": ("DEL", "k"), "flushed": ("FLUSHALL",)}
    if loss in words:
        assert (await writer.ask(*words[loss]))[:1] != b"-"
    await flood(live, writer)
    assert live.store.leases == 1
    assert await reader.read_bulk() == value
    await until(lambda: not live.store.leases)  # by the clock: the reader says nothing more


@pytest.mark.parametrize("length", [600_000, 5 * MIB])
@pytest.mark.parametrize("end", ["CLIENT KILL", "slow"])
async def test_a_reader_that_reads_after_it_was_hung_up_on_gets_what_was_there(
    end: str, length: int, live: LiveServer
) -> None:
    reader, writer = await promising(live), await live.connect()
    value = pattern(length, 3)
    await writer.ask("SET", "k", value)
    await reader.send("GET", "k")
    await until(lambda: live.server.splicing.held_bytes)
    if end == "slow":
        live.sessions()[0].close()
    else:
        assert await writer.ask("CLIENT", "KILL", "ID", str(live.sessions()[0].id)) == b":1\r\n"
    await until(lambda: len(live.sessions()) == 1)
    await writer.ask("DEL", "k")
    await flood(live, writer)
    assert live.store.leases == 1
    received = await reader.read_all()
    assert len(received) > 500_000
    head = b"$%d\r\n" % length
    assert received == (head + value + b"\r\n")[: len(received)]
    await until(lambda: not live.store.leases)
    assert not live.server.splicing.holders
    assert not live.server.splicing.held_bytes


@pytest.mark.parametrize("read", [0, 1_000_000])
async def test_a_reader_that_goes_without_reading_leaves_no_lease(read: int, live: LiveServer) -> None:
    reader, writer = await promising(live), await live.connect()
    await writer.ask("SET", "k", pattern(5 * MIB))
    await reader.send("GET", "k")
    await reader.read(read)
    await until(lambda: live.server.splicing.held_bytes)
    reader.close()
    await until(lambda: not live.store.leases and len(live.sessions()) == 1)
    assert not live.server.splicing.held_bytes


@pytest.mark.parametrize("seed", range(6))
async def test_no_byte_changes_under_readers_of_any_speed_while_keys_come_and_go(seed: int, live: LiveServer) -> None:
    """A random walk: asking, reading a little, being killed, storing, deleting; each reader's stream is compared with
    what its keys held when it asked."""
    chance = random.Random(seed)
    writer = await live.connect()
    readers = [await promising(live) for _ in range(6)]
    owed = [b""] * len(readers)
    killed: set[int] = set()
    sessions = live.sessions()[1:]
    values: dict[str, bytes] = {}
    for step in range(150):
        who, key = chance.randrange(len(readers)), f"k{chance.randrange(8)}"
        action = chance.choice(["ask", "ask", "read", "read", "set", "set", "del", "kill"])
        if action == "set":
            value = pattern(chance.choice([70_000, 300_000, 900_000, 2_500_000]), step)
            answer = await writer.ask("SET", key, value)
            if answer == b"+OK\r\n":
                values[key] = value
        elif action == "del":
            await writer.ask("DEL", key)
            values.pop(key, None)
        elif action == "ask" and not owed[who] and who not in killed:
            seen = await writer.get(key)
            if seen is not None:
                assert seen == values[key]
                await readers[who].send("GET", key)
                owed[who] = b"$%d\r\n%b\r\n" % (len(seen), seen)
                await until(partial(has_sent, sessions[who], len(owed[who])))
        elif action == "read" and owed[who]:
            piece = await readers[who].read(min(len(owed[who]), chance.choice([1000, 60_000, 400_000])))
            assert piece == owed[who][: len(piece)]
            owed[who] = owed[who][len(piece) :] if len(piece) else b""
        elif action == "kill" and owed[who] and len(killed) < 3:
            sessions[who].close()
            killed.add(who)
    for reader, rest, number in zip(readers, owed, range(len(readers)), strict=True):
        piece = await reader.read_all() if number in killed else await reader.read(len(rest))
        assert piece == rest[: len(piece)]
        assert number in killed or piece == rest
    await until(lambda: not live.store.leases)


async def test_leases_of_a_pipeline_end_as_it_is_read_not_only_when_all_of_it_is(live: LiveServer) -> None:
    client, value = await promising(live), pattern(900_000)
    await client.ask("SET", "k", value)
    calls = 60
    await client.send_raw(request("GET", "k") * calls)
    most = 0
    for _ in range(calls):
        assert await client.read_bulk() == value
        most = max(most, live.store.leases)
    assert 0 < most <= 5


async def test_a_lease_that_waits_for_its_reader_shows_and_gives_way_to_a_store_once_it_has_read(
    tmp_path: Path,
) -> None:
    async with LiveServer(tmp_path, 4 * MIB) as live:
        reader, writer = await promising(live), await live.connect()
        value = pattern(900_000)
        await writer.ask("SET", "k", value)
        await reader.send("GET", "k")
        await until(lambda: live.server.splicing.held_bytes)
        await writer.send("KV.TIERS")
        assert b"leases\r\n:1\r\n" in await writer.read(200)
        for session in live.sessions():
            session.close()
        await until(lambda: not live.sessions())
        writer = await live.connect()
        large = bytes(4 * MIB - 4096)
        assert await writer.ask("SET", "large", large) == OOM  # all there is but for what is held
        writer = await live.connect()
        assert len(await reader.read_all()) > 900_000
        assert await writer.ask("SET", "large", large) == b"+OK\r\n"  # without waiting for the clock


async def test_a_peer_that_splices_on_holds_pages_that_the_socket_no_longer_counts(live: LiveServer) -> None:
    """Which is why splicing must be asked for: the promise is to receive."""
    breaker, writer = await promising(live), await live.connect()
    await writer.ask("SET", "k", bytes(70_000))
    await breaker.send("GET", "k")
    await until(lambda: live.server.splicing.held_bytes)
    read_fd, write_fd = os.pipe()
    try:
        left = 70_000 + len(b"$70000\r\n\r\n")
        while left > 30_000:
            left -= os.splice(breaker._socket.fileno(), write_fd, left)
        extent = live.store.index.spaces[0][b"k"].extent
        await breaker.read(left)
        await until(lambda: not live.store.leases)
        live.store.arena.view[extent.offset + 512 + 100] = 1
        assert os.read(read_fd, 1000).count(1) == 1
    finally:
        os.close(read_fd)
        os.close(write_fd)


@pytest.mark.parametrize("error", [ValueError, MemoryError, OSError])
async def test_whatever_goes_wrong_while_the_socket_takes_more_ends_its_client_once(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Splicer] = []

    def advance(splicer: Splicer) -> bool:
        called.append(splicer)
        raise error

    async with LiveServer(tmp_path, ARENA) as live:
        reader, writer = await promising(live), await live.connect()
        await writer.ask("SET", "k", bytes(7 * MIB))
        await reader.send("GET", "k")
        await until(lambda: live.server.splicing.held_bytes)
        monkeypatch.setattr(Splicer, "advance", advance)
        await reader.read_all()
        await until(lambda: len(live.server.sessions) == 1)
        assert len(called) == 1
        assert len(live.complaints) == (error is not OSError)
        live.complaints.clear()


# Whose replies are spliced, and when they are copied all the same.


@pytest.mark.parametrize("length", [VALUE_BYTES_MIN // 2, VALUE_BYTES_MIN])
async def test_values_for_which_it_does_not_pay_are_copied_many_of_them_at_once_too(
    length: int, live: LiveServer
) -> None:
    client, value = await live.connect(), pattern(length)
    assert await client.ask(*promise()) == b"+OK\r\n"
    await client.ask("SET", "k", value)
    await client.send("MGET", "k", "k", "k", "k")
    await until(partial(has_sent, live.sessions()[0], 2 * length))
    assert bool(live.server.splicing.held_bytes) == (length >= VALUE_BYTES_MIN)
    assert await client.read_line() == b"*4\r\n"
    assert [await client.read_bulk() for _ in range(4)] == [value] * 4


async def test_beyond_its_share_of_the_arena_a_reply_is_copied(live: LiveServer) -> None:
    writer, readers = await live.connect(), [await promising(live) for _ in range(30)]
    value = pattern(600_000)
    await writer.ask("SET", "k", value)
    for reader in readers:
        await reader.send("GET", "k")
    sessions = live.sessions()[1:]
    await until(lambda: all(session.output_bytes > len(value) for session in sessions))
    splicing = live.server.splicing
    assert ARENA // SHARE - MIB < splicing.held_bytes <= ARENA // SHARE
    assert len(splicing.holders) < len(readers)
    for reader in readers:
        assert await reader.read_bulk() == value


async def test_without_a_descriptor_for_a_pipe_a_reply_is_copied(live: LiveServer) -> None:
    client, value = await promising(live), pattern(2 * MIB)
    await client.ask("SET", "k", value)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        await client.send("GET", "k")
        await until(lambda: live.sessions()[0].output_bytes > len(value))
        assert not live.server.splicing.held_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert await client.read_bulk() == value
    await client.send("GET", "k")
    await until(lambda: live.server.splicing.held_bytes)
    assert await client.read_bulk() == value


@pytest.mark.parametrize("rights", ["~* +@all", "%R~* +@all -debug", "~a:* +@all"])
async def test_only_a_user_who_may_read_every_key_is_lent_pages(rights: str, live: LiveServer) -> None:
    admin, client = await live.connect(), await live.connect()
    await admin.ask("SET", "a:1", pattern(MIB))
    assert await admin.ask("ACL", "SETUSER", "u", "on", ">pw", *rights.split()) == b"+OK\r\n"
    before = await client.ask(*promise())
    assert before == b"+OK\r\n"
    assert await client.ask("AUTH", "u", "pw") == b"+OK\r\n"
    again = await client.ask(*promise())
    await client.send("GET", "a:1")
    await until(lambda: live.sessions()[1].output_bytes > MIB)
    if rights.startswith("~a"):
        assert again == b"-NOPERM KV.SPLICE is for users who may read every key\r\n"
        assert not live.server.splicing.held_bytes
    else:
        assert again == b"+OK\r\n"
        assert live.server.splicing.held_bytes
    assert await client.read_bulk() == pattern(MIB)


async def test_a_process_between_client_and_server_is_not_taken_for_the_client(live: LiveServer) -> None:
    client = await live.connect()
    name, pid, space = promise()
    for words in [(name, "1", space), (name, pid, "1"), (name, "x", space), (name, str(os.getppid()), space)]:
        assert (await client.ask(*words)).startswith(b"-ERR KV.SPLICE is for the process that has connected")
    await client.ask("SET", "k", pattern(MIB))
    await client.send("GET", "k")
    await until(lambda: live.sessions()[0].output_bytes > MIB)
    assert not live.server.splicing.held_bytes
    assert await client.read_bulk() == pattern(MIB)


async def test_nothing_is_spliced_over_tcp_nor_where_writes_are_copied(loop: str, live: LiveServer) -> None:
    kinds = ["tcp"] if loop == "uvloop" else ["tcp", "unix"]
    assert await (await live.connect()).ask("CONFIG", "SET", "unix-splice", "yes") == b"+OK\r\n"
    for kind in kinds:
        client = await live.connect(kind)
        assert (await client.ask(*promise())).startswith(b"-ERR KV.SPLICE is for unix sockets")
        await client.ask("SET", "k", pattern(MIB))
        await client.send("GET", "k")
        await until(lambda: live.sessions()[-1].output_bytes > MIB)
        assert not live.server.splicing.holders
        assert await client.read_bulk() == pattern(MIB)


async def test_the_setting_decides_at_once_for_which_clients_it_is_done(live: LiveServer) -> None:
    plain, asking = await live.connect(), await promising(live)
    await plain.ask("SET", "k", pattern(MIB))
    for mode, spliced in (("asked", [asking]), ("yes", [plain, asking]), ("no", []), ("asked", [asking])):
        assert await plain.ask("CONFIG", "SET", "unix-splice", mode) == b"+OK\r\n"
        for client in (plain, asking):
            await client.send("GET", "k")
            session = live.sessions()[0 if client is plain else 1]
            await until(partial(has_sent, session, session.output_bytes + MIB))
            assert bool(live.server.splicing.held_bytes) == (client in spliced), mode
            assert await client.read_bulk() == pattern(MIB)
            await until(lambda: not live.store.leases)
    assert (await plain.ask("CONFIG", "SET", "unix-splice", "perhaps")).startswith(b"-ERR CONFIG SET failed")
    await plain.ask("CONFIG", "SET", "unix-splice", "no")
    assert (await plain.ask(*promise())).startswith(b"-ERR KV.SPLICE is for unix sockets")


async def test_a_client_that_has_not_read_is_told_that_its_own_unread_reply_has_the_room_and_stays(
    tmp_path: Path,
) -> None:
    async with LiveServer(tmp_path, 4 * MIB) as live:
        client, value, large = await promising(live), pattern(900_000), bytes(4 * MIB - 4096)
        await client.say_hello()
        await client.ask("SET", "k", value)
        await client.send("GET", "k")
        await until(lambda: live.server.splicing.held_bytes)
        live.server.now_s = lambda: live.store.now_s() + 2 * SLOW_READER_S
        await client.send_raw(request("SET", "l", large))
        assert await client.read_bulk() == value
        assert await client.read_line() == OOM
        assert await client.ask("SET", "l", large) == b"+OK\r\n"


async def test_no_client_is_hung_up_on_for_room_that_would_not_come_of_it(live: LiveServer) -> None:
    """What lies in a socket, or half in it, can be read after the end of the connection too."""
    readers, writer = [await promising(live) for _ in range(3)], await live.connect()
    await writer.say_hello()
    for reader, length in zip(readers, (700_000, 800_000, 3_000_000), strict=True):
        await writer.ask("SET", f"{length}", pattern(length))
        await reader.send("GET", f"{length}")
    await until(lambda: len(live.server.splicing.holders) == 2 and live.server.splicing.held_bytes > 4_500_000)
    live.server.now_s = lambda: live.store.now_s() + 2 * SLOW_READER_S
    await writer.send_raw(request("SET", "l", bytes(ARENA - 4096)))
    assert await writer.read_line() == OOM
    live.server.now_s = live.store.now_s
    for reader, length in zip(readers, (700_000, 800_000, 3_000_000), strict=True):
        assert await reader.read_bulk() == pattern(length)
        assert await reader.ask("PING") == b"+PONG\r\n"
