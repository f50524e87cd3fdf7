"""How much of what PCIe gives does a prompt's KV get between an engine's pages and the host? `kvredis bench swap` moves
it by three ways, alone, beside a prefill and beside an engine's own copies.

One task moves random pages out to blocks of page-locked memory, or back in: by one cudaMemcpyAsync for each layer, page
and K/V, as engines began; gathered by torch's index operations; and as kvredis does it. The link is measured in the
same repeat. On the GPU a real prefill may run beside it, and an engine's own copies. Every byte is compared, each time,
where the KV is.

GB = 1e9 bytes of KV, moved once. `seconds` is from the call until the last byte is there, wall clock, with nothing else
on the GPU. `percent` is of the link in the same repeat: the faster of one copy of page-locked memory and of a row of
copies of 64 MiB, in the same direction.

The file, kvredis.bench.swap/1, has beside what every result has
    torch, device, copies (what there is to copy with)
    links    of each repeat and direction: one_gb_per_s, row_gb_per_s
    rows     shape, chunk_tokens, nbytes, arm, direction, samples; medians of gb_per_s and percent
    prefill  how much a prefill was slowed by what ran beside it: shape, direction, launch, tokens, samples
    waits    how long copies of a few bytes took on another stream, an engine's, by what they passed beside
"""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from kvredis.storage.memory.copy import address_of
from kvredis.storage.memory.page_lock import PageLock, lock_pages

from .core.compute import DTYPES, Modelled
from .core.errors import BenchError, VerificationError
from .core.prompts import PromptPlan, prompts
from .core.result import (
    Column,
    GateLine,
    Progress,
    Result,
    Row,
    gate_line,
    gate_lines,
    machine_lines,
    new_result,
    summed,
    tables,
    verified_line,
)
from .core.shapes import BLOCK_TOKENS, SHAPES, ModelShape
from .core.statistics import GB, MIB, middle, rotated

if TYPE_CHECKING:
    from torch import Tensor

    from kvredis.adapters.transfer.base import Part
    from kvredis.adapters.transfer.kv_cache import PagedKV


SCHEMA: Final = "kvredis.bench.swap/1"
OURS: Final = "ours"
BARS: Final[Mapping[str, tuple[float, float]]] = {"8b": (97.0, 97.0), "7b": (94.0, 96.0), "3b": (91.0, 95.0)}
"""Percent of the link that ours must reach on a GPU, out and in, by shape."""
PREFILL_BAR_PERCENT: Final = 3.0

