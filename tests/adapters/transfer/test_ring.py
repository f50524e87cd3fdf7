"""The ring: whether its events are enough, what it says while it runs, and failures."""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvredis.adapters.engine.tensors import DeviceEvent
from kvredis.adapters.transfer import open_transfer
from kvredis.adapters.transfer.base import Part, layer_parts
from kvredis.adapters.transfer.cuda.ring import RingTransfer
from kvredis.adapters.transfer.cuda.tuning import Tuning
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.storage.errors import LayoutError
from kvredis.storage.memory.copy import address_of
from tests.adapters.paged_layouts import block_of, planes_first

from .lazy_gpu import LazyEvent, LazyGpu
from .test_passing_sums import true_sum

SIZE = (40, 2, 16, 2, 32)


def ring(layers: list[torch.Tensor], gpu: LazyGpu | None = None, units: int = 8) -> tuple[RingTransfer, LazyGpu]:
    paged = PagedKV(layers)
    gpu = gpu or LazyGpu(paged)
    return RingTransfer(paged, gpu, Tuning(slot_bytes=units * layers[0][0, 0].numel() * 2, slots=2)), gpu


def made_layers(count: int = 3) -> list[torch.Tensor]:
    return [planes_first(SIZE, torch.bfloat16) for _ in range(count)]


def parts_of(layers: list[torch.Tensor], counts: list[int]) -> list[Part]:
    page_bytes = len(layers) * layers[0][0].numel() * 2
    starts = [sum(counts[:at]) for at in range(len(counts))]
    return [
        Part(range(start, start + count), memoryview(bytearray(count * page_bytes)))
        for start, count in zip(starts, counts, strict=True)
    ]


def true(layers: list[torch.Tensor], part: Part) -> bool:
    return bytes(part.memory) == bytes(block_of(layers, part.pages).numpy())


class WatchedGpu(LazyGpu):
    """Remembers which copy was made when, and on which stream."""

    def __init__(self, paged: PagedKV, seed: int) -> None:
        super().__init__(paged, seed)
        self.made: list[tuple[int, int]] = []

    def _copy(self, slot: Any, extents: Any, stream: Any, *, out: bool, locked: bool) -> None:
        super()._copy(slot, extents, stream, out=out, locked=locked)
        stream.queue.append(partial(self.made.append, (len(self.copies), self.streams.index(stream))))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("way", ["store", "load"])
def test_copies_of_one_buffer_after_another_are_on_other_streams_and_made_in_turn(way: str, seed: int) -> None:
    layers = made_layers()
    gpu = WatchedGpu(PagedKV(layers), seed)
    transfer, _ = ring(layers, gpu)
    getattr(transfer, way)(parts_of(layers, [3, 4, 5, 6, 7])).wait()
    numbers, streams = zip(*gpu.made, strict=True)
    assert len(numbers) > 5
    assert list(numbers) == sorted(numbers)
    assert all(one != next_one for one, next_one in pairwise(streams))


@pytest.mark.parametrize("seed", range(25))
def test_in_whatever_order_streams_run_jobs_behind_each_other_are_right(seed: int) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers, LazyGpu(PagedKV(layers), seed))
    first, second = parts_of(layers, [3, 4, 5]), parts_of(layers, [1, 1, 1, 1, 6])
    movings = [transfer.store(first), transfer.store(second)]
    for moving in movings:
        moving.wait()
    assert all(true(layers, part) for part in (*first, *second))
    swapped = [Part(range(20, 23), first[0].memory), Part(range(30, 34), first[1].memory)]
    movings = [transfer.load(swapped), transfer.store(parts_of(layers, [2])), transfer.load(first[2:])]
    for moving in reversed(movings):
        moving.wait()
    assert all(true(layers, part) for part in swapped)
    assert len(gpu.copies) > 8  # several times around the ring


def test_a_store_begins_behind_the_event_that_the_caller_recorded() -> None:
    layers = made_layers()
    transfer, gpu = ring(layers)
    forward = gpu.stream()
    old = block_of(layers, range(3))
    gate = LazyEvent(gpu)
    gpu.wait(forward, gate)
    forward.queue.append(lambda: [layer.view(torch.int16).bitwise_not_() for layer in layers])
    (part,) = parts_of(layers, [3])
    moving = transfer.store([part], after=gpu.record(forward))  # type: ignore[arg-type]
    assert not moving.done
    gate.passed = True  # the forward may run now
    moving.wait()
    assert true(layers, part)
    assert not torch.equal(block_of(layers, range(3)), old)


