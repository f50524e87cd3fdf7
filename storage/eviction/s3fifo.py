"""S3-FIFO: blocks that are used once must not push out those that are used again.

After Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. Everything arrives in a *small* queue,
a tenth of all. An entry that comes to the front of it unused leaves; one that was used goes over to the *main* queue.
There it leaves from the front too, unless it was used since: then it goes round once more, for each of up to three
uses. *Ghosts* are the keys that left the small queue lately: a block that is stored again while its ghost is there goes
to the main queue at once. So a long prompt that no client asks for again passes through a tenth of the memory, and
causes no write to disk.

Where this differs from the paper, and why:

- Queues are measured in entries, not bytes: a policy knows an order and no capacity, and the blocks of a model are all
  of one length.
- The hands move when the store asks for a victim, not when it takes a block in: the store may find room without.
- One use is enough to go over (the paper's code asks for two): a block is read once by each prompt that begins with
  it, and its second prompt is what shows that it is shared.
- A key of the small queue that is deleted or written over has a ghost as well, and one of the main queue that is
  written over stays there: writing over a block is a use of it, and the new one shall not stand behind the old one.
- A run that is wanted at one instant goes to the end of the queue that it is in, tail first, and that is no use: a
  prefix must be eaten from its end, and the order of arrival knows nothing of that.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from kvredis.storage.entry import Entry

SMALL_PART = 10
"""The small queue is one part in this many of all entries."""

USES_MAX = 3
"""Two bits, as in the paper: how often an entry of the main queue goes round without a further use."""

TURN_STEPS_MAX = 10_000
"""How many used entries are passed over for one victim, some 2 ms: then the entry in front leaves all the same.
Otherwise the first eviction after a long time in which everything was used would go round all there is three times."""


class _Seat:
    """An entry's place in either queue: it moves along, so that a use may be counted while it moves."""

    __slots__ = ("uses",)

    def __init__(self) -> None:
        self.uses = 0


class S3FIFO:
    """Newcomers that are not used first, then the oldest of the others that have not been used lately."""

    name = "S3FIFO"
    selective = False
    __slots__ = ("_ghosts", "_gone", "_main", "_small")

    def __init__(self) -> None:
        self._small: OrderedDict[Entry, _Seat] = OrderedDict()
        self._main: OrderedDict[Entry, _Seat] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        """Hashes of keys with their database, at most as many as there are entries. Two keys of one hash do no harm."""
        self._gone: int | None = None
        """The same of the last one that left the main queue, for the case that it has only been written over."""

    def admit(self, entry: Entry) -> None:
        name = hash((entry.key, entry.space))
        if name in self._ghosts or name == self._gone:
            self._ghosts.pop(name, None)
            self._main[entry] = _Seat()
        else:
            self._small[entry] = _Seat()

    def restore(self, entry: Entry, uses: int) -> None:
        """As Policy: what was used again goes to the main queue."""
        (self._main if uses > 1 else self._small)[entry] = _Seat()

    def end_changed(self, entry: Entry) -> None:
        """As Policy: an end changes nothing here."""

    def touch(self, entry: Entry) -> None:
        seat = self._small.get(entry) or self._main[entry]  # it may go over in between, but only in this direction
        if seat.uses < USES_MAX:
            seat.uses += 1

    def touch_run(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            (self._small if entry in self._small else self._main).move_to_end(entry)

    def forget(self, entry: Entry) -> None:
        name = hash((entry.key, entry.space))
        if self._small.pop(entry, None) is not None:
            self._ghosts[name] = None
            self._ghosts.move_to_end(name)
            self._gone = None
        else:
            del self._main[entry]
            self._gone = name
        while len(self._ghosts) > len(self):
            self._ghosts.popitem(last=False)

    def victims(self) -> Iterator[Entry]:
        """As Policy. Asking turns the queues as far as the first victim, for good; from there on it only foresees."""
        self._turn()
        return self._foreseen()

    def others(self) -> Iterator[Entry]:
        """As Policy: every entry may leave."""
        return iter(())

    def warmth(self, entry: Entry) -> float:
        """As Policy: the time of the last use, which is near enough between two stores of one kind."""
        return entry.accessed_s

    def spills(self, entry: Entry) -> bool:
        """As Policy: not when it has not been used since it came, and is new."""
        seat = self._small.get(entry)
        return seat is None or seat.uses > 0

    def uses(self, entry: Entry) -> int | None:
        """As Policy: two bits are no frequency."""
        return None

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, entry: object) -> bool:
        return entry in self._small or entry in self._main

    def _turn(self) -> None:
        """Until a victim is in front. Each step takes a use away that some touch has brought, or passes by a lease."""
        leased_left = len(self)
        for step in range(TURN_STEPS_MAX + 1):
            if not (len(self) and leased_left):
                return
            in_small = _from_small(len(self._small), len(self))
            queue = self._small if in_small else self._main
            entry, seat = next(iter(queue.items()))
            if step == TURN_STEPS_MAX:
                seat.uses = 0
            elif not seat.uses:
                if not entry.leases:
                    return
                queue.move_to_end(entry)
                leased_left -= 1
            elif in_small:
                seat.uses = 0
                self._main[entry] = seat
                del self._small[entry]
            else:
                seat.uses -= 1
                self._main.move_to_end(entry)

    def _foreseen(self) -> Iterator[Entry]:
        """The entries that would leave one after the other if nothing was used or stored meanwhile; nothing changes."""
        small, main = iter(self._small.items()), iter(self._main.items())
        small_left, main_left = len(self._small), len(self._main)
        again: deque[tuple[Entry, int]] = deque()  # behind the main queue: those that go over, and those that go round
        passed = 0
        while left := small_left + main_left + len(again):
            in_small = _from_small(small_left, left)
            if in_small:
                small_left -= 1
                entry, seat = next(small)
                uses = seat.uses
            elif main_left:
                main_left -= 1
                entry, seat = next(main)
                uses = seat.uses
            else:
                entry, uses = again.popleft()
            if uses and passed < TURN_STEPS_MAX:
                again.append((entry, 0 if in_small else uses - 1))
                passed += 1
            elif not entry.leases:
                passed = 0
                yield entry


def _from_small(small: int, total: int) -> bool:
    """Whether the next to leave is one of the `small` entries in the small queue."""
    return small * SMALL_PART > total or small == total
