"""generate() over models that forget: windows and states are restored so that no token differs, whatever the hit is."""

import hashlib
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.transformers import state
from kvredis.adapters.transformers.cache import (
    CACHE,
    RoomyWindow,
    attention_layers,
    kept_tokens,
    keys_and_values,
    token_major,
)
from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.backends.config.schema import Config
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.tiny_models import LINEAR, WINDOWS, tiny
from tests.gate import nightly

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNK = 16
HAS_STATES = hasattr(transformers.cache_utils, "LinearAttentionLayer")


@pytest.fixture(scope="module", params=[kind if kind == "gemma3" else nightly(kind) for kind in WINDOWS])
def windowed(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


@pytest.fixture(scope="module", params=[kind if kind == "qwen3-next" else nightly(kind) for kind in LINEAR])
def linear(request: pytest.FixtureRequest) -> PreTrainedModel:
    if not HAS_STATES:
        with pytest.raises(ValueError, match="not supported with this transformers"):
            layout_of(tiny(request.param), "tiny")
        pytest.skip("this transformers keeps states in caches of the models' own, which are refused")
    return tiny(request.param)


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 512, (1, tokens), generator=torch.Generator().manual_seed(seed))


def cached_over(model: PreTrainedModel, backend: FakeBackend, **settings: Any) -> CachedModel:
    return CachedModel(model, CacheEngine(Config(chunk_size=CHUNK, **settings), layout_of(model, "tiny"), backend))


def greedy(model: Any, ids: torch.Tensor, new_tokens: int = 8, **options: Any) -> list[list[int]]:
    result = model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None, **options
    )
    assert isinstance(result, torch.Tensor)
    return [[int(token) for token in row] for row in result]


