"""`kvredis serve` with a metrics port: where it says that it is, what is answered from the first moment to the last."""

import asyncio
import errno
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvredis.cli.startup_probes import StartingDoor
from kvredis.server.options import ServerOptions
from kvredis.storage.errors import KVRedisError
from tests.cli.conftest import EXIT_S, Serve, ServeProcess

SMALL = ("--port", "none", "--max-local-cpu-size", "16MB", "--hugepages", "off", "--no-prefault", "--no-page-lock")


def metrics_url(server: ServeProcess) -> str:
    (line,) = [line for line in server.lines if line.startswith("Metrics on ")]
    return line.removeprefix("Metrics on ")


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of one GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def end(server: ServeProcess) -> None:
    server.signal(signal.SIGTERM)
    assert server.finish() == 0, server.stderr
    assert "Traceback" not in server.stderr


def test_a_free_port_is_told_before_the_server_is_ready(serve: Serve, tmp_path: Path, loop: str) -> None:
    flags = (*SMALL, "--unixsocket", str(tmp_path / "kv.sock"), "--metrics-port", "free")
    server = serve(*flags, KVREDIS_EVENT_LOOP=loop)
    server.wait_ready()
    port = int(metrics_url(server).rstrip("/").rpartition(":")[2])
    assert metrics_url(server) == f"http://127.0.0.1:{port}/"
    status, body = get(port, "/health")
    assert (status, json.loads(body)["status"]) == (200, "ok")
    assert f'event_loop="{loop}"' in get(port, "/metrics")[1]
    assert "<html" in get(port, "/")[1]
    end(server)


def test_without_the_key_there_is_no_http(serve: Serve, tmp_path: Path) -> None:
    server = serve(*SMALL, "--unixsocket", str(tmp_path / "kv.sock"))
    server.wait_ready()
    assert not [line for line in server.lines if "etrics" in line]
    end(server)


def test_a_metrics_port_that_is_taken_stops_the_start_at_once(serve: Serve, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        disk = ("--local-disk", str(tmp_path / "disk"), "--max-local-disk-size", "64MB")
        flags = (*SMALL, "--unixsocket", str(tmp_path / "kv.sock"), *disk, "--metrics-port", str(port))
        server = serve(*flags)
        assert server.finish() == 1
    assert f"cannot listen: 127.0.0.1:{port}: Address already in use" in server.stderr
    assert not os.path.exists(tmp_path / "disk"), "what could not be kept was not begun"
    assert not os.path.exists(tmp_path / "kv.sock")


def test_a_starting_http_without_a_loop_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_files(main: Coroutine[Any, Any, None]) -> None:
        main.close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio, "run", out_of_files)
    with pytest.raises(KVRedisError, match="Too many open files"), StartingDoor(ServerOptions(metrics_port=1)):
        raise AssertionError("it is not open")


def test_a_starting_http_that_fails_while_the_server_starts_is_told_of_and_does_not_stop_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        def open(self) -> None:
            pass

        async def close(self) -> None:
            raise ZeroDivisionError

    door = StartingDoor(ServerOptions(metrics_port=1))
    door._http = Broken()  # type: ignore[assignment]
    with door:
        loop = door._loop
        assert loop is not None
        loop.call_soon_threadsafe(door._ended.set)
        door._thread.join(EXIT_S)
    assert caplog.messages == ["the metrics port answers no longer while the server starts"]


@pytest.mark.parametrize("value", ["-2", "65536", "many"])
def test_a_port_that_is_none_is_refused(serve: Serve, value: str) -> None:
    server = serve(*SMALL, "--metrics-port", value)
    assert server.finish() == 2
    assert "metrics_port" in server.stderr
    assert value in server.stderr


def first_answer(port: int, path: str) -> tuple[int, str]:
    """The first answer of a port that is about to be opened."""
    deadline_s = time.monotonic() + EXIT_S
    while True:
        try:
            return get(port, path)
        except ConnectionError:
            assert time.monotonic() < deadline_s, "no client has come"
            time.sleep(0.01)  # between two tries; what is waited for is the answer


def test_while_the_disk_tier_is_recovered_health_says_that_the_server_starts(serve: Serve, tmp_path: Path) -> None:
    gate, port = tmp_path / "gate", free_port()
    os.mkfifo(gate)
    disk = ("--local-disk", str(tmp_path / "disk"), "--max-local-disk-size", "64MB")
    flags = (*SMALL, "--unixsocket", str(tmp_path / "kv.sock"), *disk, "--metrics-port", str(port))
    server = serve(*flags, program="tests.cli.serve.slow_start", KVREDIS_TEST_GATE=str(gate))
    status, body = first_answer(port, "/health")
    assert (status, json.loads(body)["status"]) == (503, "unavailable")
    assert "starting" in json.loads(body)["reason"]
    paths = ("/health/ready", "/health/live", "/metrics", "/", "/api/state", "/api/arena", "/api/keys", "/none")
    assert [get(port, path)[0] for path in paths] == [503, 200, 503, 503, 503, 503, 503, 404]
    with open(gate, "wb"):
        pass
    server.wait_ready()
    assert first_answer(port, "/health")[0] == 200
    assert metrics_url(server) == f"http://127.0.0.1:{port}/"
    end(server)
