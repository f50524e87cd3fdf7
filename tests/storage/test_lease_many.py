"""Leases of many blocks at a time: what is held and until when, natively and in Python alike."""

import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from kvredis.storage import lease_many
from kvredis.storage.database import unplaced
from kvredis.storage.entry import NOWHERE, PAYLOAD_OFFSET_BYTES, Entry, LeaseRun
from kvredis.storage.eviction.base import make_policy
from kvredis.storage.lease_many import Place, end_in_python, hold_in_python
from kvredis.storage.memory.allocator import Extent
from kvredis.storage.store import Store

from .small_store import ARENA_BYTES, BLOCK_BYTES, BLOCKS, Clock, content, fill, present, small_store


class Way(NamedTuple):
    """One way to do the work."""

    name: str
    hold: Callable[..., Any]
    end: Callable[..., Any]


PYTHON = Way("python", hold_in_python, end_in_python)
WAYS = [PYTHON] if lease_many.hold is hold_in_python else [PYTHON, Way("native", lease_many.hold, lease_many.end)]


@contextmanager
def by(way: Way) -> Iterator[None]:
    """Do the work that way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease_many, "hold", way.hold)
        patch.setattr(lease_many, "end", way.end)
        yield


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Each way that there is here."""
    with by(request.param):
        yield request.param


@pytest.fixture
def clock() -> Clock:
    """Time that stands still."""
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    """A small one."""
    return small_store(clock)


def places(run: LeaseRun) -> list[Place]:
    """The holds of a run."""
    return [(run, at, entry.extent.length) for at, entry in enumerate(run.entries) if entry is not None]


def bytes_of(store: Store, entry: object) -> bytes:
    """What lies where an entry is."""
    assert isinstance(entry, Entry)
    start = entry.extent.offset + PAYLOAD_OFFSET_BYTES
    return bytes(store.arena.view[start : start + entry.length])


def test_a_run_finds_blocks_small_values_and_nothing_each_in_its_place(way: Way, store: Store, clock: Clock) -> None:
    store.put(b"large", content(1))
    store.put(b"small", b"value")
    store.put(b"ending", content(2), expire_at_ms=clock.ms() + 5)
    store.put(b"over", content(3), expire_at_ms=clock.ms() + 1)
    clock.now_s += 0.002
    found, run = store.lease_run([b"large", b"none", b"small", b"ending", b"over", b"large"], 0, 5.0)
    assert [type(each) for each in found] == [Entry, type(None), bytes, Entry, type(None), Entry]
    assert (found[2], bytes_of(store, found[0]), bytes_of(store, found[3])) == (b"value", content(1), content(2))
    assert (store.leases, store.stats.hits, store.stats.misses, store.stats.expired) == (3, 4, 2, 1)
    large = store.find(b"large")
    assert large is not None
    assert (large.hits, large.leases, large.accessed_s) == (2, 2, clock.now_s)
    assert run.until_s == clock.now_s + 5.0
    assert store.end_leases(places(run)) == 3
    assert store.leases == large.leases == 0
    store.check_integrity()


def test_a_hold_is_ended_once_however_often_it_is_said(way: Way, store: Store) -> None:
    fill(store, count=3)
    _, run = store.lease_run([b"fill:0", b"fill:1"], 0, 5.0)
    held = places(run)
    assert store.end_leases([held[0], held[0]]) == 1
    assert run.held
    assert store.end_leases(held) == 1
    assert not run.held
    assert store.leases == 0


def test_what_was_deleted_while_it_was_held_is_free_when_the_last_hold_ends(way: Way, store: Store) -> None:
    fill(store)
    _, one = store.lease_run([b"fill:0", b"fill:1"], 0, 5.0)
    _, two = store.lease_run([b"fill:0"], 0, 5.0)
    store.delete([b"fill:0"])
    store.put(b"fill:1", content(50))
    free_bytes = store.allocator.free_bytes
    store.end_leases(places(one))
    assert store.retired_bytes == ARENA_BYTES // BLOCKS
    store.end_leases(places(two))
    assert store.retired_bytes == 0
    assert store.allocator.free_bytes == free_bytes + 2 * ARENA_BYTES // BLOCKS
    store.check_integrity()


