"""A range of the arena: what the allocator deals in, and what says where a value lies."""

from typing import NamedTuple


class Extent(NamedTuple):
    """A range of the arena, in bytes; both numbers are multiples of GRAIN_BYTES."""

    offset: int
    length: int
