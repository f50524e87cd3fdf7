"""A bandwidth on a clock that moves only when a thread waits."""

import threading

import pytest

from kvredis.adapters.paged.rate_limit import LATE_S, PATIENCE_S, PATIENCE_TIMES, Bandwidth

GB = 1_000_000_000


class Clock:
    """Waiting moves it on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def read(self) -> float:
        return self.now_s

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("piece", [100_000, 10_000_000, 100_000_000])
@pytest.mark.parametrize("moving_share", [0.0, 0.3, 0.9])
def test_a_gigabyte_a_second_asked_is_that_measured_whatever_the_pieces_and_the_copies(
    piece: int, moving_share: float
) -> None:
    clock = Clock()
    bandwidth = Bandwidth(GB, clock.read, clock.wait)
    moved = 0
    while moved < GB:
        bandwidth.take(piece, is_load=moved % 3 == 0)
        clock.now_s += piece / GB * moving_share
        moved += piece
    assert 0.9 < moved / (clock.now_s - 100.0) / GB < 1.1


@pytest.mark.parametrize("piece", [10_000_000, 500_000_000])
def test_a_pause_is_not_made_up_for_by_a_burst(piece: int) -> None:
    clock = Clock()
    bandwidth = Bandwidth(GB, clock.read, clock.wait)
    clock.now_s += 60
    began_s = clock.now_s
    with bandwidth.row(is_load=True):
        for _ in range(GB // piece):
            bandwidth.take(piece, is_load=True)
    assert clock.now_s - began_s == pytest.approx(1.0)
    clock.now_s += 60  # bodies did not come
    began_s = clock.now_s
    for _ in range(GB // piece):
        bandwidth.take(piece, is_load=True)
    assert clock.now_s - began_s > 1 - 1.01 * max(LATE_S, piece / GB)


def test_a_piece_is_as_long_as_ten_milliseconds_at_most() -> None:
    assert Bandwidth(GB).piece_bytes(32 << 20) == GB // 100 + 1
    assert Bandwidth(GB).piece_bytes(1000) == 1000
    assert Bandwidth(None).piece_bytes(1 << 40) == 1 << 40


def test_no_bound_never_waits() -> None:
    clock = Clock()
    bandwidth = Bandwidth(None, clock.read, clock.wait)
    bandwidth.take(1 << 60, is_load=False)
    assert clock.now_s == 100.0


def test_a_store_waits_for_as_long_as_loads_do() -> None:
    clock, order = Clock(), []
    in_line, go = threading.Event(), threading.Event()

    def wait(changed: threading.Condition, seconds: float) -> None:
        if seconds > 0.1:  # a store behind loads
            order.append("store waits")
            in_line.set()
            go.set()
            assert changed.wait(40)
        elif threading.current_thread().name == "load":
            go.set()
            changed.release()
            try:
                assert in_line.wait(40)
            finally:
                changed.acquire()
            clock.now_s += seconds
            order.append("load goes")
        else:
            clock.now_s += seconds

    bandwidth = Bandwidth(GB, clock.read, wait)
    load = threading.Thread(target=bandwidth.take, args=(1000,), kwargs={"is_load": True}, name="load")
    load.start()
    assert go.wait(40)
    bandwidth.take(1000, is_load=False)
    order.append("store goes")
    load.join()
    assert order == ["store waits", "load goes", "store goes"]


def test_a_store_waits_for_a_row_of_loads_also_between_its_pieces() -> None:
    clock, order = Clock(), []
    in_line = threading.Event()

    def wait(changed: threading.Condition, seconds: float) -> None:
        if seconds < 0.1:  # not of a store behind loads
            clock.now_s += seconds
            return
        in_line.set()
        assert changed.wait(40)

    bandwidth = Bandwidth(GB, clock.read, wait)

    def store() -> None:
        bandwidth.take(1000, is_load=False)
        order.append("store goes")

    with bandwidth.row(is_load=True):
        bandwidth.take(1000, is_load=True)
        storing = threading.Thread(target=store)
        storing.start()
        assert in_line.wait(40)
        bandwidth.take(1000, is_load=True)
        order.append("loads go")
    storing.join(40)
    assert order == ["loads go", "store goes"]


@pytest.mark.parametrize("piece", [1000, GB // 100, GB // 10])
def test_beside_loads_that_never_end_a_store_goes_when_its_patience_is_over(piece: int) -> None:
    clock, patience_s = Clock(), max(PATIENCE_S, PATIENCE_TIMES * piece / GB)
    began_s, is_nested = clock.now_s, False

    def wait(changed: threading.Condition, seconds: float) -> None:
        """While a store stands back one piece of loads goes after the other."""
        nonlocal is_nested
        if is_nested or clock.now_s >= began_s + patience_s:
            clock.now_s += seconds
            return
        is_nested = True
        bandwidth.take(GB // 100, is_load=True)
        is_nested = False

    bandwidth = Bandwidth(GB, clock.read, wait)
    with bandwidth.row(is_load=True):
        for _ in range(10):
            began_s = clock.now_s
            bandwidth.take(piece, is_load=False)
            took_s = clock.now_s - began_s
            assert patience_s <= took_s <= patience_s + piece / GB + 0.02
    assert 10 * piece / GB / (clock.now_s - 100.0) <= 1 / (1 + PATIENCE_TIMES)


def test_a_bandwidth_that_moves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="moves nothing"):
        Bandwidth(0.5)
