"""Where a block lives now, and the two holds on it: a writer's Reservation and a reader's Lease.

An Entry's state is not stored but read off what it holds: bytes of its own (`value`) or an extent of the arena, a
record on disk, a number of leases, and whether the index still maps its key to it. An entry that left the index while
leased keeps its extent until the last lease ends; that is what makes "delete", "overwrite" and "evict" safe under a
slow reader.
"""

import contextlib
from types import TracebackType
from typing import Final, Protocol

from .database import Database, unplaced
from .disk.segment import Record
from .memory.allocator import GRAIN_BYTES, Extent

INLINE_BYTES_MAX: Final = 16 * 1024
"""A value shorter than this is one Python bytes object: it would waste a page of the arena and gain nothing there."""

PAYLOAD_OFFSET_BYTES: Final = 512
"""Payloads begin this far past a page boundary. A reply's header is some 10 bytes long; source and destination of the
kernel's copy would then differ by 1..31 bytes modulo 4096, which `rep movsb` runs at less than half speed on Zen.
512 also keeps O_DIRECT possible."""

SLACK_BYTES: Final = 2
"""Room behind each payload, so that a protocol's terminator can be received by the same system call."""

ENTRY_OVERHEAD_BYTES: Final = 256
"""What an entry costs beside its key and value (the object, two dict slots, the policy's link), for the accounts."""


