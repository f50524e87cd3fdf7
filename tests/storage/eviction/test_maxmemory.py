"""Redis' maxmemory and its policies under a real store: who leaves, who stays, and what is refused."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from kvredis.storage.entry import NOWHERE, Entry
from kvredis.storage.eviction.base import REDIS_POLICIES, make_policy
from kvredis.storage.store import Store
from tests.storage.small_store import ARENA_BYTES, BLOCKS, Clock, content, fill, present, read, small_store
from tests.storage.tiered_store import TieredStore

VOLATILE = [name for name in REDIS_POLICIES if name.startswith("volatile")]
BLOCK_EXTENT_BYTES = ARENA_BYTES // BLOCKS
FAR_S = 1000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[Store]:
    with closing(small_store(clock)) as store:
        yield store
        store.check_integrity()


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore(tmp_path) as tiers:
        yield tiers


def under(store: Store, policy: str) -> None:
    store.set_eviction(None if policy == "noeviction" else make_policy(policy))


def end_in(store: Store, clock: Clock, key: bytes, seconds: float) -> None:
    assert store.expire(key, clock.ms() + int(1000 * seconds))


# ---- the order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VOLATILE)
def test_only_keys_with_an_end_leave_under_a_volatile_policy(store: Store, clock: Clock, name: str) -> None:
    under(store, name)
    keys = fill(store)
    for key in keys[::2]:
        end_in(store, clock, key, FAR_S)
    for number in range(BLOCKS // 2):
        assert store.put(b"new:%d" % number, content(number))
    assert present(store, keys) == keys[1::2]
    assert not store.put(b"one more", content(1)), "nothing is left that may leave"
    assert store.stats.refused == 1
    store.check_integrity()


@pytest.mark.parametrize("name", VOLATILE)
def test_small_values_are_refused_when_none_of_them_has_an_end(store: Store, clock: Clock, name: str) -> None:
    under(store, name)
    count = 0
    while store.put(b"%d" % count, bytes(12_000)):
        count += 1
    assert store.count() == count
    end_in(store, clock, b"3", FAR_S)
    assert store.put(b"new", bytes(12_000))
    assert present(store, [b"2", b"3", b"4", b"new"]) == [b"2", b"4", b"new"]


def test_an_end_that_is_taken_back_protects_the_key_again(store: Store, clock: Clock) -> None:
    under(store, "volatile-lru")
    keys = fill(store)
    end_in(store, clock, keys[0], FAR_S)
    end_in(store, clock, keys[1], FAR_S)
    store.expire(keys[0], 0)
    store.put(b"new", content(1))
    assert present(store, keys[:2]) == keys[:1]


def test_of_keys_with_an_end_the_least_recently_used_leaves(store: Store, clock: Clock) -> None:
    under(store, "volatile-lru")
    keys = fill(store)
    for key in keys[:4]:
        end_in(store, clock, key, FAR_S)
    read(store, keys[0])
    store.put(b"new", content(1))
    assert present(store, keys[:4]) == [keys[0], *keys[2:4]]


def test_of_keys_with_an_end_the_least_frequently_used_leaves(store: Store, clock: Clock) -> None:
    under(store, "volatile-lfu")
    keys = fill(store)
    for key in keys[:3]:
        read(store, key)
        end_in(store, clock, key, FAR_S)
    read(store, keys[0])
    read(store, keys[2])
    store.put(b"new", content(1))
    assert present(store, keys[:3]) == [keys[0], keys[2]]


def test_under_volatile_ttl_the_key_whose_end_is_nearest_leaves(store: Store, clock: Clock) -> None:
    under(store, "volatile-ttl")
    keys = fill(store)
    for key, seconds in zip(keys, (400, 100, 300, 200), strict=False):
        end_in(store, clock, key, seconds)
    end_in(store, clock, keys[1], 500)  # it was the nearest until now
    for left in ([0, 1, 2], [0, 1], [1], []):
        store.put(b"new:%d" % len(left), content(1))
        assert present(store, keys[:4]) == [keys[place] for place in left]


def test_ends_that_change_time_and_again_leave_nothing_behind(clock: Clock) -> None:
    policy = make_policy("volatile-ttl")
    entries = [Entry(b"%d" % number, 0, 1, NOWHERE, None) for number in range(8)]
    for entry in entries:
        policy.admit(entry)
    for turn in range(2000):
        entries[turn % 8].expire_at_ms = 1 + (turn * 7) % 1000
        policy.end_changed(entries[turn % 8])
    assert list(policy.victims()) == sorted(entries, key=lambda entry: entry.expire_at_ms)
    assert len(policy._ending._heap) < 200  # type: ignore[attr-defined]


def test_allkeys_random_draws_every_entry_once_and_any_of_them_first() -> None:
    policy = make_policy("allkeys-random")
    entries = [Entry(b"%d" % number, 0, 1, NOWHERE, None) for number in range(20)]
    for entry in entries:
        policy.admit(entry)
    policy.forget(entries.pop(3))
    entries[5].leases = 1
    assert sorted(each.key for each in policy.victims()) == sorted(each.key for each in entries if not each.leases)
    first = {next(policy.victims()).key for _ in range(1000)}
    assert len(first) == len(entries) - 1


@pytest.mark.parametrize("name", REDIS_POLICIES)
def test_a_block_that_is_read_or_being_written_never_leaves(store: Store, clock: Clock, name: str) -> None:
    under(store, name)
    keys = fill(store, count=BLOCKS - 1)
    for key in keys:
        end_in(store, clock, key, FAR_S)
    with store.reserve(b"coming", len(content(0))) as coming, store.fetch(keys[0]) as lease:  # type: ignore[union-attr]
        before = bytes(lease.view)
        coming.view[:4] = b"head"
        store.set_bound(2 * BLOCK_EXTENT_BYTES)
        store.shrink()
        assert present(store, keys) == keys[:1]
        assert not store.put(b"new", content(1)), "the bound is held by what cannot leave"
        assert (bytes(lease.view), bytes(coming.view[:4])) == (before, b"head")


# ---- another policy at run time ------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", REDIS_POLICIES)
@pytest.mark.parametrize("old", ["allkeys-lru", "allkeys-lfu", "allkeys-fifo", "volatile-ttl"])
def test_every_policy_can_take_over_from_another(store: Store, clock: Clock, old: str, new: str) -> None:
    under(store, old)
    keys = fill(store)
    for number in range(50):
        store.put(b"small:%d" % number, b"x")
    for key in keys[::3]:
        end_in(store, clock, key, FAR_S)
    under(store, new)
    store.check_integrity()
    for number in range(4):
        assert store.put(b"new:%d" % number, content(number))
    assert store.stats.evicted == 4


def test_lru_knows_at_once_what_was_used_under_another_policy(store: Store, clock: Clock) -> None:
    under(store, "allkeys-fifo")
    keys = fill(store)
    for key in (keys[0], *keys[2:]):
        clock.now_s += 1
        read(store, key)
    under(store, "allkeys-lru")
    store.put(b"new", content(1))
    assert present(store, keys[:3]) == [keys[0], keys[2]]


def test_lfu_knows_at_once_how_often_a_value_was_read(store: Store) -> None:
    store.put(b"k", b"v")
    for _ in range(3):
        store.fetch(b"k")
    under(store, "allkeys-lfu")
    entry = store.find(b"k")
    assert entry is not None
    assert store.inline_policy.uses(entry) == 4
    under(store, "volatile-lfu")
    store.expire(b"k", 2**60)
    assert store.inline_policy.uses(entry) == 4, "an end changes the order that it is in, not its uses"
    store.put(b"k", b"w")
    entry = store.find(b"k")
    assert entry is not None
    assert store.inline_policy.uses(entry) == 5, "as does what is written over it"


# ---- the bound -----------------------------------------------------------------------------------------------------


def test_a_lower_bound_is_reached_by_letting_the_coldest_leave(store: Store) -> None:
    keys = fill(store)
    store.set_bound(4 * BLOCK_EXTENT_BYTES)
    store.shrink()
    assert present(store, keys) == keys[-4:]
    store.put(b"new", content(1))
    assert present(store, [*keys, b"new"]) == [*keys[-3:], b"new"]
    store.set_bound(0)
    assert store.limit_bytes == ARENA_BYTES
    assert store.put(b"newer", content(1))
    assert present(store, keys) == keys[-3:]


def test_large_and_small_values_leave_in_one_order(store: Store, clock: Clock) -> None:
    names = []
    for number in range(8):
        clock.now_s += 1
        names.append(b"%d" % number)
        store.put(names[-1], content(number) if number % 2 else bytes(10_000))
    store.set_bound(store.used_bytes - 1)
    for count in range(1, 8):
        store.shrink()
        assert present(store, names) == names[count:]
        store.set_bound(store.used_bytes - 1)


def test_without_eviction_a_bound_refuses_what_is_new_and_keeps_what_is_there(store: Store) -> None:
    keys = fill(store, count=4)
    store.put(b"small", b"x")
    under(store, "noeviction")
    store.set_bound(store.used_bytes + 100)
    store.shrink()
    assert not store.put(b"new", content(1))
    assert not store.put(b"new", b"y")
    assert store.put(b"small", b"z"), "what needs no more room may take the place of the old"
    assert present(store, keys) == keys
    store.set_bound(1)
    assert not store.shrink()
    assert present(store, keys) == keys


def test_what_is_longer_than_the_bound_pushes_nothing_out(store: Store) -> None:
    store.put(b"k", b"v")
    store.set_bound(BLOCK_EXTENT_BYTES - 1)
    assert not store.put(b"new", content(1))
    assert store.find(b"k") is not None


def test_a_bound_that_was_lowered_far_is_reached_step_by_step(store: Store) -> None:
    for number in range(3000):
        store.put(b"%d" % number, b"x")
    store.set_bound(100_000)
    steps = 1
    while store.shrink():
        steps += 1
    assert steps == 3
    assert store.used_bytes <= 100_000
    assert store.find(b"2999") is not None


def test_what_is_held_beside_the_values_counts_against_the_bound(store: Store) -> None:
    keys = fill(store, count=4)
    store.set_bound(4 * BLOCK_EXTENT_BYTES)
    store.beside_bytes = BLOCK_EXTENT_BYTES
    store.shrink()
    assert present(store, keys) == keys[1:]


# ---- with a disk below ---------------------------------------------------------------------------------------------


def test_what_leaves_memory_for_a_bound_is_still_there_when_the_disk_has_it(tiers: TieredStore) -> None:
    keys = [b"%d" % number for number in range(8)]
    for number, key in enumerate(keys):
        tiers.store.put(key, content(number))
    tiers.tiering.spill([entry for key in keys if (entry := tiers.store.find(key)) is not None])
    tiers.io.run()
    tiers.store.set_bound(2 * BLOCK_EXTENT_BYTES)
    tiers.store.shrink()
    assert tiers.store.stats.evicted == 0
    assert [tiers.store.find(key).is_resident for key in keys] == [False] * 6 + [True] * 2  # type: ignore[union-attr]
    tiers.store.put(b"new", content(9))
    assert tiers.store.stats.evicted == 0


def test_under_a_volatile_policy_a_key_without_an_end_goes_to_the_disk_and_no_further(tiers: TieredStore) -> None:
    under(tiers.store, "volatile-lru")
    for number in range(60):
        key = b"%d" % number
        if not tiers.store.put(key, content(number)):
            tiers.io.run()
            assert tiers.store.put(key, content(number))
        tiers.io.run()
    assert tiers.store.stats.evicted == 0
    assert tiers.store.count() == 60
    assert tiers.store.away >= 60 - BLOCKS


def test_the_order_of_both_halves_of_a_volatile_policy_is_one_with_a_disk(tiers: TieredStore) -> None:
    under(tiers.store, "volatile-lru")
    for number in range(4):
        tiers.clock.now_s += 1
        tiers.store.put(b"%d" % number, content(number))
        if number % 2:
            tiers.store.expire(b"%d" % number, tiers.clock.ms() + 10**6)
    victims = islice(tiers.store.victims(tiers.store.policy), 4)
    assert [entry.key for entry in victims] == [b"0", b"1", b"2", b"3"]
