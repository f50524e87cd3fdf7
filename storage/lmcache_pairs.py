"""The two keys of a chunk that LMCache's redis:// connector stores, data and metadata: eviction keeps or drops both.

Its lookup asks for `KEYmetadata` and its load then reads `KEYkv_bytes` (lmcache, redis_connector.py), which it stores
first. Metadata without its data would be a hit that cannot be loaded. So the store leases and evicts the two together,
and refuses metadata whose data has left meanwhile.
"""

from typing import Final

DATA: Final = b"kv_bytes"
_OTHER: Final = {DATA: b"metadata", b"metadata": DATA}
_END_BYTES: Final = 8

DEPARTED_MAX: Final = 4096
DEPARTED_TURNS: Final = 600
"""How many data keys that left before their metadata had come are remembered, and for how many turns."""


def other_half(key: bytes) -> bytes | None:
    """The key of the other half of a chunk, if `key` has the name of a half."""
    end = _OTHER.get(key[-_END_BYTES:])
    return None if end is None else key[:-_END_BYTES] + end


class Departed:
    """The data keys that were evicted while their metadata was still on its way."""

    def __init__(self) -> None:
        self.turns: dict[tuple[bytes, int], int] = {}
        """When each of them left, the longest ago first."""

    def note(self, key: bytes, space: int, turn: int) -> None:
        """Remember a half that has left alone, if it is data."""
        if key.endswith(DATA):
            self.turns.pop((key, space), None)
            self.turns[key, space] = turn
            if len(self.turns) > DEPARTED_MAX:
                del self.turns[next(iter(self.turns))]

    def left_behind(self, key: bytes, space: int, turn: int) -> bool:
        """Whether `key`, which is being stored, is metadata of data that has left; such data itself is back now."""
        self.turns.pop((key, space), None)
        other = other_half(key)
        departed = None if other is None else self.turns.pop((other, space), None)
        return departed is not None and turn - departed < DEPARTED_TURNS
