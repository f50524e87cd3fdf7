"""Probes: a tier that was given up is tried behind the engine's back, seldom, and with one block at a time."""

import threading
from collections.abc import Generator, Iterator, Sequence

import pytest

from kvredis.adapters.engine.block import block_bytes
from kvredis.adapters.engine.break_even import KEYS_KEPT, BreakEven, Probes
from kvredis.adapters.engine.layout import ChunkLayout
from tests.adapters.fake_backend import FakeLease
from tests.adapters.slow_backend import HUNG, SlowBackend, settle

LAYOUT = ChunkLayout(4, 2, 64, "bf16", 100, model="tiny/llama")
CHUNK_S = 0.01
KEYS = [b"block %d" % number for number in range(8)]


@pytest.fixture
def backend() -> SlowBackend:
    made = SlowBackend()
    for key in KEYS:
        made.put(key, bytes(block_bytes(LAYOUT, 100)))
    return made


@pytest.fixture
def even(backend: SlowBackend) -> BreakEven:
    made = BreakEven(LAYOUT, backend.clock)
    made.prefill_took(100, CHUNK_S)
    return made


@pytest.fixture
def probes(backend: SlowBackend, even: BreakEven) -> Iterator[Probes]:
    made = Probes(backend, even, backend.clock)
    for key in KEYS:
        made.found("remote", [key])
    yield made
    made.close()
    assert backend.leases == 0


def probe(probes: Probes, *, of_unmeasured: bool = False) -> int:
    """Give a probe its chance, wait for its end, and say how many there have been."""
    probes.begin(of_unmeasured=of_unmeasured)
    settle()
    return probes.count


def test_a_tier_in_good_standing_is_not_probed(probes: Probes, even: BreakEven) -> None:
    even.load_took("remote", LAYOUT.chunk_bytes(), CHUNK_S / 2)
    assert probe(probes) == 0


def test_an_unmeasured_tier_is_probed_if_it_is_asked_for_and_once(
    probes: Probes, even: BreakEven, backend: SlowBackend
) -> None:
    backend.lags_s["remote"] = CHUNK_S * 2
    assert probe(probes) == 0, "who loads at once finds out by himself"
    assert probe(probes, of_unmeasured=True) == 1
    assert even.given_up() == ["remote"]
    backend.now_s += 1000
    assert probe(probes, of_unmeasured=True) == 1


