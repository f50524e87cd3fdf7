"""Tiny models of transformers with random weights, of each kind of attention; each prompt has another answer."""

from typing import Any

import torch
import transformers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # large enough that greedy tokens vary with the prompt
}
WINDOWS = ("mistral", "gemma3", "qwen2-windows")
LINEAR = ("qwen3-next", "lfm2")
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def tiny(kind: str) -> PreTrainedModel:
    """A model of this kind, the same weights each time."""
    torch.manual_seed(0)
    model = _made(kind)
    model.train(False)
    return model


def _made(kind: str) -> PreTrainedModel:
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE, use_sliding_window=False))
    if kind == "qwen2-windows":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=20, max_window_layers=1))
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=32))
    if kind == "gemma3":
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=24, layer_types=types))
    return _hybrid(kind)


def _hybrid(kind: str) -> PreTrainedModel:
    """Models that not every version of transformers has."""
    named: Any = transformers
    made: PreTrainedModel
    if kind == "qwen3-next":
        types = ["linear_attention", "full_attention", "linear_attention"]
        made = named.Qwen3NextForCausalLM(named.Qwen3NextConfig(**SHAPE, **_DELTA_NET, head_dim=16, layer_types=types))
    elif kind == "lfm2":
        made = named.Lfm2ForCausalLM(named.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention", "conv"]))
    elif kind == "bamba":
        made = named.BambaForCausalLM(named.BambaConfig(**SHAPE, **MAMBA, attn_layer_indices=[1]))
    else:
        raise ValueError(f"no tiny {kind}")
    return made
