"""KV goes into blocks and out of them whatever strides the engine's tensors have."""

import random

import pytest
import torch

from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import TORCH_DTYPES, SpareMemory, empty_kv, gather, scatter

AXES = 5


def random_kv(rng: random.Random, layout: ChunkLayout, tokens: int) -> torch.Tensor:
    """Random bytes as KV of `tokens` tokens, with its axes in any order in memory, and more around them."""
    shape = layout.shape(tokens)
    order = [*rng.sample(range(AXES - 1), AXES - 1), AXES - 1]  # head_dim lies together, as engines have it
    room = [shape[axis] + rng.randrange(3) for axis in order]
    width = TORCH_DTYPES[layout.dtype].itemsize
    noise = torch.randint(0, 256, (*room[:-1], room[-1] * width), dtype=torch.uint8)
    whole = noise.view(TORCH_DTYPES[layout.dtype])
    whole = whole.permute([order.index(axis) for axis in range(AXES)])
    starts = [rng.randrange(have - want + 1) for have, want in zip(whole.shape, shape, strict=True)]
    for axis, (start, want) in enumerate(zip(starts, shape, strict=True)):
        whole = whole.narrow(axis, start, want)
    return whole


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits: noise may be NaN."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("as_pairs", [False, True], ids=["one tensor", "a pair a layer"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8_e4m3", "u8"])
def test_what_is_gathered_and_scattered_is_the_same_for_any_strides_and_nothing_beside_it_changes(
    dtype: str, as_pairs: bool
) -> None:
    rng = random.Random(f"{dtype} {as_pairs}")
    for _ in range(60):
        layout = ChunkLayout(
            model="m", dtype=dtype, layers=rng.randrange(1, 4), kv_heads=rng.choice((1, 2, 3)),
            head_dim=rng.choice((1, 7, 16, 64, 80, 128)), chunk_tokens=16,
        )  # fmt: skip
        tokens = rng.randrange(1, 40)
        kv, out = random_kv(rng, layout, tokens), random_kv(rng, layout, tokens)
        start = rng.randrange(tokens)
        stop = rng.randrange(start, tokens) + 1
        expected = out.clone()
        expected[:, :, start:stop] = kv[:, :, start:stop]
        block = torch.empty(layout.shape(stop - start), dtype=kv.dtype)
        gather([(layer[0], layer[1]) for layer in kv] if as_pairs else kv, start, stop, block)
        scatter(block, [(layer[0], layer[1]) for layer in out] if as_pairs else out, start)
        assert same_bytes(block, kv[:, :, start:stop])
        assert same_bytes(out, expected)


def test_the_memory_of_a_tensor_that_is_gone_is_used_for_the_next_and_given_up_when_closed() -> None:
    layout = ChunkLayout(model="m", dtype="fp32", layers=2, kv_heads=2, head_dim=64, chunk_tokens=16)
    device, spare = torch.device("cpu"), SpareMemory()
    first = empty_kv(layout, 100, device, spare)
    first.fill_(7.0)
    view = first[1:]
    del first
    assert not (empty_kv(layout, 100, device, spare) == 7.0).any()  # a view of the first one is in use
    del view
    smaller = empty_kv(layout, 60, device, spare)
    assert (smaller == 7.0).all()
    del smaller
    assert not (empty_kv(layout, 20, device, spare) == 7.0).any()  # twice as much is the most that is given
    kept = empty_kv(layout, 100, device, spare).fill_(8.0)
    spare.close()
    del kept
    assert not (empty_kv(layout, 100, device, spare) == 8.0).any()


def test_a_block_and_kv_of_other_sizes_are_an_error_and_no_memory_beside_them_is_read_or_written() -> None:
    layout = ChunkLayout(model="m", dtype="fp32", layers=1, kv_heads=2, head_dim=64, chunk_tokens=16)
    kv = empty_kv(layout, 16, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="size of tensor"):
        gather(kv, 8, 24, torch.empty(layout.shape(16)))
    with pytest.raises(RuntimeError, match="size of tensor"):
        scatter(torch.empty(layout.shape(16)), kv, 8)
