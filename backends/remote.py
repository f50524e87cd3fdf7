"""The backend of an engine whose blocks live on a server: kvredis, or any other that speaks Redis' protocol.

Bodies are received straight into the local arena and sent straight out of it: one copy per side, the kernel's. The
arena is room for transfers only here: what is reserved in it is never committed to its index, and is given back when a
SET has been answered, or when the reader of a GET releases its Lease.

Three kinds of connection, opened when first needed: one for questions (match, touch, delete, prefetch), so that a
lookup never waits behind a body; up to `connections` for SETs, which a thread of its own sends (remote_outbox.py); up
to `connections` for each load under way, borrowed for as long as it lasts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from kvredis.storage.errors import BackendError

from . import base
from .address import Address
from .connection import Connection, Reply
from .lanes import AHEAD_MIN, GetLane, ahead_for
from .link import Link
from .remote_holds import RemoteLease, RemoteReservation, Staging
from .remote_outbox import Outbox
from .remote_prefetch import QUESTION_KEYS, RemotePrefetch, parts_of

CONNECTIONS: Final = 2
COUNTERS: Final = ("hits", "misses", "no_room", "bytes_in", "bytes_out")
EXISTS_KEYS: Final = 256
"""EXISTS in one pipeline; a long prompt that is not stored costs no more than one such round."""


class RemoteBackend:
    """Blocks on the server at `address`, with `staging` for their bodies, which is closed with the backend.

    Thread-safe: one lock covers the questions; each load receives on connections of its own, and what is stored leaves
    by the outbox. `reserve` and `commit` wait for none of them.
    """

    def __init__(
        self,
        address: Address,
        staging: Staging,
        *,
        connections: int = CONNECTIONS,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        keep: bool = False,
    ) -> None:
        """With `keep` what passes through `staging` stays in it, under its key: a tier nearer than the server."""
        self.address = address
        self._staging = staging
        self._keep = keep
        self._connections = connections
        self._link = Link(address, timeout_s, clock)
        self._lock = threading.RLock()  # reentrant: a collected generator may settle its load anywhere
        self._asking: Connection | None = None
        self._unknown: set[bytes] = set()  # commands that the server of `_asking` does not know
        self._outbox = Outbox(self._link, staging, connections, self._hang_up, keep=keep)
        self._idle: list[Connection] = []
        self._closed = False
        self._counts = dict.fromkeys(COUNTERS, 0)

    # ---- questions -----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> int:
        """As Backend.match: one KV.MATCH, or else pipelined EXISTS and a TOUCH of what was found.

        What is on its way counts as present, and nobody waits for it: `load` gives it from here.
        """
        asked = self._outbox.without(keys)
        found = self._ask(asked, self._leading_run)
        return keys.index(asked[found]) if found < len(asked) else len(keys)

    def touch(self, keys: Sequence[bytes]) -> int:
        """As Backend.touch. Behind what is on its way it takes its turn, and counts only those that are so too."""
        queued = self._outbox.touch(keys)
        if queued is not None:
            return queued
        return self._ask(keys, lambda connection, asked: self._sum(connection, b"TOUCH", asked))

    def delete(self, keys: Sequence[bytes]) -> int:
        """As Backend.delete; waits until none of `keys` is on its way."""
        self._outbox.settle(keys)
        return self._ask(keys, lambda connection, asked: self._sum(connection, b"UNLINK", asked))

    def prefetch(self, keys: Sequence[bytes]) -> RemotePrefetch:
        """As Backend.prefetch; a server that does not know KV.PREFETCH or PREFETCH has queued nothing."""
        prefetch = RemotePrefetch(self._ask_aside, self._link.timeout_s / 2)
        away = self._outbox.without(keys)
        prefetch.resident = len(keys) - len(away)
        self._ask(away, lambda connection, asked: prefetch.ask(partial(self._call, connection), asked))
        return prefetch

    def tiers_of(self, keys: Sequence[bytes]) -> list[base.Tier]:
        """As Backend.tiers_of; the server may have them on a disk of its own."""
        return ["remote"] * len(keys)

    def _ask(self, keys: Sequence[bytes], question: Callable[[Connection, Sequence[bytes]], int]) -> int:
        with self._lock:
            if not keys or self._closed:
                return 0
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
        for part in parts_of(keys, QUESTION_KEYS):
            found = self._try(connection, b"KV.MATCH", part)
            if found is None:
                return self._leading_run_by_exists(connection, keys)
            run += max(min(found, len(part)), 0)
            if found < len(part):
                break
        return run

    def _leading_run_by_exists(self, connection: Connection, keys: Sequence[bytes]) -> int:
        run = 0
        for part in parts_of(keys, EXISTS_KEYS):
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
        return sum(self._try(connection, name, part) or 0 for part in reversed(parts_of(keys, QUESTION_KEYS)))

    def _try(self, connection: Connection, name: bytes, keys: Sequence[bytes]) -> int | None:
        """Send one command, whose answer is a count; None: this server does not know it."""
        reply = self._call(connection, name, *keys)
        return None if name in self._unknown else self._count(reply)

    def _call(self, connection: Connection, name: bytes, *args: bytes) -> Reply:
        """Send one command and give its reply; None also when this server does not know it, which is noted."""
        if name in self._unknown:
            return None
        reply = connection.call(name, *args)
        if isinstance(reply, BackendError) and str(reply).startswith("ERR unknown command"):
            self._unknown.add(name)
            return None
        return reply

    def _ask_aside(self, *args: bytes) -> Reply:
        """Send one command whose answer may take its time, on a connection of its own; None: nobody answers."""
        lanes = self._borrow(1, ())
        try:
            return lanes[0].connection.call(*args) if lanes else None
        except BaseException as error:
            lanes[0].connection.close()  # an answer may be out
            if not isinstance(error, BackendError):
                raise
            self._lose(error)
            return None
        finally:
            self._bring_back(lanes, {})

    def _count(self, reply: Reply) -> int:
        if isinstance(reply, int):
            return reply
        self._link.complain(reply)
        return 0

    # ---- writing -------------------------------------------------------------------------------------------------

    def room(self, length: int) -> int:
        """Count the values of `length` bytes that would be taken now, without waiting; 0 while the server is lost."""
        return self._outbox.room(length)

    def reserve(self, key: bytes, length: int) -> RemoteReservation | None:
        """As Backend.reserve, but it never waits. None, counted as dropped, when more is stored than the server takes,
        and while it is lost."""
        return self._outbox.reserve(key, length)

    def flush(self) -> int:
        """As Backend.flush; those that were dropped since they were committed count too."""
        return self._outbox.flush()

    # ---- reading -------------------------------------------------------------------------------------------------

    def load(
        self, keys: Sequence[bytes], *, within_s: float | None = None
    ) -> Generator[RemoteLease | None, None, None]:
        """As Backend.load: the keys in turn over the load's connections, several GETs under way on each; what has not
        left yet from here."""
        here = self._outbox.hold(keys)
        away = [key for key, lease in zip(keys, here, strict=True) if lease is None]
        lanes: list[GetLane] = []
        counts = dict.fromkeys(("hits", "misses", "no_room"), 0)
        ahead, turn = AHEAD_MIN, 0
        try:
            lanes = self._borrow(min(self._connections, len(away)), away)
            for place, key in enumerate(keys):
                lease, here[place] = here[place], None
                if lease is None:
                    if lanes and lanes[0].connection.usable:
                        lease = self._take(lanes, lanes[turn % len(lanes)], key, ahead, counts)
                        if lease is not None:
                            ahead = ahead_for(lease.length, len(lanes))
                    turn += 1
                counts["misses" if lease is None else "hits"] += 1
                yield lease
        finally:
            for lease in here:
                if lease is not None:
                    lease.release()
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
            self._lose(error)
        finally:
            if room is not None and not isinstance(got, int):
                room.abort()
        if isinstance(got, BackendError):
            self._link.complain(got)
        if room is None or not isinstance(got, int):
            return None
        return RemoteLease(room.view, room.commit if self._keep else room.abort)

    def _borrow(self, count: int, keys: Sequence[bytes]) -> list[GetLane]:
        """Up to `count` connections, the keys of a load dealt out over them; none when the server is lost."""
        with self._lock:
            if self._closed:
                return []
            connections: list[Connection] = []
            while len(connections) < count:
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

    # ---- losing and closing --------------------------------------------------------------------------------------

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
        self._link.lost(error)
        self._outbox.interrupt()
        self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            for connection in self._idle:
                self._retire(connection)
            if self._asking is not None:
                self._retire(self._asking)
            self._idle.clear()
            self._asking = None

    def _retire(self, connection: Connection) -> None:
        self._counts["bytes_in"] += connection.bytes_in
        self._counts["bytes_out"] += connection.bytes_out
        connection.close()

    def stats(self) -> dict[str, int | float | str]:
        """Give counters since the start; bytes are all that went over the sockets, of loads once they have ended."""
        outbox = self._outbox.stats()
        with self._lock:
            open_now = list(self._idle)
            if self._asking is not None:
                open_now.append(self._asking)
            counts = {name: count + outbox.pop(name, 0) for name, count in self._counts.items()}
            counts["bytes_in"] += sum(connection.bytes_in for connection in open_now)
            counts["bytes_out"] += sum(connection.bytes_out for connection in open_now)
            return {
                "kind": "remote",
                "server": str(self.address),
                "connections": len(open_now) + outbox.pop("connections"),
                "errors": self._link.errors,
                "losses": self._link.losses,
                "reconnects": self._link.reconnects,
                **counts,
                **outbox,
            }

    def close(self) -> None:
        """As Backend.close; waits for the answers to what was sent, which closing early could make the server drop, but
        not longer than the timeout: what is still on its way then is dropped, and counted."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._outbox.close()
            self._hang_up()
            self._staging.close()
