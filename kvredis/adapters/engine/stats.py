"""What an engine has done and is about to do, in tokens: counters, and the plan of one load."""

from dataclasses import dataclass, field
from logging import INFO, Logger
from typing import Literal

from kvredis.backends.base import Tier


@dataclass(slots=True)
class EngineStats:
    """What one engine has done so far. Bytes are payloads without headers; seconds are the engine's waiting time."""

    lookups: int = 0
    lookup_seconds: float = 0.0
    """Of questions to the backend."""
    lookup_tokens: int = 0
    hit_tokens: int = 0
    tier_tokens: dict[Tier | Literal["engine", "miss"], int] = field(
        default_factory=lambda: {"engine": 0, "memory": 0, "disk": 0, "remote": 0, "miss": 0}
    )
    """Where the tokens looked up were; each is counted once, so that the sum is lookup_tokens."""
    skipped_tokens: int = 0
    """Of those found, the ones not loaded: fewer than min_retrieve_tokens, or with auto computed faster than loaded."""
    stored_tokens: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    """Of loads in the background too."""
    copy_seconds: float = 0.0
    """Of load_seconds, copies into the caller's tensors; on a GPU, what it takes to give them to it."""
    dropped_stores: int = 0
    """Chunks that were not handed over: too much that was stored before is still on its way, or the server is lost."""
    refused_stores: int = 0
    """Chunks for which there was no room after all, and those that flush() has found not to be in the farthest tier: a
    nearer one may have them all the same."""
    refused_blocks: int = 0
    """Blocks that were found but were not what the layout says."""
    refused_loads: int = 0
    """Calls of retrieve_later that found the queue full."""
    refused_saves: int = 0
    """Calls of store_later that found it full."""
    errors: int = 0
    """Calls of the backend that raised."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What there is to load for a prompt of `total` tokens of which the engine itself still has the first `cached`.

    `hit` is the usable prefix: on a full hit the last token is left for the engine, which needs its logits. The last
    `skipped` tokens of it are not worth loading.
    """

    total: int
    hit: int
    cached: int
    skipped: int = 0

    @property
    def stop(self) -> int:
        """The position up to which to load."""
        return self.hit - self.skipped

    @property
    def need_to_load(self) -> int:
        """Tokens to load behind the engine's own; never negative."""
        return max(self.stop - self.cached, 0)


def log_speed(logger: Logger, verb: str, tokens: int, nbytes: int, seconds: float, request: str) -> None:
    """Log how fast a request's tokens were stored or retrieved, if there were any, as LMCache does."""
    if tokens and logger.isEnabledFor(INFO):
        text, gb = "%s %d tokens for request %s: %.4f GB in %.1f ms, %.2f GB/s", nbytes / 1e9
        logger.info(text, verb, tokens, request, gb, seconds * 1e3, gb / max(seconds, 1e-9))
