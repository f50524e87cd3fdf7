"""transformers' generate() with prompts' KV taken from the store, and put there for the next time.

It serves what it can serve exactly: models whose layers attend to everything or to a sliding window, with or without
linear attention between them; one prompt or a batch of them. Anything else is a ValueError that names it, because a
wrong prefix would be wrong silently. For transformers 4.57 and later.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvredis.backends.config import Config

from .engine import AUTO, CacheEngine, Role
from .engine_config import for_device
from .later import Save
from .stats import LoadPlan
from .tensors import KV
from .transformers_cache import (
    CACHE,
    Room,
    attention_layers,
    fresh_cache,
    kept_tokens,
    linear_layers,
    token_major,
)
from .transformers_cache import RoomyLayer as RoomyLayer
from .transformers_model import active_adapters, counts_columns, forget_deltas, inferred_mask, setting, with_deltas
from .transformers_model import layout_of as layout_of
from .transformers_state import Snapshots

WRONG_BEHIND_KV = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "prefill_chunk_size")
"""With these transformers gives other tokens behind KV that it has not computed, without us too: assisted generation of
5.17 and 5.23, prefill in chunks of 4.57 to 5.17."""

ONE_AT_A_TIME = "one prompt at a time, without padding, for a model with linear attention"

NEW_TOKENS = 256
"""Room for generated tokens when nothing says how many there will be."""
NEW_TOKENS_MAX = 4096
"""More room than this is not taken in advance."""
SAVES_MAX = 2
"""Prompts whose memory waits for its store while the next one is computed."""


class Row(NamedTuple):
    """One prompt of a batch: its tokens, and how many columns of padding are before them."""

    pad: int
    tokens: list[int]


class CachedModel:
    """A causal language model whose prompts' KV outlives the request, the process and the machine.

    `last_plans` is what the latest generate() found for each prompt, and `last_loaded` how many tokens, of all prompts
    together, it then took from the store. With `behind` (the default where the model is not on a CPU) prompts are
    stored behind generate()'s back, unless the caller has their cache too; flush() of the engine waits for that.
    """

    def __init__(self, model: PreTrainedModel, engine: CacheEngine, *, behind: bool | None = None) -> None:
        self.model = model
        self.engine = engine
        self.last_plans = [LoadPlan(0, 0, 0)]
        self.last_loaded = 0
        self._behind = model.device.type != "cpu" if behind is None else behind
        self._saves: list[tuple[list[int], Save]] = []
        self._adapters = active_adapters(model)
        self._counts_columns = counts_columns(model)
        self._with_deltas = with_deltas(model)
        kinds = fresh_cache(model.config)
        self._has_windows = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in kinds.layers)
        self._snapshots = None
        if linear_layers(kinds):
            forget_deltas(self._with_deltas, [0])  # it tries the model, behind KV too
            self._snapshots = Snapshots(model, engine)

    @classmethod
    def open(
        cls, model: PreTrainedModel, config: Config | None = None, name: str = "", *, kv_role: Role = "kv_both"
    ) -> "CachedModel":
        """A cached model with an engine of its own, configured by the environment unless `config` is given.

        Raises ValueError as layout_of does and for linear attention that cannot go on from a stored state, ConfigError
        as Config.load and CacheEngine do.
        """
        config = for_device(config or Config.load(), model.device.type)
        return cls(model, CacheEngine(config, layout_of(model, name), role=kv_role))

    @property
    def last_plan(self) -> LoadPlan:
        """What the latest generate() found for its first prompt."""
        return self.last_plans[0]

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        request: str = "-",
        **options: Any,
    ) -> Any:
        """model.generate() of [prompts, tokens]; every other argument passes through, and so does the result.

        Prompts of several lengths are padded on the left, as attention_mask says. All prompts of a batch go on from one
        column, so what is loaded ends where the hit of one ends first; each is stored as if it had been alone. With
        linear attention one prompt at a time is served; it is computed up to its last whole chunk first, and a hit
        ends where that was done before.

        `past_key_values` (a DynamicCache), or `cache`, as transformers calls it since 5.24, may hold the KV of the
        first columns: they are kept, and only what is behind them is loaded. Where it has forgotten some of it (a
        window that is transformers' own, a state), it is used as it is, and nothing is loaded or stored. Prompts are
        stored when generate() is done, so a streamer gets its tokens first; with save_decode_cache that of the
        generated tokens too, for a conversation's next turn. With use_cache=False nothing is loaded or stored either.
        Without attention_mask it is what transformers infers: pad_token_id is padding, unless it is an eos_token_id.
        Raises ValueError for beams, padding elsewhere or of a model whose positions are columns, input that is not
        tokens, a cache of another kind, or two, and where adapters are active that were not when it was opened.
        """
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are two words for one argument: give one")
        past = past_key_values if cache is None else cache
        if active_adapters(self.model) != self._adapters:
            now = ", ".join(active_adapters(self.model)) or "none"
            raise ValueError(f"other adapters than when it was opened: now {now}; open the model anew, with its layout")
        is_mask_inferred = options.get("attention_mask") is None
        mask = inferred_mask(self.model, input_ids, options) if is_mask_inferred else options["attention_mask"]
        rows = self._rows(input_ids, past, mask, options, is_mask_inferred=is_mask_inferred)
        cached = 0 if past is None else past.get_seq_length()
        if setting(self.model, options, "use_cache") is False:  # a cache of ours would be used all the same
            self.last_plans = [LoadPlan(len(row.tokens), 0, 0) for row in rows]
            self.last_loaded = 0
            own = {} if past is None else {CACHE: past}
            return cast(Any, self.model).generate(input_ids, **own, **options)
        if past is not None and cached and (self._snapshots or kept_tokens(past) < cached):
            self.last_plans = [LoadPlan(len(row.tokens), min(cached, len(row.tokens)), cached) for row in rows]
            self.last_loaded = 0
            return cast(Any, self.model).generate(input_ids, **{CACHE: past}, **options)
        if not cached:
            forget_deltas(self._with_deltas, [row.pad for row in rows])
        self._wait_for_heads(rows)
        self.last_plans = [
            self.engine.plan(row.tokens, cached=max(cached - row.pad, 0), request=request, together=len(rows))
            for row in rows
        ]
        cache, room = self._filled(rows, past, self._room_tokens(input_ids.shape[1], options), request)
        options["attention_mask"] = mask
        with self._timed(cache, len(rows)):
            snapshots = self._advance(input_ids, cache, rows[0])
            result = cast(Any, self.model).generate(input_ids, **{CACHE: cache}, **options)
        is_ours = past is None and isinstance(result, torch.Tensor)
        self._store(rows, cache, room, result, is_ours=is_ours, request=request)
        for stop, taken in snapshots.items():
            assert self._snapshots is not None
            self._snapshots.store(rows[0].tokens[:stop], taken)
        return result

    def close(self) -> None:
        """Waits until what was stored behind its back has been handed over, and closes the engine; the model is the
        caller's."""
        for _, save in self._saves:
            save.wait()
        self.engine.close()

    # -- loading -----------------------------------------------------------------------------------------------------

    def _filled(self, rows: list[Row], past: Cache | None, width: int, request: str) -> tuple[Cache, Room | None]:
        """The cache to generate with (`past` if there is one), with room for `width` columns; None: `past` as it was.

        Whatever is loaded is counted in last_loaded.
        """
        cached = 0 if past is None else past.get_seq_length()
        stop = min(row.pad + plan.stop for row, plan in zip(rows, self.last_plans, strict=True))
        self.last_loaded = 0
        if past is not None and cached and stop <= cached and not self._has_windows:
            return past, None
        state = None
        if self._snapshots is not None:
            stop, state = self._snapshots.find(rows[0].tokens, stop)
        room = Room(self.engine.layout, len(rows), width, self.model.device)
        if past is not None and cached:
            room.fill_from(past, cached)
        reached = max(stop, cached)
        for number, row in enumerate(rows):
            room.blank(number, row.pad)
            own = max(cached - row.pad, 0)
            if stop - row.pad > own:
                kv = room.row(number, row.pad)
                loaded = self.engine.retrieve(
                    row.tokens, kv, start=own, stop=stop - row.pad, request=request, together=len(rows)
                )
                reached = min(reached, row.pad + loaded)
        if state is not None and reached < stop:  # a state without the KV before it is worth nothing
            reached, state = 0, None
        self.last_loaded = sum(max(reached - max(cached, row.pad), 0) for row in rows)
        kinds = fresh_cache(self.model.config)
        if state is not None and self._snapshots is not None:
            self._snapshots.put(state, kinds)
        cache = kinds if past is None else past
        room.furnish(cache, kinds, reached)
        return cache, room

    def _advance(self, input_ids: torch.Tensor, cache: Cache, row: Row) -> dict[int, torch.Tensor]:
        """With linear attention: compute up to the ends of chunks where the state is worth storing, and give these.

        These are where the KV that was found ends, since others share that prefix, and the prompt's last whole chunk.
        """
        if self._snapshots is None or self.engine.role == "kv_consumer":
            return {}
        chunk, start = self.engine.layout.chunk_tokens, cache.get_seq_length()
        taken = {}
        for stop in sorted({self.last_plan.hit // chunk * chunk, (len(row.tokens) - 1) // chunk * chunk}):
            if stop <= start:
                continue
            with torch.no_grad():
                self.model(
                    input_ids=input_ids[:, start:stop],
                    attention_mask=torch.ones_like(input_ids[:, :stop]),
                    use_cache=True,
                    logits_to_keep=1,
                    **{CACHE: cache},
                )
            taken[stop] = self._snapshots.take(cache)
            start = stop
        return taken

    def _wait_for_heads(self, rows: list[Row]) -> None:
        """Let what begins as these prompts do be stored before anybody looks for it."""
        chunk = self.engine.layout.chunk_tokens
        heads = [row.tokens[:chunk] for row in rows]
        for head, save in self._saves:
            if head in heads:
                save.wait()
        self._saves = [pair for pair in self._saves if not pair[1].done]

    # -- storing -----------------------------------------------------------------------------------------------------

    def _store(
        self, rows: list[Row], cache: Cache, room: Room | None, result: Any, *, is_ours: bool, request: str
    ) -> None:
        computed = kept_tokens(cache)
        in_room = room is not None and room.holds(cache)
        for number, row in enumerate(rows):
            kv: KV = room.row(number, row.pad) if room and in_room else token_major(cache, number, row.pad)
            for sequence in self._to_store(number, row, result):
                tokens = sequence[: max(computed - row.pad, 0)]
                if not tokens:
                    continue
                if not (self._behind and is_ours):
                    self.engine.store(tokens, kv, request=request)
                    continue
                while len(self._saves) >= SAVES_MAX * len(rows):
                    self._saves.pop(0)[1].wait()
                save = self.engine.store_later(tokens, kv, request=request)
                self._saves.append((tokens[: self.engine.layout.chunk_tokens], save))

    def _to_store(self, number: int, row: Row, result: Any) -> list[list[int]]:
        """The token sequences whose KV is stored. The prompt alone is only one more where its end has a key of its own;
        else its chunks are the first ones of the whole."""
        config = self.engine.config
        if not config.save_decode_cache:
            return [row.tokens]
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        whole = sequences[number, row.pad :].tolist()
        return [row.tokens, whole] if config.save_unfull_chunk else [whole]

    # -- the model ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, cache: Cache, rows: int) -> Iterator[None]:
        """Tell the engine how long the first forward passes take, if it wants to know: the prompt's, and that of one
        token behind it. Waits for the device around them, as the choice of a token does anyway."""
        if self.engine.config.min_retrieve_tokens != AUTO:
            yield
            return
        device = self.model.device
        before, began_s, left = 0, 0.0, 2

        def now_s() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter()

        def begin(*_: object) -> None:
            nonlocal before, began_s
            before, began_s = cache.get_seq_length(), now_s()

        def end(*_: object) -> None:
            nonlocal left
            self.engine.prefill_took(rows * (cache.get_seq_length() - before), now_s() - began_s)
            left -= 1
            if not left:
                begins.remove()
                ends.remove()

        begins, ends = self.model.register_forward_pre_hook(begin), self.model.register_forward_hook(end)
        try:
            yield
        finally:
            begins.remove()
            ends.remove()

    def _room_tokens(self, prompt_tokens: int, options: dict[str, Any]) -> int:
        """Columns that the cache has memory for: the prompt and, within a bound, what is to be generated."""
        new_tokens = setting(self.model, options, "max_new_tokens") or NEW_TOKENS
        return prompt_tokens + min(int(new_tokens), NEW_TOKENS_MAX)

    def _rows(
        self,
        input_ids: torch.Tensor,
        past: Cache | None,
        mask: torch.Tensor,
        options: dict[str, Any],
        *,
        is_mask_inferred: bool,
    ) -> list[Row]:
        """The prompts. Raises ValueError for what cannot be served."""
        if input_ids.ndim != 2 or not input_ids.shape[0]:
            raise ValueError(f"input_ids must be [prompts, tokens], not {list(input_ids.shape)}")
        for name in ("num_beams", "num_return_sequences"):
            count = setting(self.model, options, name) or 1
            if count != 1:
                raise ValueError(f"one sequence a prompt: {name} is {count}")
        for name in WRONG_BEHIND_KV:
            if setting(self.model, options, name):
                raise ValueError(f"{name}: transformers gives other tokens behind loaded KV with it; not supported")
        _refuse_other_input(options)
        if past is not None:
            attention_layers(past, CACHE)
        if mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask is {list(mask.shape)}, input_ids {list(input_ids.shape)}")
        if self._snapshots is not None and len(input_ids) > 1:
            raise ValueError(ONE_AT_A_TIME)
        pads = [int(pad) for pad in (mask == 0).sum(dim=1)]
        if not any(pads):
            return [Row(0, ids) for ids in input_ids.tolist()]
        hint = (
            "; it was inferred from pad_token_id: if these are tokens, give attention_mask" if is_mask_inferred else ""
        )
        if any(not bool(row[pad:].all()) or pad == len(row) for pad, row in zip(pads, mask, strict=True)):
            raise ValueError(f"padding must be on the left of each prompt, by whole tokens of attention_mask{hint}")
        if self._counts_columns:
            raise ValueError(f"no padding for a model without position_ids: its prompts would have other KV{hint}")
        if self._snapshots is not None:
            raise ValueError(f"{ONE_AT_A_TIME}{hint}")
        return [Row(pad, ids[pad:].tolist()) for pad, ids in zip(pads, input_ids, strict=True)]


def _refuse_other_input(options: Mapping[str, Any]) -> None:
    """Keys name tokens alone: what else the KV would depend on must not be there."""
    for name, value in options.items():
        is_input = isinstance(value, torch.Tensor) or name == "inputs_embeds"
        if value is None or not is_input or name == "attention_mask" or name.startswith("negative_prompt"):
            continue
        if name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            continue
        if name == "token_type_ids" and not bool(value.any()):
            continue
        raise ValueError(f"{name}: the KV of a prompt with more input than its tokens cannot be cached")
