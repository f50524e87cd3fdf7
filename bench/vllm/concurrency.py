"""How many requests a second does a real vLLM serve, N of them at once, by which cache has kept their KV? And does a
connector that has nothing to move cost a step anything? `kvredis bench vllm --concurrency N`.

Result: schema kvredis.bench.vllm-concurrency/1. Every arm is a vLLM in a process of its own, as in run.py, and arms
take turns repeat by repeat. vLLM's own prefix cache is emptied before each round of each arm, so that within the round
it works as always. All prompts of a repeat are new.

Kinds of rounds
    cold        N prompts that were never seen
    stored      the same prompts again: all of each is stored, but for what is behind its last whole chunk
    half        the first half of each prompt is a prefix that all N share and that is stored, the second half is its
                own and new
    step        N short requests decode: nothing is loaded or stored. Tokens a second from when all of them run
Arms
    those of `kvredis bench vllm`, and with lane+layers (or memory+layers)
    none+layers no connector, launched as +layers is: what its step is compared with
Figures: medians over the repeats, _min and _max the spread
    value           requests a second until all N are answered; tokens a second of a step
    to_base         value / that of `none` (of `none+layers` for a step by layers): the median of the ratios in the same
                    repeats where both were open together, else the ratio of the medians
    to_offloading   value / that of vLLM's OffloadingConnector, in the same way
    cached_share    tokens of the prompts that were not computed
    loaded_gb       bytes that our connector loaded in a round
    equal           share of the rounds whose answers were those of the first arm that served them
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypedDict, cast

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
    machine_facts,
    machine_lines,
    spread,
    summed,
    table,
)
from kvredis.bench.core.shapes import SHAPES, ModelShape
from kvredis.bench.core.statistics import GB, by_repeat, middle, paired_ratios

from .engine import (
    DTYPES,
    LANE,
    LAYERS,
    LMCACHE_ARMS,
    MEMORY,
    NONE,
    OFFLOADING,
    TCP,
    TINY,
    EngineProcess,
    Rounds,
    Servers,
    Setting,
    Where,
    connector_of,
    facts_of,
    forget,
    launching,
    model_config,
    port_of,
    room_bytes,
    servers_for,
    weight_bytes,
)
from .run import ANSWER_TOKENS
from .worker import Opening, Together

SCHEMA: Final = "kvredis.bench.vllm-concurrency/1"
CONCURRENT_ARMS: Final = (NONE, OFFLOADING, LANE, f"{LANE}+{LAYERS}", TCP)
NONE_BY_LAYERS: Final = f"{NONE}+{LAYERS}"
COLD, STORED, HALF, STEP = "cold", "stored", "half", "step"
KINDS: Final = (STORED, HALF, COLD, STEP)
TITLES: Final = {
    STORED: "all stored", HALF: "half shared and stored", COLD: "cold", STEP: "a step that moves nothing",
}  # fmt: skip

LEAST: Final = {STORED: 1.0, HALF: 1.0, COLD: 0.98, STEP: 0.97}
"""A kind's bar for to_base."""
OFFLOADING_LEAST: Final = 1.0
"""The bar for to_offloading of what is all stored, through shared memory."""

_STEPS: Final = 256
_CPU_TOKENS, _CPU_CHUNK, _CPU_STEPS, _CPU_BLOCK = 512, 64, 32, 32
_BESIDE_BYTES: Final = 11 << 29  # activations of the widest step, graphs, and what libraries take
_MEMORY_USED: Final = 0.94


@dataclass(frozen=True, slots=True)
class ConcurrencyPlan:
    """What one call does. None: by what there is to compute on; `together` 0: as many engines at a time as fit."""

    concurrency: int
    arms: tuple[str, ...] = CONCURRENT_ARMS
    shape: ModelShape | None = None
    prompt_tokens: int | None = None
    chunk_tokens: int | None = None
    repeats: int = 5
    together: int = 0
    limit_s: float = float("inf")
    eager: bool = False
    ranks: int = 1

    def steps(self) -> int:
        """Give about how often `run` calls its progress; what is compared with may be served more often."""
        return len(self.arms) * self.repeats


class Sample(TypedDict):
    repeat: int
    value: float
    cached_tokens: int
    loaded_bytes: int
    is_equal: bool


