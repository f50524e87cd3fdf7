"""The pyzmq peer holds what it is given and gives back what is asked for, over every transport of zmq."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvredis.bench.core.errors import BenchError
from kvredis.bench.transport.pyzmq import ZmqClient, ZmqProcess, missing

COUNT, SIZE = 6, 100_000


@pytest.fixture(params=["tcp", "ipc"])
def client(request: pytest.FixtureRequest) -> Iterator[ZmqClient]:
    with ExitStack() as stack:
        yield stack.enter_context(stack.enter_context(ZmqProcess(COUNT, SIZE)).connect(request.param))


def values(salt: int) -> list[memoryview]:
    return [memoryview(bytes([salt + index]) * SIZE) for index in range(COUNT)]


def places() -> list[memoryview]:
    return [memoryview(bytearray(SIZE)) for _ in range(COUNT)]


def test_every_way_of_storing_is_read_back(client: ZmqClient) -> None:
    ids = list(range(COUNT))
    for salt, deferred in enumerate((False, True)):
        client.set(ids, values(10 * salt), deferred=deferred)
        client.drain()
        out = places()
        client.stream(ids[::-1], out)
        assert out == values(10 * salt)[::-1]


def test_a_block_of_another_size_is_an_error(client: ZmqClient) -> None:
    client.set(list(range(COUNT)), values(1), deferred=False)
    with pytest.raises(BenchError, match="pyzmq"):
        client.stream([0], [memoryview(bytearray(SIZE - 1))])


def test_the_process_and_its_folder_are_gone_after_the_block() -> None:
    assert missing() is None
    with ZmqProcess(COUNT, SIZE) as peer:
        assert peer.cpu_s() > 0
        process, folder = peer._process, peer._socket_folder
        assert process is not None
        assert os.path.isdir(folder.name)
    assert process.returncode == 0
    assert not os.path.exists(folder.name)


def test_an_interrupt_while_the_peer_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(peer: ZmqProcess, within_s: float | None = None) -> None:
        pids.append(peer.pid)
        raise KeyboardInterrupt

    pids: list[int] = []
    monkeypatch.setattr(ZmqProcess, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt), ZmqProcess(COUNT, SIZE):
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
