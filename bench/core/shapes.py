"""How many bytes of KV a model makes: the one place that the benches and the planner take model shapes from.

Five models stand for the field: those that other caches publish figures for. Any other is read from its Hugging Face
config.json. No engine and no tensor library is needed to know a size.

A shape counts K and V of every layer of one model on one rank. Block and chunk sizes are payload: a stored block's
header (`kvredis.adapters.engine.block`) is not in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .errors import BenchError
from .states import state_bytes, state_layers

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


_LAYERS: Final = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_HEADS: Final = ("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "n_kv_heads", "n_kv_head")
_GROUPS: Final = ("num_query_groups", "n_query_groups", "num_attention_groups")
_HEAD_DIM: Final = ("attention_head_dim", "head_dim", "kv_channels", "dim_head")
_WIDTH: Final = ("hidden_size", "d_model", "n_embd", "n_embed")
"""What configurations call the same size, the most telling first."""

_NESTED: Final = ("text_config", "llm_config", "language_config", "attn_config")
"""Where a model of several kinds of input has its text model's sizes, and MPT and DBRX their attention's."""

_PLANS: Final = ("layer_types", "layers_block_type", "hybrid_override_pattern")
_KEPT: Final = frozenset(
    ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid", "hybrid_sliding", "*")
)
_NOT_KEPT: Final = frozenset(("linear_attention", "conv", "mamba", "mamba2", "mlp", "moe", "M", "-", "E"))
"""Kinds of layer that keep K and V by token, and those that keep a state of all tokens or nothing."""

_STATES: Final = (
    *("mamba_", "ssm_", "linear_num_", "linear_attn_", "linear_key_head_dim", "conv_L_cache", "lru_width"),
    *("hyena_", "attn_mode", "use_short_conv", "expand_k", "decay_low_rank_dim"),
)
"""How keys begin that only models with recurrent layers have; the last ones are those of flash-linear-attention."""

_HYBRIDS_NAMES: Final = """
bailing_hybrid bamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3 minimax nemotron_h olmo_hybrid qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text zamba zamba2
"""
_HYBRIDS: Final = frozenset(_HYBRIDS_NAMES.split())
"""Types of which not all layers keep KV: their configuration must say which."""

_BOTH: Final = frozenset(("falcon_h1", "zaya"))
"""Types each layer of which has attention and a recurrent state."""

_ENCODERS_NAMES: Final = """
bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
"""
_ENCODERS: Final = frozenset(_ENCODERS_NAMES.split())
"""Encoders, which keep KV with `is_decoder` alone."""

_REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm"),
        "its layers keep a state of all tokens, which does not grow with them",
    ),
    **dict.fromkeys(
        ("blt", "openai-gpt", "reformer", "xlm", "xlnet"), "it keeps no K and V by token that can be loaded again"
    ),
    **dict.fromkeys(
        ("moshi", "musicgen", "musicgen_melody", "prophetnet", "trocr"), "it attends to what another model has computed"
    ),
    "mimo_v2_flash": "V has another width than K, and layers have sizes that its file need not say",
}
"""Types that no adapter stores, or that no file tells all of, and why."""

_GENERATES: Final = re.compile(r"CausalLM|LMHead|Generation|VisionText2Text|ChatModel")
_DOES_ELSE: Final = re.compile(r"For[A-Z]\w*$|EncoderModel$")
"""What the names in `architectures` hold of models that make text, and how those of others end."""

_ENCODERS_KEYS: Final = ("type_vocab_size", "projection_dim", "num_channels", "num_mel_bins", "conv_stride")
"""Keys of models that read text, pictures or sound and make no text."""

_MULTI_QUERY: Final = frozenset(("falcon", "gpt_bigcode"))
"""Types with one head of K and V unless their file says otherwise."""

_SAYS_KV_HEADS_NAMES: Final = """
beam bitnet cwm dbrx dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flint gemma gemma2 gemma3 gemma3_text
gemma3n gemma3n_text glm glm4 glm4_moe got_ocr2 gpt_oss granite_swa helium hy_v3 inkling2_text inkling_text
internlm3 iquestcoder jamba jetmoe kolibri1 laguna lfm2 lfm2_moe lfm3 llama4 llama4_text mellum minimax minimax_m2
ministral ministral3 mistral mixtral moss_transcribe_diarize nemotron_h phi4_multimodal phimoe qwen2 qwen2_moe qwen3
qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm
starcoder2 vaultgemma zamba zamba2 zaya bamba emu3_text_model falcon_h1
"""
_SAYS_KV_HEADS: Final = frozenset(_SAYS_KV_HEADS_NAMES.split())
_SAYS_HEAD_DIM_NAMES: Final = """
afmoe beam cohere2_moe cwm ernie4_5 flint gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text glm glm4 gpt_oss
helium hrm_text
hy_v3 inkling2_text inkling_text internlm3 iquestcoder jetmoe kolibri1 laguna lfm3 llama4 llama4_text mellum
minimax_m2 ministral3 nemotron_h qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next seed_oss solar_open
vaultgemma zamba zamba2 zaya
"""
_SAYS_HEAD_DIM: Final = frozenset(_SAYS_HEAD_DIM_NAMES.split())
"""Types whose size, where the file does not say it, is a default of transformers' and follows from no other size."""

