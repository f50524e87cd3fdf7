"""What of a result goes into its picture, for every result that has one; plot.py draws it.

Reads results as the JSON files have them, so a picture can be made of a run long past.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from kvredis.bench.disk.result import SCHEMA as DISK
from kvredis.bench.disk.result import DiskResult
from kvredis.bench.engine_tables.result import SCHEMA as ENGINE_TABLES
from kvredis.bench.engine_tables.result import picture as draw_engine_tables
from kvredis.bench.links.plot import picture as draw_links
from kvredis.bench.links.result import SCHEMA as LINKS
from kvredis.bench.memory.result import SCHEMA as MEMORY
from kvredis.bench.memory.result import MemoryResult, MemoryRow, theirs
from kvredis.bench.server.result import SCHEMA as SERVER
from kvredis.bench.server.result import BenchResult
from kvredis.bench.store_overhead.result import SCHEMA as STORE_OVERHEAD
from kvredis.bench.store_overhead.result import picture as draw_store_overhead
from kvredis.bench.transport.report import picture as draw_transport
from kvredis.bench.transport.result import SCHEMA as TRANSPORT
from kvredis.bench.vllm.concurrency import SCHEMA as VLLM_CONCURRENCY
from kvredis.bench.vllm.concurrency import picture as draw_vllm_concurrency
from kvredis.bench.vllm.result import SCHEMA as VLLM
from kvredis.bench.vllm.result import picture as draw_vllm

from .errors import BenchError
from .plot import Bar, BarPanel, Captions, LinePanel, bars, lines
from .statistics import counted, size_text

_CUT: Final = 6.0  # times T0: half as much again as the worst of the earlier figures


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
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{source}: cannot read a result: {error}") from error
    if not isinstance(found, dict):
        raise BenchError(f"{source}: not a result of any bench")
    draw(found, path)


def _memory(raw: Mapping[str, Any], path: Path) -> None:
    result = cast(MemoryResult, raw)
    rows = [row for row in result["rows"] if row["pages"] != "torch"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    threads = list(dict.fromkeys(row["threads"] for row in rows))
    panels = [
        _memory_panel(result, [row for row in rows if row["shape"] == shape and row["threads"] == count])
        for count in threads
        for shape in shapes
    ]
    captions = Captions(
        title="Copying blocks inside one process: time, as a multiple of torch's plain copy (T0)",
        values="time / T0 (less is better)",
        foot=_foot(result["machine"], f"T0: torch {result['torch']['version']}, {result['pages'].get('torch', '')}"),
        theirs=result["earlier"]["source"],
    )
    bars(panels, captions, path, columns=len(shapes) if len(shapes) > 1 else len(threads))


def _memory_panel(result: MemoryResult, rows: Sequence[MemoryRow]) -> BarPanel:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    series: dict[str, list[Bar | None]] = {f"{row['pages']} pages": [None] * len(arms) for row in rows}
    earlier = {}
    for row in rows:
        if row["ratio"] is not None and row["ratio_min"] is not None and row["ratio_max"] is not None:
            bar = Bar(row["ratio"], row["ratio_min"], row["ratio_max"])
            series[f"{row['pages']} pages"][arms.index(row["arm"])] = bar
        if (figures := theirs(result, row)) is not None:
            earlier[row["arm"]] = figures
    first = rows[0]
    title = f"{first['shape']}, blocks of {size_text(first['block_bytes'])}, {counted(first['threads'], 'thread')}"
    return BarPanel(title, arms, series, earlier, cut=_CUT)


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
    MEMORY: _memory,
    SERVER: _server,
    DISK: _disk,
    LINKS: draw_links,
    TRANSPORT: draw_transport,
    STORE_OVERHEAD: draw_store_overhead,
    ENGINE_TABLES: draw_engine_tables,
    VLLM: draw_vllm,
    VLLM_CONCURRENCY: draw_vllm_concurrency,
}
