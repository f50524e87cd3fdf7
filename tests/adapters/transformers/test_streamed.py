"""A cache of which a share lies elsewhere: tokens and logits are those of a DynamicCache, whatever the share is.

Without a GPU "elsewhere" is other memory of the host. When copies are made there, at once or as late as the cache's
waits allow, is what a GPU's streams may do.
"""

import copy
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from kvredis.adapters.transformers import StreamedCache, streamed
from kvredis.adapters.transformers.cache import CACHE, keys_and_values
from kvredis.storage.errors import DeviceError, LayoutError
from kvredis.storage.memory import cuda
from kvredis.storage.memory.aliased import DevicePages
from tests.adapters.tiny_models import SHAPE, tiny
from tests.stand_in_cuda import stand_in_cuda

pytestmark = pytest.mark.usefixtures("one_thread")

SHARES = (0.0, 0.25, 0.5, 1.0)
PROMPT_TOKENS = 41
NEW = 6
NEAR = 2e-5
"""Of the largest logit, as test_support.py has it: the same sums in another order."""


HERE = streamed._Here


class Late:
    """Makes a copy when it is waited for, or when its buffer is to be filled again, and never before."""

    def __init__(self) -> None:
        self._asked: dict[int, Sequence[Any]] = {}
        self.forks = 0

    def fork(self) -> None:
        self.forks += 1

    def bring(self, copies: Sequence[Any], buffer: int) -> None:
        self._asked[buffer] = copies

    def wait(self, buffer: int) -> None:
        HERE().bring(self._asked.pop(buffer, ()), buffer)

    def join(self) -> None:
        for buffer in list(self._asked):
            self.wait(buffer)


def llama(layers: int, **own: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}, **own))
    model.train(False)
    return model


def prompts(rows: int = 1, tokens: int = PROMPT_TOKENS) -> torch.Tensor:
    return torch.randint(3, 500, (rows, tokens), generator=torch.Generator().manual_seed(1))