def test_a_load_writes_pages_behind_the_event_that_the_caller_recorded_whole_and_of_single_layers() -> None:
    layers = made_layers()
    transfer, gpu = ring(layers)
    (part,), (other,) = parts_of(layers, [3]), [Part(range(6, 9), parts_of(layers, [3])[0].memory)]
    transfer.store([part]).wait()
    transfer.store([other]).wait()
    forward, gate = gpu.stream(), LazyEvent(gpu)
    gpu.wait(forward, gate)
    forward.queue.append(lambda: [layer.zero_() for layer in layers])  # a pass under way writes them once more
    after: Any = gpu.record(forward)
    whole = transfer.load([part], after=after)
    by_layers = [transfer.load(layer_parts(transfer.paged, [other], layer), after=after) for layer in range(3)]
    while gpu.step():
        pass
    assert not whole.done
    assert not any(moving.done for moving in by_layers)
    gate.passed = True
    for moving in (whole, *by_layers):
        moving.wait()
    assert true(layers, part)
    assert true(layers, other)


@pytest.mark.parametrize("seed", range(8))
def test_a_job_of_many_parts_goes_in_two_and_is_whole_both_ways(seed: int) -> None:
    layers = [planes_first((140, 2, 16, 2, 32), torch.bfloat16) for _ in range(2)]
    transfer, _ = ring(layers, LazyGpu(PagedKV(layers), seed), units=40)
    parts = parts_of(layers, [1] * 110 + [7])
    stored = transfer.store(parts)
    stored.wait(60)
    assert stored.parts_done >= 60
    assert all(true(layers, part) for part in parts[:60])
    stored.wait()
    assert stored.done
    assert all(true(layers, part) for part in parts)
    swapped = [Part(part.pages, other.memory) for part, other in zip(parts[:110], parts[109::-1], strict=True)]
    loaded = transfer.load(swapped)
    loaded.wait()
    assert loaded.parts_done == 110
    assert all(true(layers, part) for part in swapped)


@pytest.mark.parametrize("way", ["store", "load"])
@pytest.mark.parametrize("wrong", [3, 59])
def test_a_wrong_part_among_many_is_an_error_and_leaves_nothing_under_way(way: str, wrong: int) -> None:
    layers = [planes_first((140, 2, 16, 2, 32), torch.bfloat16) for _ in range(2)]
    transfer, gpu = ring(layers)
    parts = parts_of(layers, [1] * 60)
    parts[wrong] = Part([139], parts[wrong].memory[:-1])
    with pytest.raises(LayoutError, match="are not 1 pages"):
        getattr(transfer, way)(parts)
    assert not any(stream.queue for stream in gpu.streams)
    assert bool(gpu.copies) == (wrong > 48)


def test_parts_are_told_as_they_have_moved_and_their_order_is_kept() -> None:
    layers = made_layers()
    transfer, _ = ring(layers)
    parts = parts_of(layers, [2] * 6)
    moving = transfer.store(parts)
    told = [moving.parts_done]
    while not moving.done:
        told.append(moving.parts_done)
        assert all(true(layers, part) for part in parts[: told[-1]])
    assert told == sorted(told)
    assert told[-1] <= 6 == moving.parts_done
    assert len(set(told)) > 2
    again = transfer.store(parts)
    again.wait(2)
    assert again.parts_done >= 2
    assert not again.done


def test_small_parts_share_a_buffer_and_large_ones_are_cut() -> None:
    layers = made_layers()
    transfer, gpu = ring(layers, units=96)
    transfer.store(parts_of(layers, [1] * 30)).wait()
    assert gpu.copies == [2, 16, 12]  # parts of 6 units, in buffers of 96, the first of 12
    gpu.copies.clear()
    transfer.store(parts_of(layers, [40])).wait()
    assert len(gpu.copies) >= 3
    assert set(gpu.copies) == {1}


@pytest.mark.parametrize("way", ["store", "load"])
def test_between_gpus_buffers_are_longer_and_each_is_filled(way: str) -> None:
    layers = made_layers()
    gpu = LazyGpu(PagedKV(layers))
    gpu.holds_both_ends = True
    transfer, _ = ring(layers, gpu, units=24)
    parts = parts_of(layers, [1] * 40)
    getattr(transfer, way)(parts, **({"is_last": True} if way == "load" else {})).wait()
    assert gpu.copies == [16, 16, 8]  # parts of 6 units, in buffers of 96
    assert all(true(layers, part) for part in parts)


