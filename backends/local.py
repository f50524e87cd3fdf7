"""The backend of an engine that keeps its blocks in its own process: the Store, under the engine's verbs.

WHY the reading ahead: a prompt that is on disk alone has dozens of blocks, and an engine takes one at a time. Asked for
singly each would cost the engine the disk's full delay; so the next ones are always on their way, and held when they
have come. What is held takes room, and the engine holds leases too, so the holds end before anybody goes without.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Generator, Sequence
from typing import Final

from kvredis.storage.entry import Lease, Reservation, extent_length
from kvredis.storage.prefetch import PrefetchJob
from kvredis.storage.store import Store
from kvredis.storage.tiering import Tiering

from . import base

LOAD_WAIT_S: Final = 10.0
"""A block that the disk has not brought by then is a miss."""
ROOM_LOOK_S: Final = 0.05
"""How often one who waits for room looks again, though nobody has told him of any."""
WAIT_SHARE: Final = 50
"""Who stores waits spill_wait_s at once, but in the long run a fiftieth of the time at most: an engine computes."""
AHEAD_PART: Final = 4
"""A quarter of the arena may be read ahead of a load, and one block always."""
AHEAD_BLOCKS_MAX: Final = 32
"""Enough that no thread of the disk waits for the next."""


class LocalBackend:
    """A Store that this backend owns. With `keep` false (local_cpu) it stays empty, unless there is a disk below it."""

    def __init__(self, store: Store, *, keep: bool = True, load_wait_s: float = LOAD_WAIT_S) -> None:
        self.store = store
        self.keep = keep
        self.load_wait_s = load_wait_s
        self._closed = False
        self._held = False  # by readers, all that could leave: then no disk makes room
        self._waited_s = 0.0  # for room, less what has been made up for until `_waited_at_s`
        self._waited_at_s = 0.0

    def match(self, keys: Sequence[bytes]) -> int:
        """As Backend.match."""
        return self.store.match(keys)

    def tiers_of(self, keys: Sequence[bytes]) -> list[base.Tier]:
        """As Backend.tiers_of."""
        if self.store.tiering is None:
            return ["memory"] * len(keys)
        found = map(self.store.find, keys)
        return ["memory" if entry is None or entry.is_resident else "disk" for entry in found]

    def reserve(self, key: bytes, length: int) -> Reservation | None:
        """As Backend.reserve. Waits for the disk if it takes that to lose nothing: up to spill_wait_s, and again as
        time passes, one second in WAIT_SHARE. Else the coldest leave unwritten, and are counted."""
        tiering = self.store.tiering
        if tiering is not None and extent_length(length) <= self.store.arena.nbytes:
            return self._reserve_over_disk(tiering, key, length)
        return self.store.reserve(key, length) if self.keep else None

    def room(self, length: int) -> int:
        """As Backend.room: others leave."""
        return sys.maxsize if self.keep or self.store.tiering is not None else 0

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[Lease | None, None, None]:
        """As Backend.load; the leases are on the store's own bytes. Waits `load_wait_s` at most for a disk that does
        not answer; what is still away after that is a miss."""
        if self.store.tiering is None:
            for key in keys:
                yield self.store.lease(key)
            return
        reading = _ReadAhead(self.store, self.store.tiering, keys, self.load_wait_s)
        try:
            for turn in range(len(keys)):
                yield reading.take(turn)
        finally:
            reading.drop()

    def touch(self, keys: Sequence[bytes]) -> int:
        """As Backend.touch. Gives the disk's housekeeping its turn: each store and each load of an engine ends here."""
        if self.store.tiering is not None:
            self.store.tiering.tick()
        return self.store.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        """As Backend.delete."""
        return self.store.delete(keys)

    def prefetch(self, keys: Sequence[bytes]) -> base.Prefetch:
        """As Backend.prefetch: from disk into memory. Refused where memory keeps nothing."""
        if not self.keep:
            return base.NothingToFetch(refused="local_cpu is false: memory keeps no blocks")
        if self.store.tiering is None:
            here = self.store.touch(keys)
            return base.NothingToFetch(resident=here, missing=len(keys) - here)
        job = self.store.tiering.prefetch(keys)
        return base.NothingToFetch(refused="too many prefetches are under way") if job is None else LocalPrefetch(job)

    def flush(self) -> int:
        """As Backend.flush: a commit is done when it returns."""
        return 0

    def stats(self) -> dict[str, int | float | str]:
        """Give the store's counters, and what it holds; those of the disk are called disk_..."""
        store = self.store
        told: dict[str, int | float | str] = {
            "kind": "local",
            "used_bytes": store.used_bytes,
            "capacity_bytes": store.arena.nbytes,
            **store.stats.as_dict(),
        }
        if store.tiering is not None:
            told |= store.tiering.stats.as_dict()
            told |= {f"disk_{name}": value for name, value in store.tiering.figures().items()}
        return told

    def close(self) -> None:
        """As Backend.close; what the disk does not have is written first."""
        if not self._closed:
            self._closed = True
            self.store.close()

    def _reserve_over_disk(self, tiering: Tiering, key: bytes, length: int) -> Reservation | None:
        store, began_s, in_vain = self.store, self.store.now_s(), False
        room = store.reserve(key, length, drop=False)
        if room is None and tiering.makes_room and not self._held and (patience_s := self._patience_s(tiering)) > 0:
            tiering.stats.spill_waits += 1
            while room is None and tiering.makes_room and not in_vain:
                left_s = began_s + patience_s - store.now_s()
                in_vain = left_s <= 0
                if not in_vain:
                    tiering.wait_for_room(min(left_s, ROOM_LOOK_S))
                    room = store.reserve(key, length, drop=False)
            self._waited_s += store.now_s() - began_s
        if room is None:
            room = store.reserve(key, length)
            if in_vain and room is not None:  # else readers hold the room: the disk is not to blame
                tiering.waited_in_vain(began_s)
        self._held = room is None
        return room

    def _patience_s(self, tiering: Tiering) -> float:
        """How long to wait now, after what has been waited for already."""
        now_s = self.store.now_s()
        self._waited_s = max(self._waited_s - (now_s - self._waited_at_s) / WAIT_SHARE, 0.0)
        self._waited_at_s = now_s
        return tiering.spill_wait_s - self._waited_s


