"""How soon does the first token of a prompt that was seen before come in a real vLLM, by which cache has kept its KV?
`kvredis bench vllm` asks vLLM without a connector, its OffloadingConnector, LMCache's, and kvredis.

Every arm is a vLLM in a process of its own, since its settings are its own. As many are open at a time as the GPU has
room for: what the others are compared with, and some of the others; they take turns prompt by prompt, each time in
another order. An arm that fails is left out and said, and so is what there was no time for.

The file: schema kvredis.bench.vllm/1. A sample is one prompt in one engine: computed (cold), served again from vLLM's
own prefix cache (own), and, that cache emptied, from what the arm has kept of it (warm). Times are to the first token,
of a request alone in its engine.

Arms
    none        no connector
    offloading  vLLM's own OffloadingConnector, to this process' memory
    memory      KVRedisConnector, to this process' memory
    lane        KVRedisConnector, to a kvredis serve process on this host, through shared memory
    tcp         the same over TCP
    +layers     stored layer by layer (use_layerwise: true)
    +auto       with min_retrieve_tokens: auto
    lmcache     vLLM's LMCacheConnectorV1, to this process' memory (local_cpu), as LMCache's page of that has it
    lmcache+redis, lmcache+kvredis
                the same without that memory, to a server over TCP by LMCache's native client (resp://): redis-server,
                with as many io-threads as LMCache's page has, or the kvredis of lane and tcp
Figures: medians over the samples, _min and _max the spread
    factor      cold of `none` / warm: in the same repeat where both were open together, else of the medians
    ratio       warm / warm of offloading, in the same way
    to_lmcache  by LMCache's arms: warm of lane or tcp / theirs, in the same way
    loaded_gb   bytes that our connector loaded for one warm prompt
    hit_share   least of the warm prompts' tokens not computed, of those that this arm can load
    equal       share of the prompts whose generated tokens were those of the first arm that served them
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypedDict, cast

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.plot import Captions, LinePanel, lines
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
from kvredis.bench.core.statistics import GB, by_repeat, middle, paired_ratio

from .engine import (
    AUTO,
    DTYPES,
    LANE,
    LAYERS,
    LMCACHE,
    LMCACHE_ARMS,
    MEMORY,
    NONE,
    OFFLOADING,
    OURS,
    TCP,
    TINY,
    EngineProcess,
    Rounds,
    Servers,
    Setting,
    Where,
    connector_of,
    engine_bytes,
    facts_of,
    forget,
    launching,
    model_config,
    port_of,
    room_bytes,
    servers_for,
)
from .worker import Opening, Served

SCHEMA: Final = "kvredis.bench.vllm/1"
DEFAULT_ARMS: Final = (
    NONE, OFFLOADING, LANE, MEMORY, TCP, f"{LANE}+{LAYERS}", f"{MEMORY}+{LAYERS}", f"{LANE}+{AUTO}",
)  # fmt: skip
ARMS: Final = (*DEFAULT_ARMS, *LMCACHE_ARMS)
RATIO_MOST: Final = 1.05
LMCACHE_RATIO: Final = "< 1.00x"
"""Ours by shared memory and by TCP, each against each of LMCache's."""
FACTOR_LEAST: Final = 6.5
FACTOR_TOKENS: Final = 15_000
"""The factor is judged for the 8b shape and prompts from this length on."""


class Sample(TypedDict):
    repeat: int
    cold_ms: float
    own_ms: float
    warm_ms: float | None
    own_tokens: int
    warm_tokens: int
    own_bytes: int
    warm_bytes: int
    stored_bytes: int
    is_equal: bool


class VLLMResult(Result):
    rows: list[Row]
    counters: dict[str, dict[str, float]]  # of our connector, by arm


def row_of(arm: str, tokens: int, can_hit: int) -> Row:
    """Give a row without samples; `can_hit` tokens of a warm prompt can this arm load."""
    missing = dict.fromkeys(("warm_ms", "warm_ms_min", "warm_ms_max", "factor", "ratio", "hit_share"))
    return Row(arm=arm, tokens=tokens, can_hit=can_hit, samples=[], loaded_gb=0.0, to_lmcache={}, **missing)


