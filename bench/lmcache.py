"""How fast does LMCache's own native client move its chunks through a server, unchanged? `kvredis bench lmcache` asks
kvredis and Redis in turns.

LMCache's `resp://` connector is a C++ client with threads and connections of its own. It stores and loads chunks here
as LMCache hands them to it, a prompt in one batch, over TCP, from kvredis and from Redis in turns. Every byte that
comes back is compared. LMCache has to be installed; nothing of it is imported but that client.

The file, kvredis.bench.lmcache/1, has beside what every result has
    lmcache  its version         servers  version, command, facts from INFO
    rows     server, op (SET, GET), samples; `ratio` is to Redis in the same repeat, more is better
"""

from __future__ import annotations

import importlib.util
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Protocol, TypedDict

from .core.errors import BenchError
from .core.result import Column, Progress, Result, Row, machine_lines, new_result, spread, summed, tables, verified_line
from .core.servers import BASELINE, RECIPES, SUBJECT, Peer, ServerFacts, ServerProcess, roomy
from .core.statistics import GB, MIB, by_repeat, counted, paired_ratios, rotated, size_text
from .core.workload import Memory, Workload, stride_bytes

SCHEMA: Final = "kvredis.bench.lmcache/1"
SERVERS: Final = (SUBJECT, BASELINE)
_ROOM: Final = 4
"""Of each server, in times the chunks' bytes. With twice as much Redis evicts what it is asked for: replies that wait
for their readers count as used memory."""
_SILENCE_S: Final = 60.0
_SEED: Final = 20250107


class LMCacheSample(TypedDict):
    repeat: int
    seconds: float
    gb_per_s: float
    server_cpu_ms_per_gb: float
    verified_bytes: int  # of a GET, after the clock had stopped


class LMCacheResult(Result):
    lmcache: str
    servers: dict[str, ServerFacts]
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class LMCachePlan:
    """A prompt of `chunks` chunks, stored and loaded `repeats` times. `workers` are the client's threads, of which
    LMCache takes eight."""

    servers: Sequence[str] = SERVERS
    chunk_bytes: int = 32 * MIB
    chunks: int = 16
    workers: int = 8
    repeats: int = 5

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        return self.repeats * len(self.servers)


QUICK: Final = LMCachePlan(chunks=4, repeats=2)


class NativeClient(Protocol):
    """LMCache's client: each call is submitted, and its number is among the completions when it is over."""

    def submit_batch_set(self, keys: list[str], values: list[memoryview]) -> int: ...
    def submit_batch_get(self, keys: list[str], places: list[memoryview]) -> int: ...
    def drain_completions(self) -> Sequence[tuple[int, bool, str, object]]: ...
    def event_fd(self) -> int: ...
    def close(self) -> None: ...


Connect = Callable[[str, int, int], NativeClient]
"""Host, port, threads."""


def native_client() -> tuple[Connect, str]:
    """Give LMCache's client and its version. Raises BenchError where LMCache is not installed."""
    found = importlib.util.find_spec("lmcache")
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    files = [path for folder in folders for path in Path(folder).glob("lmcache_redis.*.so")]
    if not files:
        raise BenchError("LMCache's native client is not installed: pip install --no-deps lmcache==0.5.6")
    import torch  # noqa: F401  # whose libraries it is linked to

    spec = importlib.util.spec_from_file_location("lmcache.lmcache_redis", files[0])
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LMCacheRedisClient, metadata.version("lmcache")


def finish(client: NativeClient, number: int) -> None:
    """Wait until what was submitted under that number is over. Raises BenchError when it failed, or takes too long."""
    while select.select([client.event_fd()], [], [], _SILENCE_S)[0]:
        for done, is_ok, error, _ in client.drain_completions():
            if int(done) == int(number):
                if not is_ok:
                    raise BenchError(f"LMCache's client: {error}")
                return
    raise BenchError(f"LMCache's client has said nothing for {_SILENCE_S:.0f} s")


