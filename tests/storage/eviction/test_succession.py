"""A new policy that takes over step by step, while the store is read, written, emptied and given yet another one."""

import random
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import pytest

from kvredis.storage import state
from kvredis.storage.entry import Entry
from kvredis.storage.eviction.base import REDIS_POLICIES, make_policy
from kvredis.storage.eviction.succession import Succession
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.storage.test_random_walk import Walk

STEPS = 600


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SLICE_ENTRIES", 3)
    monkeypatch.setattr(state, "HANDED_AT_ONCE", 2)


@pytest.mark.parametrize("seed", range(4))
def test_the_store_agrees_with_a_dict_while_policies_follow_one_another(seed: int) -> None:
    walk, rng = Walk(seed, 4 * 1024 * 1024), random.Random(seed)
    walk.lasting = 0.1
    changes = 0
    with closing(walk.store):
        for step in range(STEPS):
            walk.step()
            if step % 20 == 0:
                walk.store.set_eviction(make_policy(rng.choice([*REDIS_POLICIES])))
                changes += isinstance(walk.store.policy, Succession)
            if rng.random() < 0.3:
                walk.store.give_back()
            walk.store.check_integrity()
        while walk.store.give_back():
            pass
        assert not isinstance(walk.store.policy, Succession)
        walk.end()
    assert changes > 3


@pytest.mark.parametrize("steps", [0, 1])
def test_policies_may_follow_one_another_as_quickly_as_they_like(steps: int) -> None:
    with closing(Store(Arena.create(8 * 1024 * 1024, HugepageMode.OFF))) as store:
        keys = [b"k%03d" % number for number in range(100)]
        for key in keys:
            store.put(key, b"value")
        for number in range(sys.getrecursionlimit() + 1):
            store.set_eviction(make_policy(("FIFO", "LFU", "volatile-lru", "LRU")[number % 4]))
            for _ in range(steps):
                store.give_back()
        assert store.fetch(keys[0]) == b"value"
        store.delete(keys[:1])
        while store.give_back():
            pass
        assert [entry.key for entry in store.victims(store.inline_policy)] == keys[1:]
        store.check_integrity()


def test_an_entry_that_is_used_while_a_policy_takes_over_leaves_last() -> None:
    clock = iter(range(10**9))
    arena = Arena.create(8 * 1024 * 1024, HugepageMode.OFF)
    with closing(Store(arena, policy=make_policy("FIFO"), clock_s=lambda: float(next(clock)))) as store:
        keys = [b"k%03d" % number for number in range(100)]
        for key in keys:
            store.put(key, b"value")
        for key in keys[:50]:
            store.fetch(key)
        store.set_eviction(make_policy("LRU"))
        used = iter([*keys[20:30], *keys[70:80]])
        while store.give_back():
            for key in islice(used, 1):
                store.fetch(key)
        expected = [*keys[50:70], *keys[80:], *keys[:20], *keys[30:50], *keys[20:30], *keys[70:80]]
        assert [entry.key for entry in store.victims(store.inline_policy)] == expected
        assert store.inline_policy.name == "LRU"


def test_counts_are_kept_and_go_on_while_lfu_takes_over() -> None:
    with closing(Store(Arena.create(8 * 1024 * 1024, HugepageMode.OFF))) as store:
        for number in range(40):
            store.put(b"k%d" % number, b"value")
            for _ in range(number):
                store.fetch(b"k%d" % number)
        store.set_eviction(make_policy("LFU"))
        while store.give_back():
            store.fetch(b"k3")
            store.put(b"k5", b"anew")
        uses = [store.inline_policy.uses(store.index.spaces[0][b"k%d" % number]) for number in range(40)]
        assert (uses[:3], uses[4], uses[6:]) == ([1, 2, 3], 5, list(range(7, 41)))
        assert (uses[3] or 0) > 4
        assert (uses[5] or 0) > 6


@pytest.mark.parametrize("how", ["swapped", "moved", "renamed"])
def test_an_entry_that_goes_where_the_walk_has_been_is_handed_over_too(how: str) -> None:
    arena = Arena.create(8 * 1024 * 1024, HugepageMode.OFF)
    with closing(Store(arena, policy=make_policy("FIFO"))) as store:
        for number in range(60):
            store.put(b"k%03d" % number, b"value", number % 2)
        store.set_eviction(make_policy("LRU"))
        for number in range(60):
            store.give_back()
            if how == "swapped":
                store.swap(0, 1)
            elif how == "moved":
                store.move((b"k%03d" % number, number % 2), (b"k%03d" % number, 1 - number % 2))
            else:
                store.move((b"k%03d" % number, number % 2), (b"j%03d" % number, number % 2))
        for _ in range(100_000):
            if not store.give_back():
                break
        assert store.policy.name == "LRU"
        assert not isinstance(store.policy, Succession)
        store.check_integrity()


def test_a_change_of_policy_walks_over_no_keys_at_once() -> None:
    """With a million of them that would stop the server for a tenth of a second, and longer."""

    class Untouched(dict[bytes, Entry]):
        def __iter__(self) -> Iterator[bytes]:
            raise AssertionError("a walk over all")

        keys = values = items = __iter__  # type: ignore[assignment]

    arena = Arena.create(8 * 1024 * 1024, HugepageMode.OFF)
    with closing(Store(arena, policy=make_policy("FIFO"))) as store:
        for number in range(60):
            store.put(b"k%03d" % number, b"value")
        store.index.spaces[0] = Untouched(store.index.spaces[0])
        store.set_eviction(make_policy("LRU"))
        while store.give_back():
            pass
        assert not isinstance(store.policy, Succession)


def test_a_store_that_is_emptied_while_a_policy_takes_over_has_the_new_one() -> None:
    with closing(Store(Arena.create(8 * 1024 * 1024, HugepageMode.OFF))) as store:
        for number in range(40):
            store.put(b"k%d" % number, b"value")
        store.set_eviction(make_policy("volatile-ttl"))
        store.give_back()
        store.flush()
        assert store.policy.name == store.inline_policy.name == "VOLATILE-TTL"
        assert not isinstance(store.policy, Succession)
        store.put(b"new", b"value")
        store.check_integrity()
