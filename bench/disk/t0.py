"""T0 of the disk bench: a plain copy of the same blocks in memory, that every table of the field divides by.

With torch it is the field's own: a Python loop of `target[to] = source[from]`, a block a turn, with as many threads as
torch takes. Without torch it is memmove. Either copies from the very images that are written to the places that are
read into, on the same pages.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

from .blocks import Blocks

_RUNS: Final = 3


class PlainCopy:
    """T0 over `blocks`. `name` says what copies."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._copy, self.name = self._by_torch() if find_spec("torch") is not None else self._by_memmove()

    def seconds(self, shift: int) -> float:
        """Copy every block, as pass `shift` has it, three times; give the least time. Compared in full.

        The least: torch's threads wait for one another, and a core that somebody else holds makes T0 several times as
        long, which would flatter everything that is divided by it.
        """
        times_s = []
        self._blocks.wipe()
        for _ in range(_RUNS):
            start_s = time.perf_counter()
            for index in range(self._blocks.count):
                self._copy((index + shift) % self._blocks.count, index)
            times_s.append(time.perf_counter() - start_s)
        self._blocks.verify(shift, self.name, self._blocks.size_bytes)
        return min(times_s)

    def _by_torch(self) -> tuple[Callable[[int, int], None], str]:
        import torch

        blocks = self._blocks
        images = [torch.frombuffer(blocks.image(index, 0), dtype=torch.uint8) for index in range(blocks.count)]
        places = [torch.frombuffer(blocks.place(index), dtype=torch.uint8) for index in range(blocks.count)]

        def copy(source: int, target: int) -> None:
            places[target][:] = images[source]

        threads = torch.get_num_threads()
        return copy, f"torch {torch.__version__} block to block, torch.get_num_threads() = {threads}"

    def _by_memmove(self) -> tuple[Callable[[int, int], None], str]:
        blocks = self._blocks
        images = [ctypes.addressof(ctypes.c_char.from_buffer(blocks.image(at, 0))) for at in range(blocks.count)]
        places = [ctypes.addressof(ctypes.c_char.from_buffer(blocks.place(at))) for at in range(blocks.count)]

        def copy(source: int, target: int) -> None:
            ctypes.memmove(places[target], images[source], blocks.stride_bytes)

        return copy, "memmove by one thread (torch is not installed)"
