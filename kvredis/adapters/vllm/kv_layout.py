"""How vLLM lays KV pages out: five shapes of tensors in two years, all of which hold pages of K and V by token.

From what vLLM says of a layer (its spec) comes the layout of stored chunks, the same on the scheduler's side, which has
no tensors, and on each worker's. From a tensor comes a view of PagedKV's order, without a copy. Nothing here imports
vLLM: a spec is read by its attributes, which are those of vllm/v1/kv_cache_interface.py from 0.18 to 0.33.

    (2, B, N, H, D)  FlashAttention until 0.22       (2, B, H, N, D)  the CPU's until 0.22
    (B, 2, N, H, D)  Triton, FlashInfer, 0.24        (B, H, N, K||V)  all since 0.26
    (B, N, C)        MLA until 0.28                  (B, 1, N, C)     MLA since 0.30

B are blocks (here pages), N tokens, H heads of this rank, D head_dim, C whatever one token has.

A recurrent layer (Mamba, linear attention) has no KV by token but a state, which holds all of a prefix. With
mamba_cache_mode "align" vLLM keeps the states behind some multiples of a block, one page each: several tensors, behind
each other in the page. What they mean is the engine's affair; here a page is so many bytes.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvredis.adapters.engine.layout import DTYPES, ChunkLayout
from kvredis.adapters.engine.tensors import TORCH_DTYPES
from kvredis.storage.errors import LayoutError

DENSE_DTYPES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
UNSUPPORTED = ("CrossAttentionSpec", "EncoderOnlyAttentionSpec", "RSWASpec", "HiSparseResidentSpec")

_DRAFT = "draft_model."
"""What vLLM's names of layers begin with where a model of its own drafts (v1/spec_decode/draft_model.py)."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one shape whose pages go together: what a chunk of them is made of.

    `group` is vLLM's number of the group whose page table they share. A `window` is how many tokens back the layers
    look, None for all of them; of a prefix only the pages in it are kept, and with `window_is_fixed` it begins at a
    multiple of its length (chunked local attention) instead of sliding.
    """

    group: int
    names: tuple[str, ...]
    layout: ChunkLayout
    page_tokens: int
    window: int | None = None
    window_is_fixed: bool = False
    stored_by_another: bool = False
    """Every rank of a tensor-parallel engine has the same (MLA) and loads it, but only the first one stores it."""
    is_state: bool = False
    """Recurrent layers: a chunk's block is one page, the state behind the chunk's last token, and stands for all that
    is before. Of a prefix only the last one is needed."""
    spans: tuple[str, ...] = ("",)
    """What each stage of a pipeline has of them (ChunkLayout.span), to the scheduler, whose layout is of all stages."""

    def shards(self, ranks: int | None = None) -> list[bytes]:
        """The parts of a chunk that the ranks of all stages have, as keys spell them, or that those of an engine of so
        many ranks would have, which splits the heads otherwise."""
        layout = self.layout if ranks is None else split_anew(self.layout, ranks)
        shards = [replace(layout, rank=rank, span=span) for span in self.spans for rank in range(layout.world_size)]
        return [shard.shard.encode("ascii") for shard in shards]

    def first_kept(self, tokens: int) -> int:
        """The first token whose KV is still needed when the next one is number `tokens`."""
        if self.window is None:
            return 0
        if self.window_is_fixed:
            return tokens // self.window * self.window
        return max(tokens - self.window + 1, 0)


RANKS = (1, 2, 4, 8, 16)
"""The sizes of engines whose blocks an engine of another size looks for."""
SPLIT_DTYPES = ("fp16", "bf16", "fp32")
"""KV of other types has scales beside it, or none that all ranks agree about: such blocks are each size's own."""


