"""What a step loads by layers is leased while the engine prepares the step, taken over when it begins, and let go of
when it never does."""

import random
import threading
from collections.abc import Generator, Sequence
from weakref import ref

import pytest

from kvredis.adapters.paged.jobs import ChunkMove, LoadJob
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.adapters.paged.preload import LeasesAhead
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.cuda.tuning import Tuning
from kvredis.adapters.transfer.kv_cache import PagedKV
from tests.adapters.fake_backend import FakeBackend, FakeLease
from tests.adapters.paged_engine import WAIT_S, PagedEngine, mover_on, moves_of, pages_in
from tests.adapters.transfer.lazy_gpu import LazyGpu
from tests.adapters.transfer.manual_transfer import ManualTransfer, by_hand, with_blocks
from tests.backends.nodes import wait_until


class AskedBackend(FakeBackend):
    """Counts loads, and lends what is behind the first chunk only when the test lets go."""

    def __init__(self, known: FakeBackend) -> None:
        super().__init__()
        self.values = known.values
        self.loads = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[FakeLease | None, None, None]:
        self.loads += 1
        leases = super().load(keys, within_s=within_s)
        for number in range(len(keys)):
            if number == 1:
                assert self.go_on.wait(WAIT_S)
            yield next(leases)


def jobs_of(*names: str) -> list[LoadJob]:
    moves = moves_of("x", 3 * len(names))
    return [LoadJob(name, moves[3 * at : 3 * at + 3]) for at, name in enumerate(names)]


def leased(mover: ChunkMover) -> LeasesAhead:
    """What was asked for ahead, once that is over."""
    ahead = mover._next_leases._ahead
    assert ahead is not None
    assert ahead.wait(WAIT_S)
    return ahead


def step(mover: ChunkMover, jobs: list[LoadJob]) -> None:
    mover.begin_layers(jobs)
    for place in range(4):
        mover.wait_layer(place)
    mover.end_layers()


def all_of(jobs: list[LoadJob]) -> list[ChunkMove]:
    return [move for job in jobs for move in job.moves]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_chunks_that_were_leased_ahead_come_and_are_not_asked_for_again(seed: int, groups: int) -> None:
    jobs = jobs_of("a", "b")
    if groups == 2:
        jobs.append(LoadJob("c", moves_of("c", 2, group=1)))
    known, source = with_blocks(*jobs)
    backend = AskedBackend(known)

    def ring(paged: PagedKV) -> RingTransfer:
        return RingTransfer(paged, LazyGpu(paged, seed), Tuning(slot_bytes=20_000, slots=2), sums=seed % 2 == 1)

    engine = PagedEngine(3, transfer=ring, groups=groups)
    with mover_on(backend, engine) as mover:
        for _ in range(2):
            backend.loads = 0
            mover.lease_ahead(jobs)
            step(mover, [LoadJob(job.request, list(job.moves)) for job in jobs])
            assert backend.loads == len(jobs)
            assert mover.stats()["leased_ahead_chunks"] == mover.stats()["loaded_chunks"] > 0
            finished = mover.finished()
            assert finished.loaded == {job.request for job in jobs}
            assert finished.failed_pages == {}
        assert backend.leases == 0
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in all_of(jobs))


def test_leases_are_there_before_the_step_begins_and_no_page_is_written() -> None:
    (job,) = jobs = jobs_of("a")
    known, _ = with_blocks(job)
    backend, engine = AskedBackend(known), PagedEngine(transfer=ManualTransfer, groups=1)
    (transfer,) = by_hand(engine)
    with mover_on(backend, engine) as mover:
        mover.lease_ahead(jobs)
        wait_until(lambda: backend.leases == 3, "all are leased")
        assert transfer.calls == []
        assert mover.stats()["loading_chunks"] == 0
        assert mover.settle(0.0), "nothing that holds pages is under way"
        transfer.by_hand = False
        step(mover, jobs)
        assert backend.loads == 1


def test_a_step_that_loads_something_else_leases_anew_and_lets_go_of_the_rest() -> None:
    jobs = jobs_of("a", "b")
    known, source = with_blocks(*jobs)
    backend, engine = AskedBackend(known), PagedEngine(groups=1)
    with mover_on(backend, engine) as mover:
        mover.lease_ahead(jobs)
        step(mover, jobs[1:])
        assert mover.finished().loaded == {"b"}
        wait_until(lambda: backend.leases == 0, "nobody holds what was leased ahead")
        mover.lease_ahead(jobs)
        mover.lease_ahead(jobs[:1])  # the step before was none
        step(mover, jobs[:1])
        assert mover.finished().failed_pages == {}
        wait_until(lambda: backend.leases == 0, "nor what was replaced")
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in all_of(jobs))


