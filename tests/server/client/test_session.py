"""One client over real sockets, on both event loops: values in and out, order, endings, and who is let in."""

import asyncio
from pathlib import Path

import pytest

from kvredis.server.protocol.request import PAYLOAD_BYTES_MIN
from tests.server.feed import request
from tests.server.live import MIB, LiveServer, pattern, until

SIZES = [0, 1, 16 * 1024 - 1, 16 * 1024, 64 * 1024, 5 * MIB]
PING = request("PING")


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    return LiveServer(tmp_path, 32 * MIB)


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_values_of_all_sizes_come_back_as_they_were(loop: str, kind: str, resp: int, live: LiveServer) -> None:
    client = await live.connect(kind)
    await client.send("HELLO", str(resp))
    head = await client.read_line()
    assert head == (b"%7\r\n" if resp == 3 else b"*14\r\n")
    await client.send("ECHO", "end of hello")
    while await client.read_line() != b"end of hello\r\n":
        pass
    assert await client.get("missing") is None
    for length in SIZES:
        value = pattern(length)
        assert await client.ask("SET", f"k{length}", value) == b"+OK\r\n"
        assert await client.ask("STRLEN", f"k{length}") == b":%d\r\n" % length
        assert await client.get(f"k{length}") == value
    await client.send("MGET", *[f"k{length}" for length in SIZES], "missing")
    assert await client.read_line() == b"*%d\r\n" % (len(SIZES) + 1)
    assert [await client.read_bulk() for _ in range(len(SIZES) + 1)] == [*map(pattern, SIZES), None]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_pipeline_of_mixed_sizes_is_answered_in_order(loop: str, kind: str, live: LiveServer) -> None:
    client = await live.connect(kind)
    sent, wanted = [], []
    for turn in range(12):
        value = pattern(SIZES[turn * 5 % len(SIZES)] // 4, turn)
        sent += [request("SET", f"k{turn}", value), request("GET", f"k{turn}"), PING, b"PING\r\n"]
        wanted += [b"+OK\r\n", b"$%d\r\n" % len(value), value, b"\r\n+PONG\r\n+PONG\r\n"]
    reply = b"".join(wanted)
    received, _ = await asyncio.gather(client.read(len(reply)), client.send_raw(b"".join(sent)))
    assert received == reply


async def test_a_large_pipeline_is_read_while_it_is_answered(loop: str, live: LiveServer) -> None:
    """The client writes all of it before it reads: the server may hold back, but must not lose a byte or its place."""
    client = await live.connect()
    value = pattern(300_000)
    assert await client.ask("SET", "k", value) == b"+OK\r\n"
    count = 60
    await client.send_raw(b"".join(request("GET", "k") + request("SET", f"n{n}", "x") for n in range(count)))
    reply = b"$300000\r\n" + value + b"\r\n+OK\r\n"
    for _ in range(count):
        assert await client.read(len(reply)) == reply
    assert live.store.count() == count + 1


async def test_what_arrives_byte_by_byte_is_understood(loop: str, live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    for data in (request("SET", "k", "value"), request("GET", "k"), b"ping\r\n"):
        for at in range(len(data)):
            await client.send_raw(data[at : at + 1])
            assert await other.ask("PING") == b"+PONG\r\n"  # so the byte has been seen
    assert await client.read(5 + 11 + 7) == b"+OK\r\n$5\r\nvalue\r\n+PONG\r\n"


# ---- the end of a connection -------------------------------------------------------------------------------------


async def test_a_half_closed_client_is_answered_and_then_closed(loop: str, live: LiveServer) -> None:
    value = pattern(5 * MIB)
    client = await live.connect()
    await client.send_raw(request("SET", "k", value) + request("GET", "k") + PING + request("GET", "k")[:-3])
    client.half_close()
    assert await client.read_all() == b"+OK\r\n$%d\r\n%b\r\n+PONG\r\n" % (len(value), value)


@pytest.mark.parametrize("length", [10, 300_000, 900_000, 4 * MIB])
async def test_nothing_after_quit_is_run(loop: str, length: int, live: LiveServer) -> None:
    """However long the reply before QUIT keeps the client busy."""
    value = pattern(length)
    client = await live.connect("tcp", receive_bytes=4096)
    assert await client.ask("SET", "k", value) == b"+OK\r\n"
    await client.send_raw(request("GET", "k") + request("QUIT") + request("SET", "after", "x") + PING)
    assert await client.read_all() == b"$%d\r\n%b\r\n+OK\r\n" % (length, value)
    assert live.store.count() == 1


async def test_a_broken_request_is_named_and_ends_the_connection(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.send_raw(request("SET", "k", "v") + b"*1\r\n:1\r\n" + request("DEL", "k"))
    assert await client.read_all() == b"+OK\r\n-ERR Protocol error: expected '$', got ':'\r\n"
    other = await live.connect()
    assert await other.get("k") == b"v"
    for attack in (
        b"POST / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhOST: localhost\r\n\r\n",
        request("PING") + request("Host:", "x") + request("SET", "k", "of a browser"),
        b"MULTI\r\nPOST / HTTP/1.1\r\n",
    ):
        browser = await live.connect()
        await browser.send_raw(attack)
        assert await browser.read_all() == b"", "as Redis, which answers nothing of what came with it"
    assert await other.get("k") == b"v"
    assert len(live.complaints) == 1, "once a minute, however many there are"
    assert "it speaks HTTP" in live.complaints.pop()


async def test_a_broken_request_behind_a_large_reply_is_named_after_it(loop: str, live: LiveServer) -> None:
    value = pattern(4 * MIB)
    client = await live.connect("tcp", receive_bytes=4096)
    assert await client.ask("SET", "k", value) == b"+OK\r\n"
    await client.send_raw(request("GET", "k") + PING + b"*x\r\n" + PING)
    wanted = b"$%d\r\n%b\r\n+PONG\r\n-ERR Protocol error: invalid multibulk length\r\n" % (len(value), value)
    assert await client.read_all() == wanted


async def test_a_client_that_dies_in_the_middle_of_a_body_leaves_no_trace(loop: str, live: LiveServer) -> None:
    old = pattern(MIB, 1)
    witness = await live.connect()
    assert await witness.ask("SET", "k", old) == b"+OK\r\n"
    used_bytes = live.store.used_bytes
    request_bytes = request("SET", "k", pattern(4 * MIB, 2))
    for cut in (1000, 200_000, len(request_bytes) - 1):
        for end in ("close", "reset"):
            client = await live.connect("tcp")
            await client.send_raw(request_bytes[:cut])
            await until(lambda: live.store.reserved_bytes)
            client.close() if end == "close" else client.reset()
            await until(lambda: len(live.server.sessions) == 1)
            assert live.store.reserved_bytes == 0
            live.store.check_integrity()
            assert live.store.used_bytes == used_bytes
            assert await witness.get("k") == old


# ---- who is let in -----------------------------------------------------------------------------------------------


async def test_a_stranger_is_refused_until_it_has_the_password(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, requirepass="secret") as live:
        client = await live.connect()
        noauth = b"-NOAUTH Authentication required.\r\n"
        assert await client.ask("SET", "k", "v") == noauth
        assert await client.ask("SET", "k", pattern(PAYLOAD_BYTES_MIN)) == noauth
        assert await client.ask("PING") == noauth
        assert await client.ask("AUTH", "wrong") == (
            b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        )
        value = pattern(MIB)
        await client.send_raw(request("AUTH", "secret") + request("SET", "k", value) + request("STRLEN", "k"))
        assert await client.read(5 + 5 + 10) == b"+OK\r\n+OK\r\n:1048576\r\n"
        assert await client.ask("RESET") == b"+RESET\r\n"
        assert await client.ask("GET", "k") == noauth
        assert live.store.count() == 1


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (request("SET", "k", bytes(16385)), b"unauthenticated bulk length"),
        (request("SET", "k", bytes(5 * MIB)), b"unauthenticated bulk length"),
        (request(*["MGET"] * 11), b"unauthenticated multibulk length"),
    ],
)
async def test_a_stranger_cannot_send_much(loop: str, data: bytes, text: bytes, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, requirepass="secret") as live:
        client = await live.connect()
        await client.send_raw(data[:16_000])
        assert await client.read_line() == b"-ERR Protocol error: " + text + b"\r\n"
        assert live.store.reserved_bytes == 0


async def test_clients_beyond_the_limit_are_told_and_closed(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, maxclients=2) as live:
        first, second = await live.connect(), await live.connect("tcp")
        assert await first.ask("PING") == await second.ask("PING") == b"+PONG\r\n"
        for kind in ("unix", "tcp"):
            third = await live.connect(kind)
            assert await third.read_all() == b"-ERR max number of clients reached\r\n"
        assert live.server.stats.connections_rejected == 2
        second.close()
        await until(lambda: len(live.server.sessions) == 1)
        third = await live.connect()
        assert await third.ask("PING") == await first.ask("PING") == b"+PONG\r\n"
