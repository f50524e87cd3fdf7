"""The one door of an engine: which prefix of these tokens is stored, store it, load it.

The cache must never be the reason that an engine fails: trouble of the backend, a lost server and a block that is not
what its layout says are misses, counted and logged once per spell. Only the caller's own mistakes raise: KV whose shape
or dtype is not the layout's (LayoutError), tokens that are not integers (TypeError).

Bytes are copied once per side, between the engine's tensors and the backend's memory. `store` waits for that copy and
not for the network behind it: what a server cannot take in time is dropped and counted.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from kvredis.backends.base import Backend, NothingToFetch, Prefetch
from kvredis.backends.config import Config
from kvredis.backends.opening import open_backend
from kvredis.storage.errors import LayoutError

from .block import block_bytes, encode_header, open_block
from .keys import ChunkKey, Tokens, keys_of_bytes, token_bytes
from .layout import ChunkLayout
from .tensors import KV, check_kv, gather, scatter, view_tensor

logger = logging.getLogger(__name__)

TOUCH_SHARE = 16
"""Touching the stored head while its tail is written may cost 1/16 of the bytes written, no more."""
TOUCH_KEY_BYTES = 128
"""What one key of a touch costs on the wire, roughly."""


@dataclass(slots=True)
class EngineStats:
    """What one engine has done so far. Bytes are payloads without headers; seconds are the engine's waiting time."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    stored_tokens: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    dropped_stores: int = 0
    """Chunks that were not handed over: too much that was stored before is still on its way, or the server is lost."""
    refused_stores: int = 0
    """Chunks for which there was no room after all, and those that flush() has found were not taken."""
    refused_blocks: int = 0
    """Blocks that were found but were not what the layout says."""
    errors: int = 0
    """Calls of the backend that raised."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What there is to load for a prompt of `total` tokens of which the engine itself still has the first `cached`.

    `hit` is the usable prefix: on a full hit the last token is left for the engine, which needs its logits.
    """

    total: int
    hit: int
    cached: int

    @property
    def need_to_load(self) -> int:
        """Tokens to load behind the engine's own; never negative."""
        return max(self.hit - self.cached, 0)


class Job:
    """A prefetch that was asked for: `tokens` of the prompt that chunks can cover, and what became of its chunks.

    Of these `queued` are on their way or have come, `resident` were near already, `missing` are stored nowhere, and
    for `no_room` there is no room where they should come. `refused` says why nothing is fetched at all, else "". What
    has come is held by nobody: it may leave again. A job may be let go of at any time.
    """

    def __init__(self, tokens: int, prefetch: Prefetch) -> None:
        self.tokens = tokens
        self.refused = prefetch.refused
        self._prefetch = prefetch

    @property
    def queued(self) -> int:
        """Chunks that are on their way or have come."""
        return self._prefetch.queued

    @property
    def resident(self) -> int:
        """Chunks that were near already."""
        return self._prefetch.resident

    @property
    def missing(self) -> int:
        """Chunks that are stored nowhere."""
        return self._prefetch.missing

    @property
    def no_room(self) -> int:
        """Chunks that would not fit."""
        return self._prefetch.no_room

    @property
    def done(self) -> bool:
        """Whether nothing is on its way any more. With a server this asks it."""
        return self._prefetch.is_finished

    def wait(self, timeout_s: float) -> bool:
        """Block until it is done, at most so long; say whether it is."""
        return self._prefetch.wait(timeout_s)

    def cancel(self) -> None:
        """Want no more of it: what has not begun is not fetched."""
        self._prefetch.cancel()


