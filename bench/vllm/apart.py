"""How soon does an engine that decodes have the first token of a prompt that another engine has computed? And what does
a long prompt cost requests that decode meanwhile? `kvredis bench pd`, with real vLLM, two GPUs and one kvredis.

Engines that prefill (kv_producer) share the first GPU, the one that decodes (kv_consumer) has the second; with one GPU
they share it, and without any a tiny model computes on the CPU. With several ranks each engine has as many GPUs; where
there are not enough for two such engines they share the first. Each prompt is new. The decode engine first computes it
alone, which is what the rest is compared with, and forgets it; then a prefill engine computes it and the decode engine
loads it.

Result: schema kvredis.bench.pd/1.

Arms: how the prompt is computed
    whole       in one pass
    chunked     in passes of CHUNKED_TOKENS
    layers      in one pass, stored layer by layer (use_layerwise: true)
    gpu         in one pass, stored in the memory of the GPU that decodes, which kvredis has (gpu_memory)
    gpu+chunked the same in passes of CHUNKED_TOKENS
    gpu+layers  in one pass, stored there layer by layer
    nixl        in one pass, and read by a decode engine of its own, both with vLLM's NixlConnector
    nixl+cross  the same with all layers of a page beside each other (enable_cross_layers_blocks: true)
`gpu` is in the default list where there are two GPUs. `nixl` needs that package beside vLLM, is not in the list, and is
asked behind only. What fails of it is told, and the other arms go on.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
from kvredis.bench.core.servers import SUBJECT, free_port
from kvredis.bench.core.shapes import SHAPES, ModelShape
from kvredis.bench.core.statistics import middle, rotated

from .engine import (
    CROSS,
    DTYPES,
    LANE,
    LAYERS,
    NIXL,
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
WHOLE, CHUNKED, GPU = "whole", "chunked", "gpu"
ARMS: Final = (WHOLE, CHUNKED, LAYERS)
GPU_ARMS: Final = (GPU, f"{GPU}+{CHUNKED}", f"{GPU}+{LAYERS}")
"""Arms that need a GPU's memory."""
PEERS: Final = (NIXL, f"{NIXL}+{CROSS}")
"""Arms of another's: a pair of engines each, without kvredis between."""
BEHIND, BESIDE = "behind", "beside"
WAYS: Final = (BEHIND, BESIDE)
STALLS: Final = ("computed", "loaded", "none")
DECODING: Final = 8
CHUNKED_TOKENS: Final = 2048

JUDGED_TOKENS: Final = 15_000
"""Bars are for the 8b shape on two GPUs, an engine each, and prompts from this length on."""
HANDOVER_MOST: Final = {CHUNKED: 60.0, WHOLE: 90.0} | dict.fromkeys(GPU_ARMS, 35.0)
TO_SINGLE_MOST: Final = 1.03
STALL_MOST_MS: Final = 20.0
TO_PEER_MOST: Final = 1.0

_CPU_TOKENS, _CPU_CHUNKED, _CPU_BLOCK, _CPU_STEPS, _STEPS = 1000, 256, 32, 60, 150
_DECODE: Final = "decode"
_FOR_ANOTHER: Final = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
"""kv_transfer_params of a prompt whose KV another engine will read, as vLLM's toy_proxy_server sends them."""
_PEER_ANSWER_S: Final = 60.0
_OLD_RUNNER: Final = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # the newer one of vLLM 0.26 has no such layout
_COMING: Final = {"do_remote_prefill": True, "do_remote_decode": False}
"""kv_transfer_params of a prompt that another engine computes meanwhile, as `kvredis proxy --at-once` sends them ..."""
_BESIDE_S: Final = 0.02
"""... and so much later than the prefill engine's request."""
_SHARE_USED: Final = 0.94
_GPU_TIMES: Final = 2
"""A server's GPU memory is so much larger than its arena, which has room for two prompts: an engine may reserve a
quarter of it, and asks for the copies of a whole prompt only where that is one (adapters/paged/jobs.py, GPU_PART)."""


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

    arms: tuple[str, ...] | None = None
    shape: ModelShape | None = None
    prompt_tokens: int | None = None
    chunk_tokens: int | None = None
    repeats: int = 5
    limit_s: float = float("inf")
    ranks: int = 1

    def steps(self) -> int:
        """Give about how often `run` calls its progress."""
        return self.repeats * (sum(len(ways_of(arm)) for arm in self.arms or ARMS) + len(STALLS))


