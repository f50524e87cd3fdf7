"""Which key is which entry, in each of the databases, and the order in which SCAN walks them.

SCAN must return every key that was there all the while, though others come and go between its calls. A dict cannot
be resumed after it has changed, so each key also sits in one of BUCKETS sets by the hash of its bytes, which never
changes while the process lives; the cursor is the number of the next bucket.
"""

import random
from collections.abc import Iterator

from . import _core as core
from ._core import BUCKETS as BUCKETS
from .database import SPACES as SPACES
from .database import Database
from .entry import Entry


class Index(core.Index):
    """The keys of SPACES databases. No locks, no policy, no memory: the store keeps those in step.

    Beside what stands here, in _core.pyx: `spaces`, the entries of each database by their keys, and `databases`, what
    the entries of each refer to; `get(key, space)`, the visible entry under a key, expired or not; `put(entry)`, which
    makes an entry visible under its key and gives the one that it replaces; `remove(entry)`; `set_end(entry, at_ms)`,
    which gives a visible entry another end, in Unix ms, or 0 = none; and `rename(entry, key, space)`, which makes it
    visible under another name and no longer under its own, and gives the one that it replaces.
    """

    __slots__ = ()

    def swap(self, first: int, second: int, write: int) -> None:
        """Exchange two databases, at the store's write of that number. No step a key."""
        Database.exchange(self.databases, first, second, write)
        self.spaces[first], self.spaces[second] = self.spaces[second], self.spaces[first]
        self._buckets[first], self._buckets[second] = self._buckets[second], self._buckets[first]

    def take(self, space: int) -> tuple[dict[bytes, Entry], list[set[bytes]]]:
        """Empty a database and give what was in it: its entries, and their keys as SCAN walks them."""
        entries, buckets = self.spaces[space], self._buckets[space] or []
        self.spaces[space], self._buckets[space] = {}, None
        if entries:
            self.databases[space].flushed = True
            self.databases[space] = Database(space)
        return entries, buckets

    def expires(self, at_ms: float, name: tuple[bytes, Database]) -> bool:
        """Whether `name`, a key and its database, is there and is to be gone at just `at_ms`."""
        entry = None if name[1].flushed else self.spaces[name[1].number].get(name[0])
        return entry is not None and entry.expire_at_ms == at_ms

    def scan(self, cursor: int, count: int, space: int) -> tuple[int, list[bytes]]:
        """At least `count` keys from bucket `cursor` on, and the next cursor; 0 when the walk is complete."""
        buckets = self._buckets[space]
        found: list[bytes] = []
        if buckets is None or cursor < 0 or cursor >= BUCKETS:
            return 0, found
        while cursor < BUCKETS and len(found) < count:
            found += buckets[cursor]
            cursor += 1
        return (0 if cursor == BUCKETS else cursor), found

    def random_key(self, space: int) -> bytes | None:
        """A key from a bucket drawn at random, or None when the database is empty."""
        buckets = self._buckets[space]
        if buckets is None or not self.spaces[space]:
            return None
        start = random.randrange(BUCKETS)
        for step in range(BUCKETS):
            bucket = buckets[(start + step) & (BUCKETS - 1)]
            if bucket:
                return random.choice(tuple(bucket))
        raise AssertionError("keys and buckets disagree")

    def __iter__(self) -> Iterator[Entry]:
        """Every visible entry."""
        for entries in self.spaces:
            yield from entries.values()

    def __len__(self) -> int:
        return sum(map(len, self.spaces))

    def check_integrity(self) -> None:
        """Raise AssertionError unless keys, entries and buckets agree."""
        for space, entries in enumerate(self.spaces):
            buckets = self._buckets[space] or []
            assert sum(map(len, buckets)) == len(entries)
            for key, entry in entries.items():
                assert entry.key == key
                assert entry.database is self.databases[space]
                assert entry.space == space
                assert key in buckets[hash(key) & (BUCKETS - 1)]
            ends = [entry.expire_at_ms for entry in entries.values() if entry.expire_at_ms]
            assert (self.databases[space].ends, self.databases[space].ends_ms) == (len(ends), sum(ends))
