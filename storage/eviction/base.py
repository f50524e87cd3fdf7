"""Which entry leaves first when room is needed: the contract of an eviction policy, and the policies that are simple
orders.

A policy orders entries and nothing else: it takes no room, frees none, and holds no bytes. The store tells it of
every entry that arrives, is used or leaves, and asks it for victims, coldest first.

LRU, LFU, FIFO and MRU mean what they mean in LMCache; lfu.py and s3fifo.py hold those that are more than one order.
Redis' volatile-* policies let only entries with an end leave: each keeps those and the others in two orders.

To add a policy: write a class that meets Policy, here or, if it is more than a list, in a file of its own, and name it
in POLICIES below. `cache_policy`, `maxmemory-policy`, their help and the tests that run on every policy read that
table; tests/storage/eviction/policy_models.py wants a short model of its order.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from kvredis.storage._core import OneOrder
from kvredis.storage.entry import Entry
from kvredis.storage.errors import ConfigError

from .lfu import LFU
from .s3fifo import S3FIFO


class Policy(Protocol):
    """The order in which unleased entries would leave. Every entry in it was admitted and not yet forgotten.

    The store's lock is held by the caller, except for `touch`: that may come from another thread at any time.
    """

    name: str
    selective: bool
    """Whether only entries with an end may leave for what is new."""

    def admit(self, entry: Entry) -> None:
        """Take in an entry that has just become visible, as the one used last. One that is written over is forgotten
        first, right before the new one of its key is admitted."""
        ...

    def restore(self, entry: Entry, uses: int) -> None:
        """Take in an entry that another order has had, as the one used last, with `uses` uses so far."""
        ...

    def touch(self, entry: Entry, /) -> None:
        """Note that an entry was read or written over; KeyError when it is not in the order."""
        ...

    def end_changed(self, entry: Entry) -> None:
        """Note that an entry in the order has another end, or none any more, or one for the first time."""
        ...

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """Note that a run of blocks, given head first, is wanted at one instant: of these the last is the coldest.
        KeyError, and only some of it noted, when one of them is not in the order.

        A suffix is worth nothing without its head, so a prefix must be eaten from its end. A policy that counts uses
        does not count this one: engines say it of a run that they look up, of what they have just stored, and again and
        again of the head while they store the rest. What is really used is read as well.
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

    def others(self) -> Iterator[Entry]:
        """Entries without a lease that `victims` leaves out, coldest first; none unless the policy is selective."""
        ...

    def warmth(self, entry: Entry) -> float:
        """A number by which two orders of this kind are merged: the entry with the smaller one leaves first."""
        ...

    def spills(self, entry: Entry) -> bool:
        """Whether an entry that leaves memory is worth a write to disk; asked while it is still in the order."""
        ...

    def uses(self, entry: Entry) -> int | None:
        """How often an entry was used of late, 0 to 255 (Redis' OBJECT FREQ), 0 for one that is not in the
        order; None where uses are not counted."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, entry: object) -> bool: ...


class _OneOrder(OneOrder):
    """What the policies of one order share: a list with what arrived last at its end. What it says of entries that
    arrive, are used and leave is in _core.pyx; uses are not counted, an end changes nothing, every entry may leave, and
    each is worth a write."""

    selective = False

    def victims(self) -> Iterator[Entry]:
        """As Policy: from the front."""
        return _unleased(self, iter)

    def warmth(self, entry: Entry) -> float:
        """As Policy: the time of the last use."""
        return entry.accessed_s


class LRU(_OneOrder):
    """Least recently used first: the front of the order is the coldest entry."""

    name = "LRU"

    def __init__(self) -> None:
        super().__init__()
        self.moves_when_used = self.moves_when_renewed = self.coldest_first = True

    def touch_run(self, entries: Sequence[Entry]) -> None:
        deque(map(self.touch, reversed(entries)), maxlen=0)


class MRU(_OneOrder):
    """Most recently used first, newcomers too: for a loop over more than there is room for, which LRU always misses."""

    name = "MRU"

    def __init__(self) -> None:
        super().__init__()
        self.moves_when_used = self.moves_when_renewed = True

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """As Policy: what was used last leaves first, so here the tail goes last."""
        deque(map(self.touch, entries), maxlen=0)

    def victims(self) -> Iterator[Entry]:
        """As Policy: from the end."""
        return _unleased(self, reversed)

    def warmth(self, entry: Entry) -> float:
        """As Policy: what was used last leaves first."""
        return -entry.accessed_s


class FIFO(_OneOrder):
    """First in, first out: use changes nothing, being stored anew does. A run leaves as it came, tail first if it was
    stored tail first."""

    name = "FIFO"

    def __init__(self) -> None:
        super().__init__()
        self.moves_when_renewed = self.coldest_first = True

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """As Policy, but for the order: that of arrival stays."""
        deque(map(self.touch, entries), maxlen=0)

    def warmth(self, entry: Entry) -> float:
        """As Policy: the time of arrival."""
        return entry.created_s


class Random(_OneOrder):
    """Any entry, each as likely as the next: Redis' allkeys-random."""

    name = "RANDOM"

    def __init__(self) -> None:
        super().__init__()
        self._list: list[Entry] = []  # the same entries in no order: what a draw is made from
        self._places: dict[Entry, int] = {}

    def admit(self, entry: Entry) -> None:
        super().admit(entry)
        self._places[entry] = len(self._list)
        self._list.append(entry)

    def restore(self, entry: Entry, uses: int) -> None:
        self.admit(entry)

    def forget(self, entry: Entry) -> None:
        """As Policy: the last of the list takes the free place."""
        super().forget(entry)
        place, last = self._places.pop(entry), self._list.pop()
        if last is not entry:
            self._list[place], self._places[last] = last, place

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """As Policy, but for the order: there is none."""
        deque(map(self.touch, entries), maxlen=0)

    def victims(self) -> Iterator[Entry]:
        """As Policy: drawn one by one. A draw costs one step as long as half of the entries are still to come."""
        drawn: set[Entry] = set()
        while len(drawn) * 2 < len(self._list):
            entry = random.choice(self._list)
            if entry not in drawn:
                drawn.add(entry)
                if not entry.leases:
                    yield entry
        left = [entry for entry in self._list if entry not in drawn]
        random.shuffle(left)
        yield from (entry for entry in left if not entry.leases)

    def warmth(self, entry: Entry) -> float:
        """As Policy: drawn anew each time."""
        return random.random()


