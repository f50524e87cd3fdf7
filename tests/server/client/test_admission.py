"""A header is a claim: a client that announces values and does not send them hurts no other."""

import asyncio
from pathlib import Path

import pytest

from kvredis.server.client.admission import UNREAD_BYTES_FULL, UNREAD_BYTES_MIN, segments_received, unread_bytes
from tests.server.feed import request
from tests.server.live import MIB, OOM, Client, LiveServer, pattern, until

pytestmark = pytest.mark.usefixtures("threads")

ARENA = 16 * MIB


def header(key: str, length: int) -> bytes:
    """All of a SET up to its value."""
    return b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key.encode(), length)


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    return LiveServer(tmp_path, ARENA, body_timeout=30.0)


async def test_a_claim_without_bytes_takes_no_room(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, ARENA) as live:
        owner = await live.connect()
        for n in range(15):
            await owner.ask("SET", f"kept:{n}", pattern(1000_000, n))
        used_bytes = live.store.used_bytes
        liars = [await live.connect() for _ in range(20)]
        for n, liar in enumerate(liars):
            await liar.send_raw(header(f"claim:{n}", 12 * MIB) + bytes(1000))
        await until(lambda: sum(each.pending_bytes >= 1000 for each in live.sessions()) == 20)
        assert live.store.used_bytes == used_bytes
        assert live.store.stats.evicted == 0
        for n in range(15):
            assert await owner.get(f"kept:{n}") == pattern(1000_000, n)
        for liar in liars:
            liar.close()
        await until(lambda: len(live.server.sessions) == 1)
        assert live.store.used_bytes == used_bytes


