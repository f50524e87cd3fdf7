"""One load over two tiers: each block from near if it is there when its turn comes, else from far, in order."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final, Literal, Protocol

from kvredis.backends import base
from kvredis.backends.local import LocalBackend
from kvredis.backends.readahead import Waits
from kvredis.backends.shm.buffers import Rooms

from .staging import NearStaging

LOOK_BLOCKS_MAX: Final = 128
"""When a block has left near since it was planned, so may have others: how many of those that follow are looked at."""

Outcome = Literal["memory_hits", "disk_hits", "remote_hits", "misses"]
_Leases = Generator[base.Lease | None, None, None]


class Far(base.Backend, Protocol):
    """A backend behind a socket, which has been given a NearStaging as its staging, and tells it what was taken."""

    def touch_later(self, keys: Sequence[bytes]) -> None:
        """As Backend.touch, but it never waits and answers nothing; advice only."""
        ...

    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        """Give those of the keys that are not there by a server's own word; what is on its way counts as present."""
        ...

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None, rooms: Rooms | None = None) -> _Leases:
        """As Backend.load, of values that come to be in `rooms`, and stay there."""
        ...


class LayeredLoad:
    """For one thread: `take` every turn in order, then `close`."""

    def __init__(
        self, near: LocalBackend, far: Far, staging: NearStaging, keys: Sequence[bytes], within_s: float | None
    ) -> None:
        self.outcome: Outcome = "misses"
        """Where the block that was taken last has come from."""
        self._far = far
        self._keys = keys
        self._waits = Waits(within_s)
        self._near = near.read_ahead(keys, self._waits)
        self._filling = staging.new_load(within_s)
        self._from_far: list[_Leases | None] = [None] * len(keys)
        self._asked: list[_Leases] = []
        self._ask_far([turn for turn in range(len(keys)) if not self._near.expects(turn)])

    def take(self, turn: int) -> base.Lease | None:
        """Give the block of this turn, None for a miss."""
        lease: base.Lease | None = None
        if self._from_far[turn] is None:
            lease = self._near.take(turn)
            if lease is not None:
                self.outcome = "disk_hits" if self._near.came else "memory_hits"
                return lease
            ahead = range(turn + 1, min(turn + LOOK_BLOCKS_MAX, len(self._keys)))
            left = [each for each in ahead if self._from_far[each] is None and not self._near.expects(each)]
            self._ask_far([turn, *left])
        source = self._from_far[turn]
        if source is not None and self._waits.left_s > 0:
            with self._waits.counted():
                lease = next(source, None)
        self.outcome = "misses" if lease is None else "remote_hits"
        return lease

    def close(self) -> None:
        """Want no more: what is read ahead is let go, what was asked for is not awaited."""
        self._near.drop()
        for source in self._asked:
            source.close()

    def _ask_far(self, turns: list[int]) -> None:
        """Have these turns, in order, brought by one load, which begins when the first of them is taken."""
        if turns:
            keys = [self._keys[turn] for turn in turns]
            source = self._far.load(keys, within_s=self._waits.within_s, rooms=self._filling)
            self._asked.append(source)
            for turn in turns:
                self._from_far[turn] = source
