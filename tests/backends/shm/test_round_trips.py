"""How often a load through shared memory speaks with its server, as beside a busy engine a word costs more than a copy,
and what many loads that each ask ahead do to each other."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.resp.wire import Buffer
from kvredis.backends.shm import reader
from kvredis.backends.shm.connection import AttachedConnection
from tests.backends.conftest import small_store, start_server
from tests.backends.verbs import content, keys_of, loaded

from .lane_server import ask, lane_url, store_blocks

MIB = 1 << 20


def test_a_load_that_knows_the_length_of_blocks_asks_once_and_waits_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "TOGETHER_MAX", 5)
    calls: list[str] = []
    send, receive = AttachedConnection.send_buffers, AttachedConnection._receive

    def sending(connection: AttachedConnection, buffers: list[Buffer]) -> None:
        calls.append(f"send {len(buffers)}")
        send(connection, buffers)

    def receiving(connection: AttachedConnection, buffers: list[memoryview], flags: int = 0) -> int:
        calls.append("receive")
        return receive(connection, buffers, flags)

    server, keys = start_server("kvredis", tmp_path), keys_of(12)
    try:
        with closing(RemoteBackend(parse_url(lane_url(server)), small_store())) as backend:
            store_blocks(backend, keys)
            assert loaded(backend, keys) == [content(key) for key in keys]
            monkeypatch.setattr(AttachedConnection, "send_buffers", sending)
            monkeypatch.setattr(AttachedConnection, "_receive", receiving)
            assert loaded(backend, keys) == [content(key) for key in keys]
    finally:
        server.kill()
    assert calls[0] == "send 3", "12 keys in commands of 5"
    assert set(calls[1:]) == {"receive"}
    assert len(calls) <= 4, "the answers come together, or one by one"


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_server_says_whether_leases_may_wait_for_its_disk(
    has_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, attach = [], AttachedConnection.attach

    def noted(connection: AttachedConnection, run_id: str, *, page_lock: bool = False) -> None:
        attach(connection, run_id, page_lock=page_lock)
        found.append(connection.waits_for_disk)

    monkeypatch.setattr(AttachedConnection, "attach", noted)
    disk = ["--local-disk", f"{tmp_path}/disk", "--max-local-disk-size", "64MB"] if has_disk else []
    server = start_server("kvredis", tmp_path, *disk)
    try:
        with closing(RemoteBackend(parse_url(lane_url(server)), small_store())) as backend:
            assert backend.match([b"k"]) == 0
    finally:
        server.kill()
    assert set(found) == {has_disk}


def test_many_loads_from_disk_at_once_do_not_wait_for_each_others_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "TOGETHER_BYTES", MIB)
    loads = [[b"load %d block %d" % (load, number) for number in range(24)] for load in range(14)]
    disk = ["--local-disk", f"{tmp_path}/disk", "--max-local-disk-size", "1GB", "--max-local-cpu-size", "64MB"]
    server = start_server("kvredis", tmp_path, *disk)
    try:
        with ExitStack() as open_, ThreadPoolExecutor(len(loads)) as threads:
            url = parse_url(lane_url(server))
            backends = [open_.enter_context(closing(RemoteBackend(url, small_store(), timeout_s=60.0))) for _ in loads]
            for backend, keys in zip(backends, loads, strict=True):
                store_blocks(backend, keys, MIB)
                loaded(backend, keys[:1])  # the length is known from now on
            ask(server, "SAVE")
            found = list(threads.map(loaded, backends, loads))
            assert [values.count(None) for values in found] == [0] * len(loads)
    finally:
        server.kill()
