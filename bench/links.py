"""How fast do bytes go between this host's memory and its GPUs, and between GPUs? `kvredis bench links` says what no
load and no store can be faster than. With torch: the copy engines, one way and both at once, page-locked memory, which
a GPU copies by itself, and pageable memory, which the driver copies; GPUs that reach one another's memory directly,
others through the CPU's. Every copy is compared in full, on the CPU. torch is imported when a GPU is looked for, not
before.

The file, kvredis.bench.links/1, has beside what every result has
    gpus       their names        peers   which GPU reaches which one's memory
    copies     way, source, target, direction (uni; bi: both ways at once and their sum, as in CUDA's
               p2pBandwidthLatencyTest), samples; each copy is made PASSES times in a row
    latencies  round trips, us: copying 16 bytes and waiting for it; of a repeat the median over its rounds
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, cast

from kvredis import install_line

from .core.errors import VerificationError
from .core.plot import BarPanel, Captions, bar, bars, foot
from .core.result import Progress, Result, Row, machine_lines, new_result, summed, verified_line
from .core.statistics import GB, MIB, percentile

SCHEMA: Final = "kvredis.bench.links/1"
CPU: Final = "CPU"
GPUS_MAX: Final = 8
PASSES: Final = 8
"""So often in a row each copy is made, or starting it and waiting for it would be part of a GPU's bandwidth."""
_SEED: Final = 20250106
_TOKEN_BYTES: Final = 16
_START_WAIT_S: Final = 30.0
_CORNER: Final = "from, to"


class LinksResult(Result):
    gpus: list[str]
    peers: list[list[bool]]
    copies: list[Row]
    latencies: list[Row]


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

    part: Literal["gpu"]
    way: str
    source: str
    target: str
    direction: Literal["uni", "bi"]


@dataclass(frozen=True, slots=True)
class LinksPlan:
    """How much is moved: `nbytes` one way in each repeat of each link, and `rounds` of each token."""

    repeats: int = 5
    nbytes: int = 256 * MIB
    rounds: int = 2000

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        return steps(self.repeats) if obstacle() is None else 0


QUICK = LinksPlan(repeats=3, nbytes=64 * MIB, rounds=300)


def run(plan: LinksPlan, progress: Progress) -> LinksResult:
    """Measure all of `plan`; without a GPU the notes say so. Raises VerificationError at a wrong byte."""
    start_s = time.monotonic()
    result = LinksResult(**new_result(SCHEMA, asdict(plan)), gpus=[], peers=[], copies=[], latencies=[])
    if (missing := obstacle()) is not None:
        result["notes"].append(missing)
    else:
        found = run_gpus(plan.nbytes, plan.repeats, plan.rounds, progress)
        result["gpus"], result["peers"] = found.names, found.peers
        result["copies"], result["latencies"] = found.copies, found.latencies
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
                yield f"{way}, {said}, GB/s (least to most)"
                yield from _matrix([_copy_cell(row) for row in chosen])
    if result["latencies"]:
        yield ""
        yield "pinned, there and back, us (least to most)"
        yield from _matrix([_latency_cell(row) for row in result["latencies"]])
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


def _copy_cell(row: Row) -> tuple[str, str, str]:
    return (
        row["source"],
        row["target"],
        f"{row['gb_per_s']:.2f} ({row['gb_per_s_min']:.2f} to {row['gb_per_s_max']:.2f})",
    )


def _latency_cell(row: Row) -> tuple[str, str, str]:
    return row["source"], row["target"], f"{row['p50_us']:.1f} ({row['p50_us_min']:.1f} to {row['p50_us_max']:.1f})"


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