@pytest.mark.parametrize("slots", [1, 2])
def test_of_what_is_staged_and_given_up_no_memory_stays_referenced(slots: int) -> None:
    jobs = jobs_of("a")
    known, source = with_blocks(*jobs)

    def ring(paged: PagedKV) -> RingTransfer:
        return RingTransfer(paged, LazyGpu(paged), Tuning(slot_bytes=20_000, slots=slots))

    engine = PagedEngine(3, transfer=ring, groups=1)
    with mover_on(known, engine) as mover:
        mover.lease_ahead(jobs)
        (planned,) = leased(mover).planned
        assert planned.staged
        kept = ref(planned.layers)
        del planned
        mover.lease_ahead([])
        assert kept() is None, "its chunks' memory may be unmapped, or another server's by now"
        mover.lease_ahead(jobs)
        leased(mover)
        step(mover, jobs)
        assert mover.finished().failed_pages == {}
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in all_of(jobs))


@pytest.mark.parametrize("is_under_way", [False, True])
def test_what_nobody_begins_is_let_go_of_when_the_engine_ends(is_under_way: bool) -> None:
    jobs = jobs_of("a", "b")
    known, _ = with_blocks(*jobs)
    backend = AskedBackend(known)
    with mover_on(backend, PagedEngine(groups=1)) as mover:
        if is_under_way:
            backend.go_on.clear()
        mover.lease_ahead(jobs)
        wait_until(lambda: backend.leases == (1 if is_under_way else 6), "they are leased")
        if is_under_way:
            closing = threading.Thread(target=mover.close)
            closing.start()
            assert closing.is_alive(), "it waits for who holds a lease"
            backend.go_on.set()
            closing.join(WAIT_S)


def test_a_request_cancelled_meanwhile_is_left_out_and_the_others_come() -> None:
    jobs = jobs_of("a", "b")
    known, source = with_blocks(*jobs)
    backend, engine = AskedBackend(known), PagedEngine(transfer=ManualTransfer, groups=1)
    (transfer,) = by_hand(engine)
    with mover_on(backend, engine) as mover:
        mover.lease_ahead(jobs)
        mover.begin_layers(jobs)
        wait_until(lambda: len(transfer.calls) > 0, "layer 0 has been asked for")
        mover.cancel("a")
        transfer.by_hand = False
        for _, moving in list(transfer.calls):
            moving.let_go()
        mover.end_layers()
        finished = mover.finished()
        assert "b" in finished.loaded
        assert "b" not in finished.failed_pages
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in jobs[1].moves)


def test_a_chunk_that_is_missing_or_damaged_is_as_without_leasing_ahead() -> None:
    jobs = jobs_of("a", "b")
    known, _ = with_blocks(*jobs)
    backend, engine = AskedBackend(known), PagedEngine(groups=1)
    missing, damaged = jobs[0].moves[1], jobs[1].moves[2]
    del backend.values[missing.key]
    value = bytearray(backend.values[damaged.key])
    value[-1] ^= 1
    backend.values[damaged.key] = bytes(value)
    with mover_on(backend, engine) as mover:
        mover.lease_ahead(jobs)
        step(mover, jobs)
        failed = mover.finished().failed_pages
        assert set(failed["a"]) == pages_in(jobs[0].moves[1:])
        assert set(failed["b"]) == pages_in(jobs[1].moves[2:])
        assert damaged.key not in backend.values, "it would be found again and again"
        stats = mover.stats()
        assert (stats["missing_chunks"], stats["corrupt_chunks"], stats["errors"]) == (1, 1, 0)


def test_a_backend_that_fails_meanwhile_is_asked_again_by_the_step() -> None:
    jobs = jobs_of("a")
    known, source = with_blocks(*jobs)
    backend, engine = AskedBackend(known), PagedEngine(groups=1)
    with mover_on(backend, engine) as mover:
        backend.broken = True
        mover.lease_ahead(jobs)
        leased(mover)
        backend.broken = False
        step(mover, jobs)
        assert mover.finished().failed_pages == {}
        wait_until(lambda: list(backend.values) == [move.key for move in reversed(all_of(jobs))], "they are touched")
        assert backend.leases == 0
        backend.broken = True
        mover.lease_ahead(jobs)
        leased(mover)
        step(mover, jobs)
        assert mover.stats()["errors"] == 1, "of the step, and not of what was leased for it"
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in all_of(jobs))


