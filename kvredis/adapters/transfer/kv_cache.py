"""PagedKV, an engine's paged KV cache: a prompt's KV is in pages that lie anywhere, layer by layer, in the engine's
order.

A stored block is one contiguous tensor of AXES' order. What lies between the two is strides and a list of page numbers:
`PagedKV` names the engine's memory in one way, whatever the engine, and copies whole pages without a step between. vLLM
calls a page a block; here a block is what is stored.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import TORCH_DTYPES, strides_of
from kvredis.storage.errors import LayoutError
from kvredis.storage.memory.copy import copy_strided

INTEGERS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""By bytes an element: what KV is copied as. torch has no index_copy_ for fp8, and a copy needs no arithmetic."""


class PagedKV:
    """The layers of one engine, or of one group of its layers, that share page numbers. The memory is the engine's.

    Each layer is a view of (pages, planes, page_tokens, kv_heads, head_dim) with any strides: an engine's adapter makes
    it with view, permute and unflatten, without a copy. Raises LayoutError unless all of them have one shape, dtype and
    device.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        if not layers:
            raise LayoutError("paged KV needs at least one layer")
        for index, layer in enumerate(layers):
            if layer.ndim != 5:
                raise LayoutError(f"paged KV of layer {index} has {layer.ndim} axes, not 5: {list(layer.shape)}")
            if (layer.shape, layer.dtype, layer.device) != (layers[0].shape, layers[0].dtype, layers[0].device):
                raise LayoutError(
                    f"paged KV of layer {index} is {list(layer.shape)} {layer.dtype} on {layer.device}, that of layer 0"
                    f" {list(layers[0].shape)} {layers[0].dtype} on {layers[0].device}"
                )
        self.layers = tuple(layers)
        self.pages, self.planes, self.page_tokens, self.kv_heads, self.head_dim = layers[0].shape
        self.dtype = layers[0].dtype
        self.device = layers[0].device
        # Indexing and index_copy_ want the pages' axis where the block has it.
        self._integers = INTEGERS[self.dtype.itemsize]
        self._by_plane = tuple(layer.view(self._integers).transpose(0, 1) for layer in layers)

    def check(self, layout: ChunkLayout) -> None:
        """Raises LayoutError that names the first difference from the layout; the engine's bytes may have another name
        of as many bytes (fp8 in uint8). A chunk must be made of whole pages."""
        found = (len(self.layers), self.planes, self.kv_heads, self.head_dim, self.dtype.itemsize)
        wanted = (layout.layers, layout.planes, layout.kv_heads, layout.head_dim, TORCH_DTYPES[layout.dtype].itemsize)
        names = ("layers", "planes", "kv_heads", "head_dim", "bytes an element")
        for name, is_here, is_wanted in zip(names, found, wanted, strict=True):
            if is_here != is_wanted:
                raise LayoutError(f"paged KV has {is_here} {name}, the layout says {is_wanted}")
        if layout.chunk_tokens % self.page_tokens:
            raise LayoutError(f"a chunk of {layout.chunk_tokens} tokens is not made of pages of {self.page_tokens}")

    def shape(self, pages: int, layers: int | None = None) -> tuple[int, int, int, int, int]:
        """(layers, planes, tokens, kv_heads, head_dim) of so many pages."""
        count = len(self.layers) if layers is None else layers
        return (count, self.planes, pages * self.page_tokens, self.kv_heads, self.head_dim)

    @torch.no_grad()
    def gather(self, pages: torch.Tensor, block: torch.Tensor, layers: range | None = None) -> None:
        """Copies pages (an int64 tensor on the KV's device, in the order of the tokens) of `layers`, default all, into
        `block`, a contiguous tensor of shape(len(pages), len(layers)), dtype and device of the KV."""
        if self._copy_natively(pages, block, layers, into_pages=False):
            return
        for layer, target in zip(self._chosen(layers), self._in_pages(block, len(pages)), strict=True):
            # index_select would first make a copy of the whole layer where it is not contiguous: 20,000 times slower.
            torch.ops.aten.index.Tensor_out(layer, [None, pages], out=target)

    @torch.no_grad()
    def scatter(self, block: torch.Tensor, pages: torch.Tensor, layers: range | None = None) -> None:
        """Copies a block into those pages, and touches no other; as `gather` else."""
        if self._copy_natively(pages, block, layers, into_pages=True):
            return
        for layer, source in zip(self._chosen(layers), self._in_pages(block, len(pages)), strict=True):
            layer.index_copy_(1, pages, source)

    @torch.no_grad()
    def clear(self, pages: Sequence[int]) -> None:
        """Makes zeros of those pages, behind what the current stream has been given."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for layer in self._by_plane:
            layer.index_fill_(1, index, 0)

    def _copy_natively(
        self, pages: torch.Tensor, block: torch.Tensor, layers: range | None, *, into_pages: bool
    ) -> bool:
        """Copy all pages of all layers in one call of our own, if it can be; one of torch's for each layer waits for
        OpenMP's threads each time, seconds a prompt on processors that have other work."""
        chosen, apart, numbers = self._chosen(layers), self._in_pages(block, len(pages)), pages.tolist()
        if not numbers or not chosen or any(layer.stride() != chosen[0].stride() for layer in chosen):
            return False
        if not 0 <= min(numbers) <= max(numbers) < self.pages:
            raise IndexError(f"pages {min(numbers)} to {max(numbers)} are not all among {self.pages}")
        page, place = chosen[0][:, 0], apart[0][:, 0]
        strides = strides_of(page, place) if into_pages else strides_of(place, page)
        if strides is None:
            return False
        size = page.itemsize
        steps = [number * chosen[0].stride(1) * size for number in numbers]
        in_pages = [base + step for base in (layer.data_ptr() for layer in chosen) for step in steps]
        first, of_layer, of_page = apart.data_ptr(), apart.stride(0) * size, apart.stride(2) * size
        in_block = [
            first + layer * of_layer + page * of_page for layer in range(len(chosen)) for page in range(len(numbers))
        ]
        to, source = (in_pages, in_block) if into_pages else (in_block, in_pages)
        copy_strided(to, source, strides)
        return True

    def _chosen(self, layers: range | None) -> tuple[torch.Tensor, ...]:
        return self._by_plane if layers is None else self._by_plane[layers.start : layers.stop]

    def _in_pages(self, block: torch.Tensor, pages: int) -> torch.Tensor:
        return block.view(self._integers).view(
            block.shape[0], self.planes, pages, self.page_tokens, self.kv_heads, self.head_dim
        )
