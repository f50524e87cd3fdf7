"""The result of `kvredis bench links`: the JSON file's schema, kvredis.bench.links/1, its matrices and its picture.

A link is a pair of places. GB = 1e9 bytes; `uni` is one way alone, `bi` both ways at once and their sum, as in CUDA's
p2pBandwidthLatencyTest. Latencies are round trips, us: there and back. Medians are over the repeats; of a repeat a
latency is the median over its rounds.

Parts of `copies`
    memory   one thread of one process copies with memmove between two places (bi: two threads, one each way). `process`
             is anonymous memory, `arena` a memfd as the server maps it; each on the pages that its name says, and
             `node N` is memory bound to that NUMA node, copied by a thread on that node
    process  between two processes: tcp and unix send and receive whole blocks over one socket (bi: two); shared
             memory is one copy out of a memfd that the other process has just written
    gpu      CPU memory, page-locked (pinned) or not (pageable), to and from a GPU; between GPUs (peer) and within one
             (device); bi on two streams, pageable ones by two threads; each copy is made several times in a row
Parts of `latencies`
    cores    a token passed between two processes, each bound to a core, through a pair of eventfds: the kernel's
             wake-up is in it
    process  one byte there and back between two processes, wherever the kernel runs them: eventfd, pipe, unix, tcp
    gpu      copying 16 bytes and waiting for it

Top level
    schema, machine (see core/machine.py), options, notes (what could not be measured, and why), gpus (names), peers
    (which GPU can reach which), copies, latencies, verified_bytes, seconds

What one thread copies between two places of a process: memory of each kind of page, and of each NUMA node.

Blocks of 2 MiB in order, with memmove. Each place has a stretch to read and one to write, and the latter is overwritten
before each copy, so that what is compared afterwards can only have come from this one. Both ways at once is two
threads, each with one half.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypedDict

from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.result import Progress, Row, summed
from kvredis.bench.core.statistics import GB, MIB
from kvredis.bench.core.workload import same_bytes
from kvredis.bench.memory import HUGE_SHARE_MIN, backing
from kvredis.storage.errors import ArenaError
from kvredis.storage.memory.arena import PREFAULT_THREADS_MAX, Arena, HugepageMode
from kvredis.storage.memory.hugepages import anonymous_thp, shmem_thp, shmem_thp_usable
from kvredis.storage.memory.page_lock import c_library

BASE: Final = "process 4 KiB"
"""A copy within this memory is what the picture's bars are divided by."""


Part = Literal["memory", "process", "gpu"]
Direction = Literal["uni", "bi"]


class CopySample(TypedDict):
    repeat: int
    seconds: float
    gb_per_s: float
    verified_bytes: int  # compared in full after the clock had stopped


class LatencySample(TypedDict):
    repeat: int
    rounds: int
    p50_us: float
    p99_us: float


class Link(TypedDict):
    """What a row of copies is about, without its samples."""

    part: Part
    way: str
    source: str
    target: str
    direction: Direction


def copy_row(link: Link, nbytes: int, samples: list[CopySample]) -> Row:
    """Sum up one link over the repeats."""
    return Row(**link, nbytes=nbytes, samples=samples) | summed(samples, spreads=("gb_per_s",))


def latency_row(
    part: Literal["cores", "process", "gpu"], way: str, ends: tuple[str, str], samples: list[LatencySample]
) -> Row:
    """Sum up one way between two `ends` over the repeats."""
    row = Row(part=part, way=way, source=ends[0], target=ends[1], samples=samples)
    return row | summed(samples, ("p99_us",), ("p50_us",))


BLOCK_BYTES: Final = 2 * MIB
DIRECTIONS: Final[tuple[Direction, ...]] = ("uni", "bi")
_SEED: Final = 20250105
_FILL_BYTES: Final = 1 << 20
_START_WAIT_S: Final = 30.0
_NODES: Final = Path("/sys/devices/system/node")
_MPOL_BIND: Final = 2
_SYS_MBIND: Final = {"x86_64": 237, "aarch64": 235}


