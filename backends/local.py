"""The backend of an engine that keeps its blocks in its own process: the Store, under the engine's verbs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Sequence
from itertools import repeat
from typing import Final

from kvredis.storage.entry import Lease, Reservation, extent_length
from kvredis.storage.store import Store
from kvredis.storage.tiering.manager import Tiering
from kvredis.storage.tiering.prefetch import PrefetchJob

from . import base
from .base import Fitting
from .fork_guard import Home
from .gc_guard import Endings
from .readahead import ROOM_LOOK_S, ReadAhead, Waits

LOAD_WAIT_S: Final = 10.0
"""A block that the disk has not brought by then is a miss."""
WAIT_SHARE: Final = 50
"""An engine that stores waits spill_wait_s at once, but in the long run a fiftieth of the time at most: an engine
computes."""
OUTCOMES: Final = ("lookups", "memory_hits", "disk_hits", "misses")
"""What becomes of the blocks that are asked of load, and how many these are; the last three add up to the first."""


class LocalBackend:
    """A Store that this backend owns. With `keep` false (local_cpu) it stays empty, unless there is a disk below it."""

    def __init__(self, store: Store, *, keep: bool = True, load_wait_s: float = LOAD_WAIT_S) -> None:
        self.store = store
        self.keep = keep
        self.load_wait_s = load_wait_s
        self._closed = False
        self._counting = threading.Lock()
        self.home = Home()
        self._endings = Endings()
        self._fitting = Fitting(store.arena)
        self._counts: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._held = False  # by readers, all that could leave: then no disk makes room
        self._waited_s = 0.0  # for room, less what has been made up for until `_waited_at_s`
        self._waited_at_s = 0.0

    def match(self, keys: Sequence[bytes]) -> int:
        return self.store.match(keys) if self.home.is_here() else 0

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        here = self.home.is_here()
        return [here and self.store.find(key) is not None for key in keys]

    def expect(self, keys: Sequence[bytes], within_s: float) -> int:
        """As Backend.expect: no other process sees this memory."""
        return self.present(keys).count(False)

    def coming(self, keys: Sequence[bytes]) -> int:
        """As Backend.coming: no other process announces any."""
        return self.match(keys)

    def wait_for(self, keys: Sequence[bytes], within_s: float) -> int:
        """As Backend.wait_for: there is nothing to wait for."""
        return [*self.present(keys), False].index(False)

    def tiers_of(self, keys: Sequence[bytes]) -> list[base.Tier]:
        if self.store.tiering is None:
            return ["memory"] * len(keys)
        found = map(self.store.find, keys)
        return ["memory" if entry is None or entry.is_resident else "disk" for entry in found]

    def reserve(self, key: bytes, length: int) -> Reservation | None:
        """As Backend.reserve. Waits for the disk if it takes that to lose nothing: up to spill_wait_s, and again as
        time passes, one second in WAIT_SHARE. Else the coldest leave unwritten, and are counted."""
        if not self.home.is_here():
            return None
        self._endings.catch_up()
        self._fitting.look_at(length)
        tiering = self.store.tiering
        if tiering is not None and extent_length(length) <= self.store.arena.nbytes:
            return self._reserve_over_disk(tiering, key, length)
        return self.store.reserve(key, length) if self.keep else None

    def reserve_all(self, keys: Sequence[bytes], length: int) -> list[Reservation]:
        return base.reserve_each(self.reserve, keys, length)

    def room(self, length: int, at_least: int = 1) -> int:
        """As Backend.room: others leave."""
        return sys.maxsize if self.keep or self.store.tiering is not None else 0

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[Lease | None, None, None]:
        """As Backend.load; the leases are on the store's own bytes. Waits `load_wait_s` at most for a disk that does
        not answer, once; what is still away after that is a miss."""
        if not self.home.is_here():
            yield from repeat(None, len(keys))
            return
        self._endings.catch_up()
        reading = self.read_ahead(keys, Waits(within_s))
        outcomes: list[str] = []

        def end() -> None:
            reading.drop()
            self._count(outcomes)

        try:
            for turn in range(len(keys)):
                lease = reading.take(turn)
                outcomes.append("misses" if lease is None else "disk_hits" if reading.came else "memory_hits")
                yield lease
        finally:
            self._endings.end(end)

    def read_ahead(self, keys: Sequence[bytes], waits: Waits) -> ReadAhead:
        """Begin a load whose turns the caller takes one by one, and counts himself, with other `waits` of his own."""
        return ReadAhead(self.store, keys, waits, self.load_wait_s)

    def touch(self, keys: Sequence[bytes]) -> int:
        """As Backend.touch. Gives the disk's housekeeping its turn: each store and each load of an engine ends here."""
        if not self.home.is_here():
            return 0
        if self.store.tiering is not None:
            self.store.tiering.tick()
        return self.store.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self.store.delete(keys) if self.home.is_here() else 0

    def prefetch(self, keys: Sequence[bytes]) -> base.Prefetch:
        """As Backend.prefetch: from disk into memory. Refused where memory keeps nothing."""
        if not self.keep:
            return base.NothingToFetch(refused="local_cpu is false: memory keeps no blocks")
        if self.store.tiering is None or not self.home.is_here():
            here = self.touch(keys)
            return base.NothingToFetch(resident=here, missing=len(keys) - here)
        job = self.store.tiering.prefetch(keys)
        return base.NothingToFetch(refused="too many prefetches are under way") if job is None else LocalPrefetch(job)

    def flush(self) -> int:
        """As Backend.flush: a commit is done when it returns."""
        return 0

    def stats(self) -> dict[str, int | float | str]:
        """Give the store's counters, and what it holds; those of the disk are called disk_..."""
        self._endings.catch_up()
        store = self.store
        told: dict[str, int | float | str] = {
            "kind": "local",
            "used_bytes": store.used_bytes,
            "capacity_bytes": store.arena.nbytes,
            **store.stats.as_dict(),
        }
        with self._counting:
            told |= self._counts
        if store.tiering is not None:
            told |= store.tiering.stats.as_dict()
            told |= {f"disk_{name}": value for name, value in store.tiering.figures().items()}
        return told

    def close(self) -> None:
        """As Backend.close; what the disk does not have is written first."""
        if not self._closed and self.home.is_here():
            self._closed = True
            self._endings.catch_up()
            self.store.close()

    def _count(self, outcomes: Sequence[str]) -> None:
        """Of a whole load at once: counting blocks one by one takes nearly as long as leasing them."""
        with self._counting:
            self._counts["lookups"] += len(outcomes)
            for outcome in set(outcomes):
                self._counts[outcome] += outcomes.count(outcome)

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
        return self._job.counts.queued

    @property
    def resident(self) -> int:
        return self._job.counts.resident

    @property
    def missing(self) -> int:
        return self._job.counts.missing

    @property
    def no_room(self) -> int:
        return self._job.counts.no_room

    @property
    def refused(self) -> str:
        return ""

    @property
    def is_finished(self) -> bool:
        return self._job.is_finished

    def wait(self, timeout_s: float) -> bool:
        over = threading.Event()

        def done(job: PrefetchJob[None]) -> None:
            over.set()

        self._job.add_done(done)
        if not over.wait(timeout_s):
            self._job.remove_done(done)
        return self._job.is_finished

    def cancel(self) -> None:
        self._job.cancel()
