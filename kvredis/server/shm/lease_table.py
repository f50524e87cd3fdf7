"""Where a client's leases lie: the replies that say so, and the offsets that it gives back, a run at a time.

LaneClient (attach.py) says what is kept for a client and why; here is its commonest case, leases of blocks at places
where the client has no other. All else stops `keep`, or makes `take` leave the whole command alone. Where the extension
was built, protocol/_plain.c does the same in a third of the time, and with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from kvredis.storage.entry import PAYLOAD_OFFSET_BYTES, LeaseRun
from kvredis.storage.lease_many import Found, Place
from kvredis.storage.memory.copy import NATIVE_WANTED


class Shared:
    """Leases at one place, where there are several of one client's, or were. They may be of several blocks: when a
    limit has passed, another block may have come to lie there.

    WHY the one whose limit comes first ends first, and those that ended long ago are still counted (`ended`): a client
    names a place, not a lease. To end another than it means might take from under it what it is reading now.
    """

    __slots__ = ("ended", "nbytes", "places")

    def __init__(self, place: Place) -> None:
        self.places = [place]
        """By when their limits come."""
        self.nbytes = place[2]
        """What they take of the client's share."""
        self.ended = 0


Held = dict[bytes, Place | Shared]
"""A client's leases by their offset, as commands spell it, so that no number need be read. Mostly there is one a place.
"""

Room = tuple[int, int]
"""How many bytes of the arena, and how many leases, may be kept."""

Keeping = Callable[[Sequence[Found], int, LeaseRun, Held, Room], tuple[bytes, int, int]]
Taking = Callable[[Sequence[bytes], Held], tuple[list[Place], int] | None]


def keep_in_python(found: Sequence[Found], at: int, run: LeaseRun, held: Held, room: Room) -> tuple[bytes, int, int]:
    """Put the leases of `run` into `held`, from index `at` on, up to the first thing found that is no block, that lies
    where something is held, or for which there is no room: the replies, the index of that, and their bytes."""
    replies = []
    bytes_max, past = room[0], min(len(found), at + room[1])
    nbytes = 0
    for index in range(at, past):
        entry = found[index]
        if entry is None or isinstance(entry, bytes):
            past = index
            break
        start, length = entry.extent
        word = b"%d" % (start + PAYLOAD_OFFSET_BYTES)
        if word in held or not length or nbytes + length > bytes_max:
            past = index
            break
        held[word] = run, index, length
        nbytes += length
        replies.append(b"*2\r\n:%b\r\n:%d\r\n" % (word, entry.length))
    return b"".join(replies), max(past, at), nbytes


def take_in_python(words: Sequence[bytes], held: Held) -> tuple[list[Place], int] | None:
    """Take the leases at `words` out of `held`, and their bytes, one named twice once; None, and nothing is taken, if
    there is not just one at each."""
    if set(map(type, map(held.get, words))) - {tuple}:
        return None
    places = []
    for word in words:
        place = held.pop(word, None)
        if isinstance(place, tuple):
            places.append(place)
    return places, sum([nbytes for _, _, nbytes in places])


def _quickest() -> tuple[Keeping, Taking]:
    """The native ways, if they are there and wanted."""
    if NATIVE_WANTED:
        with suppress(ImportError):
            from kvredis.server.protocol._plain import keep, take

            return keep, take
    return keep_in_python, take_in_python


keep, take = _quickest()
