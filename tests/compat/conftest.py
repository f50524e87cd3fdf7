"""Two servers that the same words are said to: Debian's redis-server and ours, each in its own process."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.compat.vllm_process import VLLMProcess, site
from tests.compat.wire import Wire
from tests.fork_server import Forked

SERVE = "from kvredis.cli.main import main; main()"
STOP_S = 30


@dataclass(frozen=True)
class RunningServer:
    """Where a server listens."""

    unixsocket: str
    port: int

    def connect(self) -> Wire:
        """A raw connection."""
        return Wire(self.unixsocket)


def start_kvredis(folder: Path, *flags: str) -> tuple[subprocess.Popen[str], RunningServer]:
    """Start `kvredis serve` on a free port and a socket in `folder`, and wait until it says that it is ready. However
    many processors there are, one thread sends: with more of them HELLO says what Redis does not."""
    path = str(folder / "kvredis.sock")
    common = ("--port", "0", "--unixsocket", path, "--max-local-cpu-size", "64MB", "--hugepages", "off")
    flags = (*common, "--no-prefault", "--io-threads", "1", *flags)
    process = Forked(
        [sys.executable, "-c", SERVE, "serve", *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "Ready to accept connections" in line:
            ports = [word.rpartition(":")[2].strip(",") for word in line.split() if word.startswith("127.0.0.1:")]
            return process, RunningServer(path, int(ports[0]))
    raise RuntimeError(f"kvredis ended with {process.wait()} before it was ready")


def stop(process: subprocess.Popen[str]) -> None:
    """End a server that this test started."""
    process.terminate()
    try:
        process.wait(STOP_S)
    finally:
        process.kill()
        if process.stdout is not None:
            process.stdout.close()
        process.wait()


@pytest.fixture(scope="session")
def kvredis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    process, server = start_kvredis(tmp_path_factory.mktemp("kvredis"))
    yield server
    stop(process)


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (apt install redis-server)")
    folder = tmp_path_factory.mktemp("redis")
    path = folder / "redis.sock"
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder),
         "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert any("ready to accept connections" in line for line in process.stdout), "redis-server ended at its start"
    yield RunningServer(str(path), 0)
    stop(process)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    """vLLM in a process that the files of ONE_PROCESS (tests/conftest.py) share: each test opens an engine of its own
    in it."""
    process = VLLMProcess(site(), tmp_path_factory.mktemp("vllm") / "log")
    yield process
    process.stop()


def _emptied(server: RunningServer) -> RunningServer:
    with server.connect() as wire:
        wire.ask("FLUSHALL")
    return server


@pytest.fixture
def kvredis(kvredis_process: RunningServer) -> RunningServer:
    """Our server, empty."""
    return _emptied(kvredis_process)


@pytest.fixture
def redis_server(redis_process: RunningServer) -> RunningServer:
    """Debian's redis-server, empty."""
    return _emptied(redis_process)
