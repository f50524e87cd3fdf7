"""Large values by threads: the same bytes in the same order, leases and room that end, and slow clients that hold no
other up."""

import asyncio
import itertools
import os
import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from kvredis.server.client import session
from kvredis.server.client.session import Session
from kvredis.server.net import io_threads
from kvredis.server.net.io_threads import QUEUE_THREADS_MIN, THREADS_AUTO_MAX, Receiving, Sending, threads_for
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
    await until(lambda: live.server.io_pool.under_way)
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
        assert not live.server.io_pool.under_way
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
    await until(lambda: not live.server.io_pool.under_way)
    assert live.store.leases == len(slow)
    quick = await live.connect("tcp")
    assert await quick.get("behind") == value
    for client in slow:
        assert await client.read_bulk() == value
        assert await client.ask("PING") == b"+PONG\r\n"


async def test_readers_that_stall_cost_those_that_wait_for_a_thread_little(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 64 * MIB, io_threads=QUEUE_THREADS_MIN) as live:
        value = pattern(6 * MIB)
        slow = [await behind(live, value)]
        for _ in range(20):
            slow.append(await live.connect("tcp", receive_bytes=RECEIVE_BYTES))
            await slow[-1].send("GET", "behind")
        quick = await live.connect("tcp")
        assert await quick.get("behind") == value
        await until(lambda: not live.server.io_pool.under_way)
        assert live.server.stats.threaded_writes > QUEUE_THREADS_MIN
        for client in slow:
            assert await client.read_bulk() == value


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
    await until(lambda: len(live.sessions()) == 1 and not live.server.io_pool.under_way)
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
        await until(lambda: not live.server.io_pool.under_way)
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
    assert not [each for each in threading.enumerate() if each.name == "kvredis io"]


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


# ---- values that threads receive -------------------------------------------------------------------------------------


async def receiving(live: LiveServer, value: bytes, sent_bytes: int, kind: str = "tcp") -> tuple[Client, Client]:
    """One who is within a value of its own, and one of whose SET of `k` a thread receives the rest: so much is sent."""
    first = await live.connect(kind)
    await first.send_raw(request("SET", "first", value)[: 20 * 1024])
    await until(lambda: live.sessions()[-1:] and live.sessions()[-1].input_bytes == 20 * 1024)
    before = live.server.stats.threaded_reads
    second = await live.connect(kind)
    await second.send_raw(request("SET", "k", value)[:sent_bytes])
    await until(lambda: live.server.stats.threaded_reads > before)
    return first, second


@pytest.mark.parametrize(("threads", "kind"), diagonal((1, THREADS, 2, 8), ("tcp", "unix")))
async def test_what_several_clients_store_at_a_time_is_what_they_have_sent(
    kind: str, threads: int, loop: str, tmp_path: Path
) -> None:
    async def store(live: LiveServer, number: int) -> None:
        client = await live.connect(kind)
        long, short, odd = (pattern(n + number, number) for n in (3 * MIB, 300_000, MIB - 1))
        keys = [f"{name}:{number}" for name in ("long", "short", "odd")]
        sets = request("MSET", keys[0], long, keys[1], short, "x", "y", keys[2], odd)
        for _ in range(3):
            await client.send_raw(request("DEL", *keys) + request("PING") + sets + request("PING"))
            await client.read_line()
            assert await client.read(len(b"+PONG\r\n+OK\r\n+PONG\r\n")) == b"+PONG\r\n+OK\r\n+PONG\r\n"
            for key, value in zip(keys, (long, short, odd), strict=True):
                assert await client.get(key) == value

    async with LiveServer(tmp_path, 128 * MIB, io_threads=threads) as live:
        await asyncio.gather(*(store(live, number) for number in range(5)))
        assert bool(live.server.stats.threaded_reads) == (threads > 1)
        assert not live.server.io_pool.under_way


async def test_a_value_that_comes_alone_is_received_by_the_loop(loop: str, live: LiveServer) -> None:
    client, value = await live.connect("tcp"), pattern(8 * MIB)
    for _ in range(3):
        assert await client.ask("SET", "k", value) == b"+OK\r\n"
    await client.ask("KV.RESERVE", "part", str(8 * MIB))
    assert await client.ask("KV.WRITE", "1", "5", value[: 2 * MIB]) == b"+OK\r\n"
    assert not live.server.stats.threaded_reads


