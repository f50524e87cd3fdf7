"""Is kvredis as fast as the commit before it? Every row that both took part in is judged, by name and figure.

The gate says what kvredis keeps against Redis and leaves room, in which a change that costs ten percent hides. Here
nothing may be lost. One repeat on a noisy machine proves nothing, so a row is judged by the median of the ratios of
what ran side by side; a row that falls short by little deserves a second run before it is believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .gate import lookup_name, small_name, transfer_name
from .result import BenchResult, HeldJson

RATE_LEAST = 0.95
CPU_MOST = 1.05  # so too the time of a call and the p99 of a PING


@dataclass(frozen=True, slots=True)
class HeldRow:
    """One row of kvredis. `ratios` to the commit before by name: rate, CPU, time, p99; None where none was formed."""

    name: str
    ratios: dict[str, float | None]

    @property
    def worse(self) -> list[str]:
        """Name the ratios that are worse than the bounds; one that could not be formed does not pass."""
        return [name for name, ratio in self.ratios.items() if ratio is None or not _holds(name, ratio)]

    @property
    def passed(self) -> bool:
        return not self.worse

    def json(self) -> HeldJson:
        return HeldJson(name=self.name, ratios=self.ratios, worse=self.worse, passed=self.passed)


def held(result: BenchResult) -> list[HeldRow]:
    """Judge every row that has a ratio to the commit before: none when it did not take part."""
    return [*_transfers(result), *_small(result), *_pings(result), *_lookups(result)]


def _holds(name: str, ratio: float) -> bool:
    return ratio >= RATE_LEAST if name == "rate" else ratio <= CPU_MOST


def _transfers(result: BenchResult) -> Iterator[HeldRow]:
    for row in result["transfers"]:
        if "ratio_gb_per_s_to_before" in row:
            where = "one CPU" if row["pinned"] else "all CPUs"
            ratios = {"rate": row["ratio_gb_per_s_to_before"], "CPU": row.get("ratio_server_cpu_to_before")}
            yield HeldRow(f"{transfer_name(row)}, {where}", ratios)


def _small(result: BenchResult) -> Iterator[HeldRow]:
    for row in result["small"]:
        if "ratio_rps_to_before" in row:
            ratios = {"rate": row["ratio_rps_to_before"], "CPU": row.get("ratio_server_cpu_to_before")}
            yield HeldRow(f"small {small_name(row)}", ratios)


def _pings(result: BenchResult) -> Iterator[HeldRow]:
    for row in result["head_of_line"]:
        if "ratio_p99_to_before" in row:
            yield HeldRow(f"PING beside 32 MiB {row['background']}", {"p99": row["ratio_p99_to_before"]})


def _lookups(result: BenchResult) -> Iterator[HeldRow]:
    for row in result["lookup"]:
        if "ratio_p50_to_before" in row:
            ratios = {"time": row["ratio_p50_to_before"], "CPU": row.get("ratio_server_cpu_to_before")}
            yield HeldRow(lookup_name(row), ratios)
