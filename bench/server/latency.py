"""How long do small requests take, by themselves and beside large values? redis-benchmark's, lookups of a whole
prompt's keys, and PINGs.

Small operations are timed by redis-benchmark: its client is C, so the figure is the server's and not Python's. All go
in as custom commands on one key, whose value is compared after: a server that answered errors quickly would not pass.

Lookups (EXISTS, and KV.MATCH where there is one) stand in front of every request: LMCache asks for every chunk of a
prompt before it reads the first. The client encodes the request once and sends it as it is; every reply is compared.

Head of line: a PING every millisecond while a process of its own (this file as a program) moves 32 MiB values; a thread
would make the pings wait for this interpreter's GIL. While one is late the next ones are late too and are not counted
for the wait, which flatters the slower server.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypedDict

from kvredis.backends.config.url import parse_url
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.line_process import LineProcess
from kvredis.bench.core.result import Row, summed
from kvredis.bench.core.servers import BASELINE, BEFORE, SUBJECT, Peer, ServerProcess, Transport, child_environment
from kvredis.bench.core.statistics import GB, counted, percentile, rotated
from kvredis.bench.core.wire import Resp, Wire
from kvredis.bench.core.workload import Memory, Workload, memory_bytes
from kvredis.storage.errors import KVRedisError

from .transfer import compared


class SmallSample(TypedDict):
    repeat: int
    rps: float
    p50_ms: float
    p99_ms: float
    server_cpu_us_per_op: float


PROGRAM = "redis-benchmark"
VALUE = b"kvredis-100B".ljust(100, b".")
LONG = b"kvredis-16KiB".ljust(16 << 10, b".")
KEY = b"bench:small"
_MSET_KEYS = [b"%b:%d" % (KEY, number) for number in range(9)] + [KEY]


class _Op(NamedTuple):
    """What redis-benchmark is told to send, and the value that is under KEY before and after."""

    words: Sequence[bytes]
    value: bytes = VALUE

    @property
    def weight(self) -> int:
        """How many PINGs it takes the time of, roughly."""
        return max(1, sum(map(len, self.words)) // 4096, len(self.value) // 4096)


OPS = {
    "PING": _Op([b"PING"]),
    "SET": _Op([b"SET", KEY, VALUE]),
    "GET": _Op([b"GET", KEY]),
    "EXISTS": _Op([b"EXISTS", KEY]),
    "MSET": _Op([b"MSET", *chain.from_iterable((key, VALUE) for key in _MSET_KEYS)]),
    "SET 16 KiB": _Op([b"SET", KEY, LONG], LONG),
    "GET 16 KiB": _Op([b"GET", KEY], LONG),
    "MSET 16 KiB": _Op([b"MSET", *chain.from_iterable((key, LONG) for key in _MSET_KEYS)], LONG),
}
"""MSET has ten keys, as redis-benchmark's own."""
_RUN_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class SmallPlan:
    """Requests are sized so that one run takes about `run_s` at the rates that Redis reaches on a small machine."""

    repeats: int = 5
    clients: Sequence[int] = (1, 50)
    pipelines: Sequence[int] = (1, 16)
    run_s: float = 0.7

    def requests(self, op: str, clients: int, pipeline: int) -> int:
        expected_rps = (30_000 if clients == 1 else 80_000) * (1 if pipeline == 1 else 8)
        return max(clients * pipeline, int(expected_rps * self.run_s / OPS[op].weight))

    def steps(self) -> int:
        """Give how often `run_small` calls its progress."""
        return len(OPS) * len(self.clients) * len(self.pipelines) * self.repeats


def redis_benchmark_missing() -> str | None:
    """Say why small operations cannot be measured here, None when they can."""
    return None if shutil.which(PROGRAM) else f"{PROGRAM} is not installed (Debian package redis-tools)"


def run_small(plan: SmallPlan, servers: Sequence[ServerProcess], progress: Callable[[str], None]) -> list[Row]:
    """Measure all operations; `servers` listen on TCP and speak RESP."""
    rows: list[Row] = []
    for op in OPS:
        for clients in plan.clients:
            for pipeline in plan.pipelines:
                samples: dict[str, list[SmallSample]] = {server.name: [] for server in servers}
                for repeat in range(plan.repeats):
                    progress(f"{op}: {counted(clients, 'client')}, {pipeline} in flight")
                    for server in rotated(servers, repeat):
                        sample = _run_redis_benchmark(
                            server, op, (clients, pipeline), plan.requests(op, clients, pipeline)
                        )
                        sample["repeat"] = repeat
                        samples[server.name].append(sample)
                rows += summarize_small((op, clients, pipeline), samples)
    return rows


