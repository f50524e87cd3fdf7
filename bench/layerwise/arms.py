"""What `kvredis bench layerwise` measures, one sample at a time. What a sample loads has been made NaN before, so that
nothing can be right by having been there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.statistics import middle, rotated

from .model import Marks, synchronize
from .result import (
    ALONE,
    BEFORE,
    BOTH,
    LAYERED,
    LOAD,
    LOADS,
    NONE,
    PREPARED,
    STORE,
    CapSample,
    LoadSample,
    PushSample,
    ShareSample,
)
from .rig import NAME, Remote, Rig, Timed, same

if TYPE_CHECKING:
    from torch import Tensor

    from kvredis.adapters.paged.jobs import ChunkMove, StoreJob
    from kvredis.adapters.paged.layerwise_store import LayerStores
    from kvredis.adapters.paged.mover import ChunkMover


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
