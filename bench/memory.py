"""`kvredis bench memory`: how fast are blocks copied inside one process, by which means, on which pages?

Two arrays of blocks for each kind of page; tasks of random (from, to) pairs, the same for every arm. In each repeat
every kind of page gets a round with every number of threads, in which all arms take turns beside T0. Only copying is
timed: memory is mapped, touched and wiped before. After each task every block of it is compared in full, and at the end
every block that was not asked for must still be zero. GB = 1e9 bytes of payload, read once and written once.

T0 is the plainest way there is: torch, block by block, in memory as torch allocates it. It runs in every round with one
thread and with as many as torch takes by itself, and the faster of the two is the round's T0: on a busy machine torch's
threads wait for each other, and nothing would be easier to beat. A round is one kind of page with one number of threads
in one repeat.

4 KiB and hugetlb pages come from the arena, as a store has them. Transparent huge pages come from an anonymous mapping,
because most kernels give a memfd none; torch's memory comes from torch's own allocator, since that is what a program
without any of this has. What was got is read back from /proc/self/smaps and told, never assumed.

The file, kvredis.bench.memory/1, has beside what every result has
    torch    version, threads that it takes by itself
    copying  how the store's own copy is done here, see kvredis.storage.memory.copy.KINDS
    pages    kind -> what the kernel says is behind it
    earlier  other people's figures, arm -> least and most, with whose they are: measured elsewhere, so only a hint
    rows     shape, block_bytes, blocks (in each of the two arrays), arm, pages (torch: T0 alone), threads, samples;
             `ratio` is the median of an arm's seconds / T0's in the same round, so less is better; `ratio_to_4k` is to
             the same arm with as many threads on 4 KiB pages in the same repeat: what the pages are worth
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Barrier
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, cast

from kvredis import install_line
from kvredis.storage.errors import ArenaError
from kvredis.storage.memory import copy
from kvredis.storage.memory import copy as copying
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.memory.hugepages import HUGEPAGE_BYTES, HugepagePool, anonymous_thp, meminfo, pages_needed
from kvredis.storage.memory.memory_limits import gib

from .core.errors import BenchError, VerificationError
from .core.plot import Bar, BarPanel, Captions, bar, bars, foot
from .core.result import Column, Progress, Result, Row, machine_lines, new_result, spread, summed, tables, verified_line
from .core.shapes import BLOCK_TOKENS, SHAPES, ModelShape
from .core.statistics import GB, by_repeat, counted, paired_ratio, paired_ratios, rotated, size_text
from .core.workload import same_bytes

if TYPE_CHECKING:
    import numpy
    import torch


SCHEMA: Final = "kvredis.bench.memory/1"
EARLIER_FROM: Final = "wde 0.3.1 on its own machine (RTX 4090 host)"
EARLIER: Final[Mapping[str, tuple[float, float]]] = {
    "memmove": (1.2, 1.8),
    "torch fancy index": (2.0, 2.6),
    "torch index_copy_": (2.0, 2.6),
    "torch layer by layer": (2.1, 3.8),
}
"""Ratios to T0 from the tables of an earlier system's documentation, by our arm that does the same; over five models.