class Hiccuping(SlowBackend):
    """Its loads take these times, one behind the other, and then none."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.hiccups = list(seconds)

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[FakeLease | None, None, None]:
        self.lags_s["remote"] = self.hiccups.pop(0) if self.hiccups else 0.0
        return super().load(keys, within_s=within_s)


@pytest.mark.parametrize(
    ("seconds", "loaded", "is_fast"),
    [
        ((0.009, 0.001, 0.001), 3, True),  # a connection was opened
        ((0.001, 0.009, 0.001), 3, True),  # the interpreter was busy
        ((0.009, 0.009, 0.001), 3, False),
        ((0.03, 0.001, 0.001), 1, False),  # a slow link is not kept from those who store
    ],
)
def test_of_an_unmeasured_tier_the_middle_of_three_quick_blocks_counts(
    even: BreakEven, seconds: tuple[float, ...], loaded: int, is_fast: bool
) -> None:
    even.prefill_took(100, 0.005)  # the shorter of two counts: computing a block takes 5 ms
    backend = Hiccuping(*seconds)
    for key in KEYS:
        backend.put(key, bytes(block_bytes(LAYOUT, 100)))
    probes = Probes(backend, even, backend.clock)
    probes.found("remote", KEYS)
    assert probe(probes, of_unmeasured=True) == 1
    assert len(backend.loaded) == loaded
    assert (even.given_up() == []) == is_fast
    backend.now_s += 1000
    assert probe(probes) == (1 if is_fast else 2)
    assert len(backend.loaded) == loaded + (0 if is_fast else 1), "one that was given up is tried with one block"
    probes.close()
    assert backend.leases == 0


def test_a_probe_before_any_prefill_is_known_waits_as_long_as_the_backend_does(backend: SlowBackend) -> None:
    even = BreakEven(LAYOUT, backend.clock)
    probes = Probes(backend, even, backend.clock)
    probes.found("remote", KEYS)
    backend.lags_s["remote"] = CHUNK_S * 2
    assert probe(probes, of_unmeasured=True) == 1
    assert backend.bounds == [None]
    assert even.given_up() == []
    even.prefill_took(100, CHUNK_S)
    assert even.given_up() == ["remote"]
    probes.close()


def test_a_slow_tier_is_probed_until_it_is_fast_again_and_then_no_more(
    probes: Probes, even: BreakEven, backend: SlowBackend
) -> None:
    even.load_stopped("remote", 0, 1.0)
    backend.lags_s["remote"] = 2 * CHUNK_S
    for count in (1, 2, 3):
        assert probe(probes) == count
        assert even.given_up() == ["remote"]
        backend.now_s += 100
    backend.lags_s["remote"] = CHUNK_S / 10
    assert probe(probes) == 4
    assert even.given_up() == ["remote"], "once may be chance"
    backend.now_s += 100
    assert probe(probes) == 5
    assert even.given_up() == []
    backend.now_s += 100
    assert probe(probes) == 5


def test_probes_are_a_second_apart_and_a_hundredth_of_the_time(
    probes: Probes, even: BreakEven, backend: SlowBackend
) -> None:
    even.load_stopped("remote", 0, 1.0)
    assert probe(probes) == 1
    backend.now_s += 0.99
    assert probe(probes) == 1
    backend.now_s += 0.02
    backend.lags_s["remote"] = 0.03
    assert probe(probes) == 2
    backend.now_s += 2.99
    assert probe(probes) == 2
    backend.now_s += 0.02
    assert probe(probes) == 3


def test_a_probe_of_a_tier_that_hangs_ends_after_a_few_times_what_computing_takes(
    probes: Probes, even: BreakEven, backend: SlowBackend
) -> None:
    even.load_stopped("remote", 0, 1.0)
    backend.lags_s["remote"] = HUNG
    assert probe(probes) == 1
    assert backend.now_s == pytest.approx(4 * CHUNK_S)
    backend.now_s += 100
    even.question_took(0.5)
    probe(probes)
    assert backend.bounds == [pytest.approx(4 * CHUNK_S), pytest.approx(4 * CHUNK_S + 0.5)]
    assert even.given_up() == ["remote"]


def test_a_block_that_has_left_or_come_nearer_says_nothing_and_is_not_asked_for_again(
    probes: Probes, even: BreakEven, backend: SlowBackend
) -> None:
    even.load_stopped("remote", 0, 1.0)
    del backend.values[KEYS[0]]
    backend.where[KEYS[1]] = "memory"
    for _ in range(2):
        probe(probes)
        backend.now_s += 1.1
        assert even.given_up() == ["remote"]
    assert backend.loaded == [KEYS[0], KEYS[2]], "the third came, and fast"
    for _ in range(3):
        probe(probes)
        backend.now_s += 1.1
    assert backend.loaded == [KEYS[0], KEYS[2], KEYS[3]], "two fast ones, and it is used again"


def test_a_tier_where_nothing_was_found_is_not_probed(backend: SlowBackend, even: BreakEven) -> None:
    probes = Probes(backend, even, backend.clock)
    even.load_stopped("remote", 0, 1.0)
    assert probe(probes) == 0
    probes.found("disk", KEYS)
    assert probe(probes) == 0
    for number in range(KEYS_KEPT + 1):
        probes.found("remote", [b"%d" % number])
    assert probe(probes) == 1
    assert backend.loaded == [b"1"], "the oldest is forgotten"


def test_two_slow_tiers_take_turns(even: BreakEven, backend: SlowBackend) -> None:
    probes = Probes(backend, even, backend.clock)
    backend.lags_s = {"memory": 0.0, "disk": 1.0, "remote": 1.0}
    for key in KEYS[:4]:
        backend.where[key] = "disk"
    probes.found("remote", KEYS[4:])
    probes.found("disk", KEYS[:4])
    for tier in ("remote", "disk"):
        even.load_stopped(tier, 0, 1.0)
    for _ in range(8):
        probe(probes)
        backend.now_s += 1000
    tiers = backend.tiers_of(backend.loaded)
    assert tiers.count("disk") == tiers.count("remote") > 0


def test_of_a_long_prompt_the_head_is_remembered_which_stays_longest(backend: SlowBackend, even: BreakEven) -> None:
    probes = Probes(backend, even, backend.clock)
    probes.found("remote", KEYS)
    even.load_stopped("remote", 0, 1.0)
    backend.lags_s["remote"] = 1.0
    for _ in range(8):
        probe(probes)
        backend.now_s += 1000
    assert backend.loaded == KEYS[:4] * 2


def test_trouble_in_a_probe_reaches_no_caller(probes: Probes, even: BreakEven, backend: SlowBackend) -> None:
    even.load_stopped("remote", 0, 1.0)
    backend.broken = True
    assert probe(probes) == 1
    backend.broken = False
    backend.now_s += 2
    assert probe(probes) == 2


def test_at_most_one_probe_is_under_way_and_none_begins_behind_close(even: BreakEven) -> None:
    go_on, begun = threading.Event(), threading.Event()

    class Waiting(SlowBackend):
        def _try(self) -> None:
            begun.set()
            assert go_on.wait(10)

    backend = Waiting()
    probes = Probes(backend, even, lambda: 0.0)
    probes.found("remote", KEYS)
    even.load_stopped("remote", 0, 1.0)
    probes.begin()
    assert begun.wait(10)
    probes.begin()
    assert probes.count == 1
    closing = threading.Thread(target=probes.close)
    closing.start()
    go_on.set()
    closing.join(10)
    assert not closing.is_alive()
    probes.begin()
    assert probes.count == 1


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_after_a_probe_that_fails_the_tier_is_probed_again(
    probes: Probes, even: BreakEven, backend: SlowBackend, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    even.load_took("remote", LAYOUT.chunk_bytes(), CHUNK_S * 2)
    with monkeypatch.context() as patched:
        patched.setattr(backend, "load", fails)
        assert probe(probes) == 1
    backend.now_s += 1000
    assert probe(probes) == 2
