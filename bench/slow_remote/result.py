"""The result of `kvredis bench slow-remote`: the JSON file's schema, kvredis.bench.slow-remote/1, its table, its gate.

A sample is one arm's requests of one repeat, one after another. Computing is simulated: whoever has not loaded a token
sleeps 1/prefill_tokens_per_s for it, so `none` is exact and the others have everything else in them: lookups, loads,
copies, stores. A ratio is the median of the ratios to `none` in the same repeat. Every repeat begins with new engines,
so what it costs to find out that a link is slow is in each of them.

Top level
    schema, machine (see core/machine.py), options, break_even_bytes_per_s (bytes of a token x tokens per second), rows,
    recovery (how long after the end of the throttle auto loaded again), verified_bytes, gate, seconds
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypedDict

from kvredis.bench.core.statistics import middle
from kvredis.bench.server.gate import GateRow
from kvredis.bench.server.result import GateJson

SCHEMA: Final = "kvredis.bench.slow-remote/1"
NONE, PLAIN, AUTO = "none", "plain", "auto"
THROTTLED, FREE = "throttled", "free"
AUTO_MOST = 1.03
"""While the link is slow, auto takes no longer than this times no cache at all."""
FREE_MOST = 1.10
"""On a fast link auto takes no longer than this times loading everything."""


class Sample(TypedDict):
    repeat: int
    seconds: float
    loaded_tokens: int
    skipped_tokens: int  # found, and not loaded


class Row(TypedDict):
    """One arm on one link."""

    link: str  # throttled, free
    arm: str  # none, plain (min_retrieve_tokens 0), auto
    samples: list[Sample]
    seconds: float  # median
    ratio_to_none: float | None
    ratio_to_plain: float | None


class Recovery(TypedDict):
    """From the end of the throttle to the first request that auto has loaded, in one repeat."""

    repeat: int
    seconds: float
    requests: int  # computed meanwhile


class SlowRemoteResult(TypedDict):
    schema: str
    machine: dict[str, str | int]
    options: dict[str, object]
    break_even_bytes_per_s: float
    rows: list[Row]
    recovery: list[Recovery]
    verified_bytes: int
    gate: list[GateJson]
    seconds: float


def slow_remote_gate(result: SlowRemoteResult) -> list[GateRow]:
    """Judge every line; a figure that is missing does not pass."""
    rows = {(row["link"], row["arm"]): row for row in result["rows"]}
    throttled, plain = rows[THROTTLED, AUTO]["ratio_to_none"], rows[THROTTLED, PLAIN]["ratio_to_none"]
    lines = [
        _most("throttled: auto / none", throttled, AUTO_MOST),
        GateRow("throttled: plain / none", "> 1.00x", plain, plain is not None and plain > 1),
        _most("free: auto / plain", rows[FREE, AUTO]["ratio_to_plain"], FREE_MOST),
    ]
    for arm in (PLAIN, AUTO):
        ratio = rows[FREE, arm]["ratio_to_none"]
        lines.append(GateRow(f"free: {arm} / none", "< 1.00x", ratio, ratio is not None and ratio < 1))
    return lines


def _most(name: str, measured: float | None, most: float) -> GateRow:
    return GateRow(name, f"<= {most:.2f}x", measured, measured is not None and measured <= most)


def table_lines(result: SlowRemoteResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    machine, options = result["machine"], result["options"]
    yield f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, load {machine['load_1min']} before"
    yield (
        f"{options['prompts']} prompts of {options['prompt_tokens']} tokens of {options['bytes_per_token']} bytes;"
        f" computing is simulated: {options['prefill_tokens_per_s']:.0f} tokens/s of sleep"
    )
    yield (
        f"Link of {_mb(options['link_bytes_per_s'])} MB/s while throttled;"
        f" break-even is {_mb(result['break_even_bytes_per_s'])} MB/s"
    )
    yield ""
    yield f"  {'link':<10} {'arm':<6} {'seconds':>8} {'x none':>7} {'x plain':>8} {'loaded tokens':>14} {'skipped':>9}"
    for row in result["rows"]:
        loaded = middle([sample["loaded_tokens"] for sample in row["samples"]])
        skipped = middle([sample["skipped_tokens"] for sample in row["samples"]])
        yield (
            f"  {row['link']:<10} {row['arm']:<6} {row['seconds']:8.3f} {_ratio(row['ratio_to_none']):>7}"
            f" {_ratio(row['ratio_to_plain']):>8} {loaded:14.0f} {skipped:9.0f}"
        )
    seconds = middle([each["seconds"] for each in result["recovery"]])
    requests = middle([each["requests"] for each in result["recovery"]])
    yield f"After the throttle auto loads again within {seconds:.1f} s, behind {requests:.0f} requests (medians)."
    yield f"Verified: {result['verified_bytes'] / 1e9:.2f} GB compared in full, 0 wrong."
    yield ""
    yield "Gate (medians of paired ratios)"
    for line in slow_remote_gate(result):
        measured = "none" if line.measured is None else f"{line.measured:.3f}x"
        yield f"  {'held' if line.passed else 'MISSED':<6}  {line.name:<26} {line.bound:>9} {measured:>8}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}x"


def _mb(value: object) -> str:
    return f"{float(str(value)) / 1e6:.0f}"