@dataclass(frozen=True, slots=True)
class PdSetting(Setting):
    """The same with prompts of one length."""

    tokens: int
    ranks: int

    @property
    def gpus(self) -> int:
        """How many there are."""
        return int(self.facts.get("devices", 0))

    @property
    def are_apart(self) -> bool:
        """Whether the engine that decodes has GPUs of its own."""
        return self.gpus >= 2 * self.ranks


def arms_of(plan: PdPlan, facts: dict[str, Any]) -> tuple[str, ...]:
    """Give the arms, by default those that there is what they need for."""
    if plan.arms is not None:
        return plan.arms
    return (*ARMS, GPU) if facts.get("devices", 0) > 1 else ARMS


def ways_of(arm: str) -> tuple[str, ...]:
    """When an arm's decode engine is asked."""
    return (BEHIND,) if arm in PEERS else WAYS


def decoder_of(arm: str) -> str:
    """The name of the engine that decodes what an arm's has computed."""
    return f"{arm}-{_DECODE}" if arm in PEERS else _DECODE


def engines_of(arm: str) -> tuple[str, ...]:
    """The names of an arm's own engines."""
    return (arm, decoder_of(arm)) if arm in PEERS else (arm,)


def setting_of(plan: PdPlan, facts: dict[str, Any]) -> PdSetting:
    """Tie a plan to what computes. Raises BenchError for what does not fit it."""
    memory = int(facts["memory_bytes"])
    shape = plan.shape or (SHAPES["8b"] if memory else TINY)
    tokens = plan.prompt_tokens or (15_400 if memory else _CPU_TOKENS)
    chunk = plan.chunk_tokens or (256 if memory else CPU_CHUNK_TOKENS)
    if tokens <= chunk:
        raise BenchError(f"a prompt of {tokens} tokens has no chunk of {chunk} before its last")
    arms = arms_of(plan, facts)
    if not set(arms) - set(PEERS):
        raise BenchError("no arm of kvredis' own to compare nixl with")
    if set(arms) & set(GPU_ARMS) and not memory:
        raise BenchError("there is no GPU whose memory kvredis could have (arm gpu)")
    if memory and plan.ranks > int(facts.get("devices", 0)):
        raise BenchError(f"{plan.ranks} tensor-parallel ranks need as many GPUs: there are {facts.get('devices', 0)}")
    if plan.ranks > 1 and set(arms) & set(PEERS):
        raise BenchError("the arms nixl and nixl+cross are measured with one rank alone")
    decoders = {decoder_of(arm) for arm in arms}
    setting = PdSetting(shape, chunk, arms, len(arms) + len(decoders), plan.repeats, False, facts, tokens, plan.ranks)
    each = engine_bytes(shape, tokens + ANSWER_TOKENS, plan.ranks)
    engines = setting.together if not setting.are_apart else max(len(arms), len(decoders))
    if memory and engines * each > memory * _SHARE_USED:
        raise BenchError(f"{engines} engines of shape {shape.name} take {engines * each / 1e9:.0f} GB of one GPU")
    return setting


