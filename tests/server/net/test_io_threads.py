"""Large replies by threads: the same bytes in the same order, leases that end, and slow clients that hold no other
up."""

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvredis.server.net import io_threads
from kvredis.server.net.io_threads import THREADS_AUTO_MAX, Sending, threads_for
from kvredis.server.protocol.replies import Buffer
from kvredis.server.server import ServerOptions
from tests.gate import diagonal
from tests.server.feed import request
from tests.server.live import LIMIT_S, MIB, Client, LiveServer, pattern, until

THREADS = 3
RECEIVE_BYTES = 4096


async def behind(live: LiveServer, value: bytes) -> Client:
    """A client that has asked for a large value and does not read: with it there the next one's goes to a thread."""
    client = await live.connect("tcp", receive_bytes=RECEIVE_BYTES)
    await client.ask("SET", "behind", value)
    await client.send("GET", "behind")
    await until(lambda: live.server.senders.behind)
    return client


async def sent_by_a_thread(live: LiveServer, value: bytes, receive_bytes: int = RECEIVE_BYTES) -> tuple[Client, Client]:
    """One who is behind, and one to whom a thread sends the same value."""
    first = await behind(live, value)
    second = await live.connect("tcp", receive_bytes=receive_bytes)
    await second.send("GET", "behind")
    await until(lambda: live.server.senders.is_active)
    return first, second


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    return LiveServer(tmp_path, 64 * MIB, io_threads=THREADS)


@pytest.mark.parametrize(("threads", "kind"), diagonal((1, THREADS, 2), ("tcp", "unix")))
async def test_what_several_clients_read_at_a_time_is_what_was_stored(
    kind: str, threads: int, loop: str, tmp_path: Path
) -> None:
    async def read(live: LiveServer, number: int) -> None:
        client = await live.connect(kind)
        long, short = pattern(3 * MIB + number, number), pattern(700_000, 50 + number)
        await client.ask("SET", f"long:{number}", long)
        await client.ask("SET", f"short:{number}", short)
        keys = ("short", "nope", "long", "long")
        calls = [("GET", f"long:{number}"), ("PING",), ("MGET", *(f"{key}:{number}" for key in keys)), ("ECHO", "end")]
        for _ in range(5):
            await client.send_raw(b"".join(request(*call) for call in calls))
            assert await client.read_bulk() == long
            assert await client.read_line() == b"+PONG\r\n"
            assert await client.read_line() == b"*4\r\n"
            assert [await client.read_bulk() for _ in range(4)] == [short, None, long, long]
            assert await client.read_bulk() == b"end"

    async with LiveServer(tmp_path, 64 * MIB, io_threads=threads) as live:
        await asyncio.gather(*(read(live, number) for number in range(5)))
        assert bool(live.server.stats.threaded_writes) == (threads > 1)
        assert not live.server.senders.is_active
        assert not live.server.senders.behind


async def test_a_client_that_is_alone_is_served_by_the_loop(loop: str, live: LiveServer) -> None:
    client, value = await live.connect("tcp"), pattern(8 * MIB)
    await client.ask("SET", "k", value)
    for _ in range(3):
        assert await client.get("k") == value
    assert not live.server.stats.threaded_writes


async def test_clients_that_do_not_read_give_their_threads_back_and_get_all_in_the_end(
    loop: str, live: LiveServer
) -> None:
    value = pattern(6 * MIB)
    slow = [await behind(live, value)]
    for _ in range(2 * THREADS):
        slow.append(await live.connect("tcp", receive_bytes=RECEIVE_BYTES))
        await slow[-1].send("GET", "behind")
    await until(lambda: live.server.stats.threaded_writes >= THREADS - 1)
    await until(lambda: not live.server.senders.is_active)
    assert live.store.leases == len(slow)
    quick = await live.connect("tcp")
    assert await quick.get("behind") == value
    for client in slow:
        assert await client.read_bulk() == value
        assert await client.ask("PING") == b"+PONG\r\n"


async def test_a_value_that_is_overwritten_while_a_thread_sends_it_arrives_as_it_was(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 32 * MIB, io_threads=THREADS) as live:
        value = pattern(6 * MIB)
        first, second = await sent_by_a_thread(live, value)
        writer = await live.connect()
        assert await writer.ask("DEL", "behind") == b":1\r\n"
        for number in range(30):
            await writer.ask("SET", f"flood:{number % 5}", pattern(2 * MIB, number))
        assert await second.read_bulk() == value
        assert await first.read_bulk() == value


