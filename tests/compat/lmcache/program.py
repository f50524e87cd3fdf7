"""A serving engine's worker as far as LMCache can see: it owns KV tensors and has LMCache store and load them.

Run by lmcache_process.py in an environment that has LMCache; a line of JSON on stdin is a request, a line of JSON on
stdout its answer. Only what needs CUDA is left out: the KV cache is one tensor in memory that `HostPages` copies from
and to, in place of the connector to vLLM's pages. All else is LMCache's own, from its configuration to the wire.

KV bytes are random and follow from the prompt, so that any process knows what any other must have stored.
"""

import asyncio
import hashlib
import itertools
import json
import os
import queue
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import load_engine_config_with_overrides
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

STORE_S = 20
LAYERS, HEADS, HEAD_DIM = 4, 2, 64
Answer = dict[str, Any]


class HostPages(GPUConnectorInterface):  # type: ignore[misc]
    """Copies between LMCache's memory objects and `kvcaches`, a tensor of (2, layers, tokens, hidden) in memory."""

    def __init__(self, layers: int, hidden: int) -> None:
        self.layers, self.hidden = layers, hidden

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        memory_obj.tensor.copy_(kwargs["kvcaches"][:, :, start:end])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        kwargs["kvcaches"][:, :, start:end].copy_(memory_obj.tensor)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self.layers, num_tokens, self.hidden])


