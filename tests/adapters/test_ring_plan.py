"""How parts share staging buffers: nothing is lost, nothing comes twice, and few copies are made of it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvredis.adapters.paged import PagedKV
from kvredis.adapters.ring_plan import Piece, merged, plan, slots_of
from kvredis.adapters.transfer import Part


def whole(units: list[int], slots: list[list[Piece]]) -> bool:
    """Whether the pieces are all units of all parts, in order."""
    told = [(piece.part, unit) for slot in slots for piece in slot for unit in range(piece.start, piece.stop)]
    return told == [(part, unit) for part, total in enumerate(units) for unit in range(total)]


@pytest.mark.parametrize("seed", range(60))
def test_any_parts_fill_buffers_in_order_and_within_their_size(seed: int) -> None:
    lot = random.Random(seed)
    units = [lot.choice([0, 1, 3, 16, 50, 400]) for _ in range(lot.randint(1, 30))]
    grains = [lot.choice([1, 2, 7, 16, max(total, 1)]) for total in units]
    most = lot.choice([1, 5, 16, 64, 1000])
    slots = list(slots_of(units, grains, most))
    assert whole(units, slots)
    assert all(0 < sum(stop - start for _, start, stop in slot) <= most for slot in slots)


def test_the_first_buffer_is_an_eighth_so_that_copying_begins_soon() -> None:
    slots = list(slots_of([1024] * 3, [32] * 3, 1024))
    assert slots[0] == [Piece(0, 0, 128)]
    assert list(slots_of([100], [1], 1024)) == [[Piece(0, 0, 100)]]  # what is small anyway is one


def test_a_chunk_as_large_as_a_buffer_is_cut_once_at_the_beginning_and_never_again() -> None:
    slots = list(slots_of([1024] * 32, [32] * 32, 1024))
    assert sum(map(len, slots)) == 33


def test_a_small_part_is_never_cut() -> None:
    units = [36] * 100
    slots = list(slots_of(units, units, 1024))
    assert whole(units, slots)
    assert all(piece.stop - piece.start == 36 for slot in slots for piece in slot)


def test_what_adjoins_in_host_memory_is_one_copy() -> None:
    found = merged(np.array([100, 110, 130, 140, 50], np.uint64), np.array([10, 10, 10, 5, 7], np.uint64))
    assert found.host.tolist() == [100, 130, 50]
    assert found.place.tolist() == [0, 20, 35]
    assert found.nbytes.tolist() == [20, 15, 7]


def test_parts_alike_that_follow_each_other_share_a_kernel_and_a_cut_one_has_its_own() -> None:
    paged = PagedKV([torch.zeros(40, 2, 16, 2, 8, dtype=torch.bfloat16) for _ in range(4)])
    nbytes = 4 * 2 * 2 * 16 * 2 * 8 * 2
    parts = [Part([2 * at, 2 * at + 1], memoryview(bytearray(nbytes))) for at in range(10)]
    job = plan(paged, parts)
    assert job.units == [16] * 10
    cuts = [job.launches(pieces) for pieces in job.slots(64 * job.unit_bytes)]
    # 64 units a buffer, the first one 8; a part is 16, so it is cut between layers of 4 units
    assert [(each.parts, each.units, each.start) for each in cuts[0]] == [(1, 8, 0)]
    assert [(each.parts, each.units, each.start) for each in cuts[1]] == [(1, 8, 8), (3, 16, 0)]
    assert [(each.slot_unit, each.first_page) for each in cuts[1]] == [(0, 0), (8, 2)]
    assert sum(each.parts * each.units for slot in cuts for each in slot) == 160
