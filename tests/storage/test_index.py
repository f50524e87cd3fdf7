"""The index: keys of each database, and the walk of SCAN while keys come and go."""

from collections.abc import Callable

import pytest

from kvredis.storage.entry import NOWHERE, Entry
from kvredis.storage.index import BUCKETS, SPACES, Index


def entry_of(key: bytes, space: int = 0) -> Entry:
    return Entry(key, space, 1, NOWHERE, b"x")


def filled(count: int, space: int = 0) -> tuple[Index, list[bytes]]:
    index = Index()
    keys = [b"key:%d" % number for number in range(count)]
    for key in keys:
        index.put(entry_of(key, space))
    return index, keys


def walk(index: Index, count: int, between: Callable[[int], None] = lambda step: None) -> list[bytes]:
    """All that a complete SCAN returns; `between` runs after each step."""
    found: list[bytes] = []
    cursor = steps = 0
    while True:
        cursor, keys = index.scan(cursor, count, 0)
        found += keys
        if not cursor:
            return found
        steps += 1
        assert steps <= BUCKETS
        between(steps)


def test_a_new_entry_replaces_the_older_one_and_hands_it_back() -> None:
    index = Index()
    old, new = entry_of(b"k"), entry_of(b"k")
    assert index.put(old) is None
    assert index.put(new) is old
    assert index.get(b"k", 0) is new
    assert len(index) == 1
    index.check_integrity()


def test_databases_do_not_see_one_another() -> None:
    index = Index()
    entries = [entry_of(b"k", space) for space in range(SPACES)]
    for entry in entries:
        index.put(entry)
    assert [index.get(b"k", space) for space in range(SPACES)] == entries
    index.remove(entries[3])
    assert index.get(b"k", 3) is None
    assert index.scan(0, 10, 3) == (0, [])
    assert index.random_key(3) is None
    assert len(index) == SPACES - 1
    index.check_integrity()


def test_a_walk_over_keys_that_stay_gives_each_once() -> None:
    index, keys = filled(3000)
    assert sorted(walk(index, 10)) == sorted(keys)
    assert sorted(walk(index, 100_000)) == sorted(keys)


def test_a_walk_misses_no_key_that_was_there_all_the_while() -> None:
    index, keys = filled(2000)
    passing = keys[1::2]

    def churn(step: int) -> None:
        for key in passing[step * 7 % 1000 :][:7]:
            entry = index.get(key, 0)
            if entry is not None:
                index.remove(entry)
        for number in range(20):
            index.put(entry_of(b"new:%d:%d" % (step, number)))

    found = walk(index, 10, churn)
    assert set(keys[::2]) <= set(found)
    assert len(found) == len(set(found))
    index.check_integrity()


def test_a_step_gives_what_was_asked_for_and_one_bucket_more_at_most() -> None:
    index, _ = filled(3000)
    cursor, keys = index.scan(0, 50, 0)
    assert 0 < cursor < BUCKETS
    assert 50 <= len(keys) < 50 + 30


@pytest.mark.parametrize("cursor", [-1, BUCKETS, 2**64])
def test_a_cursor_that_was_never_given_ends_the_walk(cursor: int) -> None:
    index, _ = filled(10)
    assert index.scan(cursor, 10, 0) == (0, [])


def test_a_random_key_is_any_of_them_in_the_end() -> None:
    index, keys = filled(5)
    unseen = set(keys)
    for _ in range(100_000):  # a key whose bucket comes right behind another's is drawn once in BUCKETS times
        key = index.random_key(0)
        assert key in keys
        unseen.discard(key)
        if not unseen:
            break
    assert not unseen
    assert Index().random_key(0) is None


def test_a_random_key_is_found_when_it_is_the_only_one_left() -> None:
    index, keys = filled(100)
    for key in keys[1:]:
        entry = index.get(key, 0)
        assert entry is not None
        index.remove(entry)
    assert index.random_key(0) == keys[0]


def test_a_key_expires_at_its_own_time_in_its_own_database() -> None:
    index = Index()
    entry = entry_of(b"k", 2)
    index.put(entry)
    entry.expire_at_ms = 77
    assert index.expires(77, (b"k", index.databases[2]))
    assert not index.expires(78, (b"k", index.databases[2]))
    assert not index.expires(77, (b"k", index.databases[1]))
    index.swap(1, 2, 0)
    assert index.expires(77, (b"k", index.databases[1])), "it keeps its end where it comes"
    index.remove(entry)
    assert not index.expires(77, (b"k", index.databases[1]))


@pytest.mark.parametrize("damage", ["key", "space", "bucket"])
def test_damage_is_noticed(damage: str) -> None:
    index, keys = filled(3)
    index.check_integrity()
    entry = index.get(keys[0], 0)
    assert entry is not None
    if damage == "key":
        entry.key = b"other"
    elif damage == "space":
        entry.database = index.databases[1]
    else:
        del index.spaces[0][keys[0]]
    with pytest.raises(AssertionError):
        index.check_integrity()
