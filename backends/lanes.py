"""Connections with requests under way: SETs whose answers are still out, and GETs asked for ahead of their reading.

A lane is used for one of the two only, so that all replies on it are of one kind and none has to be put aside. Errors
of the connection pass through: BackendError, and the lane is done for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from kvredis.storage.errors import BackendError

from .connection import Allocate, Connection, Reply

SETS_UNANSWERED_MAX: Final = 64
"""Answers are short, so this many fit into any socket buffer; reading half of them at once saves system calls."""
AHEAD_MIN: Final = 2
"""GETs asked for ahead on a lane: one being sent by the server while the next is known to it."""
AHEAD_MAX: Final = 64
AHEAD_BYTES: Final = 32 * 1024 * 1024
"""Bodies asked for ahead, over all lanes of a load: what a server may have to hold, leased or copied, for us."""
DRAIN_BYTES_MAX: Final = 4 * 1024 * 1024
"""What is read and dropped to save a connection whose load was given up; beyond it a new one is cheaper."""


class SetLane:
    """SETs in flight on one connection."""

    __slots__ = ("connection", "unanswered")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.unanswered = 0

    def send(self, key: bytes, view: memoryview) -> None:
        """Send one SET; on return `view` is the caller's again."""
        self.unanswered += 1  # before it is sent: one that fails halfway is never answered and counts as refused
        self.connection.send_set(key, view)

    def answers(self, keep: int = 0) -> Iterator[Reply]:
        """Read answers until `keep` are left; waits for them."""
        while self.unanswered > keep:
            reply = self.connection.read()
            self.unanswered -= 1
            yield reply


class GetLane:
    """A share of a load's keys on one connection: asked for in batches, some way ahead of the reading."""

    __slots__ = ("asked", "connection", "unasked")

    def __init__(self, connection: Connection, keys: Iterable[bytes]) -> None:
        self.connection = connection
        self.unasked = deque(keys)
        self.asked = 0

    def ask(self, ahead: int) -> None:
        """Ask for more, as soon as no more than half of `ahead` is under way."""
        if self.unasked and self.asked <= ahead // 2:
            batch = [self.unasked.popleft() for _ in range(min(ahead - self.asked, len(self.unasked)))]
            self.connection.send_many((b"GET", key) for key in batch)
            self.asked += len(batch)

    def take(self, allocate: Allocate) -> int | BackendError | None:
        """Read the next body; as Connection.read_bulk_into."""
        got = self.connection.read_bulk_into(allocate)
        self.asked -= 1
        return got

    def settle(self) -> bool:
        """Bring the connection to rest after the load: read what is still owed if that is cheap, else close it."""
        left = DRAIN_BYTES_MAX

        def drop(length: int) -> None:
            nonlocal left
            left -= length
            if left < 0:
                raise BackendError("too much to drain")

        try:
            while self.asked and self.connection.usable:
                self.take(drop)
        except BackendError:
            self.connection.close()
        return self.connection.usable


def ahead_for(length: int, lanes: int) -> int:
    """How many bodies of `length` bytes to ask for ahead on each of `lanes`."""
    return max(AHEAD_MIN, min(AHEAD_MAX, AHEAD_BYTES // max(length * lanes, 1)))
