"""How does the server compare with Redis and memcached, and with its own earlier commits? `kvredis bench server` lets
them take turns under the same client.

Servers of one transport run at the same time and take turns within each repeat, so that what disturbs the machine
disturbs them alike. Parts: transfers (transfer.py), small, head-of-line and lookup (latency.py), deferred
(deferred.py).

GB is 1e9 bytes of payload. CPU is user plus system time: the server's over all its threads, the client's over all of
its own. Every `ratio_*` is the median over the repeats of a server's figure divided by redis' *in the same repeat*, and
null where redis did not run; kvredis' rows have each `ratio_*_to_before` where an earlier commit ran (`before`).

The file, kvredis.bench.server/1, has beside what every result has
    servers  version, command, facts from INFO      skipped  server or part -> why      verified  values, bytes, wrong
    transfers, small, head_of_line, lookup, deferred, t0   rows of each part; earlier files lack the last three
    held     rows of kvredis beside those of the earlier commit

The gate: server CPU is judged where client and server share one CPU, since that figure repeats; throughput where they
do not, since that is what a user sees, against the fastest of the other servers in that row. In `held` nothing may be
lost. A row that falls short by little deserves a second run before it is believed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.plot import Captions, LinePanel, foot, lines
from kvredis.bench.core.result import (
    Column,
    GateLine,
    Progress,
    Result,
    Row,
    gate_line,
    gate_lines,
    machine_lines,
    new_result,
    tables,
)
from kvredis.bench.core.servers import BEFORE, RECIPES, SUBJECT, Recipe, ServerFacts, ServerProcess, Transport
from kvredis.bench.core.shapes import shape_of
from kvredis.bench.core.statistics import MIB, by_repeat, counted, paired_ratio, size_text
from kvredis.bench.transport.pyzmq import missing as zmq_missing

from .deferred import DeferredPlan, contenders, deferred_lines, run_deferred
from .latency import HeadOfLinePlan, LookupPlan, SmallPlan, run_head_of_line, run_lookup, run_small
from .latency import redis_benchmark_missing as small_missing
from .transfer import KIB, Arm, TransferPlan, Transfers

SCHEMA = "kvredis.bench.server/1"


class HeldJson(TypedDict):
    """One row of kvredis held against the commit before."""

    name: str
    ratios: dict[str, float | None]  # rate, CPU, time, p99: those that the row has
    worse: list[str]  # which of them are
    passed: bool


class Verified(TypedDict):
    values: int
    bytes: int
    wrong: int  # 0: the bench stops at the first wrong byte


class BenchResult(Result):
    servers: dict[str, ServerFacts]
    skipped: dict[str, str]  # server or part -> why
    transfers: list[Row]
    small: list[Row]
    head_of_line: list[Row]
    lookup: list[Row]
    deferred: list[Row]
    t0: list[Row]
    verified: Verified
    held: list[HeldJson]


_OP_NAMES = {"SET": "SET", "SETP": "pipelined SET", "GET": "GET", "GETP": "pipelined GET"}


@dataclass(frozen=True, slots=True)
class TransferBound:
    """One line: in sizes from `sizes[0]` to `sizes[1]`, the ratio is at most (CPU) or at least (rate) this."""

    op: str
    sizes: tuple[int, int]
    ratio: float


_MIDDLE = (576 * KIB, 2 * MIB)
_LARGE = (32 * MIB, 32 * MIB)
CPU_MOST = (
    TransferBound("SET", _MIDDLE, 1.05),
    TransferBound("SET", _LARGE, 0.5),
    TransferBound("GET", _MIDDLE, 0.95),
    TransferBound("GET", _LARGE, 0.25),
    TransferBound("GETP", (896 * KIB, 32 * MIB), 0.35),
)
"""To Redis."""
CPU_TO_BEST_MOST = (TransferBound("SET", (64 * KIB, 64 * KIB), 1.2), TransferBound("GET", (64 * KIB, 64 * KIB), 1.2))
RATE_TO_BEST_LEAST = (
    TransferBound("SET", (16 * KIB, 16 * KIB), 0.9),
    TransferBound("SET", (64 * KIB, 2 * MIB), 1.0),
    TransferBound("SET", _LARGE, 2.0),
    TransferBound("SETP", (64 * KIB, 32 * MIB), 1.0),
    TransferBound("GET", (64 * KIB, 64 * KIB), 1.0),
    TransferBound("GET", (576 * KIB, 32 * MIB), 1.15),
    TransferBound("GETP", (576 * KIB, 32 * MIB), 1.4),
)
"""To whichever other server was best there."""
SMALL_LEAST = 0.9
PING_P99_MOST = 0.2
LOOKUP_TIME_MOST = 1.2  # to EXISTS of redis


def gate(result: BenchResult) -> list[GateLine]:
    """Judge every line that `result` has a measurement of kvredis for."""
    return [
        *_cpu(result),
        *_to_best(result),
        *_gate_small(result),
        *_gate_pings(result),
        *_gate_lookups(result),
    ]


def _cpu(result: BenchResult) -> Iterator[GateLine]:
    for row in result["transfers"]:
        if row["server"] == SUBJECT and row["pinned"]:
            for bound in CPU_MOST:
                if _covers(bound, row):
                    yield _most(f"server CPU/GB  {transfer_name(row)}", bound.ratio, row["ratio_server_cpu"])


def _to_best(result: BenchResult) -> Iterator[GateLine]:
    """Hold kvredis against the best of the others in the same arm: their rates where nothing is pinned, and server CPU
    where all is."""
    cells: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in result["transfers"]:
        cell = (row["transport"], row["connections"], row["pinned"], row["size_bytes"], row["op"])
        cells.setdefault(cell, {})[row["server"]] = row
    for rows in cells.values():
        others = [row for name, row in rows.items() if name not in (SUBJECT, BEFORE)]
        if SUBJECT not in rows or not others:
            continue
        ours = rows[SUBJECT]
        if ours["pinned"]:
            best = min(others, key=lambda row: row["server_cpu_ms_per_gb"])
            for bound in CPU_TO_BEST_MOST:
                if _covers(bound, ours):
                    yield _most(
                        _beside("CPU to best", ours, best), bound.ratio, _paired(ours, best, "server_cpu_ms_per_gb")
                    )
        else:
            best = max(others, key=lambda row: row["gb_per_s"])
            for bound in RATE_TO_BEST_LEAST:
                if _covers(bound, ours):
                    yield _least(_beside("to the best", ours, best), bound.ratio, _paired(ours, best, "gb_per_s"))


def _beside(what: str, ours: Row, best: Row) -> str:
    return f"{what:<14} {transfer_name(ours)}, {best['server']}"


def _paired(ours: Row, best: Row, figure: str) -> float | None:
    return paired_ratio(by_repeat(ours["samples"], figure), by_repeat(best["samples"], figure))


def _gate_small(result: BenchResult) -> Iterator[GateLine]:
    for row in result["small"]:
        if row["server"] == SUBJECT:
            yield _least(f"small ops      {small_name(row)}", SMALL_LEAST, row["ratio_rps"])


def _gate_pings(result: BenchResult) -> Iterator[GateLine]:
    for row in result["head_of_line"]:
        if row["server"] == SUBJECT:
            yield _most(f"PING p99       beside 32 MiB {row['background']}", PING_P99_MOST, row["ratio_p99"])


def _gate_lookups(result: BenchResult) -> Iterator[GateLine]:
    for row in result["lookup"]:
        if row["server"] == SUBJECT:
            yield _most(f"time per call  {lookup_name(row)}", LOOKUP_TIME_MOST, row["ratio_p50"])


def _covers(bound: TransferBound, row: Row) -> bool:
    size: int = row["size_bytes"]
    return bound.op == row["op"] and bound.sizes[0] <= size <= bound.sizes[1]


def transfer_name(row: Row) -> str:
    """Name what a row of transfers measured, but for the pinning."""
    where = f"{row['transport']} x{row['connections']}"
    return f"{where}, {size_text(row['size_bytes'])}, {_OP_NAMES.get(row['op'], row['op'])}"


def small_name(row: Row) -> str:
    """Name what a row of small operations measured."""
    return f"{row['op']}, {counted(row['clients'], 'client')}, {row['pipeline']} in flight"


def lookup_name(row: Row) -> str:
    """Name what a row of lookups measured."""
    return f"{row['transport']}, {row['op']} of {row['keys']} keys of {row['key_bytes']} B"


def _most(name: str, bound: float, measured: float | None) -> GateLine:
    return gate_line(name, f"<= {bound:.2f}x", measured)


def _least(name: str, bound: float, measured: float | None) -> GateLine:
    return gate_line(name, f">= {bound:.2f}x", measured)


HELD_RATE_LEAST = 0.95
HELD_CPU_MOST = 1.05  # so too the time of a call and the p99 of a PING


@dataclass(frozen=True, slots=True)
class HeldRow:
    """One row of kvredis. `ratios` to the commit before by name: rate, CPU, time, p99; None where none was formed."""

    name: str
    ratios: dict[str, float | None]

    @property
    def worse(self) -> list[str]:
        """Name the ratios that are worse than the bounds; one that could not be formed does not pass."""
        return [name for name, ratio in self.ratios.items() if ratio is None or not _holds(name, ratio)]

    @property
    def passed(self) -> bool:
        return not self.worse

    def json(self) -> HeldJson:
        return HeldJson(name=self.name, ratios=self.ratios, worse=self.worse, passed=self.passed)


def held(result: BenchResult) -> list[HeldRow]:
    """Judge every row that has a ratio to the commit before: none when it did not take part."""
    return [*_held_transfers(result), *_held_small(result), *_held_pings(result), *_held_lookups(result)]


def _holds(name: str, ratio: float) -> bool:
    return ratio >= HELD_RATE_LEAST if name == "rate" else ratio <= HELD_CPU_MOST


def _held_transfers(result: BenchResult) -> Iterator[HeldRow]:
    for row in result["transfers"]:
        if "ratio_gb_per_s_to_before" in row:
            where = "one CPU" if row["pinned"] else "all CPUs"
            ratios = {"rate": row["ratio_gb_per_s_to_before"], "CPU": row.get("ratio_server_cpu_to_before")}
            yield HeldRow(f"{transfer_name(row)}, {where}", ratios)


def _held_small(result: BenchResult) -> Iterator[HeldRow]:
    for row in result["small"]:
        if "ratio_rps_to_before" in row:
            ratios = {"rate": row["ratio_rps_to_before"], "CPU": row.get("ratio_server_cpu_to_before")}
            yield HeldRow(f"small {small_name(row)}", ratios)


def _held_pings(result: BenchResult) -> Iterator[HeldRow]:
    for row in result["head_of_line"]:
        if "ratio_p99_to_before" in row:
            yield HeldRow(f"PING beside 32 MiB {row['background']}", {"p99": row["ratio_p99_to_before"]})


def _held_lookups(result: BenchResult) -> Iterator[HeldRow]:
    for row in result["lookup"]:
        if "ratio_p50_to_before" in row:
            ratios = {"time": row["ratio_p50_to_before"], "CPU": row.get("ratio_server_cpu_to_before")}
            yield HeldRow(lookup_name(row), ratios)


def table_lines(result: BenchResult) -> Iterator[str]:
    """Give the report, line by line, with the gate and what was held against the commit before."""
    yield from _machine_lines(result)
    rate = _with_before(result, _TRANSFERS, rate="gb_per_s", CPU="server_cpu")
    yield from tables(rate, result["transfers"], _arm_title)
    small = _with_before(result, _SMALL, rate="rps", CPU="server_cpu")
    yield from tables(small, result["small"], lambda _: "small operations (redis-benchmark, tcp)")
    pings = _with_before(result, _HEAD_OF_LINE, p99="p99")
    yield from tables(pings, result["head_of_line"], lambda _: "PING every ms beside 32 MiB values (tcp)")
    lookup = _with_before(result, _LOOKUP, time="p50", CPU="server_cpu")
    about = "many keys in one call, all present (one client, all CPUs); x redis is to its EXISTS"
    yield from tables(lookup, result["lookup"], lambda _: about)
    yield from deferred_lines(result["deferred"], result["t0"])
    verified = result["verified"]
    if result["transfers"]:
        yield ""
        yield f"Verified: {verified['values']} values, {verified['bytes'] / 1e9:.2f} GB compared in full, 0 wrong."
    yield from gate_lines(result["gate"], "medians of paired ratios, to redis where nothing else is named")
    yield from held_lines(held(result), result)


def held_lines(rows: Sequence[HeldRow], result: BenchResult) -> Iterator[str]:
    """Give the verdicts against the commit before, line by line; nothing when it did not take part."""
    if not rows:
        return
    yield ""
    commit = result["servers"][BEFORE]["version"]
    yield f"Held against the commit before, {commit} (medians of paired ratios)"
    bounds = f"a rate below {HELD_RATE_LEAST:.2f}x, or server CPU, time or p99 above {HELD_CPU_MOST:.2f}x"
    yield f"  A row is worse with {bounds}."
    pages = [result["servers"][name]["facts"].get("memory_page_kind") for name in (SUBJECT, BEFORE)]
    if pages[0] != pages[1]:
        yield f"  Beware: ours lies on {pages[0]}, the one before on {pages[1]}; reserve hugepages for both, or none."
    for row in rows:
        worse = f"  worse: {', '.join(row.worse)}" if row.worse else ""
        ratios = "  ".join(
            f"{name} {'none' if value is None else f'{value:.2f}x':>7}" for name, value in row.ratios.items()
        )
        yield f"  {'held' if row.passed else 'MISSED':<6}  {row.name:<58} {ratios}{worse}"
    yield f"  {sum(row.passed for row in rows)} of {len(rows)} rows hold."


def _machine_lines(result: BenchResult) -> Iterator[str]:
    machine = result["machine"]
    yield from machine_lines(machine)
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "uvloop"))
    yield f"{versions}; THP {machine['transparent_hugepages']}, {machine['hugepages_2mib_reserved']} hugepages reserved"
    for name, server in result["servers"].items():
        pages = [f"{key} {value}" for key, value in server["facts"].items() if "page" in key]
        yield f"{name}: {server['version']}" + (f" ({', '.join(pages)})" if pages else "")
    for name, reason in result["skipped"].items():
        yield f"{name}: skipped, {reason}"


_TRANSFERS: Final[tuple[Column, ...]] = (
    ("value", "size_bytes", "size"),
    ("op", "op", ""),
    ("server", "server", ""),
    ("GB/s", "gb_per_s", ".2f"),
    ("x redis", "ratio_gb_per_s", ".2fx"),
    ("x T0", "ratio_t0", ".2fx"),
    ("p50 ms", "p50_ms", ".3f"),
    ("p99 ms", "p99_ms", ".3f"),
    ("server ms/GB", "server_cpu_ms_per_gb", ".0f"),
    ("(min)", "server_cpu_ms_per_gb_min", ".0f"),
    ("x redis", "ratio_server_cpu", ".2fx"),
    ("client ms/GB", "client_cpu_ms_per_gb", ".0f"),
)
_SMALL: Final[tuple[Column, ...]] = (
    ("op", "op", ""),
    ("clients", "clients", "d"),
    ("in flight", "pipeline", "d"),
    ("server", "server", ""),
    ("op/s", "rps", ".0f"),
    ("x redis", "ratio_rps", ".2fx"),
    ("p50 ms", "p50_ms", ".3f"),
    ("p99 ms", "p99_ms", ".3f"),
    ("server us/op", "server_cpu_us_per_op", ".2f"),
)
_HEAD_OF_LINE: Final[tuple[Column, ...]] = (
    ("background", "background", ""),
    ("server", "server", ""),
    ("p50 ms", "p50_ms", ".3f"),
    ("p99 ms", "p99_ms", ".3f"),
    ("x redis", "ratio_p99", ".2fx"),
    ("background GB/s", "background_gb_per_s", ".2f"),
)
_LOOKUP: Final[tuple[Column, ...]] = (
    ("where", "transport", ""),
    ("keys", "keys", "d"),
    ("of B", "key_bytes", "d"),
    ("op", "op", ""),
    ("server", "server", ""),
    ("p50 us", "p50_us", ".1f"),
    ("p99 us", "p99_us", ".1f"),
    ("x redis", "ratio_p50", ".2fx"),
    ("server us/call", "server_cpu_us_per_call", ".1f"),
    ("x redis", "ratio_server_cpu", ".2fx"),
)


def _with_before(result: BenchResult, columns: tuple[Column, ...], **figures: str) -> tuple[Column, ...]:
    """Add the ratios to the commit before; there are none when it did not take part, and only rows of kvredis have
    them."""
    if not {SUBJECT, BEFORE} <= result["servers"].keys():
        return columns
    return (*columns, *((f"{name} x before", f"ratio_{figure}_to_before", ".2fx") for name, figure in figures.items()))


def _arm_title(row: Row) -> str:
    where = "client and server on one CPU" if row["pinned"] else "all CPUs"
    return f"{row['transport']}, {counted(row['connections'], 'connection')}, {where}"


DEFAULT_PARTS = ("transfers", "small", "head-of-line")
BEFORE_PARTS = (*DEFAULT_PARTS, "lookup")
PARTS = (*BEFORE_PARTS, "deferred")


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What one call of the bench does. `recipes` in the order in which they begin."""

    recipes: Sequence[Recipe]
    parts: Sequence[str] = DEFAULT_PARTS
    transports: Sequence[Transport] = ("tcp", "unix")
    connections: Sequence[int] = (1, 4)
    pinned: Sequence[bool] = (True, False)
    transfers: TransferPlan = field(default_factory=TransferPlan)
    small: SmallPlan = field(default_factory=SmallPlan)
    head_of_line: HeadOfLinePlan = field(default_factory=HeadOfLinePlan)
    lookup: LookupPlan = field(default_factory=LookupPlan)
    deferred: DeferredPlan = field(default_factory=DeferredPlan)

    def arms(self, transport: Transport) -> list[Arm]:
        return [Arm(transport, many, pinned) for pinned in self.pinned for many in self.connections]

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        arms = len(self.transports) * len(self.pinned) * len(self.connections)
        steps = arms * len(self.transfers.sizes) * self.transfers.repeats if "transfers" in self.parts else 0
        steps += self.small.steps() if "small" in self.parts else 0
        steps += self.head_of_line.steps() if "head-of-line" in self.parts else 0
        steps += self.deferred.steps(len(self.recipes) + 2) if "deferred" in self.parts else 0
        return steps + (len(self.transports) * self.lookup.steps() if "lookup" in self.parts else 0)

    def options(self) -> dict[str, object]:
        """Give the plan as the result's `options`."""
        return {
            "servers": [recipe.name for recipe in self.recipes],
            "parts": list(self.parts),
            "transports": list(self.transports),
            "connections": list(self.connections),
            "pinned": list(self.pinned),
            "sizes": list(self.transfers.sizes),
            "repeats": self.transfers.repeats,
            "working_set_bytes": self.transfers.working_set_bytes,
            "cell_bytes": self.transfers.cell_bytes,
            "seed": self.transfers.seed,
            "deferred_shapes": [shape.name for shape in self.deferred.shapes],
            "deferred_blocks": self.deferred.blocks,
            "clients": "one thread per connection",
        }


