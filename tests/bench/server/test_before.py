"""Held against the commit before: what got worse is named, by row and by figure, and nothing is judged without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvredis.bench.core.servers import ServerFacts
from kvredis.bench.server.latency import HeadOfLineSample, LookupSample, SmallSample
from kvredis.bench.server.latency import summarize_lookups as summarize_lookups
from kvredis.bench.server.latency import summarize_pings as summarize_pings
from kvredis.bench.server.latency import summarize_small as summarize_small
from kvredis.bench.server.run import BenchResult, HeldRow, gate, held, held_lines, table_lines
from kvredis.bench.server.transfer import Arm, TransferSample
from kvredis.bench.server.transfer import summarize as summarize_transfers
from tests.bench.fake_server import load

RECORDED = Path(__file__).parents[1] / "recorded_result.json"


def transfer(repeat: int, rate: float, cpu: float) -> TransferSample:
    return TransferSample(
        repeat=repeat,
        seconds=1.0,
        operations=1,
        payload_bytes=1,
        gb_per_s=rate,
        p50_ms=1.0,
        p99_ms=1.0,
        server_cpu_ms_per_gb=cpu,
        client_cpu_ms_per_gb=1.0,
        verified_bytes=1,
    )


def small(rate: float, cpu: float) -> SmallSample:
    return SmallSample(repeat=0, rps=rate, p50_ms=1.0, p99_ms=1.0, server_cpu_us_per_op=cpu)


def ping(p99_ms: float) -> HeadOfLineSample:
    return HeadOfLineSample(repeat=0, pings=1, p50_ms=1.0, p99_ms=p99_ms, background_gb_per_s=1.0)


def lookup(p50_us: float, cpu: float) -> LookupSample:
    return LookupSample(repeat=0, calls=1, p50_us=p50_us, p99_us=1.0, server_cpu_us_per_call=cpu)


@pytest.fixture
def result() -> BenchResult:
    """Give a result of both commits: 10 % less rate, 20 % more CPU, 30 % longer p99, 40 % longer calls; no redis."""
    result = load(RECORDED)
    result["servers"] = {
        name: ServerFacts(version=version, command=[], facts={})
        for name, version in (("kvredis", "0.1.0"), ("before", "abc1234"))
    }
    moved = {"kvredis": [transfer(0, 0.9, 1.2)], "before": [transfer(0, 1.0, 1.0)]}
    result["transfers"] = summarize_transfers(Arm("tcp", 4, True), (65536, "GET", 1), moved)
    result["small"] = summarize_small(("SET", 50, 16), {"kvredis": [small(0.9, 1.2)], "before": [small(1, 1)]})
    result["head_of_line"] = summarize_pings("both", {"kvredis": [ping(1.3)], "before": [ping(1.0)]})
    asked = {("kvredis", "EXISTS"): [lookup(1.4, 1.2)], ("before", "EXISTS"): [lookup(1.0, 1.0)]}
    result["lookup"] = summarize_lookups("unix", [b"key"], asked)
    return result


def test_each_part_gives_a_row_with_the_ratios_it_has(result: BenchResult) -> None:
    assert held(result) == [
        HeldRow("tcp x4, 64 KiB, GET, one CPU", {"rate": 0.9, "CPU": 1.2}),
        HeldRow("small SET, 50 clients, 16 in flight", {"rate": 0.9, "CPU": 1.2}),
        HeldRow("PING beside 32 MiB both", {"p99": 1.3}),
        HeldRow("unix, EXISTS of 1 keys of 3 B", {"time": 1.4, "CPU": 1.2}),
    ]


@pytest.mark.parametrize(
    ("ratios", "worse"),
    [
        ({"rate": 0.95, "CPU": 1.05}, []),
        ({"rate": 2.0, "CPU": 0.1}, []),
        ({"rate": 0.94, "CPU": 1.0}, ["rate"]),
        ({"rate": 1.0, "CPU": 1.06}, ["CPU"]),
        ({"time": 1.06, "CPU": 1.06}, ["time", "CPU"]),
        ({"time": 0.5, "CPU": None}, ["CPU"]),
        ({"p99": 1.06}, ["p99"]),
    ],
)
def test_a_row_names_what_is_worse_and_passes_when_nothing_is(ratios: Any, worse: list[str]) -> None:
    row = HeldRow("row", ratios)
    assert (row.worse, row.passed) == (worse, not worse)
    assert row.json() == {"name": "row", "ratios": ratios, "worse": worse, "passed": not worse}


def test_a_row_is_judged_by_the_median_of_the_ratios_within_each_repeat() -> None:
    ours = [transfer(repeat, rate, 1.0) for repeat, rate in enumerate((1.0, 5.0, 2.0))]
    before = [transfer(repeat, rate, 2.0) for repeat, rate in enumerate((1.0, 10.0, 1.0))]
    first, second = summarize_transfers(Arm("unix", 1, False), (1, "SET", 1), {"kvredis": ours, "before": before})
    assert (first.get("ratio_gb_per_s_to_before"), first.get("ratio_server_cpu_to_before")) == (1.0, 0.5)
    assert "ratio_gb_per_s_to_before" not in second


def test_the_report_names_the_commit_and_the_verdict_of_every_row(result: BenchResult) -> None:
    text = "\n".join(held_lines(held(result), result))
    assert "Held against the commit before, abc1234" in text
    assert text.count("MISSED") == 4
    assert "0.90x" in text
    assert "worse: rate, CPU" in text
    assert "worse: p99" in text
    assert text.endswith("0 of 4 rows hold.")


def test_the_report_warns_when_the_two_commits_lay_on_different_pages(result: BenchResult) -> None:
    assert not any("Beware" in line for line in held_lines(held(result), result))
    result["servers"]["kvredis"]["facts"]["memory_page_kind"] = "memfd-2MiB"
    result["servers"]["before"]["facts"]["memory_page_kind"] = "memfd-4KiB"
    (line,) = (line for line in held_lines(held(result), result) if "Beware" in line)
    assert "ours lies on memfd-2MiB, the one before on memfd-4KiB" in line


def test_the_tables_have_a_column_for_the_commit_before_where_it_took_part(result: BenchResult) -> None:
    lines = list(table_lines(result))
    assert [line.split("  ")[-2:] for line in map(str.strip, lines) if "x before" in line] == [
        ["rate x before", "CPU x before"],
        ["rate x before", "CPU x before"],
        ["background GB/s", "p99 x before"],
        ["time x before", "CPU x before"],
    ]
    (row,) = (line for line in lines if line.split()[2:4] == ["GET", "kvredis"])
    assert row.split()[-2:] == ["0.90x", "1.20x"]
    (row,) = (line for line in lines if line.split()[2:4] == ["GET", "before"])
    assert not row.endswith("x")


def test_without_the_commit_before_there_is_neither_a_column_nor_a_verdict() -> None:
    recorded = load(RECORDED)
    assert held(recorded) == []
    assert list(held_lines([], recorded)) == []
    assert not any("x before" in line or "commit before" in line for line in table_lines(recorded))


def test_the_commit_before_is_not_judged_by_the_gate(result: BenchResult) -> None:
    assert [row["name"] for row in gate(result)] == [
        "small ops      SET, 50 clients, 16 in flight",
        "PING p99       beside 32 MiB both",
        "time per call  unix, EXISTS of 1 keys of 3 B",
    ]
