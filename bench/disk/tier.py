"""The disk tier as an arm: what the server does to spill and promote, by the threads that the server has for it.

A spill is place, write (the checksum is in it) and publish; a promotion is get and read (the checksum again). The tier
is full, as a cache always is: blocks of each pass have new keys and drive out those of the pass before, so making room
and telling the index of it are in the figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvredis.bench.core.errors import BenchError
from kvredis.storage.background import IoThreads, Priority
from kvredis.storage.disk.segment import Facts
from kvredis.storage.disk.tier import DiskOptions, DiskTier

from .blocks import Blocks
from .device import Timing, forget_pages
from .result import TIER, Mode

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
        """As RateArm."""
        tier, size = self._tier(mode), self._blocks.size_bytes
        self._shifts[mode] = shift

        times_s: list[float] = []

        def spill(index: int) -> None:
            start_s = time.perf_counter()
            extent = next((each for _ in range(_PLACE_TRIES) if (each := tier.place(size)[0]) is not None), None)
            image, facts = self._blocks.image(index, shift), Facts(_key(shift, index), 0, size, 0)
            record = tier.write(extent, image, facts) if extent is not None else None
            if record is None or not tier.publish(record):
                raise BenchError(f"the tier in {self._directory} did not take a block: {tier.stats}")
            times_s.append(time.perf_counter() - start_s)

        def finish() -> None:
            if not tier.sync():
                raise BenchError(f"the tier in {self._directory} could not sync: {tier.stats}")

        return self._timed(threads, Priority.SPILL, spill, finish).by_block(times_s)

    def read(self, mode: Mode, threads: int) -> Timing:
        """As RateArm."""
        tier, shift = self._tier(mode), self._shifts[mode]

        times_s: list[float] = []

        def promote(index: int) -> None:
            start_s = time.perf_counter()
            record = tier.get(_key(shift, index), 0)
            if record is None or not tier.read(record, self._blocks.place(index)):
                raise BenchError(f"the tier in {self._directory} has lost a block: {tier.stats}")
            times_s.append(time.perf_counter() - start_s)

        return self._timed(threads, Priority.DEMAND, promote, lambda: None).by_block(times_s)

    def verify(self, mode: Mode) -> int:
        """As RateArm."""
        return self._blocks.verify(self._shifts[mode], "the tier", self._blocks.size_bytes)

    def forget_pages(self) -> None:
        """As RateArm."""
        for path in self._directory.glob("*/segment-*.kv"):
            forget_pages(path)

    def close(self) -> None:
        """As RateArm."""
        while self._tiers:
            self._tiers.popitem()[1].close()

    def _tier(self, mode: Mode) -> DiskTier:
        if mode not in self._tiers:
            limit = tier_bytes(self._blocks.stride_bytes * (self._blocks.count + 8))
            options = DiskOptions(self._directory / mode, limit, direct=mode == "direct", source="kvredis bench disk")
            self._tiers[mode] = DiskTier.open(options)
        return self._tiers[mode]

    def _timed(
        self, threads: int, priority: Priority, job: Callable[[int], None], finish: Callable[[], None]
    ) -> Timing:
        count, nbytes = self._blocks.count, self._blocks.stride_bytes
        pool = IoThreads(threads, count, count * nbytes)
        pool.start()
        try:
            cpu_s, start_s = time.process_time(), time.perf_counter()
            futures = [pool.submit(priority, nbytes, _bound(job, index)) for index in range(count)]
            for future in futures:
                assert future is not None, "the queue has room for every block"
                future.result()
            finish()
            return Timing(time.perf_counter() - start_s, time.process_time() - cpu_s)
        finally:
            pool.close()


def _bound(job: Callable[[int], None], index: int) -> Callable[[], None]:
    return lambda: job(index)


def _key(shift: int, index: int) -> bytes:
    return b"bench:%d:%05d" % (shift, index)