@dataclass(slots=True)
class Gpus:
    """What is known of the GPUs: their names, which reaches which, and what was measured."""

    names: list[str] = field(default_factory=list)
    peers: list[list[bool]] = field(default_factory=list)
    copies: list[Row] = field(default_factory=list)
    latencies: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One tensor to another of the same bytes, by the copy engine of a stream of its own."""

    source: Any
    target: Any
    stream: Any

    def begin(self) -> None:
        import torch

        with torch.cuda.stream(self.stream):
            for _ in range(PASSES):
                self.target.copy_(self.source, non_blocking=True)

    def run(self) -> None:
        self.begin()
        self.stream.synchronize()


@dataclass(frozen=True, slots=True)
class _Arm:
    """One link and its copies: one, or one each way."""

    link: Link
    copies: Sequence[_Copy]


def obstacle() -> str | None:
    """Say why there is nothing to measure: no torch, or no GPU; None when there is one."""
    if find_spec("torch") is None:
        return f"no GPU part: torch is not installed ({install_line('bench')})"
    import torch

    return None if torch.cuda.is_available() else "no GPU"


def run_gpus(nbytes: int, repeats: int, rounds: int, progress: Progress) -> Gpus:
    """Measure every pair; VerificationError at a wrong byte. There is a GPU, as `obstacle` says."""
    import torch

    count = min(GPUS_MAX, torch.cuda.device_count())
    found = Gpus([torch.cuda.get_device_name(at) for at in range(count)])
    found.peers = [
        [at == to or bool(torch.cuda.can_device_access_peer(at, to)) for to in range(count)] for at in range(count)
    ]
    arms = _arms(nbytes, count)
    for arm in arms:  # contexts, peer access and staging are made by the first copy
        _timed(arm)
    samples: list[list[CopySample]] = [[] for _ in arms]
    tokens: list[list[LatencySample]] = [[] for _ in range(2 * count)]
    for repeat in range(repeats):
        for arm, own in zip(arms, samples, strict=True):
            progress(f"GPUs: {arm.link['way']}")
            own.append(_sample(arm, nbytes, repeat))
        for at in range(count):
            for back in (0, 1):
                tokens[2 * at + back].append(_token(at, back, repeat, rounds))
    found.copies = [_copy_row(arm.link, nbytes, own) for arm, own in zip(arms, samples, strict=True)]
    for at in range(count):
        for back, ends in enumerate(((CPU, f"GPU {at}"), (f"GPU {at}", CPU))):
            found.latencies.append(_latency_row(ends, tokens[2 * at + back]))
    return found


def steps(repeats: int) -> int:
    """Give how often `run_gpus` calls its progress here."""
    import torch

    count = min(GPUS_MAX, torch.cuda.device_count())
    return repeats * (6 * count + count + 2 * count * (count - 1))


def _arms(nbytes: int, count: int) -> list[_Arm]:
    """Lay out memory and links: to, from and both, pinned and pageable, for each GPU; within each; each pair of two."""
    import torch

    random = torch.Generator().manual_seed(_SEED)
    known = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)
    arms = []
    for at in range(count):
        gpu = torch.device("cuda", at)
        streams = [_stream(gpu) for _ in range(2)]
        there, room = known.to(gpu), torch.empty(nbytes, dtype=torch.uint8, device=gpu)
        for way in ("pinned", "pageable"):
            near = known.pin_memory() if way == "pinned" else known.clone()
            into = torch.empty(nbytes, dtype=torch.uint8, pin_memory=way == "pinned")
            out, back = _Copy(near, room, streams[0]), _Copy(there, into, streams[1])
            arms += _both((way, CPU, f"GPU {at}"), out, back)
        arms.append(_Arm(_link("device", f"GPU {at}", f"GPU {at}", "uni"), [_Copy(there, room, streams[0])]))
        for to in range(count):
            if to != at:
                other = torch.device("cuda", to)
                far, room_far = known.to(other), torch.empty(nbytes, dtype=torch.uint8, device=other)
                out = _Copy(there, room_far, streams[0])
                back = _Copy(far, room, _stream(other))
                uni, _, bi = _both(("peer", f"GPU {at}", f"GPU {to}"), out, back)
                arms += [uni, bi]
    return arms


def _stream(device: Any) -> Any:
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _both(ends: tuple[str, str, str], out: _Copy, back: _Copy) -> list[_Arm]:
    way, source, target = ends
    return [
        _Arm(_link(way, source, target, "uni"), [out]),
        _Arm(_link(way, target, source, "uni"), [back]),
        _Arm(_link(way, source, target, "bi"), [out, back]),
    ]


def _link(way: str, source: str, target: str, direction: Any) -> Link:
    return Link(part="gpu", way=way, source=source, target=target, direction=direction)


def _timed(arm: _Arm) -> float:
    """Give the seconds of all copies of an arm, made at once.

    A thread that begins a pageable one goes on only when it is as good as done, so two of them need a thread each.
    Others get none: waking it up would be part of their bandwidth.
    """
    _settle()
    if arm.link["way"] == "pageable" and len(arm.copies) > 1:
        return timed_together([copy.run for copy in arm.copies])
    start_s = time.perf_counter()
    for copy in arm.copies:
        copy.begin()
    _settle()
    return time.perf_counter() - start_s


def _settle() -> None:
    import torch

    for at in range(torch.cuda.device_count()):
        torch.cuda.synchronize(at)


def _sample(arm: _Arm, nbytes: int, repeat: int) -> CopySample:
    for copy in arm.copies:
        copy.target.fill_(repeat & 0xFF)
    seconds = _timed(arm)
    for copy in arm.copies:
        if not bool((copy.source.cpu() == copy.target.cpu()).all()):
            raise VerificationError(f"a copy from {arm.link['source']} to {arm.link['target']} has a wrong byte")
    total = nbytes * len(arm.copies)
    rate = total * PASSES / seconds / GB
    return CopySample(repeat=repeat, seconds=seconds, gb_per_s=rate, verified_bytes=total)


def _token(at: int, back: int, repeat: int, rounds: int) -> LatencySample:
    import torch

    near = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8, device=torch.device("cuda", at))
    ends: tuple[Any, Any] = (there, near) if back else (near, there)
    wait: Callable[[], None] = torch.cuda.current_stream(at).synchronize
    times_us = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        ends[1].copy_(ends[0], non_blocking=True)
        wait()
        times_us.append((time.perf_counter() - start_s) * 1e6)
    return LatencySample(repeat=repeat, rounds=rounds, p50_us=percentile(times_us, 50), p99_us=percentile(times_us, 99))


def _copy_row(link: Link, nbytes: int, samples: list[CopySample]) -> Row:
    return Row(**link, nbytes=nbytes, samples=samples) | summed(samples, spreads=("gb_per_s",))


def _latency_row(ends: tuple[str, str], samples: list[LatencySample]) -> Row:
    row = Row(part="gpu", way="pinned", source=ends[0], target=ends[1], samples=samples)
    return row | summed(samples, ("p99_us",), ("p50_us",))


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
