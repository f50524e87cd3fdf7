"""Expiry and deadlines: a value is gone at its time for every verb, and its past times are no burden afterwards."""

import random
import tracemalloc

import pytest

from kvredis.storage.expiry import STALE_MAX, Deadlines
from kvredis.storage.store import Store
from tests.storage.small_store import keys_in

from .small_store import BLOCK_BYTES, Clock, content, read, small_store


@pytest.mark.parametrize("length", [10, BLOCK_BYTES])
def test_a_value_is_gone_at_its_time_and_not_before(store: Store, clock: Clock, length: int) -> None:
    store.put(b"k", content(1, length), expire_at_ms=clock.ms() + 1000)
    clock.now_s += 0.999
    assert read(store, b"k") == content(1, length)
    clock.now_s += 0.001
    assert read(store, b"k") is None
    assert store.used_bytes == 0
    assert (store.stats.expired, store.stats.hits, store.stats.misses) == (1, 1, 1)


def test_no_verb_gives_an_expired_key(store: Store, clock: Clock) -> None:
    def expired() -> Store:
        store.put(b"k", content(1), expire_at_ms=clock.ms() + 5)
        clock.now_s += 1
        return store

    assert expired().find(b"k") is None
    assert expired().lease(b"k") is None
    assert expired().fetch(b"k") is None
    assert expired().fetch_untouched(b"k") is None
    assert expired().match([b"k"]) == 0
    assert expired().touch([b"k"]) == 0
    assert expired().delete([b"k"]) == 0
    assert keys_in(expired()) == []
    assert expired().random_key() is None
    assert expired().scan(0, 10_000) == (0, [])
    assert not expired().expire(b"k", 0)
    assert store.stats.expired == 11
    assert store.used_bytes == 0


def test_expired_values_are_collected_so_many_at_a_time(store: Store, clock: Clock) -> None:
    for number in range(10):
        store.put(b"%d" % number, content(number), expire_at_ms=clock.ms() + 10 * number)
    clock.now_s += 0.065
    assert store.collect_expired(5) == 5
    assert keys_in(store) == [b"7", b"8", b"9"]  # looking takes expired ones away, too
    assert store.collect_expired() == 0
    clock.now_s += 1
    assert (store.collect_expired(), store.stats.expired, store.used_bytes) == (3, 10, 0)


def test_an_expiry_can_be_moved_and_taken_away(store: Store, clock: Clock) -> None:
    for key in (b"later", b"never", b"sooner", b"past"):
        store.put(key, b"x", expire_at_ms=clock.ms() + 5000)
    assert store.expire(b"later", clock.ms() + 9000)
    assert store.expire(b"never", 0)
    assert store.expire(b"sooner", clock.ms() + 1000)
    assert store.expire(b"past", clock.ms())
    assert not store.expire(b"nobody", 0)
    assert store.count() == 3
    assert store.stats.deleted == 1
    clock.now_s += 5
    assert store.collect_expired() == 1
    assert keys_in(store) == [b"later", b"never"]
    clock.now_s += 1000
    assert store.collect_expired() == 1
    assert keys_in(store) == [b"never"]


@pytest.mark.parametrize("length", [10, BLOCK_BYTES])
def test_an_older_values_expiry_does_not_take_the_newer_value(store: Store, clock: Clock, length: int) -> None:
    store.put(b"k", content(1, length), expire_at_ms=clock.ms() + 5)
    store.put(b"k", content(2, length))
    clock.now_s += 1
    assert store.collect_expired() == 0
    assert read(store, b"k") == content(2, length)


def test_values_that_were_replaced_before_their_expiry_are_not_kept_by_it(store: Store, clock: Clock) -> None:
    tracemalloc.start()
    try:
        for number in range(2000):
            store.put(b"k", bytes(10_000), expire_at_ms=clock.ms() + 10**9 + number)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 1_000_000  # of 20 MB


class Hurrying(Clock):
    """A millisecond passes between two looks."""

    def ms(self) -> int:
        self.now_s += 0.001
        return super().ms()


@pytest.mark.parametrize("left_ms", range(1, 12))
def test_a_key_that_is_named_twice_is_there_twice_or_not_at_all(left_ms: int) -> None:
    clock = Hurrying()
    store = small_store(clock)
    for verb in (store.match, store.touch, store.affirm):
        store.put(b"k", content(1), expire_at_ms=clock.ms() + left_ms)
        assert verb([b"k"] * 10) in (0, 10)
        store.delete([b"k"])
    store.check_integrity()
    store.close()


def test_within_one_moment_no_key_ends_and_behind_it_all_do_whose_time_has_come() -> None:
    clock = Hurrying()
    store = small_store(clock)
    store.put(b"k", content(1), expire_at_ms=clock.ms() + 5)
    with store.now_ms.one_moment():
        for _ in range(20):
            assert store.find(b"k") is not None
        with store.now_ms.one_moment():
            clock.now_s += 1
        assert store.find(b"k") is not None
    assert store.find(b"k") is None
    store.close()


