"""Values on their way to a server: a bounded queue and the one thread that sends it, so that who stores never waits.

A server takes what it can. When more is stored than that, the queue fills, and what comes next is not taken: it is
dropped and counted, because an engine that waits for its cache is slower than one without.

WHY a value keeps its room until its SET is answered: until then it is not on the server, or not surely. Whoever asks
for it meanwhile is served from here, and need not wait for a queue that may be seconds long.

Values and touches leave in the order in which they came: that an engine stores a prompt tail first, and touches its
head in between, is what keeps a full server from evicting the head before the tail.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from kvredis.storage.errors import BackendError

from .connection import Connection
from .lanes import SETS_UNANSWERED_BYTES, SETS_UNANSWERED_MAX, SetLane, Touch
from .link import Link
from .remote_holds import RemoteLease, RemoteReservation, Staging

logger = logging.getLogger(__name__)

QUEUE_PART: Final = 2
"""Half of the staging memory may wait to be sent; the rest is for loads, which an engine does wait for."""
VALUES_MAX: Final = 4096
"""Values on their way; a bound for small ones, which take no room in the arena."""
TOUCHES_MAX: Final = 64
"""Touches that wait for their turn; a later one is dropped, as it is advice only."""
LINGER_S: Final = 1.0
"""How long the thread waits for more before it ends; chunks of one prompt come milliseconds apart."""
DRAIN_PART: Final = 0.75
"""The share of the timeout in which close() lets the queue drain; the rest is for ending what is under way."""
OUTCOMES: Final = ("stored", "refused", "dropped")


class Outbox:
    """The SETs of one backend. Any thread may call any public method; none waits for the network, but for those that
    say so. `on_lost` is called in the sending thread, without a lock.
    """

    def __init__(
        self, link: Link, staging: Staging, connections: int, on_lost: Callable[[], None], *, keep: bool = False
    ) -> None:
        """With `keep` a value stays in `staging` when it has left."""
        self._link = link
        self._staging = staging
        self._keep = keep
        self._connections = connections
        self._on_lost = on_lost
        self._bytes_max = staging.arena.nbytes // QUEUE_PART
        self._changed = threading.Condition()  # its lock is reentrant: a collected generator may end a hold anywhere
        self._bytes = 0  # reserved, queued or unanswered
        self._queue: deque[RemoteReservation | Touch] = deque()
        self._outstanding: dict[RemoteReservation | Touch, int] = {}  # queued or unanswered, numbered, oldest first
        self._newest: dict[bytes, RemoteReservation] = {}  # of these the last under each key
        self._number = 0
        self._touches = 0
        self._counts = dict.fromkeys((*OUTCOMES, "bytes_in", "bytes_out"), 0)
        self._refused_unflushed = 0
        self._closed = self._over = False
        self._thread: threading.Thread | None = None
        # From here on the thread's own.
        self._lanes: list[SetLane] = []
        self._turn = 0
        self._flying: set[bytes] = set()  # keys whose SET may be unanswered

    # ---- storing -------------------------------------------------------------------------------------------------

    def room(self, length: int) -> int:
        """Count the values of `length` bytes that would be taken now."""
        with self._changed:
            if self._closed or self._link.waiting:
                return 0
            free = (self._bytes_max - self._bytes) // max(length, 1)
            return max(min(free, VALUES_MAX - len(self._outstanding)), 0 if self._bytes else 1)

    def reserve(self, key: bytes, length: int) -> RemoteReservation | None:
        """Get room for a value; None, counted as dropped, when the queue or the memory is full or the server lost."""
        with self._changed:
            taken = self.room(length) > 0
            self._bytes += length if taken else 0
        room = self._staging.reserve(key, length) if taken else None
        if room is not None:
            return RemoteReservation(key, room, self._take, self._give_up, self._keep)
        with self._changed:
            self._bytes -= length if taken else 0
            self._counts["dropped"] += not self._closed
        return None

    def touch(self, keys: Sequence[bytes]) -> int | None:
        """Have `keys` touched behind all that is on its way, and count those of them that are; None: nothing is."""
        with self._changed:
            if not self._outstanding:
                return None
            if self._touches < TOUCHES_MAX:
                self._touches += 1
                self._append(Touch(keys))
            return sum(key in self._newest for key in keys)

    def flush(self) -> int:
        """Wait until every commit so far is answered; count those that came to nothing since the last flush."""
        with self._changed:
            last = self._number
            self._changed.wait_for(lambda: next(iter(self._outstanding.values()), last + 1) > last)
            refused, self._refused_unflushed = self._refused_unflushed, 0
            return refused

    def _take(self, value: RemoteReservation) -> None:
        with self._changed:
            self._newest[value.key] = value
            self._append(value)

    def _give_up(self, value: RemoteReservation) -> None:
        with self._changed:
            self._bytes -= len(value.view)
            self._end_hold(value)

    def _append(self, item: RemoteReservation | Touch) -> None:
        self._number += 1
        self._outstanding[item] = self._number
        if self._closed:
            self._settle(item, "dropped")
            return
        self._queue.append(item)
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"kvredis stores to {self._link.address}", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter ends, or has no threads left
                self._thread = None
                self._drop_all()

    # ---- reading what has not left -------------------------------------------------------------------------------

    def without(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Leave out the keys whose value is on its way."""
        with self._changed:
            return [key for key in keys if key not in self._newest] if self._newest else keys

    def hold(self, keys: Iterable[bytes]) -> list[RemoteLease | None]:
        """Lease each value that is on its way, as it was committed last; None for the others."""
        with self._changed:
            return [None if (value := self._newest.get(key)) is None else self._lease(value) for key in keys]

    def settle(self, keys: Sequence[bytes]) -> None:
        """Wait until none of `keys` is on its way."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest.keys().isdisjoint(keys))

    def _lease(self, value: RemoteReservation) -> RemoteLease:
        value.holds += 1
        return RemoteLease(value.view, partial(self._end_hold, value))

    def _end_hold(self, value: RemoteReservation) -> None:
        with self._changed:
            value.holds -= 1
            if not value.holds:
                value.free()

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._has_work():
            try:
                self._work()
            except Exception as error:  # of our own making too: whoever waits in flush() must not wait for ever
                self._lose(error if isinstance(error, BackendError) else BackendError(repr(error)))

    def _has_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._outstanding or self._closed, LINGER_S)
            if not self._outstanding:
                self._thread = None
            return bool(self._outstanding)

    def _work(self) -> None:
        """Send what is next, or read the answers when there is nothing to send."""
        with self._changed:
            item = self._queue.popleft() if self._queue else None
            if isinstance(item, RemoteReservation) and self._newest.get(item.key) is not item:
                self._settle(item)  # a newer value of the same key follows
                return
        if item is None or not self._flying.isdisjoint(item.keys):
            # A value must not be overtaken by an older one on another connection, nor by what touches it.
            for lane in self._lanes:
                self._read_answers(lane, 0, 0)
        if item is not None:
            free = self._next_lane()
            if free is None:
                self._drop_all()
                return
            if isinstance(item, RemoteReservation):
                self._flying.add(item.key)
            free.send(item)
            if free.is_full:
                self._read_answers(free, SETS_UNANSWERED_MAX // 2, SETS_UNANSWERED_BYTES // 2)

    def _next_lane(self) -> SetLane | None:
        """The lanes in turn; a new one as long as there are less than `connections`. None: nobody takes anything."""
        for lane in [lane for lane in self._lanes if not lane.unanswered and lane.connection.stale()]:
            self._lanes.remove(lane)
            self._retire(lane.connection)
        if len(self._lanes) < self._connections:
            connection = self._link.open()
            if connection is not None:
                self._lanes.append(SetLane(connection))
        self._turn += 1
        return self._lanes[self._turn % len(self._lanes)] if self._lanes and not self._over else None

    def _read_answers(self, lane: SetLane, keep: int, keep_bytes: int) -> None:
        for item, reply in lane.answers(keep, keep_bytes):
            if isinstance(reply, BackendError) or (isinstance(item, RemoteReservation) and reply != "OK"):
                self._link.complain(reply)
            if isinstance(item, RemoteReservation):
                self._flying.discard(item.key)
            if item is not None:
                with self._changed:
                    self._settle(item, "stored" if reply == "OK" else "refused")

    def _settle(self, item: RemoteReservation | Touch, outcome: str = "") -> None:
        """Nothing more is to come of it; the lock is held."""
        del self._outstanding[item]
        if isinstance(item, RemoteReservation):
            if self._newest.get(item.key) is item:
                del self._newest[item.key]
            if outcome:
                self._counts[outcome] += 1
                self._refused_unflushed += outcome != "stored"
            self._bytes -= len(item.view)
            self._end_hold(item)
        else:
            self._touches -= 1
        self._changed.notify_all()

    # ---- losing and closing --------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Make what is under way fail at once: the server is lost, as somebody else has found out."""
        for lane in tuple(self._lanes):
            lane.connection.interrupt()

    def _lose(self, error: BackendError) -> None:
        if not self._over:
            self._link.lost(error)
        self._drop_all()
        self._on_lost()

    def _drop_all(self) -> None:
        """Give up all that is on its way: what was sent, even in part, counts as refused, the rest as dropped."""
        with self._changed:
            sent = {item for lane in self._lanes for item in lane.unanswered}
            self._hang_up()
            self._queue.clear()
            for item in tuple(self._outstanding):
                self._settle(item, "refused" if item in sent else "dropped")

    def _hang_up(self) -> None:
        for lane in self._lanes:
            self._retire(lane.connection)
        self._lanes.clear()
        self._flying.clear()

    def _retire(self, connection: Connection) -> None:
        with self._changed:
            self._counts["bytes_in"] += connection.bytes_in
            self._counts["bytes_out"] += connection.bytes_out
        connection.close()

    def close(self) -> None:
        """Take nothing more, wait for the answers to what was taken, within the link's timeout, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._outstanding, self._link.timeout_s * DRAIN_PART)
            if self._outstanding:
                count = len(self._outstanding) - self._touches
                logger.warning("%s has not taken %d blocks in time; they are dropped", self._link.address, count)
            self._over = True
            thread = self._thread
        if thread is not None:
            self.interrupt()
            thread.join()
        self._hang_up()

    def stats(self) -> dict[str, int]:
        """Give counters since the start, and what is on its way: values, and bytes with those that are reserved."""
        with self._changed:
            lanes = tuple(self._lanes)
            counts = dict(self._counts)
            counts["bytes_in"] += sum(lane.connection.bytes_in for lane in lanes)
            counts["bytes_out"] += sum(lane.connection.bytes_out for lane in lanes)
            queued = len(self._outstanding) - self._touches
            return {**counts, "connections": len(lanes), "queued": queued, "queued_bytes": self._bytes}
