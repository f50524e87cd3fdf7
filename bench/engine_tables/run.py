"""What does a stored prompt save an engine that computes with transformers, from each tier? `kvredis bench prefill`,
`hit-sweep` and `long-prefill` ask so by the tokens of a pass, by the share of hits and by the length of the answer.

Two processes with a model each (worker.py) take turns: the first fills a cache and, where the cache is its own memory,
reads it again; the second has seen nothing, and reads what the first has stored elsewhere. A point's data is gone
before the next is stored. Prompts, hits and bytes are the same for every arm, and checked.

A sample is one pass over the prompts of one point. Times are of an engine that waits for its accelerator; the drain
(what batches waited for memory that was still being stored from, and in the end until all that was stored is where its
tier has it) is told beside them. On a GPU passes and decoding run in CUDA graphs. Ratios are to `recompute` of the same
point, repeat and process. The file: schema kvredis.bench.engine_tables/1.

Arms
    recompute   no cache: every prompt is computed whole
    gpu         KV that never left the accelerator's memory: what a hit is worth at most
    cpu         the engine's own memory
    lane        a kvredis serve process on this host, through shared memory
    remote      the same over TCP
    disk        the engine's own disk, with memory for an eighth, and for what is stored of two batches
    An arm that fails is left out and said, and so is, in its row, what a cache dropped when it could not keep up: the
    second pass then has that much less. Bytes that are not what was stored end the bench.
Passes
    1   the cache is empty; what prompts have in common is a hit all the same
    2   the same prompts again. gpu and cpu: in the same process, where alone their memory is; the others: in another
        process, which has seen none of them, so every hit came from the tier. Hits and their bytes are checked.
Points
    prefill: tokens of a forward pass; hit-sweep: the share of a prompt that all have in common; long-prefill: tokens
    generated for each prompt
Figures
    qps             prompts / seconds, seconds being load + prefill + decode
    first_ms        (load + prefill) / prompts: what a prompt waits for its first token, less what waits with it
    tier_gb_per_s   bytes of hits / seconds of loads beside which nothing was computed: a batch's, but the first one's,
                    come while the one before generates
    over_break_even tier_gb_per_s / (bytes a token x computed tokens/s of recompute): below 1 a hit is slower than none
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self, TypedDict, cast

from kvredis import install_line
from kvredis.backends.resp.connection import Connection
from kvredis.bench.core.compute import TINY
from kvredis.bench.core.errors import BenchError, MissingHits, VerificationError
from kvredis.bench.core.line_process import LineProcess
from kvredis.bench.core.plot import Captions, LinePanel, lines, series_of
from kvredis.bench.core.result import (
    Column,
    GateLine,
    Progress,
    Result,
    Row,
    gate_line,
    gate_lines,
    machine_facts,
    machine_lines,
    spread,
    summed,
    table,
    verified_line,
)
from kvredis.bench.core.servers import ServerProcess, child_environment, kvredis_recipe
from kvredis.bench.core.shapes import SHAPES, ModelShape
from kvredis.bench.core.statistics import GB, MIB, by_repeat, middle, paired_ratio, paired_ratios, rotated
from kvredis.storage.errors import KVRedisError

from .worker import CPU, DEVICE, DISK, LANE, RECOMPUTE, REMOTE, Pass, Task, first_line

SCHEMA: Final = "kvredis.bench.engine_tables/1"
ARMS: Final = (RECOMPUTE, DEVICE, CPU, LANE, REMOTE, DISK)
NAMES: Final = ("prefill", "hit-sweep", "long-prefill")
AXES: Final = {"prefill": "tokens a pass", "hit-sweep": "hit rate", "long-prefill": "tokens generated"}

AUTO_LEAST: Final = 0.97
"""Of recompute, with min_retrieve_tokens: auto, whatever the tier."""
LANE_LEAST: Final = 2.5
"""Of recompute in the second pass, where prompts have nothing in common."""
CPU_LEAST: Final = 0.95
"""Of hits that never left the accelerator, up to CPU_RATE of each prompt in common."""
CPU_RATE: Final = 0.5


class Sample(TypedDict):
    repeat: int
    qps: float
    first_ms: float
    seconds: float
    load_seconds: float  # that were waited for
    alone_load_seconds: float  # of loads beside which nothing was computed
    alone_hit_tokens: int  # that these brought
    prefill_seconds: float  # with handing over what is stored
    decode_seconds: float
    drain_seconds: float
    hit_tokens: int
    computed_tokens: int
    dropped_chunks: int


class EngineTablesResult(Result):
    bench: str
    rows: list[Row]
    left_out: list[str]
    """Arms that failed; the notes say at what."""


def row_of(arm: str, number: int, point: float) -> Row:
    """Give a row without samples."""
    return Row(arm=arm, number=number, point=point, samples=[])


def base_of(row: Row) -> tuple[str, int, float]:
    """Arm, pass and point of the row that a row is compared with: recompute in the process that served it."""
    return RECOMPUTE, 1 if row["arm"] in (DEVICE, CPU) else row["number"], row["point"]


def conclude(rows: list[Row], bytes_per_token: int) -> None:
    """Fill in what follows from the samples."""
    found = {(row["arm"], row["number"], row["point"]): row for row in rows}
    for row in rows:
        samples = row["samples"]
        base = found[base_of(row)]["samples"] if base_of(row) in found else []
        row |= summed(samples, ("first_ms", "drain_seconds"), ("qps",))
        row["dropped_chunks"] = sum(sample["dropped_chunks"] for sample in samples)
        tokens = [sample["hit_tokens"] + sample["computed_tokens"] for sample in samples]
        row["hit_share"] = min((s["hit_tokens"] / max(n, 1) for s, n in zip(samples, tokens, strict=True)), default=0.0)
        row |= spread("ratio", paired_ratios(by_repeat(samples, "qps"), by_repeat(base, "qps")), None)
        row["first_ratio"] = paired_ratio(by_repeat(base, "first_ms"), by_repeat(samples, "first_ms"))
        _judge_tier(row, base, bytes_per_token)


def _judge_tier(row: Row, base: list[Sample], bytes_per_token: int) -> None:
    row["tier_gb_per_s"] = row["over_break_even"] = None
    loads = [s for s in row["samples"] if s["alone_hit_tokens"] and s["alone_load_seconds"]]
    if row["arm"] == RECOMPUTE or not loads:
        return
    speed = middle([s["alone_hit_tokens"] * bytes_per_token / s["alone_load_seconds"] for s in loads])
    row["tier_gb_per_s"] = speed / GB
    made = middle([s["computed_tokens"] * bytes_per_token / s["prefill_seconds"] for s in base if s["prefill_seconds"]])
    if made:
        row["over_break_even"] = speed / made


def gate_of(result: EngineTablesResult) -> list[GateLine]:
    """Judge every line that this bench has; a figure that is missing, or an arm, does not pass."""
    return [*_lines(result), *(gate_line(f"{arm}, left out", "measured", None) for arm in result["left_out"])]


def _lines(result: EngineTablesResult) -> list[GateLine]:
    if result["options"]["auto"]:
        return [
            gate_line(_name(row, result["bench"]), f">= {AUTO_LEAST:.2f}x", row["ratio"])
            for row in result["rows"]
            if row["arm"] not in (RECOMPUTE, DEVICE)
        ]
    if result["bench"] != "hit-sweep":
        return []
    judged, second = [], [row for row in result["rows"] if row["number"] == 2]
    by_place = {(row["arm"], row["point"]): row for row in second}
    for row in second:
        at = f"{row['point']:.0%} in common"
        if row["arm"] == LANE and row["point"] == 0:
            judged.append(gate_line(f"lane / recompute, {at}", f">= {LANE_LEAST:.2f}x", row["ratio"]))
        device = by_place.get((DEVICE, row["point"]))
        if row["arm"] == CPU and row["point"] <= CPU_RATE and device is not None:
            ratio = paired_ratio(by_repeat(row["samples"], "qps"), by_repeat(device["samples"], "qps"))
            judged.append(gate_line(f"cpu / gpu, {at}", f">= {CPU_LEAST:.2f}x", ratio))
    return judged


def table_lines(result: EngineTablesResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    options = result["options"]
    yield from machine_lines(result["machine"])
    yield (
        f"{options['shape']}: {options['bytes_per_token']} bytes a token, chunks of {options['chunk_tokens']};"
        f" {options['prompts']} prompts of {options['prompt_tokens']} tokens, up to {options['rows']} at once;"
        f" {options['repeats']} repeats{', min_retrieve_tokens: auto' if options['auto'] else ''}"
    )
    yield from result["notes"]
    for point in dict.fromkeys(row["point"] for row in result["rows"]):
        columns: list[Column] = [
            (_point(result["bench"], point), lambda row: f"{row['arm']}, pass {row['number']}", ""),
            ("QPS", "qps", ".3f"),
            ("x recompute", "ratio", ".3f"),
            ("least to most", _spread_of, ">s"),
            ("first ms", "first_ms", ".1f"),
            ("sooner x", "first_ratio", ".2f"),
            ("hit", "hit_share", ".1%"),
            ("GB/s", "tier_gb_per_s", ".2f"),
            ("/ break-even", "over_break_even", ".2f"),
            ("drain s", "drain_seconds", ".3f"),
            ("", lambda row: f"{row['dropped_chunks']} chunks dropped" if row["dropped_chunks"] else "", ""),
        ]
        yield ""
        yield from table(columns, [row for row in result["rows"] if row["point"] == point])
    yield ""
    yield verified_line(result, "of KV by checksum against what was computed")
    yield from gate_lines(result["gate"])


def _spread_of(row: Row) -> str:
    known = row["ratio_min"] is not None and row["arm"] != RECOMPUTE
    return f"{row['ratio_min']:.3f} to {row['ratio_max']:.3f}" if known else ""


def _point(bench: str, point: float) -> str:
    return f"{point:.0%} in common" if bench == "hit-sweep" else f"{point:g} {AXES[bench]}"


def _name(row: Row, bench: str) -> str:
    return f"{row['arm']}, pass {row['number']}, {_point(bench, row['point'])}"


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw QPS, and how much sooner the first token comes, against the point, into the PNG `path`."""
    result = cast(EngineTablesResult, raw)
    bench, panels = result["bench"], []
    for number in (1, 2):
        for title, figure in (("prompts per second", "qps"), ("first token, times as soon", "first_ratio")):
            drawn = series_of([row for row in result["rows"] if row["number"] == number], "arm", "point", figure)
            panels.append(LinePanel(f"{title}, pass {number}", drawn, across=AXES[bench], sizes=False))
    machine, options = result["machine"], result["options"]
    foot = (
        f"{machine.get('cpu')}, {machine.get('cores')} cores, Linux {machine.get('kernel')}. {options['shape']},"
        f" {options['prompts']} prompts of {options['prompt_tokens']} tokens. {' '.join(result['notes'])}"
    )
    titles = {"prefill": "Prefilling", "hit-sweep": "What hits are worth", "long-prefill": "Long prompts"}
    lines(panels, Captions(title=titles[bench], values="", foot=foot), path, columns=2)


