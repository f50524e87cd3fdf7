"""Loads and stores at random while the device fails and requests are cancelled: no row of a checksum is lost, and no
block has another's."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvredis.adapters.engine.block import checksum_of, open_block
from kvredis.adapters.paged.jobs import ChunkMove, LoadJob, StoreJob
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.cuda.tuning import Tuning
from kvredis.adapters.transfer.kv_cache import PagedKV
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.paged_engine import CHUNK, WAIT_S, PagedEngine, block_for, mover_on, moves_of

from .lazy_gpu import LazyGpu, LazySums

ROWS = 6
LAYERS = 6


def fail_at_times(monkeypatch: pytest.MonkeyPatch, lot: random.Random) -> None:
    """What enqueues raises now and then, before it has enqueued anything."""

    def failing(whole: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            if lot.random() < 0.02:
                raise RuntimeError("this GPU is tired")
            return whole(*given, **named)

        return called

    for name in ("gather", "scatter", "upload", "copy_in", "copy_out"):
        monkeypatch.setattr(LazyGpu, name, failing(getattr(LazyGpu, name)))
    for name in ("fold", "chain"):
        monkeypatch.setattr(LazySums, name, failing(getattr(LazySums, name)))


def load(mover: ChunkMover, lot: random.Random, moves: dict[str, list[ChunkMove]]) -> None:
    jobs = [LoadJob(name, mine) for name, mine in moves.items()]
    for job in jobs:
        mover.load(job)
    for _ in range(lot.randint(1, 2)):
        mover.cancel(lot.choice([*moves, "unknown"]))


def store(mover: ChunkMover, lot: random.Random, moves: dict[str, list[ChunkMove]]) -> None:
    jobs = [StoreJob(name, mine, len(mine) * CHUNK) for name, mine in moves.items()]
    if lot.random() < 0.5:
        for place in range(lot.choice([LAYERS, LAYERS, LAYERS - 1])):
            mover.save_layer(place, jobs)
            mover.cancel(lot.choice([*moves, *["unknown"] * 9]))
        mover.end_layers()
    else:
        for job in jobs:
            mover.store(job)
        mover.cancel(lot.choice([*moves, "unknown"]))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_or_is_cancelled_every_row_is_free_again_and_every_block_has_its_own_sum(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lot = random.Random(seed)
    fail_at_times(monkeypatch, random.Random(seed))

    def ring(paged: PagedKV) -> RingTransfer:
        tuning = Tuning(slot_bytes=lot.choice([3000, 20_000]), slots=2, sum_rows=ROWS)
        return RingTransfer(paged, LazyGpu(paged, seed), tuning, sums=True)

    source, engine, backend = PagedEngine(3), PagedEngine(4, transfer=ring), FakeBackend()
    bounds = {"batch_bytes": lot.choice([1, 40_000, 1 << 20]), "window_bytes": lot.choice([1, 100_000, 1 << 24])}
    with mover_on(backend, engine, **bounds) as mover:
        for turn in range(4):
            moves = {
                name: [*moves_of(name, lot.randint(1, 5)), *moves_of(name, lot.randint(1, 4), group=1)]
                for name in (f"{turn}a", f"{turn}b", f"{turn}c")
            }
            if lot.random() < 0.5:
                for move in (move for mine in moves.values() for move in mine):
                    backend.put(move.key, block_for(source, move))
                load(mover, lot, moves)
            else:
                store(mover, lot, moves)
            assert mover.settle(WAIT_S)
        assert mover.stats()["corrupt_chunks"] == 0
    for group in engine.groups:
        taken = [group.transfer.sum_of(1024) for _ in range(ROWS)]
        assert None not in taken
        assert group.transfer.sum_of(1024) is None
    for key, value in backend.values.items():
        block = open_block(memoryview(value), engine.layouts[int(key.split(b":")[2])])
        assert block.checksum == checksum_of(block.tensor)
