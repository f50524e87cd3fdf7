"""How long does a client wait for a block that is on disk, that was fetched ahead, that is in memory?

One client, one request in flight, one server whose arena holds a third of the keys. Keys are asked for in the order in
which they were stored, over and over, so the policy has always let go of the next one. For each block, one after the
other: one preadv of a record's length from a segment file into this process, GET of the block from disk, and GET of it
again, now from memory. Whether the first GET really read the disk is seen from INFO (tier_promoted), and a block of
which that is not true does not count. Then as many blocks are prefetched as half the arena holds, the job is waited
for, and all of them are asked for twice in the same order: neither round finds its bytes in a CPU's cache.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import Progress
from kvredis.bench.core.servers import ServerProcess, Transport
from kvredis.bench.core.statistics import GB, MIB, by_repeat, middle, paired_ratio, size_text
from kvredis.storage.disk.segment import record_bytes
from kvredis.storage.memory.arena import Arena

from .client import BlockClient, Values
from .device import forget_pages
from .result import GetRow, GetSample, Mode

_KEYS_TO_ARENA: Final = 3
_PREFETCH_PART: Final = 2
_PROMOTED: Final = "tier_promoted"


@dataclass(frozen=True, slots=True)
class GetPlan:
    """How many blocks of which sizes. `arena_bytes` is what the server has."""

    arena_bytes: int
    repeats: int = 5
    sizes: Sequence[int] = (2 * MIB, 32 * MIB)
    repeat_bytes: int = 128 * MIB  # of blocks that are asked for one by one
    seed: int = 20250104

    def keys(self, size_bytes: int) -> int:
        return _KEYS_TO_ARENA * self.arena_bytes // size_bytes

    def blocks(self, size_bytes: int) -> int:
        return max(2, self.repeat_bytes // size_bytes)

    def prefetched(self, size_bytes: int) -> int:
        return max(1, self.arena_bytes // _PREFETCH_PART // record_bytes(size_bytes))

    def steps(self) -> int:
        """Give how often `run_gets` calls its progress."""
        return self.repeats * len(self.sizes)


def run_gets(
    plan: GetPlan, server: ServerProcess, transport: Transport, directory: Path, progress: Progress
) -> list[GetRow]:
    """Measure every size; `directory` is the server's disk tier. BenchError, VerificationError, BackendError."""
    rows = []
    for size in plan.sizes:
        values = Values(size, plan.keys(size), plan.seed)
        with BlockClient(server.address, values) as client:
            for index in range(values.count):
                client.store(index)
            client.save()
            mode: Mode = "direct" if client.words().get("disk_direct") == "yes" else "buffered"
            samples = []
            with closing(_Turns(plan, client, server.cpu_s, (directory, mode))) as turns:
                for repeat in range(plan.repeats):
                    progress(f"GET of {size_text(size)} from disk, {transport}")
                    samples.append(turns.turn(repeat))
        rows.append(summarize(transport, size, mode, samples))
        with server.connect() as wire:
            wire.flush()
    return rows


