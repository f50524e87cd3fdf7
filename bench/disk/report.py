"""The result of `kvredis bench disk` as text: everything that is printed is in the JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvredis.bench.core.statistics import size_text
from kvredis.bench.server.gate import GateRow

from .result import DiskResult

_KEPT = ("spilled", "spill_dropped", "spill_failed", "spill_waits", "lost")


def table_lines(result: DiskResult) -> Iterator[str]:
    """Give the report, line by line, without the gate."""
    machine = result["machine"]
    memory_gib = int(machine["memory_bytes"]) / 1024**3
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {memory_gib:.0f} GiB, Linux {machine['kernel']},"
        f" load {machine['load_1min']} before"
    )
    yield f"Directory {result['options']['directory']}"
    yield from result["notes"]
    yield from _rates(result)
    yield from _gets(result)
    yield from _pings(result)
    yield ""
    yield f"Verified: {result['verified_bytes'] / 1e9:.2f} GB compared in full, 0 wrong."


def gate_lines(rows: Sequence[GateRow]) -> Iterator[str]:
    """Give the verdicts, line by line; nothing when there is nothing to judge."""
    if not rows:
        return
    yield ""
    yield "Gate (medians of paired ratios)"
    for row in rows:
        measured = "none" if row.measured is None else f"{row.measured:.2f}x"
        yield f"  {'held' if row.passed else 'MISSED':<6}  {row.name:<64} {row.bound:>9} {measured:>8}"
    yield f"  {sum(row.passed for row in rows)} of {len(rows)} lines hold."


def _rates(result: DiskResult) -> Iterator[str]:
    heading = None
    if result["rates"]:
        yield f"The device by {result['device']}; blocks of loop and tier on {result['memory']} pages"
    if "t0" in result:
        yield f"T0: {result['t0']}, the same blocks on the same pages in the same repeat; x T0 is time, less is better"
    for row in result["rates"]:
        if heading != (row["mode"], row["op"]):
            heading = (row["mode"], row["op"])
            yield ""
            yield f"{row['op']}, {row['mode']}, blocks of {size_text(row['block_bytes'])}"
            yield (
                f"  {'threads':>7} {'arm':<7} {'GB/s':>6} {'CPU s/GB':>9} {'x device':>9} {'x loop':>7}"
                f" {'x T0':>7} {'p50 ms':>8} {'p99 ms':>8}"
            )
        yield (
            f"  {row['threads']:>7} {row['arm']:<7} {row['gb_per_s']:6.2f} {row['cpu_s_per_gb']:9.3f}"
            f" {_ratio(row['ratio_to_device']):>9} {_ratio(row['ratio_to_loop']):>7}"
            f" {_ratio(row.get('ratio_to_t0')):>7} {_ms(row.get('p50_ms')):>8} {_ms(row.get('p99_ms')):>8}"
        )


def _gets(result: DiskResult) -> Iterator[str]:
    if result["gets"]:
        yield ""
        yield "GET of a block, one client, one in flight (ms; net: less the GET from memory; fetched: by PREFETCH)"
        yield (
            f"  {'where':<5} {'value':>7} {'preadv':>8} {'of disk':>8} {'of memory':>9} {'fetched':>8}"
            f" {'disk/preadv':>11} {'net/preadv':>10} {'fetched/memory':>14} {'CPU s/GB: disk':>14} {'memory':>7}"
        )
    for row in result["gets"]:
        yield (
            f"  {row['transport']:<5} {size_text(row['size_bytes']):>7} {row['pread_ms']:8.3f} {row['spilled_ms']:8.3f}"
            f" {row['resident_ms']:9.3f} {row['prefetched_ms']:8.3f} {_ratio(row['ratio_spilled']):>11}"
            f" {_ratio(row['ratio_spilled_net']):>10} {_ratio(row['ratio_prefetched']):>14}"
            f" {row['spilled_cpu_s_per_gb']:14.3f} {row['resident_cpu_s_per_gb']:7.3f}"
        )
        skipped = sum(sample["skipped"] for sample in row["samples"])
        if skipped:
            yield f"  {'':<5} {skipped} blocks were not on disk when they were asked for, and do not count"


def _pings(result: DiskResult) -> Iterator[str]:
    if result["pings"]:
        yield ""
        yield "PING every ms, alone (quiet) and beside a process that SETs 2 MiB flat out (busy), in ms"
        yield (
            f"  {'where':<5} {'server':<7} {'quiet p50':>9} {'p99':>7} {'max':>7} {'busy p50':>9} {'p99':>7} {'max':>7}"
            f" {'p99 ratio':>9} {'x memory':>8} {'SET GB/s':>8} {'x memory':>8} {'CPU s/GB':>8}"
        )
    for row in result["pings"]:
        yield (
            f"  {row['transport']:<5} {row['server']:<7} {row['quiet_p50_ms']:9.3f} {row['quiet_p99_ms']:7.3f}"
            f" {row['quiet_max_ms']:7.2f} {row['busy_p50_ms']:9.3f} {row['busy_p99_ms']:7.3f} {row['busy_max_ms']:7.2f}"
            f" {_ratio(row['ratio_p99']):>9} {_ratio(row['ratio_busy_p99']):>8} {row['set_gb_per_s']:8.2f}"
            f" {_ratio(row['ratio_set']):>8} {row['server_cpu_s_per_gb']:8.3f}"
        )
        if any(row["counters"].get(name) for name in _KEPT):
            counted = ", ".join(f"{name} {row['counters'].get(name, 0)}" for name in _KEPT)
            yield f"  {'':<5} {'':<7} while busy: {counted}; {row['missing']} values gone by the end"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
