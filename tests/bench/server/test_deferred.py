"""What is answered early can be read after the drain, on a cold pool and a warm one; every server has its rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from kvredis.bench.core.blocks import Blocks, Turn
from kvredis.bench.core.errors import VerificationError
from kvredis.bench.core.servers import RECIPES
from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.server.deferred import Contender, DeferredPlan, Held, contenders, deferred_lines, run_deferred

TINY = ModelShape("tiny", layers=8, kv_heads=2, head_dim=64)
PLAN = DeferredPlan(repeats=1, shapes=(TINY,), blocks=16)


def test_every_server_stores_and_fetches_in_every_way_that_it_has() -> None:
    installed = [recipe for recipe in RECIPES.values() if recipe.missing() is None]
    steps: list[str] = []
    who = contenders(installed, with_zmq=importlib.util.find_spec("zmq") is not None)
    rows, base = run_deferred(PLAN, who, steps.append)
    assert len(steps) == PLAN.steps(len(who))
    found = {(row["server"], row["op"], row["pool"]) for row in rows}
    for contender in who:
        stored = {(contender.name, op, pool) for op in contender.stores for pool in ("cold", "warm")}
        assert stored | {(contender.name, "MGET", "warm")} <= found
    for row in rows:
        assert [sample["verified_bytes"] for sample in row["samples"]] == [16 * TINY.block_bytes()]
        assert row["ratio_t0"] is not None
        assert row["ratio_t0_drained"] is not None
        assert row["ratio_t0_drained"] >= row["ratio_t0"] > 0
    pipelined = next(row for row in rows if (row["server"], row["op"]) == ("kvredis+disk", "SET pipelined"))
    assert pipelined["drain_s"] > 0, "a disk tier has not written what has just been acknowledged"
    told = [" ".join(line.split()) for line in deferred_lines(rows, base)]
    assert all(any(line.startswith(f"{row['op']} {row['pool']} {row['server']} ") for line in told) for row in rows)


class Forgetful:
    """A server that acknowledges every SET and makes the last one of a pass only when it is drained, or never."""

    def __init__(self, blocks: Blocks, drains: bool) -> None:
        self._blocks, self._drains = blocks, drains
        self._held: dict[int, bytes] = {}
        self._late: tuple[int, bytes] | None = None

    def cpu_s(self) -> float:
        return 0.0

    def store(self, op: str, turn: Turn, shift: int) -> None:
        self._held |= {to: bytes(self._blocks.value(to, shift)) for _, to in turn.pairs[:-1]}
        last = turn.pairs[-1][1]
        self._late = last, bytes(self._blocks.value(last, shift))
        self._held.setdefault(last, bytes(self._blocks.size_bytes))

    def drain(self, op: str) -> None:
        if self._drains and self._late is not None:
            self._held[self._late[0]] = self._late[1]

    def fetch(self, turn: Turn) -> None:
        for source, to in turn.pairs:
            self._blocks.place(to)[:] = self._held[source]


@pytest.mark.parametrize("drains", [True, False])
def test_what_is_not_there_after_the_drain_stops_the_bench(drains: bool) -> None:
    def start(blocks: Blocks) -> Iterator[Held]:
        yield Forgetful(blocks, drains)

    who = [Contender("forgetful", start, ("SET deferred",))]
    if drains:
        assert len(run_deferred(PLAN, who, lambda _step: None)[0]) == 3
        return
    with pytest.raises(VerificationError, match="SET deferred returned a wrong byte"):
        run_deferred(PLAN, who, lambda _step: None)