def run(plan: LMCachePlan, progress: Progress) -> LMCacheResult:
    """Measure every server. Raises BenchError without LMCache or a server, VerificationError at a wrong byte."""
    connect, version = native_client()
    start_s = time.monotonic()
    for name in plan.servers:
        if (missing := RECIPES[name].missing()) is not None:
            raise BenchError(missing)
    result = LMCacheResult(**new_result(SCHEMA, asdict(plan)), lmcache=version, servers={}, rows=[])
    nbytes = plan.chunks * stride_bytes(plan.chunk_bytes)
    work = Workload(plan.chunk_bytes, plan.chunks, Memory(nbytes, seed=_SEED), Memory(nbytes))
    samples: dict[tuple[str, str], list[LMCacheSample]] = {}
    with ExitStack() as stack:
        clients = []
        for name in plan.servers:
            server = stack.enter_context(ServerProcess(roomy(RECIPES[name], _ROOM * nbytes), "tcp"))
            result["servers"][name] = ServerFacts(
                version=RECIPES[name].version(), command=server.command, facts=server.facts()
            )
            client = connect(server.address.host, server.address.port, plan.workers)
            stack.callback(client.close)
            clients.append((server, client))
            turn(server, client, work, 0)  # connections and mappings are warm
        for repeat in range(plan.repeats):
            for server, client in rotated(clients, repeat):
                progress(f"LMCache's client and {server.name}")
                for op, sample in turn(server, client, work, repeat + 1).items():
                    samples.setdefault((server.name, op), []).append(sample)
    result["rows"] = rows_of(samples)
    result["verified_bytes"] = sum(sample["verified_bytes"] for own in samples.values() for sample in own)
    result["seconds"] = time.monotonic() - start_s
    return result


def turn(server: Peer, client: NativeClient, work: Workload, shift: int) -> dict[str, LMCacheSample]:
    """Store all chunks as pass `shift` has them, load and compare them; the samples are of repeat `shift` - 1."""
    keys = [key.decode() for key in work.keys]
    indices = range(work.count)
    values, places = [work.value(at, shift) for at in indices], [work.place(at) for at in indices]
    work.wipe()
    stored = _timed(server, lambda: finish(client, client.submit_batch_set(keys, values)))
    loaded = _timed(server, lambda: finish(client, client.submit_batch_get(keys, places)))
    verified, nbytes = work.verify(shift, server.name), work.count * work.size_bytes
    return {
        op: LMCacheSample(
            repeat=shift - 1,
            seconds=seconds,
            gb_per_s=nbytes / seconds / GB,
            server_cpu_ms_per_gb=cpu_s * 1e3 * GB / nbytes,
            verified_bytes=verified if op == "GET" else 0,
        )
        for op, (seconds, cpu_s) in (("SET", stored), ("GET", loaded))
    }


def _timed(server: Peer, move: Callable[[], None]) -> tuple[float, float]:
    """Give the seconds of a move, and the server's CPU seconds."""
    cpu_s, start_s = server.cpu_s(), time.perf_counter()
    move()
    return time.perf_counter() - start_s, server.cpu_s() - cpu_s


def rows_of(samples: dict[tuple[str, str], list[LMCacheSample]]) -> list[Row]:
    """Sum up: a row for each operation and server, with its ratio to Redis."""
    rows = []
    for (server, op), own in sorted(samples.items(), key=lambda each: each[0][1] == "GET"):
        base = by_repeat(samples.get((BASELINE, op), []), "gb_per_s")
        row = Row(server=server, op=op, samples=own) | summed(own, ("server_cpu_ms_per_gb",), ("gb_per_s",))
        rows.append(row | spread("ratio", paired_ratios(by_repeat(own, "gb_per_s"), base), None))
    return rows


_COLUMNS: Final[tuple[Column, ...]] = (
    ("op", "op", ""),
    ("server", "server", ""),
    ("GB/s", "gb_per_s", ".2f"),
    ("min to max", ("gb_per_s_min", "gb_per_s_max"), ".2f"),
    ("x redis", "ratio", ".2fx"),
    ("min to max", ("ratio_min", "ratio_max"), ".2f"),
    ("server ms/GB", "server_cpu_ms_per_gb", ".0f"),
)


def table_lines(result: LMCacheResult) -> Iterator[str]:
    """Give the report, line by line: everything in it is in the JSON."""
    options = result["options"]
    yield from machine_lines(result["machine"])
    yield from (f"{name}: {facts['version']}" for name, facts in result["servers"].items())
    title = (
        f"LMCache {result['lmcache']}, its resp:// client, {counted(options['workers'], 'thread')}: prompts of"
        f" {counted(options['chunks'], 'chunk')} of {size_text(options['chunk_bytes'])}, over TCP"
    )
    yield from tables(_COLUMNS, result["rows"], lambda _: title)
    yield ""
    yield verified_line(result)
