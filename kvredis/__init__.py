"""kvredis: a Redis-protocol store of KV blocks for LLM serving, and the engine that reads and writes them.

`import kvredis` loads nothing but this file, so that the server and the command line start quickly and run without
torch. `CacheEngine` (which needs torch: the extra `engine`), `ChunkLayout` and `Config` load when named.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvredis.adapters.engine.engine import CacheEngine as CacheEngine
    from kvredis.adapters.engine.layout import ChunkLayout as ChunkLayout
    from kvredis.backends.config.schema import Config as Config

__version__ = "0.1.0"
__all__ = ["CacheEngine", "ChunkLayout", "Config", "__version__"]

_HOMES = {
    "CacheEngine": "kvredis.adapters.engine.engine",
    "ChunkLayout": "kvredis.adapters.engine.layout",
    "Config": "kvredis.backends.config.schema",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load_public(home, f"{__name__}.{name}", "engine")


def load_public(home: str, public: str, extra: str) -> Any:
    """Return what a public import path names, out of the module `home`.

    Raises ModuleNotFoundError that names the `extra` where a package that it needs is not installed.
    """
    try:
        return getattr(import_module(home), public.rpartition(".")[2])
    except ModuleNotFoundError as error:
        if "." in (error.name or ".") or error.name == "kvredis":  # a part that another version of a package has
            raise
        text = f"{public} needs {error.name}, which is not installed: {install_line(extra)}"
        raise ModuleNotFoundError(text, name=error.name) from error


def install_line(extra: str) -> str:
    """Return the line for a shell that installs an extra: out of the repository, since no package index has kvredis
    yet."""
    root = Path(__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():
        return f"pip install '{root}[{extra}]'"
    return f"pip install '.[{extra}]' in a clone of kvredis' repository"
