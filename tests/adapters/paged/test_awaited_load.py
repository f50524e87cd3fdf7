"""A load of chunks that another engine stores meanwhile, over a real server: what has come is loaded, and no more."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise

import pytest

from kvredis.adapters.paged.jobs import ChunkMove, LoadJob
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.adapters.transfer.base import Transfer
from kvredis.adapters.transfer.cpu import HostTransfer
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.backends.base import Backend
from kvredis.backends.config.schema import Config
from kvredis.backends.factory import open_backend
from tests.adapters.paged_engine import WAIT_S, GatedTransfer, PagedEngine, block_for, moves_of, pages_in
from tests.backends.conftest import ServerProcess, kvredis_server  # noqa: F401
from tests.backends.nodes import wait_until

LONG_S = 60.0


class Two:
    """An engine that stores, and one that loads, with a connection each. `moves` are the second one's."""

    def __init__(self, url: str, name: str, transfer: Callable[[PagedKV], Transfer] = HostTransfer) -> None:
        config = Config(local_cpu=False, max_local_cpu_size=0.0625, remote_url=url, blocking_timeout_secs=WAIT_S)
        self.first, self.second = PagedEngine(50, groups=1), PagedEngine(groups=1, transfer=transfer)
        self.theirs: Backend = open_backend(config)
        self.ours: Backend = open_backend(config)
        self.stored, self.moves = moves_of(name, 6), moves_of(name, 6, seed=9)
        self.mover = ChunkMover(self.ours, self.second.groups)
        self.theirs.expect([move.key for move in self.stored], LONG_S)

    def store(self, moves: list[ChunkMove], *, is_damaged: bool = False) -> None:
        for move in moves:
            block = bytearray(block_for(self.first, move))
            block[-3] ^= is_damaged
            hold = self.theirs.reserve(move.key, len(block))
            assert hold is not None
            hold.view[:] = block
            hold.commit()
        assert self.theirs.flush() == 0

    def load(self, waits_s: float = LONG_S) -> None:
        self.mover.load(LoadJob("r", self.moves, waits_s))

    def has_loaded(self, chunks: int) -> None:
        wait_until(lambda: self.mover.stats()["loaded_chunks"] == chunks, f"{chunks} chunks")

    def is_over(self, come: int) -> None:
        """The load is over, and so many chunks have come: these, and in their pages nothing else."""
        assert self.mover.settle(WAIT_S)
        finished = self.mover.finished()
        assert finished.loaded == {"r"}
        failed = [(0, page) for move in self.moves[come:] for page in move.pages]
        assert finished.failed_pages.get("r", []) == failed
        for from_, to in zip(self.stored[:come], self.moves, strict=False):
            assert self.second.bytes_of(to) == self.first.bytes_of(from_)
        assert self.mover.stats()["loading_chunks"] == 0

    def close(self) -> None:
        self.mover.close()
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def two(kvredis_server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Two]:  # noqa: F811
    with closing(Two(kvredis_server.url, request.node.name)) as two:
        yield two


def test_each_chunk_is_loaded_when_it_has_come_and_the_load_is_told_of_once(two: Two) -> None:
    two.load()
    two.store(two.stored[:1])
    two.has_loaded(1)
    two.store(two.stored[1:4])
    two.has_loaded(4)
    assert two.mover.finished().loaded == set()
    assert two.mover.stats()["loading_chunks"] == 6
    two.store(two.stored[4:])
    two.is_over(come=6)
    assert two.second.changed_pages() == pages_in(two.moves)
    assert two.mover.finished().loaded == set()
    assert two.mover.stats()["loads"] == 1


def test_chunks_that_come_while_others_are_loaded_are_loaded_together(
    kvredis_server: ServerProcess,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(Two(kvredis_server.url, "together", GatedTransfer)) as two:
        gate, asked = two.second.groups[0].transfer, list[bytes]()
        assert isinstance(gate, GatedTransfer)
        wait_for = two.ours.wait_for

        def noted(keys: Sequence[bytes], within_s: float) -> int:
            asked.append(keys[0])
            return wait_for(keys, within_s)

        monkeypatch.setattr(two.ours, "wait_for", noted)
        two.load()
        two.store(two.stored[:1])
        assert gate.began.wait(WAIT_S)
        for move, behind in pairwise(two.stored[1:]):
            two.store([move])
            wait_until(partial(asked.__contains__, behind.key), "the question for the next one")
        gate.open.set()
        two.store(two.stored[5:])
        two.is_over(come=6)
        counts = [count for _, count, _ in gate.calls]
        assert counts in ([1, 4, 1], [1, 5]), "the first, those that waited for it, and the last with them or alone"


def test_all_that_has_come_is_used_once_when_the_load_is_over(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[list[bytes]] = []
    monkeypatch.setattr(two.ours, "touch", lambda keys: touched.append(list(keys)))
    two.load()
    for at in range(0, 6, 2):
        two.store(two.stored[at : at + 2])
        two.has_loaded(at + 2)
        assert touched == [] or at == 4
    wait_until(lambda: bool(touched), "a touch")
    assert touched == [[move.key for move in two.moves]]


def test_what_has_come_is_used_also_where_the_next_one_cannot_be_asked_for(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[list[bytes]] = []
    monkeypatch.setattr(two.ours, "touch", lambda keys: touched.append(list(keys)))

    def broken(keys: Sequence[bytes], within_s: float) -> int:
        raise OSError("no answer")

    monkeypatch.setattr(two.ours, "wait_for", broken)
    two.store(two.stored[:2])
    two.load()
    two.is_over(come=2)
    wait_until(lambda: two.mover.stats()["errors"] == 1, "the error")
    assert touched == [[move.key for move in two.moves[:2]]]


def test_a_chunk_that_is_there_behind_one_that_is_not_waits_for_it(two: Two) -> None:
    two.load()
    two.store([*two.stored[:2], *two.stored[3:]])
    two.has_loaded(2)
    two.store(two.stored[2:3])
    two.is_over(come=6)


def test_where_the_storing_engine_dies_the_rest_has_failed(two: Two) -> None:
    two.load()
    two.store(two.stored[:3])
    two.has_loaded(3)
    two.theirs.close()
    two.is_over(come=3)
    assert two.second.changed_pages() == pages_in(two.moves[:3])


def test_a_chunk_that_does_not_come_in_time_has_failed(two: Two) -> None:
    two.store(two.stored[:2])
    two.load(waits_s=0.3)
    two.is_over(come=2)


def test_a_damaged_chunk_ends_the_load(two: Two) -> None:
    two.load()
    two.store(two.stored[:2])
    two.has_loaded(2)
    two.store(two.stored[2:3], is_damaged=True)
    two.is_over(come=2)
    assert two.mover.stats()["corrupt_chunks"] == 1


def test_a_load_that_is_not_wanted_any_more_ends_soon_and_writes_no_page_behind_that(two: Two) -> None:
    two.load()
    two.store(two.stored[:1])
    two.has_loaded(1)
    assert two.mover.cancel("r", WAIT_S)
    two.store(two.stored[1:])
    assert two.mover.finished().loaded == {"r"}
    assert two.second.changed_pages() == pages_in(two.moves[:1])


def test_closing_ends_what_waits(two: Two) -> None:
    two.load()
    two.mover.close()
    assert two.mover.settle(0)
    assert two.mover.finished().failed_pages == {}
