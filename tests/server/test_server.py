"""The server around its sessions: addresses and their files, whom it admits, what happens by the clock, the end."""

import asyncio
import gc
import os
import socket
import weakref
from pathlib import Path
from typing import cast

import pytest

from kvredis.server.client.session import Session
from kvredis.server.context import MAX_CLIENTS_REACHED, PROTECTED
from kvredis.server.server import Server, ServerOptions
from tests.server.fake_session import FakeSession, make_server
from tests.server.feed import request
from tests.server.lane_client import attached
from tests.server.live import MIB, LiveServer, pattern, run_on, until


class Newcomer(FakeSession):
    """A client from a given address that has not been admitted yet."""

    def __init__(self, server: Server, addr: str) -> None:
        number = len(server.sessions) + 1
        super().__init__(server, number)
        del server.sessions[number]
        self.addr = addr


def admit(server: Server, addr: str) -> bytes | None:
    return server.admit(cast(Session, Newcomer(server, addr)))


# ---- admission ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "addr", ["127.0.0.1:5", "127.9.9.9:65535", "[::1]:1", "[::ffff:127.0.0.1]:77", "/run/s:0", "s:0"]
)
def test_local_clients_need_no_password(addr: str) -> None:
    server = make_server()
    assert admit(server, addr) is None
    assert len(server.sessions) == 1


@pytest.mark.parametrize("addr", ["10.0.0.1:50000", "10.0.0.1:7", "1.127.0.1:10", "[2001:db8::1]:80", "[fe80::1]:5"])
def test_distant_clients_need_a_password_to_be_set(addr: str) -> None:
    server = make_server()
    assert admit(server, addr) == PROTECTED
    assert PROTECTED.startswith(b"-DENIED Redis is running in protected mode")
    assert PROTECTED.count(b"\r\n") == 1
    assert server.sessions == {}
    assert server.stats.connections_rejected == 1
    assert admit(make_server("secret"), addr) is None


def test_a_full_server_says_so() -> None:
    server = make_server()
    server.maxclients = 1
    assert admit(server, "127.0.0.1:5") is None
    assert admit(server, "127.0.0.1:6") == MAX_CLIENTS_REACHED
    assert (server.stats.connections_received, server.stats.connections_rejected) == (2, 1)


# ---- addresses ---------------------------------------------------------------------------------------------------


async def test_the_socket_file_goes_when_the_server_does(loop: str, tmp_path: Path) -> None:
    path = tmp_path / "kvredis.sock"
    async with LiveServer(tmp_path) as live:
        assert path.is_socket()
        assert live.server.addresses == [f"127.0.0.1:{live.server.tcp_port}", f"unix:{path}"]
    assert not path.exists()
    async with LiveServer(tmp_path) as live:
        await live.server.stop()  # and a second time at the end
        assert not path.exists()


async def test_a_file_left_by_a_crash_is_taken_over(loop: str, tmp_path: Path) -> None:
    path = tmp_path / "kvredis.sock"
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))

    async with LiveServer(tmp_path) as live:
        assert await (await live.connect()).ask("PING") == b"+PONG\r\n"


async def test_another_servers_socket_is_left_alone(loop: str, live: LiveServer) -> None:
    late = Server(live.store, ServerOptions(port=0, unixsocket=live.server.unixsocket))
    with pytest.raises(OSError, match="is in use by another server"):
        await late.start()
    await late.stop()
    assert late.listeners.addresses == []
    assert await (await live.connect()).ask("PING") == b"+PONG\r\n"


async def test_a_socket_that_has_replaced_ours_is_left_alone(loop: str, tmp_path: Path, live: LiveServer) -> None:
    os.unlink(str(live.server.unixsocket))
    newer = Server(live.store, ServerOptions(port=-1, unixsocket=live.server.unixsocket))
    await newer.start()
    await live.server.stop()
    assert (tmp_path / "kvredis.sock").is_socket()
    await newer.stop()
    assert not (tmp_path / "kvredis.sock").exists()


def test_a_file_that_is_no_socket_is_left_alone(loop: str, tmp_path: Path) -> None:
    path = tmp_path / "kvredis.sock"
    path.write_text("precious")

    async def story() -> None:
        server = Server(make_server().store, ServerOptions(port=0, unixsocket=str(path)))
        with pytest.raises(OSError, match="not a socket"):
            await server.start()
        await server.stop()

    run_on(loop, story())
    assert path.read_text() == "precious"