class TTL(_OneOrder):
    """The entry whose end comes soonest leaves first; one without an end comes last. What Redis' volatile-ttl needs of
    an order."""

    name = "TTL"

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, Entry]] = []
        self._tickets: dict[Entry, int] = {}
        """Which element of the heap is an entry's own: one with another ticket is void."""
        self._ticket = 0

    def admit(self, entry: Entry) -> None:
        super().admit(entry)
        self.end_changed(entry)

    def restore(self, entry: Entry, uses: int) -> None:
        self.admit(entry)

    def end_changed(self, entry: Entry) -> None:
        """As Policy. Void elements are swept out once they outnumber the others."""
        self._ticket += 1
        self._tickets[entry] = self._ticket
        heapq.heappush(self._heap, (entry.expire_at_ms or float("inf"), self._ticket, entry))
        if len(self._heap) > 2 * len(self._tickets) + 64:
            self._heap = [each for each in self._heap if self._tickets.get(each[2]) == each[1]]
            heapq.heapify(self._heap)

    def forget(self, entry: Entry) -> None:
        """As Policy: its element of the heap is void from now on."""
        super().forget(entry)
        del self._tickets[entry]

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """As Policy, but for the order: ends alone make it."""
        deque(map(self.touch, entries), maxlen=0)

    def victims(self) -> Iterator[Entry]:
        """As Policy. The heap stays as it is; a second one holds the places of those that may come next, so that the
        n-th victim costs log n."""
        heap = self._heap
        frontier = [(heap[0][0], heap[0][1], 0)] if heap else []
        while frontier:
            _, ticket, place = heapq.heappop(frontier)
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heapq.heappush(frontier, (heap[below][0], heap[below][1], below))
            entry = heap[place][2]
            if self._tickets.get(entry) == ticket and not entry.leases:
                yield entry

    def warmth(self, entry: Entry) -> float:
        """As Policy: the end."""
        return entry.expire_at_ms or float("inf")


