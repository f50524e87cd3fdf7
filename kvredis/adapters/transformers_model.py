"""What a model of transformers is to its KV: the layout, what tells its keys from another's, what must be refused.

Two models that share a name and shapes may still have other KV: the same folder opened with other rotary angles, of
another revision, with a quantization or an adapter. So a layout's model is the name and a digest of all that.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel

from .layout import ChunkLayout
from .tensors import TORCH_DTYPES, dtype_name
from .transformers_cache import CACHE, attention_layers, fresh_cache, kept_kv, linear_layers

HAS_POSITIONS_BY_MASK: Final = hasattr(GenerationMixin, "_prepare_position_ids_for_generation")
"""Whether generate() makes the positions from attention_mask, M-RoPE's too; in versions before, each model does."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "moshi": "its prefill ignores the window that its cache keeps: tokens behind a loaded prefix would see less",
        "mpt": "its ALiBi does not fit several tokens behind KV that is there already",
    }
)
"""Model types that transformers itself does not compute behind a prefix as it does at once, and why."""
ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the whole sequence's length: a prefix has other keys in another prompt."""
LAYER_TYPES = ("full_attention", "sliding_attention")
LINEAR_TYPES = ("linear_attention", "conv")
NO_ATTENTION_TYPES = ("mlp", "moe")
POSITIONS_BY_MASK = ("bloom",)
"""Without position_ids, and yet a padded prompt's KV is that of the prompt alone: ALiBi counts by attention_mask."""

TRIED_IDS: Final = ((3, 4), (3, 5))
"""Two prompts that begin alike."""

DIGITS = 8
"""Hexadecimal digits of a layout's model that stand for everything but the name."""
NOT_OF_KV: Final = (
    "dtype", "torch_dtype", "transformers_version", "architectures", "attn_implementation", "use_cache",
    "return_dict", "use_return_dict", "id2label", "label2id", "num_labels", "problem_type",
    "task_specific_params", "tokenizer_class", "tie_word_embeddings", "gradient_checkpointing",
    "initializer_range", "quantization_config",
)  # fmt: skip
"""Settings of a configuration that do not change what K and V are, or are asked for elsewhere."""
UNSET = GenerationConfig()  # type: ignore[no-untyped-call]
"""What a setting is in a GenerationConfig where nobody has said anything: the model's own counts then."""
SAMPLED_PARAMETERS_MAX = 2048
SAMPLED_ELEMENTS = 16


def layout_of(model: PreTrainedModel, name: str = "", chunk_tokens: int = 256) -> ChunkLayout:
    """The layout of a model's KV. `name` (default: where the weights were loaded from) stands for these very weights.

    The layout's model is that name, a "+" and 8 hexadecimal digits: of the configuration, as far as it shapes KV, the
    revision, the quantization, the adapters that are active, and a few elements of each weight. So what was opened in
    another way has keys of its own; they are the same in each process with one version of transformers.
    It has the layers that keep K and V by token, sliding windows too. Raises ValueError for a model without a name, and
    for one whose KV is not the prefix's alone or not alike in all layers: chunked or latent attention, linear attention
    in a cache of the model's own, KV shared between layers, an encoder, rotary angles that depend on the whole length,
    the model types of REFUSED, and what shows when the model computes two tokens (not in training, nor without memory):
    a cache that it does not take, layers that keep no KV of a text, KV of another shape, or KV that depends on the
    tokens behind it.
    """
    name = name or model.config._name_or_path
    if not name:
        raise ValueError("a model made from scratch needs a name: models that share one would read each other's KV")
    config = model.config.get_text_config(decoder=True)
    for kind in (model.config.model_type, config.model_type):
        if kind in REFUSED:
            raise ValueError(f"{name}: {kind} is not supported: {REFUSED[kind]}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name}: encoder-decoder models are not supported")
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{name}: latent attention (kv_lora_rank) is not supported")
    cache = fresh_cache(model.config)
    layers, linear = attention_layers(cache, name), linear_layers(cache)
    _refuse_layer_types(model, config, name, bool(linear))
    without = sum(kind in NO_ATTENTION_TYPES for kind in getattr(config, "layer_types", None) or ())
    if len(layers) + len(linear) + without != config.num_hidden_layers:
        raise ValueError(f"{name}: {config.num_hidden_layers} layers share the KV of {len(layers)}; not supported")
    if not layers:
        raise ValueError(f"{name}: no layer keeps K and V by token; not supported")
    for rope in _ropes(config):
        if rope in ROPES_BY_LENGTH:
            raise ValueError(f"{name}: rope_type {rope} depends on the whole length; not supported")
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon, whose later models keep a copy of K and V for each head
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for other in ("v_head_dim", "global_head_dim"):
        if (getattr(config, other, None) or head_dim) != head_dim:
            raise ValueError(f"{name}: {other} is another than the {head_dim} of other KV; not supported")
    if (getattr(config, "num_global_key_value_heads", None) or kv_heads) != kv_heads:
        raise ValueError(f"{name}: layers have different numbers of KV heads; not supported")
    unlike = f"{name}+{_digits(model, config)}"
    layout = ChunkLayout(len(layers), kv_heads, head_dim, dtype_name(model.dtype), chunk_tokens, model=unlike)
    if not model.training and model.device.type != "meta":  # dropout gives a prefix other KV each time
        _refuse_what_it_does(model, layout, name)
    return layout


