"""The bytes that the transports are compared on: 512 blocks of one model, moved in 8 batches of 64 random ones.

The same work for every arm, and for T0: blocks `from` of the source, drawn anew for each batch, come to be at places
`to` of the target. Over the batches of one turn every place is written once, so that after the clock has stopped every
byte of every batch can be compared. Source and target are anonymous memory for which huge pages are asked, touched
before; T0 copies between the very same two.

Which source block a key holds shifts by one with every pass of writes, as in core/workload.py.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvredis import install_line

from .errors import BenchError, VerificationError
from .shapes import ModelShape
from .workload import VALUE_OFFSET_BYTES, Memory, Workload, stride_bytes

if TYPE_CHECKING:
    import torch

BLOCKS = 512
BATCHES = 8
Pair = tuple[int, int]
Batch = list[Pair]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn's batches: (from, to) of each block. No `to` comes twice in a turn, no `from` twice in a batch."""

    batches: list[Batch]

    @property
    def pairs(self) -> list[Pair]:
        return [pair for batch in self.batches for pair in batch]


class Blocks(Workload):
    """All blocks of one shape: where they come from and where they are received. Owns both mappings."""

    def __init__(self, size_bytes: int, count: int = BLOCKS, *, seed: int = 20250106) -> None:
        """Map and fill. Raises BenchError for blocks that could not be told apart."""
        if size_bytes < 64 or size_bytes % 8 or count < BATCHES:
            raise BenchError(f"want at least {BATCHES} blocks of whole words, not {count} of {size_bytes} bytes")
        nbytes = count * stride_bytes(size_bytes)
        self.seed = seed
        super().__init__(size_bytes, count, Memory(nbytes, seed=seed), Memory(nbytes))

    @classmethod
    def of(cls, shape: ModelShape, count: int = BLOCKS) -> Blocks:
        return cls(shape.block_bytes(), count)

    @property
    def bytes_per_turn(self) -> int:
        return self.count * self.size_bytes

    def turn(self, number: int) -> Turn:
        """Draw the batches of turn `number`; the same number gives the same ones."""
        drawn = random.Random(self.seed * 1_000_003 + number)
        places, each = list(range(self.count)), self.count // BATCHES
        drawn.shuffle(places)
        batches = []
        for start in range(0, each * BATCHES, each):
            batches.append(list(zip(drawn.sample(range(self.count), each), places[start : start + each], strict=True)))
        left = places[each * BATCHES :]
        batches[-1] += [(place, place) for place in left]  # of a count that 8 does not divide
        return Turn(batches)

    def check(self, body: memoryview, held: Pair, who: str) -> None:
        """Compare `body`, wherever it lies, with what key `held[0]` held after pass `held[1]`, in full."""
        import numpy

        if len(body) != self.size_bytes or not numpy.array_equal(words(body), words(self.value(*held))):
            raise VerificationError(f"{who} returned a wrong byte of block {held[0]} ({self.size_bytes} bytes)")


def words(view: memoryview) -> Any:
    """View a block as numpy's 64-bit words, without a copy."""
    import numpy

    return numpy.frombuffer(view, numpy.uint64)


class TorchCopy:
    """T0: what every table of the field divides by, a loop of `target[to] = source[from]` over torch tensors.

    One torch thread, as a copy of one block is too small for more and idle workers would spin beside the arms; what was
    set before is set again by close(). Raises BenchError without torch.
    """

    def __init__(self, blocks: Workload) -> None:
        try:
            import torch
        except ImportError as error:
            raise BenchError(f"T0 needs torch: {install_line('bench')}") from error
        self._blocks, self._threads = blocks, torch.get_num_threads()
        torch.set_num_threads(1)
        self.threads = torch.get_num_threads()
        source, target = blocks.memories()
        self.version = str(torch.__version__)
        self.rows = self._rows(torch, source), self._rows(torch, target)
        """Source and target, a block each row."""

    def _rows(self, module: Any, memory: Memory) -> torch.Tensor:
        """View every block of a mapping as a row of 16-bit elements, which is what KV is made of, or of odd bytes."""
        size, count = self._blocks.size_bytes, self._blocks.count
        dtype, width = (module.uint8, 1) if size % 2 else (module.int16, 2)
        flat = module.frombuffer(memory.view, dtype=dtype)
        stride = stride_bytes(size) // width
        rows: torch.Tensor = flat.as_strided((count, size // width), (stride, 1), VALUE_OFFSET_BYTES // width)
        return rows

    def run(self, turn: Turn) -> float:
        """Copy one turn's blocks; gives the seconds."""
        source, target = self.rows
        start_s = time.perf_counter()
        for batch in turn.batches:
            for place_from, place_to in batch:
                target[place_to] = source[place_from]
        return time.perf_counter() - start_s

    def measure(self, turn: Turn) -> float:
        """Run, and compare every byte; gives the seconds."""
        self._blocks.wipe()
        seconds = self.run(turn)
        self._blocks.verify_pairs(turn.pairs, 0, "torch")
        return seconds

    def measure_all(self, passes: int) -> float:
        """Copy every block to its own place, so many times, and compare every byte; gives the seconds."""
        self._blocks.wipe()
        every = [(index, index) for index in range(self._blocks.count)]
        seconds = self.run(Turn([every] * passes))
        self._blocks.verify(0, "torch")
        return seconds

    def close(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
