"""The next load begins while the last copies of the one before it move, and each is still a load of its own."""

import threading
from collections.abc import Sequence

import pytest
import torch

from kvredis.adapters.engine.block import checksum_of
from kvredis.adapters.paged import load as paged_load
from kvredis.adapters.paged.jobs import LoadJob
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.adapters.transfer.base import Moving, Part, Sum
from kvredis.adapters.transfer.cpu import HostTransfer
from kvredis.adapters.transfer.kv_cache import PagedKV
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.paged_engine import WAIT_S, PagedEngine, mover_on, moves_of, pages_in
from tests.adapters.transfer.manual_transfer import ManualTransfer, by_hand, with_blocks
from tests.backends.nodes import wait_until

FIRST, SECOND = LoadJob("first", moves_of("a", 3)), LoadJob("second", moves_of("b", 3))


@pytest.fixture(autouse=True)
def every_block_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is leased: a busy machine takes longer than NEAR_S for one in memory too."""
    monkeypatch.setattr(paged_load, "NEAR_S", WAIT_S)


def begun(mover: ChunkMover, transfer: ManualTransfer, jobs: Sequence[LoadJob] = (FIRST, SECOND)) -> None:
    """Ask for loads, of which the first one waits for its copies, which are asked for when all loads have been."""
    transfer.goes_on.clear()
    for job in jobs:
        mover.load(job)
    transfer.goes_on.set()
    wait_until(lambda: len(transfer.calls) >= len(jobs), "the following load's copies are asked for too", WAIT_S)


def let_all_go(transfer: ManualTransfer) -> None:
    """Let copies move, those that are asked for from now on as well."""
    transfer.by_hand = False
    for _, moving in list(transfer.calls):
        if not moving.done:
            moving.let_go()


def test_the_next_load_s_copies_are_asked_for_before_those_of_the_first_have_moved() -> None:
    backend, source = with_blocks(FIRST, SECOND)
    engine = PagedEngine(transfer=ManualTransfer)
    transfer = by_hand(engine)[0]
    with mover_on(backend, engine) as mover:
        begun(mover, transfer)
        assert mover.finished().loaded == set(), "none is told of before its copies have moved"
        transfer.calls[0][1].let_go()
        wait_until(lambda: mover.finished().loaded == {"first"}, "the first is over by itself", WAIT_S)
        let_all_go(transfer)
        assert mover.settle(WAIT_S)
        finished = mover.finished()
        assert (finished.loaded, finished.failed_pages) == ({"second"}, {})
        assert mover.stats()["loaded_chunks"] == 6
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in (*FIRST.moves, *SECOND.moves))


def test_a_load_that_has_begun_and_is_cancelled_keeps_its_pages_until_its_copies_have_moved() -> None:
    backend, _ = with_blocks(FIRST, SECOND)
    engine = PagedEngine(transfer=ManualTransfer)
    transfer = by_hand(engine)[0]
    with mover_on(backend, engine) as mover:
        begun(mover, transfer)
        assert not mover.cancel("second"), "a copy writes its pages"
        let_all_go(transfer)
        assert mover.settle(WAIT_S)
        assert mover.finished().loaded == {"first", "second"}


def test_no_page_is_written_behind_the_end_of_a_mover_whose_next_load_had_begun() -> None:
    backend, _ = with_blocks(FIRST, SECOND)
    engine = PagedEngine(transfer=ManualTransfer)
    transfer = by_hand(engine)[0]
    with mover_on(backend, engine) as mover:
        begun(mover, transfer)
        closing = threading.Thread(target=mover.close)
        closing.start()
        let_all_go(transfer)
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert all(moving.done for _, moving in transfer.calls)
    assert backend.leases == 0


class LaterSum:
    """A checksum that the transfer finds, known when `known` is set."""

    def __init__(self, transfer: "LaterSums", row: int) -> None:
        self.row = row
        self._transfer = transfer

    def done(self) -> bool:
        return self._transfer.known.is_set()

    def result(self) -> str:
        assert self._transfer.known.wait(WAIT_S)
        return self._transfer.sums[self.row]

    def cancel(self) -> bool:
        return True


class LaterSums(HostTransfer):
    """Copies at once, and finds checksums later, as a GPU whose copies are fast."""

    def __init__(self, paged: PagedKV) -> None:
        super().__init__(paged)
        self.known, self.goes_on = threading.Event(), threading.Event()
        self.sums: dict[int, str] = {}
        self.calls = self._rows = 0

    def sum_of(self, nbytes: int) -> Sum:
        self._rows += 1
        return LaterSum(self, self._rows)

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None, is_last: bool = False) -> Moving:
        assert self.goes_on.wait(WAIT_S)
        self.calls += 1
        self.sums |= {part.row: checksum_of(part.memory) for part in parts}
        return super().load(parts, after=after, is_last=is_last)


def test_the_next_load_begins_while_the_checksums_of_the_first_are_found() -> None:
    backend, source = with_blocks(FIRST, SECOND)
    engine = PagedEngine(transfer=LaterSums)
    transfer = engine.groups[0].transfer
    assert isinstance(transfer, LaterSums)
    with mover_on(backend, engine) as mover:
        for job in (FIRST, SECOND):
            mover.load(job)
        transfer.goes_on.set()
        wait_until(lambda: transfer.calls == 2, "the following load's copies are asked for too", WAIT_S)
        assert mover.finished().loaded == set(), "none is told of before it is known to be right"
        transfer.known.set()
        assert mover.settle(WAIT_S)
        finished = mover.finished()
    assert (finished.loaded, finished.failed_pages) == ({"first", "second"}, {})
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in (*FIRST.moves, *SECOND.moves))


@pytest.mark.parametrize("fails", ["first", "second"])
def test_what_fails_of_one_load_is_no_failure_of_the_other(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = with_blocks(FIRST, SECOND)
    engine = PagedEngine(transfer=ManualTransfer)
    transfer = by_hand(engine)[0]
    with mover_on(backend, engine) as mover:
        begun(mover, transfer)
        moving = transfer.calls[0 if fails == "first" else 1][1]
        moving.failure = RuntimeError("the device failed")
        let_all_go(transfer)
        assert mover.settle(WAIT_S)
        finished = mover.finished()
    lost = FIRST if fails == "first" else SECOND
    assert finished.loaded == {"first", "second"}
    assert {name: set(pages) for name, pages in finished.failed_pages.items()} == {lost.request: pages_in(lost.moves)}
    assert backend.leases == 0


class BrokenFor(FakeBackend):
    """Raises where one load leases."""

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self.key = key

    def load(self, keys, *, within_s=None):  # type: ignore[no-untyped-def]
        if keys[0] == self.key:
            raise ConnectionResetError("the server went away")
        return super().load(keys, within_s=within_s)


def test_a_load_that_cannot_begin_fails_alone() -> None:
    whole, _ = with_blocks(FIRST, SECOND)
    backend = BrokenFor(SECOND.moves[0].key)
    for key, value in whole.values.items():
        backend.put(key, value)
    engine = PagedEngine(transfer=ManualTransfer)
    transfer = by_hand(engine)[0]
    with mover_on(backend, engine) as mover:
        for job in (FIRST, SECOND):
            mover.load(job)
        wait_until(lambda: bool(transfer.calls), "the first load's copies are asked for", WAIT_S)
        let_all_go(transfer)
        assert mover.settle(WAIT_S)
        finished = mover.finished()
        assert mover.stats()["errors"] == 1
    assert finished.failed_pages.keys() == {"second"}
    assert set(finished.failed_pages["second"]) == pages_in(SECOND.moves)


@pytest.mark.parametrize("failure", [MemoryError, SystemExit])
def test_a_load_that_failed_while_it_was_begun_goes_on_with_no_other_chunk(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is begun anew with each copy of the first: what comes then would be taken for what has failed."""
    second = LoadJob("second", moves_of("b", 5))
    backend, source = with_blocks(FIRST, second)
    engine = PagedEngine(transfer=ManualTransfer)
    transfer, excerpt = by_hand(engine)[0], paged_load.excerpt
    lacking = backend.values[second.moves[1].key]
    starved = threading.Event()

    def one_is_starved(block, *args, **kwargs):  # type: ignore[no-untyped-def]
        if not starved.is_set() and lacking.endswith(bytes(block.tensor)):
            starved.set()
            raise failure("no room for a part of a block")
        return excerpt(block, *args, **kwargs)

    monkeypatch.setattr(paged_load, "excerpt", one_is_starved)
    with mover_on(backend, engine, batch_bytes=1, verify=False) as mover:
        begun(mover, transfer, (FIRST, second))
        assert starved.wait(WAIT_S)
        transfer.by_hand = False
        calls = [moving for _, moving in transfer.calls]
        assert len(calls) == 4, "three of the first, and what came of the second"
        for moving in (calls[3], *calls[:2]):
            moving.let_go()
        wait_until(lambda: mover.stats()["loaded_chunks"] >= 2, "the second was begun again", WAIT_S)
        let_all_go(transfer)
        assert mover.settle(WAIT_S)
        finished = mover.finished()
        assert mover.stats()["errors"] == 1
    assert finished.failed_pages.keys() == {"second"}
    failed = set(finished.failed_pages["second"])
    come = [move for move in second.moves if not failed & pages_in([move])]
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in come)
    assert pages_in(second.moves[1:]) <= failed
    assert backend.leases == 0


