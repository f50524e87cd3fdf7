"""How fast are blocks copied inside one process, by which means, on which pages? T0, that other figures divide by.

Two arrays of blocks for each kind of page; tasks of random (from, to) pairs, the same for every arm. In each repeat
every kind of page gets a round with every number of threads, in which all arms take turns beside T0. Only copying is
timed. Before an arm the target is zeroed; after each of its tasks every block of it is compared in full, and at the end
every block that was not asked for must still be zero.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final

from kvredis import install_line
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.machine import machine_facts
from kvredis.bench.core.shapes import SHAPES, ModelShape
from kvredis.bench.core.statistics import GB, counted, middle, paired_ratio, paired_ratios, rotated
from kvredis.storage.errors import ArenaError
from kvredis.storage.memory import copy
from kvredis.storage.memory.hugepages import pages_needed
from kvredis.storage.memory.memory_limits import gib

from .arms import ARMS, BASELINE, Arm, Arrays, Crew, Pair
from .pages import KINDS, SMALL, TORCH, Region, available_bytes, backing, obstacle, region
from .result import EARLIER, EARLIER_FROM, SCHEMA, Earlier, MemoryResult, MemoryRow, MemorySample, TorchFacts

if TYPE_CHECKING:
    import numpy

Progress = Callable[[str], None]
Cell = tuple[str, int, str]  # kind of page, threads, arm

_MEMORY_SHARE: Final = 0.6  # of what is available now: the rest is for what else runs here


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is copied, and how often. `hugepages_max`: pages that may be taken from the pool; None: what is needed.

    Raises BenchError when a task has more pairs than there are blocks.
    """

    shapes: Sequence[ModelShape] = (SHAPES["7b"], SHAPES["3b"], SHAPES["8b"])
    threads: Sequence[int] = ()  # empty: 1 and all cores
    blocks: int = 512
    tasks: int = 8
    pairs: int = 64
    repeats: int = 5
    seed: int = 20250104
    hugepages_max: int | None = None

    def __post_init__(self) -> None:
        if self.pairs > self.blocks:
            raise BenchError(f"a task of {self.pairs} different blocks needs as many, not {self.blocks}")

    def crews(self) -> list[int]:
        """Give the numbers of threads, each once."""
        return list(dict.fromkeys(self.threads or (1, len(os.sched_getaffinity(0)))))

    def steps(self) -> int:
        """Give how often `run` calls its progress, at most."""
        return len(self.shapes) * self.repeats * len(KINDS) * len(self.crews())

    def made_tasks(self, blocks: int) -> list[list[Pair]]:
        """Give the tasks for arrays of `blocks` blocks: no block is read or written twice in one task."""
        source = random.Random(self.seed)
        numbers = range(blocks)
        return [
            list(zip(source.sample(numbers, self.pairs), source.sample(numbers, self.pairs), strict=True))
            for _ in range(self.tasks)
        ]


QUICK: Final = MemoryPlan(shapes=(SHAPES["7b"],), blocks=128, tasks=4, pairs=32, repeats=2)
"""Half a minute; the arrays then fit the last cache of a large machine, and its figures are not for quoting."""


