"""The gate judges what was measured, by the right bound, and a missing ratio never passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvredis.bench.core.result import GateLine, Row, gate_lines
from kvredis.bench.server.run import BenchResult, gate
from tests.bench.fake_server import load

RECORDED = Path(__file__).parents[1] / "recorded_result.json"
KIB, MIB = 1024, 1024**2


@pytest.fixture
def empty() -> BenchResult:
    result = load(RECORDED)
    result["transfers"], result["small"], result["head_of_line"], result["lookup"] = [], [], [], []
    return result


def transfer(op: str, size_bytes: int, *, rate: float | None = None, cpu: float | None = None) -> Row:
    ratios = {"ratio_gb_per_s": rate, "ratio_server_cpu": cpu}
    where = {"server": "kvredis", "transport": "tcp", "connections": 1, "pinned": cpu is not None}
    return Row(**where, size_bytes=size_bytes, op=op, samples=[], gb_per_s=1.0, **ratios)


def one(result: BenchResult) -> GateLine:
    (row,) = gate(result)
    return row


@pytest.mark.parametrize(
    ("op", "size", "most"),
    [
        ("SET", 576 * KIB, 1.05),
        ("SET", 2 * MIB, 1.05),
        ("SET", 32 * MIB, 0.5),
        ("GET", 896 * KIB, 0.95),
        ("GET", 32 * MIB, 0.25),
        ("GETP", 896 * KIB, 0.35),
        ("GETP", 32 * MIB, 0.35),
    ],
)
def test_server_cpu_has_an_upper_bound_by_operation_and_size(
    empty: BenchResult, op: str, size: int, most: float
) -> None:
    empty["transfers"] = [transfer(op, size, cpu=most)]
    assert one(empty)["passed"]
    empty["transfers"] = [transfer(op, size, cpu=most + 0.01)]
    assert not one(empty)["passed"]


@pytest.mark.parametrize(
    ("op", "size", "least"),
    [
        ("SET", 64 * KIB, 0.85),
        ("GETP", 64 * KIB, 0.85),
        ("SET", 576 * KIB, 0.95),
        ("SET", 32 * MIB, 2.0),
        ("GET", 2 * MIB, 1.1),
        ("GET", 32 * MIB, 3.0),
        ("GETP", 576 * KIB, 1.4),
        ("GETP", 896 * KIB, 3.0),
    ],
)
def test_throughput_has_a_lower_bound_by_operation_and_size(
    empty: BenchResult, op: str, size: int, least: float
) -> None:
    empty["transfers"] = [transfer(op, size, rate=least)]
    assert one(empty)["passed"]
    empty["transfers"] = [transfer(op, size, rate=least - 0.01)]
    assert not one(empty)["passed"]


@pytest.mark.parametrize(("op", "size"), [("SET", 64 * KIB), ("GETP", 576 * KIB), ("GET", 4 * MIB)])
def test_what_has_no_line_is_not_judged(empty: BenchResult, op: str, size: int) -> None:
    empty["transfers"] = [transfer(op, size, cpu=99.0)]
    assert gate(empty) == []


def test_a_ratio_that_could_not_be_formed_does_not_pass(empty: BenchResult) -> None:
    empty["transfers"] = [transfer("SET", 2 * MIB, rate=None)]
    assert one(empty) == GateLine(
        name="throughput     tcp x1, 2 MiB, SET", bound=">= 0.95x", measured=None, passed=False
    )


@pytest.mark.parametrize(("pipeline", "least"), [(1, 0.85), (16, 0.4)])
def test_small_operations_are_judged_by_requests_in_flight(empty: BenchResult, pipeline: int, least: float) -> None:
    row = Row(server="kvredis", op="PING", clients=50, pipeline=pipeline, ratio_rps=least)
    empty["small"] = [row]
    assert one(empty)["passed"]
    empty["small"] = [{**row, "ratio_rps": least - 0.01}]
    assert not one(empty)["passed"]


def test_a_ping_beside_large_values_may_take_a_fifth_of_redis(empty: BenchResult) -> None:
    row = Row(server="kvredis", background="GET", ratio_p99=0.2)
    empty["head_of_line"] = [row]
    assert one(empty)["passed"]
    empty["head_of_line"] = [{**row, "ratio_p99": 0.21}]
    assert not one(empty)["passed"]


def sampled(server: str, rate: float, pinned: bool) -> Row:
    """Give a row of 576 KiB GETs whose three repeats went at half, once and twice the rate."""
    row = transfer("GET", 576 * KIB)
    samples = [{"repeat": repeat, "gb_per_s": rate * factor} for repeat, factor in enumerate((0.5, 1.0, 2.0))]
    return {**row, "server": server, "gb_per_s": rate, "pinned": pinned, "samples": samples}


@pytest.mark.parametrize("pinned", [True, False])
def test_large_values_are_held_against_the_faster_of_redis_and_memcached(empty: BenchResult, pinned: bool) -> None:
    where = "one CPU" if pinned else "all CPUs"
    name = f"to the best    tcp x1, 576 KiB, GET, {where}"
    for ours, passed in ((2.3, True), (2.2, False)):
        empty["transfers"] = [
            sampled("kvredis", ours, pinned),
            sampled("redis", 1.0, pinned),
            sampled("memcached", 2.0, pinned),
        ]
        (row,) = (row for row in gate(empty) if row["name"] == name)
        assert row == GateLine(name=name, bound=">= 1.15x", measured=ours / 2.0, passed=passed)
    empty["transfers"].pop()
    assert name not in [row["name"] for row in gate(empty)], "the best of two is not known when one is absent"


@pytest.mark.parametrize("op", ["EXISTS", "KV.MATCH"])
def test_a_call_with_many_keys_may_take_a_fifth_longer_than_exists_of_redis(empty: BenchResult, op: str) -> None:
    row = Row(server="kvredis", op=op, transport="unix", keys=1000, key_bytes=101, ratio_p50=1.2, ratio_server_cpu=9.0)
    empty["lookup"] = [row]
    assert one(empty) == GateLine(
        name=f"time per call  unix, {op} of 1000 keys of 101 B", bound="<= 1.20x", measured=1.2, passed=True
    )
    empty["lookup"] = [{**row, "ratio_p50": 1.21}]
    assert not one(empty)["passed"]
    empty["lookup"] = [{**row, "server": "before", "ratio_p50": 1.21}]
    assert gate(empty) == []


def test_the_recorded_result_is_judged_as_it_was_when_recorded() -> None:
    result = load(RECORDED)
    rows = gate(result)
    assert rows == result["gate"]
    assert {row["passed"] for row in rows} == {True, False}, "a recording that cannot tell pass from fail proves little"


def test_the_verdicts_say_how_many_lines_hold() -> None:
    rows = [
        GateLine(name="a", bound="<= 1.00x", measured=0.5, passed=True),
        GateLine(name="b", bound=">= 1.00x", measured=None, passed=False),
    ]
    lines = list(gate_lines(rows))
    assert lines[-1].strip() == "1 of 2 lines hold."
    assert any("MISSED" in line and "none" in line for line in lines)
    assert list(gate_lines([])) == []
