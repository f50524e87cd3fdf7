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


def transfer(op: str, size_bytes: int, *, cpu: float | None = None) -> Row:
    ratios = {"ratio_gb_per_s": None, "ratio_server_cpu": cpu}
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


@pytest.mark.parametrize(("op", "size"), [("SET", 4 * MIB), ("GETP", 576 * KIB), ("GET", 4 * MIB)])
def test_what_has_no_line_is_not_judged(empty: BenchResult, op: str, size: int) -> None:
    empty["transfers"] = [transfer(op, size, cpu=99.0)]
    assert gate(empty) == []


def test_a_ratio_that_could_not_be_formed_does_not_pass(empty: BenchResult) -> None:
    empty["transfers"] = [{**transfer("SET", 2 * MIB), "pinned": True}]
    assert one(empty) == GateLine(
        name="server CPU/GB  tcp x1, 2 MiB, SET", bound="<= 1.05x", measured=None, passed=False
    )


@pytest.mark.parametrize("pipeline", [1, 16])
def test_small_operations_may_be_a_tenth_slower_than_redis(empty: BenchResult, pipeline: int) -> None:
    row = Row(server="kvredis", op="MSET 16 KiB", clients=50, pipeline=pipeline, ratio_rps=0.9)
    empty["small"] = [row]
    assert one(empty)["passed"]
    empty["small"] = [{**row, "ratio_rps": 0.89}]
    assert not one(empty)["passed"]


def test_a_ping_beside_large_values_may_take_a_fifth_of_redis(empty: BenchResult) -> None:
    row = Row(server="kvredis", background="GET", ratio_p99=0.2)
    empty["head_of_line"] = [row]
    assert one(empty)["passed"]
    empty["head_of_line"] = [{**row, "ratio_p99": 0.21}]
    assert not one(empty)["passed"]


def sampled(server: str, op: str, size: int, figure: str, value: float) -> Row:
    """Give a row whose three repeats were at half, once and twice the value."""
    samples = [{"repeat": repeat, figure: value * factor} for repeat, factor in enumerate((0.5, 1.0, 2.0))]
    row = transfer(op, size, cpu=1.0 if figure == "server_cpu_ms_per_gb" else None)
    return {**row, "server": server, figure: value, "samples": samples}


@pytest.mark.parametrize(
    ("op", "size", "least"),
    [
        ("SET", 16 * KIB, 0.9),
        ("SET", 64 * KIB, 1.0),
        ("SET", 2 * MIB, 1.0),
        ("SET", 32 * MIB, 2.0),
        ("SETP", 64 * KIB, 1.0),
        ("GET", 64 * KIB, 1.0),
        ("GET", 576 * KIB, 1.15),
        ("GETP", 576 * KIB, 1.4),
    ],
)
def test_throughput_is_held_against_the_fastest_of_the_others(
    empty: BenchResult, op: str, size: int, least: float
) -> None:
    others = [sampled(name, op, size, "gb_per_s", rate) for name, rate in (("redis", 1.0), ("valkey81", 2.0))]
    before = sampled("before", op, size, "gb_per_s", 99.0)
    for ours, passed in ((2 * least + 0.01, True), (2 * least - 0.01, False)):
        empty["transfers"] = [sampled("kvredis", op, size, "gb_per_s", ours), *others, before]
        line = one(empty)
        assert (line["bound"], line["passed"]) == (f">= {least:.2f}x", passed)
        assert line["measured"] == pytest.approx(ours / 2)
        assert line["name"].endswith(", valkey81")
    empty["transfers"] = [sampled("kvredis", op, size, "gb_per_s", 9.0), before]
    assert gate(empty) == [], "beside none there is no best"


@pytest.mark.parametrize("op", ["SET", "GET"])
def test_server_cpu_of_64_kib_is_held_against_the_thriftiest_of_the_others(empty: BenchResult, op: str) -> None:
    figure = "server_cpu_ms_per_gb"
    others = [sampled(name, op, 64 * KIB, figure, cpu) for name, cpu in (("redis", 300.0), ("redis8", 200.0))]
    for ours, passed in ((240.0, True), (241.0, False)):
        empty["transfers"] = [sampled("kvredis", op, 64 * KIB, figure, ours), *others]
        line = one(empty)
        assert (line["bound"], line["passed"], line["name"][-6:]) == ("<= 1.20x", passed, "redis8")


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