_KINDS: dict[str, type[BenchError]] = {each.__name__: each for each in (MissingHits, VerificationError)}


class WorkerProcess(LineProcess):
    """One engine in a process of its own, a context manager; `begun` is what engine_tables_worker.first_line gives."""

    def __init__(self, begun: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "kvredis.bench.engine_tables.worker"]
        super().__init__("a bench's engine process", command, child_environment(os.environ))
        self._begun = begun
        self.device = ""

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.tell(self._begun)
        except BaseException:
            self.__exit__()
            raise
        return self

    def started(self) -> None:
        """Wait until it computes."""
        self.device = self._answered()["device"]

    def revive(self) -> None:
        """Begin anew if it has ended."""
        if self.has_ended:
            self.__exit__()
            self.__enter__()
            self.started()

    def ask(self, task: Task) -> Pass:
        """Have it run a pass. Raises what it raised."""
        self.tell(cast(dict[str, Any], task))
        return cast(Pass, self._answered())

    def _answered(self) -> dict[str, Any]:
        answer = self.answer()
        if "error" in answer:
            raise _KINDS.get(answer["kind"], BenchError)(answer["error"])
        return answer


MEMORY_MIN_BYTES = 64 * MIB
_SEED = 23


@dataclass(frozen=True, slots=True)
class Point:
    """One place on a bench's axis. `at` is that place; `budget` the tokens of a forward pass, all rows together."""

    at: float
    hit_rate: float
    output: int
    budget: int


