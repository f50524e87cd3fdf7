"""A result as a file and as text: everything that the tables print is in the JSON, and nothing else is.

The schema is in result.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kvredis.bench.core.result import load as load_result
from kvredis.bench.core.servers import BEFORE, SUBJECT
from kvredis.bench.core.statistics import counted, size_text

from .before import CPU_MOST, RATE_LEAST, HeldRow
from .deferred_result import deferred_lines
from .gate import GateRow
from .result import SCHEMA, BenchResult


def load(path: Path) -> BenchResult:
    """Read a result, also one from before some parts; raises BenchError when it is none of this schema."""
    return cast(BenchResult, {"lookup": [], "held": [], "deferred": [], "t0": []} | load_result(path, SCHEMA))


def table_lines(result: BenchResult) -> Iterator[str]:
    """Give the report, line by line, without the gate."""
    yield from _machine(result)
    yield from _transfers(result)
    yield from _small(result)
    yield from _head_of_line(result)
    yield from _lookup(result)
    yield from deferred_lines(result["deferred"], result["t0"])
    verified = result["verified"]
    if result["transfers"]:
        yield ""
        yield f"Verified: {verified['values']} values, {verified['bytes'] / 1e9:.2f} GB compared in full, 0 wrong."


def gate_lines(rows: Sequence[GateRow]) -> Iterator[str]:
    """Give the verdicts, line by line; nothing when there is nothing to judge."""
    if not rows:
        return
    yield ""
    yield "Gate (medians of paired ratios, to redis where nothing else is named)"
    for row in rows:
        measured = "none" if row.measured is None else f"{row.measured:.2f}x"
        yield f"  {'pass' if row.passed else 'FAIL'}  {row.name:<58} {row.bound:>9} {measured:>8}"
    yield f"  {sum(row.passed for row in rows)} of {len(rows)} lines hold."


def held_lines(rows: Sequence[HeldRow], result: BenchResult) -> Iterator[str]:
    """Give the verdicts against the commit before, line by line; nothing when it did not take part."""
    if not rows:
        return
    yield ""
    commit = result["servers"][BEFORE]["version"]
    yield f"Held against the commit before, {commit} (medians of paired ratios)"
    yield f"  A row is worse with a rate below {RATE_LEAST:.2f}x, or server CPU, time or p99 above {CPU_MOST:.2f}x."
    pages = [result["servers"][name]["facts"].get("memory_page_kind") for name in (SUBJECT, BEFORE)]
    if pages[0] != pages[1]:
        yield f"  Beware: ours lies on {pages[0]}, the one before on {pages[1]}; reserve hugepages for both, or none."
    for row in rows:
        worse = f"  worse: {', '.join(row.worse)}" if row.worse else ""
        ratios = "  ".join(
            f"{name} {'none' if value is None else _ratio(value):>7}" for name, value in row.ratios.items()
        )
        yield f"  {'pass' if row.passed else 'FAIL'}  {row.name:<58} {ratios}{worse}"
    yield f"  {sum(row.passed for row in rows)} of {len(rows)} rows hold."


def _machine(result: BenchResult) -> Iterator[str]:
    machine = result["machine"]
    memory_gib = int(machine["memory_bytes"]) / 1024**3
    yield f"{machine['cpu']}, {machine['cores']} cores, {memory_gib:.0f} GiB, Linux {machine['kernel']}"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "uvloop"))
    yield f"{versions}; THP {machine['transparent_hugepages']}, {machine['hugepages_2mib_reserved']} hugepages reserved"
    for name, server in result["servers"].items():
        pages = [f"{key} {value}" for key, value in server["facts"].items() if "page" in key]
        yield f"{name}: {server['version']}" + (f" ({', '.join(pages)})" if pages else "")
    for name, reason in result["skipped"].items():
        yield f"{name}: skipped, {reason}"


def _transfers(result: BenchResult) -> Iterator[str]:
    heading, column = None, _before_heading(result, "GB/s, CPU")
    for row in result["transfers"]:
        where = "client and server on one CPU" if row["pinned"] else "all CPUs"
        arm = f"{row['transport']}, {counted(row['connections'], 'connection')}, {where}"
        if arm != heading:
            heading = arm
            yield ""
            yield arm
            yield (
                f"  {'value':>8} {'op':<4} {'server':<10} {'GB/s':>6} {'x redis':>7} {'x T0':>7} {'p50 ms':>8}"
                f" {'p99 ms':>8} {'server ms/GB':>12} {'(min)':>6} {'x redis':>7} {'client ms/GB':>12}{column}"
            )
        yield (
            f"  {size_text(row['size_bytes']):>8} {row['op']:<4} {row['server']:<10} {row['gb_per_s']:6.2f}"
            f" {_ratio(row['ratio_gb_per_s'])} {_ratio(row.get('ratio_t0'))} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f}"
            f" {row['server_cpu_ms_per_gb']:12.0f} {row['server_cpu_ms_per_gb_min']:6.0f}"
            f" {_ratio(row['ratio_server_cpu'])} {row['client_cpu_ms_per_gb']:12.0f}"
            f"{_before(row, 'gb_per_s', 'server_cpu')}"
        )


def _small(result: BenchResult) -> Iterator[str]:
    if result["small"]:
        yield ""
        yield "small operations (redis-benchmark, 100 B values, tcp)"
        yield (
            f"  {'op':<6} {'clients':>7} {'in flight':>9} {'server':<10} {'op/s':>9} {'x redis':>7}"
            f" {'p50 ms':>7} {'p99 ms':>7} {'server us/op':>12}{_before_heading(result, 'op/s, CPU')}"
        )
    for row in result["small"]:
        yield (
            f"  {row['op']:<6} {row['clients']:>7} {row['pipeline']:>9} {row['server']:<10} {row['rps']:9.0f}"
            f" {_ratio(row['ratio_rps'])} {row['p50_ms']:7.3f} {row['p99_ms']:7.3f} {row['server_cpu_us_per_op']:12.2f}"
            f"{_before(row, 'rps', 'server_cpu')}"
        )


def _head_of_line(result: BenchResult) -> Iterator[str]:
    if result["head_of_line"]:
        yield ""
        yield "PING every ms beside 32 MiB values (tcp)"
        yield (
            f"  {'background':<10} {'server':<10} {'p50 ms':>8} {'p99 ms':>8} {'x redis':>7} {'background GB/s':>15}"
            f"{_before_heading(result, 'p99')}"
        )
    for row in result["head_of_line"]:
        yield (
            f"  {row['background']:<10} {row['server']:<10} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f}"
            f" {_ratio(row['ratio_p99'])} {row['background_gb_per_s']:15.2f}{_before(row, 'p99')}"
        )


def _lookup(result: BenchResult) -> Iterator[str]:
    if result["lookup"]:
        yield ""
        yield "many keys in one call, all present (one client, all CPUs); x redis is to its EXISTS"
        yield (
            f"  {'where':<5} {'keys':>5} {'of B':>5} {'op':<8} {'server':<10} {'p50 us':>8} {'p99 us':>8}"
            f" {'x redis':>7} {'server us/call':>14} {'x redis':>7}{_before_heading(result, 'p50, CPU')}"
        )
    for row in result["lookup"]:
        yield (
            f"  {row['transport']:<5} {row['keys']:>5} {row['key_bytes']:>5} {row['op']:<8} {row['server']:<10}"
            f" {row['p50_us']:8.1f} {row['p99_us']:8.1f} {_ratio(row['ratio_p50'])}"
            f" {row['server_cpu_us_per_call']:14.1f} {_ratio(row['ratio_server_cpu'])}"
            f"{_before(row, 'p50', 'server_cpu')}"
        )


def _before_heading(result: BenchResult, figures: str) -> str:
    """Head the column of ratios to the commit before; there is none when it did not take part."""
    return f"  x before ({figures})" if {SUBJECT, BEFORE} <= result["servers"].keys() else ""


def _before(row: Mapping[str, Any], *figures: str) -> str:
    """Give a row's ratios to the commit before; only rows of kvredis have them."""
    names = [f"ratio_{figure}_to_before" for figure in figures]
    return "  " + " ".join(_ratio(row[name]) for name in names) if names[0] in row else ""


def _ratio(value: float | None) -> str:
    return f"{'':>7}" if value is None else f"{value:6.2f}x"
