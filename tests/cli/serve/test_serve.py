"""`kvredis serve` as a user or a service manager meets it: what it prints, when it is ready, how it ends."""

import asyncio
import importlib.util
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvredis.cli import serve as serve_module
from kvredis.cli.serve import event_loop_factory, raise_open_files
from kvredis.server.net.listeners import bind_tcp, release, reserve
from kvredis.server.options import ServerOptions
from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.hugepages import HugepagePool
from tests.cli.conftest import EXIT_S, ROOT, Serve

SMALL = ("--port", "0", "--max-local-cpu-size", "16MB", "--hugepages", "off")
COLD = (*SMALL, "--no-prefault", "--no-page-lock")
NR_HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")


def ping(address: str) -> bytes:
    """Send PING to HOST:PORT or a socket path and give the answer."""
    if "/" in address:
        link = socket.socket(socket.AF_UNIX)
        link.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        link = socket.create_connection((host.strip("[]"), int(port)))
    with link:
        link.settimeout(10)
        link.sendall(b"*1\r\n$4\r\nPING\r\n")
        return link.recv(64)


def test_it_says_when_it_is_ready_and_drains_on_sigterm(serve: Serve, tmp_path: Path, loop: str) -> None:
    path = tmp_path / "kv.sock"
    server = serve(*COLD, "--unixsocket", str(path), fresh=True, KVREDIS_EVENT_LOOP=loop)
    addresses = server.wait_ready()
    assert [ping(address) for address in addresses] == [b"+PONG\r\n"] * 2
    server.signal(signal.SIGTERM)
    assert server.finish() == 0, server.stderr
    assert not path.exists()
    assert sum(line.startswith("Ready to accept connections") for line in server.lines) == 1
    assert server.lines[0].startswith("Arena: 0.02 GiB, 4096 pages of 4 KiB (memfd-4KiB), page-locked: no, ")
    assert "unknown" not in server.stderr


def test_ctrl_c_ends_it_as_well(serve: Serve) -> None:
    server = serve(*COLD, fresh=True)
    server.wait_ready()
    server.signal(signal.SIGINT)
    assert server.finish() == 0, server.stderr
    assert "Traceback" not in server.stderr


def test_by_default_the_arena_warms_while_it_serves(serve: Serve) -> None:
    server = serve(*SMALL)
    server.wait_ready()
    assert "page-locked: pending" in server.lines[0]
    assert re.search(r"arena: warm after [\d.]+ s, page-locked: (mlock|no|cuda)", server.wait_log("arena: warm"))


