"""Connections with requests under way: SETs whose answers are still out, and GETs asked for ahead of their reading.

A pipeline is used for one of the two only, so that no reply has to be put aside. Errors of the connection pass through:
BackendError, and the pipeline is done for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from kvredis.backends import base
from kvredis.backends.resp.connection import Allocate, Connection, Reply
from kvredis.backends.shm.buffers import RemoteReservation
from kvredis.backends.shm.connection import AttachedConnection
from kvredis.storage.errors import BackendError
from kvredis.storage.memory.arena import Arena

SETS_UNANSWERED_MAX: Final = 64
"""Answers are short, so this many fit into any socket buffer; reading half of them at once saves system calls."""
SETS_UNANSWERED_BYTES: Final = 8 * 1024 * 1024
"""Of values on a pipeline, beyond the one sent last: what the kernel holds on both sides, and no memory to spare."""
AHEAD_MIN: Final = 2
"""GETs asked for ahead on a pipeline: one being sent by the server while the next is known to it."""
AHEAD_MAX: Final = 64
AHEAD_BYTES: Final = 32 * 1024 * 1024
"""Bodies asked for ahead, over all pipelines of a load: what a server may have to hold, leased or copied, for us."""
DRAIN_BYTES_MAX: Final = 4 * 1024 * 1024
"""What is read and dropped to save a connection whose load was given up; beyond it a new one is cheaper."""
DRAIN_S: Final = 0.1
"""How long a server may keep us waiting for that."""
DRAIN_S_MIN: Final = 0.001


class Touch:
    """Keys to be touched in between the SETs, head of the prefix first, in parts that fit one command each."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Sequence[bytes]]) -> None:
        self.parts = parts

    @property
    def keys(self) -> Iterator[bytes]:
        """All of them."""
        return chain.from_iterable(self.parts)


