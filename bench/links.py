"""How fast do bytes go between this host's memory and its GPUs, and between GPUs? `kvredis bench links` says what no
load and no store can be faster than, as CUDA's p2pBandwidthLatencyTest does, by the driver alone (cuda.py): the copy
engines, one way and both at once, page-locked memory, which a GPU copies by itself, and pageable memory, which the
driver copies; every ordered pair of GPUs, with peer access and without. Every copy is compared in full, on the CPU.

The file, kvredis.bench.links/1, has beside what every result has
    gpus       their names        peers   which GPU reaches which one's memory
    copies     way, source, target, direction (uni; bi: both ways at once and their sum), nbytes of a copy, samples; in
               each sample the copy is made `passes` times in a row
    latencies  of 16 bytes, us: p50 and p99 of copying them and waiting for it, of a repeat's rounds; gpu_us, which
               older files lack: one of many copies in a row, by the GPU's clock
    exit_status  0, or 128 and the signal that ended it early, with what had been measured until then; not in older ones

Ways: pinned and pageable (the CPU's memory), device (within a GPU), peer (from GPU to GPU) and staged (the same without
peer access, through the CPU's memory). The source's GPU copies.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, cast

from kvredis.storage.memory.copy import address_of
from kvredis.storage.memory.page_lock import c_library

from .core.errors import VerificationError
from .core.plot import BarPanel, Captions, bar, bars, foot
from .core.result import Progress, Result, Row, machine_lines, new_result, summed, verified_line
from .core.statistics import GB, MIB, percentile
from .cuda import Cuda, Place, Stream

SCHEMA: Final = "kvredis.bench.links/1"
CPU: Final = "CPU"
GPUS_MAX: Final = 8
PASSES: Final = 8
"""So often in a row a copy is made, or starting it and waiting for it would be part of a GPU's bandwidth."""
SLOW_PASSES: Final = 2
"""Of ways that take 10 ms a copy, of which that is nothing."""
NBYTES_MIN: Final = 4096
"""Of a copy: enough for a token."""
_SLOW: Final = ("pageable", "staged")
_WAYS: Final = {
    "peer": "between GPUs, peer access on",
    "staged": "between GPUs, peer access off",
    "device": "within a GPU",
}
_SEED: Final = 20250106
_TOKEN_BYTES: Final = 16
_TOKENS_IN_A_ROW: Final = 100
_SHIFT_BYTES: Final = 4096
"""Each source has the known bytes from another place on, so that what comes from the wrong GPU is seen."""
_COMPARING_MAX: Final = 4
_START_WAIT_S: Final = 30.0
_CORNER: Final = "from, to"


class LinksResult(Result):
    gpus: list[str]
    peers: list[list[bool]]
    copies: list[Row]
    latencies: list[Row]
    exit_status: int


class CopySample(TypedDict):
    repeat: int
    passes: int
    seconds: float
    gb_per_s: float
    verified_bytes: int  # compared in full after the clock had stopped


class LatencySample(TypedDict):
    repeat: int
    rounds: int
    p50_us: float
    p99_us: float
    gpu_us: float


class Link(TypedDict):
    """What a row of copies is about, without its samples."""

    part: Literal["gpu"]
    way: str
    source: str
    target: str
    direction: Literal["uni", "bi"]


@dataclass(frozen=True, slots=True)
class LinksPlan:
    """How much is moved: `nbytes` one way in each copy of each link, and `rounds` of each token."""

    repeats: int = 5
    nbytes: int = 256 * MIB
    rounds: int = 2000

    def steps(self, cuda: Cuda | str) -> int:
        """Give how often `run` calls its progress."""
        if isinstance(cuda, str):
            return 0
        links = links_of(cuda.peers)
        return self.repeats * (len(links) + len(_timed_by_tokens(links)))


QUICK = LinksPlan(repeats=3, nbytes=64 * MIB, rounds=300)


