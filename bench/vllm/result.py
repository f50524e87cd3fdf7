"""The result of `kvredis bench vllm`: schema kvredis.bench.vllm/1, its table and its picture.

A sample is one prompt in one engine: computed (cold), served again from vLLM's own prefix cache (own), and, that cache
emptied, from what the arm has kept of it (warm). Times are to the first token, of a request alone in its engine.

Arms
    none        no connector
    offloading  vLLM's own OffloadingConnector, to this process' memory
    memory      KVRedisConnector, to this process' memory
    lane        KVRedisConnector, to a kvredis serve process on this host, through shared memory
    tcp         the same over TCP
    +trusted    without checksums (verify_blocks: false)
    +layers     stored layer by layer (use_layerwise: true)
Figures: medians over the samples, _min and _max the spread
    factor      cold of `none` / warm: in the same repeat where both were open together, else of the medians
    ratio       warm / warm of offloading, in the same way
    loaded_gb   bytes that our connector loaded for one warm prompt
    hit_share   least of the warm prompts' tokens not computed, of those that this arm can load
    equal       share of the prompts whose generated tokens were those of the first arm that served them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from kvredis.bench.core.plot import Captions, LinePanel, lines
from kvredis.bench.core.statistics import GB, by_repeat, middle, paired_ratio
from kvredis.bench.server.gate import GateRow
from kvredis.bench.server.result import GateJson

SCHEMA: Final = "kvredis.bench.vllm/1"
NONE, OFFLOADING, MEMORY, LANE, TCP = "none", "offloading", "memory", "lane", "tcp"
TRUSTED, LAYERS = "trusted", "layers"
ARMS: Final = (
    NONE, OFFLOADING, LANE, f"{LANE}+{TRUSTED}", MEMORY, f"{MEMORY}+{TRUSTED}", f"{LANE}+{LAYERS}",
    f"{LANE}+{LAYERS}+{TRUSTED}", f"{MEMORY}+{LAYERS}", f"{MEMORY}+{LAYERS}+{TRUSTED}", TCP, f"{TCP}+{TRUSTED}",
)  # fmt: skip
REFERENCES: Final = (NONE, OFFLOADING)
"""What others are compared with: open beside each of them where there is room."""

RATIO_MOST: Final = 1.05
FACTOR_LEAST: Final = 6.5
FACTOR_TOKENS: Final = 15_000
"""The factor is judged for the 8b shape and prompts from this length on."""


class Sample(TypedDict):
    repeat: int
    cold_ms: float
    own_ms: float
    warm_ms: float | None
    own_tokens: int
    warm_tokens: int
    own_bytes: int
    warm_bytes: int
    stored_bytes: int
    is_equal: bool


class Row(TypedDict):
    arm: str
    tokens: int
    can_hit: int  # tokens of a warm prompt that this arm can load
    samples: list[Sample]
    cold_ms: float
    own_ms: float
    warm_ms: float | None
    warm_ms_min: float | None
    warm_ms_max: float | None
    factor: float | None
    ratio: float | None
    hit_share: float | None
    loaded_gb: float
    equal: float


class VLLMResult(TypedDict):
    schema: str
    machine: dict[str, str | int]
    options: dict[str, Any]
    notes: list[str]
    rows: list[Row]
    counters: dict[str, dict[str, float]]  # of our connector, by arm
    gate: list[GateJson]
    seconds: float


def row_of(arm: str, tokens: int, can_hit: int) -> Row:
    """Give a row without samples."""
    return Row(
        arm=arm, tokens=tokens, can_hit=can_hit, samples=[], cold_ms=0.0, own_ms=0.0, warm_ms=None, warm_ms_min=None,
        warm_ms_max=None, factor=None, ratio=None, hit_share=None, loaded_gb=0.0, equal=0.0,
    )  # fmt: skip


def conclude(rows: list[Row]) -> None:
    """Fill in what follows from the samples."""
    found = {(row["arm"], row["tokens"]): row for row in rows}
    for row in rows:
        samples = row["samples"]
        row["cold_ms"] = middle([sample["cold_ms"] for sample in samples])
        row["own_ms"] = middle([sample["own_ms"] for sample in samples])
        row["equal"] = sum(sample["is_equal"] for sample in samples) / max(len(samples), 1)
        warm = [sample["warm_ms"] for sample in samples if sample["warm_ms"] is not None]
        if not warm:
            continue
        row["warm_ms"], row["warm_ms_min"], row["warm_ms_max"] = middle(warm), min(warm), max(warm)
        row["loaded_gb"] = middle([sample["warm_bytes"] for sample in samples]) / GB
        if row["can_hit"]:
            row["hit_share"] = min(sample["warm_tokens"] for sample in samples) / row["can_hit"]
    for row in rows:
        if row["warm_ms"] is None:
            continue
        base, theirs = found.get((NONE, row["tokens"]), row), found.get((OFFLOADING, row["tokens"]))
        row["factor"] = _ratio(base, "cold_ms", row, "warm_ms")
        if theirs is not None and theirs["warm_ms"] is not None:
            row["ratio"] = _ratio(row, "warm_ms", theirs, "warm_ms")


def _ratio(above: Row, over: str, below: Row, under: str) -> float:
    """Of the samples of the same repeats; where there are none, of the medians."""
    paired = paired_ratio(by_repeat(above["samples"], over), by_repeat(below["samples"], under))
    raw = cast(Mapping[str, float], above)[over] / cast(Mapping[str, float], below)[under]
    return raw if paired is None else paired


def gate_of(result: VLLMResult) -> list[GateRow]:
    """Judge every line; without a GPU those of tokens and hits alone. A figure that is missing does not pass, nor does
    an arm that was left out, or for which there was no time."""
    found = {(row["arm"], row["tokens"]) for row in result["rows"]}
    judged = [
        GateRow(f"measured       {arm}, {tokens} tokens", "measured", None, False)
        for tokens in result["options"]["prompt_tokens"]
        for arm in result["options"]["arms"]
        if (arm, tokens) not in found
    ]
    for row in result["rows"]:
        name = f"{row['arm']}, {row['tokens']} tokens"
        judged.append(GateRow(f"tokens equal   {name}", "= 1", row["equal"], row["equal"] == 1))
        if row["hit_share"] is not None and row["arm"] != OFFLOADING:
            judged.append(GateRow(f"hits           {name}", "= 1", row["hit_share"], row["hit_share"] == 1))
    if result["options"]["device"] == "cpu":
        return judged
    for row in result["rows"]:
        name, (kind, *words) = f"{row['arm']}, {row['tokens']} tokens", row["arm"].split("+")
        if kind == LANE and LAYERS not in words:
            passed = row["ratio"] is not None and row["ratio"] <= RATIO_MOST
            judged.append(GateRow(f"/ offloading   {name}", f"<= {RATIO_MOST:.2f}x", row["ratio"], passed))
        if kind in (LANE, MEMORY) and row["tokens"] >= FACTOR_TOKENS and result["options"]["shape"] == "8b":
            passed = (row["factor"] or 0) >= FACTOR_LEAST
            judged.append(GateRow(f"cold / warm    {name}", f">= {FACTOR_LEAST:.2f}x", row["factor"], passed))
    return judged


def table_lines(result: VLLMResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    machine, options = result["machine"], result["options"]
    yield f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, load {machine['load_1min']} before"
    launch = ", short passes as CUDA graphs" if options.get("graphs") else ""  # older results do not say
    yield (
        f"vLLM {options['vllm']}{launch}, {options['device']}; {options['shape']}:"
        f" {options['bytes_per_token']} bytes a token,"
        f" chunks of {options['chunk_tokens']}; {options['repeats']} repeats, {options['together']} engines at a time"
    )
    yield from result["notes"]
    for tokens in dict.fromkeys(row["tokens"] for row in result["rows"]):
        yield ""
        yield (
            f"  {f'{tokens} tokens, TTFT in ms':<28} {'cold':>8} {'own':>8} {'warm':>8} {'least to most':>18}"
            f" {'factor':>7} {'/ offloading':>13} {'hit':>7} {'GB':>6} {'equal':>7}"
        )
        yield from (_row_line(row) for row in result["rows"] if row["tokens"] == tokens)
    yield ""
    yield "Gate"
    for line in gate_of(result):
        measured = "none" if line.measured is None else f"{line.measured:.3f}x"
        yield f"  {'held' if line.passed else 'MISSED':<6}  {line.name:<52} {line.bound:>9} {measured:>8}"


def _row_line(row: Row) -> str:
    spread = "" if row["warm_ms_min"] is None else f"{row['warm_ms_min']:.1f} to {row['warm_ms_max']:.1f}"
    share = "" if row["hit_share"] is None else f"{row['hit_share']:.1%}"
    return (
        f"  {row['arm']:<28} {row['cold_ms']:8.1f} {row['own_ms']:8.1f} {_text(row['warm_ms'], 1):>8} {spread:>18}"
        f" {_text(row['factor'], 2):>7} {_text(row['ratio'], 3):>13} {share:>7} {row['loaded_gb']:6.2f}"
        f" {row['equal']:7.0%}"
    )


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw the warm first token, and how many times as soon it comes, against the prompt's length, into a PNG."""
    result, panels = cast(VLLMResult, raw), []
    for title, figure in (("first token, ms", "warm_ms"), ("first token, times as soon as computed", "factor")):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in result["rows"]:
            value = cast(float | None, cast(Mapping[str, object], row)[figure])
            if row["arm"] == NONE and figure == "warm_ms":
                series.setdefault("computed", []).append((row["tokens"], row["cold_ms"]))
                series.setdefault("own cache", []).append((row["tokens"], row["own_ms"]))
            elif value is not None:
                series.setdefault(row["arm"], []).append((row["tokens"], value))
        panels.append(LinePanel(title, {name: sorted(at) for name, at in series.items()}, across="tokens", sizes=False))
    machine, options = result["machine"], result["options"]
    foot = (
        f"{options['device']}; {machine.get('cpu')}, {machine.get('cores')} cores. vLLM {options['vllm']},"
        f" {options['shape']}. {' '.join(result['notes'])}"
    )
    lines(panels, Captions(title="vLLM: prompts seen before", values="", foot=foot), path, columns=2)
