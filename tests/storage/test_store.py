"""The store's verbs one by one: what is stored, found, deleted, expired and counted."""

import random
from contextlib import closing

import pytest

from kvredis.storage.entry import ENTRY_OVERHEAD_BYTES, INLINE_BYTES_MAX, NOWHERE, Entry, Lease, extent_length
from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.arena import HugepageMode
from kvredis.storage.options import StoreOptions
from kvredis.storage.store import Store
from tests.storage.small_store import keys_in

from .small_store import ARENA_BYTES, BLOCK_BYTES, BLOCKS, Clock, content, fill, present, read, small_store

LENGTHS = [0, 1, 100, INLINE_BYTES_MAX - 1, INLINE_BYTES_MAX, BLOCK_BYTES, BLOCK_BYTES + 1, 500_000]


# ---- storing and finding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_what_was_stored_comes_back(store: Store, length: int) -> None:
    assert store.put(b"k", content(1, length))
    assert read(store, b"k") == content(1, length)
    lease = store.lease(b"k")
    assert lease is not None
    with lease:
        assert lease.view == content(1, length)


@pytest.mark.parametrize("first", [100, BLOCK_BYTES])
@pytest.mark.parametrize("second", [50, 100, 200_000])
def test_a_second_value_replaces_the_first_and_its_room_is_free_again(store: Store, first: int, second: int) -> None:
    store.put(b"k", content(1, first))
    store.put(b"k", content(2, second))
    assert read(store, b"k") == content(2, second)
    assert keys_in(store) == [b"k"]
    assert (store.stats.created, store.stats.overwritten) == (1, 1)
    store.check_integrity()
    assert store.delete([b"k"]) == 1
    assert store.used_bytes == 0


def test_an_older_value_is_seen_until_the_new_one_is_committed(store: Store) -> None:
    store.put(b"k", content(1))
    reservation = store.reserve(b"k", BLOCK_BYTES)
    assert reservation is not None
    reservation.view[:] = content(2)
    assert read(store, b"k") == content(1)
    reservation.commit()
    assert read(store, b"k") == content(2)


def test_small_values_come_as_bytes_and_great_ones_under_a_lease(store: Store) -> None:
    store.put(b"small", content(1, INLINE_BYTES_MAX - 1))
    store.put(b"great", content(1, INLINE_BYTES_MAX))
    assert type(store.fetch(b"small")) is bytes
    lease = store.fetch(b"great")
    assert isinstance(lease, Lease)
    assert store.leases == 1
    lease.release()
    assert store.fetch(b"neither") is None


def test_databases_do_not_see_one_another(store: Store) -> None:
    for space in range(16):
        store.put(b"k", content(space, 20_000), space)
    assert [read(store, b"k", space) for space in range(16)] == [content(space, 20_000) for space in range(16)]
    assert store.delete([b"k"], 3) == 1
    assert [store.count(space) for space in range(5)] == [1, 1, 1, 0, 1]
    assert read(store, b"k", 3) is None


@pytest.mark.parametrize(
    "length", [ARENA_BYTES, ARENA_BYTES * 100, extent_length(ARENA_BYTES - 513), (4096 << 32) - 4096, 4096 << 32, 2**62]
)
def test_a_value_larger_than_the_arena_is_refused_and_no_entry_leaves_for_it(store: Store, length: int) -> None:
    keys = fill(store)
    assert store.reserve(b"k", length) is None
    assert store.stats.refused == 1
    assert present(store, keys) == keys


def test_a_value_of_the_arenas_size_has_all_of_it(store: Store) -> None:
    fill(store)
    largest = ARENA_BYTES - 514
    assert store.put(b"k", content(1, largest))
    assert read(store, b"k") == content(1, largest)
    assert store.stats.evicted == BLOCKS
    assert store.reserve(b"more", largest + 1) is None


