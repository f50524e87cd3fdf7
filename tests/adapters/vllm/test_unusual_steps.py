"""What an engine does now and then: drafts, embeddings, prompts that grow, new weights, fewer loads than there were."""

from collections.abc import Callable

import pytest
import torch

from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.paged.jobs import MovingOptions
from kvredis.adapters.vllm.kv_layout import LayerGroup, layer_groups
from kvredis.adapters.vllm.request import Prompt, SchedulingOptions
from kvredis.adapters.vllm.scheduler import NO_PAGE, Scheduling
from kvredis.adapters.vllm.worker import PagedWorker
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.vllm.paged_specs import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheGroup, names
from tests.adapters.vllm.test_scheduler import CHUNK, PAGE, Engine
from tests.adapters.vllm.test_worker import PAGES, TOKENS, WAIT_S, Gate, Halves, opened_by_cancel

BASE = ChunkLayout(1, 1, 1, "u8", chunk_tokens=CHUNK, model="m")
MANY = list(range(1000))


def tables_of(halves: Halves, first: int) -> list[list[int]]:
    return [list(range(first, first + 19)) for _ in halves.groups]


def at_gate(**options: object) -> tuple[Halves, Gate]:
    halves, gate = Halves(**options), Gate()  # type: ignore[arg-type]
    halves.close()
    halves.open(gate)
    return halves, gate


def drafting_step(halves: Halves, forward: Callable[[], object]) -> None:
    """vLLM with speculative decoding: results are asked for before the step's stores are handed over."""
    step = halves.scheduling.step()
    halves.worker.before(step)
    jobs = halves.worker.stores(step)
    halves.worker.load(step)
    forward()
    halves.worker.results()
    halves.worker.store(step, jobs)


def test_stores_that_are_handed_over_behind_the_results_are_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    halves, gate = at_gate()
    gate.opened.set()
    tables = tables_of(halves, 1)
    assert halves.scheduling.match(Prompt("a", TOKENS), 0) == 0
    halves.scheduling.scheduled("a", tables, 0, 128, anew=True)
    drafting_step(halves, lambda: halves.compute(tables, 0, 128))
    assert halves.worker.mover.settle(WAIT_S)
    gate.opened.clear()
    halves.scheduling.scheduled("a", None, 128, 172)
    drafting_step(halves, lambda: halves.compute(tables, 128, 300))  # hears that the first store is over
    halves.scheduling.finished("a")
    asked = opened_by_cancel(halves, gate, monkeypatch)
    turned = [tables[0][::-1]]
    assert halves.scheduling.match(Prompt("b", [7 * token for token in TOKENS]), 0) == 0
    halves.scheduling.scheduled("b", turned, 0, 300, anew=True)
    drafting_step(halves, lambda: halves.compute(turned, 0, 300))
    assert asked == ["a"]
    assert halves.worker.mover.settle(WAIT_S)
    halves.scheduling.finished("b")
    into = tables_of(halves, 20)
    assert halves.holds(into, halves.prompt("c", into))
    halves.close()


def test_what_is_preempted_while_it_is_stored_is_stored_when_it_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halves, gate = at_gate()
    tables = tables_of(halves, 1)
    assert halves.scheduling.match(Prompt("a", TOKENS), 0) == 0
    halves.scheduling.scheduled("a", tables, 0, 300, anew=True)
    halves.step(lambda: halves.compute(tables, 0, 300))
    asked = opened_by_cancel(halves, gate, monkeypatch)
    assert halves.prompt("b", [tables[0][::-1]], [7 * token for token in TOKENS]) == 0
    assert asked == ["a"], "its pages are the other's"
    assert halves.worker.mover.settle(WAIT_S)
    tables = tables_of(halves, 20)
    assert halves.scheduling.match(Prompt("a", TOKENS, attempt=1), 0) == 0
    halves.scheduling.scheduled("a", tables, 0, 300, anew=True)
    halves.step(lambda: halves.compute(tables, 0, 300))
    assert halves.worker.mover.settle(WAIT_S)
    assert halves.scheduling.match(Prompt("c", TOKENS), 0) == 256
    halves.close()


@pytest.mark.parametrize(("anew", "computed", "taken"), [(True, 32, [3, 4]), (False, 32, [1, 2, 3, 4])])
def test_pages_of_requests_without_a_lookup_are_taken_as_well(anew: bool, computed: int, taken: list[int]) -> None:
    scheduling = Engine().scheduling
    scheduling.scheduled("embeddings", [[1, 2, 3, 4]], computed, 30, anew=anew)
    step = scheduling.step()
    assert step.taken == set(taken)
    assert not step.moves.stores
    assert not step.is_idle


