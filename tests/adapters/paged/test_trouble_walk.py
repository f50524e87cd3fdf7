"""As test_mover_walk.py, with a backend, and memory, that fail at any moment: no page holds what it should not, a page
that has been given back is not written, and nothing is held in the end."""

import random
import threading
from collections.abc import Generator, Sequence
from contextlib import closing

import pytest

from kvredis.adapters.engine.block import Block
from kvredis.adapters.paged import load as paged_load
from kvredis.adapters.paged.jobs import LoadJob, MovingOptions
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.adapters.transfer.base import Transfer
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.cuda.tuning import Tuning
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.backends.local import LocalBackend
from kvredis.storage.entry import Lease, Reservation
from tests.adapters.paged.test_mover_walk import PAGES, UNWRITTEN, Walk
from tests.adapters.paged_engine import WAIT_S, PagedEngine, assert_rests
from tests.adapters.transfer.lazy_gpu import LazyGpu
from tests.storage.small_store import small_store


class Trouble:
    """Raises by lot, while it `is_on`. For several threads."""

    def __init__(self, seed: int, share: float) -> None:
        self._lot, self._share = random.Random(seed), share
        self._lock = threading.Lock()
        self.is_on = True
        self.raised = 0

    def may_come(self) -> None:
        with self._lock:
            is_a_movers = threading.current_thread() is not threading.main_thread()
            if self.is_on and is_a_movers and self._lot.random() < self._share:
                self.raised += 1
                raise self._lot.choice([ConnectionResetError, MemoryError, RuntimeError, StopIteration])("by lot")


class TroubledBackend(LocalBackend):
    """Fails before what it is asked for, behind it, and between the blocks of a load."""

    trouble: Trouble

    def match(self, keys: Sequence[bytes]) -> int:
        self.trouble.may_come()
        return super().match(keys)

    def wait_for(self, keys: Sequence[bytes], within_s: float) -> int:
        self.trouble.may_come()
        return super().wait_for(keys, min(within_s, 0.01))

    def touch(self, keys: Sequence[bytes]) -> int:
        touched = super().touch(keys)
        self.trouble.may_come()
        return touched

    def reserve_all(self, keys: Sequence[bytes], length: int) -> list[Reservation]:
        self.trouble.may_come()
        return super().reserve_all(keys, length)

    def room(self, length: int, at_least: int = 1) -> int:
        self.trouble.may_come()
        return super().room(length, at_least)

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[Lease | None, None, None]:
        with closing(super().load(keys, within_s=within_s)) as leases:
            try:
                for lease in leases:
                    try:
                        self._fail()
                    except BaseException:
                        if lease is not None:
                            lease.release()
                        raise
                    yield lease
            finally:
                self._fail()

    def _fail(self) -> None:
        try:
            self.trouble.may_come()
        except StopIteration as error:
            raise RuntimeError("by lot") from error


def on_summing_gpu(paged: PagedKV) -> Transfer:
    return RingTransfer(paged, LazyGpu(paged, paged.pages), Tuning(slot_bytes=20_000, slots=2, sum_rows=8), sums=True)


class TroubledWalk(Walk):
    def step(self) -> None:
        if self.lot.random() < 0.25:
            self.awaited()
        else:
            super().step()

    def let_go(self) -> None:
        """A page that a store reads is written although it is read still."""
        if names := sorted(self.stores & self.jobs.keys()):
            name = self.lot.choice(names)
            move = self.lot.choice(self.jobs[name])
            page = self.lot.choice(move.pages)
            if not self.mover.let_go(name, {(move.group, page)}, 0.0):
                self.mover.spoil(name, {(move.group, page)})
            self._wipe(move.group, [page], UNWRITTEN)

    def awaited(self) -> None:
        """A load of what another request may store meanwhile."""
        name, moves = self._take(UNWRITTEN)
        self.mover.load(LoadJob(name, moves, self.lot.choice([0.001, 0.02])))


@pytest.mark.parametrize("share", [0.03, 0.2])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_what_has_come_is_right_and_nothing_is_held(
    seed: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_load, "NEAR_S", WAIT_S)
    trouble, excerpt = Trouble(seed, share), paged_load.excerpt

    def starved(*args: object, **kwargs: object) -> Block:
        trouble.may_come()
        return excerpt(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(paged_load, "excerpt", starved)
    engine, backend = PagedEngine(pages=PAGES, transfer=on_summing_gpu), TroubledBackend(small_store())
    backend.trouble = trouble
    options = MovingOptions(
        batch_bytes=[1, 60_000, 1 << 20][seed % 3], window_bytes=200_000, max_load_chunks=40, max_store_chunks=40
    )
    with closing(ChunkMover(backend, engine.groups, options)) as mover:
        walk = TroubledWalk(seed, engine, mover, backend)
        stats = walk.run()
    trouble.is_on = False
    assert walk.compared >= (3 if share < 0.1 else 0), "else it has shown nothing"
    assert bool(stats["errors"]) == bool(trouble.raised)
    assert stats["loading_chunks"] == stats["storing_chunks"] == 0
    assert_rests(backend)
    backend.close()