def active_adapters(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the adapters of peft that take part now, sorted; those that are switched off are not among them."""
    if not (getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")):
        return ()
    found: set[str] = set()
    for module in model.modules():
        # The layers of peft, known by what they have: peft itself may be missing. A model has a method of that name.
        if getattr(module, "disable_adapters", None) is False:
            names = getattr(module, "active_adapter", ())
            found.update([names] if isinstance(names, str) else names)
    return tuple(sorted(found))


def setting(model: PreTrainedModel, options: Mapping[str, Any], name: str) -> Any:
    """What generate(**options) will take: an option, else what the generation_config among them says, else the
    model's."""
    if name in options:
        return options[name]
    given = getattr(options.get("generation_config"), name, None)
    unset = given is None or (not isinstance(given, torch.Tensor) and given == getattr(UNSET, name, None))
    return getattr(model.generation_config, name, None) if unset else given


def inferred_mask(model: PreTrainedModel, input_ids: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """The attention_mask that generate() makes where it is given none: without the tokens that are pad_token_id, unless
    that is an eos_token_id too, as which it may be a token like others."""
    pad, eos = setting(model, options, "pad_token_id"), setting(model, options, "eos_token_id")
    ones = torch.ones_like(input_ids, dtype=torch.long)
    if pad is None or input_ids.dtype not in (torch.int, torch.long):
        return ones
    padding = torch.as_tensor(pad, device="cpu")  # where asking does not wait for a GPU
    if eos is not None and bool(torch.isin(torch.as_tensor(eos, device="cpu"), padding).any()):
        return ones
    if "attention_mask" not in signature(model.forward).parameters:
        return ones
    return input_ids.ne(padding.to(input_ids.device)).long()


def counts_columns(model: PreTrainedModel) -> bool:
    """Whether positions are columns, so that a prompt behind padding has other KV than the prompt alone."""
    if model.config.get_text_config(decoder=True).model_type in POSITIONS_BY_MASK:
        return False
    return "position_ids" not in signature(model.forward).parameters


def with_deltas(model: PreTrainedModel) -> list[Any]:
    """The modules that keep rope_deltas: with M-RoPE, how far the last computed prompt's positions are from where they
    would be without pictures. Models go by it wherever the cache is not empty: behind KV of another prompt as well."""
    return [module for module in model.modules() if hasattr(module, "rope_deltas")]


def forget_deltas(modules: list[Any], pads: list[int]) -> None:
    """Make these modules count the positions of a batch of texts, whatever they computed before."""
    for module in modules:
        if HAS_POSITIONS_BY_MASK:
            module.rope_deltas = None
        else:  # positions are columns and this; without it, those of the tokens behind loaded KV would begin at 0
            device = next(module.parameters()).device
            module.rope_deltas = -torch.tensor(pads, device=device)[:, None]


# -- what tells models of one name apart -----------------------------------------------------------------------------


def _digits(model: PreTrainedModel, config: PretrainedConfig) -> str:
    adapters, peft = active_adapters(model), getattr(model, "peft_config", None) or {}
    facts = {
        "config": _plain({key: value for key, value in config.to_diff_dict().items() if _shapes_kv(key)}),
        "revision": str(getattr(model.config, "_commit_hash", None)),  # gone in transformers 5.23
        "quantization": _plain(getattr(model.config, "quantization_config", None)),
        "adapters": {name: _plain(peft.get(name)) for name in adapters},
        "weights": _sample(model, set(peft) - set(adapters)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _shapes_kv(key: str) -> bool:
    if key in NOT_OF_KV or key in vars(UNSET):
        return False
    return not key.startswith(("_", "output_")) and not key.endswith(("_token_id", "_dropout", "_implementation"))


def _plain(value: Any) -> Any:
    """The same as JSON can say it, in one order in each process."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(str(inner) for inner in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _plain(value.to_dict()) if hasattr(value, "to_dict") else str(value)


@torch.no_grad()
def _sample(model: PreTrainedModel, inactive: set[str]) -> str:
    """A digest of a few elements of each weight: what else tells one revision or adapter from the next, where neither
    the configuration nor transformers remembers which it was."""
    digest = hashlib.sha256()
    named = {
        name.replace(".base_layer.", "."): weight  # what peft calls the weights that it is around
        for name, weight in model.named_parameters()
        if not inactive.intersection(name.split("."))
    }
    chosen = sorted(named)[:: max(len(named) // SAMPLED_PARAMETERS_MAX, 1)]
    for name in chosen:
        weight = named[name].data
        if type(weight) is not torch.Tensor or weight.is_meta or not weight.numel():
            continue  # offloaded, or of a kind of which nobody knows what an element is
        count = min(weight.numel(), SAMPLED_ELEMENTS)
        places = torch.arange(count, device=weight.device) * weight.numel() // count
        elements = weight[torch.unravel_index(places, weight.shape)] if weight.ndim else weight[None]
        digest.update(f"{name} {tuple(weight.shape)} ".encode())
        digest.update(bytes(elements.cpu().contiguous().view(torch.uint8).tolist()))
    return digest.hexdigest()


# -- what a cache made from the configuration does not show ----------------------------------------------------------


def _refuse_layer_types(model: PreTrainedModel, config: PretrainedConfig, name: str, has_linear: bool) -> None:
    """Transformers makes plain layers of all kinds that it does not know."""
    known = LAYER_TYPES + (LINEAR_TYPES + NO_ATTENTION_TYPES if has_linear else ())
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in known:
            raise ValueError(f"{name}: layers of {kind} are not supported with this transformers")
    if getattr(config, "attention_chunk_size", None) and not getattr(config, "layer_types", None):
        raise ValueError(f"{name}: chunked attention is not supported")
    if getattr(model, "_is_stateful", False) and not has_linear:
        raise ValueError(f"{name}: its state is in a cache of its own; not supported with this transformers")


@torch.no_grad()
def _refuse_what_it_does(model: PreTrainedModel, layout: ChunkLayout, name: str) -> None:
    """What no configuration tells: whether the model keeps its KV in a cache that it is given, as the layout has it,
    and whether the first token's is the same whatever comes behind it."""
    tried = []
    deltas = [(module, module.rope_deltas) for module in with_deltas(model)]  # of a conversation under way
    for ids in TRIED_IDS:
        cache = fresh_cache(model.config)
        try:
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=True, **{CACHE: cache})
        except Exception as error:
            raise ValueError(f"{name}: it cannot compute with a cache that it is given: {error}") from error
        finally:
            for module, before in deltas:
                module.rope_deltas = before
        tried.append([kept_kv(layer) for layer in attention_layers(cache) if layer.is_initialized])
    if not tried[0]:
        raise ValueError(f"{name}: it keeps no KV in a cache that it is given; not supported")
    if len(tried[0]) != layout.layers:  # the others attend to something else, as to a picture, and wait for it
        kept = f"{len(tried[0])} of {layout.layers} layers keep"
        raise ValueError(f"{name}: of a text {kept} KV in a cache that it is given; not supported")
    shape, dtype = (1, layout.kv_heads, len(TRIED_IDS[0]), layout.head_dim), TORCH_DTYPES[layout.dtype]
    for one, other in ((pair[0], pair[1]) for layers in zip(*tried, strict=True) for pair in zip(*layers, strict=True)):
        if tuple(one.shape) != shape or one.dtype != dtype:
            found = f"{list(one.shape)} of {one.dtype}"
            raise ValueError(f"{name}: the KV of two tokens is {found}, not {list(shape)} of {dtype}; not supported")
        # Of models that look ahead it is far more than what rounding makes of other experts' company.
        first, again = one[:, :, 0].float(), other[:, :, 0].float()
        if (first - again).norm() > 2 * torch.finfo(dtype).eps ** 0.5 * first.norm():
            raise ValueError(f"{name}: the KV of a token depends on those behind it (is_decoder?); not supported")


def _ropes(config: PretrainedConfig) -> Iterator[str]:
    """Every rope_type that a configuration names: one, or one for each type of layer."""
    for found in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if isinstance(found, dict):
            for part in (found, *(value for value in found.values() if isinstance(value, dict))):
                yield str(part.get("rope_type") or part.get("type") or "default")