class CacheEngine:
    """KV of token prefixes behind one Backend, which the engine owns from here on.

    The configuration's chunk_size replaces the layout's; `layout` shows the outcome. Not for several threads at once.
    Raises what open_backend raises when no backend is passed and the configured one cannot be made.
    """

    def __init__(self, config: Config, layout: ChunkLayout, backend: Backend | None = None) -> None:
        self.config = config
        self.layout = replace(layout, chunk_tokens=config.chunk_size)
        self.backend = open_backend(config) if backend is None else backend
        self.stats = EngineStats()
        self._recent: tuple[bytes, list[ChunkKey]] = (b"", [])
        self._failing = False
        self._refusal_told = False

    @classmethod
    def from_env(cls, layout: ChunkLayout) -> Self:
        """An engine configured by LMCACHE_CONFIG_FILE and LMCACHE_* alone. Raises ConfigError."""
        return cls(Config.load(), layout)

    def lookup(self, tokens: Tokens) -> int:
        """Tokens of the longest stored prefix, in one round trip. May block for blocking_timeout_secs."""
        keys = self._keys(tokens)
        self.stats.lookups += 1
        self.stats.lookup_tokens += len(tokens)
        present = 0
        with self._forgiving("lookup"):
            present = self.backend.match([chunk.key for chunk in keys]) if keys else 0
        hit = keys[present - 1].stop if present else 0
        self.stats.hit_tokens += hit
        return hit

    def plan(self, tokens: Tokens, *, cached: int = 0, request: str = "-") -> LoadPlan:
        """A lookup on behalf of an engine that holds the first `cached` tokens itself, logged as LMCache does."""
        total = len(tokens)
        plan = LoadPlan(total, max(min(self.lookup(tokens), total - 1), 0), cached)
        logger.info(
            "Reqid: %s, Total tokens %d, LMCache hit tokens: %d, need to load: %d",
            request,
            plan.total,
            plan.hit,
            plan.need_to_load,
        )
        return plan

    def store(self, tokens: Tokens, kv: KV, *, request: str = "-") -> int:
        """Stores the chunks that are not stored yet; returns the tokens of those that the backend has taken over.

        `kv` holds K and V of at least the chunked tokens, from position 0 on; it is the caller's again on return.
        Chunks go tail first, each behind a touch of the head that is there, so that what eviction leaves of a prompt is
        a prefix. As much goes as is taken without waiting: when the queue to a server has not room for all, the first
        chunks go, so that the next time it goes on from there, and the rest is dropped. Waits for one question and the
        copy; flush() waits for what is on its way. Raises LayoutError when `kv` is not of the layout.
        """
        keys = self._keys(tokens)
        if not keys:
            return 0
        check_kv(kv, self.layout, keys[-1].stop)
        started_s = time.perf_counter()
        stored = 0
        with self._forgiving("store"):
            present = self.backend.match([chunk.key for chunk in keys])
            missing = keys[-1].stop - (keys[present - 1].stop if present else 0)
            total = len(tokens)
            logger.info("Storing KV cache for %d out of %d tokens for request %s", missing, total, request)
            stored = self._store_missing(keys, present, kv)
            if stored < missing:
                logger.info("Dropped %d tokens of request %s: no more is taken for now", missing - stored, request)
        seconds = time.perf_counter() - started_s
        self.stats.stored_tokens += stored
        self.stats.stored_bytes += stored * self.layout.bytes_per_token
        self.stats.store_seconds += seconds
        self._log_speed("Stored", stored, seconds, request)
        return stored

    def retrieve(self, tokens: Tokens, out: KV, *, start: int = 0, stop: int | None = None, request: str = "-") -> int:
        """Loads the stored prefix into `out`; returns how many tokens from position 0 on are valid there now.

        With `start` the caller has the first `start` tokens in `out` already: they are never written, and what is
        returned is at least `start`. `stop` (default: all tokens) bounds what is loaded. `out` has the shape that
        `store` takes and covers `stop` tokens; behind the returned position its content is undefined. Loading ends at
        the first chunk that is missing or refused. Raises LayoutError when `out` is not of the layout.
        """
        end = len(tokens) if stop is None else stop
        wanted = [chunk for chunk in self._keys(tokens) if chunk.stop > start and chunk.start < end]
        if not wanted:
            return start
        check_kv(out, self.layout, min(wanted[-1].stop, end))
        started_s = time.perf_counter()
        position = start
        with self._forgiving("retrieve"), closing(self.backend.load([chunk.key for chunk in wanted])) as leases:
            for chunk, lease in zip(wanted, leases, strict=False):
                if lease is None:
                    break
                with lease:
                    position = self._load_chunk(chunk, lease.view, out, position, end)
            # Loading used the head first, which would make it the first to be evicted: say that it was all one use.
            self.backend.touch([chunk.key for chunk in self._keys(tokens) if chunk.start < position])
        seconds = time.perf_counter() - started_s
        self.stats.loaded_tokens += position - start
        self.stats.loaded_bytes += (position - start) * self.layout.bytes_per_token
        self.stats.load_seconds += seconds
        self._log_speed("Retrieved", position - start, seconds, request)
        return position

    def prefetch(self, tokens: Tokens) -> Job:
        """Asks the backend to bring the prompt's chunks near, head first; answers at once."""
        keys = self._keys(tokens)
        prefetch: Prefetch = NothingToFetch()
        with self._forgiving("prefetch"):
            if keys:
                prefetch = self.backend.prefetch([chunk.key for chunk in keys])
        if prefetch.refused and not self._refusal_told:
            self._refusal_told = True
            logger.warning("KV cache prefetch is refused: %s (said once)", prefetch.refused)
        return Job(keys[-1].stop if keys else 0, prefetch)

    def flush(self) -> int:
        """Waits until all that was stored so far has arrived; returns how many chunks since the last flush have not."""
        refused = 0
        with self._forgiving("flush"):
            refused = self.backend.flush()
        self.stats.refused_stores += refused
        return refused

    def close(self) -> None:
        """Closes the backend, which may wait for blocking_timeout_secs: what is on its way then is dropped."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- one chunk at a time ------------------------------------------------------------------------------------------

    def _store_missing(self, keys: list[ChunkKey], present: int, kv: KV) -> int:
        """Writes keys[present:], all at once or from the head on as many at a time as there is room for; returns the
        tokens that were taken. Ends at the first chunk that is not: what is behind a gap is worth nothing."""
        head, stored, refused = present, 0, self.stats.refused_stores
        while self.stats.refused_stores == refused and (stop := self._room(keys, head)) > head:
            stored += self._store_chunks(keys[:stop], head, kv)
            head = stop
        self.stats.dropped_stores += len(keys) - head
        return stored

    def _room(self, keys: list[ChunkKey], head: int) -> int:
        """How many of `keys` can be stored now if the first `head` are; no more if it is not worth a touch of these."""
        left = len(keys) - head
        if left:
            room = self.backend.room(block_bytes(self.layout, self.layout.chunk_tokens))
            return head + min(room, left) if room >= min(left, self._touch_every(head)) else head
        return len(keys)

    def _touch_every(self, head: int) -> int:
        """Chunks to be written for each touch of `head` others."""
        return 1 + head * TOUCH_KEY_BYTES * TOUCH_SHARE // self.layout.chunk_bytes()

    def _store_chunks(self, keys: list[ChunkKey], present: int, kv: KV) -> int:
        """Writes keys[present:] from the last to the first; returns the tokens that were taken."""
        head = [chunk.key for chunk in keys[:present]]
        touch_every = self._touch_every(present)
        stored = 0
        for count, chunk in enumerate(reversed(keys[present:])):
            if head and count % touch_every == 0:
                self.backend.touch(head)
            if self._store_chunk(chunk, kv):
                stored += chunk.stop - chunk.start
            else:  # those nearer to the head are still worth storing
                self.stats.refused_stores += 1
        self.backend.touch([chunk.key for chunk in keys])
        return stored

    def _store_chunk(self, chunk: ChunkKey, kv: KV) -> bool:
        tokens = chunk.stop - chunk.start
        reservation = self.backend.reserve(chunk.key, block_bytes(self.layout, tokens))
        if reservation is None:
            return False
        with reservation:
            header = encode_header(self.layout, tokens)
            reservation.view[: len(header)] = header
            gather(kv, chunk.start, chunk.stop, view_tensor(reservation.view[len(header) :], self.layout, tokens))
            reservation.commit()
        return True

    def _load_chunk(self, chunk: ChunkKey, view: memoryview, out: KV, position: int, stop: int) -> int:
        """Copies the chunk's tokens from `position` up to `stop` into `out`; returns the position behind them."""
        block = open_block(view, self.layout)
        if block.tokens != chunk.stop - chunk.start:
            raise LayoutError(f"block covers {block.tokens} tokens, its key {chunk.stop - chunk.start}")
        end = min(chunk.stop, stop)
        tensor = view_tensor(block.tensor, self.layout, block.tokens)
        scatter(tensor[:, :, position - chunk.start : end - chunk.start], out, position)
        return end

    # -- shared ------------------------------------------------------------------------------------------------------

    def _keys(self, tokens: Tokens) -> list[ChunkKey]:
        """The prompt's keys; the latest are kept, because a request looks up, loads and stores the same tokens."""
        data = token_bytes(tokens)
        if data != self._recent[0]:
            self._recent = (data, keys_of_bytes(data, self.layout, unfull=self.config.save_unfull_chunk))
        return self._recent[1]

    @contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        """Turns whatever the cache raises into a count and one line in the log per spell of trouble."""
        try:
            yield
        except LayoutError as error:
            self.stats.refused_blocks += 1
            logger.warning("A stored block was refused and counts as a miss: %s", error)
        except Exception as error:
            self.stats.errors += 1
            if not self._failing:
                logger.warning("KV cache %s failed; the engine goes on without: %s", what, error, exc_info=error)
            self._failing = True
        else:
            self._failing = False

    def _log_speed(self, verb: str, tokens: int, seconds: float, request: str) -> None:
        if tokens and logger.isEnabledFor(logging.INFO):
            gb = tokens * self.layout.bytes_per_token / 1e9
            text = "%s %d tokens for request %s: %.4f GB in %.1f ms, %.2f GB/s"
            logger.info(text, verb, tokens, request, gb, seconds * 1e3, gb / max(seconds, 1e-9))
