"""The store's counters: plain integers that only grow, written under the store's lock, read by whoever reports."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class StoreStats:
    """Counts since start; bytes are payload bytes."""

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

    def as_dict(self) -> dict[str, int]:
        """Every counter by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def reset(self) -> None:
        """All to zero: CONFIG RESETSTAT."""
        for field in fields(self):
            setattr(self, field.name, 0)
