"""The caches that `kvredis bench prefill`, `hit-sweep` and `long-prefill` compare, as an engine sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvredis.adapters.engine.keys import chunk_keys

if TYPE_CHECKING:
    from torch import Tensor

    from kvredis import CacheEngine, ChunkLayout
    from kvredis.adapters.engine.background import Save


class Subject(Protocol):
    """A cache under test, for one prompt at a time."""

    def hit(self, tokens: list[int], together: int) -> int:
        """Tokens of the stored prefix, less than all; as many prompts as that are served together."""
        ...

    def load(self, tokens: list[int], kv: Tensor, stop: int, together: int) -> Callable[[], int]:
        """Begin to load up to `stop` into KV of (layers, 2, tokens, kv_heads, head_dim); what it gives waits for the
        end, and tells how many are valid then."""
        ...

    def store(self, tokens: list[int], kv: Tensor) -> Save | None:
        """Store a prompt's whole chunks; the tensor is its own until the Save is done."""
        ...

    def computed(self, tokens: int, seconds: float) -> None:
        """Hear how long computing took: all of a prompt that was not loaded, or a token of each."""
        ...


class NoCache:
    """The row that others are compared with."""

    def hit(self, tokens: list[int], together: int) -> int:
        """As Subject.hit."""
        return 0

    def load(self, tokens: list[int], kv: Tensor, stop: int, together: int) -> Callable[[], int]:
        """As Subject.load."""
        return lambda: 0

    def store(self, tokens: list[int], kv: Tensor) -> Save | None:
        """As Subject.store."""
        return None

    def computed(self, tokens: int, seconds: float) -> None:
        """As Subject.computed."""


class OnDevice(NoCache):
    """An engine's own cache in the accelerator's memory, which nothing leaves: what a hit is worth at most."""

    def __init__(self, layout: ChunkLayout) -> None:
        self._layout = layout
        self._chunks: dict[bytes, Tensor] = {}

    def hit(self, tokens: list[int], together: int) -> int:
        """As Subject.hit."""
        found = 0
        for chunk in chunk_keys(tokens, self._layout):
            if chunk.key not in self._chunks:
                break
            found = chunk.stop
        return min(found, len(tokens) - 1)

    def load(self, tokens: list[int], kv: Tensor, stop: int, together: int) -> Callable[[], int]:
        """As Subject.load."""
        from kvredis.adapters.engine.tensors import scatter

        for chunk in chunk_keys(tokens, self._layout):
            if chunk.start < stop:
                scatter(self._chunks[chunk.key], kv, chunk.start, slice(stop - chunk.start))
        return lambda: stop

    def store(self, tokens: list[int], kv: Tensor) -> Save | None:
        """As Subject.store."""
        from kvredis.adapters.engine.tensors import gather

        for chunk in chunk_keys(tokens, self._layout):
            if chunk.key not in self._chunks:
                held = self._chunks[chunk.key] = kv.new_empty(self._layout.shape(chunk.stop - chunk.start))
                gather(kv, chunk.start, chunk.stop, held)
        return None


class Tiered:
    """A CacheEngine, whatever is behind it."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine

    def hit(self, tokens: list[int], together: int) -> int:
        """As Subject.hit; with min_retrieve_tokens = auto what is worth loading."""
        return self._engine.plan(tokens, together=together).stop

    def load(self, tokens: list[int], kv: Tensor, stop: int, together: int) -> Callable[[], int]:
        """As Subject.load."""
        load = self._engine.retrieve_later(tokens, kv, stop=stop, together=together)

        def wait() -> int:
            load.wait()
            if load.refused:  # more prompts are served together than may wait
                return self._engine.retrieve(tokens, kv, stop=stop, together=together)
            return load.tokens

        return wait

    def store(self, tokens: list[int], kv: Tensor) -> Save | None:
        """As Subject.store."""
        return self._engine.store_later(tokens, kv)

    def computed(self, tokens: int, seconds: float) -> None:
        """As Subject.computed."""
        self._engine.prefill_took(tokens, seconds)