@pytest.mark.parametrize("way", ["store", "load"])
@pytest.mark.parametrize("first", [False, True])
def test_each_job_fills_as_much_of_a_buffer_as_its_own_far_end_asks_for(first: bool, way: str) -> None:
    layers = made_layers()
    gpu = LazyGpu(PagedKV(layers))
    transfer = RingTransfer(
        PagedKV(layers), gpu, Tuning(slot_bytes=24 * layers[0][0, 0].numel() * 2, slots=2), sums=True
    )
    parts = parts_of(layers, [1] * 40)
    for is_linked in (first, not first, first):
        gpu.holds_both_ends = is_linked
        gpu.copies.clear()
        for part in parts:
            part.memory[:] = os.urandom(part.memory.nbytes)
        sums = [transfer.sum_of(part.memory.nbytes) for part in parts]
        rows = [part._replace(row=each.row) for part, each in zip(parts, sums, strict=True) if each is not None]
        getattr(transfer, way)(rows).wait()
        assert max(gpu.copies) == (16 if is_linked else 4)  # parts of 6 units, in buffers of 96 and 24
        assert all(true(layers, part) for part in parts)
        assert [each and each.result() for each in sums] == [true_sum(part.memory) for part in parts]


def test_checksums_are_whole_where_buffers_grow_in_the_middle_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = made_layers()
    gpu = LazyGpu(PagedKV(layers))
    tuning = Tuning(slot_bytes=24 * layers[0][0, 0].numel() * 2, slots=2, head_parts=10)
    transfer = RingTransfer(PagedKV(layers), gpu, tuning, sums=True)
    parts = parts_of(layers, [1] * 20)
    for part in parts:
        part.memory[:] = os.urandom(part.memory.nbytes)
    near = {address_of(part.memory) for part in parts[:10]}
    monkeypatch.setattr(gpu, "on_gpu", lambda address: address not in near)
    sums = [transfer.sum_of(part.memory.nbytes) for part in parts]
    rows = [part._replace(row=each.row) for part, each in zip(parts, sums, strict=True) if each is not None]
    transfer.load(rows).wait()
    assert max(gpu.copies) == 10, "the second half is in one buffer"
    assert [each and each.result() for each in sums] == [true_sum(part.memory) for part in parts]


def test_where_a_gpu_has_no_memory_for_longer_buffers_its_short_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers, units=24)
    parts = parts_of(layers, [1] * 40)
    transfer.load(parts).wait()

    def full(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(gpu, "buffer", full)
    gpu.holds_both_ends = True
    for _ in range(2):
        gpu.copies.clear()
        transfer.load(parts).wait()
        assert max(gpu.copies) == 4
        assert all(true(layers, part) for part in parts)


@pytest.mark.parametrize("after", [0, 2])
def test_a_failed_copy_is_an_error_of_wait_once_nothing_is_under_way(after: int) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers)
    parts = parts_of(layers, [2] * 6)
    gpu.copies_until_failure = after
    moving = transfer.store(parts)
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        moving.wait()
    assert moving.done
    assert moving.parts_done < 6
    assert all(true(layers, part) for part in parts[: moving.parts_done])
    assert not any(stream.queue for stream in gpu.streams)
    gpu.copies_until_failure = -1
    moving = transfer.store(parts)  # the next job is none the worse
    moving.wait()
    assert all(true(layers, part) for part in parts)


def test_a_part_that_cannot_be_addressed_fails_the_job_once_what_was_begun_of_it_has_ended() -> None:
    layers = made_layers()
    transfer, gpu = ring(layers)
    *parts, last = parts_of(layers, [2] * 6)
    scattered = memoryview(bytearray(2 * last.memory.nbytes))[::2]
    moving = transfer.store([*parts, Part(last.pages, scattered)])
    with pytest.raises(RuntimeError, match="not C-contiguous"):
        moving.wait()
    assert moving.done
    assert gpu.copies, "some of it had begun"
    assert not any(stream.queue for stream in gpu.streams)


