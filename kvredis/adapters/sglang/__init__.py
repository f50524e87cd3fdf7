"""SGLang's storage backend, `kvredis.adapters.sglang:KVRedisHiCache`, with its host pools and weights.

SGLang is imported when the backend is named. Engines' own packages import this one; no other adapter does.
"""

from typing import TYPE_CHECKING, Any

from kvredis import load_public

if TYPE_CHECKING:
    from .storage import KVRedisHiCache as KVRedisHiCache

__all__ = ["KVRedisHiCache"]


def __getattr__(name: str) -> Any:
    """Load the storage backend, and SGLang with it."""
    if name == "KVRedisHiCache":
        return load_public(f"{__name__}.storage", f"{__name__}.{name}", "sglang")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
