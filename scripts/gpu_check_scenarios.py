"""What gpu_check.py checks: models, cases, and scenarios, each of which asks engines and says what it has found.

A scenario is a function of a Run, which has the case's server, its two engines (gpu_check_engine.py) and the answers
that were computed before anything was loaded; a new one is a line more in SCENARIOS.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from kvredis.backends.config.url import Address
from kvredis.backends.resp.connection import Connection
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.line_process import LineProcess
from kvredis.bench.core.servers import child_environment, free_port, info_lines
from kvredis.storage.errors import KVRedisError

Answer = dict[str, Any]
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
OPEN_S: Final = 200.0
"""An engine's first start on a machine, with other ones beside it."""
SERVER_S: Final = 30.0
FOUND_AGAIN_S: Final = 40.0
"""A server that is there again is used again."""
FLOOR: Final = 1e-3
"""Log-probs may deviate by so much anyhow."""
CONTROL_SHARE: Final = 20
"""In float32 log-probs may deviate by this part of what another prefix makes of them."""
TIES: Final = 4.0
"""Two tokens are as near as rounding within so many of the largest deviation that the own cache shows."""
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers that a GPU and a CPU do not share."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    vocabulary: int
    chunk: int
    chunks: int  # of a prompt
    capacity: int  # tokens that an engine's KV cache holds, where it is told in blocks
    block: int
    answer: int  # tokens generated


GPU: Final = Size(1024, 8, 8, 4, 128, 512, 8192, 256, 16, 20_480, 16, 16)
CPU: Final = Size(256, 4, 4, 2, 64, 128, 1024, 64, 5, 2560, 32, 8)


