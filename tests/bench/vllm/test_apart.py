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
from kvredis.bench.vllm.apart import ARMS, BESIDE, PEERS, WAYS, PdPlan, gate_of, run, setting_of, table_lines
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
role, is_nixl = opening["connector"]["kv_role"], opening["connector"]["kv_connector"] == "NixlConnector"
seen_gpus, port = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT")
with open({told!r}, "a") as told:
    print(json.dumps([opening, seen_gpus, port, os.environ.get("VLLM_USE_V2_MODEL_RUNNER")]), file=told)
print("{{}}", flush=True)
seen, moved = set(), []
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "first":
        moved += [asked["transfer"]] if asked["transfer"] else []
        if is_nixl and len(moved) > {moved_max}:
            print(json.dumps(dict(error="the link is down")), flush=True)
            continue
        again = role == "kv_consumer" and asked["seed"] in seen
        if is_nixl:
            again = asked["transfer"] == dict(do_remote_prefill=True, of=asked["seed"])
        seen.add(asked["seed"])
        loading_s = 0.6 if is_nixl else 0.55
        first_s = asked["seed"] + (0.5 if role == "kv_producer" else loading_s if again else 0.4)
        cached = (asked["tokens"] if is_nixl else 128) if again else 0
        wanted = bool(asked["transfer"] and asked["transfer"].get("do_remote_decode"))
        transfer = dict(do_remote_prefill=True, of=asked["seed"], remote_prefill_cached_tokens=0)
        transfer = transfer if is_nixl and wanted else None
        print(json.dumps(dict(asked_s=float(asked["seed"]), first_s=first_s, cached_tokens=cached,
                              answer=[{answer}], transfer=transfer)), flush=True)
    elif asked["do"] == "stalled":
        print(json.dumps(dict(gap_ms=float(asked["tokens"]), cached_tokens=0)), flush=True)
    else:
        print("{{}}", flush=True)
