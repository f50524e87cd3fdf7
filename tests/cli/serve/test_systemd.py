"""What a service manager hears of `kvredis serve`: in which order, how often, and that it may always be deaf."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvredis.cli.systemd import more_time_while, notify
from tests.cli.conftest import Serve
from tests.server.feed import request

COLD = ("--port", "0", "--max-local-cpu-size", "64MB", "--hugepages", "off", "--no-prefault", "--no-page-lock")
HEAR_S = 30


class ServiceManager:
    """The socket that a service manager gives to a process, and the lines that came over it."""

    def __init__(self, path: str) -> None:
        self.address = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path.replace("@", "\0", 1) if path.startswith("@") else path)

    def message(self, wait_s: float = HEAR_S) -> list[str]:
        """The lines of the next message. TimeoutError when none comes."""
        self._socket.settimeout(wait_s)
        return self._socket.recv(4096).decode().split("\n")

    def lines_until(self, wanted: str) -> list[str]:
        """All lines up to the message that has this one, and the rest of that."""
        lines: list[str] = []
        while wanted not in lines:
            lines += self.message()
        return lines

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    one = ServiceManager(str(tmp_path / "notify"))
    yield one
    one.close()


def test_it_is_told_what_happens_in_the_order_in_which_it_does(
    serve: Serve, manager: ServiceManager, tmp_path: Path
) -> None:
    disk = ("--local-disk", str(tmp_path / "disk"), "--max-local-disk-size", "1GB")
    server = serve(*COLD, *disk, NOTIFY_SOCKET=manager.address)
    (address,) = server.wait_ready()
    assert manager.lines_until("READY=1") == [
        "STATUS=Opening an arena of 0.06 GiB",
        f"STATUS=Opening the disk tier {tmp_path}/disk",
        "READY=1",
        f"STATUS=Serving on {address}",
    ]
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), HEAR_S) as client:
        client.sendall(request("SET", "k", b"v" * 1_000_000))
        assert client.recv(16) == b"+OK\r\n"
    server.signal(signal.SIGTERM)
    assert manager.message()[0] == "STOPPING=1"
    saving = manager.message()
    assert saving == ["STATUS=Saving to disk: 1 blocks left", "EXTEND_TIMEOUT_USEC=30000000"]
    assert server.finish() == 0


def test_a_server_that_need_not_save_asks_for_no_time(serve: Serve, manager: ServiceManager) -> None:
    server = serve(*COLD, NOTIFY_SOCKET=manager.address)
    server.wait_ready()
    manager.lines_until("READY=1")
    server.signal(signal.SIGTERM)
    assert server.finish() == 0
    assert manager.message() == ["STOPPING=1", "STATUS=Letting transfers under way come to their end"]
    server = serve(*COLD, NOTIFY_SOCKET=manager.address)
    server.wait_ready()
    assert manager.message() == ["STATUS=Opening an arena of 0.06 GiB"], "nothing came in between"


def test_a_watchdog_is_fed_by_the_loop_and_starves_when_the_loop_stands(serve: Serve, manager: ServiceManager) -> None:
    server = serve(*COLD, NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="200000")
    server.wait_ready()
    manager.lines_until("READY=1")
    assert [manager.message() for _ in range(3)] == [["WATCHDOG=1"]] * 3
    server.signal(signal.SIGSTOP)
    state = Path(f"/proc/{server.process.pid}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "T":
        assert server.process.poll() is None
    with contextlib.suppress(TimeoutError):
        while True:  # what it had sent before it stood
            assert manager.message(wait_s=0.5) == ["WATCHDOG=1"]
    server.signal(signal.SIGCONT)
    assert manager.message() == ["WATCHDOG=1"]


def test_another_process_watchdog_is_none_of_ours(serve: Serve, manager: ServiceManager) -> None:
    server = serve(*COLD, NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="1000", WATCHDOG_PID="1")
    server.wait_ready()
    manager.lines_until("READY=1")
    server.signal(signal.SIGTERM)
    assert manager.message()[0] == "STOPPING=1"
    assert server.finish() == 0


def test_more_time_is_asked_for_only_while_blocks_leave(
    manager: ServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    counts = iter([3, 3, 2, 2, 1])
    asked, enough = threading.Event(), threading.Event()

    def left() -> int:
        count = next(counts, 0)
        if not count:
            enough.set()
            asked.wait()
        return count

    with more_time_while(left, every_s=0.001):  # 3 is asked for here, before anything is told
        assert enough.wait(HEAR_S)
        asked.set()
    more = "EXTEND_TIMEOUT_USEC=30000000"
    told = [manager.message() for _ in range(4)]
    assert [(int(lines[0].split()[3]), more in lines) for lines in told] == [
        (3, True),
        (2, True),
        (2, False),
        (1, True),
    ]


def test_a_manager_that_never_reads_does_not_hold_the_server_up(
    manager: ServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    queue = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())

    def tell() -> None:
        for _ in range(queue + 8):
            notify("WATCHDOG=1", wait_s=0)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    telling.join(HEAR_S)
    assert not telling.is_alive()
    notify("READY=1", wait_s=0.001)
    assert manager.message() == ["WATCHDOG=1"]


def test_an_abstract_socket_is_understood_and_a_missing_one_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = ServiceManager(f"@kvredis-test-{os.getpid()}")
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    notify("READY=1", "STATUS=here")
    assert manager.message() == ["READY=1", "STATUS=here"]
    manager.close()
    notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")
