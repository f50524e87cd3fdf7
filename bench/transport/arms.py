"""How does each arm of `kvredis bench transport` move one turn's batches, and one block? Every one between the same
places, from a server that holds what `Store.shift` says.

Arms, by transport (tcp, unix; ipc is zmq's name for a unix socket; lane is the same host's shared memory):
    stream_get (64 GETs in one write, bodies received into place), SET pipelined (64 in one write)
    stream_get, 4 connections (our backend loads 64 blocks into place, with a thread for each connection where blocks
    are long; its like is pyzmq stream too: one socket, whose bytes pass through a thread of zmq's own at either end)
    pyzmq stream (one message per block), pyzmq send (64 frames, copied by the peer before it answers)
    lane, no copy (64 leases, given back with the request for the next 64), lane, touched (every byte is read),
    lane, copied, lane, put (the server copies from lent memory)

An arm reads (`read`: keys `from` come to places `to`) or writes (`write`: key `to` gets its value of the next pass).
Connections are opened once for a shape and warmed up before the clock starts, as an engine's are.

One block of 2 MiB is asked for in a random order out of 64, so that neither end finds what it read last in its nearest
cache; the batches hide a round trip among 64, which a consumer of one block feels.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Self, TypedDict

from kvredis.backends.config.url import Address
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.bench.core.blocks import Batch, Blocks, Pair, Turn, words
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.result import Progress, Row, summed
from kvredis.bench.core.statistics import by_repeat, paired_ratio, percentile, rotated
from kvredis.bench.core.wire import Wire
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.memory.copy import copy
from kvredis.storage.store import Store as Staging

from .pyzmq import ZmqClient
from .shm_client import LaneClient, LentMemory, Place

MIB: Final = 1024**2
ONE_BYTES: Final = 2 * MIB
STRIPED: Final = "stream_get, 4 connections"


class ArmSample(TypedDict):
    """One arm, one repeat."""

    repeat: int
    seconds: float
    gb_per_s: float
    peer_cpu_ms_per_gb: float
    client_cpu_ms_per_gb: float
    verified_bytes: int


class T0Sample(TypedDict):
    repeat: int
    seconds: float  # the median of `runs`
    runs: list[float]


class OneSample(TypedDict):
    repeat: int
    calls: int
    p50_us: float
    p99_us: float


TOUCH: Final = "lease, touch, release"
GET_TCP: Final = "GET tcp"
MEMCPY: Final = "memcpy"


Op = Literal["read", "write"]
Run = Callable[[Turn, int], None]
"""Move a turn; the number is the shift of the pass whose values are written, or were."""


Fetch = Callable[[Sequence[Pair]], None]
"""Bring keys `from` to places `to`, whatever it takes: for comparing what was written."""

AT_ONCE: Final = 16
"""Blocks in one request where nothing is timed."""


@dataclass(slots=True)
class Store:
    """What one server holds: its keys' values are those of pass `shift`."""

    name: str
    cpu_s: Callable[[], float]
    fetch: Fetch
    shift: int = 0


@dataclass(slots=True)
class Arm:
    """One way of one transport. `verify` is set where bytes do not end up in the target: it compares them itself."""

    name: str
    transport: str
    op: Op
    store: Store
    run: Run
    verify: Callable[[Turn, int], int] | None = None


def wire_arms(transport: str, wire: Wire, blocks: Blocks, store: Store) -> list[Arm]:
    """GET and SET, 64 of them in one write."""
    keys, value, place = blocks.keys, blocks.value, blocks.place

    def stream(turn: Turn, _shift: int) -> None:
        wire.begin()
        for batch in turn.batches:
            wire.ask([keys[source] for source, _ in batch])
            for source, to in batch:
                wire.take(keys[source], place(to))

    def put_many(turn: Turn, shift: int) -> None:
        wire.begin()
        for batch in turn.batches:
            wire.put_many([(keys[to], value(to, shift)) for _, to in batch])

    return [
        Arm("stream_get", transport, "read", store, stream),
        Arm("SET pipelined", transport, "write", store, put_many),
    ]


