"""The bars of the transport bench: each by its own bound, a missing ratio never passes, no pyzmq no line about it."""

from __future__ import annotations

import pytest

from kvredis.bench.core.result import Row, new_result
from kvredis.bench.core.servers import ServerFacts
from kvredis.bench.transport.arms import STRIPED, OneSample
from kvredis.bench.transport.run import (
    SCHEMA,
    T0_MOST,
    TorchFacts,
    TransportResult,
    set_ahead,
    table_lines,
    transport_gate,
)


def arm(transport: str, name: str, ratio: float | None, seconds: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Row:
    samples = [{"repeat": repeat, "seconds": each} for repeat, each in enumerate(seconds)]
    figures = ("seconds", "gb_per_s", "gb_per_s_min", "gb_per_s_max", "peer_cpu_ms_per_gb", "client_cpu_ms_per_gb")
    ratios = dict.fromkeys(("ratio_t0", "ratio_t0_min", "ratio_t0_max"), ratio)
    about = {"shape": "7b", "block_bytes": 917504, "blocks": 512, "transport": transport, "arm": name, "ahead": None}
    return Row(**about, samples=samples, **dict.fromkeys(figures, 1.0), **ratios)


def one(what: str, *p50_us: float) -> Row:
    samples = [OneSample(repeat=repeat, calls=1, p50_us=each, p99_us=each) for repeat, each in enumerate(p50_us)]
    return Row(what=what, samples=samples, p50_us=p50_us[0], p99_us=p50_us[0], ratio_memcpy=1.0)


@pytest.fixture
def empty() -> TransportResult:
    return TransportResult(
        **new_result(SCHEMA, {}, ["a note"]),
        torch=TorchFacts(version="2", threads=1),
        server=ServerFacts(version="0", command=[], facts={}),
        t0=[],
        arms=[],
        one=[],
    )


@pytest.mark.parametrize(("which", "most"), list(T0_MOST.items()))
def test_each_bar_is_an_upper_bound_on_its_own_arm(empty: TransportResult, which: tuple[str, str], most: float) -> None:
    for ratio, passed in ((most, True), (most + 0.01, False), (None, False)):
        empty["arms"] = [arm(*which, ratio)]
        (row,) = transport_gate(empty)
        assert (row["passed"], row["measured"]) == (passed, ratio)


def test_an_arm_without_a_bar_is_not_judged(empty: TransportResult) -> None:
    empty["arms"] = [arm("lane", "lane, touched", 99.0), arm("tcp", "pyzmq stream", 99.0)]
    assert transport_gate(empty) == []


def test_being_ahead_of_pyzmq_is_paired_by_repeat(empty: TransportResult) -> None:
    ours = arm("tcp", "stream_get", 1.0, (1.0, 2.0, 4.0))
    theirs = arm("tcp", "pyzmq stream", 1.0, (1.6, 3.2, 4.0))
    empty["arms"] = [ours, theirs, arm("ipc", "pyzmq stream", 1.0)]
    set_ahead(empty["arms"])
    assert ours["ahead"] == pytest.approx(1.6)
    assert theirs["ahead"] is None
    lines = {row["name"]: row for row in transport_gate(empty)}
    assert lines["7b tcp stream_get ahead of tcp pyzmq stream"]["passed"]
    theirs["samples"] = theirs["samples"][2:]
    set_ahead(empty["arms"])
    lines = {row["name"]: row for row in transport_gate(empty)}
    assert not lines["7b tcp stream_get ahead of tcp pyzmq stream"]["passed"]


@pytest.mark.parametrize(("ours", "theirs"), [("tcp", "tcp"), ("unix", "ipc")])
def test_four_connections_are_judged_by_pyzmqs_stream_alone(empty: TransportResult, ours: str, theirs: str) -> None:
    empty["arms"] = [arm(ours, STRIPED, 9.0), arm(theirs, "pyzmq stream", 1.0, (1.5, 1.5, 1.5))]
    set_ahead(empty["arms"])
    (row,) = transport_gate(empty)
    assert (row["name"], row["measured"], row["passed"]) == (
        f"7b {ours} {STRIPED} ahead of {theirs} pyzmq stream",
        1.5,
        True,
    )
    empty["arms"][0]["samples"] = [{"repeat": repeat, "seconds": 1.01} for repeat in range(3)]
    set_ahead(empty["arms"])
    (row,) = transport_gate(empty)
    assert not row["passed"]


def test_one_block_by_lane_is_five_times_ahead_of_get_over_tcp(empty: TransportResult) -> None:
    empty["one"] = [one("GET tcp", 1000.0, 1100.0), one("lease, touch, release", 200.0, 220.0)]
    (row,) = transport_gate(empty)
    assert (row["measured"], row["passed"]) == (5.0, True)
    empty["one"] = [one("GET tcp", 1000.0, 1100.0), one("lease, touch, release", 210.0, 221.0)]
    (row,) = transport_gate(empty)
    assert not row["passed"]


def test_the_report_says_what_was_left_out_and_which_lines_fail(empty: TransportResult) -> None:
    empty["arms"] = [arm("tcp", "stream_get", 9.0), arm("unix", "stream_get", 1.0)]
    empty["t0"] = [Row(shape="7b", block_bytes=917504, samples=[], seconds=1.0, gb_per_s=1.0)]
    empty["gate"] = transport_gate(empty)
    text = "\n".join(table_lines(empty))
    assert "Note: a note" in text
    assert "MISSED  7b tcp stream_get / T0" in text
    assert "1 of 2 lines hold." in text
