"""kvredis: a Redis-protocol store of KV blocks for LLM serving, and the engine that reads and writes them.

`import kvredis` loads nothing but this file, so that the server and the command line start quickly and run without
torch. `CacheEngine` and `ChunkLayout` (which need torch: `pip install kvredis[engine]`) and `Config` load when named.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvredis.adapters.engine import CacheEngine as CacheEngine
    from kvredis.adapters.layout import ChunkLayout as ChunkLayout
    from kvredis.backends.config import Config as Config

__version__ = "0.1.0"
__all__ = ["CacheEngine", "ChunkLayout", "Config", "__version__"]

_HOMES = {
    "CacheEngine": "kvredis.adapters.engine",
    "ChunkLayout": "kvredis.adapters.layout",
    "Config": "kvredis.backends.config",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
