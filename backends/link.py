"""Whether a server is worth asking: opens connections to it, says once what is wrong, and spaces out the attempts.

An engine asks its cache before every request. A server that is gone, or hangs, must cost it little each time: attempts
wait RETRY_S_MIN, then twice as long each time, and at least FAIRNESS times as long as the failed one took.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvredis.storage.errors import BackendError

from .address import Address
from .connection import Connection, Reply

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S_MAX: Final = 2.0
RETRY_S_MIN: Final = 0.1
RETRY_S_MAX: Final = 10.0
FAIRNESS: Final = 4
COMPLAINTS_MAX: Final = 32
"""Kinds of server errors that are logged, once each."""


class Link:
    """The state of one server as we know it. Any thread may call anything; its lock is not held across the network."""

    def __init__(self, address: Address, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.losses = 0
        self.reconnects = 0
        self.errors = 0
        self._lock = threading.Lock()
        self._complaints: set[str] = set()
        self._clock = clock
        self._down = False
        self._delay_s = 0.0
        self._retry_at_s = 0.0

    @property
    def waiting(self) -> bool:
        """Say whether the server is lost and the next attempt is not due yet."""
        return self._down and self._clock() < self._retry_at_s

    def open(self) -> Connection | None:
        """Open a connection that has answered a PING, or None: the server is lost, or it is too early to try again."""
        if self.waiting:
            return None
        began_s, losses = self._clock(), self.losses
        try:
            connection = self._probed()
        except BackendError as error:
            with self._lock:
                self._down_since(error, self._clock() - began_s)
            return None
        with self._lock:
            if self.losses != losses:  # somebody has found it lost meanwhile, and this one was opened before that
                connection.close()
                return None
            if self._down:
                self._down = False
                self.reconnects += 1
                logger.warning("%s is back", self.address)
            self._delay_s = 0.0
        return connection

    def lost(self, error: BackendError) -> None:
        """Note that an open connection has failed."""
        with self._lock:
            self.errors += 1
            if not self._down:
                self._down_since(error, 0.0)

    def complain(self, reply: Reply) -> None:
        """Say once per kind of error what the server answered; its kind is its first word."""
        text = str(reply)
        kind = text.partition(" ")[0]
        with self._lock:
            self.errors += 1
            is_new = kind not in self._complaints and len(self._complaints) < COMPLAINTS_MAX
            if is_new:
                self._complaints.add(kind)
        if is_new:
            logger.warning("%s answers: %s (said once)", self.address, text[:200])

    def _probed(self) -> Connection:
        timeout_s = min(self.timeout_s, CONNECT_TIMEOUT_S_MAX)
        connection = Connection.open(self.address, timeout_s)
        reply = connection.call(b"PING")
        if reply != "PONG":
            connection.close()
            raise BackendError(
                f"answers PING with {reply!s}" if isinstance(reply, BackendError) else "does not answer PING"
            )
        connection.set_timeout(self.timeout_s)
        return connection

    def _down_since(self, error: BackendError, took_s: float) -> None:
        if not self._down:
            self._down = True
            self.losses += 1
            logger.warning("%s is lost (%s); its blocks are misses until it is back", self.address, error)
        self._delay_s = min(max(2 * self._delay_s, RETRY_S_MIN, FAIRNESS * took_s), RETRY_S_MAX)
        self._retry_at_s = self._clock() + self._delay_s
