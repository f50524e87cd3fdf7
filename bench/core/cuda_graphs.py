"""What the benches' models compute: forward passes and decoding, on a GPU as CUDA graphs.

Launched one by one from Python the kernels of a short pass or of a step of decoding take several times longer than they
run, and whatever else the process does in Python lengthens them: a cache would be judged by the interpreter's lock. An
engine that serves people has them in graphs, and so have these. A graph is of one place in memory and one length of
prompt, and is made before a clock starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Forward = Callable[["Tensor", Any], "Tensor"]
"""Token ids of [rows, tokens] and a cache that has all before them; gives logits of [rows, 1 or more, vocabulary]."""

Place = tuple[int, int]
"""Rows of a batch, and which memory for so many it is in."""

ATTENTION: Final = "sdpa_in_graphs"

_MASKS: Final[list[Any]] = []
"""Those that graphs read, of every model: torch would give their memory to others."""


def use_attention(model: Any) -> None:
    """Let a model attend as transformers' "sdpa" does, and in a graph too: while one is made transformers would give a
    mask to what needs none, and torch its slow kernels for it. A graph takes the mask of the pass before it, and reads
    that as long as it is run."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    last: Any = None

    def mask(*arguments: Any, **named: Any) -> Any:
        nonlocal last
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            _MASKS.append(last)
        else:
            last = sdpa_mask(*arguments, **named)
        return last

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION, mask)
    model.set_attn_implementation(ATTENTION)


def forward_of(model: Any) -> Forward:
    """A forward pass of a transformers model, which asks for the last token's logits alone."""
    from kvredis.adapters.transformers.cache import CACHE

    def forward(ids: Tensor, cache: Any) -> Tensor:
        logits: Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits
        return logits

    return forward


class Graphed:
    """`compute`, for token ids of one shape (rows, tokens), over and over from the same place in memory on. On a GPU it
    is one graph, which is made now and reads what is there when it runs; its memory is `pool`'s, if there is one, and
    then what it gives is overwritten by the next that runs of the same pool. The model's attention is use_attention's.
    """

    def __init__(
        self, compute: Callable[[Tensor], Tensor], shape: tuple[int, int], device: Any, *, pool: Any = None
    ) -> None:
        import torch

        self._compute = compute
        self._graph: Any = None
        if device.type != "cuda":
            return
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            compute(self._ids)  # kernels are loaded, which a graph must not do
            torch.cuda.synchronize(device)
            try:
                # By default what another thread does on the GPU meanwhile, a cache's say, would fail, and the graph.
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._made = compute(self._ids)
            except RuntimeError as error:  # what another release of transformers does there
                logger.warning("kernels are launched one by one, not as a graph: %s", error)
            else:
                self._graph = graph

    @property
    def is_graph(self) -> bool:
        """Whether all its kernels are launched at once."""
        return self._graph is not None

    def run(self, ids: Tensor) -> Tensor:
        """Compute, and give what `compute` gives."""
        if self._graph is None:
            return self._compute(ids)
        self._ids.copy_(ids)
        self._graph.replay()
        return self._made


def decode(forward: Forward, token: Tensor, cache: Any, count: int) -> Tensor:
    """Generate `count` tokens greedily behind `token`, of [rows, 1]; gives the last."""
    for _ in range(count):
        token = forward(token, cache)[:, -1:].argmax(dim=-1)
    return token


def steps_of(forward: Forward, cache: Callable[[], Any], rows: int, count: int, device: Any) -> Graphed:
    """`decode` over one cache, all its steps at once; `cache()` gives that as it is before them."""
    import torch

    device = device if count else torch.device("cpu")  # nothing makes no graph
    return Graphed(lambda token: decode(forward, token, cache(), count) if count else token, (rows, 1), device)


class Passes:
    """Passes over batches' memory; `cache(place, tokens)` gives a cache over a place's, of which so many are valid."""

    def __init__(self, forward: Forward, cache: Callable[[Place, int], Any], device: Any) -> None:
        self._forward = forward
        self._cache = cache
        self._device = device
        self._made: dict[tuple[Place, int, int], Graphed] = {}
        self._pool: Any = None

    def make(self, place: Place, starts: Iterable[int], total: int, columns: int) -> None:
        """Make the graphs of prompts of `total` tokens, `columns` at a time, from each of `starts` on."""
        if self._device.type != "cuda":
            return
        import torch

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # one pass runs at a time: they may share what they work in
        for start in starts:
            for first, stop in spans(start, total, columns):
                if (place, first, stop) not in self._made:
                    self._made[place, first, stop] = self._graphed(place, first, stop)

    def run(self, place: Place, ids: Tensor, start: int, columns: int) -> tuple[Tensor, int]:
        """Compute from token `start` on; gives the last logits, and how many passes were launched one by one."""
        total, lone, cache, logits = ids.shape[1], 0, None, ids
        for first, stop in spans(start, total, columns):  # at least one: a token is always left to compute
            made = self._made.get((place, first, stop))
            if made is not None and made.is_graph:
                logits, cache = made.run(ids[:, first:stop]), None
                continue
            cache = self._cache(place, first) if cache is None else cache
            logits = self._forward(ids[:, first:stop], cache)
            lone += 1
        return logits, lone

    def _graphed(self, place: Place, first: int, stop: int) -> Graphed:
        def compute(ids: Tensor) -> Tensor:
            return self._forward(ids, self._cache(place, first))

        return Graphed(compute, (place[0], stop - first), self._device, pool=self._pool)


def spans(start: int, total: int, columns: int) -> list[tuple[int, int]]:
    """Where the passes of a prompt begin and end."""
    return [(first, min(first + columns, total)) for first in range(start, total, columns)]
