"""The bench of what storing costs: its arms store what they say, lose nothing, and are judged by the stated lines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.bench.core.compute import TINY, Asleep, Modelled
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.prompts import PromptPlan, prompts
from kvredis.bench.core.result import Row, new_result
from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.store_overhead import (
    CPU,
    LANE,
    NONE,
    SCHEMA,
    TIERS,
    StoreOverheadPlan,
    StoreOverheadResult,
    conclude,
    row_of,
    run,
    store_overhead_gate,
    table_lines,
)
from kvredis.cli.bench.command import bench

SHAPE = ModelShape("small", layers=2, kv_heads=2, head_dim=16)
PROMPTS, TOKENS = 2, 64
SMALL = ("--prompts", str(PROMPTS), "--tokens", str(TOKENS), "--chunk-tokens", "16", "--repeats", "1")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A model's configuration of SHAPE."""
    path = tmp_path / "small" / "config.json"
    path.parent.mkdir()
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_attention_heads": 2, "head_dim": 16}
    path.write_text(json.dumps(sizes))
    return path


def test_a_small_run_stores_on_every_tier_and_gets_every_byte_back(tmp_path: Path, config: Path) -> None:
    path, drawn = tmp_path / "result.json", tmp_path / "result.png"
    options = ("--shape", str(config), "--budgets", "32,24", "--compute", "sleep:20000")
    done = CliRunner().invoke(bench, ("store-overhead", *SMALL, *options, "--json", str(path), "--plot", str(drawn)))
    assert done.exit_code == 0, done.output
    result: StoreOverheadResult = json.loads(path.read_text())
    assert result["schema"] == SCHEMA
    rows = {(row["tier"], row["budget"]): row for row in result["rows"]}
    assert set(rows) == {(tier, budget) for tier in TIERS for budget in (32, 24)}
    for (tier, _), row in rows.items():
        (sample,) = row["samples"]
        assert sample["seconds"] >= PROMPTS * TOKENS / 20_000
        assert row["kept"] == (0 if tier == NONE else 1)
        assert (sample["store_seconds"] > 0) == (tier != NONE)
        assert sample["qps_drained"] <= sample["qps"] == pytest.approx(PROMPTS / sample["seconds"], rel=1e-4)
    assert result["verified_bytes"] == 2 * 4 * PROMPTS * TOKENS * SHAPE.bytes_per_token()
    assert len(result["gate"]) == 2 * 4 + 1
    assert result["gate"][-1]["passed"]
    assert "compute: sleep:20000" in done.output
    assert drawn.stat().st_size > 10_000


def test_without_a_gpu_a_tiny_model_computes_and_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(
        StoreOverheadPlan(
            tiers=(CPU,),
            budgets=(32,),
            prompts=PROMPTS,
            prompt_tokens=TOKENS,
            chunk_tokens=16,
            repeats=1,
            tokens_per_s=None,
        ),
        lambda step: None,
    )
    assert result["options"]["shape"] == TINY.name
    assert "tiny model" in result["notes"][0]
    assert result["verified_bytes"] == PROMPTS * TOKENS * TINY.bytes_per_token()


def test_a_model_that_prefills_by_steps_makes_the_kv_that_it_makes_at_once() -> None:
    tokens = list(prompts(PromptPlan(48, 0.0, 2, seed=1)))
    made = []
    for step in (48, 20):
        model = Modelled(TINY, tokens)
        for number in range(2):
            model.begin(number)
            for start in range(0, 48, step):
                model.step(start, min(start + step, 48))
        made.append(torch.stack([model.kv(number).cpu() for number in range(2)]))
    assert made[0].shape == (2, TINY.layers, 2, 48, TINY.kv_heads, TINY.head_dim)
    assert torch.allclose(made[0].float(), made[1].float(), atol=0.05)
    assert made[0].float().std() > 0.01
    assert not torch.equal(made[0][0], made[0][1])


@pytest.mark.parametrize("nbytes", [1, 2, 4])
def test_a_step_asleep_takes_its_time_and_each_prompt_has_kv_of_its_own(nbytes: int) -> None:
    compute = Asleep(ModelShape("any", 2, 2, 16, nbytes), 3, 64, tokens_per_s=10_000)
    began_s = time.perf_counter()
    compute.step(0, 100)
    assert time.perf_counter() - began_s >= 0.01
    kvs = [compute.kv(number).view(torch.uint8) for number in range(3)]
    assert [kv.shape for kv in kvs] == [(2, 2, 64, 2, 16 * nbytes)] * 3
    assert not torch.equal(kvs[0], kvs[1])
    assert not torch.equal(kvs[1], kvs[2])


