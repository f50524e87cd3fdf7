"""transformers' decoding with a share of a prompt's KV somewhere else: on the GPU that computed it, or in the host's
memory. Each step brings each layer's share while the layers before it compute.

A decoding step reads all KV, layer by layer. While the GPU reads its weights and the KV that it has, a link can bring
so much more: `kvredis plan` says what share of the KV that is (a_max), and `kvredis bench alpha` measures it.

A layer's keys are one tensor, [batch, kv_heads, tokens, head_dim], as attention wants them, the same for its values. In
memory the tokens are outermost, and the first of them, the share, lie in a buffer which is mapped in front of every
second layer's own memory (storage/memory/aliased.py). So attention reads both in one go, by whichever kernel the model
has, the GPU's memory is taken for two buffers and not for a share of each layer, and nothing local is ever moved:

    layer n      [ buffer 0 | own tokens, new tokens, room ]       layer n computes: it waits for its share alone,
    layer n + 1  [ buffer 1 | own tokens, new tokens, room ]       while that of layer n + 1 comes to the other buffer,
    layer n + 2  [ buffer 0 | own tokens, new tokens, room ]       from where layer n - 1 has been

On a GPU the copies run on a stream of their own, by the driver's copy engines; events order both streams, and nothing
waits on the CPU. The last layer asks for the first one's share for the next step. A step can be captured in a CUDA
graph, see `StreamedCache.join`. On a CPU the same happens at once, in order.
"""

import ctypes
import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvredis.storage.errors import DeviceError, LayoutError
from kvredis.storage.memory.aliased import DevicePages, HostPages, Piece, Run
from kvredis.storage.memory.cuda import check

from .cache import RoomyLayer, attention_layers, kept_kv

NEW_TOKENS: Final = 256
"""Room for generated tokens when the caller does not say how many there will be."""
_STREAMED: Final = (DynamicLayer, RoomyLayer)
"""Layers that attend to everything. Others (windows, states) keep little by token, and stay where they are."""


