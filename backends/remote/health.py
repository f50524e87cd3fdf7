"""Whether a server is worth asking: opens connections to it, says once what is wrong, and spaces out the attempts.

An engine asks its cache before every request. A server that is gone, or hangs, must cost it little each time: attempts
wait RETRY_S_MIN, then twice as long each time, and at least FAIRNESS times as long as the failed one took. Once it is
lost they are made in a thread of their own, for which an engine waits no longer than a server takes that is there.

A master behind Sentinels is looked for anew with each attempt. One that has been demoted still answers, and refuses
what is stored: that counts as lost, so that the next attempt finds its successor.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

from kvredis.backends.config.url import Address, SentinelAddress
from kvredis.backends.resp.connection import Connection, Reply, ServerFull
from kvredis.backends.resp.sentinel import SentinelResolver
from kvredis.backends.shm.discovery import SameHost
from kvredis.storage.background import start_thread
from kvredis.storage.errors import BackendError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S_MAX: Final = 2.0
WAIT_S_MIN: Final = 0.001
RETRY_WAIT_S: Final = 0.1
"""How long a caller that has a lost server tried again waits for the outcome; later it is the next one's."""
RETRY_S_MIN: Final = 0.1
RETRY_S_MAX: Final = 10.0
"""Also how long a server must have been back until the waits begin anew with the shortest."""
FULL_S: Final = 1.0
"""How long no connection more is asked for after a server has refused one for having too many."""
FAIRNESS: Final = 4
COMPLAINTS_MAX: Final = 32
"""Kinds of server errors that are logged, once each."""