def conclude(rows: list[Row]) -> None:
    """Fill in what follows from the samples."""
    found = {(row["arm"], row["tokens"]): row for row in rows}
    for row in rows:
        samples = row["samples"]
        row |= summed(samples, ("cold_ms", "own_ms"))
        row["equal"] = sum(sample["is_equal"] for sample in samples) / max(len(samples), 1)
        warm = [sample["warm_ms"] for sample in samples if sample["warm_ms"] is not None]
        if not warm:
            continue
        row |= spread("warm_ms", warm)
        row["loaded_gb"] = middle([sample["warm_bytes"] for sample in samples]) / GB
        if row["can_hit"]:
            row["hit_share"] = min(sample["warm_tokens"] for sample in samples) / row["can_hit"]
    for row in rows:
        if row["warm_ms"] is None:
            continue
        base, theirs = found.get((NONE, row["tokens"]), row), found.get((OFFLOADING, row["tokens"]))
        row["factor"] = _ratio(base, "cold_ms", row, "warm_ms")
        if theirs is not None and theirs["warm_ms"] is not None:
            row["ratio"] = _ratio(row, "warm_ms", theirs, "warm_ms")
        if row["arm"] in OURS:
            for arm in LMCACHE_ARMS:
                other = found.get((arm, row["tokens"]))
                if other is not None and other["warm_ms"] is not None:
                    row["to_lmcache"][arm] = _ratio(row, "warm_ms", other, "warm_ms")


def _ratio(above: Row, over: str, below: Row, under: str) -> float:
    """Of the samples of the same repeats; where there are none, of the medians."""
    paired = paired_ratio(by_repeat(above["samples"], over), by_repeat(below["samples"], under))
    raw = cast(Mapping[str, float], above)[over] / cast(Mapping[str, float], below)[under]
    return raw if paired is None else paired


def gate_of(result: VLLMResult) -> list[GateLine]:
    """Judge every line; without a GPU those of tokens and hits alone. A figure that is missing does not pass, nor does
    an arm that was left out, or for which there was no time."""
    found = {(row["arm"], row["tokens"]) for row in result["rows"]}
    judged = [
        gate_line(f"measured       {arm}, {tokens} tokens", "measured", None)
        for tokens in result["options"]["prompt_tokens"]
        for arm in result["options"]["arms"]
        if (arm, tokens) not in found
    ]
    for row in result["rows"]:
        name = f"{row['arm']}, {row['tokens']} tokens"
        judged.append(gate_line(f"tokens equal   {name}", "= 1", row["equal"]))
        if row["hit_share"] is not None and row["arm"] != OFFLOADING:
            judged.append(gate_line(f"hits           {name}", "= 1", row["hit_share"]))
    if result["options"]["device"] == "cpu":
        return judged
    for row in result["rows"]:
        name, (kind, *words) = f"{row['arm']}, {row['tokens']} tokens", row["arm"].split("+")
        if kind == LANE and LAYERS not in words and OFFLOADING in result["options"]["arms"]:
            judged.append(gate_line(f"/ offloading   {name}", f"<= {RATIO_MOST:.2f}x", row["ratio"]))
        if row["arm"] in OURS:
            for theirs in (arm for arm in result["options"]["arms"] if arm in LMCACHE_ARMS):
                judged.append(gate_line(f"/ {theirs}   {name}", LMCACHE_RATIO, row["to_lmcache"].get(theirs)))
        if kind in (LANE, MEMORY) and row["tokens"] >= FACTOR_TOKENS and result["options"]["shape"] == "8b":
            judged.append(gate_line(f"cold / warm    {name}", f">= {FACTOR_LEAST:.2f}x", row["factor"]))
    return judged


