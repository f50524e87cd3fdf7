"""The result of `kvredis bench swap`: the JSON file's schema, kvredis.bench.swap/1, its tables and its gate.

GB = 1e9 bytes of KV, moved once. `seconds` is from the call until the last byte is there, wall clock, with nothing else
on the GPU. `percent` is of the link in the same repeat: the faster of one copy of page-locked memory and of a row of
copies of 64 MiB, in the same direction. Medians are over the repeats, with their least and most.

Top level
    schema, machine (see core/machine.py), torch, device, copies (what there is to copy with), options, notes, links (a
    row for each repeat and direction), rows, prefill (how much a prefill was slowed by what ran beside it), waits (how
    long copies of a few bytes took on another stream, an engine's), gate, verified_bytes, seconds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypedDict

from kvredis.bench.core.statistics import middle

SCHEMA: Final = "kvredis.bench.swap/1"
OURS: Final = "ours"
BARS: Final[Mapping[str, tuple[float, float]]] = {"8b": (97.0, 97.0), "7b": (94.0, 96.0), "3b": (91.0, 95.0)}
"""Percent of the link that ours must reach on a GPU, out and in, by shape."""
PREFILL_BAR_PERCENT: Final = 3.0

Direction = Literal["out", "in"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("out", "in")

Launch = Literal["graph", "kernels"]
GRAPH: Final[Launch] = "graph"
LAUNCHES: Final[tuple[Launch, ...]] = (GRAPH, "kernels")
"""How a prefill is launched: at once, or kernel by kernel from Python, which waits for the mover's."""

Waiter = Literal["alone", "copies in a row", "ours"]
ALONE: Final[Waiter] = "alone"
ROW: Final[Waiter] = "copies in a row"
WAITERS: Final[tuple[Waiter, ...]] = (ALONE, ROW, "ours")
"""What an engine's copies pass beside."""


class LinkSample(TypedDict):
    repeat: int
    direction: Direction
    one_gb_per_s: float
    row_gb_per_s: float


class SwapSample(TypedDict):
    repeat: int
    seconds: float
    gb_per_s: float
    percent: float
    verified_bytes: int


class SwapRow(TypedDict):
    shape: str
    chunk_tokens: int
    nbytes: int
    arm: str
    direction: Direction
    samples: list[SwapSample]
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    percent: float
    percent_min: float
    percent_max: float


class PrefillSample(TypedDict):
    repeat: int
    alone_ms: float
    beside_ms: float
    slowed_percent: float
    gb_per_s: float


class PrefillRow(TypedDict):
    shape: str
    direction: Direction
    launch: Launch
    tokens: int
    samples: list[PrefillSample]
    alone_ms: float
    beside_ms: float
    slowed_percent: float
    slowed_percent_min: float
    slowed_percent_max: float
    gb_per_s: float


class WaitSample(TypedDict):
    repeat: int
    us: float
    most_us: float
    gb_per_s: float


class WaitRow(TypedDict):
    shape: str
    direction: Direction
    nbytes: int
    beside: Waiter
    samples: list[WaitSample]
    us: float
    most_us: float
    gb_per_s: float


class GateLine(TypedDict):
    name: str
    bound: str
    measured: float
    passed: bool


class SwapResult(TypedDict):
    schema: str
    machine: dict[str, str | int]
    torch: str
    device: str
    copies: dict[str, object]
    options: dict[str, object]
    notes: list[str]
    links: list[LinkSample]
    rows: list[SwapRow]
    prefill: list[PrefillRow]
    waits: list[WaitRow]
    gate: list[GateLine]
    verified_bytes: int
    seconds: float


def swap_row(
    shape: str, chunk_tokens: int, nbytes: int, way: tuple[str, Direction], samples: list[SwapSample]
) -> SwapRow:
    """Make a row of its samples; `way` is (arm, direction)."""
    rates, percents = [each["gb_per_s"] for each in samples], [each["percent"] for each in samples]
    return SwapRow(
        shape=shape, chunk_tokens=chunk_tokens, nbytes=nbytes, arm=way[0], direction=way[1], samples=samples,
        gb_per_s=middle(rates), gb_per_s_min=min(rates), gb_per_s_max=max(rates),
        percent=middle(percents), percent_min=min(percents), percent_max=max(percents),
    )  # fmt: skip


def prefill_row(of: tuple[str, Direction, Launch], tokens: int, samples: list[PrefillSample]) -> PrefillRow:
    """Make a row of its samples; `of` is (shape, direction, launch)."""
    slowed = [each["slowed_percent"] for each in samples]
    return PrefillRow(
        shape=of[0], direction=of[1], launch=of[2], tokens=tokens, samples=samples,
        alone_ms=middle([each["alone_ms"] for each in samples]),
        beside_ms=middle([each["beside_ms"] for each in samples]),
        slowed_percent=middle(slowed), slowed_percent_min=min(slowed), slowed_percent_max=max(slowed),
        gb_per_s=middle([each["gb_per_s"] for each in samples]),
    )  # fmt: skip