def opening_of(setting: PdSetting, arm: str, where: Where, port: int, folder: Path) -> Opening:
    """How an arm's engine, or one that decodes, is made. They have the same model: its folder is in the keys."""
    longest = setting.tokens + ANSWER_TOKENS + 48
    is_decoder, arm = arm.endswith(_DECODE), arm.removesuffix(f"-{_DECODE}")
    words = arm if arm in PEERS else f"{LANE}+{LAYERS}" if LAYERS in arm.split("+") else LANE
    room = room_bytes(setting.shape, longest)
    connector = connector_of(words, setting.chunk_tokens, room, port, is_gpu=setting.is_gpu)
    assert connector is not None
    connector["kv_role"] = "kv_consumer" if is_decoder else "kv_producer"
    if arm not in PEERS:
        connector["kv_connector_extra_config"]["use_gpu_memory"] = is_decoder or arm in GPU_ARMS
    chunked = CHUNKED_TOKENS if setting.is_gpu else _CPU_CHUNKED
    options: dict[str, Any] = {"dtype": DTYPES[setting.shape.dtype_bytes], "max_model_len": longest}
    options["max_num_batched_tokens"] = chunked if CHUNKED in arm else max(longest, CHUNKED_TOKENS)
    if setting.is_gpu:
        share = engine_bytes(setting.shape, longest, setting.ranks) / int(setting.facts["memory_bytes"])
        options |= {"gpu_memory_utilization": round(share, 3), "max_num_seqs": 16, "attention_backend": where.backend}
        options |= launching(words, DECODING)
    else:
        options |= {"block_size": _CPU_BLOCK, "max_num_seqs": 16, "enforce_eager": True}
    if setting.ranks > 1:
        options["tensor_parallel_size"] = setting.ranks
    return Opening(
        model=str(folder / "model"),
        config=model_config(setting.shape, longest),
        connector=connector,
        options=options,
        is_lively=setting.shape == TINY,
    )


def gpu_of(setting: PdSetting, name: str) -> str | None:
    """CUDA_VISIBLE_DEVICES of an engine, its own GPU first; a reader of another engine's GPU must see that one, too."""
    if not setting.gpus:
        return None
    mine = int(setting.are_apart and name.endswith(_DECODE))
    if setting.are_apart and name.split("-")[0] in PEERS:
        return f"{mine},{1 - mine}"
    return ",".join(str(mine * setting.ranks + rank) for rank in range(setting.ranks))


def variables_of(name: str) -> dict[str, str]:
    """What else is in the environment of an engine."""
    if (arm := name.split("-")[0]) not in PEERS:
        return {}
    variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return variables | (_OLD_RUNNER if CROSS in arm else {})


