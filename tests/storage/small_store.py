"""A store over a few MiB whose clocks the test moves, and values whose bytes tell where they belong."""

import random
from typing import Any, Final, NoReturn

from kvredis.storage.entry import PAYLOAD_OFFSET_BYTES, SLACK_BYTES, Lease
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store

BLOCK_BYTES: Final = 64 * 1024 - PAYLOAD_OFFSET_BYTES - SLACK_BYTES
"""The longest value whose extent is 64 KiB."""
ARENA_BYTES: Final = 1024 * 1024
BLOCKS: Final = 16
"""How many values of BLOCK_BYTES fill ARENA_BYTES."""

_NOISE: Final = random.Random(7).randbytes(8 * 1024 * 1024)


class Clock:
    """Both clocks of a store; they stand still until the test moves them."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def seconds(self) -> float:
        """The monotonic one."""
        return self.now_s

    def ms(self) -> int:
        """The wall clock."""
        return int(self.now_s * 1000)


def small_store(clock: Clock | None = None, nbytes: int = ARENA_BYTES) -> Store:
    """An empty store of `nbytes`; with `clock` it lives by that."""
    arena = Arena.create(nbytes, HugepageMode.OFF)
    return Store(arena) if clock is None else Store(arena, clock_ms=clock.ms, clock_s=clock.seconds)


def content(number: int, length: int = BLOCK_BYTES) -> bytes:
    """Bytes that belong to this number and no other below 4000; up to 4 MiB."""
    start = number % 4000 * 1031
    return _NOISE[start : start + length]


def fill(store: Store, prefix: bytes = b"fill:", count: int = BLOCKS) -> list[bytes]:
    """Put `count` blocks, number by number, and give their keys."""
    keys = [prefix + b"%d" % number for number in range(count)]
    for number, key in enumerate(keys):
        assert store.put(key, content(number))
    return keys


def present(store: Store, keys: list[bytes]) -> list[bytes]:
    """Those of `keys` that are there, without touching any."""
    return [key for key in keys if store.find(key) is not None]


def keys_in(store: Store, space: int = 0) -> list[bytes]:
    """Every key of a database, in their order as bytes."""
    cursor, keys = store.scan(0, 1000, space)
    while cursor:
        cursor, more = store.scan(cursor, 1000, space)
        keys += more
    return sorted(keys)


def read(store: Store, key: bytes, space: int = 0) -> bytes | None:
    """A copy of what a GET would send."""
    found = store.fetch(key, space)
    if not isinstance(found, Lease):
        return found
    with found as lease:
        return bytes(lease.view)


class Unwalked(dict[Any, Any]):
    """A dict for what may look keys up, and not go through all of them."""

    def _walked(self) -> NoReturn:
        raise AssertionError("a walk over every key")

    __iter__ = keys = values = items = _walked