def test_leases_that_end_before_the_step_begins_are_asked_for_anew() -> None:
    jobs = jobs_of("a", "b")
    known, source = with_blocks(*jobs)
    backend, engine = AskedBackend(known), PagedEngine(groups=1)
    with mover_on(backend, engine) as mover:
        mover.lease_ahead(jobs)
        for chunk in leased(mover)._chunks[1]:  # the limit has passed, or the server has gone and come
            chunk.lease.held = False  # type: ignore[misc]
        step(mover, jobs)
        assert mover.finished().failed_pages == {}
        stats = mover.stats()
        assert (stats["leased_ahead_chunks"], stats["loaded_chunks"], stats["expired_chunks"]) == (0, 6, 0)
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in all_of(jobs))


def test_no_more_is_leased_than_may_be_under_way_and_what_fits_is_taken_over() -> None:
    jobs = jobs_of("a", "b", "c")
    known, _ = with_blocks(*jobs)
    backend, engine = AskedBackend(known), PagedEngine(groups=1)
    with mover_on(backend, engine, max_load_chunks=7) as mover:
        mover.lease_ahead(jobs)
        leased(mover)
        assert backend.leases == 6
        step(mover, jobs)
        stats = mover.stats()
        assert (stats["refused_loads"], stats["leased_ahead_chunks"], backend.loads) == (1, 6, 2)
        assert set(mover.finished().failed_pages) == {"c"}


def test_a_load_finds_room_in_the_queue_beside_what_was_leased_for_others() -> None:
    jobs = [LoadJob("a", moves_of("x", 1))]
    known, _ = with_blocks(*jobs)
    backend, gate = AskedBackend(known), threading.Event()
    touch = backend.touch

    def late(keys: Sequence[bytes]) -> int:
        assert gate.wait(WAIT_S)
        return touch(keys)

    backend.touch = late  # type: ignore[method-assign]
    with mover_on(backend, PagedEngine(groups=1), max_load_chunks=1) as mover:
        step(mover, jobs)  # over for the engine, and not for the thread
        for _ in range(5):
            mover.lease_ahead(jobs)
        mover.begin_layers(jobs)
        gate.set()
        mover.end_layers()
        assert mover.finished().failed_pages == {}
        assert mover.stats()["refused_loads"] == 0


def test_what_was_leased_for_nobody_is_not_counted() -> None:
    jobs = jobs_of("a")
    known, _ = with_blocks(*jobs)
    backend, engine = AskedBackend(known), PagedEngine(groups=1)
    del backend.values[jobs[0].moves[2].key]
    with mover_on(backend, engine) as mover:
        for ahead in (jobs, []):
            mover.lease_ahead(jobs)
            leased(mover)
            mover.lease_ahead(ahead)
            step(mover, jobs)
        assert mover.stats()["missing_chunks"] == 2


def test_what_another_thread_asks_for_while_the_engine_ends_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of("a")
    known, _ = with_blocks(*jobs)
    with mover_on(AskedBackend(known), PagedEngine(groups=1)) as mover:
        replace = mover._next_leases.replace

        def late(ahead: LeasesAhead | None) -> None:
            replace(ahead)
            if ahead is None:
                monkeypatch.setattr(mover._next_leases, "replace", replace)
                mover.lease_ahead(jobs)
                leased(mover)

        monkeypatch.setattr(mover._next_leases, "replace", late)


def test_who_never_loads_leases_nothing() -> None:
    jobs = jobs_of("a")
    known, _ = with_blocks(*jobs)
    backend = AskedBackend(known)
    with mover_on(backend, PagedEngine(groups=1), role="kv_producer") as mover:
        mover.lease_ahead(jobs)
        mover.lease_ahead([])
        assert mover.settle(WAIT_S)
    assert backend.loads == 0


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_leased_ahead_replaced_begun_or_cancelled_nothing_stays_held(seed: int) -> None:
    lot = random.Random(seed)
    jobs = jobs_of("a", "b", "c")
    known, source = with_blocks(*jobs)
    backend, engine = AskedBackend(known), PagedEngine(groups=1)
    with mover_on(backend, engine) as mover:
        for _ in range(12):
            ahead = lot.sample(jobs, lot.randint(0, 3))
            mover.lease_ahead(ahead)
            if lot.random() < 0.3:
                continue
            begun = ahead if lot.random() < 0.6 else lot.sample(jobs, lot.randint(1, 3))
            mover.begin_layers(begun)
            cancelled = lot.choice(["a", "nobody", "nobody"])
            mover.cancel(cancelled)
            mover.wait_layer(lot.randrange(4))
            mover.end_layers()
            finished = mover.finished()
            assert finished.loaded == {job.request for job in begun}
            assert finished.failed_pages == {}
            for job in begun:
                if job.request != cancelled:
                    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in job.moves)
        mover.begin_layers([])
        mover.end_layers()
        wait_until(lambda: backend.leases == 0, "nothing is leased")
