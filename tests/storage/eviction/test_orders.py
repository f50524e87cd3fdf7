"""The order in which blocks would leave under each policy that a configuration can name."""

import gc
import operator
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import islice

import pytest

from kvredis.storage.entry import NOWHERE, Entry
from kvredis.storage.errors import ConfigError
from kvredis.storage.eviction import lfu, s3fifo
from kvredis.storage.eviction.base import POLICIES, Policy, make_policy

from .policy_models import MODELS

every_policy = pytest.mark.parametrize("name", POLICIES)


class Watched(Entry):
    """An entry that counts how often a walk looked whether it is leased: once for each step of a walk."""

    looks = 0

    @property
    def leases(self) -> int:
        Watched.looks += 1
        return 0

    @leases.setter
    def leases(self, number: int) -> None:
        pass


def entries(names: Iterable[str]) -> list[Entry]:
    return [Entry(name.encode(), 0, 1, NOWHERE, None) for name in names]


def admitted(names: Iterable[str], policy: str = "LRU") -> tuple[Policy, list[Entry]]:
    made, members = make_policy(policy), entries(names)
    for entry in members:
        made.admit(entry)
    return made, members


def order(policy: Policy) -> str:
    return "".join(entry.key.decode() for entry in policy.victims())


# ---- what holds for all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@every_policy
def test_a_policy_orders_as_its_plain_model_says(name: str, seed: int) -> None:
    rng = random.Random(seed)
    policy, model = make_policy(name), MODELS[name]()
    here: dict[bytes, Entry] = {}
    keys = [b"%d" % number for number in range(60)]

    def forget(entry: Entry) -> None:
        policy.forget(entry)
        model.forget(entry)
        del here[entry.key]

    for _ in range(1500):
        choice, key = rng.random(), rng.choice(keys)
        entry = here.get(key)
        if choice < 0.25:
            if entry is not None:
                forget(entry)
            entry = here[key] = Entry(key, 0, 1, NOWHERE, None)
            policy.admit(entry)
            model.admit(entry)
        elif choice < 0.55 and entry is not None:
            policy.touch(entry)
            model.touch(entry)
        elif choice < 0.6:
            run = rng.sample(list(here.values()), rng.randint(0, len(here)))[:10]
            policy.touch_run(run)
            model.touch_run(run)
        elif choice < 0.63 and entry is not None:
            forget(entry)
        elif choice < 0.7 and entry is not None:
            entry.leases = not entry.leases
        else:
            expected = model.order()
            assert list(policy.victims()) == expected
            assert len(expected) == len(set(expected)) == sum(not each.leases for each in here.values())
            for victim in expected[: rng.choice((0, 1, 1, 1, 5))]:
                forget(victim)
        assert len(policy) == len(here)
        assert all(each in policy for each in here.values())


@every_policy
def test_those_that_leave_one_by_one_leave_in_the_order_foreseen(name: str) -> None:
    policy, members = admitted(map(str, range(100)), name)
    rng = random.Random(1)
    for _ in range(200):
        policy.touch(rng.choice(members))
    foreseen = list(policy.victims())
    left = []
    while len(policy):
        victim = next(policy.victims())
        policy.forget(victim)
        left.append(victim)
    assert left == foreseen


@every_policy
def test_asking_twice_gives_the_same(name: str) -> None:
    policy, members = admitted("abcdefghijklmnop", name)
    for entry in members[::3]:
        policy.touch(entry)
    assert order(policy) == order(policy)


@every_policy
def test_of_a_run_used_at_one_instant_the_tail_leaves_first(name: str) -> None:
    policy, (a, b, c, _) = admitted("abcx", name)
    policy.touch_run((a, b, c))
    assert order(policy) == {"FIFO": "abcx", "MRU": "cbax"}.get(name, "xcba")


@every_policy
def test_an_entry_that_is_not_in_the_order_cannot_be_used(name: str) -> None:
    policy, (a, b, c) = admitted("abc", name)
    policy.forget(b)
    with pytest.raises(KeyError):
        policy.touch(b)
    with pytest.raises(KeyError):
        policy.touch_run((a, b, c))
    assert sorted(order(policy)) == ["a", "c"]
    assert policy.uses(b) == (0 if name == "LFU" else None)


@every_policy
def test_a_leased_entry_is_no_victim_until_it_is_released(name: str) -> None:
    policy, (_, b, _) = admitted("abc", name)
    b.leases = 1
    assert sorted(order(policy)) == ["a", "c"]
    b.leases = 0
    assert sorted(order(policy)) == ["a", "b", "c"]