class _Turns:
    """The repeats of one size: they go on where the last one stopped."""

    def __init__(
        self, plan: GetPlan, client: BlockClient, cpu_s: Callable[[], float], where: tuple[Path, Mode]
    ) -> None:
        self._plan, self._client, self._cpu_s = plan, client, cpu_s
        self._values = client.values
        self._next = 0
        self._reading = _Reading(*where, record_bytes(self._values.size_bytes), plan.seed)

    def turn(self, repeat: int) -> GetSample:
        """Do one repeat."""
        size = self._values.size_bytes
        pread_s: list[float] = []
        spilled_s: list[float] = []
        resident_s: list[float] = []
        spilled_cpu_s = resident_cpu_s = 0.0
        skipped = verified = 0
        for _ in range(self._plan.blocks(size)):
            index = self._take()
            read_s = self._reading.one()
            promoted, cpu = self._client.counters()[_PROMOTED], self._cpu_s()
            took_s, nbytes = self._get(index)
            cpu, promoted = self._cpu_s() - cpu, self._client.counters()[_PROMOTED] - promoted
            verified += nbytes
            if took_s is None or promoted != 1:
                skipped += 1
                continue
            spilled_cpu_s += cpu
            cpu = self._cpu_s()
            again_s, nbytes = self._get(index)
            resident_cpu_s += self._cpu_s() - cpu
            if again_s is None:
                raise BenchError(f"key {index} was gone right after it had been read from disk")
            verified += nbytes
            pread_s.append(read_s)
            spilled_s.append(took_s)
            resident_s.append(again_s)
        first_s, again, nbytes = self._prefetch()
        return GetSample(
            repeat=repeat,
            blocks=len(spilled_s),
            skipped=skipped,
            pread_ms=middle(pread_s) * 1e3,
            spilled_ms=middle(spilled_s) * 1e3,
            resident_ms=middle(resident_s) * 1e3,
            prefetched_ms=middle(first_s) * 1e3,
            prefetched_again_ms=middle(again) * 1e3,
            spilled_cpu_s_per_gb=spilled_cpu_s * GB / (max(1, len(spilled_s)) * size),
            resident_cpu_s_per_gb=resident_cpu_s * GB / (max(1, len(spilled_s)) * size),
            verified_bytes=verified + nbytes,
        )

    def close(self) -> None:
        """Close the segment file."""
        self._reading.close()

    def _take(self) -> int:
        self._next = (self._next + 1) % self._values.count
        return self._next

    def _get(self, index: int) -> tuple[float | None, int]:
        """GET a key and compare it; the time is None for a miss."""
        self._values.wipe()
        self._reading.forget()
        took_s = self._client.load(index)
        return took_s, 0 if took_s is None else self._values.check(index, 0, "kvredis")

    def _prefetch(self) -> tuple[list[float], list[float], int]:
        """Fetch ahead and GET twice; gives both lists of times and the bytes compared. Misses are left out of both."""
        indices = [self._take() for _ in range(self._plan.prefetched(self._values.size_bytes))]
        said = self._client.prefetch(indices)
        if said.get("queued", 0) * 2 < len(indices):
            raise BenchError(f"of {len(indices)} blocks on disk KV.PREFETCH queued few: {said}")
        before = self._client.counters()[_PROMOTED]
        rounds = [[self._get(index) for index in indices] for _ in range(2)]
        if (read := self._client.counters()[_PROMOTED] - before) > len(indices) // 4:
            raise BenchError(f"{read} of {len(indices)} blocks that were fetched ahead had to be read again")
        both = [(first, again) for (first, _), (again, _) in zip(*rounds, strict=True)]
        whole = [(first, again) for first, again in both if first is not None and again is not None]
        nbytes = sum(count for each in rounds for _, count in each)
        return [first for first, _ in whole], [again for _, again in whole], nbytes


class _Reading:
    """One preadv after the other, of records' length and from places where records may lie, in one segment file."""

    def __init__(self, directory: Path, mode: Mode, nbytes: int, seed: int) -> None:
        self._paths = sorted(directory.glob("segment-*.kv"))
        self._cold = mode == "buffered"
        direct = 0 if self._cold else os.O_DIRECT
        self._fd = os.open(self._paths[0], os.O_RDONLY | os.O_CLOEXEC | direct)
        self._places = os.fstat(self._fd).st_size // nbytes
        self._nbytes = nbytes
        self._random = random.Random(seed)
        self._arena = Arena.create(nbytes)
        self._arena.prefault(1)

    def one(self) -> float:
        """Read once; gives the seconds."""
        offset = self._random.randrange(self._places) * self._nbytes
        self.forget()
        start_s = perf_counter()
        count = os.preadv(self._fd, [self._arena.view[: self._nbytes]], offset)
        took_s = perf_counter() - start_s
        if count != self._nbytes:
            raise BenchError(f"preadv of {self._nbytes} bytes at {offset} gave {count}")
        return took_s

    def forget(self) -> None:
        """Where the tier is buffered: drop its files from the page cache, so that the disk is really read."""
        if self._cold:
            for path in self._paths:
                forget_pages(path)

    def close(self) -> None:
        """Close the file and give the memory back."""
        os.close(self._fd)
        self._arena.close()


def summarize(transport: str, size_bytes: int, mode: Mode, samples: list[GetSample]) -> GetRow:
    """Sum up one size over the repeats."""
    pread, resident = by_repeat(samples, "pread_ms"), by_repeat(samples, "resident_ms")
    spilled = by_repeat(samples, "spilled_ms")
    net = {repeat: spilled[repeat] - resident[repeat] for repeat in spilled}
    return GetRow(
        transport=transport,
        size_bytes=size_bytes,
        mode=mode,
        samples=samples,
        pread_ms=middle(list(pread.values())),
        spilled_ms=middle(list(spilled.values())),
        resident_ms=middle(list(resident.values())),
        prefetched_ms=middle([sample["prefetched_ms"] for sample in samples]),
        spilled_cpu_s_per_gb=middle([sample["spilled_cpu_s_per_gb"] for sample in samples]),
        resident_cpu_s_per_gb=middle([sample["resident_cpu_s_per_gb"] for sample in samples]),
        ratio_spilled=_known(paired_ratio(spilled, pread)),
        ratio_spilled_net=_known(paired_ratio(net, pread)) if any(spilled.values()) else None,
        ratio_prefetched=_known(
            paired_ratio(by_repeat(samples, "prefetched_ms"), by_repeat(samples, "prefetched_again_ms"))
        ),
    )


def _known(ratio: float | None) -> float | None:
    """A ratio of nothing is none: repeats in which no block was on disk have zeros."""
    return ratio or None
