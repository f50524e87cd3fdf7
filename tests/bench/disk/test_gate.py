"""The disk's gate judges what was measured, by the right bound, and a missing figure never passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvredis.bench.core.result import GateLine, gate_lines
from kvredis.bench.disk.rates import Op
from kvredis.bench.disk.run import DiskResult, disk_gate, table_lines

from .fake_disk_result import get, ping, rate, result

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def one(measured: DiskResult) -> GateLine:
    (row,) = disk_gate(measured)
    return row


@pytest.mark.parametrize(("op", "name"), [("write", "spill"), ("read", "promote")])
def test_a_rate_is_held_against_the_device_and_a_loop_in_its_mode_and_threads(op: Op, name: str) -> None:
    rows = disk_gate(result(rates=[rate(op, device=0.85, loop=0.84)]))
    assert rows == [
        GateLine(name=f"{name}, direct, 4 threads: rate / fio-3.33", bound=">= 0.85x", measured=0.85, passed=True),
        GateLine(name=f"{name}, direct, 4 threads: rate / a plain loop", bound=">= 0.85x", measured=0.84, passed=False),
    ]


def test_without_a_tool_the_rate_is_held_against_the_loop_alone() -> None:
    row = one(result(rates=[rate("write", device=None, loop=0.9)]))
    assert (row["name"], row["measured"], row["passed"]) == ("spill, direct, 4 threads: rate / a plain loop", 0.9, True)


def test_warm_reads_and_other_arms_are_shown_but_not_judged() -> None:
    rows = [
        rate("read warm", device=0.1, mode="buffered"),
        rate("write", device=0.1, arm="loop"),
        rate("read", device=1.0, arm="device"),
    ]
    assert disk_gate(result(rates=rows)) == []


def test_a_get_from_disk_is_held_against_a_preadv_as_it_stands_and_without_the_socket() -> None:
    whole, net, fetched = disk_gate(result(gets=[get(1.31, net=1.3, prefetched=1.1)]))
    assert (whole["passed"], net["passed"], fetched["passed"]) == (False, True, True)
    assert "from disk / preadv" in whole["name"]
    assert "(from disk - from memory) / preadv" in net["name"]
    assert "after PREFETCH / from memory" in fetched["name"]
    assert [row["passed"] for row in disk_gate(result(gets=[get(1.3, net=1.31, prefetched=1.11)]))] == [
        True,
        False,
        False,
    ]


def test_only_the_server_with_a_disk_is_judged_by_its_pings() -> None:
    assert one(result(pings=[ping("disk", 2.0), ping("memory", 9.0)]))["passed"]
    assert not one(result(pings=[ping("disk", 2.1)]))["passed"]


def test_a_figure_that_could_not_be_formed_does_not_pass() -> None:
    rows = disk_gate(result(rates=[rate("read", device=None, loop=None)], gets=[get(None, None, None)]))
    assert len(rows) == 4
    assert not any(row["passed"] for row in rows)


def test_every_row_is_a_line_of_the_report_and_every_note_is_told() -> None:
    measured = result(
        rates=[rate("write", device=0.9), rate("read", device=0.5, mode="buffered")],
        gets=[get(1.2)],
        pings=[ping("disk", 1.5), ping("memory", 1.4)],
    )
    text = "\n".join(table_lines(measured))
    assert "direct: skipped, for a reason" in text
    assert "write, direct, blocks of 2 MiB" in text
    assert "read, buffered, blocks of 2 MiB" in text
    assert text.count("spill_dropped 2") == 2
    assert sum(line.split()[1:2] == ["tier"] for line in text.splitlines()) == 2
    assert "1.00 GB compared in full" in text


@pytest.mark.parametrize("name", ["disk-2026-11-30.json", "disk-2026-11-22-16-cores.json"])
def test_a_recorded_result_is_still_a_table(name: str) -> None:
    old = json.loads((RESULTS / name).read_text())
    lines = list(table_lines(old))
    assert sum(line.split()[1:2] == ["tier"] for line in lines) == sum(row["arm"] == "tier" for row in old["rates"])


def test_the_verdicts_say_held_or_missed() -> None:
    lines = list(gate_lines(disk_gate(result(rates=[rate("write", device=0.9), rate("read", device=0.2)]))))
    assert lines[-1].strip() == "3 of 4 lines hold."
    assert sum(line.strip().startswith("held") for line in lines) == 3
    assert sum(line.strip().startswith("MISSED") for line in lines) == 1
    assert list(gate_lines([])) == []