def test_an_interrupt_comes_out_once_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers)
    copy_out = gpu.copy_out

    def interrupted(*args: Any, **kwargs: Any) -> None:
        copy_out(*args, **kwargs)
        if len(gpu.copies) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "copy_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        transfer.store(parts_of(layers, [2] * 6))
    assert not any(stream.queue for stream in gpu.streams)


def test_an_event_is_asked_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current, asked = [0], []

    class Chosen:
        def __init__(self, device: torch.device) -> None:
            self._number = device.index

        def __enter__(self) -> None:
            current.append(self._number)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", Chosen)
    real: Any = SimpleNamespace(query=lambda: asked.append(current[-1]), synchronize=lambda: asked.append(current[-1]))
    event = DeviceEvent(real, torch.device("cuda", 1))
    assert not event.query()
    event.synchronize()
    assert asked == [1, 1]
    assert current == [0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
def test_a_thread_that_has_chosen_no_gpu_puts_nothing_on_the_first() -> None:
    paged = PagedKV([layer.to("cuda:1") for layer in made_layers()])
    before = torch.cuda.mem_get_info(0)[0]

    def move() -> None:
        transfer = open_transfer(paged)
        transfer.store(parts_of(list(paged.layers), [3])).wait()
        transfer.close()

    program = threading.Thread(target=move)
    program.start()
    program.join()
    assert torch.cuda.mem_get_info(0)[0] == before


def test_after_close_nothing_is_under_way_and_nothing_begins() -> None:
    layers = made_layers()
    transfer, gpu = ring(layers)
    (part,) = parts_of(layers, [5])
    moving = transfer.store([part])
    transfer.close()
    assert true(layers, part)
    assert moving.done
    with pytest.raises(RuntimeError, match="closed"):
        transfer.store([part]).wait()
    assert not any(stream.queue for stream in gpu.streams)


def test_memory_that_is_not_page_locked_is_said_once_and_asked_about_once_a_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers)
    lender = bytearray(4 * 3 * layers[0][0].numel() * 2)
    step = len(lender) // 4
    parts = [Part([at], memoryview(lender)[at * step : (at + 1) * step]) for at in range(4)]
    gpu.locked = False
    with caplog.at_level(logging.WARNING):
        transfer.store(parts).wait()
        transfer.load(parts).wait()
        transfer.store(parts).wait()
    assert gpu.asked_about == 3
    assert len(caplog.records) == 2  # one for each direction
    assert "not page-locked" in caplog.text
    gpu.locked = True  # by a thread of the arena's own: the next job sees it
    transfer.store(parts).wait()
    assert all(true(layers, part) for part in parts)


def test_parts_without_pages_are_no_copies_of_a_layer_either() -> None:
    layers = made_layers()
    transfer, gpu = ring(layers)
    parts = parts_of(layers, [2, 0, 2])
    planned = transfer.layers(parts)
    for layer in range(3):
        planned.store(layer).wait()
    assert all(true(layers, part) for part in parts)
    assert gpu.copies == [1, 2] * 3  # the first buffer is filled to a part


@pytest.mark.parametrize("is_large", [False, True])
def test_layers_of_the_same_chunks_are_asked_for_without_saying_again_what_is_the_same(is_large: bool) -> None:
    layers = made_layers(6)
    transfer, gpu = ring(layers, units=20 if is_large else 200)  # a layer of all has 24
    parts = parts_of(layers, [4, 4, 4])
    planned = transfer.layers(parts)
    for first, count in ((0, 1), (1, 2), (3, 3)):
        planned.store(first, count).wait()
    assert all(true(layers, part) for part in parts)
    assert any(map(any, (part.memory for part in parts)))
    assert gpu.uploads == 1
    if is_large:  # several are one behind the other; else planned for themselves, since layers of a chunk adjoin
        assert gpu.asked_about == 3, "each part lends memory of its own"


def test_memory_that_is_locked_meanwhile_is_found_so_by_the_next_layer(caplog: pytest.LogCaptureFixture) -> None:
    layers = made_layers()
    transfer, gpu = ring(layers, units=200)
    planned, gpu.locked = transfer.layers(parts_of(layers, [2])), False
    with caplog.at_level(logging.WARNING):
        planned.store(0).wait()
    gpu.locked = True  # the double asserts that copies are told so
    planned.store(1).wait()
    planned.store(2).wait()
    assert gpu.asked_about == 2