@pytest.mark.parametrize("way", ["reset", "close", "kill"])
async def test_a_client_that_goes_while_a_thread_sends_leaves_no_lease(way: str, loop: str, live: LiveServer) -> None:
    first, second = await sent_by_a_thread(live, pattern(20 * MIB), receive_bytes=0)
    if way == "kill":
        live.sessions()[-1].close()
    else:
        getattr(second, way)()
    await until(lambda: len(live.sessions()) == 1 and not live.server.senders.is_active)
    assert live.store.leases == 1
    first.reset()
    await until(lambda: not live.store.leases)


async def test_a_client_that_is_killed_gets_no_more_of_what_a_thread_sends(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        monkeypatch.setattr(io_threads, "IDLE_MS", LIMIT_S * 1000)
        value = pattern(20 * MIB)
        first, second = await sent_by_a_thread(live, value)
        live.sessions()[-1].close()
        await until(lambda: not live.server.senders.is_active)
        assert len(await second.read_all()) < len(value)
        assert await first.read_bulk() == value


async def test_what_a_thread_sends_is_leased_until_it_is_done_though_the_client_has_gone(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    def slow(one: Sending) -> Sequence[Buffer]:
        assert may_go_on.wait(LIMIT_S)
        raise BrokenPipeError

    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        monkeypatch.setattr(Sending, "_send", slow)
        first, _ = await sent_by_a_thread(live, pattern(6 * MIB))
        live.sessions()[-1].close()
        await until(lambda: len(live.sessions()) == 1)
        first.reset()
        await until(lambda: not live.sessions())
        assert live.store.leases == 1
        may_go_on.set()
        await until(lambda: not live.store.leases)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
async def test_a_mistake_in_a_thread_closes_its_client_alone_and_is_told(
    error: type[BaseException], loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(one: Sending) -> Sequence[Buffer]:
        raise error

    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        value = pattern(6 * MIB)
        monkeypatch.setattr(Sending, "_send", broken)
        first, second = await behind(live, value), await live.connect("tcp")
        await second.send("GET", "behind")
        assert await second.read_all() == b""
        assert await first.read_bulk() == value
        assert len(live.complaints) == 1
        assert "a thread failed in a reply" in live.complaints.pop()


async def test_messages_go_behind_the_reply_that_a_thread_sends(loop: str, live: LiveServer) -> None:
    value = pattern(8 * MIB)
    first, second = await sent_by_a_thread(live, value)
    session = live.sessions()[-1]
    assert session.unsent_bytes > MIB
    session.push(b">1\r\n+news\r\n")
    assert await second.read_bulk() == value
    assert await second.read(11) == b">1\r\n+news\r\n"
    assert await first.read_bulk() == value


async def test_commands_behind_a_reply_that_a_thread_sends_wait_for_it(loop: str, live: LiveServer) -> None:
    value = pattern(8 * MIB)
    first, second = await sent_by_a_thread(live, value)
    await second.send_raw(request("SET", "late", "1") + request("GET", "late") + request("QUIT"))
    witness = await live.connect()
    assert await witness.ask("EXISTS", "late") == b":0\r\n"
    await witness.send("INFO", "stats")
    assert b"io_threaded_writes_processed:1\r\n" in (await witness.read_bulk() or b"")
    assert await second.read_bulk() == value
    assert await second.read_all() == b"+OK\r\n$1\r\n1\r\n+OK\r\n"
    assert await first.read_bulk() == value


async def test_a_server_that_stops_ends_what_its_threads_send(loop: str, live: LiveServer) -> None:
    live.server.drain_s = 0.0
    await sent_by_a_thread(live, pattern(20 * MIB))
    await live.server.stop()
    assert not live.store.leases
    assert not [each for each in threading.enumerate() if each.name == "kvredis sends"]


async def test_without_a_descriptor_for_a_thread_the_loop_sends(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(fd: int) -> int:
        raise OSError(24, "Too many open files")

    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        value = pattern(6 * MIB)
        first = await behind(live, value)
        second = await live.connect("tcp")
        monkeypatch.setattr("kvredis.server.net.io_threads.os.dup", none_left)
        assert await second.get("behind") == value
        assert not live.server.stats.threaded_writes
        assert await first.read_bulk() == value


@pytest.mark.parametrize("threads", [1, 4])
async def test_a_server_tells_by_how_many_threads_it_sends(threads: int, loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, io_threads=threads) as live:
        client = await live.connect()
        await client.send_raw(request("HELLO", "2") + request("CONFIG", "GET", "io-threads") + request("QUIT"))
        answer = await client.read_all()
        assert (b"$10\r\nio-threads\r\n:%d\r\n" % threads in answer) == (threads > 1)
        assert b"$10\r\nio-threads\r\n$1\r\n%d\r\n" % threads in answer


def test_auto_is_half_of_the_processors_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (7, 1), (8, 4), (15, 7), (16, 8), (192, THREADS_AUTO_MAX)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert threads_for("auto") == threads
    assert threads_for(5) == 5
    assert ServerOptions().io_threads == 1
