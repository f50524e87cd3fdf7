"""Pauses between a long job's buffers: while others are under way, of few chunks, and not at a load's end."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvredis.adapters.transfer.base import Part
from kvredis.adapters.transfer.cuda import ring as transfer_cuda
from kvredis.adapters.transfer.cuda.ring import RingMoving, RingTransfer
from kvredis.adapters.transfer.cuda.tuning import TUNING
from tests.adapters.paged_layouts import block_of, planes_first
from tests.adapters.transfer.lazy_gpu import LazyEvent, LazyGpu
from tests.adapters.transfer.test_passing_sums import ring, summed, true_sum

UNITS = 8
PAGES = 30
SLOTS = 2


class Pauses:
    """A clock that only pauses move, and `took_s` each copy. `works`: the GPU does all it was given in a pause."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, gpu: LazyGpu, *, works: bool = False, took_s: float = 0
    ) -> None:
        self.seconds: list[float] = []
        self._now_s = 0.0
        self._gpu = gpu
        self._works = works
        monkeypatch.setattr(transfer_cuda, "time", SimpleNamespace(sleep=self._sleep, perf_counter=lambda: self._now_s))
        monkeypatch.setattr(transfer_cuda, "RingMoving", partial(RingMoving, began_s=0.0))
        for name in ("copy_out", "copy_in"):
            monkeypatch.setattr(gpu, name, partial(self._copy, getattr(gpu, name), took_s))

    def _copy(self, copy: Any, took_s: float, *args: Any, **kwargs: Any) -> None:
        self._now_s += took_s
        copy(*args, **kwargs)

    def _sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._now_s += seconds
        while self._works and self._gpu.step():
            pass


def made(paced_bytes: int = 1) -> tuple[list[torch.Tensor], RingTransfer, LazyGpu, Part]:
    """Layers, a ring of small buffers, its GPU, and a part that fills many of them, each by one copy."""
    layers = [planes_first((40, 2, 16, 2, 32), torch.bfloat16) for _ in range(2)]
    transfer, gpu = ring(layers, units=UNITS, paced_bytes=paced_bytes)
    return layers, transfer, gpu, Part(range(PAGES), memoryview(bytearray(PAGES * 4 * unit_bytes(layers))))


def unit_bytes(layers: list[torch.Tensor]) -> int:
    return layers[0][0, 0].numel() * 2


def closed_gate(gpu: LazyGpu) -> tuple[LazyEvent, Any]:
    """What lets an engine's pass end, and the event behind that."""
    gate, forward = LazyEvent(gpu), gpu.stream()
    gpu.wait(forward, gate)
    return gate, gpu.record(forward)


@pytest.mark.parametrize("way", ["store", "load"])
def test_behind_buffers_under_way_chunks_are_enqueued_at_a_pace(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, transfer, gpu, part = made()
    gate, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu)
    moving = getattr(transfer, way)([part], after=after)
    # All is enqueued, though nothing can move.
    buffer_s = UNITS * unit_bytes(layers) / TUNING.pace_bytes_per_s
    assert len(pauses.seconds) == len(gpu.copies) - SLOTS > 8
    assert buffer_s < pauses.seconds[0] < 1.5 * buffer_s, "behind a small one, which a job begins with, and another"
    assert pauses.seconds[1:] == pytest.approx([buffer_s] * len(pauses.seconds[1:]))
    gate.passed = True
    moving.wait()
    assert bytes(part.memory) == block_of(layers, range(PAGES)).numpy().tobytes()


@pytest.mark.parametrize("way", ["store", "load"])
def test_between_gpus_nothing_is_paced(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, transfer, gpu, part = made()
    gpu.holds_both_ends = True
    _, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu)
    getattr(transfer, way)([part], after=after)
    assert not pauses.seconds


def test_what_enqueuing_takes_shortens_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, transfer, gpu, part = made()
    _, after = closed_gate(gpu)
    buffer_s = UNITS * unit_bytes(layers) / TUNING.pace_bytes_per_s
    pauses = Pauses(monkeypatch, gpu, took_s=0.7 * buffer_s)
    transfer.load([part], after=after)
    first, *others = pauses.seconds
    assert first == pytest.approx((2.25 - 3 * 0.7) * buffer_s), (
        "the first buffer is a quarter, and none before the third"
    )
    assert others == pytest.approx([0.3 * buffer_s] * (len(gpu.copies) - 4))