QUICK_TRANSFERS = TransferPlan(
    sizes=(64 * KIB, 896 * KIB, 32 * MIB), repeats=2, working_set_bytes=32 * MIB, cell_bytes=32 * MIB
)
QUICK_SMALL = SmallPlan(repeats=2, run_s=0.1)
QUICK_HEAD_OF_LINE = HeadOfLinePlan(repeats=2, run_s=0.5)
QUICK_LOOKUP = LookupPlan(repeats=2, run_s=0.1)
QUICK_DEFERRED = DeferredPlan(repeats=2, shapes=(shape_of("3b"),), blocks=256)


def available(names: Sequence[str]) -> tuple[list[Recipe], dict[str, str]]:
    """Split `names` into the servers that can run here and, for the others, why not."""
    skipped = {name: reason for name in names if (reason := RECIPES[name].missing()) is not None}
    return [RECIPES[name] for name in names if name not in skipped], skipped


def run(plan: ServerPlan, progress: Progress, skipped: dict[str, str] | None = None) -> BenchResult:
    """Measure everything in `plan`, or until an interrupt, which keeps the arms and parts that are whole. Raises
    KVRedisError, VerificationError at a wrong byte, KeyboardInterrupt before anything is whole; leaves no server
    behind."""
    if not plan.recipes:
        raise BenchError("no server to measure")
    start_s = time.monotonic()
    result = BenchResult(
        **new_result(SCHEMA, plan.options()),
        servers={},
        skipped=dict(skipped or {}),
        transfers=[],
        small=[],
        head_of_line=[],
        lookup=[],
        deferred=[],
        t0=[],
        verified=Verified(values=0, bytes=0, wrong=0),
        held=[],
    )
    try:
        _measure(plan, progress, result)
    except KeyboardInterrupt:
        if not any(result[part] for part in ("transfers", "small", "head_of_line", "lookup", "deferred")):
            raise
        result["skipped"]["the rest"] = "interrupted"
    result["gate"] = gate(result)
    result["held"] = [row.json() for row in held(result)]
    result["seconds"] = time.monotonic() - start_s
    return result


