"""Verbs that give blocks another name: `move` for one key, `swap` for two whole databases.

They leave every byte where it is: the entry gets a new key, so readers keep their leases, the policy keeps the entry's
place in its order, and a payload of gigabytes is renamed as quickly as a short one.
"""

import threading

from .state import Ledger

Name = tuple[bytes, int]
"""A key and its database."""


class Moves(Ledger):
    """The part of the store that renames; Store brings the lock and the other verbs."""

    _lock: threading.Lock

    def move(self, old: Name, new: Name) -> bool:
        """Put the block under `old` under `new`, in place of what is there; its end goes with it. False without one.

        Leases on it stay good, and their `key` is the new one from now on.
        """
        with self._lock:
            entry = self._visible(*old)
            if entry is None or old == new:
                return entry is not None
            self._visible(*new)  # what is there may have expired, which is not the same as being replaced
            cost_bytes = entry.memory_bytes
            replaced = self.index.rename(entry, *new)
            if replaced is not None:
                self._retire(replaced, entry)
                self.stats.overwritten += 1
            if self.journal is not None:
                self.journal += [("del", *old), ("set", *new)]
            if self.tiering is not None and not self.tiering.rename(entry, old):
                self._lapse(entry)  # the disk has let go of it a moment ago
                return True
            self._renumber(entry)
            if entry.value is not None:
                self.inline_bytes += entry.memory_bytes - cost_bytes  # the key is part of it
                if self.inline_bytes > self.inline_bytes_high:
                    self._evict_inline(entry)
            self._remember_expiry(entry)
            return True

    def swap(self, first: int, second: int) -> None:
        """Exchange two databases: each key of one is in the other from now on. Costs no step a key, but with a disk one
        for each value that memory alone has, or where memory has many and the disk few, for each of those."""
        if first == second:
            return
        with self._lock:
            if self.tiering is not None:
                self.tiering.swap(first, second)
                self.writes += 1
            self.index.swap(first, second, self.writes)
