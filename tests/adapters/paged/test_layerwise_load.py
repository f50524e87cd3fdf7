"""Layer 0 of a load's first chunks moves while the next are leased, whatever happens meanwhile."""

import threading
from collections.abc import Generator, Sequence

import pytest
import torch

from kvredis.adapters.paged.jobs import LoadJob
from kvredis.adapters.transfer.base import Moving, Part
from tests.adapters.fake_backend import FakeBackend, FakeLease
from tests.adapters.paged_engine import WAIT_S, PagedEngine, mover_on, moves_of, pages_in
from tests.adapters.transfer.manual_transfer import ManualTransfer, by_hand, with_blocks
from tests.backends.nodes import wait_until

LAYERS = 4


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


def first_chunks(monkeypatch: pytest.MonkeyPatch, engine: PagedEngine, count: int) -> None:
    """So many chunks go first."""
    layout = engine.groups[0].layout
    monkeypatch.setattr(
        "kvredis.adapters.paged.layerwise_load.FIRST_BYTES",
        count * layout.chunk_bytes(layout.chunk_tokens) // layout.layers,
    )


def test_layer_0_of_the_first_chunks_moves_while_the_next_are_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    first_chunks(monkeypatch, engine, 1)
    jobs = [LoadJob("a", moves_of("x", 2)), LoadJob("b", moves_of("x", 10)[2:])]
    known, source = with_blocks(*jobs)
    backend = HaltingBackend(known, ready=3)
    (transfer,) = by_hand(engine)
    with mover_on(backend, engine) as mover:
        mover.begin_layers(jobs)
        wait_until(lambda: len(transfer.calls) == 2, "five chunks are leased: one, and two, the rest is waited for")
        backend.go_on.set()
        wait_until(lambda: len(transfer.calls) == 4, "four, and three: two would have gone with the four")
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


def test_layers_that_come_before_the_engine_gets_to_them_move_together() -> None:
    job = LoadJob("r", moves_of("r", 3))
    backend, source = with_blocks(job)
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    (transfer,) = by_hand(engine)
    transfer.by_hand = False
    with mover_on(backend, engine) as mover:
        mover.begin_layers([job])
        wait_until(lambda: mover.layer_loads is not None and mover.layer_loads.done, "it waits for no engine")
        mover.wait_layer(LAYERS - 1)
        assert mover.layer_loads is not None
        assert list(mover.layer_loads.loaded_s) == list(range(LAYERS)), "each layer's time is told"
        mover.end_layers()
    assert [layers for layers, _ in transfer.calls] == [range(1), range(1, 2), range(2, 4)], "one, one, and two"
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in job.moves)


def test_layers_that_the_engine_waits_for_come_one_by_one() -> None:
    job = LoadJob("r", moves_of("r", 3))
    backend, source = with_blocks(job)
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    (transfer,) = by_hand(engine)
    with mover_on(backend, engine) as mover:
        mover.begin_layers([job])
        waiting = threading.Thread(target=mover.wait_layer, args=(LAYERS - 1,))
        waiting.start()
        wait_until(lambda: mover.layer_loads is not None and mover.layer_loads._reached == LAYERS, "it waits")
        for count in range(LAYERS):
            wait_until(lambda: len(transfer.calls) > count, "the next is asked for")  # noqa: B023 - at once
            transfer.calls[count][1].let_go()
        waiting.join(WAIT_S)
        mover.end_layers()
    assert [layers for layers, _ in transfer.calls] == [range(at, at + 1) for at in range(LAYERS)]
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in job.moves)


@pytest.mark.parametrize(("bytes_per_s", "under_way"), [(1e15, 2), (4e4, 1)])
def test_a_bound_that_lets_more_through_than_comes_keeps_no_layer_waiting(bytes_per_s: float, under_way: int) -> None:
    job = LoadJob("r", moves_of("r", 2))
    backend, _ = with_blocks(job)
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    (transfer,) = by_hand(engine)
    with mover_on(backend, engine, bytes_per_s=bytes_per_s) as mover:
        mover.begin_layers([job])
        for count in range(2):
            wait_until(lambda: len(transfer.calls) > count, "the next is asked for")  # noqa: B023 - at once
            transfer.calls[count][1].let_go()
            mover.wait_layer(count)
        wait_until(lambda: len(transfer.calls) >= 2 + under_way, "what may be under way is")
        mover.cancel("r")
        for _, moving in transfer.calls[2:]:
            moving.let_go()
        transfer.by_hand = False
        mover.end_layers()
    assert len(transfer.calls) == 2 + under_way


def test_who_is_cancelled_while_chunks_are_leased_gets_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvredis.adapters.paged.layerwise_load.FIRST_BYTES", 1)
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
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    first_chunks(monkeypatch, engine, 2)
    job = LoadJob("r", moves_of("r", 9))
    backend = HaltingBackend(with_blocks(job)[0], ready=6)
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
        assert backend.leases == 6, "the first two chunks are on their way still"
        transfer.calls[0][1].let_go()
        mover.wait_layer(3)
        mover.end_layers()
        assert set(mover.finished().failed_pages["r"]) == pages_in(job.moves)
        assert mover.stats()["errors"] == 1
