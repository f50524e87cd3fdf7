"""A share of a load whose values lie in the server's memory: leases are asked for in batches, ahead of the reading.

A lease is the value itself when its reader shall have it; when a tier of ours is to keep it, it is copied once, to
where it stays. What was leased ahead and has waited too long for its reader is leased again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from kvredis.backends.remote.pipeline import DRAIN_S, DRAIN_S_MIN, GetPipeline
from kvredis.backends.resp.connection import Allocate
from kvredis.storage.errors import BackendError
from kvredis.storage.memory.copy import copy

from .buffers import RemoteLease
from .connection import AttachedConnection
from .leases import SharedLease

TOGETHER_MAX: Final = 64
TOGETHER_BYTES: Final = 256 * 1024 * 1024
"""Values leased by one command: what of them is on the server's disk is brought before any of them is answered. One
value while no length is known, which may be half of what the server has."""
LEASES_MAX: Final = 1024
LEASED_BYTES: Final = 2 * 1024 * 1024 * 1024
"""Values asked for ahead, by several commands sent together. WHY so many: beside an engine that computes in Python each
wait, however short, takes the interpreter's lock from it anew, so a load is to have few. What is leased the server
cannot give to others."""
ARENA_PARTS: Final = (4, 32)
"""One command leases a quarter of the server's arena at most, several together a 32nd, or as much where the server has
no disk. WHY so little: what is given back waits behind commands that were sent before, and one of these may wait for
room that other clients hold in the same way. With an eighth each, ten loads from disk at once stood still until the
server gave up. WHY so much without: 60 leases took 3 ms and not 0.8, waiting for the next eight again and again."""
ASKED_BYTES: Final = 128 * 1024
"""Of commands ahead: a socket takes them all while no thread reads what it has of answers, which may be values."""
KEY_OVERHEAD_BYTES: Final = 16
"""What a command has around a key."""


class LeasePipeline(GetPipeline):
    """As GetPipeline. `take` gives a lease, or with `keep` copies the value into the reader's room."""

    __slots__ = ("_ahead", "_answers", "_attached", "_batches", "_keep", "_longest", "_most", "_together", "next_bytes")

    def __init__(
        self, connection: AttachedConnection, keys: Iterable[bytes], *, keep: bool, next_bytes: int = -1
    ) -> None:
        """`next_bytes` is what the load before left."""
        super().__init__(connection, keys)
        self.next_bytes = next_bytes
        """How long the longest of the next load's values most likely is; -1: no value was leased."""
        self._attached = connection
        self._keep = keep
        self._most = max(1, ASKED_BYTES // (max(map(len, self.unasked), default=0) + KEY_OVERHEAD_BYTES))
        self._ahead = self._together = 1
        self._longest = -1
        if next_bytes >= 0:
            self._expect(next_bytes)
        self._batches: deque[tuple[Sequence[bytes], float]] = deque()  # asked for: keys, and until when leases hold
        self._answers: deque[tuple[bytes, SharedLease | bytes | BackendError | None]] = deque()

    def ask(self, ahead: int) -> None:
        """Ask for more, as soon as no more than half of what may be is under way; `ahead` is for bodies on a socket."""
        if self.unasked and self.asked <= self._ahead // 2:
            keys = [self.unasked.popleft() for _ in range(min(self._ahead - self.asked, len(self.unasked)))]
            batches = [keys[first : first + self._together] for first in range(0, len(keys), self._together)]
            until_s = self._attached.ask_leases(*batches)
            self._batches += [(batch, until_s) for batch in batches]
            self.asked += len(keys)

    def take(self, allocate: Allocate) -> int | SharedLease | RemoteLease | BackendError | None:
        """Give the next value: as a lease, or its length when it has been copied into what `allocate` lent. What is
        copied is looked at afterwards: BackendError when the server has ended the lease meanwhile. Takes as long as one
        answer may in all, however many it has to read."""
        until_s = time.monotonic() + self.connection.timeout_s
        if not self._answers:
            self._read_batch()
        key, answer = self._answers.popleft()
        self.asked -= 1
        if isinstance(answer, SharedLease) and not answer.lasts:
            answer.release()
            answer = self._ask_again(key, until_s)
        elif _is_share_used(answer):
            answer = self._ask_again(key, until_s)  # by now those before it are back
        if _is_share_used(answer):  # the reader holds too many, or the value is half of the arena
            self._wait_until(until_s)
            self.connection.send((b"GET", key))
            return self.connection.read_bulk_into(allocate)
        if answer is None or isinstance(answer, BackendError):
            return answer
        value = memoryview(answer) if isinstance(answer, bytes) else answer.view
        if len(value) > self._longest:
            self._longest = len(value)
            self._expect(max(self._longest, self.next_bytes))
        if isinstance(answer, bytes):
            return self._keep_copy(value, allocate) if self._keep else RemoteLease(value, _end)
        return self._copied(answer, allocate) if self._keep else answer

    def at_hand(self, key: bytes) -> SharedLease | None:
        """The same without a wait or a question, of `key`, where its answer has come and `ask` has nothing to do; None,
        and nothing has changed, if it is anything but a lease that lasts. Most values of a load are taken so."""
        if self._keep or not self._answers or (self.unasked and self.asked <= self._ahead // 2):
            return None
        name, answer = self._answers[0]
        if name != key or not isinstance(answer, SharedLease) or answer.length > self._longest or not answer.lasts:
            return None
        if not self.connection.usable:  # with which it has ended
            return None
        self._answers.popleft()
        self.asked -= 1
        return answer

    def settle(self, left_s: float) -> None:
        """Bring the connection to rest after the load: give back what was not taken. The leases that have been taken
        end with the connection, so it is closed only when the server does not answer."""
        until_s = time.monotonic() + min(left_s, DRAIN_S)
        try:
            while self._batches and self.connection.usable:
                self._wait_until(until_s)
                self._read_batch()
        except BackendError:
            self.connection.close()
        for _, answer in self._answers:
            if isinstance(answer, SharedLease):
                answer.release()
        self._answers.clear()
        if self._longest >= 0:
            # Not forgotten at once: short values now are no reason to ask for too many long ones next.
            self.next_bytes = max(self._longest, self.next_bytes // 2)
        self._attached.tell_ended()

    def _expect(self, length: int) -> None:
        """Ask from now on as for values of `length` bytes."""
        together, ahead = leases_for(length, self._attached.arena.nbytes, self._attached.waits_for_disk)
        self._together, self._ahead = min(together, self._most), min(ahead, self._most)

    def _read_batch(self) -> None:
        keys, until_s = self._batches.popleft()
        answers = self._attached.read_leases(until_s, len(keys))
        self._answers.extend(zip(keys, answers, strict=True))

    def _ask_again(self, key: bytes, until_s: float) -> SharedLease | bytes | BackendError | None:
        """Lease one key now; the answers that are under way come first, and wait for their turn."""
        while self._batches:
            self._wait_until(until_s)
            self._read_batch()
        self._wait_until(until_s)
        return self._attached.read_leases(self._attached.ask_leases([key]), 1)[0]

    def _wait_until(self, until_s: float) -> None:
        """Wait for the next answer no longer than that."""
        self.connection.set_timeout(max(until_s - time.monotonic(), DRAIN_S_MIN))

    def _copied(self, lease: SharedLease, allocate: Allocate) -> int | None:
        with lease:
            length = self._keep_copy(lease.view, allocate)
            if lease.held:
                return length
        if not self._attached.is_open:
            raise self.connection.broken("closed by the server")
        return None  # a copy that has taken longer than leases last

    def _keep_copy(self, value: memoryview, allocate: Allocate) -> int:
        room = allocate(len(value))
        if room is not None:
            assert isinstance(room, memoryview)  # a tier of ours lends no other
            copy(room, value)
        return len(value)


def leases_for(length: int, arena_bytes: int, waits_for_disk: bool) -> tuple[int, int]:
    """How many values of `length` bytes to lease by one command, and how many ahead in all."""
    together_bytes = min(TOGETHER_BYTES, arena_bytes // ARENA_PARTS[0])
    ahead_bytes = max(together_bytes, min(LEASED_BYTES, arena_bytes // ARENA_PARTS[waits_for_disk]))
    together = max(1, min(TOGETHER_MAX, together_bytes // max(length, 1)))
    return together, max(together, min(LEASES_MAX, ahead_bytes // max(length, 1)))


def _is_share_used(answer: SharedLease | bytes | BackendError | None) -> bool:
    """Say whether a client may lease no more, as long as it holds what it holds."""
    return isinstance(answer, BackendError) and str(answer).startswith("OOM")


def _end() -> None:
    """A value that has come whole needs no hold."""
