"""transformers' generate() with prompts' KV taken from the store, and put there for the next time.

It serves what it can serve exactly: models whose layers attend to everything or to a sliding window, with or without
linear attention between them; one prompt or a batch of them. Anything else is a ValueError that names it, or is
computed without the store, because a wrong prefix would be wrong silently. engine/identity.py lists what a prompt's KV
depends on and which of it is in the keys. For transformers 4.57 and later.
"""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Final, NamedTuple, cast

import torch
import transformers
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvredis.adapters.engine.background import Save
from kvredis.adapters.engine.config import Role, for_device
from kvredis.adapters.engine.engine import AUTO, CacheEngine
from kvredis.adapters.engine.stats import LoadPlan
from kvredis.adapters.engine.tensors import KV, SpareMemory
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import LayoutError

from .cache import (
    CACHE,
    LayerShape,
    Origin,
    Room,
    attention_layers,
    fresh_cache,
    kept_tokens,
    linear_layers,
    note_origin,
    origin_of,
    packed,
    token_major,
)
from .cache import RoomyLayer as RoomyLayer
from .model import (
    DIGITS,
    UNSET,
    counts_columns,
    forget_deltas,
    identity_of,
    inferred_mask,
    layout_with,
    setting,
    turning_of,
    why_not_now,
    with_deltas,
)
from .model import layout_of as layout_of
from .state import Snapshots

logger = logging.getLogger(__name__)

WRONG_BEHIND_KV = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "prefill_chunk_size")
"""With these transformers gives other tokens behind KV that it has not computed, without us too: assisted generation of
5.17 and 5.23, prefill in chunks of 4.57 to 5.17. So a prompt is computed whole."""

NEEDS_ALL_POSITIONS: Final = ("output_hidden_states", "output_attentions", "penalty_alpha", "dola_layers")
"""With these generate() gives back or uses more of a prompt's positions than their KV, so all of them are computed."""
DYNAMIC: Final = ("dynamic", "hybrid") if int(transformers.__version__.partition(".")[0]) >= 5 else ("dynamic",)
"""Values of cache_implementation that mean the usual cache: "hybrid" stands in Gemma's checkpoints, and transformers 5
takes it for nothing."""
GENERATION: Final = frozenset(
    {*signature(vars(GenerationMixin)["generate"]).parameters, *vars(UNSET)}
    | {"attention_mask", "tokenizer", "assistant_tokenizer", "trust_remote_code", "use_model_defaults"}
    | {"logits_to_keep", "num_logits_to_keep", "return_dict", "output_router_logits"}
)
"""Options that say how to generate and are no input of the model, beside its tokens and their mask."""

IDENTITIES_MAX: Final = 256
"""Models as they were, of which is known that they can be served: training makes a new one with each step."""
OWN_DIGITS: Final = re.compile(rf"\+[0-9a-f]{{{DIGITS}}}$")
"""What layout_of has put behind a model's name."""
TAIL = 2
"""Tokens behind a state that are computed at once: one alone takes the way of generated tokens, which in some models
(Zamba2, Nemotron-H) bounds the steps of time in another manner than a prompt's."""
PADS_ILL = "this model gives a prompt other logits behind padding: give prompts of one length, or one at a time"

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


@dataclass(slots=True)
class Call:
    """One generate() under way: what it was asked, and what it knows."""

    input_ids: torch.Tensor
    mask: torch.Tensor
    rows: list[Row]
    past: Cache | None
    request: str
    identity: str = ""
    """Of the model, when it began."""
    is_turned: bool = False
    """Whether it is longer than what the model's first rotary angles are for (LongRoPE)."""
    plans: list[LoadPlan] = field(default_factory=list)

    @property
    def keys_of(self) -> str:
        """Digits that its keys have for the model: other ones with other rotary angles."""
        return (
            hashlib.sha256(f"{self.identity} turned".encode()).hexdigest()[:DIGITS] if self.is_turned else self.identity
        )

    @property
    def cached(self) -> int:
        """Columns that the caller's cache has already."""
        return 0 if self.past is None else int(self.past.get_seq_length())


class Part(NamedTuple):
    """One prompt of a batch that is computed by itself."""

    call: Call
    cache: Cache
    room: Room
    loaded: int


