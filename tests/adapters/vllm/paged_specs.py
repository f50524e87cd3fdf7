"""What an engine says of its groups of layers, as vLLM's kv_cache_interface has it, without the engine."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class FullAttentionSpec:
    """K and V of every token."""

    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    head_size_v: int | None = None
    state_content_bytes: int | None = None
    prefix_cacheable: bool = True

    @property
    def unpadded_page_size_bytes(self) -> int:
        if self.state_content_bytes is not None:
            return self.num_kv_heads * self.block_size * self.state_content_bytes
        size_v = self.head_size if self.head_size_v is None else self.head_size_v
        return self.num_kv_heads * self.block_size * (self.head_size + size_v) * self.dtype.itemsize


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    """One latent vector a token."""

    num_kv_heads: int = 1
    head_size: int = 576
    head_size_v: int | None = 0


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    """K and V of the latest tokens."""

    sliding_window: int = 128


@dataclass
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """K and V of the tokens since the last multiple."""

    attention_chunk_size: int = 128


@dataclass
class MambaSpec:
    """A state of the whole prefix: of each layer a window of inputs, and what was made of all of them."""

    block_size: int = 32
    shapes: tuple[tuple[int, ...], ...] = ((3, 8), (2, 4, 4))
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    mamba_type: str = "gdn_attention"
    mamba_cache_mode: str = "align"
    page_size_bytes: int = 512


@dataclass
class CrossAttentionSpec(FullAttentionSpec):
    """K and V of what the encoder has seen."""


@dataclass
class UniformTypeKVCacheSpecs:
    """Layers of several widths in one group."""

    kv_cache_specs: dict[str, Any]
    block_size: int = 32


@dataclass
class KVCacheGroup:
    """Layers that share a page table."""

    layer_names: list[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


def names(count: int, start: int = 0) -> list[str]:
    return [f"model.layers.{at}.self_attn.attn" for at in range(start, start + count)]