SMALL_PLAN = StoreOverheadPlan(SHAPE, (CPU,), (32,), PROMPTS, TOKENS, 16, 1, 20_000)


def test_a_wrong_byte_stops_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    true = CacheEngine.retrieve

    def wrong(engine: CacheEngine, tokens: Any, out: Any, **options: Any) -> int:
        stop = true(engine, tokens, out, **options)
        out[0, 0, 0, 0, 0] = out[0, 0, 0, 0, 0] + 1 if out[0, 0, 0, 0, 0] == 0 else 0
        return stop

    monkeypatch.setattr(CacheEngine, "retrieve", wrong)
    with pytest.raises(VerificationError, match="other bytes"):
        run(SMALL_PLAN, lambda step: None)


def test_what_was_not_stored_is_told_and_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    true = CacheEngine.store_later
    monkeypatch.setattr(CacheEngine, "store_later", lambda engine, tokens, kv: true(engine, tokens[:48], kv))
    result = run(SMALL_PLAN, lambda step: None)
    assert [row["kept"] for row in result["rows"]] == [0, 0.75]
    assert not result["gate"][-1]["passed"]


def test_a_prompt_without_a_whole_chunk_is_refused() -> None:
    with pytest.raises(BenchError, match="no whole chunk"):
        run(StoreOverheadPlan(SHAPE, prompt_tokens=64), lambda step: None)


@pytest.mark.parametrize("compute", ["sleep", "sleep:fast", "sleep:0", "sleep:nan", "dream:5"])
def test_a_compute_that_is_none_is_refused(compute: str) -> None:
    done = CliRunner().invoke(bench, ("store-overhead", "--compute", compute))
    assert done.exit_code == 2
    assert "want model, or sleep:20480" in done.output


def rows_of(qps: dict[tuple[str, int], float], kept: float = 1.0) -> list[Row]:
    """Rows of three repeats, in which everything is 1, 2 and 3 times as fast."""
    rows = []
    for (tier, budget), base in qps.items():
        row = row_of(tier, budget)
        for repeat in range(3):
            rate = base * (repeat + 1)
            sample = {"repeat": repeat, "seconds": 4 / rate, "qps": rate, "qps_drained": 0.9 * rate, "kept": kept}
            sample |= {"drain_seconds": 0.1, "store_seconds": 0.1, "step_p50_ms": 1.0, "step_p99_ms": 2.0}
            row["samples"].append(sample)
        rows.append(row)
    conclude(rows)
    return rows


def test_ratios_are_to_no_cache_in_the_same_repeat_and_budget() -> None:
    none, cpu = rows_of({(NONE, 32): 2.0, (CPU, 32): 1.9})
    assert none["ratio"] == 1.0
    assert cpu["ratio"] == pytest.approx(0.95)
    assert cpu["ratio_min"] == pytest.approx(0.95)
    assert cpu["ratio_max"] == pytest.approx(0.95)
    assert (cpu["qps"], cpu["qps_min"], cpu["qps_max"]) == pytest.approx((3.8, 1.9, 5.7))
    assert cpu["store_seconds"] == 0.1
    assert cpu["step_p99_ratio"] == 1.0


@pytest.mark.parametrize(
    ("budget", "ratio", "passed"), [(1024, 0.971, True), (1024, 0.969, False), (768, 0.951, True), (768, 0.949, False)]
)
def test_each_line_is_held_by_what_it_asks_for(budget: int, ratio: float, passed: bool) -> None:
    rows = rows_of({(NONE, budget): 2.0, (LANE, budget): 2 * ratio})
    first, kept = store_overhead_gate(rows)
    assert (first["name"], first["passed"], kept["passed"]) == (f"lane, {budget} tokens", passed, True)


def test_a_figure_that_is_missing_does_not_pass() -> None:
    rows = rows_of({(CPU, 32): 2.0}, kept=0.5)
    assert [line["passed"] for line in store_overhead_gate(rows)] == [False, False]


def test_the_table_tells_every_row_and_what_was_missed() -> None:
    rows = rows_of({(NONE, 32): 2.0, (CPU, 32): 1.0})
    result = StoreOverheadResult(**new_result(SCHEMA, SMALL_PLAN.options(), ["a note"]), rows=rows)
    result["gate"] = store_overhead_gate(rows)
    text = "\n".join(table_lines(result))
    assert "a note" in text
    assert "0.500 to 0.500" in text
    assert "none itself moved by 200.0%" in text
    assert "MISSED  cpu, 32 tokens" in text
