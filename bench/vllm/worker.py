"""One process of `kvredis bench vllm`: a vLLM engine that serves the prompts it is told to.

A line of JSON on stdin is a request, a line on stdout its answer, or {"error": text}; the first request is an Opening.
With --facts it says what computes, with --lmcache also which LMCache is there, and ends. vLLM is loaded here alone, in
whichever version the interpreter has.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, Final, TypedDict, cast

from kvredis.backends.config.url import Address
from kvredis.backends.resp.connection import Connection

RESETS_MAX: Final = 100
SETTLE_S: Final = 60.0
_POLL_S: Final = 0.01
_SHORT_TOKENS: Final = 40
_SETTLED_STEPS: Final = 8  # of a request that decodes, before its steps are timed
_BATCHES: Final = 1000  # the first seed of prompts that are served at once
_SPREAD, _APART = 7919, 104_729  # primes
_THERE_SHARE: Final = 0.98  # of a token's KV: some of its elements are zero
_COUNTED_TOGETHER: Final = 1 << 28  # elements: counting takes a byte for each
_LIVELY: Final = 300.0  # vLLM's dummy weights are within 0.001 of 0: what comes out hardly depends on what goes in


class Opening(TypedDict):
    """What an engine is opened with."""

    model: str  # the folder, which is made
    config: dict[str, Any]  # Hugging Face's config.json
    connector: dict[str, Any] | None  # vLLM's kv_transfer_config
    options: dict[str, Any]  # of vllm.LLM
    is_lively: bool  # weights that make every token depend on those before: small models only


class Served(TypedDict):
    """One prompt: computed, again from vLLM's own cache, and again without that. Milliseconds to the first token."""

    cold_ms: float
    own_ms: float
    warm_ms: float | None  # None without a connector
    own_tokens: int  # hits
    warm_tokens: int
    own_bytes: int  # loaded by our connector
    warm_bytes: int
    stored_bytes: int
    answers: list[list[int]]  # tokens generated: cold, own and warm; where asked for, a longer answer


class Asked(TypedDict):
    """One prompt that was served once. Times are of time.monotonic, which all processes of a host share."""

    asked_s: float
    first_s: float  # when its first token was there
    cached_tokens: int
    answer: list[int]
    transfer: dict[str, Any] | None  # kv_transfer_params of the output


class Stalled(TypedDict):
    """Requests that decode while a long prompt comes."""

    gap_ms: float  # the longest between two of their tokens, from when the prompt had come on
    cached_tokens: int  # of the prompt


class Batch(TypedDict):
    """Requests that were served at once."""

    rate: float  # requests a second until all were answered; of a step that moves nothing tokens a second
    cached_tokens: int  # of all prompts
    loaded_bytes: int  # by our connector
    answers: list[list[int]]


class Together(TypedDict):
    """Batches by their kind: "cold", "stored", "half" and "step"."""

    batches: dict[str, Batch]


