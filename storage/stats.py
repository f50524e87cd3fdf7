"""The store's counters: plain integers that only grow, written under the store's lock, read by whoever reports."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Counts since start, or since they were reset."""

    def as_dict(self) -> dict[str, int]:
        """Every counter by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def reset(self) -> None:
        """All to zero: CONFIG RESETSTAT."""
        for field in fields(self):
            setattr(self, field.name, 0)


@dataclass(slots=True)
class StoreStats(Counters):
    """What became of values; bytes are payload bytes."""

    hits: int = 0
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
    expired: int = 0
    deleted: int = 0
    leases_revoked: int = 0
    """Leases ended by their time limit, not by their holder."""


@dataclass(slots=True)
class TierStats(Counters):
    """What went between memory and disk; bytes are payload bytes."""

    spilled: int = 0
    """Blocks written to disk."""
    spilled_bytes: int = 0
    promoted: int = 0
    """Blocks brought back into memory."""
    promoted_bytes: int = 0
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