def table_lines(result: VLLMResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    options = result["options"]
    yield from machine_lines(result["machine"])
    launch = ", short passes as CUDA graphs" if options.get("graphs") else ""  # older results do not say
    lmcache = f", LMCache {options[LMCACHE]}" if LMCACHE in options else ""
    yield (
        f"vLLM {options['vllm']}{launch}{lmcache}, {options['device']}; {options['shape']}:"
        f" {options['bytes_per_token']} bytes a token,"
        f" chunks of {options['chunk_tokens']}; {options['repeats']} repeats, {options['together']} engines at a time"
    )
    yield from result["notes"]
    theirs = [arm for arm in options["arms"] if arm in LMCACHE_ARMS]
    for tokens in dict.fromkeys(row["tokens"] for row in result["rows"]):
        columns: list[Column] = [
            (f"{tokens} tokens, TTFT in ms", "arm", ""),
            ("cold", "cold_ms", ".1f"),
            ("own", "own_ms", ".1f"),
            ("warm", "warm_ms", ".1f"),
            ("least to most", ("warm_ms_min", "warm_ms_max"), ".1f"),
            ("factor", "factor", ".2f"),
            ("/ offloading", "ratio", ".3f"),
            *((f"/ {arm}", partial(_beside, arm), ".3f") for arm in theirs),
            ("hit", "hit_share", ".1%"),
            ("GB", "loaded_gb", ".2f"),
            ("equal", "equal", ".0%"),
        ]
        yield ""
        yield from table(columns, [row for row in result["rows"] if row["tokens"] == tokens])
    yield from gate_lines(result["gate"])


def _beside(arm: str, row: Row) -> float | None:
    """How long a row's arm takes beside one of LMCache's; older results have none."""
    ratio: float | None = row.get("to_lmcache", {}).get(arm)
    return ratio


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw the warm first token, and how many times as soon it comes, against the prompt's length, into a PNG. Arms
    that store by layers load as the others do, and are left out."""
    result, panels = cast(VLLMResult, raw), []
    for title, figure in (("first token, ms", "warm_ms"), ("first token, times as soon as computed", "factor")):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in result["rows"]:
            value = cast(float | None, cast(Mapping[str, object], row)[figure])
            if row["arm"] == NONE and figure == "warm_ms":
                series.setdefault("computed", []).append((row["tokens"], row["cold_ms"]))
                series.setdefault("vLLM's own prefix cache", []).append((row["tokens"], row["own_ms"]))
            elif value is not None and LAYERS not in row["arm"].split("+"):
                series.setdefault(_called(row["arm"]), []).append((row["tokens"], value))
        drawn = {name: sorted(at) for name, at in series.items()}
        panels.append(LinePanel(title, drawn, across="tokens of the prompt", sizes=False))
    machine, options = result["machine"], result["options"]
    foot = (
        f"{options['device']}; {machine.get('cpu')}, {machine.get('cores')} cores. vLLM {options['vllm']},"
        f" {options['shape']}. {' '.join(result['notes'])}"
    )
    lines(panels, Captions(title="vLLM: prompts seen before", values="", foot=foot), path, columns=2)


def _called(arm: str) -> str:
    """An arm's name in a picture."""
    if arm == OFFLOADING:
        return arm
    if arm in LMCACHE_ARMS:
        return "LMCache" + arm.removeprefix(LMCACHE).replace("+", " over ")
    return f"kvredis, {arm}"


ANSWER_TOKENS: Final = 16
CPU_TOKENS: Final = (250, 1000)
CPU_CHUNK_TOKENS: Final = 64
_SEED: Final = 100
_MEMORY_USED: Final = 0.94  # of a GPU's memory, by all engines together
_CPU_BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class VLLMPlan:
    """What one call of the bench does. `shape` and `chunk_tokens` None: by what there is to compute on; `together` 0:
    as many engines at a time as fit. After `limit_s` no more is begun. `eager`: kernels are launched one by one."""

    arms: tuple[str, ...] = DEFAULT_ARMS
    shape: ModelShape | None = None
    prompt_tokens: tuple[int, ...] = (1024, 8192, 15_400)
    chunk_tokens: int | None = None
    repeats: int = 5
    together: int = 0
    limit_s: float = float("inf")
    eager: bool = False

    def steps(self) -> int:
        """Give about how often `run` calls its progress; what is compared with may be served more often."""
        return len(self.arms) * len(self.prompt_tokens) * self.repeats


@dataclass(frozen=True, slots=True)
class PromptSetting(Setting):
    """The same with prompts of several lengths."""

    prompt_tokens: tuple[int, ...]

    def can_hit(self, arm: str, tokens: int) -> int:
        """Tokens of a prompt that an arm can load: whole chunks; LMCache counts the last token of a prompt as computed
        when all of it is stored, which it is with every arm."""
        whole = 0 if arm == NONE else tokens // self.chunk_tokens * self.chunk_tokens
        return min(whole, tokens - 1) if arm in LMCACHE_ARMS else whole


def setting_of(plan: VLLMPlan, facts: dict[str, Any]) -> PromptSetting:
    """Tie a plan to what computes. Raises BenchError for what does not fit it."""
    memory, arms = int(facts["memory_bytes"]), tuple(dict.fromkeys(plan.arms))
    shape = plan.shape or (SHAPES["8b"] if memory else TINY)
    tokens, chunk = plan.prompt_tokens, plan.chunk_tokens or (256 if memory else CPU_CHUNK_TOKENS)
    if not memory:
        tokens = tuple(each for each in tokens if each <= CPU_TOKENS[-1]) or CPU_TOKENS
        arms = tuple(arm for arm in arms if arm != OFFLOADING)  # it knows GPUs alone
    if min(tokens) <= chunk:
        raise BenchError(f"a prompt of {min(tokens)} tokens has no chunk of {chunk} before its last")
    fitting = int(memory * _MEMORY_USED) // engine_bytes(shape, max(tokens)) if memory else 2
    if not fitting:
        raise BenchError(f"an engine of shape {shape.name} takes {engine_bytes(shape, max(tokens)) / 1e9:.0f} GB")
    together = min(plan.together or fitting, fitting, len(arms))
    if not together:
        raise BenchError("no arm is left: offloading needs a GPU")
    return PromptSetting(shape, chunk, arms, together, plan.repeats, plan.eager, facts, tokens)


class Prompts:
    """The Work of this bench: one prompt at a time, of each length."""

    def __init__(self, setting: PromptSetting, where: Where, servers: Servers) -> None:
        self.rows: dict[tuple[str, int], Row] = {}
        self.turns = setting.prompt_tokens
        self._setting, self._where, self._servers = setting, where, servers
        self._answers: dict[tuple[int, int], list[list[int]]] = {}

    def warm_up(self, engine: EngineProcess) -> None:
        for place, tokens in enumerate(self.turns):
            engine.measure(place, tokens)
            forget(self._servers, engine.arm, engine)

    def take(self, engine: EngineProcess, turn: int, repeat: int, place: int) -> None:
        seed = _SEED * (repeat + 1) + self.turns.index(turn)  # no prompt begins as another
        served = engine.measure(seed, turn, 0 if repeat else ANSWER_TOKENS)
        forget(self._servers, engine.arm, engine)
        expected = self._answers.setdefault((turn, repeat), served["answers"])
        which = engine.arm, turn
        row = self.rows.setdefault(which, row_of(*which, self._setting.can_hit(*which)))
        row["samples"].append(_sample_of(served, expected, place))

    def opening(self, arm: str, folder: Path) -> Opening:
        setting, longest = self._setting, max(self._setting.prompt_tokens) + ANSWER_TOKENS
        room = room_bytes(setting.shape, longest)
        port = port_of(self._servers, arm)
        options: dict[str, Any] = {"dtype": DTYPES[setting.shape.dtype_bytes]}
        options |= {"max_model_len": longest + 48, "max_num_batched_tokens": max(longest + 48, 2048)}
        if setting.is_gpu:
            share = engine_bytes(setting.shape, longest) / int(setting.facts["memory_bytes"])
            options |= {"gpu_memory_utilization": round(share, 3), "max_num_seqs": 16}
            options["attention_backend"] = self._where.backend
            options |= launching(arm) if setting.has_graphs else {"enforce_eager": True}
        else:
            options |= {"block_size": _CPU_BLOCK, "max_num_seqs": 8, "enforce_eager": True}
        return Opening(
            model=str(folder),
            config=model_config(setting.shape, longest + 48),
            connector=connector_of(arm, setting.chunk_tokens, room, port, is_gpu=setting.is_gpu),
            options=options,
            is_lively=setting.shape == TINY,
        )


def _sample_of(served: Served, expected: list[list[int]], repeat: int) -> Sample:
    """All first tokens must be the first arm's first one, and a longer answer its longer one."""
    first = expected[0]
    firsts = [answer for answer in served["answers"] if len(answer) == 1]
    longer = [answer for answer in served["answers"] if len(answer) > 1]
    is_equal = all(answer == first for answer in firsts) and longer == [each for each in expected if len(each) > 1]
    return Sample(
        repeat=repeat,
        is_equal=is_equal,
        cold_ms=served["cold_ms"],
        own_ms=served["own_ms"],
        warm_ms=served["warm_ms"],
        own_tokens=served["own_tokens"],
        warm_tokens=served["warm_tokens"],
        own_bytes=served["own_bytes"],
        warm_bytes=served["warm_bytes"],
        stored_bytes=served["stored_bytes"],
    )


def run(plan: VLLMPlan, where: Where, progress: Progress) -> VLLMResult:
    """Measure everything in `plan`, as long as `limit_s` allows; without a GPU on a tiny model.

    Raises KVRedisError where nothing could be measured; leaves no process and no folder behind.
    """
    began_s = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvbench-")))
        setting = setting_of(plan, facts_of(where, folder, plan.arms))
        room = room_bytes(setting.shape, max(setting.prompt_tokens) + ANSWER_TOKENS)
        servers = stack.enter_context(servers_for(setting.arms, room))
        facts, prompts = machine_facts(), Prompts(setting, where, servers)
        rounds = Rounds(prompts, setting, where, began_s + plan.limit_s)
        rounds.serve(folder, progress)
    if not prompts.rows:
        raise BenchError("nothing was measured. " + " ".join(rounds.notes))
    order = {arm: place for place, arm in enumerate(ARMS)}
    result = VLLMResult(
        schema=SCHEMA,
        machine=facts,
        options=setting.options(prompt_tokens=list(setting.prompt_tokens)),
        notes=rounds.notes,
        rows=sorted(prompts.rows.values(), key=lambda row: (row["tokens"], order[row["arm"]])),
        counters=rounds.counters,
        gate=[],
        verified_bytes=0,
        seconds=time.monotonic() - began_s,
    )
    conclude(result["rows"])
    result["gate"] = gate_of(result)
    return result