def computed(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Cache:
    """What a prefill of all but the last token leaves."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        own = None if mask is None else mask[:, :-1]
        model(input_ids=ids[:, :-1], attention_mask=own, use_cache=True, **{CACHE: cache})
    return cache


def generated(model: Any, ids: torch.Tensor, cache: Cache, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the logits of each."""
    options = {"attention_mask": torch.ones_like(ids), **options}
    made: Any = model.generate(
        ids, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, return_dict_in_generate=True,
        output_logits=True, **{CACHE: cache}, **options,
    )  # fmt: skip
    return made.sequences, torch.stack(made.logits)


def is_as_without(model: PreTrainedModel, ids: torch.Tensor, share: float, **options: Any) -> StreamedCache:
    """Compare a share's tokens and logits with those of the model's own cache."""
    own = computed(model, ids, options.get("attention_mask"))
    cache = StreamedCache(model, own, share, new_tokens=NEW)
    tokens, logits = generated(model, ids, own, **options)
    found, theirs = generated(model, ids, cache, **options)
    assert torch.equal(found, tokens)
    assert torch.allclose(theirs, logits, rtol=0, atol=NEAR * float(logits.abs().max()))
    assert cache.get_seq_length() == ids.shape[1] + NEW - 1
    return cache


@pytest.mark.parametrize("mover", [HERE, Late], ids=["at once", "as late as it may"])
@pytest.mark.parametrize("layers", [1, 2, 4, 5])
@pytest.mark.parametrize("share", SHARES)
def test_tokens_and_logits_are_those_of_the_models_own_cache(
    share: float, layers: int, mover: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "_Here", mover)
    cache = is_as_without(llama(layers), prompts(), share)
    assert cache.share_tokens == int(share * (PROMPT_TOKENS - 1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_batch_with_padding_is_served_by_each_attention(share: float, attention: str) -> None:
    model, ids = llama(4, attn_implementation=attention), prompts(3)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    mask[2, :30] = 0
    is_as_without(model, ids, share, attention_mask=mask)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3", "qwen2-windows", "lfm2"])
def test_layers_with_a_window_or_a_state_stay_where_they_are(kind: str) -> None:
    model = tiny(kind)
    cache = is_as_without(model, prompts(), 0.5)
    own = [layer for layer in cache.layers if isinstance(layer, streamed.StreamedLayer)]
    assert own
    assert (len(own) == len(cache.layers)) == (kind == "qwen2")
    sizes = [keys_and_values(layer)[0].shape for layer in own]  # type: ignore[arg-type]
    assert cache.share_bytes == sum(2 * 20 * 4 * heads * size for _, heads, _, size in sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_bit_for_bit_that_of_no_share(dtype: torch.dtype) -> None:
    model, ids = llama(3).to(dtype), prompts(2)
    own = computed(model, ids)
    tokens, logits = generated(model, ids, StreamedCache(model, own, 0.0, new_tokens=NEW))
    for share in (0.1, 0.9, 1.0):
        found, theirs = generated(model, ids, StreamedCache(model, own, share, new_tokens=NEW))
        assert torch.equal(found, tokens)
        assert torch.equal(theirs, logits)


@torch.no_grad()
def test_several_tokens_at_once_are_computed_behind_a_share_and_taken_back() -> None:
    model, ids = llama(3), prompts(2)
    more = prompts(2, 7)
    own = computed(model, ids)
    cache = StreamedCache(model, own, 0.6, new_tokens=7)
    expected = model(input_ids=more, **{CACHE: own}).logits
    for back in (-7, PROMPT_TOKENS - 1):  # as transformers 5 says it, and as 4 does
        found = model(input_ids=more, **{CACHE: cache}).logits
        assert torch.allclose(found, expected, atol=NEAR * float(expected.abs().max()), rtol=0)
        if back < 0 or "past_key_values" in CACHE:
            cache.crop(back)
        else:
            for layer in cache.layers:
                layer.crop(back)  # type: ignore[union-attr]
        assert cache.get_seq_length() == PROMPT_TOKENS - 1
    with pytest.raises(ValueError, match="23 tokens are less than the 24 that lie elsewhere"):
        cache.crop(-17)


def test_a_cache_that_was_made_or_used_under_inference_mode_goes_on_without() -> None:
    model, ids = llama(2), prompts()
    with torch.inference_mode():
        cache = StreamedCache(model, computed(model, ids), 0.5, new_tokens=NEW)
    generated(model, ids, cache)
    assert cache.get_seq_length() == PROMPT_TOKENS + NEW - 1


@torch.no_grad()
@pytest.mark.parametrize(("layers", "again"), [(1, 0), (2, 0), (3, 0), (4, 4), (5, 4)])
def test_each_step_brings_the_shares_of_layers_that_take_turns(
    layers: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[int] = []

    class Counted(HERE):
        def bring(self, copies: Sequence[Any], buffer: int) -> None:
            brought.append(sum(each.nbytes for each in copies))
            super().bring(copies, buffer)

    monkeypatch.setattr(streamed, "_Here", Counted)
    model, ids = llama(layers), prompts()
    cache = StreamedCache(model, computed(model, ids), 0.5)
    model(input_ids=ids[:, -1:], **{CACHE: cache})
    assert sum(brought[:layers]) == cache.share_bytes
    brought.clear()
    model(input_ids=ids[:, -1:], **{CACHE: cache})
    assert len(brought) == again
    assert sum(brought) == cache.step_bytes


def test_a_share_takes_two_buffers_of_the_models_memory_and_not_one_a_layer() -> None:
    model, ids = llama(8), prompts(4, 1001)
    own = computed(model, ids)
    none, half = (StreamedCache(model, own, share, new_tokens=1) for share in (0.0, 0.5))
    page, planes = 4096, 16
    assert abs(half.local_bytes - (none.local_bytes / 2 + half.share_bytes / 8 * 2)) <= (planes + 4) * page
    assert half.share_bytes == 8 * 2 * 500 * 4 * 2 * 16 * 4


def test_a_share_of_nothing_and_of_everything_are_told() -> None:
    model = llama(2)
    own = computed(model, prompts())
    found = [(each.share_tokens, each.share_bytes) for each in (StreamedCache(model, own, share) for share in (0, 1))]
    assert found == [(0, 0), (40, 2 * 2 * 40 * 2 * 16 * 4)]


def test_what_comes_out_lives_as_long_as_it_is_used() -> None:
    model, ids = llama(2), prompts()
    cache = StreamedCache(model, computed(model, ids), 0.5)
    new = torch.ones(1, 2, 1, 16)
    keys, _ = cache.update(new, new, 0)
    expected = keys.clone()
    del cache
    gc.collect()
    assert torch.equal(keys, expected)


@pytest.mark.parametrize("share", [-0.1, 1.01, math.nan, math.inf])
def test_a_share_that_there_is_not_is_refused(share: float) -> None:
    model = llama(1)
    with pytest.raises(ValueError, match="a share is 0 to 1, not"):
        StreamedCache(model, computed(model, prompts()), share)


def test_caches_that_are_not_a_prompts_are_refused() -> None:
    model, ids = llama(2), prompts()
    with pytest.raises(LayoutError, match="compute the prompt first"):
        StreamedCache(model, DynamicCache(config=model.config), 0.5)
    with pytest.raises(LayoutError, match="prompt: layer 0 has a StaticLayer, which is not supported"):
        StreamedCache(model, StaticCache(config=model.config, max_cache_len=64), 0.5)
    with pytest.raises(LayoutError, match="layer 0 has a StreamedLayer"):
        StreamedCache(model, StreamedCache(model, computed(model, ids), 0.5), 0.5)
    model.config.num_kv_shared_layers = 1
    with pytest.raises(LayoutError, match="num_kv_shared_layers"):
        StreamedCache(model, computed(model, ids), 0.5)


@pytest.mark.parametrize(("device", "said"), [("cuda:0", "a model on the CPU"), ("meta", "no share lies on meta")])
def test_devices_that_no_share_can_lie_on_are_refused(device: str, said: str) -> None:
    model = llama(1)
    with pytest.raises(ValueError, match=said):
        StreamedCache(model, computed(model, prompts()), 0.5, share_device=device)


@torch.no_grad()
def test_more_tokens_than_there_is_room_for_are_refused_and_lose_nothing() -> None:
    model, ids = llama(2), prompts()
    with pytest.raises(ValueError, match="new_tokens must be at least 1, not 0"):
        StreamedCache(model, computed(model, ids), 0.5, new_tokens=0)
    cache = StreamedCache(model, computed(model, ids), 0.5, new_tokens=2)
    with pytest.raises(ValueError, match="no room for token 43 of a StreamedCache that was made for 42"):
        model(input_ids=prompts(1, 3), **{CACHE: cache})
    with pytest.raises(ValueError, match="the cache has 1 prompts, and 2 go on"):
        model(input_ids=prompts(2, 1), **{CACHE: cache})
    assert cache.get_seq_length() == 40
    model(input_ids=prompts(1, 2), **{CACHE: cache})
    assert cache.get_seq_length() == 42


def test_what_would_put_other_tokens_in_the_shares_place_is_refused() -> None:
    model, ids = llama(2), prompts()
    cache = StreamedCache(model, computed(model, ids), 0.5)
    with pytest.raises(ValueError, match="the cache has 1 prompts, and 2 go on"):
        generated(model, ids, cache, num_beams=2)
    with pytest.raises(NotImplementedError, match="beam search"):
        cache.reorder_cache(torch.LongTensor([0]))
    with pytest.raises(NotImplementedError, match="cannot forget its prompt"):
        cache.reset()  # type: ignore[no-untyped-call]
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(cache)
    for refused in ("offload", "prefetch"):
        with pytest.raises(NotImplementedError, match="cannot be offloaded"):
            getattr(cache.layers[0], refused)()
    with pytest.raises(NotImplementedError, match="prompts repeated"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(NotImplementedError, match="prompts taken out"):
        cache.batch_select_indices(torch.tensor([0]))


# -- a GPU's streams ---------------------------------------------------------------------------------------------------


class FakeStreams:
    """torch's streams and events of a GPU, which note what they are asked in `said`."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = self.Stream("model")
        self._names = iter(["fork", "buffer 0", "buffer 1", "buffer 2"])

    def Stream(self, name: Any) -> Any:  # noqa: N802  # as torch names it
        stream: Any = type("Stream", (), {"cuda_stream": 1})()
        stream.name = name if isinstance(name, str) else "shares"
        stream.wait_event = lambda event: self.said.append(f"{stream.name} waits for {event.name}")
        return stream

    def Event(self) -> Any:  # noqa: N802
        event: Any = type("Event", (), {})()
        event.name = next(self._names)
        event.record = lambda stream: self.said.append(f"{event.name} at {stream.name}")
        return event

    def current_stream(self, _device: Any) -> Any:
        return self.current


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    fake = FakeStreams()
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, str(stand_in_cuda()))
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def shares_of(layers: int) -> tuple[streamed._Shares, list[torch.Tensor], list[torch.Tensor]]:
    """A GPU's shares, one of four bytes a layer; where they are kept, and the buffers."""
    turns = streamed.turns_of(layers)
    kept = [torch.full((4,), place, dtype=torch.uint8) for place in range(layers)]
    buffers = [torch.full((4,), 255, dtype=torch.uint8) for _ in range(max(turns) + 1)]
    copies = [
        [streamed._Copy(buffers[turn].data_ptr(), own.data_ptr(), 4)] for turn, own in zip(turns, kept, strict=True)
    ]
    mover = streamed._Beside(DevicePages(0), torch.device("cuda", 0), len(buffers))
    return streamed._Shares(copies, turns, mover), kept, buffers


def test_a_layers_share_comes_on_another_stream_while_the_layer_before_it_computes(streams: FakeStreams) -> None:
    shares, kept, buffers = shares_of(4)
    steps = []
    for _ in range(2):
        for place in range(4):
            shares.come(place)
            assert torch.equal(buffers[place % 2], kept[place])
            steps.append(list(streams.said))
            streams.said.clear()
        shares.join()
        steps.append(list(streams.said))
        streams.said.clear()
    began = ["fork at model", "shares waits for fork"]
    filled = [f"buffer {turn} at shares" for turn in (0, 1)]
    waits = [f"model waits for buffer {turn}" for turn in (0, 1)]
    assert steps[0] == [*began, *filled, waits[0]]
    assert steps[1] == [*began, filled[0], waits[1]]
    assert steps[2] == [*began, filled[1], waits[0]]
    assert steps[3] == [*began, filled[0], waits[1]]
    assert steps[4] == [waits[0]]  # the first layer's share of the next step
    assert steps[5] == [*began, filled[1]]  # for which that one need not wait again, as in a graph it must not
    assert steps[6:] == steps[1:5]


def test_neighbours_never_have_the_same_buffer_nor_the_last_layer_and_the_first() -> None:
    for layers in range(2, 12):
        turns = streamed.turns_of(layers)
        assert all(turns[place] != turns[(place + 1) % layers] for place in range(layers))
        assert max(turns) <= 2
    assert streamed.turns_of(1) == [0]


def test_a_share_that_the_gpu_does_not_bring_is_an_error(
    streams: FakeStreams, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    shares, _, _ = shares_of(2)
    (tmp_path / "fails").write_text("-1")
    monkeypatch.setenv("STAND_IN_CUDA_FAILS", str(tmp_path / "fails"))
    with pytest.raises(DeviceError, match="a share of KV cannot be brought"):
        shares.come(0)