def config_of(model: str, size: Size) -> Answer:
    """Hugging Face's config.json of a model."""
    common: Answer = {
        "hidden_size": size.hidden, "intermediate_size": 2 * size.hidden, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim, "vocab_size": size.vocabulary,
        "num_hidden_layers": size.layers, "max_position_embeddings": 16_384, "rms_norm_eps": 1e-5, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 2, "rope_theta": 10_000.0, "initializer_range": 3.2 / size.hidden**0.5,
    }  # fmt: skip
    if model == "dense":
        return common | {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "tie_word_embeddings": False,
        }  # fmt: skip
    if model == "window":
        kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        return common | {
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "layer_types": kinds,
            "num_hidden_layers": len(kinds), "hidden_activation": "gelu_pytorch_tanh", "sliding_window": size.window,
            "query_pre_attn_scalar": size.head_dim, "rope_local_base_freq": 10_000.0, "embedding_scale": 0.02,
        }  # fmt: skip
    if model == "latent":
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32}
        yarn |= {"beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}  # as DeepSeek-V2 has it
        return common | {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu",
            "moe_intermediate_size": size.hidden // 2, "num_key_value_heads": size.heads, "kv_lora_rank": 512,
            "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": size.head_dim,
            "v_head_dim": size.head_dim, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "first_k_dense_replace": size.layers, "rope_scaling": yarn,
        }  # fmt: skip
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    return common | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_act": "silu",
        "num_hidden_layers": len(kinds), "layer_types": kinds, "linear_key_head_dim": size.head_dim,
        "linear_value_head_dim": size.head_dim, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        "moe_intermediate_size": size.hidden // 4, "shared_expert_intermediate_size": size.hidden // 4,
        "tie_word_embeddings": False, "partial_rotary_factor": 0.25,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """What two engines and a server are started for. The second engine has `readers` ranks, 0: as many as the first;
    both have so many `stages`, and guess `drafts` tokens ahead."""

    model: str
    mode: str
    dtype: str
    ranks: int = 1
    stages: int = 1
    readers: int = 0
    drafts: int = 0

    @property
    def name(self) -> str:
        """As --only and the table have it."""
        ranks = f" tp{self.ranks}" if self.ranks > 1 or self.readers else ""
        readers = f" to tp{self.readers}" if self.readers else ""
        stages = f" pp{self.stages}" if self.stages > 1 else ""
        drafts = f" drafts{self.drafts}" if self.drafts else ""
        return f"{self.model} {self.mode} {self.dtype}{ranks}{readers}{stages}{drafts}"

    @property
    def devices(self) -> int:
        """How many GPUs it needs."""
        return max(self.ranks, self.readers) * self.stages


EXACT, NEAR = "float32", "bfloat16"
ON_GPU: Final = "gpu"
"""How the modes begin whose server has GPU memory."""
CASES: Final = (
    *(Case("dense", mode, EXACT) for mode in ("layers", "whole", "tcp")),
    *(Case("dense", mode, EXACT, ranks=2) for mode in ("layers", "whole")),
    *(Case("dense", "whole", EXACT, ranks=ranks, readers=3 - ranks) for ranks in (2, 1)),
    Case("window", "layers", EXACT, ranks=2, readers=1),
    *(Case("dense", mode, EXACT, stages=2) for mode in ("layers", "whole")),
    *(Case("window", mode, EXACT) for mode in ("whole", "layers", "tcp")),
    *(Case("latent", mode, NEAR) for mode in ("whole", "layers", "tcp")),  # vLLM has no MLA in float32 on a GPU
    *(Case("dense", mode, NEAR) for mode in ("layers", "whole", "tcp")),
    Case("window", "whole", NEAR),
    *(Case(model, "gpu", EXACT) for model in ("dense", "window")),
    Case("dense", "gpu-layers", EXACT),
    Case("latent", "gpu", NEAR),
    Case("hybrid", "whole", NEAR),
    Case("hybrid", "whole", NEAR, drafts=2),
    Case("hybrid", "whole", NEAR, ranks=2),
)
CPU_CASES: Final = (
    *(Case(model, mode, EXACT) for model in ("dense", "window", "latent") for mode in ("layers", "whole", "tcp")),
    Case("hybrid", "whole", EXACT),
    *(Case("dense", "whole", EXACT, ranks=ranks, readers=3 - ranks) for ranks in (2, 1)),
)


def options_of(case: Case, size: Size, *, on_cpu: bool, is_second: bool = False) -> Answer:
    """vLLM's options for the first engine or the second: as few as can be."""
    made: Answer = {"dtype": case.dtype, "max_model_len": size.chunk * size.chunks + 512, "max_num_seqs": 16}
    ranks = case.readers if is_second and case.readers else case.ranks
    if ranks > 1:
        made["tensor_parallel_size"] = ranks
    if case.drafts:
        ahead = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        made["speculative_config"] = ahead | {"num_speculative_tokens": case.drafts}
    if case.stages > 1:
        made["pipeline_parallel_size"] = case.stages
    if case.model in ("dense", "window"):  # one with windows has three groups of layers, whose pages are its own
        blocks = size.capacity // size.block * (3 if case.model == "window" else 1)
        made |= {"block_size": size.block, "num_gpu_blocks_override": blocks}
    if on_cpu:
        made |= {"enforce_eager": True, "max_num_batched_tokens": 2048}
        return made | ({"block_size": 16, "attention_backend": "CPU_MLA"} if case.model == "latent" else {})
    made |= {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 2 * GIB, "enable_sleep_mode": case.dtype == EXACT}
    if case.dtype == EXACT:
        made["attention_backend"] = "TRITON_ATTN"
    # torch.compile would take longer than all of this: graphs as vLLM has them without it.
    mode = "PIECEWISE" if case.mode.endswith("layers") else "FULL"
    made["compilation_config"] = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    return made


# -- what runs ---------------------------------------------------------------------------------------------------------


class Server:
    """`kvredis serve` at one port, which can be killed and started again; with memory of GPU `device`, if that is said.
    A context manager."""

    def __init__(self, room: int, log: Path, device: int | None = None) -> None:
        self.port = free_port()
        self._room, self._log = room, log
        self._gpu = [] if device is None else ["--gpu-memory", f"{room >> 21}MiB,{device}"]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "kvredis", "serve", "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-local-cpu-size", f"{self._room >> 20}MiB", *self._gpu]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=child_environment(os.environ),
                cwd=self._log.parent, start_new_session=True,
            )  # fmt: skip
        until_s = time.monotonic() + SERVER_S
        while time.monotonic() < until_s and self._process.poll() is None:
            with suppress(KVRedisError, OSError):
                self.call(b"PING")
                return
            time.sleep(0.02)
        raise BenchError(f"no kvredis server: see {self._log}")

    def kill(self) -> None:
        """End it at once, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def call(self, *words: bytes) -> Any:
        """One command's reply."""
        with Connection.open(Address(host="127.0.0.1", port=self.port)) as connection:
            return connection.call(*words)

    def await_load(self, wait_s: float) -> bool:
        """Wait until a block is found to be loaded, but not for longer; whether one was."""
        with Connection.open(Address(host="127.0.0.1", port=self.port)) as connection:
            until_s, first = time.monotonic() + wait_s, ""
            while time.monotonic() < until_s:  # without a rest: a load is as short as a few of these questions
                told = info_lines(connection.call(b"INFO", b"kv"))
                hits = f"{told['store_hits']} {told.get('gpu_leased_blocks')}"
                first = first or hits
                if hits != first:
                    return True
        return False

    def read_on_gpu(self) -> int:
        """How many blocks have been read in its GPU memory."""
        return int(info_lines(self.call(b"INFO", b"kv")).get("gpu_leased_blocks", 0))

    def keys(self) -> list[bytes]:
        """Of all blocks."""
        return sorted(self.call(b"KEYS", b"*"))


