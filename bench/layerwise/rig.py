"""Where `kvredis bench layerwise` measures: a model, its pages, and a ChunkMover between these and a store.

What `kvredis bench layerwise` measures, one sample at a time. What a sample loads has been made NaN before, so that
nothing can be right by having been there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict

from kvredis.bench.core.compute import DTYPES
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.shapes import BLOCK_TOKENS
from kvredis.bench.core.statistics import middle, rotated

from .model import Marks, PagedModel, synchronize

if TYPE_CHECKING:
    from torch import Tensor

    from kvredis.adapters.paged.jobs import ChunkMove, StoreJob
    from kvredis.adapters.paged.layerwise_store import LayerStores
    from kvredis.adapters.paged.mover import ChunkMover
    from kvredis.backends.base import Backend

NONE, BEHIND, LAYERED = "none", "behind", "layered"
PUSHES: Final = (NONE, BEHIND, LAYERED)
ALONE, BEFORE, PREPARED = "alone", "before", "prepared"
LOADS: Final = (ALONE, BEFORE, LAYERED, PREPARED)
STORE, LOAD, BOTH = "store", "load", "both"
CAPS: Final = (STORE, LOAD, BOTH)


class PushSample(TypedDict):
    repeat: int
    seconds: float  # from the first step's begin to the last one's end
    drain_seconds: float  # from then on until all is stored
    steps: int
    steps_ahead: int
    lead_ms: float  # least of the steps; negative: layer 0 was late
    tail_ms: float  # most


class LoadSample(TypedDict):
    repeat: int
    alone_seconds: float
    before_seconds: float
    load_seconds: float  # of the arm that loads before
    layered_seconds: float
    layered_exposed_seconds: float  # begin, each layer, end
    prepared_seconds: float
    prepared_exposed_seconds: float


class CapSample(TypedDict):
    repeat: int
    nbytes: int
    seconds: float
    gb_per_s: float
    load_gb_per_s: float | None


class ShareSample(TypedDict):
    repeat: int
    step_seconds: float  # median of the steps
    exposed_seconds: float  # likewise


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


class _Leaving:
    """A Hook that sends each layer off, and notes when the last one was computed."""

    def __init__(self, mover: ChunkMover, marks: Marks, last: int) -> None:
        self._mover, self._marks, self._last = mover, marks, last
        self.jobs: list[StoreJob] = []
        """Of the step that comes next."""
        self.steps: list[tuple[LayerStores, int]] = []

    def __call__(self, layer: int) -> None:
        computed = self._marks.mark()
        self._mover.save_layer(layer, self.jobs)
        stores = self._mover.layer_stores
        if layer == self._last and stores is not None and stores.errands:
            self.steps.append((stores, computed))


def push(rig: Rig, arm: str, steps: Sequence[range], repeat: int) -> PushSample:
    """Prefill by these steps of tokens, store in the arm's way, and read all of it back."""
    from kvredis.adapters.paged.jobs import StoreJob

    model, last, tokens = rig.model, rig.layers[-1], steps[-1].stop
    ids, name = model.tokens(tokens), f"push/{repeat}/{arm}"
    with rig.mover() as mover:
        marks = Marks(model.device)
        leaving = _Leaving(mover, marks, last)
        began_s = time.monotonic()
        for step in steps:
            chunks = range(step.start // rig.chunk_tokens, step.stop // rig.chunk_tokens)
            moves = rig.moves(name, chunks)
            jobs = [StoreJob(NAME, moves, step.stop)] if moves and arm != NONE else []
            if arm == LAYERED:
                leaving.jobs = jobs
                model.forward(ids[step.start : step.stop], step.start, after=leaving)
            else:
                model.forward(ids[step.start : step.stop], step.start)
            synchronize(model.device)  # as an engine does that samples a token
            if arm == LAYERED:
                mover.end_layers()
            elif jobs:
                mover.store(jobs[0])
        seconds = time.monotonic() - began_s
        rig.settle(mover)
        drain_s = time.monotonic() - began_s - seconds
        if arm != NONE:
            moves = rig.moves(name, range(tokens // rig.chunk_tokens))
            rig.backend.flush()
            rig.read_back(mover, moves, rig.held(moves), f"prefill, {arm}")
            rig.backend.delete([move.key for move in moves])
        at_s = marks.seconds()
    leads = [(at_s[computed] - stores.stored_s[0]) * 1e3 for stores, computed in leaving.steps]
    tails = [(stores.stored_s[last] - at_s[computed]) * 1e3 for stores, computed in leaving.steps]
    return PushSample(
        repeat=repeat, seconds=seconds, drain_seconds=drain_s,
        steps=len(leads), steps_ahead=sum(lead > 0 for lead in leads),
        lead_ms=min(leads, default=0.0), tail_ms=max(tails, default=0.0),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that has been computed and stored, and what the model makes of what is behind it."""

    moves: list[ChunkMove]
    held: list[Tensor]
    ids: Tensor
    """Of the tokens behind it."""
    tokens: int
    """Of the prefix."""
    logits: Tensor
    """Of the last of `ids`."""
    decoded: list[Tensor]
    """Logits of each step of decoding right behind the prefix, the likeliest token each time."""

    @property
    def nbytes(self) -> int:
        """Of the prefix' KV."""
        return sum(layer.nbytes for layer in self.held)


def prefix(rig: Rig, tokens: int, more: int, steps: int) -> Prefix:
    """Compute and store a prefix; compute `more` tokens behind it, and decode so many steps."""
    ids, moves = rig.model.tokens(tokens + more), rig.moves("prefix", range(tokens // rig.chunk_tokens))
    rig.model.forward(ids[:tokens], 0)
    synchronize(rig.model.device)
    held, behind = rig.held(moves), ids[tokens:]
    with rig.mover() as mover:
        rig.store(mover, moves)
        rig.read_back(mover, moves, held, "prefix")
    logits = rig.forward(behind, tokens).logits
    decoded, token = [], behind[:1]
    for step in range(steps):
        decoded.append(rig.forward(token, tokens + step).logits)
        token = decoded[-1].argmax(dim=-1, keepdim=True)
    return Prefix(moves, held, behind, tokens, logits, decoded)


def load(rig: Rig, mover: ChunkMover, known: Prefix, prepare_s: float, repeat: int) -> LoadSample:
    """Compute what is behind the prefix, with the prefix there, loaded before, and loaded layer by layer, at once or
    behind `prepare_s` in which the engine prepares the step."""
    from kvredis.adapters.paged.jobs import LoadJob

    made: dict[str, Timed] = {}
    load_s = 0.0
    for arm in rotated(LOADS, repeat):
        leased = mover.stats()["leased_ahead_chunks"]
        if arm != ALONE:
            rig.spoil(known.moves)
        if arm in (LAYERED, PREPARED):
            remote = Remote(mover, tuple(rig.layers), known.moves)
            if arm == PREPARED:
                rig.prepare(remote, known.ids, known.tokens, prepare_s)
            made[arm] = rig.layered(remote, known.ids, known.tokens)
        else:
            began_s = time.monotonic()
            if arm == BEFORE:
                mover.load_now(LoadJob(NAME, known.moves))
                load_s = time.monotonic() - began_s
            timed = rig.forward(known.ids, known.tokens)
            made[arm] = Timed(timed.logits, time.monotonic() - began_s)
        rig.check_loaded(mover, f"prefix, {arm}")
        ahead = mover.stats()["leased_ahead_chunks"]
        if (ahead > leased) != (arm == PREPARED):
            raise BenchError(f"prefix, {arm}: {ahead - leased} chunks were leased before the step began")
        rig.compare(known.moves, known.held, f"prefix, {arm}")
        same(made[arm].logits, known.logits, f"prefix, {arm}")
    return LoadSample(
        repeat=repeat, alone_seconds=made[ALONE].seconds, before_seconds=made[BEFORE].seconds, load_seconds=load_s,
        layered_seconds=made[LAYERED].seconds, layered_exposed_seconds=made[LAYERED].exposed_s,
        prepared_seconds=made[PREPARED].seconds, prepared_exposed_seconds=made[PREPARED].exposed_s,
    )  # fmt: skip


def cap(rig: Rig, mover: ChunkMover, known: Prefix, nbytes: int, repeat: int) -> dict[str, CapSample]:
    """Store at least `nbytes`, load them, and load them again beside a store of others."""
    from kvredis.adapters.paged.jobs import LoadJob, StoreJob

    rounds = -(-nbytes // known.nbytes)
    chunks = range(len(known.moves))
    sets = [[rig.moves(f"cap/{repeat}/{part}/{each}", chunks) for each in range(rounds)] for part in "ab"]
    first, second = ([move for moves in each for move in moves] for each in sets)
    total, made = rounds * known.nbytes, {}
    for way in (STORE, LOAD, BOTH):
        if way == LOAD:
            rig.spoil(known.moves)  # not for both: the store reads these pages
        load_s = 0.0
        began_s = time.monotonic()
        if way != LOAD:
            mover.store(StoreJob(NAME, first if way == STORE else second, 0))
        if way != STORE:
            mover.load_now(LoadJob(NAME, first))
            load_s = time.monotonic() - began_s
        rig.settle(mover)
        seconds = time.monotonic() - began_s
        rig.backend.flush()
        rig.check_loaded(mover, f"cap, {way}")
        rig.compare(known.moves, known.held, f"cap, {way}")
        moved = total * (2 if way == BOTH else 1)
        made[way] = CapSample(
            repeat=repeat, nbytes=moved, seconds=seconds, gb_per_s=moved / seconds / 1e9,
            load_gb_per_s=total / load_s / 1e9 if way == BOTH else None,
        )  # fmt: skip
    with rig.mover() as unbound:
        for moves in (*sets[0], *sets[1]):
            rig.read_back(unbound, moves, known.held, "cap")
    rig.backend.delete([move.key for move in (*first, *second)])
    return made


def share(rig: Rig, remote: Remote | None, known: Prefix, repeat: int) -> ShareSample:
    """Decode behind the prefix while some layers are remote: spoilt before each step, and loaded in it."""
    count = 0 if remote is None else len(remote.places)
    token, timed = known.ids[:1], list[Timed]()
    for step, logits in enumerate(known.decoded):
        start, what = known.tokens + step, f"decoding with {count} remote layers, step {step}"
        if remote is None:
            timed.append(rig.forward(token, start))
        else:
            rig.spoil(remote.moves, remote.places)
            timed.append(rig.layered(remote, token, start))
            rig.check_loaded(remote.mover, what)
        same(timed[-1].logits, logits, what)
        rig.compare(known.moves, known.held, what)  # with none too: it leaves a CPU's caches as cold
        token = logits.argmax(dim=-1, keepdim=True)
    return ShareSample(
        repeat=repeat,
        step_seconds=middle([each.seconds for each in timed]),
        exposed_seconds=middle([each.exposed_s for each in timed]),
    )


def remote_places(layers: int, share: float) -> tuple[int, ...]:
    """Which layers are remote at a share: evenly spread, and the first as late as can be, so that it has time to come;
    of any share above 0 at least one."""
    count = max(round(share * layers), share > 0)
    return tuple(place for place in range(layers) if (place + 1) * count // layers > place * count // layers)
