"""Prefetch jobs, which KV.JOB tells of: a list of blocks that a client will want, and how far they have come.

A prefetch answers at once, so the client that asked for it needs something to ask afterwards: a job with counts, that
can be waited for (by a callback: no thread blocks here), cancelled, and given a deadline. A job owns no bytes. What it
has brought into memory is in the store, evictable like any other block; cancelling it takes back only transfers that
have not begun and that no other caller wants.

Putting a thousand blocks on their way would take ten milliseconds, and room in memory long before the disk comes to
them. So a job has but a few moving at a time and begins another when one has arrived. A demand for a block that is
still in the list does not wait for the list: it starts a transfer of its own, and the job finds the block in memory.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeAlias, TypeVar

from .transfers import Kind, State, Transfer

log = logging.getLogger(__name__)

T = TypeVar("T")


Begin: TypeAlias = Callable[[Kind, bytes, int, Callable[[Transfer[T]], None]], Transfer[T] | State]
"""Puts the block of a key and database on its way, or joins it: `join_or_start(kind, key, space, start, done)` with the
kind and `done` given. Or says a State when there is nothing to do: DONE when it is in memory already, CANCELLED when it
is in no tier any more, REFUSED when there is no room; then `done` is not called. Must not raise. A job that is refused
while other blocks of its own are moving tries again when one of those has arrived; else it gives up its list."""


@dataclass(frozen=True, slots=True)
class PrefetchBounds:
    """What prefetches may take of a server."""

    jobs_max: int = 256
    """How many can be asked for."""
    blocks_max: int = 65_536
    """How many blocks of a job may wait; what is beyond has no room."""
    moving_max: int = 32
    """How many blocks of a job are in the disk's queue at a time: enough that no thread waits for the next."""


DEFAULT_BOUNDS: Final = PrefetchBounds()


@dataclass(slots=True)
class PrefetchCounts:
    """What became of the blocks of a job; each block is in one of resident, missing, no_room and queued."""

    queued: int = 0
    """Listed to be fetched; these end as done, failed or dropped, or move to no_room if none could be had."""
    resident: int = 0
    """In memory already."""
    missing: int = 0
    """In no tier."""
    no_room: int = 0
    """Neither memory nor the queue had room."""
    done: int = 0
    failed: int = 0
    dropped: int = 0
    """Cancelled, not begun by the deadline, or in no tier any more when their turn came."""

    @property
    def pending(self) -> int:
        """Those still on their way."""
        return self.queued - self.done - self.failed - self.dropped