class EngineProcess(LineProcess):
    """An engine's program, with all processes that its engine makes of it: none is left behind."""

    def __exit__(self, *_: object) -> None:
        self.kill()
        super().__exit__()

    def kill(self) -> None:
        """End all of them: an engine's core would keep its memory, and our pipe, for a while."""
        with suppress(ProcessLookupError, AssertionError):
            os.killpg(self.pid, signal.SIGKILL)

    def ask(self, do: str, wait_s: float, **told: Any) -> Answer:
        """Have it do something."""
        self.tell({"do": do, **told})
        return self.take(wait_s)

    def take(self, wait_s: float) -> Answer:
        """The answer to what it was told."""
        answer = self.answer(wait_s)
        if "error" in answer:
            raise self.failed(answer["error"])
        return answer


# -- what is found -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Finding:
    """What a scenario has shown."""

    verdict: str = PASSED
    reason: str = ""
    tokens_equal: bool | None = None
    outcome: str | None = None  # of a request whose load failed: "equal" or "error"
    cached_tokens: int | None = None  # least of the requests
    loaded_chunks: int | None = None
    failed_chunks: int | None = None
    deviation: float | None = None  # largest of the requests' mean deviations of log-probs from the cold ones
    details: Answer = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        """Note a reason; the first one stays."""
        self.reason = self.reason if self.verdict == FAILED else reason
        self.verdict = FAILED


@dataclass(frozen=True, slots=True)
class Compared:
    """One answer beside the cold one, over the tokens that the two have in common and the first one that differs."""

    same: int
    total: int
    mean: float
    most: float
    gap: float  # between the cold one's best and the token that came instead; 0 where all are the same

    @property
    def is_equal(self) -> bool:
        return self.same == self.total


def compare(cold: Mapping[str, Any], other: Mapping[str, Any]) -> Compared:
    """Compare tokens, and log-probs of the best ones."""
    apart: list[float] = []
    same, gap = 0, 0.0
    for at, token in enumerate(cold["tokens"]):
        if at >= len(other["tokens"]):
            gap = abs(cold["logprobs"][at][str(token)])
            break
        before, now = cold["logprobs"][at], other["logprobs"][at]
        # A token that is not among the other's best ones is at least as far as the last of those.
        apart += [abs(logprob - now.get(name, min(now.values()))) for name, logprob in before.items()]
        if other["tokens"][at] != token:
            gap = before[str(token)] - before.get(str(other["tokens"][at]), min(before.values()))
            break
        same += 1
    mean, most = (sum(apart) / len(apart), max(apart)) if apart else (0.0, 0.0)
    return Compared(same, len(cold["tokens"]), mean, most, gap)


