"""Tier speeds out of this package's own results, so that a plan can stand on what a machine has shown.

From each file the figure is the median of one row, and `source` says which:

- kvredis.bench.server/1: `remote` (TCP) and `host` (unix socket): kvredis' pipelined GETs on all CPUs, of the value
  size nearest to a chunk, with the number of connections that was fastest; stores are the SETs beside it.
- kvredis.bench.disk/1: `disk`: the tier's cold reads and its writes, O_DIRECT if it was measured, with the fastest
  number of threads.
- kvredis.bench.transport/1: `remote`, `host`: stream_get over TCP and unix sockets, and `lane`, lane, copied; of the
  block size nearest to a chunk; stores are SET pipelined and lane, put.
- kvredis.bench.memory/1: `memory`: the fastest of memmove and kvredis copy by one thread, of the block size nearest to
  a chunk.
- kvredis.bench.links/1: `memory`, a copy by one thread out of an arena's best pages; and, where there was a GPU, `gpu
  link`, page-locked memory to the first GPU.

A tier's latency is what the smallest single GET took beyond its bytes at that bandwidth, and none is below 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.servers import SUBJECT
from kvredis.bench.core.statistics import GB, counted, size_text
from kvredis.bench.disk.result import SCHEMA as DISK
from kvredis.bench.disk.result import TIER
from kvredis.bench.links.result import SCHEMA as LINKS
from kvredis.bench.memory import SCHEMA as MEMORY
from kvredis.bench.server.result import SCHEMA as SERVER
from kvredis.bench.transport.result import SCHEMA as TRANSPORT

from .planning import TierSpeed

_Row = Mapping[str, Any]

_ARMS = (
    ("remote", "tcp", "stream_get", "SET pipelined"),
    ("host", "unix", "stream_get", "SET pipelined"),
    ("lane", "lane", "lane, copied", "lane, put"),
)
_COPIES = ("memmove", "kvredis copy")


def measured_tiers(path: Path, chunk_bytes: int) -> list[TierSpeed]:
    """Read the tiers that a result says something of. BenchError when it is no result, or says nothing of a tier."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot read a result: {error}") from error
    schema = str(found.get("schema")) if isinstance(found, dict) else "none"
    if schema not in _READERS:
        raise BenchError(f"{path}: schema {schema} tells no tier's speed; known: {', '.join(_READERS)}")
    try:
        tiers = _READERS[schema](found, chunk_bytes, path.name)
    except (LookupError, TypeError, ValueError) as error:
        raise BenchError(f"{path}: not a whole result of {schema}: {error!r}") from error
    if not tiers:
        raise BenchError(f"{path}: has no row of a tier; it was measured without that part")
    return tiers


def _server(found: Mapping[str, Any], chunk_bytes: int, file: str) -> list[TierSpeed]:
    tiers = []
    for name, transport in (("remote", "tcp"), ("host", "unix")):
        rows = [row for row in found["transfers"] if row["server"] == SUBJECT and row["transport"] == transport]
        rows = _unpinned(rows)
        best = _fastest(_nearest(_only(rows, op="GETP"), chunk_bytes))
        if best is None:
            continue
        size, connections = best["size_bytes"], best["connections"]
        store = _fastest(_only(rows, op="SET", size_bytes=size, connections=connections))
        tiers.append(
            TierSpeed(
                name,
                best["gb_per_s"],
                _latency_ms(_only(rows, op="GET", connections=1), "p50_ms", best["gb_per_s"]),
                None if store is None else store["gb_per_s"],
                f"{file}: GETP of {size_text(size)}, {transport}, {counted(connections, 'connection')}",
            )
        )
    return tiers


