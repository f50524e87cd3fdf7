"""What layout_of makes of a model, and which models it refuses: what a configuration tells, and what it does not."""

from dataclasses import replace
from typing import Any

import pytest
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.backends.config.schema import Config
from tests.adapters.tiny_models import SHAPE, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("kind", "why"), [("moshi", "its prefill ignores the window"), ("mpt", "its ALiBi")])
def test_a_model_that_transformers_computes_otherwise_behind_a_prefix_is_refused_with_the_reason(
    kind: str, why: str
) -> None:
    if kind == "mpt":
        model: Any = transformers.MptForCausalLM(
            transformers.MptConfig(vocab_size=512, d_model=64, n_heads=4, n_layers=2)
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        model.config = transformers.MoshiConfig(**SHAPE)
    with pytest.raises(ValueError, match=f"^tiny: {kind} is not supported: {why}"):
        layout_of(model, "tiny")


def without_a_cache() -> Any:
    return transformers.OpenAIGPTLMHeadModel(
        transformers.OpenAIGPTConfig(vocab_size=512, n_embd=64, n_layer=2, n_head=4)
    )


def with_another_cache() -> Any:
    sizes: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8}
    return transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**SHAPE, **sizes))


def with_layers_for_pictures() -> Any:
    """Mllama, of whose layers one attends to pictures alone."""
    options: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "cross_attention_layers": [1]}
    options["rope_scaling"] = {"rope_type": "default"}  # which transformers 4 has to be told
    return transformers.MllamaForCausalLM(MllamaTextConfig(**SHAPE, **options))


def looking_ahead() -> Any:
    """BERT without is_decoder."""
    return transformers.RobertaForCausalLM(transformers.RobertaConfig(**without_kv_heads()))


def with_columns_of_its_own() -> Any:
    """CPM-Ant, which puts 32 tokens before each prompt."""
    config = transformers.CpmAntConfig(**without_kv_heads(), dim_head=16, dim_ff=64)
    return transformers.CpmAntForCausalLM(config)


def without_kv_heads() -> dict[str, Any]:
    return {name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (without_a_cache, "it keeps no KV in a cache that it is given"),
        (with_another_cache, "(it cannot compute with a cache that it is given: MiniMax|layers of linear_attention)"),
        (
            with_layers_for_pictures,  # transformers 5.0 cannot compute a text in two parts with these
            r"(of a text \d+ of \d+ layers keep KV in|it cannot compute with) a cache that it is given",
        ),
        (looking_ahead, "the KV of a token depends on those behind it"),
        (with_columns_of_its_own, "(it cannot compute with a cache that it is given|the KV of 12 tokens is)"),
    ],
)
def test_what_a_model_does_with_its_cache_is_looked_at_before_anything_is_stored(make: Any, why: str) -> None:
    model = make()
    model.train(False)
    with pytest.raises(ValueError, match=f"^tiny: {why}"):
        layout_of(model, "tiny")


def test_the_layout_has_the_shapes_that_the_model_keeps_whatever_its_configuration_says() -> None:
    model = tiny("llama")
    model.config.num_key_value_heads = 1
    model.config.v_head_dim = 8
    layout = layout_of(model, "tiny")
    assert (layout.layers, layout.planes, layout.kv_heads, layout.head_dim) == (3, 2, 2, 16)


@pytest.mark.parametrize(("kind", "kv_heads"), [({}, 1), ({"new_decoder_architecture": True, "num_kv_heads": 2}, 4)])
def test_falcon_has_as_many_kv_heads_as_it_keeps(kind: dict[str, Any], kv_heads: int) -> None:
    config = transformers.FalconConfig(**without_kv_heads(), **kind)
    model: Any = transformers.FalconForCausalLM(config)
    model.train(False)
    assert layout_of(model, "tiny").kv_heads == kv_heads


def test_a_model_whose_linear_attention_keeps_its_state_to_itself_is_refused_when_it_is_opened() -> None:
    sizes = {**SHAPE, "intermediate_size": 128, "lru_width": 64}
    model: Any = transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**sizes))
    model.train(False)
    with pytest.raises(
        ValueError, match=r"^tiny: it(s| keeps no KV).* (state .*in (the|a) cache|cache that it is given)"
    ):
        CachedModel.open(model, Config(chunk_size=16), "tiny")


def test_a_model_in_training_or_without_memory_has_the_layout_that_it_would_have() -> None:
    llama: Any = tiny("llama")
    layout = layout_of(llama, "tiny")
    nn.Module.train(llama)
    for module in llama.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    assert layout_of(llama, "tiny") == layout
    assert replace(layout_of(llama.to("meta"), "tiny"), model="") == replace(layout, model="")
