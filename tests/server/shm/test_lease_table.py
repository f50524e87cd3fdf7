"""Where leases lie: what is kept, taken and said of it."""

import gc
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from kvredis.server.shm._places import keep, take
from kvredis.server.shm.attach import Held, Shared
from kvredis.storage.entry import NOWHERE, PAYLOAD_OFFSET_BYTES, Entry, Found, LeaseRun
from kvredis.storage.memory.allocator import Extent

PLENTY = (1 << 40, 1000)
RUN = LeaseRun([], 0.0)


def entry(page: int, length: int = 5000) -> Entry:
    """A block at a page of the arena."""
    return Entry(b"key", 0, length, Extent(page * 4096, 8192), None)


def lengths(entries: Sequence[Entry]) -> list[int]:
    """How long their values are."""
    return [each.length for each in entries]


def word(page: int) -> bytes:
    """Its place, as commands spell it."""
    return b"%d" % (page * 4096 + PAYLOAD_OFFSET_BYTES)


class TestKeep:
    """What is said of leases, and kept of them."""

    def test_each_is_held_at_its_place_and_said_to_be_there(self) -> None:
        far = Entry(b"far", 0, 2**40 + 7, Extent(2**50, 2**41), None)
        held: Held = {}
        text, past, nbytes = keep([entry(0), entry(5, 0), far], 0, RUN, held, (2**60, 3))
        assert text == (b"*2\r\n:512\r\n:5000\r\n*2\r\n:20992\r\n:0\r\n*2\r\n:%d\r\n:%d\r\n" % (2**50 + 512, 2**40 + 7))
        assert (past, nbytes) == (3, 2 * 8192 + 2**41)
        assert held == {word(0): (RUN, 0, 8192), word(5): (RUN, 1, 8192), b"%d" % (2**50 + 512): (RUN, 2, 2**41)}

    @pytest.mark.parametrize("stop", [None, b"small", entry(1), entry(9)], ids=["miss", "small", "twice", "held"])
    def test_it_stops_where_it_must_not_go_on(self, stop: Found) -> None:
        held: Held = {word(9): Shared((RUN, 7, 8192))}
        found = [entry(8), entry(1), stop, entry(3)]
        text, past, nbytes = keep(found, 1, RUN, held, PLENTY)
        assert (text, past, nbytes) == (b"*2\r\n:4608\r\n:5000\r\n", 2, 8192)
        assert keep(found, 2, RUN, held, PLENTY) == (b"", 2, 0)
        assert sorted(held) == sorted([word(9), word(1)])
        assert keep(found, 3, RUN, held, PLENTY)[1:] == (4, 8192)
        assert keep(found, 4, RUN, held, PLENTY) == (b"", 4, 0)

    @pytest.mark.parametrize(
        ("room", "kept"),
        [((2 * 8192, 9), 2), ((2 * 8192 - 1, 9), 1), ((8191, 9), 0), ((-1, 9), 0), ((2**40, 2), 2), ((2**40, -3), 0)],
    )
    def test_no_more_is_kept_than_there_is_room_for(self, room: tuple[int, int], kept: int) -> None:
        held: Held = {}
        assert keep([entry(0), entry(2), entry(4)], 0, RUN, held, room)[1:] == (kept, kept * 8192)
        assert len(held) == kept

    def test_what_lies_nowhere_is_left_alone(self) -> None:
        assert keep([Entry(b"key", 0, 5, NOWHERE, None)], 0, RUN, {}, PLENTY) == (b"", 0, 0)


