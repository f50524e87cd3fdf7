"""How does `kvredis bench vllm` get its engines? An arm's settings in vLLM's words, a child process that has such one,
and rounds of them, open together and served in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, cast

from kvredis.backends.resp.connection import Connection
from kvredis.bench.core.compute import WIDTHS
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.line_process import LineProcess
from kvredis.bench.core.result import Progress
from kvredis.bench.core.servers import (
    BASELINE,
    RECIPES,
    SUBJECT,
    Recipe,
    ServerProcess,
    child_environment,
    kvredis_recipe,
    roomy,
)
from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.core.statistics import rotated

from .worker import Asked, Opening, Served, Stalled, Together

NONE, OFFLOADING, MEMORY, LANE, TCP = "none", "offloading", "memory", "lane", "tcp"
NIXL = "nixl"
LAYERS, AUTO, CROSS = "layers", "auto", "cross"
LMCACHE: Final = "lmcache"
LMCACHE_ARMS: Final = (LMCACHE, f"{LMCACHE}+{BASELINE}", f"{LMCACHE}+{SUBJECT}")
"""LMCache's own connector: its CPU tier, as its page of that configures it, or a server alone behind its native client
(`resp://`, the faster of the two that its pages have for Redis)."""
OURS: Final = (LANE, TCP)
REFERENCES: Final = (NONE, OFFLOADING)
"""What others are compared with: open beside each of them where there is room; LMCache's beside OURS."""

ANSWER_S: Final = 240.0
_GIB: Final = 1 << 30
_BESIDE_BYTES: Final = 8 * _GIB  # activations of the longest prompt, in one pass, and what libraries take
PREFAULT_THREADS: Final = 8
_GRAPH_TOKENS: Final = (1, 8, 16, 48, 256)
"""Of a pass that is a graph at most: what is left of a prompt that is a hit, and a chunk."""

TINY: Final = ModelShape("tiny", layers=4, kv_heads=2, head_dim=64, dtype_bytes=4)
"""Of the model that stands in where there is no GPU; its numbers are exact enough for tokens to be equal."""
DTYPES: Final = {2: "bfloat16", 4: "float32"}
_WIDTHS: Final = WIDTHS | {TINY.name: (256, 4, 512)}
_VOCABULARY: Final = {"8b": 128_256, TINY.name: 1024}
_VOCABULARY_ELSE: Final = 152_064
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONUNBUFFERED": "1",
}
_LMCACHE_ENVIRONMENT: Final = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"} | {
    "VLLM_USE_V2_MODEL_RUNNER": "0"  # whose graphs have no forward context, without which LMCache 0.5.3 loads nothing
}
_REDIS_IO_THREADS: Final = 4
"""As LMCache's page of RESP has it."""
_BREAKS: Final = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
"""From 0.26 on; older ones launch kernels one by one then."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where vLLM is: the interpreter, and a folder of packages put before its own ("" for none). `logs` is where what
    the engines print is kept, a file an arm; `backend` the attention on a GPU."""

    python: str
    site: str = ""
    logs: Path | None = None
    backend: str = "FLASH_ATTN"


def model_config(shape: ModelShape, tokens: int) -> dict[str, Any]:
    """Hugging Face's config.json of a Llama of that shape; BenchError for one whose widths are not known."""
    if shape.name not in _WIDTHS or shape.dtype_bytes not in DTYPES:
        raise BenchError(f"no model of shape {shape.name} to compute with; there are {', '.join(_WIDTHS)}")
    hidden, heads, intermediate = _WIDTHS[shape.name]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": DTYPES[shape.dtype_bytes],
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "max_position_embeddings": max(tokens, 4096), "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1, "attention_bias": False,
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": _VOCABULARY.get(shape.name, _VOCABULARY_ELSE),
    }  # fmt: skip


def weight_bytes(shape: ModelShape) -> int:
    """What a model's weights take, two bytes each."""
    hidden, heads, intermediate = _WIDTHS[shape.name]
    attention = 2 * hidden * (heads + shape.kv_heads) * shape.head_dim
    vocabulary = _VOCABULARY.get(shape.name, _VOCABULARY_ELSE)
    return 2 * (shape.layers * (attention + 3 * hidden * intermediate) + 2 * vocabulary * hidden)


def engine_bytes(shape: ModelShape, tokens: int, ranks: int = 1) -> int:
    """What an engine takes of each of its GPUs: weights, KV of three of the longest prompts, and what else there is."""
    return (weight_bytes(shape) + 3 * shape.block_bytes(tokens)) // ranks + _BESIDE_BYTES


