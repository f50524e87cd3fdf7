"""How fast is the device itself? fio says it (dd where there is no fio), and so does a loop of our own.

The tier is judged against a tool that everybody knows and that costs no interpreter. The loop is the fairer neighbour:
the same threads, the same images, the same memory, and nothing but preadv and pwrite; what the tier lacks to the loop
is its own, what the loop lacks to fio is Python's.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.statistics import percentile
from kvredis.storage.disk.files import RealFiles
from kvredis.storage.disk.segment import HEADER_BYTES
from kvredis.storage.memory.page_lock import c_library

from .blocks import Blocks
from .result import DEVICE, LOOP, Mode

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
    """preadv and pwrite of one file from Python threads, each with a stretch of the blocks."""

    name = LOOP

    def __init__(self, path: Path, blocks: Blocks) -> None:
        self._path, self._blocks = path, blocks
        self._shift = 0

    def write(self, mode: Mode, threads: int, shift: int) -> Timing:
        """As RateArm."""
        self._shift, size = shift, self._blocks.size_bytes
        file = RealFiles().open(self._path, direct=mode == "direct")
        times_s: list[float] = []

        def some(part: range) -> None:
            for index in part:
                start_s = time.perf_counter()
                file.pwrite(self._blocks.image(index, shift)[:size], index * size)
                times_s.append(time.perf_counter() - start_s)

        try:
            return timed_threads(threads, self._blocks.count, some, file.sync).by_block(times_s)
        finally:
            file.close()

    def read(self, mode: Mode, threads: int) -> Timing:
        """As RateArm."""
        size = self._blocks.size_bytes
        file = RealFiles().open(self._path, direct=mode == "direct")
        times_s: list[float] = []

        def some(part: range) -> None:
            for index in part:
                start_s = time.perf_counter()
                if file.pread(self._blocks.place(index)[:size], index * size) != size:
                    raise BenchError(f"{self._path} ended early")
                times_s.append(time.perf_counter() - start_s)

        try:
            return timed_threads(threads, self._blocks.count, some).by_block(times_s)
        finally:
            file.close()

    def verify(self, mode: Mode) -> int:
        """As RateArm; not the first bytes of an image, which the tier's headers are written to."""
        return self._blocks.verify(self._shift, "the loop", self._blocks.size_bytes - HEADER_BYTES)

    def forget_pages(self) -> None:
        """As RateArm."""
        forget_pages(self._path)

    def close(self) -> None:
        """As RateArm."""


def timed_threads(
    threads: int, count: int, work: Callable[[range], None], finish: Callable[[], None] = lambda: None
) -> Timing:
    """Let `threads` threads do equal stretches of `count` items, then `finish`; they start together, with the clock."""
    starts_s: list[float] = []  # by whoever comes last to the gate: this thread may not run again until others have
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


class Tool:
    """A foreign program that moves one file; what it writes is its own affair, so nothing can be compared."""

    name = DEVICE

    def __init__(self, path: Path, block_bytes: int, count: int) -> None:
        self._path, self._block_bytes, self._count = path, block_bytes, count

    def write(self, mode: Mode, threads: int, shift: int) -> Timing:
        """As RateArm."""
        return self._move("write", mode, threads)

    def read(self, mode: Mode, threads: int) -> Timing:
        """As RateArm."""
        return self._move("read", mode, threads)

    def verify(self, mode: Mode) -> int:
        """As RateArm: nothing."""
        return 0

    def forget_pages(self) -> None:
        """As RateArm."""
        forget_pages(self._path)

    def close(self) -> None:
        """As RateArm."""

    def _move(self, op: str, mode: Mode, threads: int) -> Timing:
        raise NotImplementedError


class Fio(Tool):
    """fio with one synchronous read or write in flight for each of its threads."""

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


class Dd(Tool):
    """As many dd as threads, each with a stretch of the file; the time includes that of starting them."""

    def _move(self, op: str, mode: Mode, threads: int) -> Timing:
        start_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        running = []
        try:
            for part in range(threads):
                running.append(
                    subprocess.Popen(
                        self._command(op, mode, (part, threads)),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            for each in running:
                _, complaint = each.communicate(timeout=_TOOL_WAIT_S)
                if each.returncode:
                    raise BenchError(f"dd ended with {each.returncode}: {complaint.strip()}")
        finally:
            for each in running:
                if each.poll() is None:
                    each.kill()
                    each.communicate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Timing(time.perf_counter() - start_s, cpu_s)

    def _command(self, op: str, mode: Mode, part: tuple[int, int]) -> list[str]:
        share = self._count // part[1]
        common = ["dd", f"bs={self._block_bytes}", f"count={share}", "status=none"]
        flag = ["direct"] if mode == "direct" else []
        if op == "write":
            flags = [f"oflag={each}" for each in flag]
            return [
                *common,
                "if=/dev/zero",
                f"of={self._path}",
                f"seek={part[0] * share}",
                "conv=notrunc,fsync",
                *flags,
            ]
        flags = [f"iflag={each}" for each in flag]
        return [*common, f"if={self._path}", "of=/dev/null", f"skip={part[0] * share}", *flags]


def device_tool(path: Path, block_bytes: int, count: int) -> tuple[Tool | None, str]:
    """Give what measures the device here, and what it is called; None and why when there is nothing."""
    if shutil.which("fio"):
        return Fio(path, block_bytes, count), _said(["fio", "--version"]).strip()
    if shutil.which("dd"):
        return Dd(path, block_bytes, count), "dd (fio is not installed: Debian package fio)"
    return None, "none: neither fio (Debian package fio) nor dd is installed"


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
