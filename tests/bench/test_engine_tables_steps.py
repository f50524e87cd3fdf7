"""The steps of decoding are what a model gives by itself, one by one on a CPU and all at once on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvredis.bench.engine_tables_compute import Engine, NoCache
from kvredis.bench.engine_tables_steps import ATTENTION, Steps, decode
from kvredis.bench.store_overhead_compute import TINY, llama

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
            cache = model(input_ids=ids[:, :25], use_cache=True).past_key_values
            rest = model(input_ids=ids[:, 25:], past_key_values=cache, use_cache=True).logits
            step = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits
        found.append((rest, step))
    (rest, step), (own_rest, own_step) = found
    assert torch.equal(own_rest, rest), "behind a cache a mask is needed"
    assert torch.equal(own_step, step)


def check_steps(engine: Engine, *, is_graph: bool) -> None:
    rows = 2
    _, room = engine._room(rows)
    made = prompts(2)
    steps = Steps(engine._forward, lambda: engine._cache(room, TOKENS), rows, COUNT, engine.device)
    assert steps.is_graph == is_graph
    for made in (prompts(2), prompts(3), prompts(2)):
        with torch.inference_mode():
            cache = engine._cache(room, 0)
            ids = torch.tensor(made, device=engine.device)
            token = engine._forward(ids, cache)[:, -1:].argmax(dim=-1)
            found = steps.run(token).tolist()
            assert found == decode(engine._forward, token, cache, COUNT).tolist()
        assert [row[0] for row in found] == by_itself(engine._model, made, engine.device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_a_cpu_steps_are_taken_one_by_one_from_the_same_place_each_time(engine: Engine) -> None:
    check_steps(engine, is_graph=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_all_steps_are_one_graph_that_reads_what_is_there_now(engine: Engine) -> None:
    check_steps(engine, is_graph=True)


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


def test_steps_are_made_when_nobody_stores(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, seen = Storing(), list[int]()

    def noting(*arguments: Any) -> Steps:
        seen.append(subject.under_way)
        return Steps(*arguments)

    monkeypatch.setattr("kvredis.bench.engine_tables_compute.Steps", noting)
    for number in range(4):
        engine.batch(subject, prompts(number), COUNT + 2, 64)
    assert seen == [0, 0], "two rooms take turns, and the first is being stored from when the second is new"
    assert subject.under_way == 4, "else they are stored while the next are computed"
    engine.settle()