def extent_length(length: int) -> int:
    """Bytes of arena for a payload of `length` bytes."""
    return -(-(PAYLOAD_OFFSET_BYTES + length + SLACK_BYTES) // GRAIN_BYTES) * GRAIN_BYTES


NOWHERE: Final = Extent(0, 0)
"""The extent of an inline value, and of one whose bytes are not in memory."""


class Entry:
    """One block: `key` in `database`, `length` bytes in `value`, else in `extent`, else in `record` on disk."""

    __slots__ = (
        "accessed_s",
        "affirmed_turn",
        "created_s",
        "database",
        "encoding",
        "expire_at_ms",
        "extent",
        "hits",
        "key",
        "leases",
        "length",
        "record",
        "tokens",
        "value",
    )

    def __init__(self, key: bytes, space: int, length: int, extent: Extent, value: bytes | None) -> None:
        self.key = key
        self.database: Database = unplaced(space)  # until the index has it
        self.length = length
        self.extent = extent
        self.value = value
        self.record: Record | None = None
        """Where the same bytes lie on disk; None for a block that is in memory alone."""
        self.expire_at_ms = 0
        """Unix time in ms at which the block is gone; 0 = never."""
        self.hits = 0
        self.leases = 0
        self.created_s = 0.0
        self.accessed_s = 0.0
        self.encoding: tuple[bytes, str] | None = None
        """What some want to know of how `value` came about: that value, so that it is void for another, and a word."""
        self.tokens = 0
        """How many tokens the block says that it holds (tensor_facts.py); 0 for what says nothing and for small
        values."""
        self.affirmed_turn = 0
        """The store's turn in which a client was told that the key is there; 0 = never."""

    @property
    def space(self) -> int:
        """The number of its database."""
        return self.database.number

    @property
    def is_resident(self) -> bool:
        """Whether the bytes are in memory."""
        return self.value is not None or self.extent is not NOWHERE

    @property
    def tier(self) -> str:
        """The fastest tier that holds the bytes."""
        return "memory" if self.is_resident else "disk"

    @property
    def memory_bytes(self) -> int:
        """What this block costs in memory, all told: the figure of MEMORY USAGE."""
        held = self.extent.length if self.value is None else self.length
        return held + len(self.key) + ENTRY_OVERHEAD_BYTES


class Writer(Protocol):
    """What a Reservation ends by: the store that gave the room."""

    def commit(self, reservation: "Reservation", expire_at_ms: int) -> bool:
        """Publish what the reservation holds; False when there is no room for it after all."""
        ...

    def abort(self, reservation: "Reservation") -> None:
        """Free what the reservation holds."""
        ...


class Holder(Protocol):
    """What a Lease ends by: the store that has the bytes."""

    def release(self, entry: Entry) -> None:
        """End one hold on an entry."""
        ...


class Reservation:
    """A writer's hold on room for one value: fill `view`, then `commit` or `abort`; a with-block aborts by default.

    Until `commit` no reader can see the bytes. The store owns the memory: no view may be used once the hold has ended.
    """

    __slots__ = ("_store", "extent", "key", "length", "made_s", "space", "view_with_slack")

    def __init__(
        self, store: Writer, key: bytes, space: int, memory: memoryview, extent: Extent, made_s: float = 0.0
    ) -> None:
        self._store: Writer | None = store
        self.made_s = made_s
        """When there was room, on the store's clock; 0 for a value of which that is not asked."""
        self.key = key
        self.space = space
        self.extent = extent
        self.length = len(memory) - SLACK_BYTES
        self.view_with_slack = memory
        """The value's bytes and SLACK_BYTES more, which a protocol may let its terminator fall into."""

    @property
    def view(self) -> memoryview:
        """Exactly the value's bytes, to be written."""
        return self.view_with_slack[: self.length]

    @property
    def offset(self) -> int | None:
        """Where in the arena the value begins; None for one that is not there."""
        return None if self.extent is NOWHERE else self.extent.offset + PAYLOAD_OFFSET_BYTES

    def shorten(self, length: int) -> None:
        """Let the value be the first `length` bytes only; the extent stays as it is."""
        assert 0 <= length <= self.length
        self.length = length

    def filled(self, start: int, stop: int) -> None:
        """Do nothing: the bytes are where they stay."""

    def commit(self, expire_at_ms: int = 0) -> bool:
        """Make the value visible under its key, in place of an older one. Ends the hold; a second call does nothing.

        False: a store that evicts no block has no room for it after all, as only a value outside the arena may find.
        The hold then goes on.
        """
        store, self._store = self._store, None
        if store is not None and not store.commit(self, expire_at_ms):
            self._store = store
            return False
        return True

    def abort(self) -> None:
        """Give the room back. Ends the hold; after a commit it does nothing."""
        store, self._store = self._store, None
        if store is not None:
            store.abort(self)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Lease:
    """A reader's hold: `view` is read-only and stays what it was, whatever happens to the key, until `release`.

    A lease taken with a time limit may be revoked by the store after that: its view then raises ValueError on use,
    and `held` is False. A reader that has to know asks `held` after it has used the bytes.
    """

    __slots__ = ("_store", "entry", "view")

    def __init__(self, store: Holder, entry: Entry, view: memoryview) -> None:
        self._store: Holder | None = store
        self.entry = entry
        self.view = view

    @property
    def key(self) -> bytes:
        """The key under which the block was found."""
        return self.entry.key

    @property
    def length(self) -> int:
        """Bytes of payload."""
        return self.entry.length

    @property
    def offset(self) -> int | None:
        """Where in the arena the value begins; None for one that is not there."""
        extent = self.entry.extent
        return None if extent is NOWHERE else extent.offset + PAYLOAD_OFFSET_BYTES

    @property
    def held(self) -> bool:
        """Whether the bytes have been that value until now: neither released nor revoked."""
        return self._store is not None

    def release(self) -> None:
        """End the hold; a second call does nothing."""
        store, self._store = self._store, None
        if store is not None:
            store.release(self.entry)

    def revoke(self) -> tuple[Entry, ...]:
        """For the store alone, under its lock: end the hold without its holder; of what there was one until now."""
        if self._store is None:
            return ()
        self._store = None
        with contextlib.suppress(BufferError):  # the reader has made a tensor of it: it asks `held`
            self.view.release()
        return (self.entry,)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class LeaseRun:
    """Holds that were taken together and have one time limit, for clients that ask for many at a time and read the
    arena by themselves: a list, where a Lease for each would cost an object and a view. storage/lease_many.py makes and
    ends them.

    `entries` has an entry for each hold that goes on, and None for each that has ended or never was.
    """

    __slots__ = ("entries", "until_s")

    def __init__(self, entries: list[Entry | None], until_s: float) -> None:
        self.entries = entries
        self.until_s = until_s
        """When the store may revoke them, on its own clock."""

    @property
    def held(self) -> bool:
        """Whether any of them goes on."""
        return any(self.entries)

    def revoke(self) -> tuple[Entry, ...]:
        """For the store alone, under its lock: end them without their holder; of what there was one until now."""
        entries = tuple(filter(None, self.entries))
        self.entries[:] = [None] * len(self.entries)
        return entries
