"""`generate()` of transformers with a prompt cache: `kvredis.adapters.transformers.CachedModel` and `layout_of`; and
with part of a prompt's KV on another GPU: `StreamedCache`.

transformers is imported when one of them is named. Only users and the command line's demo import this package.
"""

from typing import TYPE_CHECKING, Any

from kvredis import load_public

if TYPE_CHECKING:
    from .generate import CachedModel as CachedModel
    from .model import layout_of as layout_of
    from .streamed import StreamedCache as StreamedCache

__all__ = ["CachedModel", "StreamedCache", "layout_of"]

_HOMES = {"CachedModel": "generate", "StreamedCache": "streamed", "layout_of": "model"}


def __getattr__(name: str) -> Any:
    """Load the module that has a public name, and transformers with it."""
    if name in _HOMES:
        return load_public(f"{__name__}.{_HOMES[name]}", f"{__name__}.{name}", "demo")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
