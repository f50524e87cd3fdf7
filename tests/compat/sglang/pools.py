"""SGLang's own device pools on the CPU, of several kinds of models, and its host pools over them.

Constructors differ by version: at first a host pool takes its device pool, later what that says of itself.
"""

import inspect
import types
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from tests.compat.sglang.pages import PAGE_TOKENS

try:
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
except ImportError:  # 0.5.17
    from sglang.srt.mem_cache.memory_pool_host import MambaPoolHost, MHATokenToKVPoolHost, MLATokenToKVPoolHost
else:
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GiB are to stay free, where tests beside these need them

TOKENS = 1024
LAYERS = 4
RATIO = 2.0
"""Tokens of a host pool to one of its device's."""
HEADS: dict[str, Any] = {"head_num": 2, "head_dim": 64}
LATENT: dict[str, Any] = {"kv_lora_rank": 128, "qk_rope_head_dim": 32}
COMMON: dict[str, Any] = {"page_size": PAGE_TOKENS, "device": "cpu"}


def heads(layers: int, dtype: torch.dtype = torch.bfloat16) -> MHATokenToKVPool:
    """A device's pool of keys and values."""
    return MHATokenToKVPool(
        size=TOKENS,
        layer_num=layers,
        dtype=dtype,
        enable_memory_saver=False,
        enable_alt_stream=False,
        **COMMON,
        **HEADS,
    )


def latents(layers: int, dtype: torch.dtype = torch.bfloat16) -> MLATokenToKVPool:
    """A device's pool of latents (MLA)."""
    return MLATokenToKVPool(
        size=TOKENS, layer_num=layers, dtype=dtype, enable_memory_saver=False, **COMMON, **LATENT
    )  # fmt: skip


def states(ssm: str = "float32", conv: str = "bfloat16", layers: int = 3, width: int = 16) -> MambaPool:
    """A device's pool of Mamba's states."""
    shape = types.SimpleNamespace(conv=[(96, 3)], temporal=(4, width, 16))
    dtype = types.SimpleNamespace(conv=getattr(torch, conv), temporal=getattr(torch, ssm))
    params = types.SimpleNamespace(shape=shape, dtype=dtype, is_kda=False)
    return MambaPool(size=16, spec_state_size=16, cache_params=params, mamba_layer_ids=[*range(layers)], device="cpu")


def windows() -> SWAKVPool:
    """A device's pool of two layers with sliding windows and two without."""
    return SWAKVPool(
        TOKENS, TOKENS // 2, dtype=torch.bfloat16, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1, 3],
        enable_alt_stream=False, **COMMON, **HEADS,
    )  # fmt: skip


def hybrid(*, use_mla: bool) -> HybridLinearKVPool:
    """A device's pool of attention, with latents or without, and of states."""
    latent = LATENT | {"use_mla": True} if use_mla else {}
    return HybridLinearKVPool(
        TOKENS, dtype=torch.bfloat16, full_attention_layer_ids=[1, 3], mamba_pool=states(layers=2), **COMMON, **HEADS,
        **latent,
    )  # fmt: skip


def device_pool(model: str) -> Any:
    """The device's pool of a kind of model: dense, latents (MLA), windows (SWA), states (Mamba), latents with states
    (Kimi Linear)."""
    if model == "windows":
        return windows()
    if model in ("states", "latents with states"):
        return hybrid(use_mla=model != "states")
    return latents(LAYERS) if model == "latents" else heads(LAYERS)


def host_pool(pool: Any, layout: str, drafts: Sequence[Any] = ()) -> Any:
    """SGLang's host pool over a device's pool, with the layers of draft models (MTP) packed behind it."""
    is_states, is_latents = isinstance(pool, MambaPool), isinstance(pool, MLATokenToKVPool)
    maker = MambaPoolHost if is_states else MLATokenToKVPoolHost if is_latents else MHATokenToKVPoolHost
    takes = inspect.signature(maker).parameters
    given: dict[str, Any] = {"pin_memory": False, "device": "cpu"}
    given |= {"layout": "page_first"} if is_states else {"page_size": PAGE_TOKENS, "layout": layout}
    if "device_pool" in takes:
        return maker(pool, RATIO, 0, **given, **({"mtp_draft_device_pools": drafts} if drafts else {}))
    info, *extra = [each.get_device_pool_infos()[0].buffer_info for each in (pool, *drafts)]
    if is_states:
        return maker(info, RATIO, 0, device_capacity=pool.size, **given)
    given |= {"device_capacity_tokens": pool.size, "start_layer": 0, "end_layer": pool.layer_num}
    given |= {"target_layer_num": pool.layer_num} if is_latents else {}
    return maker(info, RATIO, 0, **given, draft_buffer_infos=extra)
