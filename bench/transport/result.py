"""The result of `kvredis bench transport`: the JSON file's schema, kvredis.bench.transport/1, and its gate.

Units: GB = 1e9 bytes of payload, us = microseconds, CPU is user plus system time of all threads of a process. A sample
is one arm's 8 batches of one repeat, clock and CPU read around them and nothing else; bytes are compared after it.
`ratio_t0` is the median over the repeats of an arm's seconds divided by T0's *in the same repeat* (the median of three
runs of T0, at the repeat's beginning, middle and end), so less is better; `ratio_t0_min` and `_max` are the extremes.
`ahead` divides the seconds of pyzmq's like, in the same repeat, by the arm's: more is better.

Top level
    schema, machine (see core/machine.py), torch (version, threads of T0), options (how the bench was called), server
    (version, command, facts from INFO), notes (what was left out, and why), earlier (other people's ratios by arm, with
    whose they are), t0, arms, scaling, one (one block of 2 MiB), lookups, verified_bytes, gate, seconds

Arms, by transport (tcp, unix; ipc is zmq's name for a unix socket; inproc is between threads; lane is the same host's
shared memory):
    GET one by one, stream_get (64 GETs in one write, bodies received into place), MGET, SET pipelined (64 in one write)
    stream_get, 4 connections (our backend loads 64 blocks into place, with a thread for each connection where blocks
    are long; its like is pyzmq stream too: one socket, whose bytes pass through a thread of zmq's own at either end)
    pyzmq multipart (REQ/REP, one reply with 64 frames, then copied into place), pyzmq recv_into (received into place),
    pyzmq stream (one message per block), pyzmq send (64 frames, copied by the peer before it answers)
    lane, no copy (64 leases, given back with the request for the next 64), lane, touched (every byte is read),
    lane, copied, lane, put (the server copies from lent memory)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypedDict

from kvredis.bench.core.statistics import by_repeat, paired_ratio, size_text
from kvredis.bench.server.gate import GateRow
from kvredis.bench.server.result import GateJson, ServerFacts, TransferSample

SCHEMA: Final = "kvredis.bench.transport/1"
MIB: Final = 1024**2
ONE_BYTES: Final = 2 * MIB
AHEAD_LEAST: Final = 1.5
LANE_AHEAD_LEAST: Final = 5.0
STRIPED: Final = "stream_get, 4 connections"
EARLIER_FROM: Final = "wde 0.3.1 on its own machine (RTX 4090 host)"
EARLIER: Final[Mapping[str, tuple[float, float]]] = {
    "tcp pyzmq multipart": (3.6, 4.6),
    "ipc pyzmq multipart": (2.9, 4.5),
    "inproc pyzmq multipart": (1.0, 1.3),
    "tcp stream_get": (2.0, 2.5),
    "tcp SET pipelined": (2.9, 4.2),
}
"""Ratios to T0 from an earlier system's documentation, by our arm that does the same (its `set sync` for our SET)."""

T0_MOST: Final[Mapping[tuple[str, str], float]] = {
    ("tcp", "stream_get"): 2.2,
    ("unix", "stream_get"): 2.0,
    ("tcp", "SET pipelined"): 2.8,
    ("unix", "SET pipelined"): 2.8,
    ("lane", "lane, copied"): 1.15,
    ("lane", "lane, no copy"): 0.05,
}
"""(transport, arm) -> the most that its ratio to T0 may be."""

LIKE: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("tcp", "stream_get"): ("tcp", "pyzmq stream"),
    ("unix", "stream_get"): ("ipc", "pyzmq stream"),
    ("tcp", STRIPED): ("tcp", "pyzmq stream"),
    ("unix", STRIPED): ("ipc", "pyzmq stream"),
    ("tcp", "SET pipelined"): ("tcp", "pyzmq send"),
    ("unix", "SET pipelined"): ("ipc", "pyzmq send"),
    ("lane", "lane, copied"): ("ipc", "pyzmq stream"),
    ("lane", "lane, no copy"): ("ipc", "pyzmq stream"),
}
"""(transport, arm) -> what pyzmq does that is most like it. For the lane: its best between two processes of a host."""


class ArmSample(TypedDict):
    """One arm, one repeat."""

    repeat: int
    seconds: float
    gb_per_s: float
    peer_cpu_ms_per_gb: float  # 0 over inproc: both ends are in the client's account
    client_cpu_ms_per_gb: float
    verified_bytes: int


class ArmRow(TypedDict):
    """One arm with one model's blocks."""

    shape: str
    block_bytes: int
    blocks: int
    transport: str
    arm: str
    op: str  # read, write
    samples: list[ArmSample]
    seconds: float
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    ratio_t0: float | None
    ratio_t0_min: float | None
    ratio_t0_max: float | None
    peer_cpu_ms_per_gb: float
    client_cpu_ms_per_gb: float
    ahead: float | None  # of pyzmq's like; None where there is none


class BaseSample(TypedDict):
    repeat: int
    seconds: float  # the median of `runs`
    runs: list[float]


