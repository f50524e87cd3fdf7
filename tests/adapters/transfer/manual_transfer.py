"""Transfers that go on when the test says so, and blocks for them to move."""

import threading
from collections.abc import Callable, Sequence

import torch

from kvredis.adapters.paged.jobs import LoadJob
from kvredis.adapters.transfer.base import Moving, Part
from kvredis.adapters.transfer.cpu import HostTransfer
from kvredis.adapters.transfer.kv_cache import PagedKV
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.paged_engine import WAIT_S, PagedEngine, block_for


class LaterMoving:
    """Parts that move when the test says so."""

    parts_done = 0

    def __init__(self, move: Callable[[], object]) -> None:
        self._move = move
        self.gone = threading.Event()
        self.failure: RuntimeError | None = None

    @property
    def done(self) -> bool:
        return self.gone.is_set()

    def let_go(self) -> None:
        self._move()
        self.gone.set()

    def wait(self, parts: int | None = None) -> None:
        assert self.gone.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure


class ManualTransfer(HostTransfer):
    """Both directions wait for the test, unless `by_hand` is false; a mover does too, while `goes_on` is not set."""

    by_hand = True

    def __init__(self, paged: PagedKV) -> None:
        super().__init__(paged)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.calls: list[tuple[range | None, LaterMoving]] = []

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        return self._later(parts, lambda: HostTransfer.store(self, parts, after=after))

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None, is_last: bool = False) -> Moving:
        return self._later(parts, lambda: HostTransfer.load(self, parts, after=after))

    def _later(self, parts: Sequence[Part], move: Callable[[], object]) -> Moving:
        assert self.goes_on.wait(WAIT_S)
        moving = LaterMoving(move)
        self.calls.append((parts[0].layers, moving))
        if not self.by_hand:
            moving.let_go()
        return moving


def by_hand(engine: PagedEngine) -> list[ManualTransfer]:
    """The transfers of an engine that was made with such."""
    transfers = [group.transfer for group in engine.groups]
    assert all(isinstance(each, ManualTransfer) for each in transfers)
    return transfers  # type: ignore[return-value]


def with_blocks(*jobs: LoadJob) -> tuple[FakeBackend, PagedEngine]:
    """A backend that has the jobs' chunks, and the engine that they are from."""
    source, backend = PagedEngine(50), FakeBackend()
    for move in (move for job in jobs for move in job.moves):
        backend.put(move.key, block_for(source, move))
    return backend, source
