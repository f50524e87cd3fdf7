"""What may be found after a process has died: one client's writes in order, and how far they are known to be on disk.

Every value is one of a kind. Its head names it, the rest follows from that, so wrong bytes are known without a list of
right ones, and a value can be recognised under any name. What was appended is a value too, which says behind what it
came; the last one gives the whole its number. Each key has one writer, whose commands are executed in their
order: so what a key may hold is any state from the last one on that the disk has confirmed, those included that were
sent and never answered.
"""

import random
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

Name = tuple[bytes, int]
"""A key and its database."""

_HEAD = struct.Struct("<8sQQQI")
_MAGIC: Final = b"crashtst"
VALUE_BYTES_MIN: Final = _HEAD.size
VALUE_BYTES_MAX: Final = 2 * 1024 * 1024
_NOISE: Final = random.Random(11).randbytes(4 * VALUE_BYTES_MAX)
_STARTS: Final = 2 * VALUE_BYTES_MAX


def value(ident: int, length: int, after: int = 0) -> bytes:
    """The bytes of value number `ident`, appended to value `after` if that is not 0: no other number, length or part of
    another value looks like it."""
    head = struct.pack("<8sQQQ", _MAGIC, ident, length, after)
    start = ident * 4099 % _STARTS
    return b"".join((head, zlib.crc32(head).to_bytes(4, "little"), _NOISE[start : start + length - _HEAD.size]))


def ident_of(found: bytes | bytearray | memoryview) -> int:
    """Which value these bytes are; AssertionError unless they are one, to the last byte."""
    at = ident = 0
    while True:
        before, rest = ident, memoryview(found)[at:]
        assert len(rest) >= _HEAD.size, f"{len(rest)} bytes are no value"
        magic, ident, length, after, _ = _HEAD.unpack_from(rest)
        assert magic == _MAGIC, f"wrong bytes: {bytes(rest[:40])!r}"
        assert length <= len(rest), f"value {ident} of {length} bytes has {len(rest)}"
        assert rest[:length] == value(ident, length, before), f"value {ident} behind {before}, {after}, has wrong bytes"
        at += length
        if at == len(found):
            return int(ident)


class Held(NamedTuple):
    """What a name holds: the number of a value (0 = nothing) and its end in Unix ms (0 = none)."""

    ident: int
    expire_at_ms: int = 0

    def is_over(self, now_ms: int) -> bool:
        """Whether its end has come."""
        return 0 < self.expire_at_ms <= now_ms


NOTHING: Final = Held(0)


@dataclass(slots=True)
class Seen:
    """What was found under a name, between two moments in Unix ms."""

    held: Held
    from_ms: int
    to_ms: int


