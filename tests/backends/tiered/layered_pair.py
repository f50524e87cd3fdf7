"""A layered backend with a small near memory before a server of the test's choice, and prompts stored as engines do."""

import time
from collections.abc import Callable
from pathlib import Path

from kvredis.backends.config.url import parse_url
from kvredis.backends.local import LocalBackend
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.tiered.backend import LayeredBackend
from kvredis.backends.tiered.staging import NearStaging
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.entry import PAYLOAD_OFFSET_BYTES, SLACK_BYTES
from tests.backends.conftest import small_store
from tests.backends.verbs import content, put

LENGTH = 64 * 1024 - PAYLOAD_OFFSET_BYTES - SLACK_BYTES
"""Of a block; 16 fill a MiB."""


def open_layered(
    url: str,
    *,
    blocks: int = 64,
    disk: Path | None = None,
    keep: bool = True,
    timeout_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
) -> LayeredBackend:
    """Near memory of so many blocks, perhaps over 16 MiB of `disk`, before the server at `url`."""
    store = small_store(blocks * 64 * 1024)
    if disk is not None:
        tier = DiskTier.open(DiskOptions(disk, 16 << 20, direct=False, segment_bytes=1 << 20))
        store.add_disk(tier, io_threads=2, spill_wait_s=20.0, keep=keep)
    near = LocalBackend(store, keep=keep, load_wait_s=timeout_s)
    staging = NearStaging(near, timeout_s)
    far = RemoteBackend(parse_url(url), staging, timeout_s=timeout_s, keep=True, clock=clock)
    return LayeredBackend(near, far, staging)


def store_prompt(backend: LayeredBackend, keys: list[bytes]) -> int:
    """Store what is missing of a prompt as CacheEngine does: as many blocks at a time as there is room for, from the
    head on, each time tail first behind a touch of the head. Returns how many were taken."""
    head = taken = backend.match(keys)
    while head < len(keys) and (room := backend.room(LENGTH)):
        stop = head + min(room, len(keys) - head)
        for key in reversed(keys[head:stop]):
            backend.touch(keys[:head])
            taken += put(backend, key, content(key, LENGTH))
        backend.touch(keys[:stop])
        head = stop
    return taken


def store_through(backend: LayeredBackend, keys: list[bytes]) -> None:
    """Store a prompt as it grows, a few blocks at a time, and wait each time until the server has them."""
    for start in range(0, len(keys), 4):
        assert store_prompt(backend, keys[: start + 4]) == len(keys[: start + 4])
        assert backend.flush() == 0


def near_keys(backend: LayeredBackend, keys: list[bytes]) -> list[bytes]:
    """Those of `keys` that are in near memory or on its disk."""
    return [key for key in keys if backend.near.store.find(key) is not None]


def forget_near(backend: LayeredBackend, keys: list[bytes]) -> None:
    """Have blocks leave near as eviction does, unseen by the backend."""
    assert backend.near.store.delete(keys) == len(keys)


def figures(backend: LayeredBackend, *names: str) -> tuple[int | float | str, ...]:
    """Some of its stats."""
    stats = backend.stats()
    return tuple(stats[name] for name in names)