@pytest.mark.parametrize("seed", range(20))
async def test_a_stream_cut_anywhere_means_the_same_to_loop_and_threads(seed: int, loop: str, tmp_path: Path) -> None:
    chance = random.Random(seed)
    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        other, client = await live.connect("tcp"), await live.connect(chance.choice(("tcp", "unix")))
        await other.send_raw(request("SET", "other", bytes(MIB))[: 20 * 1024])
        await until(lambda: live.store.reserved_bytes)
        stream, wanted, now = b"", b"", {}
        for number in range(12):
            key, value = (
                f"k{chance.randrange(3)}",
                pattern(chance.choice((5, 20_000, 300_000, 700_000, 2 * MIB)), number),
            )
            stream += request("SET", key, value) + request("STRLEN", key)
            wanted += b"+OK\r\n:%d\r\n" % len(value)
            now[key] = value
        cuts = sorted(chance.randrange(len(stream)) for _ in range(chance.randrange(1, 40)))
        for start, end in itertools.pairwise([0, *cuts, len(stream)]):
            await client.send_raw(stream[start:end])
            for _ in range(chance.choice((0, 0, 30))):
                await asyncio.sleep(0)
        assert await client.read(len(wanted)) == wanted
        for key, value in now.items():
            assert await client.get(key) == value
        assert live.server.stats.threaded_reads


async def test_a_plain_set_is_received_by_a_thread_from_the_bound_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "REST_BYTES_MIN", 100_000)
    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        other, client = await live.connect("tcp"), await live.connect("tcp")
        await other.send_raw(request("SET", "other", bytes(MIB))[: 20 * 1024])
        await until(lambda: live.store.reserved_bytes)
        before = live.server.stats.threaded_reads
        for length in (99_000, 150_000):
            stream = request("SET", "k", bytes(length))
            await client.send_raw(stream[:20_000])
            await until(lambda: live.server.admission.receiving == 2)
            await client.send_raw(stream[20_000:])
            assert await client.read_line() == b"+OK\r\n"
            assert (live.server.stats.threaded_reads > before) == (length > 100_000)


