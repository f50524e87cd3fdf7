"""What does storing cost an engine that prefills, and how long until it is over? `kvredis bench store-overhead` asks so
of each tier, by the size of the engine's steps.

Different prompts are prefilled in steps of `budget` tokens; the chunks that a step has completed are handed to
CacheEngine.store_later, as a connector would: a thread of the cache's copies while the next step computes. What a tier
costs is the loss of prompts per second against none in the same repeat, and the time that a step takes at its 99th
percentile. Every chunk is read back by a fresh engine after the drain, and compared.

Tiers
    none     nothing is stored
    cpu      the engine's own memory, with room for everything
    disk     the same with room for half, above a disk; the drain ends when all is on the disk
    remote   a kvredis serve process over TCP; the drain ends when the server has answered for all
    lane     the same through shared memory
Compute
    sleep:R  a step takes tokens / R seconds from its beginning, asleep: the accelerator is busy and the CPU is not
    model    a model of the shape with random weights, on a GPU; without one a tiny model on the CPU, which `notes` says

The file, kvredis.bench.store_overhead/1, has beside what every result has
    rows     tier, budget, samples, their medians, `kept` of the worst; `ratio`, `ratio_drained` and `step_p99_ratio`
             are to tier `none` of the same repeat and budget
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, TypedDict, cast

from kvredis import install_line
from kvredis.backends.resp.connection import Connection
from kvredis.backends.shm.arena import wait_locked

from .core.compute import DTYPES, TINY, Asleep, Compute, Modelled
from .core.errors import BenchError, VerificationError
from .core.plot import Captions, LinePanel, foot, lines, series_of
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
    spread,
    summed,
    table,
    verified_line,
)
from .core.servers import ServerProcess, kvredis_recipe
from .core.shapes import SHAPES, ModelShape
from .core.statistics import MIB, by_repeat, paired_ratios, percentile, rotated

if TYPE_CHECKING:
    from kvredis import CacheEngine, ChunkLayout


SCHEMA: Final = "kvredis.bench.store_overhead/1"
NONE, CPU, DISK, REMOTE, LANE = "none", "cpu", "disk", "remote", "lane"
TIERS: Final = (NONE, CPU, DISK, REMOTE, LANE)
WIDE_BUDGET: Final = 1024
WIDE_LEAST: Final = 0.97
"""Of the prompts per second without a cache, with steps of 1,024 tokens or more."""
NARROW_LEAST: Final = 0.95
"""With shorter steps."""


class Sample(TypedDict):
    repeat: int
    seconds: float  # from the begin of the first step to the end of the last
    drain_seconds: float  # from then on until all is where the tier has it
    qps: float  # prompts / seconds
    qps_drained: float  # prompts / (seconds + drain_seconds)
    step_p50_ms: float
    step_p99_ms: float
    store_seconds: float  # the cache's own count of the copies, on whichever thread
    kept: float  # share of the whole chunks' tokens that came back


class StoreOverheadResult(Result):
    rows: list[Row]


def row_of(tier: str, budget: int) -> Row:
    """Give a row without samples."""
    return {"tier": tier, "budget": budget, "samples": []}


def conclude(rows: list[Row]) -> None:
    """Fill in what follows from the samples."""
    bases = {row["budget"]: row["samples"] for row in rows if row["tier"] == NONE}
    for row in rows:
        samples, base = row["samples"], bases.get(row["budget"], [])

        def ratios(figure: str, samples: Any = samples, base: Any = base) -> list[float]:
            return paired_ratios(by_repeat(samples, figure), by_repeat(base, figure))

        row |= summed(samples, ("qps_drained", "drain_seconds", "step_p99_ms", "store_seconds"), ("qps",))
        row["kept"] = min((sample["kept"] for sample in samples), default=0.0)
        row |= spread("ratio", ratios("qps"), None)
        row["ratio_drained"] = spread("ratio", ratios("qps_drained"), None)["ratio"]
        row["step_p99_ratio"] = spread("ratio", ratios("step_p99_ms"), None)["ratio"]


def store_overhead_gate(rows: list[Row]) -> list[GateLine]:
    """Judge every line; a figure that is missing does not pass."""
    judged = []
    stored = [row for row in rows if row["tier"] != NONE]
    for row in stored:
        least = WIDE_LEAST if row["budget"] >= WIDE_BUDGET else NARROW_LEAST
        judged.append(gate_line(f"{row['tier']}, {row['budget']} tokens", f">= {least:.2f}x", row["ratio"]))
    if stored:
        judged.append(gate_line("least share that came back", ">= 1.00x", min(row["kept"] for row in stored)))
    return judged


def _of_stored(figure: str) -> Callable[[Row], object]:
    """A figure that tier none has not."""
    return lambda row: row[figure] if row["tier"] != NONE else None


def table_lines(result: StoreOverheadResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    options = result["options"]
    yield from machine_lines(result["machine"])
    yield (
        f"{options['prompts']} prompts of {options['prompt_tokens']} tokens, {options['shape']}:"
        f" {options['bytes_per_token']} bytes a token, chunks of {options['chunk_tokens']};"
        f" compute: {options['compute']}; {options['repeats']} repeats"
    )
    yield from result["notes"]
    for budget in dict.fromkeys(row["budget"] for row in result["rows"]):
        columns: list[Column] = [
            (f"{budget} tokens a step", "tier", ""),
            ("QPS", "qps", ".3f"),
            ("x none", "ratio", ".3f"),
            ("least to most", ("ratio_min", "ratio_max"), ".3f"),
            ("copy s", _of_stored("store_seconds"), ".3f"),
            ("drain s", _of_stored("drain_seconds"), ".3f"),
            ("drained x none", "ratio_drained", ".3f"),
            ("step p99 ms", "step_p99_ms", ".2f"),
            ("x none", "step_p99_ratio", ".3f"),
            ("kept", _of_stored("kept"), ".1%"),
        ]
        rows = [row for row in result["rows"] if row["budget"] == budget]
        yield ""
        yield from table(columns, rows)
        for row in rows:
            if row["tier"] == NONE and row["qps_min"]:
                moved = row["qps_max"] / row["qps_min"] - 1
                yield f"  Between repeats none itself moved by {moved:.1%}: a ratio says no more than that lets it say."
    yield ""
    yield verified_line(result)
    yield from gate_lines(result["gate"], "medians of paired ratios of QPS, without the drain")


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios against the budget into the PNG `path`."""
    result = cast(StoreOverheadResult, raw)
    stored, options = [row for row in result["rows"] if row["tier"] != NONE], result["options"]
    panels = [
        LinePanel(title, series_of(stored, "tier", "budget", figure), across="tokens a step", sizes=False)
        for title, figure in (
            ("QPS without the drain / none", "ratio"),
            ("QPS with the drain / none", "ratio_drained"),
            ("99th percentile of a step / none", "step_p99_ratio"),
        )
    ]
    below = foot(
        result["machine"],
        f"{options['shape']}, {options['prompts']} prompts of {options['prompt_tokens']} tokens, compute"
        f" {options['compute']}",
    )
    lines(panels, Captions(title="What storing costs an engine that prefills", values="ratio", foot=below), path)


