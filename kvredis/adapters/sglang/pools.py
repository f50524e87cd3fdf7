"""SGLang's host pools as memory of pages: where each page of a pool lies, and under which keys pages of it are stored.

A pool tells the addresses of a page's pieces (get_page_buffer_meta), which is all that is needed to fill it without a
copy of ours between. One value holds all pieces of a page behind each other, in the pool's order. A pool that cannot
tell is copied by the whole page (get_data_page, set_from_flat_data_page).

This file knows SGLang's pools by what they can do, and does not import SGLang.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from kvredis.adapters.paged.pages import Page, PageFormat, memory_at, page_prefix
from kvredis.storage.errors import LayoutError

FORM: Final = "pieces"
FLAT_FORM: Final = "flat"
"""The bytes of a page as get_data_page gives them, which some layouts order otherwise than their pieces."""
PLAIN_CLASSES: Final = frozenset({
    "MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost", "HiSparseMHATokenToKVPoolHost", "MLATokenToKVPoolHost",
})  # fmt: skip
"""Pools of keys and values, or latents, as the model computes them, unless their dtype has a byte. All others (Mamba's
states, indexers, DeepSeek V4's, the envelopes of unified memory) are opaque."""
NUMBERS: Final = (
    "dtype", "layout", "page_size", "logical_page_size", "storage_format_tag", "pool_name",
    "layer_num", "target_layer_num", "start_layer", "end_layer", "num_mamba_layers", "_target_layer_indices",
    "_live_target_layers",
    "head_num", "head_group_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "temporal_state_shape", "conv_state_shapes", "ring_size", "item_bytes", "row_bytes", "state_page_bytes",
    "indexer_page_stride_size", "page_aligned_only",
    "dcp_rank", "dcp_size", "shard_rank", "shard_size",
)  # fmt: skip
"""Attributes of SGLang's pools (0.5.23) that say how a page's bytes are cut: its tokens, its layers and which these
are, its heads and widths, its states, and whose part of it this rank has. Sizes of the whole pool are none of them."""
MIRRORED: Final = frozenset({
    "buffer_info", "_buffer_infos", "_native_infos", "mtp_draft_buffer_infos", "device_pool", "mtp_draft_device_pools",
    "state_pools", "host_pool",
})  # fmt: skip
"""Attributes that hold what a pool mirrors, or wraps. Their dtypes count too: a pool of bytes has none of its own."""
BOOKKEEPING: Final = frozenset({"mem_state", "free_slots", "release_slots", "slot_used", "_slots"})


def is_logical(host_pool: Any) -> bool:
    """Whether a pool has no memory of its own: it only counts the pages that the other pools hold."""
    return getattr(host_pool, "kv_buffer", True) is None


def anchor_of(host_pool: Any) -> Any:
    """The pool of a group (HostPoolGroup) whose pages the group moves when it is asked for its own; another pool
    itself."""
    return getattr(getattr(host_pool, "anchor_entry", None), "host_pool", host_pool)


def pool_facts(host_pool: Any) -> dict[str, Any]:
    """What the bytes of a pool's pages depend on, of what the pool knows itself: its class and layout, the numbers of
    NUMBERS, and every dtype that it or what it mirrors names or has a tensor of."""
    facts: dict[str, Any] = {"pool_class": type(host_pool).__name__, "dtypes": _dtypes(host_pool)}
    for name in NUMBERS:
        value = getattr(host_pool, name, None)
        if value is not None:
            facts[name] = _plain(value)
    mirrored = getattr(host_pool, "device_pool", None)
    facts["device_layout"] = str(getattr(mirrored, "kv_cache_layout", None))
    if is_opaque(host_pool):
        facts["platform"] = "rocm" if torch.version.hip else str(_device(host_pool))
    return facts


def is_opaque(host_pool: Any) -> bool:
    """Whether a pool's bytes are what SGLang's kernels of one version make of them, and not numbers of its dtype."""
    dtype = getattr(host_pool, "dtype", None)
    is_numbers = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    return type(host_pool).__name__ not in PLAIN_CLASSES or not is_numbers


def has_draft_layers(host_pool: Any, name: str) -> bool:
    """Whether KV of a draft model may be in a pool's pages: SGLang packs its layers behind the target's."""
    if name.startswith("draft") or type(host_pool).__name__ not in PLAIN_CLASSES:
        return True
    layers = getattr(host_pool, "layer_num", None)
    return getattr(host_pool, "target_layer_num", layers) != layers


def _dtypes(host_pool: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in _members(host_pool):
        kinds = _kinds(value)
        if name in MIRRORED:
            for each in value if isinstance(value, list | tuple) else (value,):
                kinds = kinds.union(*(_kinds(member) for _, member in _members(each)))
        if kinds:
            found[name] = sorted(kinds)
    return found


def _members(owner: Any) -> list[tuple[str, Any]]:
    names = [*getattr(owner, "__dict__", ()), *getattr(owner, "__struct_fields__", ())]
    return [
        (name, getattr(owner, name, None))
        for name in sorted(names)
        if name not in BOOKKEEPING and not name.endswith("_ptrs") and "staging" not in name
    ]


def _kinds(value: Any) -> set[str]:
    """The dtypes of a dtype, a tensor, or of those in sequences of them."""
    if isinstance(value, torch.dtype):
        return {str(value)}
    if isinstance(value, torch.Tensor):
        return {str(value.dtype)}
    if isinstance(value, list | tuple):
        return set().union(*(_kinds(each) for each in value))
    return set()


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | str) else str(value)


def _device(host_pool: Any) -> str:
    """The kind of device that a pool mirrors."""
    for name in ("_transfer_device", "_buffer_device", "gpu_device"):
        if (device := getattr(host_pool, name, None)) is not None:
            return torch.device(device).type
    device = getattr(getattr(host_pool, "device_pool", None), "device", None)
    return "unknown" if device is None else torch.device(device).type


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a tensor of {tensor.device} with strides {tensor.stride()} is no page of host memory")
    return memory_at(tensor.data_ptr(), tensor.nbytes)


class FlatPages:
    """Values of tensors that SGLang hands over, of any size, under keys of one form."""

    def __init__(self, model: str, facts: Mapping[str, Any]) -> None:
        self.prefix = page_prefix(model, {**facts, "form": FLAT_FORM})
        self._model = model
        self._formats: dict[int, PageFormat] = {}

    def key(self, name: str) -> bytes:
        """The key of a page."""
        return self.prefix + name.encode("ascii", "backslashreplace")

    def page(self, name: str, tensor: torch.Tensor) -> Page:
        """The page `name` in the tensor's memory; ValueError where that is not contiguous host memory."""
        nbytes = tensor.nbytes
        if nbytes not in self._formats:
            self._formats[nbytes] = PageFormat({"engine": "sglang", "model": self._model}, nbytes)
        return Page(self.key(name), self._formats[nbytes], (bytes_of(tensor),))


class PoolPages:
    """The pages of one host pool. Raises LayoutError for a pool whose pages SGLang cannot hand out."""

    def __init__(self, host_pool: Any, model: str, facts: Mapping[str, Any]) -> None:
        self.host_pool = host_pool
        self.page_tokens = _page_tokens(host_pool)
        sizes = self._piece_sizes()
        facts = {**facts, **pool_facts(host_pool), "pieces": sizes}
        if sizes is None:
            _refuse_without_pages(host_pool)
        self._flat = FlatPages(model, facts) if sizes is None else None
        self.prefix = self._flat.prefix if self._flat else page_prefix(model, {**facts, "form": FORM})
        self._format = PageFormat({"engine": "sglang", "model": model}, sum(sizes or ()))

    @property
    def is_addressed(self) -> bool:
        """Whether the pool tells where its pages lie."""
        return self._flat is None

    def key(self, name: str) -> bytes:
        """The key of a page."""
        return self.prefix + name.encode("ascii", "backslashreplace")

    def fits(self, names: Sequence[str], host_indices: torch.Tensor | None) -> bool:
        """Whether there is an index for each token of each page."""
        return host_indices is not None and host_indices.numel() == len(names) * self.page_tokens

    def pages(self, names: Sequence[str], host_indices: torch.Tensor) -> list[Page]:
        """The pages at these indices of a pool that is_addressed."""
        addresses, sizes = self.host_pool.get_page_buffer_meta(host_indices)
        each = len(addresses) // max(len(names), 1)
        pieces = [memory_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return [
            Page(self.key(name), self._format, pieces[place * each : (place + 1) * each])
            for place, name in enumerate(names)
        ]

    def copies(self, names: Sequence[str], host_indices: torch.Tensor | None = None) -> list[tuple[Page, torch.Tensor]]:
        """Pages of a pool that is not: copies of those at the indices, or empty ones to be filled."""
        assert self._flat is not None
        tensors = [self.host_pool.get_dummy_flat_data_page() for _ in names]
        if host_indices is not None:
            starts = host_indices.tolist()[:: self.page_tokens]
            tensors = [self.host_pool.get_data_page(start, flat=True).contiguous() for start in starts]
        return [(self._flat.page(name, tensor), tensor) for name, tensor in zip(names, tensors, strict=True)]

    def _piece_sizes(self) -> list[int] | None:
        try:
            _, sizes = self.host_pool.get_page_buffer_meta(torch.zeros(self.page_tokens, dtype=torch.int64))
        except (NotImplementedError, ValueError, AttributeError, TypeError, AssertionError):
            return None
        return [int(size) for size in sizes]


def _page_tokens(host_pool: Any) -> int:
    """Indices of a page: with decode context parallelism SGLang's indices count the tokens of all ranks."""
    return int(getattr(host_pool, "logical_page_size", None) or getattr(host_pool, "page_size", None) or 1)


def _refuse_without_pages(host_pool: Any) -> None:
    try:
        host_pool.get_dummy_flat_data_page()
    except NotImplementedError as error:
        name = type(host_pool).__name__
        raise LayoutError(f"SGLang hands out no pages of its {name} for storage: {error}") from error
