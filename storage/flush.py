"""Emptying databases at once, and taking what was in them apart when there is time.

Freeing a million entries takes about a second. So a flush that leaves nothing behind takes index, policies and
deadlines out of the store as they are and puts fresh ones in their place: from then on every account is right and every
reader sees an empty store. The old ones are `Discarded`: objects only, no room in the arena, freed slice by slice.
"""

import threading

from .deadlines import Deadlines
from .entry import NOWHERE, Entry
from .memory.allocator import Allocator
from .state import Ledger

SLICE_ENTRIES = 10_000
"""How many entries are freed at a time: a few milliseconds."""


class Discarded:
    """Entries that nobody can find any more, with the policies that still order them."""

    __slots__ = ("_entries", "_expiries", "_inline_policy", "_policy")

    def __init__(self, entries: list[dict[bytes, Entry]], ledger: Ledger) -> None:
        self._entries = entries
        self._policy = ledger.policy
        self._inline_policy = ledger.inline_policy
        self._expiries = ledger._expiries  # not looked at again, and not freed within the flush

    def drop(self, entries_max: int) -> bool:
        """Free up to `entries_max` entries; False when none is left."""
        while self._entries and not self._entries[-1]:
            self._entries.pop()
        if not self._entries:
            return False
        entries = self._entries[-1]
        for _ in range(min(entries_max, len(entries))):
            _, entry = entries.popitem()
            if entry.is_resident:
                (self._policy if entry.value is None else self._inline_policy).forget(entry)
        return True


class Flushes(Ledger):
    """The part of the store that empties databases; Store brings the lock and the other verbs."""

    _lock: threading.Lock
    _discarded: Discarded | None = None

    def flush(self, space: int | None = None) -> int:
        """Delete everything, or everything of one database; returns how many keys that were. The journal does not list
        them: who reads it is told of a flush as one thing."""
        with self._lock:
            spaces = range(len(self.index.spaces)) if space is None else (space,)
            leaving = [self.index.take(each) for each in spaces]
            count = sum(map(len, leaving))
            self.stats.flushed += count
            if self.tiering is not None:
                self.tiering.clear(space)
            if len(self.index):
                for entries in leaving:
                    for entry in entries.values():
                        self._retire(entry)
            elif count:
                self._start_afresh(leaving)
            return count

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
            self._drop_discarded()
        return collected

    def _drop_discarded(self) -> None:
        """Free a slice of what the last flush has thrown away; the lock is held."""
        if self._discarded is not None and not self._discarded.drop(SLICE_ENTRIES):
            self._discarded = None

    def _start_afresh(self, leaving: list[dict[bytes, Entry]]) -> None:
        """The index is empty: nothing that is in the policies or falls due is there any more."""
        if self.leases or self.reserved_bytes:
            for entries in leaving:  # somebody reads or writes, so extents are given back one by one
                for entry in entries.values():
                    if entry.extent is not NOWHERE:
                        self.live_bytes -= entry.extent.length
                        if entry.leases:
                            self.retired_bytes += entry.extent.length
                        else:
                            self.allocator.free(entry.extent)
        else:
            self.allocator = Allocator(self.arena.nbytes)
            self.live_bytes = 0
        self.inline_bytes = self.away = 0
        self.unsaved.clear()
        # One at a time: what an earlier flush left goes now, or flushing in a loop would pile garbage up.
        self._discarded = Discarded(leaving, self)
        self.policy, self.inline_policy = type(self.policy)(), type(self.policy)()
        self._expiries = Deadlines(self.index.expires)
