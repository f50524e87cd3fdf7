"""SGLang's host pools as memory of pages: where each page of a pool lies, and under which keys pages of it are stored.

A pool tells the addresses of a page's pieces (get_page_buffer_meta), which is all that is needed to fill it without a
copy of ours between. One value holds all pieces of a page behind each other, in the pool's order. A pool that cannot
tell is copied by the whole page (get_data_page, set_from_flat_data_page).

This file knows SGLang's pools by what they can do, and does not import SGLang.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from .page_keys import page_prefix
from .page_store import Page
from .page_value import PageFormat, memory_at

FORM: Final = "pieces"
FLAT_FORM: Final = "flat"
"""The bytes of a page as get_data_page gives them, which some layouts order otherwise than their pieces."""


def is_logical(host_pool: Any) -> bool:
    """Whether a pool has no memory of its own: it only counts the pages that the other pools hold."""
    return getattr(host_pool, "kv_buffer", True) is None


def pool_facts(host_pool: Any) -> dict[str, Any]:
    """What the bytes of a pool's pages depend on, of what the pool knows itself."""
    return {
        "pool_class": type(host_pool).__name__,
        "dtype": str(getattr(host_pool, "dtype", None)),
        "layout": str(getattr(host_pool, "layout", None)),
        "page_tokens": int(getattr(host_pool, "page_size", 1) or 1),
    }


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a tensor of {tensor.device} with strides {tensor.stride()} is no page of host memory")
    return memory_at(tensor.data_ptr(), tensor.nbytes)


class FlatPages:
    """Values of tensors that SGLang hands over, of any size, under keys of one form."""

    def __init__(self, model: str, facts: Mapping[str, Any]) -> None:
        self.prefix = page_prefix(model, {**facts, "form": FLAT_FORM})
        self._model = model
        self._formats: dict[int, PageFormat] = {}

    def key(self, name: str) -> bytes:
        """The key of a page."""
        return self.prefix + name.encode("ascii", "backslashreplace")

    def page(self, name: str, tensor: torch.Tensor) -> Page:
        """The page `name` in the tensor's memory; ValueError where that is not contiguous host memory."""
        nbytes = tensor.nbytes
        if nbytes not in self._formats:
            self._formats[nbytes] = PageFormat({"engine": "sglang", "model": self._model}, nbytes)
        return Page(self.key(name), self._formats[nbytes], (bytes_of(tensor),))


class PoolPages:
    """The pages of one host pool."""

    def __init__(self, host_pool: Any, model: str, facts: Mapping[str, Any]) -> None:
        self.host_pool = host_pool
        self.page_tokens = int(getattr(host_pool, "page_size", 1) or 1)
        sizes = self._piece_sizes()
        facts = {**facts, **pool_facts(host_pool), "pieces": sizes}
        self._flat = FlatPages(model, facts) if sizes is None else None
        self.prefix = self._flat.prefix if self._flat else page_prefix(model, {**facts, "form": FORM})
        self._format = PageFormat({"engine": "sglang", "model": model}, sum(sizes or ()))

    @property
    def is_addressed(self) -> bool:
        """Whether the pool tells where its pages lie."""
        return self._flat is None

    def key(self, name: str) -> bytes:
        """The key of a page."""
        return self.prefix + name.encode("ascii", "backslashreplace")

    def fits(self, names: Sequence[str], host_indices: torch.Tensor | None) -> bool:
        """Whether there is an index for each token of each page."""
        return host_indices is not None and host_indices.numel() == len(names) * self.page_tokens

    def pages(self, names: Sequence[str], host_indices: torch.Tensor) -> list[Page]:
        """The pages at these indices of a pool that is_addressed."""
        addresses, sizes = self.host_pool.get_page_buffer_meta(host_indices)
        each = len(addresses) // max(len(names), 1)
        pieces = [memory_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return [
            Page(self.key(name), self._format, pieces[place * each : (place + 1) * each])
            for place, name in enumerate(names)
        ]

    def copies(self, names: Sequence[str], host_indices: torch.Tensor | None = None) -> list[tuple[Page, torch.Tensor]]:
        """Pages of a pool that is not: copies of those at the indices, or empty ones to be filled."""
        assert self._flat is not None
        tensors = [self.host_pool.get_dummy_flat_data_page() for _ in names]
        if host_indices is not None:
            starts = host_indices.tolist()[:: self.page_tokens]
            tensors = [self.host_pool.get_data_page(start, flat=True).contiguous() for start in starts]
        return [(self._flat.page(name, tensor), tensor) for name, tensor in zip(names, tensors, strict=True)]

    def _piece_sizes(self) -> list[int] | None:
        try:
            _, sizes = self.host_pool.get_page_buffer_meta(torch.zeros(self.page_tokens, dtype=torch.int64))
        except (NotImplementedError, ValueError, AttributeError, TypeError):
            return None
        return [int(size) for size in sizes]
