"""What the modules of a model hold now: a checksum of all bytes of all tensors, and every plain setting beside them.

Weights change in place, and nothing tells: `param.data.copy_()`, which optimizers, LoRA merges and weight
synchronization use, leaves torch's `_version` as it was, and writes to the same address. So no cheaper question than
all bytes is sound, and all bytes are read at each generate().

What that costs: each byte is read once on a CPU (by xxh3_128, 11 GB/s where the memory gives a matrix product 12), and
twice on a GPU (a sum of each row and of each column). Decoding one token reads the same bytes, so the checksum costs
about what one more generated token costs. docs/engines.md has measured figures.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from xxhash import xxh3_128

LANES: Final = 1024
"""A tensor is added up as a matrix of that many columns of 8 bytes."""
COPIED_BYTES_MAX: Final = 64 << 20
"""What is not contiguous is copied by so much at a time."""
STATES: Final = ("quant_state", "state", "meta")
"""Attributes in which bitsandbytes and HQQ keep the scales of what they have quantized."""
CHANGING: Final = frozenset({
    "training", "gradient_checkpointing", "name_or_path", "warnings_issued", "hf_device_map", "rope_deltas",
})  # fmt: skip
"""Attributes of modules that say nothing of a prompt's KV, or are put right before each prompt (rope_deltas)."""
ROPES_BY_LENGTH: Final = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose angles depend on the whole sequence's length: a prefix has other keys in another prompt."""
TURNING: Final = ("inv_freq", "long_inv_freq", "max_seq_len_cached")
"""How the names end of what such an embedding makes anew from its settings for each prompt."""
DEPTH_MAX: Final = 3
_GOLDEN: Final = -7046029254386353131
"""2^64 divided by the golden ratio, as a signed number: the step of splitmix64, whose two multipliers follow."""
_MIX: Final = (-4658895280553007687, -7723592293110705685)

Tensors = list[tuple[str, torch.Tensor]]
Settings = list[tuple[str, str, str]]


def held_by(model: nn.Module, inactive: frozenset[str] = frozenset()) -> tuple[Tensors, Settings]:
    """The tensors that a model's modules hold, by name, and their settings: (module, attribute, value).

    Tensors are parameters, buffers and what STATES names; settings are the modules' classes, and all public attributes
    that are numbers, text, or made of such. A name with one of `inactive` in it belongs to an adapter that is switched
    off, and is left out, as are the settings of a layer of adapters when none of them is on: what peft wraps then is
    as it was without.
    """
    tensors: Tensors = []
    settings: Settings = []
    idle = "?"
    for name, module in model.named_modules():
        is_of_idle = name.startswith(idle) and not name.startswith(f"{idle}base_layer")
        if is_of_idle or inactive.intersection(name.split(".")):
            continue
        plain = name.replace(".base_layer", "")  # what peft calls the module that it is around
        turning = TURNING if _turns(module) else ()
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and own not in inactive and not _is_turning(own, turning):
                tensors.append((f"{plain}.{own}", tensor))
                for state in STATES:
                    tensors.extend(_within(f"{plain}.{own}.{state}", getattr(tensor, state, None)))
        if _is_idle(module):
            idle = f"{name}."
            continue
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            settings.append((plain, "", f"{type(module).__module__}.{type(module).__qualname__}"))
        for key, value in vars(module).items():
            if key.startswith("_") or key in CHANGING or key.endswith("dropout"):  # of no effect out of training
                continue
            if _is_turning(key, turning):
                continue
            if key in STATES or isinstance(value, torch.Tensor):
                tensors.extend(_within(f"{plain}.{key}", value))
            elif _is_plain(value):
                settings.append((plain, key, _without(value, inactive)))
    return tensors, settings


