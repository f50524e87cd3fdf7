"""Jobs of an engine whose scheduler must never wait: submitted and collected at once, done by threads of their own.

Loads and stores have separate threads, as somebody waits for a load. Both queues are bounded: a job too many has failed
at once, which costs the engine a computation at worst. What was submitted is always answered, once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from kvredis.adapters.paged.page_store import Page, PageStore
from kvredis.storage.background import start_worker

logger = logging.getLogger(__name__)

TOUCHES_MAX: Final = 64
"""Touches that wait for their turn; more are advice that comes too late."""
LOAD_PART_PAGES: Final = 512
"""A long load is asked for in parts, so that closing down need not wait for all of it."""


class Done(NamedTuple):
    """What became of a job: for each of its pages whether it is where it should be, and what it took."""

    job: int
    come: list[bool]
    seconds: float
    nbytes: int
    is_load: bool


class _Job(NamedTuple):
    number: int
    pages: Sequence[Page]
    keys: Sequence[bytes]  # of a touch, which has no pages


class TierJobs:
    """Loads and stores through `store`, which stays the caller's. All methods but `drain` and `close` return at once,
    and may be called from any thread.
    """

    def __init__(self, store: PageStore, *, pages_max: int, load_threads: int = 2) -> None:
        """At most `pages_max` pages wait to be stored, and as many to be loaded; a single job may be larger when it is
        alone."""
        self._store = store
        self._pages_max = pages_max
        self._changed = threading.Condition()
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._waiting = {True: 0, False: 0}  # pages of loads, of stores, queued or under way
        self._touches = 0
        self._under_way = 0
        self._done: list[Done] = []
        self._closed = False
        self.dropped_jobs = 0
        """Jobs that the bound has turned away."""
        self._threads = [start_worker(partial(self._turn, self._stores), "kvredis tier stores")]
        for _ in range(load_threads):
            self._threads.append(start_worker(partial(self._turn, self._loads), "kvredis tier loads"))

    def submit(self, number: int, pages: Sequence[Page], *, is_load: bool) -> None:
        """Have pages loaded into their memory, or stored from it, which is the engine's again when the job is in
        `take_done`. A job too many has failed there."""
        with self._changed:
            waiting = self._waiting[is_load]
            is_taken = not self._closed and (not waiting or waiting + len(pages) <= self._pages_max)
            if not is_taken:
                self.dropped_jobs += 1
                self._done.append(Done(number, [False] * len(pages), 0.0, 0, is_load))
                return
            self._waiting[is_load] += len(pages)
            (self._loads if is_load else self._stores).append(_Job(number, pages, ()))
            self._changed.notify_all()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Have keys touched behind what is to be stored; one too many, or of no keys, is dropped."""
        with self._changed:
            if keys and self._touches < TOUCHES_MAX and not self._closed:
                self._touches += 1
                self._stores.append(_Job(-1, (), keys))
                self._changed.notify_all()

    def take_done(self) -> list[Done]:
        """The jobs that have ended since the last call."""
        with self._changed:
            done, self._done = self._done, []
            return done

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or under way."""
        with self._changed:
            return not (self._loads or self._stores or self._under_way)

    def drain(self) -> None:
        """Wait until no job touches the engine's memory: what is under way ends, what is queued is done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._loads or self._stores or self._under_way))

    def close(self) -> None:
        """Turn away what has not begun, wait for what has, and end the threads. A second call does nothing."""
        with self._changed:
            self._closed = True
            for queue, is_load in ((self._loads, True), (self._stores, False)):
                self._done += [
                    Done(job.number, [False] * len(job.pages), 0.0, 0, is_load) for job in queue if job.pages
                ]
                queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # -- the threads -----------------------------------------------------------------------------------------------

    def _turn(self, queue: deque[_Job]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: queue or self._closed)
            if not queue:
                return False
            self._under_way += 1
            job = queue.popleft()
        if job.keys:
            self._touch(job.keys)
        else:
            self._run(job, is_load=queue is self._loads)
        return True

    def _touch(self, keys: Sequence[bytes]) -> None:
        try:
            self._store.touch(keys)
        finally:
            with self._changed:
                self._touches -= 1
                self._end_one()

    def _run(self, job: _Job, *, is_load: bool) -> None:
        began_s = time.monotonic()
        come = [False] * len(job.pages)
        nbytes = 0
        try:
            come = self._load(job.pages) if is_load else self._store.store(job.pages)
            nbytes = sum(page.format.nbytes for page, has in zip(job.pages, come, strict=True) if has)
        except BaseException:  # the engine waits for an answer
            logger.exception("a job of the kvredis tier failed")
            come = [False] * len(job.pages)
        with self._changed:
            self._done.append(Done(job.number, come, time.monotonic() - began_s, nbytes, is_load))
            self._waiting[is_load] -= len(job.pages)
            self._end_one()

    def _load(self, pages: Sequence[Page]) -> list[bool]:
        come: list[bool] = []
        for start in range(0, len(pages), LOAD_PART_PAGES):
            part = pages[start : start + LOAD_PART_PAGES]
            come += [False] * len(part) if self._closed else self._store.load(part)
        return come

    def _end_one(self) -> None:
        self._under_way -= 1
        self._changed.notify_all()
