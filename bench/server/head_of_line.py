"""Does one client's 32 MiB transfer stall another's PING? Measured: a PING every millisecond beside a busy neighbour.

Latency is counted from the moment a PING is sent; while one is late the next ones are late too and are not counted for
the wait, which flatters the slower server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.servers import BASELINE, BEFORE, SUBJECT, ServerProcess, child_environment
from kvredis.bench.core.statistics import GB, by_repeat, middle, paired_ratio, percentile, rotated

from .background_load import BACKGROUNDS
from .result import HeadOfLineRow, HeadOfLineSample

_PING_EVERY_S = 0.001
_MOVER_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class HeadOfLinePlan:
    """How long each background runs."""

    repeats: int = 5
    run_s: float = 3.0

    def steps(self) -> int:
        """Give how often `run_head_of_line` calls its progress."""
        return len(BACKGROUNDS) * self.repeats


def run_head_of_line(
    plan: HeadOfLinePlan, servers: Sequence[ServerProcess], progress: Callable[[str], None]
) -> list[HeadOfLineRow]:
    """Measure every background; `servers` speak RESP."""
    rows: list[HeadOfLineRow] = []
    for background in BACKGROUNDS:
        samples: dict[str, list[HeadOfLineSample]] = {server.name: [] for server in servers}
        for repeat in range(plan.repeats):
            progress(f"PING beside 32 MiB {background}")
            for server in rotated(servers, repeat):
                sample = _measure(server, background, plan.run_s)
                sample["repeat"] = repeat
                samples[server.name].append(sample)
        rows += summarize(background, samples)
    return rows


def summarize(background: str, samples: dict[str, list[HeadOfLineSample]]) -> list[HeadOfLineRow]:
    """Sum up one background over the repeats; one row per server."""
    base, before = samples.get(BASELINE, []), samples.get(BEFORE, [])
    rows = [
        HeadOfLineRow(
            server=server,
            background=background,
            samples=own,
            p50_ms=middle([sample["p50_ms"] for sample in own]),
            p99_ms=middle([sample["p99_ms"] for sample in own]),
            background_gb_per_s=middle([sample["background_gb_per_s"] for sample in own]),
            ratio_p99=paired_ratio(by_repeat(own, "p99_ms"), by_repeat(base, "p99_ms")),
        )
        for server, own in samples.items()
    ]
    for row in rows:
        if row["server"] == SUBJECT and before:
            row["ratio_p99_to_before"] = paired_ratio(by_repeat(row["samples"], "p99_ms"), by_repeat(before, "p99_ms"))
    return rows


def _measure(server: ServerProcess, background: str, run_s: float) -> HeadOfLineSample:
    mover = subprocess.Popen(
        [sys.executable, "-m", "kvredis.bench.server.background_load", str(server.address), background],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(os.environ),
    )
    try:
        assert mover.stdout is not None
        if mover.stdout.readline().strip() != "ready":
            raise BenchError(f"the mover did not start: {mover.communicate(timeout=_MOVER_WAIT_S)[1].strip()}")
        took_s = pings(server, run_s)
        output, complaint = mover.communicate("", timeout=_MOVER_WAIT_S)
    except BaseException:
        mover.kill()
        mover.communicate()
        raise
    if mover.returncode:
        raise BenchError(f"the mover failed: {complaint.strip()}")
    moved = json.loads(output)
    return HeadOfLineSample(
        repeat=0,
        pings=len(took_s),
        p50_ms=percentile(took_s, 50) * 1e3,
        p99_ms=percentile(took_s, 99) * 1e3,
        background_gb_per_s=moved["bytes"] / moved["seconds"] / GB,
    )


def pings(server: ServerProcess, run_s: float) -> list[float]:
    """Ask every millisecond, for `run_s`, how long an answer takes, in seconds; late ones delay those that follow."""
    took_s: list[float] = []
    with server.connect() as wire:
        start_s = due_s = time.perf_counter()
        while due_s - start_s < run_s:
            sent_s = time.perf_counter()
            wire.ping()
            answered_s = time.perf_counter()
            took_s.append(answered_s - sent_s)
            due_s = max(due_s + _PING_EVERY_S, answered_s)
            time.sleep(max(0.0, due_s - answered_s))
    return took_s
