"""Pauses between a long job's buffers: as long as others are under way, of chunks alone, and never at the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvredis.adapters import ring_way
from kvredis.adapters.ring_way import PACE
from kvredis.adapters.transfer import Part
from kvredis.adapters.transfer_cuda import RingTransfer
from tests.adapters.lazy_gpu import LazyEvent, LazyGpu
from tests.adapters.paged_layouts import block_of, planes_first
from tests.adapters.test_passing_sums import ring, summed, true_sum

UNITS = 8
PAGES = 30
SLOTS = 2


class Pauses:
    """Takes the place of time.sleep; `gpu` works off all that it was given meanwhile, or nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: LazyGpu, *, works: bool) -> None:
        self.seconds: list[float] = []
        self._gpu = gpu
        self._works = works
        monkeypatch.setattr(ring_way, "time", SimpleNamespace(sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        while self._works and self._gpu.step():
            pass


def made() -> tuple[list[torch.Tensor], RingTransfer, LazyGpu, Part]:
    """Layers, a ring of small buffers, its GPU, and a part that fills many of them, each by one copy."""
    layers = [planes_first((40, 2, 16, 2, 32), torch.bfloat16) for _ in range(2)]
    transfer, gpu = ring(layers, units=UNITS)
    return layers, transfer, gpu, Part(range(PAGES), memoryview(bytearray(PAGES * 4 * unit_bytes(layers))))


def unit_bytes(layers: list[torch.Tensor]) -> int:
    return layers[0][0, 0].numel() * 2


def closed_gate(gpu: LazyGpu) -> tuple[LazyEvent, Any]:
    """What lets an engine's pass end, and the event behind that."""
    gate, forward = LazyEvent(gpu), gpu.stream()
    gpu.wait(forward, gate)
    return gate, gpu.record(forward)


@pytest.mark.parametrize("way", ["store", "load"])
def test_behind_buffers_under_way_a_pause_is_as_long_as_the_last_of_them_at_that_pace(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, transfer, gpu, part = made()
    gate, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu, works=False)
    moving = getattr(transfer, way)([part], after=after)
    # All is enqueued, though nothing can move; the first buffer is a small one.
    assert len(pauses.seconds) == len(gpu.copies) - SLOTS > 8
    assert pauses.seconds == pytest.approx([UNITS * unit_bytes(layers) / PACE] * len(pauses.seconds))
    gate.passed = True
    moving.wait()
    assert bytes(part.memory) == block_of(layers, range(PAGES)).numpy().tobytes()


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_buffer_that_is_free_again_is_filled_at_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, transfer, gpu, part = made()
    pauses = Pauses(monkeypatch, gpu, works=True)
    getattr(transfer, way)([part]).wait()
    assert 0 < len(pauses.seconds) <= len(gpu.copies) // SLOTS
    assert bytes(part.memory) == block_of(layers, range(PAGES)).numpy().tobytes()


def test_a_small_buffer_under_way_makes_a_short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, transfer, gpu, _ = made()
    gate, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu, works=False)
    parts = [Part([at], memoryview(bytearray(4 * unit_bytes(layers)))) for at in range(5)]
    movings = [transfer.load([part], after=after) for part in parts]
    assert pauses.seconds == pytest.approx([4 * unit_bytes(layers) / PACE] * 3)
    gate.passed = True
    for moving in movings:
        moving.wait()
    assert all(bytes(part.memory) == block_of(layers, part.pages).numpy().tobytes() for part in parts)


@pytest.mark.parametrize("way", ["store", "load"])
def test_whoever_moves_layers_is_not_kept(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, transfer, gpu, part = made()
    half = part.memory.nbytes // 2
    gate, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu, works=False)
    planned = getattr(transfer.layers([part]), way)(1, after=after)
    alone = getattr(transfer, way)([Part(range(PAGES), part.memory[:half], layers=range(1))], after=after)
    assert len(gpu.copies) > 10
    assert not pauses.seconds
    gate.passed = True
    for moving in (planned, alone):
        moving.wait()
    assert bytes(part.memory) == block_of(layers, range(PAGES)).numpy().tobytes()


def test_the_end_of_a_load_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [planes_first((160, 2, 16, 2, 32), torch.bfloat16) for _ in range(3)]
    transfer, gpu = ring(layers, 0, units=64)
    parts, sums = summed(transfer, [7] * 15)
    gate, after = closed_gate(gpu)
    pauses = Pauses(monkeypatch, gpu, works=False)
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

    monkeypatch.setattr(LazyEvent, "query", lost)
    moving = transfer.store([part])
    assert len(gpu.copies) == SLOTS
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        moving.wait()
    assert moving.done
    assert not any(stream.queue for stream in gpu.streams)
    transfer.store([part]).wait()
    assert bytes(part.memory) == block_of(layers, range(PAGES)).numpy().tobytes()
