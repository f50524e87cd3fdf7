"""The picture of each bench, by the schema of its result; core/plot.py draws it. Imports every bench that has one.

Reads results as the JSON files have them, so a picture can be made of a run long past.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from . import links, memory, store_overhead
from .core.errors import BenchError
from .core.result import load
from .disk import run as disk
from .engine_tables import run as engine_tables
from .server import run as server
from .transport import run as transport
from .vllm import concurrency as vllm_concurrency
from .vllm import run as vllm

_PAINTERS: Final[Mapping[str, Callable[[Mapping[str, Any], Path], None]]] = {
    memory.SCHEMA: memory.picture,
    server.SCHEMA: server.picture,
    disk.SCHEMA: disk.picture,
    links.SCHEMA: links.picture,
    transport.SCHEMA: transport.picture,
    store_overhead.SCHEMA: store_overhead.picture,
    engine_tables.SCHEMA: engine_tables.picture,
    vllm.SCHEMA: vllm.picture,
    vllm_concurrency.SCHEMA: vllm_concurrency.picture,
}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result into the PNG `path`; BenchError when its schema has no picture, or it is empty or not whole."""
    painter = _PAINTERS.get(str(result.get("schema")))
    if painter is None:
        raise BenchError(f"no picture for schema {result.get('schema')!r}; known: {', '.join(_PAINTERS)}")
    try:
        painter(result, path)
    except (LookupError, TypeError) as error:
        raise BenchError(f"not a whole result of {result['schema']}: {error!r}") from error


def draw_file(source: Path, path: Path) -> None:
    """Draw the result in the JSON file `source`; raises BenchError when it is none."""
    draw(load(source), path)
