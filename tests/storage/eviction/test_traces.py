"""What each policy hits on made-up traces, and that the clever ones are worth their name. Seen with -s.

Rooms of 200 blocks of one length; on a miss the block is stored, and what leaves is the policy's first victim.
"""

import random
from collections.abc import Iterator

import pytest

from kvredis.storage.entry import NOWHERE, Entry
from kvredis.storage.eviction import lfu
from kvredis.storage.eviction.base import POLICIES, make_policy

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
    """`trace` with a long prompt that nobody asks for again after each thousand uses."""
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
def test_who_tells_popular_blocks_from_others_hits_more_often_than_lru(
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
