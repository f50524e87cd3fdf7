"""Which blocks are on the way between memory and disk, so that none is sent for twice.

A block may be wanted by many at once: ten clients ask for the head of one prompt, a prefetch has queued it a moment
ago. One transfer is in flight for each key and database, and a caller who asks again joins it: a job that was queued as
a prefetch becomes as urgent as the demand that joins. No caller blocks to wait here: one that wants to know gives a
callback.

Nothing is locked here while foreign code runs (`start`, callbacks), so the store may ask with its own lock held, and
take it in a callback.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from kvredis.storage.background import JobOverdue, Priority
from kvredis.storage.errors import KVRedisError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Kind(Enum):
    """Which way, and why."""

    PROMOTE = "promote"
    """From disk to memory: a caller waits for it."""
    PREFETCH = "prefetch"
    """From disk to memory, ahead of need."""
    IDLE = "idle"
    """The same, when the disk has nothing else to do."""
    SPILL = "spill"
    """From memory to disk."""

    __hash__ = object.__hash__  # Enum's own is Python, and each transfer asks for some

    @property
    def priority(self) -> Priority:
        """How urgent the jobs of this kind are."""
        return _PRIORITIES[self]


_PRIORITIES = {
    Kind.PROMOTE: Priority.DEMAND,
    Kind.PREFETCH: Priority.PREFETCH,
    Kind.IDLE: Priority.SPILL,
    Kind.SPILL: Priority.SPILL,
}


class NoRoom(KVRedisError):
    """What a job raises that finds no room in memory: its transfer is REFUSED."""

    def __init__(self) -> None:
        super().__init__("there is no room in memory for the block")


class State(Enum):
    """How far a transfer has come. All but the first two are ends."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """Its job raised `error`."""
    CANCELLED = "cancelled"
    """It was not wanted any more, or the disk's threads were closed."""
    OVERDUE = "overdue"
    """Not begun by its deadline."""
    REFUSED = "refused"
    """There was no room for it: in memory or in the queue."""


class Jobs(Protocol):
    """What is needed of IoThreads."""

    def hasten(self, future: Future[Any], priority: Priority) -> bool:
        """Let a queued job be at least as urgent as `priority`, and without a deadline."""
        ...

    def retract(self, future: Future[Any]) -> bool:
        """Take out a queued job, whose future the caller will cancel; False when it is under way or over."""
        ...


class Transfer(Generic[T]):
    """One block on its way. `result` is what its job returned, once `state` is DONE; `error` what it raised."""

    __slots__ = (
        "_callbacks",
        "_future",
        "_joined",
        "_kept",
        "_outcome",
        "_owner",
        "_unwanted",
        "error",
        "key",
        "kind",
        "priority",
        "result",
        "space",
    )

    def __init__(self, owner: "Transfers[T]", kind: Kind, key: bytes, space: int) -> None:
        self.kind = kind
        """What it was begun as: it stays that when others join."""
        self.key = key
        self.space = space
        self.priority = kind.priority
        """That of the most urgent caller."""
        self.result: T | None = None
        self.error: BaseException | None = None
        self._owner = owner
        self._outcome: State | None = None
        self._future: Future[T] | None = None  # from the moment that `start` has answered until it is over
        self._callbacks: list[Callable[[Transfer[T]], None]] = []
        self._joined = False
        self._kept = False  # a caller asked without waiting, so it does not depend on those who do
        self._unwanted: Callable[[Transfer[T]], None] | None = None

    @property
    def state(self) -> State:
        """How far it has come; read off its job until it is over."""
        future = self._future
        if self._outcome is not None:
            return self._outcome
        return State.RUNNING if future is not None and (future.running() or future.done()) else State.QUEUED

    @property
    def is_over(self) -> bool:
        """Whether nothing about it changes any more."""
        return self._outcome is not None

    def add_done(self, callback: "Callable[[Transfer[T]], None]") -> None:
        """Have `callback` called with this transfer once it is over: at once if it is, else in the thread that ends it
        (an I/O thread, as a rule), without a lock held and after those added before. It must not raise."""
        if not self._owner._add(self, callback):
            self._owner._call(callback, self)

    def withdraw(
        self,
        callback: "Callable[[Transfer[T]], None]",
        unwanted: "Callable[[Transfer[T]], None] | None" = None,
    ) -> bool:
        """Take a callback back: its caller no longer waits. When that was the last, and none had asked without waiting,
        a transfer not yet begun is cancelled; one under way goes on to its end, of which `unwanted` is told, as by
        add_done, if no other has asked for the block by then.

        False when it was not there, or has been or is about to be called.
        """
        return self._owner._withdraw(self, callback, unwanted)


