"""Expiry: a value is gone at its time for every verb, and what its time has been is no burden afterwards."""

import tracemalloc
from collections.abc import Iterator

import pytest

from kvredis.storage.store import Store

from .small_store import BLOCK_BYTES, Clock, content, read, small_store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[Store]:
    store = small_store(clock)
    yield store
    store.check_integrity()
    store.close()


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
    assert expired().keys_in() == []
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
    assert sorted(store.keys_in()) == [b"7", b"8", b"9"]  # looking takes expired ones away, too
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
    assert sorted(store.keys_in()) == [b"later", b"never"]
    clock.now_s += 1000
    assert store.collect_expired() == 1
    assert store.keys_in() == [b"never"]


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
