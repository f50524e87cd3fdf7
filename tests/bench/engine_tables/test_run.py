"""The benches of hits: every arm serves the same prompts, hits and bytes are checked, and two processes take part."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvredis import CacheEngine, Config
from kvredis.adapters.engine.background import Executor
from kvredis.bench.core.compute import TINY
from kvredis.bench.core.errors import BenchError, MissingHits, VerificationError
from kvredis.bench.core.prompts import PromptPlan, prompts
from kvredis.bench.core.result import Row, new_result
from kvredis.bench.engine_tables.run import (
    ARMS,
    PLANS,
    SCHEMA,
    EngineTablesResult,
    Point,
    TablesPlan,
    WorkerProcess,
    conclude,
    gate_of,
    hit_sweep_plan,
    long_prefill_plan,
    on_cpu,
    prefill_plan,
    row_of,
    run,
    table_lines,
)
from kvredis.bench.engine_tables.worker import (
    CPU,
    DEVICE,
    DISK,
    LANE,
    RECOMPUTE,
    REMOTE,
    Engine,
    NoCache,
    OnDevice,
    Spent,
    Task,
    Tiered,
    Worker,
    compare,
    groups,
)
from kvredis.cli.bench.command import bench

CHUNK = 16
SMALL = ("--tokens", "50", "--chunk-tokens", str(CHUNK), "--repeats", "1")


@pytest.fixture(scope="module")
def engine() -> Engine:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Engine(TINY, 60, CHUNK)
    torch.set_num_threads(threads)
    return made


def some(count: int = 3, tokens: int = 50, hit_rate: float = 0.0) -> list[list[int]]:
    return list(prompts(PromptPlan(tokens, hit_rate, count, seed=3)))


@pytest.mark.nightly  # in this process: test_a_worker_keeps_its_cache_for_the_second_pass_and_refuses_a_missing_hit...
def test_a_small_sweep_serves_every_arm_in_two_processes_and_gets_every_byte_back(tmp_path: Path) -> None:
    path, drawn = tmp_path / "result.json", tmp_path / "result.png"
    options = ("--rates", "0.5", "--prompts", "5", "--rows", "2", "--output", "3", "--budget", "32")
    done = CliRunner().invoke(bench, ("hit-sweep", *SMALL, *options, "--json", str(path), "--plot", str(drawn)))
    assert done.exit_code == 0, done.output
    result: EngineTablesResult = json.loads(path.read_text())
    assert (result["schema"], result["bench"], result["options"]["shape"]) == (SCHEMA, "hit-sweep", TINY.name)
    rows = {(row["arm"], row["number"]): row for row in result["rows"]}
    assert set(rows) == {(arm, number) for arm in ARMS for number in (1, 2)}
    served = result["options"]["prompts"]
    assert served == 4, "twice as many as are served together, without a GPU"
    for (arm, number), row in rows.items():
        (sample,) = row["samples"]
        assert sample["hit_tokens"] + sample["computed_tokens"] == served * 50
        # the head of 25 tokens has one whole chunk, which the first prompt computes; 48 tokens are stored of each
        hits = 0 if arm == RECOMPUTE else (served - 1) * CHUNK if number == 1 else served * 48
        if number == 1 and arm in (LANE, REMOTE):  # what is on its way to a server is no hit yet
            assert sample["hit_tokens"] in range(0, hits + 1, CHUNK), (arm, number)
        else:
            assert sample["hit_tokens"] == hits, (arm, number)
        assert (row["tier_gb_per_s"] is None) == (arm == RECOMPUTE)
    assert result["verified_bytes"] == 5 * served * 48 * TINY.bytes_per_token()
    assert {line["name"] for line in result["gate"]} == {"cpu / gpu, 50% in common"}
    assert "There is no GPU" in done.output
    assert drawn.stat().st_size > 10_000


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "options", "arms", "points"),
    [
        ("prefill", ("--budgets", "16,64"), (CPU, LANE), [16, 64]),
        ("long-prefill", ("--outputs", "2", "--auto", "--budget", "64"), (DISK,), [2]),
    ],
)
def test_the_other_benches_have_their_own_axes(
    tmp_path: Path, name: str, options: tuple[str, ...], arms: tuple[str, ...], points: list[float]
) -> None:
    path = tmp_path / "result.json"
    done = CliRunner().invoke(bench, (name, *SMALL, *options, "--arms", ",".join(arms), "--json", str(path)))
    assert done.exit_code == 0, done.output
    result: EngineTablesResult = json.loads(path.read_text())
    assert sorted({row["point"] for row in result["rows"]}) == points
    assert {row["arm"] for row in result["rows"]} == {RECOMPUTE, *arms}
    if "--auto" in options:
        assert [line["name"] for line in result["gate"]] == [
            f"disk, pass {number}, 2 tokens generated" for number in (1, 2)
        ]
    else:
        assert all(row["hit_share"] > 0.9 for row in result["rows"] if row["arm"] in arms and row["number"] == 2)


@pytest.mark.parametrize("hit_rate", [0.0, 0.5])
def test_a_hit_changes_neither_the_kv_nor_how_much_of_a_prompt_there_is(engine: Engine, hit_rate: float) -> None:
    cache, made = OnDevice(engine.layout), some(hit_rate=hit_rate)
    first = [engine.batch(cache, [prompt], 2, 16)[0] for prompt in made]
    spent = Spent()
    assert engine.batch(cache, made, 4, 64, spent) == first
    assert (spent.hits, spent.hit_tokens, spent.computed_tokens) == ([48] * 3, 3 * 48, 3 * 2)
    assert [len(checks) for checks in first] == [3] * 3
    assert len(set(map(tuple, first))) == 3


def test_a_batch_begins_where_the_least_of_its_hits_ends(engine: Engine) -> None:
    class Partly(OnDevice):
        def hit(self, tokens: list[int], together: int) -> int:
            return min(super().hit(tokens, together), least[tokens[0]])

    cache, made, spent = Partly(engine.layout), some(), Spent()
    least = dict.fromkeys((prompt[0] for prompt in made), 48)
    first = [engine.batch(cache, [prompt], 1, 64)[0] for prompt in made]
    least[made[1][0]] = 16
    again = engine.batch(cache, made, 1, 64, spent)
    assert compare(again, first, [1] * 3, "the first chunk") == 3
    least[made[2][0]] = 0
    engine.batch(cache, made, 1, 64, spent)
    assert spent.hits == [16] * 3 + [0] * 3


def small_cache(engine: Engine, **settings: Any) -> CacheEngine:
    over = {"chunk_size": CHUNK, "max_local_cpu_size": "16MB", "hugepages": "off"} | settings
    return CacheEngine(Config.load(env={}, overrides=over), replace(engine.layout, model="small"))


def test_more_prompts_than_may_wait_for_their_load_are_loaded_all_the_same(engine: Engine) -> None:
    with small_cache(engine) as cache:
        cache._loader = Executor(cache._load, "kvredis loads", tasks_max=0)
        made, spent = some(), Spent()
        first = engine.batch(Tiered(cache), made, 1, 64)
        engine.settle()
        assert engine.batch(Tiered(cache), made, 1, 64, spent) == first
        assert spent.hits == [48] * 3
        assert cache.stats.refused_loads == 3
        engine.settle()


def test_with_auto_a_batch_is_computed_to_see_how_long_that_takes_and_no_part_of_it_is_loaded_in_vain(
    engine: Engine,
) -> None:
    with small_cache(engine, min_retrieve_tokens="auto") as cache:
        made = some(6)
        for _ in range(2):
            engine.batch(Tiered(cache), made, 1, 512)
            engine.settle()
        assert cache.stats.hit_tokens == 6 * 48
        assert cache.stats.loaded_tokens == 0


def test_a_cache_that_gives_other_bytes_is_found_out(engine: Engine) -> None:
    class Wrong(OnDevice):
        def load(self, tokens: list[int], kv: torch.Tensor, stop: int, together: int) -> Callable[[], int]:
            wait = super().load(tokens, kv, stop, together)
            kv[1, 0, 20, 1, 3] += 1
            return wait

    cache, (prompt, *_) = Wrong(engine.layout), some()
    first = engine.batch(cache, [prompt], 1, 64)
    with pytest.raises(VerificationError, match="prompt 0 came back"):
        compare(engine.batch(cache, [prompt], 1, 64), first, [3], "wrong")


def test_only_what_was_loaded_is_compared(engine: Engine) -> None:
    checks = [[1, 2, 3], [4, 5, 6]]
    others = [[1, 2, 0], [0, 5, 6]]
    assert compare(checks, others, [2, 0], "two of six") == 2
    assert compare(checks, checks, [4, 3], "all, and a prompt's rest") == 6
    with pytest.raises(VerificationError, match="prompt 0 came back"):
        compare(checks, others, [3, 0], "wrong")


def task(**changes: Any) -> Task:
    given = Task(
        arm=DEVICE,
        what="gpu, 0",
        model="test",
        prompts=3,
        tokens=50,
        hit_rate=0.0,
        seed=1,
        output=2,
        budget=64,
        rows=2,
        engine=None,
        keep=True,
        checks=[],
        full=False,
    )
    given.update(changes)  # type: ignore[typeddict-item]
    return given


def test_a_worker_keeps_its_cache_for_the_second_pass_and_refuses_a_missing_hit_or_other_bytes(engine: Engine) -> None:
    worker = Worker(engine)
    first = worker.run(task())
    assert first["hit_tokens"] == 0
    second = worker.run(task(checks=first["checks"], full=True))
    assert (second["hit_tokens"], second["verified_tokens"], second["dropped_chunks"]) == (3 * 48, 3 * 48, 0)
    wrong = [first["checks"][0], [0, *first["checks"][1][1:]], first["checks"][2]]
    with pytest.raises(VerificationError, match="prompt 1 came back with other bytes"):
        worker.run(task(checks=wrong))
    with pytest.raises(MissingHits, match="0 tokens were hits, of 144"):
        Worker(engine).run(task(full=True))


def test_a_worker_process_that_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(prefill_plan(), shape=replace(TINY, name="unknown"), prompt_tokens=32)
    with pytest.raises(BenchError, match="no model of shape unknown"), WorkerProcess(plan.begun()) as worker:
        worker.started()


def test_the_first_of_prompts_that_share_a_head_goes_alone() -> None:
    made = some(6)
    assert [len(group) for group in groups(made, 2, shared=False)] == [2, 2, 2]
    assert [len(group) for group in groups(made, 2, shared=True)] == [1, 2, 2, 1]
    assert [len(group) for group in groups(made, 1, shared=True)] == [1] * 6
    assert [prompt for group in groups(made, 4, shared=True) for prompt in group] == made


def test_a_prompt_that_has_no_chunk_before_its_last_token_is_refused() -> None:
    with pytest.raises(BenchError, match="has no chunk"):
        run(prefill_plan(prompt_tokens=64, chunk_tokens=64), lambda step: None)


@pytest.mark.parametrize("options", ["--rates 0,2", "--rates some", "--shape 7b,3b", "--arms cloud"])
def test_options_that_are_none_are_refused(options: str) -> None:
    assert CliRunner().invoke(bench, ("hit-sweep", *options.split())).exit_code == 2


def test_plans_are_the_fields_and_shrink_where_there_is_no_gpu() -> None:
    sweep, long = hit_sweep_plan(), long_prefill_plan()
    assert (sweep.prompts, sweep.prompt_tokens, sweep.rows, sweep.points[0].output) == (200, 1000, 32, 24)
    assert [point.hit_rate for point in sweep.points] == [0.0, 0.5, 0.8, 0.9, 1.0]
    assert (long.prompts, long.prompt_tokens, long.rows, long.shape.name) == (10, 10_240, 2, "7b")
    assert [point.output for point in long.points] == [2, 16, 128]
    small = on_cpu(sweep)
    assert (small.shape, small.prompts, small.prompt_tokens) == (TINY, 64, 1000)
    assert set(PLANS) == {"prefill", "hit-sweep", "long-prefill"}
    assert TablesPlan("prefill", (Point(1, 0, 1, 1),), 1, 2, arms=(LANE,)).served() == [RECOMPUTE, LANE]


def rows_of(qps: dict[tuple[str, int, float], float]) -> list[Row]:
    """Rows of two repeats, in which everything is 1 and 2 times as fast."""
    rows = []
    for (arm, number, point), base in qps.items():
        row = row_of(arm, number, point)
        for repeat in range(2):
            rate = base * (repeat + 1)
            hit = 0 if arm == RECOMPUTE else 900
            seconds = {"seconds": 10, "prefill_seconds": 5, "decode_seconds": 3}
            seconds |= dict.fromkeys(("load_seconds", "alone_load_seconds"), 2 if hit else 0)
            sample = {"repeat": repeat, "qps": rate, "first_ms": 1e3 / rate, "drain_seconds": 0.0, "dropped_chunks": 0}
            sample |= {name: each / rate for name, each in seconds.items()}
            row["samples"].append(sample | {"hit_tokens": hit, "alone_hit_tokens": hit, "computed_tokens": 1000 - hit})
        rows.append(row)
    conclude(rows, bytes_per_token=1000)
    return rows


def result_of(rows: list[Row], name: str = "hit-sweep", auto: bool = False) -> EngineTablesResult:
    plan = replace(PLANS[name](), auto=auto)
    result = EngineTablesResult(**new_result(SCHEMA, plan.options(), ["a note"]), bench=name, rows=rows, left_out=[])
    result["gate"] = gate_of(result)
    return result


def test_a_row_is_compared_with_recompute_in_the_process_that_served_it() -> None:
    rates = {(RECOMPUTE, 1, 0.0): 2.0, (RECOMPUTE, 2, 0.0): 4.0, (CPU, 2, 0.0): 6.0, (LANE, 2, 0.0): 6.0}
    one, two, cpu, lane = rows_of(rates)
    assert (one["ratio"], two["ratio"], cpu["ratio"], lane["ratio"]) == (1.0, 1.0, 3.0, 1.5)
    assert (lane["first_ratio"], lane["hit_share"]) == (1.5, 0.9)
    # 900 tokens in 2 / 6 s and 2 / 12 s; recompute makes 1000 in 5 / 4 s and 5 / 8 s
    assert lane["tier_gb_per_s"] == pytest.approx(900 * 1000 * (3 + 6) / 2 / 1e9)
    assert lane["over_break_even"] == pytest.approx((900 * 4.5) / (1000 * 1.2))
    assert one["over_break_even"] is None


@pytest.mark.parametrize(("lane", "cpu", "passed"), [(2.51, 0.96, True), (2.49, 0.96, False), (2.51, 0.94, False)])
def test_the_sweeps_lines_are_held_by_what_they_ask_for(lane: float, cpu: float, passed: bool) -> None:
    rates = {(RECOMPUTE, 1, 0.0): 1.0, (RECOMPUTE, 2, 0.0): 1.0, (LANE, 2, 0.0): lane, (REMOTE, 2, 0.0): 0.5}
    rates |= {(DEVICE, 2, 0.5): 4.0, (CPU, 2, 0.5): 4 * cpu, (DEVICE, 2, 0.9): 4.0, (CPU, 2, 0.9): 1.0}
    judged = gate_of(result_of(rows_of(rates)))
    assert [line["name"] for line in judged] == ["lane / recompute, 0% in common", "cpu / gpu, 50% in common"]
    assert all(line["passed"] for line in judged) == passed


def test_memory_and_gpu_are_compared_repeat_by_repeat() -> None:
    device, cpu = rows = rows_of({(DEVICE, 2, 0.5): 4.0, (CPU, 2, 0.5): 4 * 0.96})
    cpu["samples"].pop()  # of the repeat in which everything was twice as fast
    conclude(rows, 1000)
    assert cpu["qps"] / device["qps"] < 0.7
    (line,) = gate_of(result_of(rows))
    assert line["measured"] == pytest.approx(0.96)
    assert line["passed"]


def test_with_auto_every_tier_is_judged_and_without_only_the_sweep_is() -> None:
    rates = {(RECOMPUTE, 1, 2.0): 1.0, (DEVICE, 1, 2.0): 0.1, (REMOTE, 1, 2.0): 0.969, (DISK, 1, 2.0): 0.971}
    rows = rows_of(rates)
    assert [line["passed"] for line in gate_of(result_of(rows, "long-prefill", auto=True))] == [False, True]
    assert gate_of(result_of(rows, "long-prefill")) == []


def test_the_table_tells_every_row_and_what_was_missed() -> None:
    rates = {(RECOMPUTE, 1, 0.0): 1.0, (RECOMPUTE, 2, 0.0): 1.0, (LANE, 2, 0.0): 2.0}
    text = "\n".join(table_lines(result_of(rows_of(rates))))
    for part in ("a note", "0% in common", "lane, pass 2", "2.000 to 2.000", "MISSED  lane / recompute"):
        assert part in text


def test_no_cache_stores_nothing_and_finds_nothing(engine: Engine) -> None:
    spent = Spent()
    engine.batch(NoCache(), some(2), 1, 64, spent)
    assert (spent.hit_tokens, spent.computed_tokens) == (0, 100)
