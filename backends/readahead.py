"""One load over a store: blocks come from its disk ahead of the reader, within bounds of memory and of time.

WHY the reading ahead: a prompt that is on disk alone has dozens of blocks, and an engine takes one at a time. Asked for
singly each would cost the engine the disk's full delay; so the next ones are always on their way, and held when they
have come. What is held takes room, and the engine holds leases too, so the holds end before another goes without.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvredis.storage.entry import Lease, extent_length
from kvredis.storage.store import Store
from kvredis.storage.tiering.manager import Tiering

ROOM_LOOK_S: Final = 0.05
"""How often a store that waits for room looks again, though it was not told of any."""
AHEAD_PART: Final = 4
"""A quarter of the arena may be read ahead of a load, and one block always."""
AHEAD_BLOCKS_MAX: Final = 32
"""Enough that no thread of the disk waits for the next."""


class Waits:
    """What one load may still wait in all, shared by all who wait on its behalf; None: each has his own bound."""

    def __init__(self, within_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.left_s = math.inf if within_s is None else within_s
        self._clock = clock

    @property
    def within_s(self) -> float | None:
        """What is left, as Backend.load takes it."""
        return None if math.isinf(self.left_s) else self.left_s

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Take the time spent in here from what is left."""
        began_s = self._clock()
        try:
            yield
        finally:
            self.left_s = max(self.left_s - (self._clock() - began_s), 0.0)


class _Coming:
    """One block that was away when it was sent for: on its way, then held until `release`."""

    def __init__(self, tiering: Tiering, key: bytes, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._over = threading.Event()
        self._bringing = tiering.bring([(key, 0)], lambda _: self._over.set())
        if self._bringing is None:  # it has come a moment ago
            self._over.set()

    def wait(self, timeout_s: float) -> bool:
        """Block until it is there or cannot be had; False when the time is up."""
        return self._over.wait(timeout_s)

    def release(self) -> None:
        """End the hold; one that has not begun is not brought."""
        if self._bringing is not None:
            self._bringing.release()


class ReadAhead:
    """For one thread: `take` the turns in order, some of them or all, then `drop` what was not taken."""

    def __init__(self, store: Store, keys: Sequence[bytes], waits: Waits, wait_s: float) -> None:
        """The load waits `wait_s` in vain for the disk, once, if `waits` have that much left."""
        self.came = False
        """Whether the block that was taken last has come from the disk for this load."""
        self._store = store
        self._keys = keys
        self._waits = waits
        self._wait_s = wait_s  # 0 once the disk has let us wait in vain
        self._room_wait_s = 0.0 if store.tiering is None else store.tiering.spill_wait_s  # the same for room
        self._next = 0  # the first turn that was not looked at
        self._coming: deque[tuple[int, _Coming]] = deque()  # each with its turn, in order
        self._coming_bytes = 0

    def expects(self, turn: int) -> bool:
        """Say whether there is a block for a turn, and it is worth waiting for."""
        entry = self._store.find(self._keys[turn])
        return entry is not None and (entry.is_resident or self._patience_s > 0)

    def take(self, turn: int) -> Lease | None:
        """Send for some of the blocks that follow, and wait for the one of this turn."""
        key, tiering, self.came = self._keys[turn], self._store.tiering, False
        if tiering is None:
            return self._store.lease(key)
        self._look_ahead(tiering, turn)
        coming = self._pop(turn)
        if coming is None:
            lease = self._store.lease(key)
            if lease is not None or not self._is_away(key):
                return lease
            coming = _Coming(tiering, key)  # it has left memory since we looked
        lease = self._await(tiering, key, coming)
        self.came = lease is not None
        return lease

    def drop(self) -> bool:
        """End the holds and want no more of what has not begun; False when there was nothing."""
        if not self._coming:
            return False
        self._next = self._coming[0][0]
        while self._coming:
            self._coming.popleft()[1].release()
        self._coming_bytes = 0
        return True

    @property
    def _patience_s(self) -> float:
        return min(self._wait_s, self._waits.left_s)

    def _await(self, tiering: Tiering, key: bytes, coming: _Coming) -> Lease | None:
        began_s = self._store.now_s()
        while True:
            lease = self._finish(key, coming)
            if lease is not None or not self._patience_s or not self._is_away(key):
                return lease
            # There was no room. What is held for later turns must not be the reason; else another reads, or the disk
            # writes, all that could leave, and both end.
            if not self.drop():
                left_s = min(began_s + self._room_wait_s - self._store.now_s(), self._waits.left_s)
                if left_s <= 0:
                    self._room_wait_s = 0.0
                    return None
                with self._waits.counted():
                    tiering.wait_for_room(min(left_s, ROOM_LOOK_S))
            coming = _Coming(tiering, key)

    def _look_ahead(self, tiering: Tiering, turn: int) -> None:
        bound = self._store.arena.nbytes // AHEAD_PART
        self._next = max(self._next, turn)
        while self._next < min(len(self._keys), turn + AHEAD_BLOCKS_MAX):
            key = self._keys[self._next]
            entry = self._store.find(key)
            if entry is not None and not entry.is_resident:
                nbytes = extent_length(entry.length)
                if self._coming and self._coming_bytes + nbytes > bound:
                    return
                self._coming.append((self._next, _Coming(tiering, key, nbytes)))
                self._coming_bytes += nbytes
            self._next += 1

    def _pop(self, turn: int) -> _Coming | None:
        while self._coming and self._coming[0][0] <= turn:
            of, coming = self._coming.popleft()
            self._coming_bytes -= coming.nbytes
            if of == turn:
                return coming
            coming.release()  # of a turn that was left out
        return None

    def _finish(self, key: bytes, coming: _Coming) -> Lease | None:
        try:
            with self._waits.counted():
                came = coming.wait(self._patience_s)
            if not came:
                self._wait_s = 0.0
            return self._store.lease(key)
        finally:
            coming.release()

    def _is_away(self, key: bytes) -> bool:
        entry = self._store.find(key)
        return entry is not None and not entry.is_resident
