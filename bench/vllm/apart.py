"""How soon does an engine that decodes have the first token of a prompt that another engine has computed? And what does
a long prompt cost requests that decode meanwhile? `kvredis bench pd`, with real vLLM, two GPUs and one kvredis.

Engines that prefill (kv_producer) share the first GPU, the one that decodes (kv_consumer) has the second; with one GPU
they share it, and without any a tiny model computes on the CPU. Each prompt is new. The decode engine first computes it
alone, which is what the rest is compared with, and forgets it; then a prefill engine computes it and the decode engine
loads it.

Result: schema kvredis.bench.pd/1.

Arms: how the prompt is computed
    whole       in one pass
    chunked     in passes of CHUNKED_TOKENS
    layers      in one pass, stored layer by layer (use_layerwise: true)
Ways: when the decode engine is asked
    behind      when the prefill engine has answered, as a router asks one after the other
    beside      with it, as a router asks both at once
Figures: medians over the repeats, _min and _max the spread; milliseconds
    single_ms    the decode engine alone, from being asked to its first token
    prefill_ms   the prefill engine, the same
    handover_ms  from the prefill engine's first token to the decode engine's
    total_ms     from the prefill engine's being asked to the decode engine's first token
    to_single    total_ms / single_ms of the same repeat
    hit_share    least of the prompt's tokens that were loaded, of those that can be
    equal        share of the prompts whose answers were those of the decode engine alone
Rows of the kind "stall": the longest gap between two tokens of DECODING requests in the decode engine
    computed, loaded, none   what becomes of a long prompt meanwhile
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypedDict, cast

from kvredis.bench.core.errors import BenchError
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
    summed,
    table,
)
from kvredis.bench.core.servers import SUBJECT
from kvredis.bench.core.shapes import SHAPES, ModelShape
from kvredis.bench.core.statistics import middle, rotated

from .engine import (
    DTYPES,
    LANE,
    LAYERS,
    TINY,
    EngineProcess,
    Servers,
    Setting,
    Where,
    connector_of,
    engine_bytes,
    facts_of,
    forget,
    launching,
    model_config,
    room_bytes,
    servers_for,
)
from .run import ANSWER_TOKENS, CPU_CHUNK_TOKENS
from .worker import Asked, Opening

SCHEMA: Final = "kvredis.bench.pd/1"
WHOLE, CHUNKED = "whole", "chunked"
ARMS: Final = (WHOLE, CHUNKED, LAYERS)
BEHIND, BESIDE = "behind", "beside"
WAYS: Final = (BEHIND, BESIDE)
STALLS: Final = ("computed", "loaded", "none")
DECODING: Final = 8
CHUNKED_TOKENS: Final = 2048

JUDGED_TOKENS: Final = 15_000
"""Bars are for the 8b shape on two GPUs, and prompts from this length on."""
HANDOVER_MOST: Final = {CHUNKED: 60.0, WHOLE: 90.0}
TO_SINGLE_MOST: Final = 1.03
STALL_MOST_MS: Final = 20.0

_CPU_TOKENS, _CPU_CHUNKED, _CPU_BLOCK, _CPU_STEPS, _STEPS = 1000, 256, 32, 60, 150
_DECODE: Final = "decode"
_BESIDE_S: Final = 0.02  # behind the prefill engine's request, which has told what it computes by then
_SHARE_USED: Final = 0.94


class Sample(TypedDict):
    repeat: int
    single_ms: float
    prefill_ms: float
    handover_ms: float
    total_ms: float
    to_single: float
    hit_tokens: int
    is_equal: bool


class PdResult(Result):
    rows: list[Row]
    stalls: list[Row]


@dataclass(frozen=True, slots=True)
class PdPlan:
    """What one call of the bench does. None: by what there is to compute on. After `limit_s` no more is begun."""

    arms: tuple[str, ...] = ARMS
    shape: ModelShape | None = None
    prompt_tokens: int | None = None
    chunk_tokens: int | None = None
    repeats: int = 5
    limit_s: float = float("inf")

    def steps(self) -> int:
        """Give about how often `run` calls its progress."""
        return self.repeats * (len(self.arms) * len(WAYS) + len(STALLS))


@dataclass(frozen=True, slots=True)
class PdSetting(Setting):
    """The same with prompts of one length."""

    tokens: int

    @property
    def gpus(self) -> int:
        """How many there are."""
        return int(self.facts.get("devices", 0))

    @property
    def hit_tokens(self) -> int:
        """Tokens of a prompt that can be loaded: whole chunks, and not the last token."""
        return (self.tokens - 1) // self.chunk_tokens * self.chunk_tokens


def setting_of(plan: PdPlan, facts: dict[str, Any]) -> PdSetting:
    """Tie a plan to what computes. Raises BenchError for what does not fit it."""
    memory = int(facts["memory_bytes"])
    shape = plan.shape or (SHAPES["8b"] if memory else TINY)
    tokens = plan.prompt_tokens or (15_400 if memory else _CPU_TOKENS)
    chunk = plan.chunk_tokens or (256 if memory else CPU_CHUNK_TOKENS)
    if tokens <= chunk:
        raise BenchError(f"a prompt of {tokens} tokens has no chunk of {chunk} before its last")
    setting = PdSetting(shape, chunk, plan.arms, len(plan.arms) + 1, plan.repeats, False, facts, tokens)
    each = engine_bytes(shape, tokens + ANSWER_TOKENS)
    engines = len(plan.arms) + (setting.gpus == 1)
    if memory and engines * each > memory * _SHARE_USED:
        raise BenchError(f"{engines} engines of shape {shape.name} take {engines * each / 1e9:.0f} GB of one GPU")
    return setting


def opening_of(setting: PdSetting, arm: str, where: Where, port: int, folder: Path) -> Opening:
    """How an arm's engine, or the one that decodes, is made. They have the same model: its folder is in the keys."""
    longest = setting.tokens + ANSWER_TOKENS + 48
    words = f"{LANE}+{LAYERS}" if arm == LAYERS else LANE
    room = room_bytes(setting.shape, longest)
    connector = connector_of(words, setting.chunk_tokens, room, port, is_gpu=setting.is_gpu)
    assert connector is not None
    connector["kv_role"] = "kv_consumer" if arm == _DECODE else "kv_producer"
    chunked = CHUNKED_TOKENS if setting.is_gpu else _CPU_CHUNKED
    options: dict[str, Any] = {"dtype": DTYPES[setting.shape.dtype_bytes], "max_model_len": longest}
    options["max_num_batched_tokens"] = chunked if arm == CHUNKED else max(longest, CHUNKED_TOKENS)
    if setting.is_gpu:
        share = engine_bytes(setting.shape, longest) / int(setting.facts["memory_bytes"])
        options |= {"gpu_memory_utilization": round(share, 3), "max_num_seqs": 16, "attention_backend": where.backend}
        options |= launching(words, DECODING)
    else:
        options |= {"block_size": _CPU_BLOCK, "max_num_seqs": 16, "enforce_eager": True}
    return Opening(
        model=str(folder / "model"),
        config=model_config(setting.shape, longest),
        connector=connector,
        options=options,
        is_lively=setting.shape == TINY,
    )


