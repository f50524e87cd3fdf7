"""LMCache keeps a chunk under two keys, and looks at one before it reads the other: they leave together."""

from pathlib import Path

import pytest

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