class Ranks:
    """The worker's halves of our connector in processes of their own."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def settle(self, wait_s: float) -> bool:
        """Whether all of them have stored everything within so many seconds."""
        return all(self._llm.collective_rpc(settled, args=(wait_s,)))

    @property
    def counters(self) -> dict[str, float]:
        """Of all ranks together."""
        ranks = self._llm.collective_rpc(counted)
        return {name: sum(rank.get(name, 0.0) for rank in ranks) for name in ranks[0]}


class LMCache:
    """The worker's half of LMCache's connector in this process."""

    counters: Final[dict[str, float]] = {}
    """Of our connector alone."""

    def __init__(self, connector: Any, extra: Mapping[str, Any]) -> None:
        """`extra` is its kv_connector_extra_config. Raises RuntimeError where it has come up without an engine, and
        would be no cache: it only logs that."""
        self._engine: Any = connector._lmcache_engine.lmcache_engine
        if self._engine is None:
            raise RuntimeError("LMCache has no engine: what it printed says why")
        self._chunk_tokens, self._chunks = int(extra["lmcache.chunk_size"]), 0
        host, _, port = extra.get("lmcache.remote_url", "").removeprefix("resp://").rpartition(":")
        self._server = Address(host=host, port=int(port)) if host else None

    def expect(self, prompt: list[int]) -> None:
        """Say what is to be stored; the server is empty but for that."""
        self._chunks = len(prompt) // self._chunk_tokens

    def settle(self, wait_s: float) -> bool:
        """Whether all of that is stored within so many seconds. Its memory has it with the step. It does not say what
        it still sends to a server, and a question to it may be lost: its client notes down who asks only after it has
        asked (0.5.6). So the server is asked, which has a key for each chunk."""
        if self._server is None:
            return True
        until_s = time.monotonic() + wait_s
        with Connection.open(self._server) as connection:
            while cast(int, connection.call(b"DBSIZE")) < self._chunks:
                if time.monotonic() > until_s:
                    return False
                time.sleep(_POLL_S)
        return True

    def forget(self) -> None:
        """Empty its memory."""
        self._engine.clear(locations=["LocalCPUBackend"])


def tell_layout() -> None:
    """Have LMCache learn how vLLM lays KV out before it opens its stores. WHY: vLLM keeps K and V of a head side by
    side since 0.26. LMCache 0.5.6 copies that right by its connector to GPUs of version 3, which learns of it with the
    first chunk that is stored: too late for that chunk's shape, and for the client of a server, which keeps the shape
    of older layouts. Half of each token's KV was copied then."""
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

    register = LMCacheConnectorV1.register_kv_caches

    def learn(self: Any, kv_caches: Mapping[str, Any]) -> None:
        connector = self._lmcache_engine.lmcache_engine.gpu_connector
        if hasattr(connector, "group_kv_cache_pointers_on_gpu"):  # version 3
            connector.initialize_kvcaches_ptr(kvcaches=list(kv_caches.values()))
            connector._initialize_kv_cache_pointers()
        keep_answers()  # no sooner: vLLM cannot begin where its package is loaded already
        register(self, kv_caches)

    LMCacheConnectorV1.register_kv_caches = learn


def keep_answers() -> None:
    """Have LMCache's native client note down who asks for keys before an answer is handed out. WHY: LMCache (0.5.6 and
    0.5.7rc2) asks first. An answer that comes between is lost, the thread that looks prompts up waits for ever, and
    each prompt from then on takes 3 s longer and finds nothing."""
    from lmcache.v1.storage_backend.native_clients.connector_client_base import ConnectorClientBase

    held, on_ready = threading.Lock(), ConnectorClientBase._on_ready

    def hand_out(self: Any) -> None:
        with held:
            on_ready(self)

    def batch_exists_sync(self: Any, keys: list[str]) -> Any:
        with held:
            answer = self._register_future_sync("batch_exists", int(self._client.submit_batch_exists(keys)))
        return answer.result()

    ConnectorClientBase._on_ready, ConnectorClientBase.batch_exists_sync = hand_out, batch_exists_sync


def settled(_worker: Any, wait_s: float) -> bool:
    """Asked within a worker: whether its connector has stored everything within so many seconds. It names nothing of
    this file, which may be another process' main module."""
    from vllm.distributed import kv_transfer

    if not kv_transfer.has_kv_transfer_group():
        return True
    return bool(kv_transfer.get_kv_transfer_group().settle(wait_s))


def counted(_worker: Any) -> dict[str, float]:
    """Asked within a worker: its connector's counters."""
    from vllm.distributed import kv_transfer

    if not kv_transfer.has_kv_transfer_group():
        return {}
    return {name: float(value) for name, value in kv_transfer.get_kv_transfer_group().counters.items()}


