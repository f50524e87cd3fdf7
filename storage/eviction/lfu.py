"""LFU: the entry used least often leaves first, and one that was popular last week does not stay for that.

Counts are exact, as LMCache's: a newcomer has one use, equals leave in the order in which they came to be equal. But
LMCache counts for ever, so that a block which was hot once is never evicted again. Here every count is halved each time
that room was made for AGE_TURNOVERS times as many blocks as there are: turnovers, not hours, since a cache that is not
short of room has no reason to forget. On the traces of tests/storage/eviction/test_orders.py that hits as often as
counting for ever does while the taste stays the same, and nearly twice as often once it has changed.

Halving touches no entry. Equals are kept in *cohorts* that know their count, one to begin with for each count; halving
changes the counts of the cohorts, some hundreds at the most, and those of one count then leave one after the other.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock

from kvredis.storage.entry import Entry

USES_MAX = 255
"""The highest count, as in Redis. It bounds the number of cohorts, and how long anything outlives its use."""

AGE_TURNOVERS = 10
"""Shorter forgets what is rare but steady; longer is slow to learn."""


_SECONDS_MAX = 1e10
"""More than a monotonic clock tells: with it one number orders by uses first and by time then."""


class _Cohort(OrderedDict[Entry, None]):
    """Entries that have been used equally often, the one that has been so longest in front."""

    __slots__ = ("uses",)

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses = uses


class LFU:
    """Least frequently used first; among equals the one that has been their equal longest."""

    name = "LFU"
    selective = False
    __slots__ = ("_asked", "_cohorts", "_gone", "_gone_uses", "_ladder", "_lock")

    def __init__(self) -> None:
        self._cohorts: dict[Entry, _Cohort] = {}
        self._ladder: dict[int, list[_Cohort]] = {}
        """Cohorts by their count, in the order in which they leave; the last takes in newcomers. None is empty."""
        self._asked = 0
        """How often room had to be made since the counts were halved."""
        self._gone = (b"", -1)
        self._gone_uses = 0
        """Key, database and uses of the last one that left, for the case that it has only been written over."""
        self._lock = Lock()  # a use takes several steps here, and may come while another thread admits or forgets

    def admit(self, entry: Entry) -> None:
        """As Policy. What is written over a block is a further use of it, as in Redis."""
        written_over = (entry.key, entry.space) == self._gone
        with self._lock:
            self._join(entry, min(self._gone_uses + 1, USES_MAX) if written_over else 1)

    def restore(self, entry: Entry, uses: int) -> None:
        with self._lock:
            self._join(entry, max(1, min(uses, USES_MAX)))

    def end_changed(self, entry: Entry) -> None:
        """As Policy: an end changes nothing here."""

    def touch(self, entry: Entry) -> None:
        with self._lock:
            cohort = self._cohorts[entry]
            self._leave(entry, cohort)
            self._join(entry, min(cohort.uses + 1, USES_MAX))

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """As Policy: among their equals, the head comes last."""
        with self._lock:
            for entry in reversed(entries):
                cohort = self._cohorts[entry]
                self._leave(entry, cohort)
                self._join(entry, cohort.uses)

    def forget(self, entry: Entry) -> None:
        with self._lock:
            cohort = self._cohorts.pop(entry)
            self._leave(entry, cohort)
            self._gone, self._gone_uses = (entry.key, entry.space), cohort.uses

    def victims(self) -> Iterator[Entry]:
        """As Policy. Counts age by how often this is asked."""
        self._asked += 1
        if self._asked > AGE_TURNOVERS * len(self):
            self._asked = 0
            self._halve()
        return self._walk()

    def others(self) -> Iterator[Entry]:
        """As Policy: every entry may leave."""
        return iter(())

    def warmth(self, entry: Entry) -> float:
        """As Policy: the uses, and among equals the last of them."""
        return (self.uses(entry) or 0) * _SECONDS_MAX + entry.accessed_s

    def spills(self, entry: Entry) -> bool:
        """As Policy: always."""
        return True

    def uses(self, entry: Entry) -> int | None:
        cohort = self._cohorts.get(entry)
        return 0 if cohort is None else cohort.uses

    def __len__(self) -> int:
        return len(self._cohorts)

    def __contains__(self, entry: object) -> bool:
        return entry in self._cohorts

    def _join(self, entry: Entry, uses: int) -> None:
        equals = self._ladder.get(uses)
        if equals is None:
            equals = self._ladder[uses] = [_Cohort(uses)]
        equals[-1][entry] = None
        self._cohorts[entry] = equals[-1]

    def _leave(self, entry: Entry, cohort: _Cohort) -> None:
        del cohort[entry]
        if not cohort:
            equals = self._ladder[cohort.uses]
            # By identity: two cohorts that are empty are equal to Python.
            equals[:] = [each for each in equals if each is not cohort]
            if not equals:
                del self._ladder[cohort.uses]

    def _halve(self) -> None:
        with self._lock:
            ladder: dict[int, list[_Cohort]] = {}
            for uses in sorted(self._ladder):
                halved = max(1, uses // 2)
                for cohort in self._ladder[uses]:
                    cohort.uses = halved
                    ladder.setdefault(halved, []).append(cohort)
            self._ladder = ladder

    def _walk(self) -> Iterator[Entry]:
        """The victims, also when touches without the store's lock come in between: each once, none left out."""
        given: set[Entry] = set()
        uses = min(self._ladder, default=0)
        while uses:
            for cohort in list(self._ladder.get(uses, ())):
                for entry in _members(cohort):
                    if not (entry.leases or entry in given):
                        given.add(entry)
                        yield entry
            uses = min([each for each in list(self._ladder) if each > uses], default=0)


def _members(cohort: _Cohort) -> Iterator[Entry]:
    """The entries of a cohort; when it changes meanwhile, those that are in it then, some for the second time."""
    try:
        yield from cohort
    except RuntimeError:
        yield from list(cohort)
