"""Passes and steps of decoding give what a model gives by itself, one by one on a CPU and as graphs on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvredis.adapters.transformers.cache import CACHE
from kvredis.bench.core.compute import ATTENTION, TINY, Graphed, decode, llama, spans, steps_of
from kvredis.bench.engine_tables.worker import Engine, NoCache, Spent

COUNT = 6
TOKENS = 40


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(TINY, 60, 16)


def prompts(seed: int, rows: int = 2) -> list[list[int]]:
    return torch.randint(1, 1000, (rows, TOKENS), generator=torch.Generator().manual_seed(seed)).tolist()


def by_itself(model: Any, made: list[list[int]], device: torch.device) -> list[int]:
    """The tokens behind the prompts, of a cache that transformers makes."""
    ids = torch.tensor(made, device=device)
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT + 1, min_new_tokens=COUNT + 1,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    last: list[int] = found[:, -1].tolist()
    return last


def test_the_model_attends_as_transformers_own_does(engine: Engine) -> None:
    ids = torch.tensor(prompts(1), device=engine.device)
    other = llama(TINY, 60, engine.device)
    assert other.config._attn_implementation == "sdpa"
    assert engine._model.config._attn_implementation == ATTENTION
    found = []
    for model in (other, engine._model):
        with torch.inference_mode():
            cache = model(input_ids=ids[:, :25], use_cache=True)[CACHE]
            rest = model(input_ids=ids[:, 25:], use_cache=True, **{CACHE: cache}).logits
            step = model(input_ids=ids[:, :1], use_cache=True, **{CACHE: cache}).logits
        found.append((rest, step))
    (rest, step), (own_rest, own_step) = found
    assert torch.equal(own_rest, rest), "behind a cache a mask is needed"
    assert torch.equal(own_step, step)


def test_steps_begin_at_the_same_place_each_time_and_on_a_gpu_are_one_graph(engine: Engine) -> None:
    rows = 2
    _, room = engine._room(rows)
    made = prompts(2)
    steps = steps_of(engine._forward, lambda: engine._cache(room, TOKENS), rows, COUNT, engine.device)
    assert steps.is_graph == (engine.device.type == "cuda")
    for made in (prompts(2), prompts(3), prompts(2)):
        with torch.inference_mode():
            cache = engine._cache(room, 0)
            ids = torch.tensor(made, device=engine.device)
            token = engine._forward(ids, cache)[:, -1:].argmax(dim=-1)
            found = steps.run(token).tolist()
            assert found == decode(engine._forward, token, cache, COUNT).tolist()
        assert [row[0] for row in found] == by_itself(engine._model, made, engine.device)


def test_no_step_needs_no_cache(engine: Engine) -> None:
    def cache() -> Any:
        raise AssertionError("which takes a millisecond to make")

    token = torch.tensor([[7]])
    steps = steps_of(engine._forward, cache, 1, 0, engine.device)
    assert not steps.is_graph
    assert steps.run(token) is token


def test_passes_begin_wherever_a_hit_ends_and_on_a_gpu_are_graphs_where_that_was_foreseen(engine: Engine) -> None:
    """Of prompts that are new, that are there in part, and that are there but for the last token."""
    device, rows, columns = engine.device, 2, 16
    is_graph = device.type == "cuda"
    engine.prepare({rows}, TOKENS, COUNT + 1, rows * columns, {0, 32, TOKENS - 1})
    place, _ = engine._room(rows)
    for seed, start in ((2, 0), (3, 0), (3, 32), (3, 20), (3, TOKENS - 1)):
        ids = torch.tensor(prompts(seed), device=device)
        with torch.inference_mode():
            logits, lone = engine._passes.run(place, ids, start, columns)
            wanted = engine._forward(ids, None)
        assert torch.equal(logits[:, -1:].argmax(dim=-1), wanted[:, -1:].argmax(dim=-1)), (seed, start)
        assert lone == (0 if is_graph and start != 20 else len(spans(start, TOKENS, columns))), (seed, start)


def test_a_prompt_is_cut_into_passes_from_where_its_hit_ends() -> None:
    assert spans(0, 40, 16) == [(0, 16), (16, 32), (32, 40)]
    assert spans(39, 40, 16) == [(39, 40)]
    assert spans(8, 40, 64) == [(8, 40)]


def test_what_was_launched_one_by_one_is_counted_by_a_pass(engine: Engine) -> None:
    spent = Spent()
    engine.batch(NoCache(), prompts(5), COUNT + 1, 36, spent)
    launched = len(spans(0, TOKENS, 18)) + COUNT  # a graph of steps is made for a batch, of passes by prepare alone
    assert spent.lone_steps == (launched if engine.device.type == "cpu" else launched - COUNT)


def test_a_batch_makes_its_steps_once_for_each_place_and_length(engine: Engine) -> None:
    for _ in range(4):
        engine.batch(NoCache(), prompts(4), COUNT + 1, 64)
    kinds = [kind for kind in engine._steps if kind[1:] == (TOKENS, COUNT)]
    assert len(kinds) == 2, "two rooms take turns"


class Storing(NoCache):
    """A cache whose stores end when they are waited for."""

    def __init__(self) -> None:
        self.under_way = 0

    def store(self, tokens: list[int], kv: torch.Tensor) -> Any:
        self.under_way += 1
        return self

    def wait(self) -> None:
        self.under_way -= 1


def test_steps_are_made_when_no_engine_stores(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, seen = Storing(), list[int]()

    def noting(*arguments: Any) -> Graphed:
        seen.append(subject.under_way)
        return steps_of(*arguments)

    monkeypatch.setattr("kvredis.bench.engine_tables.worker.steps_of", noting)
    for number in range(4):
        engine.batch(subject, prompts(number), COUNT + 2, 64)
    assert seen == [0, 0], "two rooms take turns, and the first is being stored from when the second is new"
    assert subject.under_way == 4, "else they are stored while the next are computed"
    engine.settle()
