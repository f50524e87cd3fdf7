"""Writing blocks to disk that need not leave memory, because somebody waits for them: WAITAOF, SAVE, the end.

Those who ask while a round is under way share the next one, and a sync with it: a hundred clients that wait for their
writes cost the device one flush, not a hundred. A round is worked off by as many of the disk's threads as come to it;
whoever finds nothing left to write and is the last one at it, finishes it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvredis.storage.entry import Entry

from .executor import IoThreads, Priority

if TYPE_CHECKING:
    from .manager import Tiering

log = logging.getLogger(__name__)

Done = Callable[[bool], None]


class Saving:
    """The rounds of one store. `save` may be called by any thread, without the store's lock."""

    def __init__(self, tiering: "Tiering", io: IoThreads) -> None:
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
        hands = min(self._io.threads, max(1, len(current.left)))
        begun = [self._io.submit(Priority.DEMAND, 0, self._work) for _ in range(hands)]
        if not any(begun):  # the queue is full, or closed
            self._over(current, saved=False)

    def _work(self) -> None:
        current = self._round
        if current is not None and current.work():
            saved = False
            try:
                saved = self._tiering.sync()
                current.look_again()
            finally:  # whatever comes of it: those who wait must hear
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
    except BaseException:  # his own; the others, and the next round, are not to suffer for it
        log.exception("Disk tier: a callback behind a save failed")


class _Round:
    """What is written in one go, for all who had asked by then."""

    def __init__(self, tiering: "Tiering", asked: list[tuple[int, Done]]) -> None:
        self.asked = asked
        self.unsaved_since = -1
        """The highest number of a write that did not reach the disk."""
        self._pushed_out = 0
        self._all_safe = False
        self._tiering = tiering
        tiering.carrier.pushed_out = 0
        self._lock = threading.Lock()
        self._at_it = 0
        self._over = False
        self._numbers = dict(tiering.unsaved_since(min(since for since, _ in asked)))
        self.left = deque(tiering.carrier.parcels(self._numbers))

    def work(self) -> bool:
        """Write blocks until none is left; True for the one thread that is to finish the round."""
        with self._lock:
            if self._over:
                return False
            self._at_it += 1
        while (parcel := self._take()) is not None:
            safe = [False] * len(parcel)
            try:
                safe = self._tiering.carrier.write_out(parcel)
            except BaseException:  # of this parcel; the others, and those who wait, are not to suffer for it
                log.exception("Disk tier: a block could not be written")
            with self._lock:
                for entry, is_safe in zip(parcel, safe, strict=True):
                    if not is_safe:
                        self.unsaved_since = max(self.unsaved_since, self._numbers[entry])
        with self._lock:
            self._at_it -= 1
            last = not self._at_it and not self._over
            self._over = self._over or last
            return last

    def look_again(self) -> None:
        """Note who has had to make room: on a small disk what was written first leaves for the rest."""
        self._pushed_out = self._tiering.carrier.pushed_out
        self._all_safe = not any(map(self._tiering.is_unsaved, self._numbers))

    def is_safe(self, since: int) -> bool:
        """Whether what was written from number `since` on is on disk now; 0 = all that was not when this began."""
        if since:
            return max(self.unsaved_since, self._pushed_out) < since
        return self._all_safe and self.unsaved_since < 0

    def _take(self) -> list[Entry] | None:
        with self._lock:
            return self.left.popleft() if self.left else None