def room_bytes(shape: ModelShape, tokens: int) -> int:
    """What a tier is given: twice the KV of the longest prompt, in whole GiB."""
    return (2 * shape.block_bytes(tokens) // _GIB + 1) * _GIB


def connector_of(arm: str, chunk_tokens: int, room: int, port: int, *, is_gpu: bool) -> dict[str, Any] | None:
    """vLLM's kv_transfer_config of an arm; None where it has no connector. `port` is the server's."""
    kind, *words = arm.split("+")
    if kind == NONE:
        return None
    if kind == OFFLOADING:
        extra: dict[str, Any] = {"cpu_bytes_to_use": room, "block_size": chunk_tokens}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if kind == NIXL:
        extra = {"enable_cross_layers_blocks": CROSS in words}
        return {
            "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }  # fmt: skip
    if kind == LMCACHE:
        given: dict[str, Any] = {
            "chunk_size": chunk_tokens,
            "local_cpu": not words,
            "max_local_cpu_size": float(room // _GIB),
        } | ({"use_gpu_connector_v3": True} if is_gpu else {})  # version 2 copies half of vLLM 0.26's KV
        if words:  # its memory is then where a prompt passes through, and keeps nothing
            given |= {"remote_url": f"resp://127.0.0.1:{port}", "extra_config": {"save_chunk_meta": False}}
        extra = {f"lmcache.{name}": value for name, value in given.items()}
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    extra = {"chunk_size": chunk_tokens, "max_local_cpu_size": f"{room // _GIB}GB", "local_cpu": kind == MEMORY}
    if kind in (LANE, TCP):
        extra["remote_url"] = f"{'kvredis' if kind == LANE else 'redis'}://127.0.0.1:{port}"
    if is_gpu:
        extra |= {"prefault": min(os.cpu_count() or 1, PREFAULT_THREADS), "page_lock": True}
    extra |= {"use_layerwise": LAYERS in words}
    if AUTO in words:
        extra["min_retrieve_tokens"] = "auto"
    return {
        "kv_connector": "KVRedisConnector", "kv_connector_module_path": "kvredis.adapters.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
    }  # fmt: skip


def launching(arm: str, requests: int = 1) -> dict[str, Any]:
    """vLLM's options for short passes as CUDA graphs, as it has them by default, but without torch.compile, which every
    engine would wait for; so many requests that decode are a graph, too. A whole graph leaves the hooks of single
    layers out; another kind, which breaks off for attention, calls them (_BREAKS)."""
    mode = "PIECEWISE" if LAYERS in arm else "FULL"
    sizes = sorted({*_GRAPH_TOKENS, requests})
    return {"compilation_config": {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}}


def facts_of(where: Where, folder: Path, arms: Sequence[str] = ()) -> dict[str, Any]:
    """What computes: `device`, `memory_bytes` of a GPU (0 without one), versions of `vllm` and `torch`, and of
    `lmcache` where one of the arms needs it. BenchError where there is no vLLM, or no LMCache that can serve."""
    has_lmcache = any(arm in LMCACHE_ARMS for arm in arms)
    command = [where.python, "-m", "kvredis.bench.vllm.worker", "--facts", *[f"--{LMCACHE}"] * has_lmcache]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=_environment(where), cwd=folder, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"cannot run {where.python}: {error}") from error
    if done.returncode:
        raise BenchError(f"vLLM cannot be loaded (--python, --site): {done.stderr.strip().splitlines()[-1:]}")
    facts: dict[str, Any] = json.loads(done.stdout)
    if said := facts.get("lmcache_error"):
        raise BenchError(f"LMCache cannot be loaded beside vLLM (--python, --site): {said}")
    if facts["memory_bytes"] and not facts.get("lmcache_compiled", True):
        raise BenchError(
            f"LMCache {facts['lmcache']} cannot load its compiled kernels beside torch {facts['torch']}, and would be"
            " slower than it is: take the LMCache that was built with that torch"
        )
    return facts


def _environment(where: Where) -> dict[str, str]:
    environment = child_environment(os.environ) | _ENVIRONMENT
    paths = [path for path in (where.site, environment["PYTHONPATH"]) if path]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


class EngineProcess(LineProcess):
    """One vLLM in a process of its own; a context manager. It is loaded from the beginning on, `open` makes the engine.

    Raises BenchError, with the end of what the process printed, for whatever goes wrong in it.
    """

    def __init__(
        self, arm: str, where: Where, folder: Path, gpu: str | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """With `gpu` (CUDA_VISIBLE_DEVICES) it sees no other one; `variables` are of its environment, too."""
        self.arm = arm
        command = [where.python, "-m", "kvredis.bench.vllm.worker"]
        log = (where.logs or folder) / f"vllm-{arm.replace('+', '-')}.log"
        # In that folder: `python -m` looks where it stands first.
        environment = _environment(where) | (_BREAKS if LAYERS in arm else {}) | dict(variables or {})
        if arm in LMCACHE_ARMS:
            environment |= _LMCACHE_ENVIRONMENT
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        super().__init__(f"the engine of {arm}", command, environment, folder=folder, log=log)
        self.answer_s = ANSWER_S
        """An engine that has not answered by then has failed."""

    def open(self, told: Opening) -> None:
        """Make the engine."""
        self._ask(cast(dict[str, Any], told))

    def measure(self, seed: int, tokens: int, answer: int = 0) -> Served:
        """Have a prompt served."""
        return cast(Served, self._ask({"do": "measure", "seed": seed, "tokens": tokens, "answer": answer}))

    def together(self, **asked: int) -> Together:
        """Have many prompts served at once; `asked` is what vllm_worker.Engine.together takes."""
        return cast(Together, self._ask({"do": "together", **asked}))

    def first(self, seed: int, tokens: int, answer: int, transfer: dict[str, Any] | None = None) -> Asked:
        """Have a prompt served once; `transfer` is kv_transfer_params for it."""
        self.begin_first(seed, tokens, answer, transfer)
        return self.first_answer()

    def begin_first(self, seed: int, tokens: int, answer: int, transfer: dict[str, Any] | None = None) -> None:
        """Ask for it, and wait for nothing."""
        self.tell({"do": "first", "seed": seed, "tokens": tokens, "answer": answer, "transfer": transfer})

    def first_answer(self) -> Asked:
        """What becomes of that."""
        return cast(Asked, self._answered())

    def stalled(self, seed: int, tokens: int, count: int, steps: int) -> Stalled:
        """Have `count` requests decode while a long prompt comes."""
        asked = {"do": "stalled", "seed": seed, "tokens": tokens, "count": count, "steps": steps}
        return cast(Stalled, self._ask(asked))

    def reset(self) -> None:
        """Wait until all is stored, and empty vLLM's own cache."""
        self._ask({"do": "reset"})

    def forget(self) -> None:
        """Empty LMCache's CPU tier."""
        self._ask({"do": "forget"})

    def counters(self) -> dict[str, float]:
        """Of our connector."""
        return self._ask({"do": "counters"})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.tell(message)
        return self._answered()

    def _answered(self) -> dict[str, Any]:
        answer = self.answer(self.answer_s)
        if "error" in answer:
            raise self.failed(answer["error"])
        return answer


@dataclass(frozen=True, slots=True)
class Setting:
    """A plan with its open ends tied to what there is to compute on; `facts` are the worker's."""

    shape: ModelShape
    chunk_tokens: int
    arms: tuple[str, ...]
    together: int
    repeats: int
    eager: bool
    facts: dict[str, Any]

    @property
    def is_gpu(self) -> bool:
        """Whether there is one."""
        return bool(self.facts["memory_bytes"])

    @property
    def has_graphs(self) -> bool:
        """Whether short passes are CUDA graphs."""
        return self.is_gpu and not self.eager

    def options(self, **more: Any) -> dict[str, Any]:
        """Give what a reader must know to repeat it."""
        return {
            "shape": self.shape.name,
            "bytes_per_token": self.shape.bytes_per_token(),
            "chunk_tokens": self.chunk_tokens,
            **more,
            "arms": list(self.arms),
            "repeats": self.repeats,
            "together": self.together,
            "graphs": self.has_graphs,
            **{name: self.facts[name] for name in ("device", "vllm", "torch", LMCACHE) if name in self.facts},
        }


def rounds(arms: Sequence[str], together: int) -> list[list[str]]:
    """Which arms are open at a time: what is compared with beside some of the others, where there is room for that.
    LMCache's are compared with ours, all others with vLLM's."""
    beside_all = OURS if any(arm in LMCACHE_ARMS for arm in arms) else REFERENCES
    fixed = [arm for arm in arms if arm in beside_all]
    others = [arm for arm in arms if arm not in beside_all]
    if not others or len(fixed) >= together:
        return [list(arms[at : at + together]) for at in range(0, len(arms), together)]
    beside = together - len(fixed)
    return [[*fixed, *others[at : at + beside]] for at in range(0, len(others), beside)]


class Work(Protocol):
    """What engines are measured by, turn by turn."""

    @property
    def turns(self) -> Sequence[int]:
        """Of a repeat: tokens of the prompts."""
        ...

    def opening(self, arm: str, folder: Path) -> Opening:
        """How an arm's engine is made. `folder` is the model's, and so in the keys: arms find nothing of others'."""
        ...

    def warm_up(self, engine: EngineProcess) -> None:
        """Have it serve something that does not count."""
        ...

    def take(self, engine: EngineProcess, turn: int, repeat: int, place: int) -> None:
        """Measure; `place` is the same for what ran in the same repeat of the same round."""
        ...


def server_of(arm: str) -> str | None:
    """The server behind an arm, by its name in RECIPES."""
    kind, *words = arm.split("+")
    if kind == LMCACHE:
        return words[0] if words else None
    return SUBJECT if kind in OURS else None


def _recipe(name: str, room: int, *flags: str) -> Recipe:
    if name == SUBJECT:
        return kvredis_recipe("vllm", "--max-local-cpu-size", f"{room >> 20}MiB", *flags)
    redis = roomy(RECIPES[name], 2 * room)  # which counts what clients are sending, and would evict for it
    plain, threads = redis.arguments, str(min(os.cpu_count() or 1, _REDIS_IO_THREADS))
    return replace(redis, arguments=lambda at, folder: [*plain(at, folder), "--io-threads", threads])


Servers = Mapping[str, ServerProcess]
"""Those that run, by their names in RECIPES."""


@contextmanager
def servers_for(arms: Sequence[str], room: int, *flags: str) -> Iterator[Servers]:
    """Run the servers that the arms need, each with room for so many bytes; kvredis with more `flags`."""
    with ExitStack() as stack:
        names = dict.fromkeys(name for arm in arms if (name := server_of(arm)) is not None)
        yield {name: stack.enter_context(ServerProcess(_recipe(name, room, *flags), "tcp")) for name in names}


def port_of(servers: Servers, arm: str) -> int:
    """The port of the server behind an arm, 0 where there is none."""
    name = server_of(arm)
    return 0 if name is None else servers[name].address.port


def forget(servers: Servers, arm: str, engine: EngineProcess | None = None) -> None:
    """Empty the server behind an arm that uses one, so that it need not be larger than for one, and the CPU tier of an
    `engine` whose LMCache has it."""
    if (name := server_of(arm)) is not None:
        with Connection.open(servers[name].address) as connection:
            connection.call(b"FLUSHALL")
    elif arm in LMCACHE_ARMS and engine is not None:
        engine.forget()


class Rounds:
    """The engines of one round after the other; nothing more is begun after `until_s` (time.monotonic)."""

    def __init__(self, work: Work, setting: Setting, where: Where, until_s: float) -> None:
        self.counters: dict[str, dict[str, float]] = {}
        """Of our connector, by arm."""
        what = "Weights are vLLM's dummy ones: what is generated depends little on the KV."
        if not setting.is_gpu:
            what = "There is no GPU: a tiny model computes on the CPU, and its figures say nothing of others."
        self.notes = [what]
        self._work, self._setting, self._where, self._until_s = work, setting, where, until_s

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._until_s

    def serve(self, folder: Path, progress: Progress) -> None:
        """Serve all arms, so many together as there is room for."""
        for number, arms in enumerate(rounds(self._setting.arms, self._setting.together)):
            if self._is_over:
                self.notes.append(f"There was no time for {', '.join(arms)}.")
                continue
            with ExitStack() as stack:
                loading = [stack.enter_context(EngineProcess(arm, self._where, folder)) for arm in arms]
                engines = self._opened(number, loading, folder)
                if self._measured(number, engines, progress):
                    for arm, engine in engines.items():
                        if counters := engine.counters():
                            self.counters[arm] = counters

    def _opened(self, number: int, loading: Sequence[EngineProcess], folder: Path) -> dict[str, EngineProcess]:
        """One by one: each measures what memory is free."""
        engines = {}
        for engine in loading:
            if self._is_over:
                break
            try:
                engine.open(self._work.opening(engine.arm, folder / f"{engine.arm}-{number}"))
                self._work.warm_up(engine)
                engines[engine.arm] = engine
            except BenchError as error:
                self.notes.append(f"Left out: {error}")
        return engines

    def _measured(self, number: int, engines: dict[str, EngineProcess], progress: Progress) -> bool:
        """Whether there was time for all repeats; an engine that fails is given up."""
        for repeat in range(self._setting.repeats):
            for turn in self._work.turns:
                for arm in rotated(list(engines), repeat):
                    if self._is_over:
                        self.notes.append(f"Time was over in repeat {repeat + 1} of {', '.join(engines)}.")
                        return False
                    progress(f"{arm}, {turn} tokens")
                    try:
                        self._work.take(engines[arm], turn, repeat, number * self._setting.repeats + repeat)
                    except BenchError as error:
                        self.notes.append(f"Given up: {error}")
                        del engines[arm]
        return True