class TestTake:
    """What is given back."""

    def test_it_is_held_no_more_and_one_named_twice_is_given_once(self) -> None:
        held: Held = {word(page): (RUN, page, 4096 * page) for page in range(4)}
        taken = take([word(3), word(1), word(3)], held)
        assert taken == ([(RUN, 3, 12288), (RUN, 1, 4096)], 16384)
        assert sorted(held) == sorted([word(0), word(2)])

    @pytest.mark.parametrize("strange", [word(9), b"x", b"", word(5)])
    def test_nothing_is_taken_when_at_one_there_is_not_just_one(self, strange: bytes) -> None:
        held: Held = {word(0): (RUN, 0, 4096), word(5): Shared((RUN, 5, 4096))}
        before = dict(held)
        assert take([word(0), strange], held) is None
        assert held == before


class TestBoth:
    """Both functions together, and what they refuse."""

    def test_what_is_kept_and_taken_by_chance_adds_up(self) -> None:
        rng = random.Random(5)
        for _ in range(3000):
            found = [rng.choice([None, b"small", entry(rng.randrange(30), rng.randrange(9000))]) for _ in range(6)]
            found += [entry(page) for page in rng.sample(range(30, 60), 5)] * rng.randrange(2)
            rng.shuffle(found)
            held: Held = {word(page): (RUN, page, 8192) for page in rng.sample(range(60), rng.randrange(20))}
            if rng.random() < 0.3:
                held[word(3)] = Shared((RUN, 3, 8192))
            before, at = dict(held), rng.randrange(len(found) + 1)
            room = (rng.randrange(60_000), rng.randrange(-1, 9))
            text, past, nbytes = keep(found, at, RUN, held, room)
            kept = [each for each in found[at:past] if isinstance(each, Entry)]
            places = [b"%d" % (each.extent.offset + PAYLOAD_OFFSET_BYTES) for each in kept]
            assert len(kept) == past - at <= max(0, room[1])
            assert text == b"".join(b"*2\r\n:%b\r\n:%d\r\n" % pair for pair in zip(places, lengths(kept), strict=True))
            assert nbytes == 8192 * len(kept) <= max(0, room[0])
            assert held == before | {place: (RUN, at + number, 8192) for number, place in enumerate(places)}
            stop = found[past] if past < len(found) and past - at < room[1] and nbytes + 8192 <= room[0] else None
            assert not isinstance(stop, Entry) or b"%d" % (stop.extent.offset + PAYLOAD_OFFSET_BYTES) in held
            if places:
                assert take(places, held) == ([(RUN, at + number, 8192) for number in range(len(places))], nbytes)
                assert held == before

    def test_what_they_cannot_work_with_is_refused(self) -> None:
        bad: list[tuple[Any, ...]] = [(), ((), 0, RUN, {}, PLENTY), ([], 0, RUN, [], PLENTY), ([], 0, 5, {}, PLENTY)]
        for args in (*bad, ([], 0, RUN, {}, [1, 2]), ([], 0, RUN, {}, (1, "2")), ([], "0", RUN, {}, PLENTY)):
            with pytest.raises(TypeError):
                keep(*args)
        bad = [(), ((), {}), ([], []), ([[]], {})]
        for args in bad:
            with pytest.raises(TypeError):
                take(*args)
        assert keep([object()], 0, RUN, {}, PLENTY) == (b"", 0, 0)  # type: ignore[list-item]
        with pytest.raises(TypeError):
            take([b"5"], {b"5": (RUN, 0, "many")})  # type: ignore[dict-item]

    def test_a_length_that_is_none_is_left_alone(self) -> None:
        assert keep([Entry(b"key", 0, -1, Extent(0, 4096), None)], 0, RUN, {}, PLENTY) == (b"", 0, 0)

    def test_nothing_is_kept_of_what_was_taken(self) -> None:
        found, held, counts = [entry(page + 10**6) for page in range(10)], Held(), []
        for _ in range(4):
            for _ in range(300):
                keep(found, 0, RUN, held, PLENTY)
                assert take(list(held), held) is not None
            gc.collect()
            counts.append((sys.getrefcount(RUN), sys.getrefcount(found[0]), sys.getrefcount(found[0].extent)))
        assert held == {}
        assert counts[1] == counts[3]