Direction = Literal["out", "in"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("out", "in")

Launch = Literal["graph", "kernels"]
GRAPH: Final[Launch] = "graph"
LAUNCHES: Final[tuple[Launch, ...]] = (GRAPH, "kernels")
"""How a prefill is launched: at once, or kernel by kernel from Python, which waits for the mover's."""

Waiter = Literal["alone", "copies in a row", "ours"]
ALONE: Final[Waiter] = "alone"
ROW: Final[Waiter] = "copies in a row"
WAITERS: Final[tuple[Waiter, ...]] = (ALONE, ROW, "ours")
"""What an engine's copies pass beside."""


class LinkSample(TypedDict):
    repeat: int
    direction: Direction
    one_gb_per_s: float
    row_gb_per_s: float


class SwapSample(TypedDict):
    repeat: int
    seconds: float
    gb_per_s: float
    percent: float
    verified_bytes: int


class PrefillSample(TypedDict):
    repeat: int
    alone_ms: float
    beside_ms: float
    slowed_percent: float
    gb_per_s: float


class WaitSample(TypedDict):
    repeat: int
    us: float
    most_us: float
    gb_per_s: float


class SwapResult(Result):
    torch: str
    device: str
    copies: dict[str, object]
    links: list[LinkSample]
    rows: list[Row]
    prefill: list[Row]
    waits: list[Row]


def swap_row(shape: str, chunk_tokens: int, nbytes: int, way: tuple[str, Direction], samples: list[SwapSample]) -> Row:
    """Make a row of its samples; `way` is (arm, direction)."""
    row = Row(shape=shape, chunk_tokens=chunk_tokens, nbytes=nbytes, arm=way[0], direction=way[1], samples=samples)
    return row | summed(samples, spreads=("gb_per_s", "percent"))


def prefill_row(of: tuple[str, Direction, Launch], tokens: int, samples: list[PrefillSample]) -> Row:
    """Make a row of its samples; `of` is (shape, direction, launch)."""
    row = Row(shape=of[0], direction=of[1], launch=of[2], tokens=tokens, samples=samples)
    return row | summed(samples, ("alone_ms", "beside_ms", "gb_per_s"), ("slowed_percent",))


def wait_row(of: tuple[str, Direction, int], beside: Waiter, samples: list[WaitSample]) -> Row:
    """Make a row of its samples; `of` is (shape, direction, bytes of the engine's copy)."""
    row = Row(shape=of[0], direction=of[1], nbytes=of[2], beside=beside, samples=samples)
    return row | summed(samples, ("us", "gb_per_s")) | {"most_us": max(each["most_us"] for each in samples)}


def swap_gate(rows: Sequence[Row], prefill: Sequence[Row]) -> list[GateLine]:
    """Judge what was measured on a GPU: ours against the bars of its shape, and each prefill."""
    found = []
    for row in rows:
        if row["arm"] == OURS and row["shape"] in BARS:
            bar = BARS[row["shape"]][DIRECTIONS.index(row["direction"])]
            name = f"{row['shape']} {row['direction']}, chunks of {row['chunk_tokens']}"
            found.append(gate_line(name, f">= {bar:g} %", row["percent"]))
    for row in prefill:
        name = f"{row['shape']} prefill by {row['launch']} beside {row['direction']}"
        found.append(gate_line(name, f"< {PREFILL_BAR_PERCENT:g} %", row["slowed_percent"]))
    return found


_COLUMNS: Final[tuple[Column, ...]] = (
    ("arm", "arm", ""),
    ("way", "direction", ""),
    ("GB/s", "gb_per_s", ".2f"),
    ("least to most", ("gb_per_s_min", "gb_per_s_max"), ".1f"),
    ("% of link", "percent", ".1f"),
    ("least to most", ("percent_min", "percent_max"), ".1f"),
)
_PREFILL_COLUMNS: Final[tuple[Column, ...]] = (
    ("launched by", "launch", ""),
    ("alone ms", "alone_ms", ".1f"),
    ("beside ms", "beside_ms", ".1f"),
    ("GB/s beside", "gb_per_s", ".1f"),
    ("slowed %", "slowed_percent", "+.1f"),
    ("least to most", ("slowed_percent_min", "slowed_percent_max"), "+.1f"),
)
_WAIT_COLUMNS: Final[tuple[Column, ...]] = (
    ("beside", lambda row: "nothing" if row["beside"] == ALONE else row["beside"], ""),
    ("us", "us", ",.0f"),
    ("at most", "most_us", ",.0f"),
    ("GB/s beside", "gb_per_s", ".1f"),
)


def table_lines(result: SwapResult) -> Iterator[str]:
    """Give the report, line by line: everything in it is in the JSON."""
    yield from machine_lines(result["machine"], f"{result['device']}; ")
    yield f"torch {result['torch']}; " + ", ".join(f"{name}: {value}" for name, value in result["copies"].items())
    yield from result["notes"]
    for direction in DIRECTIONS:
        chosen = [link for link in result["links"] if link["direction"] == direction]
        link = summed(chosen, spreads=("one_gb_per_s", "row_gb_per_s"))
        one, row = (
            f"{link[name]:.1f} ({link[f'{name}_min']:.1f} to {link[f'{name}_max']:.1f})"
            for name in ("one_gb_per_s", "row_gb_per_s")
        )
        yield f"Link {direction}, GB/s: one copy {one}, copies of 64 MiB in a row {row}"
    yield from tables(
        _COLUMNS,
        result["rows"],
        lambda row: (
            f"{row['shape']}, {row['nbytes'] / 1e6:.0f} MB of random pages, chunks of {row['chunk_tokens']} tokens"
        ),
    )
    yield from tables(
        _PREFILL_COLUMNS,
        result["prefill"],
        lambda row: f"{row['shape']} prefill of {row['tokens']} tokens, beside {row['direction']}",
    )
    yield from tables(
        _WAIT_COLUMNS,
        result["waits"],
        lambda row: f"{row['shape']}, an engine's copy of {row['nbytes']} bytes {row['direction']}, beside",
    )
    yield ""
    yield verified_line(result)
    yield from gate_lines(result["gate"], "medians, in percent")


_SEED: Final = 20250106
_HEADER_BYTES: Final = 512
_BLANK: Final = 0xA5
"""What is written over bytes before others are to come there."""
_ROW_BYTES: Final = 64 * 1024 * 1024
ONE_BYTES: Final = 1024**3
PER_PAGE: Final = "a copy a layer, page, K/V"
TORCH: Final = "torch index, ring"
ARMS: Final = (PER_PAGE, TORCH, OURS)

Arm = Callable[[Sequence["Part"], Direction], None]
"""Moves the parts and returns when they have moved."""


class HostMemory:
    """`nbytes` of a process's own memory, known to the GPU's driver where there is one."""

    def __init__(self, nbytes: int, *, lock: bool) -> None:
        self._mapping = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._mapping)
        import numpy as np

        self.array: Any = np.frombuffer(self.view, np.uint8)
        self.array[:] = 0
        self._lock: PageLock | None = lock_pages(address_of(self.view), nbytes) if lock else None
        self.locked = self._lock is not None and self._lock.name == "cuda"

    def close(self) -> None:
        """Give it back."""
        if self._lock is not None:
            self._lock.release()
        del self.array


