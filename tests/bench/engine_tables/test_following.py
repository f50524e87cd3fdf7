"""While a batch generates, what the cache has of the next one comes, and never into memory that is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvredis.bench.core.compute import TINY
from kvredis.bench.core.prompts import PromptPlan, prompts
from kvredis.bench.engine_tables.worker import Engine, OnDevice, Spent

CHUNK = 16


@pytest.fixture
def engine() -> Engine:
    return Engine(TINY, 60, CHUNK)


def some(count: int) -> list[list[int]]:
    return list(prompts(PromptPlan(50, 0.0, count, seed=3)))


class Noting(OnDevice):
    """Tells when it was asked to load, and stores for as long as it is told."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.layout)
        self.asked: list[int] = []
        self.done = True

    def load(self, tokens: list[int], kv: torch.Tensor, stop: int, together: int) -> Callable[[], int]:
        self.asked.append(tokens[0])
        return super().load(tokens, kv, stop, together)

    def store(self, tokens: list[int], kv: torch.Tensor) -> Any:
        super().store(tokens, kv)
        return self

    def wait(self) -> None:
        self.done = True


def test_what_the_next_batch_loads_comes_while_this_one_generates(engine: Engine) -> None:
    cache, made, spent = Noting(engine), some(4), Spent()
    first, second = made[:2], made[2:]
    known = engine.batch(cache, first, 3, 64) + engine.batch(cache, second, 3, 64)
    engine.prepare({2}, 50, 3)
    found = engine.batch(cache, first, 3, 64, spent, second)
    assert cache.asked == [prompt[0] for prompt in made], "the second's too"
    found += engine.batch(cache, second, 3, 64, spent)
    assert cache.asked == [prompt[0] for prompt in made], "once"
    assert found == known
    assert (spent.hits, spent.alone_hit_tokens) == ([48] * 4, 2 * 48), "the first alone was waited for from its start"
    assert 0 < spent.alone_load_s < spent.load_s


def test_nothing_comes_into_memory_that_is_stored_from_nor_before_steps_are_made_nor_where_nothing_is_generated(
    engine: Engine,
) -> None:
    cache, made = Noting(engine), some(4)
    first, second = made[:2], made[2:]
    engine.batch(cache, first, 7, 64, following=second)
    engine.batch(cache, second, 7, 64)
    cache.asked.clear()
    cache.done = False
    engine.batch(cache, first, 7, 64, following=second)
    assert cache.asked == [prompt[0] for prompt in first], "the other room is being stored from"
    engine.settle()
    engine.batch(cache, first, 1, 64, following=second)
    assert cache.asked == [prompt[0] for prompt in first] * 2
    engine.settle()


def test_what_was_not_said_to_follow_is_refused_and_settling_forgets_it(engine: Engine) -> None:
    cache, made = OnDevice(engine.layout), some(4)
    known = [engine.batch(cache, made[:2], 3, 64) for _ in range(2)][-1]
    engine.batch(cache, made[:2], 3, 64, following=made[2:])
    with pytest.raises(ValueError, match="follow"):
        engine.batch(cache, made[:2], 3, 64)
    engine.batch(cache, made[:2], 3, 64, following=made[2:])
    engine.settle()
    assert engine.batch(cache, made[:2], 3, 64) == known


def test_kv_is_handed_over_while_it_is_computed_and_not_when_that_has_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    class Telling(OnDevice):
        def store(self, tokens: list[int], kv: torch.Tensor) -> None:
            did.append("store")

        def computed(self, tokens: int, seconds: float) -> None:
            did.append("computed")

    def now_s() -> float:
        did.append("waited")
        return 0.0

    monkeypatch.setattr(engine, "_now_s", now_s)
    engine.batch(Telling(engine.layout), some(2), 1, 64)
    first = did.index("store")
    assert did[first : first + 4] == ["store", "store", "waited", "computed"], "behind the launch, and then the clock"


def test_what_was_served_before_does_not_choose_the_memory(engine: Engine) -> None:
    places: list[int] = []

    class Placing(OnDevice):
        def store(self, tokens: list[int], kv: torch.Tensor) -> None:
            places.append(kv.data_ptr())

    cache, made = Placing(engine.layout), some(1)
    for count in (1, 2, 3):
        engine.prepare({1}, 50, 1)
        for _ in range(count):
            engine.batch(cache, made, 1, 64)
    one, two, three = places[:1], places[1:3], places[3:]
    assert one[0] == two[0] == three[0] == three[2] != two[1]
    assert two[1] == three[1]
