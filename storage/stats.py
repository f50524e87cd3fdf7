"""The store's counters: integers that only grow, and times, written under the store's lock, read by INFO, /metrics and
benches."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from ._core import Times as Times

POWERS = 64
"""Times are counted by their bit length in ns; one of 2**63 ns does not occur."""


@dataclass(slots=True)
class Counters:
    """Counts since start, or since they were reset."""

    def as_dict(self) -> dict[str, int]:
        """Every counter by name, without the times."""
        return dict(self._counters())

    def reset(self) -> None:
        """All to zero: CONFIG RESETSTAT."""
        for name, _ in self._counters():
            setattr(self, name, 0)
        for each in fields(self):
            times = getattr(self, each.name)
            if isinstance(times, Times):
                times.reset()

    def _counters(self) -> Iterator[tuple[str, int]]:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int):
                yield each.name, value


@dataclass(slots=True)
class StoreStats(Counters):
    """What became of values; bytes are payload bytes."""

    hits: int = 0
    hit_tokens: int = 0
    """Tokens of the blocks in the arena that were handed out whole, as far as they say how many they hold."""
    misses: int = 0
    created: int = 0
    """Values stored under a key that had none."""
    overwritten: int = 0
    """Values stored in place of an older one."""
    refused: int = 0
    """Values for which there was no room: everything evictable was leased, or the value exceeds the arena."""
    aborted: int = 0
    """Reservations given back without a commit."""
    evicted: int = 0
    evicted_bytes: int = 0
    evicted_away: int = 0
    """Those of them that had left memory before and had to leave the disk, or were lost there."""
    expired: int = 0
    deleted: int = 0
    flushed: int = 0
    """Blocks that left with all others of their database."""
    leased_bytes: int = 0
    """Of blocks that clients read in the arena by themselves."""
    leases_revoked: int = 0
    """Leases ended by their time limit, not by their holder."""
    receiving: Times = field(default_factory=Times)
    """From there being room in the arena for a long value (store.TIMED_BYTES_MIN) to its being visible."""


@dataclass(slots=True)
class TierStats(Counters):
    """What went between memory and disk; bytes are payload bytes."""

    spilled: int = 0
    """Blocks written to disk."""
    spilled_bytes: int = 0
    promoted: int = 0
    """Blocks brought back into memory."""
    promoted_bytes: int = 0
    demanded: int = 0
    """Those of them for which a caller waited."""
    demanded_tokens: int = 0
    """Tokens that these hold, as far as they say."""
    unloaded: int = 0
    """Blocks that left memory without a write, since the disk had them."""
    spill_dropped: int = 0
    """Blocks that were to be kept and left unwritten, because the disk was too slow, full or broken."""
    spill_failed: int = 0
    """Writes that came to nothing."""
    spill_waits: int = 0
    """Values that had to wait for the disk to make room."""
    lost: int = 0
    """Blocks on disk that could not be read, or were not what had been written: misses."""
    spilling: Times = field(default_factory=Times)
    """Writes to disk, several small blocks at a time being one."""
    promoting: Times = field(default_factory=Times)
    """Reads from disk, with finding room for them."""
