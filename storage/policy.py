"""Who leaves first when room is needed: the contract of an eviction policy, and the three that are one order.

A policy orders entries and nothing else: it takes no room, frees none, and holds no bytes. The store tells it of
every entry that arrives, is used or leaves, and asks it for victims, coldest first.

LRU, LFU, FIFO and MRU mean what they mean in LMCache; lfu.py and s3fifo.py hold those that are more than one order.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from .entry import Entry
from .errors import ConfigError
from .lfu import LFU
from .s3fifo import S3FIFO


class Policy(Protocol):
    """The order in which unleased entries would leave. Every entry in it was admitted and not yet forgotten.

    The store's lock is held by whoever calls, except for `touch`: that may come from another thread at any time.
    """

    name: str

    def admit(self, entry: Entry) -> None:
        """Take in an entry that has just become visible, as the one used last. One that is written over is forgotten
        first, right before the new one of its key is admitted."""
        ...

    def touch(self, entry: Entry, /) -> None:
        """Note that an entry was read or written over; KeyError when it is not in the order."""
        ...

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """Note that a run of blocks, given head first, is wanted at one instant: of these the last is the coldest.
        KeyError, and only some of it noted, when one of them is not in the order.

        A suffix is worth nothing without its head, so a prefix must be eaten from its end. Who counts uses does not
        count this one: engines say it of a run that they look up, of what they have just stored, and again and again
        of the head while they store the rest. What is really used is read as well.
        """
        ...

    def forget(self, entry: Entry) -> None:
        """Drop an entry that is no longer visible."""
        ...

    def victims(self) -> Iterator[Entry]:
        """Entries without a lease, each once, coldest first; found one by one as they are asked for.

        Nothing may be admitted or forgotten while the iterator is in use; what is touched meanwhile may come in its
        old place or its new one.
        """
        ...

    def spills(self, entry: Entry) -> bool:
        """Whether an entry that leaves memory is worth a write to disk; asked while it is still in the order."""
        ...

    def uses(self, entry: Entry) -> int | None:
        """How often an entry was used of late, 0 to 255 (Redis' OBJECT FREQ), 0 for one that is not in the
        order; None where nobody counts."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, entry: object) -> bool: ...


class _OneOrder:
    """What the policies of one order share: an ordered dict with what arrived last at its end."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[Entry, None] = OrderedDict()

    def admit(self, entry: Entry) -> None:
        """As Policy."""
        self._order[entry] = None

    def forget(self, entry: Entry) -> None:
        """As Policy."""
        del self._order[entry]

    def victims(self) -> Iterator[Entry]:
        """As Policy: from the front."""
        return _unleased(self._order, iter)

    def spills(self, entry: Entry) -> bool:
        """As Policy: always."""
        return True

    def uses(self, entry: Entry) -> int | None:
        """As Policy: not counted."""
        return None

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, entry: object) -> bool:
        return entry in self._order


class LRU(_OneOrder):
    """Least recently used first: the front of the order is the coldest entry."""

    name = "LRU"

    def __init__(self) -> None:
        super().__init__()
        self.touch: Callable[[Entry], None] = self._order.move_to_end  # as Policy; without a frame of its own

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """As Policy."""
        deque(map(self.touch, reversed(entries)), maxlen=0)


class MRU(_OneOrder):
    """Most recently used first, newcomers too: for a loop over more than there is room for, which LRU always misses."""

    name = "MRU"

    def __init__(self) -> None:
        super().__init__()
        self.touch: Callable[[Entry], None] = self._order.move_to_end

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """As Policy: what was used last leaves first, so here the tail goes last."""
        deque(map(self.touch, entries), maxlen=0)

    def victims(self) -> Iterator[Entry]:
        """As Policy: from the end."""
        return _unleased(self._order, reversed)


class FIFO(_OneOrder):
    """First in, first out: use changes nothing, being stored anew does. A run leaves as it came, tail first if it was
    stored tail first."""

    name = "FIFO"

    def __init__(self) -> None:
        super().__init__()
        self.touch: Callable[[Entry], None] = self._order.__getitem__  # the KeyError, and nothing else

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """As Policy, but for the order: that of arrival stays."""
        deque(map(self.touch, entries), maxlen=0)


def _unleased(
    order: OrderedDict[Entry, None], walk: Callable[[OrderedDict[Entry, None]], Iterator[Entry]]
) -> Iterator[Entry]:
    """Those of `order` without a lease, as `walk` comes upon them."""
    walked = []
    try:
        for entry in walk(order):
            if not entry.leases:
                walked.append(entry)
                yield entry
    except RuntimeError:  # a touch without the store's lock came in between: go on as things stand now
        met = set(walked)
        yield from (entry for entry in list(walk(order)) if not (entry.leases or entry in met))


POLICIES: dict[str, Callable[[], Policy]] = {"LRU": LRU, "LFU": LFU, "FIFO": FIFO, "MRU": MRU, "S3FIFO": S3FIFO}


def make_policy(name: str, *, source: str = "StoreOptions") -> Policy:
    """A policy by its name, in any case; ConfigError for one that there is not."""
    try:
        make = POLICIES[name.upper()]
    except KeyError:
        raise ConfigError("cache_policy", name, source, f"must be one of {', '.join(POLICIES)}") from None
    return make()
