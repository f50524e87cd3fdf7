"""How parts share staging buffers: nothing is lost, nothing comes twice, and few copies are made of it."""

from __future__ import annotations

import ctypes
import random
from itertools import accumulate, pairwise

import pytest
import torch

from kvredis.adapters.transfer.base import Part
from kvredis.adapters.transfer.cuda.plan import Launch, LayerPlans, Span, merged, plan, spans_of
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.storage.memory.copy import address_of


def shared(units: list[int], grains: list[int], most: int, room: int, least: int) -> list[Span]:
    return list(spans_of(list(accumulate(units, initial=0)), grains.__getitem__, most, room, least))


def cuts(units: list[int], spans: list[Span]) -> list[tuple[int, int]]:
    """Parts that are cut, and behind which of their units."""
    begins = list(accumulate(units, initial=0))
    return [
        (part, span.stop - begin)
        for span in spans
        for part, (begin, end) in enumerate(pairwise(begins))
        if begin < span.stop < end
    ]


@pytest.mark.parametrize("seed", range(60))
def test_any_parts_fill_buffers_in_order_and_within_their_size(seed: int) -> None:
    lot = random.Random(seed)
    units = [lot.choice([0, 1, 3, 16, 50, 400]) for _ in range(lot.randint(1, 30))]
    grains = [lot.choice([1, 2, 7, 16, max(total, 1)]) for total in units]
    most = lot.choice([1, 5, 16, 64, 1000])
    room = max(most // 4, 1)
    least = lot.choice([most, max(most // 8, 1)])
    spans = shared(units, grains, most, room, least)
    assert [unit for span in spans for unit in range(*span)] == list(range(sum(units)))
    left = [sum(units) - span.start for span in spans]
    assert least == most or all(
        2 * (stop - start) <= max(rest + 1, 2 * least) for (start, stop), rest in zip(spans, left, strict=True)
    )
    assert all(0 < span.stop - span.start <= (most if at else room) for at, span in enumerate(spans))
    for part, unit in cuts(units, spans):  # behind a grain, unless a grain is larger than the buffer
        assert unit % grains[part] == 0 or grains[part] > min(room, least)


def test_the_first_buffer_is_smaller_so_that_copying_begins_soon_but_not_when_there_is_no_other() -> None:
    paged = PagedKV([torch.zeros(40, 2, 16, 2, 8, dtype=torch.bfloat16) for _ in range(4)])
    parts = [Part(range(32), memoryview(bytearray(32 * 8 * 512))) for _ in range(4)]
    job = plan(paged, parts)
    assert next(job.slots(512 * 512, 4)) == Span(0, 128)
    assert next(job.slots(512 * 512)) == Span(0, 512)
    assert list(plan(paged, parts[:1]).slots(512 * 512, 4)) == [Span(0, 256)]


def test_the_last_buffers_hold_less_and_less_where_their_checksums_are_waited_for() -> None:
    paged = PagedKV([torch.zeros(40, 2, 16, 2, 8, dtype=torch.bfloat16) for _ in range(4)])
    parts = [Part(range(32), memoryview(bytearray(32 * 8 * 512))) for _ in range(8)]
    job = plan(paged, parts)
    assert [stop - start for start, stop in job.slots(512 * 512, 1, 8)] == [512, 512, 512, 256, 128, 64, 64]
    alone = plan(paged, parts[:1])
    assert [stop - start for start, stop in alone.slots(512 * 512, 4, 8)] == [128, 64, 64]
    planned = LayerPlans(paged, parts).at(1)
    assert planned.slots(512 * 512, 1) != planned.slots(512 * 512, 1, 8), "one is not taken for the other"


def test_a_chunk_as_large_as_a_buffer_is_cut_once_at_the_beginning_and_never_again() -> None:
    units = [1024] * 32
    assert cuts(units, shared(units, [32] * 32, 1024, 256, 1024)) == [(0, 256)]


def test_a_small_part_is_never_cut() -> None:
    units = [36] * 100
    spans = shared(units, units, 1024, 256, 1024)
    assert spans[-1].stop == 3600
    assert cuts(units, spans) == []


def test_what_adjoins_in_host_memory_is_one_copy() -> None:
    found = merged([100, 110, 999, 130, 140, 50], [10, 10, 0, 10, 5, 7], [1] * 6)
    assert found.host == [100, 130, 50]
    assert found.place == [0, 20, 35]
    assert found.nbytes == [20, 15, 7]
    found = merged([100, 500, 500], [10, 0, 10], [1] * 3)
    assert found.host == [100, 500], "not as far as where a part of no pages lies"
    assert found.nbytes == [10, 10]


def test_a_copy_does_not_reach_into_what_adjoins_by_chance_and_another_one_lends() -> None:
    paged = PagedKV([torch.zeros(8, 2, 16, 2, 8, dtype=torch.bfloat16)])
    page_bytes = 2 * 16 * 2 * 8 * 2
    memory = bytearray(3 * page_bytes)
    start = address_of(memory)
    lent = [memoryview((ctypes.c_char * page_bytes).from_address(start + at * page_bytes)) for at in range(2)]
    one = memoryview(memory)[2 * page_bytes :]
    job = plan(paged, [Part([at], memory) for at, memory in enumerate([*lent, one])])
    assert job.extents(Span(0, job.units)).host == [start + at * page_bytes for at in range(3)]
    whole = memoryview(memory)
    job = plan(paged, [Part([at], whole[at * page_bytes : (at + 1) * page_bytes]) for at in range(3)])
    assert job.extents(Span(0, job.units)).nbytes == [3 * page_bytes]


def test_parts_alike_that_follow_each_other_share_a_kernel_also_where_the_first_and_the_last_are_cut() -> None:
    paged = PagedKV([torch.zeros(40, 2, 16, 2, 8, dtype=torch.bfloat16) for _ in range(4)])
    page_bytes = 4 * 2 * 16 * 2 * 8 * 2
    counts = [2] * 10 + [0, 1, 1]
    begins = list(accumulate(counts, initial=0))
    parts = [
        Part(range(begin, begin + count), memoryview(bytearray(count * page_bytes)))
        for begin, count in zip(begins, counts, strict=False)
    ]
    parts.append(Part([39, 38], memoryview(bytearray(page_bytes)), layers=range(1, 3)))
    job = plan(paged, parts)
    slots = list(job.slots(64 * job.unit_bytes, 8))
    # 64 units a buffer, the first one 8; a part of 16 units is cut between layers of 4
    found = [job.launches(span) for span in slots]
    assert found[0] == [Launch(slot_unit=0, total=8, start=0, units=16, pages=2, first_page=0, layer=0)]
    assert found[1] == [Launch(slot_unit=0, total=56, start=8, units=16, pages=2, first_page=0, layer=0)]
    rest = [launch for launches in found[2:] for launch in launches]
    assert [(each.total, each.units, each.pages, each.first_page, each.layer) for each in rest] == [
        (64, 16, 2, 8, 0), (32, 16, 2, 16, 0), (16, 8, 1, 20, 0), (8, 8, 2, 22, 1),
    ]  # fmt: skip
    assert [job.parts_before(span.stop) for span in slots] == [0, 4, 8, 14]
