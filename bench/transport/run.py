"""What does it cost to move a model's blocks between two processes of a host, by every transport there is? `kvredis
bench transport` compares RESP over TCP and unix sockets, shared memory, and pyzmq, with a plain copy in one process
(T0).

For each shape one kvredis server and one pyzmq peer hold the same blocks. In every repeat all arms (arms.py) get the
same turn of 8 batches, in rotating order, with T0 at the beginning, in the middle and at the end. Then, on a server of
its own, one block of 2 MiB at a time. What several connections bring is `kvredis bench server --connections`.

The file, kvredis.bench.transport/1, has beside what every result has
    torch    version, threads of T0        server   version, command, facts from INFO        t0
    arms     a sample is one arm's 8 batches of one repeat, clock and CPU (of all threads) read around them; `ratio_t0`
             is the median of its seconds / T0's in the same repeat, so less is better, `ahead` of the seconds of
             pyzmq's like / its own, so more is better
    one      one block of 2 MiB
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from kvredis import install_line
from kvredis.backends.config.url import Address
from kvredis.bench.core.blocks import BLOCKS, Blocks, TorchCopy
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.plot import BarPanel, Captions, bar, bars
from kvredis.bench.core.result import (
    Column,
    GateLine,
    Progress,
    Result,
    Row,
    gate_line,
    gate_lines,
    machine_lines,
    new_result,
    spread,
    summed,
    tables,
    verified_line,
)
from kvredis.bench.core.servers import RECIPES, ServerFacts, ServerProcess, free_port, kvredis_recipe
from kvredis.bench.core.shapes import ModelShape, shape_of
from kvredis.bench.core.statistics import GB, by_repeat, middle, paired_ratio, paired_ratios, rotated, size_text
from kvredis.bench.core.wire import Wire
from kvredis.storage.entry import INLINE_BYTES_MAX

from .arms import (
    AT_ONCE,
    GET_TCP,
    ONE_BLOCKS,
    ONE_BYTES,
    STRIPED,
    TOUCH,
    Arm,
    ArmSample,
    LaneArms,
    OneBlock,
    OnePlan,
    Store,
    Striped,
    T0Sample,
    fetch_by_wire,
    fetch_by_zmq,
    one_blocks,
    wire_arms,
    zmq_arms,
)
from .pyzmq import ZmqProcess
from .pyzmq import missing as zmq_missing
from .shm_client import LaneClient, LaneMissing, LentMemory

SCHEMA: Final = "kvredis.bench.transport/1"
AHEAD_LEAST: Final = 1.5
LANE_AHEAD_LEAST: Final = 5.0
T0_MOST: Final[Mapping[tuple[str, str], float]] = {
    ("tcp", "stream_get"): 2.2,
    ("unix", "stream_get"): 2.0,
    ("tcp", "SET pipelined"): 2.8,
    ("unix", "SET pipelined"): 2.8,
    ("lane", "lane, copied"): 1.15,
    ("lane", "lane, no copy"): 0.05,
}
"""(transport, arm) -> the most that its ratio to T0 may be."""
LIKE: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("tcp", "stream_get"): ("tcp", "pyzmq stream"),
    ("unix", "stream_get"): ("ipc", "pyzmq stream"),
    ("tcp", STRIPED): ("tcp", "pyzmq stream"),
    ("unix", STRIPED): ("ipc", "pyzmq stream"),
    ("tcp", "SET pipelined"): ("tcp", "pyzmq send"),
    ("unix", "SET pipelined"): ("ipc", "pyzmq send"),
    ("lane", "lane, copied"): ("ipc", "pyzmq stream"),
    ("lane", "lane, no copy"): ("ipc", "pyzmq stream"),
}
"""(transport, arm) -> what pyzmq does that is most like it. For the lane: its best between two processes of a host."""


class TorchFacts(TypedDict):
    version: str
    threads: int


class TransportResult(Result):
    torch: TorchFacts
    server: ServerFacts
    t0: list[Row]
    arms: list[Row]
    one: list[Row]


def arm_name(row: Row) -> str:
    """Name an arm with its transport, once."""
    return row["arm"] if row["transport"] == "lane" else f"{row['transport']} {row['arm']}"


def set_ahead(rows: Sequence[Row]) -> None:
    """Fill in how far each arm is ahead of pyzmq's like with the same blocks."""
    by_name = {(row["shape"], row["transport"], row["arm"]): row for row in rows}
    for row in rows:
        like = LIKE.get((row["transport"], row["arm"]))
        theirs = by_name.get((row["shape"], like[0], like[1])) if like else None
        if theirs is not None:
            row["ahead"] = paired_ratio(by_repeat(theirs["samples"], "seconds"), by_repeat(row["samples"], "seconds"))


