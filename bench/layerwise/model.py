"""What computes in `kvredis bench layerwise`: a causal transformer with its KV in pages.

It is a Llama in plain operations, without positions, which move nothing: an engine's attention reads pages wherever
they lie, and only between two layers of a model of one's own can one wait for a layer, or send it off. Nothing here is
fast but the copies that are measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvredis.bench.core.compute import DTYPES, WIDTHS
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.shapes import BLOCK_TOKENS, ModelShape

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY: Final = 8192
SMALL: Final = ModelShape("small", layers=8, kv_heads=4, head_dim=64, dtype_bytes=4)
"""Where there is no GPU."""
_WIDTHS: Final = {**WIDTHS, SMALL.name: (512, 8, 1408)}
"""Hidden size, attention heads, intermediate size."""
_SEED: Final = 13

Hook = Callable[[int], None]
"""Called with the number of a layer."""


def nothing(_layer: int) -> None:
    """A Hook that does nothing."""


class Marks:
    """Moments as the device sees them, in the order of its work, told on time.monotonic's scale.

    On a GPU a mark passes when all that was launched before it is over, so a pair around something for which the host
    waits lasts as long as the device was idle for it.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._marks: list[Any] = []
        if device.type == "cuda":
            self._zero = self._event()
            synchronize(device)
        self._zero_s = time.monotonic()

    def mark(self) -> int:
        """Note this moment; its number in `seconds`."""
        self._marks.append(self._event() if self._device.type == "cuda" else time.monotonic())
        return len(self._marks) - 1

    def seconds(self) -> list[float]:
        """All moments; waits for the device."""
        if self._device.type != "cuda":
            return list(self._marks)
        synchronize(self._device)
        return [self._zero_s + self._zero.elapsed_time(mark) / 1e3 for mark in self._marks]

    def _event(self) -> Any:
        import torch

        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def synchronize(device: Any) -> None:
    """Wait until the device has done all that it was asked for."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights, each (out, in): queries, keys and values in one; gate and up in one."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class PagedModel:
    """A model of `shape` with random weights, the same each time, and the KV of one sequence of up to `tokens` tokens.

    `memory` is each layer's KV, (pages, 2, BLOCK_TOKENS, kv_heads, head_dim), and `table` the page of each
    BLOCK_TOKENS of the sequence, in random order. Raises BenchError for a shape that it cannot compute with.
    """

    def __init__(self, shape: ModelShape, tokens: int, device: Any) -> None:
        import torch

        from kvredis.adapters.engine.tensors import TORCH_DTYPES

        if shape.name not in _WIDTHS or shape.dtype_bytes == 1:
            raise BenchError(f"no model of shape {shape.name} to compute with; there are {', '.join(_WIDTHS)}")
        self.shape, self.device = shape, device
        self._hidden, self._heads, intermediate = _WIDTHS[shape.name]
        self._dtype = TORCH_DTYPES[DTYPES[shape.dtype_bytes]]
        generator = torch.Generator(device).manual_seed(_SEED)

        def made(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=self._dtype) / math.sqrt(size[-1])

        queries, keys = self._heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._embedding = made(VOCABULARY, self._hidden)
        self._layers = [
            _Layer(
                made(queries + 2 * keys, self._hidden),
                made(self._hidden, queries),
                made(2 * intermediate, self._hidden),
                made(self._hidden, intermediate),
            )
            for _ in range(shape.layers)
        ]
        pages = -(-tokens // BLOCK_TOKENS)
        size = (pages, 2, BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        self.memory = [torch.zeros(size, dtype=self._dtype, device=device) for _ in range(shape.layers)]
        self.table = torch.randperm(pages, generator=torch.Generator().manual_seed(_SEED)).tolist()
        self._table = torch.tensor(self.table, device=device)

    def tokens(self, count: int) -> Tensor:
        """A prompt of random tokens, the same each time."""
        import torch

        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(0, VOCABULARY, (count,), generator=generator).to(self.device)

    def forward(self, ids: Tensor, start: int, before: Hook = nothing, after: Hook = nothing) -> Tensor:
        """Compute the tokens of `ids`, the sequence's from `start` on, and write their KV; give the last one's logits.
        `before` is called ahead of each layer, `after` when its attention is computed: on a GPU, launched."""
        import torch
        from torch.nn.functional import linear, silu

        with torch.inference_mode():
            places = torch.arange(start, start + len(ids), device=self.device)
            hidden = self._embedding[ids]
            for number, layer in enumerate(self._layers):
                before(number)
                hidden = hidden + linear(self._attended(number, _normed(hidden), places, start), layer.out)
                after(number)
                gate, up = linear(_normed(hidden), layer.gate_up).chunk(2, dim=-1)
                hidden = hidden + linear(silu(gate) * up, layer.down)
            logits: Tensor = linear(_normed(hidden[-1]), self._embedding)
        return logits

    def slots(self, count: int, start: int) -> Tensor:
        """Where the KV of so many tokens from `start` on lies in each layer, by token."""
        import torch

        places = torch.arange(start, start + count, device=self.device)
        return self._table[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS

    def read_all(self, tokens: int) -> None:
        """Read the first `tokens` tokens' KV of every layer as attention of one token does, and nothing else."""
        import torch

        with torch.inference_mode():
            query = torch.ones(1, self._heads, self.shape.head_dim, dtype=self._dtype, device=self.device)
            for number in range(self.shape.layers):
                self._attention(number, query, tokens - 1)

    def _attended(self, number: int, hidden: Tensor, places: Tensor, start: int) -> Tensor:
        import torch
        from torch.nn.functional import linear

        shape = self.shape
        heads = linear(hidden, self._layers[number].qkv).view(len(hidden), -1, shape.head_dim)
        query, key, value = torch.split(heads, [self._heads, shape.kv_heads, shape.kv_heads], dim=1)
        pages, slots = self._table[places // BLOCK_TOKENS], places % BLOCK_TOKENS
        self.memory[number][pages, :, slots] = torch.stack([key, value], dim=1)
        return self._attention(number, query, start)

    def _attention(self, number: int, query: Tensor, start: int) -> Tensor:
        """Attention of tokens from `start` on, (tokens, heads, head_dim), over all pages up to them."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        count, shape = len(query), self.shape
        stop = start + count
        held = self.memory[number][self._table[: -(-stop // BLOCK_TOKENS)]]
        key, value = held.transpose(0, 1).reshape(2, -1, shape.kv_heads, shape.head_dim)[:, :stop].transpose(1, 2)
        mask, grouped = None, count == 1
        if not grouped:  # with a mask no fast kernel of a GPU takes fewer heads of K and V than of queries
            places = torch.arange(stop, device=self.device)
            mask = places[start:, None] >= places[None]
            key, value = (each.repeat_interleave(self._heads // shape.kv_heads, dim=0) for each in (key, value))
        made = scaled_dot_product_attention(
            query.transpose(0, 1)[None], key[None], value[None], attn_mask=mask, enable_gqa=grouped
        )
        return made[0].transpose(0, 1).reshape(count, -1)


def _normed(hidden: Tensor) -> Tensor:
    from torch.nn.functional import rms_norm

    return rms_norm(hidden, hidden.shape[-1:], eps=1e-5)
