"""Renaming, moving between databases, exchanging and emptying them: names change, bytes and holds do not."""

import pytest

from kvredis.storage.entry import Lease
from kvredis.storage.state import SLICE_ENTRIES
from kvredis.storage.store import Store
from tests.storage.small_store import keys_in

from .small_store import BLOCK_BYTES, BLOCKS, Clock, Unwalked, content, fill, present, read


def extent_of(store: Store, key: bytes, space: int = 0) -> object:
    """Where a value lies."""
    entry = store.find(key, space)
    assert entry is not None
    return entry.extent


@pytest.mark.parametrize("length", [5, BLOCK_BYTES])
def test_a_moved_value_lies_where_it_lay_and_keeps_its_end(store: Store, clock: Clock, length: int) -> None:
    store.put(b"a", content(1, length), 0, clock.ms() + 1000)
    extent = extent_of(store, b"a")
    assert store.move((b"a", 0), (b"b", 3))
    assert store.find(b"a") is None
    assert read(store, b"b", 3) == content(1, length)
    assert extent_of(store, b"b", 3) == extent
    clock.now_s += 2
    assert store.collect_expired() == 1
    assert store.count(3) == 0


def test_there_is_nothing_to_move_where_there_is_no_key(store: Store, clock: Clock) -> None:
    assert not store.move((b"a", 0), (b"b", 0))
    store.put(b"a", b"1", 0, clock.ms() + 1)
    clock.now_s += 1
    assert not store.move((b"a", 0), (b"b", 0))
    assert store.stats.expired == 1


def test_a_key_moved_onto_itself_stays(store: Store) -> None:
    store.put(b"a", b"1")
    assert store.move((b"a", 0), (b"a", 0))
    assert read(store, b"a") == b"1"


def test_what_had_the_name_before_stays_with_its_reader(store: Store) -> None:
    store.put(b"a", content(1))
    store.put(b"b", content(2))
    lease = store.fetch(b"b")
    assert isinstance(lease, Lease)
    store.move((b"a", 0), (b"b", 0))
    store.check_integrity()
    assert store.retired_bytes > 0
    assert bytes(lease.view) == content(2)
    lease.release()
    assert store.retired_bytes == 0
    assert read(store, b"b") == content(1)


def test_a_reader_of_a_renamed_value_holds_on_to_it(store: Store) -> None:
    store.put(b"a", content(1))
    lease = store.fetch(b"a")
    assert isinstance(lease, Lease)
    store.move((b"a", 0), (b"b", 0))
    store.delete([b"b"])
    assert lease.key == b"b"
    fill(store, count=BLOCKS - 1)
    assert bytes(lease.view) == content(1)
    lease.release()
    assert store.put(b"one more", content(3))
    store.check_integrity()


def test_a_renamed_value_keeps_its_place_in_the_order_of_leaving(store: Store) -> None:
    keys = fill(store)
    store.move((keys[0], 0), (b"coldest", 0))
    store.put(b"new", content(99))
    assert present(store, [b"coldest", *keys[1:]]) == keys[1:]


def test_a_long_new_name_counts(store: Store) -> None:
    store.put(b"a", b"1")
    before = store.inline_bytes
    store.move((b"a", 0), (b"a" * 1001, 0))
    assert store.inline_bytes == before + 1000


def test_a_move_is_entered_as_one_key_gone_and_one_set(store: Store) -> None:
    store.put(b"a", b"1")
    store.journal = []
    store.move((b"a", 0), (b"b", 2))
    assert store.journal == [("del", b"a", 0), ("set", b"b", 2)]


def test_exchanged_databases_keep_their_values_ends_and_walks(store: Store, clock: Clock) -> None:
    store.put(b"a", content(1), 0, clock.ms() + 1000)
    store.put(b"b", b"2", 1)
    store.put(b"c", b"3", 1, clock.ms() + 2000)
    lease = store.fetch(b"a")
    assert isinstance(lease, Lease)
    store.swap(0, 1)
    store.check_integrity()
    assert (keys_in(store, 0), keys_in(store, 1)) == ([b"b", b"c"], [b"a"])
    assert store.scan(0, 10_000, 1) == (0, [b"a"])
    lease.release()
    store.swap(0, 0)
    clock.now_s += 1
    assert store.collect_expired() == 1
    clock.now_s += 1
    assert store.collect_expired() == 1
    assert (keys_in(store, 0), keys_in(store, 1)) == ([b"b"], [])


