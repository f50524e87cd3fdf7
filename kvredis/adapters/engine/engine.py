"""CacheEngine, which an engine calls: which prefix of these tokens is stored, store it, load it.

The cache must never be the reason that an engine fails: trouble of the backend, a lost server and a block that is not
what its layout says are misses, counted and logged once per spell. Only the caller's own mistakes raise: KV whose shape
or dtype is not the layout's (LayoutError), tokens that are not integers (TypeError).

Nor must it be the reason that an engine is slow. `store` waits for the copy out of the engine's tensors and not for the
network behind it: what a server cannot take in time is dropped and counted. `store_later` waits for no copy either, and
`retrieve_later` loads while the engine computes. With min_retrieve_tokens = auto only what comes sooner than it is
computed is loaded (break_even.py).

Bytes are copied once per side, between the engine's tensors and the backend's memory.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self, get_args

from kvredis.backends.base import Backend, NothingToFetch, Prefetch, Tier
from kvredis.backends.config.schema import Config
from kvredis.backends.factory import open_backend
from kvredis.storage.errors import ConfigError, LayoutError

from .background import Executor, Load, Save
from .break_even import PREFILLS_ASKED_MAX, BreakEven, Piece, Probes
from .config import Role
from .keys import ChunkKey, RecentKeys, Tokens, algorithm_of, token_bytes
from .layout import ChunkLayout
from .load import Intake, Span, TensorLoad, pieces_of
from .stats import EngineStats, LoadPlan, log_speed
from .store import TensorStore
from .tensors import KV, check_kv


class Job:
    """A prefetch that was asked for: `tokens` of the prompt that chunks can cover, and what became of its chunks.

    Of these `queued` are on their way or have come, `resident` were near already, `missing` are stored nowhere, and
    for `no_room` there is no room where they should come. `refused` says why nothing is fetched at all, else "". What
    has come is not leased: it may leave again. A job may be let go of at any time.
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


logger = logging.getLogger(__name__)

AUTO = "auto"