def test_a_run_is_revoked_when_its_time_has_passed_and_not_before(way: Way, store: Store, clock: Clock) -> None:
    keys = fill(store)
    _, run = store.lease_run(keys, 0, 10.0)
    held = places(run)
    assert store.end_leases(held[:1]) == 1
    clock.now_s += 9.99
    assert store.revoke_overdue() == 0
    clock.now_s += 0.02
    assert store.put(b"new", content(99))
    assert store.revoke_overdue() == BLOCKS - 1
    assert store.stats.leases_revoked == BLOCKS - 1
    assert not run.held
    assert store.end_leases(held) == 0
    assert store.leases == 0
    store.check_integrity()


def test_runs_that_have_ended_are_forgotten_though_their_time_has_not_come(way: Way, store: Store) -> None:
    fill(store)
    for _ in range(2000):
        _, run = store.lease_run([b"fill:0", b"fill:1"], 0, 600.0)
        store.end_leases(places(run))
    assert len(store._limits) < 300


def test_a_lookup_before_is_older_than_the_use(way: Way, store: Store) -> None:
    keys = fill(store)
    store.match(keys)
    _, run = store.lease_run([keys[-1]], 0, 5.0)
    store.end_leases(places(run))
    for number in range(3):
        store.put(b"new:%d" % number, content(number))
    assert keys[-1] in present(store, keys)
    assert keys[-2] not in present(store, keys)


@pytest.mark.parametrize("policy", ["LRU", "LFU", "S3FIFO", "FIFO"])
@pytest.mark.parametrize("seed", range(3))
def test_both_ways_leave_the_same_behind(policy: str, seed: int) -> None:
    stories = []
    for way in WAYS:
        with by(way):
            stories.append(_story(policy, seed))
    assert all(told == stories[0] for told in stories)


def _story(policy: str, seed: int) -> list[object]:
    """Random work, each step with what it gave and the order in which blocks would leave then."""
    rng, clock, told = random.Random(seed), Clock(), list[object]()
    store = small_store(clock)
    store.policy = make_policy(policy)
    runs: list[list[Place]] = []
    keys = [b"k%d" % number for number in range(24)]

    def lease() -> object:
        found, run = store.lease_run(rng.choices(keys, k=rng.randrange(1, 6)), rng.randrange(2), rng.choice((1.0, 5.0)))
        runs.append(places(run))
        return [each.key if isinstance(each, Entry) else each for each in found]

    def end() -> object:
        return store.end_leases(runs.pop(rng.randrange(len(runs)))) if runs else None

    def put() -> object:
        length = rng.choice((10, 20_000, BLOCK_BYTES))
        end_ms = rng.choice((0, 0, clock.ms() + 3000))
        return store.put(rng.choice(keys), content(rng.randrange(99), length), rng.randrange(2), end_ms)

    def wait() -> object:
        clock.now_s += 0.5
        return store.revoke_overdue()

    for _ in range(400):
        step = rng.choice((lease, lease, end, put, put, wait, lambda: store.delete([rng.choice(keys)])))
        told.append((step(), store.leases, store.retired_bytes, [entry.key for entry in store.policy.victims()]))
    for held in runs:
        store.end_leases(held)
    store.check_integrity()
    assert store.leases == store.retired_bytes == 0
    return [*told, store.stats.as_dict()]


def entry(key: bytes, extent: Extent = NOWHERE) -> Entry:
    """A block that no store knows."""
    return Entry(key, 0, 5, extent, None)


def test_in_python_the_store_is_asked_about_each_key() -> None:
    small, here = Entry(b"small", 0, 1, NOWHERE, b"x"), entry(b"here", Extent(4096, 4096))
    here.tokens = 256
    entries = {each.key: each for each in (small, here)}
    asked: list[bytes] = []

    def hit(key: bytes) -> Entry | None:
        asked.append(key)
        return entries.get(key)

    touched: list[Entry] = []
    found, held, sums = hold_in_python([b"here", b"none", b"small"], entries, hit, touched.append, 7.5)
    assert (found, held) == ([here, None, b"x"], [here, None, None])
    assert sums == (0, 1, here.length, 256), "used, leases, bytes and tokens"
    assert asked == [b"here", b"none", b"small"]
    assert (here.hits, here.leases, touched) == (0, 1, []), "the store counts the hit itself"


