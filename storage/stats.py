"""The store's counters: integers that only grow, and times, written under the store's lock, read by INFO, /metrics and
benches."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from ._core import StoreCounts
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


class StoreStats(StoreCounts):
    """What became of values: the counters that _core.pyi lists."""

    __slots__ = ()

    def as_dict(self) -> dict[str, int]:
        """Every counter by name, without the times."""
        return {name: getattr(self, name) for name in self.names}

    def reset(self) -> None:
        """All to zero: CONFIG RESETSTAT."""
        for name in self.names:
            setattr(self, name, 0)
        self.receiving.reset()


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
