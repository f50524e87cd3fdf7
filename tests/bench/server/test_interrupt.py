"""An interrupt of `kvredis bench server` keeps what was measured whole."""

import pytest

from kvredis.bench.core.servers import RECIPES
from kvredis.bench.server.run import BenchResult, ServerPlan, run
from kvredis.bench.server.transfer import KIB, TransferPlan

SMALL = TransferPlan(sizes=(64 * KIB,), repeats=1, working_set_bytes=256 * KIB, cell_bytes=256 * KIB)
PLAN = ServerPlan([RECIPES["kvredis"]], ("transfers",), ("tcp", "unix"), (1,), (False,), SMALL)


def interrupted(at: int) -> BenchResult:
    """The result of a run that is interrupted at its `at`-th step."""
    steps = list[str]()

    def progress(step: str) -> None:
        steps.append(step)
        if len(steps) == at:
            raise KeyboardInterrupt

    return run(PLAN, progress)


def test_the_arms_that_are_whole_are_kept_and_the_rest_is_said_to_be_missing() -> None:
    result = interrupted(2)
    assert {row["transport"] for row in result["transfers"]} == {"tcp"}
    assert result["skipped"] == {"the rest": "interrupted"}
    assert result["verified"]["bytes"] > 0
    assert {row["op"] for row in result["transfers"]} == {"SET", "SETP", "GET", "GETP"}


def test_an_interrupt_before_anything_is_whole_ends_the_bench() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(1)