def checksum(tensors: Tensors) -> str:
    """32 hexadecimal digits of the names, types, shapes and bytes of these tensors: the same wherever the bytes are the
    same, but for a CPU's and a GPU's, which have checksums of other kinds.

    What changes is missed by a chance of 2^-128 on a CPU, of 2^-64 on a GPU: by the sums of `folded` each change of one
    element, row or column shows. A tensor without memory (of the meta device) counts by its shape. Waits for the device
    once.
    """
    digest, read = hashlib.sha256(), dict[tuple[Any, ...], bytes]()
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for name, outer in tensors:
        for tensor in _flattened(outer.detach()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            if tensor.is_meta or not tensor.numel():
                continue
            same = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
            if same not in read:  # tied weights are read once
                read[same] = f"{len(read)} ".encode()
                if tensor.device.type == "cpu":
                    read[same] = _bytes_checksum(tensor)
                else:
                    sums.setdefault(tensor.device, []).append(folded(tensor))
            digest.update(read[same])
    for found in zip(*(mixed(parts) for parts in sums.values()), strict=True) if sums else ():
        digest.update(str(sum(int(part) for part in found) % (1 << 64)).encode())
    return digest.hexdigest()[:32]


@torch.no_grad()
def folded(tensor: torch.Tensor) -> torch.Tensor:
    """The sums of a tensor's rows and columns of 8 bytes, modulo 2^64, and what is left behind its last whole row: a
    vector of int64 where the tensor is."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // (8 * LANES) * 8 * LANES
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    rows = words[: whole // 8].view(-1, LANES)
    return torch.cat([rows.sum(1), rows.sum(0), words[whole // 8 :], flat[flat.numel() // 8 * 8 :].long()])


@torch.no_grad()
def mixed(vectors: list[torch.Tensor]) -> list[int]:
    """Two numbers of 64 bits for what `folded` has made of tensors of one device, by splitmix64 of each element and its
    place."""
    whole = torch.cat(vectors)
    places = torch.arange(len(whole), device=whole.device, dtype=torch.int64)
    found = []
    for salt in (1, 2):
        spread = (whole + (places * 2 + salt) * _GOLDEN) ^ (places * _MIX[salt - 1])
        for shift, factor in zip((30, 27), _MIX, strict=True):
            spread = (spread ^ ((spread >> shift) & ((1 << (64 - shift)) - 1))) * factor
        found.append((spread ^ ((spread >> 31) & ((1 << 33) - 1))).sum())
    return [int(number) for number in torch.stack(found).tolist()]


def _bytes_checksum(tensor: torch.Tensor) -> bytes:
    digest = xxh3_128()
    for part in _pieces(tensor):
        digest.update(part.view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in order, contiguous, the whole at once where it is so already."""
    if tensor.is_contiguous():
        yield tensor
    elif tensor.shape[0] == 1:
        yield from _pieces(tensor[0])
    else:
        rows = max(COPIED_BYTES_MAX // max(tensor[0].numel() * tensor.itemsize, 1), 1)
        for start in range(0, tensor.shape[0], rows):
            yield tensor[start : start + rows].contiguous()


def _flattened(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor of a class of its own (torchao's, quanto's) is made of; itself if it is plain."""
    own: Any = tensor  # torch.Tensor itself has neither
    if hasattr(own, "__tensor_flatten__"):
        names, _ = own.__tensor_flatten__()
        for name in names:
            yield from _flattened(getattr(own, name))
    elif hasattr(own, "to_local"):
        yield from _flattened(own.to_local())
    else:
        yield tensor.as_subclass(torch.Tensor)


def _within(name: str, value: Any, depth: int = 0) -> Tensors:
    """The tensors in an attribute: it is one, or has some as items or as attributes."""
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if depth == DEPTH_MAX or value is None or isinstance(value, nn.Module | str | int | float):
        return []
    items: Any = getattr(value, "__dict__", {}).items()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return [found for key, inner in items for found in _within(f"{name}.{key}", inner, depth + 1)]


def _is_idle(module: nn.Module) -> bool:
    """Whether this is a layer of peft's adapters, none of which is on."""
    off = getattr(module, "disable_adapters", None)
    return isinstance(off, bool) and (off or not getattr(module, "active_adapter", ()))


def _turns(module: nn.Module) -> bool:
    """Whether this is a rotary embedding of which a layer's angles depend on the whole length."""
    rope = getattr(module, "rope_type", None)
    return bool(ROPES_BY_LENGTH.intersection(rope.values() if isinstance(rope, dict) else [rope]))


def _is_turning(name: str, endings: tuple[str, ...]) -> bool:
    return bool(endings) and name.endswith(endings) and not name.endswith("original_inv_freq")


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _without(value: Any, inactive: frozenset[str]) -> str:
    if isinstance(value, dict):
        value = sorted((str(key), repr(inner)) for key, inner in value.items() if key not in inactive)
    return repr(value)