async def test_values_on_their_way_hold_no_more_than_their_share(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, ARENA) as live:
        clients = [await live.connect() for _ in range(8)]
        values = [pattern(3 * MIB // 2, n) for n in range(8)]
        for n, client in enumerate(clients):
            await client.send_raw(header(f"k{n}", len(values[n])) + values[n][:1000])
        claims = live.server.admission
        await until(lambda: len(claims.queue) == 6)
        assert claims.receiving == 2
        assert live.store.reserved_bytes <= claims.share_bytes
        for n, client in enumerate(clients):
            await client.send_raw(values[n][1000:] + b"\r\n")
            assert await client.read_line() == b"+OK\r\n"
            assert live.store.reserved_bytes <= claims.share_bytes
        for n, client in enumerate(clients):
            assert await client.get(f"k{n}") == values[n]


async def test_a_value_larger_than_the_share_has_its_turn_when_it_is_alone(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, ARENA) as live:
        small, large, late = [await live.connect() for _ in range(3)]
        one, two, three = pattern(MIB, 1), pattern(12 * MIB, 2), pattern(MIB, 3)
        await small.send_raw(header("one", MIB) + one[:1000])
        await until(lambda: live.store.reserved_bytes)
        await large.send_raw(header("two", 12 * MIB) + two[:10_000])
        await until(lambda: len(live.server.admission.queue) == 1)
        await late.send_raw(header("three", MIB) + three[:1000])
        await until(lambda: len(live.server.admission.queue) == 2)  # no client overtakes
        await small.send_raw(one[1000:] + b"\r\n")
        assert await small.read_line() == b"+OK\r\n"
        await large.send_raw(two[10_000:] + b"\r\n")
        assert await large.read_line() == b"+OK\r\n"
        await late.send_raw(three[1000:] + b"\r\n")
        assert await late.read_line() == b"+OK\r\n"
        assert await late.get("two") == two
        assert await late.get("three") == three


async def test_one_clients_unfinished_mset_leaves_room_for_others_values(tmp_path: Path) -> None:
    async with LiveServer(tmp_path, ARENA) as live:
        client, other = await live.connect(), await live.connect()
        await client.say_hello()
        words = [word for n in range(5) for word in (f"k{n}", pattern(2 * MIB, n))]
        await other.send_raw(header("other", MIB) + bytes(1000))
        await until(lambda: live.store.reserved_bytes)
        await client.send("MSET", *words)
        assert await client.read_line() == OOM
        assert live.store.live_bytes == 0
        assert await client.ask("PING") == b"+PONG\r\n"
        await other.send_raw(bytes(MIB - 1000) + b"\r\n")
        assert await other.read_line() == b"+OK\r\n"
        assert await client.ask("MSET", *words) == b"+OK\r\n"
        assert await client.get("k4") == pattern(2 * MIB, 4)


async def test_a_value_that_stops_coming_is_given_up(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, ARENA, body_timeout=0.0) as live:
        old = pattern(MIB, 1)
        owner, slow = await live.connect(), await live.connect()
        await owner.ask("SET", "k", old)
        await slow.send_raw(header("k", 2 * MIB) + bytes(MIB))
        await until(lambda: live.store.reserved_bytes)
        await until(lambda: live.server.admission.given_up)
        await until(lambda: not live.store.reserved_bytes)
        assert await slow.read_all() == b""
        assert await owner.get("k") == old
        live.complaints.clear()


async def test_many_writers_that_stall_together_cost_the_others_one_time_limit(loop: str, live: LiveServer) -> None:
    server, began_s = live.server, live.server.now_s()
    stalled = [await live.connect() for _ in range(8)]
    for n, client in enumerate(stalled):
        await client.send_raw(header(f"h{n}", 3 * MIB // 2) + bytes(4000))
    await until(lambda: len(server.admission.queue) == 6)
    honest = await live.connect()
    value = pattern(2 * MIB)
    sending = asyncio.create_task(honest.send("SET", "k", value))
    await until(lambda: len(server.admission.queue) == 7)
    session = next(reversed(server.admission.queue))
    await until(lambda: unread_bytes(session.fd) >= UNREAD_BYTES_MIN)
    server.now_s = lambda: began_s + 29.0
    server.admission.give_up_stalled()
    assert server.admission.given_up == 0
    server.now_s = lambda: began_s + 31.0
    server.admission.give_up_stalled()
    assert server.admission.given_up == 8
    assert await honest.read_line() == b"+OK\r\n"
    await sending
    assert await honest.get("k") == value
    live.complaints.clear()


async def connected(live: LiveServer, kind: str = "unix") -> Client:
    """Give a new client that is the last of the server's sessions."""
    count = len(live.server.sessions)
    client = await live.connect(kind)
    await until(lambda: len(live.server.sessions) > count)
    return client


def at_time(live: LiveServer, now_s: float) -> None:
    """Let a standing clock show this, and the server look at who has sent what by then."""
    live.server.now_s = lambda: now_s
    live.server.admission.give_up_stalled()


async def stall(live: LiveServer, client: Client, sent_bytes: int) -> None:
    """Have this client, the last that has connected, stop in the middle of a value of 3 MiB, which with another one is
    more than values may take at once."""
    session = live.sessions()[-1]
    head = header(f"stalled:{session.id}", 3 * MIB)
    await client.send_raw(head + bytes(sent_bytes))
    await until(lambda: session.input_bytes + unread_bytes(session.fd) == len(head) + sent_bytes)
    await until(lambda: session in live.server.admission.queue or session.is_receiving)


async def fill_socket(live: LiveServer, client: Client, value: bytes) -> "asyncio.Task[None]":
    """Have this client, the last that has connected, send a SET of `k` until its socket takes no more."""
    session = live.sessions()[-1]
    sending = asyncio.create_task(client.send("SET", "k", value))
    await until(lambda: session in live.server.admission.queue and unread_bytes(session.fd) >= UNREAD_BYTES_FULL)
    return sending


@pytest.mark.parametrize("sent_bytes", [20_000, 65_000])
async def test_what_stalled_writers_have_left_in_their_sockets_gives_none_a_time_of_its_own(
    loop: str, sent_bytes: int, live: LiveServer
) -> None:
    at_time(live, 1000.0)
    for _ in range(8):
        await stall(live, await connected(live, "tcp"), sent_bytes)
    assert len(live.server.admission.queue) == 7
    honest, value = await connected(live), pattern(3 * MIB)
    sending = await fill_socket(live, honest, value)
    at_time(live, 1001.0)
    at_time(live, 1029.0)
    assert live.server.admission.given_up == 0
    at_time(live, 1032.0)
    assert live.server.admission.given_up == 8
    assert await honest.read_line() == b"+OK\r\n"
    await sending
    live.complaints.clear()


async def test_a_client_that_most_likely_has_stopped_lets_the_others_go_first(loop: str, live: LiveServer) -> None:
    at_time(live, 1000.0)
    value = pattern(3 * MIB)
    first = await connected(live)
    await first.send_raw(header("first", len(value)) + value[:1000_000])
    await until(lambda: live.store.reserved_bytes)
    for kind in ("tcp", "unix"):
        await stall(live, await connected(live, kind), 65_000)
    honest = await connected(live)
    sending = await fill_socket(live, honest, value)
    at_time(live, 1001.0)
    at_time(live, 1003.0)
    await first.send_raw(value[1000_000:] + b"\r\n")
    assert await first.read_line() == b"+OK\r\n"
    assert await honest.read_line() == b"+OK\r\n"
    await sending
    assert live.server.admission.given_up == 0


async def test_after_a_writer_has_stalled_those_that_stalled_with_it_do_not_come_first(
    loop: str, live: LiveServer
) -> None:
    """They have filled their sockets, so that from there nothing tells them from an honest writer."""
    at_time(live, 1000.0)
    value = pattern(3 * MIB)
    tasks = []
    await stall(live, await connected(live), 1000_000)
    for _ in range(3):
        tasks.append(await fill_socket(live, await connected(live), value))
        tasks[-1].cancel()
        await until(tasks[-1].done)
    honest = await connected(live)
    sending = await fill_socket(live, honest, value)
    at_time(live, 1001.0)
    at_time(live, 1032.0)
    assert live.server.admission.given_up == 1
    assert await honest.read_line() == b"+OK\r\n"
    await sending
    live.complaints.clear()


async def test_a_client_that_was_silent_when_its_turn_came_has_a_second_while_others_wait(
    loop: str, live: LiveServer
) -> None:
    at_time(live, 1000.0)
    value = pattern(3 * MIB)
    await stall(live, await connected(live), 1000_000)
    honest = await connected(live)
    sending = await fill_socket(live, honest, value)
    silent = await fill_socket(live, await connected(live), value)
    silent.cancel()
    await until(silent.done)
    at_time(live, 1001.0)
    at_time(live, 1032.0)  # the first is closed, and the silent one's turn comes
    at_time(live, 1032.0)
    assert live.server.admission.given_up == 1, "once, though the loop has not told of its end"
    await until(lambda: len(live.sessions()) == 2)
    session = live.sessions()[1]
    await until(lambda: session.is_receiving and not unread_bytes(session.fd))
    at_time(live, 1032.5)  # what lay in its socket has come
    assert live.server.admission.given_up == 1
    at_time(live, 1034.0)
    assert live.server.admission.given_up == 2
    assert await honest.read_line() == b"+OK\r\n"
    await sending
    live.complaints.clear()


async def test_a_client_that_asks_over_tcp_whether_there_is_room_is_not_taken_for_silent(live: LiveServer) -> None:
    at_time(live, 1000.0)
    value = pattern(3 * MIB)
    first = await connected(live)
    await first.send_raw(header("first", len(value)) + value[:1000_000])
    await until(lambda: live.store.reserved_bytes)
    honest = await connected(live, "tcp")
    session = live.sessions()[-1]
    sending = asyncio.create_task(honest.send("SET", "k", value))
    await until(lambda: session in live.server.admission.queue)

    async def sign() -> None:
        before = segments_received(session.fd)
        assert before
        await until(lambda: before != segments_received(session.fd))

    unread = -1
    while unread != unread_bytes(session.fd):  # until its socket is full
        unread = unread_bytes(session.fd)
        await sign()
    at_time(live, 1010.0)
    await sign()
    at_time(live, 1020.0)
    await first.send_raw(value[1000_000:-1000])
    await until(lambda: unread_bytes(live.sessions()[0].fd) == 0)
    at_time(live, 1049.0)
    assert live.server.admission.given_up == 0
    await first.send_raw(value[-1000:] + b"\r\n")
    assert await first.read_line() == b"+OK\r\n"
    assert await honest.read_line() == b"+OK\r\n"
    await sending


async def test_a_client_that_waits_for_room_without_sending_a_value_is_not_taken_for_stalled(
    loop: str, live: LiveServer
) -> None:
    server, began_s = live.server, live.server.now_s()
    sender, reserving = await live.connect(), await live.connect()
    value = pattern(4 * MIB)
    await sender.send_raw(header("k", len(value)) + value[:MIB])
    await until(lambda: live.store.reserved_bytes)
    await reserving.send("KV.RESERVE", "part", str(3 * MIB))
    await until(lambda: len(server.admission.queue) == 1)
    server.now_s = lambda: began_s + 20.0
    await sender.send_raw(value[MIB : 2 * MIB])
    received = next(iter(server.admission._receiving)).input_bytes
    await until(lambda: next(iter(server.admission._receiving)).input_bytes > received + 64 * 1024)
    server.now_s = lambda: began_s + 31.0
    server.admission.give_up_stalled()
    assert server.admission.given_up == 0
    await sender.send_raw(value[2 * MIB :] + b"\r\n")
    assert await sender.read_line() == b"+OK\r\n"
    assert (await reserving.read_line()).startswith(b":")


async def test_a_client_that_has_sent_all_of_a_short_value_is_not_given_up_while_it_waits(
    loop: str, live: LiveServer
) -> None:
    server, began_s = live.server, live.server.now_s()
    first, slow = await live.connect(), await live.connect()
    large = pattern(8 * MIB)
    await first.send_raw(header("large", 8 * MIB) + large[:10_000])
    await until(lambda: live.store.reserved_bytes)
    await slow.send("SET", "short", pattern(70_000))
    await until(lambda: len(server.admission.queue) == 1)
    server.now_s = lambda: began_s + 31.0
    server.admission.give_up_stalled()
    assert server.admission.given_up == 1
    assert await slow.read_line() == b"+OK\r\n"
    assert await first.read_all() == b""
    live.complaints.clear()


async def test_a_client_that_has_gone_waits_no_longer_for_its_turn(loop: str, live: LiveServer) -> None:
    queue = live.server.admission.queue
    first, whole, half = await live.connect(), await live.connect(), await live.connect()
    large = pattern(8 * MIB)
    await first.send_raw(header("large", 8 * MIB) + large[:10_000])
    await until(lambda: live.store.reserved_bytes)
    for client, sent in ((whole, 200_000), (half, 100_000)):
        await client.send_raw((header("short", 200_000) + pattern(200_000) + b"\r\n")[: sent + 60])
    await until(lambda: len(queue) == 2)
    await until(lambda: all(unread_bytes(session.fd) >= 50_000 for session in queue))
    half.half_close()
    whole.half_close()
    await until(lambda: len(queue) == 1)
    await first.send_raw(large[10_000:] + b"\r\n")
    assert await first.read_line() == b"+OK\r\n"
    assert await whole.read_all() == b"+OK\r\n"


async def test_a_set_without_room_ends_a_connection_that_never_said_hello(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, ARENA) as live:
        native = await live.connect()
        await native.send("SET", "k", pattern(17 * MIB))
        assert await native.read_all() == OOM


async def test_a_client_that_said_hello_is_told_and_stays_in_step(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, ARENA) as live:
        client = await live.connect()
        await client.say_hello()
        await client.send_raw(request("SET", "k", pattern(17 * MIB)) + request("PING"))
        assert await client.read_line() == OOM
        assert await client.read_line() == b"+PONG\r\n"


async def test_what_exists_said_yes_to_is_still_there_when_others_had_to_go(tmp_path: Path) -> None:
    async with LiveServer(tmp_path, ARENA) as live:
        client = await live.connect()
        for n in range(5):
            await client.ask("SET", f"k{n}", pattern(3 * MIB, n))
        assert await client.ask("EXISTS", "k0") == b":1\r\n"  # the coldest
        assert await client.ask("EXISTS", "k1", "k9") == b":1\r\n"
        for n in range(3):
            await client.ask("SET", f"new:{n}", pattern(3 * MIB))
        assert await client.get("k0") == pattern(3 * MIB, 0)
        assert await client.get("k1") == pattern(3 * MIB, 1)
        assert await client.ask("EXISTS", "k2", "k3", "k4") == b":0\r\n"


async def test_the_grace_time_ends_and_never_makes_a_set_fail(tmp_path: Path) -> None:
    async with LiveServer(tmp_path, ARENA) as live:
        client = await live.connect()
        for n in range(5):
            await client.ask("SET", f"k{n}", pattern(3 * MIB, n))
        assert await client.ask("EXISTS", *(f"k{n}" for n in range(5))) == b":5\r\n"
        assert await client.ask("SET", "all-are-spared", pattern(3 * MIB)) == b"+OK\r\n"
        live.store.turn += 1000
        await client.ask("GETRANGE", "k1", "0", "0")
        await client.read(3)
        assert await client.ask("EXISTS", "k0") == b":0\r\n"
        assert await client.ask("SET", "next", pattern(3 * MIB)) == b"+OK\r\n"
        assert await client.ask("EXISTS", "k2") == b":0\r\n"
        assert await client.ask("EXISTS", "k1") == b":1\r\n"
