"""The benches of hits when something fails: an arm is left out and said, a row says what is not there, or all ends."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvredis import CacheEngine
from kvredis.backends.local import LocalBackend
from kvredis.bench.core.compute import TINY
from kvredis.bench.core.errors import BenchError, MissingHits, VerificationError
from kvredis.bench.engine_tables.run import (
    EngineTablesResult,
    Tables,
    TablesPlan,
    WorkerProcess,
    conclude,
    gate_of,
    hit_sweep_plan,
    long_prefill_plan,
    run,
    table_lines,
)
from kvredis.bench.engine_tables.worker import CPU, DEVICE, DISK, RECOMPUTE, Engine, Pass, Task, Worker
from kvredis.storage.errors import KVRedisError

pytestmark = pytest.mark.nightly

CHUNK = 32
MIB = 1024 * 1024


def plan_of(*arms: str, repeats: int = 2) -> TablesPlan:
    small: dict[str, Any] = {"prompts": 4, "prompt_tokens": 100, "shape": TINY, "chunk_tokens": CHUNK}
    return long_prefill_plan(outputs=(2, 16), arms=arms, repeats=repeats, **small)


class Told(WorkerProcess):
    """An engine's process that is none: passes are as fast as the next, and an arm fails as the test has it."""

    def __init__(self, failing: dict[str, BenchError] | None = None, dropped: int = 0) -> None:
        self.tasks: list[Task] = []
        self.revived = 0
        self._failing, self._dropped = failing or {}, dropped

    def ask(self, task: Task) -> Pass:
        self.tasks.append(task)
        if error := self._failing.get(task["arm"]):
            raise error
        hits = 0 if task["arm"] == RECOMPUTE or not task["checks"] else 4 * 96
        if hits and not task["full"]:
            hits //= 2
        return Pass(
            seconds=4.0,
            load_seconds=1.0,
            alone_load_seconds=1.0 if hits else 0.0,
            alone_hit_tokens=hits,
            prefill_seconds=2.0,
            decode_seconds=1.0,
            drain_seconds=0.5,
            hit_tokens=hits,
            computed_tokens=400 - hits,
            lone_steps=0,
            dropped_chunks=self._dropped if task["arm"] == DISK and not task["checks"] else 0,
            verified_tokens=hits,
            checks=[[1, 2, 3]] * 4,
        )

    def revive(self) -> None:
        self.revived += 1


def result_of(tables: Tables, plan: TablesPlan) -> EngineTablesResult:
    result = EngineTablesResult(
        schema="a test's",
        bench=plan.bench,
        machine={"cpu": "any", "cores": 2, "kernel": "6", "load_1min": "0.1"},
        options=plan.options(),
        notes=tables.notes,
        rows=list(tables.rows.values()),
        left_out=tables.left_out,
        verified_bytes=tables.verified_bytes,
        gate=[],
        seconds=1.0,
    )
    conclude(result["rows"], plan.shape.bytes_per_token())
    result["gate"] = gate_of(result)
    return result


def test_an_arm_that_fails_is_left_out_and_said_and_the_others_go_on() -> None:
    plan, steps = plan_of(CPU, DISK), list[str]()
    workers = Told(), Told({DISK: MissingHits("20478 tokens were hits, of 39936 stored")})
    tables = Tables(plan, workers, None)
    tables.measure(steps.append)
    assert len(steps) == plan.steps()
    assert {arm for arm, _, _ in tables.rows} == {RECOMPUTE, CPU}
    assert all(len(row["samples"]) == plan.repeats for row in tables.rows.values())
    assert sum(task["arm"] == DISK for task in workers[1].tasks) == 1, "it is not tried again"
    assert [worker.revived for worker in workers] == [1, 1]
    result = result_of(tables, plan)
    (note,) = result["notes"]
    assert "disk, from 2 in repeat 1" in note
    assert "20478 tokens were hits, of 39936" in note
    text = "\n".join(table_lines(result))
    assert note in text
    assert "MISSED  disk, left out" in text
    assert [(line["name"], line["passed"]) for line in gate_of(result)] == [("disk, left out", False)]


