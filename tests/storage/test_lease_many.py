"""Leases of many blocks at a time: what is held and until when."""

import gc
import random
import sys

import pytest

from kvredis.storage.entry import PAYLOAD_OFFSET_BYTES, Entry, LeaseRun, Place
from kvredis.storage.eviction.base import make_policy
from kvredis.storage.store import Store

from .small_store import ARENA_BYTES, BLOCK_BYTES, BLOCKS, Clock, content, fill, present, small_store


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


def test_a_run_finds_blocks_small_values_and_nothing_each_in_its_place(store: Store, clock: Clock) -> None:
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


def test_a_hold_is_ended_once_however_often_it_is_said(store: Store) -> None:
    fill(store, count=3)
    _, run = store.lease_run([b"fill:0", b"fill:1"], 0, 5.0)
    held = places(run)
    assert store.end_leases([held[0], held[0]]) == 1
    assert run.held
    assert store.end_leases(held) == 1
    assert not run.held
    assert store.leases == 0


def test_what_was_deleted_while_it_was_held_is_free_when_the_last_hold_ends(store: Store) -> None:
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


def test_a_run_is_revoked_when_its_time_has_passed_and_not_before(store: Store, clock: Clock) -> None:
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


def test_runs_that_have_ended_are_forgotten_though_their_time_has_not_come(store: Store) -> None:
    fill(store)
    for _ in range(2000):
        _, run = store.lease_run([b"fill:0", b"fill:1"], 0, 600.0)
        store.end_leases(places(run))
    assert len(store._limits) < 300


def test_a_lookup_before_is_older_than_the_use(store: Store) -> None:
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
def test_a_run_leaves_behind_what_leases_one_by_one_do(policy: str, seed: int) -> None:
    assert _story(policy, seed, as_runs=True) == _story(policy, seed, as_runs=False)


def _story(policy: str, seed: int, *, as_runs: bool) -> list[object]:
    """Random work, each step with what it gave and the order in which blocks would leave then."""
    rng, clock, told = random.Random(seed), Clock(), list[object]()
    store = small_store(clock)
    store.policy = make_policy(policy)
    runs: list[list[Place]] = []
    keys = [b"k%d" % number for number in range(24)]

    def lease() -> object:
        names, space = rng.choices(keys, k=rng.randrange(1, 6)), rng.randrange(2)
        limit_s, held, told = rng.choice((1.0, 5.0)), list[Place](), list[object]()
        for some in [names] if as_runs else [[name] for name in names]:
            found, run = store.lease_run(some, space, limit_s)
            held += places(run)
            told += [each.key if isinstance(each, Entry) else each for each in found]
        runs.append(held)
        return told

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


def test_an_error_of_the_policy_is_not_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise KeyError("not in the order")

    fill(store, count=1)
    monkeypatch.setattr(store.policy, "touch", broken)
    with pytest.raises(KeyError, match="order"):
        store.lease_run([b"fill:0"], 0, 5.0)


def test_a_place_that_is_none_is_refused(store: Store) -> None:
    for place in ((None, 0, 0), (LeaseRun([None], 0.0), "0", 0), (LeaseRun([None], 0.0), 1, 0), 5):
        with pytest.raises((TypeError, IndexError, AttributeError)):
            store.end_leases([place])  # type: ignore[list-item]


def test_nothing_is_kept_of_what_has_ended(store: Store) -> None:
    fill(store, count=1)
    held = store.find(b"fill:0")
    assert held is not None
    counts = []
    for _ in range(4):
        for _ in range(500):
            _, run = store.lease_run([b"fill:0", b"none"], 0, 0.0)
            assert store.end_leases([(run, 0, 4096), (run, 1, 0)]) == 1
        store.revoke_overdue()
        gc.collect()
        counts.append((sys.getrefcount(held), sys.getrefcount(held.extent), sys.getrefcount(None) // 1000))
    assert counts[1] == counts[3]
    assert held.hits == 2000