class Pair:
    """The engines of one run, and what was measured of them."""

    def __init__(self, setting: PdSetting, servers: Servers, engines: dict[str, EngineProcess]) -> None:
        self.stalls = {what: Row(kind="stall", what=what, samples=[]) for what in STALLS}
        self._setting = setting
        self._servers = servers
        self._prefill = {arm: engine for arm, engine in engines.items() if arm != _DECODE}
        self._decode = engines[_DECODE]
        kinds = [(arm, way) for arm in self._prefill for way in WAYS]
        self.rows = {(arm, way): Row(kind="handover", arm=arm, way=way, samples=[]) for arm, way in kinds}
        self._seed = 0

    def warm_up(self) -> None:
        """Serve a prompt in every way that does not count."""
        for engine in (*self._prefill.values(), self._decode):
            engine.first(self._next(), self._setting.tokens, ANSWER_TOKENS)
        for arm in self._prefill:
            self._handed_over(arm, BEHIND)
        self._stalled("computed")

    def take(self, arm: str, way: str, repeat: int) -> None:
        """Measure one prompt."""
        self.rows[arm, way]["samples"].append(self._handed_over(arm, way) | {"repeat": repeat})

    def stall(self, what: str, repeat: int) -> None:
        """Measure a gap."""
        self.stalls[what]["samples"].append(self._stalled(what) | {"repeat": repeat})

    def _next(self) -> int:
        self._seed += 1
        return self._seed

    def _handed_over(self, arm: str, way: str) -> dict[str, Any]:
        seed, tokens, prefill = self._next(), self._setting.tokens, self._prefill[arm]
        forget(self._servers, LANE)
        single = self._decode.first(seed, tokens, ANSWER_TOKENS)
        self._decode.reset()
        if way == BEHIND:
            made = prefill.first(seed, tokens, 1)
            loaded = self._decode.first(seed, tokens, ANSWER_TOKENS)
        else:
            prefill.begin_first(seed, tokens, 1)
            time.sleep(_BESIDE_S)
            loaded = self._decode.first(seed, tokens, ANSWER_TOKENS)
            made = prefill.first_answer()
        for engine in (prefill, self._decode):
            engine.reset()
        alone_ms, total_ms = _ms(single), (loaded["first_s"] - made["asked_s"]) * 1e3
        return {
            "single_ms": alone_ms,
            "prefill_ms": _ms(made),
            "handover_ms": (loaded["first_s"] - made["first_s"]) * 1e3,
            "total_ms": total_ms,
            "to_single": total_ms / alone_ms,
            "hit_tokens": loaded["cached_tokens"],
            "is_equal": loaded["answer"] == single["answer"],
        }

    def _stalled(self, what: str) -> dict[str, Any]:
        seed, tokens = self._next(), self._setting.tokens
        forget(self._servers, LANE)
        if what == "loaded":
            prefill = next(iter(self._prefill.values()))
            prefill.first(seed, tokens, 1)
            prefill.reset()
        length = 0 if what == "none" else tokens
        gap = self._decode.stalled(seed, length, DECODING, _STEPS if self._setting.is_gpu else _CPU_STEPS)
        self._decode.reset()
        return {"gap_ms": gap["gap_ms"], "hit_tokens": gap["cached_tokens"]}


