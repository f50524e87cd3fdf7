"""Rows of a `kvredis bench disk` result, as a test needs them: figures of 1 and the ratios that it names."""

from __future__ import annotations

from kvredis.bench.core.result import Row
from kvredis.bench.disk.rates import Mode, Op
from kvredis.bench.disk.run import SCHEMA, DiskResult


def rate(op: Op, *, device: float | None, loop: float | None = 1.0, mode: Mode = "direct", arm: str = "tier") -> Row:
    about = {"arm": arm, "mode": mode, "op": op, "threads": 4, "block_bytes": 2 * 1024**2}
    return Row(**about, gb_per_s=1.0, cpu_s_per_gb=0.25, ratio_to_device=device, ratio_to_loop=loop)


def get(spilled: float | None, net: float | None = 1.0, prefetched: float | None = 1.0) -> Row:
    ratios = {"ratio_spilled": spilled, "ratio_spilled_net": net, "ratio_prefetched": prefetched}
    figures = [
        "pread_ms",
        "spilled_ms",
        "resident_ms",
        "prefetched_ms",
        "spilled_cpu_s_per_gb",
        "resident_cpu_s_per_gb",
    ]
    return Row(transport="unix", size_bytes=2 * 1024**2, samples=[]) | dict.fromkeys(figures, 1.0) | ratios


def ping(server: str, ratio_p99: float | None) -> Row:
    figures = [f"{when}_{what}_ms" for when in ("quiet", "busy") for what in ("p50", "p99", "max")]
    ratios = {"ratio_p99": ratio_p99, "ratio_busy_p99": 1.0, "ratio_set": 0.5, "set_gb_per_s": 1.0}
    kept = {"counters": {"spilled": 3, "spill_dropped": 2}, "missing": 2, "server_cpu_s_per_gb": 1.0}
    return Row(server=server, transport="tcp", samples=[]) | dict.fromkeys(figures, 1.0) | ratios | kept


def result(
    *, rates: list[Row] | None = None, gets: list[Row] | None = None, pings: list[Row] | None = None
) -> DiskResult:
    return DiskResult(
        schema=SCHEMA,
        machine={"cpu": "a CPU", "cores": 2, "memory_bytes": 1024**3, "kernel": "6", "load_1min": "0.10"},
        options={"directory": "/somewhere"},
        device="fio-3.33",
        memory="memfd-4KiB",
        notes=["direct: skipped, for a reason"],
        rates=rates or [],
        gets=gets or [],
        pings=pings or [],
        verified_bytes=10**9,
        gate=[],
        seconds=1.0,
    )