class ConcurrencyResult(Result):
    rows: list[Row]
    counters: dict[str, dict[str, float]]  # of our connector, by arm


@dataclass(frozen=True, slots=True)
class ManySetting(Setting):
    """The same with many prompts of one length."""

    tokens: int
    plan: ConcurrencyPlan

    @property
    def decode_steps(self) -> int:
        """Of a round that moves nothing."""
        return _STEPS if self.is_gpu else _CPU_STEPS


def kv_bytes(shape: ModelShape, tokens: int, plan: ConcurrencyPlan) -> int:
    """What the KV of all requests at once takes on each GPU, with room for half-filled pages."""
    return plan.concurrency * shape.block_bytes(tokens + ANSWER_TOKENS + 64) // plan.ranks


def setting_of(plan: ConcurrencyPlan, facts: dict[str, Any]) -> ManySetting:
    """Tie a plan to what computes. Raises BenchError for what does not fit it."""
    memory, arms = int(facts["memory_bytes"]), tuple(dict.fromkeys(plan.arms))
    shape = plan.shape or (SHAPES["8b"] if memory else TINY)
    tokens = plan.prompt_tokens or (4096 if memory else _CPU_TOKENS)
    chunk = plan.chunk_tokens or (256 if memory else _CPU_CHUNK)
    if tokens // 2 < chunk:
        raise BenchError(f"half a prompt of {tokens} tokens has no chunk of {chunk}")
    if memory and plan.ranks > int(facts.get("devices", 1)):
        raise BenchError(f"{plan.ranks} tensor-parallel ranks need as many GPUs: there are {facts.get('devices', 1)}")
    if plan.ranks > 1 and any(arm.split("+")[0] == MEMORY for arm in arms):
        raise BenchError("ranks in processes of their own share a server alone: leave the arms with memory out")
    if any(arm in LMCACHE_ARMS for arm in arms):
        raise BenchError("LMCache's arms are measured one prompt at a time: leave them out of --concurrency")
    if not memory:
        arms = tuple(arm for arm in arms if arm != OFFLOADING)  # it knows GPUs alone
    if not arms:
        raise BenchError("no arm is left: offloading needs a GPU")
    if any(LAYERS in arm for arm in arms):
        place = next(at for at, arm in enumerate(arms) if LAYERS in arm) + 1
        arms = (*arms[:place], NONE_BY_LAYERS, *arms[place:])  # beside what is compared with it
    each = weight_bytes(shape) // plan.ranks + kv_bytes(shape, tokens, plan) + _BESIDE_BYTES
    fitting = int(memory * _MEMORY_USED) // each if memory else 2
    if not fitting:
        raise BenchError(f"an engine of shape {shape.name} takes {each / 1e9:.0f} GB")
    together = min(plan.together or fitting, fitting, len(arms))
    return ManySetting(shape, chunk, arms, together, plan.repeats, plan.eager, facts, tokens, plan)


class Batches:
    """The Work of this bench: many prompts at once, by all kinds of rounds."""

    def __init__(self, setting: ManySetting, where: Where, servers: Servers) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.turns = (setting.tokens,)
        self._setting, self._where, self._servers = setting, where, servers
        self._answers: dict[tuple[int, str], list[list[int]]] = {}

    def warm_up(self, engine: EngineProcess) -> None:
        self._ask(engine, 0)

    def _ask(self, engine: EngineProcess, seed: int) -> Together:
        setting = self._setting
        served = engine.together(
            seed=seed, count=setting.plan.concurrency, tokens=setting.tokens, answer=ANSWER_TOKENS,
            steps=setting.decode_steps,
        )  # fmt: skip
        forget(self._servers, engine.arm)
        return served

    def take(self, engine: EngineProcess, turn: int, repeat: int, place: int) -> None:
        served = self._ask(engine, repeat + 1)
        for kind, batch in served["batches"].items():
            expected = self._answers.setdefault((repeat, kind), batch["answers"])
            row = self.rows.setdefault((engine.arm, kind), row_of(engine.arm, kind))
            row["samples"].append(
                Sample(
                    repeat=place,
                    value=batch["rate"],
                    cached_tokens=batch["cached_tokens"],
                    loaded_bytes=batch["loaded_bytes"],
                    is_equal=batch["answers"] == expected,
                )
            )

    def opening(self, arm: str, folder: Path) -> Opening:
        setting, plan = self._setting, self._setting.plan
        port = port_of(self._servers, arm)
        length = setting.tokens + ANSWER_TOKENS + 48
        options: dict[str, Any] = {"dtype": DTYPES[setting.shape.dtype_bytes], "max_model_len": length}
        options["max_num_seqs"] = max(plan.concurrency, 16)
        if plan.ranks > 1:
            options["tensor_parallel_size"] = plan.ranks
        if setting.is_gpu:
            kv = kv_bytes(setting.shape, setting.tokens, plan)
            total = weight_bytes(setting.shape) // plan.ranks + kv + _BESIDE_BYTES
            options["gpu_memory_utilization"] = round(total / int(setting.facts["memory_bytes"]), 3)
            options["kv_cache_memory_bytes"] = kv + (64 << 20)
            options["attention_backend"] = self._where.backend
            options |= launching(arm, plan.concurrency) if setting.has_graphs else {"enforce_eager": True}
        else:
            options |= {"block_size": _CPU_BLOCK, "enforce_eager": True, "max_num_batched_tokens": max(length, 2048)}
        return Opening(
            model=str(folder),
            config=model_config(setting.shape, length),
            connector=connector_of(arm, setting.chunk_tokens, room_of(setting), port, is_gpu=setting.is_gpu),
            options=options,
            is_lively=setting.shape == TINY,
        )