@pytest.mark.skipif(len(WAYS) == 1, reason="the extension is not built here")
def test_natively_the_store_is_asked_only_about_what_is_not_simply_there() -> None:
    way = WAYS[1]
    here, away, ending = entry(b"here", Extent(4096, 4096)), entry(b"away"), entry(b"ending", Extent(0, 4096))
    ending.expire_at_ms = 1
    here.tokens = 256
    asked: list[bytes] = []
    touched: list[Entry] = []
    entries = {each.key: each for each in (here, away, ending)}
    keys = [b"here", b"away", b"none", b"ending"]
    found, held, sums = way.hold(keys, entries, lambda key: asked.append(key), touched.append, 7.5)
    assert (found, held) == ([here, None, None, None], [here, None, None, None])
    assert sums == (1, 1, here.length, 256), "used, leases, bytes and tokens"
    assert asked == [b"away", b"none", b"ending"]
    assert touched == [here]
    assert (here.hits, here.leases, here.accessed_s) == (1, 1, 7.5)


def test_only_entries_that_are_visible_no_more_are_told_of(way: Way) -> None:
    visible, gone, other = (entry(key, Extent(0, 4096)) for key in (b"visible", b"gone", b"visible"))
    told: list[Entry] = []
    for spaces, left in (([{b"visible": visible}], [gone, other]), (None, [visible, gone, other])):
        told.clear()
        for each in (visible, gone, other):
            each.leases = 1
        run = LeaseRun([visible, gone, None, other], 0.0)
        assert way.end([(run, at, 4096) for at in range(4)], spaces, told.append) == 3
        assert told == left
        assert run.entries == [None] * 4


def test_an_error_of_the_policy_is_not_lost(way: Way) -> None:
    def broken(_: object) -> None:
        raise KeyError("not in the order")

    here = entry(b"here", Extent(4096, 4096))
    with pytest.raises(KeyError, match="order"):
        way.hold([b"here"], {b"here": here}, broken, broken, 0.0)
    with pytest.raises(KeyError, match="order"):
        way.hold([b"none"], {}, broken, broken, 0.0)
    here.leases = 1
    with pytest.raises(KeyError, match="order"):
        way.end([(LeaseRun([here], 0.0), 0, 4096)], None, broken)


@pytest.mark.skipif(len(WAYS) == 1, reason="the extension is not built here")
class TestNatively:
    """The functions in C by themselves."""

    def test_what_they_cannot_work_with_is_refused(self) -> None:
        _, native = WAYS
        run, none = LeaseRun([None], 0.0), lambda _: None
        bad: list[tuple[Any, ...]] = [(), ([], [], none, none, 0.0), ((), {}, none, none, 0.0)]
        for args in (*bad, ([b"k"], {}, lambda _: 5, none, 0.0)):
            with pytest.raises(TypeError):
                native.hold(*args)
        wrong: tuple[object, ...] = ((run, 1, 0), (run, -1, 0), (run, "0", 0), (run, 0), [run, 0, 0], (None, 0, 0), 5)
        for place in wrong:
            with pytest.raises(TypeError):
                native.end([place], None, none)
        bad = [(), ((), None, none), ([], {}, none)]
        for args in bad:
            with pytest.raises(TypeError):
                native.end(*args)
        with pytest.raises(ValueError, match="more often"):
            native.end([(LeaseRun([entry(b"k")], 0.0), 0, 0)], None, none)
        stranger = entry(b"k")
        stranger.leases, stranger.database = 1, unplaced(16)
        with pytest.raises(ValueError, match="no database"):
            native.end([(LeaseRun([stranger], 0.0), 0, 0)], [{}], none)

    def test_keys_that_go_while_they_are_looked_for_do_no_harm(self) -> None:
        _, native = WAYS
        keys = [b"key %d" % number for number in range(100)]
        with pytest.raises(RuntimeError, match="changed"):
            native.hold(keys, {}, lambda _: keys.clear(), None, 0.0)

    def test_nothing_is_kept_of_what_has_ended(self) -> None:
        _, native = WAYS
        held = entry(b"key", Extent(4096, 4096))
        held.hits = 10**6
        now_s, counts = 123.25, []

        def lend() -> None:
            _, entries, _ = native.hold([b"key", b"none"], {b"key": held}, lambda _: None, id, now_s)
            run = LeaseRun(entries, now_s)
            assert native.end([(run, 0, 4096), (run, 1, 0)], [{b"key": held}], None) == 1

        for _ in range(4):
            for _ in range(500):
                lend()
            gc.collect()
            counts.append((sys.getrefcount(held), sys.getrefcount(held.extent), sys.getrefcount(None) // 1000))
        assert counts[1] == counts[3]
        assert held.hits == 10**6 + 2000
