"""transformers' generate() with a prompt's KV taken from the store, and put there for the next time.

Written for the Cache API of transformers 5 (cache.layers[i].keys of [batch, kv_heads, tokens, head_dim]). It serves
what it can serve exactly: one prompt at a time, models whose layers all keep every token. Anything else is a ValueError
that names it, because a wrong prefix would be wrong silently.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvredis.backends.config import Config

from .engine import AUTO, CacheEngine, Role
from .layout import ChunkLayout
from .stats import LoadPlan
from .tensors import dtype_name, empty_kv

ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the whole sequence's length: a prefix has other keys in another prompt."""


NEW_TOKENS = 256
"""Room for generated tokens when nothing says how many there will be."""
NEW_TOKENS_MAX = 4096
"""More room than this is not taken in advance."""


def layout_of(model: PreTrainedModel, name: str = "", chunk_tokens: int = 256) -> ChunkLayout:
    """The layout of a model's KV. `name` (default: where the weights were loaded from) stands for these very weights.

    Raises ValueError for a model without a name, and for one whose KV cannot be cut at any token: sliding window,
    linear or latent attention, KV shared between layers, an encoder, rotary angles that depend on the whole length.
    """
    name = name or model.config._name_or_path
    if not name:
        raise ValueError("a model made from scratch needs a name: models that share one would read each other's KV")
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name}: encoder-decoder models are not supported")
    layers = full_layers(DynamicCache(config=model.config), name)
    if len(layers) != config.num_hidden_layers:
        raise ValueError(f"{name}: {config.num_hidden_layers} layers share the KV of {len(layers)}; not supported")
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{name}: latent attention (kv_lora_rank) is not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ROPES_BY_LENGTH:
        raise ValueError(f"{name}: rope_type {rope['rope_type']} depends on the whole length; not supported")
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ChunkLayout(len(layers), kv_heads, head_dim, dtype_name(model.dtype), chunk_tokens, model=name)


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """A DynamicLayer with room behind its last token, so that growing by a token does not copy all the others.

    `keys` and `values` are the whole memory, [1, kv_heads, room, head_dim], of which the first `tokens` are valid. Once
    the room is used up, or something has put other tensors in its place, it goes on as its parent does.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._room = (keys, values)
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As DynamicLayer.update: appends, and returns all keys and values."""
        keys, values = self._room
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        moved = used and keys_and_values(self)[0].data_ptr() != keys.data_ptr()
        if moved or end > keys.shape[2] or key_states.shape[0] != 1:
            longer = super().update(key_states, value_states, *args, **kwargs)
            return longer[0], longer[1]
        keys[:, :, used:end] = key_states
        values[:, :, used:end] = value_states
        self.is_initialized = True
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values


