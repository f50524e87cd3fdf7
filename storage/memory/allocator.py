"""Where in the arena a value goes: arithmetic over extents that knows no memory and no entries.

Values are contiguous, of any length, and a cache is always full, so the question is never "is there a hole?" but
"which neighbours should leave so that one appears?". Two rules answer it:

1. A free hole is taken best fit, lowest address first (Knuth, TAOCP vol. 1, section 2.5), with holes coalesced at
   once (the same section): each is found among its neighbours by its address.
2. When no hole fits, `window` walks the victims in the policy's order and frees them *virtually*, coalescing as it
   goes, until one virtual hole is long enough; only the victims inside the part that is really needed leave, every
   other one stays. With equal lengths that is exactly the policy's own order (the first victim's extent is the
   hole); with mixed lengths a tighter window a little further on is preferred to a wasteful one (BEYOND). No victim
   outside the window is lost. It finds a window whenever evictable and free
   bytes adjoin, so without leases in the way a value that fits the arena is never refused. Memory is not compacted:
   a move would be a copy of a payload.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Protocol, TypeVar

from kvredis.storage._core import GRAIN_BYTES as GRAIN_BYTES
from kvredis.storage._core import Holes

from .extent import Extent as Extent

CANDIDATES_MAX = 16
"""Windows compared before the least wasteful is taken; each costs a look at its pieces."""

BEYOND = 4
"""How far past the first window the search for a tighter one may go, in multiples of the length wanted. This is what
mixed lengths may cost the policy's order. Mean occupancy on the trace in tests/storage/memory/test_occupancy.py: 93-98
% with 0, 95-99 % with 4; equal lengths fit at once and keep the order exactly."""


class Victim(Protocol):
    """What `window` may free: anything that says where it lies."""

    extent: Extent


V = TypeVar("V", bound=Victim)


class Allocator(Holes):
    """Free holes of one arena of `capacity_bytes`, which starts as a single hole, or taken whole where no hole can be
    longer than `hole_bytes`: the shorter holes are, the larger an arena may be (64 bits tell both).

    `allocate(length)` takes `length` bytes (a multiple of GRAIN_BYTES) from the tightest hole, or gives None when no
    hole is long enough; `free(extent)` gives an extent back, which joins the holes on both sides at once. Both are in
    _core.pyx.
    """

    __slots__ = ()

    def __init__(self, capacity_bytes: int, hole_bytes: int | None = None) -> None:
        if capacity_bytes <= 0 or capacity_bytes % GRAIN_BYTES:
            raise ValueError(f"capacity_bytes must be a positive multiple of {GRAIN_BYTES}, not {capacity_bytes}")
        super().__init__(capacity_bytes, hole_bytes or capacity_bytes)
        if hole_bytes is None:
            self.free(Extent(0, capacity_bytes))

    def extend(self, extent: Extent, least: int, most: int) -> Extent | None:
        """Lengthen `extent` into the hole behind it, to `most` bytes or as far as that goes; None, and nothing has
        changed, where it ends below `least`. All are multiples of GRAIN_BYTES."""
        end = extent.offset + extent.length
        length = min(most, (self.past(end) or end) - extent.offset)
        if length < least:
            return None
        self.allocate_at(Extent(end, length - extent.length))
        return Extent(extent.offset, length)

    def holes(self) -> list[Extent]:
        """Every free hole by address, for reports and checks."""
        return [Extent(start, end - start) for start, end in self.spans()]

    def window(self, length: int, victims: Iterable[V]) -> tuple[Extent, list[V]] | None:
        """Where `length` bytes can go and which victims must leave for it, or None when even all `victims` would not
        do.

        `victims` come in the policy's order, coldest first. Nothing changes here: the caller frees what it is told
        to and then calls `allocate_at`. Cost: one step a victim walked.
        """
        starts: dict[int, int] = {}  # virtual holes, by their two ends, laid over the real ones
        ends: dict[int, int] = {}
        walked: dict[int, V] = {}
        best: tuple[int, Extent, list[V]] | None = None
        candidates = 0
        beyond_bytes = 0  # walked since the first window was found
        for victim in victims:
            start, end = victim.extent.offset, victim.extent.offset + victim.extent.length
            walked[start] = victim
            if best is not None:
                beyond_bytes += end - start
            left = ends.pop(start, None)
            if left is None:
                left = self.start(start)
            if left is not None:
                start = left
            right = starts.pop(end, None)
            if right is None:
                right = self.past(end)
            if right is not None:
                end = right
            # A virtual hole swallows the real ones at its edges, so both of its own edges are entered anew.
            starts[start], ends[end] = end, start
            if end - start >= length:
                waste, extent, leaving = self._tightest(start, end, length, walked)
                if best is None or waste < best[0]:
                    best = waste, extent, leaving
                candidates += 1
                if waste == 0 or candidates == CANDIDATES_MAX:
                    break
            if beyond_bytes > BEYOND * length:
                break
        return None if best is None else best[1:]

    def _tightest(self, start: int, end: int, length: int, walked: dict[int, V]) -> tuple[int, Extent, list[V]]:
        """Of the runs of whole pieces in [start, end) that hold `length`, the one that wastes least.

        Waste is what leaves beyond what is placed: bytes of victims minus `length`, and no less than 0.
        """
        pieces: list[tuple[int, int, V | None]] = []
        at = start
        while at < end:
            victim = walked.get(at)
            past = self.past(at) if victim is None else at + victim.extent.length
            assert past is not None, "between victims are holes"
            pieces.append((at, past, victim))
            at = past
        best: tuple[int, int, int] | None = None
        lost = 0
        first = 0
        for last in range(len(pieces)):
            lost += 0 if pieces[last][2] is None else pieces[last][1] - pieces[last][0]
            while first < last and pieces[last][1] - pieces[first + 1][0] >= length:
                lost -= 0 if pieces[first][2] is None else pieces[first][1] - pieces[first][0]
                first += 1
            if pieces[last][1] - pieces[first][0] >= length and (best is None or lost < best[0]):
                best = lost, first, last
        assert best is not None, "the caller saw that [start, end) is long enough"
        lost, first, last = best
        leaving = [victim for _, _, victim in pieces[first : last + 1] if victim is not None]
        return max(0, lost - length), Extent(pieces[first][0], length), leaving

    def check_integrity(self) -> None:
        """Raise AssertionError unless the two views of the holes agree and no two holes touch."""
        holes = self.holes()
        assert sum(hole.length for hole in holes) == self.free_bytes
        assert sorted((hole.length, hole.offset) for hole in holes) == self.lengths()
        for hole, following in pairwise(holes):
            assert hole.offset + hole.length < following.offset, "touching holes were not joined"
        if holes:
            assert holes[0].offset >= 0
            assert holes[-1].offset + holes[-1].length <= self.capacity_bytes


def windows(length: int, victims: Iterable[V], holes: Iterable[tuple[int, int]]) -> Iterator[list[V]]:
    """The victims that must leave so that `length` bytes can go somewhere, time and again: each time others, and all in
    one walk.

    As `Allocator.window`, over `holes` as `spans` gives them, but what is found first is taken; so it needs neither the
    allocator nor the lock that guards it, and the tenth window costs no tenth walk.
    """
    real = dict(holes)
    starts, ends = dict(real), {end: start for start, end in real.items()}
    walked: dict[int, V] = {}
    for victim in victims:
        start, end = victim.extent.offset, victim.extent.offset + victim.extent.length
        walked[start] = victim
        left = ends.pop(start, None)
        if left is not None:
            del starts[left]
            start = left
        right = starts.pop(end, None)
        if right is not None:
            del ends[right]
            end = right
        if end - start >= length:
            leaving = []
            at = start
            while at < start + length:
                piece = walked.pop(at, None)
                if piece is not None:
                    leaving.append(piece)
                at = real[at] if piece is None else at + piece.extent.length
            yield leaving
            start = at
        if start < end:
            starts[start], ends[end] = end, start