def test_with_auto_too_what_is_loaded_is_compared_with_what_was_stored() -> None:
    plan = replace(plan_of(CPU), auto=True)
    workers = Told(), Told()
    tables = Tables(plan, workers, None)
    tables.measure(lambda what: None)
    second = [task for task in workers[0].tasks if task["arm"] == CPU][1::2]
    assert [task["checks"] for task in second] == [[[1, 2, 3]] * 4] * plan.repeats * len(plan.points)
    assert not any(task["full"] for task in second), "it may compute"
    assert tables.verified_bytes > 0


def test_what_computes_is_served_once_before_anything_is_measured() -> None:
    plan, workers = plan_of(CPU), (Told(), Told())
    tables = Tables(plan, workers, None)
    tables.measure(lambda step: None)
    for worker in workers:
        before = worker.tasks[: len(plan.points)]
        assert [(task["arm"], task["output"]) for task in before] == [
            (RECOMPUTE, point.output) for point in plan.points
        ], "every point, in both processes: the first of a process takes longer, whichever arm serves it"
    assert all(len(row["samples"]) == plan.repeats for row in tables.rows.values()), "and it is in no row"


def test_a_repeat_that_would_not_be_over_in_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(plan_of(CPU, repeats=9), limit_s=450.0)
    steps = list[str]()
    each_s = 100.0 * plan.repeats / plan.steps()  # 100 s a repeat, on this clock
    monkeypatch.setattr("kvredis.bench.engine_tables.run.time.monotonic", lambda: len(steps) * each_s)
    tables = Tables(plan, (Told(), Told()), None)
    tables.measure(steps.append)
    assert {len(row["samples"]) for row in tables.rows.values()} == {4}
    assert tables.notes == ["There was time for 4 of 9 repeats."]


def test_what_an_arm_measured_before_it_failed_is_kept() -> None:
    plan = plan_of(DISK)

    class Once(Told):
        def ask(self, task: Task) -> Pass:
            if task["arm"] == DISK and any(told["arm"] == DISK for told in self.tasks):
                raise BenchError("a bench's engine process ended with -9; what it said is above")
            return super().ask(task)

    tables = Tables(plan, (Once(), Told()), None)
    tables.measure(lambda step: None)
    assert len(tables.rows[DISK, 2, 2]["samples"]) == 1
    assert (DISK, 2, 16) not in tables.rows
    assert tables.left_out == [DISK]


def test_wrong_bytes_and_a_recompute_that_fails_end_the_bench() -> None:
    plan = plan_of(DISK)
    ends: list[dict[str, BenchError]] = [{DISK: VerificationError("other bytes")}, {RECOMPUTE: BenchError("no memory")}]
    for failing in ends:
        with pytest.raises(BenchError, match=r"other bytes|no memory"):
            Tables(plan, (Told(), Told(failing)), None).measure(lambda step: None)


def test_what_a_cache_dropped_is_said_in_its_row_and_no_hit_is_missed() -> None:
    plan = plan_of(CPU, DISK)
    workers = Told(dropped=40), Told()
    tables = Tables(plan, workers, None)
    tables.measure(lambda step: None)
    assert {task["full"] for task in workers[1].tasks if task["arm"] == DISK} == {False}
    assert {task["full"] for task in workers[0].tasks if task["arm"] == CPU and task["checks"]} == {True}
    result = result_of(tables, plan)
    rows = {(row["arm"], row["number"]): row for row in result["rows"]}
    assert (rows[DISK, 1]["dropped_chunks"], rows[DISK, 2]["dropped_chunks"]) == (80, 0), "of two repeats"
    assert (rows[DISK, 2]["hit_share"], rows[CPU, 2]["hit_share"]) == (0.48, 0.96)
    lines = [line for line in table_lines(result) if "chunks dropped" in line]
    assert len(lines) == 2, "one a point"
    assert all(line.startswith("  disk, pass 1") and line.endswith("80 chunks dropped") for line in lines)
    assert gate_of(result) == []