@every_policy
def test_with_everything_leased_no_entry_can_leave(name: str) -> None:
    policy, members = admitted("abcdefgh", name)
    for entry in members:
        entry.leases = 1
    assert order(policy) == ""


@every_policy
def test_an_empty_order_has_no_victims(name: str) -> None:
    policy, (a,) = admitted("a", name)
    policy.forget(a)
    assert (order(policy), len(policy)) == ("", 0)


@every_policy
def test_a_forgotten_entry_is_gone(name: str) -> None:
    policy, (a, b, _) = admitted("abc", name)
    policy.forget(b)
    assert sorted(order(policy)) == ["a", "c"]
    assert len(policy) == 2
    assert b not in policy
    assert a in policy


@every_policy
def test_entries_of_one_key_are_told_apart(name: str) -> None:
    policy, (old, new) = admitted("kk", name)
    policy.forget(old)
    assert list(policy.victims()) == [new]


@every_policy
def test_an_entry_has_its_place_in_the_orders_of_two_tiers_and_leaves_each_by_itself(name: str) -> None:
    memory, members = admitted("abcd", name)
    gpu = make_policy(name)
    for entry in reversed(members):
        gpu.admit(entry)
    orders = order(memory), order(gpu)
    memory.forget(members[1])
    gpu.forget(members[2])
    assert (order(memory), order(gpu)) == (orders[0].replace("b", ""), orders[1].replace("c", ""))
    assert members[1] in gpu
    with pytest.raises(KeyError):
        memory.touch(members[1])
    memory.admit(members[1])
    gpu.admit(members[2])
    assert sorted(order(memory)) == sorted(order(gpu)) == list("abcd")


def test_an_entry_in_two_orders_is_refused_by_a_third_and_stays_where_it_is() -> None:
    first, members = admitted("ab")
    second, third = make_policy("LRU"), make_policy("FIFO")
    second.admit(members[0])
    with pytest.raises(RuntimeError, match="two orders"):
        third.admit(members[0])
    assert (order(first), order(second), order(third)) == ("ab", "a", "")


@every_policy
def test_an_order_that_is_given_up_lets_go_of_its_entries(name: str) -> None:
    policy, members = admitted("abc", name)
    held = list(map(sys.getrefcount, members))
    policy.forget(members[0])
    del policy
    gc.collect()
    assert all(map(operator.lt, map(sys.getrefcount, members), held))
    again = make_policy(name)
    for entry in members:
        again.admit(entry)
    assert len(again) == 3


@every_policy
def test_victims_are_found_one_by_one(name: str) -> None:
    policy = make_policy(name)
    members = [Watched(b"%d" % number, 0, 1, NOWHERE, None) for number in range(5000)]
    for entry in members:
        policy.admit(entry)
    for entry in members[::2]:
        policy.touch(entry)
    policy.forget(next(policy.victims()))
    Watched.looks = 0
    assert len(list(islice(policy.victims(), 3))) == 3
    assert Watched.looks < 20


@every_policy
def test_uses_by_another_thread_in_the_middle_of_a_walk_neither_repeat_nor_lose_a_victim(name: str) -> None:
    policy, members = admitted("abcdefghijklmnopqrst", name)
    rng = random.Random(3)
    for _ in range(30):
        policy.touch(rng.choice(members))
    seen = []
    for entry in policy.victims():
        seen.append(entry)
        policy.touch(rng.choice(members))  # what Store.fetch does without the lock
    assert sorted(entry.key for entry in seen) == [entry.key for entry in members]


@pytest.mark.parametrize("spelled", [*POLICIES, "lru", "Lru", "s3fifo", "mRu"])
def test_a_policy_goes_by_its_name_in_any_case(spelled: str) -> None:
    assert make_policy(spelled).name == spelled.upper()


def test_an_unknown_policy_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"must be one of LRU, LFU, FIFO, MRU, S3FIFO.*ARC"):
        make_policy("ARC")


# ---- LRU, MRU, FIFO ----------------------------------------------------------------------------------------------


def test_the_one_that_came_first_leaves_first() -> None:
    for name in ("LRU", "LFU", "FIFO", "S3FIFO"):
        assert order(admitted("abc", name)[0]) == "abc"


def test_use_saves_an_entry_from_leaving_next() -> None:
    for name in ("LRU", "LFU", "S3FIFO"):
        policy, (a, *_) = admitted("abc", name)
        policy.touch(a)
        assert order(policy) == "bca"