def test_it_serves_without_a_standard_output(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    command = [sys.executable, "-m", "kvredis", "serve", *SMALL, "--unixsocket", path]
    with subprocess.Popen(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            said = ""
            for line in process.stderr:
                said += line
                if "arena: warm" in line:  # which it does not say before it serves
                    break
            else:
                pytest.fail(said)
            assert ping(path) == b"+PONG\r\n"
        finally:
            process.terminate()
        assert process.wait(EXIT_S) == 0


def test_prefault_comes_before_ready_when_it_is_asked_for(serve: Serve) -> None:
    server = serve(*SMALL, "--prefault")
    server.wait_ready()
    assert re.search(r"page-locked: (mlock|no|cuda), ", server.lines[0])
    statm = Path(f"/proc/{server.process.pid}/statm").read_text().split()
    assert int(statm[2]) * 4096 >= 16 * 1024**2, "the shared pages are there"


def test_a_bad_value_is_exit_2_and_names_the_flag(serve: Serve) -> None:
    server = serve("--port", "abc")
    assert server.finish() == 2
    assert server.stderr.startswith("kvredis: --port: ")
    assert "Traceback" not in server.stderr


@pytest.mark.parametrize("size", ["0", "-1"])
def test_a_size_that_is_not_positive_is_refused_even_without_local_cpu(serve: Serve, size: str) -> None:
    server = serve("--port", "0", LMCACHE_MAX_LOCAL_CPU_SIZE=size, LMCACHE_LOCAL_CPU="false")
    assert server.finish() == 2
    assert "max_local_cpu_size" in server.stderr


def test_a_hugepage_shortage_is_exit_1_with_the_public_text(serve: Serve) -> None:
    pages = HugepagePool.read().available + 512
    server = serve("--port", "0", "--max-local-cpu-size", f"{pages * 2}MB", LMCACHE_LOCAL_CPU_USE_HUGEPAGES="true")
    assert server.finish() == 1
    assert re.fullmatch(
        r"kvredis: Failed to allocate huge pages\. Pool has \d+ pages \(\d+ free, each 2 MiB\)\. "
        rf"Requested \d+\.\d\d GiB \({pages} pages\)\. Run: .*nr_hugepages.*\n",
        server.stderr,
    )


def test_more_memory_than_the_machine_has_is_exit_1_and_names_the_limit(serve: Serve) -> None:
    server = serve("--port", "0", "--max-local-cpu-size", "100TB")
    assert server.finish() == 1
    assert "but MemAvailable is " in server.stderr


def test_hugepages_are_what_the_kernel_shows_of_the_server(serve: Serve) -> None:
    pool = HugepagePool.read()
    try:
        NR_HUGEPAGES.write_text(str(pool.pages_to_set(8)))
    except OSError as error:
        pytest.skip(f"hugepages: the pool cannot be grown here ({error})")
    try:
        if HugepagePool.read().available < 8:
            pytest.skip("hugepages: the kernel has no contiguous memory for the pool")
        server = serve("--port", "0", "--max-local-cpu-size", "16MB", "--hugepages", "require")
        server.wait_ready()
        assert "8 pages of 2 MiB (hugetlb-2MiB)" in server.lines[0]
        mapping = Path(f"/proc/{server.process.pid}/smaps").read_text().partition("kvredis-arena")[2]
        assert re.search(r"KernelPageSize: +(\d+) kB", mapping) is not None
        assert re.findall(r"KernelPageSize: +(\d+) kB", mapping)[0] == "2048"
        server.signal(signal.SIGTERM)
        assert server.finish() == 0
    finally:
        NR_HUGEPAGES.write_text(str(pool.total - pool.surplus))


def test_an_address_in_use_is_exit_1_and_leaves_the_other_servers_socket(serve: Serve, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = serve(*COLD, "--port", str(other.getsockname()[1]))
        assert server.finish() == 1
        assert "cannot listen" in server.stderr
        assert "Traceback" not in server.stderr


def test_addresses_are_bound_before_memory_is_taken(serve: Serve, tmp_path: Path) -> None:
    """100 TB would be refused as well, and is not asked for."""
    path = str(tmp_path / "kv.sock")
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(path)
        theirs.listen()
        for flags in (("--port", str(other.getsockname()[1])), ("--port", "none", "--unixsocket", path)):
            server = serve(*flags, "--max-local-cpu-size", "100TB")
            assert server.finish() == 1
            assert "cannot listen" in server.stderr
            assert "MemAvailable" not in server.stderr
        assert os.path.exists(path)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("none/kv.sock", "No such file or directory"),
        ("file/kv.sock", "Not a directory"),
        ("k" * 110, "path too long: it may have 107 bytes"),
        ("file", "exists and is not a socket"),
    ],
)
def test_a_socket_that_cannot_be_made_is_told_before_memory_is_taken(
    serve: Serve, tmp_path: Path, place: str, problem: str
) -> None:
    (tmp_path / "file").touch()
    server = serve("--port", "none", "--unixsocket", str(tmp_path / place), "--max-local-cpu-size", "100TB")
    assert server.finish() == 1
    assert "cannot listen: " in server.stderr
    assert problem in server.stderr


def test_a_reserved_address_is_no_other_servers_and_refuses_clients_until_it_listens(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ServerOptions(bind=("127.0.0.1", "-::1"), port=port, unixsocket=str(tmp_path / "kv.sock"))
    reserved = reserve(options)
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            reserve(options)
        with pytest.raises(OSError, match="Address already in use"):
            bind_tcp("127.0.0.1", port)
        assert not (tmp_path / "kv.sock").exists()
        listener = bind_tcp("127.0.0.1", port, reserved.pop(("127.0.0.1", port)))
        assert listener is not None
        with listener, socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
    finally:
        release(reserved)
    release(reserve(options))  # although a connection lingers there


def test_the_memory_that_will_be_taken_is_said_with_the_key_that_asked_for_it(serve: Serve) -> None:
    server = serve(*COLD)
    server.wait_ready()
    server.signal(signal.SIGTERM)
    assert server.finish() == 0
    assert server.lines[0].endswith("; it takes all of this memory (max_local_cpu_size: --max-local-cpu-size)")


def test_the_server_never_loads_torch_or_numpy(serve: Serve) -> None:
    server = serve(*COLD, fresh=True)
    server.wait_ready()
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps


def test_event_loops_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert event_loop_factory("asyncio") is asyncio.new_event_loop
    assert event_loop_factory("uvloop").__module__.startswith("uvloop")
    assert event_loop_factory("") is event_loop_factory("uvloop")
    with pytest.raises(ConfigError, match="want asyncio or uvloop"):
        event_loop_factory("trio")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert event_loop_factory("") is asyncio.new_event_loop


class FakeLimits:
    """The open-files limit of another process."""

    RLIMIT_NOFILE = resource.RLIMIT_NOFILE
    RLIM_INFINITY = resource.RLIM_INFINITY

    def __init__(self, soft: int, hard: int) -> None:
        self.limits = (soft, hard)

    def getrlimit(self, which: int) -> tuple[int, int]:
        return self.limits

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        self.limits = limits


UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "clients", "soft_after"),
    [
        (1024, 4096, 900, 1024),
        (1024, 4096, 1000, 1032),
        (1024, 20000, 10000, 10032),
        (1024, UNLIMITED, 10000, 10032),
        (UNLIMITED, UNLIMITED, 10000, UNLIMITED),
    ],
)
def test_the_open_files_limit_is_raised_as_far_as_it_must(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, clients: int, soft_after: int
) -> None:
    limits = FakeLimits(soft, hard)
    monkeypatch.setattr(serve_module, "resource", limits)
    assert raise_open_files(clients) == clients
    assert limits.limits == (soft_after, hard)


def test_fewer_clients_than_asked_for_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve_module, "resource", FakeLimits(1024, 4096))
    assert raise_open_files(10000) == 4096 - 32
    assert "maxclients is 4064 instead of 10000" in caplog.text