def test_blocks_that_come_slowly_are_not_begun_beside_a_load_that_is_nearly_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_load, "NEAR_S", 0.5e-3)
    asked: list[tuple[bytes, bool]] = []

    class Far(FakeBackend):
        def load(self, keys, *, within_s=None):  # type: ignore[no-untyped-def]
            asked.append((keys[0], any(not moving.done for _, moving in transfer.calls)))
            for lease in super().load(keys, within_s=within_s):
                held.wait(0.01)  # as long as a block takes through a socket
                yield lease

    held, (whole, _) = threading.Event(), with_blocks(FIRST, SECOND)
    backend = Far()
    for key, value in whole.values.items():
        backend.put(key, value)
    engine = PagedEngine(transfer=ManualTransfer)
    transfer = by_hand(engine)[0]
    with mover_on(backend, engine) as mover:
        for job in (FIRST, SECOND):
            mover.load(job)
        wait_until(lambda: bool(transfer.calls), "the first load's copies are asked for", WAIT_S)
        transfer.calls[0][1].let_go()
        wait_until(lambda: mover.finished().loaded == {"first"}, "the first is over", WAIT_S)
        let_all_go(transfer)
        assert mover.settle(WAIT_S)
    assert asked == [(FIRST.moves[0].key, False), (SECOND.moves[0].key, False)]
