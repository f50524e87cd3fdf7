"""Chunks between paged memory and host memory: one suite for every way, and every byte compared."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from kvredis.adapters.engine.tensors import TORCH_DTYPES
from kvredis.adapters.transfer import open_transfer
from kvredis.adapters.transfer.base import Part, Transfer
from kvredis.adapters.transfer.cpu import HostTransfer
from kvredis.adapters.transfer.cuda.device import CudaDevice
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.cuda.tuning import Tuning
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.bench.core.shapes import SHAPES
from kvredis.storage.errors import LayoutError
from tests.adapters.paged_layouts import LAYOUTS, block_of, planes_first
from tests.gate import diagonal, nightly

from .lazy_gpu import LazyGpu

LAYERS = 5
WAYS = ("host", "ring", "small ring", *(("cuda triton", "cuda torch") if torch.cuda.is_available() else ()))
"""test_ring.py says so where there is no GPU."""


def made(layers: list[torch.Tensor], way: str) -> tuple[list[torch.Tensor], Transfer]:
    """The layers where the way has them, and the transfer."""
    if way.startswith("cuda"):
        layers = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda").copy_(each)
            for each in layers
        ]
        paged = PagedKV(layers)
        return layers, RingTransfer(paged, CudaDevice(paged, way.split()[1]), Tuning(slot_bytes=1 << 20))
    paged = PagedKV(layers)
    if way == "host":
        return layers, HostTransfer(paged)
    unit = layers[0][0, 0].numel() * layers[0].dtype.itemsize
    slot_bytes = 1 << 20 if way == "ring" else 13 * unit
    return layers, RingTransfer(paged, LazyGpu(paged, seed=len(layers)), Tuning(slot_bytes=slot_bytes, slots=2))


def memory_of(paged: PagedKV, pages: int, layers: range | None = None) -> memoryview:
    shape = torch.Size(paged.shape(pages, None if layers is None else len(layers)))
    return memoryview(bytearray(b"\xa5" * (shape.numel() * paged.dtype.itemsize)))


def drawn(paged: PagedKV, counts: tuple[int, ...], layers: range | None = None, start: int | None = None) -> list[Part]:
    """Parts of so many pages: of pages that follow each other from `start` on, or of random ones."""
    numbers = (
        random.Random(7).sample(range(paged.pages), sum(counts)) if start is None else list(range(start, paged.pages))
    )
    left = iter(numbers)
    taken = [list(itertools.islice(left, count)) for count in counts]
    return [Part(pages, memory_of(paged, len(pages), layers), layers) for pages in taken]


def bytes_of(part: Part) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(part.memory), dtype=torch.uint8) if part.pages else torch.empty(0, dtype=torch.uint8)
    )


def check_both_ways(layers: list[torch.Tensor], way: str, parts_of: Callable[[PagedKV], list[Part]]) -> None:
    """Store, compare; load what is stored into other pages' place, compare those and all that must not change."""
    layers, transfer = made(layers, way)
    parts = parts_of(transfer.paged)
    moving = transfer.store(parts)
    moving.wait()
    assert moving.done
    assert moving.parts_done == len(parts)
    for part in parts:
        chosen = layers if part.layers is None else layers[part.layers.start : part.layers.stop]
        assert torch.equal(bytes_of(part), block_of(chosen, part.pages))
    before = [layer.cpu().clone() for layer in layers]
    other = [Part(part.pages, parts[-1 - at].memory, part.layers) for at, part in enumerate(parts)]
    transfer.load(other).wait()
    for part in other:
        chosen = layers if part.layers is None else layers[part.layers.start : part.layers.stop]
        assert torch.equal(bytes_of(part), block_of(chosen, part.pages))
    touched = {page for part in parts for page in part.pages}
    rest = [page for page in range(transfer.paged.pages) if page not in touched]
    assert torch.equal(block_of(layers, rest), block_of(before, rest))
    for at, layer in enumerate(layers):
        if parts[0].layers is not None and at not in parts[0].layers:
            assert torch.equal(
                block_of([layer], range(transfer.paged.pages)), block_of([before[at]], range(len(layer)))
            )
    transfer.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("layout", "dtype"), diagonal([*LAYOUTS], ["bf16", "fp8_e4m3", "fp32", "u8"]))
