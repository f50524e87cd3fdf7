"""Pages of paged memory into and out of a staging buffer, with torch's own index operations: where there is no Triton.

Two kernels a layer. A buffer's units are ordered as ring_plan says.
"""

from typing import Protocol

import torch

from kvredis.adapters.transfer.kv_cache import INTEGERS, PagedKV

from .plan import Launch


class Index(Protocol):
    """Runs what a Launch says, on a GPU on the stream whose handle `stream` is. `slot` is a buffer's bytes, `pages` the
    job's page numbers, both where the KV is; nobody waits. Where not `takes_handle` that stream is the current one."""

    takes_handle: bool

    def gather(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        """Copy from the engine's pages into the buffer."""
        ...

    def scatter(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        """Copy from the buffer into the engine's pages."""
        ...


class TorchIndex:
    """Index by indexing and index_copy_; as many calls as layers where parts are whole or cut between layers."""

    takes_handle = False

    def __init__(self, paged: PagedKV) -> None:
        self._paged = paged
        self._integers = INTEGERS[paged.dtype.itemsize]
        self._by_plane = [layer.view(self._integers).transpose(0, 1) for layer in paged.layers]
        self._unit_shape = (paged.page_tokens, paged.kv_heads, paged.head_dim)
        self._unit_bytes = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize

    @torch.no_grad()
    def gather(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        """As Index.gather."""
        for layer, units, chosen in self._steps(launch, slot, pages):
            found = layer[:, chosen]  # index_select may copy a whole layer first, where it is not contiguous
            parts, planes, some = units.shape[:3]
            units.copy_(found.view(planes, parts, some, *self._unit_shape).transpose(0, 1))

    @torch.no_grad()
    def scatter(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        """As Index.scatter."""
        for layer, units, chosen in self._steps(launch, slot, pages):
            layer.index_copy_(1, chosen, units.transpose(0, 1).flatten(1, 2))

    def _steps(
        self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Give (planes, all pages, ...) of a layer, the buffer's (parts, planes, pages, ...), and page numbers: for the
        rest of a part that was cut, for whole ones together, for the beginning of one."""
        steps, at = [], 0
        while at < launch.total:
            part, start = divmod(launch.start + at, launch.units)
            left = launch.total - at
            parts, units = (0, min(launch.units - start, left)) if start else divmod(left, launch.units)
            if parts:
                units = launch.units
            parts = max(parts, 1)
            begin, size = (launch.slot_unit + at) * self._unit_bytes, parts * units * self._unit_bytes
            held = slot[begin : begin + size].view(self._integers).view(parts, units, *self._unit_shape)
            first = launch.first_page + part * launch.pages
            numbers = pages[first : first + parts * launch.pages].view(parts, launch.pages)
            steps += self._layers(launch.layer, start, held, numbers)
            at += parts * units
        return steps

    def _layers(
        self, layer: int, start: int, held: torch.Tensor, numbers: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """As `_steps`, of parts of which all have the same units, from `start` on."""
        parts, units = held.shape[:2]
        count = numbers.shape[1]
        steps, at = [], start
        while at < start + units:
            above, inside = divmod(at, self._paged.planes * count)
            plane, page = divmod(inside, count)
            row = start + units - at
            if page or row < count:  # some pages of one plane
                planes, some = 1, min(count - page, row)
            else:
                planes, some = min(self._paged.planes - plane, row // count), count
            there = held[:, at - start : at - start + planes * some].view(parts, planes, some, *self._unit_shape)
            source = self._by_plane[layer + above][plane : plane + planes]
            steps.append((source, there, numbers[:, page : page + some].reshape(-1)))
            at += planes * some
        return steps
