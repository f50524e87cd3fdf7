"""generate() with and without the store: equal tokens whatever the hit is, and a clear no to what would be wrong."""

import gc
import logging
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from kvredis.adapters.engine.config import Role
from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.transformers.cache import CACHE, RoomyLayer, attention_layers, keys_and_values, token_major
from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import ConfigError
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.tiny_models import tiny
from tests.gate import nightly

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNK = 16


@pytest.fixture(scope="module", params=["llama", nightly("qwen2")])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny("llama")


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 512, (1, tokens), generator=torch.Generator().manual_seed(seed))


def cached_over(
    model: PreTrainedModel, backend: FakeBackend, *, unfull: bool = False, decode: bool = False
) -> CachedModel:
    config = Config(chunk_size=CHUNK, save_unfull_chunk=unfull, save_decode_cache=decode)
    return CachedModel(model, CacheEngine(config, layout_of(model, "tiny"), backend))


def greedy(model: Any, ids: torch.Tensor, **options: Any) -> list[int]:
    result = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
    assert isinstance(result, torch.Tensor)
    return [int(token) for token in result[0]]


@pytest.mark.parametrize(
    ("tokens", "unfull", "loaded"),
    [(100, False, 96), (100, True, 99), (96, False, 95), (96, True, 95), (15, False, 0), (15, True, 14), (1, True, 0)],
)
def test_a_second_process_generates_the_same_tokens_from_the_store(
    model: PreTrainedModel, tokens: int, unfull: bool, loaded: int
) -> None:
    backend, ids = FakeBackend(), prompt(tokens)
    expected = greedy(model, ids)
    cold, warm = (cached_over(model, backend, unfull=unfull) for _ in range(2))
    assert greedy(cold, ids) == expected
    assert cold.last_loaded == 0
    written = len(backend.written)
    assert greedy(warm, ids) == expected
    assert warm.last_loaded == loaded
    assert len(backend.written) == written, "the second run stores nothing"


def test_a_prefix_shared_with_another_prompt_is_loaded_up_to_the_difference(model: PreTrainedModel) -> None:
    backend = FakeBackend()
    greedy(cached_over(model, backend), prompt(100))
    longer = torch.cat([prompt(70), prompt(50, seed=1)], dim=1)
    warm = cached_over(model, backend)
    assert greedy(warm, longer) == greedy(model, longer)
    assert warm.last_loaded == 64


