"""How `kvredis serve` ends: transfers that are under way come to their end, and the status says that all went well."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Serve, ServeProcess
from tests.server.feed import request
from tests.server.live import MIB, pattern

ROOMY = ("--port", "none", "--max-local-cpu-size", "256MB", "--hugepages", "off", "--no-prefault", "--no-page-lock")
LENGTH = 64 * MIB


def start(serve: Serve, folder: Path, loop: str) -> tuple[ServeProcess, str]:
    path = str(folder / "kv.sock")
    server = serve(*ROOMY, "--unixsocket", path, KVREDIS_EVENT_LOOP=loop)
    server.wait_ready()
    return server, path


def connect(path: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(path)
    return client


def read_all(client: socket.socket, length: int | None = None) -> bytes:
    """So many bytes, or what comes until the server hangs up."""
    data = bytearray()
    while length is None or len(data) < length:
        piece = client.recv(MIB if length is None else min(MIB, length - len(data)))
        if not piece:
            break
        data += piece
    return bytes(data)


def wait_for_hang_up(client: socket.socket) -> None:
    """An idle client is hung up on at once: the server has seen the signal."""
    assert read_all(client) == b""
    client.close()


def test_a_value_that_is_half_sent_at_sigterm_is_taken_whole(serve: Serve, tmp_path: Path, loop: str) -> None:
    server, path = start(serve, tmp_path, loop)
    words = request("SET", "k", pattern(LENGTH))
    with connect(path) as writer, connect(path) as other:
        writer.sendall(words[: LENGTH // 2])
        other.sendall(b"PING\r\n")
        assert other.recv(100) == b"+PONG\r\n"
        server.signal(signal.SIGTERM)
        wait_for_hang_up(other)
        assert not Path(path).exists(), "no new client is let in"
        writer.sendall(words[LENGTH // 2 :])
        assert read_all(writer) == b"+OK\r\n"
    assert server.finish() == 0, server.stderr


def test_a_value_that_is_half_read_at_sigterm_is_sent_whole(serve: Serve, tmp_path: Path, loop: str) -> None:
    server, path = start(serve, tmp_path, loop)
    value = pattern(LENGTH)
    with connect(path) as reader, connect(path) as other:
        reader.sendall(request("SET", "k", value))
        assert reader.recv(100) == b"+OK\r\n"
        reader.sendall(b"GET k\r\n")
        head = read_all(reader, 11)
        server.signal(signal.SIGTERM)
        wait_for_hang_up(other)
        assert head + read_all(reader) == b"$67108864\r\n" + value + b"\r\n"
    assert server.finish() == 0, server.stderr


def test_a_second_signal_ends_it_at_once_and_leaves_no_socket_file(serve: Serve, tmp_path: Path, loop: str) -> None:
    server, path = start(serve, tmp_path, loop)
    with connect(path) as writer, connect(path) as other:
        writer.sendall(request("SET", "k", pattern(LENGTH))[: LENGTH // 2])
        server.signal(signal.SIGTERM)
        wait_for_hang_up(other)
        server.signal(signal.SIGTERM)
        assert server.process.wait(5) == 1
    assert not Path(path).exists()


def test_shutdown_ends_it_as_sigterm_does(serve: Serve, tmp_path: Path, loop: str) -> None:
    server, path = start(serve, tmp_path, loop)
    words = request("SET", "k", pattern(LENGTH))
    with connect(path) as writer, connect(path) as other:
        writer.sendall(words[: LENGTH // 2])
        other.sendall(b"SHUTDOWN NOSAVE\r\n")
        wait_for_hang_up(other)
        writer.sendall(words[LENGTH // 2 :])
        assert read_all(writer) == b"+OK\r\n"
    assert server.finish() == 0, server.stderr
    assert "Traceback" not in server.stderr


STOPPED_AS_IT_LISTENS = """
import os, sys
from kvredis.cli.main import main
from kvredis.server.server import Server
number, start = int(sys.argv.pop()), Server.start
async def start_and_signal(server):
    await start(server)
    os.kill(os.getpid(), number)
Server.start = start_and_signal
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_before_the_server_has_said_that_it_is_ready_ends_it_in_order(
    number: signal.Signals, tmp_path: Path, loop: str
) -> None:
    path = tmp_path / "kv.sock"
    words = ["serve", *ROOMY, "--unixsocket", str(path), str(int(number))]
    env = os.environ | {"KVREDIS_EVENT_LOOP": loop}
    command = [sys.executable, "-c", STOPPED_AS_IT_LISTENS, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Aborted" in done.stderr) == (0, False), done.stderr
    assert not path.exists()