def run(plan: MemoryPlan, progress: Progress) -> MemoryResult:
    """Measure all shapes. Raises BenchError when none fits, VerificationError at the first wrong byte."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise BenchError(f"kvredis bench memory needs torch: {install_line('bench')}") from error
    started, threads = perf_counter(), torch.get_num_threads()
    result = MemoryResult(
        schema=SCHEMA,
        machine=machine_facts(),
        torch=TorchFacts(version=str(torch.__version__), threads=threads),
        copying=copy.KIND,
        options={**asdict(plan), "threads": plan.crews()},
        pages={},
        notes=[],
        earlier=Earlier(source=EARLIER_FROM, ratios={arm: list(theirs) for arm, theirs in EARLIER.items()}),
        rows=[],
        verified_bytes=0,
        seconds=0.0,
    )
    try:
        for shape in plan.shapes:
            with _arrays(plan, shape, result) as arrays:
                result["rows"] += _Measurement(plan, shape, arrays, threads).rows(progress)
    finally:
        torch.set_num_threads(threads)
    if not result["rows"]:
        raise BenchError("; ".join(result["notes"]))
    result["verified_bytes"] = sum(sample["verified_bytes"] for row in result["rows"] for sample in row["samples"])
    result["seconds"] = perf_counter() - started
    return result


@contextmanager
def _arrays(plan: MemoryPlan, shape: ModelShape, result: MemoryResult) -> Iterator[dict[str, Arrays]]:
    """Lend two arrays of each kind of page that can be had, sources filled; empty when the shape does not fit.

    What was left out or made smaller is written into the result's notes, what is behind the memory into its pages.
    """
    blocks, notes = _fitting(plan, shape), result["notes"]
    if blocks < plan.pairs:
        notes.append(
            f"{shape.name}: skipped, {gib(available_bytes())} are available and {plan.pairs} blocks do not fit"
        )
        yield {}
        return
    if blocks < plan.blocks:
        notes.append(f"{shape.name}: {blocks} blocks instead of {plan.blocks}, for want of memory")
    nbytes = blocks * shape.block_bytes()
    made: dict[str, Arrays] = {}
    with ExitStack() as lent:
        for kind in (TORCH, *KINDS):
            reason = obstacle(kind, _hugetlb_bytes(nbytes), plan.hugepages_max)
            if reason is None:
                try:
                    source, target = (lent.enter_context(region(kind, nbytes)) for _ in range(2))
                except (ArenaError, BenchError) as error:
                    reason = str(error)
                else:
                    _fill(source, made.get(TORCH), plan.seed)
                    made[kind] = Arrays(shape, blocks, source, target)
                    result["pages"][kind] = backing(source.address).text()
            if reason is not None:
                notes.append(f"{shape.name} on {kind} pages: skipped, {reason}")
        yield made
        made.clear()  # tensors let go of the memory before it is unmapped


def _fitting(plan: MemoryPlan, shape: ModelShape) -> int:
    """Give how many blocks each array may have: the plan's, or what a share of the memory holds."""
    arrays = 2 * (1 + len(KINDS) - 1)  # hugetlb pages are not taken from what is available
    return min(plan.blocks, int(available_bytes() * _MEMORY_SHARE) // (arrays * shape.block_bytes()))


def _hugetlb_bytes(nbytes: int) -> int:
    """Give what two arrays need in whole 2 MiB pages."""
    return 2 * pages_needed(nbytes) * 2 * 1024**2


def _fill(source: Region, first: Arrays | None, seed: int) -> None:
    """Fill with pseudo-random bytes, so that no two blocks are alike; the first kind's are copied for the others."""
    if first is not None:
        ctypes.memmove(source.address, first.source_address, first.source.nbytes)
        return
    import numpy

    words: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint64]] = numpy.frombuffer(source.view, dtype=numpy.uint64)
    numpy.copyto(words, numpy.random.default_rng(seed).integers(0, 2**64, words.size, dtype=numpy.uint64))


