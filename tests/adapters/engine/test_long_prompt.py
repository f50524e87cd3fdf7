"""A prompt of 15,410 tokens as engines hand it in: 2,048 at a time, again, and with most of it still in the engine."""

import logging

import pytest
import torch

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.backends.config.schema import Config
from tests.adapters.fake_backend import FakeBackend

LAYOUT = ChunkLayout(1, 1, 4, "bf16", model="tiny/llama")
TOTAL = 15_410
STEP = 2048
BLOCK = 16
"""Tokens of an engine's own block."""


def prompt(tokens: int = TOTAL) -> list[int]:
    return list(range(tokens))


def kv_of(tokens: int = TOTAL) -> torch.Tensor:
    return torch.randn((1, 2, tokens, 1, 4), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def engine_over(backend: FakeBackend, *, unfull: bool) -> CacheEngine:
    return CacheEngine(Config(chunk_size=256, save_unfull_chunk=unfull), LAYOUT, backend)


def prefill_in_steps(engine: CacheEngine, tokens: int = TOTAL) -> list[int]:
    """Compute and store as chunked prefill does; what each step has stored."""
    kv = kv_of(tokens)
    return [engine.store(prompt(min(stop, tokens)), kv) for stop in range(STEP, tokens + STEP, STEP)]


def test_chunked_prefill_stores_2048_at_a_time_in_seven_steps_and_the_rest_in_an_eighth(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_over(FakeBackend(), unfull=True)
    caplog.set_level(logging.INFO, "kvredis")
    assert prefill_in_steps(engine) == [STEP] * 7 + [1074]
    lines = [line for line in caplog.messages if line.startswith("Storing")]
    assert lines == [
        *(f"Storing KV cache for 2048 out of {STEP * step} tokens for request -" for step in range(1, 8)),
        "Storing KV cache for 1074 out of 15410 tokens for request -",
    ]
    assert engine.stats.stored_tokens == TOTAL


def test_with_the_partial_chunk_a_second_run_hits_all_but_the_last_token() -> None:
    backend = FakeBackend()
    prefill_in_steps(engine_over(backend, unfull=True))
    again = engine_over(backend, unfull=True)
    assert len(backend.values) == 61
    plan = again.plan(prompt())
    assert (plan.hit, plan.need_to_load) == (15_409, 15_409)
    out = torch.zeros_like(kv_of())
    assert again.retrieve(prompt(), out, stop=plan.stop) == 15_409
    assert torch.equal(out[:, :, :15_409], kv_of()[:, :, :15_409])
    assert prefill_in_steps(again) == [0] * 8
    assert again.stats.stored_bytes == 0


def test_without_it_there_are_sixty_full_chunks(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    assert prefill_in_steps(engine_over(backend, unfull=False)) == [STEP] * 7 + [1024]
    assert len(backend.values) == 60
    again = engine_over(backend, unfull=False)
    caplog.set_level(logging.INFO, "kvredis")
    plan = again.plan(prompt(), request="r9")
    assert (plan.hit, plan.need_to_load) == (15_360, 15_360)
    assert caplog.messages[-1] == ("Reqid: r9, Total tokens 15410, LMCache hit tokens: 15360, need to load: 15360")


@pytest.mark.parametrize(
    ("total", "stored", "chunk", "own", "need"),
    [(15_410, 15_410, 256, 15_408, 1), (14_820, 14_820, 256, 14_816, 3), (14_900, 14_820, 20, 14_816, 4)],
)
def test_what_the_engine_still_has_is_not_loaded_nor_written_over(
    total: int, stored: int, chunk: int, own: int, need: int
) -> None:
    """The engine holds whole blocks of its own; LMCache #2206 is 14,816 tokens in them and a hit of 14,820."""
    backend, kv = FakeBackend(), kv_of(total)
    engine = CacheEngine(Config(chunk_size=chunk, save_unfull_chunk=True), LAYOUT, backend)
    assert engine.store(prompt(stored), kv) == stored
    plan = engine.plan(prompt(total), cached=own)
    assert own % BLOCK == 0
    assert plan.need_to_load == plan.hit - own == need
    out = torch.full_like(kv, 7.0)
    end = engine.retrieve(prompt(total), out, start=own, stop=plan.stop)
    assert end == plan.stop
    assert (out[:, :, :own] == 7).all()
    assert torch.equal(out[:, :, own:end], kv[:, :, own:end])
    assert (out[:, :, end:] == 7).all()


def test_a_chunk_lost_from_the_middle_ends_the_hit_before_it() -> None:
    backend = FakeBackend()
    engine = engine_over(backend, unfull=False)
    prefill_in_steps(engine)
    backend.delete([chunk_keys(prompt(), engine.layout)[7].key])
    assert engine.plan(prompt()).hit == 7 * 256
    assert prefill_in_steps(engine) == [256, 0, 0, 0, 0, 0, 0, 0], "only what is missing is stored again"
    assert engine.plan(prompt()).hit == 15_360
