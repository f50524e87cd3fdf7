"""The rule that loads only what comes sooner than it is computed: what it learns, what it chooses, when it gives up."""

import logging
import math
from collections.abc import Sequence

import pytest

from kvredis.adapters.engine.break_even import BreakEven, Piece
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.backends.base import Tier

LAYOUT = ChunkLayout(4, 2, 64, "bf16", 100, model="tiny/llama")
CHUNK_BYTES = LAYOUT.chunk_bytes()
RATE = 10_000.0
"""Tokens per second: a chunk is computed in 10 ms."""
CHUNK_S = 0.01
EVEN = RATE * LAYOUT.bytes_per_token
MEMORY: list[Tier] = ["memory"]
DISK: list[Tier] = ["disk"]
REMOTE: list[Tier] = ["remote"]


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def even(clock: Clock) -> BreakEven:
    """One that knows the prefill rate, and that a pass costs nothing beyond it, and no tier."""
    made = BreakEven(LAYOUT, clock)
    for tokens in (1, 1, 1000):
        made.prefill_took(tokens, tokens / RATE)
    return made


def pieces(*tiers: Tier, tokens: int = 100) -> list[Piece]:
    return [Piece(tier, CHUNK_BYTES, tokens) for tier in tiers]


def loads(even: BreakEven, tier: Tier, share: float, times: int = 3) -> None:
    """So many loads from `tier`, each in this share of the time that computing takes."""
    for _ in range(times):
        even.load_took(tier, 10 * CHUNK_BYTES, 10 * CHUNK_S * share)


# ---- the prefill rate --------------------------------------------------------------------------------------------


def test_break_even_is_the_bytes_of_a_token_times_the_tokens_of_a_second(even: BreakEven) -> None:
    assert even.bytes_per_s == pytest.approx(EVEN)


def test_before_a_prefill_is_known_everything_is_loaded_however_slow() -> None:
    even = BreakEven(LAYOUT)
    even.load_took("remote", CHUNK_BYTES, 100.0)
    assert even.bytes_per_s is None
    assert even.given_up() == []
    assert even.worth(pieces("remote", "remote")) == 2
    assert even.watch(pieces("remote")).within_s is None


def test_the_first_prefill_counts_until_there_is_another() -> None:
    even = BreakEven(LAYOUT)
    even.prefill_took(1000, 5.0)
    assert even.tokens_per_s == pytest.approx(200)
    even.prefill_took(1000, 0.1)
    assert even.tokens_per_s == pytest.approx(10_000)
    even.prefill_took(1000, 0.1)
    assert even.tokens_per_s == pytest.approx(10_000)


def test_one_prefill_that_was_held_up_changes_nothing(even: BreakEven) -> None:
    for _ in range(4):
        even.prefill_took(1000, 0.1)
    even.prefill_took(1000, 30.0)
    assert even.tokens_per_s == pytest.approx(RATE)


def test_the_prefill_rate_follows_when_the_engine_gets_slower(even: BreakEven) -> None:
    for _ in range(9):
        even.prefill_took(1000, 0.5)
    assert even.tokens_per_s == pytest.approx(2000, rel=0.001)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (99, 1.0), (100, 0.0), (100, -1.0), (-5, 1.0)])
def test_a_prefill_of_less_than_a_chunk_or_of_no_time_is_no_rate(tokens: int, seconds: float) -> None:
    even = BreakEven(LAYOUT)
    even.prefill_took(tokens, seconds)
    assert even.tokens_per_s is None


def test_a_prefill_is_asked_for_until_two_are_known_and_not_for_ever(even: BreakEven) -> None:
    assert even.ask_prefill(1000), "one is known, but it may have been the warm-up"
    even.prefill_took(1000, 0.1)
    assert not even.ask_prefill(1000)
    never_told = BreakEven(LAYOUT)
    assert [never_told.ask_prefill(1000) for _ in range(6)] == [True] * 4 + [False] * 2
    assert [never_told.ask_prefill(9000, at_most=1) for _ in range(2)] == [True, False]


# ---- the speed of a tier -----------------------------------------------------------------------------------------


def test_an_untried_tier_is_tried(even: BreakEven) -> None:
    assert even.worth(pieces("remote", "disk", "memory")) == 3


@pytest.mark.parametrize(("share", "worth"), [(0.1, 3), (0.9, 3), (1.1, 0), (10.0, 0)])
def test_a_tier_is_loaded_from_while_it_is_faster_than_computing(even: BreakEven, share: float, worth: int) -> None:
    loads(even, "remote", share)
    assert even.worth(pieces("remote", "remote", "remote")) == worth
    assert even.given_up() == ([] if worth else ["remote"])


