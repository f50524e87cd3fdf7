"""Linear attention keeps one state of all tokens so far: it cannot be cut, so it is stored as it was at chosen places.

A snapshot is what every linear layer holds (convolution and recurrent states, batch of one) at a chunk's end, one after
the other as bytes, each from a multiple of 16 on. It is a block like others, of a layout of its own: planes 1, dtype
u8, one layer and head, as many bytes a token as the snapshot needs for a whole chunk, and a part that names the states'
shapes. Its key is the one that the chunk before that place has in this layout: it names all tokens of the prefix. It
has a checksum, since a wrong state would be wrong silently, and for all that follows.
"""

import hashlib
import logging
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from transformers import Cache

from kvredis.adapters.engine.block import block_bytes, checksum_of, open_block
from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.keys import ChunkKey, keys_of_bytes, token_bytes
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.load import Intake
from kvredis.adapters.engine.store import ReservedBlock
from kvredis.adapters.engine.tensors import borrow, view_tensor
from kvredis.storage.errors import LayoutError

from .cache import linear_layers
from .model import TRIED_TOKENS, as_served, is_far, tried

logger = logging.getLogger(__name__)

ALIGN_BYTES = 16
TRIES_MAX = 32
"""Places, from the last on, at which a snapshot is looked for; each is a round trip."""
CANNOT_GO_ON = (
    "with this transformers the model's linear attention cannot go on from a stored one: use its own generate(), or"
    " vLLM, of which states are stored"
)


