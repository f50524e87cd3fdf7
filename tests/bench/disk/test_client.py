"""The client of the disk's arms tells values apart, takes a miss for what it is, and stops at any other answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvredis.backends.config.url import Address
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.servers import child_environment
from kvredis.bench.disk.clients import BlockClient, Values
from tests.bench.fake_server import FakeStore, serve

SIZE = 64 * 1024
COUNT = 4


class Listening:
    """The fake store behind a unix socket; `store` may be told to be wrong."""

    def __init__(self, path: Path) -> None:
        self.store = FakeStore()
        self.address = Address(host="", port=0, path=str(path))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(sock, self.store), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Listening]:
    listening = Listening(tmp_path / "s.sock")
    yield listening
    listening.close()


@pytest.fixture
def client(server: Listening) -> Iterator[BlockClient]:
    with BlockClient(server.address, Values(SIZE, COUNT, seed=1)) as client:
        yield client


def test_what_was_stored_comes_back_and_is_compared(client: BlockClient) -> None:
    for index in range(COUNT):
        client.store(index, 7)
    for index in range(COUNT):
        client.values.wipe()
        assert client.load(index) is not None
        assert client.values.check(index, 7, "it") == SIZE


def test_a_miss_is_a_miss_and_no_error(client: BlockClient) -> None:
    assert client.load(2) is None
    client.store(2)
    assert client.load(2) is not None


@pytest.mark.parametrize(("stored", "asked", "shift"), [(0, 0, 1), (1, 2, 0), (3, 0, 0)])
def test_a_value_of_another_key_or_pass_is_noticed(client: BlockClient, stored: int, asked: int, shift: int) -> None:
    client.store(stored)
    client.load(stored)
    with pytest.raises(VerificationError, match="it returned a wrong byte"):
        client.values.check(asked, shift, "it")


def test_one_wrong_byte_is_noticed(server: Listening, client: BlockClient) -> None:
    server.store.fault = "flips a byte"
    client.store(1)
    client.load(1)
    with pytest.raises(VerificationError):
        client.values.check(1, 0, "it")


@pytest.mark.parametrize("fault", ["cuts a value", "refuses"])
def test_a_value_of_another_length_or_a_refusal_stops_the_bench(
    server: Listening, client: BlockClient, fault: str
) -> None:
    server.store.fault = fault
    client.store(1)
    with pytest.raises(BenchError, match="GET of 65536 bytes was answered"):
        client.load(1)


def test_a_server_that_cannot_save_or_prefetch_stops_the_bench(client: BlockClient) -> None:
    with pytest.raises(BenchError, match="WAITAOF was answered None"):
        client.save()
    with pytest.raises(BenchError, match=r"KV\.PREFETCH was answered None"):
        client.prefetch([1, 2])


def test_no_two_keys_and_no_two_passes_hold_the_same() -> None:
    values = Values(SIZE, COUNT, seed=1)
    assert len({bytes(values.value(index)) for index in range(COUNT)}) == COUNT
    assert len({bytes(values.value(1, shift)) for shift in range(COUNT)}) == COUNT


def moved(server: Listening) -> subprocess.CompletedProcess[str]:
    """Run the mover for as long as it takes to store every key once and to be told to stop."""
    return subprocess.run(
        [sys.executable, "-m", "kvredis.bench.disk.clients", str(server.address), str(SIZE), str(COUNT)],
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        env=child_environment(os.environ),
        check=False,
    )


def test_the_mover_stores_until_it_is_told_to_stop_and_compares_everything(server: Listening) -> None:
    done = moved(server)
    ready, stopped, said = done.stdout.splitlines()
    assert (ready, stopped, done.returncode) == ('{"said": "ready"}', '{"said": "stopped"}', 0)
    figures = json.loads(said)
    assert figures["missing"] == 0
    assert figures["verified_bytes"] == COUNT * SIZE
    assert figures["bytes"] % SIZE == 0


def test_the_mover_fails_at_a_wrong_byte(server: Listening) -> None:
    server.store.fault = "flips a byte"
    done = moved(server)
    assert done.returncode == 1
    assert "returned a wrong byte" in done.stderr
