"""What an SGLang host pool says of its bytes is in the facts, wherever it says it; pools here are fakes with attributes
as SGLang 0.5.23's have (the real ones: tests/compat/test_sglang.py).
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvredis.adapters.sglang.pools import NUMBERS, PoolPages, anchor_of, has_draft_layers, is_opaque, pool_facts
from kvredis.storage.errors import LayoutError

PAGE = 4


class MHATokenToKVPoolHost:
    """A pool of keys and values; SGLang's class has this name."""

    def __init__(self, **others: Any) -> None:
        self.dtype = torch.bfloat16
        self.layout, self.page_size = "page_first", PAGE
        self.layer_num = self.target_layer_num = 2
        self.kv_buffer = torch.zeros(2, 8, 2, 2, 16, dtype=torch.bfloat16)
        self.size = 8
        for name, value in others.items():
            setattr(self, name, value)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Two pieces a page, for whole pages of all ranks."""
        tokens = getattr(self, "logical_page_size", PAGE)
        assert len(indices) % tokens == 0
        pages = len(indices) // tokens
        return [self.kv_buffer.data_ptr()] * 2 * pages, [64] * 2 * pages


class MambaPoolHost(MHATokenToKVPoolHost):
    """A pool of states."""


def changed(value: Any) -> Any:
    """Another value of its kind."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"{value}-other"


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_that_cuts_a_page_is_a_fact(name: str) -> None:
    usual = getattr(MHATokenToKVPoolHost(), name, 1)
    one = pool_facts(MHATokenToKVPoolHost(**{name: usual}))
    assert one != pool_facts(MHATokenToKVPoolHost(**{name: changed(usual)}))


@pytest.mark.parametrize(
    "place",
    [
        lambda dtype: {"temporal_dtype": dtype},
        lambda dtype: {"temporal_buffer": torch.zeros(3, dtype=dtype)},
        lambda dtype: {"slot_state_buffers": [torch.zeros(3), torch.zeros(3, dtype=dtype)]},
        lambda dtype: {"conv_device_layers": [[torch.zeros(1, dtype=dtype)], [torch.zeros(1)]]},
        lambda dtype: {"buffer_info": SimpleNamespace(temporal=torch.zeros(3, dtype=dtype))},
        lambda dtype: {"_buffer_infos": (SimpleNamespace(dtype=torch.uint8), SimpleNamespace(dtype=dtype))},
        lambda dtype: {"device_pool": SimpleNamespace(dtype=dtype, store_dtype=torch.uint8)},
        lambda dtype: {"state_pools": [SimpleNamespace(kv_score_buffer=[torch.zeros(1, dtype=dtype)])]},
    ],
)
def test_every_dtype_that_a_pool_or_what_it_mirrors_has_is_a_fact(place: Any) -> None:
    kinds = (torch.float16, torch.bfloat16)
    one, other = (pool_facts(MambaPoolHost(**place(kind))) for kind in kinds)
    assert one != other
    assert one == pool_facts(MambaPoolHost(**place(kinds[0])))


def test_how_large_a_pool_is_and_what_is_free_are_no_facts() -> None:
    one = MHATokenToKVPoolHost()
    two = MHATokenToKVPoolHost(
        size=16,
        kv_buffer=torch.zeros(2, 16, 2, 2, 16, dtype=torch.bfloat16),
        free_slots=torch.zeros(3, dtype=torch.int32),
        k_data_ptrs=torch.zeros(1, dtype=torch.uint64),
        staging_k_buffer=torch.zeros(1),
    )
    assert pool_facts(one) == pool_facts(two)


def test_the_class_and_the_layout_of_the_device_are_facts() -> None:
    usual = pool_facts(MHATokenToKVPoolHost(device_pool=SimpleNamespace(kv_cache_layout="nhd")))
    assert usual != pool_facts(MHATokenToKVPoolHost(device_pool=SimpleNamespace(kv_cache_layout="hnd")))
    assert pool_facts(MHATokenToKVPoolHost()) != pool_facts(MambaPoolHost())


def test_bytes_whose_meaning_only_kernels_know_are_opaque_and_of_one_device() -> None:
    assert not is_opaque(MHATokenToKVPoolHost())
    eight_bits = MHATokenToKVPoolHost(dtype=torch.uint8, _transfer_device=torch.device("cpu"))
    assert is_opaque(eight_bits)
    assert is_opaque(MambaPoolHost())
    eight_bits_elsewhere = MHATokenToKVPoolHost(dtype=torch.uint8, _transfer_device=torch.device("cuda"))
    assert pool_facts(eight_bits) != pool_facts(eight_bits_elsewhere)


def test_layers_of_a_draft_that_are_packed_behind_the_targets_are_noticed() -> None:
    assert not has_draft_layers(MHATokenToKVPoolHost(), "kv")
    assert has_draft_layers(MHATokenToKVPoolHost(layer_num=3), "kv")
    assert has_draft_layers(MHATokenToKVPoolHost(), "draft_swa")
    assert has_draft_layers(MambaPoolHost(), "mamba")


def test_a_groups_pages_are_those_of_its_anchor() -> None:
    pool = MHATokenToKVPoolHost()
    assert anchor_of(SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=pool))) is pool
    assert anchor_of(pool) is pool


def test_indices_that_count_the_tokens_of_all_ranks_fit() -> None:
    pages = PoolPages(MHATokenToKVPoolHost(logical_page_size=2 * PAGE), "m", {})
    assert pages.is_addressed
    assert pages.fits(["a", "b"], torch.zeros(4 * PAGE, dtype=torch.int64))
    assert not pages.fits(["a", "b"], torch.zeros(2 * PAGE, dtype=torch.int64))


def test_a_pool_that_hands_out_no_pages_is_refused_by_name() -> None:
    class Closed(MHATokenToKVPoolHost):
        """As SGLang's MXFP8 pool, whose scales lie elsewhere."""

        def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
            """Refuse."""
            raise NotImplementedError("no pages yet")

        def get_dummy_flat_data_page(self) -> torch.Tensor:
            """Refuse too."""
            raise NotImplementedError("no pages yet")

    with pytest.raises(LayoutError, match="no pages of its Closed for storage: no pages yet"):
        PoolPages(Closed(), "m", {})
