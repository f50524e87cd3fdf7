"""What `kvredis bench disk` measured: the one schema of its file, its tables and its gate.

GB is 1e9 bytes, rates are of payload. Medians are over the repeats; a ratio is the median of the ratios of what ran
side by side in one repeat. CPU seconds are user and system time of the process that moved the bytes (all its threads),
which for a server is the server's; the kernel's own write-back threads are in nobody's account.

Top level
    schema, machine (see core/machine.py), options (how the bench was called), device (what stood for the device),
    memory (what pages the loop and the tier moved blocks to and from), notes (what could not be measured, and why),
    rates, gets, pings, verified_bytes, gate (see gate.py), seconds, t0

Rates: `write` ends when the device has confirmed all of it (fsync, fdatasync, DiskTier.sync). `read` is of files that
were dropped from the page cache (fsync, then POSIX_FADV_DONTNEED) a moment before; `read warm`, buffered only, comes
right after it and reads the same again. Files were written once before the clock started, so nobody pays for room.
p50 and p99 are over single blocks: a pread or pwrite of the loop, a spill or promotion of the tier (its queue is not in
it), fio's own; dd tells none. T0 is a copy of the same blocks in memory, in the same repeat and cell (t0.py; `t0`
says by what); `ratio_to_t0` is time / T0's, so less is better. Files from before there was T0 lack both.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from kvredis.bench.server.result import GateJson

SCHEMA = "kvredis.bench.disk/1"
DEVICE, LOOP, TIER = "device", "loop", "tier"
WITH_DISK, WITHOUT_DISK = "disk", "memory"

Mode = Literal["direct", "buffered"]
Op = Literal["write", "read", "read warm"]


class RateSample(TypedDict):
    """One arm, one operation, one repeat."""

    repeat: int
    seconds: float
    payload_bytes: int
    gb_per_s: float
    cpu_s_per_gb: float
    verified_bytes: int  # compared in full after the clock had stopped; 0 for a foreign tool
    p50_ms: NotRequired[float | None]
    p99_ms: NotRequired[float | None]
    t0_seconds: NotRequired[float]


class RateRow(TypedDict):
    """One arm in one mode with one number of threads."""

    arm: str  # device: fio or dd; loop: preadv and pwrite from Python threads; tier: DiskTier on IoThreads
    mode: Mode
    op: Op
    threads: int
    block_bytes: int
    samples: list[RateSample]
    gb_per_s: float
    cpu_s_per_gb: float
    ratio_to_device: float | None
    ratio_to_loop: float | None
    p50_ms: NotRequired[float | None]
    p99_ms: NotRequired[float | None]
    ratio_to_t0: NotRequired[float | None]


class GetSample(TypedDict):
    """One repeat: medians over the blocks of it, one client, one request in flight."""

    repeat: int
    blocks: int  # that were on disk when they were asked for
    skipped: int  # that were not: in memory already, or gone
    pread_ms: float  # one preadv of as many bytes from a segment file, in the client's process
    spilled_ms: float  # GET of a block that is on disk
    resident_ms: float  # GET of the same block right after it
    prefetched_ms: float  # GET after KV.PREFETCH and KV.JOB WAIT
    prefetched_again_ms: float  # GET of the same blocks, in the same order, once more
    spilled_cpu_s_per_gb: float
    resident_cpu_s_per_gb: float
    verified_bytes: int


class GetRow(TypedDict):
    """How long a client waits for a block, by where it is."""

    transport: str  # tcp, unix
    size_bytes: int
    mode: Mode  # of the preadv, which is the tier's own
    samples: list[GetSample]
    pread_ms: float
    spilled_ms: float
    resident_ms: float
    prefetched_ms: float
    spilled_cpu_s_per_gb: float
    resident_cpu_s_per_gb: float
    ratio_spilled: float | None  # spilled / preadv
    ratio_spilled_net: float | None  # (spilled - resident) / preadv: without the socket, which a preadv does not cross
    ratio_prefetched: float | None  # prefetched / prefetched again


class PingSample(TypedDict):
    """PING every millisecond: alone, and beside a process that SETs flat out."""

    repeat: int
    quiet_p50_ms: float
    quiet_p99_ms: float
    quiet_max_ms: float
    busy_p50_ms: float
    busy_p99_ms: float
    busy_max_ms: float
    set_gb_per_s: float
    server_cpu_s_per_gb: float  # of what was SET; the pings' share is in it
    counters: dict[str, int]  # what INFO counted meanwhile
    missing: int  # values that were not there any more when they were compared at the end
    verified_bytes: int


class PingRow(TypedDict):
    """One server. `ratio_p99` is busy to quiet; `ratio_busy_p99` and `ratio_set` are to the server without a disk."""

    server: str  # disk, memory
    transport: str
    samples: list[PingSample]
    quiet_p50_ms: float
    quiet_p99_ms: float
    quiet_max_ms: float
    busy_p50_ms: float
    busy_p99_ms: float
    busy_max_ms: float
    set_gb_per_s: float
    server_cpu_s_per_gb: float
    counters: dict[str, int]  # summed over the repeats
    missing: int
    ratio_p99: float | None
    ratio_busy_p99: float | None
    ratio_set: float | None


class DiskResult(TypedDict):
    schema: str
    machine: dict[str, str | int]
    options: dict[str, object]
    device: str
    memory: str
    notes: list[str]
    rates: list[RateRow]
    gets: list[GetRow]
    pings: list[PingRow]
    verified_bytes: int
    gate: list[GateJson]
    seconds: float
    t0: NotRequired[str]