class Transfers(Generic[T]):
    """The transfers in flight, at most one for each (key, space); as many as `jobs` has room for."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._in_flight: dict[tuple[int, bytes], Transfer[T]] = {}
        self._counts: Counter[tuple[Kind, str]] = Counter()

    def join_or_start(
        self,
        kind: Kind,
        key: bytes,
        space: int,
        start: Callable[[], Future[T] | None],
        done: Callable[[Transfer[T]], None] | None = None,
    ) -> Transfer[T]:
        """The transfer of this block: the one in flight, made as urgent as `kind`, or else a new one.

        `start` is called for a new one only: it submits the job and returns its future, or None when there is no room.
        Callbacks that it adds to the future run before those of the transfer: the place to give back what was reserved
        for a job that is not run. What it raises passes through here and fails the transfer for those who have joined
        meanwhile. What a job does must be visible to others when it returns: from then on a caller that asks again
        starts anew.

        With `done`, as for add_done, the caller waits and may withdraw; without it the transfer is to be made whatever
        becomes of those who wait. The kind of a transfer that was joined may be another: while a SPILL is in flight,
        the bytes are in memory.
        """
        with self._lock:
            transfer = self._in_flight.get((space, key))
            new = transfer is None
            if transfer is None:
                transfer = self._in_flight[space, key] = Transfer(self, kind, key, space)
            else:
                transfer._joined = True
                transfer.priority = min(transfer.priority, kind.priority)
            self._counts[kind, "started" if new else "joined"] += 1
            if done is None:
                transfer._kept = True
            else:
                transfer._callbacks.append(done)
            future, priority = transfer._future, transfer.priority
        if new:
            self._begin(transfer, start)
        elif future is not None:  # else `start` is running in another thread, and _begin sees what we have left
            self._jobs.hasten(future, priority)
        return transfer

    def find(self, key: bytes, space: int) -> Transfer[T] | None:
        """The transfer of this block that is in flight."""
        return self._in_flight.get((space, key))

    def forget(self, key: bytes, space: int) -> Transfer[T] | None:
        """Have the transfer of this block joined no more: the key was deleted or holds another value now. Those
        who wait still hear how it ends; whether its outcome is still of use, its job must find out itself."""
        with self._lock:
            return self._in_flight.pop((space, key), None)

    def forget_all(self, space: int | None = None) -> int:
        """The same for everything, or all of one database; says how many that were."""
        with self._lock:
            leaving = [where for where in self._in_flight if space is None or where[0] == space]
            for where in leaving:
                del self._in_flight[where]
            return len(leaving)

    def __len__(self) -> int:
        return len(self._in_flight)

    def figures(self) -> dict[Kind, dict[str, int]]:
        """For each kind how many were "started" and how these ended ("done", "failed", ...: the values of State), and
        how often one was "joined" by a caller of this kind."""
        with self._lock:
            names = [
                "started",
                "joined",
                *(state.value for state in State if state not in (State.QUEUED, State.RUNNING)),
            ]
            return {kind: {name: self._counts[kind, name] for name in names} for kind in Kind}

    def check_integrity(self) -> None:
        """Assert that what is in flight is filed under its own key, is not over, and is wanted."""
        with self._lock:
            for (space, key), transfer in self._in_flight.items():
                assert (transfer.space, transfer.key) == (space, key)
                assert transfer._outcome is None
                assert transfer.priority <= transfer.kind.priority

    # ---- for Transfer --------------------------------------------------------------------------------------------

    def _add(self, transfer: Transfer[T], callback: Callable[[Transfer[T]], None]) -> bool:
        with self._lock:
            if transfer._outcome is None:
                transfer._callbacks.append(callback)
            return transfer._outcome is None

    def _withdraw(
        self,
        transfer: Transfer[T],
        callback: Callable[[Transfer[T]], None],
        unwanted: Callable[[Transfer[T]], None] | None,
    ) -> bool:
        with self._lock:
            if callback not in transfer._callbacks:
                return False
            transfer._callbacks.remove(callback)
            transfer._unwanted = unwanted
            dropped = self._drop(transfer)
        if dropped is not None:
            dropped.cancel()
        return True

    # ---- how one begins and ends ---------------------------------------------------------------------------------

    def _begin(self, transfer: Transfer[T], start: Callable[[], Future[T] | None]) -> None:
        try:
            future = start()
        except BaseException as error:
            self._end(transfer, State.FAILED, error=error)
            raise
        if future is None:
            self._end(transfer, State.REFUSED)
            return
        with self._lock:
            transfer._future = future
            dropped = self._drop(transfer)
            if dropped is None and transfer._joined:
                self._jobs.hasten(future, transfer.priority)
        future.add_done_callback(partial(self._settle, transfer))
        if dropped is not None:
            dropped.cancel()

    def _drop(self, transfer: Transfer[T]) -> Future[T] | None:
        """With the lock held: if it is not wanted and has not begun, take its job back and have it joined no more; the
        caller then cancels the future that this returns, without the lock."""
        future = transfer._future
        if transfer._kept or transfer._callbacks or future is None or not self._jobs.retract(future):
            return None
        self._leave(transfer)
        return future

    def _leave(self, transfer: Transfer[T]) -> None:
        """With the lock held: it is joined no more. After `forget` its place may be another's."""
        where = (transfer.space, transfer.key)
        if self._in_flight.get(where) is transfer:
            del self._in_flight[where]

    def _settle(self, transfer: Transfer[T], future: Future[T]) -> None:
        """End a transfer whose job's future is done."""
        if future.cancelled():
            self._end(transfer, State.CANCELLED)
            return
        error = future.exception()
        if error is None:
            self._end(transfer, State.DONE, result=future.result())
        else:
            outcome = State.OVERDUE if isinstance(error, JobOverdue) else State.FAILED
            self._end(transfer, State.REFUSED if isinstance(error, NoRoom) else outcome, error=error)

    def _end(
        self, transfer: Transfer[T], outcome: State, *, result: T | None = None, error: BaseException | None = None
    ) -> None:
        with self._lock:
            self._leave(transfer)
            transfer.result, transfer.error, transfer._outcome = result, error, outcome
            transfer._future = None
            callbacks, transfer._callbacks = transfer._callbacks, []
            if transfer._unwanted is not None and not callbacks and not transfer._kept:
                callbacks = [transfer._unwanted]
            self._counts[transfer.kind, outcome.value] += 1
        for callback in callbacks:
            self._call(callback, transfer)

    def _call(self, callback: Callable[[Transfer[T]], None], transfer: Transfer[T]) -> None:
        try:
            callback(transfer)
        except BaseException:  # the others have a right to theirs
            log.exception("a callback behind the %s of a block failed", transfer.kind.value)
