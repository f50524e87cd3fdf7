"""Saving: blocks that need not leave memory are written because a client waits for them (WAITAOF, SAVE, the end).

Clients that ask while a round is under way share the next one, and a sync with it: a hundred clients that wait for
their writes cost the device one flush, not a hundred. A round is worked off by as many of the disk's threads as come to
it; the last one at it, when nothing is left to write, finishes it.

What is written over meanwhile is confirmed by its own record or by what has come in its place (disk/superseded.py);
after a SWAPDB a round looks again, since another value may stand under a name that it confirms.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol

from kvredis.storage.background import IoThreads, Priority
from kvredis.storage.entry import Entry

from .disk_io import DiskIo

log = logging.getLogger(__name__)

PLANS_MAX: Final = 8
"""How often a save looks for what SWAPDB has brought meanwhile before it is given up."""

Done = Callable[[bool], None]


class _Tier(Protocol):
    """What a save asks of the tiers of a store: see manager.py."""

    disk_io: DiskIo

    def unsaved_since(self, since: int) -> list[tuple[Entry, int]]:
        """The entries whose write had number `since` or a later one and that the disk has not, with those numbers."""

    def want_replaced(self, entries: Mapping[Entry, object] | None) -> int:
        """Have it noted what comes in the place of these entries, after the write whose number it gives."""

    def exchanged_since(self, write: int) -> bool:
        """Whether databases were exchanged after that write."""

    def is_unsaved(self, entry: Entry) -> bool:
        """Whether memory alone has an entry."""

    def sync(self) -> bool:
        """Have what is on disk survive a loss of power."""


class Saving:
    """The rounds of one store. `save` may be called by any thread, without the store's lock."""

    def __init__(self, tiering: _Tier, io: IoThreads) -> None:
        self._tiering = tiering
        self._io = io
        self._lock = threading.Lock()
        self._asked: list[tuple[int, Done]] = []
        self._round: _Round | None = None

    def save(self, since: int, done: Done) -> None:
        """Have everything on disk that was written to the store from write number `since` on, and is still what its key
        holds, and everything that was deleted, gone from it.

        `done` is called, in an I/O thread as a rule, with whether all of it is safe now.
        """
        with self._lock:
            self._asked.append((since, done))
        self._next_round()

    def _next_round(self) -> None:
        with self._lock:
            if self._round is not None or not self._asked:
                return
            current = self._round = _Round(self._tiering, self._asked)
            self._asked = []
        if self._io.submit(Priority.DEMAND, 0, self._begin) is None:  # the queue is full, or closed
            self._over(current, saved=False)

    def _begin(self) -> None:
        with self._lock:
            current = self._round
            if current is None:
                return
            current.asked += self._asked  # none too late for what is about to be planned
            self._asked = []
        try:
            current.plan()
            for _ in range(min(self._io.threads, len(current.left)) - 1):
                self._io.submit(Priority.DEMAND, 0, partial(self._work, current))
        except BaseException:  # whatever it is: those who wait must hear
            self._over(current, saved=False)
            raise
        self._work(current)

    def _work(self, current: "_Round") -> None:
        """Work a round off. It is named, since a hand that comes late would take the next one, which may not have been
        planned yet, for done."""
        while current.work():
            saved = overtaken = False
            try:
                synced = self._tiering.sync()
                overtaken = synced and current.plan_again()
                if not overtaken:
                    current.look_again()
                    saved = synced
            finally:  # whatever comes of it: those who wait must hear
                if not overtaken:
                    self._over(current, saved=saved)

    def close(self) -> None:
        """The disk's threads have ended: tell those who still wait that nothing more is safe."""
        with self._lock:
            current, self._round = self._round, None
            asked, self._asked = self._asked, []
        for _, done in (*(() if current is None else current.asked), *asked):
            _tell(done, False)

    def _over(self, current: "_Round", *, saved: bool) -> None:
        with self._lock:
            if self._round is not current:  # it was given up, or a hand that came late from another one has finished it
                return
            self._round = None
        for since, done in current.asked:
            _tell(done, saved and current.is_safe(since))
        self._next_round()


def _tell(done: Done, safe: bool) -> None:
    try:
        done(safe)
    except BaseException:  # the callback's own; the others, and the next round, are not to suffer for it
        log.exception("Disk tier: a callback behind a save failed")


class _Round:
    """What is written in one go, for all who had asked by then."""

    def __init__(self, tiering: _Tier, asked: list[tuple[int, Done]]) -> None:
        self.asked = asked
        self.unsaved_since = -1
        """The highest number of a write that did not reach the disk."""
        self._pushed_out = 0
        self._all_safe = False
        self._tiering = tiering
        tiering.disk_io.pushed_out = 0
        self._lock = threading.Lock()
        self._at_it = 0
        self._over = False
        self._numbers: dict[Entry, int] = {}
        self._again: set[Entry] = set()
        self._planned_at = 0
        self._plans_left = PLANS_MAX
        self.left: deque[list[Entry]] = deque()

    def plan(self) -> None:
        """Find what is to be written; blocks for a second where a million values are unsaved."""
        self._planned_at = self._tiering.want_replaced(None)  # from before the first look
        try:
            self._numbers = dict(self._tiering.unsaved_since(min(since for since, _ in self.asked)))
        finally:
            self._tiering.want_replaced(self._numbers)
        self.left = deque(self._tiering.disk_io.parcels(self._numbers))

    def plan_again(self) -> bool:
        """Whether databases have been exchanged since the plan: what was to be confirmed under a name may have gone to
        another, and what is there instead has to be written too. False when that has happened too often."""
        if not self._tiering.exchanged_since(self._planned_at):
            return False
        self._plans_left -= 1
        if not self._plans_left:
            self.unsaved_since = self._planned_at
            return False
        self.plan()
        with self._lock:
            self._over = False
        return True

    def work(self) -> bool:
        """Write blocks until none is left; True for the one thread that is to finish the round."""
        with self._lock:
            if self._over:
                return False
            self._at_it += 1
        while (parcel := self._take()) is not None:
            safe = [False] * len(parcel)
            try:
                safe = self._tiering.disk_io.write_out(parcel)
            except BaseException:  # of this parcel; the others, and those who wait, are not to suffer for it
                log.exception("Disk tier: a block could not be written")
            with self._lock:
                for entry, is_safe in zip(parcel, safe, strict=True):
                    if not (is_safe or self._try_again(entry)):
                        self.unsaved_since = max(self.unsaved_since, self._numbers[entry])
        with self._lock:
            self._at_it -= 1
            last = not self._at_it and not self._over
            self._over = self._over or last
            return last

    def _try_again(self, entry: Entry) -> bool:
        """Whether an entry was written over while databases were exchanged, and what is there now has another turn."""
        if self._tiering.is_unsaved(entry) or entry in self._again:
            return False
        self._again.add(entry)
        self.left.append([entry])
        return True

    def look_again(self) -> None:
        """Note the blocks that had to make room: on a small disk what was written first leaves for the rest."""
        self._tiering.want_replaced({})
        self._pushed_out = self._tiering.disk_io.pushed_out
        self._all_safe = not any(map(self._tiering.is_unsaved, self._numbers))

    def is_safe(self, since: int) -> bool:
        """Whether what was written from number `since` on is on disk now; 0 = all that was not when this began."""
        if since:
            return max(self.unsaved_since, self._pushed_out) < since
        return self._all_safe and self.unsaved_since < 0

    def _take(self) -> list[Entry] | None:
        with self._lock:
            return self.left.popleft() if self.left else None
