"""The bench of prefill and decode apart without vLLM: who is asked what, and what becomes of the answers.

tests/compat/test_vllm_ttft.py runs it with the real one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvredis.bench.core.errors import BenchError
from kvredis.bench.vllm.apart import ARMS, BESIDE, WAYS, PdPlan, gate_of, run, setting_of, table_lines
from kvredis.bench.vllm.engine import TINY, Where
from kvredis.cli.bench.command import bench

H200 = {"device": "NVIDIA H200", "memory_bytes": 150_000_000_000, "devices": 2, "vllm": "0.26.0", "torch": "2.11"}
NO_GPU = {"device": "cpu", "memory_bytes": 0, "vllm": "0.32.0", "torch": "2.13"}

FAKE = """#!{python}
import json, os, sys
if sys.argv[3:] == ["--facts"]:
    print(json.dumps({facts}))
    sys.exit()
opening = json.loads(sys.stdin.readline())
role = opening["connector"]["kv_role"]
with open({told!r}, "a") as told:
    print(json.dumps([opening, os.environ.get("CUDA_VISIBLE_DEVICES")]), file=told)
print("{{}}", flush=True)
seen = set()
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "first":
        again = role == "kv_consumer" and asked["seed"] in seen
        seen.add(asked["seed"])
        first_s = asked["seed"] + (0.5 if role == "kv_producer" else 0.55 if again else 0.4)
        cached = 128 if again else 0
        print(json.dumps(dict(asked_s=float(asked["seed"]), first_s=first_s, cached_tokens=cached,
                              answer=[{answer}])), flush=True)
    elif asked["do"] == "stalled":
        print(json.dumps(dict(gap_ms=float(asked["tokens"]), cached_tokens=0)), flush=True)
    else:
        print("{{}}", flush=True)
"""


def fake(folder: Path, facts: dict[str, Any], answer: str = "7") -> tuple[Where, Path]:
    """An interpreter that stands for one with vLLM, and the file that says what it was told."""
    python, told = folder / "python", folder / "told"
    python.write_text(FAKE.format(python=sys.executable, facts=repr(facts), told=str(told), answer=answer))
    python.chmod(0o755)
    return Where(str(python), logs=folder / "logs"), told


SMALL = PdPlan(shape=TINY, prompt_tokens=150, chunk_tokens=64, repeats=2)


def test_each_arm_has_an_engine_on_the_first_gpu_and_one_on_the_second_decodes(tmp_path: Path) -> None:
    where, told = fake(tmp_path, H200)
    result = run(SMALL, where, lambda step: None)
    openings = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(opening["connector"]["kv_role"], gpu) for opening, gpu in openings] == [
        *[("kv_producer", "0")] * len(ARMS),
        ("kv_consumer", "1"),
    ]
    assert len({opening["model"] for opening, _ in openings}) == 1, "the model's folder is in the keys"
    whole, chunked, layers, decode = (opening for opening, _ in openings)
    assert chunked["options"]["max_num_batched_tokens"] == whole["options"]["max_num_batched_tokens"] == 2048
    assert layers["connector"]["kv_connector_extra_config"]["use_layerwise"]
    assert not decode["connector"]["kv_connector_extra_config"]["use_layerwise"]
    assert {(row["arm"], row["way"], len(row["samples"])) for row in result["rows"]} == {
        (arm, way, 2) for arm in ARMS for way in WAYS
    }


def test_times_are_told_from_the_prefill_engine_s_and_compared_with_the_decode_engine_alone(tmp_path: Path) -> None:
    where, _ = fake(tmp_path, NO_GPU)
    result = run(SMALL, where, lambda step: None)
    for row in result["rows"]:
        assert row["single_ms"] == pytest.approx(400)
        assert row["prefill_ms"] == pytest.approx(500)
        assert row["handover_ms"] == pytest.approx(50)
        assert row["total_ms"] == pytest.approx(550)
        assert row["to_single"] == pytest.approx(550 / 400)
        assert (row["hit_share"], row["equal"]) == (1, 1)
    assert {row["what"]: row["gap_ms"] for row in result["stalls"]} == {"computed": 150, "loaded": 150, "none": 0}
    text = "\n".join(table_lines(result))
    assert "There is no GPU" in text
    assert "12 of 12 lines hold" in text


def test_bars_are_judged_for_long_prompts_of_the_8b_model_on_two_gpus(tmp_path: Path) -> None:
    where, _ = fake(tmp_path, H200)
    result = run(replace(SMALL, repeats=1), where, lambda step: None)
    assert len(gate_of(result)) == 12, "tokens and hits"
    result["options"] |= {"shape": "8b", "prompt_tokens": 15_400}
    judged = {line["name"]: line["passed"] for line in gate_of(result)}
    assert judged["handover ms    chunked, asked behind"]
    assert judged["handover ms    whole, asked behind"]
    assert judged[f"/ single       whole, asked {BESIDE}"] is False
    assert judged["longest gap ms, loaded"] is False


def test_answers_that_differ_and_a_prompt_without_a_chunk_are_told(tmp_path: Path) -> None:
    where, _ = fake(tmp_path, NO_GPU, answer="len(seen) + again")
    assert {row["equal"] for row in run(replace(SMALL, repeats=1), where, lambda step: None)["rows"]} == {0}
    with pytest.raises(BenchError, match="no chunk of 64"):
        setting_of(replace(SMALL, prompt_tokens=64), NO_GPU)
    with pytest.raises(BenchError, match="4 engines of shape 8b take 123 GB of one GPU"):
        setting_of(PdPlan(), H200 | {"devices": 1, "memory_bytes": 85_000_000_000})


def test_when_its_time_is_over_the_result_is_told_all_the_same(tmp_path: Path) -> None:
    where, _ = fake(tmp_path, NO_GPU)
    result = run(replace(SMALL, limit_s=0), where, lambda step: None)
    assert result["rows"] == result["stalls"] == []
    assert "Time was over before the last repeat." in result["notes"]


def test_the_command_writes_its_result_and_exits_by_its_gate(tmp_path: Path) -> None:
    where, _ = fake(tmp_path, NO_GPU)
    path = tmp_path / "pd.json"
    options = ("--quick", "--arms", "whole", "--prompt-tokens", "150", "--json", str(path), "--gate")
    done = CliRunner().invoke(bench, ("pd", "--python", where.python, *options))
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text())["schema"] == "kvredis.bench.pd/1"
    assert "4 of 4 lines hold" in done.output
