"""vLLM's connector, `kvredis.adapters.vllm:KVRedisConnector`: one file for each of its parts, named as vLLM names them.

vLLM is imported when the connector is named, so that parts which know no vLLM can be used without it. Engines' own
packages import this one; no other adapter does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVRedisConnector as KVRedisConnector

__all__ = ["KVRedisConnector"]


def __getattr__(name: str) -> Any:
    """Load the connector, and vLLM with it."""
    if name == "KVRedisConnector":
        from .connector import KVRedisConnector

        return KVRedisConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
