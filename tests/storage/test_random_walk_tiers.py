"""A seeded random walk over a store with a disk, against a plain dict; all that must agree is checked after every step.

The disk's jobs run some at a time, and in the middle of a write or a read another step may come in between, as with
threads. What the store gives up by itself the model learns from the journal. Devices fail at times; then blocks may be
lost, but never be another's, nor come back from the dead.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from xxhash import xxh3_128_digest

from kvredis.storage.disk import tier
from kvredis.storage.entry import INLINE_BYTES_MAX, Lease, Reservation
from kvredis.storage.tiering.manager import Bringing
from kvredis.storage.tiering.prefetch import PrefetchJob
from kvredis.storage.tiering.transfers import Kind

from .fake_files import Fault
from .small_store import Clock, content
from .tiered_store import MIB, TieredStore

STEPS = 800
KEYS = 30
SPACES = 2
HOLDS_MAX = 5
INLINE_BYTES_HIGH = 64 * 1024

Name = tuple[bytes, int]


@dataclass(slots=True)
class Value:
    """What a key of the model holds."""

    data: bytes
    expire_at_ms: int


@dataclass(frozen=True, slots=True)
class Terrain:
    """Where a walk goes."""

    seed: int
    policy: str = "LRU"
    keep: bool = True
    evicts: bool = True
    disk_bytes: int = 2 * MIB
    faults: bool = False
    run_part: int = tier.RUN_PART
    """Which part of the disk may be written in one call; of a small one the usual part is less than a block."""


class Walk:
    """The store, the model of it, and those who hold on to something or wait."""

    def __init__(self, terrain: Terrain, directory: Path) -> None:
        self.terrain = terrain
        self.directory = directory
        self.rng = random.Random(terrain.seed)
        self.clock = Clock()
        self.model: dict[Name, Value] = {}
        self.written: dict[bytes, bytes] = {}  # all contents that there ever were, by their checksums
        self.leases: list[tuple[Lease, bytes]] = []
        self.writers: list[tuple[Reservation, bytes]] = []
        self.waits: list[Bringing] = []
        self.told: list[Bringing] = []
        self.jobs: list[PrefetchJob[None]] = []
        self.numbers = count()
        self.done: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.nested = False  # a step is being done in the middle of another one's read or write
        self.errors: list[Exception] = []
        self.tiers = self.open()

    def open(self) -> TieredStore:
        terrain = self.terrain
        tiers = TieredStore(
            self.directory, policy=terrain.policy, keep=terrain.keep, disk_bytes=terrain.disk_bytes, clock=self.clock
        )
        tiers.store.inline_bytes_high = INLINE_BYTES_HIGH
        tiers.store.evicts = terrain.evicts
        tiers.store.journal = []
        tiers.files.plan = self.happen
        self.store = tiers.store
        return tiers

    # ---- choices -------------------------------------------------------------------------------------------------

    def name(self) -> Name:
        return b"%d" % self.rng.randrange(KEYS), self.rng.randrange(SPACES)

    def value(self) -> Value:
        """512 B to 256 KiB, each order of magnitude equally often."""
        ends = 0 if self.rng.random() < 0.8 else self.clock.ms() + self.rng.randrange(1, 20_000)
        return Value(content(next(self.numbers), int(512 * 512 ** self.rng.random())), ends)

    def happen(self, _: int, what: str) -> Fault | None:
        """At a step of the disk: another thread comes in between, or the device fails."""
        kind = what.split()[0]
        if kind in ("pwrite", "pread") and not self.nested and self.rng.random() < 0.3:
            self.nested = True
            with self.noted():
                self.act()
            self.nested = False
        if self.terrain.faults and self.rng.random() < 0.05:
            if kind == "pwrite":
                return self.rng.choice((Fault.ENOSPC, Fault.ENOSPC, Fault.FLIP, Fault.HALF))
            if kind == "pread":
                return Fault.EIO
        return None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep an error that would end in a job's future for `check`."""
        try:
            yield
        except Exception as error:
            self.errors.append(error)

    def follow(self, new: dict[Name, Value] | None = None) -> None:
        """Bring the model up to date with what the store has listed; `new` is what this step has set."""
        self.written.update((xxh3_128_digest(value.data), value.data) for value in (new or {}).values())
        journal = self.store.journal
        assert journal is not None
        events = journal[:]
        journal.clear()
        for event, key, space in events:
            name = key, space
            self.totals[event] += 1
            if event == "set":
                assert new is not None
                self.model[name] = new[name]
                continue
            value = self.model.pop(name)
            if event == "expired":
                assert 0 < value.expire_at_ms <= self.clock.ms(), "before its time"

    def visible(self, name: Name) -> Value | None:
        """The model's value, unless its time has come."""
        value = self.model.get(name)
        return None if value is not None and 0 < value.expire_at_ms <= self.clock.ms() else value

    # ---- what a step may do --------------------------------------------------------------------------------------

    def reserve(self) -> None:
        (key, space), value = self.name(), self.value()
        room = self.store.reserve(key, len(value.data), space, drop=self.rng.random() < 0.2)
        self.follow()
        if room is None:
            return
        room.view[:] = value.data
        if self.rng.random() < 0.8 or len(self.writers) >= HOLDS_MAX:
            self.commit(room, value)
        else:
            self.writers.append((room, value.data))

    def commit(self, room: Reservation, value: Value) -> None:
        room.commit(value.expire_at_ms)
        self.follow({(room.key, room.space): value})

    def finish_writing(self) -> None:
        if self.writers:
            room, data = self.writers.pop(self.rng.randrange(len(self.writers)))
            assert room.view == data, "another writer wrote into it"
            self.commit(room, Value(data, 0)) if self.rng.random() < 0.7 else room.abort()

    def put(self) -> None:
        name, value = self.name(), self.value()
        value.data = value.data[: INLINE_BYTES_MAX - 1]
        self.store.put(name[0], value.data, name[1], value.expire_at_ms)
        self.follow({name: value})

    def read(self) -> None:
        """What there is to be read is what was stored; what is not to be read is away, or not there."""
        name = self.name()
        value = self.visible(name)
        found = self.rng.choice((self.store.fetch, self.store.fetch_untouched, self.store.peek))(*name)
        self.follow()
        if found is None:
            assert (self.tiers.tier(*name) == "disk") == (value is not None)
            return
        assert value is not None
        assert (found.view if isinstance(found, Lease) else found) == value.data
        if not isinstance(found, Lease):
            return
        if len(self.leases) < HOLDS_MAX and self.rng.random() < 0.5:
            self.leases.append((found, value.data))
        else:
            found.release()

    def release(self) -> None:
        if self.leases:
            self.leases.pop(self.rng.randrange(len(self.leases)))[0].release()

    def bring(self) -> None:
        names = [self.name() for _ in range(self.rng.randrange(1, 5))]
        bringing = self.tiers.tiering.bring(names, self.told.append)
        self.follow()
        self.waits += [] if bringing is None else [bringing]
        if len(self.waits) > HOLDS_MAX:
            self.waits.pop(0).release()

    def use(self) -> None:
        """Take a caller's blocks, which have come, or end its wait."""
        if self.waits:
            self.waits.pop(self.rng.randrange(len(self.waits))).release()

    def prefetch(self) -> None:
        keys, space = [self.name()[0] for _ in range(8)], self.rng.randrange(SPACES)
        kind = self.rng.choice((Kind.PREFETCH, Kind.IDLE))
        deadline_s = self.clock.now_s + 1 if self.rng.random() < 0.3 else None
        job = self.tiers.tiering.prefetch(keys, space, kind=kind, deadline_s=deadline_s)
        self.follow()
        self.jobs += [] if job is None else [job]
        if len(self.jobs) > HOLDS_MAX:
            self.jobs.pop(0).cancel()

    def save(self) -> None:
        store = self.store
        since = self.rng.choice((0, store.writes, max(1, store.writes - 5)))
        asked = {entry: number for entry in store.unsaved if (number := store.write_of(entry)) >= since}
        evicted = self.tiers.disk.stats.evicted

        def saved(answer: bool) -> None:
            """Take what a caller is told: that what it wrote is safe, or that it is not."""
            self.totals["saved" if answer else "not saved"] += 1
            left = filter(store.is_unsaved, asked)  # what was flushed meanwhile may not be given back yet
            unsaved = [entry for entry in left if store.write_of(entry) == asked[entry]]
            with self.noted():
                assert not (answer and unsaved) or self.tiers.disk.stats.evicted > evicted

        self.tiers.tiering.saving.save(since, saved)

    def delete(self) -> None:
        name = self.name()
        assert self.store.delete([name[0]], name[1]) == (self.visible(name) is not None)
        self.follow()

    def expire(self) -> None:
        name = self.name()
        at_ms = self.rng.choice((0, self.clock.ms() + self.rng.randrange(-100, 10_000)))
        value = self.visible(name)
        assert self.store.expire(name[0], at_ms, name[1]) == (value is not None)
        self.follow({} if value is None else {name: Value(value.data, at_ms)})

    def match(self) -> None:
        space, keys = self.rng.randrange(SPACES), [self.name()[0] for _ in range(5)]
        there = [self.visible((key, space)) is not None for key in keys]
        assert self.store.match(keys, space) == [*there, False].index(False)
        assert self.store.touch(keys, space) == self.store.affirm(keys, space) == sum(there)
        self.follow()

    def move(self) -> None:
        old, new = self.name(), self.name()
        for name in (old, new):
            self.store.find(*name)  # it leaves now if its time has come
        self.follow()
        value = self.visible(old)
        assert self.store.move(old, new) == (value is not None)
        if value is not None:
            self.follow({new: value})

    def swap(self) -> None:
        self.store.swap(0, 1)
        self.model = {(key, 1 - space): value for (key, space), value in self.model.items()}

    def flush(self) -> None:
        if self.rng.random() < 0.1:
            space = self.rng.choice((None, 0, 1))
            staying = {name: value for name, value in self.model.items() if space is not None and name[1] != space}
            assert self.store.flush(space, later=self.rng.random() < 0.5) == len(self.model) - len(staying)
            self.model = staying

    def pass_time(self) -> None:
        self.clock.now_s += self.rng.random() * 3
        self.store.turn += self.rng.randrange(60)
        self.store.collect_expired(self.rng.randrange(1, 10))
        self.tiers.tiering.tick()
        self.follow()

    def work(self) -> None:
        """The disk's threads come to some of their jobs."""
        if not self.nested:
            self.tiers.io.run(self.rng.randrange(1, 6))
            self.follow()

    def restart(self) -> None:
        """End all callers and start again; what is on disk by then is there again."""
        if self.nested or self.rng.random() < 0.5:
            return
        self.let_go()
        if self.rng.random() < 0.5:
            self.nested = True  # a caller who came in between would hold on to a store that is closed
            self.save()
            self.tiers.io.run()
            self.nested = False
            self.follow()
        if self.tiers.disk.waits:  # what is on disk then is of another moment
            return
        on_disk = list(self.tiers.disk.records())
        self.totals.update(self.store.stats.as_dict() | self.tiers.tiering.stats.as_dict())
        self.tiers.files.plan = None
        self.store.close(save=False)
        self.tiers = self.open()
        self.model = {each.name: Value(self.written[each.checksum], each.expire_at_ms) for each in on_disk}
        self.model = {name: value for name, value in self.model.items() if self.visible(name) is not None}

    # ---- what must agree afterwards ------------------------------------------------------------------------------

    def check(self) -> None:
        if self.errors:
            raise self.errors[0]
        self.tiers.check()
        self.follow()
        index = self.store.index
        assert len(index) == len(self.model), "a key came back, or one was lost"
        for entry in index:
            value = self.model[entry.key, entry.space]
            assert (entry.length, entry.expire_at_ms) == (len(value.data), value.expire_at_ms)
        for lease, data in self.leases:
            assert lease.view == data, "a writer wrote under a reader"
        assert len(self.told) == len(set(map(id, self.told))), "told twice"

    def act(self) -> None:
        steps: list[tuple[Callable[[], None], int]] = [
            (self.reserve, 10), (self.put, 6), (self.finish_writing, 3), (self.read, 10), (self.release, 4),
            (self.bring, 8), (self.use, 4), (self.prefetch, 2), (self.save, 1), (self.delete, 1), (self.expire, 1),
            (self.match, 2), (self.move, 2), (self.swap, 1), (self.flush, 1), (self.pass_time, 2), (self.work, 14),
        ]  # fmt: skip
        self.follow()
        act = self.rng.choices([step for step, _ in steps], [weight for _, weight in steps])[0]
        act()
        self.done[act.__name__] += 1
        self.check()

    def let_go(self) -> None:
        """Let go of everything: nothing may be left over."""
        holds: list[Lease | Bringing] = [*(lease for lease, _ in self.leases), *self.waits]
        for hold in holds:
            hold.release()
        for room, _ in self.writers:
            room.abort()
        for job in self.jobs:
            job.cancel()
        self.leases, self.writers, self.waits = [], [], []
        self.nested = True  # no other step comes in between
        self.tiers.io.run()
        self.nested = False
        self.check()
        assert self.store.leases == self.store.reserved_bytes == self.store.retired_bytes == 0
        assert all(job.is_finished for job in self.jobs)
        assert self.tiers.tiering._listed_bytes == 0
        assert not len(self.tiers.tiering.transfers)
        ended = self.tiers.tiering.transfers.figures()
        assert ended[Kind.SPILL]["failed"] == 0, "a job died"
        assert self.terrain.faults or not any(of_kind["failed"] for of_kind in ended.values())
        died = sum(figures.failed for figures in self.tiers.io.figures().values())
        assert died == sum(of_kind["failed"] + of_kind["refused"] for of_kind in ended.values()), "a job died"
        self.jobs = []

    def end(self) -> None:
        """Read everything that is there, then take it away."""
        self.let_go()
        self.tiers.files.plan = None
        for name in list(self.model):
            value = self.visible(name)
            data = self.tiers.get(*name)
            self.follow()
            assert data == (None if value is None or name not in self.model else value.data)
        self.totals.update(self.store.stats.as_dict() | self.tiers.tiering.stats.as_dict())
        self.tiers.check()
        self.store.flush()
        self.tiers.disk.settle()
        assert self.store.used_bytes == self.store.away == len(self.store.unsaved) == len(self.tiers.disk) == 0
        assert self.store.allocator.free_bytes == self.store.arena.nbytes