async def test_values_that_stall_give_their_threads_back_and_are_stored_in_the_end(loop: str, live: LiveServer) -> None:
    value = pattern(MIB)
    sent = request("SET", "k", value)
    slow = [await live.connect(("tcp", "unix")[n % 2]) for n in range(3 * THREADS)]
    for client in slow:
        await client.send_raw(sent[: MIB // 3])
    await until(lambda: live.server.stats.threaded_reads >= THREADS - 1)
    await until(lambda: not live.server.io_pool.under_way)
    before = live.server.stats.threaded_reads
    quick = await live.connect("tcp")
    assert await quick.ask("SET", "quick", value) == b"+OK\r\n"
    assert live.server.stats.threaded_reads == before + 1
    for client in slow:
        await client.send_raw(sent[MIB // 3 : MIB // 2])
    for client in slow:
        await client.send_raw(sent[MIB // 2 :])
        assert await client.read_line() == b"+OK\r\n"
    assert live.server.stats.threaded_reads <= len(slow) + 1, "what a thread has left to the loop stays there"
    assert await quick.get("k") == await quick.get("quick") == value


async def test_a_value_that_comes_while_all_threads_are_at_work_waits_for_one_of_them(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, receive = threading.Event(), Receiving._move

    def late(one: Receiving) -> None:
        assert may_go_on.wait(LIMIT_S)
        receive(one)

    async with LiveServer(tmp_path, 64 * MIB, io_threads=QUEUE_THREADS_MIN) as live:
        monkeypatch.setattr(Receiving, "_move", late)
        value = pattern(MIB)
        other, *clients = [await live.connect("tcp") for _ in range(QUEUE_THREADS_MIN + 3)]
        await other.send_raw(request("SET", "other", value)[: 20 * 1024])
        await until(lambda: live.store.reserved_bytes)
        storing = [asyncio.create_task(client.ask("SET", f"k{n}", value)) for n, client in enumerate(clients)]
        await until(lambda: len(live.server.io_pool.under_way) == len(clients))
        assert len([each for each in threading.enumerate() if each.name == "kvredis io"]) == QUEUE_THREADS_MIN - 1
        may_go_on.set()
        assert {await each for each in storing} == {b"+OK\r\n"}
        for n in range(len(clients)):
            assert await clients[0].get(f"k{n}") == value


async def test_values_that_stall_cost_those_that_wait_for_a_thread_little(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 128 * MIB, io_threads=QUEUE_THREADS_MIN) as live:
        value = pattern(MIB)
        for _ in range(30):
            await (await live.connect("tcp")).send_raw(request("SET", "k", value)[: MIB // 3])
        honest = await live.connect("tcp")
        assert await honest.ask("SET", "honest", value) == b"+OK\r\n"
        await until(lambda: not live.server.io_pool.under_way)
        assert live.server.stats.threaded_reads >= 20
        assert await honest.get("honest") == value


@pytest.mark.parametrize("way", ["reset", "close", "half_close", "kill"])
async def test_a_client_that_goes_while_a_thread_receives_leaves_the_old_value_and_no_room_taken(
    way: str, loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        monkeypatch.setattr(io_threads, "IDLE_MS", LIMIT_S * 1000)
        keeper, old = await live.connect(), pattern(MIB, 9)
        await keeper.ask("SET", "k", old)
        first, second = await receiving(live, pattern(6 * MIB), 2 * MIB)
        held = live.store.reserved_bytes
        if way == "kill":
            assert await keeper.ask("CLIENT", "KILL", "ID", str(live.sessions()[-1].id)) == b":1\r\n"
        else:
            getattr(second, way)()
        await until(lambda: len(live.sessions()) == 2 and live.store.reserved_bytes == held // 2)
        assert await keeper.get("k") == old
        first.close()


async def test_room_that_a_thread_receives_into_is_kept_until_it_is_done_though_the_client_has_gone(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    def slow(one: Receiving) -> None:
        assert may_go_on.wait(LIMIT_S)

    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        monkeypatch.setattr(Receiving, "_move", slow)
        await receiving(live, pattern(6 * MIB), 2 * MIB)
        for session in live.sessions():
            session.close()
        await until(lambda: not live.sessions())
        assert live.store.reserved_bytes > 6 * MIB
        may_go_on.set()
        await until(lambda: not live.store.reserved_bytes)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
async def test_a_mistake_in_a_thread_that_receives_closes_its_client_alone_and_is_told(
    error: type[BaseException], loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(one: Receiving) -> None:
        raise error

    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        monkeypatch.setattr(Receiving, "_move", broken)
        value = pattern(MIB)
        first, second = await receiving(live, value, MIB // 2)
        await until(lambda: len(live.sessions()) == 1)
        monkeypatch.undo()
        await first.send_raw(request("SET", "first", value)[20 * 1024 :])
        assert await first.read_line() == b"+OK\r\n"
        assert await first.get("k") is None
        assert len(live.complaints) == 1
        assert "a thread failed in a value" in live.complaints.pop()
        second.close()


def has_received(session: Session, sent_bytes: int) -> bool:
    """Whether a client's SET has come so far, but for its head."""
    return session.held().qbuf > sent_bytes - 100


async def test_what_a_thread_has_received_is_seen_and_counts_as_progress(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS, body_timeout=30.0) as live:
        monkeypatch.setattr(io_threads, "IDLE_MS", LIMIT_S * 1000)
        value = pattern(5 * MIB)
        sent = request("SET", "k", value)
        _, second = await receiving(live, value, MIB)
        session, admission, began_s = live.sessions()[-1], live.server.admission, live.server.now_s()
        for step in (2, 3, 4):
            await second.send_raw(sent[(step - 1) * MIB : step * MIB])
            await until(partial(has_received, session, step * MIB))
            live.sessions()[0].input_bytes += MIB  # as if the other came on too
            live.server.now_s = partial(float, began_s + 29 * step)
            admission.give_up_stalled()
            assert (session.input_bytes, admission.given_up) == (step * MIB, 0)
            assert session.receiving is not None
        live.server.now_s = partial(float, began_s + 200)
        admission.give_up_stalled()
        assert admission.given_up == 2
        await until(lambda: not live.sessions())
        live.complaints.clear()


async def test_messages_reach_a_client_whose_value_a_thread_receives(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        monkeypatch.setattr(io_threads, "IDLE_MS", LIMIT_S * 1000)
        value = pattern(4 * MIB)
        _, second = await receiving(live, value, 2 * MIB)
        session = live.sessions()[-1]
        news = b">1\r\n$900000\r\n" + pattern(900_000) + b"\r\n"
        for _ in range(4):
            session.push(news)
        assert session.receiving is not None
        assert await second.read(4 * len(news)) == 4 * news
        await second.send_raw(request("SET", "k", value)[2 * MIB :])
        assert await second.read_line() == b"+OK\r\n"
        assert await second.get("k") == value


async def test_a_part_that_a_thread_receives_leaves_what_stands_behind_it(loop: str, live: LiveServer) -> None:
    other, client, value = await live.connect("tcp"), await live.connect("tcp"), pattern(4 * MIB)
    await client.ask("KV.RESERVE", "k", str(4 * MIB))
    await other.send_raw(request("SET", "first", value)[: 20 * 1024])
    await until(lambda: live.store.reserved_bytes > 4 * MIB + 4096)
    for start in (3 * MIB, 2 * MIB, 0, MIB):
        assert await client.ask("KV.WRITE", "1", str(start), value[start : start + MIB]) == b"+OK\r\n"
    assert live.server.stats.threaded_reads >= 4
    assert await client.ask("KV.COMMIT", "1") == b"+OK\r\n"
    assert await client.get("k") == value


async def test_info_tells_how_many_values_threads_were_given(loop: str, live: LiveServer) -> None:
    value = pattern(MIB)
    _, second = await receiving(live, value, MIB // 2)
    await second.send_raw(request("SET", "k", value)[MIB // 2 :] + request("INFO", "stats"))
    assert await second.read_line() == b"+OK\r\n"
    assert b"io_threaded_reads_processed:1\r\n" in (await second.read_bulk() or b"")


async def test_a_server_that_stops_ends_what_its_threads_receive(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        monkeypatch.setattr(io_threads, "IDLE_MS", LIMIT_S * 1000)
        live.server.drain_s = 0.0
        await receiving(live, pattern(6 * MIB), 2 * MIB)
        await live.server.stop()
        assert not live.store.reserved_bytes
        assert not [each for each in threading.enumerate() if each.name == "kvredis io"]


async def test_without_a_descriptor_for_a_thread_the_loop_receives(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(fd: int) -> int:
        raise OSError(24, "Too many open files")

    async with LiveServer(tmp_path, 64 * MIB, io_threads=THREADS) as live:
        value = pattern(6 * MIB)
        first, second = await live.connect("tcp"), await live.connect("tcp")
        await first.send_raw(request("SET", "first", value)[:MIB])
        await until(lambda: live.store.reserved_bytes)
        monkeypatch.setattr("kvredis.server.net.io_threads.os.dup", none_left)
        assert await second.ask("SET", "k", value) == b"+OK\r\n"
        assert not live.server.stats.threaded_reads
        assert await second.get("k") == value


# ---- how many there are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
async def test_a_server_tells_by_how_many_threads_it_sends(threads: int, loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, io_threads=threads) as live:
        client = await live.connect()
        await client.send_raw(request("HELLO", "2") + request("CONFIG", "GET", "io-threads") + request("QUIT"))
        answer = await client.read_all()
        assert (b"$10\r\nio-threads\r\n:%d\r\n" % threads in answer) == (threads > 1)
        assert b"$10\r\nio-threads\r\n$1\r\n%d\r\n" % threads in answer
        other = await live.connect()
        await other.send("CONFIG", "GET", "io-threads-do-reads")
        head = await other.read_line(), await other.read_bulk()
        assert (head, await other.read_bulk()) == (
            (b"*2\r\n", b"io-threads-do-reads"),
            b"yes" if threads > 1 else b"no",
        )


def test_auto_is_half_of_the_processors_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (7, 1), (8, 4), (15, 7), (16, 8), (192, THREADS_AUTO_MAX)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert threads_for("auto") == threads
    assert threads_for(5) == 5
    assert ServerOptions().io_threads == 1
