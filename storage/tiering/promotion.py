"""Blocks that somebody waits for: on their way into memory, and held there until he has used them.

Without the hold a block could be evicted between its arrival and the moment when whoever waited for it runs on, and a
crowd that wants more than memory holds would push out each other's blocks for ever.
"""

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvredis.storage.entry import Lease

from .transfers import State, Transfer

if TYPE_CHECKING:
    from kvredis.storage.store import Store

Promote = Callable[[bytes, int, Callable[[Transfer[None]], None]], Transfer[None] | None]


class Bringing:
    """One wait for some blocks. Any thread may call any method; `done` is called once, without a lock held, unless
    `release` came first."""

    __slots__ = ("_done", "_leases", "_left", "_lock", "_released", "_store", "_transfers", "refused")

    def __init__(self, store: "Store", done: "Callable[[Bringing], None]") -> None:
        self.refused = False
        """Memory or the queue had no room for one of them: it may have later."""
        self._store = store
        self._done = done
        self._lock = threading.Lock()
        self._leases: list[Lease] = []
        self._transfers: set[Transfer[None]] = set()
        self._left = 1  # transfers that are not over, and `start`
        self._released = False

    def start(self, names: Iterable[tuple[bytes, int]], promote: Promote) -> None:
        """Hold the blocks that are in memory and send for the others; those that are nowhere are left out."""
        try:
            for name in names:
                if not self._hold(*name):
                    self._send_for(name, promote)
        except BaseException:
            self.release()  # the caller has nothing to release it by
            raise
        self._one_less()

    def _send_for(self, name: tuple[bytes, int], promote: Promote) -> None:
        with self._lock:
            self._left += 1
        transfer = promote(*name, self._arrived)
        if transfer is None:  # it has come or gone a moment ago
            self._hold(*name)
            self._one_less()
            return
        with self._lock:
            if not transfer.is_over:
                self._transfers.add(transfer)

    def release(self) -> None:
        """End the holds, and want no more of what has not come; again is nothing."""
        with self._lock:
            self._released = True
            leases, self._leases = self._leases, []
            transfers, self._transfers = self._transfers, set()
        for transfer in transfers:
            transfer.withdraw(self._arrived, None if self._store.keep else self._let_go)
        for lease in leases:
            lease.release()

    def _hold(self, key: bytes, space: int) -> bool:
        lease = self._store.peek(key, space)
        if lease is None:
            return False
        with self._lock:
            if not self._released:
                self._leases.append(lease)
                return True
        lease.release()
        return True

    def _arrived(self, transfer: Transfer[None]) -> None:
        with self._lock:
            self._transfers.discard(transfer)
            self.refused = self.refused or transfer.state is State.REFUSED
        if not self._released:
            self._hold(transfer.key, transfer.space)
        elif not self._store.keep:
            self._let_go(transfer)
        self._one_less()

    def _let_go(self, transfer: Transfer[None]) -> None:
        """What was under way has come though nobody wants it: a memory that keeps nothing lets it go as a hold ends."""
        lease = self._store.peek(transfer.key, transfer.space) if transfer.state is State.DONE else None
        if lease is not None:
            lease.release()

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1
            told = self._left == 0 and not self._released
        if told:
            self._done(self)
