"""kv_role: who only computes for others never asks, who only serves never stores."""

from collections.abc import Callable

import pytest
import torch

from kvredis.adapters.engine.engine import CacheEngine, Role
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import ConfigError
from tests.adapters.slow_backend import SlowBackend

LAYOUT = ChunkLayout(3, 2, 8, "bf16", model="tiny/llama")
TOKENS = list(range(64))

Open = Callable[[Role], CacheEngine]


@pytest.fixture
def backend() -> SlowBackend:
    return SlowBackend()


@pytest.fixture
def open_engine(backend: SlowBackend) -> Open:
    return lambda role: CacheEngine(Config(chunk_size=16), LAYOUT, backend, role=role)


def kv_of() -> torch.Tensor:
    return torch.randn((3, 2, 64, 2, 8), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def test_a_producer_stores_and_never_loads_or_asks_what_there_is(open_engine: Open, backend: SlowBackend) -> None:
    engine = open_engine("kv_producer")
    assert engine.store(TOKENS, kv_of()) == 64
    assert engine.store(TOKENS, kv_of()) == 0, "it asks what is stored already"
    asked = backend.questions
    plan = engine.plan(TOKENS, cached=5)
    assert (plan.total, plan.hit, plan.cached, plan.need_to_load, plan.skipped) == (64, 0, 5, 0, 0)
    out = torch.zeros_like(kv_of())
    assert engine.retrieve(TOKENS, out, start=5) == 5
    later = engine.retrieve_later(TOKENS, out, start=5)
    assert (later.done, later.tokens, later.refused) == (True, 5, False)
    assert "kv_producer" in engine.prefetch(TOKENS).refused
    assert not out.any()
    assert backend.questions == asked
    assert backend.loaded == []


def test_a_consumer_loads_and_never_stores_or_asks_where_to(open_engine: Open, backend: SlowBackend) -> None:
    engine = open_engine("kv_consumer")
    assert engine.store(TOKENS, kv_of()) == 0
    assert backend.questions == 0
    assert backend.written == []
    open_engine("kv_producer").store(TOKENS, kv_of())
    assert engine.plan(TOKENS).need_to_load == 63
    out = torch.zeros_like(kv_of())
    assert engine.retrieve(TOKENS, out) == 64
    assert torch.equal(out, kv_of())
    assert engine.stats.stored_tokens == 0


def test_by_default_an_engine_does_both(backend: SlowBackend) -> None:
    engine = CacheEngine(Config(chunk_size=16), LAYOUT, backend)
    assert engine.role == "kv_both"
    assert engine.store(TOKENS, kv_of()) == 64
    assert engine.retrieve(TOKENS, torch.zeros_like(kv_of())) == 64


def test_an_unknown_role_is_refused_with_the_three_that_there_are(backend: SlowBackend) -> None:
    with pytest.raises(ConfigError, match=r"kv_role.*kv_both, kv_producer, kv_consumer.*'kv_reader'"):
        CacheEngine(Config(), LAYOUT, backend, role="kv_reader")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_role"):
        CacheEngine.from_env(LAYOUT, role="both")  # type: ignore[arg-type]
