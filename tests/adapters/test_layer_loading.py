"""Layer 0 of a load's first chunks moves while the next are leased, whatever happens meanwhile."""

import threading
from collections.abc import Generator, Sequence

import pytest
import torch

from kvredis.adapters.chunk_moves import LoadJob
from kvredis.adapters.transfer import Moving, Part
from tests.adapters.fake_backend import FakeBackend, FakeLease
from tests.adapters.manual_transfer import ManualTransfer, by_hand, with_blocks
from tests.adapters.paged_engine import WAIT_S, PagedEngine, mover_on, moves_of, pages_in
from tests.backends.nodes import wait_until


class HaltingBackend(FakeBackend):
    """Lends the first `ready` chunks of a load, and the rest when the test lets go."""

    def __init__(self, known: FakeBackend, ready: int) -> None:
        super().__init__()
        self.values = known.values
        self.ready = ready
        self.go_on = threading.Event()
        self.ended = 0
        """Loads that their readers have ended, or read to the end."""

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[FakeLease | None, None, None]:
        leases = super().load(keys, within_s=within_s)
        try:
            for number in range(len(keys)):
                if number == self.ready:
                    assert self.go_on.wait(WAIT_S)
                yield next(leases)
        finally:
            self.ended += 1


def test_layer_0_of_the_first_chunks_moves_while_the_next_are_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvredis.adapters.layer_loading.FIRST_CHUNKS", 2)
    jobs = [LoadJob("a", moves_of("x", 2)), LoadJob("b", moves_of("x", 7)[2:])]
    known, source = with_blocks(*jobs)
    backend = HaltingBackend(known, ready=3)
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    (transfer,) = by_hand(engine)
    with mover_on(backend, engine) as mover:
        mover.begin_layers(jobs)
        wait_until(lambda: len(transfer.calls) == 2, "two of four calls: five chunks are leased, two a call")
        backend.go_on.set()
        wait_until(lambda: len(transfer.calls) == 4, "the last call has one")
        assert [layers for layers, _ in transfer.calls] == [range(1)] * 4
        transfer.by_hand = False
        waiting = threading.Thread(target=mover.wait_layer, args=(0,))
        waiting.start()
        for _, moving in transfer.calls[:3]:
            moving.let_go()
        assert waiting.is_alive(), "the last chunk of layer 0 has not come"
        transfer.calls[3][1].let_go()
        waiting.join(WAIT_S)
        mover.end_layers()
        assert mover.finished().loaded == {"a", "b"}
    assert [layers.start for layers, _ in transfer.calls[4:] if layers] == [1, 2, 3], "the others move as one"
    assert all(engine.bytes_of(move) == source.bytes_of(move) for job in jobs for move in job.moves)


def test_who_is_cancelled_while_chunks_are_leased_gets_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvredis.adapters.layer_loading.FIRST_CHUNKS", 1)
    jobs = [LoadJob("a", moves_of("x", 4)), LoadJob("b", moves_of("x", 6)[4:])]
    known, source = with_blocks(*jobs)
    backend = HaltingBackend(known, ready=2)
    engine = PagedEngine(groups=1)
    with mover_on(backend, engine) as mover:
        mover.begin_layers(jobs)
        wait_until(lambda: backend.leases == 2, "two chunks are leased")
        mover.cancel("a")
        backend.go_on.set()
        mover.end_layers()
        assert mover.finished().loaded == {"a", "b"}
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in jobs[1].moves)
    touched = engine.changed_pages() - pages_in(jobs[1].moves)
    assert touched <= pages_in(jobs[0].moves[:3]), "the fourth was not even leased"


def test_a_device_that_fails_while_chunks_are_leased_fails_the_load_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvredis.adapters.layer_loading.FIRST_CHUNKS", 2)
    job = LoadJob("r", moves_of("r", 6))
    backend = HaltingBackend(with_blocks(job)[0], ready=6)
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    (transfer,) = by_hand(engine)
    load, calls = transfer.load, 0

    def fails_at_the_second(parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("this GPU has fallen off the bus")
        return load(parts, after=after)

    monkeypatch.setattr(transfer, "load", fails_at_the_second)
    with mover_on(backend, engine) as mover:
        mover.begin_layers([job])
        wait_until(lambda: calls == 2, "the second call has failed")
        wait_until(lambda: backend.ended == 1, "the backend keeps nothing for who reads no more")
        assert backend.leases == 4, "the first two chunks are on their way still"
        transfer.calls[0][1].let_go()
        mover.wait_layer(3)
        mover.end_layers()
        assert set(mover.finished().failed_pages["r"]) == pages_in(job.moves)
        assert mover.stats()["errors"] == 1
