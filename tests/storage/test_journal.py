"""What the store tells of changes, and what it spares because a client was told that it is there."""

import pytest

from kvredis.storage.entry import INLINE_BYTES_MAX
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.state import GRACE_TURNS
from kvredis.storage.store import Store

from .small_store import small_store

MIB = 1024 * 1024


class Clock:
    """Wall-clock time that a test moves."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    made = Store(Arena.create(8 * MIB, HugepageMode.OFF), clock_ms=clock)
    made.journal = []
    return made


def told(store: Store) -> list[tuple[str, bytes, int]]:
    """What has been listed since the last time."""
    journal, store.journal = store.journal, []
    assert journal is not None
    return journal


@pytest.mark.parametrize("length", [10, INLINE_BYTES_MAX, MIB])
def test_a_write_is_listed_each_time(store: Store, length: int) -> None:
    for _ in range(2):
        assert store.put(b"k", bytes(length), 3)
        assert told(store) == [("set", b"k", 3)]


def test_a_delete_is_listed_if_there_was_something(store: Store) -> None:
    store.put(b"k", b"v")
    told(store)
    store.delete([b"nothing", b"k", b"k"])
    assert told(store) == [("del", b"k", 0)]


def test_a_new_end_is_a_change_and_one_in_the_past_a_delete(store: Store, clock: Clock) -> None:
    store.put(b"k", b"v")
    told(store)
    assert store.expire(b"k", clock.ms + 5)
    assert told(store) == [("set", b"k", 0)]
    assert store.expire(b"k", 0)
    assert told(store) == [("set", b"k", 0)]
    assert store.expire(b"k", clock.ms - 5)
    assert told(store) == [("del", b"k", 0)]


@pytest.mark.parametrize("by", ["a look", "the collector"])
def test_an_expired_key_is_listed_when_it_is_found_out(store: Store, clock: Clock, by: str) -> None:
    store.put(b"k", b"v", 0, clock.ms + 5)
    told(store)
    clock.ms += 10
    if by == "a look":
        assert store.find(b"k") is None
    else:
        assert store.collect_expired() == 1
    assert told(store) == [("expired", b"k", 0)]


def test_evicted_keys_are_listed_before_the_one_they_left_for(store: Store) -> None:
    for n in range(7):
        store.put(b"%d" % n, bytes(MIB))
    told(store)
    store.put(b"new", bytes(2 * MIB))
    *evicted, last = told(store)
    assert last == ("set", b"new", 0)
    assert evicted
    assert {what for what, _, _ in evicted} == {"evicted"}


def test_a_flush_lists_nothing_and_the_list_goes_on_after_it(store: Store) -> None:
    store.put(b"k", b"v")
    told(store)
    assert store.flush() == 1
    assert told(store) == []
    store.put(b"k", b"v")
    assert told(store) == [("set", b"k", 0)]


def test_nothing_is_listed_where_no_reader_wants_it(store: Store) -> None:
    store.journal = None
    store.put(b"k", b"v")
    store.put(b"k", b"w")
    store.delete([b"k"])
    assert store.journal is None


def test_affirming_counts_what_is_there_and_what_is_named_twice(store: Store, clock: Clock) -> None:
    store.put(b"a", b"1")
    store.put(b"b", bytes(MIB))
    store.put(b"ends", b"1", 0, clock.ms + 5)
    assert store.affirm([b"a", b"b", b"nothing", b"a", b"ends"]) == 4
    clock.ms += 10
    assert store.affirm([b"ends", b"ends", b"a"]) == 1
    assert store.affirm([b"a"], 5) == 0


def test_affirmed_keys_leave_last_and_only_for_a_time(store: Store) -> None:
    for n in range(7):
        store.put(b"%d" % n, bytes(MIB))
    assert store.affirm([b"0", b"1"]) == 2
    store.put(b"new", bytes(MIB))
    assert store.find(b"0") is not None
    assert store.find(b"2") is None
    store.turn += GRACE_TURNS + 1
    store.put(b"newer", bytes(MIB))
    assert store.find(b"0") is None


def test_affirmed_keys_do_leave_when_nothing_else_can(store: Store) -> None:
    keys = [b"%d" % n for n in range(7)]
    for key in keys:
        store.put(key, bytes(MIB))
    assert store.affirm(keys) == 7
    assert store.put(b"large", bytes(7 * MIB))
    store.check_integrity()


def test_what_is_new_stays_though_all_the_rest_was_affirmed(store: Store) -> None:
    keys = [b"%d" % n for n in range(7)]
    for key in keys:
        store.put(key, bytes(MIB))
    assert store.affirm(keys) == 7
    for new in (b"new", b"newer"):
        assert store.put(new, bytes(MIB))
    assert [key for key in (*keys, b"new", b"newer") if store.find(key) is None] == [b"0", b"1"]
    store.check_integrity()


def test_small_values_that_are_new_stay_though_all_the_rest_was_affirmed(store: Store) -> None:
    keys = [b"%d" % n for n in range(store.inline_bytes_high // 9000)]
    for key in keys:
        store.put(key, bytes(8192))
    store.affirm(keys)
    new = [b"new:%d" % n for n in range(len(keys) // 4)]
    for key in new:
        assert store.put(key, bytes(8192))
    assert all(store.find(key) is not None for key in new)
    assert store.stats.evicted > 0
    store.check_integrity()


def test_affirming_moves_nothing_in_the_order_of_eviction(store: Store) -> None:
    for n in range(7):
        store.put(b"%d" % n, bytes(MIB))
    store.affirm([b"0"])
    store.turn += GRACE_TURNS + 1
    store.put(b"new", bytes(MIB))
    assert store.find(b"0") is None
    assert store.find(b"1") is not None


def test_a_store_that_does_not_evict_refuses_and_keeps_what_it_has(store: Store) -> None:
    for n in range(7):
        store.put(b"%d" % n, bytes(MIB))
    store.evicts = False
    assert not store.put(b"new", bytes(2 * MIB))
    assert store.count() == 7
    store.delete([b"0", b"1", b"2"])
    assert store.put(b"new", bytes(2 * MIB))


def test_inline_values_beyond_their_bound_are_refused_too(store: Store) -> None:
    store.evicts = False
    n = 0
    while store.put(b"%d" % n, bytes(10_000)):
        n += 1
        assert n < 10_000
    assert store.inline_bytes <= store.inline_bytes_high
    assert store.count() == n
    assert store.put(b"0", bytes(5)), "what makes a value smaller is never refused"
    store.check_integrity()


class LateWriter:
    """A store's lock that a thread of the disk has held a moment ago, and written to the journal meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> None:
        if self._store.journal is not None:
            self._store.journal.append(("evicted", b"late", 0))

    def __exit__(self, *_: object) -> None:
        pass


def test_what_another_thread_writes_while_the_journal_is_asked_for_is_in_it() -> None:
    store = small_store()
    store.keep_journal(True)
    store.put(b"key", b"value")
    store.lock = LateWriter(store)  # type: ignore[assignment]
    assert store.take_journal() == [("set", b"key", 0), ("evicted", b"late", 0)]


def test_another_reader_of_the_journal_keeps_what_is_already_listed() -> None:
    store = small_store()
    store.keep_journal(True)
    store.put(b"key", b"value")
    store.keep_journal(True)
    assert store.take_journal() == [("set", b"key", 0)]
    assert store.take_journal() == []
    store.keep_journal(False)
    store.put(b"key", b"value")
    assert store.take_journal() == []