def zmq_arms(transport: str, client: ZmqClient, blocks: Blocks, store: Store) -> list[Arm]:
    """What the field does with pyzmq: a message for each block, and many blocks in one message."""

    def stream(turn: Turn, _shift: int) -> None:
        for batch in turn.batches:
            client.stream([source for source, _ in batch], [blocks.place(to) for _, to in batch])

    def put(turn: Turn, shift: int) -> None:
        for batch in turn.batches:
            values = [blocks.value(to, shift) for _, to in batch]
            client.set([to for _, to in batch], values, deferred=False)

    return [Arm("pyzmq stream", transport, "read", store, stream), Arm("pyzmq send", transport, "write", store, put)]


@dataclass(slots=True)
class LaneArms:
    """Leases of 64 blocks at a time, given back with the request for the next: unused, touched whole, or copied."""

    lane: LaneClient
    blocks: Blocks
    store: Store
    lent: LentMemory | None = None
    _touched: list[int] = field(default_factory=list)
    _expected: list[int] = field(default_factory=list)

    def arms(self) -> list[Arm]:
        """Give the arms; what needs lent memory is left out without it."""
        made = [
            Arm("lane, no copy", "lane", "read", self.store, self._leasing(lambda _batch, _views: None), self._looked),
            Arm("lane, touched", "lane", "read", self.store, self._touching, self._felt),
            Arm("lane, copied", "lane", "read", self.store, self._leasing(self._copied)),
        ]
        if self.lent is not None:
            made.append(Arm("lane, put", "lane", "write", self.store, self._put))
        return made

    def _leasing(self, use: Callable[[Batch, list[memoryview]], None]) -> Run:
        lane, keys = self.lane, self.blocks.keys

        def run(turn: Turn, _shift: int) -> None:
            places: list[Place] = []
            for batch in turn.batches:
                since_s = time.monotonic()
                places = lane.lease([keys[source] for source, _ in batch], places)
                use(batch, [lane.block(place) for place in places])
                if not lane.holds(since_s):
                    raise BenchError("a lease ended before its batch was read")
            lane.release(places)

        return run

    def _touching(self, turn: Turn, shift: int) -> None:
        self._touched.clear()
        self._leasing(self._touch)(turn, shift)

    def _touch(self, _batch: Batch, views: list[memoryview]) -> None:
        self._touched += [int(words(view).max()) for view in views]

    def _copied(self, batch: Batch, views: list[memoryview]) -> None:
        for (_, to), view in zip(batch, views, strict=True):
            copy(self.blocks.place(to), view)

    def _put(self, turn: Turn, shift: int) -> None:
        blocks = self.blocks
        for batch in turn.batches:
            self.lane.put_many([(blocks.keys[to], blocks.offset(to, shift), blocks.size_bytes) for _, to in batch])

    def _looked(self, turn: Turn, shift: int) -> int:
        """Compare the blocks in the arena itself: lease them once more."""
        for batch in turn.batches:
            places = self.lane.lease([self.blocks.keys[source] for source, _ in batch])
            for (source, _), place in zip(batch, places, strict=True):
                self.blocks.check(self.lane.block(place), (source, shift), "the lane")
            self.lane.release(places)
        return len(turn.pairs) * self.blocks.size_bytes

    def _felt(self, turn: Turn, shift: int) -> int:
        """Compare what was made of every byte, then the bytes."""
        if not self._expected:
            self._expected = [int(words(self.blocks.value(index, 0)).max()) for index in range(self.blocks.count)]
        held = [self._expected[(source + shift) % self.blocks.count] for source, _ in turn.pairs]
        if held != self._touched:
            raise BenchError("what was read over the lane is not what the blocks hold")
        return self._looked(turn, shift)


def fetch_by_wire(wire: Wire, blocks: Blocks) -> Fetch:
    """Fetch with GET, one by one."""

    def fetch(pairs: Sequence[Pair]) -> None:
        for source, place in pairs:
            wire.begin()
            wire.get(blocks.keys[source], blocks.place(place))

    return fetch


def fetch_by_zmq(client: ZmqClient, blocks: Blocks) -> Fetch:
    """Fetch from a pyzmq peer."""

    def fetch(pairs: Sequence[Pair]) -> None:
        for start in range(0, len(pairs), AT_ONCE):
            part = pairs[start : start + AT_ONCE]
            client.stream([source for source, _ in part], [blocks.place(place) for _, place in part])

    return fetch


