"""What scheduler.py is told of an engine's requests, what it is bound by, and what it tells the workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvredis.adapters.engine.keys import DEFAULT_ALGORITHM, ChunkKey
from kvredis.adapters.paged.jobs import Moves

REST_TOKENS = 256
"""Behind a prefix that the engine has in its own pages the rest of a hit is computed where it is less than a chunk, and
less than this: the step that computes the last token computes so many beside it while a GPU reads the weights, and a
load would keep the request out of that step. Without such a prefix all that is found is loaded, however short."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as its engine describes it. `extras` are what its KV depends on beside tokens, by token position: the
    images, and at 0 the adapter and the tenant's salt. `attempt` counts how often it was preempted."""

    request: str
    tokens: Sequence[int]
    extras: tuple[tuple[int, bytes], ...] = ()
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """Bounds and habits. Fewer than `min_load_tokens` are never loaded; behind a prefix of the engine's own neither are
    fewer than `min_rest_tokens`, or than REST_TOKENS and a chunk where that is None. With `waits_for_shared` a request
    waits for another's load of the same chunks: for an engine that finds what was loaded in its own pages."""

    loads: bool = True
    stores: bool = True
    unfull: bool = False
    algorithm: str = DEFAULT_ALGORITHM
    min_load_tokens: int = 0
    min_rest_tokens: int | None = None
    max_load_chunks: int = 1024
    waits_for_shared: bool = False


@dataclass(slots=True)
class Request:
    """What is remembered of a request."""

    prompt: Prompt
    keys: list[list[ChunkKey]]
    found: int = 0
    """Chunks of the prefix that were stored when it was asked for."""
    computed: int = 0
    """Tokens the engine had itself then."""
    answer: int = 0
    """Tokens to load behind these."""
    loading: int = 0
    """Tokens of its load, until it is known what became of that."""
    asked_attempt: int = -1
    loaded_attempt: int = -1
    tables: list[list[int]] = field(default_factory=list)
    next: list[int] = field(default_factory=list)
    """Of each group, the first chunk that has not been handed over for storing."""
    quiet_until: float = 0
    """Before it has so many tokens nothing of it is stored."""
    epoch: int = 0
    """Of which weights its keys are (KeyWeights)."""
    stale_epoch: int = 0
    is_stale: bool = False
    """Whether some of its KV was computed with other weights, as was found out in that epoch: none of it is stored."""


@dataclass(slots=True)
class Step:
    """What one step asks of the workers: plain values that pickle. `taken` are the pages, by group, that this step's
    forward or loads write; `is_idle`: it computes nothing. `weights` are what its keys are of, a digest for each rank
    (weights.py), none where that is not compared; with `check_weights` each rank looks at all of its own, and tells."""

    moves: Moves = field(default_factory=Moves)
    taken: set[tuple[int, int]] = field(default_factory=set)
    is_idle: bool = True
    number: int = 0
    weights: tuple[str, ...] = ()
    check_weights: bool = False