def test_a_disks_memory_has_room_for_two_batches_and_for_no_more_than_all() -> None:
    for plan in (hit_sweep_plan(arms=(DISK,)), long_prefill_plan(arms=(DISK,), prompts=4)):
        workers = Told(), Told()
        Tables(plan, workers, None).measure(lambda step: None)
        given = [task["engine"] for worker in workers for task in worker.tasks if task["arm"] == DISK]
        sizes = {int(engine["max_local_cpu_size"][:-2]) for engine in given if engine}
        (memory_mib,) = sizes
        batch_bytes = plan.rows * plan.prompt_tokens * plan.shape.bytes_per_token()
        assert memory_mib * MIB > 2 * batch_bytes - MIB
        assert memory_mib * MIB <= 1.25 * plan.data_bytes


def test_a_worker_counts_what_a_disk_was_too_slow_for_and_checks_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(TINY, 220, CHUNK)  # 16 KiB a chunk
    told = Task(
        arm=DISK,
        what="disk, 0",
        model="test",
        prompts=16,
        tokens=200,
        hit_rate=0.0,
        seed=1,
        output=1,
        budget=256,
        rows=2,
        engine={
            "chunk_size": CHUNK,
            "max_local_cpu_size": "1MB",
            "hugepages": "off",
            "local_disk": str(tmp_path),
            "max_local_disk_size": "64MB",
            "spill_wait": 0,
        },
        keep=False,
        checks=[],
        full=False,
    )
    opened = CacheEngine.lookup

    def stuck(cache: CacheEngine, tokens: Any) -> int:
        """The worker's first word to its cache: from here on no job of its disk begins, until it is flushed."""
        tiering = cast(LocalBackend, cache.backend).store.tiering
        assert tiering is not None
        tiering.io.pause()
        return opened(cache, tokens)

    def settled(cache: CacheEngine) -> int:
        tiering = cast(LocalBackend, cache.backend).store.tiering
        assert tiering is not None
        tiering.io.resume()
        return flush(cache)

    flush = CacheEngine.flush
    with monkeypatch.context() as patched:
        patched.setattr(CacheEngine, "lookup", stuck)
        patched.setattr(CacheEngine, "flush", settled)
        first = Worker(engine).run(told)
    assert first["dropped_chunks"] > 0
    again = replace_with(told, checks=first["checks"])
    with pytest.raises(MissingHits):
        Worker(engine).run(replace_with(again, full=True, model="another"))
    second = Worker(engine).run(again)
    assert 0 < second["hit_tokens"] < 16 * 192
    assert 0 < second["verified_tokens"] <= second["hit_tokens"]


def replace_with(task: Task, **changes: Any) -> Task:
    return cast(Task, dict(task) | changes)


def test_an_engines_process_that_was_killed_can_be_begun_anew() -> None:
    plan = replace(plan_of(DISK), prompts=2)
    with WorkerProcess(plan.begun()) as worker:
        worker.started()
        worker.revive()
        before = worker.pid
        os.kill(before, signal.SIGKILL)
        with pytest.raises(BenchError, match="ended"):
            worker.ask(Tables(plan, (worker, worker), None)._task(RECOMPUTE, plan.points[0], 0))
        worker.revive()
        assert worker.pid != before
        passed = worker.ask(Tables(plan, (worker, worker), None)._task(RECOMPUTE, plan.points[0], 0))
        assert passed["computed_tokens"] == 2 * 100


def test_when_no_arm_is_left_the_bench_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tables: Tables, arm: str, *_: Any) -> Any:
        if arm != RECOMPUTE:
            raise KVRedisError(f"no {arm} today")
        return []

    monkeypatch.setattr(Tables, "arm", refuse)
    with pytest.raises(BenchError, match=r"no arm could be measured\..*no gpu today"):
        run(plan_of(DEVICE, repeats=1), lambda step: None)
