"""Bodies that come at once: into threads beside the one that loads, a connection each.

What a socket brings is copied by the kernel, outside the interpreter's lock; one thread does that at the speed of one
core. A thread is handed bodies of one connection and goes from one to the next by itself, so that none waits for
another: where each turn ended with the slowest, 60 bodies of 32 MiB took 130 ms to come over eight connections, and 84
to threads that had nothing else to do (16 cores, an H200's host). While it has any, the connection is the thread's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from kvredis.backends import base
from kvredis.backends.resp.wire import Scattered
from kvredis.backends.shm.buffers import Rooms, memory_of
from kvredis.storage.background import start_worker
from kvredis.storage.errors import BackendError

from .pipeline import GetPipeline


class Body:
    """What comes for one key: `got` as GetPipeline.take gives it, with its bytes in `room`; or `error`."""

    __slots__ = ("_key", "_rooms", "beside", "error", "got", "has_come", "has_no_room", "is_silent", "room", "took_s")

    def __init__(self, key: bytes, rooms: Rooms) -> None:
        self._key = key
        self._rooms = rooms
        self.room: base.Reservation | None = None
        self.has_no_room = False
        """Whether it was there, and dropped."""
        self.got: int | base.Lease | BackendError | None = None
        self.error: BaseException | None = None
        self.is_silent = True
        """Whether not a byte has come."""
        self.has_come = False
        """Whether its thread is done with it, also where that has failed."""
        self.took_s = 0.0
        """How long that took, from when its thread began with it."""
        self.beside = 1
        """How many connections brought bodies meanwhile, its own among them."""

    def reserve_ahead(self, length: int) -> bool:
        """Get room for as many bytes as it most likely has, before it comes; False when there is none to spare."""
        self.room = self._rooms.reserve_ahead(self._key, length)
        return self.room is not None

    def receive(self, pipeline: GetPipeline, ahead: int = 0, within_s: float | None = None) -> None:
        """Take the next body of a pipeline, in any thread, in the connection's time for one answer unless `within_s`
        sets it anew; `ahead` are asked for behind it. Raises nothing."""
        before, began_s = pipeline.connection.bytes_in, time.monotonic()
        try:
            if within_s is not None:
                pipeline.connection.set_timeout(within_s)
            pipeline.ask(ahead)
            self.got = pipeline.take(self._allocate)
        except BaseException as error:
            self.error = error
        self.took_s = time.monotonic() - began_s
        self.is_silent = pipeline.connection.bytes_in == before
        if not isinstance(self.got, int):
            self._free()

    def drop(self) -> None:
        """Give up what is not wanted any more; not while a thread receives it."""
        self._free()
        if self.got is not None and not isinstance(self.got, int | BackendError):
            self.got.release()

    def _free(self) -> None:
        room, self.room = self.room, None
        if room is not None:
            room.abort()

    def _allocate(self, length: int) -> memoryview | Scattered | None:
        if self.room is not None and len(memory_of(self.room)) != length:
            self._free()
        if self.room is None:
            self.room = self._rooms.reserve(self._key, length)
            self.has_no_room = self.room is None
        return None if self.room is None else memory_of(self.room)


class Receiver:
    """A thread that receives for the load that has borrowed it from a Node.

    WHY `_given` alone says that something is under way: a thread that is interrupted, at whatever step, can still wait
    for it, and is neither told too early that it is over nor kept for ever.
    """

    __slots__ = ("_changed", "_given", "_is_wanted")

    def __init__(self) -> None:
        """Start it; raises RuntimeError when there is no thread to be had."""
        self._changed = threading.Condition()
        self._given: deque[tuple[Body, GetPipeline, int, float]] = deque()
        self._is_wanted = True
        start_worker(self._turn, "kvredis receives")

    @property
    def is_busy(self) -> bool:
        """Whether there is something to `wait` for."""
        return bool(self._given)

    def begin(self, bodies: Iterable[Body], pipeline: GetPipeline, ahead: int, within_s: float) -> None:
        """Have the next bodies of `pipeline` received behind those before, each within so long, and `ahead` asked for
        behind each. The pipeline is this thread's until it is no longer busy."""
        with self._changed:
            self._given.extend((body, pipeline, ahead, within_s) for body in bodies)
            self._changed.notify_all()

    def wait_for(self, body: Body, timeout_s: float) -> bool:
        """Block until one of them has come, or failed; False when it has not within the time."""
        if body.has_come:
            return True
        with self._changed:
            self._changed.notify_all()  # an interrupted `begin` may not have said it
            return self._changed.wait_for(lambda: body.has_come, timeout_s)

    def forget(self) -> None:
        """Want none of those with which the thread has not begun."""
        with self._changed:
            while len(self._given) > 1:
                self._given.pop()

    def wait(self) -> None:
        """Block until all have come, or failed, which the time of each bounds; a second call does nothing."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._given)

    def end(self) -> None:
        """Let the thread end, when it is done with what is under way."""
        with self._changed:
            self._is_wanted = False
            self._changed.notify_all()

    def _turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._given or not self._is_wanted)
            if not self._given:
                return False
            body, pipeline, ahead, within_s = self._given[0]
        try:
            body.receive(pipeline, ahead, within_s)
            if body.error is not None and not isinstance(body.error, Exception):
                body.error = BackendError(repr(body.error))  # SystemExit was for this thread, not for who loads
        finally:
            with self._changed:
                body.has_come = True
                self._given.popleft()
                self._changed.notify_all()
            del body, pipeline  # a thread that waits for work holds no memory of others
        return True
