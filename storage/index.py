"""Which key is which entry, in each of the databases, and the order in which SCAN walks them.

SCAN must return every key that was there all the while, though others come and go between its calls. A dict cannot
be resumed after it has changed, so each key also sits in one of BUCKETS sets by the hash of its bytes, which never
changes while the process lives; the cursor is the number of the next bucket.
"""

import random
from collections.abc import Iterator
from typing import Final

from .database import SPACES as SPACES
from .database import Database
from .entry import Entry

BUCKETS: Final = 1024
"""A power of two; a SCAN call returns at least one bucket, so its replies grow beyond COUNT above about 10,000 keys."""


class Index:
    """The keys of SPACES databases. No locks, no policy, no memory: the store keeps those in step."""

    __slots__ = ("_buckets", "databases", "spaces")

    def __init__(self) -> None:
        self.spaces: list[dict[bytes, Entry]] = [{} for _ in range(SPACES)]
        self.databases = [Database(number) for number in range(SPACES)]
        """What the entries of each refer to."""
        self._buckets: list[list[set[bytes]] | None] = [None] * SPACES

    def get(self, key: bytes, space: int) -> Entry | None:
        """The visible entry under `key`, expired or not."""
        return self.spaces[space].get(key)

    def put(self, entry: Entry) -> Entry | None:
        """Make `entry` visible under its key; returns the one that it replaces."""
        space = entry.space
        keys = self.spaces[space]
        old = keys.get(entry.key)
        keys[entry.key] = entry
        database = entry.database = self.databases[space]
        if entry.expire_at_ms:
            database.ends += 1
            database.ends_ms += entry.expire_at_ms
        if old is not None and old.expire_at_ms:
            database.ends -= 1
            database.ends_ms -= old.expire_at_ms
        if old is None:
            buckets = self._buckets[space]
            if buckets is None:
                buckets = self._buckets[space] = [set() for _ in range(BUCKETS)]
            buckets[hash(entry.key) & (BUCKETS - 1)].add(entry.key)
        return old

    def remove(self, entry: Entry) -> None:
        """Take away a visible entry."""
        self.set_end(entry, 0, leaves=True)
        self._discard(entry.key, entry.space)

    def set_end(self, entry: Entry, at_ms: int, *, leaves: bool = False) -> None:
        """Give a visible entry another end, in Unix ms, or 0 = none; one that `leaves` keeps its own."""
        database, before = entry.database, entry.expire_at_ms
        database.ends += bool(at_ms) - bool(before)
        database.ends_ms += at_ms - before
        if not leaves:
            entry.expire_at_ms = at_ms

    def _discard(self, key: bytes, space: int) -> None:
        del self.spaces[space][key]
        buckets = self._buckets[space]
        assert buckets is not None, "a visible key is in a bucket"
        buckets[hash(key) & (BUCKETS - 1)].discard(key)

    def rename(self, entry: Entry, key: bytes, space: int) -> Entry | None:
        """Make a visible entry visible under another name and no longer under its own; returns the one it replaces."""
        old_key, old_space = entry.key, entry.space
        self.set_end(entry, 0, leaves=True)
        entry.key, entry.database = key, self.databases[space]
        replaced = self.put(entry)
        self._discard(old_key, old_space)
        return replaced

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
