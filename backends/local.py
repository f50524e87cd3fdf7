"""The backend of an engine that keeps its blocks in its own process: the Store, under the engine's verbs."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from kvredis.storage.entry import Lease, Reservation
from kvredis.storage.store import Store


class LocalBackend:
    """A Store that this backend owns. With `keep` false it stays empty: local_cpu is off and there is nowhere else."""

    def __init__(self, store: Store, *, keep: bool = True) -> None:
        self.store = store
        self.keep = keep
        self._closed = False

    def match(self, keys: Sequence[bytes]) -> int:
        """As Backend.match."""
        return self.store.match(keys)

    def reserve(self, key: bytes, length: int) -> Reservation | None:
        """As Backend.reserve."""
        return self.store.reserve(key, length) if self.keep else None

    def load(self, keys: Sequence[bytes]) -> Generator[Lease | None, None, None]:
        """As Backend.load; the leases are on the store's own bytes and cost no room."""
        for key in keys:
            yield self.store.lease(key)

    def touch(self, keys: Sequence[bytes]) -> int:
        """As Backend.touch."""
        return self.store.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        """As Backend.delete."""
        return self.store.delete(keys)

    def prefetch(self, keys: Sequence[bytes]) -> int:
        """As Backend.prefetch: what is here is in memory already."""
        return 0

    def flush(self) -> int:
        """As Backend.flush: a commit is done when it returns."""
        return 0

    def stats(self) -> dict[str, int | float | str]:
        """Give the store's counters, and what it holds."""
        return {
            "kind": "local",
            "used_bytes": self.store.used_bytes,
            "capacity_bytes": self.store.arena.nbytes,
            **self.store.stats.as_dict(),
        }

    def close(self) -> None:
        """As Backend.close."""
        if not self._closed:
            self._closed = True
            self.store.close()