def _measure(plan: ServerPlan, progress: Progress, result: BenchResult) -> None:
    if "transfers" in plan.parts:
        _transfers(plan, progress, result)
    resp = [recipe for recipe in plan.recipes if recipe.dialect.name == "resp"]
    lacking = small_missing()
    if "small" in plan.parts and lacking:
        result["skipped"]["small"] = lacking
    elif "small" in plan.parts:
        with ExitStack() as stack:
            result["small"] = run_small(plan.small, _started(stack, resp, "tcp", result), progress)
    if "head-of-line" in plan.parts:
        with ExitStack() as stack:
            servers = _started(stack, resp, "tcp", result)
            result["head_of_line"] = run_head_of_line(plan.head_of_line, servers, progress)
    if "lookup" in plan.parts:
        for transport in plan.transports:
            with ExitStack() as stack:
                servers = _started(stack, resp, transport, result)
                result["lookup"] += run_lookup(plan.lookup, transport, servers, progress)
    if "deferred" in plan.parts:
        _deferred(plan, progress, result)


def _transfers(plan: ServerPlan, progress: Progress, result: BenchResult) -> None:
    transfers = Transfers(plan.transfers, progress)
    try:
        for transport in plan.transports:
            for arm in plan.arms(transport):  # fresh servers for each arm: none inherits another arm's heap
                with ExitStack() as stack:
                    result["transfers"] += transfers.run(arm, _started(stack, plan.recipes, transport, result))
    finally:
        seen = transfers.verification
        result["t0"], result["verified"] = transfers.t0, Verified(values=seen.values, bytes=seen.bytes, wrong=0)


