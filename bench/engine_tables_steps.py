"""Decoding in `kvredis bench prefill`, `hit-sweep` and `long-prefill`: on a GPU a batch's steps are one CUDA graph.

Launched one by one from Python the kernels of a step take several times longer than they run, whatever the cache: an
engine that serves people has them in graphs, and so has this one, or each answer would hide what a hit saves. A graph
is of one place in memory and one length of prompt; it is made before the batch's clock starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Forward = Callable[["Tensor", Any], "Tensor"]
"""Token ids of [rows, tokens] and a cache that has all before them; gives logits of [rows, 1 or more, vocabulary]."""

ATTENTION: Final = "sdpa_in_graphs"


def use_attention(model: Any) -> None:
    """Let a model attend as transformers' "sdpa" does, and in a graph too: while one is made transformers would give a
    mask to the one token of a step, which needs none, and torch its slow kernels for it."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def mask(*arguments: Any, **named: Any) -> Any:
        in_graph = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return None if in_graph else sdpa_mask(*arguments, **named)

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION, mask)
    model.set_attn_implementation(ATTENTION)


def decode(forward: Forward, token: Tensor, cache: Any, count: int) -> Tensor:
    """Generate `count` tokens greedily behind `token`, of [rows, 1]; gives the last."""
    for _ in range(count):
        token = forward(token, cache)[:, -1:].argmax(dim=-1)
    return token


class Steps:
    """`decode` over one cache, over and over, from the same place on; `cache()` gives it as it is before the steps."""

    def __init__(self, forward: Forward, cache: Callable[[], Any], rows: int, count: int, device: Any) -> None:
        import torch

        self._forward = forward
        self._cache = cache
        self._count = count
        self._graph: Any = None
        if device.type != "cuda" or not count:
            return
        self._first = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            decode(forward, self._first, cache(), count)  # kernels are loaded, which a graph must not do
            torch.cuda.synchronize(device)
            try:
                # By default what another thread does on the GPU meanwhile, a cache's say, would fail, and the graph.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._last = decode(forward, self._first, cache(), count)
            except RuntimeError as error:  # what another release of transformers does there
                logger.warning("steps are launched one by one, not as a graph: %s", error)
            else:
                self._graph = graph

    @property
    def is_graph(self) -> bool:
        """Whether they are launched at once."""
        return self._graph is not None

    def run(self, token: Tensor) -> Tensor:
        """Take the steps; gives the last token, which the next run overwrites."""
        if self._graph is None:
            return decode(self._forward, token, self._cache(), self._count)
        self._first.copy_(token)
        self._graph.replay()
        return self._last
