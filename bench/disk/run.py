"""`kvredis bench disk` as a whole: a directory to measure in, the parts, and the result that all are gathered in.

Parts: rates (rates.py: the device, a plain loop and the disk tier), gets (gets.py: what a client waits for a
block that is on disk) and pings (pings.py: what others feel of spilling). The last two run `kvredis serve` as a
child process, once for each transport, with a disk tier in that directory and, for the pings, once more without.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.machine import machine_facts
from kvredis.bench.core.result import Progress
from kvredis.bench.core.servers import ServerProcess, Transport, kvredis_recipe
from kvredis.bench.core.statistics import GB, MIB

from .gate import disk_gate
from .gets import GetPlan, run_gets
from .pings import PingPlan, run_pings
from .rates import RatePlan, run_rates
from .result import SCHEMA, WITH_DISK, WITHOUT_DISK, DiskResult

PARTS = ("rates", "gets", "pings")
_ARENA_BYTES = 256 * MIB
_QUICK_ARENA_BYTES = 64 * MIB
_DISK_TO_ARENA = 16
_KEYS_TO_ARENA = 4


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """What one call of the bench does. The servers' arena has `arena_bytes`, their disk tier 16 times as much."""

    parts: Sequence[str] = PARTS
    transports: Sequence[Transport] = ("tcp", "unix")
    arena_bytes: int = _ARENA_BYTES
    rates: RatePlan = field(default_factory=RatePlan)
    gets: GetPlan = field(default_factory=lambda: GetPlan(_ARENA_BYTES))
    pings: PingPlan = field(default_factory=lambda: PingPlan(_KEYS_TO_ARENA * _ARENA_BYTES // (2 * MIB)))

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        steps = self.rates.steps() if "rates" in self.parts else 0
        steps += len(self.transports) * self.gets.steps() if "gets" in self.parts else 0
        return steps + (len(self.transports) * self.pings.steps() if "pings" in self.parts else 0)

    def disk_bytes(self) -> int:
        """Give the room that it takes at most at a time."""
        servers = self.arena_bytes * (_DISK_TO_ARENA + 1) if {"gets", "pings"} & set(self.parts) else 0
        return max(servers, self.rates.disk_bytes() if "rates" in self.parts else 0)

    def options(self, directory: Path) -> dict[str, object]:
        """Give the plan as the result's `options`."""
        return {
            "directory": str(directory),
            "parts": list(self.parts),
            "transports": list(self.transports),
            "threads": list(self.rates.threads),
            "repeats": self.rates.repeats,
            "block_bytes": self.rates.block_bytes,
            "cell_bytes": self.rates.count * self.rates.block_bytes,
            "get_sizes": list(self.gets.sizes),
            "arena_bytes": self.arena_bytes,
            "disk_bytes": self.arena_bytes * _DISK_TO_ARENA,
            "ping_run_s": self.pings.run_s,
        }


QUICK = DiskPlan(
    arena_bytes=_QUICK_ARENA_BYTES,
    rates=RatePlan(repeats=2, threads=(1, 2), cell_bytes=32 * MIB),
    gets=GetPlan(_QUICK_ARENA_BYTES, repeats=2, sizes=(2 * MIB,), repeat_bytes=16 * MIB),
    pings=PingPlan(_KEYS_TO_ARENA * _QUICK_ARENA_BYTES // (2 * MIB), repeats=2, run_s=0.5),
)


@contextmanager
def own_directory(wanted: Path | None, beside: Path) -> Iterator[Path]:
    """Lend a directory to fill: `wanted`, which must be empty or not there yet, else a new one in `beside`.

    At the end, however it comes, everything in it is removed, and the directories too that were made here.
    """
    if wanted is None:
        try:
            made = tempfile.TemporaryDirectory(prefix="kvbench-disk-", dir=beside)
        except OSError as error:
            raise BenchError(f"cannot make a directory in {beside}: {error.strerror}") from error
        with made as name:
            yield Path(name).resolve()
        return
    with ExitStack() as ours:
        try:
            for path in reversed((wanted, *wanted.parents)):
                if not path.is_dir():
                    path.mkdir()
                    ours.callback(_remove_empty, path)
            if any(wanted.iterdir()):
                raise BenchError(f"{wanted} is not empty: the bench removes what is in its directory")
        except OSError as error:
            raise BenchError(f"{wanted} cannot be used: {error.strerror}") from error
        try:
            yield wanted.resolve()
        finally:
            for path in wanted.iterdir():
                _remove(path)


def run(plan: DiskPlan, directory: Path, progress: Progress) -> DiskResult:
    """Measure everything in `plan` in `directory`, which is empty; what is left there is for the caller to remove.

    Raises KVRedisError, VerificationError at a wrong byte; leaves no process behind.
    """
    free, needed = shutil.disk_usage(directory).free, plan.disk_bytes()
    if free < needed:
        raise BenchError(f"{directory} has {free / GB:.1f} GB free, the bench needs {needed / GB:.1f} GB")
    start_s = time.monotonic()
    result = DiskResult(
        schema=SCHEMA,
        machine=machine_facts(),
        options=plan.options(directory),
        device="not measured",
        memory="none",
        notes=[],
        rates=[],
        gets=[],
        pings=[],
        verified_bytes=0,
        gate=[],
        seconds=0.0,
    )
    if "rates" in plan.parts:
        _rates(plan, directory, progress, result)
    for transport in plan.transports:
        if {"gets", "pings"} & set(plan.parts):
            _servers(plan, directory, transport, progress, result)
    samples = [sample for row in result["rates"] for sample in row["samples"]]
    result["verified_bytes"] = (
        sum(sample["verified_bytes"] for sample in samples)
        + sum(sample["verified_bytes"] for row in result["gets"] for sample in row["samples"])
        + sum(sample["verified_bytes"] for row in result["pings"] for sample in row["samples"])
    )
    result["gate"] = [row.json() for row in disk_gate(result)]
    result["seconds"] = time.monotonic() - start_s
    return result


def _rates(plan: DiskPlan, directory: Path, progress: Progress, result: DiskResult) -> None:
    place = directory / "rates"
    place.mkdir()
    try:
        rates = run_rates(plan.rates, place, progress)
    finally:
        _remove(place)  # the servers may need the room
    result["device"], result["memory"], result["rates"] = rates.device, rates.memory, rates.rows
    result["t0"] = rates.t0
    result["notes"] += rates.notes


def _servers(plan: DiskPlan, directory: Path, transport: Transport, progress: Progress, result: DiskResult) -> None:
    place = directory / f"server-{transport}"
    arena = ("--max-local-cpu-size", f"{plan.arena_bytes // MIB}MB")
    disk = ("--local-disk", str(place), "--max-local-disk-size", f"{plan.arena_bytes * _DISK_TO_ARENA // MIB}MB")
    try:
        with ExitStack() as stack:
            with_disk = stack.enter_context(ServerProcess(kvredis_recipe(WITH_DISK, *arena, *disk), transport))
            if "gets" in plan.parts:
                result["gets"] += run_gets(plan.gets, with_disk, transport, place, progress)
            if "pings" in plan.parts:
                without = stack.enter_context(ServerProcess(kvredis_recipe(WITHOUT_DISK, *arena), transport))
                result["pings"] += run_pings(plan.pings, [with_disk, without], transport, progress)
    finally:
        _remove(place)


def _remove(path: Path) -> None:
    """Remove a file or folder; one that is not there is nothing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_empty(path: Path) -> None:
    """Remove a folder, unless somebody has put something into it."""
    with suppress(OSError):
        path.rmdir()
