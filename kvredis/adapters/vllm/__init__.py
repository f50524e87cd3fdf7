"""vLLM's connector, `kvredis.adapters.vllm:KVRedisConnector`: one file for each of its parts, named as vLLM names them.

vLLM is imported when the connector is named, so that parts which know no vLLM can be used without it. Engines' own
packages import this one; no other adapter does.
"""

from typing import TYPE_CHECKING, Any

from kvredis import load_public

if TYPE_CHECKING:
    from .connector import KVRedisConnector as KVRedisConnector

__all__ = ["KVRedisConnector"]


def __getattr__(name: str) -> Any:
    """Load the connector, and vLLM with it."""
    if name == "KVRedisConnector":
        return load_public(f"{__name__}.connector", f"{__name__}.{name}", "vllm")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