def test_a_chunk_that_was_not_full_is_stored_again_when_it_is() -> None:
    engine = Engine(unfull=True)
    assert engine.match(MANY[:100]) == 0
    engine.scheduling.scheduled("r", engine.tables(112), 0, 100, anew=True)
    for done in range(100, 400):
        for job in engine.scheduling.step().moves.stores:
            engine.put(job.moves)
        if engine.scheduling.has_grown("r", done + 1):
            engine.scheduling.follow(Prompt("r", MANY[: done + 1]))
        added = [[1 + done // PAGE]] if done % PAGE == 0 and done >= 112 else None
        engine.scheduling.scheduled("r", added, done, 1)
    assert engine.match(MANY[:400], name="next turn") == 384


def test_a_hit_that_is_loaded_in_part_has_what_its_windows_need_where_it_ends() -> None:
    engine = Engine((20, None), max_load_chunks=4)  # two chunks of each group
    for step in engine.compute(MANY[:256], step=50):  # the window has let go of most
        for job in step.moves.stores:
            engine.put(job.moves)
    keys = [chunk.key for chunk in chunk_keys(MANY[:256], engine.groups[0].layout)]
    engine.backend.put(keys[3], b"")
    assert keys[1] not in engine.backend.values
    assert engine.match(MANY[:256], name="a") == 0
    engine.backend.put(keys[1], b"")
    assert engine.match(MANY[:256], name="b") == 128
    engine.scheduling.allocated("b", engine.tables(256, skipped=4), 128)
    moves = engine.scheduling.step().moves.loads[0].moves
    assert len(moves) == 3
    assert all(move.key in engine.backend.values for move in moves)


def test_nothing_is_loaded_where_the_bound_is_below_a_chunk_of_each_group() -> None:
    engine = Engine((None, 100, 50), max_load_chunks=2)
    for job in engine.compute(TOKENS)[0].moves.stores:
        engine.put(job.moves)
    assert engine.match(TOKENS, name="again") == 0


def test_requests_that_come_together_ask_for_no_more_chunks_than_the_workers_take() -> None:
    tokens, computed = MANY[:976], 48  # of a chunk, so that it and the last one, which is not full, are both loaded
    engine = Engine(max_load_chunks=31, unfull=True, min_rest_tokens=1)
    engine.put(engine.compute(tokens)[0].moves.stores[0].moves)
    found = engine.match(tokens, computed, name="a")
    assert found
    engine.scheduling.allocated("a", engine.tables(976), found)
    assert engine.match(tokens, computed, name="b") is None, "it is asked again, and not refused with its pages given"
    assert [len(job.moves) for job in engine.scheduling.step().moves.loads] == [16]
    engine.scheduling.loaded("a")
    assert engine.match(tokens, computed, name="b") == found


@pytest.mark.parametrize(("total", "found"), [(256, 192), (320, 320)])
def test_a_full_hit_leaves_a_token_whose_local_chunk_would_be_gone(total: int, found: int) -> None:
    local = ChunkedLocalAttentionSpec(PAGE, attention_chunk_size=128)
    described = [KVCacheGroup(names(2), local), KVCacheGroup(names(2, 2), FullAttentionSpec(PAGE))]
    groups, backend = layer_groups(described, BASE, "auto"), FakeBackend(1000)
    for group in groups:
        for chunk in chunk_keys(MANY[:total], group.layout):
            backend.put(chunk.key, b"")
    scheduling = Scheduling(groups, backend, SchedulingOptions())
    assert scheduling.match(Prompt("a", MANY[:total]), 0) == found
    local_table = [NO_PAGE] * (found // 128 * 8) + list(range(50, 50 + found % 128 // PAGE))
    scheduling.allocated("a", [local_table, list(range(1, 1 + found // PAGE))], found)
    moves = scheduling.step().moves.loads[0].moves
    assert [move.pages for move in moves if move.group == 0] == [(50, 51, 52, 53)]


def with_drafts(draft: str) -> tuple[list[LayerGroup], list[str]]:
    """The groups of a model of two layers and a draft's, and their names in the order of the forward passes."""
    every = [*names(2), draft]
    return layer_groups([KVCacheGroup(every[::-1], FullAttentionSpec(PAGE, 2, 8))], BASE, "auto"), every


def test_layers_of_a_draft_model_come_behind_the_model_s_and_are_stored_one_by_one() -> None:
    groups, every = with_drafts("draft_model.model.layers.0.self_attn.attn")
    assert [name for group in groups for name in group.names] == every
    assert groups[0].layout.part, "keys of their own: earlier versions had the layers in another order"
    assert not with_drafts("model.layers.2.self_attn.attn")[0][0].layout.part
    caches = {name: torch.zeros(PAGES, 2, PAGE, 16, dtype=torch.bfloat16) for name in every}
    backend = FakeBackend(1000)
    scheduling = Scheduling(groups, backend, SchedulingOptions())
    worker = PagedWorker(backend, groups, caches, PAGES, MovingOptions())

    def step(filled: Callable[[int], object]) -> None:
        told = scheduling.step()
        worker.before(told)
        jobs = worker.stores(told)
        worker.load(told)
        for at, name in enumerate(every):
            filled(at)
            worker.mover.save_layer(worker.places[name], jobs)
        worker.results()
        worker.mover.end_layers()
        assert worker.mover.settle(WAIT_S)

    assert scheduling.match(Prompt("a", TOKENS), 0) == 0
    scheduling.scheduled("a", [list(range(1, 20))], 0, 300, anew=True)
    step(lambda at: caches[every[at]][1:20].fill_(at + 1.0))
    assert len(backend.values) == 4
    assert scheduling.match(Prompt("b", TOKENS), 0) == 256
    scheduling.allocated("b", [list(range(20, 39))], 256)
    step(lambda at: None)
    assert all(bool((caches[name][20:36] == at + 1.0).all()) for at, name in enumerate(every))
    worker.close()


def test_a_layer_that_drafts_several_times_a_step_is_stored_once() -> None:
    halves = Halves()
    assert halves.scheduling.match(Prompt("a", TOKENS), 0) == 0
    halves.scheduling.scheduled("a", tables_of(halves, 1), 0, 300, anew=True)
    step = halves.scheduling.step()
    halves.worker.before(step)
    jobs = halves.worker.stores(step)
    for place in (0, 1, 1, 1):
        halves.worker.mover.save_layer(place, jobs)
    halves.worker.mover.end_layers()
    assert halves.worker.mover.settle(WAIT_S)
    stats = halves.worker.mover.stats()
    assert (stats["stores"], stats["stored_chunks"], stats["present_chunks"]) == (1, 4, 0)
    halves.close()
