"""Every policy under a real store: what must agree does, what is asked for comes, and a flush keeps the kind."""

import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvredis.storage.eviction.base import POLICIES, REDIS_POLICIES, make_policy
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.options import StoreOptions
from kvredis.storage.store import Store
from tests.storage.small_store import ARENA_BYTES, BLOCKS, content, fill, present, read
from tests.storage.test_random_walk import Walk

every_policy = pytest.mark.parametrize("name", POLICIES)

STEPS = 700
INLINE_VALUE = bytes(12_000)
"""Some three hundred of these are more than a small store keeps beside its arena."""


def store_with(name: str) -> Store:
    """An empty store of ARENA_BYTES under that policy."""
    return Store(Arena.create(ARENA_BYTES, HugepageMode.OFF), policy=make_policy(name))


@pytest.fixture
def _restless_interpreter() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@every_policy
def test_a_store_opened_with_a_policy_has_it_for_values_of_both_kinds_and_after_a_flush(name: str) -> None:
    options = StoreOptions(ARENA_BYTES, hugepages=HugepageMode.OFF, cache_policy=name.lower())
    with closing(Store.open(options)) as store:
        for _ in range(2):
            assert store.policy.name == store.inline_policy.name == store.tiers()["memory"]["policy"] == name
            fill(store)
            store.put(b"small", b"x")
            store.flush()


@pytest.mark.parametrize("name", REDIS_POLICIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_store_agrees_with_a_dict_whatever_the_policy(name: str, seed: int) -> None:
    walk = Walk(seed, 4 * 1024 * 1024)
    with closing(walk.store):
        walk.store.set_eviction(make_policy(name))
        if walk.store.policy.selective:
            walk.lasting = 0.1
        for _ in range(STEPS):
            walk.step()
        assert walk.store.stats.evicted > (2 if walk.store.policy.selective else 10)
        walk.end()


@pytest.mark.parametrize(
    ("name", "first"), [("LRU", b"fill:1"), ("LFU", b"fill:1"), ("FIFO", b"fill:0"), ("S3FIFO", b"fill:1")]
)
def test_of_equal_blocks_exactly_the_coldest_leaves(name: str, first: bytes) -> None:
    with closing(store_with(name)) as store:
        keys = fill(store)
        assert read(store, keys[0]) == content(0)
        assert store.put(b"new", content(99))
        assert [key for key in keys if key not in present(store, keys)] == [first]


def test_mru_keeps_what_is_old() -> None:
    with closing(store_with("MRU")) as store:
        keys = fill(store)
        assert read(store, keys[3]) == content(3)
        assert store.put(b"new", content(99))
        assert present(store, keys) == keys[:3] + keys[4:]


def test_a_prompt_that_was_stored_and_looked_up_is_worth_no_write_and_one_that_was_read_is() -> None:
    with closing(store_with("S3FIFO")) as store:
        keys = fill(store)
        assert store.touch(keys) == store.match(keys) == BLOCKS
        assert read(store, keys[3]) == content(3)
        for number in range(BLOCKS - 1):
            assert store.put(b"new:%d" % number, content(number))
        assert present(store, keys) == [keys[3]]
        read_once, fresh = store.find(keys[3]), store.find(b"new:0")
        assert read_once is not None
        assert fresh is not None
        assert store.policy.spills(read_once)
        assert not store.policy.spills(fresh)


@every_policy
def test_what_was_affirmed_is_spared_whatever_the_policy(name: str) -> None:
    with closing(store_with(name)) as store:
        keys = fill(store)
        affirmed = [keys[0], keys[-1]]
        assert store.affirm(affirmed) == 2
        for number in range(BLOCKS - 2):
            assert store.put(b"new:%d" % number, content(number))
        assert present(store, affirmed) == affirmed


@every_policy
def test_inline_values_stay_within_their_bound(name: str) -> None:
    with closing(store_with(name)) as store:
        for number in range(1000):
            assert store.put(b"%d" % number, INLINE_VALUE)
            assert store.find(b"%d" % number) is not None, "who has just come must not leave for itself"
            assert store.inline_bytes <= store.inline_bytes_high
        assert store.stats.evicted > 500
        store.check_integrity()


@every_policy
@pytest.mark.usefixtures("_restless_interpreter")
def test_small_values_are_read_without_the_lock_while_others_leave(name: str) -> None:
    with closing(store_with(name)) as store:
        stop = threading.Event()
        wrong: list[BaseException] = []

        def use() -> None:
            try:
                while not stop.is_set():
                    for number in range(400):
                        assert store.fetch(b"%d" % number) in (None, INLINE_VALUE)
            except BaseException as error:
                wrong.append(error)
                raise

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for number in range(1500):
                assert store.put(b"%d" % (number % 800), INLINE_VALUE)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert wrong == []
        store.check_integrity()