def run(plan: LinksPlan, progress: Progress, cuda: Cuda | str) -> LinksResult:
    """Measure all of `plan`, or until an interrupt, which keeps what was measured; without a GPU the notes say why.
    Closes `cuda`. Raises VerificationError at a wrong byte, BenchError where the driver fails, KeyboardInterrupt or
    SystemExit before anything is measured."""
    start_s = time.monotonic()
    result = LinksResult(**new_result(SCHEMA, asdict(plan)), gpus=[], peers=[], copies=[], latencies=[], exit_status=0)
    if isinstance(cuda, str):
        result["notes"].append(cuda)
        return result
    with closing(cuda):
        result["gpus"], result["peers"] = cuda.names, cuda.peers
        samples = _Samples()
        try:
            _measure(plan, progress, cuda, samples)
        except (KeyboardInterrupt, SystemExit) as end:
            status = 128 + signal.SIGINT if isinstance(end, KeyboardInterrupt) else end.code
            if not samples.count() or not isinstance(status, int):
                raise
            result["exit_status"] = status
            result["notes"].append(f"interrupted: {samples.count()} of {plan.steps(cuda)} samples were taken")
    result["copies"], result["latencies"] = samples.copy_rows(plan.nbytes), samples.latency_rows()
    result["verified_bytes"] = sum(sample["verified_bytes"] for row in result["copies"] for sample in row["samples"])
    result["seconds"] = time.monotonic() - start_s
    return result


def table_lines(result: LinksResult) -> Iterator[str]:
    """Give the report, line by line: matrices of medians, from below their least and most."""
    yield from machine_lines(result["machine"])
    yield from (f"GPU {at}: {name}" for at, name in enumerate(result["gpus"]))
    yield from result["notes"]
    for way in dict.fromkeys(row["way"] for row in result["copies"]):
        for direction, said in (("uni", "one way"), ("bi", "both ways at once, summed")):
            chosen = [row for row in result["copies"] if (row["way"], row["direction"]) == (way, direction)]
            if chosen:
                yield ""
                yield f"{_WAYS.get(way, way)}, {said}, GB/s (least to most)"
                yield from _matrix([_cell(row, "gb_per_s", ".2f") for row in chosen])
    for way in dict.fromkeys(row["way"] for row in result["latencies"]):
        for figure, said in (("p50_us", "there and back"), ("gpu_us", "one of many in a row")):
            chosen = [row for row in result["latencies"] if row["way"] == way and figure in row]
            if chosen:
                yield ""
                yield f"{_WAYS.get(way, way)}, {_TOKEN_BYTES} bytes, {said}, us (least to most)"
                yield from _matrix([_cell(row, figure, ".1f") for row in chosen])
    if result["peers"]:
        yield ""
        yield "which GPU reaches which one's memory"
        yield from _matrix(
            [
                (f"GPU {at}", f"GPU {to}", "yes" if reaches else "no")
                for at, row in enumerate(result["peers"])
                for to, reaches in enumerate(row)
            ]
        )
    yield ""
    yield verified_line(result)


def _cell(row: Row, figure: str, form: str) -> tuple[str, str, str]:
    middle, least, most = (format(row[name], form) for name in (figure, f"{figure}_min", f"{figure}_max"))
    return row["source"], row["target"], f"{middle} ({least} to {most})"