class BaseRow(TypedDict):
    """T0 of one model's blocks."""

    shape: str
    block_bytes: int
    samples: list[BaseSample]
    seconds: float
    gb_per_s: float


class ScalingRow(TypedDict):
    """GET one by one, or 16 in flight, over several connections at once, one client thread each."""

    shape: str
    block_bytes: int
    transport: str
    op: str  # GET, GETP
    connections: int
    samples: list[TransferSample]
    gb_per_s: float
    server_cpu_ms_per_gb: float
    client_cpu_ms_per_gb: float
    ratio_t0: float | None


class OneSample(TypedDict):
    repeat: int
    calls: int
    p50_us: float
    p99_us: float


class OneRow(TypedDict):
    """One block of 2 MiB, one at a time."""

    what: str
    samples: list[OneSample]
    p50_us: float
    p99_us: float
    ratio_memcpy: float | None  # p50 to that of memcpy of the same bytes in the same repeat


class LookupRateSample(TypedDict):
    repeat: int
    calls_per_s: float


class LookupRateRow(TypedDict):
    """How many calls a second one client on a unix socket gets answered."""

    what: str
    keys: int  # in one call
    samples: list[LookupRateSample]
    calls_per_s: float
    keys_per_s: float


class TorchFacts(TypedDict):
    version: str
    threads: int


class Earlier(TypedDict):
    source: str
    ratios: dict[str, list[float]]


class TransportResult(TypedDict):
    schema: str
    machine: dict[str, str | int]
    torch: TorchFacts
    options: dict[str, object]
    server: ServerFacts
    notes: list[str]
    earlier: Earlier
    t0: list[BaseRow]
    arms: list[ArmRow]
    scaling: list[ScalingRow]
    one: list[OneRow]
    lookups: list[LookupRateRow]
    verified_bytes: int
    gate: list[GateJson]
    seconds: float


def earlier() -> Earlier:
    """Give other people's figures, as the result has them."""
    return Earlier(source=EARLIER_FROM, ratios={name: list(pair) for name, pair in EARLIER.items()})


def arm_name(row: ArmRow) -> str:
    """Name an arm with its transport, once."""
    return row["arm"] if row["transport"] == "lane" else f"{row['transport']} {row['arm']}"


def set_ahead(rows: Sequence[ArmRow]) -> None:
    """Fill in how far each arm is ahead of pyzmq's like with the same blocks."""
    by_name = {(row["shape"], row["transport"], row["arm"]): row for row in rows}
    for row in rows:
        like = LIKE.get((row["transport"], row["arm"]))
        theirs = by_name.get((row["shape"], like[0], like[1])) if like else None
        if theirs is not None:
            row["ahead"] = paired_ratio(by_repeat(theirs["samples"], "seconds"), by_repeat(row["samples"], "seconds"))


def transport_gate(result: TransportResult) -> list[GateRow]:
    """Judge every line that the result has a measurement for; a ratio that could not be formed does not pass.

    Without pyzmq, or with an arm of its left out by choice, there is no line about it: notes say so.
    """
    return [*_arm_lines(result), *_one_lines(result)]


def _arm_lines(result: TransportResult) -> Iterator[GateRow]:
    theirs = {(row["shape"], row["transport"], row["arm"]) for row in result["arms"]}
    for row in result["arms"]:
        which = (row["transport"], row["arm"])
        name = f"{row['shape']} {arm_name(row)}"
        if which in T0_MOST:
            most, ratio = T0_MOST[which], row["ratio_t0"]
            yield GateRow(f"{name} / T0", f"<= {most:.2f}x", ratio, ratio is not None and ratio <= most)
        if which in LIKE and (row["shape"], *LIKE[which]) in theirs:
            transport, arm = LIKE[which]
            ahead = row["ahead"]
            bound = f">= {AHEAD_LEAST:.2f}x"
            yield GateRow(
                f"{name} ahead of {transport} {arm}", bound, ahead, ahead is not None and ahead >= AHEAD_LEAST
            )


def _one_lines(result: TransportResult) -> Iterator[GateRow]:
    rows = {row["what"]: row for row in result["one"]}
    lane, get = rows.get(TOUCH), rows.get(GET_TCP)
    if lane is None or get is None:
        return
    ahead = paired_ratio(by_repeat(get["samples"], "p50_us"), by_repeat(lane["samples"], "p50_us"))
    name = f"one {size_text(ONE_BYTES)} block: {TOUCH}, ahead of {GET_TCP}"
    bound = f">= {LANE_AHEAD_LEAST:.2f}x"
    yield GateRow(name, bound, ahead, ahead is not None and ahead >= LANE_AHEAD_LEAST)


TOUCH: Final = "lease, touch, release"
COPY: Final = "lease, copy, release"
LEASE: Final = "lease, release"
GET_UNIX: Final = "GET unix"
GET_TCP: Final = "GET tcp"
MEMCPY: Final = "memcpy"
