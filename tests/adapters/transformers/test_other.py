"""Models and calls that are not quite like others: what they keep aside, what they leave out, what tells them apart."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.transformers.cache import CACHE, fresh_cache
from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.backends.config.schema import Config
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.tiny_models import SHAPE, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNK = 16


@pytest.fixture
def llama() -> PreTrainedModel:
    return tiny("llama")


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 500, (1, tokens), generator=torch.Generator().manual_seed(seed))


def padded(*rows: torch.Tensor) -> torch.Tensor:
    """Prompts with zeros on the left."""
    width = max(row.shape[1] for row in rows)
    return torch.cat([nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])


def cached_over(model: PreTrainedModel, backend: FakeBackend) -> CachedModel:
    return CachedModel(model, CacheEngine(Config(chunk_size=CHUNK), layout_of(model, "tiny"), backend))


def greedy(model: Any, ids: torch.Tensor, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    result = model.generate(ids, **options)
    assert isinstance(result, torch.Tensor)
    return [[int(token) for token in row] for row in result]


def settings(**values: Any) -> Any:
    """A GenerationConfig."""
    made: Any = transformers.GenerationConfig
    return made(**values)


# -- positions that a model keeps ------------------------------------------------------------------------------------


def with_pictures() -> Any:
    """A Qwen2-VL, which has M-RoPE, and keeps rope_deltas on the model inside of it."""
    rope = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    tokens: dict[str, Any] = {
        "image_token_id": 505,
        "video_token_id": 506,
        "vision_start_token_id": 507,
        "vision_end_token_id": 508,
    }
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(text_config={**SHAPE, "rope_scaling": rope}, vision_config=vision, **tokens)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    model.train(False)
    return model


def test_with_m_rope_a_hit_does_not_take_the_positions_of_the_prompt_before() -> None:
    model, backend, ids = with_pictures(), FakeBackend(), prompt(60)
    expected = greedy(model, ids)
    assert greedy(cached_over(model, backend), ids) == expected
    warm = cached_over(model, backend)
    two = torch.cat([prompt(40, 1), prompt(40, 2)])
    assert greedy(warm, two) == greedy(model, two)
    assert greedy(warm, ids) == expected, "behind a batch of two"
    assert warm.last_loaded == 48
    model.model.rope_deltas = torch.tensor([[-12]])  # as a picture leaves it
    longer = torch.cat([ids[:, :40], prompt(40, 3)], dim=1)
    assert greedy(warm, longer) == greedy(model, longer), "what is computed behind a hit of 32"
    again = cached_over(model, backend)
    assert greedy(again, longer) == greedy(model, longer), "what was stored behind that hit"
    assert again.last_loaded == 79
    rows = padded(ids, prompt(41, 1))
    assert greedy(again, rows) == greedy(model, rows), "behind padding"
    assert again.last_loaded == 48 + (48 - 19)


def test_with_m_rope_positions_of_a_cache_that_the_caller_has_are_left_alone() -> None:
    model, ids = with_pictures(), prompt(60)
    past = fresh_cache(model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :40], **{CACHE: past})
    model.model.rope_deltas = deltas = torch.tensor([[-12]])
    greedy(cached_over(model, FakeBackend()), ids, **{CACHE: past})
    assert model.model.rope_deltas is deltas


# -- padding ---------------------------------------------------------------------------------------------------------


def test_without_a_mask_padding_is_what_transformers_takes_for_it(llama: PreTrainedModel) -> None:
    backend, rows = FakeBackend(), (prompt(60), prompt(41, 1))
    ids = padded(*rows)
    expected = greedy(llama, ids)
    assert greedy(cached_over(llama, backend), ids) == expected
    warm = cached_over(llama, backend)
    assert greedy(warm, ids) == expected
    assert [plan.total for plan in warm.last_plans] == [60, 41]
    assert greedy(warm, rows[1]) == greedy(llama, rows[1])
    assert warm.last_loaded == 32


@pytest.mark.parametrize(
    ("own", "options", "pads"),
    [
        ({}, {"pad_token_id": 0}, 19),
        ({}, {"pad_token_id": torch.tensor(0), "eos_token_id": torch.tensor([1, 2])}, 19),
        ({}, {"pad_token_id": 0, "eos_token_id": [7, 0]}, 0),
        ({}, {"pad_token_id": 0, "eos_token_id": torch.tensor(0)}, 0),
        ({}, {"pad_token_id": None, "eos_token_id": 0}, 0),
        ({}, {"generation_config": settings(pad_token_id=0, eos_token_id=[1])}, 19),
        ({"pad_token_id": 0}, {}, 19),
        ({"pad_token_id": 0}, {"attention_mask": None}, 19),
        ({"pad_token_id": 0}, {"generation_config": settings(max_new_tokens=2)}, 19),
        ({"pad_token_id": 0}, {"generation_config": settings(eos_token_id=0)}, 0),
        ({"pad_token_id": 0, "eos_token_id": [5, 0]}, {}, 0),
        ({"pad_token_id": 0, "eos_token_id": [5, 0]}, {"eos_token_id": 3}, 19),
        ({"pad_token_id": 0, "eos_token_id": [5, 0]}, {"generation_config": settings(pad_token_id=1)}, 0),
    ],
)
def test_pad_and_eos_are_looked_for_where_generate_looks_for_them(
    llama: PreTrainedModel, own: dict[str, Any], options: dict[str, Any], pads: int
) -> None:
    for name, value in own.items():
        setattr(llama.generation_config, name, value)
    ids = padded(prompt(60), prompt(41, 1))
    plain: Any = llama
    options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False} | options
    expected = plain.generate(ids, **options)
    cached = cached_over(llama, FakeBackend())
    result = cached.generate(ids, **options)
    assert torch.equal(result, expected)
    assert [plan.total for plan in cached.last_plans] == [60, 60 - pads]


def test_a_pad_token_among_the_others_is_refused_unless_a_mask_says_what_it_is(llama: PreTrainedModel) -> None:
    ids = prompt(60)
    ids[0, 40] = 0
    with pytest.raises(ValueError, match=r"on the left.*pad_token_id.*give attention_mask"):
        greedy(cached_over(llama, FakeBackend()), ids)
    backend, ones = FakeBackend(), torch.ones_like(ids)
    expected = greedy(llama, ids, attention_mask=ones)
    for loaded in (0, 48):
        cached = cached_over(llama, backend)
        assert greedy(cached, ids, attention_mask=ones) == expected
        assert cached.last_loaded == loaded


def test_padding_is_refused_where_positions_are_columns() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128}
    model = transformers.TrOCRForCausalLM(transformers.TrOCRConfig(vocab_size=512, init_std=0.2, **sizes))
    model.train(False)
    backend, ids = FakeBackend(), padded(prompt(60), prompt(41, 1))
    with pytest.raises(ValueError, match="without position_ids"):
        greedy(cached_over(model, backend), ids, attention_mask=(ids != 0).long())
    whole = torch.cat([prompt(60), prompt(60, 1)])
    for loaded in (0, 96):
        cached = cached_over(model, backend)
        assert greedy(cached, whole) == greedy(model, whole)
        assert cached.last_loaded == loaded


def test_bloom_is_served_with_padding_since_its_alibi_goes_by_the_mask() -> None:
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=512, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.2)
    model = transformers.BloomForCausalLM(config)
    model.train(False)
    backend, rows = FakeBackend(), (prompt(60), prompt(41, 1))
    ids = padded(*rows)
    mask = (ids != 0).long()
    assert greedy(cached_over(model, backend), ids, attention_mask=mask) == greedy(model, ids, attention_mask=mask)
    alone = cached_over(model, backend)
    assert greedy(alone, rows[1]) == greedy(model, rows[1])
    assert alone.last_loaded == 32


# -- keys ------------------------------------------------------------------------------------------------------------


def changed(**settings: Any) -> PreTrainedModel:
    """A tiny llama whose configuration says something else."""
    model = tiny("llama")
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


class Quantization:
    """As a quantizer of transformers has it."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def to_dict(self) -> dict[str, Any]:
        return {"bits": self.bits, "skip": {"lm_head", "embed", "norm", "q_proj", "k_proj"}}