class Run:
    """One case while it runs: its engines, its server, and the cold answers."""

    def __init__(self, case: Case, size: Size, open_engine: Callable[[str], EngineProcess], server: Server) -> None:
        self.case, self.size, self.server = case, size, server
        self.others: dict[Case, dict[str, Answer]] = {}  # cold answers of cases that ran before
        self.a, self.b = open_engine("a"), open_engine("b")
        self.cold: dict[str, Answer] = {}
        self.keys: dict[str, list[bytes]] = {}
        self.control_mean = 0.0  # what another prefix makes of log-probs
        self.own_mean: float | None = None  # largest of the means that the own cache shows
        self.own_most = 0.0
        self.limit_s = OPEN_S
        self.prompts: dict[str, list[int]] = {}

    @property
    def length(self) -> int:
        """Tokens of a prompt: whole chunks and a few, so that vLLM's own cache and ours find the same."""
        return self.size.chunk * self.size.chunks + 8

    def prompt(self, name: str, tokens: int | None = None, shared: tuple[str, int] | None = None) -> list[int]:
        """A prompt by its name; `shared`: its first so many tokens are all those prompts' that say the same."""
        if name not in self.prompts:
            lot = random.Random(name)
            count = tokens or self.length
            first = random.Random(shared[0]).choices(range(3, self.size.vocabulary), k=shared[1]) if shared else []
            self.prompts[name] = first + lot.choices(range(3, self.size.vocabulary), k=count - len(first))
        return self.prompts[name]

    def ask(self, names: Sequence[str], engine: EngineProcess | None = None, tokens: int | None = None) -> Answer:
        """Have prompts completed side by side."""
        prompts, count = [self.prompt(name) for name in names], tokens or self.size.answer
        return (engine or self.a).ask("generate", self.limit_s, prompts=prompts, tokens=count)

    def learn(self, names: Sequence[str], tokens: int | None = None, *, at_once: bool = False) -> None:
        """Have prompts computed, and take the answers for the right ones; note the keys they are stored under."""
        before = set(self.server.keys())
        asked = [list(names)] if at_once else [[name] for name in names]
        for each in asked:
            for name, answer in zip(each, self.ask(each, tokens=tokens)["answers"], strict=True):
                self.cold[name] = answer
            self.settle()
            now = self.server.keys()
            self.keys[each[0]] = [key for key in now if key not in before]
            before = set(now)

    def settle(self) -> None:
        """Wait until all is stored."""
        self.a.ask("settle", self.limit_s)

    def forget(self, engine: EngineProcess | None = None) -> None:
        """Wait until all is stored, and empty vLLM's own cache."""
        (engine or self.a).ask("settle", self.limit_s)
        (engine or self.a).ask("reset", self.limit_s)

    def counters(self, engine: EngineProcess | None = None) -> Answer:
        """Of the connector."""
        return (engine or self.a).ask("counters", self.limit_s)

    def measure(self, names: Sequence[str], answers: Sequence[Answer]) -> None:
        """Take in how far answers from vLLM's own cache deviate from the cold ones."""
        compared = [compare(self.cold[name], answer) for name, answer in zip(names, answers, strict=True)]
        self.own_mean = max(self.own_mean or 0.0, *(one.mean for one in compared))
        self.own_most = max(self.own_most, *(one.most for one in compared))

    def judge(
        self, found: Finding, names: Sequence[str], answers: Sequence[Answer], *, hits: bool, may_fail: bool = False
    ) -> Finding:
        """Compare answers with the cold ones; with `hits` some tokens of each must have been cached."""
        compared, errors = [], 0
        for name, answer in zip(names, answers, strict=True):
            if answer.get("finish") == "error" and may_fail:
                errors += 1
                continue
            if "tokens" not in answer or answer["finish"] == "error":
                found.fail(f"{name}: the request failed")
                continue
            one = compare(self.cold[name], answer)
            compared.append(one)
            self.judge_one(found, name, one)
            if hits and not answer["cached"]:
                found.fail(f"{name}: nothing was cached")
        if compared:
            are_equal = all(one.is_equal for one in compared)
            found.tokens_equal = are_equal and found.tokens_equal is not False
            found.deviation = max([found.deviation or 0.0, *(one.mean for one in compared)])
        if may_fail and found.verdict != FAILED:
            found.outcome = "error" if errors else "equal"
        cached: list[int] = [answer["cached"] for answer in answers if "cached" in answer]
        if cached:
            found.cached_tokens = min(cached if found.cached_tokens is None else [*cached, found.cached_tokens])
        return found

    def judge_one(self, found: Finding, name: str, one: Compared) -> None:
        """Hold one comparison against the bars."""
        allowed = 2 * (self.own_mean or 0.0) + FLOOR
        if self.case.dtype == EXACT:  # tokens decide; what other chunks and batches round varies more than one sample
            allowed = max(allowed, self.control_mean / CONTROL_SHARE)
        if one.mean > allowed:
            found.fail(f"{name}: log-probs deviate by {one.mean:.2g}, allowed are {allowed:.2g}")
        if one.is_equal or self.case.dtype != EXACT:
            return
        near = TIES * self.own_most + FLOOR
        if one.gap > near:
            found.fail(f"{name}: token {one.same} of {one.total} is another one, {one.gap:.2g} below the best")
        else:
            found.details.setdefault("ties", []).append([name, one.same, one.gap])

    def moved(self, found: Finding, before: Answer, engine: EngineProcess | None = None) -> Finding:
        """Note what was loaded since `before`, and what failed."""
        after = self.counters(engine)
        found.loaded_chunks = int(after.get("loaded_chunks", 0) - before.get("loaded_chunks", 0))
        found.failed_chunks = int(after.get("failed_chunks", 0) - before.get("failed_chunks", 0))
        found.details["loaded_bytes"] = int(after.get("loaded_bytes", 0) - before.get("loaded_bytes", 0))
        return found


