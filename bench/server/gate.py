"""The lines that kvredis has to keep against Redis and memcached, as data, and their evaluation over a result.

Server CPU is judged where client and server share one CPU, since that figure repeats; throughput where they do not,
since that is what a user sees. Every arm (transport, connections) is judged by itself, where it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvredis.bench.core.servers import SUBJECT
from kvredis.bench.core.statistics import by_repeat, counted, paired_ratio, size_text

from .result import BenchResult, GateJson, LookupRow, SmallRow, TransferRow

KIB, MIB = 1024, 1024**2
_MIDDLE = (576 * KIB, 2 * MIB)
_LARGE = (32 * MIB, 32 * MIB)
_OP_NAMES = {"SET": "SET", "GET": "GET", "GETP": "pipelined GET"}


@dataclass(frozen=True, slots=True)
class TransferBound:
    """One line: in sizes from `sizes[0]` to `sizes[1]`, the ratio to Redis is at most (CPU) or at least (rate) this."""

    op: str
    sizes: tuple[int, int]
    ratio: float


CPU_MOST = (
    TransferBound("SET", _MIDDLE, 1.05),
    TransferBound("SET", _LARGE, 0.5),
    TransferBound("GET", _MIDDLE, 0.95),
    TransferBound("GET", _LARGE, 0.25),
    TransferBound("GETP", (896 * KIB, 32 * MIB), 0.35),
)
RATE_LEAST = (
    TransferBound("SET", (64 * KIB, 64 * KIB), 0.85),
    TransferBound("GET", (64 * KIB, 64 * KIB), 0.85),
    TransferBound("GETP", (64 * KIB, 64 * KIB), 0.85),
    TransferBound("SET", _MIDDLE, 0.95),
    TransferBound("SET", _LARGE, 2.0),
    TransferBound("GET", _MIDDLE, 1.1),
    TransferBound("GET", _LARGE, 3.0),
    TransferBound("GETP", (576 * KIB, 576 * KIB), 1.4),
    TransferBound("GETP", (896 * KIB, 32 * MIB), 3.0),
)
BEST_LEAST = 1.15
"""SET and GET of BEST_BYTES or more, on one CPU or on all, against whichever of PEERS is faster there."""
BEST_BYTES = 576 * KIB
PEERS = ("redis", "memcached")
SMALL_LEAST = {1: 0.85, 16: 0.4}  # requests in flight -> rps ratio
PING_P99_MOST = 0.2
LOOKUP_TIME_MOST = 1.2  # to EXISTS of redis


@dataclass(frozen=True, slots=True)
class GateRow:
    """One judgement. `measured` is the median paired ratio to Redis; None (and not passed) when Redis did not run."""

    name: str
    bound: str
    measured: float | None
    passed: bool

    def json(self) -> GateJson:
        return GateJson(name=self.name, bound=self.bound, measured=self.measured, passed=self.passed)


def gate(result: BenchResult) -> list[GateRow]:
    """Judge every line that `result` has a measurement of kvredis for."""
    return [*_cpu(result), *_rate(result), *_best(result), *_small(result), *_pings(result), *_lookups(result)]


def _cpu(result: BenchResult) -> Iterator[GateRow]:
    for row in result["transfers"]:
        if row["server"] == SUBJECT and row["pinned"]:
            for bound in CPU_MOST:
                if _covers(bound, row):
                    yield _at_most(f"server CPU/GB  {transfer_name(row)}", bound.ratio, row["ratio_server_cpu"])


def _rate(result: BenchResult) -> Iterator[GateRow]:
    for row in result["transfers"]:
        if row["server"] == SUBJECT and not row["pinned"]:
            for bound in RATE_LEAST:
                if _covers(bound, row):
                    yield _at_least(f"throughput     {transfer_name(row)}", bound.ratio, row["ratio_gb_per_s"])


def _best(result: BenchResult) -> Iterator[GateRow]:
    """Hold kvredis against the best of its peers in the same arm, if both of them ran."""
    cells: dict[tuple[object, ...], dict[str, TransferRow]] = {}
    for row in result["transfers"]:
        cell = (row["transport"], row["connections"], row["pinned"], row["size_bytes"], row["op"])
        cells.setdefault(cell, {})[row["server"]] = row
    for rows in cells.values():
        if not {SUBJECT, *PEERS} <= rows.keys():
            continue
        ours, best = rows[SUBJECT], max((rows[name] for name in PEERS), key=lambda row: row["gb_per_s"])
        if ours["op"] in ("SET", "GET") and ours["size_bytes"] >= BEST_BYTES:
            rate = (by_repeat(row["samples"], "gb_per_s") for row in (ours, best))
            where = "one CPU" if ours["pinned"] else "all CPUs"
            yield _at_least(f"to the best    {transfer_name(ours)}, {where}", BEST_LEAST, paired_ratio(*rate))


def _small(result: BenchResult) -> Iterator[GateRow]:
    for row in result["small"]:
        least = SMALL_LEAST.get(row["pipeline"])
        if row["server"] == SUBJECT and least is not None:
            yield _at_least(f"small ops      {small_name(row)}", least, row["ratio_rps"])


def _pings(result: BenchResult) -> Iterator[GateRow]:
    for row in result["head_of_line"]:
        if row["server"] == SUBJECT:
            yield _at_most(f"PING p99       beside 32 MiB {row['background']}", PING_P99_MOST, row["ratio_p99"])


def _lookups(result: BenchResult) -> Iterator[GateRow]:
    for row in result["lookup"]:
        if row["server"] == SUBJECT:
            yield _at_most(f"time per call  {lookup_name(row)}", LOOKUP_TIME_MOST, row["ratio_p50"])


def _covers(bound: TransferBound, row: TransferRow) -> bool:
    return bound.op == row["op"] and bound.sizes[0] <= row["size_bytes"] <= bound.sizes[1]


def transfer_name(row: TransferRow) -> str:
    """Name what a row of transfers measured, but for the pinning."""
    where = f"{row['transport']} x{row['connections']}"
    return f"{where}, {size_text(row['size_bytes'])}, {_OP_NAMES.get(row['op'], row['op'])}"


def small_name(row: SmallRow) -> str:
    """Name what a row of small operations measured."""
    return f"{row['op']}, {counted(row['clients'], 'client')}, {row['pipeline']} in flight"


def lookup_name(row: LookupRow) -> str:
    """Name what a row of lookups measured."""
    return f"{row['transport']}, {row['op']} of {row['keys']} keys of {row['key_bytes']} B"


def _at_most(name: str, bound: float, measured: float | None) -> GateRow:
    return GateRow(name, f"<= {bound:.2f}x", measured, measured is not None and measured <= bound)


def _at_least(name: str, bound: float, measured: float | None) -> GateRow:
    return GateRow(name, f">= {bound:.2f}x", measured, measured is not None and measured >= bound)
