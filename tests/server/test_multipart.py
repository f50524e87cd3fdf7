"""Which bytes of a value in parts have been written, against a model that marks each byte; and who may write there."""

import random
from collections.abc import Iterator

import pytest

from kvredis.server.multipart import RANGES_MAX, Part, Piece
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.live import MIB, pattern

LENGTH = 20_000


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(Arena.create(4 * MIB, HugepageMode.OFF))
    yield store
    assert store.reserved_bytes == 0
    store.check_integrity()
    store.close()


def make_part(store: Store, length: int = LENGTH) -> Part:
    """A reservation of that length under b"k"."""
    room = store.reserve(b"k", length)
    assert room is not None
    return Part(1, room, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_what_has_been_written_is_known_to_the_byte(seed: int, store: Store) -> None:
    rng = random.Random(seed)
    part = make_part(store)
    written = bytearray(LENGTH)
    for _ in range(300):
        offset = rng.randrange(LENGTH)
        length = min(rng.choice([0, 1, 7, 100, 3000]), LENGTH - offset)
        if rng.random() < 0.75:
            part.wrote(offset, length)
            written[offset : offset + length] = b"\1" * length
        else:
            part.lost(offset, length)
            written[offset : offset + length] = bytes(length)
        assert part.written_bytes == written.count(1)
        assert part.is_whole == (0 not in written)
        gaps = bytes(written).split(b"\0")
        assert len(part._starts) == sum(bool(run) for run in gaps), "ranges that touch are one"
    part.wrote(0, LENGTH)
    assert part.is_whole
    part.end()


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, LENGTH + 1), (LENGTH, 1), (2**63, 1), (-5, 3)])
def test_what_does_not_fit_is_refused(offset: int, length: int, store: Store) -> None:
    part = make_part(store)
    told = part.refusal(offset, length)
    assert told is not None
    assert told.endswith(b" do not fit into a reservation of 20000\r\n")
    part.end()


def test_ever_more_separate_ranges_are_refused_and_filling_a_gap_is_not(store: Store) -> None:
    part = make_part(store)
    for number in range(RANGES_MAX):
        assert part.refusal(2 * number, 1) is None
        part.wrote(2 * number, 1)
    assert b"separate ranges" in (part.refusal(LENGTH - 1, 1) or b"")
    assert part.refusal(1, 1) is None
    part.wrote(1, 1)
    assert part.refusal(LENGTH - 1, 1) is None
    part.end()


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_what_lies_behind_a_piece_is_put_back_after_its_terminator_fell_there(end: str, store: Store) -> None:
    part = make_part(store)
    value = pattern(LENGTH)
    part.view[:] = value
    part.wrote(0, LENGTH)
    piece = Piece(store, part, 100, 50)
    piece.view_with_slack[:] = bytes(50) + b"\r\n"
    getattr(piece, end)()
    getattr(piece, end)()  # a second time it does nothing
    assert bytes(part.view) == value[:100] + bytes(50) + value[150:]
    assert part.written_bytes == (LENGTH if end == "commit" else LENGTH - 50)
    part.end()


def test_room_that_a_writer_fills_is_not_given_away_before_it_is_done(store: Store) -> None:
    part = make_part(store)
    free = store.allocator.free_bytes
    part.begin_fill()
    part.end()
    assert part.ended
    assert store.allocator.free_bytes == free
    part.end_fill()
    assert store.allocator.free_bytes == store.arena.nbytes
