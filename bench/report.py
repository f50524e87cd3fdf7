"""A result as a file and as text: everything that the tables print is in the JSON, and nothing else is.

The schema is in result.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from .errors import BenchError
from .figures import counted, size_text
from .gate import GateRow
from .result import SCHEMA, BenchResult, TransferRow


def default_path(folder: Path, name: str) -> Path:
    """Give where a result goes without --json: bench/results under `folder` when that exists, else `folder`."""
    results = folder / "bench" / "results"
    return (results if results.is_dir() else folder) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"


def save(result: BenchResult, path: Path) -> None:
    """Write a result: a line for each row of it, numbers to six significant digits, which is more than noise leaves."""
    fields = []
    for name, value in _rounded(result).items():
        rows = ",\n".join(json.dumps(row) for row in value) if isinstance(value, list) else ""
        fields.append(f"{json.dumps(name)}: " + (f"[\n{rows}\n]" if rows else json.dumps(value)))
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def load(path: Path) -> BenchResult:
    """Read a result; raises BenchError when the file is none of this schema."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot read a result: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise BenchError(f"{path}: not a result of schema {SCHEMA}")
    return cast(BenchResult, found)


def table_lines(result: BenchResult) -> Iterator[str]:
    """Give the report, line by line, without the gate."""
    yield from _machine(result)
    yield from _transfers(result["transfers"])
    yield from _small(result)
    yield from _head_of_line(result)
    verified = result["verified"]
    if result["transfers"]:
        yield ""
        yield f"Verified: {verified['values']} values, {verified['bytes'] / 1e9:.2f} GB compared in full, 0 wrong."


def gate_lines(rows: Sequence[GateRow]) -> Iterator[str]:
    """Give the verdicts, line by line; nothing when there is nothing to judge."""
    if not rows:
        return
    yield ""
    yield "Gate (ratio to redis, medians of paired ratios)"
    for row in rows:
        measured = "none" if row.measured is None else f"{row.measured:.2f}x"
        yield f"  {'pass' if row.passed else 'FAIL'}  {row.name:<58} {row.bound:>9} {measured:>8}"
    yield f"  {sum(row.passed for row in rows)} of {len(rows)} lines hold."


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


def _transfers(rows: Sequence[TransferRow]) -> Iterator[str]:
    heading = None
    for row in rows:
        where = "client and server on one CPU" if row["pinned"] else "all CPUs"
        arm = f"{row['transport']}, {counted(row['connections'], 'connection')}, {where}"
        if arm != heading:
            heading = arm
            yield ""
            yield arm
            yield (
                f"  {'value':>8} {'op':<4} {'server':<10} {'GB/s':>6} {'x redis':>7} {'p50 ms':>8} {'p99 ms':>8}"
                f" {'server ms/GB':>12} {'(min)':>6} {'x redis':>7} {'client ms/GB':>12}"
            )
        yield (
            f"  {size_text(row['size_bytes']):>8} {row['op']:<4} {row['server']:<10} {row['gb_per_s']:6.2f}"
            f" {_ratio(row['ratio_gb_per_s'])} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f}"
            f" {row['server_cpu_ms_per_gb']:12.0f} {row['server_cpu_ms_per_gb_min']:6.0f}"
            f" {_ratio(row['ratio_server_cpu'])} {row['client_cpu_ms_per_gb']:12.0f}"
        )


def _small(result: BenchResult) -> Iterator[str]:
    if result["small"]:
        yield ""
        yield "small operations (redis-benchmark, 100 B values, tcp)"
        yield (
            f"  {'op':<6} {'clients':>7} {'in flight':>9} {'server':<10} {'op/s':>9} {'x redis':>7}"
            f" {'p50 ms':>7} {'p99 ms':>7} {'server us/op':>12}"
        )
    for row in result["small"]:
        yield (
            f"  {row['op']:<6} {row['clients']:>7} {row['pipeline']:>9} {row['server']:<10} {row['rps']:9.0f}"
            f" {_ratio(row['ratio_rps'])} {row['p50_ms']:7.3f} {row['p99_ms']:7.3f} {row['server_cpu_us_per_op']:12.2f}"
        )


def _head_of_line(result: BenchResult) -> Iterator[str]:
    if result["head_of_line"]:
        yield ""
        yield "PING every ms beside 32 MiB values (tcp)"
        yield f"  {'background':<10} {'server':<10} {'p50 ms':>8} {'p99 ms':>8} {'x redis':>7} {'background GB/s':>15}"
    for row in result["head_of_line"]:
        yield (
            f"  {row['background']:<10} {row['server']:<10} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f}"
            f" {_ratio(row['ratio_p99'])} {row['background_gb_per_s']:15.2f}"
        )


def _ratio(value: float | None) -> str:
    return f"{'':>7}" if value is None else f"{value:6.2f}x"
