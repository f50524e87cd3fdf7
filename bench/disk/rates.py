"""How many blocks a second go to and from one directory: by the device, by a plain loop, and by the disk tier? They
take turns: in each repeat, for each mode and number of threads, every arm writes all its blocks, then every arm reads
all of them. Buffered files are read twice: cold, and out of the page cache.

fio says what the device does, as the field's usual tool. The loop is the fairer neighbour: the same threads, images and
memory, and nothing but preadv and pwrite. The checked loop finds the checksum of each block too, which the tier cannot
do without: what the tier takes of the CPU beside that is its own. The tier spills (place, write with its checksum,
publish) and promotes (get, read, the checksum again) by the threads that a server has for it; it is full, as a cache
always is, so making room and telling the index of it are in the figure.

An image is what the disk tier writes: page-aligned, the payload HEADER_BYTES behind its start. No two blocks are alike,
and which image a block holds shifts by one with every pass, so that a record of another key or of an earlier pass is
noticed. They lie in an arena, on hugepages if the machine has some: 2 MiB in one piece are one request to a device, 512
scattered pages are several, which has been seen to cost half the rate. The tier writes as a server does, some blocks
side by side in one call (DiskTier.run_bytes); a block's time is then that of the call.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, Protocol, TypedDict

from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.result import Progress, Row, summed
from kvredis.bench.core.statistics import GB, MIB, by_repeat, counted, middle, paired_ratio, percentile, rotated
from kvredis.bench.core.workload import same_bytes
from kvredis.storage.background import IoThreads, Priority
from kvredis.storage.disk.checksum import digest
from kvredis.storage.disk.files import RealFiles
from kvredis.storage.disk.segment import HEADER_BYTES, Facts, Record, record_bytes
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.memory.arena import PREFAULT_THREADS_MAX, Arena
from kvredis.storage.memory.page_lock import c_library

DEVICE, LOOP, CHECKED, TIER = "device", "loop", "checked", "tier"
Mode = Literal["direct", "buffered"]
Op = Literal["write", "read", "read warm"]
MODES: Final[tuple[Mode, ...]] = ("direct", "buffered")


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


_FILL_BYTES: Final = 1 << 20


class Blocks:
    """`count` blocks with a payload of `size_bytes` each. Owns twice their memory until `close`.

    Raises ArenaError when there is not so much.
    """

    def __init__(self, size_bytes: int, count: int, seed: int) -> None:
        self.size_bytes, self.count = size_bytes, count
        self.stride_bytes = record_bytes(size_bytes)
        self._places_at = count * self.stride_bytes
        self._arena = Arena.create(2 * self._places_at)
        self._arena.prefault(PREFAULT_THREADS_MAX)
        source = random.Random(seed)
        for start in range(0, self._places_at, _FILL_BYTES):
            end = min(start + _FILL_BYTES, self._places_at)
            self._arena.view[start:end] = source.randbytes(end - start)

    @property
    def pages(self) -> str:
        """What kind of pages the memory is made of."""
        return self._arena.pages

    @property
    def nbytes(self) -> int:
        """The payload of all blocks."""
        return self.size_bytes * self.count

    def image(self, index: int, shift: int) -> memoryview:
        """Lend the image of block `index` in pass `shift`; the caller that writes it may use its first HEADER_BYTES."""
        at = (index + shift) % self.count * self.stride_bytes
        return self._arena.view[at : at + self.stride_bytes]

    def place(self, index: int) -> memoryview:
        """Lend the memory that block `index` is read into."""
        at = self._places_at + index * self.stride_bytes
        return self._arena.view[at : at + self.stride_bytes]

    def wipe(self) -> None:
        """Forget what was read, so that a later comparison cannot pass on it."""
        ctypes.memset(self._arena.address + self._places_at, 0, self._places_at)

    def verify(self, shift: int, who: str, nbytes: int) -> int:
        """Compare `nbytes` behind each image's header with what was read; give the bytes compared.

        Raises VerificationError at the first block that is not what was written in pass `shift`.
        """
        for index in range(self.count):
            ours = (index + shift) % self.count * self.stride_bytes + HEADER_BYTES
            theirs = self._places_at + index * self.stride_bytes + HEADER_BYTES
            if not same_bytes(self._arena.address + ours, self._arena.address + theirs, nbytes):
                raise VerificationError(f"{who} returned a wrong byte in block {index}")
        return self.count * nbytes

    def close(self) -> None:
        """Give the memory back; nothing that was lent may be used afterwards."""
        self._arena.close()


_TOOL_WAIT_S = 300.0
_START_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Timing:
    """What moving all blocks once took, and one block of them; None where that was not seen."""

    seconds: float
    cpu_s: float
    p50_ms: float | None = None
    p99_ms: float | None = None

    def by_block(self, times_s: Sequence[float]) -> Timing:
        """Give the same with percentiles over the times of single blocks."""
        return replace(self, p50_ms=percentile(times_s, 50) * 1e3, p99_ms=percentile(times_s, 99) * 1e3)


class RateArm(Protocol):
    """One of those that take turns. Methods block; BenchError when it cannot be done."""

    name: str

    def write(self, mode: Mode, threads: int, shift: int) -> Timing:
        """Write every block, with what it holds in pass `shift`, until the device confirms it."""
        ...

    def read(self, mode: Mode, threads: int) -> Timing:
        """Read every block as it was last written in this mode."""
        ...

    def verify(self, mode: Mode) -> int:
        """Compare what was read last, in full; gives the bytes compared. VerificationError when one is wrong."""
        ...

    def forget_pages(self) -> None:
        """Have nothing of our files left in the page cache."""
        ...

    def close(self) -> None:
        """Let go of files; they stay."""
        ...


def forget_pages(path: Path) -> None:
    """Drop a file from the page cache: what is dirty is written first, since the kernel drops only clean pages."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def cached_share(path: Path) -> float:
    """Give the share of a file's pages that are in the page cache, 0.0 to 1.0; 0.0 of an empty one."""
    nbytes = path.stat().st_size
    if not nbytes:
        return 0.0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_PRIVATE) as mapping:
        held = ctypes.c_char.from_buffer(mapping)
        try:
            pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
            address = ctypes.c_void_p(ctypes.addressof(held))
            if c_library().mincore(address, ctypes.c_size_t(nbytes), pages):
                raise BenchError(f"mincore: {os.strerror(ctypes.get_errno())}")
        finally:
            del held
    return sum(page & 1 for page in pages) / len(pages)


