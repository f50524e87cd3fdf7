"""The public import path of vLLM's secondary tier, `kvredis.adapters.vllm_tier:KVRedisTier`."""

from typing import TYPE_CHECKING, Any

from kvredis import load_public

if TYPE_CHECKING:
    from .vllm.tier import KVRedisTier as KVRedisTier


def __getattr__(name: str) -> Any:
    """Load the tier, and vLLM with it."""
    if name == "KVRedisTier":
        return load_public("kvredis.adapters.vllm.tier", f"{__name__}.{name}", "vllm")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
