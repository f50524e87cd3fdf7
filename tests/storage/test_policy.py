"""LRU: the order in which blocks would leave, and the policies that a configuration can name."""

import pytest

from kvredis.storage.entry import NOWHERE, Entry
from kvredis.storage.errors import ConfigError
from kvredis.storage.policy import LRU, make_policy


def entries(names: str) -> list[Entry]:
    return [Entry(name.encode(), 0, 1, NOWHERE, None) for name in names]


def admitted(names: str) -> tuple[LRU, list[Entry]]:
    policy, members = LRU(), entries(names)
    for entry in members:
        policy.admit(entry)
    return policy, members


def order(policy: LRU) -> str:
    return "".join(entry.key.decode() for entry in policy.victims())


def test_the_one_that_came_first_leaves_first() -> None:
    policy, _ = admitted("abc")
    assert order(policy) == "abc"


def test_use_saves_an_entry_from_leaving_next() -> None:
    policy, (a, *_) = admitted("abc")
    policy.touch(a)
    assert order(policy) == "bca"


def test_of_a_run_used_at_one_instant_the_tail_leaves_first() -> None:
    policy, (a, b, c, _) = admitted("abcx")
    policy.touch_run((a, b, c))
    assert order(policy) == "xcba"


def test_a_leased_entry_is_no_victim_and_is_in_its_old_place_afterwards() -> None:
    policy, (_, b, _) = admitted("abc")
    b.leases = 1
    assert order(policy) == "ac"
    b.leases = 0
    assert order(policy) == "abc"


def test_a_forgotten_entry_is_gone() -> None:
    policy, (a, b, _) = admitted("abc")
    policy.forget(b)
    assert order(policy) == "ac"
    assert len(policy) == 2
    assert b not in policy
    assert a in policy


def test_entries_of_one_key_are_told_apart() -> None:
    policy, (old, new) = admitted("kk")
    policy.forget(old)
    assert list(policy.victims()) == [new]


@pytest.mark.parametrize("name", ["LRU", "lru", "Lru"])
def test_a_policy_goes_by_its_name_in_any_case(name: str) -> None:
    assert make_policy(name).name == "LRU"


def test_an_unknown_policy_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"must be one of LRU.*LFU"):
        make_policy("LFU")