class StreamedCache(Cache):
    """The KV of prompts for `model` to decode behind, of which a share lies elsewhere.

    `prompt` is the cache of a prefill, on any device; it is read now and not changed. The first `share` (0 to 1) of its
    tokens go to `share_device`: another GPU, or "cpu", the host's memory, page-locked where there is a GPU. By default
    it is where `prompt` lies, and the host's memory if that is the model's own device. The other tokens, and up to
    `new_tokens` more, lie with the model. Layers with a sliding window or a state are copied as they are.

    Greedy and sampled decoding of a batch, a chunk of several tokens, and `crop` down to the share are served; beam
    search, which has rows change places, and copies of the cache are not, and raise. Blocks while the KV is laid out.

    Raises ValueError for a share, a number of tokens or a device that there is not, LayoutError (a ValueError) for a
    cache or a model that is not served, DeviceError when the GPU has no such memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Cache,
        share: float,
        *,
        share_device: torch.device | str | None = None,
        new_tokens: int = NEW_TOKENS,
    ) -> None:
        if not (math.isfinite(share) and 0 <= share <= 1):
            raise ValueError(f"a share is 0 to 1, not {share}")
        if new_tokens < 1:
            raise ValueError(f"new_tokens must be at least 1, not {new_tokens}")
        served = _served(model, prompt)
        tokens, lies = served[0].get_seq_length(), kept_kv(served[0])[0].device
        device, away = _devices(model.device, lies, share_device)
        if lies != device and len(served) < len(prompt.layers):
            raise LayoutError(f"layers with a window or a state are not moved from {lies} to {device}")
        self.share_tokens = int(share * tokens + 1e-9)
        """How many of each prompt's columns, from the first on, lie elsewhere."""
        with torch.inference_mode(False), torch.no_grad():
            memory = _Memory(served, self.share_tokens, new_tokens, device, away)
        places = iter(range(len(served)))
        layers: list[Any] = [
            StreamedLayer(memory, next(places), tokens) if type(layer) in _STREAMED else deepcopy(layer)
            for layer in prompt.layers
        ]
        super().__init__(layers=layers)
        self._memory = memory

    @property
    def share_bytes(self) -> int:
        """How much KV lies elsewhere."""
        return sum(copy.nbytes for copies in self._memory.copies for copy in copies)

    @property
    def step_bytes(self) -> int:
        """How much of it each step brings: all but the shares of layers that have a buffer for themselves, which are up
        to three layers' and, of an odd number of them, the last one's."""
        return self._memory.shares.step_bytes

    @property
    def local_bytes(self) -> int:
        """How much memory the model's device has been asked for: what is local, the room, and the buffers."""
        return self._memory.local_bytes

    def join(self) -> None:
        """Let what the current stream is given from now on come behind all that was asked to be brought.

        Where a step is captured in a CUDA graph, call it at the end of each, captured or not: a graph ends when all its
        streams have come together, and the next one then finds the first layer's share. Else there is no need to. Such
        a graph has the cache's addresses in it, and must not run when that is gone.
        """
        self._memory.shares.join()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Refuse a copy: its layers would have memory of their own, where no share comes to."""
        raise TypeError("a StreamedCache cannot be copied or pickled: make another of the same prompt")


class StreamedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """One layer of a StreamedCache. `keys` and `values` are what is local, [batch, kv_heads, tokens, head_dim]; what
    `update` gives has the share in front of it until the next layers' updates."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, memory: "_Memory", place: int, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shares = memory.shares
        self._place = place
        self._share_tokens = memory.share_tokens
        self._keys, self._values = memory.rooms[place]
        self.dtype, self.device = self._keys.dtype, self._keys.device
        self.is_initialized = True
        self._show(tokens)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and give all keys and values, which what the current stream is given from now on finds there; the
        next layer's share is asked for. Raises ValueError when there is no room, or the batch is another."""
        end = self._tokens + key_states.shape[-2]
        if end > self._keys.shape[2]:
            raise ValueError(
                f"no room for token {end} of a StreamedCache that was made for {self._keys.shape[2]}: give new_tokens"
            )
        if key_states.shape[0] != self._keys.shape[0]:
            raise ValueError(f"the cache has {self._keys.shape[0]} prompts, and {key_states.shape[0]} go on")
        self._keys[:, :, self._tokens : end] = key_states
        self._values[:, :, self._tokens : end] = value_states
        self._show(end)
        self._shares.come(self._place)
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_seq_length(self, *_: Any) -> int:
        """Give how many tokens there are, wherever they lie."""
        return self._tokens

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Give how many tokens attention sees behind `query` more, and that they begin with the first: as DynamicLayer.
        transformers 4 gives the tokens' positions in place of their number."""
        return self._tokens + (query if isinstance(query, int) else int(query.shape[0])), 0

    def get_max_length(self) -> int:
        """Give how many tokens there is room for."""
        return int(self._keys.shape[2])

    def get_max_cache_shape(self) -> int:
        """Give the same, by the name that it has before transformers 5.20."""
        return self.get_max_length()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: as many as are told below 0, or all above so many. Raises ValueError where the share
        would be cut."""
        keep = tokens_to_remove if tokens_to_remove > 0 else self._tokens + tokens_to_remove
        if keep < self._share_tokens:
            raise ValueError(f"{keep} tokens are less than the {self._share_tokens} that lie elsewhere")
        self._show(min(keep, self._tokens))

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: the layer is there."""

    def reset(self) -> None:
        """Refuse, as what would put other tokens into the share's place."""
        self._refuse("forget its prompt")

    def offload(self) -> None:
        """Refuse."""
        self._refuse("be offloaded")

    def prefetch(self) -> None:
        """Refuse."""
        self._refuse("be offloaded")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse beam search."""
        self._refuse("have its prompts change places (beam search)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse."""
        self._refuse("have prompts repeated")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refuse."""
        self._refuse("have prompts taken out")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(f"a StreamedCache cannot {what}")

    def _show(self, tokens: int) -> None:
        self._tokens = tokens
        self.keys = self._keys[:, :, self._share_tokens : tokens]
        self.values = self._values[:, :, self._share_tokens : tokens]


# -- where KV lies -----------------------------------------------------------------------------------------------------


class _Copy(NamedTuple):
    """Bytes of a share, from where they are kept to their place in a buffer, as the layer sees it."""

    target: int
    source: int
    nbytes: int


class _Memory:
    """The KV of all streamed layers: `rooms`, each layer's K and V, [batch, kv_heads, room, head_dim], and `copies`,
    what brings its share to where these begin."""

    def __init__(
        self,
        layers: Sequence[DynamicLayer],
        share_tokens: int,
        new_tokens: int,
        device: torch.device,
        away: torch.device,
    ) -> None:
        self.share_tokens = share_tokens
        self.rooms: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copies: list[list[_Copy]] = []
        self.local_bytes = 0
        self._new_tokens = new_tokens
        self._device, self._away = device, away
        self._kept: list[torch.Tensor] = []
        """The shares themselves."""
        self._pages = DevicePages(_ordinal(device)) if device.type == "cuda" else HostPages()
        turns = turns_of(len(layers))
        pairs = [kept_kv(layer) for layer in layers]
        buffers = self._buffers(pairs, max(turns) + 1) if share_tokens else []
        for turn, pair in zip(turns, pairs, strict=True):
            sides = zip(pair, buffers[turn] if buffers else (None, None), strict=True)
            (keys, values), copies = zip(*(self._laid_out(own, buffer) for own, buffer in sides), strict=True)
            self.rooms.append((keys, values))
            self.copies.append([copy for copy in copies if copy is not None])
        mover: _Mover = (
            _Beside(self._pages, device, max(turns) + 1) if isinstance(self._pages, DevicePages) else _Here()
        )
        self.shares = _Shares(self.copies, turns, mover)
        for each in {device, away, *(pair[0].device for pair in pairs)}:
            if each.type == "cuda":
                torch.cuda.synchronize(each)  # shares are read by a stream that knows nothing of torch's

    def _buffers(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int) -> list[tuple[Piece, Piece]]:
        """Take the buffers, each for the largest share of K and of V."""
        keys, values = (max(self.share_tokens * _token_bytes(pair[side]) for pair in pairs) for side in (0, 1))
        return [(self._piece(keys), self._piece(values)) for _ in range(count)]

    def _laid_out(self, prompt: torch.Tensor, buffer: Piece | None) -> tuple[torch.Tensor, _Copy | None]:
        """Lay K or V of one layer out: the share to where it is kept, the rest behind the buffer."""
        rows, heads, tokens, size = prompt.shape
        share, room, each = self.share_tokens, tokens + self._new_tokens, _token_bytes(prompt)
        own = self._piece((room - share) * each)
        run = self._pages.run([own] if buffer is None else [buffer, own])
        start = 0 if buffer is None else buffer.nbytes - share * each  # a share ends where the layer's own begins
        flat = _tensor_over(run, self._device)[start : start + room * each]
        whole = flat.view(prompt.dtype).view(room, rows, heads, size).permute(1, 2, 0, 3)
        whole[:, :, share:tokens] = prompt[:, :, share:]
        if buffer is None:
            return whole, None
        pinned = self._away.type == "cpu" and self._device.type == "cuda"
        kept = torch.empty((share, rows, heads, size), dtype=prompt.dtype, device=self._away, pin_memory=pinned)
        kept.copy_(prompt[:, :, :share].permute(2, 0, 1, 3))
        self._kept.append(kept)
        return whole, _Copy(run.address + start, kept.data_ptr(), share * each)

    def _piece(self, nbytes: int) -> Piece:
        try:
            piece = self._pages.piece(nbytes)
        except DeviceError:
            torch.cuda.empty_cache()  # what the prefill worked in is torch's still
            piece = self._pages.piece(nbytes)
        self.local_bytes += piece.nbytes
        return piece


def turns_of(layers: int) -> list[int]:
    """Give the buffer of each layer: two in turn, such that neighbours, and the last and the first, have different
    ones; of an odd number of layers the last has one for itself."""
    turns = [place % 2 for place in range(layers)]
    if layers > 1 and layers % 2:
        turns[-1] = 2
    return turns


class _Bytes:
    """Device memory by its address, as __cuda_array_interface__ describes it; it keeps the run that the address is
    of."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.__cuda_array_interface__ = {
            "shape": (run.nbytes,), "typestr": "|u1", "data": (run.address, False), "version": 2,
        }  # fmt: skip