"""


def fake(folder: Path, facts: dict[str, Any], answer: str = "7", moved_max: int = 1000) -> tuple[Where, Path]:
    """An interpreter that stands for one with vLLM, and the file that says what it was told. After `moved_max` prompts
    with kv_transfer_params an engine with NIXL fails."""
    python, told = folder / "python", folder / "told"
    words = {"python": sys.executable, "facts": repr(facts), "told": str(told)}
    python.write_text(FAKE.format(**words, answer=answer, moved_max=moved_max))
    python.chmod(0o755)
    return Where(str(python), logs=folder / "logs"), told


SMALL = PdPlan(shape=TINY, prompt_tokens=150, chunk_tokens=64, repeats=2)


def test_each_arm_has_an_engine_on_the_first_gpu_and_one_on_the_second_decodes(tmp_path: Path) -> None:
    where, told = fake(tmp_path, H200)
    result = run(SMALL, where, lambda step: None)
    openings = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(opening["connector"]["kv_role"], gpu) for opening, gpu, *_ in openings] == [
        *[("kv_producer", "0")] * (len(ARMS) + 1),
        ("kv_consumer", "1"),
    ]
    assert len({opening["model"] for opening, *_ in openings}) == 1, "the model's folder is in the keys"
    whole, chunked, layers, gpu, decode = (opening for opening, *_ in openings)
    extra = [each["connector"]["kv_connector_extra_config"] for each in (whole, chunked, layers, gpu, decode)]
    assert [each["use_gpu_memory"] for each in extra] == [False, False, False, True, True]
    assert chunked["options"]["max_num_batched_tokens"] == whole["options"]["max_num_batched_tokens"] == 2048
    assert layers["connector"]["kv_connector_extra_config"]["use_layerwise"]
    assert not decode["connector"]["kv_connector_extra_config"]["use_layerwise"]
    assert {(row["arm"], row["way"], len(row["samples"])) for row in result["rows"]} == {
        (arm, way, 2) for arm in (*ARMS, "gpu") for way in WAYS
    }
    assert "Nothing was written to GPU memory" in result["notes"][-1], "there is none here"


@pytest.mark.parametrize(("devices", "decodes"), [(4, "2,3"), (2, "0,1")])
def test_engines_of_several_ranks_have_as_many_gpus_of_their_own_where_there_are_enough(
    tmp_path: Path, devices: int, decodes: str
) -> None:
    where, told = fake(tmp_path, H200 | {"devices": devices})
    result = run(replace(SMALL, arms=("whole", "gpu"), ranks=2), where, lambda step: None)
    openings = [json.loads(line) for line in told.read_text().splitlines()]
    assert [gpus for _, gpus, *_ in openings] == ["0,1", "0,1", decodes]
    assert {opening["options"]["tensor_parallel_size"] for opening, *_ in openings} == {2}
    assert ("The engines share 2 GPUs." in result["notes"]) is (devices == 2)
    result["options"] |= {"shape": "8b", "prompt_tokens": 15_400}
    assert not [line for line in gate_of(result) if line["name"].startswith("handover")], "the bars are of one GPU each"
    with pytest.raises(BenchError, match="need as many GPUs"):
        setting_of(replace(SMALL, ranks=8), H200)
    with pytest.raises(BenchError, match="one rank alone"):
        setting_of(replace(SMALL, arms=("whole", "nixl"), ranks=2), H200)


def test_gpu_memory_has_a_bar_of_its_own_and_needs_a_gpu(tmp_path: Path) -> None:
    where, _ = fake(tmp_path, H200)
    result = run(replace(SMALL, arms=("gpu+chunked",)), where, lambda step: None)
    result["options"] |= {"shape": "8b", "prompt_tokens": 15_400}
    bars = {line["name"]: line["bound"] for line in gate_of(result)}
    assert bars["handover ms    gpu+chunked, asked behind"] == "<= 35"
    with pytest.raises(BenchError, match="no GPU"):
        setting_of(replace(SMALL, arms=("gpu",)), NO_GPU)


def test_nixl_has_a_pair_of_engines_that_see_both_gpus_and_listen_at_ports_of_their_own(tmp_path: Path) -> None:
    where, told = fake(tmp_path, H200 | {"nixl": "1.5.2"})
    result = run(replace(SMALL, arms=("chunked", *PEERS)), where, lambda step: None)
    openings = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(opening["connector"]["kv_connector"], gpu) for opening, gpu, *_ in openings] == [
        ("KVRedisConnector", "0"),
        *[("NixlConnector", gpus) for gpus in ("0,1", "1,0") * 2],
        ("KVRedisConnector", "1"),
    ]
    pairs = openings[1:-1]
    assert [opening["connector"]["kv_role"] for opening, *_ in pairs] == ["kv_producer", "kv_consumer"] * 2
    extra = [opening["connector"]["kv_connector_extra_config"] for opening, *_ in pairs]
    assert [each["enable_cross_layers_blocks"] for each in extra] == [False, False, True, True]
    assert [runner for *_, runner in pairs] == [None, None, "0", "0"], "the other one has no such layout"
    ports = [port for *_, port, _ in pairs]
    assert len(set(ports)) == len(pairs)
    assert all(ports), "vLLM's own default is one port for all"
    assert result["options"]["nixl"] == "1.5.2"


def test_what_nixl_s_prefill_engine_says_of_its_kv_goes_to_its_decode_engine(tmp_path: Path) -> None:
    where, _ = fake(tmp_path, H200 | {"nixl": "1.5.2"})
    result = run(replace(SMALL, arms=("chunked", "nixl")), where, lambda step: None)
    (row,) = (row for row in result["rows"] if row["arm"] == "nixl")
    assert (row["way"], len(row["samples"])) == ("behind", SMALL.repeats)
    assert row["hit_share"] == row["equal"] == 1
    assert (row["single_ms"], row["handover_ms"], row["total_ms"]) == pytest.approx((400, 100, 600))
    assert result["notes"] == ["Weights are vLLM's dummy ones: what is generated depends little on the KV."]
    result["options"] |= {"shape": "8b", "prompt_tokens": 15_400}
    judged = {line["name"]: line["measured"] for line in gate_of(result)}
    assert judged["handover       chunked / nixl"] == pytest.approx(0.5)


@pytest.mark.parametrize(("moved_max", "measured"), [(0, 0), (2, 1)], ids=["at first", "later"])
def test_nixl_that_fails_is_given_up_and_the_other_arms_go_on(tmp_path: Path, moved_max: int, measured: int) -> None:
    where, _ = fake(tmp_path, H200 | {"nixl": "1.5.2"}, moved_max=moved_max)
    result = run(replace(SMALL, arms=("chunked", "nixl")), where, lambda step: None)
    counts = {(row["arm"], row["way"]): len(row["samples"]) for row in result["rows"]}
    assert counts == {("chunked", way): 2 for way in WAYS} | ({("nixl", "behind"): measured} if measured else {})
    assert "Given up: the engine of nixl: the link is down" in result["notes"][-1]
    assert not any("nixl" in line["name"] for line in gate_of(result)) or measured


def test_without_nixl_beside_vllm_its_arms_are_left_out_and_alone_they_are_refused(tmp_path: Path) -> None:
    where, told = fake(tmp_path, H200 | {"nixl": None})
    result = run(replace(SMALL, arms=("chunked", "nixl")), where, lambda step: None)
    assert "Left out, since there is no NIXL beside vLLM: nixl." in result["notes"]
    assert len(told.read_text().splitlines()) == 2
    with pytest.raises(BenchError, match="no arm of kvredis' own"):
        run(replace(SMALL, arms=("nixl",)), where, lambda step: None)


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
    assert len(gate_of(result)) == 16, "tokens and hits"
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
