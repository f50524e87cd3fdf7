"""The workload generator: the same numbers make the same tokens, everywhere, and share what they should."""

from __future__ import annotations

from hashlib import sha256
from itertools import combinations, takewhile

import pytest

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.prompts import PromptPlan, prompts

PINNED = PromptPlan(input_len=1000, hit_rate=0.5, num_prompts=20, seed=7, vocab_size=152_064)
PINNED_SHA256 = "0da0906b3a276bab676567611bcb2ecbf37339336892bbc3f3bbf2c785faa84c"


def test_the_tokens_of_a_seed_never_change() -> None:
    assert sha256(repr(list(prompts(PINNED))).encode()).hexdigest() == PINNED_SHA256
    assert list(prompts(PromptPlan(4, 0.5, 2, seed=1, vocab_size=100))) == [[13, 84, 76, 25], [13, 84, 49, 44]]


def test_another_seed_makes_other_tokens() -> None:
    assert list(prompts(PINNED)) != list(prompts(PromptPlan(1000, 0.5, 20, 8, 152_064)))


@pytest.mark.parametrize("hit_rate", [0, 0.005, 0.5, 0.8, 0.999, 1])
@pytest.mark.parametrize("vocab_size", [30, 32_000])
def test_every_two_prompts_share_exactly_what_was_asked_for(hit_rate: float, vocab_size: int) -> None:
    plan = PromptPlan(input_len=1000, hit_rate=hit_rate, num_prompts=30, vocab_size=vocab_size)
    made = list(prompts(plan))
    assert {len(prompt) for prompt in made} == {1000}
    assert {token for prompt in made for token in prompt} <= set(range(vocab_size))
    pairs = [zip(*two, strict=True) for two in combinations(made, 2)]
    shared = {sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], pair)) for pair in pairs}
    assert shared == {round(hit_rate * 1000)}


def test_without_hits_nothing_is_shared_and_with_all_hits_everything_is() -> None:
    apart, alike = (list(prompts(PromptPlan(16, rate, 10))) for rate in (0, 1))
    assert len({prompt[0] for prompt in apart}) == 10
    assert alike == [alike[0]] * 10


def test_a_part_of_a_token_is_rounded() -> None:
    assert [PromptPlan(10, rate, 1).shared_tokens for rate in (0.04, 0.06, 0.29, 0.96)] == [0, 1, 3, 10]


def test_a_smaller_hit_rates_prefix_begins_a_larger_ones_and_fewer_prompts_are_the_first_of_many() -> None:
    few, much = (next(prompts(PromptPlan(100, rate, 3))) for rate in (0.2, 0.7))
    assert few[:20] == much[:20]
    assert list(prompts(PromptPlan(100, 0.2, 3))) == list(prompts(PromptPlan(100, 0.2, 8)))[:3]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0, 0.5, 1), "input_len must be at least 1"),
        ((8, 1.01, 1), "hit_rate must be from 0 to 1"),
        ((8, float("nan"), 1), "hit_rate must be from 0 to 1"),
        ((8, 0.5, 0), "num_prompts must be at least 1"),
        ((8, 0.5, 1, -1), "seed must be at least 0"),
        ((8, 0.5, 1, 0, 2**33), "vocab_size must be at most"),
        ((8, 0.5, 11, 0, 10), "11 prompts cannot all go on differently"),
    ],
)
def test_numbers_that_make_no_workload_are_refused(numbers: tuple[int, float, int], text: str) -> None:
    with pytest.raises(BenchError, match=text):
        PromptPlan(*numbers)


def test_more_prompts_than_tokens_are_fine_when_nothing_tells_them_apart() -> None:
    assert len(list(prompts(PromptPlan(8, 1, 11, 0, 10)))) == 11
