"""One server and our connections to it, for lookups, for loads, and for the thread that sends what is stored.

All connections are opened and retired here. When one of them fails, most likely all have, and finding out costs a
timeout each; so the pool retires all at once, and the server counts as lost once.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

from kvredis.backends.fork_guard import Home
from kvredis.backends.resp.connection import Connection, Reply, TlsConnection
from kvredis.backends.shm.connection import AttachedConnection
from kvredis.storage.errors import BackendError

from .health import RETRY_WAIT_S, WAIT_S_MIN, Link
from .receive import Receiver

CONNECTIONS_DEFAULT: Final = 2
LOAD_CONNECTIONS_MAX: Final = 8
"""What a load uses of a server with as many threads: 2 GB in values of 32 MiB, scattered on a GPU, came in 121 ms over
four connections, in 88 over eight, and no sooner over twelve (16 cores, an H200's host). `resp_num_threads` asks for
others."""
STORE_THREADS_MAX: Final = 8
"""By how many threads a sender sends long values, a connection each, to a server with as many: 2 GB in values of 32 MiB
left in 444 ms by one, 142 by four and 89 by eight (32 cores, an H200's host, medians of 5)."""
STORE_CONNECTIONS_MAX: Final = 4
"""What a sender uses of a server that copies out of our memory with as many threads: 2 GB in values of 32 MiB took 60
ms over two connections and 49 over four (16 cores, an H200's host; with one thread of the server's 145 and 80)."""
PIPELINE_MAX: Final = 256
"""Commands sent before their answers are read; these are short, so that neither side waits for the other to read."""


class Node:
    """A server behind `link`, with one connection for questions, so that a lookup never waits behind a body, and those
    that are borrowed: for what is stored (store_connections_with, store_threads_with), for a load
    (load_connections_with), and one for each wait (ask_aside). As many as stores and a load need stay open when they
    are idle, or each load behind a pause would wait for a new one: 2 ms where it is to the server's memory (H200's
    host, profiled). Thread-safe; the questions take turns, nothing else waits for them.
    """

    def __init__(self, link: Link, connections: int | None = None) -> None:
        """`connections` None leaves it to what the server is good for."""
        self.link = link
        self.connections = connections or CONNECTIONS_DEFAULT
        self.body_bytes, self.pace_s = 0, math.inf
        """How long the last body of a load was, and how many seconds one took."""
        self.leased_bytes = -1
        """What the last load by leases has left (LeasePipeline.next_bytes): the next one may borrow another
        connection."""
        self._is_asked_for = connections is not None
        self._processors = len(os.sched_getaffinity(0))
        self._load_connections_max = self.connections  # as many as a load has used
        self._store_connections_max = self.connections  # as many as a sender has used
        self._lock = threading.RLock()  # reentrant: a collected generator may bring its connections back anywhere
        self._came_back = threading.Condition(self._lock)
        self._home = Home()
        self._question = threading.RLock()
        self._asking: Connection | None = None
        self._unknown: set[bytes] = set()  # commands that the server of `_asking` does not know
        self._idle: list[Connection] = []
        self._open: dict[Connection, int] = {}  # all there are, idle or lent, and the losses before each was opened
        self._past: set[Connection] = set()  # which a loss has ended, until their users retire them
        self._closed = False
        self._bytes_in = self._bytes_out = 0
        self._receivers: list[Receiver] = []  # idle ones

    # ---- connections ---------------------------------------------------------------------------------------------

    def open(self) -> Connection | None:
        """Open a connection, which its user gives to `retire` in the end; None: the server is lost, or takes no more of
        them. Those of before its last loss fail now, as it may be another one that is back. One that is refused beside
        others is no loss; where there is but the one for questions it is, or each load would miss what these find.
        """
        if not self._home.is_here():
            return None
        losses = self.link.losses  # before: one that is taken for older than it is does no harm
        with self._lock:
            beside = any(each.usable for each in self._open if each is not self._asking)
        connection = self.link.open(beside=beside)
        if connection is None:
            return None
        with self._lock:
            past = self._take_off(losses - 1)
            self._open[connection] = losses
        for each in past:
            each.interrupt()
        return connection

    def retire(self, connection: Connection) -> None:
        """Close a connection for good."""
        with self._lock:
            self._open.pop(connection, None)
            self._past.discard(connection)
            self._bytes_in += connection.bytes_in
            self._bytes_out += connection.bytes_out
        connection.close()

    def lose(self, connection: Connection | None, error: BackendError) -> None:
        """Fail all open connections, in whatever thread they are used, since one has failed. Those that an earlier loss
        has ended say nothing new."""
        with self._lock:
            losses = self.link.losses if connection is None else self._open.get(connection)
            if losses is None:
                return
            doomed = self._take_off(losses)
        self.link.lost(error, losses)
        for each in doomed:
            each.interrupt()

    def _take_off(self, losses: int) -> list[Connection]:
        """Forget those that were opened after so many losses at most; what they still have to say is no news."""
        past = [connection for connection, before in self._open.items() if before <= losses]
        for connection in past:
            del self._open[connection]
        self._past.update(past)
        return past

    def complain(self, reply: Reply, connection: Connection | None = None) -> None:
        """Say once what the server answered, on which connection; it may be a reason to look for another server."""
        if self.link.complain(reply):
            self.lose(connection, BackendError(str(reply)[:200]))

    def borrow(self, count: int, *, for_sender: bool = False, for_wait: bool = False) -> list[Connection]:
        """Up to `count` connections, for a load or what is stored; none when the server is lost. From a server that
        takes no more the first is waited for, for a moment. A node that is closed gives them to its sender only, which
        has something left for it. For an answer that takes its time one by which no reader has leases, if there is one:
        the server would hear of their end behind that answer, and they end where it does not come."""
        borrowed: list[Connection] = []
        try:
            while len(borrowed) < count and self._home.is_here():
                with self._lock:
                    if self._closed and not for_sender:
                        break
                    idle = self._take_idle(for_wait=for_wait)
                if idle is not None and idle.stale():
                    self.retire(idle)
                    continue
                connection = idle or self.open()  # a new one is not doubted, or a server that hangs up keeps us here
                if connection is None and for_wait and self._idle:
                    for_wait = False  # better that one than none
                    continue
                if connection is None:
                    if not borrowed and self.link.is_full and self._one_comes_back():
                        continue
                    break
                borrowed.append(connection)
        except BaseException:
            self.bring_back(borrowed)
            raise
        return borrowed

    def _take_idle(self, *, for_wait: bool) -> Connection | None:
        """Take the idle connection that came back last; under the lock."""
        for place in reversed(range(len(self._idle))):
            if not (for_wait and self._idle[place].has_leases):
                return self._idle.pop(place)
        return None

    def load_connections_with(self, connection: Connection) -> int:
        """How many connections a load uses, `connection` being the first of them, and so many stay open from now on.
        That one is enough where it does not carry the bodies, and over loopback to a server with one thread: that is
        what takes the time there, and to go from socket to socket costs both ends 7-18 % more of their processors' time
        (2 MiB, 576 KiB; 4 connections)."""
        if isinstance(connection, AttachedConnection):
            return 1
        if connection.io_threads > 1 and not connection.is_local and not self._is_asked_for:
            count = max(self.connections, min(connection.io_threads, LOAD_CONNECTIONS_MAX))
            self._load_connections_max = max(self._load_connections_max, count)
            return count
        return 1 if connection.is_loopback and connection.io_threads < 2 else self.connections

    def store_connections_with(self, connection: Connection) -> int:
        """How many connections a sender uses by one thread, `connection` being the first of them; as many stay open
        from now on."""
        if isinstance(connection, AttachedConnection) and not self._is_asked_for:
            count = max(self.connections, min(connection.io_threads, STORE_CONNECTIONS_MAX))
            self._store_connections_max = max(self._store_connections_max, count)
            return count
        return 1 if self.store_threads_with(connection) > 1 else self.connections

    def store_threads_with(self, connection: Connection) -> int:
        """By how many threads a sender sends long values, a connection each, `connection` being the first of them; as
        many connections stay open from now on. One where that does not carry the bodies, or a server that receives by
        one thread would be no sooner done; nor more than there are processors to copy."""
        if isinstance(connection, AttachedConnection):
            return 1
        count = self.connections
        if not self._is_asked_for:
            takes_several = connection.io_threads > 1 and not isinstance(connection, TlsConnection)
            count = min(connection.io_threads, STORE_THREADS_MAX, self._processors) if takes_several else 1
        self._store_connections_max = max(self._store_connections_max, count)
        return count

    @property
    def carries_bodies(self) -> bool:
        """Whether values go to the server and come from it over a socket, as far as it is known: there are connections,
        and none is to memory that both have."""
        with self._lock:
            return bool(self._open) and not any(isinstance(each, AttachedConnection) for each in self._open)

    @property
    def lends_memory(self) -> bool:
        """Whether there is a connection to a server that copies out of our memory, as far as it is known."""
        with self._lock:
            return any(isinstance(each, AttachedConnection) for each in self._open)

    def _one_comes_back(self) -> bool:
        with self._lock:
            return self._came_back.wait_for(lambda: bool(self._idle), RETRY_WAIT_S)

    def bring_back(self, connections: Sequence[Connection]) -> None:
        """Take connections back; what is not usable, or one too many, is closed. Not one that a reader has:
        its leases would end with it."""
        for connection in connections:
            with self._lock:
                spare = (
                    len(self._idle) >= self._store_connections_max + self._load_connections_max
                    and not connection.has_leases
                )
                keep = connection.usable and not self._closed and not spare
                if keep:
                    self._idle.append(connection)
                    self._came_back.notify()
            if not keep:
                self.retire(connection)

    def borrow_receivers(self, count: int) -> list[Receiver]:
        """Up to `count` threads that receive for a load beside its own; fewer when there are no more to be had."""
        borrowed: list[Receiver] = []
        while len(borrowed) < count:
            with self._lock:
                if self._closed:
                    break
                idle = self._receivers.pop() if self._receivers else None
            try:
                borrowed.append(idle or Receiver())
            except RuntimeError:  # the interpreter ends, or has no threads left
                break
        return borrowed

    def bring_back_receivers(self, receivers: Sequence[Receiver]) -> None:
        """Take threads back; as many stay as one load uses. One that receives still, as its load was interrupted again
        and again, ends when it is done with that."""
        for receiver in receivers:
            with self._lock:
                spare = len(self._receivers) >= self._load_connections_max
                keep = not self._closed and not spare and not receiver.is_busy
                if keep:
                    self._receivers.append(receiver)
            if not keep:
                receiver.end()

    # ---- questions -----------------------------------------------------------------------------------------------

    def knows(self, name: bytes) -> bool:
        """Say whether the server may know a command: it has not said otherwise."""
        return name not in self._unknown

    def pipeline(self, commands: Sequence[Sequence[bytes]], *, asking: bool = False) -> list[Reply]:
        """Send short commands and give their replies; None for each without an answer, and for those that this
        server does not know. With `asking`, each in a slot that the server is still importing. They take as long as
        the timeout in all, or the server is lost.
        """
        replies: list[Reply] = []
        if not self._home.is_here():
            return [None] * len(commands)
        with self._question:
            connection = self._asking_now()
            if connection is not None:
                until_s = time.monotonic() + self.link.timeout_s
                try:
                    while len(replies) < len(commands):
                        batch = commands[len(replies) : len(replies) + PIPELINE_MAX]
                        replies += self._exchange(connection, batch, asking, until_s)
                except BackendError as error:
                    self.lose(connection, error)
                except BaseException:  # which answers are still out is not known
                    connection.close()
                    raise
        return replies + [None] * (len(commands) - len(replies))

    def _asking_now(self) -> Connection | None:
        if self._asking is not None and self._asking.stale():
            self.retire(self._asking)
            self._asking = None
        if self._asking is None and not self._closed:
            self._asking = self.open()
            self._unknown.clear()
        return self._asking

    def _exchange(
        self, connection: Connection, batch: Sequence[Sequence[bytes]], asking: bool, until_s: float
    ) -> list[Reply]:
        unknown = frozenset(self._unknown)
        connection.set_timeout(max(until_s - time.monotonic(), WAIT_S_MIN))
        known = [command for command in batch if command[0] not in unknown]
        connection.send_many(word for command in known for word in ([(b"ASKING",), command] if asking else [command]))
        replies: list[Reply] = []
        for command in batch:
            reply: Reply = None
            if command[0] not in unknown:
                connection.set_timeout(max(until_s - time.monotonic(), WAIT_S_MIN))
                if asking:
                    connection.read()
                reply = connection.read()
            if isinstance(reply, BackendError) and str(reply).startswith("ERR unknown command"):
                self._unknown.add(command[0])
                reply = None
            replies.append(reply)
        return replies

    def ask_aside(self, *args: bytes, within_s: float = math.inf) -> Reply:
        """Send one command whose answer may take its time, on a connection of its own; None: no answer.

        Raises TimeoutError when the server has not answered `within_s`, where that is less than the usual time: it is
        not lost for that.
        """
        lent = self.borrow(1, for_wait=True)
        until_s = time.monotonic() + within_s
        try:
            if not lent:
                return None
            lent[0].set_timeout(min(within_s, self.link.timeout_s))
            reply = lent[0].call(*args)
            lent[0].set_timeout(self.link.timeout_s)
            return reply
        except BaseException as error:
            lent[0].close()  # an answer may be out
            if not isinstance(error, BackendError):
                raise
            if time.monotonic() >= until_s:
                raise TimeoutError from error
            self.lose(lent[0], error)
            return None
        finally:
            self.bring_back(lent)

    # ---- figures and the end -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Give counters since the start; bytes are all that went over the sockets, and connections what is open; of
        these `attached` are to the memory of a server on this host."""
        with self._lock:
            every = [*self._open, *self._past]
            return {
                "connections": len(self._open),
                "attached": sum(isinstance(connection, AttachedConnection) for connection in self._open),
                "bytes_in": self._bytes_in + sum(connection.bytes_in for connection in every),
                "bytes_out": self._bytes_out + sum(connection.bytes_out for connection in every),
                "errors": self.link.errors,
                "losses": self.link.losses,
                "reconnects": self.link.reconnects,
            }

    def close(self) -> None:
        """Ask no more questions, and close what is not in use; what is lent closes when it is brought back."""
        with self._lock:
            self._closed = True
            idle = tuple(self._idle)
            self._idle.clear()
            receivers = tuple(self._receivers)
            self._receivers.clear()
        self.link.close()
        for receiver in receivers:
            receiver.end()
        for connection in idle:
            self.retire(connection)
        with self._question:
            if self._asking is not None:
                self.retire(self._asking)
            self._asking = None
