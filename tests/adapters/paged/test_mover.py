"""ChunkMover between pages and a store: bit by bit, only what is new, only what is whole, and never an error."""

import logging
import pickle
from dataclasses import replace

import pytest

from kvredis.adapters.paged.jobs import ChunkMove, LoadJob, Moves, PagedGroup, StoreJob
from kvredis.adapters.transfer.base import Part
from kvredis.backends.local import LocalBackend
from kvredis.storage.errors import LayoutError
from tests.adapters.fake_backend import FakeBackend, FakeLease
from tests.adapters.paged_engine import (
    CHUNK,
    LATENT,
    WAIT_S,
    GatedTransfer,
    PagedEngine,
    block_for,
    load_now,
    mover_on,
    moves_of,
    pages_in,
)


def stored(backend: FakeBackend, engine: PagedEngine, moves: list[ChunkMove]) -> FakeBackend:
    """The backend with blocks of these moves in it."""
    for move in moves:
        backend.put(move.key, block_for(engine, move))
    return backend


@pytest.mark.parametrize("batch_bytes", [1, 80_000, 1 << 30])
def test_what_one_engine_stores_another_loads_into_other_pages_and_touches_no_other_page(
    local: LocalBackend, batch_bytes: int
) -> None:
    first, second = PagedEngine(1), PagedEngine(100)
    mine = moves_of("a", 7) + moves_of("a", 3, group=1)
    with mover_on(local, first, batch_bytes=batch_bytes, window_bytes=100_000) as mover:
        mover.store(StoreJob("r", mine, 7 * CHUNK))
        assert mover.settle(WAIT_S)
        assert mover.finished().stored == {"r"}
        assert mover.stats()["stored_chunks"] == 10
    theirs = moves_of("a", 7, seed=9) + moves_of("a", 3, seed=9, group=1)
    assert [move.pages for move in theirs] != [move.pages for move in mine]
    with mover_on(local, second, batch_bytes=batch_bytes, window_bytes=100_000) as mover:
        mover.load(LoadJob("s", theirs))
        assert mover.settle(WAIT_S)
        finished = mover.finished()
        assert (finished.loaded, finished.failed_pages, finished.stored) == ({"s"}, {}, set())
        assert mover.stats()["loaded_chunks"] == 10
        assert mover.finished().loaded == set(), "each load is told of once"
    for from_, to in zip(mine, theirs, strict=True):
        assert second.bytes_of(to) == first.bytes_of(from_)
    assert second.changed_pages() == pages_in(theirs)
    assert first.changed_pages() == set()


def test_a_load_now_is_over_when_it_returns(local: LocalBackend) -> None:
    first, second, moves = PagedEngine(1), PagedEngine(100), moves_of("a", 5)
    with mover_on(local, first) as mover:
        mover.store(StoreJob("r", moves[:3], 3 * CHUNK))
        assert mover.settle(WAIT_S)
    with mover_on(local, second) as mover:
        assert load_now(mover, LoadJob("s", moves)) == 3
        finished = mover.finished()
        assert finished.loaded == {"s"}
        assert set(finished.failed_pages["s"]) == pages_in(moves[3:])
    assert all(second.bytes_of(move) == first.bytes_of(move) for move in moves[:3])


def test_of_a_chunk_the_last_pages_may_be_loaded_alone(local: LocalBackend) -> None:
    first, second, whole = PagedEngine(1), PagedEngine(100), [*moves_of("a", 2), *moves_of("a", 1, group=1)]
    part = [replace(whole[0], pages=whole[0].pages[3:]), whole[1], replace(whole[2], pages=whole[2].pages[2:])]
    with mover_on(local, first) as mover:
        mover.store(StoreJob("r", whole, 2 * CHUNK))
        assert mover.settle(WAIT_S)
    with mover_on(local, second) as mover:
        assert load_now(mover, LoadJob("s", part)) == 3
        assert mover.finished().failed_pages == {}
    assert all(second.bytes_of(move) == first.bytes_of(move) for move in part)
    assert second.changed_pages() == pages_in(part)


def test_a_lookup_misses_while_chunks_leave_and_hits_when_they_have(local: LocalBackend) -> None:
    engine, moves = PagedEngine(transfer=GatedTransfer, groups=1), moves_of("a", 4)
    gate = engine.groups[0].transfer
    assert isinstance(gate, GatedTransfer)
    with mover_on(local, engine) as mover:
        after = object()
        mover.store(StoreJob("r", moves, 4 * CHUNK), after)  # type: ignore[arg-type]
        assert gate.began.wait(WAIT_S)
        assert local.present([move.key for move in moves]) == [False] * 4
        assert mover.finished().stored == set(), "its pages are still read"
        gate.open.set()
        assert mover.settle(WAIT_S)
        assert local.match([move.key for move in moves]) == 4
        assert mover.finished().stored == {"r"}
        assert gate.calls == [("store", 4, after)], "one call, behind the event of the forward pass"


