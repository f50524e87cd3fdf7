"""What tests of the same-host lane ask of a server and of this process."""

import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.shm import connection, leases
from tests.backends.conftest import ServerProcess
from tests.backends.verbs import BLOCK, content, put_through


def lane_url(server: ServerProcess) -> str:
    """Its TCP address, for who would rather share memory."""
    return server.tcp_url.replace("redis://", "kvredis://")


def lane_path(server: ServerProcess) -> str:
    """The same by its unix socket, which stays when it is started anew."""
    return server.url.replace("unix://", "kvredis://")


def ask(server: ServerProcess, *words: str | int) -> Any:
    """Ask the server over TCP, as a client that does not use shared memory."""
    with closing(redis.Redis.from_url(server.tcp_url, decode_responses=True, protocol=2)) as client:
        return client.execute_command(*words)  # type: ignore[no-untyped-call]


def lane_figures(server: ServerProcess) -> tuple[int, int]:
    """The server's attached clients, and their leases."""
    tiers = ask(server, "KV.TIERS")
    found = tiers["memory"] if isinstance(tiers, dict) else dict(zip(tiers[::2], tiers[1::2], strict=True))["memory"]
    memory = found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
    return int(memory["lane_clients"]), int(memory["lane_leases"])


def attached_ids(server: ServerProcess) -> list[int]:
    """The ids of the connections that are attached."""
    clients = ask(server, "CLIENT", "LIST")
    rows = (
        clients
        if isinstance(clients, list)
        else [dict(word.partition("=")[::2] for word in line.split()) for line in clients.splitlines()]
    )
    return [int(row["id"]) for row in rows if row["lane"] == "attached"]


def mapped() -> int:
    """How many arenas of others this process has mapped: shared, and to be read alone."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("kvredis-arena" in line and " r--s " in line for line in lines)


def store_blocks(backend: RemoteBackend, keys: list[bytes], length: int = BLOCK) -> None:
    """Store a block of its own bytes under each key."""
    for key in keys:
        assert put_through(backend, key, content(key, length))


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let leases be so much older, as we count."""
    for module in (connection, leases):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))