def test_the_leading_run_ends_at_the_first_gap(store: Store) -> None:
    keys = fill(store, count=5)
    assert store.match(keys) == 5
    store.delete([keys[2]])
    assert store.match(keys) == 2
    assert store.match(keys[3:]) == 2
    assert store.match(keys[2:]) == 0
    assert store.match([]) == 0
    assert store.match(keys, 1) == 0
    assert store.touch(keys) == 4


def test_looking_counts_no_hit_and_changes_nothing(store: Store, clock: Clock) -> None:
    store.put(b"k", content(1))
    clock.now_s += 10
    entry = store.find(b"k")
    assert entry is not None
    with store.peek(b"k") or pytest.fail("not there") as lease:
        assert lease.view == content(1)
        assert entry.leases == 1
    assert store.find(b"other") is None
    assert store.peek(b"other") is None
    assert (entry.hits, entry.accessed_s) == (0, clock.now_s - 10)
    assert (store.stats.hits, store.stats.misses) == (0, 0)


@pytest.mark.parametrize("length", [100, BLOCK_BYTES])
def test_a_block_knows_when_it_was_made_and_used_and_how_often_it_was_read(
    store: Store, clock: Clock, length: int
) -> None:
    made_s = clock.now_s
    store.put(b"k", content(1, length))
    entry = store.find(b"k")
    assert entry is not None
    for count, verb in enumerate((store.lease, store.fetch), start=1):
        clock.now_s += 1
        held = verb(b"k")
        assert (entry.created_s, entry.accessed_s, entry.hits) == (made_s, clock.now_s, count)
        if isinstance(held, Lease):
            held.release()
    for use in (store.match, store.touch):
        clock.now_s += 1
        use([b"k"])
        store.collect_expired()  # the server's tick, by which a lookup has had its effect
        assert (entry.created_s, entry.accessed_s, entry.hits) == (made_s, clock.now_s, 2)
    clock.now_s += 1
    store.put(b"k", content(2, length))
    entry = store.find(b"k")
    assert entry is not None
    assert (entry.created_s, entry.accessed_s, entry.hits) == (clock.now_s, clock.now_s, 0)


# ---- leaving -----------------------------------------------------------------------------------------------------


def test_deleting_counts_what_there_was(store: Store) -> None:
    keys = fill(store, count=3)
    store.put(b"small", b"x")
    assert store.delete([*keys[:2], keys[0], b"small", b"never"]) == 3
    assert keys_in(store) == [keys[2]]
    assert store.stats.deleted == 3


def test_flushing_empties_one_database_or_all(store: Store) -> None:
    for space in (0, 1, 2):
        store.put(b"block", content(space), space)
        store.put(b"small", b"x", space)
    assert store.flush(1) == 2
    assert [store.count(space) for space in range(3)] == [2, 0, 2]
    store.check_integrity()
    assert store.flush() == 4
    assert store.used_bytes == 0
    assert store.allocator.free_bytes == ARENA_BYTES


def test_a_flush_leaves_readers_and_writers_alone(store: Store) -> None:
    store.put(b"read", content(1))
    lease, reservation = store.lease(b"read"), store.reserve(b"written", BLOCK_BYTES)
    assert lease is not None
    assert reservation is not None
    reservation.view[:] = content(2)
    assert store.flush() == 1
    assert lease.view == content(1)
    reservation.commit()
    assert read(store, b"written") == content(2)
    lease.release()