class State(NamedTuple):
    """One tensor of a snapshot: whose it is, and what."""

    layer: int
    kind: Literal["conv", "recurrent"]
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def room_bytes(self) -> int:
        """Bytes that it takes, with what aligns the next."""
        return -(-self.nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Snapshots:
    """The states of one model, stored beside the KV that `engine` stores.

    They are those of the model that the engine uses when it is asked. Raises LayoutError for a model that does not go
    on from its state when it is given several tokens at once.
    """

    def __init__(self, model: Any, engine: CacheEngine, name: str) -> None:
        self._engine = engine
        self._device = model.device
        self.pads_well = pads_well(model)
        """Whether a prompt behind padding comes out as it does alone."""
        self._states = probed(model, name)
        self._nbytes = sum(state.room_bytes for state in self._states)
        chunk = engine.layout.chunk_tokens
        shapes = hashlib.sha256(repr(self._states).encode()).hexdigest()[:8]
        self._layout = ChunkLayout(
            1, 1, -(-self._nbytes // chunk), "u8", chunk, engine.layout.model, planes=1, part=f"state-{shapes}"
        )

    @property
    def layout(self) -> ChunkLayout:
        """The layout of a snapshot's block."""
        return replace(self._layout, model=self._engine.layout.model)

    def find(self, tokens: list[int], stop: int) -> tuple[int, torch.Tensor | None]:
        """The last place at or before `stop` of which there is a snapshot, and the snapshot; 0 and None without one."""
        places = [chunk for chunk in self._keys(tokens) if chunk.stop <= stop]
        try:
            for chunk in reversed(places[-TRIES_MAX:]):
                if self._engine.backend.match([chunk.key]):
                    taken = self._loaded(chunk)
                    if taken is not None:
                        return chunk.stop, taken
        except Exception as error:  # the cache is never the reason that an engine fails
            tell_refused(b"", error)
        return 0, None

    def put(self, rows: list[torch.Tensor | None], cache: Cache) -> None:
        """Make a cache that has not been used go on from a snapshot of each row; None: from no token."""
        blank, offset = torch.zeros(self._nbytes, dtype=torch.uint8, device=self._device), 0
        layers, whole = linear_layers(cache), [(blank if row is None else row).to(self._device) for row in rows]
        for state in self._states:
            parts = [row[offset : offset + state.nbytes].view(state.dtype).view(state.shape) for row in whole]
            tensor = torch.cat(parts)
            layer = layers[state.layer]
            update = layer.update_conv_state if state.kind == "conv" else layer.update_recurrent_state
            update(tensor, state_idx=state.number)
            offset += state.room_bytes

    def take(self, cache: Cache) -> torch.Tensor:
        """A copy of the cache's states as they are now, as bytes where the model is."""
        taken = torch.zeros(self._nbytes, dtype=torch.uint8, device=self._device)
        offset = 0
        for state, tensor in states_of(cache):
            taken[offset : offset + state.nbytes] = tensor.detach().contiguous().view(-1).view(torch.uint8)
            offset += state.room_bytes
        return taken

    def store(self, tokens: list[int], taken: torch.Tensor) -> bool:
        """Store what was taken behind `tokens`, whole chunks of them; says whether it is there or taken over."""
        key, layout = self._keys(tokens)[-1].key, self.layout
        length, backend = block_bytes(layout, layout.chunk_tokens, is_checked=True), self._engine.backend
        try:
            if backend.match([key]):
                return True
            reservation = backend.reserve(key, length)
            if reservation is None:
                return False
            with ReservedBlock(reservation, layout, layout.chunk_tokens) as block:
                room = view_tensor(block.tensor, layout, layout.chunk_tokens).view(-1)
                room[: self._nbytes].copy_(taken)
                room[self._nbytes :] = 0
                del room  # its memory ends with the reservation
                block.seal(checksum_of(block.tensor))
                block.commit()
        except Exception as error:
            logger.warning("A state could not be stored; the engine goes on without: %s", error)
            return False
        return True

    def _loaded(self, chunk: ChunkKey) -> torch.Tensor | None:
        """One snapshot in memory of our own; None when it is not there or not what its layout says."""
        backend = self._engine.backend
        intake = Intake(backend, tell_refused)
        with closing(backend.load([chunk.key])) as leases:
            lease = next(leases, None)
            if lease is None:
                return None
            with lease:
                try:
                    block = open_block(lease.view, self.layout)
                    copied = borrow(block.tensor, torch.uint8).clone()
                    if checksum_of(block.tensor) != block.checksum or block.tokens != self.layout.chunk_tokens:
                        raise LayoutError("its bytes do not have its checksum")
                    is_whole = intake.is_held(lease)
                except LayoutError as error:
                    intake.refuse(chunk.key, lease, error)
                    is_whole = False
        intake.forget()
        return copied if is_whole else None

    def _keys(self, tokens: list[int]) -> list[ChunkKey]:
        return keys_of_bytes(token_bytes(tokens), self.layout, algorithm=self._engine.config.pre_caching_hash_algorithm)


def tell_refused(key: bytes, why: Exception) -> None:
    """Say that a state cannot be used."""
    logger.warning("A stored state could not be loaded and counts as a miss: %s", why)


def states_of(cache: Cache) -> Iterator[tuple[State, torch.Tensor]]:
    """Each state that the cache's linear layers hold, and what it is."""
    for place, layer in enumerate(linear_layers(cache)):
        held: tuple[tuple[Literal["conv", "recurrent"], dict[int, Any]], ...]
        held = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for kind, states in held:
            for number, tensor in states.items():
                if tensor is not None:
                    yield State(place, kind, number, tuple(tensor.shape), tensor.dtype), tensor


def probed(model: Any, name: str) -> tuple[State, ...]:
    """The states of a model, found by having it read a few tokens: at once, in two parts, and the second part alone.

    Raises LayoutError when two parts do not come to the same, be it in the states or in the logits of the second part:
    many a model forgets its state unless tokens come singly. So it does when a state is not read at all, which shows
    when the second part comes out the same behind zeros in its place (Mamba-1's scan in Jamba); when the cache holds no
    state; and when the model cannot do any of that.
    """
    try:
        with as_served(model):
            return _probed(model, name)
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(
            f"{name}: its linear attention cannot go on from a state that it is given: {error}"
        ) from error


def pads_well(model: Any) -> bool:
    """Whether a model with linear attention gives a prompt behind padding the logits that it gives it alone."""
    ids = torch.arange(2 * TRIED_TOKENS, device=model.device).view(2, TRIED_TOKENS) + 3
    ids %= model.config.get_text_config(decoder=True).vocab_size
    pad = TRIED_TOKENS // 3
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    words = {"position_ids": positions} if "position_ids" in signature(model.forward).parameters else {}
    try:
        with as_served(model):
            padded = model(input_ids=ids, attention_mask=mask, **words).logits[1, -1]
            alone, other = (model(input_ids=ids[row : row + 1, pad:]).logits[0, -1] for row in (1, 0))
    except Exception:
        return False
    return not is_far(alone, padded, other, model.dtype)


def _probed(model: Any, name: str) -> tuple[State, ...]:
    found = tried(model)
    pairs = [[tensor for _, tensor in states_of(cache)] for cache in (found.whole, found.parts, found.alone)]
    states = [state for state, _ in states_of(found.whole)]
    if not states:
        raise LayoutError(f"{name}: its linear attention keeps its state elsewhere than in the cache; not supported")
    what = ["what follows a prompt", *(f"the {state.kind} state of a prompt" for state in states)]
    compared = zip((found.logits, *pairs[0]), (found.behind, *pairs[1]), (found.apart, *pairs[2]), strict=True)
    for one, (first, second, apart) in zip(what, compared, strict=True):
        if is_far(first, second, apart, model.dtype):
            raise LayoutError(f"{name}: {one} computed in two parts is another: {CANNOT_GO_ON}")
    for kind in sorted({state.kind for state in states}):

        def blanked(cache: Cache, kind: str = kind) -> None:
            for state, tensor in states_of(cache):
                if state.kind == kind:
                    tensor.zero_()

        if torch.equal(tried(model, between=blanked).behind, found.behind):
            raise LayoutError(f"{name}: several tokens behind a {kind} state do not read it: {CANNOT_GO_ON}")
    return tuple(states)