def test_chunks_that_are_there_are_not_stored_again_and_the_tail_goes_before_the_head() -> None:
    engine, moves = PagedEngine(), moves_of("a", 6) + moves_of("a", 3, group=1)
    backend = stored(FakeBackend(), engine, [*moves[:2], moves[6]])
    del backend.written[:]
    with mover_on(backend, engine, batch_bytes=80_000) as mover:
        mover.store(StoreJob("r", moves, 6 * CHUNK))
        assert mover.settle(WAIT_S)
        assert backend.written == [move.key for move in [*moves[2:6][::-1], *moves[7:][::-1]]]
        stats = mover.stats()
        assert (stats["present_chunks"], stats["stored_chunks"]) == (3, 6)
    assert all(backend.values[move.key] == block_for(engine, move) for move in moves)


def test_a_store_gives_a_transfer_as_many_chunks_at_a_time_as_a_batch_has_bytes() -> None:
    engine, moves = PagedEngine(groups=1, pages=4 * 10, transfer=GatedTransfer), moves_of("a", 10, pages=4 * 10)
    transfer, chunk_bytes = engine.groups[0].transfer, engine.groups[0].layout.chunk_bytes()
    assert isinstance(transfer, GatedTransfer)
    transfer.open.set()
    with mover_on(FakeBackend(), engine, batch_bytes=4 * chunk_bytes) as mover:
        mover.store(StoreJob("r", moves, 10 * CHUNK))
        assert mover.settle(WAIT_S)
    assert [count for _, count, _ in transfer.calls] == [4, 4, 2]


@pytest.mark.parametrize("batch_bytes", [1, 80_000])
def test_where_another_engine_waits_the_head_goes_first_and_is_the_newest_all_the_same(batch_bytes: int) -> None:
    engine, moves = PagedEngine(groups=1), moves_of("a", 6)
    backend = stored(FakeBackend(blocks_max=6), engine, moves[:2])
    del backend.written[:]
    with mover_on(backend, engine, batch_bytes=batch_bytes) as mover:
        mover.store(StoreJob("r", moves, 6 * CHUNK, head_first=True))
        assert mover.settle(WAIT_S)
        assert backend.written == [move.key for move in moves[2:]]
    backend.put(b"other", b"x")
    assert backend.match([move.key for move in moves]) == 5, "the tail has left"


def test_of_a_store_head_first_nothing_is_asked_for_behind_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, moves, backend = PagedEngine(groups=1), moves_of("a", 6), FakeBackend()
    reserve = backend.reserve
    monkeypatch.setattr(backend, "reserve", lambda key, n: None if key == moves[3].key else reserve(key, n))
    with mover_on(backend, engine) as mover:
        mover.store(StoreJob("r", moves, 6 * CHUNK, head_first=True))
        assert mover.settle(WAIT_S)
        assert backend.written == [move.key for move in moves[:3]]
        assert mover.finished().unstored == [move.key for move in moves]
        stats = mover.stats()
        assert (stats["stored_chunks"], stats["refused_stores"], stats["dropped_stores"]) == (3, 1, 2), "each once"


def test_what_eviction_leaves_of_a_prompt_is_a_prefix() -> None:
    engine, moves, backend = PagedEngine(groups=1), moves_of("a", 9), FakeBackend(blocks_max=6)
    with mover_on(backend, engine, batch_bytes=1) as mover:
        mover.store(StoreJob("r", moves[:3], 3 * CHUNK))
        mover.store(StoreJob("r", moves, 9 * CHUNK))
        assert mover.settle(WAIT_S)
    assert backend.match([move.key for move in moves]) == len(backend.values) == 6


def test_a_chunk_that_is_missing_fails_and_all_behind_it_do() -> None:
    engine = PagedEngine()
    moves = moves_of("a", 4) + moves_of("a", 3, group=1)
    backend = stored(FakeBackend(), PagedEngine(50), [*moves[:2], *moves[3:]])
    with mover_on(backend, engine, batch_bytes=1) as mover:
        mover.load(LoadJob("r", moves))
        assert mover.settle(WAIT_S)
        failed = mover.finished().failed_pages["r"]
        assert failed == [(move.group, page) for move in moves[2:] for page in move.pages]
        assert mover.stats()["failed_chunks"] == 5
    assert engine.changed_pages() == pages_in(moves[:2])


