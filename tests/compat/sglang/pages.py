"""What pages of SGLang's host pools must hold: random bytes that follow from a page's name and its pool's, so that any
process knows what any other must have stored."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.utils import get_hash_str

PAGE_TOKENS = 16


def tokens_of(prompt: int, pages: int) -> list[int]:
    """The tokens of a prompt."""
    return [prompt * 100_000 + place for place in range(pages * PAGE_TOKENS)]


def names(prompt: int, pages: int) -> list[str]:
    """SGLang's hashes of a prompt's pages."""
    hashes: list[str] = get_hash_str(tokens_of(prompt, pages), None, page_size=PAGE_TOKENS)
    return hashes


def content(pool: Any, key: str, pool_name: str) -> torch.Tensor:
    """What a page of a pool must be, as the pool gives it."""
    dummy = pool.get_dummy_flat_data_page()
    noise = torch.Generator().manual_seed(zlib.crc32(f"{key} {pool_name}".encode()))
    return torch.randint(0, 256, (dummy.nbytes,), dtype=torch.uint8, generator=noise).view(dummy.dtype)


def fill(pool: Any, keys: Sequence[str], pool_name: str, indices: torch.Tensor) -> None:
    """Have the pages at `indices` hold what they must."""
    for key, start in zip(keys, indices.tolist()[:: pool.page_size], strict=True):
        pool.set_from_flat_data_page(start, content(pool, key, pool_name))


def filled(pool: Any, keys: Sequence[str], pool_name: str) -> torch.Tensor:
    """Indices of pages that hold what they must."""
    indices: torch.Tensor = pool.alloc(len(keys) * pool.page_size)
    fill(pool, keys, pool_name, indices)
    return indices


def are_equal(pool: Any, keys: Sequence[str], pool_name: str, indices: torch.Tensor, come: Sequence[bool]) -> bool:
    """Whether all pages that have come are what they must be."""
    pages = zip(keys, indices.tolist()[:: pool.page_size], come, strict=True)
    return all(
        torch.equal(pool.get_data_page(start).view(torch.uint8), content(pool, key, pool_name).view(torch.uint8))
        for key, start, has in pages
        if has
    )