class Loop:
    """preadv and pwrite of one file from Python threads, each with a stretch of the blocks; when `checked`, also the
    checksum of each block, before it is written and after it was read."""

    def __init__(self, path: Path, blocks: Blocks, *, checked: bool = False) -> None:
        self.name = CHECKED if checked else LOOP
        self._path, self._blocks = path, blocks
        self._digest = digest if checked else None
        self._shift = 0

    def write(self, mode: Mode, threads: int, shift: int) -> Timing:
        self._shift, size = shift, self._blocks.size_bytes
        file = RealFiles().open(self._path, direct=mode == "direct")
        times_s: list[float] = []

        def some(part: range) -> None:
            for index in part:
                start_s = time.perf_counter()
                image = self._blocks.image(index, shift)[:size]
                if self._digest is not None:
                    self._digest(image)
                file.pwrite(image, index * size)
                times_s.append(time.perf_counter() - start_s)

        try:
            return timed_threads(threads, self._blocks.count, some, file.sync).by_block(times_s)
        finally:
            file.close()

    def read(self, mode: Mode, threads: int) -> Timing:
        size = self._blocks.size_bytes
        file = RealFiles().open(self._path, direct=mode == "direct")
        times_s: list[float] = []

        def some(part: range) -> None:
            for index in part:
                start_s = time.perf_counter()
                place = self._blocks.place(index)[:size]
                if file.pread(place, index * size) != size:
                    raise BenchError(f"{self._path} ended early")
                if self._digest is not None:
                    self._digest(place)
                times_s.append(time.perf_counter() - start_s)

        try:
            return timed_threads(threads, self._blocks.count, some).by_block(times_s)
        finally:
            file.close()

    def verify(self, mode: Mode) -> int:
        """As RateArm; not the first bytes of an image, which the tier's headers are written to."""
        return self._blocks.verify(self._shift, f"the arm {self.name}", self._blocks.size_bytes - HEADER_BYTES)

    def forget_pages(self) -> None:
        forget_pages(self._path)

    def close(self) -> None:
        """As RateArm."""


