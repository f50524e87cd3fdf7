"""The first layers of a step are staged before it begins: no page is written until they are loaded, nothing is copied
twice, and what is not loaded as it was staged comes as if nothing had been."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import xxhash

from kvredis.adapters.chunk_moves import ChunkMove, LoadJob
from kvredis.adapters.layer_loading import LayerLoads
from kvredis.adapters.moving import ChunkMover
from kvredis.adapters.paged import PagedKV
from kvredis.adapters.transfer import HostTransfer, Part, open_transfer
from kvredis.adapters.transfer_cuda import RingTransfer
from kvredis.storage.errors import LayoutError
from tests.adapters.fake_backend import FakeLease
from tests.adapters.lazy_gpu import LazyGpu
from tests.adapters.manual_transfer import with_blocks
from tests.adapters.paged_engine import CHUNK, PagedEngine, mover_on, moves_of, words
from tests.adapters.paged_layouts import block_of, planes_first
from tests.adapters.test_leases_ahead import leased

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
    return RingTransfer(paged, gpu, slot_bytes=units * UNIT, slots=slots, sums=sums), gpu


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
    seed: int, units: int, slots: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvredis.adapters.transfer_cuda.FIRST_STAGED_BYTES", 20 * UNIT)
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


# ---- behind a ChunkMover ---------------------------------------------------------------------------------------------


class Rig:
    """An engine on a GPU that does nothing before it must, whose first layers are staged."""

    def __init__(self, seed: int, *, groups: int = 1) -> None:
        moves = moves_of("a", 5)
        self.jobs = [LoadJob("a", moves[:3]), LoadJob("b", moves[3:])]
        if groups == 2:
            self.jobs.append(LoadJob("c", moves_of("c", 2, group=1)))
        self.backend, self.source = with_blocks(*self.jobs)
        self.gpus: list[LazyGpu] = []

        def transfer(paged: PagedKV) -> RingTransfer:
            self.gpus.append(LazyGpu(paged, seed))
            return RingTransfer(paged, self.gpus[-1], slot_bytes=50_000, slots=2, sums=seed % 2 == 1)

        self.engine = PagedEngine(3, transfer=transfer, groups=groups)

    def staged(self, mover: ChunkMover) -> None:
        """Have what the jobs load leased ahead, and wait until their first layers are staged."""
        mover.lease_ahead(self.jobs)
        leased(mover)

    def moves(self) -> list[ChunkMove]:
        return [move for job in self.jobs for move in job.moves]

    def step(self, mover: ChunkMover) -> None:
        mover.begin_layers(self.jobs)
        for place in mover._means.places:
            mover.wait_layer(place)
        mover.end_layers()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_finds_its_first_layers_staged_and_the_pages_as_they_were(seed: int, groups: int) -> None:
    rig = Rig(seed, groups=groups)
    with mover_on(rig.backend, rig.engine) as mover:
        rig.step(mover)
        copies = [sum(gpu.copies) for gpu in rig.gpus]
        for gpu in rig.gpus:
            gpu.copies.clear()
        assert mover.finished().failed_pages == {}
        for layers in rig.engine.memory:
            for layer in layers:
                layer.view(torch.uint8).zero_()
        rig.engine.before = rig.engine.bits()
        rig.staged(mover)
        for gpu in rig.gpus:
            assert bool(gpu.copies) == (groups == 1), "layers of several groups take turns, and are not staged"
            run_dry(gpu)
        assert rig.engine.changed_pages() == set()
        rig.step(mover)
        assert mover.finished().failed_pages == {}
        assert [sum(gpu.copies) for gpu in rig.gpus] == copies
    assert all(rig.engine.bytes_of(move) == rig.source.bytes_of(move) for move in rig.moves())


@pytest.mark.parametrize("end", ["another step", "nothing", "the engine's end", "cancelled", "cancelled as it begins"])
@pytest.mark.parametrize("seed", range(4))
def test_no_lease_ends_while_its_bytes_are_being_staged(seed: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(seed)
    (gpu,) = rig.gpus
    release, under_way = FakeLease.release, list[bool]()

    def watched(lease: FakeLease) -> None:
        under_way.append(any(stream.queue for stream in gpu.streams))
        release(lease)

    monkeypatch.setattr(FakeLease, "release", watched)
    take_over = LayerLoads._take_over

    def taken_and_cancelled(loads: LayerLoads) -> bool:
        assert take_over(loads)
        mover.cancel("a")
        mover.cancel("b")
        return True

    with mover_on(rig.backend, rig.engine) as mover:
        rig.staged(mover)
        assert any(stream.queue for stream in gpu.streams), "the GPU has done nothing yet"
        assert under_way == []
        if end == "another step":
            mover.lease_ahead(rig.jobs[:1])
        elif end == "nothing":
            mover.begin_layers([])
            mover.end_layers()
        elif end == "cancelled":
            mover.begin_layers(rig.jobs)
            mover.cancel("a")
            mover.cancel("b")
            mover.end_layers()
        elif end == "cancelled as it begins":
            monkeypatch.setattr(LayerLoads, "_take_over", taken_and_cancelled)
            mover.begin_layers(rig.jobs)
            mover.end_layers()
        if end != "another step":
            mover.close()
            assert len(under_way) == 5
        assert not any(under_way)


def test_a_bound_on_the_bandwidth_counts_what_was_staged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(0)
    with mover_on(rig.backend, rig.engine, bytes_per_s=1e9) as mover:
        bandwidth, taken = mover._means.bandwidth, list[int]()
        monkeypatch.setattr(bandwidth, "take", lambda nbytes, *, is_load: taken.append(nbytes))
        rig.staged(mover)
        assert sum(taken) > 0
        rig.step(mover)
        assert mover.finished().failed_pages == {}
    chunk = rig.engine.layouts[0].chunk_bytes(CHUNK)
    assert sum(taken) == 5 * chunk


def test_with_a_bound_no_more_is_staged_than_what_is_needed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(0)
    layer = 5 * rig.engine.layouts[0].chunk_bytes(CHUNK) // LAYERS
    with mover_on(rig.backend, rig.engine, bytes_per_s=100.0 * layer) as mover:  # pieces of 10 ms
        bandwidth, taken = mover._means.bandwidth, list[int]()
        monkeypatch.setattr(bandwidth, "take", lambda nbytes, *, is_load: taken.append(nbytes))
        rig.staged(mover)
        assert taken == [layer]
        rig.step(mover)
        assert taken == [layer] * LAYERS


def test_a_device_that_fails_while_it_stages_fails_the_load_and_not_the_engine() -> None:
    rig = Rig(0)
    (gpu,) = rig.gpus
    with mover_on(rig.backend, rig.engine) as mover:
        gpu.copies_until_failure = 0
        rig.staged(mover)
        rig.step(mover)
        assert set(mover.finished().failed_pages) == {"a", "b"}
        gpu.copies_until_failure = -1
        rig.step(mover)
        assert mover.finished().failed_pages == {}
    assert all(rig.engine.bytes_of(move) == rig.source.bytes_of(move) for move in rig.moves())