def test_the_last_tokens_logits_are_those_without_the_store(model: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(100)
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    runs = [cached_over(model, backend, unfull=True).generate(ids, **options).logits[0] for _ in range(2)]
    assert (runs[0] - runs[1]).abs().max() < 1e-4, "float32, other kernels for one token than for a hundred"


def test_bfloat16_logits_stay_within_their_rounding(llama: PreTrainedModel) -> None:
    model: Any = tiny("llama")
    model.to(torch.bfloat16)
    backend, ids = FakeBackend(), prompt(100)
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    cold, warm = (cached_over(model, backend).generate(ids, **options).logits[0] for _ in range(2))
    assert cached_over(model, backend).engine.layout.dtype == "bf16"
    assert (cold - warm).abs().max() <= 0.02 * cold.abs().max()


@pytest.mark.parametrize("own", [5, 16, 40, 96, 99])
def test_what_the_engine_has_is_kept_and_only_the_rest_is_loaded(llama: PreTrainedModel, own: int) -> None:
    backend, ids = FakeBackend(), prompt(100)
    expected = greedy(cached_over(llama, backend), ids)
    past = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(ids[:, :own], **{CACHE: past})
    before = [keys.clone() for keys, _ in token_major(past)]
    warm = cached_over(llama, backend)
    assert greedy(warm, ids, **{CACHE: past}) == expected
    assert warm.last_loaded == warm.last_plan.need_to_load == max(96 - own, 0)
    for (after, _), keys in zip(token_major(past), before, strict=True):
        assert torch.equal(after[:own], keys)


def test_a_chunk_lost_between_lookup_and_load_is_recomputed(llama: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(100)
    expected = greedy(cached_over(llama, backend), ids)
    third = backend.written[3]  # six chunks, tail first
    warm = cached_over(llama, backend)
    backend.values[third] = b"damaged"
    assert greedy(warm, ids) == expected
    assert (warm.last_plan.need_to_load, warm.last_loaded) == (96, 32)
    first = backend.written[5]
    backend.values[first] = b"damaged"
    assert greedy(warm, ids) == expected
    assert warm.last_loaded == 0


def test_memory_of_caches_that_are_gone_serves_the_next_and_no_cache_that_is_kept(llama: PreTrainedModel) -> None:
    cached = cached_over(llama, FakeBackend())
    prompts = [prompt(400, seed) for seed in range(3)]
    right = [greedy(llama, ids) for ids in prompts]

    def asked(number: int) -> Any:
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        made = cached.generate(prompts[number], return_dict_in_generate=True, **options)
        assert made.sequences[0].tolist() == right[number]
        return made

    kept = keys_and_values(attention_layers(made_cache(asked(0)))[0])[0]
    before = kept.clone()
    for number in (1, 2, 1, 0):  # computed, and loaded: what was there before shows nowhere
        gc.collect()
        asked(number)
    assert torch.equal(kept, before)  # its caller has it still


def made_cache(made: Any) -> Any:
    """The cache in a result of generate(), by the name that this transformers has for it."""
    return getattr(made, CACHE)


def test_a_roomy_layer_grows_in_place_and_falls_back_to_its_parents_ways() -> None:
    kv = torch.randn(2, 1, 2, 9, 4)
    new = torch.randn(2, 1, 2, 1, 4)

    def same_as_plain(layer: RoomyLayer, plain: DynamicLayer, update: torch.Tensor) -> bool:
        pairs = zip(layer.update(*update), plain.update(*update), strict=True)
        return (
            all(torch.equal(left, right) for left, right in pairs) and layer.get_seq_length() == plain.get_seq_length()
        )

    room = kv.clone()
    layer, plain = RoomyLayer(room[0], room[1], 6), DynamicLayer()  # type: ignore[no-untyped-call]
    plain.update(*kv[:, :, :, :6])
    for _ in range(2):
        assert same_as_plain(layer, plain, new)
    assert keys_and_values(layer)[0].data_ptr() == room.data_ptr(), "in place"
    for cache in (layer, plain):
        cache.crop(-3)
    assert same_as_plain(layer, plain, new[..., :])
    for _ in range(4):
        assert same_as_plain(layer, plain, new)  # past the end of the room
    assert layer.get_seq_length() == 10
    for cache in (layer, plain):
        cache.crop(-8)
        cache.reorder_cache(torch.LongTensor([0]))
    assert same_as_plain(layer, plain, new)
    for cache in (layer, plain):
        cache.reset()
    assert layer.get_seq_length() == plain.get_seq_length(), "older versions keep the length"
    assert same_as_plain(layer, plain, kv[:, :, :, :3])


def test_a_conversation_goes_on_with_the_cache_that_generate_returned(llama: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(100)
    cached = cached_over(llama, backend)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    first = cached.generate(ids, return_dict_in_generate=True, **options)
    longer = torch.cat([first.sequences, prompt(60, seed=2)], dim=1)
    expected = greedy(llama, longer)
    assert greedy(cached, longer, **{CACHE: first[CACHE]}) == expected
    assert cached.last_plan.cached == 107
    assert cached.last_loaded == 0
    again = cached_over(llama, backend)
    assert greedy(again, longer) == expected
    assert again.last_loaded == 160


@pytest.mark.parametrize("new_tokens", [1, 4], ids="answered={}".format)
def test_a_prompt_that_is_asked_again_with_its_whole_cache_stores_nothing_wrong(
    llama: PreTrainedModel, new_tokens: int
) -> None:
    backend, ids, past = FakeBackend(), prompt(60), DynamicCache(config=llama.config)
    cached = cached_over(llama, backend, decode=True)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached.generate(ids, past_key_values=past, max_new_tokens=new_tokens, **options)
    assert past.get_seq_length() >= 60
    again = cached.generate(ids, past_key_values=past, max_new_tokens=20, **options)
    further = torch.cat([again, prompt(5, seed=1)], dim=1)
    assert greedy(cached_over(llama, backend), further) == greedy(llama, further)


@pytest.mark.parametrize(("unfull", "again", "next_turn"), [(False, 96, 112), (True, 99, 112)])
def test_generated_tokens_are_stored_too_when_asked_and_the_next_turn_loads_them(
    model: PreTrainedModel, unfull: bool, again: int, next_turn: int
) -> None:
    backend, ids = FakeBackend(), prompt(100)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    first = cached_over(model, backend, unfull=unfull, decode=True).generate(ids, **options)
    assert first.shape[1] == 120
    longer = torch.cat([first, prompt(30, seed=5)], dim=1)
    expected, plain = greedy(model, longer), greedy(model, ids)
    warm = cached_over(model, backend, unfull=unfull, decode=True)
    assert greedy(warm, longer) == expected
    assert warm.last_loaded == next_turn
    warm = cached_over(model, backend, unfull=unfull, decode=True)
    assert greedy(warm, ids) == plain
    assert warm.last_loaded == again, "the prompt by itself is there as well"


def test_without_being_asked_only_the_prompt_is_stored_and_else_all_that_was_computed(llama: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(96)
    greedy(cached_over(llama, backend), ids)
    assert len(backend.values) == 6
    backend = FakeBackend()
    result = cached_over(llama, backend, decode=True).generate(
        ids, max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True
    )
    assert len(backend.values) == (96 + 40 - 1) // CHUNK
    past = result[CACHE]
    stored = CacheEngine(Config(chunk_size=CHUNK), layout_of(llama, "tiny"), backend)
    out = torch.zeros(3, 2, 135, 2, 16)
    assert stored.retrieve(result.sequences[0], out) == 128
    for loaded, (keys, values) in zip(out, token_major(past), strict=True):
        assert torch.equal(loaded[0, :128], keys[:128])
        assert torch.equal(loaded[1, :128], values[:128])


@pytest.mark.parametrize(("role", "stored", "loaded"), [("kv_producer", 6, 0), ("kv_consumer", 0, 0)])
def test_a_role_is_kept_and_the_tokens_are_the_same(
    llama: PreTrainedModel, role: Role, stored: int, loaded: int
) -> None:
    backend, ids = FakeBackend(), prompt(100)
    engine = CacheEngine(Config(chunk_size=CHUNK), layout_of(llama, "tiny"), backend, role=role)
    cached = CachedModel(llama, engine)
    expected = greedy(llama, ids)
    for _ in range(2):
        assert greedy(cached, ids) == expected
        assert (len(backend.values), cached.last_loaded) == (stored, loaded)


def test_a_model_opened_with_a_role_has_it(llama: PreTrainedModel) -> None:
    config = Config.load(env={}, overrides={"max_local_cpu_size": "4MB", "hugepages": "off"})
    cached = CachedModel.open(llama, config, "tiny", kv_role="kv_consumer")
    assert cached.engine.role == "kv_consumer"
    cached.close()
    with pytest.raises(ConfigError, match="kv_role"):
        CachedModel.open(llama, config, "tiny", kv_role="kv_nobody")  # type: ignore[arg-type]


def test_generation_goes_on_without_the_store(llama: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    backend, ids = FakeBackend(), prompt(100)
    backend.broken = True
    assert greedy(cached_over(llama, backend), ids) == greedy(llama, ids)
    assert [record for record in caplog.records if record.levelno == logging.WARNING]


def test_tokens_stream_as_they_come(llama: PreTrainedModel) -> None:
    class Collector:
        def __init__(self) -> None:
            self.puts: list[list[int]] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.puts.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    backend, ids = FakeBackend(), prompt(100)
    cached = cached_over(llama, backend)
    for _ in range(2):
        streamer = Collector()
        full = greedy(cached, ids, streamer=streamer)
        assert streamer.puts == [full[:100], *([token] for token in full[100:])]
        assert streamer.ended


@pytest.mark.parametrize(
    ("ids", "options", "text"),
    [
        (torch.zeros(8, dtype=torch.long), {}, "must be"),
        (prompt(8), {"num_beams": 2}, "num_beams is 2"),
        (prompt(8), {"num_return_sequences": 3}, "num_return_sequences is 3"),
        (prompt(8), {"attention_mask": torch.tensor([[1] * 7 + [0]])}, "on the left"),
        (prompt(8), {"attention_mask": torch.tensor([[0] * 8])}, "on the left"),
        (prompt(8), {"attention_mask": torch.tensor([[1] * 9])}, "attention_mask is"),
        (prompt(8), {"inputs_embeds": torch.zeros(1, 8, 64)}, "inputs_embeds"),
        (prompt(8), {"pixel_values": torch.zeros(1, 3, 8, 8)}, "pixel_values"),
        (prompt(8), {"token_type_ids": torch.ones(1, 8)}, "token_type_ids"),
    ],
)
def test_what_keys_do_not_name_is_refused(
    llama: PreTrainedModel, ids: torch.Tensor, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        greedy(cached_over(llama, FakeBackend()), ids, **options)


def test_a_cache_is_given_by_transformers_new_word_or_the_old_one_and_not_by_both(llama: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(100)
    expected = greedy(cached_over(llama, backend), ids)
    for word in ("past_key_values", "cache"):
        past = DynamicCache(config=llama.config)
        with torch.no_grad():
            llama(ids[:, :40], **{CACHE: past})
        warm = cached_over(llama, backend)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*past_key_values", FutureWarning)  # this version may have given it up
            assert greedy(warm, ids, **{word: past}) == expected
        assert warm.last_loaded == 56
        assert past.get_seq_length() == 107, "it is the one that was given"
    with pytest.raises(ValueError, match="give one"):
        greedy(cached_over(llama, backend), ids, past_key_values=past, cache=past)


@pytest.mark.parametrize("where", ["option", "given", "model"])
def test_without_a_cache_nothing_is_loaded_or_stored_and_none_of_ours_is_passed_on(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, ids, llama = FakeBackend(), prompt(60), tiny("llama")
    cached = cached_over(llama, backend)
    greedy(cached, ids)
    backend.written.clear()
    options: dict[str, Any] = {}
    made: Any = GenerationConfig
    if where == "option":
        options = {"use_cache": False}
    elif where == "given":
        options = {"generation_config": made(use_cache=False)}
    else:
        llama.generation_config.use_cache = False
    expected = greedy(llama, ids, **options)
    caches: list[Any] = []
    forward = llama.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        caches.append(kwargs.get(CACHE))
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(llama, "forward", watched)
        assert greedy(cached, ids, **options) == expected
    assert caches == [None] * 8
    assert (cached.last_loaded, cached.last_plan.hit, cached.last_plan.total) == (0, 0, 60)
    assert backend.written == []
    if where != "model":
        greedy(cached, ids)
        assert cached.last_loaded == 48, "the next call is as usual"


def test_a_cache_of_another_kind_is_refused(llama: PreTrainedModel) -> None:
    static = StaticCache(config=llama.config, max_cache_len=32)
    with pytest.raises(ValueError, match="StaticLayer"):
        greedy(cached_over(llama, FakeBackend()), prompt(8), **{CACHE: static})


@pytest.mark.parametrize("kind", [nightly("llama"), "gemma3"])
def test_calls_of_a_thread_pool_give_each_prompt_its_own_tokens(kind: str) -> None:
    model, backend = tiny(kind), FakeBackend()
    shapes = ((1, 20), (1, 200), (2, 50), (3, 130), (1, 64), (1, 17))
    prompts = [prompt(tokens, seed).expand(rows, -1) for seed, (rows, tokens) in enumerate(shapes)]
    expected = [greedy(model, ids) for ids in prompts]
    cached = CachedModel(model, CacheEngine(Config(chunk_size=CHUNK), layout_of(model, "tiny"), backend), behind=True)
    order = [(first + step) % len(prompts) for first in range(6) for step in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change within a call
    try:
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda place: greedy(cached, prompts[place]), order))
    finally:
        sys.setswitchinterval(interval)
    assert found == [expected[place] for place in order]
    cached.close()
    assert cached.engine.stats.loaded_tokens > 0


def test_models_that_would_be_wrong_silently_are_refused_by_name() -> None:
    chunked = tiny("llama")
    chunked.config.layer_types = ["chunked_attention"] * 3
    chunked.config.attention_chunk_size = chunked.config.sliding_window = 32
    with pytest.raises(ValueError, match="chunked_attention"):
        layout_of(chunked, "tiny")
    with pytest.raises(ValueError, match="needs a name"):
        layout_of(tiny("llama"))


def test_the_layout_is_read_off_the_model(llama: PreTrainedModel) -> None:
    layout = layout_of(llama, "tiny", 32)
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (3, 2, 16, "fp32")
    assert layout.chunk_tokens == 32
    assert re.fullmatch(r"tiny\+[0-9a-f]{16}", layout.model)
    cache = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(prompt(8), **{CACHE: cache})
    views = token_major(cache)
    assert views[2][1].shape == (8, 2, 16)
    assert views[2][1].data_ptr() == keys_and_values(attention_layers(cache)[2])[1].data_ptr()
