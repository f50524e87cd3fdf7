"""The backend of an engine whose blocks live on a server: kvredis, or any other that speaks Redis' protocol.

Bodies are received straight into the local arena and sent straight out of it: one copy per side, the kernel's. The
arena is room for transfers only here: what is reserved in it is never committed to its index, and is given back when a
SET has been handed to the kernel, or when the reader of a GET releases its Lease.

Three kinds of connection, opened when first needed: one for questions (match, touch, delete, prefetch), so that a
lookup never waits behind a body; up to `connections` for SETs, whose answers are read when there are many and in
flush(); up to `connections` for each load under way, borrowed for as long as it lasts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvredis.storage.errors import BackendError

from . import base
from .address import Address
from .connection import Connection, Reply
from .holds import RemoteLease, RemoteReservation, Staging
from .lanes import AHEAD_MIN, SETS_UNANSWERED_MAX, GetLane, SetLane, ahead_for
from .link import Link

logger = logging.getLogger(__name__)

CONNECTIONS: Final = 2
COUNTERS: Final = ("hits", "misses", "no_room", "stored", "refused", "errors", "bytes_in", "bytes_out")
QUESTION_KEYS: Final = 4096
"""Keys in one command."""
EXISTS_KEYS: Final = 256
"""EXISTS in one pipeline; a long prompt that is not stored costs no more than one such round."""
COMPLAINTS_MAX: Final = 32
"""Kinds of server errors that are logged, once each."""


class RemoteBackend:
    """Blocks on the server at `address`, with `staging` for their bodies, which is closed with the backend.

    Thread-safe: one lock covers everything but the receiving of bodies, which each load does on connections of its own.
    """

    def __init__(
        self,
        address: Address,
        staging: Staging,
        *,
        connections: int = CONNECTIONS,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._staging = staging
        self._connections = connections
        self._link = Link(address, timeout_s, clock)
        self._lock = threading.RLock()  # reentrant: a collected generator may settle its load anywhere
        self._asking: Connection | None = None
        self._unknown: set[bytes] = set()  # commands that the server of `_asking` does not know
        self._set_lanes: list[SetLane] = []
        self._set_turn = 0
        self._unsettled: set[bytes] = set()  # keys whose SET may be unanswered: never asked for before it is
        self._idle: list[Connection] = []
        self._refused_unflushed = 0
        self._complaints: set[str] = set()
        self._closed = False
        self._counts = dict.fromkeys(COUNTERS, 0)

    # ---- questions -----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> int:
        """As Backend.match: one KV.MATCH, or else pipelined EXISTS and a TOUCH of what was found."""
        return self._ask(keys, self._leading_run)

    def touch(self, keys: Sequence[bytes]) -> int:
        """As Backend.touch."""
        return self._ask(keys, lambda connection, asked: self._sum(connection, b"TOUCH", asked))

    def delete(self, keys: Sequence[bytes]) -> int:
        """As Backend.delete."""
        return self._ask(keys, lambda connection, asked: self._sum(connection, b"UNLINK", asked))

    def prefetch(self, keys: Sequence[bytes]) -> int:
        """As Backend.prefetch; a server that does not know PREFETCH has queued nothing."""
        return self._ask(keys, lambda connection, asked: self._sum(connection, b"PREFETCH", asked))

    def _ask(self, keys: Sequence[bytes], question: Callable[[Connection, Sequence[bytes]], int]) -> int:
        with self._lock:
            if not keys or self._closed:
                return 0
            self._settle(keys)
            if self._asking is not None and self._asking.stale():
                self._retire(self._asking)
                self._asking = None
            if self._asking is None:
                self._asking = self._link.open()
                self._unknown.clear()
            if self._asking is not None:
                with self._forgiving():
                    return question(self._asking, keys)
            return 0

    def _leading_run(self, connection: Connection, keys: Sequence[bytes]) -> int:
        run = 0
        for part in _parts(keys, QUESTION_KEYS):
            found = self._try(connection, b"KV.MATCH", part)
            if found is None:
                return self._leading_run_by_exists(connection, keys)
            run += max(min(found, len(part)), 0)
            if found < len(part):
                break
        return run

    def _leading_run_by_exists(self, connection: Connection, keys: Sequence[bytes]) -> int:
        run = 0
        for part in _parts(keys, EXISTS_KEYS):
            connection.send_many((b"EXISTS", key) for key in part)
            present = [self._count(connection.read()) == 1 for _ in part]
            run += [*present, False].index(False)
            if not all(present):
                break
        if run:
            self._sum(connection, b"TOUCH", keys[:run])
        return run

    def _sum(self, connection: Connection, name: bytes, keys: Sequence[bytes]) -> int:
        """Add up a command's answers over parts of the keys, tail first: what is touched last stays longest."""
        return sum(self._try(connection, name, part) or 0 for part in reversed(_parts(keys, QUESTION_KEYS)))

    def _try(self, connection: Connection, name: bytes, keys: Sequence[bytes]) -> int | None:
        """Send one command, whose answer is a count; None: this server does not know it."""
        if name in self._unknown:
            return None
        reply = connection.call(name, *keys)
        if isinstance(reply, BackendError) and str(reply).startswith("ERR unknown command"):
            self._unknown.add(name)
            return None
        return self._count(reply)

    def _count(self, reply: Reply) -> int:
        if isinstance(reply, int):
            return reply
        self._complain(reply)
        return 0

    # ---- writing -------------------------------------------------------------------------------------------------

    def reserve(self, key: bytes, length: int) -> RemoteReservation | None:
        """As Backend.reserve; None also while the server is lost, for then nobody would take the value."""
        with self._lock:
            if self._closed or self._link.waiting:
                return None
        room = self._staging.reserve(key, length)
        if room is None:
            with self._lock:
                self._counts["no_room"] += 1
            return None
        return RemoteReservation(key, room, self._send)

    def flush(self) -> int:
        """As Backend.flush."""
        with self._lock:
            for lane in list(self._set_lanes):
                self._read_answers(lane, 0)
            self._unsettled.clear()
            refused, self._refused_unflushed = self._refused_unflushed, 0
            return refused

    def _send(self, key: bytes, view: memoryview) -> None:
        with self._lock:
            self._settle([key])  # an older value of the same key must not arrive after this one
            lane = None if self._closed else self._next_set_lane()
            if lane is None:
                self._refuse(1)
                return
            self._unsettled.add(key)
            with self._forgiving():
                lane.send(key, view)
            if lane.unanswered >= SETS_UNANSWERED_MAX:
                self._read_answers(lane, SETS_UNANSWERED_MAX // 2)

    def _next_set_lane(self) -> SetLane | None:
        """The lanes in turn; a new one as long as there are less than `connections`."""
        for lane in [lane for lane in self._set_lanes if not lane.unanswered and lane.connection.stale()]:
            self._set_lanes.remove(lane)
            self._retire(lane.connection)
        if len(self._set_lanes) < self._connections:
            connection = self._link.open()
            if connection is not None:
                self._set_lanes.append(SetLane(connection))
        self._set_turn += 1
        return self._set_lanes[self._set_turn % len(self._set_lanes)] if self._set_lanes else None

    def _settle(self, keys: Sequence[bytes]) -> None:
        """Wait for the SETs of `keys`: on another connection they might be asked for before they are there."""
        if not self._unsettled.isdisjoint(keys):
            for lane in list(self._set_lanes):
                self._read_answers(lane, 0)
            self._unsettled.clear()

    def _read_answers(self, lane: SetLane, keep: int) -> None:
        with self._forgiving():
            for reply in lane.answers(keep) if lane.connection.usable else ():
                if reply == "OK":
                    self._counts["stored"] += 1
                else:
                    self._complain(reply)
                    self._refuse(1)

    def _refuse(self, count: int) -> None:
        self._counts["refused"] += count
        self._refused_unflushed += count

    # ---- reading -------------------------------------------------------------------------------------------------

    def load(self, keys: Sequence[bytes]) -> Generator[RemoteLease | None, None, None]:
        """As Backend.load: the keys in turn over the load's connections, several GETs under way on each."""
        lanes = self._borrow(keys)
        counts = dict.fromkeys(("hits", "misses", "no_room"), 0)
        ahead = AHEAD_MIN
        try:
            for turn, key in enumerate(keys):
                lease = None
                if lanes and lanes[0].connection.usable:
                    lease = self._take(lanes, lanes[turn % len(lanes)], key, ahead, counts)
                if lease is None:
                    counts["misses"] += 1
                else:
                    counts["hits"] += 1
                    ahead = ahead_for(lease.length, len(lanes))
                yield lease
        finally:
            self._bring_back(lanes, counts)

    def _take(
        self, lanes: list[GetLane], lane: GetLane, key: bytes, ahead: int, counts: dict[str, int]
    ) -> RemoteLease | None:
        """Top up what is asked for on all lanes, and receive the next body of `lane` into room of its own."""
        room: base.Reservation | None = None

        def allocate(length: int) -> memoryview | None:
            nonlocal room
            room = self._staging.reserve(key, length)
            counts["no_room"] += room is None
            return None if room is None else room.view

        got: Reply = None
        try:
            for each in lanes:
                each.ask(ahead)
            got = lane.take(allocate)
        except BaseException as error:
            # Which bodies are still to come is not known any more, on this lane or another: all of them end here.
            for each in lanes:
                each.connection.close()
            got = None
            if not isinstance(error, BackendError):
                raise
            with self._lock:
                self._lose(error)
        finally:
            if room is not None and not isinstance(got, int):
                room.abort()
        if isinstance(got, BackendError):
            with self._lock:
                self._complain(got)
        return RemoteLease(key, room) if room is not None and isinstance(got, int) else None

    def _borrow(self, keys: Sequence[bytes]) -> list[GetLane]:
        """Connections for a load, its keys dealt out over them; none when the server is lost."""
        with self._lock:
            if self._closed:
                return []
            self._settle(keys)
            connections: list[Connection] = []
            while len(connections) < min(self._connections, len(keys)):
                connection = self._idle.pop() if self._idle else self._link.open()
                if connection is None:
                    break
                if connection.stale():
                    self._retire(connection)
                else:
                    connections.append(connection)
            lanes = len(connections)
            return [GetLane(connection, keys[first::lanes]) for first, connection in enumerate(connections)]

    def _bring_back(self, lanes: list[GetLane], counts: dict[str, int]) -> None:
        for lane in lanes:
            lane.settle()
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
            for lane in lanes:
                if lane.connection.usable and not self._closed and len(self._idle) < self._connections:
                    self._idle.append(lane.connection)
                else:
                    self._retire(lane.connection)

    # ---- losing and closing, with the lock held ------------------------------------------------------------------

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Take a failed connection for a lost server; after anything else nobody knows which answers are still out."""
        try:
            yield
        except BackendError as error:
            self._lose(error)
        except BaseException:
            self._hang_up()
            raise

    def _lose(self, error: BackendError) -> None:
        """A connection has failed: most likely all have, and each costs a timeout to find out, so all go."""
        self._counts["errors"] += 1
        self._link.lost(error)
        self._hang_up()

    def _hang_up(self) -> None:
        for lane in self._set_lanes:
            self._refuse(lane.unanswered)
            self._retire(lane.connection)
        for connection in self._idle:
            self._retire(connection)
        if self._asking is not None:
            self._retire(self._asking)
        self._set_lanes.clear()
        self._idle.clear()
        self._unsettled.clear()
        self._asking = None

    def _retire(self, connection: Connection) -> None:
        self._counts["bytes_in"] += connection.bytes_in
        self._counts["bytes_out"] += connection.bytes_out
        connection.close()

    def _complain(self, reply: Reply) -> None:
        """Say once per kind of error what the server answered; its kind is its first word."""
        text = str(reply)
        kind = text.partition(" ")[0]
        self._counts["errors"] += 1
        if kind not in self._complaints and len(self._complaints) < COMPLAINTS_MAX:
            self._complaints.add(kind)
            logger.warning("%s answers: %s (said once)", self.address, text[:200])

    def stats(self) -> dict[str, int | float | str]:
        """Give counters since the start; bytes are all that went over the sockets, of loads once they have ended."""
        with self._lock:
            open_now = [*self._idle, *(lane.connection for lane in self._set_lanes)]
            if self._asking is not None:
                open_now.append(self._asking)
            counts = dict(self._counts)
            counts["bytes_in"] += sum(connection.bytes_in for connection in open_now)
            counts["bytes_out"] += sum(connection.bytes_out for connection in open_now)
            return {
                "kind": "remote",
                "server": str(self.address),
                "connections": len(open_now),
                "losses": self._link.losses,
                "reconnects": self._link.reconnects,
                **counts,
            }

    def close(self) -> None:
        """As Backend.close; waits for the answers to what was sent, which closing early could make the server drop."""
        with self._lock:
            if not self._closed:
                self.flush()
                self._closed = True
                self._hang_up()
                self._staging.close()


def _parts(keys: Sequence[bytes], size: int) -> list[Sequence[bytes]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]
