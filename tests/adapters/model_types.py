"""Tiny configurations of any type of causal language model that transformers maps, from the type's own defaults."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ALL_TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NOT_TINY = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cohere_compass_text", "dbrx", "dots1",
    "dots3_note", "gemma3n", "gemma3n_text", "gemma4_assistant", "gemma4_unified_assistant", "gpt_neo",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe", "mamba2", "marian", "mbart", "ministral", "musicgen",
    "musicgen_melody", "mvp", "nemotron", "pegasus", "plbart", "prophetnet", "reformer", "whisper", "zamba",
    "zamba2", "zaya",
)  # fmt: skip
"""Types whose sizes depend on each other in a way that SIZES does not know, with transformers 5.23."""
TINY_TYPES = tuple(kind for kind in ALL_TYPES if kind not in NOT_TINY)

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 256),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_key_value_groups"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "dim_head"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "rotary_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "sliding_window"), 32),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "n_group", "topk_group"), 1),
    **{"mamba_d_ssm": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""What is small, for whichever of these a configuration has."""


def tiny_config(kind: str, **own: Any) -> Any:
    """A small configuration of this type. Raises whatever the type does where its sizes depend on each other in a way
    that SIZES does not know."""
    made: Any = CONFIG_MAPPING[kind]
    usual: Any = made()
    text = usual.get_text_config(decoder=True)
    known = {*vars(text), *getattr(type(text), "attribute_map", {})}
    sizes = {name: size for name, size in SIZES.items() if name in known and _value(text, name) is not None} | own
    if sizes.get("kv_lora_rank"):  # a latent has as many heads as queries have
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if text is usual:
        return made(**sizes)
    part = next(name for name, value in vars(usual).items() if value is text)
    return made(**{part: sizes})


def tiny_of(kind: str, **own: Any) -> Any:
    """A small model of this type, the same weights each time."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(tiny_config(kind, **own))
    model.train(False)
    return model


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it differs between layers
        return ""