def test_no_key_is_looked_at_to_exchange_databases(store: Store, clock: Clock) -> None:
    store.put(b"a", content(1), 0, clock.ms() + 1000)
    store.put(b"b", b"2", 1)
    spaces = store.index.spaces
    spaces[:2] = Unwalked(spaces[0]), Unwalked(spaces[1])
    store.swap(0, 1)
    spaces[:2] = dict(dict.items(spaces[0])), dict(dict.items(spaces[1]))
    assert (keys_in(store, 0), keys_in(store, 1)) == ([b"b"], [b"a"])
    store.put(b"a", b"3", 0)
    assert store.delete([b"a"], 1), "what is stored later is in the database that has the number by now"
    assert read(store, b"a") == b"3"


def test_a_flush_leaves_an_empty_store_at_once_and_its_readers_what_they_hold(store: Store, clock: Clock) -> None:
    keys = fill(store, count=4)
    store.put(b"small", b"1", 2, clock.ms() + 1000)
    lease = store.fetch(keys[1])
    assert isinstance(lease, Lease)
    assert store.flush() == 5
    store.check_integrity()
    assert len(store.index) == store.live_bytes == store.inline_bytes == 0
    assert store.retired_bytes == store.used_bytes > 0
    assert bytes(lease.view) == content(1)
    lease.release()
    assert store.used_bytes == 0
    assert store.flush() == 0
    fill(store)
    clock.now_s += 10
    assert store.collect_expired() == 0
    assert len(store.index) == BLOCKS


def test_a_flush_does_not_disturb_a_writer(store: Store) -> None:
    fill(store, count=4)
    reservation = store.reserve(b"k", BLOCK_BYTES)
    assert reservation is not None
    store.flush()
    store.check_integrity()
    reservation.view[:] = content(7)
    reservation.commit()
    assert read(store, b"k") == content(7)


def test_a_flush_of_one_database_leaves_the_others_in_order(store: Store) -> None:
    keys = fill(store, count=4)
    store.put(b"other", content(9), 5)
    store.put(b"small", b"1", 5)
    assert store.flush(0) == 4
    store.check_integrity()
    assert present(store, keys) == []
    assert read(store, b"other", 5) == content(9)
    assert store.flush(5) == 2
    store.check_integrity()


def test_a_flushed_database_is_empty_at_once_and_given_back_slice_by_slice(store: Store) -> None:
    keys = fill(store, count=4)
    for number in range(20):
        store.put(b"%d" % number, b"v")
    store.put(b"other", b"1", 5)
    held = store.used_bytes
    lease, ended = store.fetch(keys[0]), store.fetch(keys[1])
    assert isinstance(lease, Lease)
    assert isinstance(ended, Lease)
    spaces = store.index.spaces
    spaces[0] = Unwalked(spaces[0])
    assert store.flush(0, later=True) == 24
    store._flushed[0] = dict(dict.items(store._flushed[0]))
    assert (store.count(0), store.find(keys[0]), store.used_bytes) == (0, None, held)
    ended.release()
    store.put(b"7", b"of a new kind")
    left = [store.flushed_entries]
    while store.give_back(5):
        store.check_integrity()
        left.append(store.flushed_entries)
    assert left[:6] == [24, 19, 14, 9, 4, 0]
    assert read(store, b"7") == b"of a new kind"
    assert bytes(lease.view) == content(0)
    assert store.live_bytes == 0 < store.retired_bytes
    lease.release()
    assert store.retired_bytes == 0


def test_a_writer_gets_room_that_flushed_entries_hold_at_once(store: Store) -> None:
    store.evicts = False
    fill(store)
    store.put(b"small", b"1")
    store.put(b"other", b"1", 5)
    store.flush(0, later=True)
    store.inline_bytes_high = store.inline_bytes
    assert store.put(b"large", content(3)), "of the arena"
    assert store.put(b"small", b"2"), "and beside it"
    assert store.stats.evicted == store.stats.refused == 0


def test_what_a_flush_threw_away_is_freed_slice_by_slice(store: Store) -> None:
    store.inline_bytes_high = 1 << 40
    for number in range(SLICE_ENTRIES + 10):
        store.put(b"%d" % number, b"v")
    store.flush()
    store.put(b"new", b"1")
    rounds = 0
    while store._discarded is not None:
        store.collect_expired()
        store.check_integrity()
        rounds += 1
    assert rounds == 3
    assert read(store, b"new") == b"1"
