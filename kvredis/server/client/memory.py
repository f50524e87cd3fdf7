"""What clients hold beside the values: counted for CLIENT LIST and INFO, and bounded by maxmemory-clients.

Redis keeps these sums with every read and write. Here a client is measured when a command asks, and in turns by the
clock, all of them about once a second, since a sum for each read would cost every client something. A client that holds
more than the bound alone is found at once where it grows without limit otherwise: in a transaction's queue.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator
from typing import Final

from .client import Client, Host

log = logging.getLogger(__name__)

MEASURED_MIN: Final = 100
MEASURED_PART: Final = 10
"""How many clients are measured in a tenth of a second: so many, and at least a tenth of all."""

GONE_MIN: Final = 100
"""So many clients, and half of all, must have gone for the C library to be asked for their memory."""


def held_by_all(server: Host) -> tuple[int, int]:
    """What all clients hold, and how much of that counts in `used_memory` in addition to the values."""
    total = beside = 0
    for session in server.sessions.values():
        held = session.held()
        total += held.total
        beside += held.beside
    return total, beside


class ClientMemory:
    """The clients of one server as far as they were measured, and the bound for all of them together."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self.limit = "0"
        """maxmemory-clients: bytes, or a percentage of maxmemory; 0 = no bound."""
        self._measured: dict[Client, tuple[int, int]] = {}  # total and beside
        self._total = self._beside = 0
        self._round: Iterator[Client] = iter(())
        self._most = self._last = 0  # clients: the most since memory was last given back, those of a second ago
        self._falling = False
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's, as musl has none

    @property
    def limit_bytes(self) -> int:
        """What all clients may hold; 0 = no bound."""
        if self.limit.endswith("%"):
            return self._server.store.limit_bytes * int(self.limit[:-1]) // 100
        return int(self.limit)

    def tick(self) -> None:
        """Measure some of the clients, tell the store what they hold, and hang up on the largest beyond the bound."""
        store = self._server.store
        if not (self.limit_bytes or store.bound_bytes):
            if self._measured:
                self._measured.clear()
                self._total = self._beside = store.beside_bytes = 0
            return
        sessions = self._server.sessions
        for _ in range(max(MEASURED_MIN, len(sessions) // MEASURED_PART)):
            session = next(self._round, None)
            if session is None:
                self._round = iter(list(sessions.values()))
                break
            if session.id in sessions:
                self._measure(session)
        store.beside_bytes = self._beside
        self._evict()

    def give_back(self) -> None:
        """Give the kernel what the C library keeps of buffers of clients that have gone: a crowd that leaves would else
        be paid for until the next one. Called every second or so; takes milliseconds when there is much."""
        last, self._last = self._last, len(self._server.sessions)
        self._most = max(self._most, self._last)
        if self._most - self._last >= max(GONE_MIN, self._last):
            self._falling = True
        elif not self._falling:
            return
        else:
            self._falling = self._last < last  # and once more when the last of the crowd has gone
        self._most = self._last
        self.trim()

    def trim(self) -> None:
        """Give the kernel what neither values nor clients need; no step an entry."""
        self._server.scratches.spare.clear()
        # Thousands of freed objects that the interpreter keeps for reuse each hold a page of many others. Only a full
        # collection lets go of them: made with nothing to walk, it takes no time.
        gc.freeze()
        gc.collect()
        gc.unfreeze()
        if self._trim is not None:
            self._trim(0)

    def forget(self, session: Client) -> None:
        """Forget a client that has gone."""
        total, beside = self._measured.pop(session, (0, 0))
        self._total -= total
        self._beside -= beside

    def alone_exceeds(self, session: Client) -> bool:
        """Whether one client, which may be hung up on, holds more than all may."""
        limit = self.limit_bytes
        return bool(limit) and not session.no_evict and session.held().total >= limit

    def note_evicted(self, session: Client, nbytes: int) -> None:
        """Tell of a client that is hung up on for what it holds."""
        self._server.stats.evicted_clients += 1
        log.warning(
            "client %s closed: it holds %d bytes of what all clients may (maxmemory-clients)", session.addr, nbytes
        )

    def _measure(self, session: Client) -> None:
        held = session.held()
        self.forget(session)
        self._measured[session] = held.total, held.beside
        self._total += held.total
        self._beside += held.beside

    def _evict(self) -> None:
        limit = self.limit_bytes
        if not limit or self._total < limit:
            return
        largest_first = sorted(self._measured, key=lambda each: self._measured[each][0], reverse=True)
        for session in largest_first:
            if self._total < limit:
                return
            if not session.no_evict:
                self.note_evicted(session, self._measured[session][0])
                self.forget(session)
                session.close()