class Engine:
    """The engine that is open."""

    def __init__(self, told: Opening) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        folder = Path(told["model"])
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"config.json.{os.getpid()}"
        written.write_text(json.dumps(told["config"]))
        written.replace(folder / "config.json")  # another engine may be reading it
        options = dict(told["options"])
        if told["connector"] is not None:
            options["kv_transfer_config"] = KVTransferConfig(**told["connector"])
        self._vocabulary = int(told["config"]["vocab_size"]) - 8
        if told["connector"] is not None and told["connector"]["kv_connector"] == "LMCacheConnectorV1":
            tell_layout()
        self._llm: Any = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=True, **options,
        )  # fmt: skip
        if told["is_lively"]:
            self._llm.apply_model(enliven)
        self._number = 0
        self._has_connector = told["connector"] is not None
        self._ours: Any = None
        self._is_one = int(options.get("tensor_parallel_size", 1)) == 1
        """Whether its worker is in this process."""
        if not self._is_one:
            connector = told["connector"] or {}
            self._ours = Ranks(self._llm) if connector.get("kv_connector") == "KVRedisConnector" else None
        elif self._has_connector:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            group = get_kv_transfer_group()
            self._ours = group if hasattr(group, "settle") else None
            if told["connector"] is not None and told["connector"]["kv_connector"] == "LMCacheConnectorV1":
                self._ours = LMCache(group, told["connector"]["kv_connector_extra_config"])

    def measure(self, seed: int, tokens: int, answer: int) -> Served:
        """Serve one prompt that is new to the engine three times; with `answer` tokens generated a fourth time."""
        prompt, stored = self._prompt(seed, tokens), self._counter("stored_bytes")
        cold_ms, cold, first = self._generate(prompt, 1)
        if cold:
            raise RuntimeError(f"{cold} tokens of a new prompt were a hit")
        if isinstance(self._ours, LMCache):
            self._ours.expect(prompt)
        self._settle()
        stored, loaded = self._counter("stored_bytes") - stored, self._counter("loaded_bytes")
        own_ms, own, second = self._generate(prompt, 1)
        own_bytes, loaded = self._counter("loaded_bytes") - loaded, self._counter("loaded_bytes")
        made = Served(
            cold_ms=cold_ms, own_ms=own_ms, warm_ms=None, own_tokens=own, warm_tokens=0,
            own_bytes=own_bytes, warm_bytes=0, stored_bytes=stored, answers=[first, second],
        )  # fmt: skip
        if self._has_connector:
            self._wait_stored()  # the first answer's is dropped where weights were made lively since the start
            self._reset()
            if self._is_one:
                self._llm.collective_rpc(wipe)
            loaded = self._counter("loaded_bytes")
            made["warm_ms"], made["warm_tokens"], third = self._generate(prompt, 1)
            there = self._llm.collective_rpc(tokens_there)[0] if self._is_one else made["warm_tokens"]
            if there < _THERE_SHARE * made["warm_tokens"]:
                raise RuntimeError(f"{made['warm_tokens']} tokens were a hit, and KV of {there:.0f} is in its memory")
            made["warm_bytes"] = self._counter("loaded_bytes") - loaded
            made["answers"].append(third)
            if answer:
                self._reset()
        if answer:
            made["answers"].append(self._generate(prompt, answer)[2])
        return made

    def together(self, seed: int, count: int, tokens: int, answer: int, steps: int) -> Together:
        """Serve `count` prompts at once, which are new to the engine; again, of what is stored; others that share a
        stored first half; and short ones for `steps` steps. Before each its own cache is emptied."""
        first = _BATCHES + seed * (2 * count + 1)
        prompts = [self._prompt(first + place, tokens) for place in range(count)]
        shared = self._prompt(first + count, tokens // 2)
        halves = [shared + self._prompt(first + count + 1 + at, tokens - tokens // 2) for at in range(count)]
        self._reset()
        batches = {"cold": self._batch(prompts, answer)}
        self._settle()
        self._reset()
        batches["stored"] = self._batch(prompts, answer)
        self._reset()
        self._generate(shared, 1)
        self._settle()
        self._reset()
        batches["half"] = self._batch(halves, answer)
        self._settle()
        self._reset()
        batches["step"] = self._steps([self._prompt(first + at, _SHORT_TOKENS) for at in range(count)], steps)
        return Together(batches=batches)

    def _batch(self, prompts: list[list[int]], count: int) -> Batch:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        asked, loaded = [{"prompt_token_ids": prompt} for prompt in prompts], self._counter("loaded_bytes")
        began_s = time.perf_counter()
        made = self._llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        return Batch(
            rate=len(prompts) / seconds,
            cached_tokens=sum(int(each.num_cached_tokens or 0) for each in made),
            loaded_bytes=self._counter("loaded_bytes") - loaded,
            answers=[list(each.outputs[0].token_ids) for each in made],
        )

    def _steps(self, prompts: list[list[int]], steps: int) -> Batch:
        """Tokens a second, from when each request has some on."""
        engine, loaded = self._llm.llm_engine, self._counter("loaded_bytes")
        for place, prompt in enumerate(prompts):
            self._add(f"step{place}", prompt, steps)
        answers: dict[int, list[int]] = {}
        began_s, began = 0.0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[int(output.request_id.partition("-")[0][4:])] = list(output.outputs[0].token_ids)
            if not began and len(answers) == len(prompts) and min(map(len, answers.values())) >= _SETTLED_STEPS:
                began_s, began = time.perf_counter(), sum(map(len, answers.values()))
        made = sum(map(len, answers.values())) - began
        return Batch(
            rate=made / (time.perf_counter() - began_s),
            cached_tokens=0,
            loaded_bytes=self._counter("loaded_bytes") - loaded,
            answers=[answers[place] for place in range(len(prompts))],
        )

    def first(self, seed: int, tokens: int, answer: int, transfer: dict[str, Any] | None = None) -> Asked:
        """Serve one prompt, with `answer` tokens; `transfer` is kv_transfer_params for it."""
        prompt = self._prompt(seed, tokens)
        asked_s = time.monotonic()
        self._add("first", prompt, answer, transfer)
        first_s, output = 0.0, None
        while self._llm.llm_engine.has_unfinished_requests():
            for output in self._llm.llm_engine.step():
                first_s = first_s or (time.monotonic() if output.outputs[0].token_ids else 0.0)
        if output is None or not first_s:
            raise RuntimeError("vLLM has answered nothing")
        return Asked(
            asked_s=asked_s,
            first_s=first_s,
            cached_tokens=int(output.num_cached_tokens or 0),
            answer=list(output.outputs[0].token_ids),
            transfer=output.kv_transfer_params,
        )

    def stalled(self, seed: int, tokens: int, count: int, steps: int) -> Stalled:
        """Have `count` short requests decode so many steps, and a prompt of `tokens` (0: none) come amid them."""
        engine, times, cached = self._llm.llm_engine, dict[str, list[float]](), 0
        prompt = self._prompt(seed, tokens)  # in the loop it would be a part of the gap
        for place in range(count):
            self._add(f"short{place}", self._prompt(_BATCHES + place, _SHORT_TOKENS), steps)
        came_s = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                name, now_s = output.request_id.partition("-")[0], time.monotonic()
                if name == "long":
                    cached = int(output.num_cached_tokens or 0)
                else:
                    mine = times.setdefault(name, [])
                    mine += [now_s] * (len(output.outputs[0].token_ids) - len(mine))
            if not came_s and len(times) == count and min(map(len, times.values())) >= steps // 3:
                came_s = time.monotonic()
                if tokens:
                    self._add("long", prompt, 1)
        gaps = [later - one for each in times.values() for one, later in pairwise(each) if later > came_s]
        return Stalled(gap_ms=max(gaps) * 1e3, cached_tokens=cached)

    def reset(self) -> dict[str, Any]:
        """Wait until what was computed is stored, and empty vLLM's own cache."""
        self._settle()
        self._reset()
        return {}

    def _add(self, name: str, prompt: list[int], count: int, transfer: dict[str, Any] | None = None) -> None:
        from vllm import SamplingParams

        self._number += 1
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=extra)
        self._llm.llm_engine.add_request(f"{name}-{self._number}", {"prompt_token_ids": prompt}, sampling)

    def forget(self) -> dict[str, Any]:
        """Empty LMCache's own memory."""
        self._ours.forget()
        return {}

    def counters(self) -> dict[str, float]:
        """Of our connector; {} without it."""
        return {} if self._ours is None else {name: float(value) for name, value in self._ours.counters.items()}

    def _prompt(self, seed: int, tokens: int) -> list[int]:
        return [3 + (at * _SPREAD + seed * _APART) % self._vocabulary for at in range(tokens)]

    def _generate(self, prompt: list[int], count: int) -> tuple[float, int, list[int]]:
        """Milliseconds until `count` tokens are there, the prompt's tokens that were not computed, and the tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        (made,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return (time.perf_counter() - began_s) * 1e3, int(made.num_cached_tokens or 0), list(made.outputs[0].token_ids)

    def _settle(self) -> None:
        """Wait until what was computed is stored. vLLM's own connectors say nothing of it: they hand over what a step
        has computed with a later one, so some follow; with every arm, since an engine that has just served something
        is quicker than one that has slept."""
        self._wait_stored()
        for place in range(3):
            self._generate(self._prompt(50 + place, _SHORT_TOKENS), 1)
        if self._has_connector and self._ours is None:
            time.sleep(0.5)
            self._generate(self._prompt(53, _SHORT_TOKENS), 1)

    def _wait_stored(self) -> None:
        """As far as a connector says so."""
        if self._ours is not None and not self._ours.settle(SETTLE_S):
            raise RuntimeError(f"not stored within {SETTLE_S:.0f} s")

    def _reset(self) -> None:
        """Empty vLLM's own cache; blocks that a connector still reads are not let go of at once."""
        for _ in range(RESETS_MAX):
            if self._llm.reset_prefix_cache():
                return
            self._generate(self._prompt(60, _SHORT_TOKENS), 1)
            time.sleep(0.02)
        raise RuntimeError("vLLM does not empty its prefix cache")

    def _counter(self, name: str) -> int:
        return 0 if self._ours is None else int(self._ours.counters.get(name, 0))


def kv_memory(worker: Any) -> list[Any]:
    """All KV memory of a worker, as vectors of integers."""
    import torch

    storages = {each.data_ptr(): each for each in (cache.untyped_storage() for cache in worker.model_runner.kv_caches)}
    return [torch.empty(0, dtype=torch.int16, device=each.device).set_(each) for each in storages.values()]


def wipe(worker: Any) -> None:
    """Fill KV memory with zeros; asked within a worker whose engine has no request and an empty cache. WHY: a
    connector may tell vLLM of tokens whose KV it never brings, and dummy weights hide that. LMCache 0.5.3 does beside
    a runner that it does not know."""
    import torch

    for each in kv_memory(worker):
        each.zero_()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tokens_there(worker: Any) -> float:
    """For how many tokens there is KV in memory that was wiped before, by the elements that are not zero."""
    import torch

    memory, cache = kv_memory(worker), worker.model_runner.cache_config
    written: int = sum(int(torch.count_nonzero(part)) for each in memory for part in each.split(_COUNTED_TOGETHER))
    a_token = sum(each.numel() for each in memory) / (cache.num_gpu_blocks * cache.block_size)
    return float(written / a_token)


def enliven(model: Any) -> None:
    """Make a dummy model's matrices large enough for its tokens to depend on those before."""
    for weights in model.parameters():
        if weights.dim() > 1:
            weights.data.mul_(_LIVELY)


def device() -> dict[str, Any]:
    """What computes: its name, the memory of a GPU in bytes, 0 without one, and how many there are."""
    import torch
    import vllm

    said = {"vllm": vllm.__version__, "torch": torch.__version__, "nixl": None}
    with suppress(PackageNotFoundError):
        said["nixl"] = version("nixl")
    if not torch.cuda.is_available():
        return {"device": "cpu", "memory_bytes": 0} | said
    facts = torch.cuda.get_device_properties(0)
    return {"device": facts.name, "memory_bytes": facts.total_memory, "devices": torch.cuda.device_count()} | said


def lmcache_facts() -> dict[str, Any]:
    """LMCache's version, and whether its compiled kernels move KV (it has slower ones of torch for when they cannot be
    loaded); where it cannot be imported, why."""
    try:
        import lmcache
        import lmcache.integration.vllm.vllm_v1_adapter  # what vLLM's connector imports
    except Exception as error:  # of any kind: its libraries belong to another torch, or a package is missing
        return {"lmcache_error": f"{type(error).__name__}: {error}"}
    kernels = getattr(lmcache, "device_ops", None) or getattr(lmcache, "c_ops", None)
    moving = getattr(kernels, "multi_layer_kv_transfer", None)
    return {"lmcache": lmcache.__version__, "lmcache_compiled": isinstance(moving, BuiltinFunctionType)}


def main() -> None:
    """Serve lines until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    if sys.argv[1:2] == ["--facts"]:
        answers.write(json.dumps(device() | (lmcache_facts() if "--lmcache" in sys.argv else {})) + "\n")
        return
    from vllm import LLM as LLM  # before it is asked for: that takes as long as opening an engine

    engine: Engine | None = None
    for line in sys.stdin:
        told = json.loads(line)
        answer: Any
        try:
            if engine is None:
                engine, answer = Engine(cast(Opening, told)), {}
            else:
                answer = getattr(engine, told.pop("do"))(**told)
        except Exception as error:  # of any kind: the bench goes on with its other arms
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    answers.flush()
    sys.stderr.flush()
    os._exit(0)  # vLLM's own end takes its time, and all that this process holds goes with it


if __name__ == "__main__":
    main()