def test_slow_enqueuing_has_no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, transfer, gpu, part = made()
    _, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu, took_s=1.1 * UNITS * unit_bytes(layers) / TUNING.pace_bytes_per_s)
    transfer.load([part], after=after)
    assert len(gpu.copies) > 8
    assert not pauses.seconds


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_buffer_that_is_free_again_is_filled_at_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, transfer, gpu, part = made()
    pauses = Pauses(monkeypatch, gpu, works=True)
    getattr(transfer, way)([part]).wait()
    assert 0 < len(pauses.seconds) <= len(gpu.copies) // SLOTS
    assert bytes(part.memory) == block_of(layers, range(PAGES)).numpy().tobytes()


@pytest.mark.parametrize(("more", "is_paced"), [(0, True), (1, False)])
def test_jobs_of_few_bytes_have_no_pauses(more: int, is_paced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = made()[-1].memory.nbytes
    _, transfer, gpu, part = made(nbytes + more)
    _, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu)
    transfer.load([part], after=after)
    assert bool(pauses.seconds) == is_paced


@pytest.mark.parametrize(("count", "is_paced"), [(TUNING.paced_parts, True), (TUNING.paced_parts + 1, False)])
def test_jobs_of_many_parts_have_no_pauses(count: int, is_paced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [planes_first((60, 2, 16, 2, 32), torch.bfloat16) for _ in range(2)]
    transfer, gpu = ring(layers, units=4 * UNITS, paced_bytes=1)
    gate, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu)
    parts = [Part([at], memoryview(bytearray(4 * unit_bytes(layers)))) for at in range(count)]
    moving = transfer.load(parts, after=after)
    assert len(gpu.copies) > SLOTS + 2
    assert bool(pauses.seconds) == is_paced
    gate.passed = True
    moving.wait()
    assert all(bytes(part.memory) == block_of(layers, part.pages).numpy().tobytes() for part in parts)


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_copy_by_layers_is_not_paced(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, transfer, gpu, part = made()
    half = part.memory.nbytes // 2
    gate, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu)
    other = getattr(transfer, way)([Part(range(PAGES), part.memory[half:], layers=range(1, 2))], after=after)
    alone = getattr(transfer, way)([Part(range(PAGES), part.memory[:half], layers=range(1))], after=after)
    assert len(gpu.copies) > 10
    assert not pauses.seconds
    gate.passed = True
    for moving in (other, alone):
        moving.wait()
    assert bytes(part.memory) == block_of(layers, range(PAGES)).numpy().tobytes()


def test_the_end_of_a_load_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [planes_first((160, 2, 16, 2, 32), torch.bfloat16) for _ in range(3)]
    transfer, gpu = ring(layers, 0, units=64)
    parts, sums = summed(transfer, [7] * 15)
    gate, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu)
    moving = transfer.load(parts, after=after, is_last=True)
    assert len(gpu.copies) > 4
    assert not pauses.seconds
    gate.passed = True
    moving.wait()
    assert [each.result() for each in sums] == [true_sum(part.memory) for part in parts]
    assert all(block_of(layers, part.pages).numpy().tobytes() == bytes(part.memory) for part in parts)


def test_a_device_that_is_lost_before_a_pause_is_an_error_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, transfer, gpu, part = made()
    query = LazyEvent.query

    def lost(self: LazyEvent) -> bool:
        monkeypatch.setattr(LazyEvent, "query", query)
        raise RuntimeError("this GPU has fallen off the bus")

    Pauses(monkeypatch, gpu)
    monkeypatch.setattr(LazyEvent, "query", lost)
    moving = transfer.store([part])
    assert len(gpu.copies) == SLOTS
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        moving.wait()
    assert moving.done
    assert not any(stream.queue for stream in gpu.streams)
    transfer.store([part]).wait()
    assert bytes(part.memory) == block_of(layers, range(PAGES)).numpy().tobytes()