class Worker:
    """One LMCacheEngine, configured by the LMCACHE_* variables alone, and the prompts that it serves."""

    def __init__(self, name: str, model: str, dtype: str, layers: int = LAYERS) -> None:
        self.config = load_engine_config_with_overrides()
        self.dtype, self.layers = getattr(torch, dtype), layers
        metadata = LMCacheMetadata(
            model_name=model,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self.dtype,
            kv_shape=(layers, 2, self.config.chunk_size, HEADS, HEAD_DIM),
            chunk_size=self.config.chunk_size,
            role="worker",
        )
        pages = HostPages(layers, HEADS * HEAD_DIM)
        self.engine = LMCacheEngineBuilder.get_or_create(
            name, self.config, metadata, pages, lambda tensor, source: None, lambda value, source: value
        )
        self.engine.post_init()
        backends = self.engine.storage_manager.storage_backends
        self.remote_name = next(name for name in backends if name.startswith("RemoteBackend"))
        self.remote = backends[self.remote_name]
        if self.remote.connection is None:
            raise ConnectionError("LMCache could not make its connector")
        if self.config.remote_url and self.config.remote_url.startswith("resp://"):
            self._look_up_on_the_loop()
        self._requests = itertools.count()
        self._landed: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._tell_landing()

    def _look_up_on_the_loop(self) -> None:
        """Have lookups take the native client's other way, since the first may wait for ever, on Redis as well.

        It submits a lookup and then notes who waits for it, while LMCache's event loop, in another thread, may have
        been told the outcome in between, and drops what no caller waits for.
        """
        connection, loop = self.remote.connection, self.remote.loop

        def batched_contains(keys: Any) -> int:
            hits = asyncio.run_coroutine_threadsafe(connection.batched_async_contains("", keys), loop).result()
            return int(hits)

        connection.batched_contains = batched_contains

    def _tell_landing(self) -> None:
        """LMCache does not tell when a put has ended, and only its log says how: listen where the connector knows
        it."""
        connector = self.remote.connection._connector
        put: Callable[..., Awaitable[None]] = connector.batched_put

        async def batched_put(keys: Any, memory_objs: Any) -> None:
            error: Exception | None = None
            try:
                await put(keys, memory_objs)
            except Exception as raised:
                error = raised
                raise
            finally:
                self._landed.put(error)

        connector.batched_put = batched_put

    def tokens(self, prompt: int, chunks: float) -> list[int]:
        """A prompt's tokens; prompts share no prefix."""
        return list(range(prompt << 20, (prompt << 20) + int(chunks * self.config.chunk_size)))

    def kv(self, prompt: int, tokens: int) -> torch.Tensor:
        """What attention would have computed for the prompt's first tokens: random bytes, NaN and infinities too."""
        nbytes = tokens * 2 * self.layers * HEADS * HEAD_DIM * self.dtype.itemsize
        noise = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(prompt))
        return noise.view(self.dtype).view(tokens, 2, self.layers, HEADS * HEAD_DIM).permute(1, 2, 0, 3).contiguous()

    def store(self, prompt: int, chunks: float) -> Answer:
        """Store a prompt and wait until LMCache's remote put has ended; `error` is the exception that it swallowed."""
        tokens = self.tokens(prompt, chunks)
        self.engine.store(tokens, kvcaches=self.kv(prompt, len(tokens)))
        error = self._landed.get(timeout=STORE_S)
        return {"error": None if error is None else repr(error)}

    def lookup(self, prompt: int, chunks: float) -> Answer:
        """How many of the prompt's tokens the server has."""
        return {"hit": self.engine.lookup(self.tokens(prompt, chunks), search_range=[self.remote_name])}

    def load(self, prompt: int, chunks: float) -> Answer:
        """Look a prompt up and load what was found, as vLLM's adapter does.

        `hit` tokens were found and `loaded` of them arrived, `equal` says whether with the bytes that were stored.
        """
        tokens = self.tokens(prompt, chunks)
        expected = self.kv(prompt, len(tokens))
        out = torch.zeros_like(expected)
        hit, loaded = self._loaded(tokens, out)
        same = torch.equal(_raw(out[:, :, :loaded]), _raw(expected[:, :, :loaded]))
        return {"hit": hit, "loaded": loaded, "equal": same}

    def _loaded(self, tokens: list[int], out: torch.Tensor) -> tuple[int, int]:
        """How many tokens were found and how many of these were loaded into `out`."""
        request = f"request-{next(self._requests)}"
        hit = self.engine.lookup(tokens, search_range=[self.remote_name], lookup_id=request, pin=True)
        mask = self.engine.retrieve(tokens[:hit], kvcaches=out, req_id=request) if hit else torch.zeros(1)
        self.engine.lookup_unpin(request)
        return hit, int(mask.sum())

    def chunks(self, prompt: int, chunks: float) -> Answer:
        """The prompt's keys, each with the sha256 of the bytes that belong to it."""
        tokens = self.tokens(prompt, chunks)
        kv = self.kv(prompt, len(tokens))
        return {
            key.to_string(): hashlib.sha256(_raw(kv[:, :, start:end]).numpy().tobytes()).hexdigest()
            for start, end, key in self.engine.token_database.process_tokens(tokens)
        }

    def fill(self, prompts: int, chunks: float) -> Answer:
        """Store this many prompts, one after another, and what went wrong."""
        return {"errors": [told for prompt in range(prompts) if (told := self.store(prompt, chunks)["error"])]}

    def sweep(self, prompts: int, chunks: float, rounds: int) -> Answer:
        """Look up and load each of so many prompts, round after round.

        `hits` counts the chunks that lookups affirmed, `stale` those of them that a load did not get, `wrong` the
        prompts that came with other bytes.
        """
        told = [self.load(prompt, chunks) for _ in range(rounds) for prompt in range(prompts)]
        hits, loaded = (sum(answer[key] for answer in told) // self.config.chunk_size for key in ("hit", "loaded"))
        return {"hits": hits, "stale": hits - loaded, "wrong": sum(not answer["equal"] for answer in told)}

    def apart(self, prompt: int, chunks: float) -> Answer:
        """Look up and load each chunk of a prompt by itself, whatever became of those before it; as `sweep`."""
        tokens, hits, loaded, wrong = self.tokens(prompt, chunks), 0, 0, 0
        kv = self.kv(prompt, len(tokens))
        for start, end, key in self.engine.token_database.process_tokens(tokens):
            if self.remote.contains(key):
                hits += 1
                memory_obj = self.remote.get_blocking(key)
                if memory_obj is not None:
                    loaded += 1
                    wrong += not torch.equal(_raw(memory_obj.tensor), _raw(kv[:, :, start:end]))
                    memory_obj.ref_count_down()
        return {"hits": hits, "stale": hits - loaded, "wrong": wrong}


def _raw(kv: torch.Tensor) -> torch.Tensor:
    return kv.contiguous().view(torch.uint8)


def opened(workers: dict[str, Worker], name: str, environment: dict[str, str], **rest: Any) -> Answer:
    """Make a worker under these variables alone; what LMCache understood of its configuration."""
    for variable in [found for found in os.environ if found.startswith("LMCACHE_")]:
        if variable not in environment:
            del os.environ[variable]
    os.environ.update(environment)
    workers[name] = Worker(name, **rest)
    config = workers[name].config
    named = ("chunk_size", "local_cpu", "max_local_cpu_size", "remote_url", "blocking_timeout_secs", "extra_config")
    return {key: getattr(config, key) for key in named}


def main() -> None:
    """Serve requests until stdin ends, then leave without LMCache's close(), which waits for itself for ever."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # GLIDE logs to stdout
    workers: dict[str, Worker] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, do = request.pop("worker"), request.pop("do")
        try:
            answer = opened(workers, name, **request) if do == "open" else getattr(workers[name], do)(**request)
        except Exception as error:
            answer = {"raised": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