class _Volatile:
    """Only entries with an end leave for what is new; two orders of one kind, one for those and one for the others."""

    base: ClassVar[type[Policy]]
    selective = True

    def __init__(self) -> None:
        make = type(self).base
        self._ending, self._lasting = make(), make()
        self._gone: tuple[bytes, int] = (b"", -1)
        self._gone_uses = 0
        """Name and uses of the last one that left: written over, it may come back into the other order."""

    def _order_of(self, entry: Entry) -> Policy:
        return self._ending if entry in self._ending else self._lasting

    def admit(self, entry: Entry) -> None:
        order = self._ending if entry.expire_at_ms else self._lasting
        if self._gone_uses and (entry.key, entry.space) == self._gone:
            order.restore(entry, self._gone_uses + 1)
        else:
            order.admit(entry)

    def restore(self, entry: Entry, uses: int) -> None:
        (self._ending if entry.expire_at_ms else self._lasting).restore(entry, uses)

    def touch(self, entry: Entry) -> None:
        self._order_of(entry).touch(entry)

    def end_changed(self, entry: Entry) -> None:
        """As Policy: an entry that has an end for the first time, or none any more, goes over, as the one used last."""
        old, new = self._order_of(entry), self._ending if entry.expire_at_ms else self._lasting
        if old is new:
            new.end_changed(entry)
        else:
            uses = old.uses(entry)
            old.forget(entry)
            new.restore(entry, uses or 1)

    def touch_run(self, entries: Sequence[Entry]) -> None:
        self._ending.touch_run([entry for entry in entries if entry in self._ending])
        self._lasting.touch_run([entry for entry in entries if entry not in self._ending])

    def forget(self, entry: Entry) -> None:
        order = self._order_of(entry)
        self._gone, self._gone_uses = (entry.key, entry.space), order.uses(entry) or 0
        order.forget(entry)

    def victims(self) -> Iterator[Entry]:
        """As Policy: those with an end."""
        return self._ending.victims()

    def others(self) -> Iterator[Entry]:
        """As Policy: those without one."""
        return self._lasting.victims()

    def warmth(self, entry: Entry) -> float:
        return self._order_of(entry).warmth(entry)

    def spills(self, entry: Entry) -> bool:
        """As Policy: always."""
        return True

    def uses(self, entry: Entry) -> int | None:
        return self._order_of(entry).uses(entry)

    def __len__(self) -> int:
        return len(self._ending) + len(self._lasting)

    def __contains__(self, entry: object) -> bool:
        return entry in self._ending or entry in self._lasting


class VolatileLRU(_Volatile):
    """Redis' volatile-lru."""

    name = "VOLATILE-LRU"
    base = LRU


class VolatileLFU(_Volatile):
    """Redis' volatile-lfu."""

    name = "VOLATILE-LFU"
    base = LFU


class VolatileRandom(_Volatile):
    """Redis' volatile-random."""

    name = "VOLATILE-RANDOM"
    base = Random


class VolatileTTL(_Volatile):
    """Redis' volatile-ttl."""

    name = "VOLATILE-TTL"
    base = TTL


def _unleased(order: OneOrder, walk: Callable[[OneOrder], Iterator[Entry]]) -> Iterator[Entry]:
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
"""The policies that cache_policy can name."""

REDIS_POLICIES: dict[str, Callable[[], Policy]] = {
    "volatile-lru": VolatileLRU,
    "volatile-lfu": VolatileLFU,
    "volatile-random": VolatileRandom,
    "volatile-ttl": VolatileTTL,
    "allkeys-lru": LRU,
    "allkeys-lfu": LFU,
    "allkeys-random": Random,
    **{f"allkeys-{name.lower()}": make for name, make in POLICIES.items() if name not in ("LRU", "LFU")},
}
"""The policies that maxmemory-policy can name, beside noeviction: those of Redis in its order, then ours."""


def redis_name(policy: Policy) -> str:
    """What Redis calls a policy, or would call one that it does not have."""
    return policy.name.lower() if policy.selective else f"allkeys-{policy.name.lower()}"


def make_policy(name: str, *, source: str = "StoreOptions") -> Policy:
    """A policy by its name in either table, in any case; ConfigError for one that there is not."""
    make = POLICIES.get(name.upper()) or REDIS_POLICIES.get(name.lower())
    if make is None:
        raise ConfigError("cache_policy", name, source, f"must be one of {', '.join(POLICIES)}")
    return make()