class Swap:
    """One shape's KV: twice as many pages as are moved, random, and the parts of one task by chunk."""

    def __init__(self, shape: ModelShape, tokens: int, device: Any) -> None:
        import torch

        from kvredis.adapters.engine.tensors import TORCH_DTYPES
        from kvredis.adapters.transfer.kv_cache import PagedKV

        self.shape = shape
        self.tokens = tokens
        count = 2 * (tokens // BLOCK_TOKENS)
        torch.manual_seed(_SEED)
        size = (2, count, BLOCK_TOKENS, shape.kv_heads, shape.head_dim * shape.dtype_bytes)
        made = [torch.randint(0, 256, size, dtype=torch.uint8, device=device) for _ in range(shape.layers)]
        dtype = TORCH_DTYPES[DTYPES[shape.dtype_bytes]]
        self.paged: PagedKV = PagedKV([layer.view(dtype).transpose(0, 1) for layer in made])
        self._true = [layer.clone() for layer in made]
        self._held = made
        self.pages = random.Random(_SEED).sample(range(count), tokens // BLOCK_TOKENS)
        self.nbytes = shape.block_bytes(tokens)

    def parts(self, host: memoryview, chunk_tokens: int) -> list[Part]:
        """Give the task's pages by chunks, each with its own block: as in an arena, behind headers, in random order."""
        from kvredis.adapters.transfer.base import Part

        held = chunk_tokens // BLOCK_TOKENS
        nbytes = self.shape.block_bytes(chunk_tokens)
        places = list(range(self.tokens // chunk_tokens))
        random.Random(_SEED + 1).shuffle(places)
        found = []
        for at, place in enumerate(places):
            start = place * (nbytes + _HEADER_BYTES) + _HEADER_BYTES
            found.append(Part(self.pages[at * held : (at + 1) * held], host[start : start + nbytes]))
        return found

    def host_bytes(self, chunk_tokens: int) -> int:
        """Give what `parts` needs."""
        return self.tokens // chunk_tokens * (self.shape.block_bytes(chunk_tokens) + _HEADER_BYTES)

    def blank(self, parts: Sequence[Part]) -> None:
        """Overwrite the parts' blocks: from the device's memory, which is faster than the CPU's own writing."""
        import torch

        from kvredis.adapters.engine.tensors import borrow

        blank = torch.full((parts[0].memory.nbytes,), _BLANK, dtype=torch.uint8, device=self.paged.device)
        for part in parts:
            borrow(part.memory, torch.uint8).copy_(blank, non_blocking=True)
        settle(self.paged.device)

    def check_out(self, parts: Sequence[Part]) -> int:
        """Compare every block with the pages it is of, on the device; VerificationError at a wrong byte. Give the bytes
        compared."""
        import torch

        from kvredis.adapters.engine.tensors import borrow

        device = self.paged.device
        found = torch.empty((len(parts), parts[0].memory.nbytes), dtype=torch.uint8, device=device)
        for row, part in zip(found, parts, strict=True):
            row.copy_(borrow(part.memory, torch.uint8), non_blocking=True)
        pages = torch.tensor([part.pages for part in parts], device=device)
        wanted = torch.stack([layer[:, pages] for layer in self._true])  # layers, 2, parts, pages of a part, ...
        wanted = wanted.permute(2, 0, 1, *range(3, wanted.ndim)).reshape(found.shape)
        if not torch.equal(found, wanted):
            raise VerificationError(f"{self.shape.name}: a block that was stored has other bytes than its pages")
        return found.numel()

    def wipe(self) -> None:
        """Overwrite the task's pages, and no other."""
        import torch

        pages = torch.tensor(self.pages, device=self.paged.device)
        for layer in self._held:
            layer[:, pages] = _BLANK

    def check_in(self) -> int:
        """Compare all memory of the KV with what it was; VerificationError at a wrong byte."""
        import torch

        for layer, wanted in zip(self._held, self._true, strict=True):
            if not torch.equal(layer, wanted):
                raise VerificationError(f"{self.shape.name}: pages that were loaded, or others, have other bytes")
        return self.nbytes

    def spoil(self, parts: Sequence[Part], direction: Direction) -> None:
        """Overwrite what is to be moved to; what moves in has been stored and compared just before."""
        if direction == "out":
            self.blank(parts)
        else:
            self.wipe()
        settle(self.paged.device)

    def check(self, parts: Sequence[Part], direction: Direction) -> int:
        """Compare what was moved to; gives the bytes."""
        return self.check_out(parts) if direction == "out" else self.check_in()


def settle(device: Any) -> None:
    """Wait for all that a GPU has been given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def arm_of(name: str, paged: PagedKV) -> tuple[Arm, Callable[[], None]]:
    """Make a way of moving, and what gives its memory back."""
    from kvredis.adapters.transfer import open_transfer
    from kvredis.adapters.transfer.cpu import HostTransfer
    from kvredis.adapters.transfer.cuda.device import CudaDevice
    from kvredis.adapters.transfer.cuda.ring import RingTransfer

    if name == PER_PAGE:
        return (_per_page_gpu(paged) if paged.device.type == "cuda" else _per_page_cpu(paged)), lambda: None
    if name == OURS:
        transfer = open_transfer(paged)
    elif paged.device.type == "cuda":
        transfer = RingTransfer(paged, CudaDevice(paged, "torch"))
    else:
        transfer = HostTransfer(paged)

    def move(parts: Sequence[Part], direction: Direction) -> None:
        (transfer.store(parts) if direction == "out" else transfer.load(parts)).wait()

    return move, transfer.close


def _per_page_cpu(paged: PagedKV) -> Arm:
    from kvredis.adapters.engine.tensors import borrow

    def move(parts: Sequence[Part], direction: Direction) -> None:
        for part in parts:
            block = borrow(part.memory, paged.dtype).view(
                len(paged.layers), 2, len(part.pages), *paged.layers[0].shape[2:]
            )
            for layer, planes in zip(paged.layers, block, strict=True):
                for at, page in enumerate(part.pages):
                    for plane in (0, 1):
                        here, there = layer[page, plane], planes[plane, at]
                        if direction == "out":
                            there.copy_(here)
                        else:
                            here.copy_(there)

    return move


def _per_page_gpu(paged: PagedKV) -> Arm:
    """One cudaMemcpyAsync for each layer, page and plane, from Python: what the first engines with offloading did."""
    import torch

    from kvredis.adapters.transfer.cuda.runtime import cuda_runtime

    runtime = cuda_runtime()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    import numpy as np

    bases = np.array([layer.data_ptr() for layer in paged.layers], np.uint64)
    page, plane = (stride * paged.dtype.itemsize for stride in paged.layers[0].stride()[:2])
    unit = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize

    def move(parts: Sequence[Part], direction: Direction) -> None:
        assert runtime is not None
        for part in parts:
            pages = np.array(part.pages, np.uint64) * np.uint64(page)
            there = bases[:, None, None] + np.array([0, plane], np.uint64)[None, :, None] + pages[None, None, :]
            host = np.uint64(address_of(part.memory)) + np.arange(there.size, dtype=np.uint64) * np.uint64(unit)
            sizes = np.full(there.size, unit, np.uint64)
            target, source = (host, there.ravel()) if direction == "out" else (there.ravel(), host)
            runtime.copy(target.tolist(), source.tolist(), sizes.tolist(), stream.cuda_stream, batch=False)
        stream.synchronize()

    return move


class Link:
    """The copy engine by itself: page-locked memory to and from the GPU, or on the CPU one tensor to another."""

    def __init__(self, host: HostMemory, device: Any, nbytes: int) -> None:
        import torch

        self.nbytes = min(nbytes, len(host.view))
        self._host: Tensor = torch.from_numpy(host.array[: self.nbytes])
        self._there = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self._on_gpu = self._there.is_cuda
        self._stream: Any = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    def sample(self, repeat: int) -> list[LinkSample]:
        """Time one copy of all, and a row of 64 MiB ones, each way."""
        found = []
        for direction in DIRECTIONS:
            rates = [self._timed(direction, self.nbytes), self.row(direction)]
            found.append(LinkSample(repeat=repeat, direction=direction, one_gb_per_s=rates[0], row_gb_per_s=rates[1]))
        return found

    def row(self, direction: Direction) -> float:
        """Copy all in pieces of 64 MiB, which the device is given at once; GB/s."""
        return self._timed(direction, _ROW_BYTES)

    def _timed(self, direction: Direction, step: int) -> float:
        import torch

        began_s = time.perf_counter()
        with torch.cuda.stream(self._stream):
            for start in range(0, len(self._host), step):
                host, there = self._host[start : start + step], self._there[start : start + step]
                if direction == "out":
                    host.copy_(there, non_blocking=True)
                else:
                    there.copy_(host, non_blocking=True)
        if self._on_gpu:
            self._stream.synchronize()
        return len(self._host) / GB / (time.perf_counter() - began_s)


_PREFILL_SEED: Final = 5
_COPIES: Final = 20
"""Of an engine, timed in a repeat."""
_PAUSE_S: Final = 4e-3
"""Before each at most, by lot: the next of a row without pauses finds the copy engine still with that stream."""
COPY_BYTES: Final[dict[Direction, int]] = {"out": 64, "in": 1 << 20}
"""A step's tokens, and what a step may be given: a few bytes into a GPU do not wait for others, 1 MiB does (H100)."""


def prefill_beside(swap: Swap, arm: Arm, parts: Any, direction: Direction, repeats: int) -> tuple[list[Row], int]:
    """Prefill with a model of the shape, alone and while another thread moves the parts again and again: as a CUDA
    graph, and launched kernel by kernel, in turns. Gives the bytes compared, too: what moves in was moved out before.
    """
    prompt = list(prompts(PromptPlan(swap.tokens, 0.0, 1, seed=_PREFILL_SEED)))
    model = Modelled(swap.shape, prompt * len(LAUNCHES))
    model.prepare(swap.tokens, prompts=1 + LAUNCHES.index(GRAPH))
    samples: dict[Launch, list[PrefillSample]] = {launch: [] for launch in LAUNCHES}

    def moving(launch: Launch, move: Callable[[], None]) -> tuple[float, float]:
        """Milliseconds of a prefill beside it, and GB/s."""
        with Moving(move, swap.nbytes) as mover:
            took_ms = _prefill_ms(model, LAUNCHES.index(launch), swap.tokens)
        return took_ms, mover.gb_per_s

    def move() -> None:
        arm(parts, direction)

    for number in [*range(len(LAUNCHES))] * 2:
        _prefill_ms(model, number, swap.tokens)
    swap.spoil(parts, direction)
    began_s = time.perf_counter()
    move()
    moved_s = time.perf_counter() - began_s
    for launch in LAUNCHES:
        moving(launch, move)  # the first beside anything is 9 % slower, whichever way bytes go

    def rest() -> None:
        """A prefill begins behind the first move, in which nothing computes. Behind such a rest one alone was 2 %
        faster on an H200, so each has it."""
        time.sleep(moved_s)

    for repeat in range(repeats):
        for launch in rotated(LAUNCHES, repeat):
            before_ms, _ = moving(launch, rest)
            beside_ms, gb_per_s = moving(launch, move)
            alone_ms = middle([before_ms, moving(launch, rest)[0]])
            samples[launch].append(
                PrefillSample(
                    repeat=repeat,
                    alone_ms=alone_ms,
                    beside_ms=beside_ms,
                    slowed_percent=100 * (beside_ms / alone_ms - 1),
                    gb_per_s=gb_per_s,
                )
            )
    verified = swap.check(parts, direction)
    rows = [prefill_row((swap.shape.name, direction, launch), swap.tokens, each) for launch, each in samples.items()]
    return rows, verified


def _prefill_ms(model: Modelled, number: int, tokens: int) -> float:
    """Milliseconds of a prefill of the prompt of that number, on the GPU's clock where there is one."""
    import torch

    model.begin(number)
    if not torch.cuda.is_available():
        began_s = time.perf_counter()
        model.enqueue(0, tokens)
        return 1e3 * (time.perf_counter() - began_s)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    model.enqueue(0, tokens)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def copies_beside(
    swap: Swap, moves: tuple[Arm, Link], parts: Sequence[Part], direction: Direction, repeats: int
) -> tuple[list[Row], int]:
    """Time an engine's copies of a few bytes in that direction: alone, beside large copies in a row on one stream, and
    beside ours, in turns. Gives the bytes compared, too."""
    arm, link = moves
    arm(parts, "out")
    copy, lot = _EngineCopy(direction, swap.paged.device), random.Random(_PREFILL_SEED)
    samples: dict[Waiter, list[WaitSample]] = {waiter: [] for waiter in WAITERS}
    verified = 0
    for repeat in range(repeats):
        for waiter in rotated(WAITERS, repeat):
            if waiter == OURS:
                swap.spoil(parts, direction)
            move, nbytes = {
                ALONE: (lambda: time.sleep(1e-3), 0),
                ROW: (lambda: link.row(direction), link.nbytes),
                OURS: (lambda: arm(parts, direction), swap.nbytes),
            }[waiter]
            with Moving(move, nbytes) as mover:
                times_us = [copy.time_us(lot.uniform(0, _PAUSE_S)) for _ in range(_COPIES)]
            if waiter == OURS:
                verified += swap.check(parts, direction)
            samples[waiter].append(
                WaitSample(repeat=repeat, us=middle(times_us), most_us=max(times_us), gb_per_s=mover.gb_per_s)
            )
    of = (swap.shape.name, direction, COPY_BYTES[direction])
    return [wait_row(of, waiter, each) for waiter, each in samples.items()], verified


class _EngineCopy:
    """A copy of a few bytes on the stream that is the current one, an engine's."""

    def __init__(self, direction: Direction, device: Any) -> None:
        import torch

        self._on_gpu = device.type == "cuda"
        there = torch.zeros(COPY_BYTES[direction], dtype=torch.uint8, device=device)
        here = torch.zeros(COPY_BYTES[direction], dtype=torch.uint8, pin_memory=self._on_gpu)
        self._target, self._source = (here, there) if direction == "out" else (there, here)

    def time_us(self, pause_s: float) -> float:
        """Microseconds from the call until the bytes are there, on a stream that has had nothing to do for so long."""
        import torch

        time.sleep(pause_s)
        began_s = time.perf_counter()
        self._target.copy_(self._source, non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return 1e6 * (time.perf_counter() - began_s)


class Moving:
    """A thread that moves the same parts over and over, from before the block begins until it ends."""

    def __init__(self, move: Any, nbytes: int) -> None:
        self._move = move
        self._nbytes = nbytes
        self._begun = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvredis bench swap", daemon=True)
        self._failure: Exception | None = None
        self.gb_per_s = 0.0

    def __enter__(self) -> Moving:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise BenchError(f"nothing was moved beside the engine: {self._failure}") from self._failure

    def _run(self) -> None:
        times, began_s = 0, time.perf_counter()
        try:
            while not self._stop.is_set():
                self._move()
                times += 1
                self._begun.set()
        except Exception as error:
            self._failure = error
        finally:
            self._begun.set()
        self.gb_per_s = times * self._nbytes / GB / (time.perf_counter() - began_s)


_CPU_TOKENS = 512
_CPU_LINK_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """What one call of the bench does; `tokens` None: 8192, without a GPU 512."""

    shapes: tuple[ModelShape, ...] = field(default_factory=lambda: tuple(SHAPES[name] for name in ("8b", "7b", "3b")))
    chunk_tokens: tuple[int, ...] = (16, 256)
    tokens: int | None = None
    repeats: int = 5
    beside_prefill: bool = False
    beside_copies: bool = False

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        each = len(self.chunk_tokens) * (self.repeats + 1) * len(ARMS) * len(DIRECTIONS)
        return len(self.shapes) * (each + len(DIRECTIONS) * (self.beside_prefill + self.beside_copies))


QUICK = SwapPlan(repeats=2)


def run(plan: SwapPlan, progress: Progress) -> SwapResult:
    """Measure; VerificationError at a wrong byte, BenchError for what cannot be moved."""
    import torch

    from kvredis.adapters.transfer.cuda.device import choices

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    tokens = plan.tokens or (8192 if on_gpu else _CPU_TOKENS)
    for shape in plan.shapes:
        if shape.dtype_bytes not in DTYPES:
            raise BenchError(f"{shape.name}: no KV of {shape.dtype_bytes} bytes an element")
    for chunk in plan.chunk_tokens:
        if chunk % BLOCK_TOKENS or tokens % chunk:
            raise BenchError(f"{tokens} tokens are not whole chunks of {chunk}, made of pages of {BLOCK_TOKENS}")
    began_s = time.perf_counter()
    result = SwapResult(
        **new_result(
            SCHEMA,
            {
                "shapes": [shape.name for shape in plan.shapes], "chunk_tokens": list(plan.chunk_tokens),
                "tokens": tokens, "page_tokens": BLOCK_TOKENS, "repeats": plan.repeats,
            },
            [] if on_gpu else ["There is no GPU: everything is copied within the CPU's memory, and no bar applies"],
        ),
        torch=str(torch.__version__), device=torch.cuda.get_device_name() if on_gpu else "No GPU",
        copies=choices() if on_gpu else {}, links=[], rows=[], prefill=[], waits=[],
    )  # fmt: skip
    for shape in plan.shapes:
        _measure(Swap(shape, tokens, device), plan, result, progress)
    if on_gpu:
        result["gate"] = swap_gate(result["rows"], result["prefill"])
    result["seconds"] = time.perf_counter() - began_s
    return result


def _measure(swap: Swap, plan: SwapPlan, result: SwapResult, progress: Progress) -> None:
    on_gpu = swap.paged.device.type == "cuda"
    link_bytes = ONE_BYTES if on_gpu else _CPU_LINK_BYTES
    host = HostMemory(max(link_bytes, *(swap.host_bytes(chunk) for chunk in plan.chunk_tokens)), lock=on_gpu)
    arms = {OURS: arm_of(OURS, swap.paged)}
    try:
        if on_gpu and not host.locked:
            result["notes"].append(f"{swap.shape.name}: the host's memory could not be registered with the GPU")
        if plan.beside_prefill and on_gpu:  # before others make streams, which an engine has not either
            for direction in DIRECTIONS:
                progress(f"{swap.shape.name}: prefill beside {direction}")
                parts = swap.parts(host.view, plan.chunk_tokens[-1])
                rows, verified = prefill_beside(swap, arms[OURS][0], parts, direction, plan.repeats)
                result["prefill"] += rows
                result["verified_bytes"] += verified
        elif plan.beside_prefill and not any("prefill" in note for note in result["notes"]):
            result["notes"].append("There is no GPU: no prefill to slow down")
        arms |= {name: arm_of(name, swap.paged) for name in ARMS if name != OURS}
        link = Link(host, swap.paged.device, link_bytes)
        if plan.beside_copies:
            for direction in DIRECTIONS:
                progress(f"{swap.shape.name}: an engine's copies beside {direction}")
                parts = swap.parts(host.view, plan.chunk_tokens[-1])
                waits, verified = copies_beside(swap, (arms[OURS][0], link), parts, direction, plan.repeats)
                result["waits"] += waits
                result["verified_bytes"] += verified
        turns = _Turns(plan, link, {name: arm for name, (arm, _) in arms.items()})
        for chunk in plan.chunk_tokens:
            result["rows"] += _rows(swap, host.view, chunk, turns, result, progress)
    finally:
        for _, close in arms.values():
            close()
        del arms
        host.close()


@dataclass(frozen=True, slots=True)
class _Turns:
    """The arms that take turns in a repeat."""

    plan: SwapPlan
    link: Link
    arms: dict[str, Arm]


def _rows(swap: Swap, host: memoryview, chunk: int, turns: _Turns, result: SwapResult, progress: Progress) -> list[Row]:
    parts = swap.parts(host, chunk)
    samples: dict[tuple[str, Direction], list[SwapSample]] = {(arm, way): [] for arm in ARMS for way in DIRECTIONS}
    for repeat in range(-1, turns.plan.repeats):  # the first is a warm-up: checked, not told
        links = turns.link.sample(repeat)
        if repeat >= 0:
            result["links"] += links
        for name in rotated(ARMS, repeat + 1):
            for direction in DIRECTIONS:
                progress(f"{swap.shape.name}, chunks of {chunk}: {name} {direction}")
                sample = _sample(swap, parts, (turns.arms[name], direction), links)
                result["verified_bytes"] += sample["verified_bytes"]
                if repeat >= 0:
                    samples[name, direction].append(sample)
    return [swap_row(swap.shape.name, chunk, swap.nbytes, way, each) for way, each in samples.items()]


def _sample(swap: Swap, parts: Any, way: tuple[Arm, Direction], links: list[LinkSample]) -> SwapSample:
    arm, direction = way
    swap.spoil(parts, direction)
    began_s = time.perf_counter()
    arm(parts, direction)
    seconds = time.perf_counter() - began_s
    settle(swap.paged.device)
    verified = swap.check(parts, direction)
    rate = swap.nbytes / GB / seconds
    link = next(each for each in links if each["direction"] == direction)
    return SwapSample(
        repeat=link["repeat"], seconds=seconds, gb_per_s=rate,
        percent=100 * rate / max(link["one_gb_per_s"], link["row_gb_per_s"]), verified_bytes=verified,
    )  # fmt: skip
