"""The ways to copy blocks from one array to another in this process, under one signature.

An arm gets the two arrays (Arrays), the pairs of (from, to) block numbers of one task, and a Crew of threads; when it
returns, the bytes are there. A task's blocks are all different, so threads need no order among them. torch's arms leave
threads to torch (torch.set_num_threads), the others share out the pairs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.shapes import BLOCK_TOKENS, ModelShape
from kvredis.storage.memory import copy as copying

from .pages import Region

if TYPE_CHECKING:
    import torch

Pair = tuple[int, int]

BASELINE: Final = "torch naive"

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcmp.restype = ctypes.c_int


class Crew:
    """Threads that share out the pairs of a task; one thread is the caller itself."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvredis-bench") if threads > 1 else None
        if self._pool is not None:
            met = Barrier(threads)  # all of them are there before anything is timed
            list(self._pool.map(lambda _number: met.wait(), range(threads)))

    def each(self, copy: Callable[[Sequence[Pair]], None], pairs: Sequence[Pair]) -> None:
        """Call `copy` with all pairs, or with one part of them in each thread; return when all have."""
        if self._pool is None:
            copy(pairs)
        else:
            list(self._pool.map(copy, [pairs[part :: self.threads] for part in range(self.threads)]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of a block in both arrays, by its offset in bytes from the arrays' start."""

    of: int  # where block 0's piece begins
    stride: int  # from one block's piece to the next block's
    nbytes: int


class Arrays:
    """Two arrays of the same size, and what each arm sees in them.

    Blockwise a block is one range of bytes: (blocks, layers, 2, tokens, kv_heads, head_dim). Layerwise, as engines keep
    it, it is 2 x layers ranges: (layers, 2, blocks, tokens, kv_heads, head_dim). Elements are written as float16 where
    they have two bytes; no arm computes with them.
    """

    def __init__(self, shape: ModelShape, blocks: int, source: Region, target: Region) -> None:
        if min(source.nbytes, target.nbytes) < blocks * shape.block_bytes():
            raise BenchError(f"{blocks} blocks of {shape.name} do not fit the bench's memory")
        import torch

        self.shape, self.blocks, self.block_bytes = shape, blocks, shape.block_bytes()
        nbytes = blocks * self.block_bytes
        self.source, self.target = source.view[:nbytes], target.view[:nbytes]
        self.source_address, self.target_address = source.address, target.address
        dtype = {1: torch.uint8, 2: torch.float16, 4: torch.float32}[shape.dtype_bytes]
        from_torch, to_torch = (torch.frombuffer(view, dtype=dtype) for view in (self.source, self.target))
        tokens = (BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        blockwise = (blocks, shape.layers, 2, *tokens)
        layerwise = (shape.layers, 2, blocks, *tokens)
        self.torch_blocks: tuple[torch.Tensor, torch.Tensor] = (from_torch.view(blockwise), to_torch.view(blockwise))
        self.torch_layers = (list(from_torch.view(layerwise)), list(to_torch.view(layerwise)))
        self.numpy_blocks: tuple[Any, Any] = (self.torch_blocks[0].numpy(), self.torch_blocks[1].numpy())

    def pieces(self, layerwise: bool) -> list[Piece]:
        """Give the ranges of bytes that make one block."""
        if not layerwise:
            return [Piece(0, self.block_bytes, self.block_bytes)]
        half = self.shape.layer_bytes(BLOCK_TOKENS) // 2
        return [Piece(at * half * self.blocks, half, half) for at in range(2 * self.shape.layers)]

    def wipe(self) -> None:
        """Zero the target, so that no comparison passes on what an earlier arm left."""
        ctypes.memset(self.target_address, 0, self.target.nbytes)

    def verify(self, written: Mapping[int, int], layerwise: bool, who: str) -> int:
        """Compare target blocks in full with the source blocks that were copied there, as {to: from}.

        Gives the bytes compared; raises VerificationError at the first wrong block.
        """
        for piece in self.pieces(layerwise):
            for to, source in written.items():
                ours = self.source_address + piece.of + source * piece.stride
                theirs = self.target_address + piece.of + to * piece.stride
                if _libc.memcmp(ours, theirs, piece.nbytes):
                    raise VerificationError(f"{who} copied wrong bytes: block {source} to {to}, from byte {piece.of}")
        return len(written) * self.block_bytes

    def verify_untouched(self, written: Mapping[int, int], layerwise: bool, who: str) -> None:
        """See that every block that nobody copied to is still zero; raises VerificationError when one is not."""
        zeros = bytes(self.block_bytes)
        for piece in self.pieces(layerwise):
            for block in range(self.blocks):
                at = piece.of + block * piece.stride
                if block not in written and _libc.memcmp(self.target_address + at, zeros, piece.nbytes):
                    raise VerificationError(f"{who} wrote to block {block}, which was not asked for")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to copy. `layerwise`: a block is where engines keep it, in 2 x layers pieces."""

    name: str
    copy: Callable[[Arrays, Sequence[Pair], Crew], None]
    layerwise: bool = False


def torch_naive(arrays: Arrays, pairs: Sequence[Pair], _crew: Crew) -> None:
    """Assign block by block."""
    source, target = arrays.torch_blocks
    for block, to in pairs:
        target[to] = source[block]


def torch_layerwise(arrays: Arrays, pairs: Sequence[Pair], _crew: Crew) -> None:
    """Assign layer by layer: K and V of one block in one layer at a time."""
    sources, targets = arrays.torch_layers
    for block, to in pairs:
        for source, target in zip(sources, targets, strict=True):
            target[:, to] = source[:, block]


def torch_fancy(arrays: Arrays, pairs: Sequence[Pair], _crew: Crew) -> None:
    """Gather all blocks into new memory and scatter them from there: two passes in one statement."""
    import torch

    source, target = arrays.torch_blocks
    blocks, places = torch.tensor(pairs).T
    target[places] = source[blocks]


def torch_index_copy(arrays: Arrays, pairs: Sequence[Pair], _crew: Crew) -> None:
    """The same two passes by their names, index_select and index_copy_."""
    import torch

    source, target = arrays.torch_blocks
    blocks, places = torch.tensor(pairs).T
    target.index_copy_(0, places, source.index_select(0, blocks))


def numpy_naive(arrays: Arrays, pairs: Sequence[Pair], crew: Crew) -> None:
    """Assign block by block."""
    source, target = arrays.numpy_blocks

    def copy(some: Sequence[Pair]) -> None:
        for block, to in some:
            target[to] = source[block]

    crew.each(copy, pairs)


def memmove(arrays: Arrays, pairs: Sequence[Pair], crew: Crew) -> None:
    """Call the C library's memmove for each block; the interpreter lock is free meanwhile."""
    nbytes, source, target = arrays.block_bytes, arrays.source_address, arrays.target_address

    def copy(some: Sequence[Pair]) -> None:
        for block, to in some:
            ctypes.memmove(target + to * nbytes, source + block * nbytes, nbytes)

    crew.each(copy, pairs)


def store_copy(arrays: Arrays, pairs: Sequence[Pair], crew: Crew) -> None:
    """Copy as the store does where it must: kvredis.storage.memory.copy."""
    nbytes, source, target = arrays.block_bytes, arrays.source, arrays.target

    def copy(some: Sequence[Pair]) -> None:
        for block, to in some:
            copying.copy(target[to * nbytes : (to + 1) * nbytes], source[block * nbytes : (block + 1) * nbytes])

    crew.each(copy, pairs)


ARMS: Final = (
    Arm(BASELINE, torch_naive),
    Arm("torch layer by layer", torch_layerwise, layerwise=True),
    Arm("torch fancy index", torch_fancy),
    Arm("torch index_copy_", torch_index_copy),
    Arm("numpy naive", numpy_naive),
    Arm("memmove", memmove),
    Arm("kvredis copy", store_copy),
)