def test_a_lease_changes_no_place() -> None:
    policy, (_, b, _) = admitted("abc")
    b.leases = 1
    assert order(policy) == "ac"
    b.leases = 0
    assert order(policy) == "abc"


def test_mru_lets_go_what_was_used_last() -> None:
    policy, (a, *_) = admitted("abc", "MRU")
    assert order(policy) == "cba"
    policy.touch(a)
    assert order(policy) == "acb"


def test_fifo_does_not_mind_use() -> None:
    policy, (a, *_) = admitted("abc", "FIFO")
    policy.touch(a)
    assert order(policy) == "abc"


def test_all_but_s3fifo_write_to_disk_whatever_leaves() -> None:
    for name in POLICIES:
        policy, (a,) = admitted("a", name)
        assert policy.spills(a) == (name != "S3FIFO")


# ---- LFU ---------------------------------------------------------------------------------------------------------


def test_lfu_lets_go_what_was_used_least_and_says_how_often() -> None:
    policy, (a, b, c) = admitted("abc", "LFU")
    for entry in (a, a, b, c, c, c):
        policy.touch(entry)
    assert order(policy) == "bac"
    assert [policy.uses(entry) for entry in (a, b, c)] == [3, 2, 4]


@pytest.mark.parametrize("name", ["LFU", "S3FIFO"])
def test_that_a_run_is_wanted_is_not_counted_however_often_it_is_said(name: str) -> None:
    policy, (a, b, c, d, *_) = admitted("abcdefghijkl", name)
    policy.touch(d)
    for _ in range(9):
        policy.touch_run((a, b, c))
    assert order(policy)[-1] == "d"
    assert policy.uses(a) == {"LFU": 1}.get(name)
    assert policy.spills(a) == (name == "LFU")


def test_lfu_counts_no_further_than_redis() -> None:
    policy, (a, b) = admitted("ab", "LFU")
    for _ in range(300):
        policy.touch(a)
    policy.touch(b)
    assert (policy.uses(a), policy.uses(b)) == (255, 2)


def test_lfu_counts_writing_over_a_block_as_a_use_of_it() -> None:
    policy, (old, _) = admitted("ab", "LFU")
    policy.touch(old)
    policy.forget(old)
    (new,) = entries("a")
    policy.admit(new)
    assert policy.uses(new) == 3
    policy.forget(new)
    (other,) = entries("c")
    policy.admit(other)
    assert policy.uses(other) == 1


def test_lfu_forgets_popularity_of_long_ago() -> None:
    policy, (hot, *_) = admitted("abcd", "LFU")
    for _ in range(99):
        policy.touch(hot)
    for _ in range(4 * 10):
        next(policy.victims())
    assert policy.uses(hot) == 100
    next(policy.victims())
    assert policy.uses(hot) == 50
    for _ in range(7 * (4 * 10 + 1)):
        next(policy.victims())
    assert policy.uses(hot) == 1


# ---- S3-FIFO -----------------------------------------------------------------------------------------------------


def test_a_scan_passes_through_the_small_queue_only() -> None:
    policy, members = admitted(map(str, range(20)), "S3FIFO")
    for entry in members:
        policy.touch(entry)
    for scanned in entries(f"scan{number}" for number in range(100)):
        policy.admit(scanned)
        policy.forget(next(policy.victims()))
    assert sum(entry in policy for entry in members) >= 18


def test_an_entry_that_was_used_when_it_came_to_the_front_is_worth_a_write_and_one_hit_wonders_are_not() -> None:
    policy, (a, b, *_) = admitted("abcdefghijkl", "S3FIFO")
    policy.touch(a)
    assert next(policy.victims()) is b
    assert policy.spills(a)
    assert not policy.spills(b)


def test_a_key_that_comes_back_soon_is_no_one_hit_wonder() -> None:
    policy, (a, *_) = admitted("abcdefghijkl", "S3FIFO")
    policy.forget(a)
    (again, other) = entries("az")
    policy.admit(again)
    policy.admit(other)
    assert policy.spills(again)
    assert not policy.spills(other)


def test_where_all_were_used_a_victim_is_found_in_a_bounded_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3fifo, "TURN_STEPS_MAX", 10)
    policy, members = admitted(map(str, range(100)), "S3FIFO")
    for entry in members:
        policy.touch(entry)
    assert next(policy.victims()) is members[10]
    foreseen = list(policy.victims())
    assert foreseen[:2] == [members[10], members[21]]
    assert sorted(entry.key for entry in foreseen) == sorted(entry.key for entry in members)


