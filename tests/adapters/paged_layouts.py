"""The memory that engines keep KV in, in each of their orders, as PagedKV wants it; and what a block must hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Size = tuple[int, int, int, int, int]
"""(pages, planes, page_tokens, kv_heads, head_dim)"""


def _memory(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bytes: copies must not look at them, and a NaN must stay the NaN that it was."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).view(shape)


def planes_first(size: Size, dtype: torch.dtype) -> torch.Tensor:
    pages, planes, tokens, heads, dim = size
    return _memory(dtype, planes, pages, tokens, heads, dim).permute(1, 0, 2, 3, 4)


def pages_first(size: Size, dtype: torch.dtype) -> torch.Tensor:
    return _memory(dtype, *size)


def heads_first(size: Size, dtype: torch.dtype) -> torch.Tensor:
    pages, planes, tokens, heads, dim = size
    return _memory(dtype, pages, planes, heads, tokens, dim).transpose(2, 3)


def planes_last(size: Size, dtype: torch.dtype) -> torch.Tensor:
    """(pages, heads, tokens, K behind V)."""
    pages, planes, tokens, heads, dim = size
    return (
        _memory(dtype, pages, heads, tokens, planes * dim)
        .view(pages, heads, tokens, planes, dim)
        .permute(0, 3, 2, 1, 4)
    )


def latent(size: Size, dtype: torch.dtype) -> torch.Tensor:
    """MLA, one vector a token."""
    pages, _, tokens, _, dim = size
    return _memory(dtype, pages, tokens, dim).view(pages, 1, tokens, 1, dim)


def padded(size: Size, dtype: torch.dtype) -> torch.Tensor:
    """Pages with something else between them, as in memory that several groups of layers share."""
    pages, planes, tokens, heads, dim = size
    return _memory(dtype, pages, planes + 1, tokens, heads, dim)[:, :planes]


def elements_apart(size: Size, dtype: torch.dtype) -> torch.Tensor:
    """No engine known does so; strides say all, so it must be right."""
    pages, planes, tokens, heads, dim = size
    return _memory(dtype, pages, planes, dim, tokens, heads).permute(0, 1, 3, 4, 2)


LAYOUTS: dict[str, tuple[Callable[[Size, torch.dtype], torch.Tensor], Size]] = {
    "planes first": (planes_first, (23, 2, 16, 2, 32)),
    "pages first": (pages_first, (23, 2, 16, 2, 32)),
    "heads first": (heads_first, (23, 2, 16, 2, 32)),
    "planes last": (planes_last, (23, 2, 16, 2, 32)),
    "one head": (planes_first, (23, 2, 16, 1, 64)),
    "one token": (pages_first, (23, 2, 1, 2, 32)),
    "odd sizes": (pages_first, (23, 2, 3, 5, 7)),
    "latent": (latent, (23, 1, 16, 1, 72)),
    "one vector of K and V": (heads_first, (23, 1, 16, 2, 40)),
    "padded": (padded, (23, 2, 16, 2, 32)),
    "elements apart": (elements_apart, (23, 2, 4, 2, 8)),
}


def block_of(layers: Sequence[torch.Tensor], pages: Sequence[int]) -> torch.Tensor:
    """The bytes that a block of these pages must hold, flat: by indexing, which shares nothing with what is tested."""
    found = []
    for layer in layers:
        chosen = layer.cpu().view(_INTEGERS[layer.dtype.itemsize])[list(pages)]
        found.append(chosen.transpose(0, 1).contiguous().view(torch.uint8).flatten())
    return torch.cat(found)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