class LocalPrefetch:
    """A base.Prefetch over a job of the store."""

    def __init__(self, job: PrefetchJob[None]) -> None:
        self._job = job

    @property
    def queued(self) -> int:
        """As Prefetch.queued."""
        return self._job.counts.queued

    @property
    def resident(self) -> int:
        """As Prefetch.resident."""
        return self._job.counts.resident

    @property
    def missing(self) -> int:
        """As Prefetch.missing."""
        return self._job.counts.missing

    @property
    def no_room(self) -> int:
        """As Prefetch.no_room."""
        return self._job.counts.no_room

    @property
    def refused(self) -> str:
        """As Prefetch.refused."""
        return ""

    @property
    def is_finished(self) -> bool:
        """As Prefetch.is_finished."""
        return self._job.is_finished

    def wait(self, timeout_s: float) -> bool:
        """As Prefetch.wait."""
        over = threading.Event()

        def done(job: PrefetchJob[None]) -> None:
            over.set()

        self._job.add_done(done)
        if not over.wait(timeout_s):
            self._job.remove_done(done)
        return self._job.is_finished

    def cancel(self) -> None:
        """As Prefetch.cancel."""
        self._job.cancel()


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


class _ReadAhead:
    """One load over memory and disk, for one thread: `take` the keys in order, then `drop` what was not taken."""

    def __init__(self, store: Store, tiering: Tiering, keys: Sequence[bytes], wait_s: float) -> None:
        self._store = store
        self._tiering = tiering
        self._keys = keys
        self._wait_s = wait_s  # 0 once the disk has let us wait in vain
        self._room_wait_s = tiering.spill_wait_s  # the same for room
        self._next = 0  # the first turn that was not looked at
        self._coming: deque[tuple[int, _Coming]] = deque()  # each with its turn, in order
        self._coming_bytes = 0

    def take(self, turn: int) -> Lease | None:
        """Send for some of the blocks that follow, and wait for the one of this turn."""
        self._look_ahead(turn)
        key = self._keys[turn]
        coming = self._pop(turn)
        if coming is None:
            lease = self._store.lease(key)
            if lease is not None or not self._is_away(key):
                return lease
            coming = _Coming(self._tiering, key)  # it has left memory since we looked
        began_s = self._store.now_s()
        while True:
            lease = self._finish(key, coming)
            if lease is not None or not self._wait_s or not self._is_away(key):
                return lease
            # There was no room. What is held for later turns must not be the reason; else somebody reads, or the disk
            # writes, all that could leave, and both end.
            if not self.drop():
                left_s = began_s + self._room_wait_s - self._store.now_s()
                if left_s <= 0:
                    self._room_wait_s = 0.0
                    return None
                self._tiering.wait_for_room(min(left_s, ROOM_LOOK_S))
            coming = _Coming(self._tiering, key)

    def drop(self) -> bool:
        """End the holds and want no more of what has not begun; False when there was nothing."""
        if not self._coming:
            return False
        self._next = self._coming[0][0]
        while self._coming:
            self._coming.popleft()[1].release()
        self._coming_bytes = 0
        return True

    def _look_ahead(self, turn: int) -> None:
        bound = self._store.arena.nbytes // AHEAD_PART
        self._next = max(self._next, turn)
        while self._next < min(len(self._keys), turn + AHEAD_BLOCKS_MAX):
            key = self._keys[self._next]
            entry = self._store.find(key)
            if entry is not None and not entry.is_resident:
                nbytes = extent_length(entry.length)
                if self._coming and self._coming_bytes + nbytes > bound:
                    return
                self._coming.append((self._next, _Coming(self._tiering, key, nbytes)))
                self._coming_bytes += nbytes
            self._next += 1

    def _pop(self, turn: int) -> _Coming | None:
        if not self._coming or self._coming[0][0] != turn:
            return None
        coming = self._coming.popleft()[1]
        self._coming_bytes -= coming.nbytes
        return coming

    def _finish(self, key: bytes, coming: _Coming) -> Lease | None:
        try:
            if not coming.wait(self._wait_s):
                self._wait_s = 0.0
            return self._store.lease(key)
        finally:
            coming.release()

    def _is_away(self, key: bytes) -> bool:
        entry = self._store.find(key)
        return entry is not None and not entry.is_resident