def _ms(asked: Asked) -> float:
    return (asked["first_s"] - asked["asked_s"]) * 1e3


def run(plan: PdPlan, where: Where, progress: Progress) -> PdResult:
    """Measure everything in `plan`, as long as `limit_s` allows. Raises KVRedisError where an engine fails; leaves no
    process and no folder behind."""
    began_s, notes = time.monotonic(), list[str]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvbench-")))
        setting = setting_of(plan, facts_of(where, folder))
        notes += _notes(setting)
        room = room_bytes(setting.shape, setting.tokens + ANSWER_TOKENS)
        servers = stack.enter_context(servers_for((LANE,), room))
        facts, names = machine_facts(), (*plan.arms, _DECODE)
        gpus = {name: str(int(name == _DECODE and setting.gpus > 1)) for name in names} if setting.gpus else {}
        engines = {name: stack.enter_context(EngineProcess(name, where, folder, gpu=gpus.get(name))) for name in names}
        for name, engine in engines.items():  # one by one: each measures what memory is free
            engine.open(opening_of(setting, name, where, servers[SUBJECT].address.port, folder))
        pair = Pair(setting, servers, engines)
        pair.warm_up()
        until_s = began_s + plan.limit_s
        for repeat in range(plan.repeats):
            for arm, way in rotated(list(pair.rows), repeat):
                if time.monotonic() < until_s:
                    progress(f"{arm}, asked {way}")
                    pair.take(arm, way, repeat)
            for what in rotated(STALLS, repeat):
                if time.monotonic() < until_s:
                    progress(f"a long prompt {what}")
                    pair.stall(what, repeat)
    if time.monotonic() >= until_s:
        notes.append("Time was over before the last repeat.")
    result = PdResult(
        schema=SCHEMA,
        machine=facts,
        options=setting.options(prompt_tokens=setting.tokens, gpus=setting.gpus, decoding=DECODING),
        notes=notes,
        rows=[row for row in pair.rows.values() if row["samples"]],
        stalls=[row for row in pair.stalls.values() if row["samples"]],
        gate=[],
        verified_bytes=0,
        seconds=time.monotonic() - began_s,
    )
    conclude(result)
    result["gate"] = gate_of(result)
    return result


