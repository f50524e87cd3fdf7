"""Whatever shape vLLM gives its KV, the same chunk comes out, and what cannot be read is refused by name."""

import pytest
import torch

from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.adapters.vllm.kv_layout import LayerGroup, NoStates, layer_groups, paged_view, state_view
from kvredis.storage.errors import LayoutError
from tests.adapters.vllm.paged_specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    names,
)

PAGES, TOKENS, HEADS, DIM = 6, 32, 2, 8
BASE = ChunkLayout(1, 1, 1, "u8", chunk_tokens=64, model="org/model")


def groups_of(*groups: KVCacheGroup, base: ChunkLayout = BASE, kv_dtype: str = "auto") -> list[LayerGroup]:
    return layer_groups(groups, base, kv_dtype)


def one(spec: object, layers: int = 1, base: ChunkLayout = BASE) -> LayerGroup:
    (group,) = groups_of(KVCacheGroup(names(layers), spec), base=base)
    return group


def canonical() -> torch.Tensor:
    """(pages, 2, tokens, heads, dim), every element another."""
    return torch.arange(PAGES * 2 * TOKENS * HEADS * DIM, dtype=torch.float32).view(PAGES, 2, TOKENS, HEADS, DIM)


SHAPES = {
    "(2, B, N, H, D)": lambda kv: kv.transpose(0, 1).contiguous(),
    "(2, B, H, N, D)": lambda kv: kv.transpose(0, 1).transpose(2, 3).contiguous(),
    "(B, 2, N, H, D)": lambda kv: kv.contiguous(),
    "(B, 2, H, N, D)": lambda kv: kv.transpose(2, 3).contiguous(),
    "(B, H, N, 2D)": lambda kv: kv.permute(0, 3, 2, 1, 4).flatten(3).contiguous(),
    "(B, H, N, 2D), tokens outside heads in memory": lambda kv: (
        kv.permute(0, 2, 3, 1, 4).flatten(3).contiguous().transpose(1, 2)
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_of_k_and_v_is_read_as_the_same_pages_without_a_copy(shape: str) -> None:
    group = one(FullAttentionSpec(TOKENS, HEADS, DIM, torch.float32))
    tensor = SHAPES[shape](canonical())
    view = paged_view(tensor, group, PAGES)
    assert torch.equal(view, canonical())
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("device_order", ["(2, B, H, N, D)", "(B, 2, H, N, D)"])
def test_where_heads_are_as_many_as_tokens_the_order_is_the_cpus(device_order: str) -> None:
    kv = torch.arange(4 * 2 * 16 * 16 * 4, dtype=torch.float32).view(4, 2, 16, 16, 4)
    group = one(FullAttentionSpec(16, 16, 4, torch.float32))
    assert torch.equal(paged_view(SHAPES[device_order](kv), group, 4), kv)


@pytest.mark.parametrize("shape", [(PAGES, TOKENS, 576), (PAGES, 1, TOKENS, 576)])
def test_a_latent_is_one_plane(shape: tuple[int, ...]) -> None:
    group = one(MLAAttentionSpec(TOKENS))
    assert (group.layout.planes, group.layout.kv_heads, group.layout.head_dim) == (1, 1, 576)
    tensor = torch.randn(shape).to(torch.bfloat16)
    view = paged_view(tensor, group, PAGES)
    assert torch.equal(view.reshape(PAGES, TOKENS, 576), tensor.reshape(PAGES, TOKENS, 576))


def test_k_and_v_of_different_lengths_are_one_vector() -> None:
    group = one(FullAttentionSpec(TOKENS, HEADS, 8, torch.float32, head_size_v=4))
    assert (group.layout.planes, group.layout.head_dim) == (1, 12)
    tensor = torch.randn(PAGES, HEADS, TOKENS, 12)
    assert torch.equal(paged_view(tensor, group, PAGES)[:, 0], tensor.transpose(1, 2))


def test_what_is_packed_is_bytes() -> None:
    group = one(FullAttentionSpec(TOKENS, HEADS, 64, torch.uint8, state_content_bytes=136))
    assert (group.layout.dtype, group.layout.planes, group.layout.head_dim) == ("u8", 1, 136)
    tensor = torch.randint(0, 255, (PAGES, HEADS, TOKENS, 136), dtype=torch.uint8)
    assert paged_view(tensor, group, PAGES).shape == (PAGES, 1, TOKENS, HEADS, 136)


def test_kernels_may_split_pages() -> None:
    group = one(FullAttentionSpec(TOKENS, HEADS, DIM, torch.float32))
    tensor = (
        SHAPES["(B, H, N, 2D)"](canonical())
        .view(PAGES, HEADS, 2, 16, 2 * DIM)
        .transpose(1, 2)
        .flatten(0, 1)
        .contiguous()
    )
    view = paged_view(tensor, group, PAGES)
    assert PagedKV([view]).page_tokens == 16
    assert torch.equal(view.reshape(PAGES, 2, *view.shape[1:]).transpose(1, 2).flatten(2, 3), canonical())


@pytest.mark.parametrize("shape", [(PAGES, HEADS, TOKENS, 15), (PAGES, HEADS, 31, 16), (5, 5), (PAGES, 3, TOKENS, 16)])
def test_a_tensor_of_another_shape_is_refused_by_name(shape: tuple[int, ...]) -> None:
    group = one(FullAttentionSpec(TOKENS, HEADS, DIM, torch.float32))
    with pytest.raises(LayoutError, match=r"model\.layers\.0\.self_attn\.attn has shape"):
        paged_view(torch.zeros(shape), group, PAGES)


def test_layers_are_in_the_order_of_their_numbers() -> None:
    shuffled = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.0.attn"]
    assert groups_of(KVCacheGroup(shuffled, FullAttentionSpec()))[0].names == tuple(reversed(shuffled))


def test_groups_differ_in_their_layouts_and_so_in_their_keys() -> None:
    window = SlidingWindowSpec(32, 2, 64, sliding_window=100)
    found = groups_of(
        KVCacheGroup(names(2), window),
        KVCacheGroup(names(2, 2), window),
        KVCacheGroup(names(2, 4), FullAttentionSpec()),
        KVCacheGroup(names(1, 6), FullAttentionSpec(), enable_kv_transfer=False),
        KVCacheGroup(names(1, 7), FullAttentionSpec(prefix_cacheable=False)),
    )
    assert [(group.group, group.window) for group in found] == [(0, 100), (1, 100), (2, None)]
    assert len({group.layout for group in found}) == 3
    assert one(FullAttentionSpec()).layout.part == ""


def test_layers_of_several_widths_share_a_table_and_not_a_layout() -> None:
    wide, slim = names(2)
    spec = UniformTypeKVCacheSpecs({wide: FullAttentionSpec(32, 4), slim: FullAttentionSpec(32, 2)})
    found = groups_of(KVCacheGroup([wide, slim], spec))
    assert [(group.group, group.names, group.layout.kv_heads) for group in found] == [(0, (wide,), 4), (0, (slim,), 2)]


def test_an_fp8_cache_of_the_same_model_has_another_layout() -> None:
    plain = groups_of(KVCacheGroup(names(1), FullAttentionSpec(dtype=torch.uint8)))
    fp8 = groups_of(KVCacheGroup(names(1), FullAttentionSpec(dtype=torch.uint8)), kv_dtype="fp8_e4m3")
    assert plain[0].layout != fp8[0].layout


def test_a_recurrent_layer_has_one_page_for_all_that_is_before_and_stands_behind_those_with_kv() -> None:
    kv, state = groups_of(KVCacheGroup(names(3, 1), MambaSpec()), KVCacheGroup(names(1), FullAttentionSpec()))
    assert (kv.group, kv.is_state, state.group, state.is_state) == (1, False, 0, True)
    assert (state.layout.layers, state.layout.chunk_bytes(1)) == (3, 3 * (3 * 8 * 2 + 2 * 4 * 4 * 4))
    other = groups_of(KVCacheGroup(names(3, 1), MambaSpec(dtypes=(torch.float32, torch.float32))))[0]
    swapped = groups_of(KVCacheGroup(names(3, 1), MambaSpec(shapes=((2, 4, 4), (3, 16)))))[0]
    assert len({group.layout for group in (state, other, swapped)}) == 3


def test_the_page_of_a_state_is_all_of_its_tensors_and_nothing_of_the_padding() -> None:
    (group,) = groups_of(KVCacheGroup(names(1), MambaSpec()))
    raw = torch.arange(4 * 512, dtype=torch.int64).to(torch.uint8)
    window = raw.view(torch.bfloat16).as_strided((4, 3, 8), (256, 8, 1))
    total = raw.view(torch.float32).as_strided((4, 2, 4, 4), (128, 16, 4, 1), 12)
    view = state_view([window, total], group, 4)
    assert view.shape == (4, 1, 1, 1, 176)
    assert torch.equal(view[2].flatten(), raw[1024 : 1024 + 176])
    assert view.data_ptr() == raw.data_ptr()
    apart = raw.view(torch.float32).as_strided((4, 2, 4, 4), (128, 16, 4, 1), 16)
    for wrong in ([window, apart], [total, window], [window], [window[:3], total[:3]]):
        with pytest.raises(LayoutError, match="state"):
            state_view(wrong, group, 4)


def test_without_states_at_block_boundaries_it_is_said_what_to_do_and_what_has_no_tokens_is_refused() -> None:
    with pytest.raises(NoStates, match=r"layer group 1 \(model.layers.2.self_attn.attn\).*enable prefix caching"):
        groups_of(
            KVCacheGroup(names(2), FullAttentionSpec()), KVCacheGroup(names(1, 2), MambaSpec(mamba_cache_mode="none"))
        )
    with pytest.raises(LayoutError, match=r"layer group 0 .* is a CrossAttentionSpec"):
        groups_of(KVCacheGroup(names(1), CrossAttentionSpec()))
    with pytest.raises(LayoutError, match="no layers"):
        groups_of()


def test_a_latent_is_the_same_on_all_ranks_and_stored_by_the_first() -> None:
    ranks = [ChunkLayout(1, 1, 1, "u8", chunk_tokens=64, model="m", rank=rank, world_size=2) for rank in (0, 1)]
    first, second = (one(MLAAttentionSpec(), base=base) for base in ranks)
    assert first.layout == second.layout
    assert (first.stored_by_another, second.stored_by_another) == (False, True)
    split = [one(FullAttentionSpec(), base=base).layout for base in ranks]
    assert [(layout.rank, layout.world_size) for layout in split] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("spec", "tokens", "first"),
    [
        (FullAttentionSpec(), 1000, 0),
        (SlidingWindowSpec(sliding_window=128), 100, 0),
        (SlidingWindowSpec(sliding_window=128), 1000, 873),
        (ChunkedLocalAttentionSpec(attention_chunk_size=128), 1000, 896),
        (ChunkedLocalAttentionSpec(attention_chunk_size=128), 1024, 1024),
    ],
)
def test_a_window_keeps_what_the_next_token_sees(spec: object, tokens: int, first: int) -> None:
    assert one(spec).first_kept(tokens) == first