def transport_gate(result: TransportResult) -> list[GateLine]:
    """Judge every line that the result has a measurement for; a ratio that could not be formed does not pass.

    Without pyzmq, or with an arm of its left out by choice, there is no line about it: notes say so.
    """
    return [*_arm_lines(result), *_one_lines(result)]


def _arm_lines(result: TransportResult) -> Iterator[GateLine]:
    theirs = {(row["shape"], row["transport"], row["arm"]) for row in result["arms"]}
    for row in result["arms"]:
        which = (row["transport"], row["arm"])
        name = f"{row['shape']} {arm_name(row)}"
        if which in T0_MOST:
            yield gate_line(f"{name} / T0", f"<= {T0_MOST[which]:.2f}x", row["ratio_t0"])
        if which in LIKE and (row["shape"], *LIKE[which]) in theirs:
            transport, arm = LIKE[which]
            yield gate_line(f"{name} ahead of {transport} {arm}", f">= {AHEAD_LEAST:.2f}x", row["ahead"])


def _one_lines(result: TransportResult) -> Iterator[GateLine]:
    rows = {row["what"]: row for row in result["one"]}
    lane, get = rows.get(TOUCH), rows.get(GET_TCP)
    if lane is None or get is None:
        return
    ahead = paired_ratio(by_repeat(get["samples"], "p50_us"), by_repeat(lane["samples"], "p50_us"))
    name = f"one {size_text(ONE_BYTES)} block: {TOUCH}, ahead of {GET_TCP}"
    yield gate_line(name, f">= {LANE_AHEAD_LEAST:.2f}x", ahead)


