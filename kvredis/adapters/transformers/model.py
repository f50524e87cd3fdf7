"""Facts of a transformers model: its KV's layout, the name that its keys carry, and which models are refused.

Two models that share a name and shapes may still have other KV: the same folder opened with other rotary angles, of
another revision, with a quantization or an adapter, or the same object after a training step. So a layout's model is
the name and a digest of all that as it is now. engine/identity.py lists what goes into it, and why.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import torch
import transformers
from torch.nn.modules import module as torch_module
from transformers import Cache, GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel

from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import dtype_name
from kvredis.storage.errors import LayoutError

from .cache import CACHE, LayerShape, attention_layers, fresh_cache, kept_kv, layout_for, linear_layers
from .weights import ROPES_BY_LENGTH, checksum, held_by

HAS_POSITIONS_BY_MASK: Final = hasattr(GenerationMixin, "_prepare_position_ids_for_generation")
"""Whether generate() makes the positions from attention_mask, M-RoPE's too; in versions before, each model does."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "moshi": "its prefill ignores the window that its cache keeps: tokens behind a loaded prefix would see less",
        "mpt": "its ALiBi does not fit several tokens behind KV that is there already",
    }
)
"""Model types that transformers itself does not compute behind a prefix as it does at once, and why."""
LAYER_TYPES = ("full_attention", "sliding_attention")
LINEAR_TYPES = ("linear_attention", "conv", "hybrid")
NO_ATTENTION_TYPES = ("mlp", "moe")
POSITIONS_BY_MASK = ("bloom",)
"""Without position_ids, and yet a padded prompt's KV is that of the prompt alone: ALiBi counts by attention_mask."""

TRIED_TOKENS: Final = 12
TRIED_CUT: Final = 10
TRIED_SHARE_MAX: Final = 0.25
"""What comes behind a prompt that was computed in two parts may differ from what the whole gives by so much of what the
second part alone would give, and by no more than rounding_max. Of a model that forgets the first part it differs by
about all of it, of one that forgets it in some layers by less (Jamba by 0.08 to 0.5, Bamba by 0.24 to 0.5)."""

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
    {"transformers", "transformers_modules", "accelerate", "peft", "torch", "bitsandbytes", "kernels", "kvredis"}
)
"""Packages whose hooks and forward methods are known to leave KV what a model's weights and settings say."""
REPLACEABLE: Final = ("forward", "prepare_inputs_for_generation")
"""Methods by which an application gives one model other inputs or other results."""
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


class Served(NamedTuple):
    """How a model's KV is stored: the layout, and the shapes of K and V of each layer that has them."""

    layout: ChunkLayout
    shapes: tuple[LayerShape, ...]


class Trial(NamedTuple):
    """What a model does with a few tokens: read at once, in two parts, and the second part alone. The first three are
    caches, the others logits of the second part's tokens, [1, tokens, vocabulary]."""

    whole: Cache
    parts: Cache
    alone: Cache
    logits: torch.Tensor
    behind: torch.Tensor
    apart: torch.Tensor


def layout_of(model: PreTrainedModel, name: str = "", chunk_tokens: int = 256) -> ChunkLayout:
    """The layout of a model's KV. `name` (default: where the weights were loaded from) stands for the model.

    The layout's model is that name, a "+" and the digits of identity_of(model): what is opened in another way, or has
    other weights, has keys of its own. It has the layers that keep K and V by token, sliding windows too.

    Raises LayoutError (a ValueError) and nothing else: for a model without a name and for KV that is not the
    prefix's alone: chunked attention, linear attention in a cache of the model's own, states without KV, an encoder,
    virtual tokens of peft, the model types of REFUSED, and what shows when the model computes a few tokens (out of
    training and autocast, whatever it is in now): a cache that it does not take, layers that keep no KV of a text, KV
    that depends on the tokens behind it, or other logits where a prompt is computed in two parts. The shapes are those
    of the KV that it keeps then.
    """
    name = name or model.config._name_or_path
    if not name:
        raise LayoutError("a model made from scratch needs a name: models that share one would read each other's KV")
    return layout_with(model, name, identity_of(model), chunk_tokens).layout


def layout_with(model: PreTrainedModel, name: str, identity: str, chunk_tokens: int = 256) -> Served:
    """The same for an identity that is known already, and the shapes."""
    try:
        return _layout(model, name, identity, chunk_tokens)
    except LayoutError:
        raise
    except Exception as error:  # there are hundreds of configurations, and new kinds with each transformers
        raise LayoutError(f"{name}: its KV cannot be told from its configuration: {error}") from error


