"""CacheEngine with min_retrieve_tokens: only what is worth it is loaded, and a slow tier costs next to nothing."""

import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.stats import LoadPlan
from kvredis.backends.base import Tier
from kvredis.backends.config.schema import Config
from tests.adapters.slow_backend import HUNG, SlowBackend, settle

LAYOUT = ChunkLayout(3, 2, 8, "bf16", model="tiny/llama")
CHUNK = 16
BLOCKS = 32
TOKENS = list(range(CHUNK * BLOCKS + 1))
RATE = 1600.0
CHUNK_S = 0.01
COMPUTE_S = CHUNK_S * BLOCKS


@pytest.fixture
def backend() -> SlowBackend:
    return SlowBackend()


@pytest.fixture
def engine(backend: SlowBackend) -> Iterator[CacheEngine]:
    """An engine with auto that has stored a prompt and knows its prefill rate."""
    with engine_over(backend, "auto") as made:
        made.store(TOKENS, kv_of(len(TOKENS)))
        know_rate(made)
        yield made
        settle()
    assert backend.leases == 0
    assert made.stats.errors == 0
    assert sum(made.stats.tier_tokens.values()) == made.stats.lookup_tokens


def engine_over(backend: SlowBackend, least: int | str, *, unfull: bool = False) -> CacheEngine:
    config = Config(chunk_size=CHUNK, min_retrieve_tokens=least, save_unfull_chunk=unfull)
    return CacheEngine(config, LAYOUT, backend, clock=backend.clock)


def know_rate(engine: CacheEngine) -> None:
    """Tell of passes of every size, without a fixed cost."""
    for tokens in (1, 20, 60, 200, 600):
        for _ in range(2):
            engine.prefill_took(tokens, tokens / RATE)