def test_small_values_are_bounded_and_the_oldest_leave_first_and_no_more_than_must(store: Store) -> None:
    rng = random.Random(1)
    keys = fill(store, count=4)
    bound = store.inline_bytes_high
    small = [b"small:%d" % number for number in range(3 * bound // 10_000)]
    for key in small:
        assert store.put(key, bytes(rng.randrange(5_000, INLINE_BYTES_MAX)))
        assert store.inline_bytes <= bound
        assert not store.stats.evicted or store.inline_bytes > bound - INLINE_BYTES_MAX - 1000
    left = present(store, small)
    assert left == small[-len(left) :]
    assert store.stats.evicted == len(small) - len(left) > 0
    assert present(store, keys) == keys


def test_a_small_value_that_grows_counts_against_the_bound(store: Store) -> None:
    keys = [b"small:%d" % number for number in range(store.inline_bytes_high // (300 + ENTRY_OVERHEAD_BYTES))]
    for key in keys:
        store.put(key, bytes(100))
    assert store.stats.evicted == 0
    for key in keys:
        assert store.put(key, bytes(15_000))
        assert store.inline_bytes <= store.inline_bytes_high
    assert store.find(keys[-1]) is not None
    store.check_integrity()


def test_the_small_value_just_stored_is_not_the_one_to_leave(store: Store) -> None:
    keys = [b"small:%d" % number for number in range(store.inline_bytes_high // 15_000)]
    for key in keys:
        store.put(key, bytes(15_000))
    there = present(store, keys)
    leases = [store.lease(key) for key in there]
    assert store.put(b"newest", bytes(15_000))
    assert present(store, [*keys, b"newest"]) == [*there, b"newest"]
    for lease in leases:
        assert lease is not None
        lease.release()


# ---- walking -----------------------------------------------------------------------------------------------------


def test_a_walk_gives_every_key_that_stays_while_others_come_go_and_expire(store: Store, clock: Clock) -> None:
    stay = [b"stay:%d" % number for number in range(1000)]
    for key in stay:
        store.put(key, b"x")
    for number in range(500):
        store.put(b"expires:%d" % number, b"x", expire_at_ms=clock.ms() + number)
    found: list[bytes] = []
    cursor = steps = 0
    while cursor or not steps:
        cursor, keys = store.scan(cursor, 10)
        found += keys
        steps += 1
        clock.now_s += 0.005
        for number in range(5):
            store.put(b"new:%d" % (steps % 20 * 5 + number), b"x")
            store.delete([b"new:%d" % (steps * 7 % 100)])
    assert steps > 50
    assert set(stay) <= set(found)
    assert found.count(stay[0]) == 1


def test_a_random_key_is_a_key_that_is_there(store: Store, clock: Clock) -> None:
    assert store.random_key() is None
    store.put(b"a", b"x")
    store.put(b"b", content(1))
    store.put(b"gone", b"x", expire_at_ms=clock.ms() + 1)
    clock.now_s += 1
    assert {store.random_key() for _ in range(2000)} <= {b"a", b"b"}
    assert store.stats.expired <= 1
    store.delete([b"a", b"b"])
    assert store.random_key() is None


# ---- accounts ----------------------------------------------------------------------------------------------------


def test_every_counter_counts_what_it_says(store: Store, clock: Clock) -> None:
    fill(store)
    store.put(b"small", b"x")
    store.put(b"small", b"y")
    for key in (b"small", b"fill:0", b"nobody", b"fill:1"):
        read(store, key)
    store.reserve(b"too large", ARENA_BYTES)
    (store.reserve(b"given up", BLOCK_BYTES) or pytest.fail("no room")).abort()
    store.put(b"fill:5", content(1))
    store.expire(b"fill:6", clock.ms() + 1)
    clock.now_s += 1
    store.collect_expired()
    store.delete([b"fill:7", b"fill:8"])
    _, run = store.lease_run([b"fill:0", b"missing"], 0, 1.0)
    store.end_leases([(run, 0, 0)])
    assert store.flush() == store.stats.flushed
    assert store.stats.as_dict() == {
        "hits": 4,
        "hit_tokens": 0,
        "misses": 2,
        "created": BLOCKS + 1,
        "overwritten": 2,
        "refused": 1,
        "aborted": 1,
        "evicted": 1,  # fill:2 for the one given up, whose room then served fill:5
        "evicted_bytes": BLOCK_BYTES,
        "evicted_away": 0,
        "expired": 1,
        "deleted": 2,
        "flushed": BLOCKS - 3,
        "leased_bytes": BLOCK_BYTES,
        "leases_revoked": 0,
    }
    assert sum(store.stats.receiving.counts) == 0, "they were short"
    with store.reserve(b"long", 5 * BLOCK_BYTES) or pytest.fail("no room") as long:
        clock.now_s += 2
        long.commit()
    assert (sum(store.stats.receiving.counts), store.stats.receiving.nanoseconds) == (1, 2_000_000_000)
    store.stats.reset()
    assert set(store.stats.as_dict().values()) == {0}


def test_the_accounts_are_exact_to_the_byte(store: Store) -> None:
    store.put(b"live", content(1, 100_000))
    store.put(b"retired", content(2, 50_000))
    lease, reservation = store.lease(b"retired"), store.reserve(b"written", 30_000)
    assert lease is not None
    assert reservation is not None
    store.delete([b"retired"])
    store.put(b"small", bytes(77))
    assert store.live_bytes == extent_length(100_000)
    assert store.retired_bytes == extent_length(50_000)
    assert store.reserved_bytes == extent_length(30_000)
    assert store.inline_bytes == 77 + len(b"small") + ENTRY_OVERHEAD_BYTES
    held = store.live_bytes + store.retired_bytes + store.reserved_bytes
    assert store.allocator.free_bytes == ARENA_BYTES - held
    memory = store.tiers()["memory"]
    assert (memory["capacity"], memory["used"]) == (ARENA_BYTES, held + store.inline_bytes)
    assert (memory["entries"], memory["leases"], memory["reserved"]) == (2, 1, extent_length(30_000))
    assert memory["largest_free"] == memory["free"] == ARENA_BYTES - held
    lease.release()
    reservation.abort()
    assert store.used_bytes == store.live_bytes + store.inline_bytes


@pytest.mark.parametrize(
    "account",
    ["live_bytes", "retired_bytes", "reserved_bytes", "inline_bytes", "retired", "allocator", "gone", "stale", "index"],
)
def test_an_account_that_is_wrong_is_noticed(account: str) -> None:
    with closing(small_store()) as store:
        keys = fill(store, count=3)
        store.put(b"small", b"x")
        entry = store.find(keys[0])
        assert entry is not None
        store.check_integrity()
        if account == "allocator":
            store.allocator.free(entry.extent)
        elif account == "retired":
            store.live_bytes -= 4096
            store.retired_bytes += 4096
        elif account == "gone":
            store.policy.forget(entry)
        elif account == "stale":
            store.policy.admit(Entry(b"left long ago", 0, 1, NOWHERE, None))
        elif account == "index":
            store.index.remove(entry)
        else:
            setattr(store, account, getattr(store, account) + 1)
        with pytest.raises(AssertionError):
            store.check_integrity()


def test_extents_that_overlap_are_noticed() -> None:
    with closing(small_store()) as store:
        fill(store, count=3)
        first, second = store.find(b"fill:0"), store.find(b"fill:1")
        assert first is not None
        assert second is not None
        second.extent = first.extent
        with pytest.raises(AssertionError, match="overlap"):
            store.check_integrity()


def test_a_store_is_opened_as_its_options_say() -> None:
    store = Store.open(StoreOptions(3 * ARENA_BYTES, HugepageMode.OFF, "lru", prefault_threads=2))
    assert store.arena.nbytes == 3 * ARENA_BYTES
    assert store.put(b"k", content(1))
    lease = store.lease(b"k")
    store.close()
    assert lease is not None
    lease.release()
    with pytest.raises(ConfigError):
        Store.open(StoreOptions(ARENA_BYTES, HugepageMode.OFF, "ARC"))


def test_a_lookup_comes_before_a_later_read_of_a_small_value_in_the_order_of_eviction() -> None:
    store = small_store()
    for key in (b"looked up", b"read", b"neither"):
        store.put(key, b"x")
    store.match([b"looked up"])
    assert store.fetch(b"read") == b"x"
    leaving = [entry.key for entry in store.victims(store.inline_policy)]
    assert leaving == [b"neither", b"looked up", b"read"]
