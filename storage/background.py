"""Background threads that outlive what their work raises, and that do not end without a line in the log.

Python prints what ends a thread to standard error, where no log has it, and says nothing at all of SystemExit; a caller
that waits for what the thread was to do next then waits for ever. An exception may be the work's own, or come from
outside: PyThreadState_SetAsyncExc throws one into a thread at whatever step it is, also while it waits for work.

IoThreads are a few such threads that do the disk's work, most urgent first. A read or write of a block keeps a thread
for a millisecond and gives up the interpreter's lock meanwhile, so two to four threads saturate a device. What needs
care is the order: a caller waits for a demand, may soon want a prefetched block, and never waits for a spill. So a job
queued later may be begun earlier, and one that is queued already can be made more urgent when a caller comes to wait
for it. The bounds are per priority: a flood of spills must not be the reason why a demand is refused. A job counts, in
the bounds and in the figures, where it was admitted, however urgent it has become since.
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, TypeVar

from .errors import KVRedisError

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 30.0
"""How long `close` waits for jobs under way: a disk that takes longer is broken, and must not keep us from ending."""


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread that calls `run` once; what that raises is logged, and ends the thread. Raises RuntimeError
    when the interpreter ends or the system has no thread left."""

    def once() -> bool:
        run()
        return False

    return _start(once, name, goes_on=False)


def start_worker(turn: Callable[[], bool], name: str) -> threading.Thread:
    """Start a daemon thread that calls `turn` again and again until it answers False; what a turn raises is logged, and
    the next turn follows. A turn waits for a job and does it; it takes the job out of its queue first, or would fail at
    the same job without end. Raises as start_thread."""
    return _start(turn, name, goes_on=True)


def _start(turn: Callable[[], bool], name: str, *, goes_on: bool) -> threading.Thread:
    def work() -> None:
        is_wanted = True
        while is_wanted:
            try:
                is_wanted = turn()
            except BaseException:  # SystemExit too: it is the thread's alone, and the process goes on
                is_wanted = goes_on
                log.exception("the thread %r failed in its work and %s", name, "goes on" if goes_on else "ends")

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class JobOverdue(KVRedisError):
    """What the future of a job holds that had not been begun by its deadline."""

    def __init__(self) -> None:
        super().__init__("a disk job had not been begun by its deadline")


class Priority(IntEnum):
    """How urgent a job is; the lower the sooner."""

    DEMAND = 0
    """A caller waits for the bytes."""
    PREFETCH = 1
    """A client said that it will want them."""
    SPILL = 2
    """Room is to be made in memory, some day soon."""


@dataclass(slots=True)
class IoFigures:
    """What became of the jobs of one priority; a job is counted where it was admitted.

    submitted == queued + running + done + failed + cancelled + dropped, always.
    """

    submitted: int = 0
    refused: int = 0
    """Not admitted, so in no other figure: the queue was full or closed."""
    queued: int = 0
    queued_bytes: int = 0
    running: int = 0
    done: int = 0
    done_bytes: int = 0
    failed: int = 0
    """Raised an exception."""
    cancelled: int = 0
    dropped: int = 0
    """Not begun by their deadline."""
    hastened: int = 0
    """Became more urgent while they were queued."""
    wait_s_total: float = 0.0
    """From submission to begin, over all jobs begun."""
    wait_s_max: float = 0.0


class _Job:
    """One job in the queue. The thread that has taken it out is the only one to complete its future."""

    __slots__ = ("call", "deadline_s", "future", "nbytes", "priority", "share", "submitted_s")

    def __init__(self, priority: Priority, nbytes: int, call: Callable[[], Any], deadline_s: float | None) -> None:
        self.call = call
        self.nbytes = nbytes
        self.priority = self.share = priority  # where it is queued now, and where it was admitted
        self.deadline_s = deadline_s
        self.submitted_s = 0.0
        self.future: Future[Any] = Future()


