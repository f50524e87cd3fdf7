"""What of a result goes into its picture, for every result that has one; plot.py draws it.

Reads results as the JSON files have them, so a picture can be made of a run long past.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from .core.errors import BenchError
from .core.plot import Captions, LinePanel, lines
from .core.result import load
from .core.statistics import counted, size_text
from .disk.result import SCHEMA as DISK
from .disk.result import DiskResult
from .engine_tables.result import SCHEMA as ENGINE_TABLES
from .engine_tables.result import picture as draw_engine_tables
from .links.plot import picture as draw_links
from .links.result import SCHEMA as LINKS
from .memory import SCHEMA as MEMORY
from .memory import picture as draw_memory
from .server.result import SCHEMA as SERVER
from .server.result import BenchResult
from .store_overhead import SCHEMA as STORE_OVERHEAD
from .store_overhead import picture as draw_store_overhead
from .transport.report import picture as draw_transport
from .transport.result import SCHEMA as TRANSPORT
from .vllm.concurrency import SCHEMA as VLLM_CONCURRENCY
from .vllm.concurrency import picture as draw_vllm_concurrency
from .vllm.result import SCHEMA as VLLM
from .vllm.result import picture as draw_vllm


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


def _server(raw: Mapping[str, Any], path: Path) -> None:
    result = cast(BenchResult, raw)
    panels: dict[tuple[str, int, bool], dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for row in result["transfers"]:
        where = row["transport"], row["connections"], row["pinned"]
        series = panels.setdefault(where, {}).setdefault(row["op"], {})
        series.setdefault(row["server"], []).append((row["size_bytes"], row["gb_per_s"]))
    ops = list(dict.fromkeys(row["op"] for row in result["transfers"]))
    captions = Captions(
        title="Bandwidth against value size",
        values="GB/s",
        foot=_foot(result["machine"], "GETP: pipelined. Medians over the repeats"),
    )
    drawn = [
        LinePanel(_server_title(op, *where), _ordered(series[op])) for where, series in panels.items() for op in series
    ]
    lines(drawn, captions, path, columns=max(1, len(ops)))


def _server_title(op: str, transport: str, connections: int, pinned: bool) -> str:
    return f"{op}, {transport}, {counted(connections, 'connection')}, {'one CPU' if pinned else 'all CPUs'}"


def _disk(raw: Mapping[str, Any], path: Path) -> None:
    result = cast(DiskResult, raw)
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in result["rates"]:
        title = f"{row['op']}, {row['mode']}, blocks of {size_text(row['block_bytes'])}"
        panels.setdefault(title, {}).setdefault(row["arm"], []).append((row["threads"], row["gb_per_s"]))
    captions = Captions(
        title="The disk tier beside its device",
        values="GB/s",
        foot=_foot(result["machine"], f"device: {result['device']}; loop: preadv and pwrite. Medians over the repeats"),
    )
    drawn = [LinePanel(title, _ordered(series), across="threads", sizes=False) for title, series in panels.items()]
    lines(drawn, captions, path)


def _ordered(series: Mapping[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    return {name: sorted(points) for name, points in series.items()}


def _foot(machine: Mapping[str, object], more: str) -> str:
    return f"{machine.get('cpu')}, {machine.get('cores')} cores, Linux {machine.get('kernel')}. {more}"


_PAINTERS: Final[Mapping[str, Callable[[Mapping[str, Any], Path], None]]] = {
    MEMORY: draw_memory,
    SERVER: _server,
    DISK: _disk,
    LINKS: draw_links,
    TRANSPORT: draw_transport,
    STORE_OVERHEAD: draw_store_overhead,
    ENGINE_TABLES: draw_engine_tables,
    VLLM: draw_vllm,
    VLLM_CONCURRENCY: draw_vllm_concurrency,
}