class Link:
    """The state of one server as we know it. Any thread may call anything; its lock is not held across the network."""

    def __init__(
        self,
        address: Address | SentinelAddress,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        connect_timeout_s: float | None = None,
        page_lock: bool = False,
    ) -> None:
        """An attempt to open a connection takes `connect_timeout_s`, and never more than `timeout_s`, in all. With
        `page_lock` the GPU is told of memory that a server on this host shares."""
        self.address = address
        self.timeout_s = timeout_s
        self._connect_timeout_s = min(timeout_s, connect_timeout_s or CONNECT_TIMEOUT_S_MAX)
        self._is_behind_sentinels = isinstance(address, SentinelAddress)
        self._find = _finder(address)
        self._same_host: SameHost | None = None
        if isinstance(address, Address) and address.shared_memory:
            self._same_host = SameHost(address, page_lock=page_lock)
        self.losses = 0
        self.reconnects = 0
        self.errors = 0
        self._lock = threading.Lock()
        self._complaints: set[str] = set()
        self._clock = clock
        self._down = False
        self._delay_s = 0.0
        self._retry_at_s = 0.0
        self._more_at_s = -math.inf
        self._told_full = False
        self._up_since_s = -math.inf
        self._retrying: threading.Thread | None = None
        self._found: Connection | None = None  # by a retry, and not fetched yet
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Say whether the server is lost, and the next attempt is not due yet or under way."""
        return self._down and (self._retrying is not None or self._clock() < self._retry_at_s)

    @property
    def is_full(self) -> bool:
        """Whether the server has refused one connection too many just now."""
        return self._clock() < self._more_at_s

    def use_gpu(self, number: int) -> bool:
        """Have connections from now on map the GPU memory of a server on this host for our GPU of that number; False:
        values come and go over a socket."""
        if self._same_host is None:
            return False
        self._same_host.gpu = number
        return True

    def open(self, *, beside: bool = False) -> Connection | None:
        """Open a connection that has answered a PING, or None: the server is lost, or it is too early to try again.

        With `beside` there are others that do: a server that refuses one more for having too many is not lost then.
        """
        found = self._take_found()
        if found is not None or self.waiting or (beside and self.is_full):
            return found
        if not self._down:
            return self._try(beside=beside)
        with self._lock:
            if self._retrying is not None or self._closed:
                return None
            try:
                self._retrying = retry = start_thread(self._retry, f"kvredis looks for {self.address}")
            except RuntimeError:  # the interpreter ends, or has no threads left
                return None
        retry.join(RETRY_WAIT_S)
        return self._take_found()

    def close(self) -> None:
        """Look no more for a server that is lost. While it is not, a sender that has something left may open more."""
        with self._lock:
            self._closed = True
            found, self._found = self._found, None
        if found is not None:
            found.close()

    def _retry(self) -> None:
        losses, connection = self.losses, None
        try:
            connection = self._try()
        except BaseException:  # it ends this thread, and not the attempts
            with self._lock:
                self._down_since(None, 0.0)
            raise
        finally:
            with self._lock:
                self._retrying = None
                if self.losses == losses and not self._closed:
                    self._found, connection = connection, None
        if connection is not None:
            connection.close()

    def _take_found(self) -> Connection | None:
        with self._lock:
            found, self._found = self._found, None
        if found is not None and found.stale():
            found.close()
            return None
        return found

    def _try(self, *, beside: bool = False) -> Connection | None:
        began_s, losses = self._clock(), self.losses
        try:
            connection = self._probed()
        except Exception as error:  # of our own making too: nothing may end the attempts, or reach an engine
            if beside and isinstance(error, ServerFull):
                self._wait_for_more(error)
                return None
            with self._lock:
                if self.losses == losses:
                    reason = error if isinstance(error, BackendError) else BackendError(repr(error))
                    self._down_since(reason, self._clock() - began_s)
            return None
        with self._lock:
            if self.losses != losses:  # another has found it lost since this one was opened
                connection.close()
                return None
            if self._down:
                self._down = False
                self.reconnects += 1
                self._up_since_s = self._clock()
                logger.warning("%s is back", self.address)
        return connection

    def _wait_for_more(self, error: ServerFull) -> None:
        with self._lock:
            self._more_at_s = self._clock() + FULL_S
            told, self._told_full = self._told_full, True
        if not told:
            logger.warning("%s takes no more connections (%s): it is used by those there are", self.address, str(error))

    def lost(self, error: BackendError, losses: int) -> None:
        """Note that a connection has failed. One that was opened before the last of the `losses`, so that there have
        been more of them since, says nothing of the server that is there now.
        """
        with self._lock:
            self.errors += 1
            if losses != self.losses or self._down:
                return
            found, self._found = self._found, None
            self._down_since(error, 0.0)
        if found is not None:
            found.close()

    def doubt(self) -> None:
        """Take the server for lost, without a word: another has found out, and has said so."""
        with self._lock:
            if not self._down:
                self._down_since(None, 0.0)

    def complain(self, reply: Reply) -> bool:
        """Say once per kind of error what the server answered; its kind is its first word.

        True: the connection that brought it, and all others, are to be given up as lost. The master that Sentinels
        named is none any more. (A single server may be meant to be read only; there the reads go on.)
        """
        text = str(reply)
        kind = text.partition(" ")[0]
        if kind == "READONLY" and self._is_behind_sentinels:
            return True
        with self._lock:
            self.errors += 1
            is_new = kind not in self._complaints and len(self._complaints) < COMPLAINTS_MAX
            if is_new:
                self._complaints.add(kind)
        if is_new:
            logger.warning("%s answers: %s (said once)", self.address, text[:200])
        return False

    def _probed(self) -> Connection:
        deadline_s = time.monotonic() + self._connect_timeout_s
        connection = Connection.open(self._find(self._connect_timeout_s), _left_s(deadline_s))
        try:
            connection.set_timeout(_left_s(deadline_s))
            reply = connection.call(b"PING")
            if reply != "PONG":
                answer = f"answers PING with {reply}" if isinstance(reply, BackendError) else "does not answer PING"
                raise BackendError(answer)
            if self._is_behind_sentinels:
                connection.set_timeout(_left_s(deadline_s))
                role = connection.call(b"ROLE")  # an error, where we may not ask: READONLY will tell
                if isinstance(role, list) and role[:1] != [b"master"]:
                    raise BackendError("the master that the Sentinels name is none any more")
            if self._same_host is not None:
                connection = self._same_host.attached(connection, deadline_s)
        except BaseException:
            connection.close()
            raise
        connection.set_timeout(self.timeout_s)
        return connection

    def _down_since(self, error: BackendError | None, took_s: float) -> None:
        if not self._down:
            self._down = True
            self.losses += 1
            if self._clock() - self._up_since_s >= RETRY_S_MAX:  # else it comes and goes
                self._delay_s = 0.0
            if error is not None:
                # As text: a record that a handler keeps would keep all that the error's frames hold, mappings too.
                logger.warning("%s is lost (%s); its blocks are misses until it is back", self.address, str(error))
        self._delay_s = min(max(2 * self._delay_s, RETRY_S_MIN, FAIRNESS * took_s), RETRY_S_MAX)
        self._retry_at_s = self._clock() + self._delay_s


def _finder(address: Address | SentinelAddress) -> Callable[[float], Address]:
    """Give what says, within so many seconds, where the server is now."""
    return SentinelResolver(address).master if isinstance(address, SentinelAddress) else lambda timeout_s: address


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - time.monotonic(), WAIT_S_MIN)
