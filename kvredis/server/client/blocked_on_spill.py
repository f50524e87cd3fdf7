"""Values that find the arena full of blocks which the disk is still to be given: whose turn it is when it has some.

A client that stores waits, unread, until blocks have been written and can leave, in the order in which clients came,
and for a bounded time each. Then the coldest leave unwritten for its value, and are counted. A disk that writes nothing
at all keeps nobody waiting a second time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvredis.server.protocol.request import LATER, Later
from kvredis.storage.entry import Reservation, extent_length

from .blocked import Pending, tell_loop
from .client import Client

if TYPE_CHECKING:
    from kvredis.server.server import Server


class DiskRoom:
    """Who waits for the disk of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._store = server.store
        self._waiting: OrderedDict[Client, tuple[float, Pending]] = OrderedDict()  # since when
        self._called: Client | None = None  # whose turn it is
        self._told = False  # the loop will hear of it that there is room

    def start(self) -> None:
        """The loop runs: let the disk say when it has made room."""
        loop = asyncio.get_running_loop()
        if self._store.tiering is not None:
            self._store.tiering.call_on_room(lambda: self._tell(loop))

    def reserve(self, session: Client, key: bytes, length: int) -> Reservation | Later | None:
        """Room for a value, LATER when the client waits, or None: there is none, however long one waits."""
        tiering = self._store.tiering
        if tiering is None or extent_length(length) > self._store.limit_bytes:
            return self._store.reserve(key, length, session.space)
        now_s = self._server.now_s()
        since_s, _ = self._waiting.get(session, (now_s, None))
        overdue = session in self._waiting and now_s - since_s >= tiering.spill_wait_s
        if overdue and self._store.unsaved:  # else it is not the disk that keeps the room
            tiering.waited_in_vain(since_s)
        patient = tiering.makes_room and tiering.spill_wait_s > 0 and not overdue
        room = None
        if not (patient and self._waiting and session not in (self._called, next(iter(self._waiting)))):
            room = self._store.reserve(key, length, session.space, drop=not patient)
        if room is None and patient:
            return self._wait(session, since_s)
        self._waiting.pop(session, None)
        self._called = None
        if self._waiting:  # there may be more
            self._tell(asyncio.get_running_loop())
        return room

    def keeps_waiting(self, session: Client) -> bool:
        """Whether it is here that a client waits."""
        return session in self._waiting

    def forget(self, session: Client) -> None:
        """A client has gone, or what it wanted to store."""
        if self._waiting.pop(session, None) is not None:
            self._next()

    def tick(self) -> None:
        """Let the first ask again, whose time may be over."""
        self._next()

    def __len__(self) -> int:
        return len(self._waiting)

    def _wait(self, session: Client, since_s: float) -> Later:
        tiering = self._store.tiering
        assert tiering is not None
        tiering.stats.spill_waits += session not in self._waiting
        if self._called is session:
            self._called = None
        session.waiting = pending = Pending(session)
        self._waiting[session] = since_s, pending  # one that has waited keeps its place
        return LATER

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        """There may be room; called by I/O threads too."""
        if self._waiting and not self._told:
            self._told = True
            tell_loop(loop, self._next)

    def _next(self) -> None:
        self._told = False
        while self._waiting:
            session, (_, pending) = next(iter(self._waiting.items()))
            if session.waiting is pending:
                self._called = session
                pending.resolve(b"")
                return
            del self._waiting[session]  # it was called and did not come