class CachedModel:
    """A causal language model whose prompts' KV outlives the request, the process and the machine.

    `last_plan` is what the latest generate() found, and `last_loaded` how many tokens it then took from the store.
    """

    def __init__(self, model: PreTrainedModel, engine: CacheEngine) -> None:
        self.model = model
        self.engine = engine
        self.last_plan = LoadPlan(0, 0, 0)
        self.last_loaded = 0

    @classmethod
    def open(
        cls, model: PreTrainedModel, config: Config | None = None, name: str = "", *, kv_role: Role = "kv_both"
    ) -> "CachedModel":
        """A cached model with an engine of its own, configured by the environment unless `config` is given.

        Raises ValueError as layout_of does, ConfigError as Config.load and CacheEngine do.
        """
        return cls(model, CacheEngine(config or Config.load(), layout_of(model, name), role=kv_role))

    def generate(
        self, input_ids: torch.Tensor, *, past_key_values: Cache | None = None, request: str = "-", **options: Any
    ) -> Any:
        """model.generate() of one prompt, [1, tokens]; every other argument passes through, and so does the result.

        `past_key_values` (a DynamicCache) may hold the KV of the prompt's first tokens: they are kept, and only what is
        behind them is loaded. The prompt's KV is stored when generate() is done, so a streamer gets its tokens first;
        with save_decode_cache that of the generated tokens too, for a conversation's next turn.
        Raises ValueError for more than one sequence, padding, or a cache of another kind.
        """
        self._refuse(input_ids, past_key_values, options)
        tokens = input_ids[0].tolist()
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        self.last_plan = self.engine.plan(tokens, cached=cached, request=request)
        cache, self.last_loaded = self._filled(tokens, past_key_values, self._room(len(tokens), options), request)
        options["attention_mask"] = torch.ones_like(input_ids)
        with self._timed(cache):
            result = cast(Any, self.model).generate(input_ids, past_key_values=cache, **options)
        computed = cache.get_seq_length()
        for stored in self._to_store(tokens, result):
            if computed:
                self.engine.store(stored[:computed], token_major(cache), request=request)
        return result

    def close(self) -> None:
        """Closes the engine; the model is the caller's."""
        self.engine.close()

    def _to_store(self, prompt: list[int], result: Any) -> list[list[int]]:
        """The token sequences whose KV is stored. The prompt alone is only one more where its end has a key of its own;
        else its chunks are the first ones of the whole."""
        config = self.engine.config
        if not config.save_decode_cache:
            return [prompt]
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        whole = sequences[0].tolist()
        return [prompt, whole] if config.save_unfull_chunk else [whole]

    @contextmanager
    def _timed(self, cache: Cache) -> Iterator[None]:
        """Tell the engine how long the first forward pass takes, if it wants to know. Waits for the device around it,
        as the choice of the first token does anyway."""
        if self.engine.config.min_retrieve_tokens != AUTO:
            yield
            return
        device = self.model.device
        before = cache.get_seq_length()
        began_s = 0.0

        def now_s() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter()

        def begin(*_: object) -> None:
            nonlocal began_s
            began_s = now_s()
            begins.remove()

        def end(*_: object) -> None:
            self.engine.prefill_took(cache.get_seq_length() - before, now_s() - began_s)
            ends.remove()

        begins, ends = self.model.register_forward_pre_hook(begin), self.model.register_forward_hook(end)
        try:
            yield
        finally:
            begins.remove()
            ends.remove()

    def _filled(self, tokens: list[int], past: Cache | None, room: int, request: str) -> tuple[Cache, int]:
        """The cache to generate with (`past` if there is one), and how many of its tokens came from the store."""
        plan, layout = self.last_plan, self.engine.layout
        if past is not None and not plan.need_to_load:
            return past, 0
        kv = empty_kv(layout, room, self.model.device)
        views = [(pair[0].transpose(0, 1)[None], pair[1].transpose(0, 1)[None]) for pair in kv]
        if plan.cached and past is not None:
            for pair, layer in zip(views, full_layers(past), strict=True):
                for target, own in zip(pair, keys_and_values(layer), strict=True):
                    target[:, :, : plan.cached] = own
        stop = self.engine.retrieve(tokens, kv, start=plan.cached, stop=plan.stop, request=request)
        cache = DynamicCache(config=self.model.config) if past is None else past
        if stop > plan.cached or past is None:
            cache.layers = [RoomyLayer(keys, values, stop) for keys, values in views]
        return cache, stop - plan.cached

    def _room(self, prompt_tokens: int, options: dict[str, Any]) -> int:
        """Tokens that the cache has memory for: the prompt and, within a bound, what is to be generated."""
        settings = options.get("generation_config") or self.model.generation_config
        new_tokens = options.get("max_new_tokens") or getattr(settings, "max_new_tokens", None) or NEW_TOKENS
        return prompt_tokens + min(int(new_tokens), NEW_TOKENS_MAX)

    def _refuse(self, input_ids: torch.Tensor, past: Cache | None, options: dict[str, Any]) -> None:
        if input_ids.ndim != 2 or input_ids.shape[0] != 1:
            raise ValueError(f"one prompt at a time: input_ids must be [1, tokens], not {list(input_ids.shape)}")
        settings = options.get("generation_config") or self.model.generation_config
        for name in ("num_beams", "num_return_sequences"):
            count = options.get(name) or getattr(settings, name, None) or 1
            if count != 1:
                raise ValueError(f"one sequence at a time: {name} is {count}")
        mask = options.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            raise ValueError("a padded prompt cannot be cached: attention_mask must be all ones")
        if past is not None:
            full_layers(past, "past_key_values")


def full_layers(cache: Cache, name: str = "the cache") -> list[DynamicLayer]:
    """The cache's layers, all of which keep every token. Raises ValueError that names the first one that does not."""
    layers = []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or type(layer) not in (DynamicLayer, RoomyLayer):
            raise ValueError(f"{name}: layer {index} has a {type(layer).__name__}; only full attention is supported")
        layers.append(layer)
    return layers


def keys_and_values(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer that has been used, each [1, kv_heads, tokens, head_dim]."""
    assert isinstance(layer.keys, torch.Tensor)
    assert isinstance(layer.values, torch.Tensor)
    return layer.keys, layer.values


def token_major(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's K and V as (tokens, kv_heads, head_dim) views of a cache of one sequence."""
    return [
        (keys[0].transpose(0, 1), values[0].transpose(0, 1))
        for keys, values in map(keys_and_values, full_layers(cache))
    ]