def always(at: float, item: object) -> bool:
    return True


def test_what_is_due_comes_out_earliest_first_and_once() -> None:
    deadlines: Deadlines[str] = Deadlines(always)
    for at, item in ((3, "c"), (1, "a"), (2, "b"), (9, "z")):
        deadlines.add(at, item, 10)
    assert list(deadlines.due(3)) == ["a", "b", "c"]
    assert list(deadlines.due(3)) == []
    assert len(deadlines) == 1
    assert list(deadlines.due(9)) == ["z"]


def test_nothing_is_due_before_its_time() -> None:
    deadlines: Deadlines[str] = Deadlines(always)
    deadlines.add(10.0, "a", 1)
    assert list(deadlines.due(9.999)) == []
    assert list(deadlines.due(10.0)) == ["a"]


def test_items_that_cannot_be_ordered_may_fall_due_together() -> None:
    deadlines: Deadlines[object] = Deadlines(always)
    items = [object() for _ in range(50)]
    for item in items:
        deadlines.add(1, item, 50)
    assert list(deadlines.due(1)) == items


def test_what_is_not_consumed_stays() -> None:
    deadlines: Deadlines[str] = Deadlines(always)
    for item in "abc":
        deadlines.add(1, item, 3)
    assert next(deadlines.due(1)) == "a"
    assert list(deadlines.due(1)) == ["b", "c"]


def test_a_deadline_that_is_void_is_not_given() -> None:
    current = {"a": 5.0, "b": 7.0}
    deadlines: Deadlines[str] = Deadlines(lambda at, item: current.get(item) == at)
    for at, item in ((5, "a"), (6, "b"), (7, "b"), (7, "gone")):
        deadlines.add(at, item, 2)
    assert list(deadlines.due(100)) == ["a", "b"]


def test_void_deadlines_do_not_pile_up_and_the_ones_that_hold_survive_the_sweep() -> None:
    current: dict[str, float] = {}
    deadlines: Deadlines[str] = Deadlines(lambda at, item: current.get(item) == at)
    for at in range(20 * STALE_MAX):
        name = "abc"[at % 3]
        current[name] = at
        deadlines.add(at, name, len(current))
        assert len(deadlines) <= 2 * len(current) + STALE_MAX
    assert sorted(deadlines.due(1e9)) == ["a", "b", "c"]


def test_after_a_sweep_what_holds_still_comes_out_in_time_order() -> None:
    rng = random.Random(1)
    current: dict[int, float] = {}
    deadlines: Deadlines[int] = Deadlines(lambda at, item: current.get(item) == at)
    for _ in range(20 * STALE_MAX):
        item, at = rng.randrange(STALE_MAX), rng.random()
        current[item] = at
        deadlines.add(at, item, len(current))
    for now in (0.25, 0.5, 1.0):
        expected = [item for at, item in sorted((at, item) for item, at in current.items()) if at <= now]
        assert list(deadlines.due(now)) == expected
        for item in expected:
            del current[item]


def test_the_same_deadline_again_and_again_does_not_pile_up() -> None:
    deadlines: Deadlines[str] = Deadlines(always)
    for _ in range(10 * STALE_MAX):
        deadlines.add(5, "a", 1)
    assert len(deadlines) <= 2 + STALE_MAX


def test_as_many_deadlines_as_hold_are_kept() -> None:
    deadlines: Deadlines[int] = Deadlines(always)
    for number in range(10 * STALE_MAX):
        deadlines.add(number, number, number + 1)
    assert list(deadlines.due(1e9)) == list(range(10 * STALE_MAX))


def test_a_sweep_looks_at_some_of_the_deadlines_and_goes_on_with_others() -> None:
    current: dict[int, float] = {}
    looked = 0

    def holds(at: float, item: int) -> bool:
        nonlocal looked
        looked += 1
        return current.get(item) == at

    deadlines: Deadlines[int] = Deadlines(holds, width=10)
    most = 0
    for turn in range(20):
        for item in range(1_000):
            current[item], looked = turn + item, 0
            deadlines.add(turn + item, item, len(current))
            most = max(most, looked)
    assert 0 < most < 200, "a span of 10 times has 30 deadlines or so, all have 2,000"
    assert sorted(deadlines.due(1e9)) == list(range(1_000))
    assert len(deadlines) == 0


def test_what_is_dropped_goes_a_few_at_a_time() -> None:
    deadlines: Deadlines[int] = Deadlines(always, width=100)
    for number in range(1_000):
        deadlines.add(number, number, 1_000)
    times = 1
    while deadlines.drop(30):
        times += 1
    assert 30 <= times <= 60
