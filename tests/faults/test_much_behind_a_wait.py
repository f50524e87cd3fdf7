"""Clients that die in WAIT with more sent behind it than the sockets hold, so that their end comes behind all that."""

import socket
from pathlib import Path

import pytest

from kvredis.server import context as context_module
from kvredis.server import server as server_module
from tests.server.feed import request
from tests.server.live import LiveServer, until


def fill(link: socket.socket) -> int:
    """Send PINGs until no socket holds another one; how many bytes that were."""
    pings, sent = request("PING") * 10_000, 0
    try:
        while True:
            sent += link.send(memoryview(pings)[sent % len(pings) :])
    except BlockingIOError:
        return sent


async def test_a_client_that_dies_in_wait_is_let_go_however_much_it_has_sent_behind_it(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "TURNS_IN_A_SECOND", 1)

    async with LiveServer(tmp_path) as live:
        with socket.create_connection(("127.0.0.1", live.server.tcp_port)) as link:
            link.setblocking(False)
            link.sendall(request("WAIT", "1", "0"))
            await until(lambda: live.server.blocked.timeouts)
            assert fill(link) > 100_000
        await until(lambda: not live.sessions())
        assert not live.server.blocked.timeouts


async def test_what_is_behind_a_wait_is_read_on_within_a_bound_and_answered_when_that_is_over(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "TURNS_IN_A_SECOND", 1)
    monkeypatch.setattr(context_module, "READ_ON_BYTES_MAX", 64 * 1024)

    async with LiveServer(tmp_path) as live:
        client, keeper = await live.connect("tcp"), await live.connect()
        number = (await client.ask("CLIENT", "ID"))[1:-2]
        await client.send("WAIT", "1", "0")
        await until(lambda: live.server.blocked.timeouts)
        session = live.server.sessions[int(number)]
        await client.send_raw(request("SET", "k", bytes(100_000)) + request("ECHO", "last"))
        await until(lambda: session.pending_bytes == 64 * 1024)
        assert await keeper.ask("CLIENT", "UNBLOCK", number) == b":1\r\n"
        assert await client.read_line() == b":0\r\n"
        assert await client.read_line() == b"+OK\r\n"
        assert await client.read_bulk() == b"last"
        assert await keeper.get("k") == bytes(100_000)
