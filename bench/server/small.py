"""Small operations, timed by redis-benchmark: its client is C, so the figure is the server's and not Python's.

All four go in as custom commands on one key, whose value is stored before and compared after: a server that answered
errors quickly would not pass.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.servers import BASELINE, BEFORE, SUBJECT, ServerProcess
from kvredis.bench.core.statistics import by_repeat, counted, middle, paired_ratio, rotated

from .result import SmallRow, SmallSample

PROGRAM = "redis-benchmark"
VALUE = b"kvredis-100B".ljust(100, b".")
KEY = b"bench:small"
OPS = {
    "PING": ("PING",),
    "SET": ("SET", KEY.decode(), VALUE.decode()),
    "GET": ("GET", KEY.decode()),
    "EXISTS": ("EXISTS", KEY.decode()),
}
_RUN_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class SmallPlan:
    """Requests are sized so that one run takes about `run_s` at the rates that Redis reaches on a small machine."""

    repeats: int = 5
    clients: Sequence[int] = (1, 50)
    pipelines: Sequence[int] = (1, 16)
    run_s: float = 0.7

    def requests(self, clients: int, pipeline: int) -> int:
        expected_rps = (30_000 if clients == 1 else 80_000) * (1 if pipeline == 1 else 8)
        return max(clients * pipeline, int(expected_rps * self.run_s))

    def steps(self) -> int:
        """Give how often `run_small` calls its progress."""
        return len(OPS) * len(self.clients) * len(self.pipelines) * self.repeats


def missing() -> str | None:
    """Say why small operations cannot be measured here, None when they can."""
    return None if shutil.which(PROGRAM) else f"{PROGRAM} is not installed (Debian package redis-tools)"


def run_small(plan: SmallPlan, servers: Sequence[ServerProcess], progress: Callable[[str], None]) -> list[SmallRow]:
    """Measure all operations; `servers` listen on TCP and speak RESP."""
    rows: list[SmallRow] = []
    for op in OPS:
        for clients in plan.clients:
            for pipeline in plan.pipelines:
                samples: dict[str, list[SmallSample]] = {server.name: [] for server in servers}
                for repeat in range(plan.repeats):
                    progress(f"{op}: {counted(clients, 'client')}, {pipeline} in flight")
                    for server in rotated(servers, repeat):
                        sample = _measure(server, op, (clients, pipeline), plan.requests(clients, pipeline))
                        sample["repeat"] = repeat
                        samples[server.name].append(sample)
                rows += summarize((op, clients, pipeline), samples)
    return rows


def _measure(server: ServerProcess, op: str, shape: tuple[int, int], requests: int) -> SmallSample:
    clients, pipeline = shape
    with server.connect() as wire:
        wire.put(KEY, memoryview(VALUE))
        command = [PROGRAM, "-h", server.address.host, "-p", str(server.address.port), "--csv", "--precision", "3"]
        command += ["-c", str(clients), "-P", str(pipeline), "-n", str(requests), *OPS[op]]
        before_s = server.cpu_s()
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_RUN_WAIT_S)
        cpu_s = server.cpu_s() - before_s
        if done.returncode:
            raise BenchError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        body = memoryview(bytearray(len(VALUE)))
        wire.get(KEY, body)
        if body != VALUE:
            raise VerificationError(f"{server.name} returned a wrong 100 B value after {op}")
    sample = parse_csv(done.stdout)
    sample["server_cpu_us_per_op"] = cpu_s * 1e6 / requests
    return sample


def parse_csv(text: str) -> SmallSample:
    """Read the one line of figures of `redis-benchmark --csv`; its columns are named in the line before."""
    lines = [line for line in csv.reader(io.StringIO(text)) if line]
    if len(lines) != 2 or lines[0][0] != "test" or len(lines[0]) != len(lines[1]):
        raise BenchError(f"cannot read what {PROGRAM} printed: {text[:200]!r}")
    named = dict(zip(lines[0], lines[1], strict=True))
    return SmallSample(
        repeat=0,
        rps=float(named["rps"]),
        p50_ms=float(named["p50_latency_ms"]),
        p99_ms=float(named["p99_latency_ms"]),
        server_cpu_us_per_op=0.0,
    )


def summarize(what: tuple[str, int, int], samples: dict[str, list[SmallSample]]) -> list[SmallRow]:
    """Sum up `what` = (op, clients, pipeline) over the repeats; one row per server."""
    op, clients, pipeline = what
    base, before = samples.get(BASELINE, []), samples.get(BEFORE, [])
    rows = [
        SmallRow(
            server=server,
            op=op,
            clients=clients,
            pipeline=pipeline,
            samples=own,
            rps=middle([sample["rps"] for sample in own]),
            p50_ms=middle([sample["p50_ms"] for sample in own]),
            p99_ms=middle([sample["p99_ms"] for sample in own]),
            server_cpu_us_per_op=middle([sample["server_cpu_us_per_op"] for sample in own]),
            ratio_rps=paired_ratio(by_repeat(own, "rps"), by_repeat(base, "rps")),
        )
        for server, own in samples.items()
    ]
    for row in rows:
        if row["server"] == SUBJECT and before:
            rate, cpu = (by_repeat(row["samples"], figure) for figure in ("rps", "server_cpu_us_per_op"))
            row["ratio_rps_to_before"] = paired_ratio(rate, by_repeat(before, "rps"))
            row["ratio_server_cpu_to_before"] = paired_ratio(cpu, by_repeat(before, "server_cpu_us_per_op"))
    return rows
