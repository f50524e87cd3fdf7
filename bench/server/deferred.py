"""What does it cost to store a model's blocks, by how much is done before the answer comes? And is a SET that is
answered early a SET?

    SET pipelined         64 in flight, each answered when the value can be read; nothing is on disk
    SET + WAITAOF         the same, and after each batch of 64 the client waits until it is on disk (disk tier alone)
    SET deferred          pyzmq: a batch in one message, answered before it is copied (its sync: SET in one message)
    MGET                  64 keys in one request, received one after the other (pyzmq: a message per block)

In every repeat each server (kvredis, with a disk tier too, redis, memcached, and a pyzmq ROUTER that stores as the
field's own server does) is started afresh for each operation that stores, which then finds a pool that was never
touched (cold; kvredis with --no-prefault), and gets the same again once all of it was (warm); then it is read from.
Everything is read back and compared after what was put off has been done. `drain_s` is how long after the last answer
that was; it is not in `seconds`, and is in `ratio_t0_drained`. Ratios to T0 as in transport/run.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypedDict

from kvredis.bench.core.blocks import BLOCKS, Blocks, TorchCopy, Turn
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import Column, Progress, Row, summed, table
from kvredis.bench.core.servers import SUBJECT, Recipe, ServerProcess, roomy
from kvredis.bench.core.shapes import ModelShape, shape_of
from kvredis.bench.core.statistics import GB, by_repeat, middle, paired_ratio, rotated, size_text
from kvredis.bench.transport.pyzmq import ZmqProcess

from .transfer import BaseSample

SET_PIPELINED, SET_DURABLE, SET_MESSAGE, SET_DEFERRED = (
    "SET pipelined",
    "SET + WAITAOF",
    "SET in one message",
    "SET deferred",
)
MGET: Final = "MGET"
COLD: Final = "cold"
WARM: Final = "warm"


class DeferredSample(TypedDict):
    """One server, one operation, one repeat: every block once."""

    repeat: int
    seconds: float
    drain_s: float  # 0 where nothing is put off
    drained_s: float  # seconds + drain_s
    gb_per_s: float
    server_cpu_ms_per_gb: float
    client_cpu_ms_per_gb: float
    verified_bytes: int  # read back after the drain, and compared in full


def summarize_deferred(
    what: tuple[str, str, str], shape: tuple[str, int, int], samples: list[DeferredSample], base: list[BaseSample]
) -> Row:
    """Sum up `what` = (server, op, pool) with blocks of `shape` = (name, bytes, how many); T0 is in `base`."""
    base_s = by_repeat(base, "seconds")
    row = Row(
        server=what[0],
        transport="tcp",
        shape=shape[0],
        block_bytes=shape[1],
        blocks=shape[2],
        op=what[1],
        pool=what[2],
        samples=samples,
    )
    row |= summed(samples, ("seconds", "drain_s", "gb_per_s", "server_cpu_ms_per_gb", "client_cpu_ms_per_gb"))
    row["ratio_t0"] = paired_ratio(by_repeat(samples, "seconds"), base_s)
    row["ratio_t0_drained"] = paired_ratio(by_repeat(samples, "drained_s"), base_s)
    return row


def deferred_lines(rows: Sequence[Row], base: Sequence[Row]) -> Iterator[str]:
    """Give the part's table, line by line; nothing when it was not measured."""
    for t0 in base:
        own = [row for row in rows if row["shape"] == t0["where"] and row["op"] in _ORDER]
        own = own if t0["part"] == "deferred" else []
        if not own:
            continue
        yield ""
        yield (
            f"{t0['where']}: {own[0]['blocks']} blocks of {size_text(t0['size_bytes'])} in batches of 64,"
            f" tcp, one connection; T0 {t0['gb_per_s']:.2f} GB/s"
        )
        yield from table(_COLUMNS, sorted(own, key=lambda row: (_ORDER.index(row["op"]), row["pool"] != COLD)))


_ORDER: Final[tuple[str, ...]] = (SET_PIPELINED, SET_MESSAGE, SET_DEFERRED, SET_DURABLE, MGET)


_COLUMNS: Final[tuple[Column, ...]] = (
    ("op", "op", ""),
    ("pool", "pool", ""),
    ("server", "server", ""),
    ("ms", lambda row: row["seconds"] * 1e3, ".1f"),
    ("GB/s", "gb_per_s", ".2f"),
    ("x T0", "ratio_t0", ".2fx"),
    ("drain ms", lambda row: row["drain_s"] * 1e3, ".1f"),
    ("x T0", "ratio_t0_drained", ".2fx"),
    ("server ms/GB", "server_cpu_ms_per_gb", ".0f"),
    ("client ms/GB", "client_cpu_ms_per_gb", ".0f"),
)