class Pair:
    """The engines of one run, and what was measured of them."""

    def __init__(self, setting: PdSetting, servers: Servers, engines: dict[str, EngineProcess]) -> None:
        self.stalls = {what: Row(kind="stall", what=what, samples=[]) for what in STALLS}
        self.notes: list[str] = []
        self._setting = setting
        self._servers = servers
        self._engines = engines
        self._arms = list(setting.arms)
        kinds = [(arm, way) for arm in setting.arms for way in ways_of(arm)]
        self.rows = {(arm, way): Row(kind="handover", arm=arm, way=way, samples=[]) for arm, way in kinds}
        self._seed = 0

    def open(self, port: int, where: Where, folder: Path) -> None:
        """Make the engines, one by one: each measures what memory is free."""
        for arm in (*self._arms, _DECODE):
            with self._told(arm):
                for name in engines_of(arm):
                    self._engines[name].open(opening_of(self._setting, name, where, port, folder))
                    if arm in PEERS:
                        self._engines[name].answer_s = _PEER_ANSWER_S

    def warm_up(self) -> None:
        """Serve a prompt in every way that does not count."""
        for arm in (*self._arms, _DECODE):
            with self._told(arm):
                for name in engines_of(arm):
                    self._engines[name].first(self._next(), self._setting.tokens, ANSWER_TOKENS)
        for arm in tuple(self._arms):
            with self._told(arm):
                self._handed_over(arm, BEHIND)
        self._stalled("computed")

    def take(self, arm: str, way: str, repeat: int) -> None:
        """Measure one prompt, unless the arm has been given up."""
        if arm in self._arms:
            with self._told(arm):
                self.rows[arm, way]["samples"].append(self._handed_over(arm, way) | {"repeat": repeat})

    @contextmanager
    def _told(self, arm: str) -> Iterator[None]:
        """Give an arm of another's up when it fails, end its engines and say so: the rest can be measured without."""
        try:
            yield
        except BenchError as error:
            if arm not in PEERS:
                raise
            self.notes.append(f"Given up: {error}")
            self._arms.remove(arm)
            for name in engines_of(arm):
                self._engines[name].__exit__()

    def stall(self, what: str, repeat: int) -> None:
        """Measure a gap."""
        self.stalls[what]["samples"].append(self._stalled(what) | {"repeat": repeat})

    def _next(self) -> int:
        self._seed += 1
        return self._seed

    def _handed_over(self, arm: str, way: str) -> dict[str, Any]:
        seed, tokens = self._next(), self._setting.tokens
        prefill, decode = self._engines[arm], self._engines[decoder_of(arm)]
        forget(self._servers, LANE)
        single = decode.first(seed, tokens, ANSWER_TOKENS)
        decode.reset()
        if arm in PEERS:
            made = prefill.first(seed, tokens, 1, dict(_FOR_ANOTHER))
            told = dict(made["transfer"] or {})
            told.pop("remote_prefill_cached_tokens", None)  # newer vLLM says that of the decode engine's hits
            loaded = decode.first(seed, tokens, ANSWER_TOKENS, told)
        elif way == BEHIND:
            made = prefill.first(seed, tokens, 1)
            loaded = decode.first(seed, tokens, ANSWER_TOKENS)
        else:
            prefill.begin_first(seed, tokens, 1)
            time.sleep(_BESIDE_S)
            loaded = decode.first(seed, tokens, ANSWER_TOKENS, dict(_COMING))
            made = prefill.first_answer()
        for engine in (prefill, decode):
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
            prefill = self._engines[next(arm for arm in self._arms if arm not in PEERS)]
            prefill.first(seed, tokens, 1)
            prefill.reset()
        length, decode = 0 if what == "none" else tokens, self._engines[_DECODE]
        gap = decode.stalled(seed, length, DECODING, _STEPS if self._setting.is_gpu else _CPU_STEPS)
        decode.reset()
        return {"gap_ms": gap["gap_ms"], "hit_tokens": gap["cached_tokens"]}


def _ms(asked: Asked) -> float:
    return (asked["first_s"] - asked["asked_s"]) * 1e3