def room_of(setting: ManySetting) -> int:
    """What a tier is given: all that one arm stores in a repeat."""
    return room_bytes(setting.shape, setting.plan.concurrency * (setting.tokens + ANSWER_TOKENS))


def run(plan: ConcurrencyPlan, where: Where, progress: Progress) -> ConcurrencyResult:
    """Measure everything in `plan`, as long as `limit_s` allows; without a GPU on a tiny model.

    Raises KVRedisError where nothing could be measured; leaves no process and no folder behind.
    """
    began_s = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvbench-")))
        setting = setting_of(plan, facts_of(where, folder))
        servers = stack.enter_context(servers_for(setting.arms, room_of(setting)))
        facts, batches = machine_facts(), Batches(setting, where, servers)
        rounds = Rounds(batches, setting, where, began_s + plan.limit_s)
        rounds.serve(folder, progress)
    if not batches.rows:
        raise BenchError("nothing was measured. " + " ".join(rounds.notes))
    order = {arm: place for place, arm in enumerate(setting.arms)}
    result = ConcurrencyResult(
        schema=SCHEMA,
        machine=facts,
        options=setting.options(
            prompt_tokens=setting.tokens,
            answer_tokens=ANSWER_TOKENS,
            concurrency=plan.concurrency,
            tensor_parallel=plan.ranks,
        ),
        notes=rounds.notes,
        rows=sorted(batches.rows.values(), key=lambda row: (KINDS.index(row["kind"]), order[row["arm"]])),
        counters=rounds.counters,
        gate=[],
        verified_bytes=0,
        seconds=time.monotonic() - began_s,
    )
    conclude(result)
    result["gate"] = gate_of(result)
    return result


# -- what follows from the samples -------------------------------------------------------------------------------------


def row_of(arm: str, kind: str) -> Row:
    """Give a row without samples."""
    missing = dict.fromkeys(("to_base", "to_base_min", "to_base_max", "to_offloading"))
    return Row(arm=arm, kind=kind, samples=[], cached_share=0.0, **missing)


def base_of(arm: str, kind: str) -> str | None:
    """Which arm another one is compared with; None for those that others are compared with."""
    if arm in (NONE, NONE_BY_LAYERS):
        return None
    return NONE_BY_LAYERS if kind == STEP and LAYERS in arm else NONE


def conclude(result: ConcurrencyResult) -> None:
    """Fill in what follows from the samples."""
    found = {(row["arm"], row["kind"]): row for row in result["rows"]}
    asked = result["options"]["concurrency"] * result["options"]["prompt_tokens"]
    for row in result["rows"]:
        samples = row["samples"]
        row |= summed(samples, spreads=("value",))
        if row["kind"] != STEP:
            row["cached_share"] = middle([sample["cached_tokens"] for sample in samples]) / asked
        row["loaded_gb"] = middle([sample["loaded_bytes"] for sample in samples]) / GB
        row["equal"] = sum(sample["is_equal"] for sample in samples) / len(samples)
    for row in result["rows"]:
        base = found.get((base_of(row["arm"], row["kind"]) or "", row["kind"]))
        if base is not None:
            row |= spread("to_base", _ratios(row, base))
        theirs = found.get((OFFLOADING, row["kind"]))
        if theirs is not None and theirs is not row:
            row["to_offloading"] = middle(_ratios(row, theirs))


