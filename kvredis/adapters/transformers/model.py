"""Facts of a transformers model: its KV's layout, the name that its keys carry, and which models are refused.

Two models that share a name and shapes may still have other KV: the same folder opened with other rotary angles, of
another revision, with a quantization or an adapter, or the same object after a training step. So a layout's model is
the name and a digest of all that as it is now. engine/identity.py lists what goes into it, and why.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel

from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import TORCH_DTYPES, dtype_name
from kvredis.storage.errors import LayoutError

from .cache import CACHE, attention_layers, fresh_cache, kept_kv, linear_layers
from .weights import checksum, held_by

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

DIGITS = 16
"""Hexadecimal digits of a layout's model that stand for everything but the name: training makes other weights by the
thousand."""
NOT_OF_KV: Final = (
    "dtype", "torch_dtype", "transformers_version", "architectures", "attn_implementation", "use_cache",
    "return_dict", "use_return_dict", "id2label", "label2id", "num_labels", "problem_type",
    "task_specific_params", "tokenizer_class", "tie_word_embeddings", "gradient_checkpointing",
    "initializer_range", "quantization_config",
)  # fmt: skip
"""Settings of a configuration that do not change what K and V are, or are asked for elsewhere."""
_ATTENTION: Mapping[str, Any] = getattr(transformers.modeling_utils, "ALL_ATTENTION_FUNCTIONS", {})
UNSET = GenerationConfig()  # type: ignore[no-untyped-call]
"""What a setting is in a GenerationConfig where it was not set: the model's own counts then."""
LIBRARIES = frozenset(
    {"transformers", "transformers_modules", "accelerate", "peft", "torch", "bitsandbytes", "kernels"}
)
"""Packages whose hooks and forward methods are known to leave KV what a model's weights and settings say."""
PRECISIONS: Final = (
    (torch.backends, "fp32_precision"),
    (torch.backends.cuda.matmul, "fp32_precision"),
    (torch.backends.cuda.matmul, "allow_fp16_accumulation"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (getattr(torch.backends.cudnn, "conv", torch.backends.cudnn), "fp32_precision"),
    (torch.backends.cudnn, "allow_tf32"),
    (getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision"),
    (getattr(torch.backends.mkldnn, "conv", None), "fp32_precision"),
)
"""Where torch keeps how exactly it multiplies."""


def layout_of(model: PreTrainedModel, name: str = "", chunk_tokens: int = 256) -> ChunkLayout:
    """The layout of a model's KV. `name` (default: where the weights were loaded from) stands for the model.

    The layout's model is that name, a "+" and the digits of identity_of(model): what is opened in another way, or has
    other weights, has keys of its own. It has the layers that keep K and V by token, sliding windows too.

    Raises LayoutError (a ValueError) and nothing else: for a model without a name, for a configuration that says
    nothing of KV that is one for all layers, and for KV that is not the prefix's alone or not alike in all layers:
    chunked or latent attention, linear attention in a cache of the model's own, KV shared between layers, an encoder,
    rotary angles that depend on the whole length, virtual tokens of peft, the model types of REFUSED, and what shows
    when the model computes two tokens (out of training and autocast, whatever it is in now; never without memory): a
    cache that it does not take, layers that keep no KV of a text, KV of another shape, or KV that depends on the tokens
    behind it.
    """
    name = name or model.config._name_or_path
    if not name:
        raise LayoutError("a model made from scratch needs a name: models that share one would read each other's KV")
    return layout_with(model, name, identity_of(model), chunk_tokens)


def layout_with(model: PreTrainedModel, name: str, identity: str, chunk_tokens: int = 256) -> ChunkLayout:
    """The same for an identity that is known already."""
    try:
        return _layout(model, name, identity, chunk_tokens)
    except LayoutError:
        raise
    except Exception as error:  # there are hundreds of configurations, and new kinds with each transformers
        raise LayoutError(f"{name}: its KV cannot be told from its configuration: {error}") from error


def _layout(model: PreTrainedModel, name: str, identity: str, chunk_tokens: int) -> ChunkLayout:
    config = model.config.get_text_config(decoder=True)
    for kind in (model.config.model_type, config.model_type):
        if kind in REFUSED:
            raise LayoutError(f"{name}: {kind} is not supported: {REFUSED[kind]}")
    if model.config.is_encoder_decoder:
        raise LayoutError(f"{name}: encoder-decoder models are not supported")
    if getattr(config, "kv_lora_rank", None):
        raise LayoutError(f"{name}: latent attention (kv_lora_rank) is not supported")
    cache = fresh_cache(model.config)
    layers, linear = attention_layers(cache, name), linear_layers(cache)
    _refuse_layer_types(model, config, name, bool(linear))
    without = sum(kind in NO_ATTENTION_TYPES for kind in getattr(config, "layer_types", None) or ())
    if len(layers) + len(linear) + without != config.num_hidden_layers:
        raise LayoutError(f"{name}: {config.num_hidden_layers} layers share the KV of {len(layers)}; not supported")
    if not layers:
        raise LayoutError(f"{name}: no layer keeps K and V by token; not supported")
    for rope in _ropes(config):
        if rope in ROPES_BY_LENGTH:
            raise LayoutError(f"{name}: rope_type {rope} depends on the whole length; not supported")
    kv_heads = _size(config, "num_key_value_heads", name) or config.num_attention_heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon, whose later models keep a copy of K and V for each head
    head_dim = _size(config, "head_dim", name) or config.hidden_size // config.num_attention_heads
    for other in ("v_head_dim", "global_head_dim"):
        if (_size(config, other, name) or head_dim) != head_dim:
            raise LayoutError(f"{name}: {other} is another than the {head_dim} of other KV; not supported")
    if (_size(config, "num_global_key_value_heads", name) or kv_heads) != kv_heads:
        raise LayoutError(f"{name}: layers have different numbers of KV heads; not supported")
    for prompt_learning in (getattr(each, "is_prompt_learning", False) for each in _peft_of(model).values()):
        if prompt_learning:
            raise LayoutError(f"{name}: peft puts virtual tokens before each prompt; not supported")
    kind = dtype_name(model.dtype)
    layout = ChunkLayout(len(layers), kv_heads, head_dim, kind, chunk_tokens, model=f"{name}+{identity}")
    if model.device.type != "meta":
        with as_served(model):
            _refuse_what_it_does(model, layout, name)
    return layout


@contextmanager
def as_served(model: PreTrainedModel) -> Iterator[None]:
    """Within it all modules are out of training, where dropout would give a prefix other KV each time, and autocast and
    gradients are off. Each module is told by its flag: train() merges adapters of some libraries."""
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for module in trained:
            module.training = True


def _size(config: PretrainedConfig, attribute: str, name: str) -> int | None:
    """A size of all layers, None where the configuration does not have it."""
    try:
        found: int | None = getattr(config, attribute, None)
    except RuntimeError as error:  # what transformers raises since 5.24 where layers differ, as Gemma 4's do
        raise LayoutError(f"{name}: layers have another {attribute} than others; not supported") from error
    return found


def _peft_of(model: PreTrainedModel) -> Mapping[str, Any]:
    return getattr(model, "peft_config", None) or {}


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


def identity_of(model: PreTrainedModel) -> str:
    """16 hexadecimal digits of everything but tokens that the bits of this model's KV depend on, as it is now.

    They are the same in each process with one version of transformers and the same kind of device. All weights are
    read: weights.py says what that costs.
    """
    config = model.config.get_text_config(decoder=True)
    adapters, peft = active_adapters(model), _peft_of(model)
    tensors, settings = held_by(model, frozenset(peft) - frozenset(adapters))
    facts = {
        "transformers": transformers.__version__,  # models of one version are mended in the next
        "class": f"{type(model).__module__}.{type(model).__qualname__}",  # with its revision, for code from the hub
        "config": _plain({key: value for key, value in config.to_diff_dict().items() if _shapes_kv(key)}),
        "implementations": _implementations(config),
        "revision": str(getattr(model.config, "_commit_hash", None)),  # gone in transformers 5.23
        "quantization": _plain(getattr(model.config, "quantization_config", None)),
        "adapters": {name: _plain(peft.get(name)) for name in adapters},
        "device": model.device.type,
        "precision": _precision(),
        "settings": hashlib.sha256(repr(settings).encode()).hexdigest(),
        "weights": checksum(tensors),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:DIGITS]


def why_not_now(model: PreTrainedModel) -> str:
    """Why a prompt's KV is not that of the model's identity now, so that nothing may be loaded or stored; else ""."""
    if torch.is_autocast_enabled(model.device.type):
        return f"torch.autocast is on for {model.device.type}"
    hooks: list[Any] = []
    hooks += [*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()]
    for module in model.modules():
        if module.training:
            return f"{type(module).__name__} is in training mode, call eval()"
        if module._forward_hooks or module._forward_pre_hooks:
            hooks += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if "forward" in vars(module) and module is not model:
            hooks.append(module.forward)
    for hook in hooks:
        if _package_of(hook) not in LIBRARIES:
            return f"{getattr(hook, '__qualname__', repr(hook))} is a hook or a forward method of no known library"
    return ""


def _package_of(function: Any) -> str:
    inner = getattr(function, "func", function)  # of functools.partial
    return str(getattr(inner, "__module__", "")).partition(".")[0]


def _implementations(config: PretrainedConfig) -> list[str]:
    """By what attention, experts and the like are computed: some of them leave out what a model asks for (a soft cap on
    scores, sinks), or were registered by the application."""
    found = []
    for key, value in sorted(vars(config).items()):
        if "_implementation" in key:
            function = _ATTENTION.get(value) if isinstance(value, str) and "attn" in key else None
            registered = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
            found.append(f"{key}={value} {registered}")
    return found


def _precision() -> list[str]:
    """How exactly torch multiplies: TF32 or bf16 within fp32, sums in fp16."""
    found = []
    for owner, attribute in PRECISIONS:
        try:
            found.append(str(getattr(owner, attribute, None)).replace("none", "ieee"))  # as "none" is taken
        except RuntimeError:  # set by the older way and asked for by the newer
            found.append("another way")
    try:
        found.append(torch.get_float32_matmul_precision())
    except RuntimeError:
        found.append("another way")
    return found


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


# -- what a cache made from the configuration does not show ----------------------------------------------------------


def _refuse_layer_types(model: PreTrainedModel, config: PretrainedConfig, name: str, has_linear: bool) -> None:
    """Transformers makes plain layers of all kinds that it does not know."""
    known = LAYER_TYPES + (LINEAR_TYPES + NO_ATTENTION_TYPES if has_linear else ())
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in known:
            raise LayoutError(f"{name}: layers of {kind} are not supported with this transformers")
    if getattr(config, "attention_chunk_size", None) and not getattr(config, "layer_types", None):
        raise LayoutError(f"{name}: chunked attention is not supported")
    if getattr(model, "_is_stateful", False) and not has_linear:
        raise LayoutError(f"{name}: its state is in a cache of its own; not supported with this transformers")


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
            raise LayoutError(f"{name}: it cannot compute with a cache that it is given: {error}") from error
        finally:
            for module, before in deltas:
                module.rope_deltas = before
        tried.append([kept_kv(layer) for layer in attention_layers(cache) if layer.is_initialized])
    if not tried[0]:
        raise LayoutError(f"{name}: it keeps no KV in a cache that it is given; not supported")
    if len(tried[0]) != layout.layers:  # the others attend to something else, as to a picture, and wait for it
        kept = f"{len(tried[0])} of {layout.layers} layers keep"
        raise LayoutError(f"{name}: of a text {kept} KV in a cache that it is given; not supported")
    shape, dtype = (1, layout.kv_heads, len(TRIED_IDS[0]), layout.head_dim), TORCH_DTYPES[layout.dtype]
    for one, other in ((pair[0], pair[1]) for layers in zip(*tried, strict=True) for pair in zip(*layers, strict=True)):
        if tuple(one.shape) != shape or one.dtype != dtype:
            found = f"{list(one.shape)} of {one.dtype}"
            raise LayoutError(f"{name}: the KV of two tokens is {found}, not {list(shape)} of {dtype}; not supported")
        # Of models that look ahead it is far more than what rounding makes of other experts' company.
        first, again = one[:, :, 0].float(), other[:, :, 0].float()
        if (first - again).norm() > 2 * torch.finfo(dtype).eps ** 0.5 * first.norm():
            raise LayoutError(f"{name}: the KV of a token depends on those behind it (is_decoder?); not supported")


def _ropes(config: PretrainedConfig) -> Iterator[str]:
    """Every rope_type that a configuration names: one, or one for each type of layer."""
    for found in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if isinstance(found, dict):
            for part in (found, *(value for value in found.values() if isinstance(value, dict))):
                yield str(part.get("rope_type") or part.get("type") or "default")
