"""What a scheduler tells a worker to move in one step: chunks by key, and the engine's pages that they belong to.

An engine decides in one process and computes in others, so these are plain values that pickle. A chunk is always made
of whole pages; one of which a page is missing (a sliding window has let go of it) is not moved at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """One stored block and its place in the engine: `pages` of layer group `group`, in the order of the tokens. A load
    may name the chunk's last pages alone: the others are not written."""

    key: bytes
    group: int
    pages: tuple[int, ...]


@dataclass(slots=True)
class LoadJob:
    """Chunks that a request waits for: head first, one group behind the other."""

    request: str
    moves: list[ChunkMove]


@dataclass(slots=True)
class StoreJob:
    """Chunks of a request that have been computed, or will be when this step's forward pass is over: head first, one
    group behind the other. `total` is the prompt's length so far in tokens, for the log. A worker that learns only
    later whether what is computed may be stored gives `is_sound`, which waits for that; a scheduler does not."""

    request: str
    moves: list[ChunkMove]
    total: int
    is_sound: Callable[[], bool] | None = None


@dataclass(slots=True)
class Moves:
    """All that one step asks for. A request of `cancelled` wants nothing more of what was asked for it before."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
