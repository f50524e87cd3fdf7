"""Emptying databases at once, and taking what was in them apart when there is time.

Freeing a million entries takes about a second. So a flush that leaves nothing behind takes index, policies and
deadlines out of the store as they are and puts fresh ones in their place: from then on every account is right and every
reader sees an empty store. The old ones are `Discarded`: objects only, no room in the arena, freed slice by slice.

While other databases hold keys, or somebody reads or writes, all that can go at once is the index's part and the
disk's: no reader finds the entries any more, and no disk gets them. They are in the accounts and the policies until
they are given back: slice by slice, and sooner where room is wanted that they hold.
"""

import threading

from .deadlines import Deadlines
from .entry import Entry
from .memory.allocator import Allocator
from .state import Ledger, drop_keys

SLICE_ENTRIES = 1_000
"""How many entries are freed at a time: a millisecond or two."""


class Discarded:
    """Entries that nobody can find any more, with the policies that still order them."""

    __slots__ = ("_buckets", "_entries", "_expiries", "_inline_policy", "_policy", "_unsaved")

    def __init__(self, entries: list[dict[bytes, Entry]], buckets: list[set[bytes]], ledger: Ledger) -> None:
        self._entries, self._buckets = entries, buckets
        self._policy = ledger.policy
        self._inline_policy = ledger.inline_policy
        self._unsaved = ledger.unsaved
        self._expiries = ledger._expiries  # not looked at again, and not freed within the flush

    def drop(self, entries_max: int) -> bool:
        """Free up to `entries_max` entries; False when none is left."""
        drop_keys(self._buckets, entries_max)
        while self._entries and not self._entries[-1]:
            self._entries.pop()
        if not self._entries:
            return bool(self._buckets)
        entries = self._entries[-1]
        for _ in range(min(entries_max, len(entries))):
            _, entry = entries.popitem()
            self._unsaved.pop(entry, None)
            if entry.is_resident:
                (self._policy if entry.value is None else self._inline_policy).forget(entry)
        return True


class Flushes(Ledger):
    """The part of the store that empties databases; Store brings the lock and the other verbs."""

    _lock: threading.Lock
    _discarded: Discarded | None = None

    def flush(self, space: int | None = None, *, later: bool = False) -> int:
        """Delete everything, or everything of one database; returns how many keys that were. The journal does not list
        them: who reads it is told of a flush as one thing. With `later` what they hold may still be held: the caller
        sees to `give_back`."""
        with self._lock:
            spaces = range(len(self.index.spaces)) if space is None else (space,)
            if self.tiering is not None:
                self.tiering.clear(space)
            leaving: list[dict[bytes, Entry]] = []
            buckets: list[set[bytes]] = []
            for each in spaces:
                entries, of_entries = self.index.take(each)
                leaving.append(entries)
                buckets += of_entries
            count = sum(map(len, leaving))
            self.stats.flushed += count
            if len(self.index) or self.leases or self.reserved_bytes:
                self._flushed += filter(None, leaving)
                self._flushed_keys += buckets
            elif count:
                self._start_afresh([*leaving, *self._flushed], [*buckets, *self._flushed_keys])
            if not later:
                while self._give_back(SLICE_ENTRIES):
                    pass
            return count

    def give_back(self, entries_max: int | None = SLICE_ENTRIES) -> bool:
        """Give back what flushed entries hold, of at most so many or None = of all; whether there are more. To be
        called every so often; what room is wanted for is given back by itself."""
        with self._lock:
            more = self._give_back(SLICE_ENTRIES if entries_max is None else entries_max)
            while more and entries_max is None:
                more = self._give_back(SLICE_ENTRIES)
            if not more:
                self._drop_discarded()
            return more or self._discarded is not None

    def collect_expired(self, entries_max: int = 200) -> int:
        """Remove up to `entries_max` blocks whose time has come; returns how many. To be called every so often, as it
        also does what was put off."""
        collected = 0
        with self._lock:
            self._catch_up()
            for key, database in self._expiries.due(self.now_ms()):
                self._remove(self.index.spaces[database.number][key], "expired")
                self.stats.expired += 1
                collected += 1
                if collected == entries_max:
                    break
            self._give_back(SLICE_ENTRIES)
            self._drop_discarded()
        return collected

    def _drop_discarded(self) -> None:
        """Free a slice of what the last flush has thrown away; the lock is held."""
        if self._discarded is not None and not self._discarded.drop(SLICE_ENTRIES):
            self._discarded = None

    def _start_afresh(self, leaving: list[dict[bytes, Entry]], buckets: list[set[bytes]]) -> None:
        """The index is empty, and nobody reads or writes: nothing that is in the policies or falls due is there any
        more."""
        self.allocator = Allocator(self.arena.nbytes)
        self.live_bytes = self.inline_bytes = self.away = 0
        # One at a time: what an earlier flush left goes now, or flushing in a loop would pile garbage up.
        self._discarded = Discarded(leaving, buckets, self)
        self._flushed, self._flushed_keys = [], []
        self.unsaved = {}
        self.policy, self.inline_policy = type(self.policy)(), type(self.policy)()
        self._expiries = Deadlines(self.index.expires)
