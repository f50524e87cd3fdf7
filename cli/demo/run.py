"""One process of the demo: builds the model, answers the prompt through the store, writes down what it saw.

A process of its own for each run is what proves that the KV came from the store: nothing else of the first run is left
when the second begins. `python -m kvredis.cli.demo.run SPEC.json RESULT.json`
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import redis
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.tensors import borrow, empty_kv, gather, scatter
from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.backends.config.schema import Config
from kvredis.storage.memory.copy import copy

from .spec import Beside, Run, Spec

WARM_UP_TOKENS = 32


class Clock:
    """A streamer that notes when the first new token came. What it says is no language: the weights are random."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Called by generate(): once with the prompt, then with each new token."""
        if self._has_prompt:
            self.first_s = self.first_s or time.perf_counter()
        self._has_prompt = True

    def end(self) -> None:
        """Called by generate() behind the last token."""


def build(spec: Spec) -> LlamaForCausalLM:
    """The model that `spec` describes, with the same random float32 weights in every process."""
    shape = spec.shape
    torch.manual_seed(spec.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=spec.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=len(spec.ids) + spec.max_new_tokens,
            initializer_range=0.05,
            tie_word_embeddings=True,
        )
    )
    model.train(False)
    return model


def ask(cached: CachedModel, spec: Spec) -> Run:
    """One request: the prompt in, `max_new_tokens` out, greedily."""
    engine, clock = cached.engine, Clock()
    before = asdict(engine.stats)
    ids = torch.tensor([spec.ids])
    started_s = time.perf_counter()
    out = cached.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # a prompt may hold the token of pad_token_id
        streamer=clock,
        max_new_tokens=spec.max_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        request="demo",
    )
    total_s = time.perf_counter() - started_s
    engine.flush()  # what is stored goes out behind the answer, and the next run may be another process
    after = {name: value for name, value in asdict(engine.stats).items() if isinstance(value, int | float)}
    did = {name: value - before[name] for name, value in after.items()}
    return Run(
        ttft_s=clock.first_s - started_s,
        lookup_s=did["lookup_seconds"],
        copy_s=did["copy_seconds"],
        total_s=total_s,
        prompt_tokens=len(spec.ids),
        hit_tokens=cached.last_plan.hit,
        need_to_load=cached.last_plan.need_to_load,
        loaded_tokens=cached.last_loaded,
        loaded_bytes=did["loaded_bytes"],
        load_s=did["load_seconds"],
        stored_tokens=did["stored_tokens"],
        store_s=did["store_seconds"],
        tokens=out[0, len(spec.ids) :].tolist(),
    )


def beside(engine: CacheEngine, spec: Spec) -> Beside:
    """Move the prompt's KV, which is stored, by other ways. Each goes twice, and the second time counts: the memory on
    both sides was touched then."""
    layout, tokens = engine.layout, len(spec.ids)
    kv, out = (empty_kv(layout, tokens, torch.device("cpu")) for _ in range(2))
    loaded = engine.retrieve(spec.ids, kv)
    blocks = []
    for start in range(0, loaded, layout.chunk_tokens):
        stop = min(start + layout.chunk_tokens, loaded)
        block = torch.empty(layout.shape(stop - start), dtype=kv.dtype)
        gather(kv, start, stop, block)
        blocks.append((start, block))

    copies = [torch.empty_like(block) for _, block in blocks]

    def copy_all() -> None:
        for into, (_, block) in zip(copies, blocks, strict=True):
            copy(bytes_of(into), bytes_of(block))

    memcpy_s = second_of(copy_all)
    if spec.redis_port is None:
        return Beside(memcpy_s, None)
    client = redis.Redis(port=spec.redis_port)
    for start, block in blocks:  # as LMCache's connector has it: what a value is, and the value
        client.set(f"demo@{start}metadata", json.dumps([*block.shape]))
        client.set(f"demo@{start}kv_bytes", bytes_of(block))

    def get_all() -> None:
        for start, _ in blocks:
            shape = json.loads(cast(bytes, client.get(f"demo@{start}metadata")))
            got = cast(bytes, client.get(f"demo@{start}kv_bytes"))
            scatter(borrow(memoryview(got), kv.dtype).view(shape), out, start)

    redis_s = second_of(get_all)
    client.close()
    if not torch.equal(out[:, :, :loaded], kv[:, :, :loaded]):
        raise RuntimeError("what the plain Redis gave back is not what was put there")
    return Beside(memcpy_s, redis_s)


def bytes_of(block: torch.Tensor) -> memoryview:
    """A contiguous block's memory."""
    return memoryview(cast(Any, block.view(torch.uint8).numpy())).cast("B")


def second_of(move: Callable[[], None]) -> float:
    """Seconds of the second of two calls."""
    move()
    began_s = time.perf_counter()
    move()
    return time.perf_counter() - began_s


def main(spec_path: str, result_path: str) -> None:
    """Run what the spec file says; write a list of runs and, where they loaded, what other ways take."""
    spec = Spec.read(Path(spec_path))
    model = build(spec)
    with torch.no_grad():  # thread pools and kernels start here, not in the time of the first request
        model(torch.zeros(1, WARM_UP_TOKENS, dtype=torch.long), use_cache=False)
    name = f"kvredis-demo/llama-{'x'.join(str(size) for size in asdict(spec.shape).values())}-seed{spec.seed}"
    config = Config.load(env={}, overrides=spec.config)
    with CacheEngine(config, layout_of(model, name)) as engine:
        cached = CachedModel(model, engine)
        runs = [ask(cached, spec) for _ in range(spec.runs)]
        others = beside(engine, spec) if runs[-1].loaded_tokens else None
    made = {"runs": [asdict(run) for run in runs], "beside": None if others is None else asdict(others)}
    Path(result_path).write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
