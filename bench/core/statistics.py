"""The arithmetic of a comparison: percentiles, medians and ratios that pair what ran next to each other.

WHY paired: throughput on a shared machine moves by up to 2x within minutes, for every server alike. A ratio of two
figures taken side by side in one repeat is free of most of that; the median of those ratios is what is reported.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeVar, cast

GB = 1e9  # bytes
MIB = 1024**2

_T = TypeVar("_T")


def percentile(values: Sequence[float], percent: float) -> float:
    """Give the smallest of `values` that at least `percent` % of them do not exceed (nearest rank); 0.0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)  # ceiling
    return ordered[max(0, int(rank) - 1)]


def middle(values: Sequence[float]) -> float:
    """Give the median, 0.0 of nothing."""
    return median(values) if values else 0.0


def paired_ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Divide what has the same repeat number, by repeat; a repeat that either side lacks is left out."""
    return [ours[repeat] / theirs[repeat] for repeat in sorted(ours) if theirs.get(repeat)]


def paired_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Give the median of the paired ratios, None when no repeat has both sides."""
    ratios = paired_ratios(ours, theirs)
    return median(ratios) if ratios else None


def by_repeat(samples: Sequence[Mapping[str, object]], figure: str) -> dict[int, float]:
    """Give one figure of each sample under its repeat number."""
    return {cast(int, sample["repeat"]): cast(float, sample[figure]) for sample in samples}


def rotated(items: Sequence[_T], turns: int) -> list[_T]:
    """Give `items` beginning at place `turns`: over as many turns as there are items, each is first once. Every other
    turn goes backwards from there, since one may be the worse for what came right before it."""
    if not items:
        return []
    start, step = turns % len(items), -1 if turns % 2 else 1
    return [items[(start + step * place) % len(items)] for place in range(len(items))]


def counted(count: int, noun: str) -> str:
    """Write a count with its noun: 1 client, 50 clients."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(nbytes: int) -> str:
    """Write a size as 64 KiB, 2 MiB or 100 B."""
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes} B"
