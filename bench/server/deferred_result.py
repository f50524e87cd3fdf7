"""The part `deferred` of `kvredis bench server`: its rows, and their lines in the report.

What it costs a client to store and fetch a model's blocks, by how much is done before the answer comes:

    SET one by one        answered when the value can be read; nothing is on disk
    SET pipelined         the same, 64 in flight
    SET + WAITAOF         the same, and after each batch of 64 the client waits until it is on disk (disk tier alone)
    SET deferred          pyzmq: a batch in one message, answered before it is copied (its sync: SET in one message)
    GET one by one, MGET  64 keys in one request, received one after the other (pyzmq: a message per block)

`drain_s` is how long after the last answer everything that had been put off was done: pyzmq's copies, kvredis' writes
to disk. It is not in `seconds`, and is in `ratio_t0_drained`. A `cold` pool belongs to a server that has just started
and has touched none of its memory (kvredis with --no-prefault; by default a thread of its own does it).
Ratios to T0 as in transport/result.py: an arm's seconds / those of torch's plain copy of the blocks in the same repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypedDict

from kvredis.bench.core.statistics import by_repeat, middle, paired_ratio, size_text

SET, SET_PIPELINED, SET_DURABLE, SET_MESSAGE, SET_DEFERRED = (
    "SET one by one",
    "SET pipelined",
    "SET + WAITAOF",
    "SET in one message",
    "SET deferred",
)
GET, MGET = "GET one by one", "MGET"
COLD: Final = "cold"
WARM: Final = "warm"


class DeferredSample(TypedDict):
    """One server, one operation, one repeat: every block once."""

    repeat: int
    seconds: float
    drain_s: float  # 0 where nothing is put off
    drained_s: float  # seconds + drain_s
    gb_per_s: float
    server_cpu_ms_per_gb: float
    client_cpu_ms_per_gb: float
    verified_bytes: int  # read back after the drain, and compared in full


class DeferredRow(TypedDict):
    """One server and operation on one kind of pool; one client, one connection."""

    server: str  # kvredis, kvredis+disk, redis, memcached, pyzmq
    transport: str
    shape: str
    block_bytes: int
    blocks: int
    op: str
    pool: str  # cold, warm
    samples: list[DeferredSample]
    seconds: float
    drain_s: float
    gb_per_s: float
    server_cpu_ms_per_gb: float
    client_cpu_ms_per_gb: float
    ratio_t0: float | None
    ratio_t0_drained: float | None


class BaseSample(TypedDict):
    repeat: int
    seconds: float
    payload_bytes: int
    gb_per_s: float


class BaseRow(TypedDict):
    """T0 of values of one size: torch's plain copy of them, one thread, in the same run and repeats."""

    part: str  # transfers, deferred
    where: str  # the arm of transfers, the shape of deferred
    size_bytes: int
    samples: list[BaseSample]
    gb_per_s: float


def summarize(
    what: tuple[str, str, str], shape: tuple[str, int, int], samples: list[DeferredSample], base: list[BaseSample]
) -> DeferredRow:
    """Sum up `what` = (server, op, pool) with blocks of `shape` = (name, bytes, how many); T0 is in `base`."""
    base_s = by_repeat(base, "seconds")
    return DeferredRow(
        server=what[0],
        transport="tcp",
        shape=shape[0],
        block_bytes=shape[1],
        blocks=shape[2],
        op=what[1],
        pool=what[2],
        samples=samples,
        seconds=middle([sample["seconds"] for sample in samples]),
        drain_s=middle([sample["drain_s"] for sample in samples]),
        gb_per_s=middle([sample["gb_per_s"] for sample in samples]),
        server_cpu_ms_per_gb=middle([sample["server_cpu_ms_per_gb"] for sample in samples]),
        client_cpu_ms_per_gb=middle([sample["client_cpu_ms_per_gb"] for sample in samples]),
        ratio_t0=paired_ratio(by_repeat(samples, "seconds"), base_s),
        ratio_t0_drained=paired_ratio(by_repeat(samples, "drained_s"), base_s),
    )


def deferred_lines(rows: Sequence[DeferredRow], base: Sequence[BaseRow]) -> Iterator[str]:
    """Give the part's table, line by line; nothing when it was not measured."""
    for t0 in base:
        own = [row for row in rows if row["shape"] == t0["where"]] if t0["part"] == "deferred" else []
        if not own:
            continue
        yield ""
        yield (
            f"{t0['where']}: {own[0]['blocks']} blocks of {size_text(t0['size_bytes'])} in batches of 64,"
            f" tcp, one connection; T0 {t0['gb_per_s']:.2f} GB/s"
        )
        yield (
            f"  {'op':<18} {'pool':<4} {'server':<12} {'ms':>8} {'GB/s':>6} {'x T0':>7} {'drain ms':>8} {'x T0':>7}"
            f" {'server ms/GB':>12} {'client ms/GB':>12}"
        )
        for row in sorted(own, key=lambda row: (_ORDER.index(row["op"]), row["pool"] != COLD)):
            yield (
                f"  {row['op']:<18} {row['pool']:<4} {row['server']:<12} {row['seconds'] * 1e3:8.1f}"
                f" {row['gb_per_s']:6.2f} {_ratio(row['ratio_t0'])} {row['drain_s'] * 1e3:8.1f}"
                f" {_ratio(row['ratio_t0_drained'])} {row['server_cpu_ms_per_gb']:12.0f}"
                f" {row['client_cpu_ms_per_gb']:12.0f}"
            )


_ORDER: Final[tuple[str, ...]] = (SET, SET_PIPELINED, SET_MESSAGE, SET_DEFERRED, SET_DURABLE, GET, MGET)


def _ratio(value: float | None) -> str:
    return f"{'':>7}" if value is None else f"{value:6.2f}x"
