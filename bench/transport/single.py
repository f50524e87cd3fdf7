"""One block of 2 MiB at a time, by every way to its bytes, and how many lookups and leases a second there are.

A consumer that waits for one block feels this figure, where the batches of the other parts hide a round trip among 64.
Blocks are asked for in a random order out of 64, so that neither end finds what it read last in its nearest cache. A
lease is given back with the request for the next one, but where leases are counted: there it waits for the answer.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvredis.bench.core.errors import VerificationError
from kvredis.bench.core.result import Progress
from kvredis.bench.core.statistics import by_repeat, middle, paired_ratio, percentile, rotated
from kvredis.bench.core.wire import Wire
from kvredis.storage.memory.copy import copy

from .blocks import Blocks, words
from .result import (
    COPY,
    GET_TCP,
    GET_UNIX,
    LEASE,
    MEMCPY,
    ONE_BYTES,
    TOUCH,
    LookupRateRow,
    LookupRateSample,
    OneRow,
    OneSample,
)
from .shm_client import LaneClient, Place, request

ONE_BLOCKS: Final = 64
_LOOKUPS: Final = (1, 64)

Way = Callable[[int], object]
"""Get the block of that number."""


@dataclass(frozen=True, slots=True)
class OnePlan:
    """How often each way is timed in each repeat, and how long lookups are asked for."""

    calls: int = 300
    rate_s: float = 0.5


class OneBlock:
    """The ways to one block; `wires` by transport, `lane` where there is one. The server holds the keys' pass 0."""

    def __init__(self, blocks: Blocks, wires: Mapping[str, Wire], lane: LaneClient | None) -> None:
        self.blocks, self.lane = blocks, lane
        self._ways: dict[str, Way] = {MEMCPY: self._memcpy}
        self._calls: dict[tuple[str, int], Callable[[], object]] = {}
        for name, transport in ((GET_TCP, "tcp"), (GET_UNIX, "unix")):
            if transport in wires:
                self._ways[name] = self._getting(wires[transport])
        if lane is not None:
            self._ways |= {LEASE: self._lease, TOUCH: self._touch, COPY: self._copy}
        for keys in _LOOKUPS:
            if "unix" in wires:
                self._calls["KV.MATCH", keys] = self._matching(wires["unix"], keys)
            if lane is not None:
                self._calls["KV.LEASE, KV.RELEASE", keys] = self._leasing(lane, keys)
        self._samples: dict[str, list[OneSample]] = {name: [] for name in self._ways}
        self._rates: dict[tuple[str, int], list[LookupRateSample]] = {name: [] for name in self._calls}
        self._out: list[Place] = []
        self.verified_bytes = 0

    def run(self, plan: OnePlan, repeats: int, progress: Progress) -> tuple[list[OneRow], list[LookupRateRow]]:
        """Measure everything, in turns."""
        for repeat in range(repeats):
            progress("one block of 2 MiB")
            order = random.Random(repeat).choices(range(self.blocks.count), k=plan.calls)
            for name in rotated(list(self._ways), repeat):
                self._verify(name)
                self._samples[name].append(_sample(self._ways[name], order, repeat))
            for what in rotated(list(self._calls), repeat):
                rate = _rate(self._calls[what], plan.rate_s)
                self._rates[what].append(LookupRateSample(repeat=repeat, calls_per_s=rate))
        return [self._row(name) for name in self._ways], [self._rate_row(*what) for what in self._calls]

    def _verify(self, name: str) -> None:
        """Before the clock starts, compare what this way brings of every block, in full; it warms up as well."""
        self.blocks.wipe()
        for index in range(self.blocks.count):
            told = self._ways[name](index)
            if name == TOUCH and told != int(words(self.blocks.value(index, 0)).max()):
                raise VerificationError(f"what {name} read of block {index} is not what it holds")
            if name in (TOUCH, LEASE):
                self._verify_leased(index)
            else:
                self.blocks.check(self.blocks.place(index), (index, 0), name)
            self.verified_bytes += self.blocks.size_bytes

    def _verify_leased(self, index: int) -> None:
        assert self.lane is not None
        places = self.lane.lease([self.blocks.keys[index]])
        self.blocks.check(self.lane.block(places[0]), (index, 0), "the lane")
        self.lane.release(places)

    def _memcpy(self, index: int) -> None:
        source, target = self.blocks.memories()
        at = self.blocks.offset(index, 0)
        ctypes.memmove(target.address + at, source.address + at, self.blocks.size_bytes)

    def _getting(self, wire: Wire) -> Way:
        def get(index: int) -> None:
            wire.begin()
            wire.get(self.blocks.keys[index], self.blocks.place(index))

        return get

    def _lease(self, index: int) -> memoryview:
        """Lease one block, and give back the one before in the same write, as our own client does."""
        assert self.lane is not None
        self._out = self.lane.lease([self.blocks.keys[index]], self._out)
        return self.lane.block(self._out[0])

    def _touch(self, index: int) -> int:
        return int(words(self._lease(index)).max())

    def _copy(self, index: int) -> None:
        copy(self.blocks.place(index), self._lease(index))

    def _matching(self, wire: Wire, count: int) -> Callable[[], object]:
        keys, reply = self.blocks.keys[:count], b":%d" % count

        def ask() -> None:
            wire.begin()
            wire.call(request(b"KV.MATCH", *keys), reply)

        return ask

    def _leasing(self, lane: LaneClient, count: int) -> Callable[[], object]:
        keys = self.blocks.keys[:count]
        return lambda: lane.release(lane.lease(keys))

    def _row(self, name: str) -> OneRow:
        own, base = self._samples[name], self._samples[MEMCPY]
        return OneRow(
            what=name,
            samples=own,
            p50_us=middle([sample["p50_us"] for sample in own]),
            p99_us=middle([sample["p99_us"] for sample in own]),
            ratio_memcpy=paired_ratio(by_repeat(own, "p50_us"), by_repeat(base, "p50_us")),
        )

    def _rate_row(self, what: str, keys: int) -> LookupRateRow:
        own = self._rates[what, keys]
        rate = middle([sample["calls_per_s"] for sample in own])
        return LookupRateRow(what=what, keys=keys, samples=own, calls_per_s=rate, keys_per_s=rate * keys)


def one_blocks() -> Blocks:
    """Give the blocks of this part."""
    return Blocks(ONE_BYTES, ONE_BLOCKS)


def _sample(way: Way, order: list[int], repeat: int) -> OneSample:
    took_us = []
    for index in order:
        start_s = time.perf_counter()
        way(index)
        took_us.append((time.perf_counter() - start_s) * 1e6)
    return OneSample(repeat=repeat, calls=len(took_us), p50_us=percentile(took_us, 50), p99_us=percentile(took_us, 99))


def _rate(call: Callable[[], object], run_s: float) -> float:
    """Give how often `call` can be made in a second."""
    calls, start_s = 0, time.perf_counter()
    while (now_s := time.perf_counter()) < start_s + run_s:
        call()
        calls += 1
    return calls / (now_s - start_s)
