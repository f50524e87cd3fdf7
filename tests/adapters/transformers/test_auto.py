"""generate() with min_retrieve_tokens: auto: the model tells how long its passes take, and what is loaded follows."""

import threading
import time
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.transformers import model as model_module
from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.backends.config.schema import Config
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.slow_backend import SlowBackend, settle
from tests.adapters.tiny_models import tiny

CHUNK = 16


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny("llama")


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 512, (1, tokens), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, ids: torch.Tensor) -> list[int]:
    result = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert isinstance(result, torch.Tensor)
    return [int(token) for token in result[0]]


def test_with_auto_the_model_tells_how_fast_it_computes_and_loads_by_that(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, ids = SlowBackend(), prompt(100)
    config = Config(chunk_size=CHUNK, min_retrieve_tokens="auto")
    engine = CacheEngine(config, layout_of(llama, "tiny"), backend, clock=backend.clock)
    cached = CachedModel(llama, engine)
    expected = greedy(llama, ids)
    monkeypatch.setattr(time, "perf_counter", backend.clock)
    forward = llama.forward

    def taking_its_time(*args: Any, **kwargs: Any) -> Any:
        settle()
        backend.now_s += 0.5 + kwargs["input_ids"].shape[1] / 100
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama, "forward", taking_its_time)
    monkeypatch.setattr(model_module, "LIBRARIES", model_module.LIBRARIES | {"tests"})
    assert greedy(cached, ids) == expected
    assert engine.break_even.tokens_per_s == pytest.approx(100 / 1.5), "one short pass may have been the warm-up"
    backend.lags_s["remote"] = 0.01
    assert greedy(cached, ids) == expected
    assert cached.last_loaded == 0, "the prompt is computed, to see how long that takes when all is warm"
    assert engine.break_even.tokens_per_s == pytest.approx(100), "half a second is there with each pass"
    assert greedy(cached, ids) == expected
    assert cached.last_loaded == 96
    assert engine.break_even.tokens_per_s == pytest.approx(100), "what was left was less than a chunk"
    backend.lags_s["remote"] = 3.0
    for _ in range(3):
        assert greedy(cached, ids) == expected
    assert cached.last_loaded == 0
    assert (cached.last_plan.hit, cached.last_plan.skipped) == (96, 96)
    assert not llama._forward_hooks
    assert not llama._forward_pre_hooks


def test_with_auto_a_batch_is_one_question_and_what_its_first_pass_took_is_not_believed(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, rows = SlowBackend(), 6
    config = Config(chunk_size=CHUNK, min_retrieve_tokens="auto")
    engine = CacheEngine(config, layout_of(llama, "tiny"), backend, clock=backend.clock)
    cached = CachedModel(llama, engine)
    ids = torch.cat([prompt(97, seed) for seed in range(rows)])
    for row in ids.tolist():
        engine.store(row, torch.zeros(3, 2, 97, 2, 16))
    monkeypatch.setattr(time, "perf_counter", backend.clock)
    forward, warm_up_s = llama.forward, [60.0]

    def taking_its_time(*args: Any, **kwargs: Any) -> Any:
        settle()
        backend.now_s += kwargs["input_ids"].numel() / 1000 + (warm_up_s.pop() if warm_up_s else 0)
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama, "forward", taking_its_time)
    monkeypatch.setattr(model_module, "LIBRARIES", model_module.LIBRARIES | {"tests"})
    backend.lags_s["remote"] = 10 * CHUNK / 1000
    for _ in range(4):
        cached.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
        assert cached.last_loaded == 0
        assert {plan.skipped for plan in cached.last_plans} == {96}, "none of them is loaded in vain"
    assert engine.stats.loaded_tokens == 0


def test_with_auto_a_prompt_is_stored_that_another_thread_computes_meanwhile(llama: PreTrainedModel) -> None:
    backend = FakeBackend()
    config = Config(chunk_size=CHUNK, min_retrieve_tokens="auto")
    cached = CachedModel(llama, CacheEngine(config, layout_of(llama, "tiny"), backend))
    others = [threading.Thread(target=greedy, args=(cached, prompt(100, seed=1)))]

    def beside(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        while others:  # the first prompt has been computed, and how long that took is still looked at
            others[0].start()
            others.pop().join()
        return scores

    cached.generate(prompt(100), max_new_tokens=4, do_sample=False, pad_token_id=0, logits_processor=[beside])
    assert len(set(backend.written)) == 2 * (100 // CHUNK), "both prompts"


def test_a_prefill_that_fails_leaves_no_hook_behind(llama: PreTrainedModel) -> None:
    config = Config(chunk_size=CHUNK, min_retrieve_tokens="auto")
    cached = CachedModel(llama, CacheEngine(config, layout_of(llama, "tiny"), FakeBackend()))
    with pytest.raises(IndexError):
        cached.generate(torch.full((1, 20), 10_000), max_new_tokens=1)
    assert not llama._forward_hooks
    assert not llama._forward_pre_hooks
    assert cached.engine.break_even.tokens_per_s is None