def _matrix(cells: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Lay cells of (row, column, text) out as a matrix; a pair that is not there is a dash."""
    names = list(dict.fromkeys([source for source, _, _ in cells] + [target for _, target, _ in cells]))
    sources = [name for name in names if any(name == source for source, _, _ in cells)]
    targets = [name for name in names if any(name == target for _, target, _ in cells)]
    texts = {(source, target): text for source, target, text in cells}
    first = max(len(source) for source in [*sources, _CORNER])
    widths = [max(len(target), *(len(texts.get((source, target), "-")) for source in sources)) for target in targets]
    yield f"  {_CORNER:<{first}}  " + "  ".join(
        target.rjust(width) for target, width in zip(targets, widths, strict=True)
    )
    for source in sources:
        yield f"  {source:<{first}}  " + "  ".join(
            texts.get((source, target), "-").rjust(width) for target, width in zip(targets, widths, strict=True)
        )


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw the GB/s of every link of a GPU; BenchError when there is none."""
    result = cast(LinksResult, raw)
    rows = [row for row in result["copies"] if row["part"] == "gpu"]
    names = list(dict.fromkeys((row["way"], row["source"], row["target"]) for row in rows))
    series = {}
    for direction, said in (("uni", "one way"), ("bi", "both ways, summed")):
        found = {(row["way"], row["source"], row["target"]): row for row in rows if row["direction"] == direction}
        series[said] = [bar(found[name], "gb_per_s") if name in found else None for name in names]
    panels = [BarPanel("GPUs", [f"{way}: {source} to {target}" for way, source, target in names], series)]
    told = Captions("What copies to, from and between GPUs", "GB/s", foot(result["machine"], ", ".join(result["gpus"])))
    bars(panels if rows else [], told, path)


def links_of(peers: Sequence[Sequence[bool]]) -> list[Link]:
    """List the links of GPUs of which some reach others: to, from and both, pinned and pageable, for each; within each;
    each ordered pair of two. Those that want peer access come last."""
    gpus = [f"GPU {at}" for at in range(len(peers))]
    links: list[Link] = []
    for gpu in gpus:
        for way in ("pinned", "pageable"):
            links += [_link(way, CPU, gpu, "uni"), _link(way, gpu, CPU, "uni"), _link(way, CPU, gpu, "bi")]
        links.append(_link("device", gpu, gpu, "uni"))
    for way in ("staged", "peer"):
        for at, to in _pairs(len(peers)):
            if way == "staged" or (peers[at][to] and peers[to][at]):
                links += [_link(way, gpus[at], gpus[to], "uni"), _link(way, gpus[at], gpus[to], "bi")]
    return links


def _pairs(count: int) -> list[tuple[int, int]]:
    return [(at, to) for at in range(count) for to in range(count) if at != to]


def _link(way: str, source: str, target: str, direction: Literal["uni", "bi"]) -> Link:
    return Link(part="gpu", way=way, source=source, target=target, direction=direction)


def _timed_by_tokens(links: Sequence[Link]) -> list[Link]:
    return [link for link in links if link["direction"] == "uni" and link["way"] != "pageable"]


_Name = tuple[str, str, str, str]


class _Samples:
    """What was measured until now, by link, in the order in which links were first measured."""

    def __init__(self) -> None:
        self._copies: dict[_Name, tuple[Link, list[CopySample]]] = {}
        self._latencies: dict[_Name, tuple[Link, list[LatencySample]]] = {}

    def add(self, link: Link, sample: CopySample) -> None:
        self._copies.setdefault(_name(link), (link, []))[1].append(sample)

    def add_latency(self, link: Link, sample: LatencySample) -> None:
        self._latencies.setdefault(_name(link), (link, []))[1].append(sample)

    def count(self) -> int:
        copies, latencies = self._copies.values(), self._latencies.values()
        return sum(len(own) for _, own in copies) + sum(len(own) for _, own in latencies)

    def copy_rows(self, nbytes: int) -> list[Row]:
        return [_copy_row(link, nbytes, own) for link, own in self._copies.values()]

    def latency_rows(self) -> list[Row]:
        return [_latency_row(link, own) for link, own in self._latencies.values()]


def _name(link: Link) -> _Name:
    return link["way"], link["source"], link["target"], link["direction"]


def _copy_row(link: Link, nbytes: int, samples: list[CopySample]) -> Row:
    return Row(**link, nbytes=nbytes, samples=samples) | summed(samples, spreads=("gb_per_s",))


def _latency_row(link: Link, samples: list[LatencySample]) -> Row:
    row = Row(part="gpu", way=link["way"], source=link["source"], target=link["target"], samples=samples)
    return row | summed(samples, ("p99_us",), ("p50_us", "gpu_us"))


def _measure(plan: LinksPlan, progress: Progress, cuda: Cuda, samples: _Samples) -> None:
    """Take every sample of `plan`; those that were taken when this is ended early are in `samples`."""
    bench = _Bench(cuda, plan.nbytes)
    try:
        _take(plan, progress, bench, links_of(cuda.peers), samples)
    finally:
        bench.settle()


def _take(plan: LinksPlan, progress: Progress, bench: _Bench, links: Sequence[Link], samples: _Samples) -> None:
    """Go through all links repeat by repeat, so that each has its share of what the machine does else."""
    without = [link for link in links if link["way"] != "peer"]
    direct = [link for link in links if link["way"] == "peer"]

    def measure(chosen: Sequence[Link], repeat: int) -> None:
        for link in chosen:
            progress(f"GPUs: {_WAYS.get(link['way'], link['way'])}")
            samples.add(link, bench.sample(link, repeat))
        for link in _timed_by_tokens(chosen):
            progress("GPUs: latencies")
            samples.add_latency(link, bench.latency(link, repeat, plan.rounds))

    for repeat in range(plan.repeats):
        if not repeat:
            bench.warm_up(without)
        measure(without, repeat)
        bench.allow_peers(True)
        if not repeat:
            bench.warm_up(direct)
        measure(direct, repeat)
        bench.allow_peers(False)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy, on a stream of its own."""

    target: Place
    source: Place
    stream: Stream
    known: int  # where on the CPU lies what the source has


class _Bench:
    """All memory and streams: a source and a target of `nbytes` for each GPU and for each kind of the CPU's memory."""

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self._cuda = cuda
        self._nbytes = nbytes
        count = len(cuda.names)
        known = cuda.host_memory(nbytes + (count + 1) * _SHIFT_BYTES)
        step = min(MIB, nbytes)
        generator = random.Random(_SEED)
        for start in range(0, nbytes + (count + 1) * _SHIFT_BYTES, step):
            size = min(step, nbytes + (count + 1) * _SHIFT_BYTES - start)
            ctypes.memmove(known.address + start, generator.randbytes(size), size)
        self._known = known.address
        self._landing = cuda.host_memory(nbytes)
        self._pageable = bytearray(nbytes), bytearray(nbytes)
        source, target = (Place(address_of(memory)) for memory in self._pageable)
        ctypes.memmove(source.address, known.address, nbytes)
        self._cpu = {"pinned": (known, self._landing), "pageable": (source, target)}
        self._gpus = [(cuda.device_memory(at, nbytes), cuda.device_memory(at, nbytes)) for at in range(count)]
        self._streams = [(cuda.stream(at), cuda.stream(at)) for at in range(count)]
        self._events = [(cuda.event(at), cuda.event(at)) for at in range(count)]
        for at, (there, _) in enumerate(self._gpus):
            cuda.copy(there, Place(self._known_of(at)), nbytes, self._streams[at][0])
            cuda.wait(self._streams[at][0])

    def settle(self) -> None:
        """Wait for all that was begun: an interrupt comes before it is done, and the memory goes after this."""
        for stream in chain(*self._streams):
            self._cuda.wait(stream)

    def allow_peers(self, allowed: bool) -> None:
        """Switch direct access on or off, for all that have it."""
        peers = self._cuda.peers
        for at, to in _pairs(len(peers)):
            if peers[at][to] and peers[to][at]:
                self._cuda.allow_peer(at, to, allowed)

    def warm_up(self, links: Sequence[Link]) -> None:
        """Have the driver make what a first copy makes."""
        for link in links:
            self._timed(link, self._copies(link), 1)

    def sample(self, link: Link, repeat: int) -> CopySample:
        """Time a link's copies, and compare what came. Raises VerificationError."""
        copies = self._copies(link)
        passes = SLOW_PASSES if link["way"] in _SLOW else PASSES
        for copy in copies:
            self._cuda.fill(copy.target, repeat & 0xFF, self._nbytes)
        seconds = self._timed(link, copies, passes)
        self._verify(link, copies, self._nbytes)
        total = self._nbytes * len(copies)
        rate = total * passes / seconds / GB
        return CopySample(repeat=repeat, passes=passes, seconds=seconds, gb_per_s=rate, verified_bytes=total)

    def latency(self, link: Link, repeat: int, rounds: int) -> LatencySample:
        """Time copies of a token, each waited for, and many in a row by the GPU's clock. Raises VerificationError."""
        cuda, (copy,) = self._cuda, self._copies(link)
        cuda.fill(copy.target, repeat & 0xFF, _TOKEN_BYTES)
        times_us = []
        for _ in range(rounds):
            start_s = time.perf_counter()
            cuda.copy(copy.target, copy.source, _TOKEN_BYTES, copy.stream)
            cuda.wait(copy.stream)
            times_us.append((time.perf_counter() - start_s) * 1e6)
        self._verify(link, [copy], _TOKEN_BYTES)
        start, end = self._events[copy.stream.gpu]
        # All are enqueued while the stream has a large copy to do, or the CPU's own time would be in it.
        cuda.copy(self._gpus[copy.stream.gpu][1], Place(self._known), self._nbytes, copy.stream)
        cuda.record(start, copy.stream)
        for _ in range(_TOKENS_IN_A_ROW):
            cuda.copy(copy.target, copy.source, _TOKEN_BYTES, copy.stream)
        cuda.record(end, copy.stream)
        cuda.wait(copy.stream)
        return LatencySample(
            repeat=repeat, rounds=rounds, p50_us=percentile(times_us, 50), p99_us=percentile(times_us, 99),
            gpu_us=cuda.elapsed_us(start, end) / _TOKENS_IN_A_ROW,
        )  # fmt: skip

    def _copies(self, link: Link) -> list[_Copy]:
        """Give a link's copy, or its copies each way."""
        copies = [self._copy(link["way"], link["source"], link["target"], 0)]
        if link["direction"] == "bi":
            copies.append(self._copy(link["way"], link["target"], link["source"], 1))
        return copies

    def _copy(self, way: str, source: str, target: str, stream: int) -> _Copy:
        from_gpu, to_gpu = _ordinal(source), _ordinal(target)
        there = self._cpu[way][0] if from_gpu is None else self._gpus[from_gpu][0]
        room = self._cpu[way][1] if to_gpu is None else self._gpus[to_gpu][1]
        runs_on = from_gpu if from_gpu is not None else to_gpu
        if runs_on is None:
            raise ValueError(f"no GPU copies from {source} to {target}")
        return _Copy(room, there, self._streams[runs_on][stream], self._known_of(from_gpu))

    def _known_of(self, gpu: int | None) -> int:
        return self._known + (0 if gpu is None else (gpu + 1) * _SHIFT_BYTES)

    def _timed(self, link: Link, copies: Sequence[_Copy], passes: int) -> float:
        """Give the seconds of `passes` of all copies, made at once.

        A thread that begins a pageable one goes on only when it is as good as done, so two of them need a thread each.
        Others get none: waking it up would be part of their bandwidth.
        """
        cuda = self._cuda

        def begin(chosen: Sequence[_Copy]) -> None:
            for _ in range(passes):
                for copy in chosen:
                    cuda.copy(copy.target, copy.source, self._nbytes, copy.stream)
            for copy in chosen:
                cuda.wait(copy.stream)

        if link["way"] == "pageable" and len(copies) > 1:
            return timed_together([lambda copy=copy: begin([copy]) for copy in copies])  # type: ignore[misc]
        start_s = time.perf_counter()
        begin(copies)
        return time.perf_counter() - start_s

    def _verify(self, link: Link, copies: Sequence[_Copy], nbytes: int) -> None:
        """Compare every target with what its source has, on the CPU; a GPU's is brought to where the CPU's pinned one
        is, which comes first for that."""
        for copy in sorted(copies, key=lambda copy: copy.target.gpu is not None):
            came = copy.target
            if came.gpu is not None:
                self._cuda.copy(self._landing, came, nbytes, self._streams[came.gpu][0])
                self._cuda.wait(self._streams[came.gpu][0])
                came = self._landing
            if not _equal(came.address, copy.known, nbytes):
                raise VerificationError(f"a copy between {link['source']} and {link['target']} has a wrong byte")


def _ordinal(end: str) -> int | None:
    return None if end == CPU else int(end.removeprefix("GPU "))


_memcmp = c_library().memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _equal(address: int, other: int, nbytes: int) -> bool:
    """Whether two pieces of memory have the same bytes; several threads look, without the interpreter's lock."""
    workers = min(_COMPARING_MAX, len(os.sched_getaffinity(0)))
    step = -(-nbytes // workers)
    parts = [(start, min(step, nbytes - start)) for start in range(0, nbytes, step)]

    def same(part: tuple[int, int]) -> bool:
        start, size = part
        return bool(_memcmp(address + start, other + start, size) == 0)

    with ThreadPoolExecutor(workers) as pool:
        return all(pool.map(same, parts))


def timed_together(jobs: Sequence[Callable[[], None]]) -> float:
    """Run each job in a thread of its own, all at once; give the seconds until the last has ended. An interrupt is
    raised once all have."""
    starts_s: list[float] = []  # by the last thread at the gate: this one may not run again until jobs have
    gate = threading.Barrier(len(jobs) + 1, lambda: starts_s.append(time.perf_counter()))
    ends_s = [0.0] * len(jobs)
    failures: list[BaseException] = []
    over = [threading.Event() for _ in jobs]  # a join that an interrupt ends takes its thread for over (CPython 3.11)

    def one(at: int) -> None:
        try:
            gate.wait(_START_WAIT_S)
            jobs[at]()
        except BaseException as error:
            failures.append(error)
        ends_s[at] = time.perf_counter()
        over[at].set()

    for at in range(len(jobs)):
        threading.Thread(target=one, args=(at,), daemon=True).start()
    try:
        gate.wait(_START_WAIT_S)
        for each in over:
            each.wait()
    except BaseException:
        gate.abort()
        for each in over:
            each.wait()
        raise
    if failures:
        raise failures[0]
    return max(ends_s) - starts_s[0]
