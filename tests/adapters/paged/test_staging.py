"""The first layers of a step are staged before it begins: no page is written until they are loaded, nothing is copied
twice, and what is not loaded as it was staged comes as if nothing had been."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import xxhash

from kvredis.adapters.transfer.base import Part
from kvredis.adapters.transfer.cpu import HostTransfer
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.cuda.tuning import Tuning
from kvredis.adapters.transfer.factory import open_transfer
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.storage.errors import LayoutError
from tests.adapters.paged_engine import words
from tests.adapters.paged_layouts import block_of, planes_first
from tests.adapters.transfer.lazy_gpu import LazyGpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SIZE = (40, 2, 16, 2, 32)
UNIT = 16 * 2 * 32 * 2
"""Bytes of a page in one plane of a layer."""
LAYERS = 4


def made_layers() -> list[torch.Tensor]:
    return [planes_first(SIZE, torch.bfloat16) for _ in range(LAYERS)]


def ring(
    layers: list[torch.Tensor], seed: int = 0, *, units: int = 20, slots: int = 2, sums: bool = False
) -> tuple[RingTransfer, LazyGpu]:
    paged = PagedKV(layers)
    gpu = LazyGpu(paged, seed)
    return RingTransfer(
        paged, gpu, Tuning(slot_bytes=units * UNIT, slots=slots, first_staged_bytes=20 * UNIT), sums=sums
    ), gpu


def parts_of(first_pages: Sequence[int], count: int = 3) -> list[Part]:
    """Chunks of random bytes and `count` pages."""
    return [
        Part(range(page, page + count), memoryview(bytearray(random.Random(page).randbytes(count * 2 * UNIT * LAYERS))))
        for page in first_pages
    ]


def have_come(layers: list[torch.Tensor], parts: Sequence[Part]) -> bool:
    return all(bytes(part.memory) == bytes(block_of(layers, part.pages).numpy()) for part in parts)


def run_dry(gpu: LazyGpu) -> None:
    while gpu.step():
        pass


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("units", "slots", "rows"),
    [
        (20, 2, [1, 1]),
        (8, 2, [1]),
        (20, 3, [1, 1, 1]),
        (7, 3, [1]),
        (40, 2, [1, 2]),
        (40, 3, [1, 2, 1]),
        (90, 2, [1, 3]),
    ],
)
def test_staged_layers_touch_no_page_and_are_not_copied_again(
    seed: int, units: int, slots: int, rows: list[int]
) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers, seed, units=units, slots=slots)
    parts = parts_of([0, 10, 20])  # of 18 units a layer
    planned = transfer.layers(parts)
    row = [range(sum(rows[:at]), sum(rows[: at + 1])) for at in range(len(rows))]
    row += [range(layer, layer + 1) for layer in range(sum(rows), LAYERS)]
    for each in row:
        planned.load(each.start, len(each)).wait()
    assert have_come(layers, parts)
    copies, before = sum(gpu.copies), words(layers)
    parts = parts_of([5, 15, 25])
    planned = transfer.layers(parts)
    assert planned.rows == row[: len(rows)]
    gpu.copies.clear()
    staged = [planned.stage(each.start, len(each)) for each in planned.rows]
    if seed % 2:
        run_dry(gpu)
        assert all(moving.done for moving in staged)
        assert gpu.copies
        assert all(map(torch.equal, words(layers), before)), "pages may be anybody's still"
    uploads = gpu.uploads
    movings = [planned.load(each.start, len(each)) for each in row]
    for moving in reversed(movings):
        moving.wait()
    assert have_come(layers, parts)
    assert gpu.uploads == uploads, "page numbers are there as well"
    assert sum(gpu.copies) <= copies + 1  # where a buffer begins may cut one part more


@pytest.mark.parametrize("between", ["other chunks", "other layers", "whole chunks", "staged anew", "staged again"])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_loaded_in_between_is_right_and_so_is_what_was_staged(seed: int, between: str) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers, seed)
    parts, others = parts_of([0, 10, 20]), parts_of([5, 15, 25])
    planned, other = transfer.layers(parts), transfer.layers(others)
    movings = [planned.stage(0), planned.stage(1)]
    if between == "other chunks":
        movings += [other.load(0), *map(planned.load, range(LAYERS)), *map(other.load, range(1, LAYERS))]
    elif between == "other layers":
        movings += [*map(planned.load, (1, 0, 2, 3)), *map(other.load, range(LAYERS))]
    elif between == "whole chunks":
        movings += [transfer.load(others), *map(planned.load, range(LAYERS))]
    elif between == "staged anew":
        movings += [other.stage(0), other.stage(1), *map(other.load, range(LAYERS)), *map(planned.load, range(LAYERS))]
    else:
        movings += [planned.stage(0), planned.stage(0), planned.stage(1), planned.stage(2)]
        movings += [*map(planned.load, range(LAYERS)), *map(other.load, range(LAYERS))]
    for moving in movings:
        moving.wait()
    assert have_come(layers, parts)
    assert have_come(layers, others)
    assert not any(stream.queue for stream in gpu.streams)


@pytest.mark.parametrize("seed", range(8))
def test_small_layers_come_together_behind_the_first_which_was_staged(seed: int) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers, seed, units=40)
    parts = parts_of([0, 10, 20])
    planned = transfer.layers(parts)
    staged = planned.stage(0)
    first, rest = planned.load(0), planned.load(1, 3)
    for moving in (rest, first, staged):
        moving.wait()
    assert have_come(layers, parts)
    assert gpu.copies == [3, 2, 1]  # the first of each chunk, then what is left of it as one


@pytest.mark.parametrize(("units", "slots"), [(20, 3), (8, 5)])
@pytest.mark.parametrize("staged", [(0, 1), (0, 0), (1,), (0, 1, 0)])
@pytest.mark.parametrize("seed", range(8))
def test_checksums_are_of_what_was_staged_and_of_what_came_behind_it(
    seed: int, staged: tuple[int, ...], units: int, slots: int
) -> None:
    layers = made_layers()
    transfer, _ = ring(layers, seed, units=units, slots=slots, sums=True)
    parts, sums = [], []
    for part in parts_of([0, 10, 20], 5):
        taken = transfer.sum_of(part.memory.nbytes)
        assert taken is not None
        sums.append(taken)
        parts.append(part._replace(row=taken.row))
    planned = transfer.layers(parts)
    movings = [*map(planned.stage, staged), *map(planned.load, range(LAYERS))]
    planned.sum_up()
    assert [each.result() for each in sums] == [xxhash.xxh3_64_hexdigest(part.memory) for part in parts]
    for moving in movings:
        moving.wait()


def test_a_copy_that_fails_while_it_is_staged_is_an_error_of_wait_and_the_next_load_is_none_the_worse() -> None:
    layers = made_layers()
    transfer, gpu = ring(layers)
    parts = parts_of([0, 10, 20])
    planned = transfer.layers(parts)
    gpu.copies_until_failure = 1
    staged = [planned.stage(0), planned.stage(1)]
    staged[0].wait()
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        staged[1].wait()
    assert staged[1].done
    gpu.copies_until_failure = -1
    for layer in range(LAYERS):
        planned.load(layer).wait()
    assert have_come(layers, parts)
    with pytest.raises(LayoutError, match="no layer 4 among 4"):
        planned.load(4)
    transfer.close()
    with pytest.raises(RuntimeError, match="closed"):
        planned.stage(0).wait()


def test_pages_that_there_are_not_are_an_error_of_what_is_staged_and_of_what_is_loaded() -> None:
    transfer, gpu = ring(made_layers())
    (part,) = parts_of([38])  # to 41, and there are 40
    planned = transfer.layers([part])
    staged = planned.stage(0)
    with pytest.raises(RuntimeError, match="pages 38 to 40 are not all among 40"):
        staged.wait()
    with pytest.raises(LayoutError, match="pages 38 to 40 are not all among 40"):
        planned.load(0)
    assert not any(stream.queue for stream in gpu.streams)


@needs_gpu
@pytest.mark.parametrize("between", [False, True])
def test_on_a_gpu_staged_layers_touch_no_page_until_they_are_loaded(between: bool) -> None:
    layers = [layer.cuda() for layer in made_layers()]
    before = words(layers)
    transfer = open_transfer(PagedKV(layers), sums=True)
    assert isinstance(transfer, RingTransfer)
    parts, others = parts_of([0, 10, 20]), parts_of([5, 15, 25])
    planned, other = transfer.layers(parts), transfer.layers(others)
    for row in planned.rows:
        planned.stage(row.start, len(row)).wait()
    torch.cuda.synchronize()
    assert all(map(torch.equal, words(layers), before))
    if between:
        other.load(0).wait()
    for row in planned.rows:
        planned.load(row.start, len(row)).wait()
    for layer in range(LAYERS):
        other.load(layer).wait()
    assert have_come([layer.cpu() for layer in layers], [*parts, *others])
    transfer.close()


def test_where_there_is_no_device_there_is_no_room_and_nothing_to_do() -> None:
    layers = made_layers()
    planned = HostTransfer(PagedKV(layers)).layers(parts_of([0]))
    assert planned.rows == []
    assert planned.stage(0).done
