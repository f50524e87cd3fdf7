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


def worth() -> tuple[Worth, SlowBackend, BreakEven]:
    backend = SlowBackend()
    break_even = BreakEven(LAYOUT, backend.clock)
    shared = Shared(backend, break_even, Probes(backend, break_even, backend.clock))
    return Worth(shared, backend.clock), backend, break_even


def compute(speeds: Worth, backend: SlowBackend, seconds: float) -> None:
    speeds.step_began(1024)
    backend.now_s += seconds
    speeds.step_over()


def load(speeds: Worth, backend: SlowBackend, seconds: float, *, failed: bool = False) -> int:
    count = speeds.narrow(KEYS, 256)
    if count:
        speeds.load_began("r")
        backend.now_s += seconds
        speeds.load_over("r", failed=failed)
    return count


def test_everything_is_loaded_until_the_speeds_are_known() -> None:
    speeds, backend, _ = worth()
    assert load(speeds, backend, 1.0) == 10


def test_a_tier_that_is_slower_than_computing_is_given_up_and_a_faster_one_is_not() -> None:
    for seconds, expected in ((0.1, 10), (5.0, 0)):  # ten chunks are computed in 0.25 s
        speeds, backend, _ = worth()
        for _ in range(3):
            compute(speeds, backend, 0.1)
        for _ in range(3):
            load(speeds, backend, seconds)
        assert load(speeds, backend, seconds) == expected


def test_a_failed_load_says_nothing_of_the_tier() -> None:
    speeds, backend, break_even = worth()
    for _ in range(3):
        compute(speeds, backend, 0.1)
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
    load(speeds, backend, 2.0)
    pace = break_even._speeds["remote"].seconds_per_byte
    assert abs(pace - 2.0 / (10 * block_bytes(LAYOUT, 256))) < 1e-12
