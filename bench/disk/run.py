"""How much of a disk does the disk tier give, and what do clients feel of it? `kvredis bench disk` measures the tier
beside fio and a plain loop in the same directory, and GETs and PINGs of a server that has it.

Parts: rates (rates.py), gets and pings (clients.py). The last two run `kvredis serve` as a child process, once for each
transport, with a disk tier in that directory and, for the pings, once more without.

GB is 1e9 bytes, rates are of payload. Medians are over the repeats; a ratio is the median of the ratios of what ran
side by side in one repeat. CPU seconds are user and system time of the process that moved the bytes (all its threads);
the kernel's own write-back threads are in no account.

The file, kvredis.bench.disk/1, has beside what every result has
    device   what stood for the device            memory   pages that the loop and the tier moved blocks to and from
    rates    arm (device: fio; loop: preadv and pwrite from Python threads; checked: that and each block's checksum;
             tier: DiskTier on IoThreads), mode (direct, buffered), op, threads, block_bytes, samples; ratios to device
             and loop. A write ends when the device has confirmed all of it; a read is of files that were dropped from
             the page cache a moment before, `read warm` (buffered alone) comes right after it and reads the same again.
             p50 and p99 are over single blocks
    gets     transport, size_bytes, mode (of the preadv), samples; ratio_spilled is spilled / preadv, ratio_spilled_net
             (spilled - resident) / preadv, ratio_prefetched prefetched / prefetched again
    pings    server (disk, memory), transport, samples, counters, missing; ratio_p99 is busy / quiet, ratio_busy_p99 and
             ratio_set are to the server without a disk

The gate judges rates at the same number of threads, against the device as fio sees it and against a plain loop, which
has the tier's own memory; a warm read touches no device and is not judged. A GET crosses a socket,
which a preadv does not: a second line leaves the socket out by taking off what the same GET takes from memory.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, cast

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.plot import Captions, LinePanel, foot, lines, series_of
from kvredis.bench.core.result import (
    Column,
    GateLine,
    Progress,
    Result,
    Row,
    gate_line,
    gate_lines,
    machine_lines,
    new_result,
    tables,
    verified_line,
)
from kvredis.bench.core.servers import ServerProcess, Transport, kvredis_recipe
from kvredis.bench.core.statistics import GB, MIB, counted, size_text

from .clients import WITH_DISK, WITHOUT_DISK, GetPlan, PingPlan, run_gets, run_pings
from .rates import TIER, RatePlan, run_rates

SCHEMA = "kvredis.bench.disk/1"


class DiskResult(Result):
    device: str
    memory: str
    rates: list[Row]
    gets: list[Row]
    pings: list[Row]


RATE_LEAST = 0.85
GET_MOST = 1.3
PREFETCHED_MOST = 1.1
PING_P99_MOST = 2.0
_NAMES = {"write": "spill", "read": "promote"}


def disk_gate(result: DiskResult) -> list[GateLine]:
    """Judge every line that `result` has a measurement for."""
    return [*_gate_rates(result), *_gate_gets(result), *_gate_pings(result)]


def _gate_rates(result: DiskResult) -> Iterator[GateLine]:
    for row in result["rates"]:
        if row["arm"] == TIER and row["op"] in _NAMES:
            what = f"{_NAMES[row['op']]}, {row['mode']}, {counted(row['threads'], 'thread')}"
            if row["ratio_to_device"] is not None:
                tool = result["device"].partition(" ")[0]
                yield _judged(f"{what}: rate / {tool}", row["ratio_to_device"], least=RATE_LEAST)
            yield _judged(f"{what}: rate / a plain loop", row["ratio_to_loop"], least=RATE_LEAST)


def _gate_gets(result: DiskResult) -> Iterator[GateLine]:
    for row in result["gets"]:
        what = f"GET {size_text(row['size_bytes'])}, {row['transport']}"
        yield _judged(f"{what}: from disk / preadv", row["ratio_spilled"], most=GET_MOST)
        yield _judged(f"{what}: (from disk - from memory) / preadv", row["ratio_spilled_net"], most=GET_MOST)
        yield _judged(f"{what}: after PREFETCH / from memory", row["ratio_prefetched"], most=PREFETCHED_MOST)


def _gate_pings(result: DiskResult) -> Iterator[GateLine]:
    for row in result["pings"]:
        if row["server"] == WITH_DISK:
            what = f"PING p99, {row['transport']}"
            yield _judged(f"{what}: spilling flat out / quiet", row["ratio_p99"], most=PING_P99_MOST)


def _judged(name: str, measured: float | None, *, least: float | None = None, most: float | None = None) -> GateLine:
    return gate_line(name, f"<= {most:.2f}x" if least is None else f">= {least:.2f}x", measured)


_KEPT = ("spilled", "spill_dropped", "spill_failed", "spill_waits", "lost")


def table_lines(result: DiskResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    yield from machine_lines(result["machine"])
    yield f"Directory {result['options']['directory']}"
    yield from result["notes"]
    yield from _rates(result)
    yield from _gets(result)
    yield from _pings(result)
    yield ""
    yield verified_line(result)
    yield from gate_lines(result["gate"])


_RATES: Final[tuple[Column, ...]] = (
    ("threads", "threads", "d"),
    ("arm", "arm", ""),
    ("GB/s", "gb_per_s", ".2f"),
    ("CPU s/GB", "cpu_s_per_gb", ".3f"),
    ("x device", "ratio_to_device", ".2fx"),
    ("x loop", "ratio_to_loop", ".2fx"),
    ("p50 ms", "p50_ms", ".3f"),
    ("p99 ms", "p99_ms", ".3f"),
)
_GETS: Final[tuple[Column, ...]] = (
    ("where", "transport", ""),
    ("value", "size_bytes", "size"),
    ("preadv", "pread_ms", ".3f"),
    ("of disk", "spilled_ms", ".3f"),
    ("of memory", "resident_ms", ".3f"),
    ("fetched", "prefetched_ms", ".3f"),
    ("disk/preadv", "ratio_spilled", ".2fx"),
    ("net/preadv", "ratio_spilled_net", ".2fx"),
    ("fetched/memory", "ratio_prefetched", ".2fx"),
    ("CPU s/GB: disk", "spilled_cpu_s_per_gb", ".3f"),
    ("memory", "resident_cpu_s_per_gb", ".3f"),
)
_PINGS: Final[tuple[Column, ...]] = (
    ("where", "transport", ""),
    ("server", "server", ""),
    ("quiet p50", "quiet_p50_ms", ".3f"),
    ("p99", "quiet_p99_ms", ".3f"),
    ("max", "quiet_max_ms", ".2f"),
    ("busy p50", "busy_p50_ms", ".3f"),
    ("p99", "busy_p99_ms", ".3f"),
    ("max", "busy_max_ms", ".2f"),
    ("p99 ratio", "ratio_p99", ".2fx"),
    ("x memory", "ratio_busy_p99", ".2fx"),
    ("SET GB/s", "set_gb_per_s", ".2f"),
    ("x memory", "ratio_set", ".2fx"),
    ("CPU s/GB", "server_cpu_s_per_gb", ".3f"),
)


def _rates(result: DiskResult) -> Iterator[str]:
    if result["rates"]:
        yield f"The device by {result['device']}; blocks of loop and tier on {result['memory']} pages"
    yield from tables(_RATES, result["rates"], _rates_title)


def _rates_title(row: Row) -> str:
    return f"{row['op']}, {row['mode']}, blocks of {size_text(row['block_bytes'])}"


def _gets(result: DiskResult) -> Iterator[str]:
    about = "GET of a block, one client, one in flight (ms; net: less the GET from memory; fetched: by PREFETCH)"
    yield from tables(_GETS, result["gets"], lambda _: about)
    for row in result["gets"]:
        if skipped := sum(sample["skipped"] for sample in row["samples"]):
            what = f"{row['transport']}, {size_text(row['size_bytes'])}"
            yield f"  {what}: {skipped} blocks were not on disk when they were asked for, and do not count"


def _pings(result: DiskResult) -> Iterator[str]:
    about = "PING every ms, alone (quiet) and beside a process that SETs 2 MiB flat out (busy), in ms"
    yield from tables(_PINGS, result["pings"], lambda _: about)
    for row in result["pings"]:
        if any(row["counters"].get(name) for name in _KEPT):
            counted = ", ".join(f"{name} {row['counters'].get(name, 0)}" for name in _KEPT)
            what = f"{row['transport']}, {row['server']}"
            yield f"  {what}, while busy: {counted}; {row['missing']} values gone by the end"


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
            "modes": list(self.rates.modes),
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
    parts = {"device": "not measured", "memory": "none", "rates": [], "gets": [], "pings": []}
    result = cast(DiskResult, new_result(SCHEMA, plan.options(directory)) | parts)
    if "rates" in plan.parts:
        _measure_rates(plan, directory, progress, result)
    for transport in plan.transports:
        if {"gets", "pings"} & set(plan.parts):
            _servers(plan, directory, transport, progress, result)
    samples = [sample for row in result["rates"] for sample in row["samples"]]
    result["verified_bytes"] = (
        sum(sample["verified_bytes"] for sample in samples)
        + sum(sample["verified_bytes"] for row in result["gets"] for sample in row["samples"])
        + sum(sample["verified_bytes"] for row in result["pings"] for sample in row["samples"])
    )
    result["gate"] = disk_gate(result)
    result["seconds"] = time.monotonic() - start_s
    return result


def _measure_rates(plan: DiskPlan, directory: Path, progress: Progress, result: DiskResult) -> None:
    place = directory / "rates"
    place.mkdir()
    try:
        rates = run_rates(plan.rates, place, progress)
    finally:
        _remove(place)  # the servers may need the room
    result["device"], result["memory"], result["rates"] = rates.device, rates.memory, rates.rows
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
    """Remove a folder, unless another process has put something into it."""
    with suppress(OSError):
        path.rmdir()


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw bandwidth against threads into the PNG `path`: a panel for each operation and mode."""
    result = cast(DiskResult, raw)
    captions = Captions(
        title="The disk tier beside its device",
        values="GB/s",
        foot=foot(result["machine"], f"device: {result['device']}; loop: preadv and pwrite. Medians over the repeats"),
    )
    panels = [
        LinePanel(title, series_of(rows, "arm", "threads", "gb_per_s"), across="threads", sizes=False)
        for title, rows in groupby(sorted(result["rates"], key=_rates_title), _rates_title)
    ]
    lines(panels, captions, path)
