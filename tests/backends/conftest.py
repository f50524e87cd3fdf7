"""Servers as processes of their own, ours and Debian's Redis, ended with the test whatever happens in it."""

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from kvredis.backends.config.url import parse_url
from kvredis.backends.remote import health
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.fork_server import Forked
from tests.server.certificates import make_papers

from .fake_server import FakeServer, Shelf
from .topologies import KvredisCluster, RedisCluster, Sentinels

ROOT = Path(__file__).parents[2]
EXIT_S = 30
"""A bound on what must end by itself; none of it takes a second."""


class ServerProcess:
    """One server on a unix socket in `folder`; it can be killed and started again in the same place."""

    def __init__(
        self, kind: str, folder: Path, args: tuple[str, ...] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self._env = dict(env or {})
        self.url = f"unix://{folder}/socket"
        self.tcp_url = ""
        self.tls_address = ""
        if kind == "redis":
            command = ["redis-server", "--port", "0", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        else:
            command = [sys.executable, "-m", "kvredis", "serve", "--port", "0", "--hugepages", "off"]
            command += ["--max-local-cpu-size", "128MB", "--no-prefault"]  # to touch it takes as long as to start
        self._command = [*command, "--unixsocket", f"{folder}/socket", *args]
        self._socket = folder / "socket"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start, and wait until it says that it is ready."""
        self._process = Forked(
            self._command,
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", **self._env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            if "ready to accept connections" in line.lower():
                if self.kind == "kvredis":
                    addresses = line.split(" on ")[1].strip().split(", ")
                    self.tcp_url = f"redis://{addresses[0]}"
                    self.tls_address = "".join(each[4:] for each in addresses if each.startswith("tls:"))
                return
        raise AssertionError(f"{self.kind} ended before it was ready: {said}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it without a goodbye."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate(timeout=EXIT_S)
            self._socket.unlink(missing_ok=True)


StartServer = Callable[..., ServerProcess]


def start_server(kind: str, folder: Path, *args: str, env: Mapping[str, str] | None = None) -> ServerProcess:
    if kind == "redis" and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = ServerProcess(kind, folder, args, env)
    server.start()
    return server


@pytest.fixture(scope="module")
def kvredis_server() -> Iterator[ServerProcess]:
    """A kvredis that the tests of a file share."""
    with tempfile.TemporaryDirectory() as folder:
        server = start_server("kvredis", Path(folder))
        yield server
        server.kill()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[ServerProcess]:
    """Debian's Redis, shared by the tests of a file."""
    with tempfile.TemporaryDirectory() as folder:
        server = start_server("redis", Path(folder))
        yield server
        server.kill()


@pytest.fixture(scope="module")
def tls_url() -> Iterator[str]:
    """A kvredis with TLS, and with threads that only plain sockets have, shared by the tests of a file."""
    with tempfile.TemporaryDirectory() as folder:
        papers = make_papers(Path(folder))
        options = ["--tls-port", "free", "--tls-auth-clients", "no", "--tls-ca-cert-file", papers.path("ca")]
        options += ["--tls-cert-file", papers.path("server"), "--tls-key-file", papers.path("server_key")]
        options += ["--io-threads", "4"]
        server = start_server("kvredis", Path(folder), *options)
        yield f"rediss://{server.tls_address}?ssl_ca_certs={papers.path('ca')}"
        server.kill()


@pytest.fixture(scope="module")
def sentinels_url() -> Iterator[str]:
    """Debian's Redis behind Sentinels, shared by the tests of a file."""
    with Sentinels() as sentinels:
        yield sentinels.url


@pytest.fixture(scope="module")
def redis_cluster_url() -> Iterator[str]:
    """Three nodes of Debian's Redis, shared by the tests of a file."""
    with RedisCluster() as cluster:
        yield cluster.url


@pytest.fixture(scope="module")
def kvredis_cluster_url() -> Iterator[str]:
    """Three kvredis nodes behind the Redis Cluster protocol, shared by the tests of a file."""
    with KvredisCluster() as cluster:
        yield cluster.url


@pytest.fixture
def server_of() -> Iterator[StartServer]:
    """Starts servers of a test's own: server_of("kvredis" or "redis", *arguments)."""
    servers: list[ServerProcess] = []
    with tempfile.TemporaryDirectory() as folder:

        def start(kind: str, *args: str) -> ServerProcess:
            place = Path(folder) / str(len(servers))
            place.mkdir()
            servers.append(start_server(kind, place, *args))
            return servers[-1]

        yield start
        for server in servers:
            server.kill()


def small_store(nbytes: int = 32 << 20) -> Store:
    """A store for staging or for a local backend, of ordinary pages."""
    return Store(Arena.create(nbytes, HugepageMode.OFF))


def small_disk(directory: Path, nbytes: int = 64 << 20) -> DiskTier:
    """A disk tier to put below a store, in segments of 4 MiB."""
    return DiskTier.open(DiskOptions(directory, nbytes, direct=False, segment_bytes=4 << 20))


class Clock:
    """Time that passes when the test says so."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The remote backend's clock. Who sets it forward sees what the next attempt comes to, however slow the machine."""
    monkeypatch.setattr(health, "RETRY_WAIT_S", EXIT_S)
    return Clock()


@pytest.fixture
def store() -> Store:
    """What a backend under test keeps its blocks in, or stages them in; it closes it."""
    return small_store()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeServer]:
    """A scripted server."""
    server = FakeServer(tmp_path)
    yield server
    server.close()


Connect = Callable[..., RemoteBackend]


@pytest.fixture
def connect(store: Store, clock: Clock) -> Iterator[Connect]:
    """Makes the remote backend under test: connect(url, timeout_s=...)."""
    made: list[RemoteBackend] = []

    def make(url: str, timeout_s: float = 5.0) -> RemoteBackend:
        made.append(RemoteBackend(parse_url(url), store, timeout_s=timeout_s, clock=clock))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def shelf(fake: FakeServer, connect: Connect) -> Iterator[Shelf]:
    """What the fake server answers with; it takes SETs when the test says so, and before the backends are closed."""
    fake.answer = shelf = Shelf()
    shelf.open.clear()
    yield shelf
    shelf.open.set()