def _deferred(plan: ServerPlan, progress: Progress, result: BenchResult) -> None:
    lacking = zmq_missing()
    if lacking:
        result["skipped"]["pyzmq"] = lacking
    recipes = [recipe for recipe in plan.recipes if recipe.name != BEFORE]
    rows, base = run_deferred(plan.deferred, contenders(recipes, not lacking), progress)
    result["deferred"], result["t0"] = rows, [*result["t0"], *base]


def _started(
    stack: ExitStack, recipes: Sequence[Recipe], transport: Transport, result: BenchResult
) -> list[ServerProcess]:
    servers = [stack.enter_context(ServerProcess(recipe, transport)) for recipe in recipes]
    for server in servers:
        if server.name not in result["servers"]:
            facts = ServerFacts(version=server.recipe.version(), command=server.command, facts=server.facts())
            result["servers"][server.name] = facts
    return servers


def picture(raw: Mapping[str, Any], path: Path) -> None:
    """Draw bandwidth against value size into the PNG `path`: a panel for each arm and operation."""
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
        foot=foot(result["machine"], "GETP: pipelined. Medians over the repeats"),
    )
    drawn = [
        LinePanel(_panel_title(op, *where), {name: sorted(points) for name, points in series[op].items()})
        for where, series in panels.items()
        for op in series
    ]
    lines(drawn, captions, path, columns=max(1, len(ops)))


def _panel_title(op: str, transport: str, connections: int, pinned: bool) -> str:
    return f"{op}, {transport}, {counted(connections, 'connection')}, {'one CPU' if pinned else 'all CPUs'}"
