"""One process of the demo: builds the model, answers the prompt through the store, writes down what it saw.

A process of its own for each run is what proves that the KV came from the store: nothing else of the first run is left
when the second begins. `python -m kvredis.cli.demo.run SPEC.json RESULT.json`
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.backends.config.schema import Config

from .spec import Run, Spec

WARM_UP_TOKENS = 32


class Clock:
    """A streamer that notes when the first new token came and, if asked, prints text as it comes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.first_s = 0.0
        self._tokenizer = tokenizer
        self._tokens: list[int] | None = None
        self._printed = 0

    def put(self, value: torch.Tensor) -> None:
        """Called by generate(): once with the prompt, then with each new token."""
        if self._tokens is None:
            self._tokens = []
            return
        self.first_s = self.first_s or time.perf_counter()
        self._tokens += value.flatten().tolist()
        if self._tokenizer is not None:
            text = self._tokenizer.decode(self._tokens)
            if not text.endswith("\ufffd"):  # the bytes of a character may come in several tokens
                print(text[self._printed :], end="", flush=True)
                self._printed = len(text)

    def end(self) -> None:
        """Called by generate() behind the last token."""
        if self._tokenizer is not None:
            print(flush=True)


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


def ask(model: LlamaForCausalLM, engine: CacheEngine, spec: Spec) -> Run:
    """One request: the prompt in, `max_new_tokens` out, greedily."""
    before = asdict(engine.stats)
    cached = CachedModel(model, engine)
    clock = Clock(Tokenizer.from_file(spec.tokenizer) if spec.stream else None)
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


def main(spec_path: str, result_path: str) -> None:
    """Runs what the spec file says and writes a list of runs."""
    spec = Spec.read(Path(spec_path))
    model = build(spec)
    with torch.no_grad():  # thread pools and kernels start here, not in the time of the first request
        model(torch.zeros(1, WARM_UP_TOKENS, dtype=torch.long), use_cache=False)
    name = f"kvredis-demo/llama-{'x'.join(str(size) for size in asdict(spec.shape).values())}-seed{spec.seed}"
    config = Config.load(env={}, overrides=spec.config)
    with CacheEngine(config, layout_of(model, name)) as engine:
        runs = [asdict(ask(model, engine, spec)) for _ in range(spec.runs)]
    Path(result_path).write_text(json.dumps(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
