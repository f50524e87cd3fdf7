"""transformers' cache layers with room behind them and every token kept: what prompts are loaded into and stored from.

A layer of transformers grows by copying itself, and one with a sliding window forgets all but the window. A stored
prompt needs every token of every layer, so that any shorter prefix of it can be restored; so these layers lie in memory
of their own for a whole batch, hand attention the views it expects, and forget nothing.

Written for transformers 4.57 and later: cache.layers[i].keys of [batch, kv_heads, tokens, head_dim].
"""

from dataclasses import replace
from inspect import signature
from typing import Any, Final, NamedTuple, cast

import torch
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import SpareMemory, empty_kv
from kvredis.storage.errors import LayoutError

_WORDS = signature(vars(GenerationMixin)["prepare_inputs_for_generation"]).parameters

CACHE: Final = "cache" if "cache" in _WORDS else "past_key_values"
"""What models and generate() call the argument, and their outputs the field: another word since transformers 5.24."""


class _NeverMade:
    """Stands for a class of later transformers; nothing is ever one."""


LINEAR_ATTENTION: type = getattr(cache_utils, "LinearAttentionLayer", _NeverMade)
"""In older transformers models with linear attention bring caches of their own, and are refused."""
LINEAR_AND_FULL: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
"""Keeps a state and K and V by token, both."""


class Origin(NamedTuple):
    """Where the KV of a cache that generate() has given back comes from: a model's identity ("" where something else
    took part), and the columns' token ids and mask, [prompts, columns]."""

    identity: str
    ids: torch.Tensor
    mask: torch.Tensor

    def is_of(self, identity: str, ids: torch.Tensor, mask: torch.Tensor, columns: int) -> bool:
        """Whether the first `columns` are of that model and those tokens."""
        if identity != self.identity or columns > self.ids.shape[1] or len(ids) != len(self.ids):
            return False
        pairs = ((self.ids, ids), (self.mask, mask))
        return all(torch.equal(own[:, :columns], given[:, :columns].to(own)) for own, given in pairs)


def origin_of(cache: Cache) -> Origin | None:
    """What was noted of a cache; None for one that was made elsewhere."""
    return getattr(cache, "_kvredis_origin", None)


def note_origin(cache: Cache, origin: Origin) -> None:
    """Note it on the cache itself, so that a copy has it too."""
    cast(Any, cache)._kvredis_origin = origin


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """A DynamicLayer with room behind its last token, so that growing by a token does not copy all the others.

    `keys` and `values` are the whole memory, [batch, kv_heads, room, head_dim], of which the first `tokens` are valid.
    Once the room is used up, or something has put other tensors in its place, it goes on as its parent does.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._room = (keys, values)
        _begin(self, keys)
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]

    @property
    def in_place(self) -> bool:
        """Whether all its tokens are in the memory that it was made with."""
        used = self.get_seq_length()
        return not used or keys_and_values(self)[0].data_ptr() == self._room[0].data_ptr()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As DynamicLayer.update: appends, and returns all keys and values."""
        keys, values = self._room
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        if not self.in_place or end > keys.shape[2] or key_states.shape[0] != keys.shape[0]:
            longer = super().update(key_states, value_states, *args, **kwargs)
            return longer[0], longer[1]
        keys[:, :, used:end] = key_states
        values[:, :, used:end] = value_states
        self.is_initialized = True
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values


if LINEAR_AND_FULL is None:
    RoomyHybrid: Any = _NeverMade
else:

    class RoomyHybrid(RoomyLayer, LINEAR_AND_FULL):  # type: ignore[no-redef, misc, no-untyped-call]
        """The same for a layer that keeps a state beside K and V: that of `kind`, a layer of the plain class."""

        def __init__(self, keys: torch.Tensor, values: torch.Tensor, tokens: int, kind: Any) -> None:
            super().__init__(keys, values, tokens)
            own = ("keys", "values", "is_initialized", "dtype", "device")
            self.__dict__.update({name: value for name, value in vars(kind).items() if name not in own})


