"""How many times is a payload in memory? Once: a 32 MiB SET and GET raise the server's peak by less than 2 MiB.

A server process is started with its arena faulted in, so that the arena's share of its memory is constant. After a
warm-up of both commands with smaller values the kernel's high-water mark is set back (`5` into clear_refs, proc(5)),
one command is run, and the mark is compared with what was resident before it. A server with a copy in it, made on
purpose, shows that the measurement would see one.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.feed import request
from tests.server.live import LOOPS, MIB, pattern

LENGTH = 32 * MIB
GROWTH_BYTES_MAX = 2 * MIB
ROUNDS = 3

SERVE = "from kvredis.cli.main import main; main()"
COPYING_SET = "import kvredis.server.client.admission as c; c.Admission.open_payload = lambda *_: None; "
COPYING_GET = (
    "import kvredis.server.commands.strings as s, kvredis.server.protocol.replies as r; "
    "s._lent = lambda session, lease: (session.hold(lease), r.bulk(bytes(lease.view)))[1]; "
)


class Process:
    """A server process: what it says to one client and what the kernel says of its memory."""

    def __init__(self, pid: int, path: str) -> None:
        self._proc = Path(f"/proc/{pid}")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(path)
        self._room = bytearray(LENGTH + 64)

    def exchange(self, data: bytes, reply_bytes: int) -> memoryview:
        """Send a request and read a reply of that length."""
        self._socket.sendall(data)
        view = memoryview(self._room)[:reply_bytes]
        filled = 0
        while filled < reply_bytes:
            received = self._socket.recv_into(view[filled:])
            assert received, bytes(view[:filled][:100])
            filled += received
        return view

    def growth_bytes(self, data: bytes, reply_bytes: int) -> int:
        """How far the process' peak rises above what it held before, while it answers."""
        (self._proc / "clear_refs").write_text("5")
        before = self._status("VmRSS")
        self.exchange(data, reply_bytes)
        return self._status("VmHWM") - before

    def close(self) -> None:
        self._socket.close()

    def _status(self, name: str) -> int:
        lines = (self._proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


@contextmanager
def serving(folder: Path, loop: str, prelude: str = "") -> Iterator[Process]:
    """A server of its own process, ready and warm."""
    path = str(folder / "kvredis.sock")
    flags = ["--port", "0", "--unixsocket", path, "--max-local-cpu-size", "80MB", "--hugepages", "off"]
    with subprocess.Popen(
        [sys.executable, "-c", prelude + SERVE, "serve", *flags, "--prefault", "--no-page-lock"],
        env={**os.environ, "KVREDIS_EVENT_LOOP": loop},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert any("Ready to accept connections" in line for line in process.stdout)
            told = Process(process.pid, path)
            try:
                for length in (100, 20_000, 2 * MIB):
                    for _ in range(20):
                        told.exchange(request("SET", "k", pattern(length)), 5)
                        told.exchange(request("GET", "k"), length + len(b"$%d\r\n\r\n" % length))
                yield told
            finally:
                told.close()
        finally:
            process.terminate()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_large_value_is_in_memory_once(loop: str, tmp_path: Path) -> None:
    value = pattern(LENGTH)
    wanted = b"$%d\r\n%b\r\n" % (LENGTH, value)
    with serving(tmp_path, loop) as server:
        for _ in range(ROUNDS):
            set_growth = server.growth_bytes(request("SET", "k", value), 5)
            get_growth = server.growth_bytes(request("GET", "k"), len(wanted))
            assert server.exchange(request("GET", "k"), len(wanted)) == wanted
            print(f"{loop}: SET {set_growth / 1024:.0f} KiB, GET {get_growth / 1024:.0f} KiB")
            assert set_growth < GROWTH_BYTES_MAX
            assert get_growth < GROWTH_BYTES_MAX


def test_a_copy_would_be_seen(tmp_path: Path) -> None:
    with serving(tmp_path, "uvloop", COPYING_SET) as server:
        assert server.growth_bytes(request("SET", "k", pattern(LENGTH)), 5) > LENGTH
    with serving(tmp_path, "uvloop", COPYING_GET) as server:
        server.exchange(request("SET", "k", pattern(LENGTH)), 5)
        assert server.growth_bytes(request("GET", "k"), LENGTH + 13) > LENGTH