_OTHER_SIZES: Final[Mapping[str, str]] = {
    "global_head_dim": "head_dim",
    "swa_head_dim": "head_dim",
    "v_head_dim": "head_dim",
    "swa_v_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
    "swa_num_key_value_heads": "num_key_value_heads",
}
"""Sizes of some layers, or of V alone -> the size of all that they may differ from."""

_UNREAD: Final[Mapping[str, str]] = {
    "block_configs": "gives each block sizes of its own",
    "cross_attention_layers": "names layers that attend to a picture and keep no KV of a text",
    "index_head_dim": "an index is kept beside K and V, in a form of the engine's own",
    "index_topk": "an index is kept beside K and V, in a form of the engine's own",
}
"""Keys with which a token's bytes follow from no formula here, and why."""

_OF_KV: Final = re.compile(r"(?<!q)kv(?!_cache)|key_value|query_group|shared_head|cla_|yoco")
_OF_KV_READ: Final = frozenset(
    (*_KV_HEADS, *_GROUPS, *_HEAD_DIM, *_OTHER_SIZES, "kv_lora_rank", "num_kv_shared_layers", "multi_query_group_num")
)
"""What the names of sizes of KV hold, and those that are read here: another one may say that there is less of it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the size of a model's KV: planes x layers x kv_heads x head_dim elements a token.

    `layers` are those that keep KV. `planes` is 2 for K and V, 1 for the one latent of MLA, whose width is head_dim.
    `states` are layers that keep a state of all tokens, and `snapshot_bytes` those states at one boundary (states.py);
    None: the file does not say.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int = 2
    planes: int = 2
    states: int = 0
    snapshot_bytes: int | None = 0

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "dtype_bytes", "planes"):
            if getattr(self, field) < 1:
                raise BenchError(f"model {self.name}: {field} must be at least 1, not {getattr(self, field)}")

    def bytes_per_token(self) -> int:
        """K and V, or the latent, of one token in every layer."""
        return self.layers * self.layer_bytes(1)

    def layer_bytes(self, tokens: int) -> int:
        """K and V, or the latent, of `tokens` tokens in one layer."""
        return self.planes * self.kv_heads * self.head_dim * self.dtype_bytes * tokens

    def block_bytes(self, tokens: int = BLOCK_TOKENS) -> int:
        """K and V, or the latent, of a block or chunk of `tokens` tokens in every layer."""
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

    Layers, KV heads and head size are read by the names that transformers' types have for them, of the text model where
    a model of several kinds of input has one, and the dtype (default: two bytes). Layers with attention are counted
    where others keep a state or nothing; layers that share another's KV are not. MLA is its latent: kv_lora_rank +
    qk_rope_head_dim. A sliding window is counted as stored: every token.

    Raises BenchError that names what is missing or in the way: for a size that the file does not say and that follows
    from no other, for layers of several sizes, for V of another width than K, and for types that no adapter stores.
    Falcon's new decoder is what paged engines keep (num_kv_heads); transformers keeps a copy for each head.
    """
    config = _flattened(path)
    kind = str(config.get("model_type") or "")
    _refuse(config, kind, path)
    layers, heads, width = (_count(config, path, *names) for names in (_LAYERS, _HEADS, _WIDTH))
    every, layers = layers, _kept_layers(config, kind, path, layers)
    name, nbytes = path.resolve().parent.name, _dtype_bytes(config, path)
    if latent := _count(config, path, "kv_lora_rank"):
        rope = _count(config, path, "qk_rope_head_dim")
        if layers is None or rope is None:
            raise _lacking(path, num_hidden_layers=layers, qk_rope_head_dim=rope)
        shape = ModelShape(name, layers, 1, latent + rope, nbytes, planes=1)
        return _with_states(shape, config, kind, every)
    kv_heads = _kv_heads(config, kind, path, heads)
    head_dim = _count(config, path, *(_HEAD_DIM[:1] if kind == "zamba2" else _HEAD_DIM))
    if head_dim is None and kind not in _SAYS_HEAD_DIM and heads and width:
        head_dim = width // heads or None
    if layers is None or kv_heads is None or head_dim is None:
        raise _lacking(path, num_hidden_layers=layers, num_key_value_heads=kv_heads, head_dim=head_dim)
    _refuse_other_sizes(config, path, {"head_dim": head_dim, "num_key_value_heads": kv_heads})
    return _with_states(ModelShape(name, layers, kv_heads, head_dim, nbytes), config, kind, every)