CONNECTIONS: Final = 4
_STAGING_BLOCKS: Final = 256
"""The backend receives at once what is an eighth of its memory at most; none of it is ever touched here."""


class InPlace:
    """Room for one body: a place in the target, which its holder never gives back. A base.Reservation."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def filled(self, start: int, stop: int) -> None:
        """Some of it has."""

    def commit(self) -> None:
        """The body has come."""

    def abort(self) -> None:
        """It has not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Places:
    """The Rooms of one load: where each key's body belongs."""

    def __init__(self, places: Mapping[bytes, memoryview]) -> None:
        self._places = places

    def reserve(self, key: bytes, length: int) -> InPlace | None:
        """As Rooms.reserve; a body of another length has no place."""
        view = self._places[key]
        return InPlace(view) if len(view) == length else None

    reserve_ahead = reserve


class Striped:
    """A backend with several connections to one server; close it in the end."""

    def __init__(self, address: Address, blocks: Blocks) -> None:
        self._blocks = blocks
        self._staging = Staging(Arena.create(_STAGING_BLOCKS * max(blocks.size_bytes, 4096), HugepageMode.OFF))
        self._backend = RemoteBackend(address, self._staging, connections=CONNECTIONS)

    def arm(self, transport: str, store: Store) -> Arm:
        """Give the arm."""
        return Arm(STRIPED, transport, "read", store, self._run)

    def close(self) -> None:
        """Hang up, and give the memory back."""
        self._backend.close()  # closes the staging memory as well

    def _run(self, turn: Turn, _shift: int) -> None:
        for batch in turn.batches:
            while batch:
                batch = self._load(batch)

    def _load(self, batch: Batch) -> Batch:
        """Load a batch; what is left are places whose key has another place in it."""
        keys, place = self._blocks.keys, self._blocks.place
        first = dict(reversed(batch))
        places = {keys[source]: place(to) for source, to in first.items()}
        for key, lease in zip(places, self._backend.load(list(places), rooms=Places(places)), strict=True):
            if lease is None:
                raise BenchError(f"no block came for {key.decode()}, or one of another length")
            lease.release()
        return [(source, to) for source, to in batch if first[source] != to]


ONE_BLOCKS: Final = 64

Way = Callable[[int], object]
"""Get the block of that number."""


@dataclass(frozen=True, slots=True)
class OnePlan:
    """How often each way is timed in each repeat."""

    calls: int = 300


class OneBlock:
    """The ways to one block: by `wire`, which is TCP's, and by `lane`, where there are. The server holds pass 0."""

    def __init__(self, blocks: Blocks, wire: Wire | None, lane: LaneClient | None) -> None:
        self.blocks, self.lane = blocks, lane
        self._ways: dict[str, Way] = {MEMCPY: self._memcpy}
        if wire is not None:
            self._ways[GET_TCP] = self._getting(wire)
        if lane is not None:
            self._ways[TOUCH] = self._touch
        self._samples: dict[str, list[OneSample]] = {name: [] for name in self._ways}
        self._out: list[Place] = []
        self.verified_bytes = 0

    def run(self, plan: OnePlan, repeats: int, progress: Progress) -> list[Row]:
        """Measure everything, in turns."""
        for repeat in range(repeats):
            progress("one block of 2 MiB")
            order = random.Random(repeat).choices(range(self.blocks.count), k=plan.calls)
            for name in rotated(list(self._ways), repeat):
                self._verify(name)
                self._samples[name].append(_sample(self._ways[name], order, repeat))
        return [self._row(name) for name in self._ways]

    def _verify(self, name: str) -> None:
        """Before the clock starts, compare what this way brings of every block, in full; it warms up as well."""
        self.blocks.wipe()
        for index in range(self.blocks.count):
            told = self._ways[name](index)
            if name == TOUCH and told != int(words(self.blocks.value(index, 0)).max()):
                raise VerificationError(f"what {name} read of block {index} is not what it holds")
            if name == TOUCH:
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

    def _row(self, name: str) -> Row:
        own, base = self._samples[name], self._samples[MEMCPY]
        ratio = paired_ratio(by_repeat(own, "p50_us"), by_repeat(base, "p50_us"))
        return Row(what=name, samples=own, ratio_memcpy=ratio) | summed(own, ("p50_us", "p99_us"))


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