def _layout(model: PreTrainedModel, name: str, identity: str, chunk_tokens: int) -> Served:
    config = model.config.get_text_config(decoder=True)
    for kind in (model.config.model_type, config.model_type):
        if kind in REFUSED:
            raise LayoutError(f"{name}: {kind} is not supported: {REFUSED[kind]}")
    if model.config.is_encoder_decoder:
        raise LayoutError(f"{name}: encoder-decoder models are not supported")
    cache = fresh_cache(model.config)
    layers, linear = attention_layers(cache, name), linear_layers(cache)
    _refuse_layer_types(model, config, name, bool(linear))
    kinds = getattr(config, "layer_types", None) or ()
    without = sum(kind in NO_ATTENTION_TYPES for kind in kinds) + (getattr(config, "num_kv_shared_layers", None) or 0)
    keeping = len({id(layer) for layer in (*layers, *linear)})
    if keeping + without != config.num_hidden_layers:
        raise LayoutError(f"{name}: {config.num_hidden_layers} layers share the KV of {keeping}; not supported")
    if not layers:
        raise LayoutError(
            f"{name}: no layer keeps K and V by token, and states are stored beside these alone:"
            " use generate() of the model itself"
        )
    turning_of(model, name)
    for prompt_learning in (getattr(each, "is_prompt_learning", False) for each in _peft_of(model).values()):
        if prompt_learning:
            raise LayoutError(f"{name}: peft puts virtual tokens before each prompt; not supported")
    with as_served(model):
        shapes = _shapes_that_it_keeps(model, len(layers), name)
    return Served(layout_for(shapes, dtype_name(model.dtype), chunk_tokens, f"{name}+{identity}"), shapes)


@contextmanager
def as_served(model: PreTrainedModel) -> Iterator[None]:
    """Within it all modules are out of training, where dropout would give a prefix other KV each time, and autocast and
    gradients are off. Each module is told by its flag: train() merges adapters of some libraries."""
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        with (
            torch.no_grad(),
            torch.autocast("cpu" if model.device.type == "meta" else model.device.type, enabled=False),
        ):
            yield
    finally:
        for module in trained:
            module.training = True


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
        hooks += [vars(module)[name] for name in REPLACEABLE if name in vars(module)]
    for kind in dict.fromkeys(map(type, model.modules())):
        owner = next(each for each in kind.__mro__ if "forward" in vars(each))
        forward = vars(owner)["forward"]
        if _package_of(forward) != owner.__module__.partition(".")[0]:  # replaced for all modules of the class
            hooks.append(forward)
    for hook in hooks:
        if _package_of(hook) not in LIBRARIES:
            return f"{getattr(hook, '__qualname__', repr(hook))} is a hook or a forward method of no known library"
    return ""


def _package_of(function: Any) -> str:
    inner = getattr(function, "func", function)  # of functools.partial
    inner = getattr(inner, "__func__", inner)
    # where it was written: functools.wraps gives it the module of what it stands for
    home = getattr(inner, "__globals__", {}).get("__name__") or getattr(inner, "__module__", "")
    return str(home).partition(".")[0]


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


def tried(model: PreTrainedModel, between: Callable[[Cache], None] | None = None) -> Trial:
    """Have a model read a few tokens. `between` may change the cache of the first part before the second is read. What
    the model keeps of a conversation (rope_deltas) is as it was then."""
    ids = torch.arange(TRIED_TOKENS, device=model.device)[None] + 3
    ids %= model.config.get_text_config(decoder=True).vocab_size
    deltas = [(module, module.rope_deltas) for module in with_deltas(model)]

    takes_positions = "cache_position" in signature(model.forward).parameters  # which generate() gives them then

    def read(cache: Cache, tokens: torch.Tensor, behind: int = 0) -> torch.Tensor:
        words = {CACHE: cache, "use_cache": True}
        if takes_positions:
            words["cache_position"] = torch.arange(behind, behind + tokens.shape[1], device=model.device)
        logits: torch.Tensor = model(input_ids=tokens, **words).logits
        return logits[:, TRIED_CUT - TRIED_TOKENS :]

    whole, parts, alone = (fresh_cache(model.config) for _ in range(3))
    try:
        forget_deltas([module for module, _ in deltas], [0])
        logits = read(whole, ids)
        read(parts, ids[:, :TRIED_CUT])
        if between is not None:
            between(parts)
        rest = ids[:, TRIED_CUT:]
        return Trial(whole, parts, alone, logits, read(parts, rest, TRIED_CUT), read(alone, rest))
    finally:
        for module, before in deltas:
            module.rope_deltas = before


