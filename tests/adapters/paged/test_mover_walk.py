"""Anything at any moment: loads, stores, layers, cancels, damage and evictions in an order drawn by lot, over a GPU
that does things late and in an order of its own. Whatever comes of it: what has come is right, nothing else is written,
and nothing is held in the end.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing

import pytest
import torch

from kvredis.adapters.paged.jobs import ChunkMove, LoadJob, MovingOptions, StoreJob
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.adapters.transfer.base import Transfer
from kvredis.adapters.transfer.cpu import HostTransfer
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.cuda.tuning import Tuning
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.backends.local import LocalBackend
from tests.adapters.paged_engine import PAGES_A_CHUNK, WAIT_S, PagedEngine, assert_rests, pages_in
from tests.adapters.transfer.lazy_gpu import LazyGpu
from tests.storage.small_store import small_store

STEPS = 150
PROMPTS = 6
CHUNKS = 4
PAGES = 60


def on_lazy_gpu(paged: PagedKV) -> Transfer:
    return RingTransfer(paged, LazyGpu(paged, paged.pages), Tuning(slot_bytes=20_000, slots=2))


FREE = 7
"""What free pages hold."""
UNWRITTEN = -7
"""What pages hold that a load is to write."""


class Walk:
    """An engine that lends pages to requests, and knows what a block of each key must hold."""

    def __init__(self, seed: int, engine: PagedEngine, mover: ChunkMover, backend: LocalBackend) -> None:
        self.lot = random.Random(seed)
        self.engine, self.mover, self.backend = engine, mover, backend
        self.free = [list(range(PAGES)) for _ in engine.groups]
        self.truth: dict[bytes, bytes] = {}
        self.jobs: dict[str, list[ChunkMove]] = {}
        self.cancelled: set[str] = set()
        self.stores: set[str] = set()
        self.compared = self.number = 0
        for group, pages in enumerate(self.free):
            self._wipe(group, pages, FREE)

    def run(self) -> dict[str, int | float]:
        """Take all steps, cancel half of what is left, and look at it all when it is over. Gives the mover's
        counters."""
        for _ in range(STEPS):
            self.step()
        for name in sorted(self.jobs)[::2]:
            self.mover.cancel(name)
            self.cancelled.add(name)
        assert self.mover.settle(WAIT_S)
        self.look()
        assert not self.jobs
        assert [len(free) for free in self.free] == [PAGES, PAGES]
        return self.mover.stats()

    def step(self) -> None:
        """One thing that an engine may do, or that may happen to it."""
        kinds = [self.load, self.store, self.cancel, self.layers, self.damage, self.look, self.evict, self.rest]
        self.lot.choices([*kinds, self.let_go], [6, 6, 3, 3, 1, 4, 1, 2, 3])[0]()

    def load(self) -> None:
        name, moves = self._take(UNWRITTEN)
        self.mover.load(LoadJob(name, moves))

    def store(self) -> None:
        name, moves = self._take(FREE)
        for move in moves:
            for layer in range(self.engine.layouts[move.group].layers):
                self._compute(move, layer)
            self.truth.setdefault(move.key, self.engine.bytes_of(move))
        self.stores.add(name)
        self.mover.store(StoreJob(name, moves, 100))

    def layers(self) -> None:
        """A step that stores a request layer by layer while another is loaded; some end too early."""
        (one, coming), (other, going) = self._take(UNWRITTEN), self._take(FREE)
        self.mover.load(LoadJob(one, coming))
        for place in range(self.lot.choice([4, 6, 6, 6])):
            for move in going:
                layer = self.engine.groups[move.group].layer_of(place)
                if layer is not None:
                    self._compute(move, layer)
            self.mover.save_layer(place, [StoreJob(other, going, 100)])
            if self.lot.random() < 0.05:
                self.mover.cancel(one)
                self.cancelled.add(one)
        for move in going:
            for layer in range(self.engine.layouts[move.group].layers):
                self._compute(move, layer)
            self.truth.setdefault(move.key, self.engine.bytes_of(move))
        self.stores.add(other)
        self.mover.end_layers()

    def cancel(self) -> None:
        if self.jobs:
            name = self.lot.choice(sorted(self.jobs))
            self.cancelled.add(name)
            if self.mover.cancel(name, self.lot.choice([0.0, WAIT_S])):
                self.look()
                assert name not in self.jobs, "its pages are free, so it was told of"

    def let_go(self) -> None:
        """A page that a store reads becomes another's, which writes it."""
        if names := sorted(self.stores & self.jobs.keys()):
            name = self.lot.choice(names)
            move = self.lot.choice(self.jobs[name]) if self.jobs[name] else None
            if move is not None:
                page = self.lot.choice(move.pages)
                if self.mover.let_go(name, {(move.group, page)}, self.lot.choice([0.0, WAIT_S])):
                    self._wipe(move.group, [page], UNWRITTEN)

    def damage(self) -> None:
        """A bit of a stored block flips."""
        keys = [key for key in sorted(self.truth) if self.backend.store.find(key) is not None]
        if keys:
            key = self.lot.choice(keys)
            for lease in self.backend.load([key]):
                if lease is not None:
                    with lease:
                        value = bytearray(lease.view)
                    value[-self.lot.randrange(1, len(value) - 1024)] ^= 1
                    self.backend.store.put(key, bytes(value))

    def rest(self) -> None:
        """Ask for nothing until all is done. Without it the mover, on a busy machine, may stand still while all steps
        go by: most stores are dropped then, and no load finds anything."""
        assert self.mover.settle(WAIT_S)
        self.look()

    def evict(self) -> None:
        self.backend.delete(self.lot.sample(sorted(self.truth), min(3, len(self.truth))))

    def look(self) -> None:
        """Take pages back, and see what is in them and in the others."""
        finished = self.mover.finished()
        assert finished.failed_pages.keys() <= finished.loaded
        for name in finished.loaded | finished.stored:
            moves, failed = self.jobs.pop(name), set(finished.failed_pages.get(name, ()))
            for move in moves:
                if name in finished.loaded and name not in self.cancelled and not failed & pages_in([move]):
                    assert self.engine.bytes_of(move) == self.truth[move.key]
                    self.compared += 1
                self.free[move.group] += move.pages
                self._wipe(move.group, move.pages, FREE)
        for layers, pages in zip(self.engine.memory, self.free, strict=True):
            for layer in layers:
                assert bool((layer[pages].contiguous().view(torch.int16) == FREE).all()), "a free page was written"

    def _take(self, bits: int) -> tuple[str, list[ChunkMove]]:
        """A new request with pages of its own, for chunks that are stored, or will be, or never are."""
        self.look()
        self.number += 1
        prompt, moves = self.lot.randrange(PROMPTS), []
        for group, free in enumerate(self.free):
            for place in range(min(self.lot.randrange(1, CHUNKS + 1), len(free) // PAGES_A_CHUNK)):
                self.lot.shuffle(free)
                pages = tuple(free.pop() for _ in range(PAGES_A_CHUNK))
                moves.append(ChunkMove(b"kv:%d:%d:%d" % (prompt, group, place), group, pages))
                self._wipe(group, pages, bits)
        self.jobs[f"r{self.number}"] = moves
        return f"r{self.number}", moves

    def _compute(self, move: ChunkMove, layer: int) -> None:
        """The same for the same key."""
        memory = self.engine.memory[move.group][layer]
        for place, page in enumerate(move.pages):
            draw = torch.Generator().manual_seed(zlib.crc32(move.key + bytes([layer, place])))
            bits = torch.randint(-30000, 30000, memory[page].shape, generator=draw, dtype=torch.int16)
            memory[page] = bits.view(memory.dtype)

    def _wipe(self, group: int, pages: Sequence[int], bits: int) -> None:
        for layer in self.engine.memory[group]:
            layer[list(pages)] = torch.full(layer[list(pages)].shape, bits, dtype=torch.int16).view(layer.dtype)


@pytest.mark.parametrize("transfer", [HostTransfer, on_lazy_gpu], ids=["host", "lazy gpu"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_asked_what_has_come_is_right_and_nothing_else_is_written(
    seed: int, transfer: Callable[[PagedKV], Transfer]
) -> None:
    engine, backend = PagedEngine(pages=PAGES, transfer=transfer), LocalBackend(small_store())
    options = MovingOptions(
        batch_bytes=[1, 60_000, 1 << 20][seed % 3], window_bytes=100_000, max_load_chunks=20, max_store_chunks=20
    )
    with closing(ChunkMover(backend, engine.groups, options)) as mover:
        walk = Walk(seed, engine, mover, backend)
        stats = walk.run()
    assert walk.compared >= 10, "else it has shown nothing"
    assert stats["corrupt_chunks"] + stats["missing_chunks"] > 0
    assert stats["errors"] == stats["loading_chunks"] == stats["storing_chunks"] == 0
    assert_rests(backend)
    backend.close()