class _Measurement:
    """One shape: its arrays by kind of page, and the samples of each cell."""

    def __init__(self, plan: MemoryPlan, shape: ModelShape, arrays: Mapping[str, Arrays], torch_threads: int) -> None:
        self.plan, self.shape, self.arrays, self.torch_threads = plan, shape, arrays, torch_threads
        self.samples: dict[Cell, list[MemorySample]] = {}
        blocks = next(iter(arrays.values())).blocks if arrays else 0
        self.tasks = plan.made_tasks(blocks) if arrays else []

    def rows(self, progress: Progress) -> list[MemoryRow]:
        """Warm up, measure every repeat, and give a row for each cell, T0 first."""
        rounds = [(kind, threads) for kind in KINDS if kind in self.arrays for threads in self.plan.crews()]
        for kind, threads in rounds:
            for arm, pages, crew in self._cells(kind, threads):
                self._run(arm, pages, crew, self.tasks[:1])
        number = 0
        for repeat in range(self.plan.repeats):
            for kind, threads in rotated(rounds, repeat):
                self._round(repeat, number, kind, threads)
                number += 1
                progress(f"{self.shape.name}, {kind} pages, {counted(threads, 'thread')}")
        return [self._row(cell) for cell in sorted(self.samples, key=self._order)]

    def _cells(self, kind: str, threads: int) -> list[tuple[Arm, str, int]]:
        """Give what takes turns in one round: plain torch with one thread and with its own number, and all arms."""
        baselines = [(ARMS[0], TORCH, count) for count in dict.fromkeys((1, self.torch_threads))]
        return [*baselines, *((arm, kind, threads) for arm in ARMS)]

    def _round(self, repeat: int, number: int, kind: str, threads: int) -> None:
        for arm, pages, crew in rotated(self._cells(kind, threads), repeat):
            seconds, verified = self._run(arm, pages, crew, self.tasks)
            payload = len(self.tasks) * self.plan.pairs * self.shape.block_bytes()
            sample = MemorySample(
                repeat=repeat,
                round=number,
                seconds=seconds,
                payload_bytes=payload,
                gb_per_s=payload / GB / seconds,
                verified_bytes=verified,
            )
            self.samples.setdefault((pages, crew, arm.name), []).append(sample)

    def _run(self, arm: Arm, kind: str, threads: int, tasks: Sequence[Sequence[Pair]]) -> tuple[float, int]:
        """Copy `tasks` with one arm; give the seconds that copying took, and the bytes compared."""
        import torch

        arrays, who = self.arrays[kind], f"{arm.name} on {kind} pages"
        torch.set_num_threads(threads)
        arrays.wipe()
        seconds, verified = 0.0, 0
        written: dict[int, int] = {}
        with Crew(threads) as crew:
            for pairs in tasks:
                started = perf_counter()
                arm.copy(arrays, pairs, crew)
                seconds += perf_counter() - started
                done = {to: block for block, to in pairs}
                verified += arrays.verify(done, arm.layerwise, who)
                written |= done
        arrays.verify_untouched(written, arm.layerwise, who)
        return seconds, verified

    def _order(self, cell: Cell) -> tuple[int, int, int]:
        kind, threads, arm = cell
        return (TORCH, *KINDS).index(kind), threads, [each.name for each in ARMS].index(arm)

    def _t0(self) -> dict[int, float]:
        """Give T0's seconds by round: those of the faster of the two."""
        faster: dict[int, float] = {}
        for threads in dict.fromkeys((1, self.torch_threads)):
            for sample in self.samples[TORCH, threads, BASELINE]:
                faster[sample["round"]] = min(sample["seconds"], faster.get(sample["round"], sample["seconds"]))
        return faster

    def _row(self, cell: Cell) -> MemoryRow:
        kind, threads, arm = cell
        samples = self.samples[cell]
        by_round = {sample["round"]: sample["seconds"] for sample in samples}
        ratios = paired_ratios(by_round, self._t0())
        rates = [sample["gb_per_s"] for sample in samples]
        small = self.samples.get((SMALL, threads, arm), []) if kind not in (TORCH, SMALL) else []
        return MemoryRow(
            shape=self.shape.name,
            block_bytes=self.shape.block_bytes(),
            blocks=self.arrays[kind].blocks,
            arm=arm,
            pages=kind,
            threads=threads,
            samples=samples,
            seconds=middle([sample["seconds"] for sample in samples]),
            gb_per_s=middle(rates),
            gb_per_s_min=min(rates),
            gb_per_s_max=max(rates),
            ratio=middle(ratios) if ratios else None,
            ratio_min=min(ratios, default=None),
            ratio_max=max(ratios, default=None),
            ratio_to_4k=paired_ratio(_by_repeat(samples), _by_repeat(small)),
        )


def _by_repeat(samples: Sequence[MemorySample]) -> dict[int, float]:
    return {sample["repeat"]: sample["seconds"] for sample in samples}
