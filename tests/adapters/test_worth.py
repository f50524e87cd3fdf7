"""min_retrieve_tokens = auto in an engine that computes in steps: what it sees of its speeds, what it loads then."""

from kvredis.adapters.block import block_bytes
from kvredis.adapters.deciding import BreakEven
from kvredis.adapters.layout import ChunkLayout
from kvredis.adapters.probing import Probes
from kvredis.adapters.shared_backend import Shared
from kvredis.adapters.worth import Worth
from tests.adapters.slow_backend import SlowBackend

LAYOUT = ChunkLayout(4, 2, 64, "bf16", chunk_tokens=256)
KEYS = [b"%d" % at for at in range(10)]
REST = 10 * 256 + 172
"""Tokens of a prompt whose chunks these are, and a bit."""


def worth() -> tuple[Worth, SlowBackend, BreakEven]:
    backend = SlowBackend()
    break_even = BreakEven(LAYOUT, backend.clock)
    shared = Shared(backend, break_even, Probes(backend, break_even, backend.clock))
    return Worth(shared, backend.clock), backend, break_even


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


def test_a_server_of_which_nobody_ever_hears_a_step_loads_everything_after_a_while() -> None:
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
