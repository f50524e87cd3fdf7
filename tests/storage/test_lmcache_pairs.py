"""LMCache keeps a chunk under two keys, and looks at one before it reads the other: they leave together."""

from pathlib import Path

import pytest

from kvredis.storage.lmcache_pairs import DEPARTED_TURNS
from kvredis.storage.store import Store

from .small_store import small_store
from .tiered_store import TieredStore

MIB = 1024 * 1024
VALUE = bytes(256 * 1024)


def halves(number: int) -> tuple[bytes, bytes]:
    return b"vllm@model@1@0@%032x@bf16kv_bytes" % number, b"vllm@model@1@0@%032x@bf16metadata" % number


def store_chunk(store: Store, number: int) -> None:
    data, facts = halves(number)
    assert store.put(data, VALUE)
    assert store.put(facts, b"f" * 28)


def test_of_a_chunk_under_two_keys_both_are_there_or_neither_after_many_were_evicted() -> None:
    store = small_store(nbytes=4 * MIB)
    store.journal = []
    for number in range(100):
        store_chunk(store, number)
        store.check_integrity()
    there = [[store.find(key) is not None for key in halves(number)] for number in range(100)]
    assert [True, False] not in there
    assert [False, True] not in there
    assert 0 < there.count([True, True]) < 100
    evicted = [key for what, key, _ in store.journal if what == "evicted"]
    assert len(evicted) == len(set(evicted)) == store.stats.evicted == 2 * there.count([False, False])


def test_a_flood_of_the_small_halves_takes_the_large_ones_along() -> None:
    store = small_store(nbytes=4 * MIB)
    store_chunk(store, 0)
    for number in range(1, 30_000):
        store.put(halves(number)[1], b"f" * 28)
    assert [store.find(key) for key in halves(0)] == [None, None]
    store.check_integrity()


@pytest.mark.parametrize("end", [b"kv_bytes", b"metadata"])
def test_a_key_that_only_ends_so_leaves_alone(end: bytes) -> None:
    store = small_store(nbytes=MIB)
    assert store.put(b"x" + end, VALUE)
    for number in range(8):
        assert store.put(b"other:%d" % number, VALUE)
    assert store.find(b"x" + end) is None
    store.check_integrity()


def test_a_half_that_the_disk_lets_go_takes_the_other_one_along(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=MIB) as tiers:
        for number in range(60):
            store_chunk(tiers.store, number)
            assert tiers.save()
        there = [[tiers.store.find(key) is not None for key in halves(number)] for number in range(60)]
        assert [True, False] not in there
        assert [False, True] not in there
        assert tiers.tiering.disk.stats.evicted > 0
        tiers.store.check_integrity()


def test_a_chunk_of_which_one_half_was_affirmed_keeps_both_while_others_can_go() -> None:
    store = small_store(nbytes=4 * MIB)
    for number in range(8):
        store_chunk(store, number)
    assert store.affirm([halves(0)[1]]) == 1
    for number in range(100, 130):
        store_chunk(store, number)
    assert [store.find(key) is not None for key in (*halves(0), *halves(1))] == [True, True, False, False]
    store.check_integrity()


def test_when_all_were_affirmed_the_one_affirmed_last_stays_longest() -> None:
    store = small_store(nbytes=4 * MIB)
    for number in range(8):
        store_chunk(store, number)
    for number in reversed(range(8)):
        store.turn += 1
        assert store.affirm([halves(number)[1]]) == 1
    for number in range(100, 112):
        store_chunk(store, number)
        store.affirm([halves(number)[1]])
    there = [store.find(halves(number)[0]) is not None for number in range(8)]
    assert True in there
    assert there == sorted(there, reverse=True)
    store.check_integrity()


def test_metadata_that_comes_after_its_data_was_evicted_does_not_stay() -> None:
    store = small_store(nbytes=4 * MIB)
    for number in range(40):
        assert store.put(halves(number)[0], VALUE)
    for number in range(40):
        assert store.put(halves(number)[1], b"f" * 28)
    there = [[store.find(key) is not None for key in halves(number)] for number in range(40)]
    assert [False, True] not in there
    assert there.count([True, True]) > 8
    store.check_integrity()


def test_metadata_stays_when_its_data_came_again() -> None:
    store = small_store(nbytes=MIB)
    for number in range(10):
        assert store.put(halves(number)[0], VALUE)
    store_chunk(store, 0)
    assert all(store.find(key) is not None for key in halves(0))


def test_metadata_of_data_that_left_long_ago_or_never_was_stays() -> None:
    store = small_store(nbytes=MIB)
    for number in range(10):
        assert store.put(halves(number)[0], VALUE)
    store.turn += DEPARTED_TURNS
    for number in (0, 100):
        assert store.put(halves(number)[1], b"f" * 28)
        assert store.find(halves(number)[1]) is not None
