"""The arms of the transport bench: each moves one turn's batches in its own way between the client and a store.

A store is one server with what its keys hold at the moment. An arm reads (`read`: keys `from` come to places `to`) or
writes (`write`: key `to` gets its value of the next pass). Connections are opened once for a shape and warmed up before
the clock starts, as an engine's are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.wire import Wire
from kvredis.storage.memory.copy import copy

from .blocks import Batch, Blocks, Pair, Turn, words
from .shm_client import LaneClient, LentMemory, Place
from .zmq_client import ZmqClient

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
    """GET one by one, GET pipelined, MGET, SET pipelined: 64 at a time."""
    keys, value, place = blocks.keys, blocks.value, blocks.place

    def one_by_one(turn: Turn, _shift: int) -> None:
        wire.begin()
        for source, to in turn.pairs:
            wire.get(keys[source], place(to))

    def stream(turn: Turn, _shift: int) -> None:
        wire.begin()
        for batch in turn.batches:
            wire.ask([keys[source] for source, _ in batch])
            for source, to in batch:
                wire.take(keys[source], place(to))

    def many(turn: Turn, _shift: int) -> None:
        wire.begin()
        for batch in turn.batches:
            wire.get_many([(keys[source], place(to)) for source, to in batch])

    def put_many(turn: Turn, shift: int) -> None:
        wire.begin()
        for batch in turn.batches:
            wire.put_many([(keys[to], value(to, shift)) for _, to in batch])

    return [
        Arm("GET one by one", transport, "read", store, one_by_one),
        Arm("stream_get", transport, "read", store, stream),
        Arm("MGET", transport, "read", store, many),
        Arm("SET pipelined", transport, "write", store, put_many),
    ]


def zmq_arms(transport: str, client: ZmqClient, blocks: Blocks, store: Store) -> list[Arm]:
    """What the field does with pyzmq: a multipart reply, the same by recv_into, a message per block, multipart send."""

    def reading(move: Callable[[Sequence[int], Sequence[memoryview]], None]) -> Run:
        def run(turn: Turn, _shift: int) -> None:
            for batch in turn.batches:
                move([source for source, _ in batch], [blocks.place(to) for _, to in batch])

        return run

    def put(turn: Turn, shift: int) -> None:
        for batch in turn.batches:
            client.put([to for _, to in batch], [blocks.value(to, shift) for _, to in batch])

    arms = [
        Arm("pyzmq multipart", transport, "read", store, reading(client.get)),
        Arm("pyzmq recv_into", transport, "read", store, reading(client.get_into)),
        Arm("pyzmq stream", transport, "read", store, reading(client.stream)),
        Arm("pyzmq send", transport, "write", store, put),
    ]
    return [arm for arm in arms if transport != "inproc" or arm.name in ("pyzmq multipart", "pyzmq send")]


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
            client.get([source for source, _ in part], [blocks.place(place) for _, place in part])

    return fetch
