"""A stream of GETs over several connections at once, as an engine gets it: the product's own backend, threads and all.

The backend is told where each body shall be, as a nearer tier tells it: in the target, so that nothing is copied behind
the clock's back, and the bytes are compared like any other arm's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

from kvredis.backends.config.url import Address
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.bench.core.errors import BenchError
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store as Staging

from .arms import Arm, Store
from .blocks import Batch, Blocks, Turn
from .result import STRIPED

CONNECTIONS: Final = 4
_STAGING_BLOCKS: Final = 256
"""The backend receives at once what is an eighth of its memory at most; none of it is ever touched here."""


class Place:
    """Room for one body: a place in the target, which is nobody's to give back. A base.Reservation."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def commit(self) -> None:
        """The body has come."""

    def abort(self) -> None:
        """It has not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Places:
    """The Rooms of one load: where each key's body belongs."""

    def __init__(self, places: Mapping[bytes, memoryview]) -> None:
        self._places = places

    def reserve(self, key: bytes, length: int) -> Place | None:
        """As Rooms.reserve; a body of another length has no place."""
        view = self._places[key]
        return Place(view) if len(view) == length else None

    reserve_ahead = reserve


class Striped:
    """A backend with several connections to one server; close it in the end."""

    def __init__(self, address: Address, blocks: Blocks) -> None:
        self._blocks = blocks
        self._staging = Staging(Arena.create(_STAGING_BLOCKS * max(blocks.size_bytes, 4096), HugepageMode.OFF))
        self._backend = RemoteBackend(address, self._staging, connections=CONNECTIONS)

    def arm(self, transport: str, store: Store) -> Arm:
        """Give the arm."""
        return Arm(STRIPED, transport, "read", store, self._run)

    def close(self) -> None:
        """Hang up, and give the memory back."""
        self._backend.close()  # closes the staging memory as well

    def _run(self, turn: Turn, _shift: int) -> None:
        for batch in turn.batches:
            while batch:
                batch = self._load(batch)

    def _load(self, batch: Batch) -> Batch:
        """Load a batch; what is left are places whose key has another place in it."""
        keys, place = self._blocks.keys, self._blocks.place
        first = dict(reversed(batch))
        places = {keys[source]: place(to) for source, to in first.items()}
        for key, lease in zip(places, self._backend.load(list(places), rooms=Places(places)), strict=True):
            if lease is None:
                raise BenchError(f"no block came for {key.decode()}, or one of another length")
            lease.release()
        return [(source, to) for source, to in batch if first[source] != to]
