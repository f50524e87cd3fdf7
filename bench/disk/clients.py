"""How long does a client wait for a block that is on disk, and do others feel it when blocks are spilled? GETs of one
client, and PINGs beside a process that SETs flat out.

GETs: one request in flight, one server whose arena holds a third of the keys. Keys are asked for in the order in which
they were stored, over and over, so the policy has always let go of the next one. For each block: one preadv of a
record's length from a segment file into this process, GET of the block from disk, and GET of it again, now from memory.
INFO (tier_promoted) says whether the first GET really read the disk; else the block does not count. Then as many blocks
are prefetched as half the arena holds, and all of them are asked for twice in the same order.

PINGs: every millisecond, alone and beside the load, which is a process (this file as a program: `URL SIZE KEYS`), since
a thread would make them wait for the GIL. It stores every key once, says so, goes on until its standard input closes,
says that it has stopped, gets every key back and compares it in full, and prints a line of JSON. The same load goes to
a kvredis without a disk: what both have in common is the price of taking in so many bytes.

Values are slices of one random mapping, a page apart, so any two differ from their first bytes on and a thousand of
them need the memory of one. Which slice a key holds is known from its number and the pass in which it was stored.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Final, TypedDict

from kvredis.backends.config.url import Address, parse_url
from kvredis.backends.resp.connection import Connection, Reply
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.line_process import LineProcess
from kvredis.bench.core.result import Progress, Row, summed
from kvredis.bench.core.servers import ServerProcess, Transport, child_environment, info_lines
from kvredis.bench.core.statistics import GB, MIB, by_repeat, middle, paired_ratio, percentile, rotated, size_text
from kvredis.bench.core.workload import PAGE_BYTES, VALUE_OFFSET_BYTES, Memory, same_bytes
from kvredis.bench.server.latency import pings
from kvredis.storage.disk.segment import record_bytes
from kvredis.storage.errors import BackendError, KVRedisError
from kvredis.storage.memory.arena import Arena

from .rates import Mode, forget_pages

WITH_DISK, WITHOUT_DISK = "disk", "memory"


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


_SILENCE_S = 60.0


class Values:
    """What `count` keys of `size_bytes` hold, and the place where a value is received. Owns both mappings."""

    def __init__(self, size_bytes: int, count: int, seed: int) -> None:
        self.size_bytes, self.count = size_bytes, count
        self._source = Memory(size_bytes + (count + 1) * PAGE_BYTES, seed=seed)
        self._target = Memory(size_bytes + PAGE_BYTES)
        self.place = self._target.view[VALUE_OFFSET_BYTES : VALUE_OFFSET_BYTES + size_bytes]

    def key(self, index: int) -> bytes:
        """Give the name of key `index`."""
        return b"bench:%d:%05d" % (self.size_bytes, index)

    def value(self, index: int, shift: int = 0) -> memoryview:
        """Lend what key `index` holds after pass `shift`."""
        at = self._at(index, shift)
        return self._source.view[at : at + self.size_bytes]

    def _at(self, index: int, shift: int) -> int:
        return (index + shift) % self.count * PAGE_BYTES + VALUE_OFFSET_BYTES

    def wipe(self) -> None:
        """Forget the value that was received last."""
        self._target.wipe(self._target.nbytes)

    def check(self, index: int, shift: int, who: str) -> int:
        """Compare the value that was received last with that of key `index`, in full; give its bytes."""
        ours = self._source.address + self._at(index, shift)
        if not same_bytes(ours, self._target.address + VALUE_OFFSET_BYTES, self.size_bytes):
            raise VerificationError(f"{who} returned a wrong byte of {self.key(index).decode()}")
        return self.size_bytes


class BlockClient:
    """One connection, one request in flight. BackendError when it breaks; use it in a with-block."""

    def __init__(self, address: Address, values: Values) -> None:
        self.values = values
        self._connection = Connection.open(address, _SILENCE_S)

    def __enter__(self) -> BlockClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def store(self, index: int, shift: int = 0) -> None:
        """SET a key; BenchError when it is refused."""
        reply = self._connection.set(self.values.key(index), self.values.value(index, shift))
        if reply != "OK":
            raise BenchError(f"SET was answered {reply!r}")

    def load(self, index: int) -> float | None:
        """GET a key into the values' place; give the seconds from the request to the last byte, None for a miss."""
        key, place = self.values.key(index), self.values.place
        start_s = time.perf_counter()
        self._connection.send([b"GET", key])
        length = self._connection.read_bulk_into(lambda nbytes: place if nbytes == len(place) else None)
        took_s = time.perf_counter() - start_s
        if length is None:
            return None
        if isinstance(length, BackendError) or length != len(place):
            raise BenchError(f"GET of {len(place)} bytes was answered {length!r}")
        return took_s

    def save(self) -> None:
        """Have everything that this connection stored on disk; BenchError when it is not."""
        reply = self._call(b"WAITAOF", b"1", b"0", b"%d" % int(_SILENCE_S * 500))
        if reply != [1, 0]:
            raise BenchError(f"WAITAOF was answered {reply!r}")

    def prefetch(self, indices: list[int]) -> dict[str, int]:
        """KV.PREFETCH as a job, and wait for its end; gives what the server said of it at first."""
        words = self._call(b"KV.PREFETCH", *(self.values.key(index) for index in indices), b"JOB")
        if not isinstance(words, list):
            raise BenchError(f"KV.PREFETCH was answered {words!r}")
        said = {_text(name): value for name, value in zip(words[::2], words[1::2], strict=True)}
        job = said.get("job")
        if not isinstance(job, int):
            raise BenchError(f"KV.PREFETCH gave no job: {said!r}")
        ended = self._call(b"KV.JOB", b"%d" % job, b"WAIT", b"%d" % int(_SILENCE_S * 500))
        if isinstance(ended, BackendError) or ended is None:
            raise BenchError(f"KV.JOB was answered {ended!r}")
        return {name: value for name, value in said.items() if isinstance(value, int)}

    def counters(self) -> dict[str, int]:
        """Give the whole numbers in INFO's Kv section."""
        lines = info_lines(self._connection.call(b"INFO", b"kv"))
        return {name: int(text) for name, text in lines.items() if text.removeprefix("-").isdecimal()}

    def words(self) -> dict[str, str]:
        """Give INFO's Kv section as it is written."""
        return info_lines(self._connection.call(b"INFO", b"kv"))

    def _call(self, *args: bytes) -> Reply:
        return self._connection.call(*args)