def _disk(found: Mapping[str, Any], chunk_bytes: int, file: str) -> list[TierSpeed]:
    own = _only(found["rates"], arm=TIER)
    rows = _only(own, mode="direct") or _only(own, mode="buffered")
    best, store = _fastest(_only(rows, op="read")), _fastest(_only(rows, op="write"))
    if best is None or store is None:
        return []
    source = f"{file}: tier, cold read, {best['mode']}, {counted(best['threads'], 'thread')}"
    latency_ms = _latency_ms(found["gets"], "spilled_ms", best["gb_per_s"])
    return [TierSpeed("disk", best["gb_per_s"], latency_ms, store["gb_per_s"], source)]


def _transport(found: Mapping[str, Any], chunk_bytes: int, file: str) -> list[TierSpeed]:
    tiers = []
    for name, transport, read, write in _ARMS:
        rows = _nearest(_only(found["arms"], transport=transport), chunk_bytes, "block_bytes")
        best, store = _fastest(_only(rows, arm=read)), _fastest(_only(rows, arm=write))
        if best is not None:
            source = f"{file}: {read} of {size_text(best['block_bytes'])}, {transport}"
            tiers.append(TierSpeed(name, best["gb_per_s"], 0.0, None if store is None else store["gb_per_s"], source))
    return tiers


def _memory(found: Mapping[str, Any], chunk_bytes: int, file: str) -> list[TierSpeed]:
    rows = [row for row in _only(found["rows"], threads=1) if row["arm"] in _COPIES]
    best = _fastest(_nearest(rows, chunk_bytes, "block_bytes"))
    if best is None:
        return []
    source = f"{file}: {best['arm']} of {size_text(best['block_bytes'])}, {best['pages']} pages, 1 thread"
    return [TierSpeed("memory", best["gb_per_s"], source=source)]


def _links(found: Mapping[str, Any], chunk_bytes: int, file: str) -> list[TierSpeed]:
    tiers = []
    memory = _fastest(
        [
            row
            for row in _only(found["copies"], part="memory", direction="uni")
            if row["source"].startswith("arena") and row["target"].startswith("process")
        ]
    )
    if memory is not None:
        source = f"{file}: {memory['source']} to {memory['target']}"
        tiers.append(TierSpeed("memory", memory["gb_per_s"], source=source))
    rows = _only(found["copies"], part="gpu", direction="uni", way="pinned")
    link = _fastest(_only(rows, source="CPU", target="GPU 0"))
    if link is not None:
        store = _fastest(_only(rows, source="GPU 0", target="CPU"))
        back = None if store is None else store["gb_per_s"]
        tiers.append(TierSpeed("gpu link", link["gb_per_s"], 0.0, back, f"{file}: pinned, CPU to GPU 0"))
    return tiers


_READERS: Mapping[str, Callable[[Mapping[str, Any], int, str], list[TierSpeed]]] = {
    SERVER: _server,
    DISK: _disk,
    TRANSPORT: _transport,
    MEMORY: _memory,
    LINKS: _links,
}


def _only(rows: Iterable[_Row], **wanted: object) -> list[_Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _unpinned(rows: Sequence[_Row]) -> list[_Row]:
    return _only(rows, pinned=False) or list(rows)


def _nearest(rows: Sequence[_Row], nbytes: int, figure: str = "size_bytes") -> list[_Row]:
    """Give the rows whose size is the fewest times larger or smaller than `nbytes`."""
    if not rows:
        return []
    size = min((row[figure] for row in rows), key=lambda size: abs(math.log(size / nbytes)))
    return _only(rows, **{figure: size})


def _fastest(rows: Sequence[_Row]) -> _Row | None:
    return max(rows, key=lambda row: float(row["gb_per_s"]), default=None)


def _latency_ms(rows: Sequence[_Row], figure: str, gb_per_s: float) -> float:
    """Give what the smallest of `rows` took beyond its bytes; 0.0 when nothing was measured."""
    if not rows:
        return 0.0
    row = min(rows, key=lambda row: int(row["size_bytes"]))
    return max(0.0, float(row[figure]) - int(row["size_bytes"]) / (gb_per_s * GB) * 1e3)
