"""`kvredis bench vllm --concurrency`: which engines are opened, what they are told, and what follows from what they
answer. They are a process that answers by its arm; tests/compat has the real one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.shapes import SHAPES
from kvredis.bench.vllm.concurrency import (
    CONCURRENT_ARMS,
    KINDS,
    SCHEMA,
    ConcurrencyPlan,
    ConcurrencyResult,
    gate_of,
    run,
    setting_of,
    table_lines,
)
from kvredis.bench.vllm.engine import TINY, Where, rounds
from kvredis.cli.bench.command import bench

H200 = {"device": "NVIDIA H200", "memory_bytes": 150_000_000_000, "devices": 1, "vllm": "0.26.0", "torch": "2.11"}
NO_GPU = {"device": "cpu", "memory_bytes": 0, "vllm": "0.32.0", "torch": "2.13"}

FAKE = """#!{python}
import json, os, sys
if sys.argv[3:] == ["--facts"]:
    print(json.dumps({facts}))
    sys.exit()
opening = json.loads(sys.stdin.readline())
arm = os.path.basename(opening["model"]).rsplit("-", 1)[0]
with open({told!r}, "a") as told:
    print(json.dumps([arm, opening, os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH")]), file=told)
print(json.dumps({{"error": "no engine today"}} if arm == "tcp" else {{}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.pop("do") == "counters":
        print(json.dumps({{"loads": 3.0}} if arm.startswith("lane") else {{}}), flush=True)
        continue
    slow = asked["seed"]  # the machine slows down for all alike
    rates = dict(cold=10.0, stored=10.0, half=20.0, step=1000.0)
    if arm == "offloading":
        rates["stored"] = 16.0
    if arm == "lane":
        rates |= dict(cold=9.9, stored=20.0, half=19.0)
    if arm == "lane+layers":
        rates |= dict(stored=15.0, step=720.0)
    if arm == "none+layers":
        rates |= dict(step=750.0)
    answers = [[asked["seed"] + at] for at in range(asked["count"])]
    if arm == "lane+layers" and asked["seed"] == 2:
        answers[0] = [-1]
    cached = 0 if arm.startswith("none") else asked["count"] * asked["tokens"]
    batches = {{
        kind: dict(rate=rate / (1 + slow), cached_tokens=cached if kind == "stored" else 0, loaded_bytes=7,
                   answers=answers)
        for kind, rate in rates.items()
    }}
    print(json.dumps(dict(batches=batches)), flush=True)
"""


def fake(folder: Path, facts: dict[str, Any]) -> tuple[Where, Path]:
    """An interpreter that stands for one with vLLM, and the file that says what it was told."""
    python, told = folder / "python", folder / "told"
    python.write_text(FAKE.format(python=sys.executable, facts=repr(facts), told=str(told)))
    python.chmod(0o755)
    return Where(str(python), logs=folder / "logs"), told


def small(**rest: Any) -> ConcurrencyPlan:
    return replace(ConcurrencyPlan(4, shape=TINY, prompt_tokens=256, chunk_tokens=64, repeats=2), **rest)


def test_rates_are_compared_with_those_of_an_engine_without_a_connector_that_is_launched_in_the_same_way(
    tmp_path: Path,
) -> None:
    where, _ = fake(tmp_path, H200)
    result = run(small(), where, lambda _: None)
    rows = {(row["arm"], row["kind"]): row for row in result["rows"]}
    assert set(rows) == {
        (arm, kind) for arm in ("none", "offloading", "lane", "lane+layers", "none+layers") for kind in KINDS
    }
    lane, layers = rows["lane", "stored"], rows["lane+layers", "step"]
    assert (lane["to_base"], lane["to_offloading"], lane["cached_share"]) == (2.0, 1.25, 1.0)
    assert lane["value"] == pytest.approx(20 * (1 / 2 + 1 / 3) / 2), "the median of two repeats"
    assert layers["to_base"] == pytest.approx(0.96), "of none+layers, not of none"
    assert rows["lane", "step"]["to_base"] == 1.0
    assert rows["none+layers", "step"]["to_base"] is None
    assert rows["lane+layers", "cold"]["equal"] == 0.5
    judged = {line["name"]: line["passed"] for line in result["gate"]}
    assert judged["/ none         lane, all stored"] is True
    assert judged["/ none         lane, half shared and stored"] is False
    assert judged["/ none         lane, cold"] is True, "0.99"
    assert judged["/ offloading   lane, all stored"] is True
    assert judged["/ offloading   lane+layers, all stored"] is False
    assert judged["/ none+layers  lane+layers, a step that moves nothing"] is False
    assert judged["tokens equal   lane+layers, cold"] is False
    assert judged["measured       tcp, cold"] is False, "an arm that was left out has held nothing"
    assert any("no engine today" in note for note in result["notes"])
    assert result["counters"] == {"lane": {"loads": 3.0}, "lane+layers": {"loads": 3.0}}
    text = "\n".join(table_lines(result))
    assert "4 requests at once of 256 tokens" in text
    assert "all stored   requests/s" in text


def test_engines_have_room_for_all_requests_and_graphs_of_as_many(tmp_path: Path) -> None:
    where, told = fake(tmp_path, H200 | {"devices": 2})
    run(small(concurrency=12, ranks=2, arms=("none", "lane+layers"), repeats=1), where, lambda _: None)
    opened = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(arm, breaks) for arm, _, breaks in opened] == [("none", None), ("lane+layers", "1"), ("none+layers", "1")]
    for arm, opening, _ in opened:
        options = opening["options"]
        assert options["tensor_parallel_size"] == 2
        assert options["kv_cache_memory_bytes"] >= 12 * TINY.block_bytes(256) // 2
        launch = options["compilation_config"]
        assert 12 in launch["cudagraph_capture_sizes"]
        assert launch["cudagraph_mode"] == ("FULL" if arm == "none" else "PIECEWISE")
        assert (opening["connector"] is None) == (arm != "lane+layers")


def test_what_layers_are_compared_with_is_open_beside_them_where_there_is_room() -> None:
    setting = setting_of(ConcurrencyPlan(8), H200)
    assert (setting.shape, setting.tokens, setting.chunk_tokens) == (SHAPES["8b"], 4096, 256)
    assert setting.arms == ("none", "offloading", "lane", "lane+layers", "none+layers", "tcp")
    assert rounds(setting.arms, setting.together) == [
        ["none", "offloading", "lane", "lane+layers", "none+layers"],
        ["none", "offloading", "tcp"],
    ]
    assert setting_of(ConcurrencyPlan(8), NO_GPU).arms == ("none", "lane", "lane+layers", "none+layers", "tcp")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BenchError, match="half a prompt of 100 tokens has no chunk of 64"):
        setting_of(small(prompt_tokens=100), NO_GPU)
    with pytest.raises(BenchError, match="2 tensor-parallel ranks need as many GPUs"):
        setting_of(small(ranks=2), H200)
    with pytest.raises(BenchError, match="leave the arms with memory out"):
        setting_of(small(ranks=2, arms=("none", "memory")), H200 | {"devices": 2})
    with pytest.raises(BenchError, match="no arm is left"):
        setting_of(small(arms=("offloading",)), NO_GPU)
    with pytest.raises(BenchError, match="an engine of shape 8b takes"):
        setting_of(ConcurrencyPlan(8), H200 | {"memory_bytes": 20_000_000_000})


def test_nothing_is_begun_when_time_is_over(tmp_path: Path) -> None:
    where, told = fake(tmp_path, H200)
    with pytest.raises(BenchError, match="There was no time for none, lane"):
        run(small(arms=("none", "lane"), limit_s=1e-9), where, lambda _: None)
    assert not told.exists()


def test_the_command_takes_its_options_and_draws(tmp_path: Path) -> None:
    where, told = fake(tmp_path, NO_GPU)
    path, drawn = tmp_path / "result.json", tmp_path / "result.png"
    options = ("--concurrency", "3", "--arms", "none,lane", "--quick", "--json", str(path), "--plot", str(drawn))
    done = CliRunner().invoke(bench, ("vllm", "--python", where.python, *options, "--gate"))
    assert done.exit_code == 0, done.output
    result: ConcurrencyResult = json.loads(path.read_text())
    assert (result["schema"], result["options"]["concurrency"], result["options"]["repeats"]) == (SCHEMA, 3, 1)
    assert [arm for arm, *_ in map(json.loads, told.read_text().splitlines())] == ["none", "lane"]
    assert all(line["name"].startswith("tokens equal") for line in gate_of(result)), "without a GPU tokens alone"
    assert drawn.stat().st_size > 10_000
    assert set(CONCURRENT_ARMS) >= {"none", "lane"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--tensor-parallel", "2"), "--tensor-parallel goes with --concurrency"),
        (("--concurrency", "8", "--prompt-tokens", "512,1024"), "prompts of one length"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: tuple[str, ...], text: str) -> None:
    done = CliRunner().invoke(bench, ("vllm", *words))
    assert done.exit_code == 2
    assert text in done.output
