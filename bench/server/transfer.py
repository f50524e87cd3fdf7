"""How fast, and for how much CPU, do large values go in and out? SET and GET, one by one and pipelined, against every
server, side by side.

One arm is a transport, a number of connections and whether client and server are bound to one CPU. Within an arm, for
each size, every server first stores all keys untimed; then in each repeat every server in turn gets the same work:

    connect afresh, warm the connections up        not timed
    SET  every key, a new value each pass           timed, then all keys are read back and compared in full
    SETP the same, `in_flight` requests             timed, then as behind SET
    GET  every key, one request in flight           timed, then the bodies are compared in full
    GETP every key, `in_flight` requests            timed, then the bodies are compared in full

Pinned runs give CPU-ms per GB that repeat within about 10 %; unpinned runs give the throughput that a user sees.
Several connections are one client thread each: socket calls release the GIL.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, TypedDict

from kvredis.bench.core.blocks import TorchCopy
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import Progress, Row, summed
from kvredis.bench.core.servers import BASELINE, BEFORE, SUBJECT, Peer, Transport
from kvredis.bench.core.statistics import (
    GB,
    MIB,
    by_repeat,
    counted,
    middle,
    paired_ratio,
    percentile,
    rotated,
    size_text,
)
from kvredis.bench.core.wire import Wire
from kvredis.bench.core.workload import Job, Memory, Workload, memory_bytes, working_set


class BaseSample(TypedDict):
    repeat: int
    seconds: float
    payload_bytes: int
    gb_per_s: float


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


KIB = 1024
SIZES = (16 * KIB, 64 * KIB, 576 * KIB, 896 * KIB, 2 * MIB, 32 * MIB)
OPS = ("SET", "SETP", "GET", "GETP")
_WRITES = ("SET", "SETP")
_PIPELINED = ("SETP", "GETP")
IN_FLIGHT = 16
IN_FLIGHT_LARGE = 4  # from LARGE_BYTES on: more would only be buffered
LARGE_BYTES = 16 * MIB
_START_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Arm:
    """What stays the same while the servers take turns."""

    transport: Transport
    connections: int
    pinned: bool

    def __str__(self) -> str:
        where = "one CPU" if self.pinned else "all CPUs"
        return f"{self.transport}, {counted(self.connections, 'connection')}, {where}"


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How much is moved. Every cell moves the working set `passes` times: at least `cell_bytes` in all."""

    sizes: Sequence[int] = SIZES
    repeats: int = 5
    working_set_bytes: int = 128 * MIB
    cell_bytes: int = 256 * MIB
    warm_up_bytes: int = 16 * MIB  # each way on each connection: opens the TCP window before the clock starts
    seed: int = 20250101

    def count(self, size_bytes: int) -> int:
        return working_set(size_bytes, self.working_set_bytes)

    def passes(self, size_bytes: int) -> int:
        return max(1, -(-self.cell_bytes // (size_bytes * self.count(size_bytes))))


@dataclass(slots=True)
class Verification:
    """What was compared so far."""

    values: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Transfers:
    """The part of the bench that moves large values. Holds the client's memory for all arms."""

    plan: TransferPlan
    progress: Progress = lambda _step: None
    verification: Verification = field(default_factory=Verification)
    _source: Memory = field(init=False)
    _target: Memory = field(init=False)
    t0: list[Row] = field(default_factory=list)
    _shift: int = 0

    def __post_init__(self) -> None:
        nbytes = memory_bytes(self.plan.sizes, self.plan.working_set_bytes)
        self._source = Memory(nbytes, seed=self.plan.seed)
        self._target = Memory(nbytes)

    def run(self, arm: Arm, peers: Sequence[Peer]) -> list[Row]:
        """Measure every size of one arm. Raises BackendError, WireError or VerificationError at the first fault."""
        rows: list[Row] = []
        with pinned(peers) if arm.pinned else ExitStack():
            for size in self.plan.sizes:
                samples: dict[str, dict[str, list[TransferSample]]] = {
                    op: {peer.name: [] for peer in peers} for op in OPS
                }
                work = Workload(size, self.plan.count(size), self._source, self._target)
                for peer in peers:
                    self._fill(peer, work)
                base = _Base(work, self.plan.passes(size))
                for repeat in range(self.plan.repeats):
                    self.progress(f"{arm}: {size_text(size)}")
                    base.measure(repeat)
                    for peer in rotated(peers, repeat):
                        for op, sample in self._turn(arm, peer, work, repeat).items():
                            samples[op][peer.name].append(sample)
                for peer in peers:
                    with peer.connect() as wire:
                        wire.flush()
                for op in OPS:
                    rows += summarize(arm, (size, op, _in_flight(op, size)), samples[op], base.samples)
                self.t0 += base.rows(arm)
        return rows

    def _turn(self, arm: Arm, peer: Peer, work: Workload, repeat: int) -> dict[str, TransferSample]:
        """Give one server's samples of one repeat; its connections are as new as every other server's."""
        with ExitStack() as stack:
            wires = [stack.enter_context(peer.connect()) for _ in range(arm.connections)]
            self._warm_up(wires, work)
            cells: dict[str, TransferSample] = {}
            for op in OPS:
                jobs = self._jobs(work, op, len(wires))
                work.wipe()
                cell = timed(peer, wires, jobs, op, _in_flight(op, work.size_bytes))
                if op in _WRITES:
                    for job in work.gets():
                        wires[0].get(job.key, job.view)
                cell["repeat"] = repeat
                cell["verified_bytes"] = work.verify(self._shift, peer.name)
                self.verification.values += work.count
                self.verification.bytes += cell["verified_bytes"]
                cells[op] = cell
            return cells

    def _jobs(self, work: Workload, op: str, parts: int) -> list[list[Job]]:
        """Give each connection's requests of one operation."""
        passes = self.plan.passes(work.size_bytes)
        if op not in _WRITES:
            return [work.gets(part, parts) * passes for part in range(parts)]
        shifts = range(self._shift + 1, self._shift + passes + 1)
        self._shift += passes
        return [[job for shift in shifts for job in work.sets(shift, part, parts)] for part in range(parts)]

    def _fill(self, peer: Peer, work: Workload) -> None:
        """Store every key twice, untimed: no repeat pays for memory that the server touches for the first time."""
        with peer.connect() as wire:
            for shift in (-2, -1):
                for job in work.sets(shift):
                    wire.put(job.key, job.view)

    def _warm_up(self, wires: Sequence[Wire], work: Workload) -> None:
        for part, wire in enumerate(wires):
            for index in range(max(1, self.plan.warm_up_bytes // work.size_bytes)):
                key = b"bench:warm-up:%d" % part
                wire.put(key, work.value(index % work.count, 0))
                wire.get(key, work.place(index % work.count))


class _Base:
    """T0 of one cell's bytes, in each repeat; nothing where torch is not installed."""

    def __init__(self, work: Workload, passes: int) -> None:
        self.samples: list[BaseSample] = []
        self._work, self._passes = work, passes
        self._torch = None if find_spec("torch") is None else TorchCopy(work)

    def measure(self, repeat: int) -> None:
        """Copy as many bytes as each server moves, block by block, and compare them."""
        if self._torch is None:
            return
        nbytes = self._passes * self._work.count * self._work.size_bytes
        seconds = self._torch.measure_all(self._passes)
        rate = nbytes / seconds / GB
        self.samples.append(BaseSample(repeat=repeat, seconds=seconds, payload_bytes=nbytes, gb_per_s=rate))

    def rows(self, arm: Arm) -> list[Row]:
        """Give the row of one arm and size, or none; torch is as it was before."""
        if self._torch is None:
            return []
        self._torch.close()
        rate = middle([sample["gb_per_s"] for sample in self.samples])
        size = self._work.size_bytes
        return [Row(part="transfers", where=str(arm), size_bytes=size, samples=self.samples, gb_per_s=rate)]


def _in_flight(op: str, size_bytes: int) -> int:
    if op not in _PIPELINED:
        return 1
    return IN_FLIGHT_LARGE if size_bytes >= LARGE_BYTES else IN_FLIGHT


def _put_all(wire: Wire, jobs: Sequence[Job], _in_flight: int) -> list[float]:
    took = []
    for job in jobs:
        start = time.perf_counter()
        wire.put(job.key, job.view)
        took.append(time.perf_counter() - start)
    return took


def _get_all(wire: Wire, jobs: Sequence[Job], _in_flight: int) -> list[float]:
    took = []
    for job in jobs:
        start = time.perf_counter()
        wire.get(job.key, job.view)
        took.append(time.perf_counter() - start)
    return took


def _get_pipelined(wire: Wire, jobs: Sequence[Job], in_flight: int) -> list[float]:
    """Ask for `in_flight` values at once and take them in order, as an engine does with the blocks of a prefix."""
    took: list[float] = []
    for first in range(0, len(jobs), in_flight):
        batch = jobs[first : first + in_flight]
        asked = time.perf_counter()
        wire.ask([job.key for job in batch])
        for job in batch:
            wire.take(job.key, job.view)
            took.append(time.perf_counter() - asked)
    return took


def _put_pipelined(wire: Wire, jobs: Sequence[Job], in_flight: int) -> list[float]:
    """Send `in_flight` values before the first answer is read."""
    took: list[float] = []
    for first in range(0, len(jobs), in_flight):
        batch = jobs[first : first + in_flight]
        began = time.perf_counter()
        wire.put_many([(job.key, job.view) for job in batch])
        took += [time.perf_counter() - began] * len(batch)
    return took


class Counted(Protocol):
    """A server whose CPU time can be read."""

    def cpu_s(self) -> float: ...


_LOOPS = {"SET": _put_all, "SETP": _put_pipelined, "GET": _get_all, "GETP": _get_pipelined}


def timed(
    peer: Counted, wires: Sequence[Wire], jobs: Sequence[Sequence[Job]], op: str, in_flight: int
) -> TransferSample:
    """Run one cell: each wire does its jobs, all at the same time; the clock and both CPU accounts stop together."""
    loop = _LOOPS[op]
    gate = threading.Barrier(len(wires) + 1)

    def one(wire: Wire, own: Sequence[Job]) -> list[float]:
        gate.wait(_START_WAIT_S)
        return loop(wire, own, in_flight)

    with ThreadPoolExecutor(len(wires)) as pool:
        futures = [pool.submit(one, wire, own) for wire, own in zip(wires, jobs, strict=True)]
        server_s, client_s = peer.cpu_s(), time.process_time()
        start_s = time.perf_counter()
        gate.wait(_START_WAIT_S)
        took_s = [seconds for future in futures for seconds in future.result()]
        elapsed_s = time.perf_counter() - start_s
        server_s, client_s = peer.cpu_s() - server_s, time.process_time() - client_s
    nbytes = sum(len(job.view) for own in jobs for job in own)
    return TransferSample(
        repeat=0,
        seconds=elapsed_s,
        operations=len(took_s),
        payload_bytes=nbytes,
        gb_per_s=nbytes / elapsed_s / GB,
        p50_ms=percentile(took_s, 50) * 1e3,
        p99_ms=percentile(took_s, 99) * 1e3,
        server_cpu_ms_per_gb=server_s * 1e3 * GB / nbytes,
        client_cpu_ms_per_gb=client_s * 1e3 * GB / nbytes,
        verified_bytes=0,
    )


@contextmanager
def pinned(peers: Sequence[Peer]) -> Iterator[None]:
    """Bind this thread (and what it starts) and all servers to one CPU, the last one; give all of them back after."""
    before = os.sched_getaffinity(0)
    one = {max(before)}
    try:
        os.sched_setaffinity(0, one)
        for peer in peers:
            peer.pin(one)
        yield
    finally:
        os.sched_setaffinity(0, before)
        for peer in peers:
            peer.pin(before)


def summarize(
    arm: Arm, what: tuple[int, str, int], samples: dict[str, list[TransferSample]], t0: Sequence[BaseSample] = ()
) -> list[Row]:
    """Sum up one operation, `what` = (size_bytes, op, in_flight), over the repeats; one row per server."""
    size_bytes, op, in_flight = what
    ratios = {"ratio_gb_per_s": "gb_per_s", "ratio_server_cpu": "server_cpu_ms_per_gb"}
    figures = ("gb_per_s", "p50_ms", "p99_ms", "server_cpu_ms_per_gb", "client_cpu_ms_per_gb")
    rows = []
    for server, own in samples.items():
        if not own:
            raise BenchError(f"no sample of {server} in {arm}")
        row = Row(
            server=server,
            transport=arm.transport,
            connections=arm.connections,
            pinned=arm.pinned,
            size_bytes=size_bytes,
            op=op,
            in_flight=in_flight,
            samples=own,
        )
        row |= summed(own, figures) | compared(server, own, samples, ratios)
        row["server_cpu_ms_per_gb_min"] = min(sample["server_cpu_ms_per_gb"] for sample in own)
        if t0:
            row["ratio_t0"] = paired_ratio(by_repeat(t0, "gb_per_s"), by_repeat(own, "gb_per_s"))
        rows.append(row)
    return rows


def compared(
    server: str,
    own: Sequence[Any],
    others: Mapping[str, Sequence[Any]],
    ratios: Mapping[str, str],
    to_before: Mapping[str, str] | None = None,
) -> Row:
    """Give each of `ratios` (name -> figure) to redis, None where it did not run; for our own server also those
    `to_before` (default the same) as NAME_to_before, where an earlier commit ran."""

    def ratio(base: str, figure: str) -> float | None:
        return paired_ratio(by_repeat(own, figure), by_repeat(others.get(base, []), figure))

    row: Row = {name: ratio(BASELINE, figure) for name, figure in ratios.items()}
    if server == SUBJECT and others.get(BEFORE):
        row |= {f"{name}_to_before": ratio(BEFORE, figure) for name, figure in (to_before or ratios).items()}
    return row
