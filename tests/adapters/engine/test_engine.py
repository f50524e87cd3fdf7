"""CacheEngine: which prefix it finds, what it stores in which order, and that its trouble is never the engine's."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.stats import LoadPlan
from kvredis.adapters.engine.store import TOUCH_KEY_BYTES, TOUCH_SHARE
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import LayoutError
from tests.adapters.fake_backend import FakeBackend

LAYOUT = ChunkLayout(3, 2, 8, "bf16", model="tiny/llama")
CHUNK = 16


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


def engine_over(backend: FakeBackend, *, unfull: bool = False, layout: ChunkLayout = LAYOUT) -> CacheEngine:
    return CacheEngine(Config(chunk_size=CHUNK, save_unfull_chunk=unfull, blocking_timeout_secs=0.5), layout, backend)


@pytest.fixture
def engine(backend: FakeBackend) -> Iterator[CacheEngine]:
    with engine_over(backend) as made:
        yield made
    assert backend.closed
    assert backend.leases == 0


def kv_of(tokens: int) -> torch.Tensor:
    return torch.randn((3, 2, tokens, 2, 8), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def test_a_stored_prompt_comes_back_bit_by_bit_in_another_engine(backend: FakeBackend) -> None:
    tokens, kv = list(range(100)), kv_of(100)
    assert engine_over(backend).store(tokens, kv) == 96
    other = engine_over(backend)
    assert other.lookup(tokens) == 96
    out = torch.zeros_like(kv)
    assert other.retrieve(tokens, out) == 96
    assert torch.equal(out[:, :, :96], kv[:, :, :96])
    assert not out[:, :, 96:].any()
    assert other.stats.loaded_bytes == 96 * LAYOUT.bytes_per_token


def test_a_changed_token_ends_the_hit_at_its_chunk(engine: CacheEngine) -> None:
    tokens = list(range(64))
    engine.store(tokens, kv_of(64))
    tokens[35] = 999
    assert engine.lookup(tokens) == 32


def test_a_missing_chunk_ends_the_hit_and_the_load(engine: CacheEngine, backend: FakeBackend) -> None:
    tokens, kv = list(range(80)), kv_of(80)
    engine.store(tokens, kv)
    backend.delete([chunk_keys(tokens, engine.layout)[1].key])
    assert engine.lookup(tokens) == 16
    assert engine.retrieve(tokens, torch.zeros_like(kv)) == 16


def test_what_is_stored_already_is_not_stored_again(engine: CacheEngine, backend: FakeBackend) -> None:
    tokens = list(range(96))
    assert engine.store(tokens[:48], kv_of(48)) == 48
    assert engine.store(tokens, kv_of(96)) == 48
    assert engine.store(tokens, kv_of(96)) == 0
    assert len(backend.written) == len(set(backend.written)) == 6


def test_chunks_are_written_tail_first(engine: CacheEngine, backend: FakeBackend) -> None:
    tokens = list(range(64))
    engine.store(tokens, kv_of(64))
    assert backend.written == [chunk.key for chunk in reversed(chunk_keys(tokens, engine.layout))]


@pytest.mark.parametrize("head", [0, 32, 64])
def test_what_a_full_store_keeps_of_a_prompt_is_a_prefix(head: int) -> None:
    backend = FakeBackend(blocks_max=6)
    engine = engine_over(backend, layout=replace(LAYOUT, head_dim=64))
    tokens, kv = list(range(160)), torch.zeros((3, 2, 160, 2, 64), dtype=torch.bfloat16)
    engine.store(tokens[:head], kv)
    engine.store(tokens, kv)
    assert engine.lookup(tokens) == 96
    assert len(backend.values) == 6


def test_another_prompt_takes_the_tail_before_the_head() -> None:
    backend = FakeBackend(blocks_max=6)
    engine = engine_over(backend)
    tokens = list(range(96))
    engine.store(tokens, kv_of(96))
    for taken in range(1, 5):
        engine.store([1000 + taken] * CHUNK, kv_of(CHUNK))
        present = [chunk.key in backend.values for chunk in chunk_keys(tokens, engine.layout)]
        assert present == [True] * (6 - taken) + [False] * taken


def test_the_partial_last_chunk_is_stored_under_a_key_of_its_own_when_asked(backend: FakeBackend) -> None:
    tokens, kv = list(range(1074)), kv_of(1074)
    engine = CacheEngine(Config(chunk_size=256, save_unfull_chunk=True), LAYOUT, backend)
    assert engine.store(tokens, kv) == 1074
    assert len(backend.values) == 5
    assert engine.plan(tokens) == LoadPlan(total=1074, hit=1073, cached=0)
    out = torch.zeros_like(kv)
    assert engine.retrieve(tokens, out, stop=1073) == 1073
    assert torch.equal(out[:, :, :1073], kv[:, :, :1073])
    assert not out[:, :, 1073].any()
    assert engine.lookup([*tokens, 5]) == 1024
    assert CacheEngine(Config(chunk_size=256), LAYOUT, backend).lookup(tokens) == 1024


def test_tokens_that_the_engine_has_are_never_overwritten(engine: CacheEngine) -> None:
    tokens, kv = list(range(64)), kv_of(64)
    engine.store(tokens, kv)
    out = torch.full_like(kv, 7.0)
    assert engine.retrieve(tokens, out, start=21, stop=50) == 50
    assert (out[:, :, :21] == 7).all()
    assert torch.equal(out[:, :, 21:50], kv[:, :, 21:50])
    assert (out[:, :, 50:] == 7).all()
    assert engine.stats.loaded_tokens == 29


@pytest.mark.parametrize(
    ("total", "stored", "cached", "need"),
    [(15410, 15410, 15408, 1), (15410, 15360, 0, 15360), (14900, 14820, 14816, 4), (100, 64, 80, 0), (64, 64, 0, 63)],
)
def test_need_to_load_is_the_hit_less_what_the_engine_has(total: int, stored: int, cached: int, need: int) -> None:
    backend = FakeBackend(2000)
    engine = CacheEngine(Config(chunk_size=20, save_unfull_chunk=True), LAYOUT, backend)
    for chunk in chunk_keys(range(total), engine.layout, unfull=True):
        if chunk.stop <= stored:
            backend.put(chunk.key, b"")
    assert engine.plan(list(range(total)), cached=cached).need_to_load == need


def test_log_lines_are_those_that_people_grep_for(engine: CacheEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvredis")
    tokens, kv = list(range(100)), kv_of(100)
    engine.store(tokens[:32], kv, request="r0")
    engine.store(tokens, kv, request="r1")
    engine.plan(tokens, cached=16, request="r2")
    engine.retrieve(tokens, kv, request="r2")
    lines = [record.getMessage() for record in caplog.records]
    assert "Storing KV cache for 32 out of 32 tokens for request r0" in lines
    assert "Storing KV cache for 64 out of 100 tokens for request r1" in lines
    assert "Reqid: r2, Total tokens 100, LMCache hit tokens: 96, need to load: 80" in lines
    for verb, request in (("Stored", "r1"), ("Retrieved", "r2")):
        speed = rf"{verb} \d+ tokens for request {request}: \d+\.\d+ GB in \d+\.\d+ ms, \d+\.\d+ GB/s"
        assert any(re.fullmatch(speed, line) for line in lines), lines


@pytest.mark.parametrize("damage", ["model", "cut", "garbage", "other tokens"])
def test_a_refused_block_is_a_miss_from_there_on_and_counted(
    engine: CacheEngine, backend: FakeBackend, damage: str
) -> None:
    tokens, kv = list(range(64)), kv_of(64)
    engine.store(tokens, kv)
    third = chunk_keys(tokens, engine.layout)[2].key
    value = backend.values[third]
    backend.values[third] = {
        "model": value.replace(b"tiny/llama", b"tiny/lynx "),
        "cut": value[:-1],
        "garbage": b"not a block",
        "other tokens": value.replace(b'"tokens":"16"', b'"tokens":"15"'),
    }[damage]
    out = torch.zeros_like(kv)
    assert engine.retrieve(tokens, out) == 32
    assert torch.equal(out[:, :, :32], kv[:, :, :32])
    assert engine.stats.refused_blocks == 1
    assert engine.retrieve(tokens[:32], out) == 32, "the engine and its backend stay usable"
    assert third not in backend.values
    assert engine.lookup(tokens) == 32
    assert engine.store(tokens, kv) == 32, "or it would be computed for ever"
    assert engine.retrieve(tokens, out) == 64
    assert torch.equal(out, kv)


def test_a_partial_block_under_a_full_chunks_key_is_refused(backend: FakeBackend) -> None:
    engine = engine_over(backend, unfull=True)
    engine.store(list(range(7)), kv_of(7))
    full = chunk_keys(range(16), engine.layout)[0].key
    backend.values[full] = next(iter(backend.values.values()))
    assert engine.retrieve(list(range(16)), kv_of(16)) == 0
    assert engine.stats.refused_blocks == 1


def test_a_broken_backend_is_a_miss_logged_once_per_spell(
    engine: CacheEngine, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, kv = list(range(64)), kv_of(64)
    engine.store(tokens, kv)
    for spell in (1, 2):
        backend.broken = True
        assert engine.lookup(tokens) == 0
        assert engine.store([9, *tokens], kv_of(65)) == 0
        assert engine.retrieve(tokens, kv) == 0
        assert engine.prefetch(tokens).queued == 0
        backend.broken = False
        assert engine.lookup(tokens) == 64
        assert engine.stats.errors == 4 * spell
        assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == spell


def test_a_prefetch_is_a_job_that_counts_chunks(engine: CacheEngine) -> None:
    job = engine.prefetch(list(range(100)))
    assert (job.tokens, job.queued, job.resident, job.missing, job.no_room, job.refused) == (96, 0, 6, 0, 0, "")
    job.cancel()
    assert job.wait(0)
    assert job.done


def test_a_prefetch_that_fails_or_is_refused_is_done_and_says_so_once(
    engine: CacheEngine, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.refusal = "no memory to keep it in"
    for _ in range(3):
        job = engine.prefetch(list(range(64)))
        assert job.refused == backend.refusal
        assert job.done
    assert caplog.messages == ["KV cache prefetch is refused: no memory to keep it in (said once)"]
    backend.broken = True
    job = engine.prefetch(list(range(64)))
    assert (job.tokens, job.queued, job.resident, job.done, job.wait(0)) == (64, 0, 0, True, True)


def test_a_full_backend_is_counted_and_stores_nothing(engine: CacheEngine, backend: FakeBackend) -> None:
    backend.full = True
    assert engine.store(list(range(64)), kv_of(64)) == 0
    assert engine.stats.refused_stores == 4


def test_what_would_not_be_taken_is_not_copied_first(
    engine: CacheEngine, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(backend, "room", lambda length, at_least: 0)
    monkeypatch.setattr(backend, "reserve", lambda key, length: asked.append(key))
    assert engine.store(list(range(64)), kv_of(64)) == 0
    assert (engine.stats.dropped_stores, engine.stats.refused_stores) == (4, 0)
    assert asked == []


def test_behind_a_long_head_a_few_chunks_are_not_worth_the_touches_and_the_backend_is_told(
    engine: CacheEngine, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def room(length: int, at_least: int) -> int:
        asked.append(at_least)
        return 1 if at_least == 1 else 0

    assert engine.store(list(range(16)), kv_of(16)) == 16
    monkeypatch.setattr(backend, "room", room)
    assert engine.store(list(range(32)), kv_of(32)) == 16
    assert asked == [1]
    assert engine.store(list(range(320)), kv_of(320)) == 0
    assert asked == [1, 1 + 2 * TOUCH_KEY_BYTES * TOUCH_SHARE // engine.layout.chunk_bytes()] == [1, 2]
    assert engine.stats.dropped_stores == 18


def test_chunks_that_did_not_arrive_are_counted_when_a_caller_waits_for_them(
    engine: CacheEngine, backend: FakeBackend
) -> None:
    backend.refused = 1
    assert engine.store(list(range(64)), kv_of(64)) == 64
    assert engine.stats.refused_stores == 0
    assert engine.flush() == 1
    assert engine.flush() == 0
    assert engine.stats.refused_stores == 1
    backend.broken = True
    assert engine.flush() == 0
    assert engine.stats.errors == 1


def test_kv_of_another_layout_is_the_callers_mistake_and_raises(engine: CacheEngine, backend: FakeBackend) -> None:
    tokens = list(range(64))
    for wrong in (kv_of(63), kv_of(64).float(), kv_of(64)[:2]):
        with pytest.raises(LayoutError):
            engine.store(tokens, wrong)
    engine.store(tokens, kv_of(64))
    with pytest.raises(LayoutError):
        engine.retrieve(tokens, kv_of(64).half())
    with pytest.raises(LayoutError):
        engine.retrieve(tokens, kv_of(32))
    assert engine.retrieve(tokens, kv_of(32), stop=32) == 32
    assert engine.stats.errors == engine.stats.refused_blocks == 0


def test_two_layouts_share_a_backend_and_never_see_each_other(backend: FakeBackend) -> None:
    tokens = list(range(64))
    engine_over(backend).store(tokens, kv_of(64))
    assert engine_over(backend, layout=replace(LAYOUT, model="tiny/other")).lookup(tokens) == 0
    assert engine_over(backend, layout=replace(LAYOUT, rank=1, world_size=2)).lookup(tokens) == 0


def test_the_configurations_chunk_size_decides(engine: CacheEngine) -> None:
    assert LAYOUT.chunk_tokens != CHUNK
    assert engine.layout.chunk_tokens == CHUNK


def test_a_prompt_shorter_than_a_chunk_costs_no_round_trip(engine: CacheEngine, backend: FakeBackend) -> None:
    backend.broken = True
    assert engine.lookup([1, 2, 3]) == engine.store([1, 2, 3], kv_of(3)) == engine.retrieve([1, 2, 3], kv_of(3)) == 0
    assert engine.lookup([]) == engine.plan([]).need_to_load == engine.prefetch([]).tokens == 0
    assert engine.stats.errors == 0


def test_stats_count_lookups_and_hits_in_tokens(engine: CacheEngine) -> None:
    tokens = list(range(100))
    engine.lookup(tokens)
    engine.store(tokens, kv_of(100))
    engine.lookup(tokens)
    assert (engine.stats.lookups, engine.stats.lookup_tokens, engine.stats.hit_tokens) == (2, 200, 96)
    assert (engine.stats.stored_tokens, engine.stats.stored_bytes) == (96, 96 * LAYOUT.bytes_per_token)
    assert engine.stats.store_seconds > 0


def test_another_model_has_keys_of_its_own_and_the_first_finds_its_own_again(
    engine: CacheEngine, backend: FakeBackend
) -> None:
    tokens, kv, out = list(range(64)), kv_of(64), torch.zeros(3, 2, 64, 2, 8, dtype=torch.bfloat16)
    engine.store(tokens, kv)
    save = engine.store_later(tokens[:32], kv)
    engine.use_model("tiny/llama+step1")
    assert engine.lookup(tokens) == 0
    assert engine.retrieve(tokens, out) == 0
    engine.store(tokens, kv + 1)
    assert engine.retrieve(tokens, out) == 64
    assert torch.equal(out, kv + 1)
    engine.use_model("tiny/llama")
    assert engine.lookup(tokens) == 64
    assert engine.retrieve(tokens, out) == 64
    assert torch.equal(out, kv)
    assert save.wait(10)
    assert len(backend.values) == 8
