"""The result of `kvredis bench links`: the JSON file's schema, kvredis.bench.links/1, its matrices and its picture.

A link is a pair of places. GB = 1e9 bytes; `uni` is one way alone, `bi` both ways at once and their sum, as in CUDA's
p2pBandwidthLatencyTest. Latencies are round trips, us: there and back. Medians are over the repeats; of a repeat a
latency is the median over its rounds.

Parts of `copies`
    memory   one thread of one process copies with memmove between two places (bi: two threads, one each way). `process`
             is anonymous memory, `arena` a memfd as the server maps it; each on the pages that its name says, and
             `node N` is memory bound to that NUMA node, copied by a thread on that node
    process  between two processes: tcp and unix send and receive whole blocks over one socket (bi: two); shared
             memory is one copy out of a memfd that the other process has just written
    gpu      CPU memory, page-locked (pinned) or not (pageable), to and from a GPU; between GPUs (peer) and within one
             (device); bi on two streams, pageable ones by two threads; each copy is made several times in a row
Parts of `latencies`
    cores    a token passed between two processes, each bound to a core, through a pair of eventfds: the kernel's
             wake-up is in it
    process  one byte there and back between two processes, wherever the kernel runs them: eventfd, pipe, unix, tcp
    gpu      copying 16 bytes and waiting for it

Top level
    schema, machine (see core/machine.py), options, notes (what could not be measured, and why), gpus (names), peers
    (which GPU can reach which), copies, latencies, verified_bytes, seconds
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypedDict

from kvredis.bench.core.statistics import middle

SCHEMA: Final = "kvredis.bench.links/1"
BASE: Final = "process 4 KiB"
"""A copy within this memory is what the picture's bars are divided by."""

_CORNER: Final = "from, to"

Part = Literal["memory", "process", "gpu"]
Direction = Literal["uni", "bi"]


class CopySample(TypedDict):
    repeat: int
    seconds: float
    gb_per_s: float
    verified_bytes: int  # compared in full after the clock had stopped


class CopyRow(TypedDict):
    part: Part
    way: str  # memmove, tcp, unix, shared memory, pinned, pageable, peer, device
    source: str
    target: str
    direction: Direction
    nbytes: int  # one way, one repeat; of `memory`, bi: both ways together
    samples: list[CopySample]
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float


class LatencySample(TypedDict):
    repeat: int
    rounds: int
    p50_us: float
    p99_us: float


class LatencyRow(TypedDict):
    part: Literal["cores", "process", "gpu"]
    way: str
    source: str
    target: str
    samples: list[LatencySample]
    p50_us: float
    p50_us_min: float
    p50_us_max: float
    p99_us: float


class LinksResult(TypedDict):
    schema: str
    machine: dict[str, str | int]
    options: dict[str, object]
    notes: list[str]
    gpus: list[str]
    peers: list[list[bool]]
    copies: list[CopyRow]
    latencies: list[LatencyRow]
    verified_bytes: int
    seconds: float


class Link(TypedDict):
    """What a row of copies is about, without its samples."""

    part: Part
    way: str
    source: str
    target: str
    direction: Direction


def copy_row(link: Link, nbytes: int, samples: list[CopySample]) -> CopyRow:
    """Sum up one link over the repeats."""
    rates = [sample["gb_per_s"] for sample in samples]
    return CopyRow(
        **link,
        nbytes=nbytes,
        samples=samples,
        gb_per_s=middle(rates),
        gb_per_s_min=min(rates),
        gb_per_s_max=max(rates),
    )


def latency_row(
    part: Literal["cores", "process", "gpu"], way: str, ends: tuple[str, str], samples: list[LatencySample]
) -> LatencyRow:
    """Sum up one way between two `ends` over the repeats."""
    p50s = [sample["p50_us"] for sample in samples]
    return LatencyRow(
        part=part,
        way=way,
        source=ends[0],
        target=ends[1],
        samples=samples,
        p50_us=middle(p50s),
        p50_us_min=min(p50s),
        p50_us_max=max(p50s),
        p99_us=middle([sample["p99_us"] for sample in samples]),
    )


def table_lines(result: LinksResult) -> Iterator[str]:
    """Give the report, line by line: matrices of medians, from below their least and most."""
    machine = result["machine"]
    yield f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, load {machine['load_1min']} before"
    yield from (f"GPU {at}: {name}" for at, name in enumerate(result["gpus"]))
    yield from result["notes"]
    for part, title in (
        ("memory", "Memory to memory, one process"),
        ("process", "Between two processes"),
        ("gpu", "GPUs"),
    ):
        rows = [row for row in result["copies"] if row["part"] == part]
        for way in dict.fromkeys(row["way"] for row in rows):
            for direction, said in (("uni", "one way"), ("bi", "both ways at once, summed")):
                chosen = [row for row in rows if (row["way"], row["direction"]) == (way, direction)]
                if chosen:
                    yield ""
                    yield f"{title}: {way}, {said}, GB/s (least to most)"
                    yield from _matrix([_copy_cell(row) for row in chosen])
    for part, title in (("cores", "Core to core"), ("process", "Between two processes"), ("gpu", "GPUs")):
        times = [row for row in result["latencies"] if row["part"] == part]
        for way in dict.fromkeys(row["way"] for row in times):
            yield ""
            yield f"{title}: {way}, there and back, us (least to most)"
            yield from _matrix([_latency_cell(row) for row in times if row["way"] == way])
    if result["peers"]:
        yield ""
        yield "GPUs: who reaches whose memory"
        yield from _matrix(
            [
                (f"GPU {at}", f"GPU {to}", "yes" if reaches else "no")
                for at, row in enumerate(result["peers"])
                for to, reaches in enumerate(row)
            ]
        )
    yield ""
    yield f"Verified: {result['verified_bytes'] / 1e9:.2f} GB compared in full, 0 wrong."


def _copy_cell(row: CopyRow) -> tuple[str, str, str]:
    return (
        row["source"],
        row["target"],
        f"{row['gb_per_s']:.2f} ({row['gb_per_s_min']:.2f} to {row['gb_per_s_max']:.2f})",
    )


def _latency_cell(row: LatencyRow) -> tuple[str, str, str]:
    return row["source"], row["target"], f"{row['p50_us']:.1f} ({row['p50_us_min']:.1f} to {row['p50_us_max']:.1f})"


def _matrix(cells: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Lay cells of (row, column, text) out as a matrix; a pair that is not there is a dash."""
    names = list(dict.fromkeys([source for source, _, _ in cells] + [target for _, target, _ in cells]))
    sources = [name for name in names if any(name == source for source, _, _ in cells)]
    targets = [name for name in names if any(name == target for _, target, _ in cells)]
    texts = {(source, target): text for source, target, text in cells}
    first = max(len(source) for source in [*sources, _CORNER])
    widths = [max(len(target), *(len(texts.get((source, target), "-")) for source in sources)) for target in targets]
    yield f"  {_CORNER:<{first}}  " + "  ".join(
        target.rjust(width) for target, width in zip(targets, widths, strict=True)
    )
    for source in sources:
        yield f"  {source:<{first}}  " + "  ".join(
            texts.get((source, target), "-").rjust(width) for target, width in zip(targets, widths, strict=True)
        )