@dataclass(frozen=True, slots=True)
class TablesPlan:
    """What one call of a bench does; `rows` is how many prompts are served together. A repeat is not begun, but for the
    first, that would not be over `limit_s` from the beginning on if it takes as long as the one before."""

    bench: str
    points: tuple[Point, ...]
    prompts: int
    prompt_tokens: int
    rows: int = 1
    shape: ModelShape = field(default_factory=lambda: SHAPES["3b"])
    arms: tuple[str, ...] = ARMS
    chunk_tokens: int = 256
    repeats: int = 3
    auto: bool = False
    limit_s: float = float("inf")

    @property
    def data_bytes(self) -> int:
        """KV of all prompts of a point, had they nothing in common."""
        return self.prompts * self.shape.block_bytes(self.prompt_tokens)

    @property
    def burst_bytes(self) -> int:
        """KV of two batches: it is stored at once, faster than any disk writes, and written while others compute."""
        return 2 * min(self.rows, self.prompts) * self.shape.block_bytes(self.prompt_tokens)

    def served(self) -> list[str]:
        """Every arm, recompute always first."""
        return [RECOMPUTE, *(arm for arm in self.arms if arm != RECOMPUTE)]

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        return self.repeats * len(self.points) * 2 * len(self.served())

    def begun(self) -> dict[str, Any]:
        """Give what an engine's process is told first."""
        columns = self.prompt_tokens + max(point.output for point in self.points)
        sizes = sorted({(rows, point.budget) for point in self.points for rows in (1, self.rows)})
        return first_line(self.shape, columns, self.chunk_tokens, sizes)

    def options(self) -> dict[str, Any]:
        """Give what a reader must know to repeat it."""
        return {
            "shape": self.shape.name,
            "bytes_per_token": self.shape.bytes_per_token(),
            "chunk_tokens": self.chunk_tokens,
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "rows": self.rows,
            "repeats": self.repeats,
            "auto": self.auto,
            "points": [[point.at, point.hit_rate, point.output, point.budget] for point in self.points],
        }