def wait_row(of: tuple[str, Direction, int], beside: Waiter, samples: list[WaitSample]) -> WaitRow:
    """Make a row of its samples; `of` is (shape, direction, bytes of the engine's copy)."""
    return WaitRow(
        shape=of[0], direction=of[1], nbytes=of[2], beside=beside, samples=samples,
        us=middle([each["us"] for each in samples]), most_us=max(each["most_us"] for each in samples),
        gb_per_s=middle([each["gb_per_s"] for each in samples]),
    )  # fmt: skip


def gate_lines(rows: Sequence[SwapRow], prefill: Sequence[PrefillRow]) -> list[GateLine]:
    """Judge what was measured on a GPU: ours against the bars of its shape, and each prefill."""
    found = []
    for row in rows:
        if row["arm"] == OURS and row["shape"] in BARS:
            bar = BARS[row["shape"]][DIRECTIONS.index(row["direction"])]
            name = f"{row['shape']} {row['direction']}, chunks of {row['chunk_tokens']}"
            found.append(
                GateLine(name=name, bound=f">= {bar:g} %", measured=row["percent"], passed=row["percent"] >= bar)
            )
    for each in prefill:
        slowed = each["slowed_percent"]
        name = f"{each['shape']} prefill by {each['launch']} beside {each['direction']}"
        bound = f"< {PREFILL_BAR_PERCENT:g} %"
        found.append(GateLine(name=name, bound=bound, measured=slowed, passed=slowed < PREFILL_BAR_PERCENT))
    return found


def table_lines(result: SwapResult) -> Iterator[str]:
    """Give the report, line by line: everything in it is in the JSON."""
    machine = result["machine"]
    yield f"{result['device']}; {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}"
    yield f"torch {result['torch']}; " + ", ".join(f"{name}: {value}" for name, value in result["copies"].items())
    yield from result["notes"]
    for direction in DIRECTIONS:
        chosen = [link for link in result["links"] if link["direction"] == direction]
        one, row = ([link[key] for link in chosen] for key in ("one_gb_per_s", "row_gb_per_s"))
        yield (
            f"Link {direction}: one copy {middle(one):.1f} ({min(one):.1f} to {max(one):.1f}),"
            f" copies of 64 MiB in a row {middle(row):.1f} GB/s ({min(row):.1f} to {max(row):.1f})"
        )
    heading = None
    for each in result["rows"]:
        if heading != (each["shape"], each["chunk_tokens"]):
            heading = (each["shape"], each["chunk_tokens"])
            yield ""
            size_text = f"{each['nbytes'] / 1e6:.0f} MB of random pages"
            yield f"{each['shape']}, {size_text}, chunks of {each['chunk_tokens']} tokens"
            yield f"  {'arm':<26} {'way':<4} {'GB/s':>7} {'least to most':>15} {'% of link':>10} {'least to most':>15}"
        yield (
            f"  {each['arm']:<26} {each['direction']:<4} {each['gb_per_s']:7.2f}"
            f" {_range(each['gb_per_s_min'], each['gb_per_s_max']):>15} {each['percent']:10.1f}"
            f" {_range(each['percent_min'], each['percent_max']):>15}"
        )
    for beside in result["prefill"]:
        yield ""
        yield (
            f"{beside['shape']} prefill of {beside['tokens']} tokens by {beside['launch']}:"
            f" {beside['alone_ms']:.1f} ms alone, {beside['beside_ms']:.1f} ms beside {beside['direction']}"
            f" at {beside['gb_per_s']:.1f} GB/s: slowed {beside['slowed_percent']:+.1f} %"
            f" ({_range(beside['slowed_percent_min'], beside['slowed_percent_max'])})"
        )
    for wait in result["waits"]:
        if wait["beside"] == ALONE:
            yield ""
            yield f"{wait['shape']}, an engine's copy of {wait['nbytes']} bytes {wait['direction']}, beside"
        yield (
            f"  {'nothing' if wait['beside'] == ALONE else wait['beside']:<16} {wait['us']:9,.0f} us,"
            f" {wait['most_us']:,.0f} at most, at {wait['gb_per_s']:.1f} GB/s"
        )
    yield ""
    yield f"Verified: {result['verified_bytes'] / 1e9:.2f} GB compared in full, 0 wrong."
    for line in result["gate"]:
        verdict = "held" if line["passed"] else "MISSED"
        yield f"  {verdict:<6}  {line['name']:<30} {line['bound']:>9} {line['measured']:7.1f}"


def _range(low: float, high: float) -> str:
    return f"{low:.1f} to {high:.1f}"