# -- scenarios ---------------------------------------------------------------------------------------------------------

BASIC = tuple(f"basic-{at}" for at in range(4))
CROWD = tuple(f"crowd-{at}" for at in range(8))
HEAVY = tuple(f"heavy-{at}" for at in range(8))
DAMAGED = ("damaged-0", "damaged-1", "damaged-2")
KILLED = tuple(f"killed-{at}" for at in range(4))


def cold(run: Run) -> Finding:
    """Prompts that are new to the engine, one by one, before it has loaded anything; another prefix before the same
    last tokens must give other ones."""
    found, tail = Finding(), run.size.chunk
    run.learn(["control", *DAMAGED, *KILLED, "asleep"])
    run.prompts["other prefix"] = run.prompt("control")[:-tail] + run.prompt(BASIC[0])[-tail:]
    (other,) = run.ask(["other prefix"])["answers"]
    run.learn(BASIC)  # last, so that vLLM's own cache has them
    one = compare(run.cold[BASIC[0]], other)
    run.control_mean = one.mean
    found.details = {"control_same_tokens": one.same, "control_deviation": one.mean}
    if one.is_equal:
        found.fail("control: the tokens do not depend on the prefix, so that this case would prove nothing")
    elif len({tuple(answer["tokens"]) for answer in run.cold.values()}) < len(run.cold):
        found.fail("control: different prompts have the same answer")
    found.cached_tokens = max(answer["cached"] for answer in run.cold.values())
    if found.cached_tokens:
        found.fail("a new prompt was cached")
    first = run.others.setdefault(replace(run.case, mode=""), dict(run.cold))  # of whichever mode came first
    if run.case.dtype == EXACT:
        for name in BASIC:
            run.judge_one(found, f"{name}, beside another mode", compare(first[name], run.cold[name]))
    return found


def own(run: Run) -> Finding:
    """vLLM's own prefix cache, one by one and at once: its deviation is the measure for all others."""
    found, before = Finding(), run.counters()
    answers = [run.ask([name])["answers"][0] for name in BASIC]
    if run.moved(found, before).loaded_chunks:
        return Finding(SKIPPED, "vLLM has no prefix cache of its own for this model here")
    run.measure(BASIC, answers)
    run.measure(BASIC, run.ask(BASIC)["answers"])
    found.details["own_most"] = run.own_most
    return run.judge(found, BASIC, answers, hits=True)


def warm(run: Run) -> Finding:
    """From our store, into the same engine."""
    run.forget()
    before = run.counters()
    asked = [run.ask([name]) for name in BASIC]
    found = run.judge(Finding(), BASIC, [each["answers"][0] for each in asked], hits=True)
    found.details["seconds_each"] = [each["seconds"] for each in asked]
    return loads(run.moved(found, before))


def loads(found: Finding, *, may_fail: bool = False) -> Finding:
    """Chunks must have been loaded, and none may have failed."""
    if not found.loaded_chunks:
        found.fail("no chunk was loaded")
    if found.failed_chunks and not may_fail:
        found.fail(f"{found.failed_chunks} chunks failed")
    return found