def prefill_plan(budgets: tuple[int, ...] = (1024, 8192), **rest: Any) -> TablesPlan:
    """Prompts one after another, in passes of 1,024 tokens and at once; one token comes out."""
    points = tuple(Point(budget, 0.0, 1, budget) for budget in budgets)
    settings: dict[str, Any] = {"prompts": 3, "prompt_tokens": 8192} | rest
    return TablesPlan("prefill", points, **settings)


def hit_sweep_plan(
    rates: tuple[float, ...] = (0.0, 0.5, 0.8, 0.9, 1.0), output: int = 24, budget: int = 8192, **rest: Any
) -> TablesPlan:
    """Prompts of which a share is common to all, many at once."""
    points = tuple(Point(rate, rate, output, budget) for rate in rates)
    settings: dict[str, Any] = {"prompts": 200, "prompt_tokens": 1000, "rows": 32} | rest
    return TablesPlan("hit-sweep", points, **settings)


def long_prefill_plan(outputs: tuple[int, ...] = (2, 16, 128), budget: int = 1024, **rest: Any) -> TablesPlan:
    """Long prompts, two at once, and answers of several lengths."""
    points = tuple(Point(output, 0.0, output, budget) for output in outputs)
    given: dict[str, Any] = {"prompts": 10, "prompt_tokens": 10_240, "rows": 2, "shape": SHAPES["7b"]} | rest
    return TablesPlan("long-prefill", points, **given)


PLANS: dict[str, Callable[..., TablesPlan]] = {
    "prefill": prefill_plan,
    "hit-sweep": hit_sweep_plan,
    "long-prefill": long_prefill_plan,
}
QUICK: dict[str, dict[str, Any]] = {
    "prefill": {"budgets": (1024,), "prompt_tokens": 2048, "repeats": 1},
    "hit-sweep": {"rates": (0.0, 0.8), "prompts": 33, "output": 4, "repeats": 1},
    "long-prefill": {"outputs": (2, 16), "prompts": 2, "prompt_tokens": 2048, "repeats": 1},
}


