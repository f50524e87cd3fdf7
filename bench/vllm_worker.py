"""One process of `kvredis bench vllm`: a vLLM engine that serves the prompts it is told to.

A line of JSON on stdin is a request, a line on stdout its answer, or {"error": text}; the first request is an Opening.
With --facts it says what computes, and ends. vLLM is loaded here alone, in whichever version the interpreter has.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final, TypedDict, cast

RESETS_MAX: Final = 100
SETTLE_S: Final = 60.0
_SHORT_TOKENS: Final = 40
_SPREAD, _APART = 7919, 104_729  # primes
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


class Engine:
    """The engine that is open."""

    def __init__(self, told: Opening) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        folder = Path(told["model"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(told["config"]))
        options = dict(told["options"])
        if told["connector"] is not None:
            options["kv_transfer_config"] = KVTransferConfig(**told["connector"])
        self._vocabulary = int(told["config"]["vocab_size"]) - 8
        self._llm: Any = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=True, **options,
        )  # fmt: skip
        if told["is_lively"]:
            self._llm.apply_model(enliven)
        self._has_connector = told["connector"] is not None
        self._ours: Any = None
        if self._has_connector:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            group = get_kv_transfer_group()
            self._ours = group if hasattr(group, "settle") else None

    def measure(self, seed: int, tokens: int, answer: int) -> Served:
        """Serve one prompt that is new to the engine three times; with `answer` tokens generated a fourth time."""
        prompt, stored = self._prompt(seed, tokens), self._counter("stored_bytes")
        cold_ms, cold, first = self._generate(prompt, 1)
        if cold:
            raise RuntimeError(f"{cold} tokens of a new prompt were a hit")
        self._settle()
        stored, loaded = self._counter("stored_bytes") - stored, self._counter("loaded_bytes")
        own_ms, own, second = self._generate(prompt, 1)
        own_bytes, loaded = self._counter("loaded_bytes") - loaded, self._counter("loaded_bytes")
        made = Served(
            cold_ms=cold_ms, own_ms=own_ms, warm_ms=None, own_tokens=own, warm_tokens=0,
            own_bytes=own_bytes, warm_bytes=0, stored_bytes=stored, answers=[first, second],
        )  # fmt: skip
        if self._has_connector:
            self._reset()
            loaded = self._counter("loaded_bytes")
            made["warm_ms"], made["warm_tokens"], third = self._generate(prompt, 1)
            made["warm_bytes"] = self._counter("loaded_bytes") - loaded
            made["answers"].append(third)
            if answer:
                self._reset()
        if answer:
            made["answers"].append(self._generate(prompt, answer)[2])
        return made

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
        if self._ours is not None and not self._ours.settle(SETTLE_S):
            raise RuntimeError(f"not stored within {SETTLE_S:.0f} s")
        for place in range(3):
            self._generate(self._prompt(50 + place, _SHORT_TOKENS), 1)
        if self._has_connector and self._ours is None:
            time.sleep(0.5)
            self._generate(self._prompt(53, _SHORT_TOKENS), 1)

    def _reset(self) -> None:
        """Empty vLLM's own cache; blocks that a connector still reads are not let go of at once."""
        for _ in range(RESETS_MAX):
            if self._llm.reset_prefix_cache():
                return
            self._generate(self._prompt(60, _SHORT_TOKENS), 1)
            time.sleep(0.02)
        raise RuntimeError("vLLM does not empty its prefix cache")

    def _counter(self, name: str) -> int:
        return 0 if self._ours is None else int(self._ours.counters[name])


def enliven(model: Any) -> None:
    """Make a dummy model's matrices large enough for its tokens to depend on those before."""
    for weights in model.parameters():
        if weights.dim() > 1:
            weights.data.mul_(_LIVELY)


def device() -> dict[str, Any]:
    """What computes: its name, and the memory of a GPU in bytes, 0 without one."""
    import torch
    import vllm

    said = {"vllm": vllm.__version__, "torch": torch.__version__}
    if not torch.cuda.is_available():
        return {"device": "cpu", "memory_bytes": 0} | said
    facts = torch.cuda.get_device_properties(0)
    return {"device": facts.name, "memory_bytes": facts.total_memory} | said


def main() -> None:
    """Serve lines until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    if sys.argv[1:] == ["--facts"]:
        answers.write(json.dumps(device()) + "\n")
        return
    from vllm import LLM as LLM  # before it is asked for: that takes as long as opening an engine

    engine: Engine | None = None
    for line in sys.stdin:
        told = json.loads(line)
        answer: Any
        try:
            if engine is None:
                engine, answer = Engine(cast(Opening, told)), {}
            elif told.pop("do") == "measure":
                answer = engine.measure(**told)
            else:
                answer = engine.counters()
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