async def test_a_port_in_use_is_an_error_and_nothing_stays_bound(loop: str, tmp_path: Path, live: LiveServer) -> None:
    path = tmp_path / "late.sock"
    late = Server(live.store, ServerOptions(port=live.server.tcp_port, unixsocket=str(path)))
    with pytest.raises(OSError, match=r"(?i)in use"):
        await late.start()
    assert not path.exists()


async def test_every_address_gets_the_same_free_port(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, bind=("127.0.0.1", "127.0.0.2")) as live:
        port = live.server.tcp_port
        assert live.server.addresses[:2] == [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]


# ---- the clock ---------------------------------------------------------------------------------------------------


async def test_what_expires_is_gone_without_a_read(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    assert await client.ask("SET", "small", "v", "PX", "1000") == b"+OK\r\n"
    assert await client.ask("SET", "large", pattern(MIB), "EX", "1") == b"+OK\r\n"
    assert await client.ask("SET", "later", "v", "EX", "2") == b"+OK\r\n"
    assert await client.ask("PTTL", "small") == b":1000\r\n"
    live.clock_ms += 999
    assert await client.ask("EXISTS", "small", "large", "later") == b":3\r\n"
    live.clock_ms += 1
    await until(lambda: live.store.count() == 1)
    assert live.store.stats.expired == 2
    assert live.store.allocator.free_bytes == live.store.arena.nbytes


async def test_a_lease_of_an_expired_value_lasts_until_it_is_sent(loop: str, live: LiveServer) -> None:
    value = pattern(8 * MIB)
    client = await live.connect("tcp", receive_bytes=4096)
    assert await client.ask("SET", "k", value, "EX", "1") == b"+OK\r\n"
    await client.send("GET", "k")
    await client.read(10)
    live.clock_ms += 5000
    await until(lambda: live.store.count() == 0)
    assert (await client.read(len(value) + 2))[:-2] == value
    assert await client.get("k") is None


# ---- the end -----------------------------------------------------------------------------------------------------


async def test_stopping_lets_replies_go_out_and_then_hangs_up(loop: str, live: LiveServer) -> None:
    value = pattern(4 * MIB)
    reader = await live.connect("tcp", receive_bytes=4096)
    idle = await live.connect()
    assert await reader.ask("SET", "k", value) == b"+OK\r\n"
    await reader.send_raw(request("GET", "k") + request("SET", "after", "x"))
    await reader.read(10)
    stopping = asyncio.ensure_future(live.server.stop())
    assert await idle.read_all() == b""
    assert await reader.read_all() == value + b"\r\n"
    await stopping
    assert live.server.sessions == {}
    assert live.store.count() == 1


async def test_stopping_does_not_wait_for_a_client_that_reads_nothing(loop: str, live: LiveServer) -> None:
    reader = await live.connect("tcp", receive_bytes=4096)
    assert await reader.ask("SET", "k", pattern(8 * MIB)) == b"+OK\r\n"
    await reader.send("GET", "k")
    writer = await live.connect()
    await writer.send_raw(request("SET", "half", pattern(MIB))[:500_000])
    await until(lambda: live.store.leases and live.store.reserved_bytes)
    live.server.drain_s = 0.1
    await live.server.stop()
    assert live.server.sessions == {}
    assert (live.store.leases, live.store.reserved_bytes) == (0, 0)


def test_a_session_that_has_ended_is_freed_without_the_collector(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            client = await live.connect()
            assert await client.ask("SET", "k", bytes(MIB)) == b"+OK\r\n"
            ended = weakref.ref(live.sessions()[0])
            client.close()
            await until(lambda: ended() is None)

    gc.disable()
    try:
        run_on(loop, story())
    finally:
        gc.enable()


def test_a_session_that_was_attached_and_reserved_is_freed_so_too(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live, attached(live) as client:
            assert await client.ask("KV.RESERVE", "k", 100_000) == 1
            ended = weakref.ref(live.sessions()[0])
            client.close()
            await until(lambda: ended() is None)

    gc.disable()
    try:
        run_on(loop, story())
    finally:
        gc.enable()


async def test_refused_calls_and_failed_ones_are_counted_apart(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    for words in (("GET",), ("GET", "k"), ("EXPIRE", "k", "x"), ("NOSUCH",), ("CLIENT", "NO-TOUCH", "x")):
        await client.ask(*words)
    counted = {
        name: (each.calls, each.rejected_calls, each.failed_calls) for name, each in live.server.stats.commands.items()
    }
    assert counted == {"get": (1, 1, 0), "expire": (1, 0, 1), "client|no-touch": (1, 0, 1)}
    assert live.server.stats.error_replies == 4
