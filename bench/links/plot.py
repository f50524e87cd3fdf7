"""A picture of `kvredis bench links`: each link beside a plain copy, one way and both.

Copies in memory are held against the plain copy of the same repeat; the other parts run after all of these, so that
nothing pairs them with it, and are held against its median.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from kvredis.bench.core.plot import Bar, BarPanel, Captions, bars
from kvredis.bench.core.statistics import by_repeat, middle, paired_ratios

from .result import BASE, CopyRow, LinksResult


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


def _bar(row: CopyRow, base: dict[int, float]) -> Bar | None:
    if row["part"] != "memory":
        plain = middle([*base.values()]) or 1.0  # GB/s as they are when the memory part was left out
        return Bar(row["gb_per_s"] / plain, row["gb_per_s_min"] / plain, row["gb_per_s_max"] / plain)
    ratios = paired_ratios(by_repeat(row["samples"], "gb_per_s"), base)
    return Bar(middle(ratios), min(ratios), max(ratios)) if ratios else None


def _told(way: str, source: str, target: str) -> str:
    return f"{source} to {target}" if way == "memmove" else f"{way}: {source} to {target}"
