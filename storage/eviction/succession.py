"""A policy that takes over from another one while the store is in use: a million entries are not sorted in one step.

Every entry is in one of three places. *Old* is the order that was in force; from there the store hands entries over,
coldest first by what they know of themselves, to *new*. Whatever is stored or used meanwhile is *late*: it comes behind
all that was handed over, in the order of its use. Until all is done new leaves first, then old, then late; when the
last late one has been handed over, the new order is the whole, and the store goes on with it alone.

A change that comes before the last one is done goes on from where that is: what it had made new is one more old order,
and late is late. There are as many old orders as changes came between two steps of handing over, and empty ones go.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from threading import Lock

from kvredis.storage.entry import Entry

from .base import Policy


class Succession:
    """The two orders of a change as one Policy, under the name of the new one."""

    def __init__(self, old: Policy, new: Policy) -> None:
        self.name, self.selective = new.name, new.selective
        self.new = new
        self._olds: list[Policy] = [old]
        """The old orders, in the order in which they leave."""
        self._late: OrderedDict[Entry, int] = OrderedDict()
        """With their uses, the one used last at the end."""
        self._is_ending = False
        self._gone: tuple[bytes, int] = (b"", -1)
        self._gone_uses = 0
        """Name and uses of the last one that left, for the case that it has only been written over."""
        self._lock = Lock()  # a use takes several steps here, and may come while another thread admits or forgets
        if isinstance(old, Succession):
            with old._lock:
                self._olds = [each for each in (old.new, *old._olds) if len(each)]
            self._late, self._lock = old._late, old._lock  # a use may still be under way there

    # ---- handing over --------------------------------------------------------------------------------------------

    def hand_over(self, entry: Entry) -> None:
        """Make an entry of the old order the last of the new one; one that is not there (any more) stays where it
        is."""
        with self._lock:
            old = self._old_of(entry)
            if old is not None:
                uses = _uses_in(old, entry)
                old.forget(entry)
                self.new.restore(entry, uses)

    def end(self, entries_max: int) -> bool:
        """Hand over up to so many of the late ones; whether the new order is the whole. From the first call on what is
        used in the new order stays there, or this would have no end."""
        with self._lock:
            self._is_ending = True
            for _ in range(min(entries_max, len(self._late))):
                entry, uses = self._late.popitem(last=False)
                self.new.restore(entry, uses)
            return not (self._late or any(map(len, self._olds)))

    @property
    def late(self) -> int:
        """How many late ones there are."""
        return len(self._late)

    def _old_of(self, entry: object) -> Policy | None:
        return next((old for old in self._olds if entry in old), None)

    def _take(self, entry: Entry) -> int:
        """Take an entry out of where it is; gives its uses. KeyError when it is nowhere."""
        uses = self._late.pop(entry, None)
        if uses is not None:
            return uses
        order = self.new if entry in self.new else self._old_of(entry)
        if order is None:
            raise KeyError(entry)
        uses = _uses_in(order, entry)
        order.forget(entry)
        return uses

    # ---- Policy --------------------------------------------------------------------------------------------------

    def admit(self, entry: Entry) -> None:
        with self._lock:
            self._late[entry] = self._gone_uses + 1 if (entry.key, entry.space) == self._gone else 1

    def restore(self, entry: Entry, uses: int) -> None:
        with self._lock:
            self._late[entry] = uses

    def touch(self, entry: Entry) -> None:
        with self._lock:
            if self._is_ending and entry in self.new:
                self.new.touch(entry)
            else:
                self._late[entry] = self._take(entry) + 1

    def end_changed(self, entry: Entry) -> None:
        with self._lock:
            for order in (self.new, *self._olds):
                if entry in order:
                    order.end_changed(entry)

    def touch_run(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            for entry in reversed(entries):
                if self._is_ending and entry in self.new:
                    self.new.touch_run([entry])
                else:
                    self._late[entry] = self._take(entry)

    def forget(self, entry: Entry) -> None:
        with self._lock:
            self._gone, self._gone_uses = (entry.key, entry.space), self._take(entry)

    def victims(self) -> Iterator[Entry]:
        """As Policy: in the order that the new one has so far, then in the old one's."""
        rest = self._unleased_rest()
        return _each_once(chain(self.new.victims(), filter(_has_end, rest) if self.selective else rest))

    def others(self) -> Iterator[Entry]:
        if not self.selective:
            return iter(())
        rest = self._unleased_rest()
        return _each_once(chain(self.new.others(), (entry for entry in rest if not _has_end(entry))))

    def _unleased_rest(self) -> Iterator[Entry]:
        olds = [chain(old.victims(), old.others()) for old in self._olds]
        return chain(*olds, self._unleased_late())

    def _unleased_late(self) -> Iterator[Entry]:
        try:
            for entry in self._late:
                if not entry.leases:
                    yield entry
        except RuntimeError:  # a touch without the store's lock came in between
            yield from [entry for entry in list(self._late) if not entry.leases]

    def warmth(self, entry: Entry) -> float:
        return self.new.warmth(entry)

    def spills(self, entry: Entry) -> bool:
        return self.new.spills(entry) if entry in self.new else True

    def uses(self, entry: Entry) -> int | None:
        """As Policy: None where the new order does not count them."""
        with self._lock:
            if entry in self._late:
                found = self._late[entry]
            elif (old := self._old_of(entry)) is not None:
                found = _uses_in(old, entry)
            else:
                return self.new.uses(entry)
            return None if self.new.uses(entry) is None else min(found, 255)

    def __len__(self) -> int:
        return len(self.new) + sum(map(len, self._olds)) + len(self._late)

    def __contains__(self, entry: object) -> bool:
        return entry in self.new or entry in self._late or self._old_of(entry) is not None


def _uses_in(order: Policy, entry: Entry) -> int:
    uses = order.uses(entry)
    return entry.hits + 1 if uses is None else uses


def _has_end(entry: Entry) -> bool:
    return entry.expire_at_ms != 0


def _each_once(entries: Iterator[Entry]) -> Iterator[Entry]:
    """Those that a touch moves from one order to another meanwhile come once."""
    met: set[Entry] = set()
    for entry in entries:
        if entry not in met:
            met.add(entry)
            yield entry
