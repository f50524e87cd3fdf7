"""What computing takes: a fixed cost and a cost per token, from passes of about the size that is asked for."""

from collections.abc import Sequence

import pytest

from kvredis.adapters.engine.break_even import BreakEven, Passes, Piece
from kvredis.adapters.engine.layout import ChunkLayout

CHUNK = 256
LAYOUT = ChunkLayout(4, 2, 64, "bf16", CHUNK, model="tiny/llama")
PIECES = [Piece("remote", LAYOUT.chunk_bytes(), CHUNK)] * 4


def told(*passes: tuple[int, float], times: int = 2) -> Passes:
    """An engine that has told of these passes (tokens, seconds), so often each."""
    made = Passes(CHUNK)
    for tokens, seconds in passes:
        for _ in range(times):
            made.took(tokens, seconds)
    return made


def gpu(tokens: int) -> tuple[int, float]:
    """A pass of a model that takes 25 ms at least, and 15 us for each token: most passes of the first are idle."""
    return tokens, max(0.025, tokens * 15e-6)


def test_a_short_pass_tells_what_a_pass_costs_and_a_long_one_what_a_token_costs_beyond_that() -> None:
    passes = told((1, 0.0211), (8192, 0.020 + 8192 * 1e-5))
    assert passes.seconds_per_token(8192) == pytest.approx(1e-5, rel=0.02)


def test_where_computing_has_no_fixed_cost_the_rest_of_a_prompt_does_not_pretend_one() -> None:
    assert told((200, 0.2), (1000, 1.0)).seconds_per_token(1000) == pytest.approx(0.001)


def test_while_the_fixed_cost_is_unknown_half_of_a_pass_may_be_it() -> None:
    passes = told((8192, 0.1))
    assert passes.seconds_per_token(8192) == pytest.approx(0.1 / 8192)
    assert passes.unknown_share == 0.5
    passes.took(1, 0.09)
    assert passes.unknown_share == 0.5, "a first short pass may have been a warm-up"
    assert passes.seconds_per_token(8192) == pytest.approx(0.1 / 8192)
    passes.took(1, 0.02)
    assert passes.seconds_per_token(8192) == pytest.approx(0.08 / 8191)
    assert passes.unknown_share == 0


def test_an_engine_that_never_tells_of_a_short_pass_is_not_guessed_about_for_ever() -> None:
    passes = told((8192, 0.1), times=31)
    assert passes.unknown_share == 0.5
    passes.took(8192, 0.1)
    assert passes.unknown_share == 0.0


def test_of_the_short_passes_only_the_latest_are_remembered() -> None:
    passes = told((1, 0.001), (8192, 0.1))
    for _ in range(9):
        passes.took(1, 0.05)
    assert passes.seconds_per_token(8192) == pytest.approx(0.05 / 8191)


def test_short_rests_behind_hits_do_not_say_what_a_long_prompt_takes() -> None:
    passes = told(gpu(1), gpu(257), gpu(428), times=50)
    per_token = passes.seconds_per_token(8192)
    assert per_token is not None
    assert per_token < 15e-6, "rather too little: then it is computed, and known"
    for _ in range(2):
        passes.took(*gpu(8192))
    assert passes.seconds_per_token(8192) == pytest.approx(12e-6, rel=0.05), "of 123 ms 25 are there in any case"
    for _ in range(100):
        passes.took(*gpu(300))
    assert passes.seconds_per_token(8192) == pytest.approx(12e-6, rel=0.05), "nor do they push it out"


def test_a_pass_that_costs_the_same_with_and_without_its_tokens_is_hardly_worth_loading() -> None:
    per_token = told((1, 0.025), (1000, 0.025)).seconds_per_token(1000)
    assert per_token is not None
    assert 0 < per_token * 1000 < 0.025 * 0.04


@pytest.mark.parametrize("longer_s", [0.0095, 0.010, 0.0101, 0.011, 0.02])
def test_two_passes_of_nearly_the_same_size_do_not_make_a_token_dearer_than_its_share_of_a_pass(
    longer_s: float,
) -> None:
    per_token = told((255, 0.010), (256, longer_s)).seconds_per_token(256)
    assert per_token is not None
    assert 0 < per_token <= longer_s / 256