def kv_of(tokens: int) -> torch.Tensor:
    return torch.randn((3, 2, tokens, 2, 8), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def put_into(backend: SlowBackend, tier: Tier, blocks: range) -> None:
    for place, chunk in enumerate(chunk_keys(TOKENS, ChunkLayout(3, 2, 8, "bf16", CHUNK, "tiny/llama"))):
        if place in blocks:
            backend.where[chunk.key] = tier


def request(engine: CacheEngine, backend: SlowBackend) -> tuple[int, float]:
    """One request: plan, load, check what came. The tokens loaded, and the time that it took."""
    settle()
    began_s, loading = backend.now_s, backend.loaded.copy()
    kv = kv_of(len(TOKENS))
    out = torch.zeros_like(kv)
    plan = engine.plan(TOKENS)
    loaded = engine.retrieve(TOKENS, out, stop=plan.stop) if plan.need_to_load else 0
    took_s = backend.now_s - began_s
    settle()
    assert torch.equal(out[:, :, :loaded], kv[:, :, :loaded])
    assert len(backend.loaded) >= len(loading)
    return loaded, took_s


# ---- auto --------------------------------------------------------------------------------------------------------


def test_a_fast_remote_is_loaded_whole(engine: CacheEngine, backend: SlowBackend) -> None:
    backend.lags_s["remote"] = CHUNK_S / 10
    for _ in range(3):
        assert request(engine, backend)[0] == CHUNK * BLOCKS
    assert engine.stats.skipped_tokens == 0
    trial = [pytest.approx(4 * CHUNK_S), pytest.approx(COMPUTE_S - CHUNK_S)]
    assert backend.bounds == [*trial, *[pytest.approx(COMPUTE_S)] * 2]


def test_a_remote_that_is_slow_from_the_start_costs_one_block_and_then_nothing(
    engine: CacheEngine, backend: SlowBackend
) -> None:
    backend.lags_s["remote"] = CHUNK_S * 4
    loaded, took_s = request(engine, backend)
    assert loaded == CHUNK
    assert took_s == pytest.approx(CHUNK_S * 4)
    assert len(backend.loaded) == 1, "nothing else was asked for"
    for _ in range(10):
        assert engine.plan(TOKENS).need_to_load == 0
    assert engine.stats.skipped_tokens == 11 * CHUNK * BLOCKS - loaded


def test_it_is_used_again_when_it_is_fast_again_without_the_engine_ever_waiting_for_it(
    engine: CacheEngine, backend: SlowBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.lags_s["remote"] = CHUNK_S * 3
    request(engine, backend)
    backend.lags_s["remote"] = CHUNK_S / 10
    loaded, steps = 0, 0
    while not loaded and steps < 10:
        backend.now_s += 5
        engine.plan(TOKENS)
        settle()
        steps += 1
        loaded = request(engine, backend)[0]
    assert loaded == CHUNK * BLOCKS
    assert steps <= 3
    told = [record for record in caplog.records if record.name.endswith("break_even")]
    assert [record.getMessage().split(":")[0] for record in told] == [
        "The remote tier is given up, computing is faster",
        "The remote tier is used again",
    ]


def test_a_remote_that_gets_slow_costs_a_few_blocks_once_and_then_nothing(
    engine: CacheEngine, backend: SlowBackend
) -> None:
    backend.lags_s["remote"] = CHUNK_S / 10
    assert request(engine, backend)[0] == CHUNK * BLOCKS
    backend.lags_s["remote"] = CHUNK_S * 4
    loaded, took_s = request(engine, backend)
    assert 0 < loaded < 4 * CHUNK
    assert took_s < COMPUTE_S / 4
    for _ in range(10):
        assert engine.plan(TOKENS).need_to_load == 0
    assert engine.stats.skipped_tokens == 11 * CHUNK * BLOCKS - loaded


@pytest.mark.parametrize("known", [False, True])
def test_a_remote_that_hangs_costs_a_trial_or_what_computing_costs_and_once(
    engine: CacheEngine, backend: SlowBackend, known: bool
) -> None:
    if known:
        request(engine, backend)
    backend.lags_s["remote"] = HUNG
    loaded, took_s = request(engine, backend)
    assert loaded == 0
    assert took_s == pytest.approx(COMPUTE_S if known else 4 * CHUNK_S)
    for _ in range(5):
        began_s = backend.now_s
        assert engine.plan(TOKENS).need_to_load == 0
        assert engine.retrieve(TOKENS, kv_of(len(TOKENS))) == 0, "also of one who has not asked for a plan"
        settle()
        assert backend.now_s - began_s <= 4 * CHUNK_S + 1e-9, "the probe's, which no caller waits for"


def test_what_is_near_is_loaded_though_the_rest_is_not_worth_it(engine: CacheEngine, backend: SlowBackend) -> None:
    backend.lags_s |= {"memory": CHUNK_S / 20, "remote": CHUNK_S * 4}
    request(engine, backend)
    put_into(backend, "memory", range(10))
    plan = engine.plan(TOKENS)
    assert plan == LoadPlan(len(TOKENS), CHUNK * BLOCKS, 0, CHUNK * (BLOCKS - 10))
    assert (plan.stop, plan.need_to_load) == (160, 160)
    assert request(engine, backend)[0] == 160


def test_what_the_engine_has_itself_is_not_part_of_the_choice(engine: CacheEngine, backend: SlowBackend) -> None:
    backend.lags_s["remote"] = CHUNK_S * 4
    request(engine, backend)
    put_into(backend, "memory", range(20, BLOCKS))
    assert engine.plan(TOKENS).need_to_load == 0
    plan = engine.plan(TOKENS, cached=20 * CHUNK)
    assert (plan.need_to_load, plan.skipped) == (12 * CHUNK, 0)
    plan = engine.plan(TOKENS, cached=BLOCKS * CHUNK)
    assert (plan.need_to_load, plan.skipped) == (0, 0)
    plan = engine.plan(TOKENS, cached=len(TOKENS))
    assert (plan.need_to_load, plan.skipped) == (0, 0)


FIXED_S = 0.2
"""What a pass of a model on a GPU takes however little it computes: as long as 20 chunks of tokens beyond that."""


def served(engine: CacheEngine, backend: SlowBackend, *, first_s: float = 0.0) -> float:
    """One request of a prompt that is stored: load what is worth it, compute the rest, and tell; seconds of all."""
    loaded, load_s = request(engine, backend)
    compute_s = FIXED_S + (len(TOKENS) - loaded) / RATE + first_s
    backend.now_s += compute_s
    engine.prefill_took(len(TOKENS) - loaded, compute_s)
    return load_s + compute_s


@pytest.mark.parametrize("warm_up_s", [0.0, 5.0])
@pytest.mark.parametrize("share", [0.05, 0.5, 1.2, 1.5, 4.0])
def test_a_fresh_process_that_finds_every_prompt_is_no_slower_than_one_without_a_cache(
    backend: SlowBackend, share: float, warm_up_s: float
) -> None:
    engine = engine_over(backend, "auto")
    engine.store(TOKENS, kv_of(len(TOKENS)))
    backend.lags_s["remote"] = CHUNK_S * share
    none_s = FIXED_S + len(TOKENS) / RATE
    took_s = [served(engine, backend, first_s=warm_up_s), *(served(engine, backend) for _ in range(19))]
    if share < 1:
        assert sum(took_s[2:]) < 0.9 * 18 * none_s, "a fast tier is used as soon as two prompts were computed"
        assert engine.break_even.given_up() == []
    else:
        assert engine.stats.loaded_tokens == 0, "it was measured behind the engine's back"
    for requests in (3, 20):
        assert sum(took_s[:requests]) < (requests * none_s + warm_up_s) / 0.97


def test_a_fresh_process_computes_two_prompts_before_it_loads_one(backend: SlowBackend) -> None:
    engine = engine_over(backend, "auto")
    engine.store(TOKENS, kv_of(len(TOKENS)))
    assert request(engine, backend)[0] == 0
    engine.prefill_took(CHUNK + 1, 0.3)
    engine.prefill_took(CHUNK + 1, 0.3)
    assert request(engine, backend)[0] == 0, "a short pass is a fixed cost for the most part"
    engine.prefill_took(len(TOKENS), 9.0)
    assert request(engine, backend)[0] == 0, "the first pass warms up, and is slow"
    engine.prefill_took(len(TOKENS), 0.5)
    backend.lags_s["remote"] = CHUNK_S / 10
    assert request(engine, backend)[0] == CHUNK * BLOCKS
    assert engine.stats.skipped_tokens == 3 * CHUNK * BLOCKS


def test_a_prompt_that_is_served_with_others_is_judged_by_the_pass_over_them_all(backend: SlowBackend) -> None:
    engine, together = engine_over(backend, "auto"), 8
    engine.store(TOKENS, kv_of(len(TOKENS)))
    for _ in range(2):
        engine.prefill_took(1, FIXED_S)
        engine.prefill_took(len(TOKENS), FIXED_S)  # alone most of its tokens cost nothing
        engine.prefill_took(together * len(TOKENS), FIXED_S + together * len(TOKENS) / RATE)
    backend.lags_s["remote"] = CHUNK_S / 5
    out = torch.zeros_like(kv_of(len(TOKENS)))
    for count, worth in ((together, CHUNK * BLOCKS), (1, 0)):
        plan = engine.plan(TOKENS, together=count)
        assert plan.need_to_load == worth
        assert engine.retrieve(TOKENS, out, stop=plan.stop, together=count) == worth
    load = engine.retrieve_later(TOKENS, out, together=together)
    assert load.wait(10)
    assert load.tokens == CHUNK * BLOCKS
    engine.close()


def test_an_engine_that_never_tells_how_fast_it_is_gets_everything_after_a_while(backend: SlowBackend) -> None:
    engine = engine_over(backend, "auto")
    engine.store(TOKENS, kv_of(len(TOKENS)))
    loaded = [request(engine, backend)[0] for _ in range(6)]
    assert loaded == [0] * 4 + [CHUNK * BLOCKS] * 2


def test_a_prompt_of_which_nothing_is_stored_counts_as_no_question(backend: SlowBackend) -> None:
    engine = engine_over(backend, "auto")
    for _ in range(6):
        assert engine.plan(TOKENS).skipped == 0
    engine.store(TOKENS, kv_of(len(TOKENS)))
    assert engine.plan(TOKENS).need_to_load == 0


def test_the_choice_is_in_the_log_line_with_the_hit(
    engine: CacheEngine, backend: SlowBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.lags_s["remote"] = CHUNK_S * 4
    request(engine, backend)
    put_into(backend, "memory", range(10))
    caplog.set_level(logging.INFO, "kvredis")
    caplog.clear()
    engine.plan(TOKENS, request="r7")
    line = "Reqid: r7, Total tokens 513, LMCache hit tokens: 512, need to load: 160; the other 352 are computed"
    assert caplog.messages[0] == line


def test_a_probe_comes_from_what_lookups_have_found(engine: CacheEngine, backend: SlowBackend) -> None:
    backend.lags_s["remote"] = CHUNK_S * 4
    request(engine, backend)
    backend.now_s += 100
    backend.loaded.clear()
    for _ in range(3):
        engine.plan(TOKENS)
        settle()
        backend.now_s += 100
    assert len(backend.loaded) == 3
    assert set(backend.loaded) <= set(backend.values)


def test_closing_ends_the_probe_under_way(backend: SlowBackend) -> None:
    engine = engine_over(backend, "auto")
    engine.store(TOKENS, kv_of(len(TOKENS)))
    know_rate(engine)
    backend.lags_s["remote"] = CHUNK_S * 4
    request(engine, backend)
    backend.now_s += 100
    engine.plan(TOKENS)
    engine.close()
    assert backend.closed
    assert not [thread for thread in threading.enumerate() if thread.name == "kvredis probe"]


# ---- a number ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "need"), [(0, 512), (512, 512), (513, 0)])
def test_below_min_retrieve_tokens_nothing_is_loaded(backend: SlowBackend, least: int, need: int) -> None:
    engine = engine_over(backend, least)
    engine.store(TOKENS, kv_of(len(TOKENS)))
    plan = engine.plan(TOKENS)
    assert (plan.hit, plan.need_to_load, plan.stop) == (512, need, need)
    assert engine.stats.skipped_tokens == 512 - need
    assert engine.stats.hit_tokens == 512


def test_what_counts_is_what_would_be_loaded_not_what_was_found(backend: SlowBackend) -> None:
    engine = engine_over(backend, 100)
    engine.store(TOKENS, kv_of(len(TOKENS)))
    assert engine.plan(TOKENS, cached=412).need_to_load == 100
    plan = engine.plan(TOKENS, cached=413)
    assert (plan.need_to_load, plan.skipped) == (0, 99)
    assert engine.plan(TOKENS, cached=513).skipped == 0


def test_what_was_not_loaded_is_said_to_be_needed_as_lmcache_does_and_is_not_stored_again(
    backend: SlowBackend, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_over(backend, 1000)
    engine.store(TOKENS, kv_of(len(TOKENS)))
    written = len(backend.written)
    caplog.set_level(logging.INFO, "kvredis")
    engine.plan(TOKENS, request="r1")
    assert caplog.messages[-1] == (
        "Reqid: r1, Total tokens 513, LMCache hit tokens: 512, need to load: 512 < min_retrieve 1000, nothing is loaded"
    )
    assert engine.store(TOKENS, kv_of(len(TOKENS))) == 0
    assert len(backend.written) == written


# ---- where tokens are --------------------------------------------------------------------------------------------


def test_the_tokens_of_every_lookup_are_counted_once_by_tier(backend: SlowBackend) -> None:
    engine = engine_over(backend, 0)
    kv = kv_of(len(TOKENS))
    engine.store(TOKENS, kv)
    put_into(backend, "memory", range(10))
    put_into(backend, "disk", range(10, 20))
    tiers = engine.stats.tier_tokens
    engine.lookup(TOKENS)
    assert tiers == {"engine": 0, "memory": 160, "disk": 160, "remote": 192, "miss": 1}
    engine.plan(TOKENS, cached=200)
    assert tiers == {"engine": 200, "memory": 160, "disk": 280, "remote": 384, "miss": 2}
    engine.plan(TOKENS, cached=513)
    assert tiers == {"engine": 713, "memory": 160, "disk": 280, "remote": 384, "miss": 2}
    engine.plan([*TOKENS[:100], *range(900, 1000)], cached=50)
    assert tiers == {"engine": 763, "memory": 206, "disk": 280, "remote": 384, "miss": 106}
    assert sum(tiers.values()) == engine.stats.lookup_tokens == 513 * 3 + 200
    backend.broken = True
    engine.plan(TOKENS, cached=13)
    engine.lookup([1, 2])
    assert sum(tiers.values()) == engine.stats.lookup_tokens
    assert tiers["miss"] == 106 + 500 + 2
