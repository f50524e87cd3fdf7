"""Checksums that a ring finds while bytes pass: right in whatever order streams run, and never another chunk's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
import xxhash

from kvredis.adapters.paged.jobs import LoadJob, StoreJob
from kvredis.adapters.transfer import open_transfer
from kvredis.adapters.transfer.base import NO_ROW, Part, layer_parts
from kvredis.adapters.transfer.cuda.checksum import BLOCK_BYTES, INITIAL, LANES, LAST_STRIPE, SECRET, RingSum, digest_of
from kvredis.adapters.transfer.cuda.device import CudaDevice
from kvredis.adapters.transfer.cuda.ring import RingLayers, RingTransfer
from kvredis.adapters.transfer.cuda.tuning import TUNING, Tuning
from kvredis.adapters.transfer.kv_cache import PagedKV
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.paged_engine import CHUNK, PagedEngine, block_for, mover_on, moves_of
from tests.adapters.paged_layouts import LAYOUTS, block_of, planes_first

from .lazy_gpu import LazyEvent, LazyGpu, LazySums
from .manual_transfer import with_blocks

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SIZE = (40, 2, 16, 2, 32)
COUNTS = [3, 1, 7, 2, 2, 2]


def made_layers(count: int = 3) -> list[torch.Tensor]:
    return [planes_first(SIZE, torch.bfloat16) for _ in range(count)]


def ring(
    layers: list[torch.Tensor], seed: int = 0, units: int = 8, paced_bytes: int = TUNING.paced_bytes
) -> tuple[RingTransfer, LazyGpu]:
    paged = PagedKV(layers)
    gpu = LazyGpu(paged, seed)
    tuning = Tuning(slot_bytes=units * layers[0][0, 0].numel() * 2, slots=2, paced_bytes=paced_bytes)
    return RingTransfer(paged, gpu, tuning, sums=True), gpu


def summed(transfer: RingTransfer, counts: list[int]) -> tuple[list[Part], list[RingSum]]:
    """Parts of whole chunks, of random bytes, and their sums."""
    paged = transfer.paged
    page_bytes = torch.Size(paged.shape(1)).numel() * paged.dtype.itemsize
    parts, sums, first = [], [], 0
    for count in counts:
        taken = transfer.sum_of(count * page_bytes)
        assert taken is not None
        memory = memoryview(bytearray(random.Random(first).randbytes(count * page_bytes)))
        parts.append(Part(range(first, first + count), memory, row=taken.row))
        sums.append(taken)
        first += count
    return parts, sums


def true_sum(data: memoryview | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("units", "is_linked"), [(8, False), (50, False), (2, True), (12, True)])
def test_in_whatever_order_streams_run_sums_are_of_the_bytes_that_passed(
    seed: int, units: int, is_linked: bool
) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers, seed, units)
    gpu.holds_both_ends = is_linked
    parts, sums = summed(transfer, COUNTS)
    moving = transfer.store(parts)  # two jobs, both ways, at the same time
    loaded, others = summed(transfer, COUNTS[::-1])
    wanted = [true_sum(part.memory) for part in loaded]
    moving.wait()
    moving = transfer.load(loaded)
    assert [each.result() for each in sums] == [true_sum(part.memory) for part in parts]
    assert [each.result() for each in others] == wanted
    moving.wait()
    assert all(each.done() for each in (*sums, *others))


@pytest.mark.parametrize("seed", range(10))
def test_chunks_that_move_by_layers_add_up_to_their_sums_and_are_whole(seed: int) -> None:
    layers = made_layers()
    transfer, _ = ring(layers, seed)
    before = [block_of(layers, range(at, at + 2)).numpy().tobytes() for at in (0, 2, 4)]
    parts, sums = summed(transfer, [2, 2, 2])
    planned = transfer.layers(parts)
    movings = [planned.store(layer) for layer in range(3)]
    for moving in movings:
        moving.wait()
    assert [bytes(part.memory) for part in parts] == before
    assert [each.result() for each in sums] == [true_sum(each) for each in before]
    again = [transfer.sum_of(part.memory.nbytes) for part in parts]
    turned = [
        Part(part.pages, other.memory, row=each.row)
        for part, other, each in zip(parts, parts[::-1], again, strict=True)
        if each
    ]
    movings = [transfer.load(layer_parts(transfer.paged, turned, layer)) for layer in range(3)]
    for moving in reversed(movings):
        moving.wait()
    now = [block_of(layers, range(at, at + 2)).numpy().tobytes() for at in (0, 2, 4)]
    assert now == before[::-1]
    assert [each.result() for each in again if each] == [true_sum(each) for each in before[::-1]]


def test_a_store_s_buffers_share_a_stream_for_sums_until_they_go_to_a_gpu_and_a_load_s_have_one_each() -> None:
    transfer, gpu = ring(made_layers())
    counted = [len(gpu.streams)]
    for move, is_linked in ((transfer.store, False), (transfer.load, False), *[(transfer.store, True)] * 2):
        gpu.holds_both_ends = is_linked
        parts, sums = summed(transfer, COUNTS)
        move(parts).wait()
        assert all(each.result() for each in sums)
        counted.append(len(gpu.streams))
    assert counted == [2, 5, 9, 10, 10]


def test_a_layer_that_is_not_there_is_an_error_and_nothing_moves() -> None:
    transfer, gpu = ring(made_layers())
    parts, _ = summed(transfer, [2])
    planned = transfer.layers(parts)
    with pytest.raises(ValueError, match="no layer 3 among 3"):
        planned.store(3)
    assert gpu.copies == []


def test_parts_without_a_row_pass_beside_others_unsummed() -> None:
    transfer, _ = ring(made_layers())
    parts, sums = summed(transfer, COUNTS)
    some = [Part(part.pages, part.memory, row=NO_ROW if at % 2 else part.row) for at, part in enumerate(parts)]
    transfer.load(some).wait()
    assert [each.result() for each in sums[::2]] == [true_sum(part.memory) for part in parts[::2]]
    assert not any(each.done() for each in sums[1::2])
    with pytest.raises(RuntimeError, match="no byte"):
        sums[1].result()
    assert sums[1].cancel()


def test_a_row_is_another_chunk_s_only_when_the_gpu_is_done_with_it() -> None:
    transfer, gpu = ring(made_layers())
    parts, sums = summed(transfer, [2])
    moving = transfer.load(parts)
    assert not sums[0].done()
    sums[0].cancel()  # waits
    assert not any(stream.queue for stream in gpu.streams) or moving.done
    taken = {each.row for each in iter(lambda: transfer.sum_of(1024), None)}
    assert sums[0].row in taken
    assert len(taken) == 4096
    assert transfer.sum_of(1024) is None  # then who moves hashes memory


def test_a_copy_that_failed_leaves_no_sum_and_its_row_is_good_again() -> None:
    transfer, gpu = ring(made_layers())
    parts, sums = summed(transfer, COUNTS)
    gpu.copies_until_failure = 1
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        transfer.load(parts).wait()
    for each in sums:
        assert each.cancel()
    gpu.copies_until_failure = -1
    parts, sums = summed(transfer, COUNTS)
    transfer.load(parts).wait()
    assert [each.result() for each in sums] == [true_sum(part.memory) for part in parts]


def lazy_ring(paged: PagedKV) -> RingTransfer:
    return RingTransfer(paged, LazyGpu(paged, 5), Tuning(slot_bytes=20_000, slots=2), sums=True)


def no_hashing(tensor: memoryview) -> None:
    raise AssertionError("a core hashes what passes the GPU")


@pytest.mark.parametrize("by_layers", [False, True])
def test_a_mover_stores_sums_that_passed_and_refuses_what_does_not_have_them(
    by_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvredis.adapters.transfer.checksum.checksum_of", no_hashing)
    source, backend = PagedEngine(3, transfer=lazy_ring), FakeBackend()
    moves = moves_of("a", 5) + moves_of("a", 5, group=1)
    with mover_on(backend, source) as mover:
        job = StoreJob("a", moves, 5 * CHUNK)
        if by_layers:
            for place in range(6):
                mover.save_layer(place, [job])
            mover.end_layers()
        else:
            mover.store(job)
        assert mover.settle(20)
        assert mover.stats()["stored_chunks"] == 10
    assert all(bytes(backend.values[move.key]) == block_for(source, move) for move in moves)
    damaged = bytearray(backend.values[moves[3].key])
    damaged[-1] ^= 1
    backend.put(moves[3].key, bytes(damaged))
    target = PagedEngine(4, transfer=lazy_ring)
    with mover_on(backend, target) as mover:
        mover.load(LoadJob("a", moves))
        assert mover.settle(20)
        finished, stats = mover.finished(), mover.stats()
    assert stats["corrupt_chunks"] == 1
    assert stats["loaded_chunks"] == 3
    assert (0, moves[3].pages[0]) in finished.failed_pages["a"]
    assert all(target.bytes_of(move) == source.bytes_of(move) for move in moves[:3])
    assert moves[3].key not in backend.values


class Spent(RingTransfer):
    """Has no row free when chunks are planned first; what is to happen then is `planned`, as a rule a cancel."""

    planned: Callable[[], object] | None = None

    def sum_of(self, nbytes: int) -> RingSum | None:
        return super().sum_of(nbytes) if self.planned is None else None

    def layers(self, parts: Sequence[Part]) -> RingLayers:
        made, self.planned, planned = super().layers(parts), None, self.planned
        if planned is not None:
            planned()
        return made


def spent(paged: PagedKV) -> Spent:
    return Spent(paged, LazyGpu(paged, 5), Tuning(slot_bytes=20_000, slots=2), sums=True)


def test_a_chunk_planned_anew_on_its_way_has_the_sum_of_all_its_layers() -> None:
    source, engine, backend = PagedEngine(3, groups=1), PagedEngine(3, transfer=spent, groups=1), FakeBackend()
    kept, dropped = moves_of("a", 3), moves_of("b", 2)
    transfer = engine.groups[0].transfer
    assert isinstance(transfer, Spent)
    with mover_on(backend, engine) as mover:
        transfer.planned = lambda: mover.cancel("b")
        jobs = [StoreJob("a", kept, 3 * CHUNK), StoreJob("b", dropped, 2 * CHUNK)]
        for place in range(4):
            mover.save_layer(place, jobs)
        mover.end_layers()
        assert mover.settle(20)
        stats = mover.stats()
    assert stats["corrupt_chunks"] == stats["errors"] == 0
    assert stats["stored_chunks"] == 3
    assert all(bytes(backend.values[move.key]) == block_for(source, move) for move in kept)


@pytest.mark.parametrize("seed", range(10))
def test_a_transfer_that_is_closed_adds_up_no_sum_any_more(seed: int) -> None:
    transfer, gpu = ring(made_layers(), seed)
    parts, _ = summed(transfer, COUNTS)
    moving = transfer.load(parts)
    transfer.close()
    assert not any(stream.queue for stream in gpu.streams)
    assert moving.done


@pytest.mark.parametrize("nbytes", [1024, 2048, 5120])
def test_the_lanes_end_is_xxhash_s(nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    lanes, mask = list(INITIAL), (1 << 64) - 1
    for block in range(nbytes // BLOCK_BYTES):
        is_last = block == nbytes // BLOCK_BYTES - 1
        for stripe in range(16):
            key_at = LAST_STRIPE if is_last and stripe == 15 else 8 * stripe
            for lane in range(LANES):
                at = block * BLOCK_BYTES + stripe * 64 + lane * 8
                value = int.from_bytes(data[at : at + 8], "little")
                keyed = value ^ int.from_bytes(SECRET[key_at + lane * 8 : key_at + lane * 8 + 8], "little")
                lanes[lane ^ 1] = lanes[lane ^ 1] + value & mask
                lanes[lane] = lanes[lane] + (keyed & 0xFFFFFFFF) * (keyed >> 32) & mask
        if not is_last:
            keys = [int.from_bytes(SECRET[at : at + 8], "little") for at in range(128, 192, 8)]
            lanes = [((each ^ each >> 47) ^ key) * 0x9E3779B1 & mask for each, key in zip(lanes, keys, strict=True)]
    assert digest_of(lanes, nbytes) == xxhash.xxh3_64_intdigest(data)


@needs_gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_on_a_gpu_sums_are_xxhash_s_in_every_layout_both_ways(name: str) -> None:
    make: Callable[..., torch.Tensor]
    make, size = LAYOUTS[name]
    layers = [make(size, torch.bfloat16).cuda() for _ in range(3)]
    with closing(open_transfer(PagedKV(layers), sums=True)) as transfer:
        assert isinstance(transfer, RingTransfer)
        if transfer.sum_of(1024) is None:
            assert torch.Size(transfer.paged.shape(1)).numel() * 2 // (3 * transfer.paged.planes) % BLOCK_BYTES
            return
        parts, sums = summed(transfer, [2, 1, 3])
        transfer.load(parts).wait()
        assert [each.result() for each in sums] == [true_sum(part.memory) for part in parts]
        back, others = summed(transfer, [2, 1, 3])
        transfer.store(back).wait()
        assert [bytes(part.memory) for part in back] == [bytes(part.memory) for part in parts]
        assert [each.result() for each in others] == [true_sum(part.memory) for part in parts]


@needs_gpu
@pytest.mark.parametrize("slot_mib", [1, 32])
def test_on_a_gpu_large_chunks_have_their_sums_whole_and_by_layers(slot_mib: int) -> None:
    layers = [torch.zeros(1024, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    paged = PagedKV(layers)
    with closing(RingTransfer(paged, CudaDevice(paged), Tuning(slot_bytes=slot_mib << 20), sums=True)) as transfer:
        parts, sums = summed(transfer, [64, 16, 200, 64, 64, 1])
        transfer.load(parts).wait()
        wanted = [true_sum(part.memory) for part in parts]
        assert [each.result() for each in sums] == wanted
        out, sums = summed(transfer, [64, 16, 200, 64, 64, 1])
        planned = transfer.layers(out)
        for moving in [planned.store(layer) for layer in range(4)]:
            moving.wait()
        assert [each.result() for each in sums] == wanted
        assert [bytes(part.memory) for part in out] == [bytes(part.memory) for part in parts]


def test_the_device_is_asked_once_where_many_sums_end_behind_the_same_event(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = made_layers()
    transfer, _ = ring(layers, units=400)
    parts, sums = summed(transfer, [1] * 12)
    transfer.load(parts).wait()
    asked: list[LazyEvent] = []
    synchronize = LazyEvent.synchronize

    def noted(event: LazyEvent) -> None:
        asked.append(event)
        synchronize(event)

    monkeypatch.setattr(LazyEvent, "synchronize", noted)
    assert [each.result() for each in sums] == [true_sum(part.memory) for part in parts]
    assert len(asked) == len({id(each.event) for each in sums}) < len(sums)


@pytest.mark.parametrize("which", ["fold", "chain"])
def test_a_sum_that_the_device_refuses_is_an_error_and_no_damaged_block(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nth = 4  # of the last buffer
    job = LoadJob("a", moves_of("a", 1))
    backend, _ = with_blocks(job)
    real, calls = getattr(LazySums, which), list[int]()

    def made(paged: PagedKV) -> RingTransfer:
        return RingTransfer(paged, LazyGpu(paged, 5), Tuning(slot_bytes=12_000, slots=2), sums=True)

    def refusing(sums: LazySums, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == nth:
            raise RuntimeError("too many resources requested for launch")
        real(sums, *arguments)

    def told(sums: LazySums, row: int, nbytes: int) -> str:  # of what there is, as a GPU does
        found: str = sums._rows[row].hexdigest()
        return found

    monkeypatch.setattr(LazySums, which, refusing)
    monkeypatch.setattr(LazySums, "digest", told)
    with mover_on(backend, PagedEngine(3, transfer=made, groups=1)) as mover:
        mover.load(job)
        assert mover.settle(20)
        stats = mover.stats()
    assert len(calls) >= nth
    assert (stats["errors"], stats["corrupt_chunks"]) == (1, 0)
    assert job.moves[0].key in backend.values