def _run_redis_benchmark(server: ServerProcess, op: str, shape: tuple[int, int], requests: int) -> SmallSample:
    clients, pipeline = shape
    words, value = OPS[op]
    with server.connect() as wire:
        wire.put(KEY, memoryview(value))
        command = [PROGRAM, "-h", server.address.host, "-p", str(server.address.port), "--csv", "--precision", "3"]
        command += ["-c", str(clients), "-P", str(pipeline), "-n", str(requests), *map(bytes.decode, words)]
        before_s = server.cpu_s()
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_RUN_WAIT_S)
        cpu_s = server.cpu_s() - before_s
        if done.returncode:
            raise BenchError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        body = memoryview(bytearray(len(value)))
        wire.get(KEY, body)
        if body != value:
            raise VerificationError(f"{server.name} returned a wrong value after {op}")
    sample = parse_csv(done.stdout)
    sample["server_cpu_us_per_op"] = cpu_s * 1e6 / requests
    return sample


def parse_csv(text: str) -> SmallSample:
    """Read the one line of figures of `redis-benchmark --csv`; its columns are named in the line before."""
    # The first column is all of the command, values too, and may be longer than the csv module reads.
    shortened = ["".join(line.partition('","')[1:])[2:] for line in text.splitlines() if line]
    lines = [line for line in csv.reader(shortened) if line]
    if len(lines) != 2 or len(lines[0]) != len(lines[1]) or not text.startswith('"test"'):
        raise BenchError(f"cannot read what {PROGRAM} printed: {text[:200]!r}")
    named = dict(zip(lines[0], lines[1], strict=True))
    return SmallSample(
        repeat=0,
        rps=float(named["rps"]),
        p50_ms=float(named["p50_latency_ms"]),
        p99_ms=float(named["p99_latency_ms"]),
        server_cpu_us_per_op=0.0,
    )


def summarize_small(what: tuple[str, int, int], samples: dict[str, list[SmallSample]]) -> list[Row]:
    """Sum up `what` = (op, clients, pipeline) over the repeats; one row per server."""
    op, clients, pipeline = what
    ratios = {"ratio_rps": "rps"}
    to_before = ratios | {"ratio_server_cpu": "server_cpu_us_per_op"}
    return [
        Row(server=server, op=op, clients=clients, pipeline=pipeline, samples=own)
        | summed(own, ("rps", "p50_ms", "p99_ms", "server_cpu_us_per_op"))
        | compared(server, own, samples, ratios, to_before)
        for server, own in samples.items()
    ]


class LookupSample(TypedDict):
    repeat: int
    calls: int
    p50_us: float
    p99_us: float
    server_cpu_us_per_call: float


_MODEL = b"meta-llama/Llama-3.1-8B-Instruct@1@0@"
_VALUE = memoryview(b"kvredis-16-bytes")
_WARM_UP_CALLS = 20

Samples = dict[tuple[str, str], list[LookupSample]]  # by server and op


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """How many keys one call has and how long each server is asked in each repeat."""

    repeats: int = 5
    keys: int = 1000
    run_s: float = 1.0

    def steps(self) -> int:
        """Give how often `run_lookup` calls its progress."""
        return 2 * self.repeats


def long_keys(count: int) -> list[bytes]:
    """Give keys as LMCache makes them of a model, two ranks and a chunk's hash: 101 bytes."""
    return [_MODEL + hashlib.sha256(b"%d" % index).hexdigest().encode() for index in range(count)]


def short_keys(count: int) -> list[bytes]:
    """Give keys of 32 bytes: so few that it is the number of keys that counts, and not their length."""
    return [key[-32:] for key in long_keys(count)]


def request_of(op: str, keys: Sequence[bytes]) -> bytes:
    """Encode one call."""
    words = [op.encode(), *keys]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def run_lookup(
    plan: LookupPlan, transport: Transport, peers: Sequence[Peer], progress: Callable[[str], None] = lambda _step: None
) -> list[Row]:
    """Measure both kinds of keys over one transport; `peers` speak RESP. Raises WireError at the first wrong count."""
    calls = [(peer, "EXISTS") for peer in peers]
    calls += [(peer, "KV.MATCH") for peer in peers if peer.name in (SUBJECT, BEFORE)]
    rows: list[Row] = []
    for keys in (long_keys(plan.keys), short_keys(plan.keys)):
        samples: Samples = {(peer.name, op): [] for peer, op in calls}
        for peer, op in calls:
            _fill(peer, op, keys)
        for repeat in range(plan.repeats):
            progress(f"{len(keys)} keys of {len(keys[0])} B, {transport}")
            for peer, op in rotated(calls, repeat):
                sample = _ask_for_a_while(peer, request_of(op, keys), len(keys), plan.run_s)
                sample["repeat"] = repeat
                samples[peer.name, op].append(sample)
        for peer in peers:
            with peer.connect() as wire:
                wire.flush()
        rows += summarize_lookups(transport, keys, samples)
    return rows


def _fill(peer: Peer, op: str, keys: Sequence[bytes]) -> None:
    """Store all keys, after asking an empty server: one that always says that it has all of them is noticed."""
    with peer.connect() as wire:
        wire.flush()
        wire.call(request_of(op, keys), b":0")
        for key in keys:
            wire.put(key, _VALUE)


