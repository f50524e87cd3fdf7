"""The compiled way to the coldest entry lets the same leave, in the same order, as the way through Python does."""

import random
from collections.abc import Callable
from contextlib import closing

import pytest

from kvredis.storage.entry import INLINE_BYTES_MAX, Entry, Lease
from kvredis.storage.eviction.base import FIFO, LRU, Policy
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.storage.small_store import BLOCK_BYTES, BLOCKS, content, fill, keys_in, present, small_store

LENGTHS = (100, 9_000, INLINE_BYTES_MAX, 60_000, 60_000, 60_000, 300_000)


class SlowLRU(LRU):
    """LRU, of which the compiled part takes no short cut: it says itself what arrives."""

    def admit(self, entry: Entry) -> None:
        super().admit(entry)


class SlowFIFO(FIFO):
    """The same of FIFO."""

    def admit(self, entry: Entry) -> None:
        super().admit(entry)


def store_of(policy: Policy, clock: Callable[[], float]) -> Store:
    store = Store(
        Arena.create(2 * 1024 * 1024, HugepageMode.OFF),
        policy=policy,
        clock_ms=lambda: int(clock() * 1000),
        clock_s=clock,
    )
    store.inline_bytes_high = 100_000
    store.keep_journal(True)
    return store


def step(store: Store, rng: random.Random, leases: list[Lease]) -> None:
    """One thing that a client does, at random."""
    key, what = b"%d" % rng.randrange(200), rng.randrange(12)
    if what < 6:
        store.put(key + rng.choice([b"", b"", b"", b"kv_bytes", b"metadata"]), bytes(rng.choice(LENGTHS)))
    elif what == 6:
        store.fetch(key)
    elif what == 7 and (lease := store.lease(key)) is not None:
        leases.append(lease)
    elif what == 8 and leases:
        leases.pop(rng.randrange(len(leases))).release()
    elif what == 9:
        store.match([key, b"%d" % rng.randrange(200)])
    elif what == 10 and rng.randrange(10) == 0:
        store.affirm([key])
    elif what == 11 and rng.randrange(40) == 0:
        store.flush()
    store.turn += rng.randrange(3)


@pytest.mark.parametrize(("quick", "slow"), [(LRU, SlowLRU), (FIFO, SlowFIFO)])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_leave_in_the_same_order(quick: type[LRU | FIFO], slow: type[LRU | FIFO], seed: int) -> None:
    now_s = [1_000_000.0]
    stores = [store_of(policy(), lambda: now_s[0]) for policy in (quick, slow)]
    held: list[list[Lease]] = [[], []]
    left = 0
    for turn in range(3000):
        now_s[0] += 0.01
        for store, leases in zip(stores, held, strict=True):
            step(store, random.Random(f"{seed} {turn}"), leases)
        changes, expected = (store.take_journal() for store in stores)
        assert changes == expected, turn
        left += sum(change[0] == "evicted" for change in changes)
        assert stores[0].allocator.spans() == stores[1].allocator.spans(), turn
    assert left > 300, "the stores were full"
    for store, leases in zip(stores, held, strict=True):
        for lease in leases:
            lease.release()
        store.check_integrity()
        store.close()
    assert stores[0].stats.evicted_bytes == stores[1].stats.evicted_bytes


def test_what_was_looked_up_a_moment_ago_is_not_the_coldest() -> None:
    with closing(small_store()) as store:
        keys = fill(store)
        assert store.match(keys[:1]) == 1
        assert store.put(b"new", content(99))
        assert present(store, keys) == [keys[0], *keys[2:]]


def test_what_was_flushed_makes_room_before_the_coldest_leaves() -> None:
    with closing(small_store()) as store:
        assert store.put(b"coldest", content(1), 1)
        keys = fill(store, count=BLOCKS - 1)
        store.flush(0, later=True)
        assert store.put(b"new", content(2))
        assert present(store, keys) == []
        assert store.find(b"coldest", 1) is not None
        store.check_integrity()


def test_a_small_value_that_is_more_than_all_may_hold_is_the_one_that_stays() -> None:
    with closing(small_store()) as store:
        store.inline_bytes_high = 1000
        assert store.put(b"old", b"small")
        assert store.put(b"new", bytes(2000))
        assert keys_in(store) == [b"new"]
        store.check_integrity()


@pytest.mark.parametrize("length", [100, BLOCK_BYTES])
def test_none_leaves_by_the_short_way_where_none_may_leave(length: int) -> None:
    with closing(small_store()) as store:
        store.inline_bytes_high = 4000
        store.set_eviction(None)
        stored = [store.put(b"%d" % number, bytes(length)) for number in range(40)]
        assert len(keys_in(store)) == sum(stored) < 40
        assert store.stats.evicted == 0
        store.check_integrity()