@dataclass(frozen=True, slots=True)
class Place:
    """A stretch of memory, twice `nbytes`: read from its first half, written into its second. `cpus`: who copies."""

    name: str
    address: int
    nbytes: int
    cpus: frozenset[int]

    @property
    def source(self) -> int:
        """Where the bytes are that others get."""
        return self.address

    @property
    def target(self) -> int:
        """Where copies go to."""
        return self.address + self.nbytes


def run_memory(nbytes: int, repeats: int, progress: Progress, notes: list[str]) -> list[Row]:
    """Measure every pair of places, one way and both, in every repeat; tell in `notes` what this machine has not.

    Raises BenchError when there is no memory, VerificationError at a wrong byte.
    """
    with ExitStack() as stack:
        places = list(_places(nbytes, stack, notes))
        pattern(places[0].source, nbytes)
        for place in places[1:]:
            ctypes.memmove(place.source, places[0].source, nbytes)
        samples: dict[tuple[int, int, Direction], list[CopySample]] = {}
        for repeat in range(repeats):
            for at, source in enumerate(places):
                progress(f"memory: from {source.name}")
                for to, target in enumerate(places):
                    for direction in DIRECTIONS:
                        key = at, to, direction
                        samples.setdefault(key, []).append(_sample(source, target, direction, repeat))
        return [
            copy_row(
                Link(part="memory", way="memmove", source=places[at].name, target=places[to].name, direction=direction),
                nbytes,
                own,
            )
            for (at, to, direction), own in samples.items()
        ]


def pattern(address: int, nbytes: int) -> None:
    """Fill memory with the bytes that every end of a link knows."""
    source = random.Random(_SEED)
    for start in range(0, nbytes, _FILL_BYTES):
        chunk = source.randbytes(min(_FILL_BYTES, nbytes - start))
        ctypes.memmove(address + start, chunk, len(chunk))


