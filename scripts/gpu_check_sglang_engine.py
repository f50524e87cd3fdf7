"""One SGLang engine of gpu_check_sglang.py, in a process that obeys lines (gpu_check_engine.py).

It uses SGLang's Engine as a program would that has SGLang in itself. Models are Llamas with random weights that follow
from a seed: they are written without transformers, whose saved configuration another release may not read.
"""

import json
import time
from pathlib import Path
from typing import Any, Final

from gpu_check_engine import Answer, serve

FLUSH_S: Final = 25.0
FLUSH_REST_S: Final = 0.2


class Engine:
    """The engine that is open in this process."""

    def __init__(self) -> None:
        from sglang.srt.entrypoints.engine import Engine as SGLang

        self._make: Any = SGLang
        self._engine: Any = None

    def open(self, folder: str, config: Answer, seed: int, options: Answer) -> Answer:
        """Open an engine of the model that `config` describes, with the weights of a seed."""
        began_s = time.monotonic()
        self._engine = self._make(model_path=str(saved(Path(folder), config, seed)), **options)
        return {"seconds": time.monotonic() - began_s}

    def generate(self, prompt: list[int], tokens: int) -> Answer:
        """Complete a prompt, greedily: its tokens, their log-probs, how many of the prompt were cached, and where."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        began_s = time.monotonic()
        told = self._engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True)
        seconds = time.monotonic() - began_s
        told = told[0] if isinstance(told, list) else told
        meta = told["meta_info"]
        steps = meta.get("output_token_logprobs") or []
        return {
            "tokens": list(told.get("output_ids") or [step[1] for step in steps]),
            "logprobs": [float(step[0]) for step in steps],
            "cached": meta.get("cached_tokens"),
            "details": meta.get("cached_tokens_details") or {},
            "seconds": seconds,
        }

    def flush(self) -> Answer:
        """Flush SGLang's caches. It refuses while pages are on their way to the store: it is asked until it does."""
        until_s, tries = time.monotonic() + FLUSH_S, 1
        while getattr(told := self._engine.flush_cache(), "success", told) is False:
            if time.monotonic() > until_s:
                raise RuntimeError(f"SGLang does not flush its cache: {told}")
            time.sleep(FLUSH_REST_S)
            tries += 1
        return {"tries": tries}

    def update(self, folder: str, config: Answer, seed: int) -> Answer:
        """Give it other weights. SGLang flushes then, and 0.5.17 ends where it cannot: it is flushed before."""
        self.flush()
        return {"told": str(self._engine.update_weights_from_disk(str(saved(Path(folder), config, seed))))}

    def close(self) -> Answer:
        """End SGLang's processes."""
        self._engine.shutdown()
        return {}


def saved(folder: Path, config: Answer, seed: int) -> Path:
    """The checkpoint of a seed, made if it is not there; one process at a time."""
    made = folder / f"model-{seed}"
    if made.is_dir():
        return made
    import torch
    from safetensors.torch import save_file

    noise = torch.Generator().manual_seed(seed)
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    wide, narrow = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))

    def random(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=noise) * scale).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": random(vocabulary, hidden, 1.0)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, rows, columns in (
            ("self_attn.q_proj", wide, hidden), ("self_attn.k_proj", narrow, hidden),
            ("self_attn.v_proj", narrow, hidden), ("self_attn.o_proj", hidden, wide),
            ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
        ):  # fmt: skip
            weights[f"{name}.{part}.weight"] = random(rows, columns, 2.0 / columns**0.5)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{part}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weights["lm_head.weight"] = random(vocabulary, hidden, 4.0 / hidden**0.5)
    scratch = folder / f"scratch-{seed}"
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "config.json").write_text(json.dumps(config))
    save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
    return scratch.rename(made)


if __name__ == "__main__":
    serve("sglang", Engine)