def split_anew(layout: ChunkLayout, ranks: int) -> ChunkLayout:
    """What the first of so many ranks has of the same heads; the layout itself where all ranks have the same."""
    if not layout.splits_heads:
        return layout
    return replace(layout, kv_heads=layout.kv_heads * layout.world_size // ranks, rank=0, world_size=ranks)


def other_sizes(groups: Sequence[LayerGroup]) -> list[int]:
    """How many ranks other engines may have whose blocks this one can read: none where ranks have what only as many
    ranks have alike, the states of recurrent layers or packed KV."""
    split = [group.layout for group in groups if group.layout.splits_heads]
    if not split or any(group.is_state or group.layout.world_size > 1 for group in groups if group.layout not in split):
        return []
    own = split[0].world_size
    fit = [ranks for ranks in RANKS if all(layout.kv_heads * own % ranks == 0 for layout in split)]
    return [ranks for ranks in fit if ranks != own and (ranks % own == 0 or own % ranks == 0)]


def layer_groups(
    groups: Sequence[Any], base: ChunkLayout, kv_dtype: str, *, is_stage: bool = False
) -> list[LayerGroup]:
    """The groups that make up a model's KV, from vLLM's kv_cache_groups. `base` gives the model's name, the rank and
    the chunk's tokens; `kv_dtype` is vLLM's name of the cache's type, "auto" for the model's own. `is_stage`: they are
    those of one stage of a pipeline, in an order that does not depend on which layers a stage begins with.

    Raises LayoutError that names a group which cannot be stored (cross attention), NoStates for recurrent layers
    whose states vLLM does not keep at block boundaries.
    """
    found: list[tuple[int, tuple[str, ...], Any]] = []
    for number, group in enumerate(groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        by_spec: dict[str, tuple[list[str], Any]] = {}
        whole = group.kv_cache_spec
        if not getattr(whole, "prefix_cacheable", True):
            continue  # the engine rebuilds it
        each = getattr(whole, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs: layers of several widths
        for name in sorted(group.layer_names, key=in_order):
            spec = whole if each is None else each[name]
            _refuse(spec, number, name)
            by_spec.setdefault(_shape_key(spec), ([], spec))[0].append(name)
        kinds = sorted(by_spec) if is_stage else by_spec
        found += [(number, tuple(by_spec[kind][0]), by_spec[kind][1]) for kind in kinds]
    if not found:
        raise LayoutError("the engine has no layers whose KV can be stored")
    found.sort(key=lambda each: is_recurrent(each[2]))  # first those that have KV for each token
    has_drafts = any(name.startswith(_DRAFT) for _, names, _ in found for name in names)
    spans = [f"{_number(names[0])}-{_number(names[-1])}" if is_stage else "" for _, names, _ in found]
    whole_model = len(found) == 1 and kv_dtype in ("auto", "") and not has_drafts and not is_recurrent(found[0][2])
    made = [
        _group(number, names, spec, base, "" if whole_model else f"{kv_dtype}:{place}:{names[0]}")
        for place, (number, names, spec) in enumerate(found)
    ]
    return [
        replace(group, layout=replace(group.layout, span=span), spans=(span,))
        for group, span in zip(made, spans, strict=True)
    ]


def _number(name: str) -> str:
    """A layer's number in the model; its name, in a key's characters, where it has none."""
    found = re.search(r"\d+", name)
    return found[0] if found else re.sub(r"[^A-Za-z0-9._]", "_", name)


def paged_view(tensor: torch.Tensor, group: LayerGroup, pages: int, name: str = "") -> torch.Tensor:
    """A layer's tensor, which errors call `name`, as (pages, planes, page_tokens, kv_heads, head_dim), not copied.

    A kernel may use smaller pages than the engine hands out: there are more of them then, each of fewer tokens.
    Raises LayoutError for a tensor that is none of the shapes above.
    """
    layout = group.layout
    if layout.dtype == "u8" and tensor.dtype != torch.uint8:
        tensor = tensor.view(torch.uint8)
    elif tensor.dtype.itemsize == DTYPES[layout.dtype].nbytes and tensor.dtype != TORCH_DTYPES[layout.dtype]:
        tensor = tensor.view(TORCH_DTYPES[layout.dtype])
    for view in _readings(tensor, layout):
        count, planes, tokens, heads, dim = view.shape
        if (planes, heads, dim) != (layout.planes, layout.kv_heads, layout.head_dim) or count % pages:
            continue
        if tokens * (count // pages) == group.page_tokens:
            return view
    raise LayoutError(
        f"KV of {name or group.names[0]} has shape {list(tensor.shape)}, which is not {pages} pages of"
        f" {group.page_tokens} tokens, {layout.planes} x {layout.kv_heads} heads of {layout.head_dim} {layout.dtype}"
    )


def state_view(tensors: Sequence[torch.Tensor], group: LayerGroup, pages: int, name: str = "") -> torch.Tensor:
    """A recurrent layer's tensors, which errors call `name`, as (pages, 1, 1, 1, bytes) of their page, not copied.

    Each of them has a first axis of pages; in a page they follow each other without a gap (vLLM's _reshape_kv_cache).
    Raises LayoutError where they do not.
    """
    first, begin = tensors[0], _offset_bytes(tensors[0])
    step, at = first.stride(0) * first.itemsize, begin
    for tensor in tensors:
        is_dense = tensor.shape[0] == pages and tensor[0].is_contiguous()
        is_next = (_offset_bytes(tensor), tensor.stride(0) * tensor.itemsize) == (at, step)
        if not (is_dense and is_next and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()):
            raise LayoutError(f"the states of {name or group.names[0]} do not lie behind each other in {pages} pages")
        at += tensor[0].nbytes
    nbytes = at - begin
    if nbytes != group.layout.head_dim or nbytes > step:
        raise LayoutError(f"a state of {name or group.names[0]} has {nbytes} bytes, not {group.layout.head_dim}")
    view = torch.empty(0, dtype=torch.uint8, device=first.device)
    view.set_(first.untyped_storage(), begin, (pages, 1, 1, 1, nbytes), (step, nbytes, nbytes, nbytes, 1))
    return view


def _offset_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _readings(tensor: torch.Tensor, layout: ChunkLayout) -> list[torch.Tensor]:
    """The ways in which a tensor may be meant; the more likely first where two fit, tokens and heads being as many."""
    if tensor.ndim == 3:
        return [tensor.unsqueeze(1).unsqueeze(3)]
    if tensor.ndim == 4:
        if layout.planes == 1:
            return [tensor.permute(0, 2, 1, 3).unsqueeze(1)]
        if tensor.shape[3] % 2:
            return []
        # A view, whatever the strides: halves of the last axis become an axis of their own.
        return [torch.unflatten(tensor, -1, (2, -1)).permute(0, 3, 2, 1, 4)]
    if tensor.ndim != 5:
        return []
    plain = []
    if tensor.shape[1] == 2:
        plain.append(tensor)
    if tensor.shape[0] == 2:
        plain.append(tensor.transpose(0, 1))
    swapped = [view.transpose(2, 3) for view in plain]
    return swapped + plain if tensor.device.type == "cpu" else plain + swapped


def _group(number: int, names: tuple[str, ...], spec: Any, base: ChunkLayout, part: str) -> LayerGroup:
    if is_recurrent(spec):
        return _state_group(number, names, spec, base, part)
    heads, dtype = spec.num_kv_heads, spec.dtype
    size, size_v = spec.head_size, getattr(spec, "head_size_v", None)
    kind = type(spec).__name__
    is_mla = "MLA" in kind
    size_v = 0 if is_mla else size if size_v is None else size_v
    content = _page_bytes(spec) // spec.block_size  # of one token
    name = DENSE_DTYPES.get(dtype, "u8")
    if content != heads * (size + size_v) * dtype.itemsize:
        # Packed some way of its own: scales, fp4. Bytes that only the engine understands.
        slots = getattr(spec, "num_head_slots", None) or heads
        if content % slots:
            slots = 1
        planes, heads, dim, name = 1, slots, content // slots, "u8"
    elif size_v == size:
        planes, dim = 2, size
    else:
        planes, dim = 1, size + size_v
    window = getattr(spec, "attention_chunk_size", None) if kind.startswith("ChunkedLocal") else None
    is_fixed = window is not None
    if kind.startswith("SlidingWindow"):
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    layout = ChunkLayout(
        layers=len(names),
        kv_heads=heads,
        head_dim=dim,
        dtype=name,
        chunk_tokens=base.chunk_tokens,
        model=base.model,
        rank=0 if is_mla else base.rank,
        world_size=1 if is_mla else base.world_size,
        planes=planes,
        part=part,
        splits_heads=not is_mla and name in SPLIT_DTYPES,
    )
    return LayerGroup(number, names, layout, spec.block_size, window, is_fixed, is_mla and base.rank > 0)


def _state_group(number: int, names: tuple[str, ...], spec: Any, base: ChunkLayout, part: str) -> LayerGroup:
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    facts = [(list(shape), str(dtype)) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    kind = f"{getattr(spec, 'mamba_type', '')}"
    layout = replace(
        base, layers=len(names), kv_heads=1, head_dim=nbytes, dtype="u8", planes=1, part=f"{part}:state:{kind}:{facts}"
    )
    return LayerGroup(number, names, layout, spec.block_size, is_state=True)


def _page_bytes(spec: Any) -> int:
    """Bytes of a page without padding behind it; the name has changed."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes"):
        value = getattr(spec, name, None)
        if value is not None:
            return int(value)
    raise LayoutError(f"{type(spec).__name__} does not say how long its pages are")


class NoStates(LayoutError):
    """The engine serves the model, and keeps no states that could be stored."""


def is_recurrent(spec: Any) -> bool:
    """Whether layers of this spec have a state in place of KV."""
    return any(kind.__name__ == "MambaSpec" for kind in type(spec).__mro__)


def _refuse(spec: Any, number: int, layer: str) -> None:
    kinds = {kind.__name__ for kind in type(spec).__mro__}
    if is_recurrent(spec) and (mode := getattr(spec, "mamba_cache_mode", "none")) != "align":
        raise NoStates(
            f"layer group {number} ({layer}) is recurrent, and with mamba_cache_mode {mode!r} vLLM keeps no states at"
            " block boundaries: enable prefix caching (--enable-prefix-caching), or nothing is stored"
        )
    for kind in UNSUPPORTED:
        if kind in kinds:
            raise LayoutError(
                f"layer group {number} ({layer}) is a {type(spec).__name__}: its KV belongs to a whole prompt, not"
                " to tokens, and cannot be stored in chunks; use this model without KVRedisConnector"
            )


def _shape_key(spec: Any) -> str:
    names = ("num_kv_heads", "head_size", "head_size_v", "dtype", "sliding_window", "attention_chunk_size", "shapes")
    values = [str(getattr(spec, name, None)) for name in names]
    return " ".join([type(spec).__name__, *values, str(_page_bytes(spec)), str(spec.block_size)])


def in_order(name: str) -> list[tuple[int, str]]:
    """Layer names as they are computed, by the numbers in them: layers.10 behind layers.9. A draft model's are last."""
    parts = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
    return [(int(name.startswith(_DRAFT)), ""), *parts]
