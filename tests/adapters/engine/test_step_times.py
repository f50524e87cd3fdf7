"""min_retrieve_tokens = auto in an engine that computes in steps: what it sees of its speeds, what it loads then."""

import pytest

from kvredis.adapters.engine.block import block_bytes
from kvredis.adapters.engine.break_even import BreakEven, Probes, Worth
from kvredis.adapters.engine.layout import ChunkLayout
from tests.adapters.slow_backend import SlowBackend

LAYOUT = ChunkLayout(4, 2, 64, "bf16", chunk_tokens=256)
KEYS = [b"%d" % at for at in range(10)]
REST = 10 * 256 + 172
"""Tokens of a prompt whose chunks these are, and a bit."""


def worth() -> tuple[Worth, SlowBackend, BreakEven]:
    backend = SlowBackend()
    break_even = BreakEven(LAYOUT, backend.clock)
    probes = Probes(backend, break_even, backend.clock)
    return Worth(backend, break_even, probes, backend.clock), backend, break_even


def compute(speeds: Worth, backend: SlowBackend, seconds: float, tokens: int = 1024) -> None:
    speeds.step_began(tokens)
    backend.now_s += seconds
    speeds.step_over()


def warm(speeds: Worth, backend: SlowBackend) -> None:
    """A prompt, computed in steps of 0.1 s, and a few tokens behind it."""
    for _ in range(3):
        compute(speeds, backend, 0.1)
    for _ in range(3):
        compute(speeds, backend, 0.001, tokens=1)


def load(speeds: Worth, backend: SlowBackend, seconds: float, *, failed: bool = False) -> int:
    count = speeds.narrow(KEYS, 256, REST)
    speeds.asked("r")
    if count:
        speeds.load_began("r")
        backend.now_s += seconds
        speeds.load_over("r", failed=failed)
    return count


def test_everything_is_computed_until_it_is_known_how_long_that_takes_and_no_tier_is_asked() -> None:
    speeds, backend, break_even = worth()
    for _ in range(5):
        assert load(speeds, backend, 1.0) == 0, "requests that come together"
    for tokens in (172, 428, 172, 1, 1):  # short rests behind what the engine had itself: all of them take 20 ms
        compute(speeds, backend, 0.02, tokens)
    assert load(speeds, backend, 1.0) == 0, "nor does one of a chunk or two tell"
    warm(speeds, backend)
    assert load(speeds, backend, 0.1) == 10
    assert break_even.given_up() == []


def test_an_engine_that_never_reports_a_step_loads_everything_after_a_while() -> None:
    speeds, backend, _ = worth()
    assert [load(speeds, backend, 1.0) for _ in range(66)] == [0] * 64 + [10] * 2


def test_a_tier_that_was_given_up_in_a_fresh_process_stays_so_though_only_short_rests_are_computed() -> None:
    speeds, backend, break_even = worth()
    warm(speeds, backend)
    load(speeds, backend, 0.3)  # ten chunks are computed in 0.25 s
    assert break_even.given_up() == ["remote"]
    for _ in range(50):
        compute(speeds, backend, 0.02, tokens=300)
        assert speeds.narrow(KEYS, 256, REST) == 0


def test_a_tier_that_is_slower_than_computing_is_given_up_and_a_faster_one_is_not() -> None:
    for seconds, expected in ((0.1, 10), (5.0, 0)):  # ten chunks are computed in 0.25 s
        speeds, backend, _ = worth()
        warm(speeds, backend)
        for _ in range(3):
            load(speeds, backend, seconds)
        assert load(speeds, backend, seconds) == expected


def test_a_failed_load_says_nothing_of_the_tier() -> None:
    speeds, backend, break_even = worth()
    warm(speeds, backend)
    load(speeds, backend, 50.0, failed=True)
    assert break_even.given_up() == []


def test_steps_that_overlap_are_measured_from_one_output_to_the_next() -> None:
    speeds, backend, break_even = worth()
    for _ in range(4):  # each is asked for before the one ahead of it is over
        speeds.step_began(1024)
    for _ in range(4):
        backend.now_s += 0.2
        speeds.step_over()
    assert break_even.tokens_per_s == 1024 / 0.2


def test_a_load_is_measured_by_all_of_its_bytes() -> None:
    speeds, backend, break_even = worth()
    warm(speeds, backend)
    load(speeds, backend, 2.0)
    pace = break_even._speeds["remote"].seconds_per_byte
    assert abs(pace - 2.0 / (10 * block_bytes(LAYOUT, 256))) < 1e-12


def test_a_load_is_measured_by_what_was_chosen_for_it_whichever_request_was_asked_for_since() -> None:
    speeds, backend, break_even = worth()
    warm(speeds, backend)
    speeds.narrow(KEYS, 256, REST)
    speeds.asked("waits for pages")
    speeds.narrow(KEYS[:1], 256, 300)
    speeds.asked("has too little to load")
    speeds.asked("asked for before, and asked again")
    for request in ("has nothing", "waits for pages"):
        speeds.load_began(request)
    backend.now_s += 0.1
    for request in ("has nothing", "waits for pages"):
        speeds.load_over(request, failed=False)
    pace = break_even._speeds["remote"].seconds_per_byte
    assert abs(pace - 0.1 / (10 * block_bytes(LAYOUT, 256))) < 1e-12
    assert break_even.given_up() == []


def test_a_load_that_no_request_waits_for_any_more_says_nothing_and_nothing_is_kept_of_it() -> None:
    speeds, backend, break_even = worth()
    warm(speeds, backend)
    for number in range(3):
        speeds.narrow(KEYS, 256, REST)
        speeds.asked(f"r{number}")
        if number:
            speeds.load_began(f"r{number}")
        backend.now_s += 0.0001
        speeds.forget(f"r{number}")
        speeds.load_over(f"r{number}", failed=False)
    assert break_even.unmeasured(["remote"]) == ["remote"]
    assert not speeds._chosen
    assert not speeds._loads


def test_steps_in_which_an_engine_only_waits_for_loads_are_not_taken_for_others() -> None:
    speeds, backend, break_even = worth()
    for _ in range(100):
        speeds.step_began(0)  # whose output is never reported
        backend.now_s += 0.001
    speeds.step_began(0)
    backend.now_s += 0.001
    speeds.step_over()  # of this one: a load has come
    warm(speeds, backend)
    assert break_even.tokens_per_s == pytest.approx(1023 / (0.1 - 0.001))
    assert not speeds._steps, "none is left behind"
