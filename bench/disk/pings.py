"""Does spilling stall other clients? A PING every millisecond, alone and beside a process that SETs flat out.

The same load goes to a kvredis without a disk, where what must leave is dropped: what both have in common is the price
of taking in so many bytes, and only the rest is that of spilling. Latency is counted from the moment a PING is sent;
while one is late the next ones are late too and are not counted for the wait, which flatters a slow server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvredis.backends.resp.connection import Connection
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import Progress
from kvredis.bench.core.servers import ServerProcess, Transport, child_environment, info_lines
from kvredis.bench.core.statistics import GB, MIB, by_repeat, middle, paired_ratio, percentile, rotated
from kvredis.bench.server.head_of_line import pings

from .result import WITHOUT_DISK, PingRow, PingSample

_MOVER_WAIT_S: Final = 120.0
_CALM_WAIT_S: Final = 30.0
_COUNTED: Final = ("spilled", "spilled_bytes", "spill_dropped", "spill_failed", "spill_waits", "lost", "unloaded")


@dataclass(frozen=True, slots=True)
class PingPlan:
    """The load, and how long it lasts. `keys` of `size_bytes` are more than the arena holds and less than the disk."""

    keys: int
    repeats: int = 5
    size_bytes: int = 2 * MIB
    run_s: float = 2.0

    def steps(self) -> int:
        """Give how often `run_pings` calls its progress."""
        return self.repeats


def run_pings(
    plan: PingPlan, servers: Sequence[ServerProcess], transport: Transport, progress: Progress
) -> list[PingRow]:
    """Measure every server in turn, in rotating order; one row each."""
    samples: dict[str, list[PingSample]] = {server.name: [] for server in servers}
    for repeat in range(plan.repeats):
        progress(f"PING beside SETs flat out, {transport}")
        for server in rotated(servers, repeat):
            samples[server.name].append(_measure(plan, server, repeat))
    return summarize(transport, samples)


def _measure(plan: PingPlan, server: ServerProcess, repeat: int) -> PingSample:
    _calm(server)
    quiet_s = pings(server, plan.run_s)
    command = ["-m", "kvredis.bench.disk.background_load", str(server.address), str(plan.size_bytes), str(plan.keys)]
    mover = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(os.environ),
    )
    try:
        assert mover.stdin is not None
        assert mover.stdout is not None
        if mover.stdout.readline().strip() != "ready":
            raise BenchError(f"the mover did not start: {mover.communicate(timeout=_MOVER_WAIT_S)[1].strip()}")
        counted, cpu_s = _counters(server), server.cpu_s()
        busy_s = pings(server, plan.run_s)
        mover.stdin.close()
        mover.stdout.readline()  # stopped, or the end of its output
        cpu_s = server.cpu_s() - cpu_s
        after = _counters(server)
        mover.stdin = None  # or communicate would flush what is closed
        output, complaint = mover.communicate(timeout=_MOVER_WAIT_S)
    except BaseException:
        mover.kill()
        mover.communicate()
        raise
    if mover.returncode:
        raise BenchError(f"the mover failed: {complaint.strip()}")
    moved: dict[str, Any] = json.loads(output)
    return PingSample(
        repeat=repeat,
        quiet_p50_ms=percentile(quiet_s, 50) * 1e3,
        quiet_p99_ms=percentile(quiet_s, 99) * 1e3,
        quiet_max_ms=max(quiet_s) * 1e3,
        busy_p50_ms=percentile(busy_s, 50) * 1e3,
        busy_p99_ms=percentile(busy_s, 99) * 1e3,
        busy_max_ms=max(busy_s) * 1e3,
        set_gb_per_s=moved["bytes"] / moved["seconds"] / GB,
        server_cpu_s_per_gb=cpu_s * GB / max(1, moved["bytes"]),
        counters={name: after[name] - counted.get(name, 0) for name in after},
        missing=moved["missing"],
        verified_bytes=moved["verified_bytes"],
    )


def summarize(transport: str, samples: dict[str, list[PingSample]]) -> list[PingRow]:
    """Sum up over the repeats; one row per server."""
    base = samples.get(WITHOUT_DISK, [])
    rows = []
    for server, own in samples.items():
        rate, busy = by_repeat(own, "set_gb_per_s"), by_repeat(own, "busy_p99_ms")
        totals = {name: sum(sample["counters"].get(name, 0) for sample in own) for name in _COUNTED}
        rows.append(
            PingRow(
                server=server,
                transport=transport,
                samples=own,
                quiet_p50_ms=middle([sample["quiet_p50_ms"] for sample in own]),
                quiet_p99_ms=middle([sample["quiet_p99_ms"] for sample in own]),
                quiet_max_ms=middle([sample["quiet_max_ms"] for sample in own]),
                busy_p50_ms=middle([sample["busy_p50_ms"] for sample in own]),
                busy_p99_ms=middle([sample["busy_p99_ms"] for sample in own]),
                busy_max_ms=middle([sample["busy_max_ms"] for sample in own]),
                set_gb_per_s=middle(list(rate.values())),
                server_cpu_s_per_gb=middle([sample["server_cpu_s_per_gb"] for sample in own]),
                counters=totals,
                missing=sum(sample["missing"] for sample in own),
                ratio_p99=paired_ratio(busy, by_repeat(own, "quiet_p99_ms")),
                ratio_busy_p99=paired_ratio(busy, by_repeat(base, "busy_p99_ms")),
                ratio_set=paired_ratio(rate, by_repeat(base, "set_gb_per_s")),
            )
        )
    return rows


def _counters(server: ServerProcess) -> dict[str, int]:
    """Give what the server has counted so far; 0 of what it does not count."""
    lines = _info(server)
    return {name: int(lines.get(f"tier_{name}", "0")) for name in _COUNTED}


def _calm(server: ServerProcess) -> None:
    """Wait until nothing waits to be spilled, so that quiet is quiet."""
    until_s = time.monotonic() + _CALM_WAIT_S
    while int(_info(server).get("disk_queued_spills", "0")):
        if time.monotonic() > until_s:
            raise BenchError(f"{server.name} still spills after {_CALM_WAIT_S:.0f} s without load")
        time.sleep(0.05)


def _info(server: ServerProcess) -> dict[str, str]:
    with Connection.open(server.address) as connection:
        return info_lines(connection.call(b"INFO", b"kv"))