class Writes:
    """The writes of one client. Numbers of values are taken from `first_ident` on."""

    def __init__(self, first_ident: int = 1) -> None:
        self.sent = 0
        """How many writes there were: what `confirm` is given back."""
        self._next_ident = first_ident
        self._states: dict[Name, list[tuple[int, Held]]] = {}  # from the confirmed one on, each with its write's number
        self._deleted: set[int] = set()  # values that were taken away without another one in their place
        self._copied: set[int] = set()  # values that may be under several names
        self._followed: dict[int, set[int]] = {}  # what has come in a value's place, under whatever name

    def latest(self, name: Name) -> Held:
        """What a name holds once everything has been executed that was sent."""
        states = self._states.get(name)
        return states[-1][1] if states else NOTHING

    def names(self) -> list[Name]:
        """Every name that was ever written."""
        return list(self._states)

    def at_stake(self) -> int:
        """How many names hold something that is confirmed and was written over, and not deleted, since."""
        states = ([held for _, held in each] for each in self._states.values())
        return sum(len(each) > 1 and NOTHING not in each and each[0] != each[-1] for each in states)

    # ---- what was sent -----------------------------------------------------------------------------------------------

    def set(self, name: Name, expire_at_ms: int = 0) -> int:
        """A new value; gives its number."""
        self.sent += 1
        ident = self._next_ident
        self._next_ident += 1
        self._follow(name, ident)
        self._note(name, Held(ident, expire_at_ms))
        return ident

    def delete(self, names: Iterable[Name]) -> None:
        """Names are to hold nothing: DEL, FLUSHDB."""
        self.sent += 1
        for name in names:
            self._deleted.add(self.latest(name).ident)
            self._note(name, NOTHING)

    def expire(self, name: Name, at_ms: int) -> None:
        """Another end, or none with 0. A name that holds nothing is none the wiser."""
        self.sent += 1
        if self.latest(name).ident:
            self._note(name, Held(self.latest(name).ident, at_ms))

    def copy(self, old: Name, new: Name) -> None:
        """COPY REPLACE: `old` must hold something, and not be `new`."""
        self.sent += 1
        held = self.latest(old)
        self._copied.add(held.ident)
        self._follow(new, held.ident)
        self._note(new, held)

    def rename(self, old: Name, new: Name) -> None:
        """`old` must hold something, and not be `new`."""
        self.sent += 1
        held = self.latest(old)
        self._follow(new, held.ident)
        self._note(old, NOTHING)
        self._note(new, held)

    def swap(self, first: int, second: int) -> None:
        """SWAPDB."""
        self.sent += 1
        for key in {key for key, space in self._states if space in (first, second)}:
            one, other = self.latest((key, first)), self.latest((key, second))
            if one != other:
                self._note((key, first), other)
                self._note((key, second), one)

    # ---- what came of it ---------------------------------------------------------------------------------------------

    def confirm(self, sent: int) -> None:
        """The first `sent` writes are on disk."""
        for states in self._states.values():
            while len(states) > 1 and states[1][0] <= sent:
                del states[0]

    def vanished(self, name: Name) -> None:
        """A name was found empty that held something: its time had come, or the cache has let go of it."""
        self.delete([name])

    def unsaid(self, name: Name, held: Held) -> None:
        """A write to `name` turned out to have done nothing: it still holds what it did."""
        self.sent += 1
        self._note(name, held)

    def _follow(self, name: Name, ident: int) -> None:
        self._followed.setdefault(self.latest(name).ident, set()).add(ident)

    def _note(self, name: Name, held: Held) -> None:
        self._states.setdefault(name, [(0, NOTHING)]).append((self.sent, held))

    # ---- what is found afterwards ------------------------------------------------------------------------------------

    def compare(self, seen: Mapping[Name, Seen], *, misses: bool) -> None:
        """AssertionError unless all that was found is what a client wrote there and nothing confirmed is missing;
        `misses`: unless the disk may have let go of it. From then on what was found counts as confirmed."""
        homes: dict[int, Name] = {}
        looked_ms = max((each.to_ms for each in seen.values()), default=0)  # a value may have ended where it was last
        for name, each in seen.items():
            if each.held.ident:
                other = homes.setdefault(each.held.ident, name)
                assert other == name or each.held.ident in self._copied, (
                    f"value {each.held.ident} is under two names: {other} and {name}"
                )
        for name, each in seen.items():
            states = [held for _, held in self._states.get(name, [(0, NOTHING)])]
            if each.held.ident:
                assert each.held in states, f"{name} holds {each.held}; it may hold {states}"
                assert not each.held.is_over(each.from_ms), f"{name} is served {each.from_ms} ms after its end"
            elif not misses:
                over = any(held.is_over(looked_ms) for held in states)
                assert over or NOTHING in states, f"{name} is lost; it may hold {states}"
                assert self._has_left_something(states[0].ident, set(homes), looked_ms), (
                    f"{states[0]}, confirmed under {name}, is lost, and so is all that has come in its place"
                )
        for name, each in seen.items():
            self._states[name] = [(0, each.held)]
        self._deleted.clear()
        self._followed.clear()

    def _has_left_something(self, ident: int, found: Collection[int], now_ms: int) -> bool:
        """Whether a value is there, or something that has come in its place, or any of them may have gone for good."""
        line, seen = [ident], {ident}
        while line:
            each = line.pop()
            if not each or each in found or each in self._deleted:
                return True
            states = (held for states in self._states.values() for _, held in states)
            if any(held.ident == each and held.is_over(now_ms) for held in states):
                return True
            line += self._followed.get(each, set()) - seen
            seen |= self._followed.get(each, set())
        return False