def _ask_for_a_while(peer: Peer, request: bytes, count: int, run_s: float) -> LookupSample:
    took_s: list[float] = []
    reply = b":%d" % count
    with peer.connect() as wire:
        _ask(wire, request, reply, _WARM_UP_CALLS)
        before_s = peer.cpu_s()
        end_s = time.perf_counter() + run_s
        while not took_s or time.perf_counter() < end_s:
            took_s.append(_ask(wire, request, reply, 1))
        cpu_s = peer.cpu_s() - before_s
    return LookupSample(
        repeat=0,
        calls=len(took_s),
        p50_us=percentile(took_s, 50) * 1e6,
        p99_us=percentile(took_s, 99) * 1e6,
        server_cpu_us_per_call=cpu_s * 1e6 / len(took_s),
    )


def _ask(wire: Wire, request: bytes, reply: bytes, times: int) -> float:
    start_s = time.perf_counter()
    for _ in range(times):
        wire.call(request, reply)
    return time.perf_counter() - start_s


def summarize_lookups(transport: Transport, keys: Sequence[bytes], samples: Samples) -> list[Row]:
    """Sum up one kind of keys over the repeats; one row per server and op."""
    ratios = {"ratio_p50": "p50_us", "ratio_server_cpu": "server_cpu_us_per_call"}
    rows = []
    for (server, op), own in samples.items():
        others = {BASELINE: samples.get((BASELINE, "EXISTS"), []), BEFORE: samples.get((BEFORE, op), [])}
        rows.append(
            Row(server=server, op=op, transport=transport, keys=len(keys), key_bytes=len(keys[0]), samples=own)
            | summed(own, ("p50_us", "p99_us", "server_cpu_us_per_call"))
            | compared(server, own, others, ratios)
        )
    return rows


class HeadOfLineSample(TypedDict):
    repeat: int
    pings: int
    p50_ms: float
    p99_ms: float
    background_gb_per_s: float


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
) -> list[Row]:
    """Measure every background; `servers` speak RESP."""
    rows: list[Row] = []
    for background in BACKGROUNDS:
        samples: dict[str, list[HeadOfLineSample]] = {server.name: [] for server in servers}
        for repeat in range(plan.repeats):
            progress(f"PING beside 32 MiB {background}")
            for server in rotated(servers, repeat):
                sample = _ping_beside(server, background, plan.run_s)
                sample["repeat"] = repeat
                samples[server.name].append(sample)
        rows += summarize_pings(background, samples)
    return rows


def summarize_pings(background: str, samples: dict[str, list[HeadOfLineSample]]) -> list[Row]:
    """Sum up one background over the repeats; one row per server."""
    return [
        Row(server=server, background=background, samples=own)
        | summed(own, ("p50_ms", "p99_ms", "background_gb_per_s"))
        | compared(server, own, samples, {"ratio_p99": "p99_ms"})
        for server, own in samples.items()
    ]


def _ping_beside(server: ServerProcess, background: str, run_s: float) -> HeadOfLineSample:
    command = [sys.executable, "-m", __spec__.name, str(server.address), background]
    with LineProcess("the mover", command, child_environment(os.environ)) as mover:
        mover.answer(_MOVER_WAIT_S)  # it moves
        took_s = pings(server, run_s)
        mover.finish()
        moved = mover.answer(_MOVER_WAIT_S)
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


SIZE_BYTES = 32 * 1024**2
_KEYS = 2
_SEED = 20250102
BACKGROUNDS = ("SET", "GET", "both")


def main(url: str, background: str) -> None:
    """Move values until standard input ends; see the module's docstring."""
    address = parse_url(url)
    nbytes = memory_bytes([SIZE_BYTES], _KEYS * SIZE_BYTES)
    work = Workload(SIZE_BYTES, _KEYS, Memory(nbytes, seed=_SEED), Memory(nbytes))
    stop = threading.Event()

    def move(direction: str) -> int:
        moved = 0
        with Wire.connect(address, Resp()) as wire:
            while moved < _KEYS * SIZE_BYTES or not stop.is_set():  # every key at least once: all are compared
                index = (moved // SIZE_BYTES) % _KEYS
                if direction == "SET":
                    wire.put(work.keys[index], work.value(index, 0))
                else:
                    wire.get(work.keys[index], work.place(index))
                moved += SIZE_BYTES
        return moved

    with Wire.connect(address, Resp()) as wire:
        for job in work.sets(0):
            wire.put(job.key, job.view)
        with ThreadPoolExecutor(2) as pool:
            directions = ("SET", "GET") if background == "both" else (background,)
            start_s = time.monotonic()
            futures = [pool.submit(move, direction) for direction in directions]
            print(json.dumps({"said": "ready"}), flush=True)
            sys.stdin.read()
            stop.set()
            moved = sum(future.result() for future in futures)
            seconds = time.monotonic() - start_s
        if background == "SET":
            for job in work.gets():
                wire.get(job.key, job.view)
        work.verify(0, str(address))
    print(json.dumps({"bytes": moved, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except KVRedisError as error:
        sys.exit(str(error))