def run(plan: PdPlan, where: Where, progress: Progress) -> PdResult:
    """Measure everything in `plan`, as long as `limit_s` allows. Raises KVRedisError where an engine fails; leaves no
    process and no folder behind."""
    began_s, notes = time.monotonic(), list[str]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvbench-")))
        computing = facts_of(where, folder)
        arms = arms_of(plan, computing)
        if missing := [arm for arm in arms if arm in PEERS and not computing.get("nixl")]:
            notes.append(f"Left out, since there is no NIXL beside vLLM: {', '.join(missing)}.")
        plan = replace(plan, arms=tuple(arm for arm in arms if arm not in missing))
        setting = setting_of(plan, computing)
        notes += _notes(setting)
        room = room_bytes(setting.shape, setting.tokens + ANSWER_TOKENS)
        gpu = f"{_GPU_TIMES * room >> 20}MiB,{setting.ranks if setting.are_apart else 0}"
        flags = ("--gpu-memory", gpu) if set(setting.arms) & set(GPU_ARMS) else ()
        servers = stack.enter_context(servers_for((LANE,), room, *flags))
        facts = machine_facts()
        engines = {
            name: stack.enter_context(
                EngineProcess(name, where, folder, gpu=gpu_of(setting, name), variables=variables_of(name))
            )
            for arm in (*setting.arms, _DECODE)
            for name in engines_of(arm)
        }
        pair = Pair(setting, servers, engines)
        pair.open(servers[SUBJECT].address.port, where, folder)
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
        if flags and not int(servers[SUBJECT].facts().get("gpu_stored_bytes", 0)):
            notes.append("Nothing was written to GPU memory: what the arm gpu shows is host memory.")
    if time.monotonic() >= until_s:
        notes.append("Time was over before the last repeat.")
    result = PdResult(
        schema=SCHEMA,
        machine=facts,
        options=setting.options(
            prompt_tokens=setting.tokens,
            gpus=setting.gpus,
            tensor_parallel=setting.ranks,
            decoding=DECODING,
            nixl=setting.facts.get("nixl"),
        ),
        notes=notes + pair.notes,
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
    if not setting.are_apart:
        yield f"The engines share {'one GPU' if setting.ranks == 1 else f'{setting.ranks} GPUs'}."


def conclude(result: PdResult) -> None:
    """Fill in what follows from the samples."""
    tokens, chunk = int(result["options"]["prompt_tokens"]), int(result["options"]["chunk_tokens"])
    most = result["options"]["hit_tokens"] = tokens // chunk * chunk  # vLLM counts the last one, which it computes
    for row in result["rows"]:
        samples = cast(Sequence[Sample], row["samples"])
        row |= summed(samples, ("single_ms", "prefill_ms", "to_single"), ("handover_ms", "total_ms"))
        least = min(sample["hit_tokens"] for sample in samples)
        # NIXL's has no chunks. vLLM counts the last token, which it computes, among those that were read.
        row["hit_share"] = min(least, tokens - 1) / (tokens - 1) if row["arm"] in PEERS else least / most
        row["equal"] = sum(sample["is_equal"] for sample in samples) / len(samples)
    for row in result["stalls"]:
        row |= summed(row["samples"], (), ("gap_ms",))
        row["hit_share"] = middle([sample["hit_tokens"] for sample in row["samples"]]) / most


def gate_of(result: PdResult) -> list[GateLine]:
    """Judge every line; tokens and hits alone, but for the 8b shape on two GPUs and long prompts."""
    options, judged = result["options"], list[GateLine]()
    for row in result["rows"]:
        name = f"{row['arm']}, asked {row['way']}"
        judged.append(gate_line(f"tokens equal   {name}", "= 1", row["equal"]))
        judged.append(gate_line(f"hits           {name}", "= 1", row["hit_share"]))
    is_pair = options["gpus"] > 1 and options["tensor_parallel"] == 1
    if not is_pair or options["shape"] != "8b" or options["prompt_tokens"] < JUDGED_TOKENS:
        return judged
    for row in result["rows"]:
        name = f"{row['arm']}, asked {row['way']}"
        if (most := HANDOVER_MOST.get(row["arm"])) is not None:
            judged.append(gate_line(f"handover ms    {name}", f"<= {most:.0f}", row["handover_ms"]))
        if row["way"] == BESIDE:
            judged.append(gate_line(f"/ single       {name}", f"<= {TO_SINGLE_MOST:.2f}x", row["to_single"]))
    behind = [row for row in result["rows"] if row["way"] == BEHIND]
    ours = min((row for row in behind if row["arm"] not in PEERS), key=_handover_ms, default=None)
    theirs = min((row for row in behind if row["arm"] in PEERS), key=_handover_ms, default=None)
    if ours and theirs:
        ratio = ours["handover_ms"] / theirs["handover_ms"]
        judged.append(gate_line(f"handover       {ours['arm']} / {theirs['arm']}", f"<= {TO_PEER_MOST:.2f}x", ratio))
    for row in result["stalls"]:
        if row["what"] == "loaded":
            judged.append(gate_line("longest gap ms, loaded", f"<= {STALL_MOST_MS:.0f}", row["gap_ms"]))
    return judged


def _handover_ms(row: Row) -> float:
    return float(row["handover_ms"])


def table_lines(result: PdResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    options = result["options"]
    yield from machine_lines(result["machine"])
    nixl = f", NIXL {options['nixl']}" if options.get("nixl") else ""
    ranks = f", {options['tensor_parallel']} tensor-parallel ranks" if options["tensor_parallel"] > 1 else ""
    yield (
        f"vLLM {options['vllm']}{nixl}{ranks}, {options['gpus'] or 'no'} x {options['device']}; {options['shape']}:"
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