def test_one_hiccup_among_three_loads_does_not_count_and_two_do(even: BreakEven) -> None:
    loads(even, "remote", 0.2)
    loads(even, "remote", 50.0, times=1)
    assert even.worth(pieces("remote")) == 1
    loads(even, "remote", 50.0, times=1)
    assert even.worth(pieces("remote")) == 0


def test_what_is_smaller_than_a_chunk_tells_nothing_of_a_tier(even: BreakEven) -> None:
    even.load_took("remote", CHUNK_BYTES - 1, 100.0)
    assert even.worth(pieces("remote")) == 1


def test_a_tier_gives_way_when_the_engine_gets_faster_and_comes_back_when_it_gets_slower(even: BreakEven) -> None:
    loads(even, "disk", 0.5)
    for _ in range(9):
        even.prefill_took(1000, 0.1 / 4)
    assert even.worth(pieces("disk")) == 0
    assert even.given_up() == ["disk"]
    for _ in range(9):
        even.prefill_took(1000, 0.1)
    assert even.given_up() == []
    assert even.worth(pieces("disk")) == 1


def test_latency_is_paid_once_a_load_and_is_not_taken_for_bandwidth(even: BreakEven) -> None:
    for seconds in (0.5, 0.02, 0.08):  # the quickest answer is the way, the rest is what else went on
        even.question_took(seconds)
    even.load_took("remote", CHUNK_BYTES, 0.02 + CHUNK_S / 2)
    assert even.worth(pieces(*REMOTE * 3)) == 0, "3 x 5 ms are saved, 20 ms are waited for"
    assert even.worth(pieces(*REMOTE * 5)) == 5
    loads(even, "disk", 0.5)
    assert even.worth(pieces("disk")) == 1, "only the remote tier is a way off"


def test_latency_explains_no_more_than_most_of_a_load(even: BreakEven) -> None:
    even.question_took(10.0)
    even.load_took("remote", CHUNK_BYTES, 20 * CHUNK_S)
    assert even.given_up() == ["remote"]


def test_of_the_questions_only_the_latest_are_remembered(even: BreakEven) -> None:
    even.question_took(0.001)
    for _ in range(8):
        even.question_took(0.5)
    loads(even, "remote", 0.5)
    assert even.worth(pieces(*REMOTE * 10)) == 0


# ---- which prefix ------------------------------------------------------------------------------------------------


def test_a_slow_tail_behind_a_fast_head_is_computed(even: BreakEven) -> None:
    loads(even, "memory", 0.05)
    loads(even, "remote", 2.0)
    assert even.worth(pieces("memory", "memory", "remote", "remote")) == 2


def test_a_slow_head_is_loaded_when_the_tail_makes_up_for_it(even: BreakEven) -> None:
    loads(even, "memory", 0.0)
    loads(even, "remote", 4.0)
    assert even.worth(pieces("remote", *MEMORY * 2)) == 0
    assert even.worth(pieces("remote", *MEMORY * 4)) == 5
    assert even.worth(pieces("remote", *MEMORY * 4, "remote")) == 5
    assert even.worth(pieces("remote", *MEMORY * 4, "remote", *MEMORY * 4)) == 10


def test_nothing_is_loaded_behind_a_tier_that_hangs(even: BreakEven) -> None:
    even.load_stopped("remote", 0, 1.0)
    assert even.worth(pieces("memory", "remote", *MEMORY * 1000)) == 1


def test_a_chunk_of_which_the_engine_has_most_is_not_worth_its_bytes(even: BreakEven) -> None:
    loads(even, "remote", 0.5)
    assert even.worth(pieces("remote", tokens=40)) == 0
    assert even.worth(pieces("remote", tokens=60)) == 1
    assert even.worth([*pieces("remote", tokens=40), *pieces("remote")]) == 2


def test_what_saves_computing_pays_to_be_stored_where_that_takes_less(even: BreakEven) -> None:
    assert even.pays_to_store(CHUNK_BYTES, 100) is None, "no store is known"
    even.store_took(CHUNK_BYTES - 1, 0.0)
    for share in (0.5, 0.5, 100):  # one is held up
        even.store_took(10 * CHUNK_BYTES, 10 * CHUNK_S * share)
    assert even.pays_to_store(CHUNK_BYTES, 100)
    assert not even.pays_to_store(3 * CHUNK_BYTES, 100)
    assert even.pays_to_store(3 * CHUNK_BYTES, 200)


