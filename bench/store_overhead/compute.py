"""What computes in `kvredis bench store-overhead`: a clock that stands for an accelerator, or a model on one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvredis.bench.core.cuda_graphs import Passes, forward_of, spans, use_attention
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.shapes import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

_SEED: Final = 7
_SHIFT_TOKENS: Final = 16
_VOCABULARY: Final = 32_000
DTYPES: Final = {1: "fp8_e4m3", 2: "bf16", 4: "fp32"}
"""kvredis' name of the element type that has so many bytes."""

TINY: Final = ModelShape("tiny", layers=2, kv_heads=2, head_dim=32)
"""Of the model that stands in where there is no GPU."""
WIDTHS: Final = {
    "3b": (2048, 16, 11008),
    "7b": (3584, 28, 18944),
    "8b": (4096, 32, 14336),
    "32b": (5120, 40, 27648),
    "glm": (4096, 32, 13696),
    TINY.name: (64, 2, 128),
}
"""Hidden size, attention heads and intermediate size: what the KV's shape does not tell and computing depends on."""


GRAPHS_MAX: Final = 128
"""Steps of all prompts of which graphs are made: a tenth of a second each, and memory of the host's."""


class Compute(Protocol):
    """Prefills prompts by steps; `kv(n)` holds the n-th prompt's KV by token, as far as it has been computed."""

    def prepare(self, budget: int) -> str:
        """Get ready for steps of so many tokens, with every prompt; gives what is to be said of how they run."""
        ...

    def begin(self, number: int) -> None:
        """Go on with the prompt of this number, from its first token on."""
        ...

    def step(self, start: int, stop: int) -> None:
        """Compute tokens [start, stop) of it; on return they are in its KV."""
        ...

    def kv(self, number: int) -> Tensor:
        """(layers, 2, tokens, kv_heads, head_dim)."""
        ...


class Asleep:
    """An accelerator that computes `tokens_per_s`, and leaves the CPU alone meanwhile. The KV is random and there at
    once, each prompt's another one."""

    def __init__(self, shape: ModelShape, prompts: int, tokens: int, tokens_per_s: float) -> None:
        import torch

        from kvredis.adapters.engine.tensors import TORCH_DTYPES

        size = (shape.layers, 2, tokens + prompts * _SHIFT_TOKENS, shape.kv_heads)
        words = max(shape.head_dim * shape.dtype_bytes // 2, 1)
        generator = torch.Generator().manual_seed(_SEED)
        made = torch.randint(-32768, 32767, (*size, words), dtype=torch.int16, generator=generator)
        self._all = made.view(TORCH_DTYPES[DTYPES[shape.dtype_bytes]])
        self._tokens = tokens
        self._tokens_per_s = tokens_per_s

    def prepare(self, budget: int) -> str:
        """As Compute.prepare."""
        return ""

    def begin(self, number: int) -> None:
        """As Compute.begin."""

    def step(self, start: int, stop: int) -> None:
        """As Compute.step."""
        until_s = time.perf_counter() + (stop - start) / self._tokens_per_s
        while (left_s := until_s - time.perf_counter()) > 0:
            time.sleep(left_s)

    def kv(self, number: int) -> Tensor:
        """As Compute.kv."""
        start = number * _SHIFT_TOKENS
        return self._all[:, :, start : start + self._tokens]


class Modelled:
    """A Llama of the shape with random weights, in bfloat16, with the attention that transformers chooses."""

    def __init__(self, shape: ModelShape, prompts: Sequence[Sequence[int]]) -> None:
        import torch

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = llama(shape, len(prompts[0]), self._device)
        use_attention(self._model)
        self._ids = [torch.tensor([list(prompt)], device=self._device) for prompt in prompts]
        size = (shape.layers, 2, shape.kv_heads, len(prompts[0]), shape.head_dim)
        self._kv = [torch.zeros(size, dtype=torch.bfloat16, device=self._device).transpose(2, 3) for _ in prompts]
        self._passes = Passes(
            forward_of(self._model), lambda place, tokens: self._cache(place[1], tokens), self._device
        )
        self._number = 0

    @property
    def device(self) -> str:
        """What it computes on, in words."""
        import torch

        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"

    def prepare(self, budget: int, prompts: int | None = None) -> str:
        """As Compute.prepare; only the first so many `prompts`, if told: those behind them are launched one by one."""
        steps = len(self._ids) * len(spans(0, self._ids[0].shape[1], budget))
        if self._device.type == "cuda" and steps > GRAPHS_MAX:
            return f"Steps of {budget} tokens are launched one by one, and not in CUDA graphs."
        for number, ids in enumerate(self._ids[:prompts]):
            self._passes.make((1, number), (0,), ids.shape[1], budget)
        return ""

    def begin(self, number: int) -> None:
        """As Compute.begin."""
        self._number = number

    def step(self, start: int, stop: int) -> None:
        """As Compute.step; waits for what it computes, as an engine does that samples a token, and for nothing else."""
        import torch

        self.enqueue(start, stop)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def enqueue(self, start: int, stop: int) -> None:
        """As `step`, without waiting: on a GPU the current stream is not done yet."""
        import torch

        with torch.inference_mode():
            self._passes.run((1, self._number), self._ids[self._number][:, :stop], start, stop - start)

    def kv(self, number: int) -> Tensor:
        """As Compute.kv."""
        return self._kv[number]

    def _cache(self, number: int, tokens: int) -> Any:
        from transformers import DynamicCache

        from kvredis.adapters.transformers.generate import RoomyLayer

        cache: Any = DynamicCache(config=self._model.config)
        cache.layers = [
            RoomyLayer(pair[0].transpose(0, 1)[None], pair[1].transpose(0, 1)[None], tokens)
            for pair in self._kv[number]
        ]
        return cache


def llama(shape: ModelShape, tokens: int, device: Any) -> Any:
    """A Llama of the shape with random weights in bfloat16, the same each time; BenchError for one without widths."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape.name not in WIDTHS or shape.dtype_bytes != 2:
        raise BenchError(f"no model of shape {shape.name} to compute with; there are {', '.join(WIDTHS)}")
    hidden, heads, intermediate = WIDTHS[shape.name]
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
    )
    torch.manual_seed(_SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train(False)
    return model
