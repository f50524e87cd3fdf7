"""A job of the ring (ring.py) under way: what of it has moved, as the events behind its buffers tell."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvredis.adapters.transfer.base import Part

from .device import Event


@dataclass(slots=True)
class RingMoving:
    """Moving (transfer/base.py): how many parts have moved when an event has been passed, in order.

    `hold` is what must not be freed before. One thread enqueues and publishes; others may ask meanwhile.
    """

    parts: Sequence[Part]
    hold: list[object] = field(default_factory=list)
    failure: Exception | None = None
    began_s: float = field(default_factory=time.perf_counter)
    """When it was asked for."""
    _marks: deque[tuple[int, Event]] = field(default_factory=deque)
    _moved: int = 0
    _over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, parts: int, event: Event | None) -> None:
        """The first `parts` have moved behind this event, none if that is below 0; None: behind the last one that was
        added."""
        parts = max(parts, 0)
        if event is not None:
            self._marks.append((parts, event))
        elif not self._marks:
            self._moved, self._over = parts, True
        else:
            self._marks[-1] = (parts, self._marks[-1][1])

    def end(self, events: Sequence[Event]) -> None:
        """It failed: behind these events its memory is the caller's again, and no more parts have moved."""
        moved = self._marks[-1][0] if self._marks else self._moved
        self._marks.extend((moved, event) for event in events)
        self._over = not self._marks

    @property
    def parts_done(self) -> int:
        """As Moving.parts_done."""
        self._look()
        return self._moved

    @property
    def done(self) -> bool:
        """As Moving.done; true behind a failure too, as soon as nothing of it is under way."""
        self._look()
        return self._over

    def wait(self, parts: int | None = None) -> None:
        """As Moving.wait. Waits for all that was enqueued before it raises; for all parts it raises too when only a
        checksum could not be asked for, which would be another one."""
        wanted = len(self.parts) if parts is None else parts
        while self._moved < wanted or self.failure is not None:
            mark = self._next()
            if mark is None:
                break
            try:
                mark[1].synchronize()
            except RuntimeError as error:
                self._fail(error)
            else:
                self._pass(mark)
        if self.failure is not None and (parts is None or self._moved < wanted):
            raise RuntimeError(f"copying KV failed: {self.failure}") from self.failure

    def precede(self, stream: Any) -> None:
        """As Moving.precede: behind the last event, which is behind the others, but for those that `end` was given."""
        with self._lock:
            marks = list(self._marks) if self.failure is not None else list(self._marks)[-1:]
        for _, event in marks:
            event.wait(stream)

    def _look(self) -> None:
        while (mark := self._next()) is not None:
            try:
                if not mark[1].query():
                    return
            except RuntimeError as error:
                self._fail(error)
            else:
                self._pass(mark)

    def _next(self) -> tuple[int, Event] | None:
        with self._lock:
            return None if self._over else self._marks[0]

    def _pass(self, mark: tuple[int, Event]) -> None:
        with self._lock:
            if self._marks and self._marks[0] is mark:  # another thread may have seen it first
                self._moved = mark[0]
                self._marks.popleft()
                self._settle()

    def _fail(self, error: Exception) -> None:
        """The device is lost, and nothing runs on it any more."""
        with self._lock:
            self.failure = self.failure or error
            self._marks.clear()
            self._settle()

    def _settle(self) -> None:
        if not self._marks:
            self._over = True
            self.hold.clear()