def test_what_is_opened_in_another_way_has_keys_of_its_own() -> None:
    layouts = [
        layout_of(model, "org/tiny")
        for model in (
            tiny("llama"),
            changed(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
            changed(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}),
            changed(rms_norm_eps=1e-3),
            changed(_commit_hash="0123456789abcdef"),
            changed(_commit_hash="fedcba9876543210"),
            changed(quantization_config={"bits": 4}),
            changed(quantization_config=Quantization(4)),
            changed(quantization_config=Quantization(8)),
        )
    ]
    assert len({layout.model for layout in layouts}) == len(layouts)


def test_a_window_of_another_size_has_keys_of_its_own() -> None:
    models = [tiny("mistral"), tiny("mistral")]
    models[1].config.sliding_window = 16
    assert len({layout_of(model, "tiny").model for model in models}) == 2


def test_other_weights_under_one_name_have_keys_of_their_own() -> None:
    one, other = tiny("llama"), tiny("llama")
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.01)  # another revision, of which transformers 5.23 remembers nothing
    assert layout_of(one, "tiny").model != layout_of(other, "tiny").model


def test_what_does_not_shape_kv_leaves_the_keys_as_they_are() -> None:
    plain = layout_of(tiny("llama"), "org/tiny")
    model = changed(
        architectures=["LlamaForCausalLM"],
        use_cache=False,
        pad_token_id=7,
        eos_token_id=[1, 2],
        id2label={0: "a"},
        problem_type="regression",
        _name_or_path="/somewhere/else",
    )
    assert layout_of(model, "org/tiny") == plain
    cached = CachedModel(model, CacheEngine(Config(chunk_size=CHUNK), plain, FakeBackend()))
    cached.generate(prompt(40), max_new_tokens=2, use_cache=True)
    assert layout_of(model, "org/tiny") == plain, "after its use too"


