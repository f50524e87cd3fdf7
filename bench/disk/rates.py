"""Blocks per second from and to one directory: the device, a plain loop and the disk tier, taking turns.

In each repeat, for each mode and number of threads, every arm in rotating order writes all its blocks, T0 copies them
in memory, then every arm reads all of them. What was read is compared in full once the clock has stopped.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import Progress
from kvredis.bench.core.statistics import GB, MIB, by_repeat, counted, middle, paired_ratio, rotated
from kvredis.storage.disk.files import RealFiles

from .blocks import Blocks
from .device import Loop, RateArm, Timing, cached_share, device_tool
from .result import DEVICE, LOOP, Mode, Op, RateRow, RateSample
from .t0 import PlainCopy
from .tier import TierArm, tier_bytes

_MODES: tuple[Mode, ...] = ("direct", "buffered")
HUGEPAGES = "hugetlb-2MiB"
_CACHED_SHARE_MOST = 0.01
_WARM_UP_PASSES = 2  # the second pass fills what the first left of a tier's room


@dataclass(frozen=True, slots=True)
class RatePlan:
    """How much is moved, and by how many threads. Every cell moves all blocks once."""

    repeats: int = 5
    threads: Sequence[int] = (1, 2, 4, 8)
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
        return self.repeats * len(_MODES) * len(self.threads)

    def disk_bytes(self) -> int:
        """Give the room that the files of all arms take."""
        nbytes = self.count * self.block_bytes
        return 2 * nbytes + len(_MODES) * tier_bytes(nbytes + 64 * self.block_bytes)


@dataclass(slots=True)
class Rates:
    """What came of it: the rows, what stood for the device, and what could not be done."""

    device: str
    memory: str
    t0: str
    rows: list[RateRow] = field(default_factory=list)
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
    t0 = PlainCopy(blocks)
    rates = Rates(name, blocks.pages, t0.name)
    if tool is not None and blocks.pages == HUGEPAGES:
        rates.notes.append(
            f"{name}: its buffers lie on small pages, ours on hugepages; the loop is the fairer neighbour"
        )
    modes = _MODES
    if (obstacle := RealFiles().direct_obstacle(directory)) is not None:
        modes = ("buffered",)
        rates.notes.append(f"direct: skipped, {obstacle}")
    arms: list[RateArm] = [Loop(directory / "loop.data", blocks), TierArm(directory, blocks)]
    if tool is not None:
        arms.insert(0, tool)
    samples: _Samples = {}
    with ExitStack() as stack:
        for arm in arms:
            stack.callback(arm.close)
        shift = _warm_up(arms, modes)
        rates.notes += _still_cached(arms, directory)
        for repeat in range(plan.repeats):
            for mode in modes:
                for threads in plan.threads:
                    progress(f"{mode}, {counted(threads, 'thread')}")
                    shift += 1
                    for arm in rotated(arms, repeat):
                        arm.forget_pages()
                        timing = arm.write(mode, threads, shift)
                        _keep(samples, (mode, "write", threads), arm, _sample(plan, timing, repeat, 0))
                    t0_s = t0.seconds(shift)
                    for arm in rotated(arms, repeat):
                        for op in _reads(mode):
                            sample = _read(plan, arm, blocks, (mode, op, threads), repeat)
                            _keep(samples, (mode, op, threads), arm, sample)
                    _pair(samples, (mode, threads), t0_s)
    for cell in sorted(samples, key=_cell_order):
        rates.rows += summarize(plan.block_bytes, cell, samples[cell])
    return rates


def summarize(block_bytes: int, cell: tuple[Mode, Op, int], samples: dict[str, list[RateSample]]) -> list[RateRow]:
    """Sum up one cell over the repeats; one row per arm."""
    rates = {arm: by_repeat(own, "gb_per_s") for arm, own in samples.items()}
    mode, op, threads = cell
    return [
        RateRow(
            arm=arm,
            mode=mode,
            op=op,
            threads=threads,
            block_bytes=block_bytes,
            samples=own,
            gb_per_s=middle(list(rates[arm].values())),
            cpu_s_per_gb=middle([sample["cpu_s_per_gb"] for sample in own]),
            ratio_to_device=paired_ratio(rates[arm], rates.get(DEVICE, {})),
            ratio_to_loop=paired_ratio(rates[arm], rates.get(LOOP, {})),
            p50_ms=_middle(own, "p50_ms"),
            p99_ms=_middle(own, "p99_ms"),
            ratio_to_t0=paired_ratio(by_repeat(own, "seconds"), _t0_s(own)),
        )
        for arm, own in samples.items()
    ]


def _middle(samples: Sequence[RateSample], figure: Literal["p50_ms", "p99_ms"]) -> float | None:
    """Give a percentile's median over the repeats, None where single blocks were not seen."""
    found = [value for sample in samples if (value := sample.get(figure)) is not None]
    return middle(found) if found else None


def _t0_s(samples: Sequence[RateSample]) -> dict[int, float]:
    return {sample["repeat"]: sample["t0_seconds"] for sample in samples if "t0_seconds" in sample}


def _pair(samples: _Samples, cell: tuple[Mode, int], t0_s: float) -> None:
    """Note T0 in the latest sample of every arm and operation of a cell."""
    for (mode, _, threads), arms in samples.items():
        if (mode, threads) == cell:
            for own in arms.values():
                own[-1]["t0_seconds"] = t0_s


def _still_cached(arms: Sequence[RateArm], directory: Path) -> list[str]:
    """Say so when this file system keeps pages that it is told to drop: then a cold read there is none."""
    for arm in arms:
        arm.forget_pages()
    share = max(cached_share(path) for path in directory.glob("*.data"))
    if share <= _CACHED_SHARE_MOST:
        return []
    return [f"cold reads are not cold: {share:.0%} of a file stays in the page cache after POSIX_FADV_DONTNEED"]


def _warm_up(arms: Sequence[RateArm], modes: Sequence[Mode]) -> int:
    """Lay out every file, untimed; gives the last pass."""
    for mode in modes:
        for arm in arms:
            for shift in range(_WARM_UP_PASSES):
                arm.write(mode, 1, shift)
    return _WARM_UP_PASSES


def _reads(mode: Mode) -> tuple[Op, ...]:
    return ("read", "read warm") if mode == "buffered" else ("read",)


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


def _cell_order(cell: tuple[Mode, Op, int]) -> tuple[bool, str, int]:
    mode, op, threads = cell
    return mode == "buffered", {"write": "0", "read": "1"}.get(op, "2"), threads
