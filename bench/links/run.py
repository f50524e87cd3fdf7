"""`kvredis bench links` as a whole: what copies between any two places of this machine, and how long a token takes.

Parts: memory (memory.py), processes (process.py, with peer.py as the other one) and gpus
(gpu.py), which a machine without any says it has not.

A picture of `kvredis bench links`: each link beside a plain copy, one way and both.

Copies in memory are held against the plain copy of the same repeat; the other parts run after all of these, so that
nothing pairs them with it, and are held against its median.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from kvredis.bench.core.plot import Bar, BarPanel, Captions, bars
from kvredis.bench.core.result import Progress, Result, Row, machine_lines, new_result, verified_line
from kvredis.bench.core.statistics import MIB, by_repeat, middle, paired_ratios
from kvredis.bench.links import gpu

from .memory import BASE, run_memory
from .process import COPY_WAYS, peer_of, run_copies, run_tokens

SCHEMA: Final = "kvredis.bench.links/1"
_CORNER: Final = "from, to"


class LinksResult(Result):
    gpus: list[str]
    peers: list[list[bool]]
    copies: list[Row]
    latencies: list[Row]


def table_lines(result: LinksResult) -> Iterator[str]:
    """Give the report, line by line: matrices of medians, from below their least and most."""
    yield from machine_lines(result["machine"])
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
    yield verified_line(result)


def _copy_cell(row: Row) -> tuple[str, str, str]:
    return (
        row["source"],
        row["target"],
        f"{row['gb_per_s']:.2f} ({row['gb_per_s_min']:.2f} to {row['gb_per_s_max']:.2f})",
    )


def _latency_cell(row: Row) -> tuple[str, str, str]:
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


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw every link as a multiple of a plain copy; BenchError when there is nothing."""
    result = cast(LinksResult, raw)
    base = next(
        (by_repeat(row["samples"], "gb_per_s") for row in result["copies"] if row["source"] == row["target"] == BASE),
        {},
    )
    panels = []
    for part, title in (("memory", "memory to memory"), ("process", "between processes"), ("gpu", "GPUs")):
        rows = [row for row in result["copies"] if row["part"] == part]
        names = list(dict.fromkeys((row["way"], row["source"], row["target"]) for row in rows))
        series: dict[str, list[Bar | None]] = {}
        for direction, said in (("uni", "one way"), ("bi", "both ways, summed")):
            found = {(row["way"], row["source"], row["target"]): row for row in rows if row["direction"] == direction}
            series[said] = [_bar(found[name], base) if name in found else None for name in names]
        if names:
            panels.append(BarPanel(title, [_told(*name) for name in names], series))
    machine = result["machine"]
    captions = Captions(
        "What copies between two places",
        "times a plain copy" if base else "GB/s",
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}. Plain copy: one thread, {BASE} memory",
    )
    bars(panels, captions, path)


def _bar(row: Row, base: dict[int, float]) -> Bar | None:
    if row["part"] != "memory":
        plain = middle([*base.values()]) or 1.0  # GB/s as they are when the memory part was left out
        return Bar(row["gb_per_s"] / plain, row["gb_per_s_min"] / plain, row["gb_per_s_max"] / plain)
    ratios = paired_ratios(by_repeat(row["samples"], "gb_per_s"), base)
    return Bar(middle(ratios), min(ratios), max(ratios)) if ratios else None


def _told(way: str, source: str, target: str) -> str:
    return f"{source} to {target}" if way == "memmove" else f"{way}: {source} to {target}"


PARTS = ("memory", "processes", "gpus")
_PLACES_MOST = 5


@dataclass(frozen=True, slots=True)
class LinksPlan:
    """How much is moved: `nbytes` one way in each repeat of each link, and `rounds` of each token."""

    parts: Sequence[str] = PARTS
    repeats: int = 5
    nbytes: int = 256 * MIB
    rounds: int = 2000

    def steps(self) -> int:
        """Give how often `run` calls its progress at most."""
        steps = self.repeats * _PLACES_MOST if "memory" in self.parts else 0
        steps += self.repeats * (len(COPY_WAYS) + 1) if "processes" in self.parts else 0
        gpus = "gpus" in self.parts and gpu.obstacle() is None
        return steps + (gpu.steps(self.repeats) if gpus else 0)


QUICK = LinksPlan(repeats=3, nbytes=64 * MIB, rounds=300)


def run(plan: LinksPlan, progress: Progress) -> LinksResult:
    """Measure all of `plan`. Raises KVRedisError, VerificationError at a wrong byte; no process is left behind."""
    start_s = time.monotonic()
    options = {**asdict(plan), "parts": list(plan.parts)}
    result = LinksResult(**new_result(SCHEMA, options), gpus=[], peers=[], copies=[], latencies=[])
    if "memory" in plan.parts:
        result["copies"] += run_memory(plan.nbytes, plan.repeats, progress, result["notes"])
    if "processes" in plan.parts:
        with peer_of(plan.nbytes) as peer:
            result["copies"] += run_copies(peer, plan.repeats, progress)
            result["latencies"] += run_tokens(peer, plan.repeats, plan.rounds, progress)
    if "gpus" in plan.parts:
        _gpus(plan, progress, result)
    result["verified_bytes"] = sum(sample["verified_bytes"] for row in result["copies"] for sample in row["samples"])
    result["seconds"] = time.monotonic() - start_s
    return result


def _gpus(plan: LinksPlan, progress: Progress, result: LinksResult) -> None:
    obstacle = gpu.obstacle()
    if obstacle is not None:
        result["notes"].append(obstacle)
        return
    found = gpu.run_gpus(plan.nbytes, plan.repeats, plan.rounds, progress)
    result["gpus"], result["peers"] = found.names, found.peers
    result["copies"] += found.copies
    result["latencies"] += found.latencies
