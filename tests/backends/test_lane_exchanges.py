"""How often a load through shared memory speaks with its server: beside a busy engine a word costs more than a copy."""

from contextlib import closing
from pathlib import Path

import pytest

from kvredis.backends import lease_lane
from kvredis.backends.address import parse_url
from kvredis.backends.attached import AttachedConnection
from kvredis.backends.remote import RemoteBackend
from kvredis.backends.wire import Buffer

from .conftest import small_store, start_server
from .lane_server import lane_url, store_blocks
from .verbs import content, keys_of, loaded


def test_a_load_that_knows_the_length_of_blocks_asks_once_and_waits_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_lane, "TOGETHER_MAX", 5)
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