class OpenValue:
    """A value of which ranges were sent before it is whole: KV.RESERVE's `number` for it, on one pipeline."""

    __slots__ = ("number", "pipeline", "sent")

    def __init__(self, pipeline: SetPipeline, number: int) -> None:
        self.pipeline = pipeline
        self.number = number
        self.sent: list[tuple[int, int]] = []

    def left(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Give the ranges of the value that have not been sent, in order."""
        at = 0
        for start, stop in (*sorted(self.sent), (nbytes, nbytes)):
            if at < start:
                yield at, start
            at = stop


class SetPipeline:
    """SETs, ranges of values, and touches, in flight on one connection."""

    __slots__ = ("_borrower", "_committing", "connection", "unanswered", "unanswered_bytes")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._borrower: AttachedConnection | None = None
        self._committing: dict[RemoteReservation, OpenValue] = {}  # whose KV.COMMIT is unanswered
        self.unanswered: deque[RemoteReservation | Touch | None] = deque()  # None: an answer that settles nothing
        self.unanswered_bytes = 0

    @property
    def is_full(self) -> bool:
        """Say whether it is time to read some answers."""
        count = len(self.unanswered)
        return count >= SETS_UNANSWERED_MAX or (count > 1 and self.unanswered_bytes > SETS_UNANSWERED_BYTES)

    def lend(self, arena: Arena) -> BackendError | None:
        """Let a server on this host take values out of `arena` itself; or say why it will not, and send them."""
        connection = self.connection
        if not isinstance(connection, AttachedConnection):
            return None
        reply = connection.lend(arena)
        self._borrower = connection if connection.borrows else None
        return reply if isinstance(reply, BackendError) else None

    def send(self, item: RemoteReservation | Touch) -> None:
        """Send a SET, or a PUT of what was lent, or a TOUCH, its tail first: what is touched last stays longest."""
        if isinstance(item, Touch):
            self.unanswered += [None] * (len(item.parts) - 1)
            self.unanswered.append(item)
            self.connection.send_many((b"TOUCH", *part) for part in item.parts[::-1])
        else:
            if item.asking:
                self.unanswered.append(None)
                self.connection.send((b"ASKING",))
            self.unanswered.append(item)  # before it is sent: one that fails halfway is never answered
            self.unanswered_bytes += item.nbytes
            if item.offset is not None and self._borrower is not None:
                self._borrower.send_put(item.key, item.offset, item.nbytes)
            else:
                self.connection.send_set(item.key, *item.pieces)

    def open_value(self, item: RemoteReservation) -> OpenValue | None:
        """Have the server keep room for a value that comes in parts, and wait for its answer, as the only one that is
        out. None: it copies nothing out of our memory, or has no room now."""
        if item.offset is None or self._borrower is None:
            return None
        number = self.connection.call(b"KV.RESERVE", item.key, b"%d" % item.nbytes)
        return OpenValue(self, number) if isinstance(number, int) else None

    def send_range(self, opened: OpenValue, item: RemoteReservation, start: int, stop: int) -> None:
        """Have the server copy bytes of a value."""
        assert self._borrower is not None
        assert item.offset is not None
        opened.sent.append((start, stop))
        self.unanswered.append(None)
        self._borrower.send_fill(opened.number, start, item.offset + start, stop - start)

    def send_rest(self, opened: OpenValue, item: RemoteReservation) -> None:
        """Send what is left of a value, and have it seen."""
        for start, stop in opened.left(item.nbytes):
            self.send_range(opened, item, start, stop)
        self.unanswered.append(item)
        self.unanswered_bytes += item.nbytes
        self._committing[item] = opened
        self.connection.send((b"KV.COMMIT", b"%d" % opened.number))

    def give_up(self, opened: OpenValue) -> None:
        """Want no more of a value of which parts were sent."""
        self.unanswered.append(None)
        self.connection.send((b"KV.ABORT", b"%d" % opened.number))

    def answers(self, keep: int, keep_bytes: int) -> Iterator[tuple[RemoteReservation | Touch | None, Reply]]:
        """Read answers until `keep` are left, and `keep_bytes` of values or one value; waits for them. A server keeps
        the room of a commit that it refuses: it is told that the value is not wanted any more."""
        while len(self.unanswered) > keep or (len(self.unanswered) > 1 and self.unanswered_bytes > keep_bytes):
            reply = self.connection.read()
            item = self.unanswered.popleft()
            opened = None
            if isinstance(item, RemoteReservation):
                self.unanswered_bytes -= item.nbytes
                opened = self._committing.pop(item, None)
            yield item, reply
            if opened is not None and isinstance(reply, BackendError):
                self.give_up(opened)


class GetPipeline:
    """A share of a load's keys on one connection: asked for in batches, some way ahead of the reading."""

    __slots__ = ("asked", "connection", "unasked")

    def __init__(self, connection: Connection, keys: Iterable[bytes]) -> None:
        self.connection = connection
        self.unasked = deque(keys)
        self.asked = 0

    def ask_aside(self, key: bytes, *, asking: bool) -> None:
        """Ask for one more key, the next to be taken, on a pipeline of which nothing else is asked."""
        self.connection.send_many(([(b"ASKING",)] if asking else []) + [(b"GET", key)])
        self.asked += 1
        if asking:
            self.connection.read()

    def ask(self, ahead: int) -> None:
        """Ask for more, as soon as no more than half of `ahead` is under way."""
        if self.unasked and self.asked <= ahead // 2:
            batch = [self.unasked.popleft() for _ in range(min(ahead - self.asked, len(self.unasked)))]
            self.connection.send_many((b"GET", key) for key in batch)
            self.asked += len(batch)

    def take(self, allocate: Allocate) -> int | base.Lease | BackendError | None:
        """Read the next body; as Connection.read_bulk_into. Or give it as a lease, if it need not be read."""
        got = self.connection.read_bulk_into(allocate)
        self.asked -= 1
        return got

    def settle(self, left_s: float) -> None:
        """Bring the connection to rest after the load: read what is still owed if that is cheap, else close it."""
        left = DRAIN_BYTES_MAX

        def drop(length: int) -> None:
            nonlocal left
            left -= length
            if left < 0:
                raise BackendError("too much to drain")

        until_s = time.monotonic() + min(left_s, DRAIN_S)
        try:
            while self.asked and self.connection.usable:
                self.connection.set_timeout(max(until_s - time.monotonic(), DRAIN_S_MIN))
                self.take(drop)
        except BackendError:
            self.connection.close()


def ahead_for(length: int, pipelines: int) -> int:
    """How many bodies of `length` bytes to ask for ahead on each of `pipelines`."""
    return max(AHEAD_MIN, min(AHEAD_MAX, AHEAD_BYTES // max(length * pipelines, 1)))