def _with_states(shape: ModelShape, config: Mapping[str, Any], kind: str, layers: int | None) -> ModelShape:
    """Add what recurrent layers keep to the shape of a hybrid model."""
    if layers is None or not (kind in _HYBRIDS | _BOTH or any(key.startswith(_STATES) for key in config)):
        return shape
    states = state_layers(config, kind, layers, shape.layers)
    each = state_bytes(config, kind, shape.dtype_bytes) if states else 0
    return replace(shape, states=states, snapshot_bytes=None if each is None else states * each)


def _flattened(path: Path) -> dict[str, Any]:
    """Read the file's object, with what stands in the parts of _NESTED over it; model_type is the text model's."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot read a model's configuration: {error}") from error
    if not isinstance(found, dict):
        raise BenchError(f"{path}: not a model's configuration but a {type(found).__name__}")
    if isinstance(thinker := found.get("thinker_config"), dict):  # of Qwen's models that speak: what thinks is text
        found = found | thinker
    config: dict[str, Any] = dict(found)
    for part in _NESTED:
        if isinstance(found.get(part), dict):
            config |= {key: value for key, value in found[part].items() if part != "attn_config" or key != "model_type"}
    return config


def _refuse(config: Mapping[str, Any], kind: str, path: Path) -> None:
    """Raise BenchError for types and keys with which no formula here is true."""
    if kind in _REFUSED:
        raise BenchError(f"{path}: {kind}: {_REFUSED[kind]}")
    if kind in _ENCODERS and not config.get("is_decoder"):
        raise BenchError(f"{path}: {kind} is an encoder, which keeps no KV without is_decoder")
    if config.get("is_encoder_decoder"):
        raise BenchError(f"{path}: {kind}: an encoder-decoder's KV depends on what its encoder has read")
    if why := _makes_no_text(config):
        raise BenchError(f"{path}: {why}: a model that makes no text keeps no KV")
    for key, reason in _UNREAD.items():
        if config.get(key):
            raise BenchError(f"{path}: {key}: {reason}")
    for key, value in config.items():
        if _OF_KV.search(key) and key not in _OF_KV_READ and _is_size(value):
            raise BenchError(f"{path}: {key}: tells of KV in a form that is not known here")
    for layer, own in (config.get("per_layer_config") or {}).items():
        if isinstance(own, dict) and own.keys() & {*_KV_HEADS, *_HEAD_DIM, "kv_lora_rank", "qk_rope_head_dim"}:
            raise BenchError(f"{path}: per_layer_config: layer {layer} has KV of another size than others")


def _makes_no_text(config: Mapping[str, Any]) -> str:
    """Name what says that the model reads text, pictures or sound and makes no text; "" where nothing does."""
    if config.get("is_decoder"):
        return ""
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if any(map(_GENERATES.search, names)):
        return ""
    if others := [name for name in names if _DOES_ELSE.search(name)]:
        return others[0]
    is_nested = any(isinstance(config.get(part), dict) for part in _NESTED)
    if not names and is_nested:
        return ""
    return next((key for key in _ENCODERS_KEYS if key in config), "")


def _is_size(value: Any) -> bool:
    """Say whether a key has numbers: a switch says nothing of how much KV there is."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return (is_number and value > 0) or (isinstance(value, list | dict) and bool(value))


def _refuse_other_sizes(config: Mapping[str, Any], path: Path, sizes: Mapping[str, int]) -> None:
    for key, size in _OTHER_SIZES.items():
        other = _count(config, path, key)
        if other is not None and other != sizes[size]:
            what = "V has another width than K" if key.endswith("v_head_dim") else "layers have KV of several sizes"
            raise BenchError(f"{path}: {what}: {key} is {other}, and {size} is {sizes[size]}")