def _tensor_over(run: Run, device: torch.device) -> torch.Tensor:
    """Give a run's bytes as a tensor, which keeps it."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.as_tensor(_Bytes(run), device=device)
    array: Any = (ctypes.c_ubyte * run.nbytes).from_address(run.address)
    array.run = run
    return torch.frombuffer(array, dtype=torch.uint8)


def _token_bytes(kv: torch.Tensor) -> int:
    rows, heads, _, size = kv.shape
    return rows * heads * size * kv.element_size()


# -- when shares come --------------------------------------------------------------------------------------------------


class _Mover(Protocol):
    """What brings shares to buffers, beside what the current stream computes."""

    def fork(self) -> None:
        """Let what is brought from now on come behind what the current stream has been given until now."""
        ...

    def bring(self, copies: Sequence[_Copy], buffer: int) -> None:
        """Begin to fill a buffer."""
        ...

    def wait(self, buffer: int) -> None:
        """Let what the current stream is given from now on come behind what fills a buffer."""
        ...

    def join(self) -> None:
        """Do that for all buffers."""
        ...


class _Shares:
    """Which layer's share is in which buffer, or on its way there."""

    def __init__(self, copies: Sequence[Sequence[_Copy]], turns: Sequence[int], mover: _Mover) -> None:
        self._copies = copies
        self._turns = turns
        self._mover = mover
        self._held: dict[int, int] = {}
        shared = [own for own, turn in zip(copies, turns, strict=True) if turns.count(turn) > 1]
        self.step_bytes = sum(copy.nbytes for own in shared for copy in own)

    def come(self, place: int) -> None:
        """Have the layer's share there for what the current stream is given from now on, and the next one's on its
        way. The buffer that the next one comes to is that of a layer whose attention the stream has been given
        before, so it is free when the stream gets to where it is now."""
        if not self._copies[place]:
            return
        chosen = (place, (place + 1) % len(self._copies))
        missing = [each for each in chosen if self._held.get(self._turns[each]) != each]
        if missing:
            self._mover.fork()
        for each in missing:
            self._held[self._turns[each]] = each
            self._mover.bring(self._copies[each], self._turns[each])
        self._mover.wait(self._turns[place])

    def join(self) -> None:
        self._mover.join()


