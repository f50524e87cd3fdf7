"""Rows of a `kvredis bench disk` result, as a test needs them: figures of 1 and the ratios that it names."""

from __future__ import annotations

from kvredis.bench.core.result import Row
from kvredis.bench.disk.rates import Mode, Op
from kvredis.bench.disk.run import SCHEMA, DiskResult


def rate(op: Op, *, device: float | None, loop: float | None = 1.0, mode: Mode = "direct", arm: str = "tier") -> Row:
    return Row(
        arm=arm,
        mode=mode,
        op=op,
        threads=4,
        block_bytes=2 * 1024**2,
        samples=[],
        gb_per_s=1.0,
        cpu_s_per_gb=0.25,
        ratio_to_device=device,
        ratio_to_loop=loop,
    )


def get(spilled: float | None, net: float | None = 1.0, prefetched: float | None = 1.0) -> Row:
    return Row(
        transport="unix",
        size_bytes=2 * 1024**2,
        mode="direct",
        samples=[],
        pread_ms=1.0,
        spilled_ms=1.0,
        resident_ms=1.0,
        prefetched_ms=1.0,
        spilled_cpu_s_per_gb=1.0,
        resident_cpu_s_per_gb=1.0,
        ratio_spilled=spilled,
        ratio_spilled_net=net,
        ratio_prefetched=prefetched,
    )


def ping(server: str, ratio_p99: float | None) -> Row:
    return Row(
        server=server,
        transport="tcp",
        samples=[],
        quiet_p50_ms=1.0,
        quiet_p99_ms=1.0,
        quiet_max_ms=1.0,
        busy_p50_ms=1.0,
        busy_p99_ms=1.0,
        busy_max_ms=1.0,
        set_gb_per_s=1.0,
        server_cpu_s_per_gb=1.0,
        counters={"spilled": 3, "spill_dropped": 2},
        missing=2,
        ratio_p99=ratio_p99,
        ratio_busy_p99=1.0,
        ratio_set=0.5,
    )


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
