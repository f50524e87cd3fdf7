"""`kvredis serve` with a disk tier: what it says of it, what it refuses, and that blocks are there again afterwards."""

import re
import signal
import socket
import sqlite3
from pathlib import Path

import pytest

from tests.cli.conftest import Serve, ServeProcess
from tests.server.feed import request

COLD = ("--port", "none", "--max-local-cpu-size", "16MB", "--hugepages", "off", "--no-prefault", "--no-page-lock")
VALUE = bytes(range(256)) * 256
"""64 KiB: one that lies in the arena."""


def with_disk(directory: Path, *more: str) -> tuple[str, ...]:
    """Flags for a cold, small server with a disk tier, on a socket beside its directory."""
    socket_path = str(directory.parent / "kv.sock")
    disk = ("--local-disk", str(directory), "--max-local-disk-size", "64MB")
    return (*COLD, "--unixsocket", socket_path, *disk, *more)


def connect(directory: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(str(directory.parent / "kv.sock"))
    return client


def ask(client: socket.socket, *words: str | bytes, length: int = 5) -> bytes:
    """Send a command and give the first `length` bytes of what comes."""
    client.sendall(request(*words))
    data = b""
    while len(data) < length and (piece := client.recv(length - len(data))):
        data += piece
    return data


def fill(directory: Path, *keys: str) -> None:
    with connect(directory) as client:
        for key in keys:
            assert ask(client, "SET", key, VALUE) == b"+OK\r\n"


def end(server: ServeProcess) -> None:
    server.signal(signal.SIGTERM)
    assert server.finish() == 0, server.stderr
    assert "Traceback" not in server.stderr


def disk_line(server: ServeProcess) -> str:
    (line,) = [line for line in server.lines if line.startswith("Disk tier: ")]
    return line


def test_what_was_stored_is_there_at_the_next_start(serve: Serve, tmp_path: Path, loop: str) -> None:
    directory = tmp_path / "disk"
    first = serve(*with_disk(directory), KVREDIS_EVENT_LOOP=loop)
    first.wait_ready()
    assert ", 0 blocks (0.00 GiB) recovered, " in disk_line(first)
    fill(directory, "a", "b", "c")
    end(first)
    assert "Disk tier: saving 3 blocks (0.00 GiB)" in first.stderr
    second = serve(*with_disk(directory), KVREDIS_EVENT_LOOP=loop)
    second.wait_ready()
    assert ", 3 blocks (0.00 GiB) recovered, " in disk_line(second)
    reply = b"$65536\r\n" + VALUE + b"\r\n"
    with connect(directory) as client:
        assert ask(client, "GET", "b", length=len(reply)) == reply
    end(second)


def test_the_line_comes_behind_the_arenas_and_says_where_how_much_and_how(serve: Serve, tmp_path: Path) -> None:
    server = serve(*with_disk(tmp_path / "disk", "--no-disk-direct", "--max-local-disk-size", "1GB"))
    server.wait_ready()
    assert server.lines[0].startswith("Arena: 0.02 GiB, ")
    shown = re.escape(str(tmp_path / "disk"))
    assert re.fullmatch(
        rf"Disk tier: {shown}, 1\.00 GiB in segments of \d+\.\d\d GiB, buffered: O_DIRECT was not asked for, "
        r"0 blocks \(0\.00 GiB\) recovered, \d+\.\d{3} s",
        server.lines[1],
    )
    assert server.lines[2].startswith("Ready to accept connections")
    end(server)


def test_o_direct_is_said_where_it_can_be_had_and_else_why_not(serve: Serve, tmp_path: Path) -> None:
    server = serve(*with_disk(tmp_path / "disk"))
    server.wait_ready()
    assert re.search(r" GiB, (O_DIRECT|buffered: \S+ refuses O_DIRECT: .+), 0 blocks ", disk_line(server))


@pytest.mark.parametrize("half", [("--local-disk", "disk"), ("--max-local-disk-size", "1GB")])
def test_half_of_its_keys_is_a_warning_and_no_disk_tier(serve: Serve, tmp_path: Path, half: tuple[str, str]) -> None:
    flag, value = half
    if flag == "--local-disk":
        value = str(tmp_path / value)
    server = serve(*COLD, "--unixsocket", str(tmp_path / "kv.sock"), flag, value)
    server.wait_ready()
    assert [line for line in server.lines if "Disk tier" in line] == []
    end(server)
    assert server.stderr.count("there is no disk tier without") == 1
    assert not (tmp_path / "disk").exists()


def test_a_server_that_would_keep_nothing_is_refused(serve: Serve) -> None:
    for server in (serve(*COLD, "--no-local-cpu"), serve(*COLD, LMCACHE_LOCAL_CPU="false")):
        assert server.finish() == 2
        assert re.match(
            r"kvredis: (--local-cpu|env LMCACHE_LOCAL_CPU): local_cpu: a server without a disk tier keeps nothing",
            server.stderr,
        )
        assert server.lines == []


def test_an_arena_that_keeps_nothing_is_taken_with_a_disk_tier(serve: Serve, tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    server = serve(*with_disk(directory, "--no-local-cpu"))
    server.wait_ready()
    fill(directory, "a", "b")
    end(server)
    again = serve(*with_disk(directory))
    again.wait_ready()
    assert ", 2 blocks (0.00 GiB) recovered, " in disk_line(again)


def refused(server: ServeProcess, key: str, told: str) -> None:
    """It ends with status 2 and one line that begins with source and key, and has got as far as nothing."""
    assert server.finish() == 2, server.stderr
    assert re.match(rf"kvredis: --{key.replace('_', '-')}: {key}: .*{told}", server.stderr.splitlines()[-1])
    assert "Traceback" not in server.stderr
    assert server.lines == []


def test_a_directory_that_another_server_has_open_is_refused(serve: Serve, tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    first = serve(*with_disk(directory))
    first.wait_ready()
    fill(directory, "a")
    flags = ("--local-disk", str(directory), "--max-local-disk-size", "64MB")
    refused(serve(*COLD, "--unixsocket", str(tmp_path / "2.sock"), *flags), "local_disk", "another server has it open")
    end(first)


def test_a_directory_that_cannot_be_made_is_refused(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flags = ("--local-disk", str(tmp_path / "file/disk"), "--max-local-disk-size", "64MB")
    server = serve(*COLD, "--unixsocket", str(tmp_path / "kv.sock"), *flags)
    refused(server, "local_disk", "cannot be used: Not a directory")


def test_a_directory_of_a_newer_kvredis_is_refused_and_names_the_line_of_the_file(serve: Serve, tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    first = serve(*with_disk(directory))
    first.wait_ready()
    end(first)
    index = sqlite3.connect(directory / "index.sqlite", isolation_level=None)
    index.execute("PRAGMA user_version=99")
    index.close()
    file = tmp_path / "kv.yaml"
    file.write_text(f"max_local_disk_size: 64MB\nlocal_disk: {directory}\n")
    server = serve(*COLD, "--unixsocket", str(tmp_path / "kv.sock"), "--config-file", str(file))
    assert server.finish() == 2
    assert f"kvredis: {file}:2: local_disk: it was written in format 99, by a newer kvredis" in server.stderr


def test_a_size_that_holds_nothing_names_its_own_flag(serve: Serve, tmp_path: Path) -> None:
    server = serve(*with_disk(tmp_path / "disk", "--max-local-disk-size", "100b"))
    refused(server, "max_local_disk_size", "hold nothing")


def test_shutdown_nosave_leaves_what_the_disk_has_not_got(serve: Serve, tmp_path: Path, loop: str) -> None:
    directory = tmp_path / "disk"
    first = serve(*with_disk(directory), KVREDIS_EVENT_LOOP=loop)
    first.wait_ready()
    fill(directory, "a", "b")
    with connect(directory) as client:
        assert ask(client, "SHUTDOWN", "NOSAVE") == b""
    assert first.finish() == 0, first.stderr
    assert "saving" not in first.stderr
    second = serve(*with_disk(directory), KVREDIS_EVENT_LOOP=loop)
    second.wait_ready()
    assert ", 0 blocks (0.00 GiB) recovered, " in disk_line(second)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once_while_it_is_being_saved(
    serve: Serve, tmp_path: Path, loop: str, second: signal.Signals
) -> None:
    directory = tmp_path / "disk"
    server = serve(*with_disk(directory), program="tests.cli.stuck_disk", KVREDIS_EVENT_LOOP=loop)
    server.wait_ready()
    fill(directory, "a")
    server.signal(signal.SIGTERM)
    server.wait_log("Disk tier: saving 1 blocks")
    server.signal(second)
    assert server.process.wait(5) == 1
    assert not (tmp_path / "kv.sock").exists()
    again = serve(*with_disk(directory))
    again.wait_ready()
    assert ", 0 blocks (0.00 GiB) recovered, " in disk_line(again)