def timed_threads(
    threads: int, count: int, work: Callable[[range], None], finish: Callable[[], None] = lambda: None
) -> Timing:
    """Let `threads` threads do equal stretches of `count` items, then `finish`; they start together, with the clock."""
    starts_s: list[float] = []  # by the last thread at the gate: this one may not run again until others have
    gate = threading.Barrier(threads + 1, lambda: starts_s.append(time.perf_counter()))

    def one(part: range) -> None:
        gate.wait(_START_WAIT_S)
        work(part)

    parts = [range(count * part // threads, count * (part + 1) // threads) for part in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(one, part) for part in parts]
        cpu_s = time.process_time()
        gate.wait(_START_WAIT_S)
        for future in futures:
            future.result()
        finish()
        return Timing(time.perf_counter() - starts_s[0], time.process_time() - cpu_s)


class Fio:
    """fio with one synchronous read or write in flight for each of its threads. What it writes is its own affair, so
    nothing can be compared."""

    name = DEVICE

    def __init__(self, path: Path, block_bytes: int, count: int) -> None:
        self._path, self._block_bytes, self._count = path, block_bytes, count

    def write(self, mode: Mode, threads: int, shift: int) -> Timing:
        return self._move("write", mode, threads)

    def read(self, mode: Mode, threads: int) -> Timing:
        return self._move("read", mode, threads)

    def verify(self, mode: Mode) -> int:
        """As RateArm: nothing."""
        return 0

    def forget_pages(self) -> None:
        forget_pages(self._path)

    def close(self) -> None:
        """As RateArm."""

    def _move(self, op: str, mode: Mode, threads: int) -> Timing:
        share = self._block_bytes * (self._count // threads)
        return fio_timing(_said([*self._command(op, mode, threads), f"--size={share}"]), op)

    def _command(self, op: str, mode: Mode, threads: int) -> list[str]:
        share = self._block_bytes * (self._count // threads)
        return [
            *("fio", "--name=device", "--ioengine=psync", "--thread", "--group_reporting", "--output-format=json"),
            *("--invalidate=0", "--fallocate=none", "--end_fsync=1", f"--offset_increment={share}"),
            *(f"--filename={self._path}", f"--rw={op}", f"--bs={self._block_bytes}", f"--numjobs={threads}"),
            f"--direct={int(mode == 'direct')}",
        ]


def fio_timing(said: str, op: str) -> Timing:
    """Read fio's JSON of one group; it begins at the first brace. Raises BenchError when it is none.

    The rate counts from the first block to the end of the last fsync. fio gives CPU time in percent of the jobs'
    running times, added up (job_runtime, ms). Some fio tell no percentiles.
    """
    try:
        job: dict[str, Any] = json.loads(said[said.index("{") :])["jobs"][0]
        moved = job[op]
        if job["error"] or not moved["bw_bytes"]:
            raise BenchError(f"fio could not {op}: error {job['error']}")
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        times_ns = moved.get("clat_ns", {}).get("percentile", {})
        p50_ns, p99_ns = (times_ns.get(f"{percent}.000000") for percent in (50, 99))
        timing = Timing(moved["io_bytes"] / moved["bw_bytes"], cpu_s)
        return timing if p50_ns is None or p99_ns is None else replace(timing, p50_ms=p50_ns / 1e6, p99_ms=p99_ns / 1e6)
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"fio said something else than its figures: {said[:200]!r}") from error


def device_tool(path: Path, block_bytes: int, count: int) -> tuple[Fio | None, str]:
    """Give what measures the device here, and what it is called; None and why when there is nothing."""
    if shutil.which("fio"):
        return Fio(path, block_bytes, count), _said(["fio", "--version"]).strip()
    return None, "none: fio is not installed (Debian package fio)"


def _said(command: Sequence[str]) -> str:
    """Run a tool to its end and give its standard output; an interrupt ends it."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TOOL_WAIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{command[0]} did not end within {_TOOL_WAIT_S:.0f} s") from error
    if done.returncode:
        raise BenchError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


_PLACE_TRIES: Final = 16
"""How often room is asked for: other threads may take what one has made. The time of it is in the figure."""


def tier_bytes(blocks_bytes: int) -> int:
    """Give the room on disk of a tier for blocks whose records come to `blocks_bytes`: a pass, and some of the last."""
    return blocks_bytes * 5 // 4


class TierArm:
    """One tier for each mode, opened when it is first used."""

    name = TIER

    def __init__(self, directory: Path, blocks: Blocks) -> None:
        self._directory, self._blocks = directory, blocks
        self._tiers: dict[Mode, DiskTier] = {}
        self._shifts: dict[Mode, int] = {}

    def write(self, mode: Mode, threads: int, shift: int) -> Timing:
        tier, size = self._tier(mode), self._blocks.size_bytes
        self._shifts[mode] = shift

        times_s: list[float] = []

        def one(facts: Facts, image: memoryview) -> Record | None:
            extent = next((each for _ in range(_PLACE_TRIES) if (each := tier.place(size)[0]) is not None), None)
            return None if extent is None else tier.write(extent, image, facts)

        def spill(run: range) -> None:
            start_s = time.perf_counter()
            blocks = [(Facts(_key(shift, index), 0, size, 0), self._blocks.image(index, shift)) for index in run]
            written = tier.write_run(blocks)[0] if len(blocks) > 1 else None
            records = [one(*block) for block in blocks] if written is None else written
            if not all(record is not None and tier.publish(record) for record in records):
                raise BenchError(f"the tier in {self._directory} did not take a block: {tier.stats}")
            times_s.extend([time.perf_counter() - start_s] * len(run))

        def finish() -> None:
            if not tier.sync():
                raise BenchError(f"the tier in {self._directory} could not sync: {tier.stats}")

        at_once = max(1, tier.run_bytes // self._blocks.stride_bytes)
        runs = [range(at, min(at + at_once, self._blocks.count)) for at in range(0, self._blocks.count, at_once)]
        return self._timed(threads, Priority.SPILL, [partial(spill, run) for run in runs], finish).by_block(times_s)

    def read(self, mode: Mode, threads: int) -> Timing:
        tier, shift = self._tier(mode), self._shifts[mode]

        times_s: list[float] = []

        def promote(index: int) -> None:
            start_s = time.perf_counter()
            record = tier.get(_key(shift, index), 0)
            if record is None or not tier.read(record, self._blocks.place(index)):
                raise BenchError(f"the tier in {self._directory} has lost a block: {tier.stats}")
            times_s.append(time.perf_counter() - start_s)

        jobs = [partial(promote, index) for index in range(self._blocks.count)]
        return self._timed(threads, Priority.DEMAND, jobs, lambda: None).by_block(times_s)

    def verify(self, mode: Mode) -> int:
        return self._blocks.verify(self._shifts[mode], "the tier", self._blocks.size_bytes)

    def forget_pages(self) -> None:
        for path in self._directory.glob("*/segment-*.kv"):
            forget_pages(path)

    def close(self) -> None:
        while self._tiers:
            self._tiers.popitem()[1].close()

    def _tier(self, mode: Mode) -> DiskTier:
        if mode not in self._tiers:
            limit = tier_bytes(self._blocks.stride_bytes * (self._blocks.count + 8))
            options = DiskOptions(self._directory / mode, limit, direct=mode == "direct", source="kvredis bench disk")
            self._tiers[mode] = DiskTier.open(options)
        return self._tiers[mode]

    def _timed(
        self, threads: int, priority: Priority, jobs: Sequence[Callable[[], None]], finish: Callable[[], None]
    ) -> Timing:
        nbytes = self._blocks.nbytes // len(jobs)
        pool = IoThreads(threads, len(jobs), self._blocks.nbytes)
        pool.start()
        try:
            cpu_s, start_s = time.process_time(), time.perf_counter()
            submitted = [pool.submit(priority, nbytes, job) for job in jobs]
            futures = [future for future in submitted if future is not None]
            assert len(futures) == len(jobs), "the queue has room for every block"
            wait(futures)  # once for all: waking this thread for each block is no part of a tier's work
            for future in futures:
                future.result()
            finish()
            return Timing(time.perf_counter() - start_s, time.process_time() - cpu_s)
        finally:
            pool.close()


def _key(shift: int, index: int) -> bytes:
    return b"bench:%d:%05d" % (shift, index)


HUGEPAGES = "hugetlb-2MiB"
_CACHED_SHARE_MOST = 0.01
_WARM_UP_PASSES = 2  # the second pass fills what the first left of a tier's room


@dataclass(frozen=True, slots=True)
class RatePlan:
    """How much is moved, and by how many threads. Every cell moves all blocks once."""

    repeats: int = 5
    threads: Sequence[int] = (1, 2, 4, 8)
    modes: Sequence[Mode] = ("direct",)
    block_bytes: int = 2 * MIB
    cell_bytes: int = 512 * MIB
    seed: int = 20250103

    @property
    def count(self) -> int:
        """The blocks of a cell: as many for each thread, whatever their number."""
        step = math.lcm(*self.threads)
        return max(1, self.cell_bytes // (self.block_bytes * step)) * step

    def steps(self) -> int:
        """Give how often `run_rates` calls its progress."""
        return self.repeats * len(self.modes) * len(self.threads)

    def disk_bytes(self) -> int:
        """Give the room that the files of all arms take."""
        nbytes = self.count * self.block_bytes
        return 2 * nbytes + len(self.modes) * tier_bytes(nbytes + 64 * self.block_bytes)


@dataclass(slots=True)
class Rates:
    """What came of it: the rows, what stood for the device, and what could not be done."""

    device: str
    memory: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


_Samples = dict[tuple[Mode, Op, int], dict[str, list[RateSample]]]


def run_rates(plan: RatePlan, directory: Path, progress: Progress) -> Rates:
    """Measure in `directory`, whose file system it is about; leaves files there. BenchError, VerificationError."""
    free = shutil.disk_usage(directory).free
    if free < plan.disk_bytes():
        raise BenchError(f"{directory} has {free / GB:.1f} GB free, the bench needs {plan.disk_bytes() / GB:.1f} GB")
    with closing(Blocks(plan.block_bytes, plan.count, plan.seed)) as blocks:
        return _measured(plan, directory, blocks, progress)


def _measured(plan: RatePlan, directory: Path, blocks: Blocks, progress: Progress) -> Rates:
    tool, name = device_tool(directory / "device.data", plan.block_bytes, plan.count)
    rates = Rates(name, blocks.pages)
    if tool is not None and blocks.pages == HUGEPAGES:
        rates.notes.append(
            f"{name}: its buffers lie on small pages, ours on hugepages; the loop is the fairer neighbour"
        )
    modes = plan.modes
    if "direct" in modes and (obstacle := RealFiles().direct_obstacle(directory)) is not None:
        modes = ("buffered",)
        rates.notes.append(f"direct: skipped, {obstacle}")
    path = directory / "loop.data"  # both loops write the same there
    arms: list[RateArm] = [Loop(path, blocks), Loop(path, blocks, checked=True), TierArm(directory, blocks)]
    if tool is not None:
        arms.insert(0, tool)
    samples: _Samples = {}
    with ExitStack() as stack:
        for arm in arms:
            stack.callback(arm.close)
        shift = _warm_up(arms, modes)
        if "buffered" in modes:
            rates.notes += _still_cached(arms, directory)
        for repeat in range(plan.repeats):
            for mode, threads in product(modes, plan.threads):
                progress(f"{mode}, {counted(threads, 'thread')}")
                shift += 1
                for arm in rotated(arms, repeat):
                    arm.forget_pages()
                    timing = arm.write(mode, threads, shift)
                    _keep(samples, (mode, "write", threads), arm, _sample(plan, timing, repeat, 0))
                for arm in rotated(arms, repeat):
                    for op in _reads(mode):
                        sample = _read(plan, arm, blocks, (mode, op, threads), repeat)
                        _keep(samples, (mode, op, threads), arm, sample)
    for cell in sorted(samples, key=_cell_order):
        rates.rows += summarize(plan.block_bytes, cell, samples[cell])
    return rates


def summarize(block_bytes: int, cell: tuple[Mode, Op, int], samples: dict[str, list[RateSample]]) -> list[Row]:
    """Sum up one cell over the repeats; one row per arm."""
    rates = {arm: by_repeat(own, "gb_per_s") for arm, own in samples.items()}
    mode, op, threads = cell
    return [
        Row(arm=arm, mode=mode, op=op, threads=threads, block_bytes=block_bytes, samples=own)
        | summed(own, ("gb_per_s", "cpu_s_per_gb"))
        | {
            "ratio_to_device": paired_ratio(rates[arm], rates.get(DEVICE, {})),
            "ratio_to_loop": paired_ratio(rates[arm], rates.get(LOOP, {})),
            "p50_ms": _middle(own, "p50_ms"),
            "p99_ms": _middle(own, "p99_ms"),
        }
        for arm, own in samples.items()
    ]


def _middle(samples: Sequence[RateSample], figure: Literal["p50_ms", "p99_ms"]) -> float | None:
    """Give a percentile's median over the repeats, None where single blocks were not seen."""
    found = [value for sample in samples if (value := sample.get(figure)) is not None]
    return middle(found) if found else None


def _warm_up(arms: Sequence[RateArm], modes: Sequence[Mode]) -> int:
    """Lay out every file, untimed; gives the last pass."""
    for mode, arm in product(modes, arms):
        for shift in range(_WARM_UP_PASSES):
            arm.write(mode, 1, shift)
    return _WARM_UP_PASSES


def _still_cached(arms: Sequence[RateArm], directory: Path) -> list[str]:
    """Say so when this file system keeps pages that it is told to drop: then a cold read there is none."""
    for arm in arms:
        arm.forget_pages()
    share = max(cached_share(path) for path in directory.glob("*.data"))
    if share <= _CACHED_SHARE_MOST:
        return []
    return [f"cold reads are not cold: {share:.0%} of a file stays in the page cache after POSIX_FADV_DONTNEED"]


def _reads(mode: Mode) -> tuple[Op, ...]:
    """Give the reads of a mode in their order: what a cold one leaves in the page cache, the warm one finds there."""
    return ("read", "read warm") if mode == "buffered" else ("read",)


def _cell_order(cell: tuple[Mode, Op, int]) -> tuple[int, int, int]:
    mode, op, threads = cell
    return MODES.index(mode), ("write", "read", "read warm").index(op), threads


def _read(plan: RatePlan, arm: RateArm, blocks: Blocks, cell: tuple[Mode, Op, int], repeat: int) -> RateSample:
    mode, op, threads = cell
    if op == "read":
        arm.forget_pages()
    blocks.wipe()
    timing = arm.read(mode, threads)
    return _sample(plan, timing, repeat, arm.verify(mode))


def _sample(plan: RatePlan, timing: Timing, repeat: int, verified_bytes: int) -> RateSample:
    nbytes = plan.count * plan.block_bytes
    return RateSample(
        repeat=repeat,
        seconds=timing.seconds,
        payload_bytes=nbytes,
        gb_per_s=nbytes / timing.seconds / GB,
        cpu_s_per_gb=timing.cpu_s * GB / nbytes,
        verified_bytes=verified_bytes,
        p50_ms=timing.p50_ms,
        p99_ms=timing.p99_ms,
    )


def _keep(samples: _Samples, cell: tuple[Mode, Op, int], arm: RateArm, sample: RateSample) -> None:
    samples.setdefault(cell, {}).setdefault(arm.name, []).append(sample)