@pytest.mark.parametrize(
    ("passes", "tokens", "is_sure"),
    [
        ([], 8192, False),
        ([(8192, 0.1)], 8192, False),
        ([(8192, 0.1)] * 2, 8192, True),
        ([(5000, 0.1), (15000, 0.3)], 8192, True),
        ([(4000, 0.1), (17000, 0.3)], 8192, False),
        ([(8191, 0.1), (8193, 0.1)], 8192, True),
        ([(1024, 0.03)] * 2, 8192, False),
        ([(1024, 0.03)] * 2 + [(1, 0.02)], 8192, False),
        ([(1024, 0.03)] * 2 + [(1, 0.02)] * 2, 8192, True),
        ([(8192, 0.1)] * 2 + [(1, 0.02)] * 2, 1024, False),
        ([(300, 0.1)] * 2, 5, True),
    ],
)
def test_two_passes_of_about_the_size_are_enough_and_of_smaller_ones_where_the_fixed_cost_is_known(
    passes: Sequence[tuple[int, float]], tokens: int, is_sure: bool
) -> None:
    assert told(*passes, times=1).is_sure(tokens) is is_sure


def test_of_two_passes_the_shorter_counts_and_of_more_the_middle_one_of_the_latest() -> None:
    passes = told((8192, 9.0), (8192, 0.1), times=1)
    assert passes.seconds_per_token(8192) == pytest.approx(0.1 / 8192)
    for _ in range(3):
        passes.took(8192, 0.2)
    assert passes.seconds_per_token(8192) == pytest.approx(0.2 / 8192)
    for _ in range(3):
        passes.took(8192, 0.05)
    assert passes.seconds_per_token(8192) == pytest.approx(0.05 / 8192)


def test_each_size_has_its_own_cost_and_the_next_smaller_one_is_asked_else_the_next_larger_one() -> None:
    passes = told((1024, 1.024), (65536, 655.36))
    assert passes.seconds_per_token(1500) == pytest.approx(0.001)
    assert passes.seconds_per_token(40_000) == pytest.approx(0.01)
    assert passes.seconds_per_token(20_000) == pytest.approx(0.001)
    assert passes.seconds_per_token(300) == pytest.approx(0.001)
    assert passes.seconds_per_token() == pytest.approx(0.01)


def test_each_size_is_asked_for_by_itself_and_so_often_at_most() -> None:
    passes = told((1024, 0.1))
    assert not passes.ask(1000, at_most=4)
    assert [passes.ask(9000, at_most=2) for _ in range(3)] == [True, True, False]
    assert passes.ask(100_000, at_most=2)
    for _ in range(2):
        passes.took(100_000, 10.0)
    assert not passes.ask(100_000, at_most=2)


@pytest.mark.parametrize("passed", [(0, 1.0), (-5, 1.0), (300, 0.0), (300, -1.0), (1, 0.0)])
def test_a_pass_of_nothing_or_of_no_time_is_none(passed: tuple[int, float]) -> None:
    passes = told(passed)
    assert passes.seconds_per_token(300) is None
    assert passes.seconds_per_token() is None
    assert not passes.is_sure(300)


# ---- what follows for loads --------------------------------------------------------------------------------------


def even_of(*passes: tuple[int, float], load_s: float) -> BreakEven:
    """What an engine knows that has told of these passes twice, and has loaded a chunk in `load_s`."""
    even = BreakEven(LAYOUT)
    for tokens, seconds in passes:
        for _ in range(2):
            even.prefill_took(tokens, seconds)
    even.load_took("remote", LAYOUT.chunk_bytes(), load_s)
    return even


@pytest.mark.parametrize(("share", "worth"), [(0.45, 4), (0.55, 0)])
def test_while_it_is_unknown_what_a_pass_costs_at_all_a_tier_must_be_twice_as_fast_to_be_loaded_from(
    share: float, worth: int
) -> None:
    even = even_of((1024, 0.1024), load_s=CHUNK * 1e-4 * share)
    assert even.worth(PIECES) == worth
    assert even.watch(PIECES * 2).within_s == pytest.approx(8 * CHUNK * 1e-4), "it is not stopped for a guess"
    assert even.given_up() == [], "nor given up"
    for _ in range(2):
        even.prefill_took(1, 0.0001)
    assert even.worth(PIECES) == 4


def test_a_hit_is_judged_by_what_passes_of_all_that_is_to_be_computed_take() -> None:
    even = even_of((1, 0.02), (1000, 0.021), (8000, 0.82), load_s=CHUNK * 5e-5)
    assert even.worth(PIECES, 8000) == 4
    assert even.worth(PIECES, 1000) == even.worth(PIECES) == 0, "the pass that follows is as long without these tokens"
    assert even.watch(PIECES * 2, 8000).within_s == pytest.approx(8 * CHUNK * 1e-4, rel=0.01)
    assert even.given_up() == [], "to larger prompts it is worth its while"