def crowd(run: Run) -> Finding:
    """Eight at once that share a prefix, which is stored before."""
    shared = run.size.chunk * (run.size.chunks // 2)
    for name in CROWD:
        run.prompt(name, shared + 2 * run.size.chunk + 8, ("crowd", shared))
    run.learn(CROWD, at_once=True)
    if run.own_mean is not None:
        run.measure(CROWD, run.ask(CROWD)["answers"])
    run.forget()
    before = run.counters()
    found = run.judge(Finding(), CROWD, run.ask(CROWD)["answers"], hits=True)
    loads(run.moved(found, before))
    alone = run.size.chunks // 2 + 2 * len(CROWD)
    found.details["chunks_of_all"] = alone  # each once: what was loaded beyond that was loaded several times
    return found


def preemption(run: Run) -> Finding:
    """More requests than the engine has room for: vLLM takes pages away from some, cold and again from our store."""
    each = run.size.capacity // len(HEAVY) - 2 * run.size.block
    for name in HEAVY:
        run.prompt(name, each)
    answer = 5 * run.size.block
    run.learn(HEAVY, answer)
    run.forget()
    before, began = run.counters(), run.ask([BASIC[0]], tokens=1)["preemptions"]
    run.forget()
    asked = run.ask(HEAVY, tokens=answer)
    found = run.judge(Finding(), HEAVY, asked["answers"], hits=False)  # one that was preempted may be computed anew
    loads(run.moved(found, before))
    found.details["preemptions"] = asked["preemptions"] - began
    if found.verdict == PASSED and not found.details["preemptions"]:
        found.verdict, found.reason = SKIPPED, "vLLM has preempted no request of this model"
    return found


def abort(run: Run) -> Finding:
    """A request is aborted while it loads; others, and the same prompt, are served then."""
    found = Finding()
    run.forget()
    first_s = run.ask([BASIC[1]], tokens=1)["seconds"]
    for share in (0.0, 0.2, 0.4, 0.6, 0.8):
        run.forget()
        run.a.ask("abort", run.limit_s, prompt=run.prompt(BASIC[1]), after_s=share * first_s)
        for names in ([BASIC[2]], [BASIC[1], BASIC[3]]):
            run.judge(found, names, run.ask(names)["answers"], hits=True)
    return found


def damaged(run: Run, name: str, which: str) -> Finding:
    """Some of a prompt's stored blocks are damaged: the request is right or fails, and what is stored then is right."""
    run.forget()
    keys = run.keys[name]
    if not keys:
        return Finding(FAILED, "nothing was stored")
    chosen = {"one": keys[-1:], "some": keys[::2], "all": keys}[which]  # in no order: keys are digests
    for key in chosen:
        length = int(run.server.call(b"STRLEN", key))
        at = length - 200 if which == "one" else length // 2
        run.server.call(b"SETRANGE", key, str(at).encode(), b"?" * 100)
    before = run.counters()
    found = run.judge(Finding(), [name], run.ask([name])["answers"], hits=False, may_fail=True)
    run.moved(found, before)
    if not found.failed_chunks and (which != "one" or run.case.model != "window"):
        found.fail("no load failed: this check has checked nothing")
    run.forget()
    run.judge(found, [name], run.ask([name])["answers"], hits=False)
    if found.verdict == PASSED and not found.failed_chunks:
        found.verdict, found.reason = SKIPPED, "the block is none that a hit needs: it is behind its window"
    return found


def fresh(run: Run) -> Finding:
    """Another process, which has computed none of it, finds what the first one stored, after damage too."""
    run.settle()
    before, found = run.counters(run.b), Finding()
    for name in (*BASIC, *DAMAGED, "control"):
        run.judge(found, [name], run.ask([name], run.b)["answers"], hits=name in BASIC)
    if CROWD[0] in run.cold:
        run.judge(found, CROWD, run.ask(CROWD, run.b)["answers"], hits=True)
    run.moved(found, before, run.b)
    return loads(found, may_fail=True)  # of a window model blocks may be damaged still that no request has needed


def sleep(run: Run) -> Finding:
    """Asleep and awake again: idle, with stores under way, with vLLM's own cache and without."""
    found = Finding()
    found.details |= run.a.ask("sleep", run.limit_s)
    run.judge(found, BASIC[:2], [run.ask([name])["answers"][0] for name in BASIC[:2]], hits=True)  # nothing is lost
    run.forget()
    before = run.counters()
    run.judge(found, BASIC[:2], [run.ask([name])["answers"][0] for name in BASIC[:2]], hits=True)
    loads(run.moved(found, before))
    run.cold["asleep at once"] = run.ask(["asleep at once"])["answers"][0]
    run.a.ask("sleep", run.limit_s)
    for _ in range(2):
        run.judge(found, ["asleep at once"], run.ask(["asleep at once"])["answers"], hits=False)
        run.forget()
    return run.judge(found, ["asleep"], run.ask(["asleep"])["answers"], hits=True)


def killed_before(run: Run) -> Finding:
    """The server is killed while nothing is under way: all is computed."""
    run.forget()
    run.server.kill()
    found = run.judge(Finding(), BASIC[:2], run.ask(BASIC[:2])["answers"], hits=False)
    return run.judge(found, [BASIC[2]], run.ask([BASIC[2]])["answers"], hits=False)


def again(run: Run) -> None:
    """Start the server anew, and wait until all ranks use it again."""
    run.server.kill()
    run.server.start()
    until_s, number, stored = time.monotonic() + FOUND_AGAIN_S, 0, 0
    while stored < run.case.ranks * run.case.stages * run.size.chunks:  # of one prompt: a rank alone stores others, too
        if time.monotonic() > until_s:
            raise BenchError(f"the server is not used again within {FOUND_AGAIN_S:.0f} s")
        before, number = len(run.server.keys()), number + 1
        run.prompts["again"] = random.Random(f"again {number}").choices(range(3, 1000), k=run.length)
        run.ask(["again"], tokens=1)
        run.settle()
        stored = len(run.server.keys()) - before


def killed_during(run: Run) -> Finding:
    """The server is killed as soon as four prompts begin to load, and a while later: each is right or fails, and what
    is stored then is right. On the same host loads that have begun may end all the same: the memory stays."""
    found = Finding()
    tries: list[tuple[float, bool, int, int]] = []
    again(run)
    run.forget()
    run.ask(KILLED)
    run.forget()
    first_s = run.ask(KILLED, tokens=1)["seconds"]
    for share in (0.0, 0.2, 0.5):
        run.forget()
        before = run.counters()
        prompts = [run.prompt(name) for name in KILLED]
        run.a.tell({"do": "generate", "prompts": prompts, "tokens": run.size.answer})
        has_begun = run.server.await_load(2 * first_s)
        time.sleep(share * first_s)
        run.server.kill()
        answers = run.a.take(run.limit_s)["answers"]
        run.judge(found, KILLED, answers, hits=False, may_fail=True)
        run.moved(found, before)
        tries.append((share, has_begun, found.loaded_chunks or 0, found.failed_chunks or 0))
        again(run)
        run.forget()
        # What was computed while the server was away is not stored; from here on it is.
        for _ in range(2):
            run.judge(found, KILLED, run.ask(KILLED)["answers"], hits=False)
            run.forget()
    found.details["tries"] = tries  # when, whether a load had begun, chunks loaded and failed
    found.failed_chunks = sum(failed for *_, failed in tries)
    if found.verdict == PASSED and not found.failed_chunks:
        found.reason = "no load failed: those that had begun ended"
    return found


def fresh_after_kill(run: Run) -> Finding:
    """The other process finds what was stored after the kill, and it is right."""
    run.settle()
    run.forget(run.b)
    before, found = run.counters(run.b), Finding()
    for name in KILLED:
        run.judge(found, [name], run.ask([name], run.b)["answers"], hits=True)
    return loads(run.moved(found, before, run.b))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A row of each case. `needs`: "gpu"; `exact`: in float32 alone, and for models that have no float32."""

    name: str
    do: Callable[[Run], Finding]
    limit_s: float = 30.0
    needs: str = ""
    exact: bool = False


SCENARIOS: Final = (
    Scenario("cold", cold, 60),
    Scenario("own cache", own),
    Scenario("warm", warm),
    Scenario("8 at once", crowd, 60),
    Scenario("damaged: one block", partial(damaged, name=DAMAGED[0], which="one")),
    Scenario("damaged: some blocks", partial(damaged, name=DAMAGED[1], which="some")),
    Scenario("damaged: all blocks", partial(damaged, name=DAMAGED[2], which="all")),
    Scenario("fresh process", fresh, 60),
    Scenario("abort in a load", abort, 60, exact=True),
    Scenario("preemption", preemption, 90, exact=True),
    Scenario("sleep and wake", sleep, 60, needs="gpu", exact=True),
    Scenario("killed before a load", killed_before, 60, exact=True),
    Scenario("killed in a load", killed_during, 120, exact=True),
    Scenario("fresh after kill", fresh_after_kill, 60, exact=True),
)


def left_out(scenario: Scenario, case: Case, *, on_cpu: bool) -> str | None:
    """Why a scenario is not for a case; None where it is. An empty reason: it is not even a row."""
    if scenario.needs == "gpu" and on_cpu:
        return "vLLM on a CPU cannot"
    if scenario.needs == "gpu" and case.dtype != EXACT:
        return ""  # engines sleep where their cases ask for it
    if scenario.exact and case.dtype != EXACT and case.model != "latent":
        return ""
    return None