def test_every_layout_of_an_engine_goes_out_and_in_to_the_bit(layout: str, dtype: str, way: str) -> None:
    make, size = LAYOUTS[layout]
    layers = [make(size, TORCH_DTYPES[dtype]) for _ in range(LAYERS)]
    check_both_ways(layers, way, lambda paged: drawn(paged, (4, 4, 4, 4)))


@pytest.mark.parametrize(
    ("shape", "dtype", "way"),
    [
        *diagonal(sorted(SHAPES.keys() - {"32b"}), ["fp16", "bf16", "fp8_e5m2", "fp32"], WAYS),
        *(nightly("32b", "bf16", way) for way in WAYS),
    ],
)
def test_every_shape_goes_out_and_in_to_the_bit(shape: str, dtype: str, way: str) -> None:
    model = SHAPES[shape]
    layers = [
        planes_first((6, 2, 16, model.kv_heads, model.head_dim), TORCH_DTYPES[dtype]) for _ in range(model.layers)
    ]
    check_both_ways(layers, way, lambda paged: drawn(paged, (2, 2)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counts", [(1,) * 11, (16,), (3, 3, 3), (7, 0, 7)])
@pytest.mark.parametrize("chosen", [None, range(0, 1), range(2, 5)], ids=["all layers", "the first", "the last three"])
@pytest.mark.parametrize("start", [None, 2], ids=["scattered", "contiguous"])
def test_parts_of_any_size_and_any_layers(
    way: str, counts: tuple[int, ...], chosen: range | None, start: int | None
) -> None:
    layers = [planes_first((23, 2, 16, 2, 32), torch.bfloat16) for _ in range(LAYERS)]
    check_both_ways(layers, way, lambda paged: drawn(paged, counts, chosen, start))


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_different_sizes_and_layers_share_one_job(way: str) -> None:
    layers = [planes_first((23, 2, 16, 2, 32), torch.bfloat16) for _ in range(LAYERS)]
    layers, transfer = made(layers, way)
    parts = [
        *drawn(transfer.paged, (1, 5)),
        *drawn(transfer.paged, (2,), range(1, 4)),
        *drawn(transfer.paged, (2, 2, 2), range(4, 5)),
        *drawn(transfer.paged, (9,)),
    ]
    transfer.store(parts).wait()
    for part in parts:
        chosen = layers if part.layers is None else layers[part.layers.start : part.layers.stop]
        assert torch.equal(bytes_of(part), block_of(chosen, part.pages))
    transfer.close()


@pytest.mark.parametrize("way", WAYS)
def test_no_parts_are_done_at_once(way: str) -> None:
    _, transfer = made([planes_first((4, 2, 16, 2, 32), torch.bfloat16)], way)
    for moving in (transfer.store([]), transfer.load([]), transfer.store([Part([], memoryview(b"").toreadonly())][:0])):
        assert (moving.done, moving.parts_done) == (True, 0)
        moving.wait()
    transfer.close()


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_is_refused_before_anything_moves(way: str) -> None:
    layers, transfer = made([planes_first((4, 2, 16, 2, 32), torch.bfloat16) for _ in range(2)], way)
    paged = transfer.paged
    good = Part([0, 1], memory_of(paged, 2))
    for bad, word in (
        (Part([0], memory_of(paged, 2)), "bytes are not 1 pages"),
        (Part([0, 4], memory_of(paged, 2)), "pages 0 to 4"),
        (Part([-1, 1], memory_of(paged, 2)), "pages -1 to 1"),
        (Part([0], memory_of(paged, 1), range(1, 3)), "no layers"),
        (Part([0], memory_of(paged, 1), range(0, 2, 2)), "no layers"),
    ):
        for move in (transfer.store, transfer.load):
            with pytest.raises(LayoutError, match=word):
                move([good, bad])
    assert set(bytes(good.memory)) == {0xA5}
    with pytest.raises(LayoutError, match="read-only"):
        transfer.store([Part([0, 1], good.memory.toreadonly())])
    transfer.load([Part([0, 1], good.memory.toreadonly())]).wait()  # a server's arena is mapped so
    assert torch.equal(bytes_of(good), block_of(layers, [0, 1]))
    transfer.close()


def test_kv_in_the_cpus_memory_is_copied_by_the_cpu() -> None:
    paged = PagedKV([planes_first((4, 2, 16, 2, 32), torch.bfloat16)])
    assert isinstance(open_transfer(paged), HostTransfer)
