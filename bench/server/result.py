"""The result of `kvredis bench server`: the JSON file's schema, kvredis.bench.server/1.

Units: GB = 1e9 bytes of payload (protocol bytes are not counted), ms = milliseconds, rps = requests per second. CPU is
user plus system time: the server's over all its threads, the client's over all of its own, between the first request
and the last reply. Every `ratio_*` is the median over the repeats of kvredis-or-peer divided by redis *in the same
repeat*, and null where redis did not run. Medians are over the repeats. `before` is an earlier commit of kvredis; the
rows of kvredis have each `ratio_*_to_before` where it ran, and no row has one where it did not.

Top level
    schema, machine (see core/machine.py), options (how the bench was called), servers (version, command, facts from
    INFO), skipped (server -> why), transfers, small, head_of_line, lookup, deferred and t0 (see deferred_result.py),
    verified, gate (see gate.py), held (see before.py), seconds; earlier files lack `lookup`, `held`, `deferred` and
    `t0`, and load() gives them empty

A percentile p99 of a cell with few operations (32 MiB) is simply its slowest one.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

from .deferred_result import BaseRow, DeferredRow

SCHEMA = "kvredis.bench.server/1"


class ServerFacts(TypedDict):
    version: str
    command: list[str]
    facts: dict[str, str]


class TransferSample(TypedDict):
    """One server, one operation, one repeat."""

    repeat: int
    seconds: float
    operations: int
    payload_bytes: int
    gb_per_s: float
    p50_ms: float  # per operation, from its request to its last byte; pipelined ones wait in line
    p99_ms: float
    server_cpu_ms_per_gb: float
    client_cpu_ms_per_gb: float
    verified_bytes: int  # bodies compared in full after the clock had stopped


class TransferRow(TypedDict):
    """One server in one arm: all samples and what they amount to."""

    server: str
    transport: str  # tcp, unix
    connections: int  # one client thread each
    pinned: bool  # client and server share one CPU
    size_bytes: int
    op: str  # SET, GET, GETP (pipelined)
    in_flight: int  # requests sent and not yet answered, per connection
    samples: list[TransferSample]
    gb_per_s: float
    p50_ms: float
    p99_ms: float
    server_cpu_ms_per_gb: float
    server_cpu_ms_per_gb_min: float
    client_cpu_ms_per_gb: float
    ratio_gb_per_s: float | None
    ratio_server_cpu: float | None
    ratio_t0: NotRequired[float | None]  # seconds to those of torch's plain copy of the same bytes: less is better
    ratio_gb_per_s_to_before: NotRequired[float | None]
    ratio_server_cpu_to_before: NotRequired[float | None]


class SmallSample(TypedDict):
    repeat: int
    rps: float
    p50_ms: float
    p99_ms: float
    server_cpu_us_per_op: float


class SmallRow(TypedDict):
    """redis-benchmark against one server, TCP, unpinned."""

    server: str
    op: str  # PING, SET, GET, EXISTS; 100 B values
    clients: int
    pipeline: int
    samples: list[SmallSample]
    rps: float
    p50_ms: float
    p99_ms: float
    server_cpu_us_per_op: float
    ratio_rps: float | None
    ratio_rps_to_before: NotRequired[float | None]
    ratio_server_cpu_to_before: NotRequired[float | None]


class HeadOfLineSample(TypedDict):
    repeat: int
    pings: int
    p50_ms: float
    p99_ms: float
    background_gb_per_s: float


class HeadOfLineRow(TypedDict):
    """PING every millisecond while another process moves 32 MiB values over other connections; TCP, unpinned."""

    server: str
    background: str  # SET, GET, both (a connection each)
    samples: list[HeadOfLineSample]
    p50_ms: float
    p99_ms: float
    background_gb_per_s: float
    ratio_p99: float | None
    ratio_p99_to_before: NotRequired[float | None]


class LookupSample(TypedDict):
    repeat: int
    calls: int
    p50_us: float
    p99_us: float
    server_cpu_us_per_call: float


class LookupRow(TypedDict):
    """How long one call takes that asks for many keys, all of them present; one client, unpinned."""

    server: str
    op: str  # EXISTS, KV.MATCH (kvredis alone has it)
    transport: str
    keys: int  # in one call
    key_bytes: int
    samples: list[LookupSample]
    p50_us: float
    p99_us: float
    server_cpu_us_per_call: float
    ratio_p50: float | None  # to EXISTS of redis, whichever the op
    ratio_server_cpu: float | None
    ratio_p50_to_before: NotRequired[float | None]  # op by op
    ratio_server_cpu_to_before: NotRequired[float | None]


class GateJson(TypedDict):
    name: str
    bound: str
    measured: float | None
    passed: bool


class HeldJson(TypedDict):
    """One row of kvredis held against the commit before."""

    name: str
    ratios: dict[str, float | None]  # rate, CPU, time, p99: those that the row has
    worse: list[str]  # which of them are
    passed: bool


class Verified(TypedDict):
    values: int
    bytes: int
    wrong: int  # 0: the bench stops at the first wrong byte


class BenchResult(TypedDict):
    schema: str
    machine: dict[str, str | int]
    options: dict[str, object]
    servers: dict[str, ServerFacts]
    skipped: dict[str, str]
    transfers: list[TransferRow]
    small: list[SmallRow]
    head_of_line: list[HeadOfLineRow]
    lookup: list[LookupRow]
    deferred: list[DeferredRow]
    t0: list[BaseRow]
    verified: Verified
    gate: list[GateJson]
    held: list[HeldJson]
    seconds: float