That system timed one repeat without warm-up, and compared the last task of each arm alone.
"""


class MemorySample(TypedDict):
    """One arm, one round. `round` pairs it with T0, `repeat` with other pages and threads."""

    repeat: int
    round: int
    seconds: float
    payload_bytes: int
    gb_per_s: float
    verified_bytes: int  # every byte of every task, after the clock had stopped


class Earlier(TypedDict):
    source: str
    ratios: dict[str, list[float]]


class TorchFacts(TypedDict):
    version: str
    threads: int


class MemoryResult(Result):
    torch: TorchFacts
    copying: str
    pages: dict[str, str]
    earlier: Earlier
    rows: list[Row]


def table_lines(result: MemoryResult) -> Iterator[str]:
    """Give the report, line by line: everything in it is in the JSON."""
    columns: list[Column] = [
        ("pages", "pages", ""),
        ("threads", "threads", "d"),
        ("arm", "arm", ""),
        ("GB/s", "gb_per_s", ".2f"),
        ("min to max", ("gb_per_s_min", "gb_per_s_max"), ".2f"),
        ("x T0", "ratio", ".2fx"),
        ("min to max", ("ratio_min", "ratio_max"), ".2f"),
        ("x 4 KiB", "ratio_to_4k", ".2fx"),
        ("earlier", lambda row: _span(theirs(result, row)), ">s"),
    ]
    torch = result["torch"]
    yield from machine_lines(result["machine"])
    threads = counted(torch["threads"], "thread")
    yield f"torch {torch['version']} takes {threads} by itself; kvredis copy is {result['copying']}"
    for kind, text in result["pages"].items():
        yield f"{kind}: {text}"
    yield from result["notes"]
    yield from tables(columns, result["rows"], _title)
    yield ""
    yield f"x T0 of earlier systems: {result['earlier']['source']}. T0 is the faster of the first rows in each round."
    yield verified_line(result, "compared in full, every task")


def _title(row: Row) -> str:
    return (
        f"{row['shape']}: tasks of random blocks of {size_text(row['block_bytes'])}, between two arrays of"
        f" {row['blocks']}; x T0 is time, less is better"
    )


def theirs(result: MemoryResult, row: Row) -> tuple[float, float] | None:
    """Give the earlier figures that a row may be held against; theirs of memmove are of one thread."""
    figures = result["earlier"]["ratios"].get(row["arm"])
    if figures is None or row["pages"] == "torch" or (row["arm"] == "memmove" and row["threads"] != 1):
        return None
    return figures[0], figures[1]


def _span(figures: tuple[float, float] | None) -> str:
    return "" if figures is None else f"{figures[0]:.1f} to {figures[1]:.1f}"


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw ratios to T0 into the PNG `path`: a panel for each shape and number of threads."""
    result = cast(MemoryResult, raw)
    rows = [row for row in result["rows"] if row["pages"] != "torch"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    threads = list(dict.fromkeys(row["threads"] for row in rows))
    panels = [
        _panel(result, [row for row in rows if row["shape"] == shape and row["threads"] == count])
        for count in threads
        for shape in shapes
    ]
    captions = Captions(
        title="Copying blocks inside one process: time, as a multiple of torch's plain copy (T0)",
        values="time / T0 (less is better)",
        foot=foot(result["machine"], f"T0: torch {result['torch']['version']}, {result['pages'].get('torch', '')}"),
        theirs=result["earlier"]["source"],
    )
    bars(panels, captions, path, columns=len(shapes) if len(shapes) > 1 else len(threads))


def _panel(result: MemoryResult, rows: Sequence[Row]) -> BarPanel:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    series: dict[str, list[Bar | None]] = {f"{row['pages']} pages": [None] * len(arms) for row in rows}
    for row in rows:
        series[f"{row['pages']} pages"][arms.index(row["arm"])] = bar(row, "ratio")
    earlier = {row["arm"]: figures for row in rows if (figures := theirs(result, row)) is not None}
    first = rows[0]
    title = f"{first['shape']}, blocks of {size_text(first['block_bytes'])}, {counted(first['threads'], 'thread')}"
    return BarPanel(title, arms, series, earlier, cut=_CUT)


Pair = tuple[int, int]

BASELINE: Final = "torch naive"


class Crew:
    """Threads that share out the pairs of a task; one thread is the caller itself."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvredis-bench") if threads > 1 else None
        if self._pool is not None:
            met = Barrier(threads)  # all of them are there before anything is timed
            list(self._pool.map(lambda _number: met.wait(), range(threads)))

    def each(self, copy: Callable[[Sequence[Pair]], None], pairs: Sequence[Pair]) -> None:
        """Call `copy` with all pairs, or with one part of them in each thread; return when all have."""
        if self._pool is None:
            copy(pairs)
        else:
            list(self._pool.map(copy, [pairs[part :: self.threads] for part in range(self.threads)]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of a block in both arrays, by its offset in bytes from the arrays' start."""

    of: int  # where block 0's piece begins
    stride: int  # from one block's piece to the next block's
    nbytes: int


class Arrays:
    """Two arrays of the same size, and what each arm sees in them.

    Blockwise a block is one range of bytes: (blocks, layers, 2, tokens, kv_heads, head_dim). Layerwise, as engines keep
    it, it is 2 x layers ranges: (layers, 2, blocks, tokens, kv_heads, head_dim). Elements are written as float16 where
    they have two bytes; no arm computes with them.
    """

    def __init__(self, shape: ModelShape, blocks: int, source: Region, target: Region) -> None:
        if min(source.nbytes, target.nbytes) < blocks * shape.block_bytes():
            raise BenchError(f"{blocks} blocks of {shape.name} do not fit the bench's memory")
        import torch

        self.shape, self.blocks, self.block_bytes = shape, blocks, shape.block_bytes()
        nbytes = blocks * self.block_bytes
        self.source, self.target = source.view[:nbytes], target.view[:nbytes]
        self.source_address, self.target_address = source.address, target.address
        dtype = {1: torch.uint8, 2: torch.float16, 4: torch.float32}[shape.dtype_bytes]
        from_torch, to_torch = (torch.frombuffer(view, dtype=dtype) for view in (self.source, self.target))
        tokens = (BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        blockwise = (blocks, shape.layers, 2, *tokens)
        layerwise = (shape.layers, 2, blocks, *tokens)
        self.torch_blocks: tuple[torch.Tensor, torch.Tensor] = (from_torch.view(blockwise), to_torch.view(blockwise))
        self.torch_layers = (list(from_torch.view(layerwise)), list(to_torch.view(layerwise)))
        self.numpy_blocks: tuple[Any, Any] = (self.torch_blocks[0].numpy(), self.torch_blocks[1].numpy())

    def pieces(self, layerwise: bool) -> list[Piece]:
        """Give the ranges of bytes that make one block."""
        if not layerwise:
            return [Piece(0, self.block_bytes, self.block_bytes)]
        half = self.shape.layer_bytes(BLOCK_TOKENS) // 2
        return [Piece(at * half * self.blocks, half, half) for at in range(2 * self.shape.layers)]

    def wipe(self) -> None:
        """Zero the target, so that no comparison passes on what an earlier arm left."""
        ctypes.memset(self.target_address, 0, self.target.nbytes)

    def verify(self, written: Mapping[int, int], layerwise: bool, who: str) -> int:
        """Compare target blocks in full with the source blocks that were copied there, as {to: from}.

        Gives the bytes compared; raises VerificationError at the first wrong block.
        """
        for piece in self.pieces(layerwise):
            for to, source in written.items():
                ours = self.source_address + piece.of + source * piece.stride
                theirs = self.target_address + piece.of + to * piece.stride
                if not same_bytes(ours, theirs, piece.nbytes):
                    raise VerificationError(f"{who} copied wrong bytes: block {source} to {to}, from byte {piece.of}")
        return len(written) * self.block_bytes

    def verify_untouched(self, written: Mapping[int, int], layerwise: bool, who: str) -> None:
        """See that every block that no arm copied to is still zero; raises VerificationError when one is not."""
        zeros = (ctypes.c_char * self.block_bytes)()
        for piece in self.pieces(layerwise):
            for block in range(self.blocks):
                at = piece.of + block * piece.stride
                if block not in written and not same_bytes(
                    self.target_address + at, ctypes.addressof(zeros), piece.nbytes
                ):
                    raise VerificationError(f"{who} wrote to block {block}, which was not asked for")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to copy. `layerwise`: a block is where engines keep it, in 2 x layers pieces."""

    name: str
    copy: Callable[[Arrays, Sequence[Pair], Crew], None]
    layerwise: bool = False


def torch_naive(arrays: Arrays, pairs: Sequence[Pair], _crew: Crew) -> None:
    """Assign block by block."""
    source, target = arrays.torch_blocks
    for block, to in pairs:
        target[to] = source[block]


def torch_layerwise(arrays: Arrays, pairs: Sequence[Pair], _crew: Crew) -> None:
    """Assign layer by layer: K and V of one block in one layer at a time."""
    sources, targets = arrays.torch_layers
    for block, to in pairs:
        for source, target in zip(sources, targets, strict=True):
            target[:, to] = source[:, block]


def torch_fancy(arrays: Arrays, pairs: Sequence[Pair], _crew: Crew) -> None:
    """Gather all blocks into new memory and scatter them from there: two passes in one statement."""
    import torch

    source, target = arrays.torch_blocks
    blocks, places = torch.tensor(pairs).T
    target[places] = source[blocks]


def torch_index_copy(arrays: Arrays, pairs: Sequence[Pair], _crew: Crew) -> None:
    """The same two passes by their names, index_select and index_copy_."""
    import torch

    source, target = arrays.torch_blocks
    blocks, places = torch.tensor(pairs).T
    target.index_copy_(0, places, source.index_select(0, blocks))


def numpy_naive(arrays: Arrays, pairs: Sequence[Pair], crew: Crew) -> None:
    """Assign block by block."""
    source, target = arrays.numpy_blocks

    def copy(some: Sequence[Pair]) -> None:
        for block, to in some:
            target[to] = source[block]

    crew.each(copy, pairs)


def memmove(arrays: Arrays, pairs: Sequence[Pair], crew: Crew) -> None:
    """Call the C library's memmove for each block; the interpreter lock is free meanwhile."""
    nbytes, source, target = arrays.block_bytes, arrays.source_address, arrays.target_address

    def copy(some: Sequence[Pair]) -> None:
        for block, to in some:
            ctypes.memmove(target + to * nbytes, source + block * nbytes, nbytes)

    crew.each(copy, pairs)


def store_copy(arrays: Arrays, pairs: Sequence[Pair], crew: Crew) -> None:
    """Copy as the store does where it must: kvredis.storage.memory.copy."""
    nbytes, source, target = arrays.block_bytes, arrays.source, arrays.target

    def copy(some: Sequence[Pair]) -> None:
        for block, to in some:
            copying.copy(target[to * nbytes : (to + 1) * nbytes], source[block * nbytes : (block + 1) * nbytes])

    crew.each(copy, pairs)


ARMS: Final = (
    Arm(BASELINE, torch_naive),
    Arm("torch layer by layer", torch_layerwise, layerwise=True),
    Arm("torch fancy index", torch_fancy),
    Arm("torch index_copy_", torch_index_copy),
    Arm("numpy naive", numpy_naive),
    Arm("memmove", memmove),
    Arm("kvredis copy", store_copy),
)


TORCH, SMALL, THP, HUGETLB = "torch", "4 KiB", "THP", "hugetlb"
KINDS: Final = (SMALL, THP, HUGETLB)
_SMAPS: Final = Path("/proc/self/smaps")
HUGE_SHARE_MIN: Final = 0.9


@dataclass(frozen=True, slots=True)
class Region:
    """Writable bytes with their address; the object that made it keeps it mapped."""

    view: memoryview
    address: int

    @property
    def nbytes(self) -> int:
        return self.view.nbytes


@dataclass(frozen=True, slots=True)
class Backing:
    """What the kernel says is behind a mapping."""

    page_bytes: int
    huge_share: float  # of the mapping's memory: in huge pages of whichever kind

    def text(self) -> str:
        """Write it for people: 4 KiB pages, 97 % of them merged into huge ones."""
        if self.page_bytes >= HUGEPAGE_BYTES:
            return f"hugetlb pages of {self.page_bytes // 1024} KiB"
        return f"{self.page_bytes // 1024} KiB pages, {self.huge_share * 100:.0f} % in transparent huge pages"


def obstacle(kind: str, nbytes: int, hugepages_max: int | None) -> str | None:
    """Say why there is no memory of `kind` here, or None. `hugepages_max` caps what may be taken from the pool."""
    if kind == THP and (not hasattr(mmap, "MADV_HUGEPAGE") or anonymous_thp() == "never"):
        return "transparent huge pages are off (/sys/kernel/mm/transparent_hugepage/enabled is never)"
    if kind == HUGETLB:
        needed, pool = pages_needed(nbytes), HugepagePool.read()
        if hugepages_max is not None and hugepages_max < needed:
            return f"needs {needed} pages of 2 MiB and --hugepages allows {hugepages_max}"
        if pool.available < needed:
            return f"needs {needed} pages of 2 MiB and the pool has {pool.available} free"
    return None


@contextmanager
def region(kind: str, nbytes: int) -> Iterator[Region]:
    """Lend `nbytes` of one kind of page, all of them touched.

    Raises BenchError when the kernel gave other pages than were asked for, ArenaError when it gave none.
    """
    if kind == TORCH:
        yield _torch_region(nbytes)
        return
    if kind == THP:
        with _mapped(nbytes) as made:
            yield _proven(made, kind)
        return
    with Arena.create(nbytes, HugepageMode.REQUIRE if kind == HUGETLB else HugepageMode.OFF) as arena:
        arena.prefault(1)
        yield _proven(Region(arena.view[:nbytes], arena.address), kind)


def backing(address: int, smaps: Path = _SMAPS) -> Backing:
    """Read what is behind the mapping that holds `address`; raises BenchError when no mapping does."""
    fields: dict[str, int] = {}
    inside = False
    for line in smaps.read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if not head.endswith(":"):
            if inside:
                break
            start, _, end = head.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and line.endswith("kB"):
            fields[head[:-1]] = int(line.split()[1])
    if not inside:
        raise BenchError(f"no mapping holds address {address:#x}")
    huge = sum(fields.get(name, 0) for name in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"))
    page_bytes = fields.get("KernelPageSize", 0) * 1024
    share = 1.0 if page_bytes >= HUGEPAGE_BYTES else huge / max(1, fields.get("Rss", 0))
    return Backing(page_bytes, min(1.0, share))


def available_bytes() -> int:
    """Give what the kernel could hand out now without swapping (MemAvailable)."""
    return meminfo().get("MemAvailable", 0)


@contextmanager
def _mapped(nbytes: int) -> Iterator[Region]:
    """Map anonymous memory on a 2 MiB boundary and in whole huge pages: the kernel makes no others."""
    whole = pages_needed(nbytes) * HUGEPAGE_BYTES
    mapping = mmap.mmap(-1, whole + HUGEPAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    skipped = -address % HUGEPAGE_BYTES
    ctypes.memset(address + skipped, 0, whole)
    yield Region(memoryview(mapping)[skipped : skipped + nbytes], address + skipped)
    # No close: tensors may still view it; the mapping goes with the last of them.


def _torch_region(nbytes: int) -> Region:
    import torch

    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    tensor.fill_(0)  # zeros may be calloc's, which nothing is behind yet
    array: Any = tensor.numpy()
    return Region(memoryview(array), tensor.data_ptr())


def _proven(made: Region, kind: str) -> Region:
    found = backing(made.address)
    right = {
        SMALL: found.page_bytes < HUGEPAGE_BYTES and found.huge_share < 1 - HUGE_SHARE_MIN,
        THP: found.huge_share >= HUGE_SHARE_MIN,
        HUGETLB: found.page_bytes == HUGEPAGE_BYTES,
    }[kind]
    if not right:
        raise BenchError(f"{gib(made.nbytes)} of {kind} memory turned out to be {found.text()}")
    return made


Cell = tuple[str, int, str]  # kind of page, threads, arm

_CUT: Final = 6.0  # of a bar, times T0: half as much again as the worst of the earlier figures
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
        **new_result(SCHEMA, {**asdict(plan), "threads": plan.crews()}),
        torch=TorchFacts(version=str(torch.__version__), threads=threads),
        copying=copy.KIND,
        pages={},
        earlier=Earlier(source=EARLIER_FROM, ratios={arm: list(theirs) for arm, theirs in EARLIER.items()}),
        rows=[],
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

    def rows(self, progress: Progress) -> list[Row]:
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

    def _row(self, cell: Cell) -> Row:
        kind, threads, arm = cell
        samples = self.samples[cell]
        by_round = {sample["round"]: sample["seconds"] for sample in samples}
        small = self.samples.get((SMALL, threads, arm), []) if kind not in (TORCH, SMALL) else []
        about: Row = {
            "shape": self.shape.name,
            "block_bytes": self.shape.block_bytes(),
            "blocks": self.arrays[kind].blocks,
            "arm": arm,
            "pages": kind,
            "threads": threads,
            "samples": samples,
        }
        ratios = spread("ratio", paired_ratios(by_round, self._t0()), None)
        to_4k = paired_ratio(by_repeat(samples, "seconds"), by_repeat(small, "seconds"))
        return about | summed(samples, ("seconds",), ("gb_per_s",)) | ratios | {"ratio_to_4k": to_4k}
