"""What a StoreState tells the tiers beside its memory, and asks of them: the disk below it, and a GPU's memory. So it
imports neither."""

from collections.abc import Sequence
from typing import Protocol

from .disk.segment import Record
from .entry import Entry
from .stats import TierStats


class LowerTier(Protocol):
    """What a StoreState tells the tier below its memory; the lock is held in every call."""

    stats: TierStats

    def storable(self, entry: Entry) -> bool:
        """Say whether such a block can be there at all."""
        ...

    def touch_run(self, records: Sequence[Record]) -> None:
        """Note that records were used, given head first."""
        ...

    def forget(self, entry: Entry) -> None:
        """Note that an entry has left the index."""
        ...

    def supersede(self, old: Entry, entry: Entry) -> None:
        """Note that an entry has left the index, since another has come in its place."""
        ...

    def unloaded(self, entry: Entry, record: Record) -> None:
        """Note that an entry has left memory."""
        ...


class DeviceBlock(Protocol):
    """A hold on an entry's bytes on the GPU."""

    def read(self, into: memoryview, /) -> bool:
        """Copy them to memory; blocks, and takes the lock. False: they could not be had, and the entry knows it."""
        ...

    def unhold(self) -> None:
        """End the hold; the lock is held."""
        ...


class DeviceTier(Protocol):
    """What a StoreState tells the tier in GPU memory; the lock is held in every call."""

    def has(self, entry: Entry) -> bool:
        """Say whether an entry's bytes lie there."""
        ...

    def hold(self, entry: Entry) -> DeviceBlock | None:
        """Keep an entry's bytes where they lie; None when they are not there."""
        ...

    def forget(self, entry: Entry) -> None:
        """Note that an entry has left the index."""
        ...

    def unloaded(self, entry: Entry) -> None:
        """Note that an entry has left memory."""
        ...

    def renamed(self, old: tuple[bytes, int]) -> None:
        """Note that an entry has another name than this."""
        ...

    def renamed_all(self, space: int | None) -> None:
        """Note that a database, or with None all, is emptied or exchanged."""
        ...

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """Note that entries, some of which may be there, were used, given head first."""
        ...

    def end_changed(self, entry: Entry) -> None:
        """Note that an entry has another end."""
        ...

    def start_afresh(self) -> None:
        """Let go of entries whose databases were flushed."""
        ...