def _text(reply: Reply) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)


_KEYS_TO_ARENA: Final = 3
_PREFETCH_PART: Final = 2
_PROMOTED: Final = "tier_promoted"


@dataclass(frozen=True, slots=True)
class GetPlan:
    """How many blocks of which sizes. `arena_bytes` is what the server has."""

    arena_bytes: int
    repeats: int = 5
    sizes: Sequence[int] = (2 * MIB, 32 * MIB)
    repeat_bytes: int = 128 * MIB  # of blocks that are asked for one by one
    seed: int = 20250104

    def keys(self, size_bytes: int) -> int:
        return _KEYS_TO_ARENA * self.arena_bytes // size_bytes

    def blocks(self, size_bytes: int) -> int:
        return max(2, self.repeat_bytes // size_bytes)

    def prefetched(self, size_bytes: int) -> int:
        return max(1, self.arena_bytes // _PREFETCH_PART // record_bytes(size_bytes))

    def steps(self) -> int:
        """Give how often `run_gets` calls its progress."""
        return self.repeats * len(self.sizes)


def run_gets(
    plan: GetPlan, server: ServerProcess, transport: Transport, directory: Path, progress: Progress
) -> list[Row]:
    """Measure every size; `directory` is the server's disk tier. BenchError, VerificationError, BackendError."""
    rows = []
    for size in plan.sizes:
        values = Values(size, plan.keys(size), plan.seed)
        with BlockClient(server.address, values) as client:
            for index in range(values.count):
                client.store(index)
            client.save()
            mode: Mode = "direct" if client.words().get("disk_direct") == "yes" else "buffered"
            samples = []
            with closing(_Turns(plan, client, server.cpu_s, (directory, mode))) as turns:
                for repeat in range(plan.repeats):
                    progress(f"GET of {size_text(size)} from disk, {transport}")
                    samples.append(turns.turn(repeat))
        rows.append(summarize_gets(transport, size, mode, samples))
        with server.connect() as wire:
            wire.flush()
    return rows


class _Turns:
    """The repeats of one size: they go on where the last one stopped."""

    def __init__(
        self, plan: GetPlan, client: BlockClient, cpu_s: Callable[[], float], where: tuple[Path, Mode]
    ) -> None:
        self._plan, self._client, self._cpu_s = plan, client, cpu_s
        self._values = client.values
        self._next = 0
        self._reading = _Reading(*where, record_bytes(self._values.size_bytes), plan.seed)

    def turn(self, repeat: int) -> GetSample:
        """Do one repeat."""
        size = self._values.size_bytes
        pread_s: list[float] = []
        spilled_s: list[float] = []
        resident_s: list[float] = []
        spilled_cpu_s = resident_cpu_s = 0.0
        skipped = verified = 0
        for _ in range(self._plan.blocks(size)):
            index = self._take()
            read_s = self._reading.one()
            promoted, cpu = self._client.counters()[_PROMOTED], self._cpu_s()
            took_s, nbytes = self._get(index)
            cpu, promoted = self._cpu_s() - cpu, self._client.counters()[_PROMOTED] - promoted
            verified += nbytes
            if took_s is None or promoted != 1:
                skipped += 1
                continue
            spilled_cpu_s += cpu
            cpu = self._cpu_s()
            again_s, nbytes = self._get(index)
            resident_cpu_s += self._cpu_s() - cpu
            if again_s is None:
                raise BenchError(f"key {index} was gone right after it had been read from disk")
            verified += nbytes
            pread_s.append(read_s)
            spilled_s.append(took_s)
            resident_s.append(again_s)
        first_s, again, nbytes = self._prefetch()
        return GetSample(
            repeat=repeat,
            blocks=len(spilled_s),
            skipped=skipped,
            pread_ms=middle(pread_s) * 1e3,
            spilled_ms=middle(spilled_s) * 1e3,
            resident_ms=middle(resident_s) * 1e3,
            prefetched_ms=middle(first_s) * 1e3,
            prefetched_again_ms=middle(again) * 1e3,
            spilled_cpu_s_per_gb=spilled_cpu_s * GB / (max(1, len(spilled_s)) * size),
            resident_cpu_s_per_gb=resident_cpu_s * GB / (max(1, len(spilled_s)) * size),
            verified_bytes=verified + nbytes,
        )

    def close(self) -> None:
        """Close the segment file."""
        self._reading.close()

    def _take(self) -> int:
        self._next = (self._next + 1) % self._values.count
        return self._next

    def _get(self, index: int) -> tuple[float | None, int]:
        """GET a key and compare it; the time is None for a miss."""
        self._values.wipe()
        self._reading.forget()
        took_s = self._client.load(index)
        return took_s, 0 if took_s is None else self._values.check(index, 0, "kvredis")

    def _prefetch(self) -> tuple[list[float], list[float], int]:
        """Fetch ahead and GET twice; gives both lists of times and the bytes compared. Misses are left out of both."""
        indices = [self._take() for _ in range(self._plan.prefetched(self._values.size_bytes))]
        said = self._client.prefetch(indices)
        if said.get("queued", 0) * 2 < len(indices):
            raise BenchError(f"of {len(indices)} blocks on disk KV.PREFETCH queued few: {said}")
        before = self._client.counters()[_PROMOTED]
        rounds = [[self._get(index) for index in indices] for _ in range(2)]
        if (read := self._client.counters()[_PROMOTED] - before) > len(indices) // 4:
            raise BenchError(f"{read} of {len(indices)} blocks that were fetched ahead had to be read again")
        both = [(first, again) for (first, _), (again, _) in zip(*rounds, strict=True)]
        whole = [(first, again) for first, again in both if first is not None and again is not None]
        nbytes = sum(count for each in rounds for _, count in each)
        return [first for first, _ in whole], [again for _, again in whole], nbytes


class _Reading:
    """One preadv after the other, of records' length and from places where records may lie, in one segment file."""

    def __init__(self, directory: Path, mode: Mode, nbytes: int, seed: int) -> None:
        self._paths = sorted(directory.glob("segment-*.kv"))
        self._cold = mode == "buffered"
        direct = 0 if self._cold else os.O_DIRECT
        self._fd = os.open(self._paths[0], os.O_RDONLY | os.O_CLOEXEC | direct)
        self._places = os.fstat(self._fd).st_size // nbytes
        self._nbytes = nbytes
        self._random = random.Random(seed)
        self._arena = Arena.create(nbytes)
        self._arena.prefault(1)

    def one(self) -> float:
        """Read once; gives the seconds."""
        offset = self._random.randrange(self._places) * self._nbytes
        self.forget()
        start_s = perf_counter()
        count = os.preadv(self._fd, [self._arena.view[: self._nbytes]], offset)
        took_s = perf_counter() - start_s
        if count != self._nbytes:
            raise BenchError(f"preadv of {self._nbytes} bytes at {offset} gave {count}")
        return took_s

    def forget(self) -> None:
        """Where the tier is buffered: drop its files from the page cache, so that the disk is really read."""
        if self._cold:
            for path in self._paths:
                forget_pages(path)

    def close(self) -> None:
        """Close the file and give the memory back."""
        os.close(self._fd)
        self._arena.close()


def summarize_gets(transport: str, size_bytes: int, mode: Mode, samples: list[GetSample]) -> Row:
    """Sum up one size over the repeats."""
    pread, resident = by_repeat(samples, "pread_ms"), by_repeat(samples, "resident_ms")
    spilled = by_repeat(samples, "spilled_ms")
    net = {repeat: spilled[repeat] - resident[repeat] for repeat in spilled}
    row = Row(transport=transport, size_bytes=size_bytes, mode=mode, samples=samples)
    row |= summed(
        samples,
        ("pread_ms", "spilled_ms", "resident_ms", "prefetched_ms", "spilled_cpu_s_per_gb", "resident_cpu_s_per_gb"),
    )
    row["ratio_spilled"] = _known(paired_ratio(spilled, pread))
    row["ratio_spilled_net"] = _known(paired_ratio(net, pread)) if any(spilled.values()) else None
    again = by_repeat(samples, "prefetched_again_ms")
    row["ratio_prefetched"] = _known(paired_ratio(by_repeat(samples, "prefetched_ms"), again))
    return row


def _known(ratio: float | None) -> float | None:
    """A ratio of nothing is none: repeats in which no block was on disk have zeros."""
    return ratio or None


_MOVER_WAIT_S: Final = 120.0
_CALM_WAIT_S: Final = 30.0
_COUNTED: Final = ("spilled", "spilled_bytes", "spill_dropped", "spill_failed", "spill_waits", "lost", "unloaded")


@dataclass(frozen=True, slots=True)
class PingPlan:
    """The load, and how long it lasts. `keys` of `size_bytes` are more than the arena holds and less than the disk."""

    keys: int
    repeats: int = 5
    size_bytes: int = 2 * MIB
    run_s: float = 2.0

    def steps(self) -> int:
        """Give how often `run_pings` calls its progress."""
        return self.repeats


def run_pings(plan: PingPlan, servers: Sequence[ServerProcess], transport: Transport, progress: Progress) -> list[Row]:
    """Measure every server in turn, in rotating order; one row each."""
    samples: dict[str, list[PingSample]] = {server.name: [] for server in servers}
    for repeat in range(plan.repeats):
        progress(f"PING beside SETs flat out, {transport}")
        for server in rotated(servers, repeat):
            samples[server.name].append(_measure(plan, server, repeat))
    return summarize_pings(transport, samples)


def _measure(plan: PingPlan, server: ServerProcess, repeat: int) -> PingSample:
    _calm(server)
    quiet_s = pings(server, plan.run_s)
    command = [sys.executable, "-m", __spec__.name, str(server.address), str(plan.size_bytes), str(plan.keys)]
    with LineProcess("the mover", command, child_environment(os.environ)) as mover:
        mover.answer(_MOVER_WAIT_S)  # every key is stored
        counted, cpu_s = _counters(server), server.cpu_s()
        busy_s = pings(server, plan.run_s)
        mover.finish()
        mover.answer(_MOVER_WAIT_S)  # it has stopped
        cpu_s = server.cpu_s() - cpu_s
        after = _counters(server)
        moved = mover.answer(_MOVER_WAIT_S)
    return PingSample(
        repeat=repeat,
        quiet_p50_ms=percentile(quiet_s, 50) * 1e3,
        quiet_p99_ms=percentile(quiet_s, 99) * 1e3,
        quiet_max_ms=max(quiet_s) * 1e3,
        busy_p50_ms=percentile(busy_s, 50) * 1e3,
        busy_p99_ms=percentile(busy_s, 99) * 1e3,
        busy_max_ms=max(busy_s) * 1e3,
        set_gb_per_s=moved["bytes"] / moved["seconds"] / GB,
        server_cpu_s_per_gb=cpu_s * GB / max(1, moved["bytes"]),
        counters={name: after[name] - counted.get(name, 0) for name in after},
        missing=moved["missing"],
        verified_bytes=moved["verified_bytes"],
    )


_PING_FIGURES: Final = (
    *(f"{when}_{what}_ms" for when in ("quiet", "busy") for what in ("p50", "p99", "max")),
    "set_gb_per_s",
    "server_cpu_s_per_gb",
)


def summarize_pings(transport: str, samples: dict[str, list[PingSample]]) -> list[Row]:
    """Sum up over the repeats; one row per server."""
    base = samples.get(WITHOUT_DISK, [])
    rows = []
    for server, own in samples.items():
        rate, busy = by_repeat(own, "set_gb_per_s"), by_repeat(own, "busy_p99_ms")
        totals = {name: sum(sample["counters"].get(name, 0) for sample in own) for name in _COUNTED}
        row = Row(server=server, transport=transport, samples=own, counters=totals)
        row |= summed(own, _PING_FIGURES)
        row["missing"] = sum(sample["missing"] for sample in own)
        row["ratio_p99"] = paired_ratio(busy, by_repeat(own, "quiet_p99_ms"))
        row["ratio_busy_p99"] = paired_ratio(busy, by_repeat(base, "busy_p99_ms"))
        row["ratio_set"] = paired_ratio(rate, by_repeat(base, "set_gb_per_s"))
        rows.append(row)
    return rows


def _counters(server: ServerProcess) -> dict[str, int]:
    """Give what the server has counted so far; 0 of what it does not count."""
    lines = _info(server)
    return {name: int(lines.get(f"tier_{name}", "0")) for name in _COUNTED}


def _calm(server: ServerProcess) -> None:
    """Wait until nothing waits to be spilled, so that quiet is quiet."""
    until_s = time.monotonic() + _CALM_WAIT_S
    while int(_info(server).get("disk_queued_spills", "0")):
        if time.monotonic() > until_s:
            raise BenchError(f"{server.name} still spills after {_CALM_WAIT_S:.0f} s without load")
        time.sleep(0.05)


def _info(server: ServerProcess) -> dict[str, str]:
    with Connection.open(server.address) as connection:
        return info_lines(connection.call(b"INFO", b"kv"))


_SEED = 20250105


def main(url: str, size_bytes: int, count: int) -> None:
    """SET until standard input ends; see the module's docstring."""
    values = Values(size_bytes, count, _SEED)
    stop = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    with BlockClient(parse_url(url), values) as client:
        for index in range(count):
            client.store(index)
        print(json.dumps({"said": "ready"}), flush=True)
        sets, start_s = 0, time.monotonic()
        while not stop.is_set():
            client.store(sets % count, 1 + sets // count)
            sets += 1
        seconds = time.monotonic() - start_s
        print(json.dumps({"said": "stopped"}), flush=True)
        missing = verified = 0
        for index in range(count):
            values.wipe()
            if client.load(index) is None:
                missing += 1
            else:
                verified += values.check(index, (sets + count - 1 - index) // count, url)
    said = {"bytes": sets * size_bytes, "seconds": seconds, "missing": missing, "verified_bytes": verified}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except KVRedisError as error:
        sys.exit(str(error))