class CacheEngine:
    """KV of token prefixes behind one Backend, which the engine owns from here on.

    The configuration's chunk_size replaces the layout's; `layout` shows the outcome. One thread at a time may call it,
    which callers in several threads see to by holding `turn`. Beside it the engine's own threads load, store and probe:
    `retrieve_later` and `store_later` give tensors away until the Load or Save is done, and everything else (counters,
    learnt speeds, the backend) is shared safely. `stats` may be read at any time.

    Raises what open_backend raises when no backend is passed and the configured one cannot be made, ConfigError for an
    unknown `role`, ValueError for an unknown pre_caching_hash_algorithm.
    """

    def __init__(
        self,
        config: Config,
        layout: ChunkLayout,
        backend: Backend | None = None,
        *,
        role: Role = "kv_both",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if role not in get_args(Role):
            raise ConfigError("kv_role", role, "CacheEngine", f"must be one of {', '.join(get_args(Role))}")
        algorithm_of(config.pre_caching_hash_algorithm)
        self.config = config
        self.role = role
        self.layout = replace(layout, chunk_tokens=config.chunk_size)
        self.backend = open_backend(config) if backend is None else backend
        self.turn = threading.RLock()
        self.stats = EngineStats()
        self.break_even = BreakEven(self.layout, clock)
        """What is known of the speeds of tiers and model."""
        self._probes = Probes(self.backend, self.break_even, clock)
        self._loader = Executor(self._load, "kvredis loads")
        self._saver = Executor(self._save_later, "kvredis stores", steps_aside=True)
        self._clock = clock
        self._lock = threading.Lock()  # of `stats` and `_failing`
        self._recent = self._recent_keys()
        self._failing = False
        self._refusal_told = False

    @classmethod
    def from_env(cls, layout: ChunkLayout, *, role: Role = "kv_both") -> Self:
        """An engine configured by LMCACHE_CONFIG_FILE and LMCACHE_* alone. Raises ConfigError."""
        return cls(Config.load(), layout, role=role)

    def use_model(self, model: str) -> None:
        """Use the keys of another model with KV of the same shape from here on: its weights have changed, say.

        Takes no time, asks no backend, deletes nothing: when the model is used again, its KV is found again. Loads and
        stores in the background keep the model that they began with.
        """
        if model != self.layout.model:
            self.layout = replace(self.layout, model=model)
            self._recent = self._recent_keys()

    # -- what is there -----------------------------------------------------------------------------------------------

    def lookup(self, tokens: Tokens) -> int:
        """Tokens of the longest stored prefix, in one round trip. May block for blocking_timeout_secs."""
        return self._look_up(self._keys(tokens), len(tokens), 0)

    def plan(self, tokens: Tokens, *, cached: int = 0, request: str = "-", together: int = 1) -> LoadPlan:
        """A lookup on behalf of an engine that holds the first `cached` tokens itself, logged as LMCache does.

        Nothing is to be loaded for a producer, which does not ask, nor where it would be less than min_retrieve_tokens;
        with auto as much as comes sooner than it is computed, and nothing while it is unknown how long that takes, in a
        pass over `together` such prompts: `prefill_took` is told of the tokens of them all.
        """
        total = len(tokens)
        if self.role == "kv_producer":
            return LoadPlan(total, 0, cached)
        keys = self._keys(tokens)
        hit = max(min(self._look_up(keys, total, cached), total - 1), 0)
        plan = self._narrowed(LoadPlan(total, hit, cached), keys, together)
        found = max(hit - cached, 0)
        text = "Reqid: %s, Total tokens %d, LMCache hit tokens: %d, need to load: %d"
        why = ""
        if plan.skipped and self.config.min_retrieve_tokens == AUTO:
            why = f"; the other {plan.skipped} are computed"
        elif plan.skipped:
            why = f" < min_retrieve {self.config.min_retrieve_tokens}, nothing is loaded"
        # As LMCache has it, what is below the minimum is still said to be needed.
        need = plan.need_to_load if self.config.min_retrieve_tokens == AUTO else found
        logger.info(text + "%s", request, total, hit, need, why)
        with self._lock:
            self.stats.skipped_tokens += plan.skipped
        return plan

    def prefill_took(self, tokens: int, seconds: float) -> None:
        """Tell how long a forward pass over `tokens` took, less what was waited for; min_retrieve_tokens = auto asks.

        Until two passes of about the size of a prompt are known, `plan` has such prompts computed, hit or not, a few
        times at most; where no engine tells, all is loaded then. Short passes, as a step of decoding, tell what a pass
        costs at all, which no load saves; as long as fewer than two are known it is taken for half of a long one.
        """
        self.break_even.prefill_took(tokens, seconds)

    # -- storing and loading -----------------------------------------------------------------------------------------

    def store(self, tokens: Tokens, kv: KV, *, request: str = "-") -> int:
        """Stores the chunks that are not stored yet; returns the tokens of those that the backend has taken over.

        `kv` holds K and V of at least the chunked tokens, from position 0 on; it is the caller's again on return.
        Chunks go tail first, each behind a touch of the head that is there, so that what eviction leaves of a prompt is
        a prefix. As much goes as is taken without waiting: when the queue to a server has not room for all, the first
        chunks go, so that the next time it goes on from there, and the rest is dropped. Waits for one question and the
        copy; flush() waits for what is on its way. A consumer stores nothing. Raises LayoutError when `kv` is not of
        the layout.
        """
        keys = self._keys(tokens)
        if not keys or self.role == "kv_consumer":
            return 0
        check_kv(kv, self.layout, keys[-1].stop)
        return self._store(Save(keys, len(tokens), kv, request, self.layout))

    def store_later(self, tokens: Tokens, kv: KV, *, request: str = "-") -> Save:
        """As `store`, in the background and behind the stores asked for before; answers at once, and waits for nothing.

        `kv` belongs to the Save until it is done: nothing may write its chunked tokens before. On a GPU it need not be
        there yet: what the current stream has been given comes first, and the copy runs beside what follows. When too
        many are waiting it is refused, done at once with 0 tokens; a longer prefix stored after it has its chunks too.
        """
        keys = [] if self.role == "kv_consumer" else self._keys(tokens)
        if keys:
            check_kv(kv, self.layout, keys[-1].stop)
        save = Save(keys, len(tokens), kv, request, self.layout)
        if not keys:
            save.end(0)
            return save
        save.follow()
        if not self._saver.submit(save):
            with self._lock:
                self.stats.refused_saves += 1
        return save

    def _store(self, save: Save) -> int:
        keys, request, started_s = save.keys, save.request, time.perf_counter()
        storing = TensorStore(self.backend, save.layout, save.kv)
        with self._forgiving("store"), save.on_stream():
            present = self.backend.match([chunk.key for chunk in keys])
            missing = keys[-1].stop - (keys[present - 1].stop if present else 0)
            logger.info("Storing KV cache for %d out of %d tokens for request %s", missing, save.total, request)
            storing.run(keys, present)
            if storing.tokens < missing:
                dropped = missing - storing.tokens
                logger.info("Dropped %d tokens of request %s: no more is taken for now", dropped, request)
        seconds, nbytes = time.perf_counter() - started_s, storing.tokens * self.layout.bytes_per_token
        with self._lock:
            self.stats.stored_tokens += storing.tokens
            self.stats.stored_bytes += nbytes
            self.stats.store_seconds += seconds
            self.stats.refused_stores += storing.refused
            self.stats.dropped_stores += storing.dropped
        log_speed(logger, "Stored", storing.tokens, nbytes, seconds, request)
        return storing.tokens

    def retrieve(
        self, tokens: Tokens, out: KV, *, start: int = 0, stop: int | None = None, request: str = "-", together: int = 1
    ) -> int:
        """Loads the stored prefix into `out`; returns how many tokens from position 0 on are valid there now.

        With `start` the caller has the first `start` tokens in `out` already: they are never written, and what is
        returned is at least `start`. `stop` (default: all tokens; a plan's `stop` else) bounds what is loaded. `out`
        has the shape that `store` takes and covers `stop` tokens; behind the returned position its content is
        undefined. Loading ends at the first chunk that is missing or refused, and with auto where computing turns out
        to be faster, `together` as in `plan`. A producer loads nothing. Raises LayoutError when `out` is not of the
        layout.
        """
        span = self._span(tokens, out, start, stop, request, together)
        return start if span is None else self._load(Load(span, self.layout))

    def retrieve_later(
        self, tokens: Tokens, out: KV, *, start: int = 0, stop: int | None = None, request: str = "-", together: int = 1
    ) -> Load:
        """As `retrieve`, in the background and behind the loads asked for before; answers at once.

        `out` belongs to the Load, from token `start` on, until it is done. On a GPU what the current stream has been
        given comes first, and the copies run beside what follows. When too many are waiting it is refused: done at once
        with `start` tokens, and counted.
        """
        span = self._span(tokens, out, start, stop, request, together)
        load = Load(Span([], 0, out, start, start, request, 0) if span is None else span, self.layout)
        if span is None:
            load.end(start)
            return load
        load.follow()
        if not self._loader.submit(load):
            with self._lock:
                self.stats.refused_loads += 1
        return load

    def prefetch(self, tokens: Tokens) -> Job:
        """Asks the backend to bring the prompt's chunks near, head first; answers at once."""
        keys = self._keys(tokens)
        prefetch: Prefetch = NothingToFetch()
        if self.role == "kv_producer":
            prefetch = NothingToFetch(refused="a kv_producer loads nothing")
        elif keys:
            with self._forgiving("prefetch"):
                prefetch = self.backend.prefetch([chunk.key for chunk in keys])
        if prefetch.refused and not self._refusal_told:
            self._refusal_told = True
            logger.warning("KV cache prefetch is refused: %s (said once)", prefetch.refused)
        return Job(keys[-1].stop if keys else 0, prefetch)

    def flush(self) -> int:
        """Waits until all that was stored so far has arrived; returns how many chunks since the last flush have not: in
        the farthest tier, a nearer one may have them."""
        refused = 0
        self._saver.settle()
        with self._forgiving("flush"):
            refused = self.backend.flush()
        with self._lock:
            self.stats.refused_stores += refused
        return refused

    def close(self) -> None:
        """Ends the loads in the background, each behind its block, and closes the backend; each may wait for
        blocking_timeout_secs. What is on its way to a server then is dropped, and so are the stores in the background
        that have not begun: flush() before it waits for both."""
        self._loader.close()
        self._saver.close()
        self._probes.close()
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- one lookup, one load ----------------------------------------------------------------------------------------

    def _look_up(self, keys: list[ChunkKey], total: int, cached: int) -> int:
        hits: list[ChunkKey] = []
        tiers: list[Tier] = []
        began_s, took_s = self._clock(), 0.0
        with self._forgiving("lookup"):
            present = self.backend.match([chunk.key for chunk in keys]) if keys else 0
            took_s = self._clock() - began_s
            tiers = self.backend.tiers_of([chunk.key for chunk in keys[:present]])
            hits = keys[:present]
            if "remote" in tiers:
                self.break_even.question_took(took_s)
        hit = hits[-1].stop if hits else 0
        with self._lock:
            self.stats.lookups += 1
            self.stats.lookup_seconds += took_s
            self.stats.lookup_tokens += total
            self.stats.hit_tokens += hit
            counts = self.stats.tier_tokens
            counts["engine"] += min(cached, total)
            for chunk, tier in zip(hits, tiers, strict=True):
                counts[tier] += max(chunk.stop - max(chunk.start, cached), 0)
            counts["miss"] += max(total - max(hit, cached), 0)
        if self.config.min_retrieve_tokens == AUTO:
            self._probe(hits, tiers)
        return hit

    def _probe(self, hits: list[ChunkKey], tiers: list[Tier]) -> None:
        """Give the tiers that were given up their chance, with what was found there."""
        full = self.layout.chunk_tokens
        for tier in set(tiers):
            there = zip(hits, tiers, strict=True)
            self._probes.found(tier, (at.key for at, where in there if where == tier and at.stop - at.start == full))
        self._probes.begin()

    def _narrowed(self, plan: LoadPlan, keys: list[ChunkKey], together: int) -> LoadPlan:
        """The plan less what is not worth loading."""
        least = self.config.min_retrieve_tokens
        if least == AUTO:
            chunks = [chunk for chunk in keys if chunk.stop > plan.cached and chunk.start < plan.hit]
            rest, count = (plan.total - plan.cached) * together, 0
            if chunks and self.break_even.ask_prefill(rest, PREFILLS_ASKED_MAX * together):
                self._probes.begin(of_unmeasured=True)
            elif chunks:
                count = self.break_even.worth(self._pieces(chunks, plan.cached, plan.hit), rest)
            stop = min(chunks[count - 1].stop, plan.hit) if count else plan.cached
            return replace(plan, skipped=max(plan.hit - max(stop, plan.cached), 0))
        if isinstance(least, int) and plan.need_to_load < least:
            return replace(plan, skipped=plan.need_to_load)
        return plan

    def _pieces(self, chunks: list[ChunkKey], start: int, stop: int) -> list[Piece]:
        tiers: list[Tier] = ["remote"] * len(chunks)
        with self._forgiving("lookup"):
            tiers = self.backend.tiers_of([chunk.key for chunk in chunks])
        return pieces_of(chunks, tiers, self.layout, start, stop)

    def _span(self, tokens: Tokens, out: KV, start: int, stop: int | None, request: str, together: int) -> Span | None:
        """What is to be loaded; None: nothing is."""
        end = len(tokens) if stop is None else stop
        chunks = [chunk for chunk in self._keys(tokens) if chunk.start < end]
        if not chunks or chunks[-1].stop <= start or start >= end:
            return None
        check_kv(out, self.layout, min(chunks[-1].stop, end))
        if self.role == "kv_producer":
            return None
        first = next(place for place, chunk in enumerate(chunks) if chunk.stop > start)
        return Span(chunks, first, out, start, end, request, (len(tokens) - start) * together)

    def _load(self, load: Load) -> int:
        span, started_s = load.span, time.perf_counter()
        intake = Intake(self.backend, self._refuse_block)
        loading = TensorLoad(self.backend, load.layout, span, intake, lambda: load.cancelled)
        with self._forgiving("retrieve"), load.on_stream():
            if self.config.min_retrieve_tokens == AUTO:
                loading.run_while_worth(self.break_even)
            else:
                loading.run()
        if intake.damaged:
            with self._forgiving("delete"):
                intake.forget()
        seconds, tokens = time.perf_counter() - started_s, loading.position - span.start
        nbytes = tokens * self.layout.bytes_per_token
        with self._lock:
            self.stats.loaded_tokens += tokens
            self.stats.loaded_bytes += nbytes
            self.stats.load_seconds += seconds
            self.stats.copy_seconds += loading.copy_s
            self.stats.skipped_tokens += loading.skipped
        log_speed(logger, "Retrieved", tokens, nbytes, seconds, span.request)
        return loading.position

    def _save_later(self, save: Save) -> int:
        stored = self._store(save)
        save.kv, save.keys = [], []  # a caller that keeps a Save for its count keeps no tensors
        return stored

    # -- shared ------------------------------------------------------------------------------------------------------

    def _recent_keys(self) -> RecentKeys:
        config = self.config
        return RecentKeys(self.layout, unfull=config.save_unfull_chunk, algorithm=config.pre_caching_hash_algorithm)

    def _keys(self, tokens: Tokens) -> list[ChunkKey]:
        """The prompt's keys; the latest are kept, because a request looks up, loads and stores the same tokens."""
        return self._recent.keys(token_bytes(tokens))

    @contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        """Turns whatever the cache raises into a count and one line in the log per spell of trouble."""
        try:
            yield
        except Exception as error:
            with self._lock:
                self.stats.errors += 1
                is_new, self._failing = not self._failing, True
            if is_new:
                logger.warning("KV cache %s failed; the engine goes on without: %s", what, error, exc_info=error)
        else:
            with self._lock:
                self._failing = False

    def _refuse_block(self, key: bytes, why: LayoutError) -> None:
        with self._lock:
            self.stats.refused_blocks += 1
        logger.warning("A stored block was refused and counts as a miss: %s", why)