WITH_DISK: Final = "kvredis+disk"
PYZMQ: Final = "pyzmq"
_ROOM: Final = 3  # memory of each server, in times the blocks' bytes
_UNTIMED: Final = 3
"""Passes of SETs between the cold and the warm one: as many as it takes to touch all of a pool that overwrites nothing
in place, as kvredis' arena, whose SETs take new room."""
_DISK_WAIT_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class DeferredPlan:
    """Which blocks, and how often."""

    repeats: int = 5
    shapes: Sequence[ModelShape] = field(default_factory=lambda: [shape_of("7b")])
    blocks: int = BLOCKS

    def steps(self, servers: int) -> int:
        """Give how often `run_deferred` calls its progress."""
        return self.repeats * len(self.shapes) * servers


class Held(Protocol):
    """A running server with one connected client: what is stored and fetched, and when all of it is done."""

    def cpu_s(self) -> float: ...
    def store(self, op: str, turn: Turn, shift: int) -> None: ...
    def drain(self, op: str) -> None: ...
    def fetch(self, turn: Turn) -> None: ...


@dataclass(frozen=True, slots=True)
class Contender:
    """One server: how it is started with an untouched pool, and what it can do."""

    name: str
    start: Callable[[Blocks], Iterator[Held]]
    stores: Sequence[str]


class _WireHeld:
    """A server that speaks RESP or memcached's protocol."""

    def __init__(self, server: ServerProcess, blocks: Blocks, stack: ExitStack) -> None:
        self._server, self._blocks = server, blocks
        self._wire = stack.enter_context(server.connect())
        self.cpu_s = server.cpu_s

    def store(self, op: str, turn: Turn, shift: int) -> None:
        wire, keys, value = self._wire, self._blocks.keys, self._blocks.value
        wire.begin()
        for batch in turn.batches:
            wire.put_many([(keys[to], value(to, shift)) for _, to in batch])
            if op == SET_DURABLE:
                self._saved()

    def drain(self, op: str) -> None:
        if self._server.name == WITH_DISK:
            self._saved()

    def _saved(self) -> None:
        """WAITAOF 1 0: everything that this connection has stored is on disk."""
        wait = b"%d" % _DISK_WAIT_MS
        self._wire.begin()
        self._wire.send_buffers([b"*4\r\n$7\r\nWAITAOF\r\n$1\r\n1\r\n$1\r\n0\r\n$%d\r\n%b\r\n" % (len(wait), wait)])
        for line in (b"*2", b":1", b":0"):
            self._wire.expect(line)

    def fetch(self, turn: Turn) -> None:
        wire, keys, place = self._wire, self._blocks.keys, self._blocks.place
        wire.begin()
        for batch in turn.batches:
            wire.get_many([(keys[source], place(to)) for source, to in batch])


class _ZmqHeld:
    """The pyzmq peer over TCP."""

    def __init__(self, peer: ZmqProcess, blocks: Blocks, stack: ExitStack) -> None:
        self._client, self._blocks = stack.enter_context(peer.connect("tcp")), blocks
        self.cpu_s = peer.cpu_s

    def store(self, op: str, turn: Turn, shift: int) -> None:
        for batch in turn.batches:
            values = [self._blocks.value(to, shift) for _, to in batch]
            self._client.set([to for _, to in batch], values, deferred=op == SET_DEFERRED)

    def drain(self, op: str) -> None:
        if op == SET_DEFERRED:
            self._client.drain()

    def fetch(self, turn: Turn) -> None:
        for batch in turn.batches:
            ids, places = [source for source, _ in batch], [self._blocks.place(to) for _, to in batch]
            self._client.stream(ids, places)


def contenders(recipes: Sequence[Recipe], with_zmq: bool) -> list[Contender]:
    """Give the contenders: every recipe, kvredis with a disk as well, and the pyzmq peer."""
    made = []
    for recipe in recipes:
        made.append(Contender(recipe.name, _by_recipe(recipe, disk=False), (SET_PIPELINED,)))
        if recipe.name == SUBJECT:
            own = replace(recipe, name=WITH_DISK)
            made.append(Contender(WITH_DISK, _by_recipe(own, disk=True), (SET_PIPELINED, SET_DURABLE)))
    if with_zmq:
        made.append(Contender(PYZMQ, _zmq, (SET_MESSAGE, SET_DEFERRED)))
    return made


def _by_recipe(recipe: Recipe, *, disk: bool) -> Callable[[Blocks], Iterator[Held]]:
    def start(blocks: Blocks) -> Iterator[Held]:
        with ExitStack() as stack:
            untouched = roomy(recipe, blocks.bytes_per_turn * _ROOM, "--no-prefault", disk=disk)
            server = stack.enter_context(ServerProcess(untouched, "tcp"))
            yield _WireHeld(server, blocks, stack)

    return start


def _zmq(blocks: Blocks) -> Iterator[Held]:
    with ExitStack() as stack:
        yield _ZmqHeld(stack.enter_context(ZmqProcess(blocks.count, blocks.size_bytes)), blocks, stack)