class IoThreads:
    """A bounded priority queue of blocking jobs, and `threads` daemon threads that run them once `start` is called.

    For each priority at most `queue_jobs_max` jobs of together `queue_bytes_max` bytes wait; a longer job is admitted
    when no other of its priority waits. `clock_s` is monotonic, the clock of the deadlines. Any thread may call any
    method; callbacks of the futures run without a lock held, in the thread that completes them: an I/O thread, or
    the caller of `cancel`, `drop_overdue`, `submit` or `close`.
    """

    def __init__(
        self,
        threads: int,
        queue_jobs_max: int,
        queue_bytes_max: int,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threads = threads
        self.queue_jobs_max = queue_jobs_max
        self.queue_bytes_max = queue_bytes_max
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        # OrderedDict: popping the first of a plain dict steps over all that were popped before it.
        self._queues: tuple[OrderedDict[Future[Any], _Job], ...] = tuple(OrderedDict() for _ in Priority)
        self._earliest_s = math.inf  # no queued job has an earlier deadline; perhaps none has one as early
        self._figures = tuple(IoFigures() for _ in Priority)
        self._taken = 0  # jobs out of the queue whose futures' callbacks have not all returned
        self._paused = False
        self._closed = False
        self._running_threads: list[threading.Thread] = []

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads; what was submitted before has waited for that. Raises RuntimeError if the system has no
        thread left to give, so that it is known at startup and not under load."""
        for number in range(len(self._running_threads), self.threads):
            # Daemons: a process that is told to go at once does not wait for a disk. One that can wait calls `close`.
            self._running_threads.append(start_worker(self._turn, f"kvredis-io-{number}"))

    def pause(self) -> None:
        """Begin no further job until `resume`; those under way go on."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._lock:
            self._paused = False
            self._work.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or under way, callbacks included; False when that took too long. Not to be
        called from a job or a callback, which would wait for itself."""
        with self._lock:
            return self._idle.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Admit nothing more, cancel what is queued and wait for what is under way; call `drain` first to have it all
        done. False when a thread was still busy after `timeout_s` (it is left to itself). May be called again."""
        with self._lock:
            self._closed = True
            left = [self._remove(future) for queue in self._queues for future in list(queue)]
            self._work.notify_all()
        for job in left:
            self._over(job, "cancelled")
            self._let_go()
        for job in left:
            job.future.cancel()
            job.future.set_running_or_notify_cancel()
        until_s = time.monotonic() + timeout_s  # not the clock of the deadlines, which in tests stands still
        for thread in self._running_threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._running_threads)

    # ---- the queue -----------------------------------------------------------------------------------------------

    def submit(
        self, priority: Priority, nbytes: int, job: Callable[[], T], *, deadline_s: float | None = None
    ) -> Future[T] | None:
        """Queue `job`, which moves `nbytes`, behind those of its priority; None when there is no room or we are closed.

        The future gets what the job returns or raises; JobOverdue when it has not been begun by `deadline_s`; or it is
        cancelled. `job` and its future are let go of once it is over, so that holds in its closure end then.
        """
        queued = _Job(priority, nbytes, job, deadline_s)
        if self._admit(queued) or (self.drop_overdue() and self._admit(queued)):
            return queued.future
        with self._lock:
            self._figures[priority].refused += 1
        return None

    def hasten(self, future: Future[Any], priority: Priority) -> bool:
        """Another caller wants this as well: let it be at least as urgent as `priority`, and lift its deadline, which
        was only the first one's. False when it is no longer queued."""
        with self._lock:
            job = self._find(future)
            if job is None:
                return False
            job.deadline_s = None
            if priority < job.priority:
                del self._queues[job.priority][future]
                self._queues[priority][future] = job
                job.priority = priority
                self._figures[job.share].hastened += 1
            return True

    def cancel(self, future: Future[Any]) -> bool:
        """Take a queued job out and cancel its future; False when it is under way or over, and then nothing happens.

        Rather than `future.cancel()`, after which the job keeps its place in the bounds until its turn comes.
        """
        if not self.retract(future):
            return False
        future.cancel()
        future.set_running_or_notify_cancel()  # wakes those in concurrent.futures.wait
        return True

    def retract(self, future: Future[Any]) -> bool:
        """The first half of `cancel`, for a caller who holds a lock: the job will not run and its room is free, but no
        callback has run. The caller calls `future.cancel()` when he has let go of his lock."""
        with self._lock:
            if self._find(future) is None:
                return False
            job = self._remove(future)
        self._over(job, "cancelled")
        self._let_go()
        return True

    def drop_overdue(self) -> int:
        """Drop the queued jobs whose deadline has passed, and say how many. Deadlines are also looked at when a job's
        turn comes and when the queue is full; to tell those who wait in time, call this now and then."""
        with self._lock:
            overdue = [self._remove(future) for future in self._find_overdue(self._clock_s())]
        for job in overdue:
            try:
                if job.future.set_running_or_notify_cancel():
                    self._over(job, "dropped")
                    job.future.set_exception(JobOverdue())
                else:
                    self._over(job, "cancelled")
            finally:
                self._let_go()
        return len(overdue)

    # ---- figures -------------------------------------------------------------------------------------------------

    def figures(self) -> dict[Priority, IoFigures]:
        """A copy of the figures by priority, all of one moment."""
        with self._lock:
            return {priority: replace(self._figures[priority]) for priority in Priority}

    def check_integrity(self) -> None:
        """Assert that bounds hold and that no job is lost or counted twice."""
        with self._lock:
            jobs = [job for queue in self._queues for job in queue.values()]
            for priority, queue in zip(Priority, self._queues, strict=True):
                figures = self._figures[priority]
                admitted = [job for job in jobs if job.share is priority]
                assert all(job.priority is priority and job.share >= priority for job in queue.values())
                assert figures.queued == len(admitted) <= self.queue_jobs_max
                assert figures.queued_bytes == sum(job.nbytes for job in admitted)
                assert figures.queued_bytes <= self.queue_bytes_max or figures.queued == 1
                over = figures.done + figures.failed + figures.cancelled + figures.dropped
                assert figures.submitted == figures.queued + figures.running + over
            assert all(self._earliest_s <= job.deadline_s for job in jobs if job.deadline_s is not None)
            assert 0 <= sum(figures.running for figures in self._figures) <= self._taken

    # ---- with the lock held --------------------------------------------------------------------------------------

    def _find(self, future: Future[Any]) -> _Job | None:
        return next((queue[future] for queue in self._queues if future in queue), None)

    def _find_overdue(self, now_s: float) -> list[Future[Any]]:
        """Look through the queue if it may pay: a look finds something, or finds out until when to look no more."""
        if now_s < self._earliest_s:
            return []
        self._earliest_s, overdue = math.inf, []
        for queue in self._queues:
            for future, job in queue.items():
                if job.deadline_s is None:
                    continue
                if job.deadline_s <= now_s:
                    overdue.append(future)
                else:
                    self._earliest_s = min(self._earliest_s, job.deadline_s)
        return overdue

    def _is_idle(self) -> bool:
        return not self._taken and not any(self._queues)

    def _remove(self, future: Future[Any]) -> _Job:
        """Take a job out of the queue; the caller completes its future, then says `_over` and `_let_go`."""
        job = next(queue.pop(future) for queue in self._queues if future in queue)
        self._taken += 1
        self._has_left(job)
        return job

    def _has_left(self, job: _Job) -> None:
        figures = self._figures[job.share]
        figures.queued -= 1
        figures.queued_bytes -= job.nbytes
        figures.running += 1

    # ---- without it ----------------------------------------------------------------------------------------------

    def _admit(self, job: _Job) -> bool:
        with self._lock:
            figures = self._figures[job.share]
            full = figures.queued >= self.queue_jobs_max or (
                figures.queued > 0 and figures.queued_bytes + job.nbytes > self.queue_bytes_max
            )
            if full or self._closed:
                return False
            job.submitted_s = self._clock_s()
            figures.submitted += 1
            figures.queued += 1
            figures.queued_bytes += job.nbytes
            self._queues[job.priority][job.future] = job
            if job.deadline_s is not None:
                self._earliest_s = min(self._earliest_s, job.deadline_s)
            self._work.notify()
            return True

    def _turn(self) -> bool:
        """Wait for a job and run it, in one of the threads; False when the queue is closed."""
        job = self._take(wait=True)
        if job is None:
            return False
        self._run(job)
        del job  # what it has raised may keep this frame, and so the job and what its closure holds
        return True

    def _take(self, wait: bool) -> _Job | None:
        """Take out the job that is next; None when there is none and we do not wait, or when we are closed."""
        with self._lock:
            while not self._closed:
                queue = None if self._paused else next(filter(None, self._queues), None)
                if queue is not None:
                    _, job = queue.popitem(last=False)
                    self._taken += 1
                    self._has_left(job)
                    return job
                if not wait:
                    break
                self._work.wait()
            return None

    def _run(self, job: _Job) -> None:
        """Run a job that was taken out, and complete its future. Figures first: a waiting caller may look at them at
        once."""
        future = job.future
        try:
            now_s = self._clock_s()
            if not future.set_running_or_notify_cancel():
                self._over(job, "cancelled")
                return
            if job.deadline_s is not None and job.deadline_s <= now_s:
                self._over(job, "dropped")
                future.set_exception(JobOverdue())
                return
            self._begun(job, now_s - job.submitted_s)
            try:
                result = job.call()
            except BaseException as error:  # whatever it is belongs to the caller who asked for the job
                self._over(job, "failed")
                future.set_exception(error)
            else:
                self._over(job, "done")
                future.set_result(result)
        finally:
            self._let_go()
            del job, future  # an exception's traceback holds this frame: no cycle through its own future

    def _begun(self, job: _Job, wait_s: float) -> None:
        with self._lock:
            figures = self._figures[job.share]
            figures.wait_s_total += wait_s
            figures.wait_s_max = max(figures.wait_s_max, wait_s)

    def _over(self, job: _Job, outcome: str) -> None:
        with self._lock:
            figures = self._figures[job.share]
            figures.running -= 1
            if outcome == "done":
                figures.done_bytes += job.nbytes
            setattr(figures, outcome, getattr(figures, outcome) + 1)

    def _let_go(self) -> None:
        with self._lock:
            self._taken -= 1
            if self._is_idle():
                self._idle.notify_all()
