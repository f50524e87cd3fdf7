"""The result of `kvredis bench memory`: the JSON file's schema, kvredis.bench.memory/1, and its tables.

Units: GB = 1e9 bytes of payload, read once and written once (a block of n bytes counts n, however often an arm moves
it). `seconds` of a sample is the copying of all its tasks and nothing else: memory is mapped, touched and wiped before,
compared after.

T0 is the plainest way there is: torch, block by block, in memory as torch allocates it. It runs in every round with one
thread and with as many as torch takes by itself, and the faster of the two is the round's T0: on a busy machine torch's
threads wait for each other, and nothing would be easier to beat. A round is one kind of page with one number of threads
in one repeat.
`ratio` is the median over the repeats of an arm's seconds divided by those of T0 *in the same round*, so less is
better; `ratio_min` and `ratio_max` are the least and the most of them. `ratio_to_4k` divides by the same arm with as
many threads on 4 KiB pages in the same repeat: what the pages are worth.

Top level
    schema, machine (see core/machine.py), torch (version, threads that it takes by itself), copying (the kind of the
    store's own copy), options (how the bench was called), pages (kind -> what the kernel says is behind it), notes
    (what was left out or made smaller, and why), earlier (other people's figures, arm -> least and most, with whose
    they are), rows, verified_bytes, seconds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, TypedDict

from kvredis.bench.core.statistics import counted, size_text

SCHEMA: Final = "kvredis.bench.memory/1"
EARLIER_FROM: Final = "wde 0.3.1 on its own machine (RTX 4090 host)"
EARLIER: Final[Mapping[str, tuple[float, float]]] = {
    "memmove": (1.2, 1.8),
    "torch fancy index": (2.0, 2.6),
    "torch index_copy_": (2.0, 2.6),
    "torch layer by layer": (2.1, 3.8),
}
"""Ratios to T0 from the tables of an earlier system's documentation, by our arm that does the same; over five models.

That system timed one repeat without warm-up, and compared the last task of each arm alone.
"""


class MemorySample(TypedDict):
    """One arm, one round. `round` pairs it with T0, `repeat` with other pages and threads."""

    repeat: int
    round: int
    seconds: float
    payload_bytes: int
    gb_per_s: float
    verified_bytes: int  # every byte of every task, after the clock had stopped


class MemoryRow(TypedDict):
    """One arm on one kind of page with one number of threads: all samples and what they amount to."""

    shape: str
    block_bytes: int
    blocks: int  # in each of the two arrays
    arm: str
    pages: str  # torch (T0 alone), 4 KiB, THP, hugetlb
    threads: int
    samples: list[MemorySample]
    seconds: float
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    ratio: float | None
    ratio_min: float | None
    ratio_max: float | None
    ratio_to_4k: float | None


class Earlier(TypedDict):
    """Other people's figures, beside which ours are drawn: measured elsewhere, so only a hint."""

    source: str
    ratios: dict[str, list[float]]


class TorchFacts(TypedDict):
    version: str
    threads: int


class MemoryResult(TypedDict):
    schema: str
    machine: dict[str, str | int]
    torch: TorchFacts
    copying: str  # how the store's own copy is done here, see kvredis.storage.memory.copy.KINDS
    options: dict[str, object]
    pages: dict[str, str]
    notes: list[str]
    earlier: Earlier
    rows: list[MemoryRow]
    verified_bytes: int
    seconds: float


def table_lines(result: MemoryResult) -> Iterator[str]:
    """Give the report, line by line: everything in it is in the JSON."""
    machine, torch = result["machine"], result["torch"]
    memory_gib = int(machine["memory_bytes"]) / 1024**3
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {memory_gib:.0f} GiB, Linux {machine['kernel']},"
        f" load {machine['load_1min']} before"
    )
    threads = counted(torch["threads"], "thread")
    yield f"torch {torch['version']} takes {threads} by itself; kvredis copy is {result['copying']}"
    for kind, text in result["pages"].items():
        yield f"{kind}: {text}"
    yield from result["notes"]
    heading = None
    for row in result["rows"]:
        if heading != row["shape"]:
            heading = row["shape"]
            yield ""
            yield (
                f"{heading}: tasks of random blocks of {size_text(row['block_bytes'])}, between two arrays of"
                f" {row['blocks']}; x T0 is time, less is better"
            )
            yield (
                f"  {'pages':<8} {'threads':>7} {'arm':<21} {'GB/s':>6} {'min to max':>15} {'x T0':>7}"
                f" {'min to max':>15} {'x 4 KiB':>8} {'earlier':>11}"
            )
        yield (
            f"  {row['pages']:<8} {row['threads']:>7} {row['arm']:<21} {row['gb_per_s']:6.2f}"
            f" {_range(row['gb_per_s_min'], row['gb_per_s_max']):>15} {_ratio(row['ratio']):>7}"
            f" {_range(row['ratio_min'], row['ratio_max']):>15} {_ratio(row['ratio_to_4k']):>8}"
            f" {_span(theirs(result, row)):>11}"
        )
    yield ""
    yield f"x T0 of earlier systems: {result['earlier']['source']}. T0 is the faster of the first rows in each round."
    yield f"Verified: {result['verified_bytes'] / 1e9:.2f} GB compared in full, every task, 0 wrong."


def theirs(result: MemoryResult, row: MemoryRow) -> tuple[float, float] | None:
    """Give the earlier figures that a row may be held against; theirs of memmove are of one thread."""
    figures = result["earlier"]["ratios"].get(row["arm"])
    if figures is None or row["pages"] == "torch" or (row["arm"] == "memmove" and row["threads"] != 1):
        return None
    return figures[0], figures[1]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def _span(figures: tuple[float, float] | None) -> str:
    return "" if figures is None else f"{figures[0]:.1f} to {figures[1]:.1f}"