def _kept_layers(config: Mapping[str, Any], kind: str, path: Path, layers: int | None) -> int | None:
    """How many of the layers keep K and V by token; None where the file does not say how many there are."""
    kept = _attention_layers(config, kind, path, layers)
    if kept is None and kind not in _BOTH:
        states = sorted(key for key, value in config.items() if key.startswith(_STATES) and value is not None)
        if kind in _HYBRIDS or states:
            why = f"{kind} has" if kind in _HYBRIDS else f"{states[0]} tells of"
            raise BenchError(f"{path}: {why} layers without KV, and nothing says which; lacking: layer_types")
    if kept is None and layers is not None:
        kept = layers * 2 if kind == "longcat_flash" else layers  # each of whose layers has two attentions
    if kept is not None:
        kept -= _count(config, path, "num_kv_shared_layers", low=0) or 0
        if kept < 1:
            raise BenchError(f"{path}: no layer keeps K and V by token")
    return kept


def _attention_layers(config: Mapping[str, Any], kind: str, path: Path, layers: int | None) -> int | None:
    """How many layers have attention, by whichever key says of single layers what they are; None without one."""
    for key in _PLANS:
        plan = config.get(key)
        if isinstance(plan, list | str) and plan:
            unknown = [each for each in plan if each not in _KEPT | _NOT_KEPT]
            if unknown:
                raise BenchError(f"{path}: {key}: layers of {unknown[0]} keep KV in a form that is not known here")
            if layers is not None and len(plan) != layers:
                raise BenchError(f"{path}: {key} tells of {len(plan)} layers, and there are {layers}")
            return sum(each in _KEPT for each in plan)
    if isinstance(types := config.get("attn_type_list"), list):  # MiniMax: 1 is attention, 0 linear
        return types.count(1)
    linear = config.get("linear_attn_config")  # Kimi Linear
    named = config.get("attn_layer_indices") or config.get("full_attn_idxs") or config.get("hybrid_layer_ids")
    if isinstance(linear, dict):
        named = linear.get("full_attn_layers", named)
    if isinstance(named, list):
        return len(named)
    interval = _count(config, path, "full_attention_interval", "layer_group_size")
    if interval is not None and layers is not None:
        return layers // interval
    period, offset = _count(config, path, "attn_layer_period"), _count(config, path, "attn_layer_offset", low=0)
    if period is not None and offset is not None and layers is not None and kind != "zamba":
        return sum(layer % period == offset for layer in range(layers))
    return None


def _kv_heads(config: Mapping[str, Any], kind: str, path: Path, heads: int | None) -> int | None:
    """How many heads of K and V a layer keeps."""
    if config.get("multi_query", kind in _MULTI_QUERY) and not config.get("new_decoder_architecture"):
        return 1  # Falcon, whatever its num_kv_heads is, and GPT BigCode
    if config.get("attn_type") == "multiquery_attention" or config.get("attention_head_type") == "multiquery":
        return 1  # MPT, SantaCoder
    if config.get("multi_query_attention", True) and (groups := _count(config, path, "multi_query_group_num")):
        return groups  # ChatGLM
    found = _count(config, path, *_KV_HEADS, *(() if kind in _SAYS_KV_HEADS else _GROUPS))
    if found is None and config.get("multi_query_attention"):
        return 1  # OLMo before transformers had it
    return heads if found is None and kind not in _SAYS_KV_HEADS else found


def _lacking(path: Path, **sizes: int | None) -> BenchError:
    names = ", ".join(name for name, size in sizes.items() if size is None)
    return BenchError(f"{path}: does not say how large the model's KV is; lacking: {names}")


def _count(config: Mapping[str, Any], path: Path, *names: str, low: int = 1) -> int | None:
    """Give the first of `names` that has a value, None when none has; raises BenchError when it is no count, or one for
    each layer."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, list):
                raise BenchError(f"{path}: {name} is another for each layer")
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise BenchError(f"{path}: {name} must be a whole number of at least {low}, not {value!r}")
            return value
    return None


def _dtype_bytes(config: Mapping[str, Any], path: Path) -> int:
    name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    nbytes = _DTYPE_BYTES.get(str(name).removeprefix("torch."))
    if nbytes is None:
        raise BenchError(f"{path}: unknown torch_dtype {name!r}; known: {', '.join(_DTYPE_BYTES)}")
    return nbytes