class RoomyWindow(DynamicSlidingWindowLayer):
    """The same for a sliding window: attention sees the window, and the room keeps what has left it.

    `keys`, `values` and cumulative_length are what the parent's would be: the last window - 1 tokens and the length of
    all. `kept` says how many tokens, from the first on, are in the room.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tokens: int, window: int) -> None:
        super().__init__(sliding_window=window)  # type: ignore[no-untyped-call]
        self._room = (keys, values)
        self.kept = tokens
        _begin(self, keys)
        self._show(tokens)

    @property
    def room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All K and V that are kept, from the first token on."""
        return self._room[0][:, :, : self.kept], self._room[1][:, :, : self.kept]

    @property
    def in_place(self) -> bool:
        """Whether all its tokens are in the memory that it was made with."""
        used = self.cumulative_length
        if not used:
            return True
        return used == self.kept and keys_and_values(self)[0].data_ptr() == self._seen(used)[0].data_ptr()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the parent's: appends, and returns the new tokens behind the window - 1 before them."""
        keys, values = self._room
        used = self.cumulative_length
        end = used + key_states.shape[-2]
        if not self.in_place or end > keys.shape[2] or key_states.shape[0] != keys.shape[0]:
            longer = super().update(key_states, value_states, *args, **kwargs)
            return longer[0], longer[1]
        keys[:, :, used:end] = key_states
        values[:, :, used:end] = value_states
        self.is_initialized = True
        self.kept = end
        self._show(end)
        first = max(used - self.sliding_window + 1, 0)
        return keys[:, :, first:end], values[:, :, first:end]

    def crop(self, tokens_to_remove: int) -> None:
        """As the parent's, below 0 for how many go and above for how many stay; in the room it is always possible,
        since what was left behind is there."""
        if not self.in_place:
            super().crop(tokens_to_remove)
            self.kept = min(self.kept, self.cumulative_length)
            return
        end = tokens_to_remove if tokens_to_remove > 0 else max(self.cumulative_length + tokens_to_remove, 0)
        if end < self.cumulative_length:
            self.kept = end
            self._show(end)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """As the parent's; the room has the rows in another order then, and counts no more."""
        self.kept = 0
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As the parent's, with the same end."""
        self.kept = 0
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """As the parent's, with the same end."""
        self.kept = 0
        super().batch_select_indices(indices)

    def _seen(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = max(end - self.sliding_window + 1, 0)
        return self._room[0][:, :, first:end], self._room[1][:, :, first:end]

    def _show(self, end: int) -> None:
        self.cumulative_length = end
        self.keys, self.values = self._seen(end)


KINDS: Final = (DynamicLayer, DynamicSlidingWindowLayer, LINEAR_AND_FULL, RoomyLayer, RoomyHybrid, RoomyWindow)
"""Layers that keep K and V by token in a way that is known here."""


class LayerShape(NamedTuple):
    """How many heads K and V of one layer have, and of which size."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def key_size(self) -> int:
        """Numbers of one token's K."""
        return self.key_heads * self.key_dim

    @property
    def size(self) -> int:
        """Numbers of one token's K and V."""
        return self.key_size + self.value_heads * self.value_dim


def layout_for(shapes: tuple[LayerShape, ...], dtype: str, chunk_tokens: int, model: str) -> ChunkLayout:
    """The layout of KV of these shapes.

    Where K and V of all layers are alike it has them by layer, plane and head. Where they differ (the latent and the
    rotated part of MLA, Gemma 4's layers that see everything) it is packed: one layer, plane and head, whose vector is
    a token's K and V of all layers, one behind the other.
    """
    first = shapes[0]
    if len(set(shapes)) == 1 and first[:2] == first[2:]:
        return ChunkLayout(len(shapes), first.key_heads, first.key_dim, dtype, chunk_tokens, model=model)
    return ChunkLayout(1, 1, sum(shape.size for shape in shapes), dtype, chunk_tokens, model=model, planes=1)


class Room:
    """Memory for the KV of `rows` prompts side by side, `tokens` columns each, in one piece."""

    def __init__(
        self,
        layout: ChunkLayout,
        shapes: tuple[LayerShape, ...],
        rows: int,
        tokens: int,
        device: torch.device,
        spare: SpareMemory | None = None,
    ) -> None:
        whole = empty_kv(replace(layout, kv_heads=rows * layout.kv_heads), tokens, device, spare)
        axes = (layout.layers, layout.planes, rows, layout.kv_heads, tokens, layout.head_dim)
        self._memory = whole.transpose(2, 3).view(axes)
        """[layers, planes, rows, kv_heads, tokens, head_dim]"""
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = [(layer[0], layer[-1]) for layer in self._memory]
        """K and V of each layer, [rows, kv_heads, tokens, head_dim]."""
        if layout.planes == 1:
            self._pairs, vectors, offset = [], self._memory[0, 0, :, 0], 0
            for shape in shapes:
                middle, end = offset + shape.key_size, offset + shape.size
                keys, values = vectors[..., offset:middle], vectors[..., middle:end]
                keys = keys.view(*keys.shape[:-1], shape.key_heads, shape.key_dim).transpose(1, 2)
                values = values.view(*values.shape[:-1], shape.value_heads, shape.value_dim).transpose(1, 2)
                self._pairs.append((keys, values))
                offset += shape.size

    def row(self, number: int, pad: int) -> torch.Tensor:
        """One row's KV from column `pad` on, of AXES' order."""
        return self._memory[:, :, number, :, pad:].transpose(2, 3)

    def blank(self, number: int, pad: int) -> None:
        """Zero the columns before a row's first token: they are not looked at, but attention multiplies them by 0."""
        self._memory[:, :, number, :, :pad] = 0

    def fill_from(self, cache: Cache, stop: int) -> None:
        """Copy the first `stop` columns of a cache that has kept them."""
        for pair, layer in zip(self._pairs, attention_layers(cache), strict=True):
            for target, own in zip(pair, kept_kv(layer), strict=True):
                target[:, :, :stop] = own[:, :, :stop]

    def furnish(self, cache: Cache, kinds: Cache, tokens: int) -> None:
        """Give the cache layers over this memory, of the kinds that another has, of which `tokens` are valid."""
        places = iter(self._pairs)
        layers: list[Any] = []
        for kind in kinds.layers:
            if not isinstance(kind, DynamicLayer):
                layers.append(kind)
                continue
            keys, values = next(places)
            if isinstance(kind, DynamicSlidingWindowLayer):
                layers.append(RoomyWindow(keys, values, tokens, kind.sliding_window))
            elif isinstance(kind, LINEAR_ATTENTION):
                layers.append(RoomyHybrid(keys, values, tokens, kind))
            else:
                layers.append(RoomyLayer(keys, values, tokens))
        cache.layers = layers

    def holds(self, cache: Cache) -> bool:
        """Whether everything in the cache, which was furnished from here, is still here."""
        return all(isinstance(layer, RoomyLayer | RoomyWindow) and layer.in_place for layer in attention_layers(cache))


def attention_layers(cache: Cache, name: str = "the cache") -> list[DynamicLayer]:
    """The layers that keep K and V by token. Raises LayoutError that names the first of a kind that is not known."""
    layers = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is LINEAR_ATTENTION or type(layer).__name__ == "DummyLayer":  # that one keeps nothing
            continue
        if type(layer) not in KINDS:
            raise LayoutError(f"{name}: layer {index} has a {type(layer).__name__}, which is not supported")
        assert isinstance(layer, DynamicLayer)
        layers.append(layer)
    return layers


def linear_layers(cache: Cache) -> list[Any]:
    """The layers that keep one state of all tokens so far."""
    return [layer for layer in cache.layers if isinstance(layer, LINEAR_ATTENTION)]


def fresh_cache(config: PretrainedConfig) -> DynamicCache:
    """The empty cache that transformers would make for such a model."""
    return DynamicCache(config=config)


def kept_tokens(cache: Cache) -> int:
    """How many columns, from the first on, every layer still has."""
    return min((kept_kv(layer)[0].shape[2] for layer in attention_layers(cache) if layer.is_initialized), default=0)


def kept_kv(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer that has been used, each [batch, kv_heads, tokens, head_dim], from the first token on: none
    where a window has left the first ones behind."""
    if isinstance(layer, RoomyWindow):
        return layer.room
    keys, values = keys_and_values(layer)
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.cumulative_length > keys.shape[2]:
        return keys[:, :, :0], values[:, :, :0]
    return keys, values


def keys_and_values(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention sees of a layer that has been used, each [batch, kv_heads, tokens, head_dim]."""
    assert isinstance(layer.keys, torch.Tensor)
    assert isinstance(layer.values, torch.Tensor)
    return layer.keys, layer.values


def token_major(cache: Cache, row: int = 0, pad: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's K and V of one row as (tokens, kv_heads, head_dim) views, behind its padding."""
    return [
        (keys[row, :, pad:].transpose(0, 1), values[row, :, pad:].transpose(0, 1))
        for keys, values in map(kept_kv, attention_layers(cache))
    ]


def packed(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """A copy of what token_major gives, as a packed layout has it."""
    tokens = min(keys.shape[0] for keys, _ in layers)
    vectors = torch.cat([part[:tokens].flatten(1) for pair in layers for part in pair], dim=1)
    return vectors[None, None, :, None]


def _begin(layer: Any, keys: torch.Tensor) -> None:
    """What lazy_initialization does: its arguments are others in each version."""
    layer.dtype, layer.device = keys.dtype, keys.device
    if hasattr(layer, "_sliding_window_tensor"):
        layer._sliding_window_tensor = layer._sliding_window_tensor.to(keys.device)
    layer.is_initialized = True
