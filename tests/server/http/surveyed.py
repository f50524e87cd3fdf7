"""A store to be looked at as the page does, and what it then shows."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvredis.server.http.page.survey import Surveys
from kvredis.storage.entry import Entry
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store

MIB = 1024 * 1024
CHUNK = b"kvredis:llama@0123456789abcdef@{0@%s}%s"


@pytest.fixture
def store() -> Iterator[Store]:
    """An empty one whose clock stands still; in the end nothing of it is held."""
    now_ms = 1_700_000_000_000
    store = Store(Arena.create(64 * MIB, HugepageMode.OFF), clock_ms=lambda: now_ms)
    yield store
    assert store.leases == 0
    store.check_integrity()
    store.close()


def entry_of(store: Store, key: bytes, space: int = 0) -> Entry:
    """A block that is there."""
    found = store.index.get(key, space)
    assert found is not None
    return found


def surveyed(store: Store) -> dict[str, Any]:
    """A survey as the page reads it."""
    told: dict[str, Any] = json.loads(asyncio.run(Surveys(store).latest()))
    return told