def first_logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options |= {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    logits = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits


@pytest.mark.parametrize(
    ("tokens", "unfull", "loaded"),
    [(100, True, 99), (21, False, 16), nightly(100, False, 96), nightly(33, False, 32), nightly(9, True, 8)],
)
def test_windows_are_restored_wherever_the_prefix_ends(
    windowed: PreTrainedModel, tokens: int, unfull: bool, loaded: int
) -> None:
    backend, ids = FakeBackend(), prompt(tokens)
    expected = greedy(windowed, ids, 40)  # more than a window of new tokens
    assert greedy(cached_over(windowed, backend, save_unfull_chunk=unfull), ids, 40) == expected
    warm = cached_over(windowed, backend, save_unfull_chunk=unfull)
    assert greedy(warm, ids, 40) == expected
    assert warm.last_loaded == loaded


def test_any_shorter_prefix_can_be_restored_though_windows_have_left_it_behind(windowed: PreTrainedModel) -> None:
    backend = FakeBackend()
    greedy(cached_over(windowed, backend), prompt(200))
    for shared in (20, 40, 77, 150):
        ids = torch.cat([prompt(200)[:, :shared], prompt(30, seed=shared)], dim=1)
        warm = cached_over(windowed, backend)
        assert greedy(warm, ids) == greedy(windowed, ids)
        assert warm.last_loaded == shared // CHUNK * CHUNK


def test_with_windows_the_last_tokens_logits_are_those_without_the_store(windowed: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(100)
    plain = first_logits(windowed, ids)
    for _ in range(2):
        assert (first_logits(cached_over(windowed, backend), ids) - plain).abs().max() < 1e-4


def test_a_cache_with_windows_is_what_transformers_own_would_be(windowed: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(100)
    greedy(cached_over(windowed, backend), ids)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ours = cached_over(windowed, backend).generate(ids, return_dict_in_generate=True, **options)[CACHE]
    own = DynamicCache(config=windowed.config)
    plain: Any = windowed
    plain.generate(ids, **{CACHE: own}, **options)
    assert ours.get_seq_length() == own.get_seq_length() == 107
    pairs = list(zip(attention_layers(ours), attention_layers(own), strict=True))
    assert any(isinstance(layer, RoomyWindow) for layer, _ in pairs)
    for left, right in pairs:
        for mine, theirs in zip(keys_and_values(left), keys_and_values(right), strict=True):
            assert (mine - theirs).abs().max() < 1e-4
    assert kept_tokens(ours) == 107
    assert kept_tokens(own) == (
        107 if not any(isinstance(right, DynamicSlidingWindowLayer) for _, right in pairs) else 0
    )


def test_a_conversation_goes_on_with_the_cache_and_its_windows(windowed: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(100)
    cached = cached_over(windowed, backend)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    first = cached.generate(ids, return_dict_in_generate=True, **options)
    longer = torch.cat([first.sequences, prompt(60, seed=2)], dim=1)
    expected = greedy(windowed, longer)
    assert greedy(cached, longer, **{CACHE: first[CACHE]}) == expected
    assert (cached.last_plan.cached, cached.last_loaded) == (107, 0)
    again = cached_over(windowed, backend)
    assert greedy(again, longer) == expected
    assert again.last_loaded == 160, "what the windows had left behind was stored as well"


def test_a_cache_whose_windows_have_forgotten_serves_as_it_is_and_stores_nothing(windowed: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(100)
    own: Any = DynamicCache(config=windowed.config)
    with torch.no_grad():
        windowed(ids[:, :60], **{CACHE: own})
    cached = cached_over(windowed, backend)
    assert greedy(cached, ids, **{CACHE: own}) == greedy(windowed, ids)
    assert (cached.last_loaded, backend.written) == (0, [])


def test_a_window_in_its_room_grows_crops_and_falls_back_as_its_parent_does() -> None:
    kv, window = torch.randn(2, 1, 2, 40, 4), 8
    layer, plain = (
        RoomyWindow(kv[0].clone(), kv[1].clone(), 30, window),
        DynamicSlidingWindowLayer(sliding_window=window),
    )
    plain.update(*kv[:, :, :, :30])

    def same(update: torch.Tensor) -> bool:
        pairs = zip(layer.update(*update), plain.update(*update), strict=True)
        is_same = all(torch.equal(left, right) for left, right in pairs)
        return is_same and layer.get_seq_length() == plain.get_seq_length()

    assert same(kv[:, :, :, 30:33])
    assert same(kv[:, :, :, 33:34])
    assert (layer.in_place, layer.kept) == (True, 34)
    assert same(kv[:, :, :, :9]), "past the end of the room"
    assert (layer.in_place, layer.kept) == (False, 34)
    assert torch.equal(layer.room[0], kv[0, :, :, :34]), "what was there is there"
    assert same(kv[:, :, :, :1])
    layer = RoomyWindow(kv[0].clone(), kv[1].clone(), 30, window)
    layer.crop(-7)
    assert (layer.get_seq_length(), layer.kept) == (23, 23)
    assert torch.equal(keys_and_values(layer)[0], kv[0, :, :, 16:23])
    assert torch.equal(layer.update(*kv[:, :, :, 23:24])[0], kv[0, :, :, 16:24])
    layer.reorder_cache(torch.LongTensor([0]))
    assert (layer.in_place, layer.kept) == (False, 0)


# -- several prompts at once -----------------------------------------------------------------------------------------


def batch(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on the left, and their mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])
    return ids, mask


@pytest.mark.parametrize("kind", ["llama", "gemma3", *map(nightly, ("mistral", "qwen2-windows"))])
def test_a_batch_of_several_lengths_gives_each_prompt_its_tokens_cold_and_warm(kind: str) -> None:
    model, backend = tiny(kind), FakeBackend()
    ids, mask = batch(prompt(100), prompt(63, seed=1), prompt(21, seed=2))
    expected = greedy(model, ids, attention_mask=mask)
    assert greedy(cached_over(model, backend), ids, attention_mask=mask) == expected
    warm = cached_over(model, backend)
    assert greedy(warm, ids, attention_mask=mask) == expected
    assert [plan.hit for plan in warm.last_plans] == [96, 48, 16]
    # the second prompt's hit ends at column 37 + 48, the first's at 96, the third's at 79 + 16
    assert warm.last_loaded == 85 + 48 + (85 - 79)
    difference = first_logits(warm, ids, attention_mask=mask) - first_logits(model, ids, attention_mask=mask)
    assert difference.abs().max() < 1e-4


def test_what_a_batch_stored_serves_a_prompt_alone_and_the_other_way_round() -> None:
    model, backend = tiny("llama"), FakeBackend()
    rows = [prompt(100), prompt(63, seed=1)]
    ids, mask = batch(*rows)
    greedy(cached_over(model, backend), ids, attention_mask=mask)
    for row, loaded in zip(rows, (96, 48), strict=True):
        alone = cached_over(model, backend)
        assert greedy(alone, row) == greedy(model, row)
        assert alone.last_loaded == loaded
    backend = FakeBackend()
    for row in rows:
        greedy(cached_over(model, backend), row)
    together = cached_over(model, backend)
    assert greedy(together, ids, attention_mask=mask) == greedy(model, ids, attention_mask=mask)
    assert together.last_loaded == 85 + 48


def test_a_batch_of_equal_prompts_stores_them_once() -> None:
    model, backend = tiny("llama"), FakeBackend()
    ids = prompt(100).expand(3, -1)
    assert greedy(cached_over(model, backend), ids) == greedy(model, ids)
    assert len(backend.written) == 6
    warm = cached_over(model, backend, save_unfull_chunk=True)
    assert greedy(warm, ids) == greedy(model, ids)
    assert warm.last_loaded == 3 * 96


def test_one_new_prompt_makes_its_batch_compute(windowed: PreTrainedModel) -> None:
    backend = FakeBackend()
    greedy(cached_over(windowed, backend), prompt(100))
    ids, mask = batch(prompt(100), prompt(60, seed=9))
    mixed = cached_over(windowed, backend)
    assert greedy(mixed, ids, attention_mask=mask) == greedy(windowed, ids, attention_mask=mask)
    assert mixed.last_loaded == 40, "as far as the other's padding"


def test_a_chunk_that_one_row_of_a_batch_lost_is_computed_for_all() -> None:
    model, backend = tiny("llama"), FakeBackend()
    ids, mask = batch(prompt(100), prompt(63, seed=1))
    expected = greedy(cached_over(model, backend), ids, attention_mask=mask)
    backend.values[backend.written[-2]] = b"damaged"  # the second chunk of the last row, which is stored tail first
    warm = cached_over(model, backend)
    assert greedy(warm, ids, attention_mask=mask) == expected
    assert warm.last_loaded == (37 + 16) + 16


def test_a_batch_goes_on_with_its_cache_and_stores_the_generated_tokens() -> None:
    model, backend = tiny("llama"), FakeBackend()
    ids, mask = batch(prompt(50), prompt(33, seed=1))
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = cached_over(model, backend, save_decode_cache=True)
    first = cached.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
    longer = torch.cat([first.sequences, prompt(30, seed=5).expand(2, -1)], dim=1)
    wider = torch.cat([mask, torch.ones(2, 50, dtype=mask.dtype)], dim=1)
    expected = greedy(model, longer, attention_mask=wider)
    past = first[CACHE]
    assert greedy(cached, longer, attention_mask=wider, **{CACHE: past}) == expected
    again = cached_over(model, backend)
    assert greedy(again, longer, attention_mask=wider) == expected
    assert [plan.hit for plan in again.last_plans] == [96, 80]


# -- linear attention ------------------------------------------------------------------------------------------------


def test_a_state_is_restored_at_the_last_whole_chunk(linear: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(100)
    expected = greedy(linear, ids, 20)
    cold, warm = (cached_over(linear, backend) for _ in range(2))
    assert greedy(cold, ids, 20) == expected
    assert len(backend.written) == 6 + 1
    assert greedy(warm, ids, 20) == expected
    assert warm.last_loaded == 96
    assert len(backend.written) == 7, "the second run stores nothing"
    longer = torch.cat([ids, prompt(60, seed=1)], dim=1)
    turn = cached_over(linear, backend)
    assert greedy(turn, longer) == greedy(linear, longer)
    assert turn.last_loaded == 96
    assert (first_logits(cached_over(linear, backend), ids) - first_logits(linear, ids)).abs().max() < 1e-3


def test_a_prefix_without_a_state_is_computed_once_and_has_one_then(linear: PreTrainedModel) -> None:
    backend = FakeBackend()
    greedy(cached_over(linear, backend), prompt(100))
    for seed, loaded in ((1, 0), (2, 48), (3, 48)):
        ids = torch.cat([prompt(60)[:, :50], prompt(40, seed=seed)], dim=1)
        warm = cached_over(linear, backend)
        assert greedy(warm, ids) == greedy(linear, ids)
        assert (warm.last_plan.hit, warm.last_loaded) == (48, loaded)


@pytest.mark.parametrize("which", ["state", "kv", "both gone", "a bit of the state"])
def test_a_state_or_kv_that_is_damaged_is_a_miss_and_stored_again(linear: PreTrainedModel, which: str) -> None:
    backend, ids = FakeBackend(), prompt(100)
    expected = greedy(cached_over(linear, backend), ids)
    state, second, sound = backend.written[-1], backend.written[-3], dict(backend.values)
    if which == "both gone":
        backend.delete([state, second])
    elif which == "a bit of the state":
        block = bytearray(backend.values[state])
        block[600] ^= 1
        backend.values[state] = bytes(block)
    else:
        backend.values[state if which == "state" else second] = b"damaged"
    damaged = {key: backend.values.get(key) for key, value in sound.items() if backend.values.get(key) != value}
    warm = cached_over(linear, backend)
    assert greedy(warm, ids) == expected
    assert warm.last_loaded == 0
    assert damaged
    assert all(backend.values[key] != value for key, value in damaged.items())


def test_a_broken_store_does_not_stop_a_model_with_states(linear: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(100)
    backend.broken = True
    assert greedy(cached_over(linear, backend), ids) == greedy(linear, ids)


def test_a_batch_of_a_model_with_states_loads_each_prompt_and_stores_it_as_if_it_were_alone(
    linear: PreTrainedModel,
) -> None:
    backend, rows = FakeBackend(), [prompt(100), prompt(63, seed=1), prompt(21, seed=2)]
    ids, mask = batch(*rows)
    expected = greedy(linear, ids, attention_mask=mask)
    for loaded in (0, 96 + 48 + 16):
        cached = cached_over(linear, backend)
        assert greedy(cached, ids, attention_mask=mask) == expected
        assert cached.last_loaded == loaded
    for row, loaded in zip(rows, (96, 48, 16), strict=True):
        alone = cached_over(linear, backend)
        assert greedy(alone, row) == greedy(linear, row)
        assert alone.last_loaded == loaded


def test_a_model_with_states_is_refused_padding_that_it_does_not_heed(
    linear: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "pads_well", lambda model: False)
    ids, mask = batch(prompt(40), prompt(20, seed=1))
    cached = cached_over(linear, FakeBackend())
    with pytest.raises(ValueError, match="other logits behind padding: give prompts of one length"):
        greedy(cached, ids, attention_mask=mask)
    even = torch.cat([prompt(40), prompt(40, seed=1)])
    assert greedy(cached, even) == greedy(linear, even)


def test_a_model_with_states_goes_on_with_its_own_cache(linear: PreTrainedModel) -> None:
    backend, ids = FakeBackend(), prompt(50)
    cached = cached_over(linear, backend)
    own: Any = DynamicCache(config=linear.config)
    with torch.no_grad():
        linear(ids[:, :20], **{CACHE: own})
    assert greedy(cached, ids, **{CACHE: own}) == greedy(linear, ids)
    assert backend.written == []


def test_a_model_that_forgets_its_state_unless_tokens_come_singly_is_refused() -> None:
    model = tiny("bamba")
    with pytest.raises(ValueError, match=r"cannot go on from a stored one|a cache of its own"):
        cached_over(model, FakeBackend())


# -- behind generate()'s back ----------------------------------------------------------------------------------------


def test_prompts_stored_behind_are_the_same_blocks_and_close_hands_all_over() -> None:
    model, ids = tiny("llama"), [prompt(100, seed) for seed in range(5)]
    blocks = []
    for behind in (False, True):
        backend = FakeBackend()
        cached = CachedModel(
            model, CacheEngine(Config(chunk_size=CHUNK), layout_of(model, "tiny"), backend), behind=behind
        )
        answers = [greedy(cached, one) for one in ids]
        cached.close()
        assert answers == [greedy(model, one) for one in ids]
        assert cached.engine.stats.stored_tokens == 5 * 96
        blocks.append({key: hashlib.sha256(value).digest() for key, value in backend.values.items()})
    assert len(blocks[0]) == 30
    assert blocks[0] == blocks[1]


def test_a_prompt_that_begins_as_one_on_its_way_waits_for_it() -> None:
    model, backend = tiny("llama"), FakeBackend()
    cached = CachedModel(model, CacheEngine(Config(chunk_size=CHUNK), layout_of(model, "tiny"), backend), behind=True)
    greedy(cached, prompt(100))
    longer = torch.cat([prompt(100), prompt(20, seed=1)], dim=1)
    assert greedy(cached, longer) == greedy(model, longer)
    assert cached.last_loaded == 96
    cached.close()


def test_a_cache_that_the_caller_keeps_is_stored_before_it_is_returned() -> None:
    model, backend = tiny("llama"), FakeBackend()
    cached = CachedModel(model, CacheEngine(Config(chunk_size=CHUNK), layout_of(model, "tiny"), backend), behind=True)
    result = cached.generate(prompt(100), max_new_tokens=4, pad_token_id=0, return_dict_in_generate=True)
    assert len(backend.written) == 6
    assert token_major(result[CACHE])[0][0].shape[0] == 103
    cached.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3-next"])
def test_on_a_gpu_prompts_are_stored_behind_and_their_tokens_are_the_same(kind: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    model: Any = tiny(kind)
    model.to("cuda")
    backend, prompts = FakeBackend(), [prompt(100, seed).cuda() for seed in range(4)]
    expected = [greedy(model, ids) for ids in prompts]
    cold = cached_over(model, backend)
    assert [greedy(cold, ids) for ids in prompts] == expected
    cold.close()
    assert cold.engine.stats.stored_tokens == 4 * 96
    warm = cached_over(model, backend)
    for ids, tokens in zip(prompts, expected, strict=True):
        assert greedy(warm, ids) == tokens
        assert warm.last_loaded == 96
    warm.close()
