"""Bringing blocks from far into near memory ahead of need: one thread, a bounded list of jobs, and no caller waits for
it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal

from kvredis.backends import base
from kvredis.storage.background import start_worker

logger = logging.getLogger(__name__)

JOBS_MAX: Final = 64
"""Prefetches that are not over; the next one is refused."""
BLOCKS_MAX: Final = 65_536
"""Blocks of one prefetch; what is beyond has no room."""


class FarPrefetch:
    """The part of a prefetch that is far: its `keys` are on their way until the thread has found out about each."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys[:BLOCKS_MAX]
        self.queued = len(self.keys)
        self.resident = self.missing = 0
        self.no_room = len(keys) - self.queued
        self.cancelled = False
        self.over = threading.Event()

    def found(self, what: Literal["resident", "missing", "no_room"], count: int = 1) -> None:
        """Move blocks out of those that are on their way; for the thread alone."""
        self.queued -= count
        setattr(self, what, getattr(self, what) + count)


class LayeredPrefetch:
    """A base.Prefetch of which a part comes from near's disk and a part from far."""

    def __init__(self, near: base.Prefetch, far: FarPrefetch) -> None:
        self._near = near
        self._far = far

    @property
    def queued(self) -> int:
        return self._near.queued + self._far.queued

    @property
    def resident(self) -> int:
        return self._near.resident + self._far.resident

    @property
    def missing(self) -> int:
        """As Prefetch.missing; what is far is known to be there when it has come."""
        return self._near.missing + self._far.missing

    @property
    def no_room(self) -> int:
        return self._near.no_room + self._far.no_room

    @property
    def refused(self) -> str:
        return self._near.refused

    @property
    def is_finished(self) -> bool:
        """As Prefetch.is_finished; asks no server."""
        return self._near.is_finished and self._far.over.is_set()

    def wait(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        return self._near.wait(timeout_s) and self._far.over.wait(max(until_s - time.monotonic(), 0.0))

    def cancel(self) -> None:
        self._near.cancel()
        self._far.cancelled = True


class Prefetcher:
    """Does the jobs one after the other by `fetch`, in a thread that lives as long as there are any."""

    def __init__(self, fetch: Callable[[FarPrefetch], None]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._jobs: deque[FarPrefetch] = deque()  # the first is under way
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, job: FarPrefetch) -> bool:
        """Put a job behind the others; False when there are too many, or no thread to do it."""
        if not job.keys:
            job.over.set()
            return True
        with self._lock:
            if self._closed or len(self._jobs) >= JOBS_MAX:
                return False
            self._jobs.append(job)
            if self._thread is None:
                try:
                    self._thread = start_worker(self._turn, "kvredis prefetch")
                except RuntimeError:  # the interpreter ends, or has no threads left
                    self._jobs.clear()
                    return False
        return True

    def close(self) -> None:
        """Give up all jobs, and wait for the block that is under way."""
        with self._lock:
            self._closed = True
            thread = self._thread
            for job in self._jobs:
                job.cancelled = True
        if thread is not None:
            thread.join()

    def _turn(self) -> bool:
        with self._lock:
            if not self._jobs:
                self._thread = None
                return False
            job = self._jobs[0]
        try:
            if not job.cancelled:
                self._fetch(job)
        except BaseException:  # a caller who waits for this job or a later one must not wait for ever
            logger.exception("A prefetch has failed")
        with self._lock:
            self._jobs.popleft()
        job.over.set()
        return True
