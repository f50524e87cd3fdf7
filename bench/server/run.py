"""`kvredis bench server` as a whole: which servers run when, and the result that all parts are gathered in.

Servers of one transport run at the same time and take turns within each repeat, so that what disturbs the machine
disturbs them alike; an idle one costs nothing. Parts: transfers (transfer.py), small (small.py), head-of-line
(head_of_line.py), lookup (lookup.py), deferred (deferred.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.machine import machine_facts
from kvredis.bench.core.result import Progress
from kvredis.bench.core.servers import BEFORE, RECIPES, Recipe, ServerProcess, Transport
from kvredis.bench.core.shapes import shape_of
from kvredis.bench.core.statistics import MIB
from kvredis.bench.transport.zmq_client import missing as zmq_missing

from .before import held
from .deferred import DeferredPlan, contenders, run_deferred
from .gate import gate
from .head_of_line import HeadOfLinePlan, run_head_of_line
from .lookup import LookupPlan, run_lookup
from .result import SCHEMA, BenchResult, ServerFacts, Verified
from .small import SmallPlan, run_small
from .small import missing as small_missing
from .transfer import KIB, Arm, TransferPlan, Transfers

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
    """Measure everything in `plan`. Raises KVRedisError, VerificationError at a wrong byte; leaves no server behind."""
    if not plan.recipes:
        raise BenchError("no server to measure")
    start_s = time.monotonic()
    result = BenchResult(
        schema=SCHEMA,
        machine=machine_facts(),
        options=plan.options(),
        servers={},
        skipped=dict(skipped or {}),
        transfers=[],
        small=[],
        head_of_line=[],
        lookup=[],
        deferred=[],
        t0=[],
        verified=Verified(values=0, bytes=0, wrong=0),
        gate=[],
        held=[],
        seconds=0.0,
    )
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
    result["gate"] = [row.json() for row in gate(result)]
    result["held"] = [row.json() for row in held(result)]
    result["seconds"] = time.monotonic() - start_s
    return result


def _transfers(plan: ServerPlan, progress: Progress, result: BenchResult) -> None:
    transfers = Transfers(plan.transfers, progress)
    for transport in plan.transports:
        for arm in plan.arms(transport):  # fresh servers for each arm: none inherits another arm's heap
            with ExitStack() as stack:
                result["transfers"] += transfers.run(arm, _started(stack, plan.recipes, transport, result))
    result["t0"] = transfers.t0
    result["verified"] = Verified(values=transfers.verification.values, bytes=transfers.verification.bytes, wrong=0)


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
