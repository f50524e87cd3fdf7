"""Layer by layer: one leaves while the next is computed; a chunk is all or nothing."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvredis.adapters.paged.jobs import LoadJob, StoreJob
from kvredis.adapters.paged.layerwise_store import LayerStores
from kvredis.backends.local import LocalBackend
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.paged_engine import CHUNK, WAIT_S, PagedEngine, block_for, load_now, mover_on, moves_of
from tests.backends.nodes import wait_until
from tests.storage.small_store import small_store

PLACES = range(6)


def of_both(name: str, chunks: int = 3, seed: int = 0) -> LoadJob:
    """A job over both groups of layers."""
    return LoadJob(name, moves_of(name, chunks, seed) + moves_of(name, 2, seed, group=1))


def compute(engine: PagedEngine, place: int) -> None:
    """Attention of a layer of the model writes it, all over."""
    for group, layers in zip(engine.groups, engine.memory, strict=True):
        layer = group.layer_of(place)
        if layer is not None:
            bits = layers[layer].view(torch.int16)
            bits.copy_(torch.randint(-30000, 30000, bits.shape, generator=torch.Generator().manual_seed(place)))


def test_layer_0_has_been_stored_before_the_last_layer_is_computed_and_nothing_can_be_seen_before_it_is_whole() -> None:
    engine, backend = PagedEngine(), LocalBackend(small_store())
    job, begun = StoreJob("r", of_both("r").moves, 3 * CHUNK), list[LayerStores]()
    with mover_on(backend, engine) as mover:
        for place in PLACES:
            compute(engine, place)
            if place == PLACES[-1]:
                wait_until(lambda: 0 in begun[0].stored_s, "layer 0 in the store's memory")
            mover.save_layer(place, [job])
            if place == 0 and mover.layer_stores is not None:
                begun.append(mover.layer_stores)
            if place != PLACES[-1]:
                assert not any(backend.present([move.key for move in job.moves]))
        mover.end_layers()
        assert mover.layer_stores is None
        assert mover.settle(WAIT_S)
        assert mover.finished().stored == {"r"}
        assert begun[0].stored_s[0] < begun[0].computed_s[5]
        assert list(begun[0].stored_s) == list(PLACES)
        assert all(backend.present([move.key for move in job.moves]))
        assert mover.stats()["stored_chunks"] == 5
    with mover_on(backend, other := PagedEngine(300)) as mover:
        assert load_now(mover, LoadJob("s", of_both("r", seed=4).moves)) == 5
    for from_, to in zip(job.moves, of_both("r", seed=4).moves, strict=True):
        assert other.bytes_of(to) == engine.bytes_of(from_)
    backend.close()


def test_only_what_is_new_leaves_layer_by_layer_and_the_tail_is_seen_first() -> None:
    engine, backend, job = PagedEngine(), FakeBackend(), of_both("r", 4)
    backend.put(job.moves[0].key, block_for(engine, job.moves[0]))
    del backend.written[:]
    with mover_on(backend, engine) as mover:
        for place in PLACES:
            mover.save_layer(place, [StoreJob("r", job.moves, 4 * CHUNK)])
        mover.end_layers()
        assert mover.settle(WAIT_S)
        assert backend.written == [move.key for move in job.moves[1:]][::-1]
        for place in PLACES:  # now all of it is there
            mover.save_layer(place, [StoreJob("r", job.moves, 4 * CHUNK)])
        mover.end_layers()
        assert mover.settle(WAIT_S)
        stats = mover.stats()
        assert (stats["stored_chunks"], stats["present_chunks"], stats["errors"]) == (5, 7, 0)
    assert all(backend.values[move.key] == block_for(engine, move) for move in job.moves)


def test_a_step_that_ends_without_its_last_layer_stores_nothing_and_gives_its_room_back() -> None:
    engine, backend = PagedEngine(), LocalBackend(small_store())
    jobs = [StoreJob(name, of_both(name).moves, 3 * CHUNK) for name in "ab"]
    with mover_on(backend, engine) as mover:
        for place in PLACES[:5]:
            mover.save_layer(place, jobs[:1])
        for place in PLACES:  # the engine has not said that the step before was over
            mover.save_layer(place, jobs[1:])
        mover.end_layers()
        assert mover.settle(WAIT_S)
        assert mover.finished().stored == {"a", "b"}
        assert mover.stats()["dropped_stores"] == 5
    assert not any(backend.present([move.key for move in jobs[0].moves]))
    assert all(backend.present([move.key for move in jobs[1].moves]))
    backend.close()


@pytest.mark.parametrize(
    ("row_bytes", "row_max", "rows"),
    [(1 << 30, 8, [1, 5]), (1 << 30, 2, [1, 2, 2, 1]), (1, 8, [1] * 6), (70_000, 8, [1, 3, 2])],
)
def test_small_layers_leave_together_behind_the_first(
    row_bytes: int, row_max: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvredis.adapters.paged.layerwise_store.ROW_BYTES", row_bytes)
    monkeypatch.setattr("kvredis.adapters.paged.layerwise_store.ROW_MAX", row_max)
    sent: list[list[int]] = []
    send = LayerStores._send

    def seen(stores: LayerStores, places: Sequence[int], *more: Any) -> None:
        sent.append(list(places))
        send(stores, places, *more)

    monkeypatch.setattr(LayerStores, "_send", seen)
    engine, backend = PagedEngine(), FakeBackend()
    job = StoreJob("r", of_both("r").moves, 3 * CHUNK)  # 98 KiB + 34 KiB in six layers
    with mover_on(backend, engine) as mover:
        for place in PLACES:
            mover.save_layer(place, [job])
        mover.end_layers()
        assert mover.settle(WAIT_S)
        assert mover.stats()["stored_chunks"] == 5
    assert [len(row) for row in sent] == rows
    assert [place for row in sent for place in row] == list(PLACES)
    assert all(backend.values[move.key] == block_for(engine, move) for move in job.moves)


@pytest.mark.parametrize(("told_bytes", "is_one"), [(1, False), (5_000, False), (1 << 30, True)])
def test_layers_that_have_come_may_leave_before_their_chunk_is_whole(
    told_bytes: int, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvredis.adapters.paged.store.TOLD_BYTES", told_bytes)
    monkeypatch.setattr("kvredis.adapters.paged.layerwise_store.ROW_MAX", 1)
    engine, backend = PagedEngine(), FakeBackend()
    job = StoreJob("r", of_both("r").moves, 3 * CHUNK)
    with mover_on(backend, engine) as mover:
        for place in PLACES:
            compute(engine, place)
            mover.save_layer(place, [job])
        mover.end_layers()
        assert mover.settle(WAIT_S)
    for move in job.moves:
        value = backend.values[move.key]
        told = [(start, part) for key, start, part in backend.filled if key == move.key]
        assert all(value[start:].startswith(part) for start, part in told), "what was told of is final"
        ends = [start + len(part) for start, part in told]
        assert [start for start, _ in told[1:]] == ends[:-1], "one behind the other"
        assert ends[-1] == len(value), "all but the header"
        assert (len(told) == 1) == is_one
        assert engine.bytes_of(move) == value[told[0][0] :]


@pytest.mark.parametrize("left_out", [1, 3])
def test_a_step_that_leaves_a_layer_out_stores_nothing(left_out: int) -> None:
    engine, backend = PagedEngine(), LocalBackend(small_store())
    job = StoreJob("r", of_both("r").moves, 3 * CHUNK)
    with mover_on(backend, engine) as mover:
        for place in PLACES:
            if place != left_out:
                mover.save_layer(place, [job])
        mover.end_layers()
        assert mover.settle(WAIT_S)
        assert mover.finished().stored == {"r"}
        assert mover.stats()["dropped_stores"] == 5
        assert mover.stats()["errors"] == 0
    assert not any(backend.present([move.key for move in job.moves]))
    backend.close()


def test_layers_without_room_are_dropped_from_the_tail_on() -> None:
    engine, backend = PagedEngine(groups=1), LocalBackend(small_store(nbytes=4 * 64 * 1024))
    moves = moves_of("r", 9)
    with mover_on(backend, engine) as mover:
        for place in range(4):
            mover.save_layer(place, [StoreJob("r", moves, 9 * CHUNK)])
        mover.end_layers()
        assert mover.settle(WAIT_S)
        stats = mover.stats()
    kept = backend.match([move.key for move in moves])
    assert kept == stats["stored_chunks"] == 9 - stats["refused_stores"] - stats["dropped_stores"] > 1
    backend.close()


def test_a_request_that_is_cancelled_is_not_stored_and_its_neighbour_is() -> None:
    engine, backend = PagedEngine(groups=1), LocalBackend(small_store())
    jobs = [StoreJob(name, moves_of(name, 2), 2 * CHUNK) for name in "ab"]
    with mover_on(backend, engine) as mover:
        for place in range(4):
            if place == 2:
                mover.cancel("a")
            mover.save_layer(place, jobs)
        mover.end_layers()
        assert mover.settle(WAIT_S)
        assert mover.finished().stored == {"a", "b"}
    assert [backend.match([move.key for move in job.moves]) for job in jobs] == [0, 2]
    backend.close()


def test_closing_in_the_middle_of_a_step_ends_it() -> None:
    backend = FakeBackend()
    with mover_on(backend, PagedEngine()) as mover:
        mover.save_layer(0, [StoreJob("s", of_both("s").moves, 3 * CHUNK)])
    mover.end_layers()
    assert not any(backend.present([move.key for move in of_both("s").moves]))
    assert mover.settle(0)


def test_steps_without_jobs_wait_for_nothing() -> None:
    with mover_on(FakeBackend(), PagedEngine()) as mover:
        for place in PLACES:
            mover.save_layer(place, [])
        mover.end_layers()
        assert mover.finished().loaded == mover.finished().stored == set()
