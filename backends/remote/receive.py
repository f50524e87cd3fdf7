"""Bodies that come at once: one into the thread that loads, those behind it into threads beside it, a connection each.

What a socket brings is copied by the kernel, outside the interpreter's lock; one thread does that at the speed of one
core. A thread is handed a few bodies of one connection, and the thread that loads waits for all threads before it hands
out the first body: so between two calls nothing is under way, and a load that is given up has no thread to stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvredis.backends import base
from kvredis.backends.resp.wire import Scattered
from kvredis.backends.shm.buffers import Rooms, memory_of
from kvredis.storage.background import start_worker
from kvredis.storage.errors import BackendError

from .pipeline import DRAIN_S_MIN, GetPipeline


class Body:
    """What comes for one key: `got` as GetPipeline.take gives it, with its bytes in `room`; or `error`."""

    __slots__ = ("_key", "_rooms", "error", "got", "has_no_room", "is_silent", "room")

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

    def reserve_ahead(self, length: int) -> bool:
        """Get room for as many bytes as it most likely has, before it comes; False when there is none to spare."""
        self.room = self._rooms.reserve_ahead(self._key, length)
        return self.room is not None

    def receive(self, pipeline: GetPipeline, within_s: float | None = None) -> None:
        """Take the next body of a pipeline, in any thread, in the connection's time for one answer unless `within_s`
        sets it anew; raises nothing."""
        before = pipeline.connection.bytes_in
        try:
            if within_s is not None:
                pipeline.connection.set_timeout(within_s)
            self.got = pipeline.take(self._allocate)
        except BaseException as error:
            self.error = error
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


def receive(bodies: Sequence[Body], pipeline: GetPipeline) -> None:
    """Take the next bodies of a pipeline, in the time that its connection has for one answer; raises nothing."""
    until_s = time.monotonic() + pipeline.connection.timeout_s
    for number, body in enumerate(bodies):
        body.receive(pipeline, max(until_s - time.monotonic(), DRAIN_S_MIN) if number else None)


class Receiver:
    """A thread that receives for the load that has borrowed it from a Node.

    WHY `_given` alone says that something is under way: a thread that is interrupted, at whatever step, can still wait
    for it, and is neither told too early that it is over nor kept for ever.
    """

    __slots__ = ("_changed", "_given", "_is_wanted")

    def __init__(self) -> None:
        """Start it; raises RuntimeError when there is no thread to be had."""
        self._changed = threading.Condition()
        self._given: tuple[Sequence[Body], GetPipeline] | None = None
        self._is_wanted = True
        start_worker(self._turn, "kvredis receives")

    @property
    def is_busy(self) -> bool:
        """Whether there is something to `wait` for."""
        return self._given is not None

    def begin(self, bodies: Sequence[Body], pipeline: GetPipeline) -> None:
        """Have the next bodies of `pipeline` received; `wait` comes before the next call."""
        with self._changed:
            self._given = bodies, pipeline
            self._changed.notify_all()

    def wait(self) -> None:
        """Block until all have come, or failed, which the pipeline's timeout bounds; a second call does nothing."""
        with self._changed:
            self._changed.notify_all()  # an interrupted `begin` may not have said it
            self._changed.wait_for(lambda: self._given is None)

    def end(self) -> None:
        """Let the thread end, when it is done with what is under way."""
        with self._changed:
            self._is_wanted = False
            self._changed.notify_all()

    def _turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._given is not None or not self._is_wanted)
            if self._given is None:
                return False
            bodies, pipeline = self._given
        try:
            receive(bodies, pipeline)
            for body in bodies:
                if body.error is not None and not isinstance(body.error, Exception):
                    body.error = BackendError(repr(body.error))  # SystemExit was for this thread, not for who loads
        finally:
            del bodies, pipeline  # a thread that waits for work holds no memory of others
            with self._changed:
                self._given = None
                self._changed.notify_all()
        return True
