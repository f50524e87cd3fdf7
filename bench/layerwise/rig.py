"""Where `kvredis bench layerwise` measures: a model, its pages, and a ChunkMover between these and a store."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvredis.bench.core.compute import DTYPES
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.shapes import BLOCK_TOKENS

from .model import Marks, PagedModel, synchronize

if TYPE_CHECKING:
    from torch import Tensor

    from kvredis.adapters.paged.jobs import ChunkMove
    from kvredis.adapters.paged.mover import ChunkMover
    from kvredis.backends.base import Backend

NAME: Final = "layerwise"
"""Of every request: each has a mover of its own, or comes after the one before."""
_SETTLE_S: Final = 120.0
_CHUNKS_MOST: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Timed:
    """One forward pass; `exposed_s` of it the device was idle for loads."""

    logits: Tensor
    seconds: float
    exposed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Remote:
    """Layers of which the chunks `moves` are not in the engine when a step begins, and who brings them."""

    mover: ChunkMover
    places: tuple[int, ...]
    moves: list[ChunkMove]


class Rig:
    """A model over pages and a backend for its chunks; both are the caller's. Errors that are about bytes are
    VerificationError."""

    def __init__(self, model: PagedModel, backend: Backend, chunk_tokens: int) -> None:
        self.model, self.backend, self.chunk_tokens = model, backend, chunk_tokens
        self.verified_bytes = 0
        self._chunk_pages = chunk_tokens // BLOCK_TOKENS

    @property
    def layers(self) -> range:
        """All layers of the model."""
        return range(self.model.shape.layers)

    @contextmanager
    def mover(self, places: Sequence[int] | None = None, bytes_per_s: float | None = None) -> Iterator[ChunkMover]:
        """A mover of the model's layers `places`, default all."""
        from kvredis.adapters.engine.layout import ChunkLayout
        from kvredis.adapters.paged.jobs import MovingOptions, PagedGroup
        from kvredis.adapters.paged.mover import ChunkMover
        from kvredis.adapters.transfer.factory import open_transfer
        from kvredis.adapters.transfer.kv_cache import PagedKV

        shape, chosen = self.model.shape, tuple(self.layers if places is None else places)
        layout = ChunkLayout(
            len(chosen),
            shape.kv_heads,
            shape.head_dim,
            DTYPES[shape.dtype_bytes],
            self.chunk_tokens,
            f"bench/{NAME}",
            part=",".join(map(str, chosen)),
        )
        paged = PagedKV([self.model.memory[place] for place in chosen])
        transfer = open_transfer(paged, sums=True)  # as engines' adapters do
        options = MovingOptions(max_load_chunks=_CHUNKS_MOST, max_store_chunks=_CHUNKS_MOST, bytes_per_s=bytes_per_s)
        mover = ChunkMover(self.backend, [PagedGroup(layout, paged, transfer, chosen)], options)
        try:
            yield mover
        finally:
            mover.close()
            transfer.close()

    def moves(self, name: str, chunks: range) -> list[ChunkMove]:
        """The sequence's chunks of these numbers, under keys of `name`."""
        from kvredis.adapters.paged.jobs import ChunkMove

        size, table = self._chunk_pages, self.model.table
        return [
            ChunkMove(f"{NAME}/{name}/{chunk}".encode(), 0, tuple(table[chunk * size : (chunk + 1) * size]))
            for chunk in chunks
        ]

    def pages(self, moves: Sequence[ChunkMove]) -> Tensor:
        """Their pages, on the model's device."""
        import torch

        return torch.tensor([page for move in moves for page in move.pages], device=self.model.device)

    def held(self, moves: Sequence[ChunkMove]) -> list[Tensor]:
        """A copy of what every layer has in these pages."""
        pages = self.pages(moves)
        return [layer[pages] for layer in self.model.memory]

    def spoil(self, moves: Sequence[ChunkMove], places: Collection[int] | None = None) -> None:
        """Make those pages NaN, of all layers or `places`; over when this returns."""
        pages = self.pages(moves)
        for place in self.layers if places is None else places:
            self.model.memory[place].index_fill_(0, pages, float("nan"))
        synchronize(self.model.device)

    def compare(self, moves: Sequence[ChunkMove], held: Sequence[Tensor], what: str) -> None:
        """Raises VerificationError unless those pages hold what they held."""
        import torch

        pages = self.pages(moves)
        for place, (layer, before) in enumerate(zip(self.model.memory, held, strict=True)):
            if not torch.equal(layer[pages].view(torch.uint8), before.view(torch.uint8)):
                raise VerificationError(f"{what}: layer {place} came back with other bytes than were stored")
            self.verified_bytes += before.nbytes

    def store(self, mover: ChunkMover, moves: list[ChunkMove]) -> None:
        """Store them, and see that they are there."""
        from kvredis.adapters.paged.jobs import StoreJob

        mover.store(StoreJob(NAME, moves, 0))
        self.settle(mover)
        self.backend.flush()
        self.check_stored(moves)

    def check_stored(self, moves: Sequence[ChunkMove]) -> None:
        """Raises BenchError unless all of them are there."""
        there = self.backend.match([move.key for move in moves])
        if there < len(moves):
            raise BenchError(f"only {there} of {len(moves)} chunks could be stored")

    def settle(self, mover: ChunkMover) -> None:
        """Wait until nothing is under way."""
        if not mover.settle(_SETTLE_S):
            raise BenchError(f"what was asked for was not over after {_SETTLE_S:g} s")

    def read_back(self, mover: ChunkMover, moves: list[ChunkMove], held: Sequence[Tensor], what: str) -> None:
        """Load what is in the store into pages made NaN before, and compare."""
        from kvredis.adapters.paged.jobs import LoadJob

        self.spoil(moves)
        mover.load_now(LoadJob(NAME, moves))
        self.check_loaded(mover, what)
        self.compare(moves, held, what)

    def check_loaded(self, mover: ChunkMover, what: str) -> None:
        """Raises VerificationError when a load since the last call has failed."""
        failed = mover.finished().failed_pages
        if failed:
            raise VerificationError(f"{what}: {sum(map(len, failed.values()))} pages did not come")

    def forward(self, ids: Tensor, start: int) -> Timed:
        """Compute, with no load in the way."""
        began_s = time.monotonic()
        logits = self.model.forward(ids, start)
        synchronize(self.model.device)
        return Timed(logits, time.monotonic() - began_s)

    def prepare(self, remote: Remote, ids: Tensor, start: int, seconds: float) -> None:
        """Say what the next step loads, and be busy with what engines prepare of a step for so long."""
        from kvredis.adapters.paged.jobs import LoadJob

        began_s = time.monotonic()
        remote.mover.lease_ahead([LoadJob(NAME, remote.moves)])
        while time.monotonic() - began_s < seconds:
            self.model.slots(len(ids), start)

    def layered(self, remote: Remote, ids: Tensor, start: int) -> Timed:
        """Compute while layers come, each waited for just before it is needed."""
        from kvredis.adapters.paged.jobs import LoadJob

        mover, device = remote.mover, self.model.device
        marks, pairs = Marks(device), list[tuple[int, int]]()

        def before(layer: int) -> None:
            if layer in remote.places:
                begun = marks.mark()
                mover.wait_layer(layer)
                pairs.append((begun, marks.mark()))

        began_s = time.monotonic()
        begun = marks.mark()
        mover.begin_layers([LoadJob(NAME, remote.moves)])
        pairs.append((begun, marks.mark()))
        logits = self.model.forward(ids, start, before)
        synchronize(device)
        computed_s = time.monotonic()
        mover.end_layers()
        ended_s = time.monotonic()
        at_s = marks.seconds()
        exposed_s = sum(at_s[end] - at_s[begin] for begin, end in pairs) + ended_s - computed_s
        return Timed(logits, ended_s - began_s, exposed_s)


def same(logits: Tensor, wanted: Tensor, what: str) -> None:
    """Raises VerificationError for an output that differs in a bit, or is no number."""
    import torch

    if not torch.equal(logits, wanted):  # of which NaN is one, too
        raise VerificationError(f"{what}: the model's output is another one")