@pytest.mark.parametrize("at", [3, 200, 600, 30_000, -1])
@pytest.mark.parametrize("batch_bytes", [1, 1 << 30])
def test_a_damaged_block_is_a_miss_and_is_deleted(at: int, batch_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    engine, moves = PagedEngine(groups=1), moves_of("a", 4)
    backend = stored(FakeBackend(), PagedEngine(50), moves)
    block = bytearray(backend.values[moves[1].key])
    block[at] ^= 1
    backend.put(moves[1].key, bytes(block))
    with mover_on(backend, engine, batch_bytes=batch_bytes) as mover:
        assert load_now(mover, LoadJob("r", moves)) == 1
        assert set(mover.finished().failed_pages["r"]) == pages_in(moves[1:])
        assert mover.stats()["corrupt_chunks"] == 1
        assert moves[1].key not in backend.values, "it would be found and missed for ever"
        assert moves[2].key in backend.values
    assert engine.changed_pages() >= pages_in(moves[:1])
    assert "refused and counts as a miss" in caplog.text


def test_without_verify_nothing_is_hashed_and_with_it_blocks_that_have_no_checksum_are_as_good_as_ever() -> None:
    source, moves = PagedEngine(50, groups=1), moves_of("a", 2)
    for verify in (True, False):
        engine, backend = PagedEngine(groups=1), FakeBackend()
        for move in moves:
            backend.put(move.key, block_for(source, move, is_checked=False))
        with mover_on(backend, engine, verify=verify) as mover:
            assert load_now(mover, LoadJob("r", moves)) == 2
            more = moves_of("b", 1)
            mover.store(StoreJob("r", more, CHUNK))
            assert mover.settle(WAIT_S)
            assert backend.values[more[0].key] == block_for(engine, more[0], is_checked=verify)
    spoilt = bytearray(block_for(source, moves[0]))
    spoilt[-1] ^= 1
    backend.put(moves[0].key, bytes(spoilt))
    with mover_on(backend, engine, verify=False) as mover:
        assert load_now(mover, LoadJob("r", moves)) == 2, "who does not want to know is not told"


class FleetingLease(FakeLease):
    """Bytes of a server that ends leases when it likes."""

    def release(self) -> None:
        self.held = True  # for the count below
        super().release()


def test_a_chunk_whose_lease_ended_before_its_last_byte_was_copied_has_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, moves = PagedEngine(groups=1), moves_of("a", 5)
    backend = stored(FakeBackend(), PagedEngine(50), moves)
    leases: list[FleetingLease] = []

    def lend(backend: FakeBackend, value: bytes) -> FleetingLease:
        leases.append(FleetingLease(backend, value))
        return leases[-1]

    monkeypatch.setattr("tests.adapters.fake_backend.FakeLease", lend)
    transfer = engine.groups[0].transfer
    load = transfer.load

    def load_and_lose(parts: list[Part], *, after: object, is_last: bool) -> object:
        moving = load(parts)
        leases[3].held = False
        return moving

    monkeypatch.setattr(transfer, "load", load_and_lose, raising=False)
    with mover_on(backend, engine) as mover:
        assert load_now(mover, LoadJob("r", moves)) == 3
        assert set(mover.finished().failed_pages["r"]) == pages_in(moves[3:])
        stats = mover.stats()
        assert (stats["expired_chunks"], stats["corrupt_chunks"]) == (1, 0)
    assert len(backend.values) == 5, "it was a good block"


def test_a_load_too_many_fails_at_once_and_the_others_come() -> None:
    engine = PagedEngine(transfer=GatedTransfer, groups=1)
    moves = [moves_of(name, 4) for name in "abc"]
    backend = stored(FakeBackend(), PagedEngine(50, groups=1), [move for each in moves for move in each])
    gate = engine.groups[0].transfer
    assert isinstance(gate, GatedTransfer)
    with mover_on(backend, engine, max_load_chunks=9) as mover:
        for name, each in zip("abc", moves, strict=True):
            mover.load(LoadJob(name, each))
        assert gate.began.wait(WAIT_S)
        finished = mover.finished()
        assert finished.loaded == {"c"}
        assert set(finished.failed_pages["c"]) == pages_in(moves[2])
        assert mover.stats()["loading_chunks"] == 8
        gate.open.set()
        assert mover.settle(WAIT_S)
        assert mover.finished().loaded == {"a", "b"}
        assert mover.stats()["refused_loads"] == 1
        assert load_now(mover, LoadJob("c", moves[2])) == 4, "there is room again"
        assert load_now(mover, LoadJob("d", moves[0] * 3)) == 0, "no load has more than the bound"


def test_the_newest_store_is_dropped_and_counted_when_too_many_wait() -> None:
    engine, backend = PagedEngine(transfer=GatedTransfer, groups=1), FakeBackend()
    gate = engine.groups[0].transfer
    assert isinstance(gate, GatedTransfer)
    moves = [moves_of(name, 4) for name in "abc"]
    with mover_on(backend, engine, max_store_chunks=8) as mover:
        for name, each in zip("abc", moves, strict=True):
            mover.store(StoreJob(name, each, 4 * CHUNK))
        assert mover.finished().stored == {"c"}, "its pages are free"
        assert mover.stats()["dropped_stores"] == 4
        gate.open.set()
        assert mover.settle(WAIT_S)
        assert mover.finished().stored == {"a", "b"}
    assert set(backend.values) == {move.key for each in moves[:2] for move in each}


def test_what_the_backend_does_not_take_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, backend, moves = PagedEngine(groups=1), FakeBackend(), moves_of("a", 6)
    monkeypatch.setattr(backend, "room", lambda length, at_least=1: 2 if len(backend.values) < 4 else 0)
    with mover_on(backend, engine) as mover:
        mover.store(StoreJob("r", moves, 6 * CHUNK))
        assert mover.settle(WAIT_S)
        assert backend.match([move.key for move in moves]) == 4, "from the head on as far as there is room"
        assert mover.stats()["dropped_stores"] == 2
        monkeypatch.undo()
        backend.full = True
        mover.store(StoreJob("r", moves, 6 * CHUNK))
        assert mover.settle(WAIT_S)
        assert mover.stats()["refused_stores"] == 2
        assert mover.finished().stored == {"r"}


def test_a_request_is_stored_when_the_last_of_its_stores_is_over() -> None:
    engine, backend = PagedEngine(transfer=GatedTransfer, groups=1), FakeBackend()
    gate = engine.groups[0].transfer
    assert isinstance(gate, GatedTransfer)
    moves = moves_of("a", 4)
    with mover_on(backend, engine, max_store_chunks=4) as mover:
        mover.store(StoreJob("r", moves[:2], 2 * CHUNK))
        mover.store(StoreJob("r", moves[2:] + moves[:1], 4 * CHUNK))  # one too many: dropped
        assert mover.finished().stored == set(), "the first still reads its pages"
        gate.open.set()
        assert mover.settle(WAIT_S)
        assert mover.finished().stored == {"r"}


def test_a_producer_never_loads_and_a_consumer_never_stores() -> None:
    engine, moves = PagedEngine(groups=1), moves_of("a", 2)
    backend = stored(FakeBackend(), engine, moves)
    with mover_on(backend, engine, role="kv_producer") as mover:
        assert load_now(mover, LoadJob("r", moves)) == 0
        finished = mover.finished()
        assert finished.loaded == {"r"}
        assert set(finished.failed_pages["r"]) == pages_in(moves)
    assert engine.changed_pages() == set()
    with mover_on(backend, engine, role="kv_consumer") as mover:
        mover.store(StoreJob("s", moves_of("b", 2), 2 * CHUNK))
        for layer in range(4):
            mover.save_layer(layer, [StoreJob("t", moves_of("c", 2), 2 * CHUNK)])
        mover.end_layers()
        assert mover.settle(WAIT_S)
        assert mover.finished().stored == {"s", "t"}
    assert len(backend.values) == 2


def test_a_broken_backend_is_a_failed_load_and_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine, moves = PagedEngine(groups=1), moves_of("a", 2)
    backend = stored(FakeBackend(), engine, moves)
    backend.broken = True
    with mover_on(backend, engine) as mover:
        for name in "rst":
            assert load_now(mover, LoadJob(name, moves)) == 0
            mover.store(StoreJob(name, moves_of("b", 2), 2 * CHUNK))
        assert mover.settle(WAIT_S)
        finished = mover.finished()
        assert finished.failed_pages.keys() == finished.loaded == finished.stored == {"r", "s", "t"}
        assert mover.stats()["errors"] == 6
        assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 2, "one for each thread"
        backend.broken = False
        assert load_now(mover, LoadJob("r", moves)) == 2


@pytest.mark.parametrize("waits_s", [0.0, 10.0], ids=["load", "awaited load"])
def test_what_ends_a_thread_ends_no_job_without_a_word(monkeypatch: pytest.MonkeyPatch, waits_s: float) -> None:
    engine, backend, moves = PagedEngine(), FakeBackend(), moves_of("a", 3)

    def ended(*_: object, **__: object) -> None:
        raise SystemExit("this thread alone")

    monkeypatch.setattr(backend, "match", ended)
    monkeypatch.setattr(backend, "load", ended)
    with mover_on(backend, engine) as mover:
        mover.load(LoadJob("r", moves, waits_s))
        mover.store(StoreJob("s", moves, 3 * CHUNK))
        assert mover.settle(5.0)
        finished = mover.finished()
    assert (finished.loaded, finished.stored) == ({"r"}, {"s"})
    assert mover.stats()["errors"] == 2
    assert set(finished.failed_pages["r"]) == pages_in(moves)


def test_a_move_that_cannot_be_is_a_failed_one(caplog: pytest.LogCaptureFixture) -> None:
    engine = PagedEngine(groups=1)
    moves = moves_of("a", 2)
    backend = stored(FakeBackend(), engine, moves)
    with mover_on(backend, engine) as mover:
        assert load_now(mover, LoadJob("r", [replace(moves[0], group=1)])) == 0
        assert load_now(mover, LoadJob("s", [replace(moves[0], pages=())])) == 0
        assert load_now(mover, LoadJob("t", [replace(moves[0], pages=(0, 1, 2, 40))])) == 0
        assert load_now(mover, LoadJob("u", [replace(moves[0], pages=(0, 1, 2, 3, 4))])) == 0, "more than it holds"
        assert load_now(mover, LoadJob("v", [])) == 0
        mover.store(StoreJob("w", [replace(moves[0], group=-1)], CHUNK))
        assert mover.settle(WAIT_S)
        finished = mover.finished()
        assert finished.loaded == set("rstuv")
        assert finished.failed_pages["t"] == [(0, 0), (0, 1), (0, 2), (0, 40)]
    assert engine.changed_pages() == set()
    assert "there is nothing to move" in caplog.text


def test_closing_gives_up_what_waits_and_holds_nothing() -> None:
    engine = PagedEngine(transfer=GatedTransfer, groups=1)
    gate = engine.groups[0].transfer
    assert isinstance(gate, GatedTransfer)
    backend = stored(FakeBackend(), engine, [move for name in "abc" for move in moves_of(name, 4)])
    with mover_on(backend, engine) as mover:
        for name in "abc":
            mover.load(LoadJob(name, moves_of(name, 4)))
            mover.store(StoreJob(name, moves_of(name, 4, first=4), 8 * CHUNK))
        assert gate.began.wait(WAIT_S)
        gate.open.set()
    assert mover.finished().loaded == {"a", "b", "c"}
    mover.load(LoadJob("d", moves_of("a", 4)))
    mover.store(StoreJob("d", moves_of("a", 4), 4 * CHUNK))
    assert mover.finished().failed_pages.keys() == {"d"}, "it is refused, and no thread waits for it"
    assert mover.settle(0)


def test_the_log_says_what_is_stored_and_loaded_and_how_fast(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine, backend, moves = PagedEngine(groups=1), FakeBackend(), moves_of("a", 4)
    with mover_on(backend, engine) as mover:
        mover.store(StoreJob("req-7", moves, 150))
        assert mover.settle(WAIT_S)
        load_now(mover, LoadJob("req-8", moves))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "Storing KV cache for 128 out of 150 tokens for request req-7"
    assert lines[1].startswith("Stored 128 tokens for request req-7: 0.0001 GB in ")
    assert lines[2].startswith("Retrieved 128 tokens for request req-8: 0.0001 GB in ")
    assert all(line.endswith(" GB/s") for line in lines[1:])


def test_what_a_scheduler_tells_its_workers_pickles() -> None:
    moves = Moves([LoadJob("a", moves_of("a", 2))], [StoreJob("b", moves_of("b", 1), 40)], ["c"])
    assert pickle.loads(pickle.dumps(moves)) == moves


def test_a_group_whose_layout_is_not_its_memory_is_refused() -> None:
    group = PagedEngine().groups[0]
    with pytest.raises(LayoutError, match="layers"):
        PagedGroup(LATENT, PagedEngine().groups[0].paged, group.transfer)
    with pytest.raises(ValueError, match="places"):
        PagedGroup(group.layout, group.paged, group.transfer, (0, 1, 1, 2))