Taken = list[tuple[list[int], torch.Tensor]]
"""States to store, and the tokens that they are behind."""


class CachedModel:
    """A causal language model whose prompts' KV outlives the request, the process and the machine.

    Before each prompt it reads all weights and settings of the model (weights.py says what that costs),
    and uses keys of exactly these: after a training step, with another adapter or another attention implementation a
    prompt is computed, and what the earlier ones stored is found again when they are back. The engine's layout may name
    the model as it likes.

    Several threads may call generate() at a time: loads and stores take turns, generation runs side by side, except
    that of models that keep positions on themselves (M-RoPE), or angles that go by the prompt's length (LongRoPE,
    dynamic NTK), which take turns as a whole.

    `last_plans` is what the latest generate() of any thread found for each prompt, and `last_loaded` how many tokens,
    of all prompts together, it then took from the store. With `behind` (the default where the model is not on a CPU)
    prompts are stored in the background while generate() returns, unless the caller has their cache too; flush() of the
    engine waits for that.

    Raises LayoutError as layout_of does, for an engine whose layout has another shape than the model's KV, for weights
    that are offloaded or on several devices, and for linear attention that cannot go on from a stored state.
    """

    def __init__(self, model: PreTrainedModel, engine: CacheEngine, *, behind: bool | None = None) -> None:
        self.model = model
        self.engine = engine
        self.last_plans = [LoadPlan(0, 0, 0)]
        self.last_loaded = 0
        self._spare = SpareMemory()
        self._behind = model.device.type != "cpu" if behind is None else behind
        self._saves: list[tuple[list[int], Save]] = []
        self._counts_columns = counts_columns(model)
        self._with_deltas = with_deltas(model)
        self._turning = turning_of(model)
        self._said: set[str] = set()
        self._in_flight = 0
        devices = {weight.device for weight in model.parameters()}
        if len(devices) > 1 or model.device.type == "meta":
            named = ", ".join(sorted(map(str, devices)))
            raise LayoutError(f"{type(model).__name__}: its weights are on {named}: offloading and several devices are"
                              " not supported")  # fmt: skip
        self._name = OWN_DIGITS.sub("", engine.layout.model)
        self._served: set[str] = set()
        self._shapes: tuple[LayerShape, ...] = ()
        self._use(identity_of(model))
        kinds = fresh_cache(model.config)
        self._has_windows = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in kinds.layers)
        self._snapshots = None
        if linear_layers(kinds):
            self._snapshots = Snapshots(model, engine, self._name)

    @classmethod
    def open(
        cls, model: PreTrainedModel, config: Config | None = None, name: str = "", *, kv_role: Role = "kv_both"
    ) -> "CachedModel":
        """A cached model with an engine of its own, configured by the environment unless `config` is given.

        Raises LayoutError (a ValueError) as layout_of and the class do, ConfigError as Config.load and CacheEngine do.
        """
        config = for_device(config or Config.load(), model.device.type)
        engine = CacheEngine(config, layout_of(model, name), role=kv_role)
        try:
            return cls(model, engine)
        except BaseException:
            engine.close()
            raise

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
        linear attention each prompt is loaded and computed by itself, up to its last whole chunk first, and a hit ends
        where that was done before; then the batch goes on together. With LongRoPE prompts on either side of the length
        at which the angles change have keys of their own.

        `past_key_values` (a DynamicCache), or `cache`, as transformers calls it since 5.24, may hold the KV of the
        first columns: they are kept, and only what is behind them is loaded. What follows is stored if this method has
        given that cache back and the model is as it was then; if the model is another now, nothing is loaded or stored.
        Where the cache has forgotten some of it (a window that is transformers' own, a state), it is used as it is, and
        nothing is loaded or stored. Prompts are stored when generate() is done, so a streamer gets its tokens first;
        with save_decode_cache that of the generated tokens too, for a conversation's next turn.

        Nothing is loaded or stored, and all is as model.generate() does it: with use_cache=False, for hidden states and
        attentions (which would lack the positions that are loaded) and what else NEEDS_ALL_POSITIONS names, with
        another cache_implementation than the usual, assisted and prompt-lookup decoding, under torch.autocast, in
        training mode, and with hooks that were registered by the application. The log says each reason once.

        Without attention_mask it is what transformers infers: pad_token_id is padding, unless it is an eos_token_id.
        Raises ValueError for beams, padding elsewhere or of a model whose positions are columns or whose linear
        attention does not heed it, assisted decoding behind a cache that is not empty, input that is not
        tokens, a cache of another kind, or two, and LayoutError where the model was changed into one that layout_of
        refuses.
        """
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are two words for one argument: give one")
        past = past_key_values if cache is None else cache
        is_mask_inferred = options.get("attention_mask") is None
        mask = inferred_mask(self.model, input_ids, options) if is_mask_inferred else options["attention_mask"]
        rows = self._rows(input_ids, past, mask, options, is_mask_inferred=is_mask_inferred)
        call = Call(input_ids, mask, rows, past, request)
        with self.engine.turn if self._with_deltas or self._turning is not None else nullcontext():
            if setting(self.model, options, "use_cache") is False:  # a cache of ours would be used all the same
                return self._plainly(call, options)
            why = self._why_not(options)
            if not why:
                call.identity = identity_of(self.model)
                why = self._why_not_as_long(call) or self._why_not_behind(call)
            if why:
                if self._is_new(why):
                    logger.warning("generate() neither loads nor stores KV: %s (said once)", why)
                if past is not None:  # what is put into it now is not of the model alone
                    note_origin(past, Origin("", input_ids, mask))
                return self._plainly(call, options)
            if past is not None and call.cached and (self._snapshots or kept_tokens(past) < call.cached):
                return self._plainly(call, options)
            return self._served_by_store(call, options)

    def _served_by_store(self, call: Call, options: dict[str, Any]) -> Any:
        is_known = not call.cached or self._is_ours(call)
        with self.engine.turn:
            self._in_flight += 1
        try:
            with self.engine.turn:
                self._use(call.keys_of)
                if not call.cached:
                    forget_deltas(self._with_deltas, [row.pad for row in call.rows])
                self._wait_for_heads(call.rows)
                call.plans = self.last_plans = [
                    self.engine.plan(
                        row.tokens,
                        cached=max(call.cached - row.pad, 0),
                        request=call.request,
                        together=len(call.rows),
                    )
                    for row in call.rows
                ]
                width = self._room_tokens(call.input_ids.shape[1], options)
                parts = self._parts(call) if self._snapshots and (len(call.rows) > 1 or call.rows[0].pad) else []
                cache, room = self._assembled(call, width) if parts else self._filled(call, width)
            options["attention_mask"] = call.mask
            if setting(self.model, options, "cache_implementation") is not None:  # the usual one, which is ours now
                options["cache_implementation"] = None
            with nullcontext() if parts else self._timed(cache, len(call.rows)):
                snapshots = self._advance(call, cache) if not parts else self._gathered(call, cache, room, parts)
                result = cast(Any, self.model).generate(call.input_ids, **{CACHE: cache}, **options)
        finally:
            with self.engine.turn:
                self._in_flight -= 1
        if not is_known:
            return result
        is_same = self._is_as_it_was(call, options)
        self._note(call, cache, result, call.keys_of if is_same else "")
        if is_same:
            with self.engine.turn:
                self._use(call.keys_of)
                self._store(call, cache, room, result)
                for tokens, taken in snapshots:
                    assert self._snapshots is not None
                    self._snapshots.store(tokens, taken)
        return result

    def close(self) -> None:
        """Waits until what is stored in the background has been handed over, and closes the engine; the model is the
        caller's."""
        for _, save in self._saves:
            save.wait()
        self._spare.close()
        self.engine.close()

    # -- what is served, and by which keys ---------------------------------------------------------------------------

    def _use(self, identity: str) -> None:
        """Have the engine use the keys of the model as it is now. Raises LayoutError where it cannot be served so."""
        layout = self.engine.layout
        if identity not in self._served:
            named = self._name or type(self.model).__name__
            made, self._shapes = layout_with(self.model, named, identity, layout.chunk_tokens)
            own = replace(made, model=layout.model, rank=layout.rank, world_size=layout.world_size, part=layout.part)
            if own != layout:
                raise LayoutError(f"{self._name}: the engine's layout is {layout}, that of the model's KV {own}")
            if len(self._served) >= IDENTITIES_MAX:
                self._served.clear()
            self._served.add(identity)
        self.engine.use_model(f"{self._name}+{identity}")

    def _why_not(self, options: Mapping[str, Any]) -> str:
        for name in NEEDS_ALL_POSITIONS:
            if setting(self.model, options, name):
                return f"{name} asks for more of a prompt than its KV"
        for name in WRONG_BEHIND_KV:
            if setting(self.model, options, name):
                return f"{name} would give other tokens behind loaded KV: leave it out to load"
        if setting(self.model, options, "custom_generate") is not None:
            return "custom_generate keeps KV in another way"
        implementation = setting(self.model, options, "cache_implementation")
        if implementation is not None and implementation not in DYNAMIC:
            return (
                f"cache_implementation {implementation!r} is a cache that is not filled by token: leave it out to load"
            )
        return why_not_now(self.model)

    def _why_not_as_long(self, call: Call) -> str:
        """Why nothing may be loaded or stored of prompts as long as these; else "", and the call knows its angles."""
        if self._snapshots is not None and len(call.rows) > 1 and min(len(row.tokens) for row in call.rows) < TAIL:
            return "a prompt of one token in a batch of a model with linear attention"
        if self._turning is None:
            return ""
        rope, tokens = self._turning
        longest, width = max(len(row.tokens) for row in call.rows), call.input_ids.shape[1]
        if longest <= tokens and width <= tokens:
            return ""
        if rope == "dynamic":
            return f"rope_type dynamic gives each prompt of more than {tokens} tokens angles of its own"
        if longest < width or width < tokens + 2:  # Phi-3 computes all anew behind a cache of so many columns
            return f"rope_type longrope gives other angles from {tokens + 1} columns on"
        call.is_turned = True
        return ""

    def _why_not_behind(self, call: Call) -> str:
        if call.cached >= call.input_ids.shape[1]:  # transformers computes all of them again, and appends that
            return f"{CACHE} holds as many tokens as there are in the prompt, or more"
        origin = None if call.past is None or not call.cached else origin_of(call.past)
        is_strange = origin is None and self._turning is not None and bool(call.cached)
        if not is_strange and (origin is None or origin.identity == call.keys_of):
            return ""
        return f"{CACHE} holds KV of other weights or settings, or what was computed without the store"

    def _is_ours(self, call: Call) -> bool:
        """Whether the caller's cache is one that generate() has given back, of the model as it is now."""
        origin = None if call.past is None else origin_of(call.past)
        return origin is not None and origin.is_of(call.keys_of, call.input_ids, call.mask, call.cached)

    def _is_as_it_was(self, call: Call, options: Mapping[str, Any]) -> bool:
        """Whether the model is still what it was when the call began; not asked where all is stored already."""
        chunk, config = self.engine.layout.chunk_tokens, self.engine.config
        ends = (len(row.tokens) if config.save_unfull_chunk else len(row.tokens) // chunk * chunk for row in call.rows)
        is_new = any(end > plan.hit for end, plan in zip(ends, call.plans, strict=True))
        if self.engine.role == "kv_consumer" or not (is_new or config.save_decode_cache):
            return True
        if not self._why_not(options) and identity_of(self.model) == call.identity:
            return True
        if self._is_new("changed"):
            logger.warning("A prompt is not stored: its model changed while it was computed (said once)")
        return False

    def _note(self, call: Call, cache: Cache, result: Any, identity: str) -> None:
        """Note on the cache whose KV it holds, if the caller can have it."""
        if call.past is None and isinstance(result, torch.Tensor):
            return
        ids = result if isinstance(result, torch.Tensor) else result.sequences
        ones = call.mask.new_ones(len(ids), ids.shape[1] - call.mask.shape[1])
        note_origin(cache, Origin(identity, ids, torch.cat([call.mask, ones], dim=1)))

    def _plainly(self, call: Call, options: dict[str, Any]) -> Any:
        """Generate as the model does without us."""
        self.last_plans = [LoadPlan(len(row.tokens), 0, min(call.cached, len(row.tokens))) for row in call.rows]
        self.last_loaded = 0
        own = {} if call.past is None else {CACHE: call.past}
        return cast(Any, self.model).generate(call.input_ids, **own, **options)

    def _is_new(self, reason: str) -> bool:
        """Whether this reason to do without the store has not been said yet."""
        is_new = reason not in self._said
        self._said.add(reason)
        return is_new

    # -- loading -----------------------------------------------------------------------------------------------------

    def _filled(self, call: Call, width: int) -> tuple[Cache, Room | None]:
        """The cache to generate with (the caller's if there is one), with room for `width` columns; None: the caller's
        as it was.

        Whatever is loaded is counted in last_loaded.
        """
        rows, past, cached = call.rows, call.past, call.cached
        stop = min(row.pad + plan.stop for row, plan in zip(rows, call.plans, strict=True))
        self.last_loaded = 0
        if past is not None and cached and stop <= cached and not self._has_windows:
            return past, None
        state = None
        if self._snapshots is not None:
            stop, state = self._snapshots.find(rows[0].tokens, min(stop, len(rows[0].tokens) - TAIL))
        room = self._room(len(rows), width)
        if past is not None and cached:
            room.fill_from(past, cached)
        reached = max(stop, cached)
        for number, row in enumerate(rows):
            room.blank(number, row.pad)
            own = max(cached - row.pad, 0)
            if stop - row.pad > own:
                kv = room.row(number, row.pad)
                loaded = self.engine.retrieve(
                    row.tokens, kv, start=own, stop=stop - row.pad, request=call.request, together=len(rows)
                )
                reached = min(reached, row.pad + loaded)
        if state is not None and reached < stop:  # a state without the KV before it is worth nothing
            reached, state = 0, None
        self.last_loaded = sum(max(reached - max(cached, row.pad), 0) for row in rows)
        kinds = fresh_cache(self.model.config)
        if state is not None and self._snapshots is not None:
            self._snapshots.put([state], kinds)
        cache = kinds if past is None else past
        room.furnish(cache, kinds, reached)
        return cache, room

    def _parts(self, call: Call) -> list[Part]:
        """Each prompt of a batch by itself, with what is loaded of it: a state is one of whole chunks of tokens, and
        these end in other columns of each row."""
        parts = list[Part]()
        for row, plan in zip(call.rows, call.plans, strict=True):
            ids = call.input_ids[len(parts) : len(parts) + 1, row.pad :]
            alone = replace(call, input_ids=ids, mask=torch.ones_like(ids), rows=[Row(0, row.tokens)], plans=[plan])
            alone.past = None
            cache, room = self._filled(alone, len(row.tokens))
            assert room is not None
            parts.append(Part(alone, cache, room, self.last_loaded))
        self.last_loaded = sum(part.loaded for part in parts)
        return parts

    def _assembled(self, call: Call, width: int) -> tuple[Cache, Room]:
        """An empty cache for the whole batch, and the room for it."""
        kinds = fresh_cache(self.model.config)
        return kinds if call.past is None else call.past, self._room(len(call.rows), width)

    def _gathered(self, call: Call, cache: Cache, room: Room | None, parts: list[Part]) -> Taken:
        """Compute each prompt but for its last tokens (TAIL), and bring them together in the batch's cache. The states
        worth storing."""
        assert room is not None
        assert self._snapshots is not None
        taken, ends = Taken(), list[torch.Tensor | None]()
        for number, (row, part) in enumerate(zip(call.rows, parts, strict=True)):
            taken += self._advance(part.call, part.cache)
            computed = len(row.tokens) - TAIL
            self._compute(part.call, part.cache, computed)
            room.blank(number, row.pad)
            ends.append(self._snapshots.take(part.cache) if computed else None)
            room.row(number, row.pad)[:, :, :computed] = part.room.row(0, 0)[:, :, :computed]
        kinds = fresh_cache(self.model.config)
        if any(end is not None for end in ends):
            self._snapshots.put(ends, kinds)
        room.furnish(cache, kinds, call.input_ids.shape[1] - TAIL)
        return taken

    def _room(self, rows: int, width: int) -> Room:
        return Room(self.engine.layout, self._shapes, rows, width, self.model.device, self._spare)

    def _advance(self, call: Call, cache: Cache) -> Taken:
        """With linear attention: compute up to the ends of chunks where the state is worth storing, and give these.

        These are where the KV that was found ends, since others share that prefix, and the prompt's last whole chunk.
        With LongRoPE's other angles: compute all but the last column, since models forget a cache that is shorter than
        what these angles are for.
        """
        if call.is_turned:
            self._compute(call, cache, call.input_ids.shape[1] - 1)
        if self._snapshots is None or self.engine.role == "kv_consumer":
            return []
        chunk, taken = self.engine.layout.chunk_tokens, Taken()
        last = (len(call.rows[0].tokens) - TAIL) // chunk * chunk
        for stop in sorted({min(call.plans[0].hit // chunk * chunk, last), last}):
            if stop <= cache.get_seq_length():
                continue
            self._compute(call, cache, stop)
            taken.append((call.rows[0].tokens[:stop], self._snapshots.take(cache)))
        return taken

    def _compute(self, call: Call, cache: Cache, stop: int) -> None:
        """Compute the prompts' columns behind those of the cache up to `stop`."""
        start, mask = cache.get_seq_length(), call.mask[:, :stop]
        if stop <= start:
            return
        more = {}
        if not bool(mask.all()):
            more["position_ids"] = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)[:, start:]
        with torch.no_grad():
            self.model(
                input_ids=call.input_ids[:, start:stop],
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=1,
                **{CACHE: cache},
                **more,
            )

    def _wait_for_heads(self, rows: list[Row]) -> None:
        """Let what begins as these prompts do be stored before it is looked for."""
        chunk = self.engine.layout.chunk_tokens
        heads = [row.tokens[:chunk] for row in rows]
        for head, save in self._saves:
            if head in heads:
                save.wait()
        self._saves = [pair for pair in self._saves if not pair[1].done]

    # -- storing -----------------------------------------------------------------------------------------------------

    def _store(self, call: Call, cache: Cache, room: Room | None, result: Any) -> None:
        rows, request, computed = call.rows, call.request, kept_tokens(cache)
        is_ours = call.past is None and isinstance(result, torch.Tensor)
        in_room = room is not None and room.holds(cache)
        for number, row in enumerate(rows):
            kv: KV = room.row(number, row.pad) if room and in_room else self._copied(cache, number, row.pad)
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

    def _copied(self, cache: Cache, number: int, pad: int) -> KV:
        """One row's KV out of a cache that is not in a room."""
        layers = token_major(cache, number, pad)
        return packed(layers) if self.engine.layout.planes == 1 else layers

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
        device, thread = self.model.device, threading.get_ident()
        before, began_s, left = 0, 0.0, 2

        def now_s() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter()

        def begin(*_: object) -> None:
            nonlocal before, began_s
            if threading.get_ident() == thread:  # the hooks see other threads' passes too
                before, began_s = cache.get_seq_length(), now_s()

        def end(*_: object) -> None:
            nonlocal left
            if threading.get_ident() != thread or not left:
                return
            if self._in_flight == 1:  # beside another pass it would have taken longer
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
        for name in WRONG_BEHIND_KV if past is not None and past.get_seq_length() else ():
            if setting(self.model, options, name):
                raise ValueError(f"{name}: transformers gives other tokens behind a cache that is not empty: give none")
        _refuse_other_input(options)
        if past is not None:
            try:
                attention_layers(past, CACHE)
            except LayoutError as error:
                raise LayoutError(f"{error}: give a DynamicCache, or none") from None
        if mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask is {list(mask.shape)}, input_ids {list(input_ids.shape)}")
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
        if self._snapshots is not None and not self._snapshots.pads_well:
            raise ValueError(f"{PADS_ILL}{hint}")
        return [Row(pad, ids[pad:].tolist()) for pad, ids in zip(pads, input_ids, strict=True)]


def _refuse_other_input(options: Mapping[str, Any]) -> None:
    """Keys name tokens alone: what else the KV would depend on must not be there, be it pictures, positions, embeddings
    or the names of adapters."""
    for name, value in options.items():
        if value is None or name in GENERATION:
            continue
        if name.endswith("token_type_ids") and isinstance(value, torch.Tensor) and not bool(value.any()):
            continue
        raise ValueError(f"{name}: the KV of a prompt with more input than its tokens cannot be cached")