@pytest.mark.nightly  # of keys alone: tests/adapters/engine/test_keys.py
def test_keys_are_the_same_in_another_process() -> None:
    model = changed(quantization_config=Quantization(4))  # with a set, whose order is another in each process
    code = (
        "from kvredis.adapters.transformers import layout_of\n"
        "from tests.adapters.transformers.test_other import Quantization, changed\n"
        "print(layout_of(changed(quantization_config=Quantization(4)), 'org/tiny').model)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[-1] == layout_of(model, "org/tiny").model


def test_errors_say_the_plain_name() -> None:
    with pytest.raises(ValueError, match=r"^org/tiny: encoder-decoder"):
        layout_of(changed(is_encoder_decoder=True), "org/tiny")


class AdapterLayer(nn.Module):
    """What a layer of peft's LoRA shows of itself."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.ModuleDict(), nn.ModuleDict()
        self.active_adapter: list[str] = []
        self.disable_adapters = False

    def load(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.down[name] = nn.Linear(self.base_layer.in_features, 2, bias=False)
        self.up[name] = nn.Linear(2, self.base_layer.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(hidden)
        for name in [] if self.disable_adapters else self.active_adapter:
            out = out + self.up[name](self.down[name](hidden))
        return out


class PeftConfig:
    """What an adapter's configuration shows of itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def to_dict(self) -> dict[str, Any]:
        return {"r": self.rank, "target_modules": {"k_proj", "v_proj"}}


def adapted(names: list[str], *, seed: int = 1, rank: int = 2, active: list[str] | None = None) -> Any:
    """A tiny llama with adapters that are loaded, and the layer that has them."""
    model: Any = tiny("llama")
    attention = model.model.layers[0].self_attn
    attention.k_proj = layer = AdapterLayer(attention.k_proj)
    for name in names:
        layer.load(name, seed)
    layer.train(False)
    layer.active_adapter = names if active is None else active
    model._hf_peft_config_loaded = True
    model.peft_config = {name: PeftConfig(rank) for name in names}
    return model


def test_adapters_that_are_active_have_keys_of_their_own_and_others_none() -> None:
    def named(model: Any) -> str:
        return layout_of(model, "tiny").model

    plain = named(tiny("llama"))
    off = adapted(["poet"])
    off.model.layers[0].self_attn.k_proj.disable_adapters = True
    assert named(off) == named(adapted(["poet"], active=[])) == plain
    assert named(adapted(["poet"])) == named(adapted(["poet", "clerk"], active=["poet"]))
    others = [adapted(["poet"]), adapted(["clerk"]), adapted(["poet", "clerk"])]
    others += [adapted(["poet"], rank=4), adapted(["poet"], seed=2)]  # of other training under one name
    assert len({plain, *(named(model) for model in others)}) == 6


def test_an_adapter_that_is_switched_after_the_model_was_opened_has_keys_of_its_own_and_finds_them_again() -> None:
    model, ids = adapted(["poet", "clerk"], active=["poet"]), prompt(60)
    layer = model.model.layers[0].self_attn.k_proj
    layer.load("clerk", 7)
    layer.train(False)
    cached = cached_over(model, FakeBackend())
    for active, is_off, loaded in (
        (["poet"], False, 0),
        (["clerk"], False, 0),
        (["poet"], True, 0),
        (["clerk"], False, 48),
        (["clerk"], True, 48),  # whichever is off
        (["poet"], False, 48),
    ):
        layer.active_adapter, layer.disable_adapters = active, is_off
        assert greedy(cached, ids) == greedy(model, ids)
        assert (active, is_off, cached.last_loaded) == (active, is_off, loaded)
