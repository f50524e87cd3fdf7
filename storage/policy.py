"""Who leaves first when room is needed: the contract of an eviction policy, and LRU.

A policy orders entries and nothing else: it takes no room, frees none, and holds no bytes. The store tells it of
every entry that arrives, is used or leaves, and asks it for victims, coldest first.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from .entry import Entry
from .errors import ConfigError


class Policy(Protocol):
    """The order in which unleased entries would leave. Every entry in it was admitted and not yet forgotten."""

    name: str

    def admit(self, entry: Entry) -> None:
        """Take in an entry that has just become visible, as the one used last."""

    def touch(self, entry: Entry) -> None:
        """Note that an entry was used."""

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """Note that a run of blocks, given head first, was used at one instant: of these the last is the coldest.
        KeyError, and only some of it noted, when one of them is not in the order.

        A suffix is worth nothing without its head, so a prefix must be eaten from its end.
        """

    def forget(self, entry: Entry) -> None:
        """Drop an entry that is no longer visible."""

    def victims(self) -> Iterator[Entry]:
        """Entries without a lease, coldest first. The policy must not be changed while the iterator is in use."""

    def __len__(self) -> int: ...

    def __contains__(self, entry: object) -> bool: ...


class LRU:
    """Least recently used first: an ordered dict whose front is the coldest entry."""

    name = "LRU"
    __slots__ = ("_order", "touch")

    def __init__(self) -> None:
        self._order: OrderedDict[Entry, None] = OrderedDict()
        self.touch: Callable[[Entry], None] = self._order.move_to_end  # as Policy; without a frame of its own

    def admit(self, entry: Entry) -> None:
        """As Policy."""
        self._order[entry] = None

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """As Policy."""
        deque(map(self.touch, reversed(entries)), maxlen=0)

    def forget(self, entry: Entry) -> None:
        """As Policy."""
        del self._order[entry]

    def victims(self) -> Iterator[Entry]:
        """As Policy."""
        return (entry for entry in self._order if not entry.leases)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, entry: object) -> bool:
        return entry in self._order


POLICIES: dict[str, type[LRU]] = {"LRU": LRU}


def make_policy(name: str, *, source: str = "StoreOptions") -> Policy:
    """A policy by LMCache's name for it, in any case; ConfigError for one that is not built yet."""
    try:
        return POLICIES[name.upper()]()
    except KeyError:
        raise ConfigError("cache_policy", name, source, f"must be one of {', '.join(POLICIES)}") from None
