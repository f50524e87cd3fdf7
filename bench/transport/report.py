"""The report and the picture of `kvredis bench transport`: what the JSON file has, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kvredis.bench.core.plot import Bar, BarPanel, Captions, bars
from kvredis.bench.core.statistics import size_text
from kvredis.bench.server.gate import GateRow

from .result import ArmRow, TransportResult, arm_name


def table_lines(result: TransportResult) -> Iterator[str]:
    """Give the report, line by line, without the gate."""
    yield from _machine(result)
    yield from _arms(result)
    yield from _scaling(result)
    yield from _one(result)
    yield ""
    yield f"Verified: {result['verified_bytes'] / 1e9:.2f} GB compared in full, 0 wrong."


def gate_lines(rows: Sequence[GateRow]) -> Iterator[str]:
    """Give the verdicts, line by line; nothing when there is nothing to judge."""
    if not rows:
        return
    yield ""
    yield "Gate (medians of paired ratios)"
    for row in rows:
        measured = "none" if row.measured is None else f"{row.measured:.3f}x"
        yield f"  {'pass' if row.passed else 'FAIL'}  {row.name:<66} {row.bound:>9} {measured:>9}"
    yield f"  {sum(row.passed for row in rows)} of {len(rows)} lines hold."


def _machine(result: TransportResult) -> Iterator[str]:
    machine, torch, facts = result["machine"], result["torch"], result["server"]["facts"]
    yield f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, load {machine['load_1min']} before"
    yield f"T0: torch {torch['version']}, {torch['threads']} thread, anonymous memory for which huge pages were asked"
    yield f"kvredis {result['server']['version']}, arena on {facts.get('memory_page_kind', 'unknown pages')}"
    for note in result["notes"]:
        yield f"Note: {note}"


def _arms(result: TransportResult) -> Iterator[str]:
    for base in result["t0"]:
        rows = [row for row in result["arms"] if row["shape"] == base["shape"]]
        if not rows:
            continue
        yield ""
        yield (
            f"{base['shape']}: {rows[0]['blocks']} blocks of {size_text(base['block_bytes'])}, 8 batches;"
            f" T0 {base['seconds'] * 1e3:.1f} ms, {base['gb_per_s']:.2f} GB/s"
        )
        yield (
            f"  {'arm':<30} {'ms':>8} {'GB/s':>6} {'(min':>6} {'max)':>6} {'x T0':>7} {'(min':>6} {'max)':>6}"
            f" {'peer ms/GB':>10} {'client ms/GB':>12} {'ahead of pyzmq':>14}"
        )
        for row in rows:
            yield (
                f"  {arm_name(row):<30} {row['seconds'] * 1e3:8.1f} {row['gb_per_s']:6.2f} {row['gb_per_s_min']:6.2f}"
                f" {row['gb_per_s_max']:6.2f} {_ratio(row['ratio_t0']):>7} {_bare(row['ratio_t0_min']):>6}"
                f" {_bare(row['ratio_t0_max']):>6} {row['peer_cpu_ms_per_gb']:10.0f}"
                f" {row['client_cpu_ms_per_gb']:12.0f} {_ratio(row['ahead']):>14}"
            )


def _scaling(result: TransportResult) -> Iterator[str]:
    if result["scaling"]:
        yield ""
        yield "several connections at once, a client thread each (GETP: 16 in flight)"
        yield (
            f"  {'blocks':<14} {'where':<5} {'op':<5} {'connections':>11} {'GB/s':>6} {'x T0':>7}"
            f" {'server ms/GB':>12} {'client ms/GB':>12}"
        )
    for row in result["scaling"]:
        what = f"{row['shape']}, {size_text(row['block_bytes'])}"
        yield (
            f"  {what:<14} {row['transport']:<5} {row['op']:<5} {row['connections']:>11} {row['gb_per_s']:6.2f}"
            f" {_ratio(row['ratio_t0']):>7} {row['server_cpu_ms_per_gb']:12.0f} {row['client_cpu_ms_per_gb']:12.0f}"
        )


def _one(result: TransportResult) -> Iterator[str]:
    if result["one"]:
        yield ""
        yield "one block of 2 MiB at a time"
        yield f"  {'what':<24} {'p50 us':>8} {'p99 us':>8} {'x memcpy':>9}"
    for one in result["one"]:
        yield f"  {one['what']:<24} {one['p50_us']:8.1f} {one['p99_us']:8.1f} {_ratio(one['ratio_memcpy']):>9}"
    if result["lookups"]:
        yield ""
        yield "lookups and leases, one client on a unix socket"
        yield f"  {'call':<24} {'keys':>5} {'calls/s':>9} {'keys/s':>10}"
    for row in result["lookups"]:
        yield f"  {row['what']:<24} {row['keys']:>5} {row['calls_per_s']:9.0f} {row['keys_per_s']:10.0f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _bare(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw ratios to T0 into the PNG `path`: a panel for each model, the earlier system's figures beside ours."""
    result = cast(TransportResult, raw)
    machine = result["machine"]
    captions = Captions(
        title="Blocks between two processes",
        values="time / T0 (less is better)",
        foot=f"{machine.get('cpu')}, {machine.get('cores')} cores, Linux {machine.get('kernel')}."
        " T0: torch's plain copy in one process."
        f" Arena on {result['server']['facts'].get('memory_page_kind', 'unknown pages')}.",
        theirs=result["earlier"]["source"],
    )
    shapes = list(dict.fromkeys(row["shape"] for row in result["arms"]))
    bars([_panel(result, shape) for shape in shapes], captions, path)


def _panel(result: TransportResult, shape: str) -> BarPanel:
    rows = [row for row in result["arms"] if row["shape"] == shape]
    names = [arm_name(row) for row in rows]
    earlier = {name: (pair[0], pair[1]) for name, pair in result["earlier"]["ratios"].items() if name in names}
    title = f"{shape}, {rows[0]['blocks']} blocks of {size_text(rows[0]['block_bytes'])}"
    return BarPanel(title, names, {"measured here": [_bar(row) for row in rows]}, earlier)


def _bar(row: ArmRow) -> Bar | None:
    low, middle, high = row["ratio_t0_min"], row["ratio_t0"], row["ratio_t0_max"]
    return None if low is None or middle is None or high is None else Bar(middle, low, high)
