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
from typing import Any, Literal, NamedTuple

import torch
from transformers import Cache

from .block import block_bytes, checksum_of, encode_header, open_block
from .engine import CacheEngine
from .keys import ChunkKey, keys_of_bytes, token_bytes
from .layout import ChunkLayout
from .tensors import borrow, view_tensor
from .transformers_cache import CACHE, fresh_cache, linear_layers

logger = logging.getLogger(__name__)

ALIGN_BYTES = 16
TRIES_MAX = 32
"""Places, from the last on, at which a snapshot is looked for; each is a round trip."""
PROBE_TOKENS = 12
PROBE_CUT = 10
PROBE_SHARE_MAX = 0.25
"""A state of a prompt that was computed in two parts may differ from that of the whole by so much of what the second
part alone would; of a model that forgets the first part it differs by about all of it."""


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

    Raises ValueError for a model that does not go on from its state when it is given several tokens at once.
    """

    def __init__(self, model: Any, engine: CacheEngine) -> None:
        self._engine = engine
        self._device = model.device
        self._states = probed(model, engine.layout.model.rpartition("+")[0] or engine.layout.model)
        self._nbytes = sum(state.room_bytes for state in self._states)
        chunk = engine.layout.chunk_tokens
        shapes = hashlib.sha256(repr(self._states).encode()).hexdigest()[:8]
        self.layout = ChunkLayout(
            1, 1, -(-self._nbytes // chunk), "u8", chunk, engine.layout.model, planes=1, part=f"state-{shapes}"
        )
        self._length = block_bytes(self.layout, chunk, is_checked=True)

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
            logger.warning("A stored state could not be loaded and counts as a miss: %s", error)
        return 0, None

    def put(self, taken: torch.Tensor, cache: Cache) -> None:
        """Make a cache that has not been used go on from a snapshot."""
        layers, offset = linear_layers(cache), 0
        for state in self._states:
            tensor = taken[offset : offset + state.nbytes].view(state.dtype).view(state.shape).to(self._device)
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
        key = self._keys(tokens)[-1].key
        backend = self._engine.backend
        try:
            if backend.match([key]):
                return True
            reservation = backend.reserve(key, self._length)
            if reservation is None:
                return False
            with reservation:
                chunk = self.layout.chunk_tokens
                room = reservation.view[self._length - self.layout.chunk_bytes() :]
                block = view_tensor(room, self.layout, chunk).view(-1)
                block[: self._nbytes].copy_(taken)
                block[self._nbytes :] = 0
                header = encode_header(self.layout, chunk, checksum_of(room))
                reservation.view[: len(header)] = header
                del block, room  # the room's view ends with the reservation
                reservation.commit()
        except Exception as error:
            logger.warning("A state could not be stored; the engine goes on without: %s", error)
            return False
        return True

    def _loaded(self, chunk: ChunkKey) -> torch.Tensor | None:
        """One snapshot in memory of our own; None when it is not there or not what its layout says."""
        with closing(self._engine.backend.load([chunk.key])) as leases:
            lease = next(leases, None)
            if lease is None:
                return None
            with lease:
                block = open_block(lease.view, self.layout)
                copied = borrow(block.tensor, torch.uint8).clone()
                is_whole = checksum_of(block.tensor) == block.checksum and block.tokens == self.layout.chunk_tokens
                is_whole = is_whole and lease.held  # asked behind the last byte
        return copied if is_whole else None

    def _keys(self, tokens: list[int]) -> list[ChunkKey]:
        return keys_of_bytes(token_bytes(tokens), self.layout, algorithm=self._engine.config.pre_caching_hash_algorithm)


def states_of(cache: Cache) -> Iterator[tuple[State, torch.Tensor]]:
    """Each state that the cache's linear layers hold, and what it is."""
    for place, layer in enumerate(linear_layers(cache)):
        held: tuple[tuple[Literal["conv", "recurrent"], dict[int, Any]], ...]
        held = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for kind, states in held:
            for number, tensor in states.items():
                if tensor is not None:
                    yield State(place, kind, number, tuple(tensor.shape), tensor.dtype), tensor


@torch.no_grad()
def probed(model: Any, name: str) -> tuple[State, ...]:
    """The states of a model, found by having it read a few tokens: at once, in two parts, and the second part alone.

    Raises ValueError when two parts do not come to the same: many a model forgets its state unless tokens come singly;
    and when the cache holds none.
    """
    ids = torch.arange(PROBE_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    whole, parts, alone = (fresh_cache(model.config) for _ in range(3))
    model(input_ids=ids, **{CACHE: whole}, use_cache=True)
    model(input_ids=ids[:, :PROBE_CUT], **{CACHE: parts}, use_cache=True)
    model(input_ids=ids[:, PROBE_CUT:], **{CACHE: parts}, use_cache=True)
    model(input_ids=ids[:, PROBE_CUT:], **{CACHE: alone}, use_cache=True)
    found = []
    for (state, right), (_, got), (_, other) in zip(states_of(whole), states_of(parts), states_of(alone), strict=True):
        right, got, other = right.double(), got.double(), other.double()
        rounding = torch.finfo(model.dtype).eps * right.norm()
        if not (right - got).norm() <= PROBE_SHARE_MAX * (right - other).norm() + rounding:
            raise ValueError(
                f"{name}: the {state.kind} state of a prompt computed in two parts is another: with this transformers "
                "the model's linear attention cannot go on from a stored one"
            )
        found.append(state)
    if not found:
        raise ValueError(f"{name}: its linear attention keeps its state elsewhere than in the cache; not supported")
    return tuple(found)
