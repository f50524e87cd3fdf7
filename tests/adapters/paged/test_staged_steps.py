"""Behind a ChunkMover: a step finds its first layers staged, and what is staged is let go, and booked, whatever becomes
of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from kvredis.adapters.paged.jobs import ChunkMove, LoadJob, PagedGroup
from kvredis.adapters.paged.layerwise_load import LayerLoads
from kvredis.adapters.paged.load import LeasedChunk
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.adapters.paged.preload import PlannedLayers, plan_layers
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.cuda.tuning import Tuning
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.storage.errors import LayoutError
from tests.adapters.fake_backend import FakeLease
from tests.adapters.paged.test_preload import leased
from tests.adapters.paged.test_staging import LAYERS, run_dry
from tests.adapters.paged_engine import CHUNK, PagedEngine, mover_on, moves_of
from tests.adapters.transfer.lazy_gpu import LazyGpu
from tests.adapters.transfer.manual_transfer import with_blocks


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
            return RingTransfer(paged, self.gpus[-1], Tuning(slot_bytes=50_000, slots=2), sums=seed % 2 == 1)

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


def noted(mover: ChunkMover, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are booked from now on."""
    booked = list[int]()
    monkeypatch.setattr(mover._means.bandwidth, "take", lambda nbytes, **_: booked.append(nbytes))
    monkeypatch.setattr(mover._means.bandwidth, "owe", booked.append)
    return booked


def test_a_bound_on_the_bandwidth_counts_what_was_staged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(0)
    layer = 5 * rig.engine.layouts[0].chunk_bytes(CHUNK) // LAYERS
    with mover_on(rig.backend, rig.engine, bytes_per_s=100.0 * layer) as mover:  # pieces of 10 ms
        booked = noted(mover, monkeypatch)
        rig.staged(mover)
        assert booked == []
        (planned,) = mover._next_leases._ahead.planned  # type: ignore[union-attr]
        assert list(planned.staged) == [range(1)], "no more than what is needed first"
        rig.step(mover)
        assert mover.finished().failed_pages == {}
        assert booked == [layer] * LAYERS


@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_first_layer_waits_for_no_turn_of_its_own_and_no_other_for_the_first(
    is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(0)
    layer = 5 * rig.engine.layouts[0].chunk_bytes(CHUNK) // LAYERS
    with mover_on(rig.backend, rig.engine, bytes_per_s=100.0 * layer) as mover:
        waits = list[float]()
        bandwidth = mover._means.bandwidth
        monkeypatch.setattr(bandwidth, "_clock", lambda: sum(waits))
        monkeypatch.setattr(bandwidth, "_free_s", 0.0)
        monkeypatch.setattr(bandwidth, "_wait", lambda _changed, seconds: waits.append(seconds))
        if is_ahead:
            rig.staged(mover)
        rig.step(mover)
        assert waits == pytest.approx([0.01] * (LAYERS - 1))
        rig.step(mover)
        assert waits == pytest.approx([0.01] * (2 * LAYERS - 1))


def test_what_is_staged_and_not_loaded_is_booked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(0)
    layer = 5 * rig.engine.layouts[0].chunk_bytes(CHUNK) // LAYERS
    with mover_on(rig.backend, rig.engine, bytes_per_s=100.0 * layer) as mover:
        booked = noted(mover, monkeypatch)
        rig.staged(mover)
        mover.begin_layers([])
        assert booked == [layer]
        mover.end_layers()


def test_a_step_that_fails_between_two_groups_leaves_no_sums_to_be_found_when_their_rows_are_another_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(1, groups=2)

    def broken(group: PagedGroup, number: int, chunks: Iterable[LeasedChunk]) -> PlannedLayers:
        if number == 1:
            raise LayoutError("these pages are no layers")
        return plan_layers(group, number, chunks)

    with mover_on(rig.backend, rig.engine) as mover:
        places = mover._means.places
        together = [place for place in places if place > places[0]]
        monkeypatch.setattr(LayerLoads, "_next", lambda loads: together)
        monkeypatch.setattr("kvredis.adapters.paged.layerwise_load.plan_layers", broken)
        monkeypatch.setattr(LayerLoads, "_plan", lambda loads: None)
        rig.step(mover)
        assert set(mover.finished().failed_pages) == {"a", "b", "c"}
        for group in rig.engine.groups:
            assert isinstance(group.transfer, RingTransfer)
            assert group.transfer._load._loaded is None
        monkeypatch.undo()
        rig.step(mover)
        assert mover.finished().failed_pages == {}
    assert all(rig.engine.bytes_of(move) == rig.source.bytes_of(move) for move in rig.moves())


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