class Tables:
    """The two processes, the server, and one pass after another; `notes` say which arms were left out, and why."""

    def __init__(self, plan: TablesPlan, workers: tuple[WorkerProcess, WorkerProcess], server: ServerProcess | None):
        self._plan = plan
        self._first, self._second = workers
        self._server = server
        self.verified_bytes = self.lone_steps = 0
        self.rows: dict[tuple[str, int, float], Row] = {}
        self.left_out: list[str] = []
        self.notes: list[str] = []

    def measure(self, progress: Progress, began_s: float = 0.0) -> None:
        """Serve every arm at every point, repeat by repeat. Raises what recompute raises, and VerificationError; any
        other arm that fails is left out from then on. Before, both processes serve what recompute does: the first of
        that takes up to 1.8 times as long, whichever arm serves it. Time is limited from `began_s` on."""
        for point in self._plan.points:
            self.arm(RECOMPUTE, point, 0)
        self.lone_steps = 0
        took_s = 0.0
        for repeat in range(self._plan.repeats):
            repeat_s = time.monotonic()
            if repeat and repeat_s + took_s > began_s + self._plan.limit_s:
                self.notes.append(f"There was time for {repeat} of {self._plan.repeats} repeats.")
                break
            for point in self._plan.points:
                for arm in rotated(self._plan.served(), repeat):
                    progress(f"{arm}, {point.at:g}")
                    if arm not in self.left_out:
                        self._try(arm, point, repeat)
                    progress(f"{arm}, {point.at:g}")
            took_s = time.monotonic() - repeat_s

    def _try(self, arm: str, point: Point, repeat: int) -> None:
        try:
            samples = self.arm(arm, point, repeat)
        except VerificationError:
            raise
        except KVRedisError as error:
            if arm == RECOMPUTE:
                raise
            self.left_out.append(arm)
            self.notes.append(f"Left out: {arm}, from {point.at:g} in repeat {repeat + 1} on: {error}")
            for worker in (self._first, self._second):
                worker.revive()
            return
        for number, sample in samples:
            place = (arm, number, point.at)
            self.rows.setdefault(place, row_of(*place))["samples"].append(sample)

    def arm(self, arm: str, point: Point, repeat: int) -> list[tuple[int, Sample]]:
        """Both passes of an arm; what it stored is gone on return."""
        plan = self._plan
        with ExitStack() as stack:
            if arm in (LANE, REMOTE):
                stack.callback(self._flush_server)
            folder = stack.enter_context(TemporaryDirectory(prefix="kvbench-"))
            task = self._task(arm, point, repeat)
            first = self._first.ask(self._with_engine(task, Path(folder), number=1))
            stays = arm in (DEVICE, CPU)
            has_all = not first["dropped_chunks"]
            again = replace_task(task, keep=False, full=arm != RECOMPUTE and not plan.auto and has_all)
            again["checks"] = [] if arm == RECOMPUTE else first["checks"]
            second = (self._first if stays else self._second).ask(self._with_engine(again, Path(folder), number=2))
        self.verified_bytes += second["verified_tokens"] * plan.shape.bytes_per_token()
        self.lone_steps += first["lone_steps"] + second["lone_steps"]
        return [(1, self._sample(first, repeat)), (2, self._sample(second, repeat))]

    def _flush_server(self) -> None:
        assert self._server is not None
        with Connection.open(self._server.address) as connection:
            connection.call(b"FLUSHALL")

    def _task(self, arm: str, point: Point, repeat: int) -> Task:
        plan = self._plan
        return Task(
            arm=arm,
            what=f"{arm}, {point.at:g}",
            model=f"bench/{plan.bench}-{arm}",
            prompts=plan.prompts,
            tokens=plan.prompt_tokens,
            hit_rate=point.hit_rate,
            seed=_SEED + repeat,
            output=point.output,
            budget=point.budget,
            rows=plan.rows,
            engine=None,
            keep=arm in (DEVICE, CPU),
            checks=[],
            full=False,
        )

    def _with_engine(self, task: Task, folder: Path, number: int) -> Task:
        """The task with its cache's configuration."""
        plan, arm = self._plan, task["arm"]
        if arm in (RECOMPUTE, DEVICE):
            return task
        data = plan.data_bytes + max(plan.data_bytes // 4, MEMORY_MIN_BYTES)
        memory = data
        over: dict[str, Any] = {"chunk_size": plan.chunk_tokens, "local_cpu": arm not in (LANE, REMOTE)}
        if arm in (LANE, REMOTE):
            assert self._server is not None
            scheme = "kvredis" if arm == LANE else "redis"
            over["remote_url"] = f"{scheme}://127.0.0.1:{self._server.address.port}"
            memory = data if number == 1 else max(data // 4, MEMORY_MIN_BYTES)  # what waits to be sent
        elif arm == DISK:
            over |= {"local_disk": str(folder), "max_local_disk_size": f"{2 * data // MIB + 1024}MB"}
            memory = min(max(data // 8, plan.burst_bytes, MEMORY_MIN_BYTES), data)
        over["max_local_cpu_size"] = f"{memory // MIB}MB"
        if plan.auto:
            over["min_retrieve_tokens"] = "auto"
        return replace_task(task, engine=over)

    def _sample(self, passed: Pass, repeat: int) -> Sample:
        prompts = self._plan.prompts
        return Sample(
            repeat=repeat,
            qps=prompts / passed["seconds"],
            first_ms=(passed["load_seconds"] + passed["prefill_seconds"]) / prompts * 1e3,
            seconds=passed["seconds"],
            load_seconds=passed["load_seconds"],
            alone_load_seconds=passed["alone_load_seconds"],
            alone_hit_tokens=passed["alone_hit_tokens"],
            prefill_seconds=passed["prefill_seconds"],
            decode_seconds=passed["decode_seconds"],
            drain_seconds=passed["drain_seconds"],
            hit_tokens=passed["hit_tokens"],
            computed_tokens=passed["computed_tokens"],
            dropped_chunks=passed["dropped_chunks"],
        )


def replace_task(task: Task, **changes: Any) -> Task:
    """The task with these entries changed."""
    return cast(Task, dict(task) | changes)


def on_cpu(plan: TablesPlan) -> TablesPlan:
    """What is left of a plan where there is no GPU: a tiny model, and prompts that it gets through."""
    tokens = min(plan.prompt_tokens, 4 * plan.chunk_tokens)
    return replace(plan, shape=TINY, prompts=min(plan.prompts, 2 * plan.rows), prompt_tokens=tokens)


def run(plan: TablesPlan, progress: Progress) -> EngineTablesResult:
    """Measure everything in `plan`; without a GPU what on_cpu leaves of it.

    Raises KVRedisError, BenchError when no arm is left but recompute, and VerificationError at a wrong byte; leaves no
    process and no folder behind.
    """
    try:
        import torch
        import transformers  # noqa: F401  the engines' processes do, and would end in a traceback
    except ImportError as error:
        raise BenchError(f"the bench's engines need torch and transformers: {install_line('demo')}") from error
    start_s, notes = time.monotonic(), []
    if not torch.cuda.is_available():
        plan = on_cpu(plan)
        notes.append("There is no GPU: a tiny model computes on the CPU, and the ratios say nothing of a real one.")
    if plan.prompt_tokens <= plan.chunk_tokens:
        raise BenchError(f"a prompt of {plan.prompt_tokens} tokens has no chunk of {plan.chunk_tokens} before its last")
    with ExitStack() as stack:
        server = None
        if {LANE, REMOTE} & set(plan.arms):
            room = plan.data_bytes + max(plan.data_bytes // 4, MEMORY_MIN_BYTES)
            size = ("--max-local-cpu-size", f"{room // MIB}MB")
            server = stack.enter_context(ServerProcess(kvredis_recipe("engine-tables", *size), "tcp"))
        begun = plan.begun()
        workers = stack.enter_context(WorkerProcess(begun)), stack.enter_context(WorkerProcess(begun))
        for worker in workers:
            worker.started()
        notes.append(f"A model with random weights computes in bfloat16 on {workers[0].device}.")
        tables, facts = Tables(plan, workers, server), machine_facts()
        tables.measure(progress, start_s)
    rows = tables.rows
    if tables.lone_steps:
        notes.append(
            f"{tables.lone_steps} steps of decoding and passes were launched one by one, and not in CUDA graphs."
        )
    if tables.left_out and not any(arm != RECOMPUTE for arm, _, _ in rows):
        raise BenchError("no arm could be measured. " + " ".join(tables.notes))
    order = {arm: place for place, arm in enumerate(ARMS)}
    result = EngineTablesResult(
        schema=SCHEMA,
        bench=plan.bench,
        machine=facts,
        options=plan.options(),
        notes=[*notes, *tables.notes],
        left_out=tables.left_out,
        rows=sorted(rows.values(), key=lambda row: (row["point"], row["number"], order[row["arm"]])),
        verified_bytes=tables.verified_bytes,
        gate=[],
        seconds=time.monotonic() - start_s,
    )
    conclude(result["rows"], plan.shape.bytes_per_token())
    result["gate"] = gate_of(result)
    return result
