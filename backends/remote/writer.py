"""The thread that sends what is stored to one server: SETs, and the touches between them, over a few connections.

Its queue is a part of the backend's outbox, under whose lock it is kept; what is under way on its connections is the
thread's own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, Protocol

from kvredis.backends.resp.connection import Reply
from kvredis.backends.shm.buffers import RemoteReservation
from kvredis.storage.errors import BackendError
from kvredis.storage.memory.arena import Arena

from .pipeline import SETS_UNANSWERED_BYTES, SETS_UNANSWERED_MAX, SetLane, Touch
from .pool import Node
from .routing import HOPS_MAX, Hop

log = logging.getLogger(__name__)

Item = RemoteReservation | Touch
Outcome = Literal["stored", "refused", "dropped"]

LINGER_S: Final = 1.0
"""How long the thread waits for more before it ends; chunks of one prompt come milliseconds apart."""


class Ledger(Protocol):
    """What a sender needs of the outbox. `changed` is to be held around every call but `forget`."""

    changed: threading.Condition
    closed: bool
    over: bool

    @property
    def arena(self) -> Arena:
        """The memory that values are in."""
        ...

    def is_superseded(self, item: Item) -> bool:
        """Say whether a newer value of the same key follows."""
        ...

    def pass_on(self, item: Item, node: Node) -> None:
        """Give it to the sender of another server."""
        ...

    def settle(self, item: Item, outcome: Outcome | None = None) -> None:
        """Nothing more is to come of it."""
        ...

    def forget(self, node: Node) -> None:
        """Its sender has left."""
        ...


class Sender:
    """The way to `node`: a queue, a thread that runs while something is in it, and up to node.connections lanes."""

    def __init__(self, node: Node, ledger: Ledger, follow: Callable[[BackendError], Hop | None]) -> None:
        self._node = node
        self._ledger = ledger
        self._follow = follow
        self._changed = ledger.changed
        self._queue: deque[Item] = deque()
        self._held: dict[Item, None] = {}  # queued or unanswered here, oldest first
        self._leaving = False
        self._thread: threading.Thread | None = None
        # From here on the thread's own.
        self._lanes: list[SetLane] = []
        self._turn = 0
        self._flying: set[bytes] = set()  # keys whose SET may be unanswered

    # ---- called by the outbox, under its lock ----------------------------------------------------------------------

    def take(self, item: Item) -> None:
        """Queue it, and see to it that somebody sends it."""
        self._held[item] = None
        self._queue.append(item)
        self._changed.notify_all()
        if self._thread is None:
            name = f"kvredis stores to {self._node.link.address}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter ends, or has no threads left
                self._thread = None
                self._settle_all()

    # ---- the end, without the lock ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """End when all that is held has been sent: no key is this server's any more."""
        with self._changed:
            self._leaving = True
            is_idle = self._thread is None
            self._changed.notify_all()
        if is_idle:
            self._hang_up()
            self._ledger.forget(self._node)

    def end(self) -> None:
        """Give up what is left, and wait for the thread; the ledger is over."""
        with self._changed:
            thread = self._thread
        if thread is not None:
            for lane in tuple(self._lanes):
                lane.connection.interrupt()
            thread.join()
        self._hang_up()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._has_work():
                try:
                    self._work()
                except BaseException as error:  # of our own making too: a caller of flush() would wait for ever
                    self._lose(error if isinstance(error, BackendError) else BackendError(repr(error)))
        except BaseException:  # nor for a thread that is no more
            log.exception("the thread that stores to %s ended wildly", self._node.link.address)
            with self._changed:
                self._settle_all()
                self._thread = None
        if self._leaving:
            self.leave()

    def _has_work(self) -> bool:
        with self._changed:
            linger_s = 0.0 if self._node.link.is_full else LINGER_S
            self._changed.wait_for(lambda: self._held or self._ledger.closed or self._leaving, linger_s)
            is_idle = not self._held
        if is_idle:  # others may have them meanwhile: a server may take no more
            self._node.bring_back([lane.connection for lane in self._lanes])
            self._lanes.clear()
        with self._changed:
            if not self._held:
                self._thread = None
            return bool(self._held)

    def _work(self) -> None:
        """Send what is next, or read the answers when there is nothing to send."""
        with self._changed:
            item = self._queue.popleft() if self._queue else None
            if item is not None and self._ledger.is_superseded(item):
                self._settle(item)
                return
        if item is None or not self._flying.isdisjoint(item.keys):
            # A value must not be overtaken by an older one on another connection, nor by what touches it.
            for lane in self._lanes:
                self._read_answers(lane, 0, 0)
        if item is not None:
            free = self._next_lane()
            if free is None:
                self._settle_all()
                self._hang_up()
                return
            if isinstance(item, RemoteReservation):
                self._flying.add(item.key)
            free.send(item)
            if free.is_full:
                self._read_answers(free, SETS_UNANSWERED_MAX // 2, SETS_UNANSWERED_BYTES // 2)

    def _next_lane(self) -> SetLane | None:
        """The lanes in turn; a new one as long as there are less than may be. None: nobody takes anything."""
        for lane in [lane for lane in self._lanes if not lane.unanswered and lane.connection.stale()]:
            self._lanes.remove(lane)
            self._node.retire(lane.connection)
        if len(self._lanes) < self._node.connections:
            for connection in self._node.borrow(1):
                self._lanes.append(SetLane(connection))
                refusal = self._lanes[-1].lend(self._ledger.arena)
                if refusal is not None:
                    self._node.complain(refusal, connection)
        self._turn += 1
        return self._lanes[self._turn % len(self._lanes)] if self._lanes and not self._ledger.over else None

    def _read_answers(self, lane: SetLane, keep: int, keep_bytes: int) -> None:
        for item, reply in lane.answers(keep, keep_bytes):
            hop = self._follow(reply) if isinstance(reply, BackendError) else None
            if isinstance(item, RemoteReservation):
                self._flying.discard(item.key)
            if item is not None:
                self._answered(item, reply, hop)
            is_right = not isinstance(reply, BackendError) if item is None or isinstance(item, Touch) else reply == "OK"
            if hop is None and not is_right:
                self._node.complain(reply, lane.connection)

    def _answered(self, item: Item, reply: Reply, hop: Hop | None) -> None:
        with self._changed:
            if hop is None or isinstance(item, Touch) or item.hops >= HOPS_MAX or self._ledger.over:
                self._settle(item, "stored" if reply == "OK" else "refused")
                return
            item.hops += 1
            item.asking = hop.asking
            del self._held[item]
            self._ledger.pass_on(item, hop.node)

    def _settle(self, item: Item, outcome: Outcome | None = None) -> None:
        del self._held[item]
        self._ledger.settle(item, outcome)

    # ---- losing the server -----------------------------------------------------------------------------------------

    def _lose(self, error: BackendError) -> None:
        if not self._ledger.over:
            for lane in [lane for lane in self._lanes if not lane.connection.usable] or self._lanes:
                self._node.lose(lane.connection, error)
        self._settle_all()
        self._hang_up()

    def _settle_all(self) -> None:
        """Give up all that is on its way: what was sent, even in part, counts as refused, the rest as dropped.

        The connections end first. A server that takes values out of our memory must know before that memory is another
        value's, and publishes none for who has hung up.
        """
        for lane in self._lanes:
            lane.connection.interrupt()
        with self._changed:
            sent = {item for lane in self._lanes for item in lane.unanswered}
            self._queue.clear()
            for item in tuple(self._held):
                self._settle(item, "refused" if item in sent else "dropped")

    def _hang_up(self) -> None:
        """Without the lock: nodes have one of their own, and a collected generator may want both in any order."""
        for lane in self._lanes:
            self._node.retire(lane.connection)
        self._lanes.clear()
        self._flying.clear()