def run_deferred(plan: DeferredPlan, who: Sequence[Contender], progress: Progress) -> tuple[list[Row], list[Row]]:
    """Measure every shape; gives the rows and T0. Raises KVRedisError, VerificationError at a wrong byte."""
    rows: list[Row] = []
    base: list[Row] = []
    for shape in plan.shapes:
        one = _Shape(plan, shape)
        one.run(who, progress)
        rows += one.rows()
        base.append(one.base_row())
    return rows, base


class _Shape:
    """The samples of one model's blocks."""

    def __init__(self, plan: DeferredPlan, shape: ModelShape) -> None:
        self._plan, self._shape = plan, shape
        self._blocks = Blocks.of(shape, plan.blocks)
        self._samples: dict[tuple[str, str, str], list[DeferredSample]] = {}
        self._base: list[BaseSample] = []

    def run(self, who: Sequence[Contender], progress: Progress) -> None:
        with closing(TorchCopy(self._blocks)) as torch:
            torch.measure(self._blocks.turn(0))
            for repeat in range(self._plan.repeats):
                turn = self._blocks.turn(repeat)
                runs = [torch.measure(turn)]
                for contender in rotated(who, repeat):
                    progress(f"{self._shape.name}: {contender.name}, cold and warm")
                    self._contend(contender, turn, repeat)
                    runs.append(torch.measure(turn))
                seconds, nbytes = middle(runs), self._blocks.bytes_per_turn
                self._base.append(
                    BaseSample(repeat=repeat, seconds=seconds, payload_bytes=nbytes, gb_per_s=nbytes / seconds / GB)
                )

    def _contend(self, contender: Contender, turn: Turn, repeat: int) -> None:
        """Every operation of one server: each that stores on a fresh one, cold and warm, the others after the last."""
        last = 2 + _UNTIMED
        for op in contender.stores:
            with contextmanager(contender.start)(self._blocks) as held:
                self._keep((contender.name, op, COLD), self._store(held, op, (turn, 1, repeat)))
                for shift in range(2, last):
                    held.store(op, turn, shift)
                held.drain(op)
                self._keep((contender.name, op, WARM), self._store(held, op, (turn, last, repeat)))
                if op == contender.stores[-1]:
                    self._keep((contender.name, MGET, WARM), self._fetch(held, (turn, last, repeat), contender.name))

    def _keep(self, what: tuple[str, str, str], sample: DeferredSample) -> None:
        self._samples.setdefault(what, []).append(sample)

    def _store(self, held: Held, op: str, which: tuple[Turn, int, int]) -> DeferredSample:
        turn, shift, repeat = which
        server_s, client_s, start_s = held.cpu_s(), time.process_time(), time.perf_counter()
        held.store(op, turn, shift)
        answered_s = time.perf_counter()
        held.drain(op)
        drained_s = time.perf_counter()
        server_s, client_s = held.cpu_s() - server_s, time.process_time() - client_s
        self._blocks.wipe()
        back = Turn([[(to, to) for _, to in batch] for batch in turn.batches])
        held.fetch(back)
        verified = self._blocks.verify_pairs(back.pairs, shift, op)
        took = (answered_s - start_s, drained_s - answered_s)
        return self._sample(repeat, took, (server_s, client_s), verified)

    def _fetch(self, held: Held, which: tuple[Turn, int, int], who: str) -> DeferredSample:
        turn, shift, repeat = which
        self._blocks.wipe()
        server_s, client_s, start_s = held.cpu_s(), time.process_time(), time.perf_counter()
        held.fetch(turn)
        took_s = time.perf_counter() - start_s
        server_s, client_s = held.cpu_s() - server_s, time.process_time() - client_s
        verified = self._blocks.verify_pairs(turn.pairs, shift, who)
        return self._sample(repeat, (took_s, 0.0), (server_s, client_s), verified)

    def _sample(
        self, repeat: int, took: tuple[float, float], cpu: tuple[float, float], verified: int
    ) -> DeferredSample:
        nbytes = self._blocks.bytes_per_turn
        return DeferredSample(
            repeat=repeat,
            seconds=took[0],
            drain_s=took[1],
            drained_s=sum(took),
            gb_per_s=nbytes / took[0] / GB,
            server_cpu_ms_per_gb=cpu[0] * 1e3 * GB / nbytes,
            client_cpu_ms_per_gb=cpu[1] * 1e3 * GB / nbytes,
            verified_bytes=verified,
        )

    def rows(self) -> list[Row]:
        """Sum up."""
        shape = (self._shape.name, self._blocks.size_bytes, self._blocks.count)
        return [summarize_deferred(what, shape, own, self._base) for what, own in self._samples.items()]

    def base_row(self) -> Row:
        """Give T0."""
        if not self._base:
            raise BenchError("no repeat was measured")
        rate = middle([sample["gb_per_s"] for sample in self._base])
        where, size = self._shape.name, self._blocks.size_bytes
        return Row(part="deferred", where=where, size_bytes=size, samples=self._base, gb_per_s=rate)
