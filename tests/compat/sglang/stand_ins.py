"""What of SGLang, and below it, needs a GPU or a processor with AMX, in torch: kernels, and how pages are moved.

SGLang's scheduler, caches, pools, controllers and models are its own.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.compat.sglang import attention, recurrent, speculative

ABSENT = ("torchvision", "torchaudio")
KERNELS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (*attention.FUNCTIONS, *recurrent.FUNCTIONS, *speculative.FUNCTIONS)
}
Tensors = Sequence[torch.Tensor]


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """What SGLang imports of packages that these tests have no use for: names without a meaning."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Answer for what is ABSENT, and for what is in it."""
        is_it = fullname.split(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_it else None

    def create_module(self, spec: Any) -> types.ModuleType:
        """Make an empty package whose every name is an empty class."""
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = "0.0"  # type: ignore[attr-defined]

        def named(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = named  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def install() -> None:
    """Before SGLang is imported: have it find its kernels, and take no others."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
    torch.cpu._is_amx_tile_supported = lambda: False  # all machines do the same
    sys.meta_path.append(Absent())
    for name in ("sgl_kernel", "sgl_kernel.kvcacheio", "sgl_kernel.mamba"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__getattr__ = kernel  # type: ignore[method-assign]
        sys.modules[name] = module
    setattr(torch.ops, "sgl_kernel", types.SimpleNamespace(**KERNELS))  # noqa: B010


def kernel(name: str) -> Callable[..., Any]:
    """The function of sgl_kernel with this name."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in KERNELS:
        return KERNELS[name]

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} was not thought to be called on a CPU")

    return refuse


def replace() -> None:
    """Once SGLang is imported: have it go without a GPU, and take the backend for AMX, whose kernels these are."""
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla
    from sglang.srt.models import qwen2_moe

    runtime_context.get_platform()._install(has_amx=True)
    common._cuda_host_register = lambda *_, **__: None
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GiB are to stay free, where tests beside these need them
    for module in (mha, mla, mamba):
        for move in (transfer_kv_direct, transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf):
            setattr(module, move.__name__, move)
    torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]
    setattr(torch.Tensor, "pin_memory", lambda self: self)  # noqa: B010
    allocation.get_last_loc_triton = allocation.get_last_loc_torch
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True  # as of GPUs; what it takes is torch's
    hybrid_linear_attn_backend.track_mamba_states_all_layers = recurrent.track_mamba_states_all_layers
    qwen2_moe.fused_gate_sigmoid_mul_add = recurrent.fused_gate_sigmoid_mul_add
    FusedRMSNormGated.forward = recurrent.gated_norm


def transfer_kv_direct(
    src_layers: Tensors, dst_layers: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Copy tokens of each layer, where both sides have layers of tokens."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Copy tokens of all layers of keys, and of values, into pages, each of which has all layers."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices.long()[::page_size] // page_size
    for place, layer in enumerate(src_ptrs):
        tokens = layer[src_indices.long()]
        dst_ptrs[place // layers][pages, place % layers] = tokens.view(-1, page_size, *tokens.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy tokens of one layer of keys, and of values, out of pages."""
    pages = src_indices.long()[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices.long()] = source[pages, layer_id].flatten(0, 1)