def test_before_a_prefill_is_known_it_is_unknown_what_pays_to_be_stored() -> None:
    even = BreakEven(LAYOUT)
    for _ in range(3):
        even.store_took(CHUNK_BYTES, 1.0)
    assert even.pays_to_store(1, 10_000) is None


def test_nothing_found_is_nothing_to_load(even: BreakEven) -> None:
    assert even.worth([]) == 0
    assert even.watch([]).within_s == 0


def test_a_tier_is_tried_with_one_block_before_the_rest_is_asked_for(even: BreakEven) -> None:
    todo = pieces("memory", "memory", "remote", "remote")
    assert even.first_part(todo) == 1
    loads(even, "memory", 0.1)
    assert even.first_part(todo) == 3
    loads(even, "remote", 0.1)
    assert even.first_part(todo) == 4
    assert even.first_part([]) == 0
    assert BreakEven(LAYOUT).first_part(todo) == 4, "nothing to compare it with"


# ---- the watch ---------------------------------------------------------------------------------------------------


def laps(even: BreakEven, clock: Clock, todo: list[Piece], seconds: Sequence[float | None]) -> int:
    """Load `todo`, each piece in so many seconds (None: it does not come, within the bound); how many were taken."""
    watch = even.watch(todo)
    taken = 0
    for each in seconds:
        assert watch.within_s is not None
        clock.now_s += watch.within_s if each is None else each
        go_on = watch.lap(each is not None)
        taken += each is not None
        if not go_on:
            break
    watch.end()
    return taken


def test_a_load_may_wait_no_longer_than_computing_takes_or_a_trial(even: BreakEven) -> None:
    assert even.watch(pieces("remote", "remote")).within_s == even.trial_s("remote") == pytest.approx(4 * CHUNK_S)
    assert even.watch(pieces(*REMOTE * 8)).within_s == pytest.approx(8 * CHUNK_S)
    even.question_took(0.5)
    assert even.watch(pieces(*REMOTE * 8)).within_s == pytest.approx(8 * CHUNK_S + 0.5)
    assert even.watch(pieces(*DISK * 8)).within_s == pytest.approx(8 * CHUNK_S)


def test_the_first_load_from_a_slow_tier_is_stopped_early_and_there_is_no_second(even: BreakEven, clock: Clock) -> None:
    todo = pieces(*REMOTE * 32)
    assert laps(even, clock, todo, [4 * CHUNK_S] * 32) == 1
    assert even.worth(todo) == 0


def test_a_tier_that_slows_down_in_the_middle_of_a_load_is_given_up_there(even: BreakEven, clock: Clock) -> None:
    loads(even, "remote", 0.1)
    todo = pieces(*REMOTE * 32)
    taken = laps(even, clock, todo, [CHUNK_S / 10] * 8 + [CHUNK_S * 10] * 24)
    assert taken == 10, "what 8 have saved, and the allowance, pay for most of two"
    assert even.worth(todo) == 0


def test_a_hiccup_that_the_rest_of_the_load_makes_up_for_does_not_stop_it(even: BreakEven, clock: Clock) -> None:
    todo = pieces(*REMOTE * 32)
    assert laps(even, clock, todo, [CHUNK_S / 10] * 8 + [CHUNK_S * 7] + [CHUNK_S / 10] * 23) == 32
    assert even.given_up() == []


def test_a_hiccup_at_the_start_does_not_undo_what_is_known(even: BreakEven, clock: Clock) -> None:
    todo = pieces(*REMOTE * 32)
    loads(even, "remote", 0.1)
    assert laps(even, clock, todo, [CHUNK_S * 4] + [CHUNK_S / 10] * 31) == 32
    assert laps(even, clock, todo, [CHUNK_S * 4] * 32) == 2


def test_a_server_that_hangs_costs_what_computing_costs_and_once(even: BreakEven, clock: Clock) -> None:
    todo, began_s = pieces(*REMOTE * 32), clock.now_s
    assert laps(even, clock, todo, [None]) == 0
    assert clock.now_s - began_s == pytest.approx(32 * CHUNK_S)
    assert even.given_up() == ["remote"]
    assert even.worth(todo) == 0


def test_a_block_that_has_left_ends_the_load_and_says_nothing_of_the_tier(even: BreakEven, clock: Clock) -> None:
    loads(even, "remote", 0.1)
    watch = even.watch(pieces(*REMOTE * 4))
    clock.now_s += CHUNK_S / 10
    assert watch.lap(True)
    clock.now_s += CHUNK_S / 100
    assert not watch.lap(False)
    watch.end()
    assert not watch.stopped
    assert even.given_up() == []


