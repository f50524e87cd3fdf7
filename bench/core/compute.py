"""What computes in the benches: a model with random weights that prefills and decodes, on a GPU by CUDA graphs, or a
clock that stands for an accelerator.

Launched one by one from Python the kernels of a short pass or of a step of decoding take several times longer than they
run, and whatever else the process does in Python lengthens them: a cache would be judged by the interpreter's lock. An
engine that serves people has them in graphs, and so have these. A graph is of one place in memory and one length of
prompt, and is made before a clock starts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from .errors import BenchError
from .shapes import ModelShape

if TYPE_CHECKING:
    from torch import Tensor


_SEED: Final = 7
_SHIFT_TOKENS: Final = 16
_VOCABULARY: Final = 32_000
DTYPES: Final = {1: "fp8_e4m3", 2: "bf16", 4: "fp32"}
"""kvredis' name of the element type that has so many bytes."""

TINY: Final = ModelShape("tiny", layers=2, kv_heads=2, head_dim=32)
"""Of the model that stands in where there is no GPU."""
WIDTHS: Final = {
    "3b": (2048, 16, 11008),
    "7b": (3584, 28, 18944),
    "8b": (4096, 32, 14336),
    "32b": (5120, 40, 27648),
    "glm": (4096, 32, 13696),
    TINY.name: (64, 2, 128),
}
"""Hidden size, attention heads and intermediate size: what the KV's shape does not tell and computing depends on."""


GRAPHS_MAX: Final = 128
"""Steps of all prompts of which graphs are made: a tenth of a second each, and memory of the host's."""


class Compute(Protocol):
    """Prefills prompts by steps; `kv(n)` holds the n-th prompt's KV by token, as far as it has been computed."""

    def prepare(self, budget: int) -> str:
        """Get ready for steps of so many tokens, with every prompt; gives what is to be said of how they run."""
        ...

    def begin(self, number: int) -> None:
        """Go on with the prompt of this number, from its first token on."""
        ...

    def step(self, start: int, stop: int) -> None:
        """Compute tokens [start, stop) of it; on return they are in its KV."""
        ...

    def kv(self, number: int) -> Tensor:
        """(layers, 2, tokens, kv_heads, head_dim)."""
        ...


class Asleep:
    """An accelerator that computes `tokens_per_s`, and leaves the CPU alone meanwhile. The KV is random and there at
    once, each prompt's another one."""

    def __init__(self, shape: ModelShape, prompts: int, tokens: int, tokens_per_s: float) -> None:
        import torch

        from kvredis.adapters.engine.tensors import TORCH_DTYPES

        size = (shape.layers, 2, tokens + prompts * _SHIFT_TOKENS, shape.kv_heads)
        words = max(shape.head_dim * shape.dtype_bytes // 2, 1)
        generator = torch.Generator().manual_seed(_SEED)
        made = torch.randint(-32768, 32767, (*size, words), dtype=torch.int16, generator=generator)
        self._all = made.view(TORCH_DTYPES[DTYPES[shape.dtype_bytes]])
        self._tokens = tokens
        self._tokens_per_s = tokens_per_s

    def prepare(self, budget: int) -> str:
        return ""

    def begin(self, number: int) -> None:
        """As Compute.begin."""

    def step(self, start: int, stop: int) -> None:
        until_s = time.perf_counter() + (stop - start) / self._tokens_per_s
        while (left_s := until_s - time.perf_counter()) > 0:
            time.sleep(left_s)

    def kv(self, number: int) -> Tensor:
        start = number * _SHIFT_TOKENS
        return self._all[:, :, start : start + self._tokens]


class Modelled:
    """A Llama of the shape with random weights, in bfloat16, with the attention that transformers chooses."""

    def __init__(self, shape: ModelShape, prompts: Sequence[Sequence[int]]) -> None:
        import torch

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = llama(shape, len(prompts[0]), self._device)
        use_attention(self._model)
        self._ids = [torch.tensor([list(prompt)], device=self._device) for prompt in prompts]
        size = (shape.layers, 2, shape.kv_heads, len(prompts[0]), shape.head_dim)
        self._kv = [torch.zeros(size, dtype=torch.bfloat16, device=self._device).transpose(2, 3) for _ in prompts]
        self._passes = Passes(
            forward_of(self._model), lambda place, tokens: self._cache(place[1], tokens), self._device
        )
        self._number = 0

    @property
    def device(self) -> str:
        """What it computes on, in words."""
        import torch

        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"

    def prepare(self, budget: int, prompts: int | None = None) -> str:
        """As Compute.prepare; only the first so many `prompts`, if told: those behind them are launched one by one."""
        steps = len(self._ids) * len(spans(0, self._ids[0].shape[1], budget))
        if self._device.type == "cuda" and steps > GRAPHS_MAX:
            return f"Steps of {budget} tokens are launched one by one, and not in CUDA graphs."
        for number, ids in enumerate(self._ids[:prompts]):
            self._passes.make((1, number), (0,), ids.shape[1], budget)
        return ""

    def begin(self, number: int) -> None:
        self._number = number

    def step(self, start: int, stop: int) -> None:
        """As Compute.step; waits for what it computes, as an engine does that samples a token, and for nothing else."""
        import torch

        self.enqueue(start, stop)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def enqueue(self, start: int, stop: int) -> None:
        """As `step`, without waiting: on a GPU the current stream is not done yet."""
        import torch

        with torch.inference_mode():
            self._passes.run((1, self._number), self._ids[self._number][:, :stop], start, stop - start)

    def kv(self, number: int) -> Tensor:
        return self._kv[number]

    def _cache(self, number: int, tokens: int) -> Any:
        from transformers import DynamicCache

        from kvredis.adapters.transformers.generate import RoomyLayer

        cache: Any = DynamicCache(config=self._model.config)
        cache.layers = [
            RoomyLayer(pair[0].transpose(0, 1)[None], pair[1].transpose(0, 1)[None], tokens)
            for pair in self._kv[number]
        ]
        return cache


def llama(shape: ModelShape, tokens: int, device: Any) -> Any:
    """A Llama of the shape with random weights in bfloat16, the same each time; BenchError for one without widths."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape.name not in WIDTHS or shape.dtype_bytes != 2:
        raise BenchError(f"no model of shape {shape.name} to compute with; there are {', '.join(WIDTHS)}")
    hidden, heads, intermediate = WIDTHS[shape.name]
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
    )
    torch.manual_seed(_SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train(False)
    return model


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
