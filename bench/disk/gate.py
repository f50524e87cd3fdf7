"""The lines that the disk tier has to keep, as data, and their evaluation over a result.

Each says what it compares. Rates are judged at the same number of threads and in the same mode, cold: against the
device as fio or dd sees it, and against a plain loop, which has the tier's own memory and so sees more of some devices.
A warm read touches no device, so it is shown and not judged. A GET crosses a socket, which a preadv does not: the line
of the issue is judged as it stands, and a second one leaves the socket out by taking off what the same GET takes from
memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvredis.bench.core.statistics import counted, size_text
from kvredis.bench.server.gate import GateRow

from .result import TIER, WITH_DISK, DiskResult

RATE_LEAST = 0.85
GET_MOST = 1.3
PREFETCHED_MOST = 1.1
PING_P99_MOST = 2.0
_NAMES = {"write": "spill", "read": "promote"}


def disk_gate(result: DiskResult) -> list[GateRow]:
    """Judge every line that `result` has a measurement for."""
    return [*_rates(result), *_gets(result), *_pings(result)]


def _rates(result: DiskResult) -> Iterator[GateRow]:
    for row in result["rates"]:
        if row["arm"] == TIER and row["op"] in _NAMES:
            what = f"{_NAMES[row['op']]}, {row['mode']}, {counted(row['threads'], 'thread')}"
            if row["ratio_to_device"] is not None:
                tool = result["device"].partition(" ")[0]
                yield _judged(f"{what}: rate / {tool}", row["ratio_to_device"], least=RATE_LEAST)
            yield _judged(f"{what}: rate / a plain loop", row["ratio_to_loop"], least=RATE_LEAST)


def _gets(result: DiskResult) -> Iterator[GateRow]:
    for row in result["gets"]:
        what = f"GET {size_text(row['size_bytes'])}, {row['transport']}"
        yield _judged(f"{what}: from disk / preadv", row["ratio_spilled"], most=GET_MOST)
        yield _judged(f"{what}: (from disk - from memory) / preadv", row["ratio_spilled_net"], most=GET_MOST)
        yield _judged(f"{what}: after PREFETCH / from memory", row["ratio_prefetched"], most=PREFETCHED_MOST)


def _pings(result: DiskResult) -> Iterator[GateRow]:
    for row in result["pings"]:
        if row["server"] == WITH_DISK:
            what = f"PING p99, {row['transport']}"
            yield _judged(f"{what}: spilling flat out / quiet", row["ratio_p99"], most=PING_P99_MOST)


def _judged(name: str, measured: float | None, *, least: float | None = None, most: float | None = None) -> GateRow:
    """A figure that could not be formed does not pass."""
    if least is not None:
        return GateRow(name, f">= {least:.2f}x", measured, measured is not None and measured >= least)
    assert most is not None
    return GateRow(name, f"<= {most:.2f}x", measured, measured is not None and measured <= most)