def table_lines(result: TransportResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    yield from _machine(result)
    yield from _tables(result)
    yield ""
    yield verified_line(result)
    yield from gate_lines(result["gate"])


def _machine(result: TransportResult) -> Iterator[str]:
    torch, facts = result["torch"], result["server"]["facts"]
    yield from machine_lines(result["machine"])
    yield f"T0: torch {torch['version']}, {torch['threads']} thread, anonymous memory for which huge pages were asked"
    yield f"kvredis {result['server']['version']}, arena on {facts.get('memory_page_kind', 'unknown pages')}"
    for note in result["notes"]:
        yield f"Note: {note}"


_ARMS: Final[tuple[Column, ...]] = (
    ("arm", arm_name, ""),
    ("ms", lambda row: row["seconds"] * 1e3, ".1f"),
    ("GB/s", "gb_per_s", ".2f"),
    ("min to max", ("gb_per_s_min", "gb_per_s_max"), ".2f"),
    ("x T0", "ratio_t0", ".2fx"),
    ("min to max", ("ratio_t0_min", "ratio_t0_max"), ".2f"),
    ("peer ms/GB", "peer_cpu_ms_per_gb", ".0f"),
    ("client ms/GB", "client_cpu_ms_per_gb", ".0f"),
    ("ahead of pyzmq", "ahead", ".2fx"),
)
_ONE: Final[tuple[Column, ...]] = (
    ("what", "what", ""),
    ("p50 us", "p50_us", ".1f"),
    ("p99 us", "p99_us", ".1f"),
    ("x memcpy", "ratio_memcpy", ".2fx"),
)


def _tables(result: TransportResult) -> Iterator[str]:
    t0 = {row["shape"]: row for row in result["t0"]}

    def title(row: Row) -> str:
        base = t0[row["shape"]]
        return (
            f"{row['shape']}: {row['blocks']} blocks of {size_text(base['block_bytes'])}, 8 batches;"
            f" T0 {base['seconds'] * 1e3:.1f} ms, {base['gb_per_s']:.2f} GB/s"
        )

    yield from tables(_ARMS, result["arms"], title)
    yield from tables(_ONE, result["one"], lambda _: "one block of 2 MiB at a time")


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw ratios to T0 into the PNG `path`: a panel for each model."""
    result = cast(TransportResult, raw)
    machine = result["machine"]
    captions = Captions(
        title="Blocks between two processes",
        values="time / T0 (less is better)",
        foot=f"{machine.get('cpu')}, {machine.get('cores')} cores, Linux {machine.get('kernel')}."
        " T0: torch's plain copy in one process."
        f" Arena on {result['server']['facts'].get('memory_page_kind', 'unknown pages')}.",
    )
    shapes = list(dict.fromkeys(row["shape"] for row in result["arms"]))
    bars([_panel(result, shape) for shape in shapes], captions, path)


def _panel(result: TransportResult, shape: str) -> BarPanel:
    rows = [row for row in result["arms"] if row["shape"] == shape]
    names = [arm_name(row) for row in rows]
    title = f"{shape}, {rows[0]['blocks']} blocks of {size_text(rows[0]['block_bytes'])}"
    return BarPanel(title, names, {"measured here": [bar(row, "ratio_t0") for row in rows]})


PARTS: Final = ("arms", "one")
TRANSPORTS: Final = ("tcp", "unix", "lane", "pyzmq")
_ARENA_PARTS: Final = (9, 4)  # of the blocks' bytes: a SET takes a new place before the old one is free
_ARENA_LEAST: Final = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class TransportPlan:
    """What one call of the bench does."""

    shapes: Sequence[ModelShape] = field(default_factory=lambda: [shape_of(name) for name in ("3b", "7b", "8b")])
    blocks: int = BLOCKS
    repeats: int = 5
    parts: Sequence[str] = PARTS
    transports: Sequence[str] = TRANSPORTS
    one: OnePlan = field(default_factory=OnePlan)

    def steps(self) -> int:
        """Give at least how often `run` calls its progress."""
        arms = len(self.shapes) * self.repeats if "arms" in self.parts else 0
        return arms + (self.repeats if "one" in self.parts else 0)

    def options(self) -> dict[str, object]:
        """Give the plan as the result's `options`."""
        return {
            "shapes": [shape.name for shape in self.shapes],
            "blocks": self.blocks,
            "repeats": self.repeats,
            "parts": list(self.parts),
            "transports": list(self.transports),
            "one_calls": self.one.calls,
        }


QUICK: Final = TransportPlan(shapes=[shape_of("3b")], repeats=2, one=OnePlan(calls=100))


def run(plan: TransportPlan, progress: Progress) -> TransportResult:
    """Measure everything in `plan`. Raises KVRedisError, VerificationError at a wrong byte; no process is left."""
    if not plan.shapes:
        raise BenchError("no shape to measure")
    start_s = time.monotonic()
    result = TransportResult(
        **new_result(SCHEMA, plan.options()),
        torch=_torch_facts(),
        server=ServerFacts(version="", command=[], facts={}),
        t0=[],
        arms=[],
        one=[],
    )
    lacking = zmq_missing()
    if lacking and "pyzmq" in plan.transports:
        result["notes"].append(f"pyzmq's arms are left out: {lacking}")
        plan = replace(plan, transports=[name for name in plan.transports if name != "pyzmq"])
    for shape in plan.shapes:
        if "arms" in plan.parts:
            _Bench(plan, shape, result, progress).run()
    if "one" in plan.parts:
        _measure_one(plan, result, progress)
    set_ahead(result["arms"])
    result["gate"] = transport_gate(result)
    result["seconds"] = time.monotonic() - start_s
    return result


class _Bench:
    """All arms with the blocks of one shape; rows go into `result`."""

    def __init__(self, plan: TransportPlan, shape: ModelShape, result: TransportResult, progress: Progress) -> None:
        self._plan, self._shape, self._result, self._progress = plan, shape, result, progress
        self._blocks = Blocks.of(shape, plan.blocks)
        self._base: list[T0Sample] = []

    def run(self) -> None:
        with ExitStack() as stack:
            torch = stack.enter_context(closing(TorchCopy(self._blocks)))
            nbytes = self._blocks.bytes_per_turn * _ARENA_PARTS[0] // _ARENA_PARTS[1]
            server = stack.enter_context(_server(nbytes))
            self._result["server"] = _facts(server)
            arms = self._arms(stack, server)
            self._fill(arms)
            samples: dict[int, list[ArmSample]] = {index: [] for index in range(len(arms))}
            for index, arm in enumerate(arms):  # a turn of each that does not count: windows, mappings, caches
                self._turn(arm, -1 - index)
            torch.measure(self._blocks.turn(0))
            for repeat in range(self._plan.repeats):
                self._progress(f"{self._shape.name}: all transports")
                self._repeat(arms, samples, torch, repeat)
            self._result["arms"] += [self._row(arm, samples[index]) for index, arm in enumerate(arms)]
            self._result["t0"].append(_base_row(self._shape, self._base, self._blocks.bytes_per_turn))

    def _arms(self, stack: ExitStack, server: TwoListeners) -> list[Arm]:
        """Connect everything that takes part."""
        plan, blocks, arms = self._plan, self._blocks, list[Arm]()
        wires = {name: stack.enter_context(server.connect_to(name)) for name in ("tcp", "unix")}
        store = Store("kvredis", server.cpu_s, fetch_by_wire(wires["unix"], blocks))
        self._put(store, wires["unix"])
        for name, wire in wires.items():
            if name in plan.transports:
                arms += wire_arms(name, wire, blocks, store)
                striped = stack.enter_context(closing(Striped(server.address_of(name), blocks)))
                arms.append(striped.arm(name, store))
        if "lane" in plan.transports and blocks.size_bytes < INLINE_BYTES_MAX:
            self._note(f"the lane's arms are left out: values under {size_text(INLINE_BYTES_MAX)} lie in no arena")
        elif "lane" in plan.transports:
            try:
                lane = stack.enter_context(LaneClient(server.address.path))
            except LaneMissing as error:
                self._note(f"the lane's arms are left out: {error}")
            else:
                lent = stack.enter_context(closing(LentMemory(blocks.memories()[0])))
                lane.lend(lent)
                arms += LaneArms(lane, blocks, store, lent).arms()
        if "pyzmq" in plan.transports:
            peer = stack.enter_context(ZmqProcess(blocks.count, blocks.size_bytes))
            far = [stack.enter_context(peer.connect(name)) for name in ("tcp", "ipc")]
            shared = Store("pyzmq", peer.cpu_s, fetch_by_zmq(far[0], blocks))
            for name, client in zip(("tcp", "ipc"), far, strict=True):
                arms += zmq_arms(name, client, blocks, shared)
        return arms

    def _put(self, store: Store, wire: Wire) -> None:
        """Store pass 0 in kvredis, also for a run without arms that write."""
        keys = self._blocks.keys
        for start in range(0, len(keys), AT_ONCE):
            part = range(start, min(start + AT_ONCE, len(keys)))
            wire.begin()
            wire.put_many([(keys[index], self._blocks.value(index, 0)) for index in part])
        store.shift = 0

    def _fill(self, arms: Sequence[Arm]) -> None:
        """Have every other store hold a pass before anything is read from it."""
        filled = {"kvredis"}
        for arm in arms:
            if arm.op == "write" and arm.store.name not in filled:
                filled.add(arm.store.name)
                self._turn(arm, -1)

    def _repeat(self, arms: Sequence[Arm], samples: dict[int, list[ArmSample]], torch: TorchCopy, repeat: int) -> None:
        turn = self._blocks.turn(repeat)
        runs = [torch.measure(turn)]
        order = rotated(list(enumerate(arms)), repeat * 5)  # by five: neighbours change as well as the first one
        for done, (index, arm) in enumerate(order):
            if done == len(order) // 2:
                runs.append(torch.measure(turn))
            samples[index].append(self._turn(arm, repeat))
        runs.append(torch.measure(turn))
        self._base.append(T0Sample(repeat=repeat, seconds=middle(runs), runs=runs))

    def _turn(self, arm: Arm, repeat: int) -> ArmSample:
        """One turn of one arm: wipe, move with the clock running, compare."""
        blocks, turn, store = self._blocks, self._blocks.turn(repeat), arm.store
        shift = store.shift + (arm.op == "write")
        blocks.wipe()
        peer_s, client_s = store.cpu_s(), time.process_time()
        start_s = time.perf_counter()
        arm.run(turn, shift)
        seconds = time.perf_counter() - start_s
        client_s, peer_s = time.process_time() - client_s, store.cpu_s() - peer_s
        store.shift = shift
        if arm.verify is not None:
            verified = arm.verify(turn, shift)
        elif arm.op == "read":
            verified = blocks.verify_pairs(turn.pairs, shift, f"{arm.transport} {arm.name}")
        else:
            back = [(index, index) for index in range(blocks.count)]
            store.fetch(back)
            verified = blocks.verify_pairs(back, shift, f"{arm.transport} {arm.name}")
        self._result["verified_bytes"] += verified
        nbytes = blocks.bytes_per_turn
        return ArmSample(
            repeat=repeat,
            seconds=seconds,
            gb_per_s=nbytes / seconds / GB,
            peer_cpu_ms_per_gb=peer_s * 1e3 * GB / nbytes,
            client_cpu_ms_per_gb=client_s * 1e3 * GB / nbytes,
            verified_bytes=verified,
        )

    def _row(self, arm: Arm, own: list[ArmSample]) -> Row:
        ratios = paired_ratios(by_repeat(own, "seconds"), by_repeat(self._base, "seconds"))
        row = Row(
            shape=self._shape.name,
            block_bytes=self._blocks.size_bytes,
            blocks=self._blocks.count,
            transport=arm.transport,
            arm=arm.name,
            op=arm.op,
            samples=own,
            ahead=None,
        )
        row |= summed(own, ("seconds", "peer_cpu_ms_per_gb", "client_cpu_ms_per_gb"), ("gb_per_s",))
        return row | spread("ratio_t0", ratios, None)

    def _note(self, text: str) -> None:
        if text not in self._result["notes"]:
            self._result["notes"].append(text)


def _measure_one(plan: TransportPlan, result: TransportResult, progress: Progress) -> None:
    """One block of 2 MiB at a time, on a server of its own."""
    blocks = one_blocks()
    with ExitStack() as stack:
        server = stack.enter_context(_server(ONE_BYTES * ONE_BLOCKS * _ARENA_PARTS[0] // _ARENA_PARTS[1]))
        result["server"] = _facts(server)
        wires = {name: stack.enter_context(server.connect_to(name)) for name in ("tcp", "unix")}
        for index in range(blocks.count):
            wires["unix"].put(blocks.keys[index], blocks.value(index, 0))
        lane = None
        if "lane" in plan.transports:
            try:
                lane = stack.enter_context(LaneClient(server.address.path))
            except LaneMissing as error:
                result["notes"].append(f"one block: no lane: {error}")
        part = OneBlock(blocks, wires["tcp"] if "tcp" in plan.transports else None, lane)
        result["one"] = part.run(plan.one, plan.repeats, progress)
        result["verified_bytes"] += part.verified_bytes


class TwoListeners(ServerProcess):
    """One kvredis that listens on a unix socket and on TCP, so that both transports reach the same blocks."""

    def address_of(self, transport: str) -> Address:
        """Give the address of `transport`, tcp or unix."""
        if transport == "unix":
            return self.address
        words = self.command
        at = len(words) - 1 - words[::-1].index("--port")  # the last one counts
        return Address(host="127.0.0.1", port=int(words[at + 1]))

    def connect_to(self, transport: str) -> Wire:
        """Connect over `transport`."""
        return self.connect_at(self.address_of(transport))


@contextmanager
def _server(arena_bytes: int) -> Iterator[TwoListeners]:
    """Run a server with an arena of about `arena_bytes`, prefaulted."""
    size = f"{max(arena_bytes, _ARENA_LEAST) // 1024**2}MB"
    recipe = kvredis_recipe("kvredis", "--bind", "127.0.0.1", "--max-local-cpu-size", size)
    plain = recipe.arguments
    recipe = replace(recipe, arguments=lambda at, folder: [*plain(at, folder), "--port", str(free_port())])
    with TwoListeners(recipe, "unix") as server:
        yield server


def _facts(server: ServerProcess) -> ServerFacts:
    return ServerFacts(version=RECIPES["kvredis"].version(), command=server.command, facts=server.facts())


def _torch_facts() -> TorchFacts:
    try:
        import torch
    except ImportError as error:
        raise BenchError(f"T0 needs torch: {install_line('bench')}") from error
    return TorchFacts(version=str(torch.__version__), threads=1)


def _base_row(shape: ModelShape, samples: list[T0Sample], nbytes: int) -> Row:
    seconds = middle([sample["seconds"] for sample in samples])
    return Row(
        shape=shape.name,
        block_bytes=shape.block_bytes(),
        samples=samples,
        seconds=seconds,
        gb_per_s=nbytes / seconds / GB,
    )