BUDGETS = (1024, 768, 512, 256, 128, 64, 32)
FREE_PART = 4
"""A quarter more memory than the chunks take: for their headers, for rounding, for what is on its way."""
MEMORY_MIN_BYTES = 64 * MIB
_SEED = 11


@dataclass(frozen=True, slots=True)
class StoreOverheadPlan:
    """What one call of the bench does. `tokens_per_s` None: compute with a model, else asleep at that rate; 20,480 is
    the 3b shape on a large desktop GPU."""

    shape: ModelShape = field(default_factory=lambda: SHAPES["3b"])
    tiers: tuple[str, ...] = TIERS
    budgets: tuple[int, ...] = BUDGETS
    prompts: int = 4
    prompt_tokens: int = 8192
    chunk_tokens: int = 256
    repeats: int = 5
    tokens_per_s: float | None = 20_480.0

    @property
    def whole_tokens(self) -> int:
        """Tokens of one prompt that are in whole chunks."""
        return self.prompt_tokens // self.chunk_tokens * self.chunk_tokens

    @property
    def memory_bytes(self) -> int:
        """Room for all chunks of all prompts."""
        chunks = self.prompts * self.shape.block_bytes(self.whole_tokens)
        return chunks + max(chunks // FREE_PART, MEMORY_MIN_BYTES)

    def arms(self) -> list[str]:
        """Give the tiers; none is always there."""
        return [NONE, *(tier for tier in self.tiers if tier != NONE)]

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        return self.repeats * len(self.budgets) * len(self.arms())

    def options(self) -> dict[str, object]:
        """Give what a reader must know to repeat it."""
        return {
            "shape": self.shape.name,
            "bytes_per_token": self.shape.bytes_per_token(),
            "chunk_tokens": self.chunk_tokens,
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "repeats": self.repeats,
            "compute": "model" if self.tokens_per_s is None else f"sleep:{self.tokens_per_s:g}",
            "memory_bytes": self.memory_bytes,
        }


QUICK = StoreOverheadPlan(budgets=(1024, 128), prompts=2, prompt_tokens=4096, repeats=2)


class Shelf:
    """Where one tier stores: what an engine over it is configured with, new and empty for each sample."""

    def __init__(self, tier: str, plan: StoreOverheadPlan, server: ServerProcess | None) -> None:
        self._tier = tier
        self._plan = plan
        self._server = server
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Shelf:
        if self._tier == DISK:
            self._folder = TemporaryDirectory(prefix="kvbench-")
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()
        if self._server is not None:
            with Connection.open(self._server.address) as connection:
                connection.call(b"FLUSHALL")

    def engine(self, *, reads: bool = False) -> CacheEngine:
        """Open an engine; the caller closes it. Unless it `reads`, its memory is touched before, as that of a process
        that has run, and page-locked where a model computes."""
        from kvredis import CacheEngine, Config

        memory = self._plan.memory_bytes
        over: dict[str, Any] = {"chunk_size": self._plan.chunk_tokens, "local_cpu": self._server is None}
        if not reads:
            over |= {"prefault": min(os.cpu_count() or 1, 8), "page_lock": self._plan.tokens_per_s is None}
        if self._server is not None:
            scheme = "kvredis" if self._tier == LANE else "redis"
            over["remote_url"] = f"{scheme}://127.0.0.1:{self._server.address.port}"
            memory = max(memory // 4, MEMORY_MIN_BYTES) if reads else memory * 2  # half of it may wait to be sent
        if self._folder is not None:
            over |= {"local_disk": self._folder.name, "max_local_disk_size": f"{2 * memory // MIB + 1024}MB"}
            memory = max(memory // 2, MEMORY_MIN_BYTES)
        over["max_local_cpu_size"] = f"{memory // MIB}MB"
        return CacheEngine(Config.load(env={}, overrides=over), self.layout())

    def layout(self) -> ChunkLayout:
        """Give the layout of the plan's shape."""
        from kvredis import ChunkLayout

        shape = self._plan.shape
        return ChunkLayout(
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
            DTYPES[shape.dtype_bytes],
            chunk_tokens=self._plan.chunk_tokens,
            model="bench/store-overhead",
        )

    def drained(self, engine: CacheEngine) -> tuple[float, CacheEngine]:
        """Wait until all is where the tier has it. Give the seconds, and an engine that has seen none of it."""
        from kvredis import CacheEngine

        began_s = time.perf_counter()
        engine.flush()
        if self._tier == DISK:
            engine.close()  # writes what the disk does not have
        seconds = time.perf_counter() - began_s
        if self._tier == CPU:
            return seconds, CacheEngine(engine.config, engine.layout, engine.backend)
        engine.close()
        return seconds, self.engine(reads=True)


class Bench:
    """The prompts, what computes them, and one sample after another."""

    def __init__(self, plan: StoreOverheadPlan, server: ServerProcess | None) -> None:
        import torch

        self._plan = plan
        self._server = server
        self._prompts = list(prompts(PromptPlan(plan.prompt_tokens, 0.0, plan.prompts, seed=_SEED)))
        self._compute: Compute
        self.notes: list[str] = []
        if plan.tokens_per_s is None:
            model = Modelled(plan.shape, self._prompts)
            self.notes.append(f"A model with random weights computes in bfloat16 on {model.device}")
            self._compute = model
        else:
            self._compute = Asleep(plan.shape, plan.prompts, plan.prompt_tokens, plan.tokens_per_s)
        self._out = torch.empty_like(self._compute.kv(0), device="cpu")
        self.verified_bytes = 0

    def warm_up(self) -> None:
        """Compute one prompt by steps of each budget, and store nothing: kernels are chosen and loaded."""
        for budget in self._plan.budgets:
            self.notes += [note for note in (self._compute.prepare(budget),) if note]
            self._compute.begin(0)
            for start in range(0, self._plan.prompt_tokens, budget):
                self._compute.step(start, min(start + budget, self._plan.prompt_tokens))

    def sample(self, tier: str, budget: int, repeat: int) -> Sample:
        """Prefill every prompt, drain, and read back. Raises VerificationError at a wrong byte."""
        if tier == NONE:
            seconds, steps_s = self._prefill(None, budget)
            return self._told(repeat, seconds, steps_s)
        with Shelf(tier, self._plan, self._server if tier in (REMOTE, LANE) else None) as shelf, ExitStack() as stack:
            engine = shelf.engine()
            stack.callback(engine.close)
            engine.lookup(self._prompts[0])  # connected, as that of a process that has run
            wait_locked()  # a driver that page-locks memory keeps launches waiting
            seconds, steps_s = self._prefill(engine, budget)
            drain_s, fresh = shelf.drained(engine)
            stack.callback(fresh.close)
            sample = self._told(repeat, seconds, steps_s, drain_s)
            sample["store_seconds"] = engine.stats.store_seconds
            sample["kept"] = self._read_back(fresh)
        return sample

    def _prefill(self, engine: CacheEngine | None, budget: int) -> tuple[float, list[float]]:
        """Give the seconds of all, and of each step with the handing over that follows it."""
        plan, compute, steps_s = self._plan, self._compute, []
        began_s = step_began_s = time.perf_counter()
        for number, tokens in enumerate(self._prompts):
            kv, stored = compute.kv(number), 0
            compute.begin(number)
            for start in range(0, plan.prompt_tokens, budget):
                stop = min(start + budget, plan.prompt_tokens)
                compute.step(start, stop)
                whole = stop // plan.chunk_tokens * plan.chunk_tokens
                if engine is not None and whole > stored:
                    engine.store_later(tokens[:whole], kv)
                    stored = whole
                now_s = time.perf_counter()
                steps_s.append(now_s - step_began_s)
                step_began_s = now_s
        return time.perf_counter() - began_s, steps_s

    def _told(self, repeat: int, seconds: float, steps_s: list[float], drain_s: float = 0.0) -> Sample:
        return Sample(
            repeat=repeat,
            seconds=seconds,
            drain_seconds=drain_s,
            qps=self._plan.prompts / seconds,
            qps_drained=self._plan.prompts / (seconds + drain_s),
            step_p50_ms=percentile(steps_s, 50) * 1e3,
            step_p99_ms=percentile(steps_s, 99) * 1e3,
            store_seconds=0.0,
            kept=0.0,
        )

    def _read_back(self, engine: CacheEngine) -> float:
        """Compare what comes back with what was computed; give its share of what was handed over."""
        import torch

        found = 0
        for number, tokens in enumerate(self._prompts):
            self._out.zero_()
            stop = engine.retrieve(tokens, self._out)
            made = self._compute.kv(number)[:, :, :stop].cpu()
            if not torch.equal(self._out[:, :, :stop].view(torch.uint8), made.view(torch.uint8)):
                raise VerificationError(f"prompt {number} came back with other bytes than were stored")
            found += stop
        self.verified_bytes += found * self._plan.shape.bytes_per_token()
        return found / (self._plan.prompts * self._plan.whole_tokens)


def run(plan: StoreOverheadPlan, progress: Progress) -> StoreOverheadResult:
    """Measure everything in `plan`. With a model and no GPU its shape is TINY's.

    Raises KVRedisError, VerificationError at a wrong byte; leaves no process and no folder behind.
    """
    try:
        import torch
    except ImportError as error:
        raise BenchError(f"the bench's engines need torch: {install_line('engine')}") from error
    if plan.prompt_tokens < plan.chunk_tokens:
        raise BenchError(f"a prompt of {plan.prompt_tokens} tokens has no whole chunk of {plan.chunk_tokens}")
    torch.set_num_threads(1)
    start_s = time.monotonic()
    notes = []
    if plan.tokens_per_s is None and not torch.cuda.is_available():
        plan = replace(plan, shape=TINY)
        notes.append("There is no GPU: a tiny model computes on the CPU, and the ratios say nothing of a real one")
    arms = plan.arms()
    with ExitStack() as stack:
        server = None
        if {REMOTE, LANE} & set(plan.tiers):
            size = ("--max-local-cpu-size", f"{plan.memory_bytes // MIB}MB")
            server = stack.enter_context(ServerProcess(kvredis_recipe("store-overhead", *size), "tcp"))
        bench = Bench(plan, server)
        rows_of_arms = [row_of(tier, budget) for budget in plan.budgets for tier in arms]
        result = StoreOverheadResult(**new_result(SCHEMA, plan.options(), notes), rows=rows_of_arms)
        bench.warm_up()
        result["notes"] += bench.notes
        rows = {(row["tier"], row["budget"]): row for row in result["rows"]}
        for repeat in range(plan.repeats):
            for budget in plan.budgets:
                for tier in rotated(arms, repeat):
                    progress(f"{tier}, {budget} tokens a step")
                    rows[tier, budget]["samples"].append(bench.sample(tier, budget, repeat))
        result["verified_bytes"] = bench.verified_bytes
    conclude(result["rows"])
    result["gate"] = store_overhead_gate(result["rows"])
    result["seconds"] = time.monotonic() - start_s
    return result
