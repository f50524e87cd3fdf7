"""Chunks between an engine's pages on the CPU and host memory: one copy of our own a chunk, in the caller's thread."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvredis.adapters.engine.tensors import borrow

from .base import Layers, Moving, Part, Sum, check_part, check_writable, layer_parts
from .kv_cache import PagedKV


class HostTransfer:
    """The engine computes on the CPU: a part is copied when it is asked for, and done on return."""

    def __init__(self, paged: PagedKV) -> None:
        self.paged = paged

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        shapes = [check_part(self.paged, part) for part in parts]
        check_writable(parts)
        for part, shape in zip(parts, shapes, strict=True):
            if part.pages:
                block = borrow(part.memory, self.paged.dtype).view(shape)
                self.paged.gather(torch.tensor(part.pages, dtype=torch.int64), block, part.layers)
        return Moved(len(parts))

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None, is_last: bool = False) -> Moving:
        shapes = [check_part(self.paged, part) for part in parts]
        for part, shape in zip(parts, shapes, strict=True):
            if part.pages:
                block = borrow(part.memory, self.paged.dtype).view(shape)
                self.paged.scatter(block, torch.tensor(part.pages, dtype=torch.int64), part.layers)
        return Moved(len(parts))

    def layers(self, parts: Sequence[Part]) -> Layers:
        return LayersByPart(self, parts)

    def sum_of(self, nbytes: int) -> Sum | None:
        """None: the bytes pass no device."""
        return None

    def close(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A Moving that is over."""

    parts_done: int
    done: bool = True

    def wait(self, parts: int | None = None) -> None:
        """At once."""


class LayersByPart:
    """Layers (base.py) of a transfer that has nothing to plan."""

    def __init__(self, transfer: HostTransfer, parts: Sequence[Part]) -> None:
        self._transfer = transfer
        self._parts = parts

    def store(self, layer: int, count: int = 1, *, after: torch.cuda.Event | None = None) -> Moving:
        return self._transfer.store(layer_parts(self._transfer.paged, self._parts, layer, count), after=after)
