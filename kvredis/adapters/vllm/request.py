"""What the connector's scheduler is told of a request, what it remembers of it, and what it asks of its workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvredis.adapters.engine.keys import DEFAULT_ALGORITHM, ChunkKey
from kvredis.adapters.paged.jobs import Moves

from .lookup import Found, Question
from .stored_events import PLAIN, Origin

REST_TOKENS = 256
"""Behind a prefix that the engine has in its own pages the rest of a hit is computed where it is less than a chunk, and
less than this: the step that computes the last token computes so many beside it while a GPU reads the weights, and a
load would keep the request out of that step. Without such a prefix all that is found is loaded, however short."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as its engine describes it. `extras` are what its KV depends on beside tokens, by token position: the
    images, and at 0 the adapter and the tenant's salt. `attempt` counts how often it was preempted. `origin` is what
    events say of it. Where prefill and decode are apart its KV is computed `for_others`; or another engine computes it,
    which has `handed_over` the name of its first chunk, or `is_promised` to begin with it."""

    request: str
    tokens: Sequence[int]
    extras: tuple[tuple[int, bytes], ...] = ()
    attempt: int = 0
    origin: Origin = PLAIN
    for_others: bool = False
    handed_over: str = ""
    is_promised: bool = False


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """Bounds and habits. Fewer than `min_load_tokens` are never loaded; behind a prefix of the engine's own neither are
    fewer than `min_rest_tokens`, or than REST_TOKENS and a chunk where that is None. With `waits_for_shared` a request
    waits for another's load of the same chunks: for an engine that finds what was loaded in its own pages. The states
    of recurrent layers that are stored of a prompt take `state_bytes` at most, of all ranks. Where that is None a state
    is stored if that takes less than computing from the one before, and while that is unknown they take as much as the
    prompt's KV. The last one is always stored. A server's answer is waited for as long as computing the
    prompt takes, and never longer than `lookup_s_max`; and as long for KV that another engine computes, if it `waits`
    for that. With `announces` others hear what this engine computes. One that `streams` begins to load what others
    have announced, and waits for each chunk as long as for an answer: for an engine that computes what fails."""

    loads: bool = True
    stores: bool = True
    unfull: bool = False
    algorithm: str = DEFAULT_ALGORITHM
    min_load_tokens: int = 0
    min_rest_tokens: int | None = None
    max_load_chunks: int = 1024
    waits_for_shared: bool = False
    state_bytes: int | None = None
    lookup_s_max: float = 10.0
    announces: bool = False
    waits: bool = False
    streams: bool = False


@dataclass(slots=True)
class Request:
    """What is remembered of a request."""

    prompt: Prompt
    keys: list[list[ChunkKey]]
    found: int = 0
    """Chunks of the prefix that were stored when it was asked for."""
    answered: Found = field(default_factory=Found)
    """Up to which chunks it could have been loaded then."""
    lookup: Question[Found] | None = None
    """The question for it, until the answer has been taken over or given up."""
    asked_s: float = 0
    is_waiting: bool = False
    """Whether that question is the second one, for KV that another engine computes."""
    announced: Question[Found] | None = None
    """The last question that may have announced what this engine computes of it."""
    snapshot: int = 0
    """Chunks before the last state that was found, or handed over for storing."""
    computed: int = 0
    """Tokens the engine had itself then."""
    answer: int = 0
    """Tokens to load behind these."""
    loading: int = 0
    """Tokens of its load, until it is known what became of that."""
    is_awaited: bool = False
    """Whether another engine stores some of these meanwhile."""
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
    """What one step asks of the workers: plain values that pickle. `taken` are the pages that this step's
    forward or loads write; `is_idle`: it computes nothing. Of requests in `held` the pages that are stored are kept
    until workers tell that they have read them. `weights` are what its keys are of, a digest for each rank
    (weights.py), none where that is not compared: with `compares` also where nothing is moved; with `check_weights`
    each rank looks at all of its own, and tells."""

    moves: Moves = field(default_factory=Moves)
    taken: set[int] = field(default_factory=set)
    is_idle: bool = True
    held: set[str] = field(default_factory=set)
    number: int = 0
    weights: tuple[str, ...] = ()
    compares: bool = False
    check_weights: bool = False
