"""An engine that stores after every step asks for the keys of one prompt again and again, each time a little longer.

What was hashed for it before is not hashed again: the chain goes on from where the latest prompts and this one part.
"""

from bisect import bisect_left

from .keys import TOKEN_BYTES, ChunkKey, keys_of_bytes
from .layout import ChunkLayout

PROMPTS_MAX = 8
"""Prompts whose keys are kept: those of a few requests that are prefilled in turns. 100,000 tokens take about 1 MB."""


class RecentKeys:
    """The keys of the latest prompts of one layout. Raises ValueError for an unknown algorithm, when it is asked."""

    def __init__(self, layout: ChunkLayout, *, unfull: bool, algorithm: str) -> None:
        self._layout = layout
        self._unfull = unfull
        self._algorithm = algorithm
        self._step = layout.chunk_tokens * TOKEN_BYTES
        self._kept: list[tuple[bytes, list[ChunkKey]]] = []  # the latest is the last

    def keys(self, data: bytes) -> list[ChunkKey]:
        """As keys_of_bytes; the list is not the caller's to change."""
        place, shared = self._nearest(data)
        known, keys = (b"", []) if place is None else self._kept[place]
        if data != known:
            keys = keys_of_bytes(
                data, self._layout, unfull=self._unfull, algorithm=self._algorithm, known=keys[:shared]
            )
        if place is not None and data.startswith(known):
            del self._kept[place]  # it has grown, or is the same
        self._kept = [*self._kept[1 - PROMPTS_MAX :], (data, keys)]
        return keys

    def _nearest(self, data: bytes) -> tuple[int | None, int]:
        """The place of the kept prompt that shares most whole chunks with this one, the latest of these, and how many
        it shares."""
        nearest, most = None, 0
        for place in reversed(range(len(self._kept))):
            known = self._kept[place][0]
            if data == known:
                return place, len(data) // self._step
            shared = self._shared(data, known, most)
            if shared > most:
                nearest, most = place, shared
        return nearest, most

    def _shared(self, data: bytes, known: bytes, most: int) -> int:
        """Whole chunks that both begin with; 0 if no more than `most`. Comparing takes a twentieth of hashing, so
        that halving finds them soon enough."""
        step, view = self._step, memoryview(known)
        both = min(len(data), len(known)) // step
        if both <= most or not data.startswith(view[: (most + 1) * step]):
            return 0
        if data.startswith(view[: both * step]):
            return both
        return bisect_left(range(1, both + 1), True, key=lambda chunks: not data.startswith(view[: chunks * step]))
