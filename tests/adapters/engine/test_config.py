"""What an engine's own arguments and its device make of the configuration."""

from collections.abc import Callable

import pytest
import torch

from kvredis.adapters.engine.config import Role, for_device, of_rank
from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import ConfigError
from tests.adapters.slow_backend import SlowBackend


@pytest.fixture
def plain() -> Config:
    return Config.load(env={})


def test_beside_a_gpu_the_hosts_memory_is_page_locked_and_touched_by_threads(plain: Config) -> None:
    config = for_device(plain, "cuda")
    assert config.page_lock
    assert 1 <= config.prefault <= 8
    assert config.store_options().page_lock


def test_beside_a_cpu_nothing_is_locked(plain: Config) -> None:
    assert for_device(plain, "cpu") is plain


@pytest.mark.parametrize("said", ["true", "false"])
def test_what_was_said_of_page_locking_holds_beside_a_gpu(said: str) -> None:
    config = Config.load(env={"KVREDIS_PAGE_LOCK": said})
    assert for_device(config, "cuda") is config


def test_as_many_threads_as_were_asked_for_touch_the_memory() -> None:
    assert for_device(Config.load(env={"KVREDIS_PREFAULT": "3"}), "cuda").prefault == 3


def test_each_of_several_ranks_has_a_directory_of_its_own_below_the_disk_that_all_are_told_of(plain: Config) -> None:
    told = Config.load(env={"LMCACHE_LOCAL_DISK": "file:///nvme/kv/", "LMCACHE_MAX_LOCAL_DISK_SIZE": "1"})
    assert [of_rank(told, rank, 2).local_disk for rank in range(2)] == ["/nvme/kv/rank-0", "/nvme/kv/rank-1"]
    assert of_rank(told, 1, 2).max_local_disk_size == told.max_local_disk_size
    assert of_rank(told, 0, 1) is told
    assert of_rank(plain, 1, 2) is plain


# kv_role: who only computes for others never asks, who only serves never stores.

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
