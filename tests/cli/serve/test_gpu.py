"""`kvredis serve --gpu-memory`, with a library in libcuda's place: what it says, and what is left when it is killed."""

import json
import re
import signal
import socket
from pathlib import Path
from typing import Any, Self

import hiredis
import pytest

from kvredis.backends.config.schema import Config
from kvredis.cli.doctor.gpu import gpu
from kvredis.storage.errors import ConfigError
from kvredis.storage.memory import cuda
from kvredis.storage.memory.device_arena import DeviceArena
from tests.cli.conftest import Serve, ServeProcess
from tests.cli.inspected import SMALL
from tests.server.feed import request
from tests.stand_in_cuda import stand_in_cuda

MIB = 1024 * 1024
VALUE = bytes(range(256)) * 1024


def started(serve: Serve, folder: Path, *args: str, **env: str) -> ServeProcess:
    """A server with 64 MB of the second GPU's memory."""
    where = ("--port", "none", "--unixsocket", str(folder / "s"))
    env = {cuda.LIBRARY_VARIABLE: str(stand_in_cuda()), **env}
    server = serve(*SMALL, *where, "--gpu-memory", "64MB,1", *args, **env)
    server.wait_ready()
    return server


class Attached:
    """A connection that has been given the GPU's memory, which it maps."""

    def __init__(self, folder: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(str(folder / "s"))
        self.reader = hiredis.Reader()
        self.sock.sendall(request("KV.ATTACH", "GPU"))
        data, descriptors, *_ = socket.recv_fds(self.sock, 65536, 4)
        self.reader.feed(data)
        reply: Any = self.reader.gets()
        self.facts = dict(zip(reply[::2], reply[1::2], strict=True))
        self.gpu = DeviceArena.attach(descriptors[2], self.facts[b"gpu-bytes"], 0)
        for fd in descriptors:
            socket.close(fd)

    def ask(self, *words: Any) -> Any:
        """One command's reply."""
        self.sock.sendall(request(*(str(word) if isinstance(word, int) else word for word in words)))
        while (reply := self.reader.gets()) is False:
            self.reader.feed(self.sock.recv(MIB))
        return reply

    def put(self, key: str) -> int:
        """Store VALUE on the GPU; where it lies."""
        number, address = self.ask("KV.RESERVE", key, len(VALUE), "GPU")
        offset = int(address) - int(self.facts[b"gpu-base"])
        self.gpu.write(offset, VALUE)
        assert self.ask("KV.COMMIT", number) == b"OK"
        return offset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.gpu.close()
        self.sock.close()


@pytest.fixture
def client_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, str(stand_in_cuda()))


@pytest.mark.usefixtures("client_library")
def test_the_server_says_what_it_has_taken_and_serves_it(serve: Serve, tmp_path: Path) -> None:
    server = started(serve, tmp_path)
    (line,) = [line for line in server.lines if line.startswith("GPU memory: ")]
    assert re.fullmatch(r"GPU memory: 0\.06 GiB of GPU 1 \(GPU-1011\S+\), \d+\.\d{3} s", line)
    with Attached(tmp_path) as client:
        client.put("k")
        assert client.ask("GET", "k") == VALUE
    server.signal(signal.SIGTERM)
    assert server.finish() == 0


@pytest.mark.usefixtures("client_library")
def test_what_a_client_has_mapped_outlives_a_server_that_is_killed(serve: Serve, tmp_path: Path) -> None:
    server = started(serve, tmp_path)
    with Attached(tmp_path) as client:
        offset = client.put("k")
        server.signal(signal.SIGKILL)
        assert server.finish() == -signal.SIGKILL
        found = bytearray(len(VALUE))
        client.gpu.read(offset, found)
        assert found == VALUE
        assert client.sock.recv(1) == b""


@pytest.mark.usefixtures("client_library")
def test_what_is_on_the_gpu_is_saved_at_the_end_and_there_at_the_next_start(serve: Serve, tmp_path: Path) -> None:
    disk = ("--local-disk", str(tmp_path / "disk"), "--max-local-disk-size", "64MB")
    server = started(serve, tmp_path, *disk)
    with Attached(tmp_path) as client:
        client.put("k")
    server.signal(signal.SIGTERM)
    assert server.finish() == 0
    started(serve, tmp_path, *disk)
    with Attached(tmp_path) as client:
        assert client.ask("GET", "k") == VALUE


@pytest.mark.parametrize(
    ("env", "args", "said"),
    [
        ({cuda.LIBRARY_VARIABLE: "/nowhere/libcuda.so"}, (), "no CUDA driver (/nowhere/libcuda.so)"),
        ({"STAND_IN_CUDA_DEVICES": "1"}, (), "no GPU 1: this process sees 1"),
        ({"STAND_IN_CUDA_BYTES": "1000000"}, (), "GPU 1 has 0.00 GiB of 0.00 GiB free, 0.06 GiB are wanted"),
        ({}, ("--lane", "off"), "since no client can be given it (lane: off)"),
    ],
    ids=["no driver", "no device", "no memory", "no lane"],
)
def test_without_one_it_is_off_with_one_line_and_the_server_serves(
    serve: Serve, tmp_path: Path, env: dict[str, str], args: tuple[str, ...], said: str
) -> None:
    server = started(serve, tmp_path, *args, **env)
    assert f"GPU memory: off, {said}" in server.lines
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / "s"))
        sock.sendall(request("KV.TIERS"))
        assert b"gpu" not in sock.recv(65536)


def test_none_of_it_is_told_the_word_for_none() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory: want SIZE or SIZE,DEVICE: .*; off for none \(got '0'\)"):
        Config.load(env={"KVREDIS_GPU_MEMORY": "0"}, server=True)


@pytest.mark.parametrize("text", ["0", "20GB,first", "20GB,0,1", "lots", "yes"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="gpu_memory"):
        Config.load(env={"KVREDIS_GPU_MEMORY": text}, server=True)


@pytest.mark.parametrize(
    ("text", "found"), [("20GB", (20 << 30, 0)), ("0.5,3", (1 << 29, 3)), ("none", None), ("512MB, 1", (1 << 29, 1))]
)
def test_size_and_device_are_read(text: str, found: tuple[int, int] | None) -> None:
    assert Config.load(env={"KVREDIS_GPU_MEMORY": text}, server=True).gpu == found
    assert json.dumps(Config.load(env={"KVREDIS_GPU_MEMORY": text}, server=True).shown())


@pytest.mark.usefixtures("client_library")
def test_doctor_says_whether_there_is_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    enough, too_much = (Config.load(env={"KVREDIS_GPU_MEMORY": text}, server=True) for text in ("1GB,1", "2GB"))
    finding = gpu(enough)[0][-1]
    assert (finding.name, finding.ok) == ("GPU memory", True)
    assert (
        finding.found == "1.00 GiB of 1.00 GiB free on GPU-10111213-1415-1617-1819-1a1b1c1d1e1f, shared by descriptors"
    )
    finding = gpu(too_much)[0][-1]
    assert (finding.ok, finding.needed) == (False, "2.00 GiB of GPU 0")
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, "/nowhere/libcuda.so")
    assert gpu(enough)[0][-1].found == "no CUDA driver (/nowhere/libcuda.so)"