def is_far(first: torch.Tensor, second: torch.Tensor, apart: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the second is farther from the first than another order of computing the same explains, given what comes
    of the second part alone."""
    one, two, other = (tensor.double() for tensor in (first, second, apart))
    eps = torch.finfo(dtype).eps
    most = min(TRIED_SHARE_MAX * (one - other).norm(), rounding_max(dtype) * one.norm())
    return not bool((one - two).norm() <= most + eps * one.norm())


def rounding_max(dtype: torch.dtype) -> float:
    """The largest share of a tensor that another order of computing it may change: 0.0007 of fp32, where served models
    were seen to differ by 0.000005, and 0.18 of bf16, where rounding sends some tokens to other experts."""
    return float(2 * torch.finfo(dtype).eps ** 0.5)


def _shapes_that_it_keeps(model: PreTrainedModel, layers: int, name: str) -> tuple[LayerShape, ...]:
    """The shapes of the KV that a model keeps, told by its reading a few tokens. Raises LayoutError for what no
    configuration tells: a model that does not keep its KV in a cache that it is given, KV of a token that depends on
    those behind it, and logits of a prompt in two parts that are not those of the whole."""
    try:
        found = tried(model)
    except Exception as error:
        raise LayoutError(f"{name}: it cannot compute with a cache that it is given: {error}") from error
    whole, parts = (
        [kept_kv(layer) for layer in attention_layers(cache) if layer.is_initialized]
        for cache in (found.whole, found.parts)
    )
    if not whole:
        raise LayoutError(f"{name}: it keeps no KV in a cache that it is given; not supported")
    if len(whole) != layers:  # the others attend to something else, as to a picture, and wait for it
        kept = f"{len(whole)} of {layers} layers keep"
        raise LayoutError(f"{name}: of a text {kept} KV in a cache that it is given; not supported")
    for one, other in zip(whole, parts, strict=True):
        for first, again in zip(one, other, strict=True):
            if first.ndim != 4 or first.shape[2] not in (0, TRIED_TOKENS) or first.dtype != model.dtype:
                shape = f"{list(first.shape)} of {first.dtype}"
                raise LayoutError(f"{name}: the KV of {TRIED_TOKENS} tokens is {shape}; not supported")
            if first.is_meta:
                continue
            # Of models that look ahead it is far more than what rounding makes of other experts' company.
            head, same = first[:, :, :TRIED_CUT].float(), again[:, :, :TRIED_CUT].float()
            if (head - same).norm() > rounding_max(model.dtype) * head.norm():
                raise LayoutError(f"{name}: the KV of a token depends on those behind it (is_decoder?); not supported")
    is_cut_well = found.logits.is_meta or not is_far(found.logits, found.behind, found.apart, model.dtype)
    if not is_cut_well and not linear_layers(found.whole):  # state.py says it of those, and by which state
        raise LayoutError(f"{name}: what follows a prompt computed in two parts is another; not supported")
    return tuple(LayerShape(k.shape[1], k.shape[3], v.shape[1], v.shape[3]) for k, v in whole)


class Turning(NamedTuple):
    """A rotary embedding whose angles are others in prompts of more than `tokens` tokens."""

    rope: Literal["dynamic", "longrope"]
    tokens: int


def turning_of(model: PreTrainedModel, name: str = "") -> Turning | None:
    """The length behind which a model's angles are others; None where they are always the same. Raises LayoutError for
    a model with several such lengths."""
    config = model.config.get_text_config(decoder=True)
    found = set()
    for part in _ropes(config):
        rope = part.get("rope_type") or part.get("type")
        usual = config.max_position_embeddings if rope in ROPES_BY_LENGTH else 0
        own = part.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if rope == "longrope":
            found.add(Turning("longrope", int(own or usual)))
        elif rope == "dynamic":
            found.add(Turning("dynamic", int(min(own or usual, usual)) - 1))  # at its length it keeps what it had
    if len(found) > 1:
        raise LayoutError(f"{name}: its layers' rotary angles change at several lengths; not supported")
    return found.pop() if found else None


def _ropes(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """What a configuration says of rotary embeddings: one dictionary, or one for each type of layer."""
    for found in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if isinstance(found, dict):
            yield from (found, *(value for value in found.values() if isinstance(value, dict)))
