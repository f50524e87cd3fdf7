"""The result of `kvredis bench store-overhead`: the JSON file's schema, kvredis.bench.store_overhead/1, table and gate.

A sample is one repeat of one row: all prompts, one after another, each prefilled in steps of `budget` tokens. After a
step the chunks that it has completed are handed to the engine. Ratios are to tier `none` of the same repeat and budget;
a row's figures are medians over its repeats, _min and _max the spread.

Tiers
    none     nothing is stored
    cpu      the engine's own memory, with room for everything
    disk     the same with room for half, above a disk; the drain ends when all is on the disk
    remote   a kvredis serve process over TCP; the drain ends when the server has answered for all
    lane     the same through shared memory
Ways
    now      CacheEngine.store: the engine's thread waits for the copy out of its tensors
    later    CacheEngine.store_later: a thread of the cache's copies while the next step computes
Compute
    sleep:R  a step takes tokens / R seconds from its beginning, asleep: the accelerator is busy and the CPU is not
    model    a model of the shape with random weights, on a GPU; without one a tiny model on the CPU, which `notes` says

Top level
    schema, machine (see core/machine.py), options, notes, rows, verified_bytes (read back by a fresh engine after the
    drain and compared in full), gate (`later` where it was measured, else `now`), seconds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from kvredis.bench.core.plot import Captions, LinePanel, lines
from kvredis.bench.core.statistics import by_repeat, middle, paired_ratios
from kvredis.bench.server.gate import GateRow
from kvredis.bench.server.result import GateJson

SCHEMA: Final = "kvredis.bench.store_overhead/1"
NONE, CPU, DISK, REMOTE, LANE = "none", "cpu", "disk", "remote", "lane"
TIERS: Final = (NONE, CPU, DISK, REMOTE, LANE)
NOW, LATER = "now", "later"
WAYS: Final = (NOW, LATER)
WIDE_BUDGET: Final = 1024
WIDE_LEAST: Final = 0.97
"""Of the prompts per second without a cache, with steps of 1,024 tokens or more."""
NARROW_LEAST: Final = 0.95
"""With shorter steps."""


class Sample(TypedDict):
    repeat: int
    seconds: float  # from the begin of the first step to the end of the last
    drain_seconds: float  # from then on until all is where the tier has it
    qps: float  # prompts / seconds
    qps_drained: float  # prompts / (seconds + drain_seconds)
    step_p50_ms: float
    step_p99_ms: float
    store_seconds: float  # the cache's own count of the copies, on whichever thread
    kept: float  # share of the whole chunks' tokens that came back


class Row(TypedDict):
    tier: str
    way: str  # "" of tier none
    budget: int
    samples: list[Sample]
    qps: float
    qps_min: float
    qps_max: float
    qps_drained: float
    ratio: float | None
    ratio_min: float | None
    ratio_max: float | None
    ratio_drained: float | None
    drain_seconds: float
    step_p99_ms: float
    step_p99_ratio: float | None
    store_seconds: float
    kept: float  # least


class StoreOverheadResult(TypedDict):
    schema: str
    machine: dict[str, str | int]
    options: dict[str, object]
    notes: list[str]
    rows: list[Row]
    verified_bytes: int
    gate: list[GateJson]
    seconds: float


def row_of(tier: str, way: str, budget: int) -> Row:
    """Give a row without samples."""
    return Row(
        tier=tier,
        way=way,
        budget=budget,
        samples=[],
        qps=0.0,
        qps_min=0.0,
        qps_max=0.0,
        qps_drained=0.0,
        ratio=None,
        ratio_min=None,
        ratio_max=None,
        ratio_drained=None,
        drain_seconds=0.0,
        step_p99_ms=0.0,
        step_p99_ratio=None,
        store_seconds=0.0,
        kept=0.0,
    )


def conclude(rows: list[Row]) -> None:
    """Fill in what follows from the samples."""
    bases = {row["budget"]: row["samples"] for row in rows if row["tier"] == NONE}
    for row in rows:
        samples, base = row["samples"], bases.get(row["budget"], [])
        rates = [sample["qps"] for sample in samples]
        row["qps"], row["qps_min"], row["qps_max"] = middle(rates), min(rates, default=0.0), max(rates, default=0.0)
        row["qps_drained"] = middle([sample["qps_drained"] for sample in samples])
        row["drain_seconds"] = middle([sample["drain_seconds"] for sample in samples])
        row["step_p99_ms"] = middle([sample["step_p99_ms"] for sample in samples])
        row["store_seconds"] = middle([sample["store_seconds"] for sample in samples])
        row["kept"] = min((sample["kept"] for sample in samples), default=0.0)
        if ratios := _ratios(samples, base, "qps"):
            row["ratio"], row["ratio_min"], row["ratio_max"] = middle(ratios), min(ratios), max(ratios)
            row["ratio_drained"] = middle(_ratios(samples, base, "qps_drained"))
            row["step_p99_ratio"] = middle(_ratios(samples, base, "step_p99_ms"))


def _ratios(samples: list[Sample], base: list[Sample], figure: str) -> list[float]:
    return paired_ratios(by_repeat(samples, figure), by_repeat(base, figure))


def store_overhead_gate(rows: list[Row]) -> list[GateRow]:
    """Judge every line; a figure that is missing does not pass."""
    judged = []
    stored = [row for row in rows if row["tier"] != NONE]
    ways = {tier: {row["way"] for row in stored if row["tier"] == tier} for tier in TIERS}
    for row in stored:
        if row["way"] != (LATER if LATER in ways[row["tier"]] else NOW):
            continue
        least = WIDE_LEAST if row["budget"] >= WIDE_BUDGET else NARROW_LEAST
        passed = row["ratio"] is not None and row["ratio"] >= least
        judged.append(GateRow(f"{_name(row)}, {row['budget']} tokens", f">= {least:.2f}x", row["ratio"], passed))
    if stored:
        kept = min(row["kept"] for row in stored)
        judged.append(GateRow("least share that came back", ">= 1.00x", kept, kept >= 1))
    return judged


def table_lines(result: StoreOverheadResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    machine, options = result["machine"], result["options"]
    yield f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, load {machine['load_1min']} before"
    yield (
        f"{options['prompts']} prompts of {options['prompt_tokens']} tokens, {options['shape']}:"
        f" {options['bytes_per_token']} bytes a token, chunks of {options['chunk_tokens']};"
        f" compute: {options['compute']}; {options['repeats']} repeats"
    )
    yield from result["notes"]
    for budget in dict.fromkeys(row["budget"] for row in result["rows"]):
        yield ""
        yield (
            f"  {f'{budget} tokens a step':<22} {'QPS':>7} {'x none':>7} {'least to most':>15} {'copy s':>7}"
            f" {'drain s':>8} {'drained x none':>15} {'step p99 ms':>12} {'x none':>7} {'kept':>7}"
        )
        rows = [row for row in result["rows"] if row["budget"] == budget]
        yield from map(_row_line, rows)
        for row in rows:
            if row["tier"] == NONE and row["qps_min"]:
                moved = row["qps_max"] / row["qps_min"] - 1
                yield f"  Between repeats none itself moved by {moved:.1%}: a ratio says no more than that lets it say."
    yield ""
    yield f"Verified: {result['verified_bytes'] / 1e9:.2f} GB compared in full, 0 wrong."
    yield ""
    yield "Gate (medians of paired ratios of QPS, without the drain)"
    for line in store_overhead_gate(result["rows"]):
        measured = "none" if line.measured is None else f"{line.measured:.3f}x"
        yield f"  {'held' if line.passed else 'MISSED':<6}  {line.name:<28} {line.bound:>9} {measured:>8}"


def _name(row: Row) -> str:
    return f"{row['tier']} {row['way']}".rstrip()


def _row_line(row: Row) -> str:
    stored = row["tier"] != NONE
    spread = f"{_ratio(row['ratio_min'])} to {_ratio(row['ratio_max'])}" if stored else ""
    copy, drain = (f"{row['store_seconds']:.3f}", f"{row['drain_seconds']:.3f}") if stored else ("", "")
    kept = f"{row['kept']:.1%}" if stored else ""
    return (
        f"  {_name(row):<22} {row['qps']:7.3f} {_ratio(row['ratio']):>7} {spread:>15} {copy:>7} {drain:>8}"
        f" {_ratio(row['ratio_drained']):>15} {row['step_p99_ms']:12.2f} {_ratio(row['step_p99_ratio']):>7} {kept:>7}"
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios against the budget into the PNG `path`."""
    result = cast(StoreOverheadResult, raw)
    panels = []
    for title, figure in (
        ("QPS without the drain / none", "ratio"),
        ("QPS with the drain / none", "ratio_drained"),
        ("99th percentile of a step / none", "step_p99_ratio"),
    ):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in result["rows"]:
            value = cast(float | None, cast(Mapping[str, object], row)[figure])
            if row["tier"] != NONE and value is not None:
                series.setdefault(_name(row), []).append((row["budget"], value))
        panels.append(
            LinePanel(title, {name: sorted(at) for name, at in series.items()}, across="tokens a step", sizes=False)
        )
    machine, options = result["machine"], result["options"]
    foot = (
        f"{machine.get('cpu')}, {machine.get('cores')} cores, Linux {machine.get('kernel')}. {options['shape']},"
        f" {options['prompts']} prompts of {options['prompt_tokens']} tokens, compute {options['compute']}"
    )
    lines(panels, Captions(title="What storing costs an engine that prefills", values="ratio", foot=foot), path)
