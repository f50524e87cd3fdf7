"""How many bytes of KV a model makes: the one place that the benches and the planner take model shapes from.

Five models stand for the field: those that other caches publish figures for. Any other is read from its Hugging Face
config.json. No engine and no tensor library is needed to know a size.

A shape counts K and V of every layer of one model on one rank. Block and chunk sizes are payload: a stored block's
header (`kvredis.adapters.block`) is not in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import BenchError

BLOCK_TOKENS: Final = 16
"""Tokens of one block in the engines that the known figures come from."""

# A quantised checkpoint still names the type its activations have, and that is the KV cache's own unless an engine is
# told otherwise.
_DTYPE_BYTES: Final[Mapping[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "half": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the size of a model's KV: 2 x layers x kv_heads x head_dim elements a token."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "dtype_bytes"):
            if getattr(self, field) < 1:
                raise BenchError(f"model {self.name}: {field} must be at least 1, not {getattr(self, field)}")

    def bytes_per_token(self) -> int:
        """K and V of one token in every layer."""
        return self.layers * self.layer_bytes(1)

    def layer_bytes(self, tokens: int) -> int:
        """K and V of `tokens` tokens in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes * tokens

    def block_bytes(self, tokens: int = BLOCK_TOKENS) -> int:
        """K and V of a block or chunk of `tokens` tokens in every layer."""
        return self.bytes_per_token() * tokens

    def blocks(self, nbytes: int, tokens: int = BLOCK_TOKENS) -> int:
        """Give how many whole blocks of `tokens` tokens `nbytes` hold."""
        return nbytes // self.block_bytes(tokens)


SHAPES: Final[Mapping[str, ModelShape]] = {
    shape.name: shape
    for shape in (
        ModelShape("32b", layers=64, kv_heads=8, head_dim=128),
        ModelShape("7b", layers=28, kv_heads=4, head_dim=128),
        ModelShape("3b", layers=36, kv_heads=2, head_dim=128),
        ModelShape("glm", layers=40, kv_heads=4, head_dim=128),
        ModelShape("8b", layers=32, kv_heads=8, head_dim=128),
    )
}
"""By short name: Qwen2.5-32B, -7B and -3B, glm-4-9b-chat-1m, Llama-3.1-8B."""


def shape_of(word: str) -> ModelShape:
    """Give a shape by its short name, or by the path of a config.json or of the folder that holds one.

    Raises BenchError naming the known names when `word` is neither.
    """
    if word in SHAPES:
        return SHAPES[word]
    path = Path(word)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise BenchError(f"no model shape {word!r}: want one of {', '.join(SHAPES)}, or the path of a config.json")
    return shape_from_config(path)


def shape_from_config(path: Path) -> ModelShape:
    """Read a Hugging Face config.json; the shape is named after the file's folder.

    Reads num_hidden_layers, num_key_value_heads (default: num_attention_heads), head_dim (default: hidden_size /
    num_attention_heads) and torch_dtype or dtype (default: two bytes), of `text_config` where a model of several kinds
    of input has one; ChatGLM's own names as well. Raises BenchError when something is missing, or when the model does
    not keep K and V per head (multi-head latent attention), so that no formula here would be true of it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot read a model's configuration: {error}") from error
    if not isinstance(found, dict):
        raise BenchError(f"{path}: not a model's configuration but a {type(found).__name__}")
    nested = found.get("text_config")
    config: dict[str, Any] = found | nested if isinstance(nested, dict) else found
    if config.get("kv_lora_rank"):
        raise BenchError(f"{path}: multi-head latent attention keeps one latent a token, not K and V per head")
    heads = _count(config, path, "num_attention_heads")
    kv_heads = _count(config, path, "num_key_value_heads", "multi_query_group_num") or heads
    head_dim = _count(config, path, "head_dim", "kv_channels")
    if head_dim is None and heads:
        head_dim = (_count(config, path, "hidden_size") or 0) // heads or None
    layers = _count(config, path, "num_hidden_layers", "num_layers")
    if layers is None or kv_heads is None or head_dim is None:
        lacking = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": head_dim}
        names = ", ".join(name for name, value in lacking.items() if value is None)
        raise BenchError(f"{path}: does not say how large the model's KV is; lacking: {names}")
    return ModelShape(path.resolve().parent.name, layers, kv_heads, head_dim, _dtype_bytes(config, path))


def _count(config: Mapping[str, Any], path: Path, *names: str) -> int | None:
    """Give the first of `names` that has a value, None when none has; raises BenchError when it is no count."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BenchError(f"{path}: {name} must be a whole number of at least 1, not {value!r}")
            return value
    return None


def _dtype_bytes(config: Mapping[str, Any], path: Path) -> int:
    name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    nbytes = _DTYPE_BYTES.get(str(name).removeprefix("torch."))
    if nbytes is None:
        raise BenchError(f"{path}: unknown torch_dtype {name!r}; known: {', '.join(_DTYPE_BYTES)}")
    return nbytes
