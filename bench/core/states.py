"""How many bytes the recurrent layers of a hybrid model keep: one state each, of all tokens so far, however many.

To go on from a boundary a model needs these states as they were there, beside the KV of all tokens before it. An engine
keeps a copy of them at some boundaries: a snapshot. Shapes and types are those that vLLM gives a page of states
(model_executor/layers/mamba/mamba_utils.py, 0.32) on one rank without speculation; a state has two tensors, the last
inputs of a short convolution in the model's type and what recurs, which some types keep in float32 at all times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

Config = Mapping[str, Any]
Elements = tuple[int, int]
"""Of the convolution's inputs, and of what recurs."""

FLOAT32_BYTES: Final = 4
_TYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}


def state_layers(config: Config, kind: str, layers: int, attention_layers: int) -> int:
    """Count the layers that keep a state, of `layers` of which `attention_layers` keep K and V."""
    if kind in ("falcon_h1", "zamba2"):  # each layer has one, whatever it has besides
        return layers
    plan = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if plan:
        return sum(each in ("linear_attention", "conv", "mamba", "mamba2", "M") for each in plan)
    return layers - attention_layers


def state_bytes(config: Config, kind: str, dtype_bytes: int) -> int | None:
    """Bytes of one layer's state; None for a type, or a file, that does not say."""
    elements = _FAMILIES.get(kind)
    if elements is None:
        return None
    try:
        window, recurring = elements(config)
    except (KeyError, TypeError):
        return None
    return window * dtype_bytes + recurring * _recurring_bytes(config, kind, dtype_bytes)


def _recurring_bytes(config: Config, kind: str, dtype_bytes: int) -> int:
    if kind == "kimi_linear":
        return FLOAT32_BYTES
    if kind == "nemotron_h":
        return _TYPE_BYTES.get(str(config.get("mamba_ssm_cache_dtype")), FLOAT32_BYTES)
    if kind.startswith("qwen3_5"):
        return _TYPE_BYTES.get(str(config.get("mamba_ssm_dtype")), dtype_bytes)
    return dtype_bytes


def _mamba(config: Config) -> Elements:
    inner = config["mamba_expand"] * config["hidden_size"]
    return (config["mamba_d_conv"] - 1) * inner, inner * config["mamba_d_state"]


def _mamba2(config: Config) -> Elements:
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
    return _grouped(
        *(config["mamba_d_conv"], inner, config["mamba_n_groups"]),
        *(config["mamba_n_heads"], config["mamba_d_head"], config["mamba_d_state"]),
    )


def _nemotron(config: Config) -> Elements:
    heads, head_dim = config["mamba_num_heads"], config["mamba_head_dim"]
    return _grouped(
        config["conv_kernel"], heads * head_dim, config["n_groups"], heads, head_dim, config["ssm_state_size"]
    )


def _zamba2(config: Config) -> Elements:
    return _grouped(
        *(config["mamba_d_conv"], config["mamba_expand"] * config["hidden_size"], config["mamba_ngroups"]),
        *(config["n_mamba_heads"], config["mamba_headdim"], config["mamba_d_state"]),
    )


def _grouped(kernel: int, inner: int, groups: int, heads: int, head_dim: int, states: int) -> Elements:
    return (kernel - 1) * (inner + 2 * groups * states), heads * head_dim * states


def _gated_delta(config: Config) -> Elements:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return (config["linear_conv_kernel_dim"] - 1) * (2 * keys + values), values * config["linear_key_head_dim"]


def _kimi(config: Config) -> Elements:
    linear = config.get("linear_attn_config") or {  # as transformers writes it
        "num_heads": config["linear_num_heads"],
        "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    }
    width = linear["num_heads"] * linear["head_dim"]
    return (linear["short_conv_kernel_size"] - 1) * 3 * width, width * linear["head_dim"]


def _convolution(config: Config) -> Elements:
    return (config["conv_L_cache"] - 1) * (config.get("conv_dim") or config["hidden_size"]), 0


_FAMILIES: Final[Mapping[str, Callable[[Config], Elements]]] = {
    "jamba": _mamba,
    **dict.fromkeys(("bamba", "granitemoehybrid", "falcon_h1"), _mamba2),
    "nemotron_h": _nemotron,
    "zamba2": _zamba2,
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _gated_delta),
    "kimi_linear": _kimi,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _convolution),
}