TERRAINS = [
    Terrain(1),
    Terrain(2, disk_bytes=8 * MIB),
    Terrain(3, faults=True),
    Terrain(4, "S3FIFO"),
    Terrain(5, "MRU", faults=True),
    Terrain(6, "LFU", keep=False),
    Terrain(7, "FIFO", evicts=False, disk_bytes=32 * MIB),
    Terrain(8, keep=False, faults=True),
    Terrain(9, run_part=4),
    Terrain(10, faults=True, run_part=4),
]


@pytest.mark.parametrize("terrain", TERRAINS, ids=str)
def test_a_store_with_a_disk_agrees_with_a_dict_after_every_step(
    tmp_path: Path, terrain: Terrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "RUN_PART", terrain.run_part)
    walk = Walk(terrain, tmp_path)
    try:
        for step in range(STEPS):
            walk.act()
            if step % 200 == 199:
                walk.restart()
        walk.end()
    finally:
        walk.tiers.store.close(save=False)
    totals = walk.totals
    assert len(walk.done) == 17
    assert min(totals[name] for name in ("spilled", "promoted", "unloaded", "expired", "saved", "hits")) > 0, totals
    assert terrain.faults or (totals["lost"] == totals["spill_failed"] == totals["not saved"] == 0)
    assert terrain.evicts or totals["evicted"] == totals["spill_dropped"] == 0