def _ratios(above: Row, below: Row) -> list[float]:
    """Of the same repeats; where there are none, of the medians."""
    paired = paired_ratios(by_repeat(above["samples"], "value"), by_repeat(below["samples"], "value"))
    return paired or [above["value"] / below["value"]]


def gate_of(result: ConcurrencyResult) -> list[GateLine]:
    """Judge every line; without a GPU those of tokens alone. An arm that was left out does not pass."""
    found = {(row["arm"], row["kind"]) for row in result["rows"]}
    judged = [
        gate_line(f"measured       {arm}, {TITLES[kind]}", "measured", None)
        for kind in KINDS
        for arm in result["options"]["arms"]
        if (arm, kind) not in found
    ]
    for row in result["rows"]:
        name = f"{row['arm']}, {TITLES[row['kind']]}"
        judged.append(gate_line(f"tokens equal   {name}", "= 1", row["equal"]))
    if result["options"]["device"] == "cpu":
        return judged
    for row in result["rows"]:
        name, base = f"{row['arm']}, {TITLES[row['kind']]}", base_of(row["arm"], row["kind"])
        if base is None or row["arm"] == OFFLOADING:
            continue
        least = LEAST[row["kind"]]
        judged.append(gate_line(f"/ {base:<12} {name}", f">= {least:.2f}x", row["to_base"]))
        if row["kind"] == STORED and row["arm"].split("+")[0] == LANE:
            bound = f">= {OFFLOADING_LEAST:.2f}x"
            judged.append(gate_line(f"/ {OFFLOADING:<12} {name}", bound, row["to_offloading"]))
    return judged


def table_lines(result: ConcurrencyResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    options = result["options"]
    yield from machine_lines(result["machine"])
    launch = ", steps of few tokens as CUDA graphs" if options["graphs"] else ""
    ranks = f", {options['tensor_parallel']} tensor-parallel ranks" if options["tensor_parallel"] > 1 else ""
    yield (
        f"vLLM {options['vllm']}{launch}{ranks}, {options['device']}; {options['shape']}: {options['bytes_per_token']}"
        f" bytes a token, chunks of {options['chunk_tokens']}; {options['concurrency']} requests at once of"
        f" {options['prompt_tokens']} tokens; {options['repeats']} repeats, {options['together']} engines at a time"
    )
    yield from result["notes"]
    for kind in dict.fromkeys(row["kind"] for row in result["rows"]):
        columns: list[Column] = [
            (TITLES[kind], "arm", ""),
            ("tokens/s" if kind == STEP else "requests/s", "value", ".2f"),
            ("least to most", ("value_min", "value_max"), ".2f"),
            ("/ none", "to_base", ".3f"),
            ("/ offloading", "to_offloading", ".3f"),
            ("cached", "cached_share", ".1%"),
            ("GB", "loaded_gb", ".2f"),
            ("equal", "equal", ".0%"),
        ]
        yield ""
        yield from table(columns, [row for row in result["rows"] if row["kind"] == kind])
    yield from gate_lines(result["gate"])


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw each kind's rates as multiples of those without a connector, into a PNG."""
    result, panels = cast(ConcurrencyResult, raw), []
    for kind in dict.fromkeys(row["kind"] for row in result["rows"]):
        shown = [row for row in result["rows"] if row["kind"] == kind and row["to_base"] is not None]
        ratios = [bar(row, "to_base") for row in shown]
        if shown:
            panels.append(BarPanel(TITLES[kind], [row["arm"] for row in shown], {"/ none": ratios}))
    machine, options = result["machine"], result["options"]
    foot = (
        f"{options['device']}; {machine.get('cpu')}, {machine.get('cores')} cores. vLLM {options['vllm']},"
        f" {options['shape']}, {options['concurrency']} requests at once. {' '.join(result['notes'])}"
    )
    captions = Captions(title="vLLM: many requests at once", values="rate / that without a connector", foot=foot)
    bars(panels, captions, path, columns=2)
