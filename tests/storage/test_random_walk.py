"""A seeded random walk over the store's verbs against a plain dict; all that must agree is checked after every step.

The dict holds what was committed, deleted and expired; what the store has evicted it learns from the store, and the
number of those must be the one that the store counted. Readers and writers hold on for random times meanwhile.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import count

import pytest

from kvredis.storage.entry import INLINE_BYTES_MAX, Lease, Reservation, extent_length

from .small_store import Clock, content, small_store

MIB = 1024 * 1024
STEPS = 2500
KEYS = 20
SPACES = 2
HOLDS_MAX = 16
NEVER_MS = 0

Name = tuple[bytes, int]


@dataclass(slots=True)
class Value:
    """What a key of the model holds."""

    data: bytes
    expire_at_ms: int


@dataclass(slots=True)
class Reader:
    """A lease and what must be under it until it is released or may be revoked."""

    lease: Lease
    data: bytes
    limit_at_s: float


class Walk:
    """The store, the model of it, and those who hold on to something."""

    def __init__(self, seed: int, arena_bytes: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.store = small_store(self.clock, arena_bytes)
        self.model: dict[Name, Value] = {}
        self.readers: list[Reader] = []
        self.writers: list[tuple[Reservation, bytes]] = []
        self.done: Counter[str] = Counter()
        self.numbers = count()
        self.retired = 0
        """Steps after which a reader held what is under no key any more."""
        self.lasting = 0.7
        """What part of the values has no end."""
        self.left = 0
        """Keys that have been seen to be evicted or expired."""

    # ---- choices -------------------------------------------------------------------------------------------------

    def name(self) -> Name:
        return b"%d" % self.rng.randrange(KEYS), self.rng.randrange(SPACES)

    def value(self) -> bytes:
        """1 KiB to 2 MiB, each order of magnitude equally often."""
        return content(next(self.numbers), int(1024 * 2048 ** self.rng.random()))

    def expiry_ms(self) -> int:
        return NEVER_MS if self.rng.random() < self.lasting else self.clock.ms() + self.rng.randrange(1, 20_000)

    def now_in_model(self, name: Name) -> Value | None:
        """The model's value, unless its time has come."""
        value = self.model.get(name)
        if value is not None and value.expire_at_ms and value.expire_at_ms <= self.clock.ms():
            return None
        return value

    # ---- what a step may do --------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Begin to write, finish at once or later; a refusal must have been unavoidable."""
        (key, space), data = self.name(), self.value()
        run = self.longest_run_without_holds()
        reservation = self.store.reserve(key, len(data), space)
        self.forget_evicted()
        if len(data) >= INLINE_BYTES_MAX:
            assert (reservation is not None) == (run >= extent_length(len(data)))
        if reservation is None:
            return
        reservation.view[:] = data
        if self.rng.random() < 0.8 or len(self.writers) >= HOLDS_MAX // 4:
            self.commit(reservation, data)
        else:
            self.writers.append((reservation, data))

    def commit(self, reservation: Reservation, data: bytes) -> None:
        expire_at_ms = self.expiry_ms()
        if reservation.commit(expire_at_ms):
            self.model[reservation.key, reservation.space] = Value(data, expire_at_ms)
        else:
            reservation.abort()

    def finish_writing(self) -> None:
        """Commit or abort what was begun earlier."""
        if self.writers:
            reservation, data = self.writers.pop(self.rng.randrange(len(self.writers)))
            assert reservation.view == data
            if self.rng.random() < 0.7:
                self.commit(reservation, data)
            else:
                reservation.abort()

    def put(self) -> None:
        name, data, expire_at_ms = self.name(), self.value(), self.expiry_ms()
        created = self.store.stats.created
        if self.store.put(name[0], data, name[1], expire_at_ms):
            if name in self.model and self.store.stats.created > created:
                self.left += 1  # the room for the new value was that of the old one
            self.model[name] = Value(data, expire_at_ms)

    def lease(self) -> None:
        """Begin to read, with or without a time limit."""
        name = self.name()
        limit_s = self.rng.choice((0.0, 0.0, 5.0))
        lease = self.store.lease(name[0], name[1], limit_s)
        value = self.now_in_model(name)
        assert (lease is None) == (value is None)
        if lease is None or value is None:
            return
        assert bytes(lease.view) == value.data
        if len(self.readers) < HOLDS_MAX:
            self.readers.append(Reader(lease, value.data, self.clock.now_s + limit_s if limit_s else float("inf")))
        else:
            lease.release()

    def release(self) -> None:
        if self.readers:
            self.readers.pop(self.rng.randrange(len(self.readers))).lease.release()

    def fetch(self) -> None:
        name = self.name()
        fetch = self.rng.choice((self.store.fetch, self.store.fetch_untouched, self.store.peek))
        found = fetch(*name)
        value = self.now_in_model(name)
        assert (found is None) == (value is None)
        if isinstance(found, Lease):
            with found:
                assert value is not None
                assert bytes(found.view) == value.data
        elif value is not None:
            assert found == value.data

    def delete(self) -> None:
        names = [self.name() for _ in range(2)]
        space = names[0][1]
        there = {(key, space) for key, _ in names if self.now_in_model((key, space)) is not None}
        assert self.store.delete([key for key, _ in names], space) == len(there)
        for name in there:
            del self.model[name]

    def expire(self) -> None:
        name, at_ms = self.name(), self.clock.ms() + self.rng.randrange(-100, 10_000)
        value = self.now_in_model(name)
        assert self.store.expire(name[0], at_ms, name[1]) == (value is not None)
        if value is not None:
            value.expire_at_ms = at_ms
            if at_ms <= self.clock.ms():
                del self.model[name]

    def match(self) -> None:
        space = self.rng.randrange(SPACES)
        keys = [self.name()[0] for _ in range(5)]
        there = [self.now_in_model((key, space)) is not None for key in keys]
        assert self.store.match(keys, space) == (there.index(False) if False in there else len(keys))
        assert self.store.touch(keys, space) == sum(there)

    def walk_over_keys(self) -> None:
        """Every way to list keys gives those of the model."""
        space = self.rng.randrange(SPACES)
        keys = {key for key, its_space in self.model if its_space == space and self.now_in_model((key, space))}
        found: list[bytes] = []
        cursor, batch = self.store.scan(0, 10, space)
        found += batch
        while cursor:
            cursor, batch = self.store.scan(cursor, 10, space)
            found += batch
        assert sorted(found) == sorted(keys)
        drawn = self.store.random_key(space)
        assert drawn in keys if keys else drawn is None
        assert self.store.count(space) == len(keys)

    def pass_time(self) -> None:
        self.clock.now_s += self.rng.random() * 3
        if self.rng.random() < 0.5:
            self.store.collect_expired(self.rng.randrange(1, 10))

    def revoke(self) -> None:
        overdue = [r for r in self.readers if r.lease.held and r.limit_at_s <= self.clock.now_s]
        assert self.store.revoke_overdue() == len(overdue)
        assert all(not reader.lease.held for reader in overdue)

    def move(self) -> None:
        """A name for another, in this database or the other one; what had that name is gone."""
        old, new = self.name(), self.name()
        for name in (old, new):
            self.store.find(*name)  # it leaves now if its time has come: below it would be taken for replaced
        self.forget_evicted()
        value = self.now_in_model(old)
        assert self.store.move(old, new) == (value is not None)
        if value is not None:
            del self.model[old]
            self.model[new] = value

    def swap(self) -> None:
        """Every key is in the other database, with its value, its end and its readers."""
        self.store.swap(0, 1)
        self.model = {(key, 1 - space): value for (key, space), value in self.model.items()}

    def flush(self) -> None:
        if self.rng.random() < 0.1:
            space = self.rng.choice((None, 0, 1))
            leaving = [name for name in self.model if space is None or name[1] == space]
            self.store.collect_expired(KEYS * SPACES)
            self.forget_evicted()
            assert self.store.flush(space, later=self.rng.random() < 0.5) == sum(name in self.model for name in leaving)
            for name in leaving:
                self.model.pop(name, None)

    # ---- what must agree afterwards ------------------------------------------------------------------------------

    def longest_run_without_holds(self) -> int:
        """The longest stretch of the arena that no reader within its time and no writer holds, nor a key without an end
        under a policy that lets only the others leave."""
        staying = [reservation.extent for reservation, _ in self.writers]
        staying += [
            reader.lease.entry.extent
            for reader in self.readers
            if reader.lease.held and reader.limit_at_s > self.clock.now_s
        ]
        if self.store.policy.selective:
            staying += [entry.extent for entry in self.store.index if not entry.expire_at_ms]
        best = at = 0
        for extent in sorted(staying):
            best = max(best, extent.offset - at)
            at = max(at, extent.offset + extent.length)
        return max(best, self.store.arena.nbytes - at)

    def forget_evicted(self) -> None:
        """Take what the store has dropped by itself out of the model; it must be as many as the store says."""
        gone = [name for name in self.model if self.store.index.get(*name) is None]
        stats = self.store.stats
        self.left += len(gone)
        assert self.left == stats.evicted + stats.expired
        for name in gone:
            del self.model[name]

    def check(self) -> None:
        self.store.check_integrity()
        self.retired += self.store.retired_bytes > 0
        self.forget_evicted()
        assert len(self.store.index) == len(self.model), "a key came back, or one was lost"
        for entry in self.store.index:
            value = self.model[entry.key, entry.space]
            assert (entry.length, entry.expire_at_ms) == (len(value.data), value.expire_at_ms)
        for reader in self.readers:
            if not reader.lease.held:
                assert reader.limit_at_s <= self.clock.now_s, "revoked before its time"
            else:
                assert bytes(reader.lease.view) == reader.data, "a writer wrote under a reader"
        self.readers = [reader for reader in self.readers if reader.lease.held]
        assert self.store.leases == len(self.readers)

    def step(self) -> None:
        steps: list[tuple[Callable[[], None], int]] = [
            (self.reserve, 8), (self.put, 6), (self.finish_writing, 2), (self.lease, 12), (self.release, 3),
            (self.fetch, 3), (self.delete, 1), (self.expire, 1), (self.match, 1), (self.walk_over_keys, 1),
            (self.pass_time, 2), (self.revoke, 1), (self.flush, 1), (self.move, 3), (self.swap, 1),
        ]  # fmt: skip
        act = self.rng.choices([step for step, _ in steps], [weight for _, weight in steps])[0]
        act()
        self.done[act.__name__] += 1
        self.check()

    def end(self) -> None:
        """Let go of everything: nothing may be left over."""
        for reader in self.readers:
            reader.lease.release()
        for reservation, _ in self.writers:
            reservation.abort()
        self.store.check_integrity()
        assert self.store.leases == self.store.reserved_bytes == self.store.retired_bytes == 0
        self.store.flush()
        assert self.store.used_bytes == 0
        assert self.store.allocator.free_bytes == self.store.arena.nbytes


@pytest.mark.parametrize(("seed", "arena_mib"), [(1, 4), (2, 4), (3, 6), (4, 8), (5, 8), (6, 5)])
def test_the_store_agrees_with_a_dict_after_every_step(seed: int, arena_mib: int) -> None:
    walk = Walk(seed, arena_mib * MIB)
    with closing(walk.store):
        for _ in range(STEPS):
            walk.step()
        walk.end()
    stats = walk.store.stats
    assert len(walk.done) == 15
    elsewhere = ("hit_tokens", "leased_bytes", "evicted_away")  # of engines' blocks, of the lane, of a disk
    counts = {name: count for name, count in stats.as_dict().items() if name not in elsewhere}
    assert min(counts.values()) > 0, stats
    assert walk.retired > 50