def copy_blocks(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` from address to address, a block at a time."""
    for start in range(0, nbytes, BLOCK_BYTES):
        ctypes.memmove(target + start, source + start, min(BLOCK_BYTES, nbytes - start))


def _sample(source: Place, target: Place, direction: Direction, repeat: int) -> CopySample:
    nbytes, half = source.nbytes, source.nbytes // 2
    ctypes.memset(source.target, repeat & 1, nbytes)
    ctypes.memset(target.target, repeat & 1, nbytes)
    jobs = [(source.cpus, target.target, source.source, nbytes)]
    if direction == "bi":
        back = (target.cpus, source.target + half, target.source + half, nbytes - half)
        jobs = [(source.cpus, target.target, source.source, half), back]
    seconds = timed_together([_job(*job) for job in jobs])
    for _, into, out_of, count in jobs:
        if not same_bytes(into, out_of, count):
            raise VerificationError(f"a copy from {source.name} to {target.name} has a wrong byte")
    return CopySample(repeat=repeat, seconds=seconds, gb_per_s=nbytes / seconds / GB, verified_bytes=nbytes)


def _job(cpus: frozenset[int], into: int, out_of: int, nbytes: int) -> Callable[[], None]:
    def job() -> None:
        copy_blocks(into, out_of, nbytes)

    return _bound(cpus, job) if cpus else job


def _bound(cpus: frozenset[int], job: Callable[[], None]) -> Callable[[], None]:
    def bound() -> None:
        os.sched_setaffinity(0, cpus)  # of this thread, which ends with its job
        job()

    return bound


def timed_together(jobs: Sequence[Callable[[], None]]) -> float:
    """Run each job in a thread of its own, all at once; give the seconds until the last has ended."""
    starts_s: list[float] = []  # by the last thread at the gate: this one may not run again until jobs have
    gate = threading.Barrier(len(jobs) + 1, lambda: starts_s.append(time.perf_counter()))
    ends_s = [0.0] * len(jobs)
    failures: list[BaseException] = []

    def one(at: int) -> None:
        try:
            gate.wait(_START_WAIT_S)
            jobs[at]()
        except BaseException as error:
            failures.append(error)
        ends_s[at] = time.perf_counter()

    threads = [threading.Thread(target=one, args=(at,), daemon=True) for at in range(len(jobs))]
    for thread in threads:
        thread.start()
    gate.wait(_START_WAIT_S)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return max(ends_s) - starts_s[0]


def _places(nbytes: int, stack: ExitStack, notes: list[str]) -> Iterator[Place]:
    anywhere: frozenset[int] = frozenset()
    yield Place(BASE, stack.enter_context(_anonymous(2 * nbytes, mmap.MADV_NOHUGEPAGE)), nbytes, anywhere)
    if anonymous_thp() == "never":
        notes.append("process THP: skipped, transparent hugepages are off (never)")
    else:
        address = stack.enter_context(_anonymous(2 * nbytes, mmap.MADV_HUGEPAGE))
        if _is_huge("process THP", address, notes):
            yield Place("process THP", address, nbytes, anywhere)
    for name, mode in (("4 KiB", HugepageMode.OFF), ("THP", HugepageMode.THP), ("hugetlb", HugepageMode.REQUIRE)):
        if mode is HugepageMode.THP and not shmem_thp_usable():
            notes.append(f"arena THP: skipped, THP of shared memory is off ({shmem_thp()})")
            continue
        try:
            arena = Arena.create(2 * nbytes, mode)
        except ArenaError as error:
            notes.append(f"arena {name}: skipped, {str(error).splitlines()[0]}")
            continue
        stack.callback(arena.close)
        arena.prefault(PREFAULT_THREADS_MAX)
        if mode is HugepageMode.OFF or _is_huge(f"arena {name}", arena.address, notes):
            yield Place(f"arena {name}", arena.address, nbytes, anywhere)
    yield from _node_places(nbytes, stack, notes)


def _is_huge(name: str, address: int, notes: list[str]) -> bool:
    """Whether the kernel gave the huge pages that it was asked for; a note says so when it did not."""
    found = backing(address)
    if found.huge_share < HUGE_SHARE_MIN:
        notes.append(f"{name}: skipped, its memory turned out to be {found.text()}")
    return found.huge_share >= HUGE_SHARE_MIN


def _node_places(nbytes: int, stack: ExitStack, notes: list[str]) -> Iterator[Place]:
    nodes = numa_nodes()
    if len(nodes) < 2:
        notes.append("NUMA: one node, so nothing to compare")
        return
    for node, cpus in nodes.items():
        try:
            address = stack.enter_context(_anonymous(2 * nbytes, mmap.MADV_NOHUGEPAGE, node))
        except OSError as error:
            notes.append(f"node {node}: skipped, its memory could not be had: {error}")
            continue
        yield Place(f"node {node}", address, nbytes, cpus)


def numa_nodes(root: Path = _NODES) -> dict[int, frozenset[int]]:
    """Give the NUMA nodes that have CPUs which this process may use, and those CPUs."""
    usable, nodes = os.sched_getaffinity(0), {}
    for path in sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        cpus = frozenset(_listed((path / "cpulist").read_text())) & usable
        if cpus:
            nodes[int(path.name.removeprefix("node"))] = cpus
    return nodes


def _listed(text: str) -> Iterator[int]:
    """Read sysfs' 0-3,8."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@contextmanager
def _anonymous(nbytes: int, advice: int, node: int | None = None) -> Iterator[int]:
    """Lend anonymous memory, touched in full and aligned to 2 MiB, of one node or of any; gives its address."""
    try:
        mapping = mmap.mmap(-1, nbytes + BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BenchError(f"no memory for {nbytes} bytes: {error.strerror}") from error
    mapping.madvise(advice)
    held = ctypes.c_char.from_buffer(mapping)
    try:
        address = -(-ctypes.addressof(held) // BLOCK_BYTES) * BLOCK_BYTES
        if node is not None:
            _bind(address, nbytes, node)
        ctypes.memset(address, 0, nbytes)
        yield address
    finally:
        del held
        mapping.close()


def _bind(address: int, nbytes: int, node: int) -> None:
    """Have pages that are not there yet come from one node; OSError when the kernel will not."""
    number = _SYS_MBIND.get(os.uname().machine)
    if number is None:
        raise OSError(f"mbind is not known on {os.uname().machine}")
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    pointer, length, bits = ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_ulong(len(mask) * 64 + 1)
    if c_library().syscall(number, pointer, length, _MPOL_BIND, mask, bits, 0):
        raise OSError(ctypes.get_errno(), f"mbind: {os.strerror(ctypes.get_errno())}")