def test_there_are_never_more_ghosts_than_entries() -> None:
    policy, members = admitted(map(str, range(100)), "S3FIFO")
    for entry in members[:70]:
        policy.forget(entry)
    forgotten_first, forgotten_last = entries(("0", "69"))
    policy.admit(forgotten_first)
    policy.admit(forgotten_last)
    assert not policy.spills(forgotten_first)
    assert policy.spills(forgotten_last)


def test_a_key_of_the_main_queue_that_is_written_over_stays_there() -> None:
    policy, (a, *_) = admitted("abcdefghijkl", "S3FIFO")
    policy.touch(a)
    next(policy.victims())
    policy.forget(a)
    (new,) = entries("a")
    policy.admit(new)
    assert policy.spills(new)


# What each policy hits on made-up traces, and that the clever ones are worth their name. Seen with -s. Rooms of 200
# blocks of one length; on a miss the block is stored, and what leaves is the policy's first victim.

ROOM = 200


BLOCKS = 25 * ROOM


"""Different blocks of a Zipf trace."""


USES = 20_000


def hit_rate(name: str, trace: list[int]) -> float:
    """The share of `trace` that is found in a room of ROOM entries."""
    policy = make_policy(name)
    here: dict[int, Entry] = {}
    hits = 0
    for number in trace:
        entry = here.get(number)
        if entry is not None:
            hits += 1
            policy.touch(entry)
            continue
        if len(here) == ROOM:
            victim = next(policy.victims())
            policy.forget(victim)
            del here[int(victim.key)]
        entry = here[number] = Entry(b"%d" % number, 0, 1, NOWHERE, None)
        policy.admit(entry)
    return hits / len(trace)


def zipf(seed: int, first: int = 0) -> list[int]:
    """USES of BLOCKS blocks from number `first` on, the n-th most popular one being used 1/n as often as the first."""
    weights = [1 / rank for rank in range(1, BLOCKS + 1)]
    return random.Random(seed).choices(range(first, first + BLOCKS), weights, k=USES)


def with_scans(trace: list[int]) -> Iterator[int]:
    """`trace` with a long prompt that no client asks for again after each thousand uses."""
    fresh = 10**6
    for at in range(0, len(trace), 1000):
        yield from trace[at : at + 1000]
        yield from range(fresh, fresh + ROOM)
        fresh += ROOM


TRACES = {
    "loop over 1.5 rooms": list(range(ROOM * 3 // 2)) * 12,
    "Zipf": zipf(1),
    "Zipf with scans": list(with_scans(zipf(1))),
    "Zipf, then another": zipf(1) * 3 + zipf(3, BLOCKS) * 3,
}


@pytest.fixture(scope="module")
def rates() -> dict[str, dict[str, float]]:
    """The share of hits by policy and trace."""
    found = {name: {trace: hit_rate(name, TRACES[trace]) for trace in TRACES} for name in POLICIES}
    print("\n" + " " * 8 + "".join(f"{trace:>22}" for trace in TRACES))
    for name, by_trace in found.items():
        print(f"{name:8}" + "".join(f"{rate:22.1%}" for rate in by_trace.values()))
    return found


def test_s3fifo_hits_more_often_than_lru_on_a_loop_that_does_not_fit(rates: dict[str, dict[str, float]]) -> None:
    lru, s3fifo = (rates[name]["loop over 1.5 rooms"] for name in ("LRU", "S3FIFO"))
    assert lru == 0.0
    assert s3fifo > 0.35


@pytest.mark.parametrize("trace", ["Zipf", "Zipf with scans", "Zipf, then another"])
@pytest.mark.parametrize("name", ["S3FIFO", "LFU"])
def test_a_policy_that_tells_popular_blocks_from_others_hits_more_often_than_lru(
    name: str, trace: str, rates: dict[str, dict[str, float]]
) -> None:
    assert rates[name][trace] > rates["LRU"][trace] + 0.05


def test_what_loops_are_for_is_mru(rates: dict[str, dict[str, float]]) -> None:
    assert max(rates, key=lambda name: rates[name]["loop over 1.5 rooms"]) == "MRU"


def test_halving_costs_lfu_nothing_while_tastes_stay_and_saves_it_when_they_change(
    rates: dict[str, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lfu, "AGE_TURNOVERS", 10**9)
    for_ever = {trace: hit_rate("LFU", TRACES[trace]) for trace in ("Zipf", "Zipf, then another")}
    assert rates["LFU"]["Zipf"] > for_ever["Zipf"] - 0.01
    assert rates["LFU"]["Zipf, then another"] > for_ever["Zipf, then another"] + 0.15
