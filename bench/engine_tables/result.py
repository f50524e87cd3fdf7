"""The result of `kvredis bench prefill`, `hit-sweep` and `long-prefill`: schema kvredis.bench.engine_tables/1, tables.

A sample is one pass over the prompts of one point. Times are of an engine that waits for its accelerator; the drain
(what batches waited for memory that was still being stored from, and in the end until all that was stored is where its
tier has it) is told beside them. On a GPU passes and decoding run in CUDA graphs. Ratios are to `recompute` of the same
point, repeat and process; a row's figures are medians over its repeats, _min and _max the spread.

Arms
    recompute   no cache: every prompt is computed whole
    gpu         KV that never left the accelerator's memory: what a hit is worth at most
    cpu         the engine's own memory
    lane        a kvredis serve process on this host, through shared memory
    remote      the same over TCP
    disk        the engine's own disk, with memory for an eighth, and for what is stored of two batches
    An arm that fails is left out and said, and so is, in its row, what a cache dropped when it could not keep up: the
    second pass then has that much less. Bytes that are not what was stored end the bench.
Passes
    1   the cache is empty; what prompts have in common is a hit all the same
    2   the same prompts again. gpu and cpu: in the same process, where alone their memory is; the others: in another
        process, which has seen none of them, so every hit came from the tier. Hits and their bytes are checked.
Points
    prefill: tokens of a forward pass; hit-sweep: the share of a prompt that all have in common; long-prefill: tokens
    generated for each prompt
Figures
    qps             prompts / seconds, seconds being load + prefill + decode
    first_ms        (load + prefill) / prompts: what a prompt waits for its first token, less what waits with it
    tier_gb_per_s   bytes of hits / seconds of loads beside which nothing was computed: a batch's, but the first one's,
                    come while the one before generates
    over_break_even tier_gb_per_s / (bytes a token x computed tokens/s of recompute): below 1 a hit is slower than none
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from kvredis.bench.core.plot import Captions, LinePanel, lines
from kvredis.bench.core.statistics import GB, by_repeat, middle, paired_ratio, paired_ratios
from kvredis.bench.server.gate import GateRow
from kvredis.bench.server.result import GateJson

SCHEMA: Final = "kvredis.bench.engine_tables/1"
RECOMPUTE, DEVICE, CPU, LANE, REMOTE, DISK = "recompute", "gpu", "cpu", "lane", "remote", "disk"
ARMS: Final = (RECOMPUTE, DEVICE, CPU, LANE, REMOTE, DISK)
NAMES: Final = ("prefill", "hit-sweep", "long-prefill")
AXES: Final = {"prefill": "tokens a pass", "hit-sweep": "hit rate", "long-prefill": "tokens generated"}

AUTO_LEAST: Final = 0.97
"""Of recompute, with min_retrieve_tokens: auto, whatever the tier."""
LANE_LEAST: Final = 2.5
"""Of recompute in the second pass, where prompts have nothing in common."""
CPU_LEAST: Final = 0.95
"""Of hits that never left the accelerator, up to CPU_RATE of each prompt in common."""
CPU_RATE: Final = 0.5


class Sample(TypedDict):
    repeat: int
    qps: float
    first_ms: float
    seconds: float
    load_seconds: float  # that were waited for
    alone_load_seconds: float  # of loads beside which nothing was computed
    alone_hit_tokens: int  # that these brought
    prefill_seconds: float  # with handing over what is stored
    decode_seconds: float
    drain_seconds: float
    hit_tokens: int
    computed_tokens: int
    dropped_chunks: int


class Row(TypedDict):
    arm: str
    number: int  # of the pass
    point: float
    samples: list[Sample]
    qps: float
    qps_min: float
    qps_max: float
    first_ms: float
    ratio: float | None  # of qps
    ratio_min: float | None
    ratio_max: float | None
    first_ratio: float | None  # how many times as soon the first token comes
    hit_share: float
    tier_gb_per_s: float | None
    over_break_even: float | None
    drain_seconds: float
    dropped_chunks: int  # over all samples


class EngineTablesResult(TypedDict):
    schema: str
    bench: str
    machine: dict[str, str | int]
    options: dict[str, Any]
    notes: list[str]
    rows: list[Row]
    left_out: list[str]
    """Arms that failed; the notes say at what."""
    verified_bytes: int
    gate: list[GateJson]
    seconds: float


def row_of(arm: str, number: int, point: float) -> Row:
    """Give a row without samples."""
    return Row(
        arm=arm,
        number=number,
        point=point,
        samples=[],
        qps=0.0,
        qps_min=0.0,
        qps_max=0.0,
        first_ms=0.0,
        ratio=None,
        ratio_min=None,
        ratio_max=None,
        first_ratio=None,
        hit_share=0.0,
        tier_gb_per_s=None,
        over_break_even=None,
        drain_seconds=0.0,
        dropped_chunks=0,
    )


def base_of(row: Row) -> tuple[str, int, float]:
    """Arm, pass and point of the row that a row is compared with: recompute in the process that served it."""
    return RECOMPUTE, 1 if row["arm"] in (DEVICE, CPU) else row["number"], row["point"]


def conclude(rows: list[Row], bytes_per_token: int) -> None:
    """Fill in what follows from the samples."""
    found = {(row["arm"], row["number"], row["point"]): row for row in rows}
    for row in rows:
        samples = row["samples"]
        base = found[base_of(row)]["samples"] if base_of(row) in found else []
        rates = [sample["qps"] for sample in samples]
        row["qps"], row["qps_min"], row["qps_max"] = middle(rates), min(rates, default=0.0), max(rates, default=0.0)
        row["first_ms"] = middle([sample["first_ms"] for sample in samples])
        row["drain_seconds"] = middle([sample["drain_seconds"] for sample in samples])
        row["dropped_chunks"] = sum(sample["dropped_chunks"] for sample in samples)
        tokens = [sample["hit_tokens"] + sample["computed_tokens"] for sample in samples]
        row["hit_share"] = min((s["hit_tokens"] / max(n, 1) for s, n in zip(samples, tokens, strict=True)), default=0.0)
        if ratios := paired_ratios(by_repeat(samples, "qps"), by_repeat(base, "qps")):
            row["ratio"], row["ratio_min"], row["ratio_max"] = middle(ratios), min(ratios), max(ratios)
            row["first_ratio"] = middle(paired_ratios(by_repeat(base, "first_ms"), by_repeat(samples, "first_ms")))
        _judge_tier(row, base, bytes_per_token)


def _judge_tier(row: Row, base: list[Sample], bytes_per_token: int) -> None:
    loads = [s for s in row["samples"] if s["alone_hit_tokens"] and s["alone_load_seconds"]]
    if row["arm"] == RECOMPUTE or not loads:
        return
    speed = middle([s["alone_hit_tokens"] * bytes_per_token / s["alone_load_seconds"] for s in loads])
    row["tier_gb_per_s"] = speed / GB
    made = middle([s["computed_tokens"] * bytes_per_token / s["prefill_seconds"] for s in base if s["prefill_seconds"]])
    if made:
        row["over_break_even"] = speed / made


def gate_of(result: EngineTablesResult) -> list[GateRow]:
    """Judge every line that this bench has; a figure that is missing, or an arm, does not pass."""
    return [*_lines(result), *(GateRow(f"{arm}, left out", "measured", None, False) for arm in result["left_out"])]


def _lines(result: EngineTablesResult) -> list[GateRow]:
    if result["options"]["auto"]:
        return [
            GateRow(
                _name(row, result["bench"]), f">= {AUTO_LEAST:.2f}x", row["ratio"], (row["ratio"] or 0) >= AUTO_LEAST
            )
            for row in result["rows"]
            if row["arm"] not in (RECOMPUTE, DEVICE)
        ]
    if result["bench"] != "hit-sweep":
        return []
    judged, second = [], [row for row in result["rows"] if row["number"] == 2]
    by_place = {(row["arm"], row["point"]): row for row in second}
    for row in second:
        at = f"{row['point']:.0%} in common"
        if row["arm"] == LANE and row["point"] == 0:
            passed = (row["ratio"] or 0) >= LANE_LEAST
            judged.append(GateRow(f"lane / recompute, {at}", f">= {LANE_LEAST:.2f}x", row["ratio"], passed))
        device = by_place.get((DEVICE, row["point"]))
        if row["arm"] == CPU and row["point"] <= CPU_RATE and device is not None:
            ratio = paired_ratio(by_repeat(row["samples"], "qps"), by_repeat(device["samples"], "qps"))
            judged.append(GateRow(f"cpu / gpu, {at}", f">= {CPU_LEAST:.2f}x", ratio, (ratio or 0) >= CPU_LEAST))
    return judged


def table_lines(result: EngineTablesResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    machine, options = result["machine"], result["options"]
    yield f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, load {machine['load_1min']} before"
    yield (
        f"{options['shape']}: {options['bytes_per_token']} bytes a token, chunks of {options['chunk_tokens']};"
        f" {options['prompts']} prompts of {options['prompt_tokens']} tokens, up to {options['rows']} at once;"
        f" {options['repeats']} repeats{', min_retrieve_tokens: auto' if options['auto'] else ''}"
    )
    yield from result["notes"]
    for point in dict.fromkeys(row["point"] for row in result["rows"]):
        yield ""
        yield (
            f"  {_point(result['bench'], point):<28} {'QPS':>8} {'x recompute':>12} {'least to most':>16}"
            f" {'first ms':>9} {'sooner x':>9} {'hit':>7} {'GB/s':>7} {'/ break-even':>13} {'drain s':>8}"
        )
        yield from (_row_line(row) for row in result["rows"] if row["point"] == point)
    yield ""
    yield f"Verified: {result['verified_bytes'] / 1e9:.2f} GB of KV by checksum against what was computed, 0 wrong."
    judged = gate_of(result)
    if judged:
        yield ""
        yield "Gate"
    for line in judged:
        measured = "none" if line.measured is None else f"{line.measured:.3f}x"
        yield f"  {'held' if line.passed else 'MISSED':<6}  {line.name:<40} {line.bound:>9} {measured:>8}"


def _point(bench: str, point: float) -> str:
    return f"{point:.0%} in common" if bench == "hit-sweep" else f"{point:g} {AXES[bench]}"


def _name(row: Row, bench: str) -> str:
    return f"{row['arm']}, pass {row['number']}, {_point(bench, row['point'])}"


def _row_line(row: Row) -> str:
    is_base = row["arm"] == RECOMPUTE
    spread = "" if row["ratio_min"] is None or is_base else f"{row['ratio_min']:.3f} to {row['ratio_max']:.3f}"
    name = f"{row['arm']}, pass {row['number']}"
    dropped = f"  {row['dropped_chunks']} chunks dropped" if row["dropped_chunks"] else ""
    return (
        f"  {name:<28} {row['qps']:8.3f} {_text(row['ratio'], 3):>12} {spread:>16}"
        f" {row['first_ms']:9.1f} {_text(row['first_ratio'], 2):>9} {row['hit_share']:7.1%}"
        f" {_text(row['tier_gb_per_s'], 2):>7} {_text(row['over_break_even'], 2):>13}"
        f" {row['drain_seconds']:8.3f}{dropped}"
    )


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw QPS, and how much sooner the first token comes, against the point, into the PNG `path`."""
    result = cast(EngineTablesResult, raw)
    bench, panels = result["bench"], []
    for number in (1, 2):
        for title, figure in (("prompts per second", "qps"), ("first token, times as soon", "first_ratio")):
            series: dict[str, list[tuple[float, float]]] = {}
            for row in result["rows"]:
                value = cast(float | None, cast(Mapping[str, object], row)[figure])
                if row["number"] == number and value is not None:
                    series.setdefault(row["arm"], []).append((row["point"], value))
            drawn = {name: sorted(at) for name, at in series.items()}
            panels.append(LinePanel(f"{title}, pass {number}", drawn, across=AXES[bench], sizes=False))
    machine, options = result["machine"], result["options"]
    foot = (
        f"{machine.get('cpu')}, {machine.get('cores')} cores, Linux {machine.get('kernel')}. {options['shape']},"
        f" {options['prompts']} prompts of {options['prompt_tokens']} tokens. {' '.join(result['notes'])}"
    )
    titles = {"prefill": "Prefilling", "hit-sweep": "What hits are worth", "long-prefill": "Long prompts"}
    lines(panels, Captions(title=titles[bench], values="", foot=foot), path, columns=2)