def test_each_tier_of_a_load_has_its_own_account(even: BreakEven, clock: Clock) -> None:
    todo = pieces(*MEMORY * 16, *REMOTE * 16)
    assert laps(even, clock, todo, [0.0] * 16 + [CHUNK_S * 4] * 16) == 17, "memory's head start is not spent on it"
    assert even.given_up() == ["remote"]
    assert even.worth(todo) == 16


def test_a_slow_head_that_was_worth_it_is_not_stopped(even: BreakEven, clock: Clock) -> None:
    loads(even, "memory", 0.01)
    loads(even, "remote", 3.0)
    todo = pieces("remote", *MEMORY * 20)
    assert even.worth(todo) == 21
    assert laps(even, clock, todo, [3 * CHUNK_S] + [CHUNK_S / 100] * 20) == 21


def test_a_slow_last_piece_is_no_reason_to_speak_of_a_stop(even: BreakEven, clock: Clock) -> None:
    loads(even, "remote", 0.1)
    watch = even.watch(pieces("remote"))
    clock.now_s += 5 * CHUNK_S
    assert watch.lap(True)
    watch.end()
    assert not watch.stopped
    assert even.given_up() == []


def test_a_load_is_measured_while_no_prefill_is_known(clock: Clock) -> None:
    even = BreakEven(LAYOUT, clock)
    watch = even.watch(pieces("remote", "remote"))
    clock.now_s += 5.0
    assert watch.lap(True)
    clock.now_s += 5.0
    assert watch.lap(True)
    watch.end()
    even.prefill_took(1000, 0.1)
    assert even.given_up() == ["remote"]
    assert even.worth(pieces("remote")) == 0


# ---- giving up and using again -----------------------------------------------------------------------------------


def test_after_a_stop_two_fast_probes_bring_the_tier_back(even: BreakEven) -> None:
    loads(even, "remote", 0.1)
    even.load_stopped("remote", CHUNK_BYTES, 4 * CHUNK_S)
    even.load_took("remote", CHUNK_BYTES, CHUNK_S / 10)
    assert even.worth(pieces("remote")) == 0
    even.load_took("remote", CHUNK_BYTES, CHUNK_S / 10)
    assert even.given_up() == []
    assert even.worth(pieces("remote")) == 1


def test_after_a_hang_it_is_the_same(even: BreakEven) -> None:
    even.load_stopped("remote", 0, 1.0)
    even.load_took("remote", 0, 1.0)
    for _ in range(2):
        assert even.worth(pieces("remote")) == 0
        loads(even, "remote", 0.1, times=1)
    assert even.worth(pieces("remote")) == 1


def test_a_tier_near_break_even_does_not_come_and_go(even: BreakEven, caplog: pytest.LogCaptureFixture) -> None:
    loads(even, "remote", 1.05)
    for share in (0.95, 0.9, 0.85, 0.95, 0.99):
        loads(even, "remote", share)
        assert even.worth(pieces("remote")) == 0
    assert len(caplog.messages) == 1
    loads(even, "remote", 0.75)
    assert even.worth(pieces("remote")) == 1


def test_giving_up_and_using_again_are_one_line_each_with_both_figures(caplog: pytest.LogCaptureFixture) -> None:
    layout = ChunkLayout(28, 4, 128, "bf16", 256, model="7b")
    even = BreakEven(layout)
    even.prefill_took(8192, 0.84)
    for _ in range(3):
        even.load_took("remote", layout.chunk_bytes(), layout.chunk_bytes() / 0.05e9)
    for _ in range(3):
        even.load_took("remote", layout.chunk_bytes(), layout.chunk_bytes() / 3.7e9)
    assert caplog.messages == [
        "The remote tier is given up, computing is faster: 0.050 GB/s measured, break-even is 0.559 GB/s",
        "The remote tier is used again: 3.700 GB/s measured, break-even is 0.559 GB/s",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_tier_of_which_nothing_came_is_said_to_give_nothing(
    even: BreakEven, caplog: pytest.LogCaptureFixture
) -> None:
    even.load_stopped("remote", 0, 1.0)
    even.load_stopped("remote", 0, 1.0)
    assert [message.partition(": ")[2][:10] for message in caplog.messages] == ["0.000 GB/s"]


def test_speeds_are_numbers_whatever_was_measured(even: BreakEven) -> None:
    loads(even, "memory", 0.0)
    even.load_stopped("remote", 0, 0.0)
    assert even.worth(pieces("memory", "remote", "memory")) == 1
    assert even.bytes_per_s is not None
    assert math.isfinite(even.bytes_per_s)
