"""What a ChunkMover holds while it moves, room and leases, is given back whatever the backend or the memory does; and
no page is written that something else still writes."""

import logging
import threading
from collections.abc import Sequence

import pytest

from kvredis.adapters.paged.jobs import LoadJob, StoreJob
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.backends.local import LocalBackend
from tests.adapters.fake_backend import FakeBackend, FakeReservation
from tests.adapters.paged_engine import (
    CHUNK,
    WAIT_S,
    GatedTransfer,
    PagedEngine,
    block_for,
    load_now,
    mover_on,
    moves_of,
    pages_in,
)
from tests.backends.nodes import wait_until


def test_no_room_stays_held_when_the_head_cannot_be_touched_while_its_tail_is_stored(
    local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, moves = PagedEngine(1), moves_of("a", 8)
    with mover_on(local, engine) as mover:
        mover.store(StoreJob("r", moves[:4], 4 * CHUNK))
        assert mover.settle(WAIT_S)

        def lost(keys: object) -> int:
            raise ConnectionResetError("the other side went away")

        monkeypatch.setattr(local, "touch", lost)
        mover.store(StoreJob("r", moves, 8 * CHUNK))
        assert mover.settle(WAIT_S)
        assert mover.stats()["errors"] == 1
    # mover_on has looked that the store holds neither leases nor reservations


def test_a_block_that_cannot_be_opened_for_want_of_memory_is_not_leased_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, moves = PagedEngine(1), moves_of("a", 3)
    backend = FakeBackend()
    for move in moves:
        backend.put(move.key, block_for(engine, move))

    def starved(*_: object, **__: object) -> None:
        raise MemoryError("no room for a part of a block")

    monkeypatch.setattr("kvredis.adapters.paged.load.excerpt", starved)
    with mover_on(backend, engine) as mover:
        mover.load(LoadJob("r", moves))
        assert mover.settle(WAIT_S)
        assert set(mover.finished().failed_pages["r"]) == pages_in(moves)
    assert backend.leases == 0


def test_no_lease_stays_held_when_there_is_no_thread_left_to_hash_what_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, moves, backend = PagedEngine(1), moves_of("a", 3), FakeBackend()
    for move in moves:
        backend.put(move.key, block_for(engine, move))

    def starved(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("kvredis.adapters.transfer.checksum.Checksum.begin", starved)
    with mover_on(backend, engine) as mover:
        mover.load(LoadJob("r", moves))
        assert mover.settle(WAIT_S)
        assert set(mover.finished().failed_pages["r"]) == pages_in(moves)
        assert mover.stats()["errors"] == 1
    # mover_on has looked that each lease has ended, once


@pytest.mark.parametrize("by_layers", [False, True])
def test_no_room_stays_held_when_there_is_no_thread_left_to_hash_what_was_stored(
    by_layers: bool, local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, job = PagedEngine(1, groups=1), StoreJob("r", moves_of("a", 4), 4 * CHUNK)

    def starved(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("kvredis.adapters.transfer.checksum.Checksum.begin", starved)
    with mover_on(local, engine) as mover:
        if by_layers:
            for place in range(4):
                mover.save_layer(place, [job])
            mover.end_layers()
        else:
            mover.store(job)
        assert mover.settle(WAIT_S)
        assert mover.stats()["errors"] == 1
    # mover_on has looked that the store holds no reservations


def test_a_load_s_pages_are_written_behind_what_wrote_them_last() -> None:
    engine, moves = PagedEngine(transfer=GatedTransfer, groups=1), moves_of("a", 3)
    source, backend = PagedEngine(50, groups=1), FakeBackend()
    for move in moves:
        backend.put(move.key, block_for(source, move))
    gate, after = engine.groups[0].transfer, object()
    assert isinstance(gate, GatedTransfer)
    gate.open.set()
    with mover_on(backend, engine) as mover:
        mover.load(LoadJob("r", moves), after)  # type: ignore[arg-type]
        assert mover.settle(WAIT_S)
    assert {way for way, _, _ in gate.calls} == {"load"}
    assert all(given is after for _, _, given in gate.calls)


def hold_back(mover: ChunkMover, pieces: int) -> tuple[threading.Event, threading.Event]:
    """Let the first pieces through, and those behind them when the second event is set; the first says that one
    waits."""
    take, left, waits, goes_on = mover._context.bandwidth.take, [pieces], threading.Event(), threading.Event()

    def wait(nbytes: int, *, is_load: bool) -> None:
        left[0] -= 1
        if left[0] < 0:
            waits.set()
            assert goes_on.wait(WAIT_S)
        take(nbytes, is_load=is_load)

    mover._context.bandwidth.take = wait  # type: ignore[method-assign]
    return waits, goes_on


def test_of_pages_that_are_let_go_of_nothing_is_stored_and_the_rest_is() -> None:
    engine, backend, moves = PagedEngine(transfer=GatedTransfer, groups=1), FakeBackend(), moves_of("a", 4)
    gate = engine.groups[0].transfer
    assert isinstance(gate, GatedTransfer)
    with mover_on(backend, engine, batch_bytes=1) as mover:
        _, goes_on = hold_back(mover, 1)
        mover.store(StoreJob("r", moves, 4 * CHUNK))
        assert gate.began.wait(WAIT_S)  # with the last chunk, as the tail goes first
        assert mover.let_go("r", pages_in(moves[1:3]), 0.0), "their turn has not come"
        assert not mover.let_go("r", pages_in(moves[3:]), 0.01), "they are being read"
        gate.open.set()
        assert mover.let_go("r", pages_in(moves[3:]), WAIT_S), "they are read no more, though the store goes on"
        goes_on.set()
        assert mover.settle(WAIT_S)
        finished, stats = mover.finished(), mover.stats()
        assert (finished.stored, finished.unstored) == ({"r"}, [move.key for move in moves])
        assert (stats["stored_chunks"], stats["dropped_stores"], stats["cancelled_jobs"]) == (2, 2, 0)
    assert set(backend.values) == {moves[0].key, moves[3].key}
    assert all(backend.values[move.key] == block_for(engine, move) for move in (moves[0], moves[3]))


def test_chunks_that_have_room_already_give_it_back_when_their_pages_are_let_go_of() -> None:
    engine, backend, moves = PagedEngine(groups=1), FakeBackend(), moves_of("a", 3)
    with mover_on(backend, engine) as mover:
        waits, goes_on = hold_back(mover, 0)
        mover.store(StoreJob("r", moves, 3 * CHUNK))
        assert waits.wait(WAIT_S)
        assert mover.let_go("r", pages_in(moves[:2]), 0.0)
        goes_on.set()
        assert mover.settle(WAIT_S)
        assert mover.stats()["dropped_stores"] == 2
    assert set(backend.values) == {moves[2].key}


@pytest.mark.parametrize("whole_request", [True, False])
def test_a_copy_out_of_pages_that_are_written_before_it_ends_is_not_stored(whole_request: bool) -> None:
    """An engine does not wait for a copy for ever, and what that finds in the end has a checksum like any other."""
    engine, backend, moves = PagedEngine(transfer=GatedTransfer, groups=1), FakeBackend(), moves_of("a", 4)
    gate, taken = engine.groups[0].transfer, moves[2:]
    assert isinstance(gate, GatedTransfer)
    with mover_on(backend, engine) as mover:
        mover.store(StoreJob("r", moves, 4 * CHUNK))
        assert gate.began.wait(WAIT_S)
        if whole_request:
            assert not mover.cancel("r", 0.01), "they are being read"
            mover.spoil("r")
        else:
            assert not mover.let_go("r", pages_in(taken), 0.01), "they are being read"
            mover.spoil("r", pages_in(taken))
        for layer in engine.memory[0]:
            layer[[page for move in taken for page in move.pages]] = 1.0
        gate.open.set()
        assert mover.settle(WAIT_S)
        finished, stats = mover.finished(), mover.stats()
        assert (finished.stored, finished.unstored) == ({"r"}, [move.key for move in moves])
        stored = 0 if whole_request else 2
        assert (stats["stored_chunks"], stats["dropped_stores"]) == (stored, 4 - stored)
    assert backend.values.keys() == {move.key for move in moves[:stored]}
    assert all(backend.values[move.key] == block_for(engine, move) for move in moves[:stored])


def test_stores_that_leave_layer_by_layer_end_when_a_page_is_let_go_of() -> None:
    engine, backend, moves = PagedEngine(1, groups=1), FakeBackend(), moves_of("a", 3)
    with mover_on(backend, engine) as mover:
        mover.save_layer(0, [StoreJob("r", moves, 3 * CHUNK)])
        assert mover.let_go("r", pages_in(moves[:1]), WAIT_S)
        mover.end_layers()
        assert mover.settle(WAIT_S)
        assert mover.stats()["cancelled_jobs"] == 1
    assert not backend.values


class SlowToTouch(FakeBackend):
    """Touches when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.asked = threading.Event()

    def touch(self, keys: Sequence[bytes]) -> int:
        self.asked.set()
        assert self.open.wait(WAIT_S)
        return super().touch(keys)


def test_no_caller_waits_until_a_load_s_chunks_have_been_touched() -> None:
    engine, source, backend, moves = PagedEngine(groups=1), PagedEngine(50, groups=1), SlowToTouch(), moves_of("a", 3)
    for move in moves:
        backend.put(move.key, block_for(source, move))

    def load() -> None:
        assert load_now(mover, LoadJob("r", moves)) == 3

    with mover_on(backend, engine) as mover:
        engine_s = threading.Thread(target=load)
        engine_s.start()
        try:
            assert backend.asked.wait(WAIT_S)
            engine_s.join(WAIT_S)
            assert not engine_s.is_alive()
            assert mover.finished().loaded == {"r"}
        finally:
            backend.open.set()
            engine_s.join()
    assert list(backend.values) == [move.key for move in reversed(moves)]


def test_what_is_left_of_a_load_lets_the_engine_go_on_first_and_the_next_load_does_not_wait_for_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, source, backend = PagedEngine(groups=1), PagedEngine(50, groups=1), FakeBackend()
    first, second = moves_of("a", 3), moves_of("b", 2)
    for move in (*first, *second):
        backend.put(move.key, block_for(source, move))
    monkeypatch.setattr("kvredis.adapters.paged.mover.STAND_BACK_S", 10 * WAIT_S)
    with caplog.at_level(logging.INFO), mover_on(backend, engine) as mover:
        assert load_now(mover, LoadJob("first", first)) == 3
        assert mover.finished().loaded == {"first"}
        assert backend.leases == 3, "all of one batch"
        assert list(backend.values) == [move.key for move in (*first, *second)], "they are not touched yet"
        assert "Retrieved" not in caplog.text
        assert load_now(mover, LoadJob("second", second)) == 2
        assert backend.leases == 2
        assert list(backend.values) == [move.key for move in (*second, *reversed(first))]
        assert "request first" in caplog.text
        assert "request second" not in caplog.text
    assert list(backend.values) == [move.key for move in (*reversed(first), *reversed(second))]
    assert "request second" in caplog.text


def test_a_load_that_came_and_was_not_touched_is_an_error_that_is_counted_and_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, backend, moves = PagedEngine(groups=1), FakeBackend(), moves_of("a", 3)
    for move in moves:
        backend.put(move.key, block_for(engine, move))

    def lost(keys: object) -> int:
        raise ConnectionResetError("the other side went away")

    monkeypatch.setattr(backend, "touch", lost)
    with caplog.at_level(logging.WARNING), mover_on(backend, engine) as mover:
        assert load_now(mover, LoadJob("r", moves)) == 3
    assert mover.stats()["errors"] == 1
    assert "the other side went away" in caplog.text


def test_a_step_without_an_end_holds_up_neither_the_next_nor_the_end() -> None:
    engine, backend, moves = PagedEngine(groups=1), FakeBackend(), moves_of("a", 2)
    with mover_on(backend, engine) as mover:
        for move in moves:
            for place in range(4):
                mover.save_layer(place, [StoreJob("r", [move], 2 * CHUNK)])
        wait_until(lambda: moves[0].key in backend.values, "the first step's store")


class SlowToReserve(FakeBackend):
    """Gives room when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def reserve(self, key: bytes, length: int) -> FakeReservation | None:
        assert self.open.wait(WAIT_S)
        return super().reserve(key, length)


def test_a_caller_that_waits_for_a_load_waits_for_no_store() -> None:
    engine, backend, moves = PagedEngine(groups=1), SlowToReserve(), moves_of("a", 3)
    for move in moves:
        backend.put(move.key, block_for(engine, move))
    with mover_on(backend, engine) as mover:
        mover.store(StoreJob("s", moves_of("b", 2), 2 * CHUNK))
        mover.load(LoadJob("r", moves))
        try:
            assert mover.wait_loaded(WAIT_S / 2)
            assert mover.finished().loaded == {"r"}
            assert mover.wait_loaded(WAIT_S / 2), "none is under way"
            assert not mover.settle(0)
        finally:
            backend.open.set()
