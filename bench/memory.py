"""How fast are blocks copied inside one process, and by which means? `kvredis bench memory` is why the store copies
with streaming stores of its own, where memmove, or an index of torch, would do. All arms move the same batches of
random blocks between the same two mappings (core/blocks.py), in turns beside T0, torch's plain copy of one block after
the other, which runs before and behind them in each repeat. Every byte is compared.

The file, kvredis.bench.memory/1, has beside what every result has
    torch    its version
    copying  how the store's own copy is done here, see kvredis.storage.memory.copy.KINDS
    rows     shape, block_bytes, blocks, arm, threads, samples; `ratio` is the median of an arm's seconds / T0's in the
             same repeat, so less is better. Older files have a row for each kind of page, and T0's on "torch" pages.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypedDict, cast

from kvredis.storage.memory import copy as copying

from .core.blocks import BLOCKS, Batch, Blocks, TorchCopy, Turn
from .core.plot import Bar, BarPanel, Captions, bar, bars, foot
from .core.result import Column, Progress, Result, Row, machine_lines, new_result, spread, summed, tables, verified_line
from .core.shapes import SHAPES, ModelShape
from .core.statistics import GB, by_repeat, counted, middle, paired_ratios, rotated, size_text

SCHEMA: Final = "kvredis.bench.memory/1"
BASELINE: Final = "torch naive"
_CUT: Final = 6.0
"""Of a bar, times T0."""


class MemorySample(TypedDict):
    """One arm, one repeat: a turn of batches."""

    repeat: int
    seconds: float
    gb_per_s: float
    verified_bytes: int  # after the clock had stopped


class TorchFacts(TypedDict):
    version: str


class MemoryResult(Result):
    torch: TorchFacts
    copying: str
    rows: list[Row]


Copy = Callable[[Batch], None]
"""Bring some blocks to their places. Several threads may, each with its own."""


def arms(blocks: Blocks, t0: TorchCopy) -> dict[str, Copy]:
    """Give the ways to copy, by name."""
    import torch

    source, target = t0.rows
    near, far = (memory.address for memory in blocks.memories())
    nbytes = blocks.size_bytes

    def memmove(batch: Batch) -> None:
        for block, to in batch:
            ctypes.memmove(far + blocks.offset(to, 0), near + blocks.offset(block, 0), nbytes)

    def own(batch: Batch) -> None:
        for block, to in batch:
            copying.copy(blocks.place(to), blocks.value(block, 0))

    def fancy_index(batch: Batch) -> None:
        """Gather all blocks into new memory and scatter them from there: two passes in one statement."""
        some, places = torch.tensor(batch).T
        target[places] = source[some]

    def index_copy(batch: Batch) -> None:
        """The same two passes by their names."""
        some, places = torch.tensor(batch).T
        target.index_copy_(0, places, source.index_select(0, some))

    return {"torch fancy index": fancy_index, "torch index_copy_": index_copy, "memmove": memmove, "kvredis copy": own}


def moved(copy: Copy, turn: Turn, pool: ThreadPoolExecutor | None, threads: int) -> float:
    """Copy a turn's batches, each shared out to the threads; give the seconds."""
    start_s = perf_counter()
    for batch in turn.batches:
        if pool is None:
            copy(batch)
        else:
            list(pool.map(copy, [batch[part::threads] for part in range(threads) if batch[part::threads]]))
    return perf_counter() - start_s


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is copied, how often, and by how many threads; none named: by one and by as many as there are cores."""

    shapes: Sequence[ModelShape] = (SHAPES["7b"], SHAPES["3b"], SHAPES["8b"])
    threads: Sequence[int] = ()
    blocks: int = BLOCKS
    repeats: int = 5

    def crews(self) -> list[int]:
        """Give the numbers of threads, each once."""
        return list(dict.fromkeys(self.threads or (1, len(os.sched_getaffinity(0)))))

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        return len(self.shapes) * self.repeats


QUICK: Final = MemoryPlan(shapes=(SHAPES["7b"],), blocks=128, repeats=2)
"""Half a minute; the arrays then fit the last cache of a large machine, and its figures are not for quoting."""


def run(plan: MemoryPlan, progress: Progress) -> MemoryResult:
    """Measure all shapes. Raises BenchError without torch or memory, VerificationError at the first wrong byte."""
    start_s = perf_counter()
    options = {**asdict(plan), "threads": plan.crews()}
    head = new_result(SCHEMA, options)
    result = MemoryResult(**head, torch=TorchFacts(version=""), copying=copying.KIND, rows=[])
    for shape in plan.shapes:
        blocks = Blocks.of(shape, plan.blocks)
        with closing(TorchCopy(blocks)) as t0:
            result["torch"] = TorchFacts(version=t0.version)
            result["rows"] += _rows_of(plan, shape, blocks, t0, progress)
    result["verified_bytes"] = sum(sample["verified_bytes"] for row in result["rows"] for sample in row["samples"])
    result["seconds"] = perf_counter() - start_s
    return result


def _rows_of(plan: MemoryPlan, shape: ModelShape, blocks: Blocks, t0: TorchCopy, progress: Progress) -> list[Row]:
    ways = arms(blocks, t0)
    cells = [(arm, threads) for threads in plan.crews() for arm in ways]
    samples: dict[tuple[str, int], list[MemorySample]] = {cell: [] for cell in [(BASELINE, 1), *cells]}

    def measure(arm: str, threads: int, turn: Turn, repeat: int) -> MemorySample:
        blocks.wipe()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(len, [()] * threads))  # they are there before anything is timed
            seconds = moved(ways[arm], turn, pool if threads > 1 else None, threads)
        return sample(seconds, blocks.verify_pairs(turn.pairs, 0, arm), repeat)

    def sample(seconds: float, nbytes: int, repeat: int) -> MemorySample:
        return MemorySample(repeat=repeat, seconds=seconds, gb_per_s=nbytes / seconds / GB, verified_bytes=nbytes)

    for cell in cells:  # warm up
        measure(*cell, blocks.turn(0), 0)
    for repeat in range(plan.repeats):
        turn = blocks.turn(repeat)
        before_s = t0.measure(turn)
        for cell in rotated(cells, repeat):
            samples[cell].append(measure(*cell, turn, repeat))
        base_s = middle([before_s, t0.measure(turn)])
        samples[BASELINE, 1].append(sample(base_s, blocks.bytes_per_turn, repeat))
        progress(shape.name)
    base = by_repeat(samples[BASELINE, 1], "seconds")
    return [
        Row(shape=shape.name, block_bytes=blocks.size_bytes, blocks=blocks.count, arm=arm, threads=threads, samples=own)
        | summed(own, ("seconds",), ("gb_per_s",))
        | spread("ratio", paired_ratios(by_repeat(own, "seconds"), base))
        for (arm, threads), own in samples.items()
    ]


_COLUMNS: Final[tuple[Column, ...]] = (
    ("threads", "threads", "d"),
    ("arm", "arm", ""),
    ("GB/s", "gb_per_s", ".2f"),
    ("min to max", ("gb_per_s_min", "gb_per_s_max"), ".2f"),
    ("x T0", "ratio", ".2fx"),
    ("min to max", ("ratio_min", "ratio_max"), ".2f"),
)


def table_lines(result: MemoryResult) -> Iterator[str]:
    """Give the report, line by line: everything in it is in the JSON."""
    yield from machine_lines(result["machine"])
    yield f"T0: torch {result['torch']['version']}, one thread; kvredis copy is {result['copying']}"
    yield from result["notes"]
    yield from tables(_COLUMNS, result["rows"], _title)
    yield ""
    yield verified_line(result)


def _title(row: Row) -> str:
    return (
        f"{row['shape']}: random blocks of {size_text(row['block_bytes'])}, between two arrays of {row['blocks']};"
        " x T0 is time, less is better"
    )


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw ratios to T0 into the PNG `path`: a panel for each shape and number of threads."""
    result = cast(MemoryResult, raw)
    rows = [row for row in result["rows"] if row.get("pages") != "torch" and row["arm"] != BASELINE]
    panels = list(dict.fromkeys((row["threads"], row["shape"]) for row in rows))
    captions = Captions(
        title="Copying blocks inside one process: time, as a multiple of torch's plain copy (T0)",
        values="time / T0 (less is better)",
        foot=foot(result["machine"], f"T0: torch {result['torch']['version']}"),
    )
    shown = [_panel([row for row in rows if (row["threads"], row["shape"]) == panel]) for panel in panels]
    bars(shown, captions, path, columns=max(len({shape for _, shape in panels}), 2))


def _panel(rows: Sequence[Row]) -> BarPanel:
    names = list(dict.fromkeys(row["arm"] for row in rows))
    series: dict[str, list[Bar | None]] = {_pages(row): [None] * len(names) for row in rows}
    for row in rows:
        series[_pages(row)][names.index(row["arm"])] = bar(row, "ratio")
    first = rows[0]
    title = f"{first['shape']}, blocks of {size_text(first['block_bytes'])}, {counted(first['threads'], 'thread')}"
    return BarPanel(title, names, series, cut=_CUT)


def _pages(row: Row) -> str:
    return f"{row['pages']} pages" if "pages" in row else "measured here"