class PrefetchJob(Generic[T]):
    """One prefetch: filled by `count` and `fetch`, set off by `seal`, finished when nothing of it is on its way.

    Any thread may call any method. `deadline_s` is on the clock of PrefetchJobs; None = never.
    """

    def __init__(
        self, number: int, begin: Begin[T], bounds: PrefetchBounds, deadline_s: float | None, kind: Kind
    ) -> None:
        self.number = number
        self.deadline_s = deadline_s
        self.kind = kind
        self._begin = begin
        self._bounds = bounds
        self._lock = threading.Lock()
        self._counts = PrefetchCounts()
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._moving = 0  # begun and not settled; `_transfers` are those of them that can be withdrawn
        self._transfers: set[Transfer[T]] = set()
        self._callbacks: list[Callable[[PrefetchJob[T]], None]] = []
        self._feeding = False
        self._full = False  # refused, and nothing of ours has ended since
        self._stirred = False  # something of ours has ended since the last block was begun
        self._sealed = False
        self._cancelled = False
        self._told = False

    # ---- filling it ----------------------------------------------------------------------------------------------

    def count(self, *, resident: int = 0, missing: int = 0, no_room: int = 0) -> None:
        """Note blocks for which nothing is to be done, or can be."""
        with self._lock:
            self._counts.resident += resident
            self._counts.missing += missing
            self._counts.no_room += no_room

    def fetch(self, keys: Iterable[bytes], space: int) -> None:
        """List blocks to be brought into memory, first things first; nothing is begun yet. What exceeds `blocks_max` is
        counted as no_room."""
        with self._lock:
            wanted = [(key, space) for key in keys]
            fitting = wanted[: max(0, self._bounds.blocks_max - len(self._waiting))]
            self._waiting.extend(fitting)
            self._counts.queued += len(fitting)
            self._counts.no_room += len(wanted) - len(fitting)
            if self._cancelled:
                self._drop_waiting()

    def seal(self) -> None:
        """Begin, since nothing will be added. Costs the begin of a few blocks, however long the list is."""
        with self._lock:
            self._sealed = True
        self._feed()

    # ---- looking at it -------------------------------------------------------------------------------------------

    @property
    def counts(self) -> PrefetchCounts:
        """A copy, all of one moment."""
        with self._lock:
            return replace(self._counts)

    @property
    def is_finished(self) -> bool:
        """Whether it is sealed and nothing of it is on its way any more."""
        with self._lock:
            return self._is_finished()

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled, or its deadline has passed, before it was finished."""
        return self._cancelled

    # ---- waiting and ending --------------------------------------------------------------------------------------

    def add_done(self, callback: "Callable[[PrefetchJob[T]], None]") -> None:
        """Have `callback` called with this job once it is finished: at once if it is, else in whatever thread ends the
        last transfer, without a lock held. It must not raise."""
        with self._lock:
            if not self._told:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def remove_done(self, callback: "Callable[[PrefetchJob[T]], None]") -> bool:
        """Take a callback back: its caller has gone, or has waited long enough. False when it was not there, or has
        been or is about to be called."""
        with self._lock:
            if callback not in self._callbacks:
                return False
            self._callbacks.remove(callback)
            return True

    def cancel(self) -> int:
        """Want no more of it, and say how many blocks were dropped: those that have not begun. What is under way goes
        on to its end, and is counted then; a block that others wait for comes all the same."""
        with self._lock:
            if self._is_finished():
                return 0
            self._cancelled = True
            dropped = self._drop_waiting()
            transfers = list(self._transfers)
        dropped += sum(self._withdraw(transfer) for transfer in transfers if transfer.state is State.QUEUED)
        self._tell_if_finished()
        return dropped

    # ---- how blocks begin and end --------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Begin blocks while fewer than may are moving, but no more than that in one go: a quick disk must not keep us
        here. One thread at a time; another that has settled a block meanwhile is seen by the one that feeds."""
        with self._lock:
            if self._feeding or not self._sealed:
                return
            self._feeding = True
        begun = 0
        while True:
            with self._lock:
                enough = self._moving and (self._full or begun >= self._bounds.moving_max)
                if enough or not self._waiting or self._moving >= self._bounds.moving_max:
                    self._feeding = False  # the thread that settles the next block feeds on
                    break
                key, space = self._waiting.popleft()
                self._moving += 1
                self._stirred = False
            begun += 1
            try:
                outcome = self._begin(self.kind, key, space, self._settle)
            except BaseException:  # of this block; the rest of the list is begun, and those who wait hear of the end
                log.exception("prefetch job %d could not begin a block", self.number)
                outcome = State.FAILED
            if isinstance(outcome, State):
                self._note(outcome, key, space)
                continue
            with self._lock:
                if not outcome.is_over:  # if it is, _settle was called or will be, and looks for nothing here
                    self._transfers.add(outcome)
                cancelled = self._cancelled
            if cancelled and outcome.state is State.QUEUED:
                self._withdraw(outcome)
        self._tell_if_finished()

    def _withdraw(self, transfer: Transfer[T]) -> int:
        times = 0  # as often as the block was named in the list
        while transfer.withdraw(self._settle):
            times += 1
        with self._lock:
            self._transfers.discard(transfer)
            self._moving -= times
            self._counts.dropped += times
        return times

    def _settle(self, transfer: Transfer[T]) -> None:
        with self._lock:
            self._transfers.discard(transfer)
        self._note(transfer.state, transfer.key, transfer.space)
        self._feed()
        self._tell_if_finished()

    def _note(self, state: State, key: bytes, space: int) -> None:
        with self._lock:
            self._moving -= 1
            counts = self._counts
            again = state is State.REFUSED and (self._moving > 0 or self._stirred) and not self._cancelled
            self._full = again and not self._stirred
            self._stirred = self._stirred or state is not State.REFUSED
            match state:
                case State.DONE:
                    counts.done += 1
                case State.FAILED:
                    counts.failed += 1
                case State.REFUSED if again:
                    self._waiting.appendleft((key, space))
                case State.REFUSED:  # nothing that is ours will make room, so the rest of the list has none either
                    counts.queued -= 1 + len(self._waiting)
                    counts.no_room += 1 + len(self._waiting)
                    self._waiting.clear()
                case _:
                    counts.dropped += 1

    def _drop_waiting(self) -> int:
        """With the lock held."""
        dropped = len(self._waiting)
        self._waiting.clear()
        self._counts.dropped += dropped
        return dropped

    def _is_finished(self) -> bool:
        return self._sealed and not self._counts.pending

    def _tell_if_finished(self) -> None:
        with self._lock:
            if self._told or not self._is_finished():
                return
            self._told = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: "Callable[[PrefetchJob[T]], None]") -> None:
        try:
            callback(self)
        except BaseException:  # the others have a right to theirs
            log.exception("a callback behind prefetch job %d failed", self.number)


class PrefetchJobs(Generic[T]):
    """The jobs that can be asked for; when there are too many, the oldest finished one is forgotten for a new one.

    `begin` says how a block is put on its way; `clock_s` is the clock of the deadlines.
    """

    def __init__(
        self,
        begin: Begin[T],
        bounds: PrefetchBounds = DEFAULT_BOUNDS,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bounds = bounds
        self._begin = begin
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._jobs: dict[int, PrefetchJob[T]] = {}
        self._last_number = 0

    def open(self, deadline_s: float | None = None, kind: Kind = Kind.PREFETCH) -> PrefetchJob[T] | None:
        """A new job, to be filled and sealed; None when there are `jobs_max` that are not finished."""
        with self._lock:
            if len(self._jobs) >= self.bounds.jobs_max:
                finished = next((number for number, job in self._jobs.items() if job.is_finished), None)
                if finished is None:
                    return None
                del self._jobs[finished]
            self._last_number += 1
            job = PrefetchJob(self._last_number, self._begin, self.bounds, deadline_s, kind)
            self._jobs[job.number] = job
            return job

    def get(self, number: int) -> PrefetchJob[T] | None:
        """The job of that number; None when there never was one, or it was forgotten."""
        return self._jobs.get(number)

    def cancel_overdue(self) -> int:
        """Cancel the jobs whose deadline has passed, and say how many blocks were dropped; to be called now and then.
        Costs a look at each job."""
        now_s = self._clock_s()
        with self._lock:
            overdue = [job for job in self._jobs.values() if job.deadline_s is not None and job.deadline_s <= now_s]
        return sum(job.cancel() for job in overdue)

    @property
    def under_way(self) -> int:
        """How many of them are not finished."""
        with self._lock:
            return sum(not job.is_finished for job in self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)