class _Here:
    """On a CPU: what is brought is there."""

    def fork(self) -> None:
        """As _Mover.fork."""

    def bring(self, copies: Sequence[_Copy], buffer: int) -> None:
        for copy in copies:
            ctypes.memmove(copy.target, copy.source, copy.nbytes)

    def wait(self, buffer: int) -> None:
        """As _Mover.wait."""

    def join(self) -> None:
        """As _Mover.join."""


class _Beside:
    """On a GPU: by its copy engines, on a stream of their own.

    Buffers that the current stream has not been let wait for are `_coming`: in a graph nothing may wait for what was
    asked for outside of it.
    """

    def __init__(self, pages: DevicePages, device: torch.device, buffers: int) -> None:
        self._pages = pages  # whose end would be that of the context
        self._gpu = pages.device
        self._copy = pages.device.driver.cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_void_p]
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._forked, *self._filled = (torch.cuda.Event() for _ in range(1 + buffers))  # type: ignore[no-untyped-call]
        self._coming: set[int] = set()

    def fork(self) -> None:
        self._forked.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forked)

    def bring(self, copies: Sequence[_Copy], buffer: int) -> None:
        with self._gpu.current():
            for copy in copies:
                code = self._copy(copy.target, copy.source, copy.nbytes, self._stream.cuda_stream)
                check(self._gpu.driver, code, "a share of KV cannot be brought (cuMemcpyAsync)")
        self._filled[buffer].record(self._stream)
        self._coming.add(buffer)

    def wait(self, buffer: int) -> None:
        if buffer in self._coming:
            torch.cuda.current_stream(self._device).wait_event(self._filled[buffer])
            self._coming.discard(buffer)

    def join(self) -> None:
        for buffer in sorted(self._coming):
            self.wait(buffer)


# -- what is served ----------------------------------------------------------------------------------------------------


def _served(model: PreTrainedModel, prompt: Cache) -> list[DynamicLayer]:
    """Give the layers of which a share can lie elsewhere. Raises LayoutError when there are none, or are others."""
    if getattr(model.config.get_text_config(), "num_kv_shared_layers", 0):
        raise LayoutError("layers of this model read the KV of others (num_kv_shared_layers) when its share is gone")
    found = [layer for layer in attention_layers(prompt, "prompt") if type(layer) in _STREAMED]
    lengths = {layer.get_seq_length() for layer in found}
    if not found or 0 in lengths:
        raise LayoutError("the prompt's cache has no layer that keeps all of its tokens: compute the prompt first")
    pairs = [kept_kv(layer) for layer in found]
    if len(lengths) > 1 or len({pair[0].device for pair in pairs}) > 1 or len({pair[0].shape[0] for pair in pairs}) > 1:
        raise LayoutError("the prompt's layers differ in tokens, prompts or device")
    return found


def _devices(
    own: torch.device, prompt: torch.device, asked: torch.device | str | None
) -> tuple[torch.device, torch.device]:
    """Give where the model computes, and where the share lies. Raises ValueError."""
    if own.type not in ("cpu", "cuda"):
        raise ValueError(f"no KV is streamed to {own}: to a GPU of NVIDIA's, or on the CPU")
    own = torch.device("cuda", _ordinal(own)) if own.type == "cuda" else own
    away = torch.device(asked) if asked is not None else prompt if prompt != own else torch.device("cpu")
    if away.type == "cuda":
        if own.type != "cuda":
            raise ValueError(f"a model on the CPU has no share of its KV on {away}")
        away = torch.device("cuda", _ordinal(away))
        if away == own:
            raise ValueError(f"{away} is where the model computes: a share that lies there saves nothing")
        torch.zeros(1, device=own).to(away)  # torch lets one GPU reach another's memory when it first copies there
    elif away.type != "cpu":
        raise ValueError(f"no share lies on {away}: another GPU, or cpu")
    return own, away


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