def _notes(setting: PdSetting) -> Iterator[str]:
    if not setting.is_gpu:
        yield "There is no GPU: a tiny model computes on the CPU, and its figures say nothing of others."
        return
    yield "Weights are vLLM's dummy ones: what is generated depends little on the KV."
    if setting.gpus == 1:
        yield "There is one GPU: the engines share it."


def conclude(result: PdResult) -> None:
    """Fill in what follows from the samples."""
    most = result["options"]["hit_tokens"] = _hit_tokens(result["options"])
    for row in result["rows"]:
        samples = cast(Sequence[Sample], row["samples"])
        row |= summed(samples, ("single_ms", "prefill_ms", "to_single"), ("handover_ms", "total_ms"))
        row["hit_share"] = min(sample["hit_tokens"] for sample in samples) / most
        row["equal"] = sum(sample["is_equal"] for sample in samples) / len(samples)
    for row in result["stalls"]:
        row |= summed(row["samples"], (), ("gap_ms",))
        row["hit_share"] = middle([sample["hit_tokens"] for sample in row["samples"]]) / most


def _hit_tokens(options: dict[str, Any]) -> int:
    return int(options["prompt_tokens"] - 1) // int(options["chunk_tokens"]) * int(options["chunk_tokens"])


def gate_of(result: PdResult) -> list[GateLine]:
    """Judge every line; tokens and hits alone, but for the 8b shape on two GPUs and long prompts."""
    options, judged = result["options"], list[GateLine]()
    for row in result["rows"]:
        name = f"{row['arm']}, asked {row['way']}"
        judged.append(gate_line(f"tokens equal   {name}", "= 1", row["equal"]))
        judged.append(gate_line(f"hits           {name}", "= 1", row["hit_share"]))
    if options["gpus"] < 2 or options["shape"] != "8b" or options["prompt_tokens"] < JUDGED_TOKENS:
        return judged
    for row in result["rows"]:
        name = f"{row['arm']}, asked {row['way']}"
        if (most := HANDOVER_MOST.get(row["arm"])) is not None:
            judged.append(gate_line(f"handover ms    {name}", f"<= {most:.0f}", row["handover_ms"]))
        if row["way"] == BESIDE:
            judged.append(gate_line(f"/ single       {name}", f"<= {TO_SINGLE_MOST:.2f}x", row["to_single"]))
    for row in result["stalls"]:
        if row["what"] == "loaded":
            judged.append(gate_line("longest gap ms, loaded", f"<= {STALL_MOST_MS:.0f}", row["gap_ms"]))
    return judged


def table_lines(result: PdResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    options = result["options"]
    yield from machine_lines(result["machine"])
    yield (
        f"vLLM {options['vllm']}, {options['gpus'] or 'no'} x {options['device']}; {options['shape']}:"
        f" {options['bytes_per_token']} bytes a token, chunks of {options['chunk_tokens']}; prompts of"
        f" {options['prompt_tokens']} tokens, {options['repeats']} repeats"
    )
    yield from result["notes"]
    columns: list[Column] = [
        ("first token, ms", "arm", ""),
        ("asked", "way", ""),
        ("alone", "single_ms", ".1f"),
        ("prefill", "prefill_ms", ".1f"),
        ("handover", "handover_ms", ".1f"),
        ("least to most", ("handover_ms_min", "handover_ms_max"), ".1f"),
        ("in all", "total_ms", ".1f"),
        ("/ alone", "to_single", ".3f"),
        ("hit", "hit_share", ".1%"),
        ("equal", "equal", ".0%"),
    ]
    yield ""
    yield from table(columns, result["rows"])
    gaps: list[Column] = [
        (f"longest gap of {options['decoding']} that decode, ms", "what", ""),
        ("gap", "gap_ms", ".1f"),
        ("least to most", ("gap_ms_min", "gap_ms_max"), ".1f"),
        ("hit", "hit_share", ".1%"),
    ]
    yield ""
    yield from table(gaps, result["stalls"])
    yield from gate_lines(result["gate"])
