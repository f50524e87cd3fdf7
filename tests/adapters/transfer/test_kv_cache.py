"""An engine's memory is named once, and what does not fit its layout is said in words."""

from __future__ import annotations

import pytest
import torch

from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.transfer import kv_cache
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.storage.errors import LayoutError
from kvredis.storage.memory.copy import COPIES_STRIDED, Strides, copy_strided
from tests.adapters.paged_layouts import LAYOUTS, block_of, latent, planes_first

SIZE = (9, 2, 16, 2, 32)
LAYOUT = ChunkLayout(layers=3, kv_heads=2, head_dim=32, dtype="bf16", chunk_tokens=64)


def layers_of(count: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [planes_first(SIZE, dtype) for _ in range(count)]


def test_layers_that_are_not_alike_are_refused() -> None:
    with pytest.raises(LayoutError, match="at least one layer"):
        PagedKV([])
    with pytest.raises(LayoutError, match="layer 1 has 4 axes, not 5"):
        PagedKV([*layers_of(1), torch.zeros(9, 16, 2, 32)])
    with pytest.raises(LayoutError, match=r"layer 2 is .* torch.float16 on cpu, that of layer 0"):
        PagedKV([*layers_of(2), *layers_of(1, torch.float16)])


def test_a_layout_fits_or_its_first_difference_is_named() -> None:
    PagedKV(layers_of()).check(LAYOUT)
    PagedKV(layers_of(dtype=torch.float16)).check(LAYOUT)  # other names of as many bytes
    for other, word in (
        (ChunkLayout(4, 2, 32, "bf16", chunk_tokens=64), "3 layers, the layout says 4"),
        (ChunkLayout(3, 2, 32, "bf16", chunk_tokens=64, planes=1), "2 planes, the layout says 1"),
        (ChunkLayout(3, 1, 32, "bf16", chunk_tokens=64), "2 kv_heads"),
        (ChunkLayout(3, 2, 64, "bf16", chunk_tokens=64), "32 head_dim"),
        (ChunkLayout(3, 2, 32, "fp32", chunk_tokens=64), "2 bytes an element"),
        (ChunkLayout(3, 2, 32, "bf16", chunk_tokens=40), "chunk of 40 tokens is not made of pages of 16"),
    ):
        with pytest.raises(LayoutError, match=word):
            PagedKV(layers_of()).check(other)
    mla = PagedKV([latent((9, 1, 16, 1, 72), torch.bfloat16)])
    mla.check(ChunkLayout(1, 1, 72, "bf16", chunk_tokens=32, planes=1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_gathered_in_the_order_asked_for_and_scattered_back_alone(layout: str) -> None:
    make, size = LAYOUTS[layout]
    layers = [make(size, torch.float8_e4m3fn) for _ in range(2)]
    kv = PagedKV(layers)
    pages = torch.tensor([7, 2, 11])
    block = torch.empty(kv.shape(3), dtype=kv.dtype)
    kv.gather(pages, block)
    assert torch.equal(block.view(torch.uint8).flatten(), block_of(layers, [7, 2, 11]))
    before = [layer.view(torch.uint8).clone() for layer in layers]
    kv.scatter(block, torch.tensor([1, 0, 22]))
    assert torch.equal(block_of(layers, [1, 0, 22]), block_of(layers, [7, 2, 11]))
    rest = [page for page in range(23) if page not in (0, 1, 22)]
    assert torch.equal(block_of(layers, rest), block_of(before, rest))


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_cleared_and_no_others(layout: str, device: str) -> None:
    make, size = LAYOUTS[layout]
    layers = [make(size, torch.float8_e4m3fn).to(device) for _ in range(2)]
    others = [page for page in range(size[0]) if page not in (1, 5)]
    before = [layer.view(torch.uint8).clone() for layer in layers]
    PagedKV(layers).clear([5, 1])
    assert not block_of(layers, [5, 1]).any()
    assert torch.equal(block_of(layers, others), block_of(before, others))


def test_some_layers_alone_are_copied() -> None:
    layers = layers_of()
    kv = PagedKV(layers)
    block = torch.empty(kv.shape(2, 1), dtype=kv.dtype)
    kv.gather(torch.tensor([3, 4]), block, range(1, 2))
    assert torch.equal(block.view(torch.uint8).flatten(), block_of(layers[1:2], [3, 4]))
    untouched = [layers[at].view(torch.int16).clone() for at in (0, 2)]
    kv.scatter(block, torch.tensor([5, 6]), range(1, 2))
    assert torch.equal(block_of(layers[1:2], [5, 6]), block_of(layers[1:2], [3, 4]))
    assert all(torch.equal(layers[at].view(torch.int16), was) for at, was in zip((0, 2), untouched, strict=True))


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each != "elements apart"])
def test_all_pages_of_all_layers_are_copied_at_once_and_not_by_threads_of_torch(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are waited for at each layer, however busy their processors are."""
    calls: list[int] = []

    def counted(to: list[int], source: list[int], strides: Strides) -> None:
        calls.append(len(to))
        copy_strided(to, source, strides)

    monkeypatch.setattr(kv_cache, "copy_strided", counted)
    make, size = LAYOUTS[layout]
    layers = [make(size, torch.bfloat16) for _ in range(4)]
    kv = PagedKV(layers)
    block = torch.empty(kv.shape(3), dtype=kv.dtype)
    kv.gather(torch.tensor([7, 2, 11]), block)
    kv.scatter(block, torch.tensor([1, 0, 22]))
    assert calls == (2 * [4 * 3] if COPIES_STRIDED else [])
    assert torch.equal(block_of(layers, [1, 0, 22]), block_of(layers, [7, 2, 11]))


def test_a_page_that_the_engine_does_not_have_is_refused() -> None:
    kv = PagedKV(layers_of())
    block = torch.zeros(kv.shape(1), dtype=kv.dtype)
    for page in (-1, 9):
        with pytest.raises(IndexError):
            kv.scatter(block, torch.tensor([page]))


def test_layers_that_lie_differently_are_copied_all_the_same() -> None:
    layers = [layers_of(1)[0], torch.randn(SIZE).to(torch.bfloat16).contiguous()]
    kv = PagedKV(layers)
    block = torch.empty(kv.shape(2), dtype=kv.dtype)
    kv.gather(torch.tensor([3, 4]), block)
    assert torch.equal(block.view(torch.uint8).flatten(), block_of(layers, [3, 4]))
