"""A GPU's stream waits for layers, and the engine runs ahead of it: no kernel reads a layer that has not come."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import torch

from kvredis.adapters.engine.block import encode_header
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import event_on
from kvredis.adapters.paged.jobs import ChunkMove, Errand, LoadJob
from kvredis.adapters.paged.layerwise_load import LayerLoads
from kvredis.adapters.paged.mover import ChunkMover, PagedGroup
from kvredis.adapters.paged.preload import LeasesAhead
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.cuda.tuning import Tuning
from kvredis.adapters.transfer.factory import open_transfer
from kvredis.adapters.transfer.kv_cache import PagedKV
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.paged_engine import WAIT_S, PagedEngine, mover_on, moves_of, pages_in
from tests.adapters.transfer.lazy_gpu import LazyGpu, LazyStream
from tests.adapters.transfer.manual_transfer import ManualTransfer, by_hand, with_blocks
from tests.backends.nodes import wait_until

LAYERS = 4


@dataclass(eq=False)
class Mark:
    """An event that is passed when the test says so."""

    passed: bool = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for the engine")

    def wait(self, stream: object) -> None:
        raise AssertionError("nothing waits for the engine")


@contextmanager
def loads_of(
    mover: ChunkMover, moves: list[ChunkMove], *, is_ahead: bool = False
) -> Iterator[tuple[LayerLoads, Errand]]:
    """A step's loads on a thread of their own, for an engine whose stream waits; they are over when this ends. With
    `is_ahead` they are leased before the engine gets to layer 0, or meanwhile."""
    errand = Errand("r", moves)
    ahead = LeasesAhead(mover._means, [LoadJob("r", moves)]) if is_ahead else None
    loads = LayerLoads(mover._means, [errand], by_stream=True, ahead=ahead)

    def run() -> None:
        try:
            if ahead is not None:
                ahead.run()
            loads.run()
        except RuntimeError:
            pass
        finally:
            loads.end(0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield loads, errand
    finally:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@dataclass
class Computing:
    """An engine's stream, whose kernels take down what they read of a layer."""

    gpu: LazyGpu
    engine: PagedEngine
    moves: list[ChunkMove]
    stream: LazyStream = field(init=False)
    seen: dict[int, list[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream = self.gpu.stream()

    def layer(self, loads: LayerLoads, place: int) -> None:
        """Launch what reads a layer."""
        loads.hold_back(place, cast("Any", self.stream), self.gpu.record(self.stream))
        self.stream.queue.append(partial(self._read, place))

    def _read(self, place: int) -> None:
        self.seen[place] = [layer_of(self.engine.bytes_of(move), place) for move in self.moves]


def layer_of(tensor: bytes, place: int) -> bytes:
    size = len(tensor) // LAYERS
    return tensor[place * size : (place + 1) * size]


def on_lazy_gpu(gpus: list[LazyGpu], seed: int) -> Callable[[PagedKV], RingTransfer]:
    """Rings whose devices are in `gpus`."""

    def made(paged: PagedKV) -> RingTransfer:
        gpus.append(LazyGpu(paged, seed))
        return RingTransfer(paged, gpus[-1], Tuning(slot_bytes=20_000, slots=2), sums=seed % 2 == 1)

    return made


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_no_kernel_reads_a_layer_before_it_has_come_whatever_the_gpu_does_first(seed: int, is_ahead: bool) -> None:
    job = LoadJob("r", moves_of("r", 5, seed))
    backend, source = with_blocks(job)
    gpus: list[LazyGpu] = []
    engine = PagedEngine(transfer=on_lazy_gpu(gpus, seed), groups=1)
    with mover_on(backend, engine) as mover:
        computing = Computing(gpus[0], engine, job.moves)
        with loads_of(mover, job.moves, is_ahead=is_ahead) as (loads, errand):
            for place in range(LAYERS):
                computing.layer(loads, place)
            gpus[0].synchronize(computing.stream)
    assert errand.come == 5
    for place, read in computing.seen.items():
        assert read == [layer_of(source.bytes_of(move), place) for move in job.moves], f"layer {place} came later"
    assert list(computing.seen) == list(range(LAYERS))


def let_go(transfer: ManualTransfer) -> None:
    """All that is on its way comes, the first of it last, and so does whatever is asked for then."""
    transfer.by_hand = False
    for _, moving in transfer.calls[::-1]:
        moving.let_go()


def test_an_engine_launches_layers_that_are_on_their_way_and_waits_for_those_that_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvredis.adapters.paged.layerwise_load.AHEAD_OF_STREAM", 1)
    monkeypatch.setattr("kvredis.adapters.paged.layerwise_load.ROW_BYTES", 1)
    job = LoadJob("r", moves_of("r", 3))
    backend, source = with_blocks(job)
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    (transfer,) = by_hand(engine)
    stream = cast("Any", "the engine's")
    with mover_on(backend, engine) as mover, loads_of(mover, job.moves) as (loads, errand):
        for place in range(2):
            loads.hold_back(place, stream, Mark())
        first, second = (moving for _, moving in transfer.calls)
        assert not first.gone.is_set()
        assert (first.held_back, second.held_back) == ([stream] * 2, [stream]), "behind all layers up to that one"
        waiting = threading.Thread(target=loads.hold_back, args=(2, stream, Mark()))
        waiting.start()
        wait_until(lambda: len(loads._marks) == 3, "the engine has got to layer 2")
        assert waiting.is_alive(), "which is not on its way"
        let_go(transfer)
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
    assert (len(first.held_back), len(second.held_back)) == (2, 1), "nothing is held back for what has come"
    assert errand.come == 3
    assert all(engine.bytes_of(move) == source.bytes_of(move) for move in job.moves)


@pytest.mark.parametrize("is_behind", [True, False])
def test_layers_move_together_while_the_gpu_has_not_got_to_them_however_far_the_engine_has(
    is_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvredis.adapters.paged.layerwise_load.AHEAD_OF_STREAM", 1)
    monkeypatch.setattr("kvredis.adapters.paged.layerwise_load.ROW_BYTES", 1)
    job = LoadJob("r", moves_of("r", 3))
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    (transfer,) = by_hand(engine)
    with mover_on(with_blocks(job)[0], engine) as mover, loads_of(mover, job.moves) as (loads, _):
        for place in range(2):
            loads.hold_back(place, cast("Any", None), Mark(passed=not is_behind))
        let_go(transfer)
    rows = [layers for layers, _ in transfer.calls]
    assert rows == [range(1), range(1, 2), *([range(2, 4)] if is_behind else [range(2, 3), range(3, 4)])]


@pytest.mark.parametrize(
    ("row_bytes", "row_max", "rows"), [(1 << 20, 8, [1, 3]), (50_000, 8, [1, 2, 1]), (1 << 20, 1, [1] * 4)]
)
def test_small_layers_move_together_behind_the_first(
    row_bytes: int, row_max: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvredis.adapters.paged.layerwise_load.ROW_BYTES", row_bytes)
    monkeypatch.setattr("kvredis.adapters.paged.layerwise_load.ROW_MAX", row_max)
    job = LoadJob("r", moves_of("r", 3))  # 24 KiB a layer
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    (transfer,) = by_hand(engine)
    transfer.by_hand = False
    with mover_on(with_blocks(job)[0], engine) as mover, loads_of(mover, job.moves) as (loads, _):
        for place in range(LAYERS):
            loads.hold_back(place, cast("Any", None), Mark(passed=True))
    assert [len(layers) for layers, _ in transfer.calls if layers is not None] == rows


def test_a_device_that_fails_keeps_no_engine_waiting() -> None:
    job = LoadJob("r", moves_of("r", 5))
    gpus: list[LazyGpu] = []
    engine = PagedEngine(transfer=on_lazy_gpu(gpus, 3), groups=1)
    with mover_on(with_blocks(job)[0], engine) as mover:
        gpus[0].copies_until_failure = 2
        computing = Computing(gpus[0], engine, job.moves)
        with loads_of(mover, job.moves) as (loads, errand):
            for place in range(LAYERS):
                computing.layer(loads, place)
            gpus[0].synchronize(computing.stream)
    assert errand.come == 0
    assert engine.changed_pages() <= pages_in(job.moves)


def test_what_is_missing_keeps_no_engine_waiting() -> None:
    engine = PagedEngine(transfer=ManualTransfer, groups=1)
    with mover_on(FakeBackend(), engine) as mover, loads_of(mover, moves_of("r", 2)) as (loads, errand):
        for place in range(LAYERS):
            loads.hold_back(place, cast("Any", None), Mark())
    assert errand.come == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_what_is_launched_behind_a_layer_reads_it_though_nobody_waited() -> None:
    layout = ChunkLayout(LAYERS, 8, 128, "bf16", 256, model="tiny")
    size = (64, 2, 16, layout.kv_heads, layout.head_dim)
    layers = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    paged, backend, moves, sent = PagedKV(layers), FakeBackend(), list[ChunkMove](), list[torch.Tensor]()
    for chunk in range(4):
        tensor = torch.randn(layout.shape(256), dtype=torch.bfloat16)
        moves.append(ChunkMove(b"%d" % chunk, 0, tuple(range(16 * chunk, 16 * chunk + 16))))
        backend.put(moves[-1].key, encode_header(layout, 256) + tensor.view(torch.uint8).numpy().tobytes())
        sent.append(tensor)
    with (
        closing(open_transfer(paged)) as transfer,
        closing(ChunkMover(backend, [PagedGroup(layout, paged, transfer)])) as mover,
    ):
        for _ in range(3):
            for layer in layers:
                layer.fill_(torch.nan)
            mover.begin_layers([LoadJob("r", moves)], event_on(torch.cuda.current_stream()))
            seen = list[torch.Tensor]()
            for place, layer in enumerate(layers):
                mover.wait_layer(place)
                seen.append(layer.clone())
            mover.end_layers()
            assert not mover.finished().failed_pages
            for place, layer in enumerate(seen):
                wanted = torch.cat([tensor[place] for tensor in sent], dim=1)
                assert torch.equal(layer.transpose(0, 1).flatten(1, 2).cpu(), wanted)
