"""A scheduler's side of weights that change: which ones its keys stand for, and which pages hold KV of these.

Keys name the weights, so that engines with others do not find them and those with the same do: new weights are a new
name, nothing is deleted, and weights that come back find what is theirs. Workers tell which weights they compute with
(weights.py), at the start and whenever it is not what a step's keys say.
"""

import secrets
from collections import deque
from collections.abc import Iterable, Mapping

from .weights import Table, WeightsReport, digest_of, identity_of

WAIT_STEPS_MAX = 64
"""So many steps after a reset the workers' answer is waited for; an answer comes with the first. Then nothing is
loaded until it is there."""
STEPS_MAX = 16
"""Of which it is remembered what they wrote: more than are scheduled ahead of their results."""

Pages = frozenset[tuple[int, int]]
"""The engine's pages, by group."""


class KeyWeights:
    """What keys say of the weights. `tables` are the workers', by rank; without any nothing is said or compared."""

    def __init__(self, tables: Mapping[int, Table]) -> None:
        self.epoch = 0
        """How often keys have become others."""
        self.digests: tuple[str, ...] = ()
        """Of each rank, what a step's keys expect it to have."""
        self._tables = dict(tables)
        self._identity = self._salt = ""
        self._unheard: set[int] = set()
        self._asks = self._forgets = False
        self._steps_waited = 0
        self._take()

    @property
    def suffix(self) -> str:
        """What follows the model's name in keys."""
        weights = f"+w{self._identity}" if self._identity else ""
        return weights + (f"+reset{self._salt}" if self._salt else "")

    @property
    def is_waiting(self) -> bool:
        """Whether it is being found out which weights there are now."""
        return bool(self._unheard) and self._steps_waited <= WAIT_STEPS_MAX

    @property
    def is_unknown(self) -> bool:
        """Whether no worker has told in time."""
        return bool(self._unheard) and not self.is_waiting

    def reset(self, *, forgets: bool) -> None:
        """The weights may be others from now on. Where they are the same, and the engine `forgets`, its keys become
        its own."""
        self._forgets |= forgets
        self._unheard, self._steps_waited, self._asks = set(self._tables), 0, bool(self._tables)
        if not self._tables:
            self._forget()

    def step(self) -> bool:
        """A step goes to the workers: whether they are to look at all of their weights."""
        asks, self._asks = self._asks, False
        self._steps_waited += bool(self._unheard)
        return asks

    def heard(self, reports: Mapping[int, WeightsReport]) -> int | None:
        """What workers have told, by rank. Where the weights have become others: the first step that was computed with
        these on all ranks."""
        changed = {rank: report for rank, report in reports.items() if report.table is not None}
        self._unheard -= reports.keys()
        before = self._identity
        self._tables |= {rank: report.table for rank, report in changed.items() if report.table is not None}
        self._take()
        if self._identity != before:
            self.epoch += 1
            self._salt, self._forgets = "", False
            return max(report.since for report in changed.values())
        if self._forgets and not self._unheard:
            self._forget()
        return None

    def _forget(self) -> None:
        if self._forgets:
            self._forgets, self._salt = False, secrets.token_hex(4)
            self.epoch += 1

    def _take(self) -> None:
        tables = [table for _, table in sorted(self._tables.items())]
        self._identity = identity_of(tables) if tables else ""
        self.digests = tuple(map(digest_of, tables))


class FreshPages:
    """Which of the engine's pages hold KV that the present weights have computed. Its own prefix cache may hold others:
    what is computed behind them must not be stored under keys of these weights."""

    def __init__(self) -> None:
        self._pages: set[tuple[int, int]] | None = None  # all of them, until the weights change
        self._steps: deque[tuple[int, list[tuple[str, int, bool, Pages]]]] = deque(maxlen=STEPS_MAX)
        self._now: list[tuple[str, int, bool, Pages]] = []

    @property
    def are_all(self) -> bool:
        """Whether the weights have never changed."""
        return self._pages is None

    def cover(self, pages: Iterable[tuple[int, int]]) -> bool:
        """Whether all of these are."""
        return self._pages is None or self._pages.issuperset(pages)

    def written(self, request: str, computed: int, pages: Pages, *, anew: bool, is_stale: bool) -> None:
        """A step gives a request these pages, to write them behind its first `computed` tokens."""
        self._now.append((request, computed, anew, pages))
        if self._pages is not None:
            self._pages = self._pages - pages if is_stale else self._pages | pages

    def loaded(self, pages: Iterable[tuple[int, int]]) -> None:
        """These are loaded, under keys of the present weights."""
        if self._pages is not None:
            self._pages.update(pages)

    def step(self, number: int) -> None:
        """All that was told since the last call is step `number`."""
        self._steps.append((number, self._now))
        self._now = []

    def changed(self, since: int) -> None:
        """The weights are others, with which step `since` was the first to compute."""
        clean: set[str] = set()
        self._pages = set()
        for number, entries in (*self._steps, (since, self._now)):
            for request, computed, anew, pages in entries if number >= since else ():
                if not computed:
                    clean.add(request)
                elif anew:  # behind pages that may be older
                    clean.discard(request)
                if request in clean:
                    self._pages |= pages
