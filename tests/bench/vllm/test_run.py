"""The bench of vLLM without vLLM: what is open beside what, what is asked of an engine, and what its answers become.

tests/compat/test_vllm_ttft.py runs it with the real one.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvredis.adapters.vllm.config import configured
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import new_result
from kvredis.bench.core.shapes import SHAPES
from kvredis.bench.vllm.engine import (
    LMCACHE_ARMS,
    TINY,
    Where,
    connector_of,
    engine_bytes,
    model_config,
    room_bytes,
    rounds,
)
from kvredis.bench.vllm.run import (
    ANSWER_TOKENS,
    ARMS,
    VLLMPlan,
    VLLMResult,
    conclude,
    gate_of,
    row_of,
    run,
    setting_of,
    table_lines,
)
from kvredis.bench.vllm.worker import Served
from kvredis.cli.bench.command import bench

H200 = {"device": "NVIDIA H200", "memory_bytes": 150_000_000_000, "vllm": "0.26.0", "torch": "2.11"}
H100 = H200 | {"device": "NVIDIA H100", "memory_bytes": 85_000_000_000}
NO_GPU = {"device": "cpu", "memory_bytes": 0, "vllm": "0.32.0", "torch": "2.13"}
LMCACHE_THERE = {"lmcache": "0.5.3", "lmcache_compiled": True}

FAKE = """#!{python}
import json, os, socket, sys
arguments = sys.argv[1:]
assert arguments[:2] == ["-m", "kvredis.bench.vllm.worker"], arguments
if arguments[2:3] == ["--facts"]:
    print(json.dumps({facts} | ({lmcache} if "--lmcache" in arguments else {{}})))
    sys.exit()
opening = json.loads(sys.stdin.readline())
arm = os.path.basename(opening["model"]).rsplit("-", 1)[0]
with open({told!r}, "a") as told:
    breaks = {{"breaks": os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH")}}
    theirs = {{name: value for name, value in os.environ.items() if name.startswith("LMCACHE_")}}
    print(json.dumps([arm, opening | breaks | {{"environment": theirs}}, os.environ["PYTHONPATH"]]), file=told)
if arm == "tcp":
    print("it printed this", file=sys.stderr)
    print(json.dumps({{"error": "no engine today"}}), flush=True)
    sys.exit()
print("{{}}", flush=True)
extra = (opening["connector"] or {{}}).get("kv_connector_extra_config", {{}})
port = extra.get("lmcache.remote_url", "").rpartition(":")[2]
for line in sys.stdin:
    asked = json.loads(line)
    do = asked.pop("do")
    if port and do == "measure":
        with socket.create_connection(("127.0.0.1", int(port))) as server:
            server.sendall(b"DBSIZE\\r\\nSET %d-%d x\\r\\n" % (asked["seed"], asked["tokens"]))
            answer = server.makefile("rb")
            size = answer.readline()
            assert (size, answer.readline()) == (b":0\\r\\n", b"+OK\\r\\n"), size
    if do == "forget":
        with open({told!r}, "a") as told:
            print(json.dumps([arm, "forgets", ""]), file=told)
        print("{{}}", flush=True)
        continue
    if do == "counters":
        print(json.dumps({{"loads": 3.0}} if arm.startswith("lane") else {{}}), flush=True)
        continue
    if arm == "memory" and asked["seed"] >= 200:
        sys.exit(3)
    first = [asked["seed"] % 7]
    answers = [first, first] + ([first] if opening["connector"] else [])
    if asked["answer"]:
        answers.append([1] * asked["answer"] if arm != "offloading" else [2] * asked["answer"])
    warm = {{"none": None, "offloading": 20.0, "lmcache": 40.0}}.get(arm, 25.0)
    hit = asked["tokens"] // 64 * 64 - (64 if "layers" in arm else 0)
    if arm.startswith("lmcache"):
        hit = min(hit, asked["tokens"] - 1)
    print(json.dumps(dict(cold_ms=100.0, own_ms=10.0, warm_ms=warm, own_tokens=9, warm_tokens=hit if warm else 0,
                          own_bytes=0, warm_bytes=5, stored_bytes=5, answers=answers)), flush=True)
"""


def fake(folder: Path, facts: dict[str, Any], lmcache: dict[str, Any] = LMCACHE_THERE) -> tuple[Where, Path]:
    """An interpreter that stands for one with vLLM and LMCache, and the file that says what it was told."""
    python, told = folder / "python", folder / "told"
    python.write_text(FAKE.format(python=sys.executable, facts=repr(facts), told=str(told), lmcache=repr(lmcache)))
    python.chmod(0o755)
    return Where(str(python), site=str(folder), logs=folder / "logs"), told


def small(*arms: str, **rest: Any) -> VLLMPlan:
    plan = VLLMPlan(arms=arms, shape=TINY, prompt_tokens=(100, 200), chunk_tokens=64, repeats=2)
    return replace(plan, **rest)


def test_as_many_engines_are_open_as_fit_and_what_others_are_compared_with_beside_each() -> None:
    setting = setting_of(VLLMPlan(), H200)
    assert (setting.shape.name, setting.chunk_tokens, setting.together) == ("8b", 256, 4)
    assert setting_of(VLLMPlan(), H100).together == 2
    assert setting_of(VLLMPlan(together=1), H200).together == 1
    assert rounds(("none", "offloading", "lane", "memory", "tcp"), 4) == [
        ["none", "offloading", "lane", "memory"],
        ["none", "offloading", "tcp"],
    ]
    assert rounds(("none", "offloading", "lane"), 2) == [["none", "offloading"], ["lane"]]
    assert rounds(("none",), 1) == [["none"]]
    assert rounds(("none", "lane", "tcp", *LMCACHE_ARMS), 4) == [
        ["lane", "tcp", "none", "lmcache"],
        ["lane", "tcp", "lmcache+redis", "lmcache+kvredis"],
    ]
    with pytest.raises(BenchError, match="takes 31 GB"):
        setting_of(VLLMPlan(), H200 | {"memory_bytes": 20_000_000_000})


def test_an_engine_of_the_8b_model_has_its_weights_and_three_prompts() -> None:
    weights = 16.06e9  # what Llama 3.1 8B has in bfloat16
    kv = 3 * 15_400 * SHAPES["8b"].bytes_per_token()
    assert engine_bytes(SHAPES["8b"], 15_400) == pytest.approx(weights + kv + 8 * 2**30, rel=0.01)
    config = model_config(SHAPES["8b"], 15_400)
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["vocab_size"]) == (32, 8, 128_256)
    with pytest.raises(BenchError, match="no model of shape mine"):
        model_config(replace(SHAPES["8b"], name="mine"), 100)


def test_without_a_gpu_a_tiny_model_serves_shorter_prompts_and_offloading_is_left_out() -> None:
    setting = setting_of(VLLMPlan(), NO_GPU)
    assert (setting.shape, setting.prompt_tokens, setting.chunk_tokens) == (TINY, (250, 1000), 64)
    assert "offloading" not in setting.arms
    assert setting_of(VLLMPlan(prompt_tokens=(300, 9000)), NO_GPU).prompt_tokens == (300,)
    with pytest.raises(BenchError, match="no chunk of 64"):
        setting_of(VLLMPlan(prompt_tokens=(64,)), NO_GPU)
    with pytest.raises(BenchError, match="no arm is left"):
        setting_of(VLLMPlan(arms=("offloading",)), NO_GPU)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_s_settings_are_understood(arm: str, caplog: pytest.LogCaptureFixture) -> None:
    room = room_bytes(SHAPES["8b"], 15_400)
    connector = connector_of(arm, 256, room, 1234, is_gpu=True)
    if arm == "none":
        assert connector is None
        return
    assert connector is not None
    extra = connector["kv_connector_extra_config"]
    if arm in LMCACHE_ARMS:
        assert connector["kv_connector"] == "LMCacheConnectorV1"
        assert (extra["lmcache.chunk_size"], extra["lmcache.max_local_cpu_size"]) == (256, room / 2**30)
        url = None if arm == "lmcache" else "resp://127.0.0.1:1234"
        assert (extra["lmcache.local_cpu"], extra.get("lmcache.remote_url")) == (url is None, url)
        return
    if arm == "offloading":
        assert extra["cpu_bytes_to_use"] == room == 4 * 2**30
        return
    config = configured(extra)
    assert not caplog.records, "an entry has no meaning"
    assert config.use_layerwise == ("layers" in arm)
    assert config.verify_blocks
    kinds = {"memory": None, "lane": "kvredis://127.0.0.1:1234", "tcp": "redis://127.0.0.1:1234"}
    assert config.remote_url == kinds[arm.split("+")[0]]
    assert (config.chunk_size, config.capacity_bytes, config.page_lock) == (256, room, True)


def test_a_run_tells_what_each_engine_answered_and_leaves_out_what_fails(tmp_path: Path) -> None:
    where, told = fake(tmp_path, H200)
    steps: list[str] = []
    arms = ("none", "offloading", "lane", "lane+layers", "memory", "tcp")
    result = run(small(*arms, together=4), where, steps.append)
    rows = {(row["arm"], row["tokens"]): row for row in result["rows"]}
    assert set(rows) == {(arm, tokens) for arm in arms if arm != "tcp" for tokens in (100, 200)}
    lane, memory, none = rows["lane", 200], rows["memory", 200], rows["none", 200]
    assert (lane["factor"], lane["ratio"], lane["hit_share"], lane["equal"]) == (4.0, 1.25, 1.0, 1.0)
    assert (none["warm_ms"], none["factor"], len(none["samples"])) == (None, None, 4), "open in both rounds"
    assert [sample["repeat"] for sample in memory["samples"]] == [2], "it ended in its second repeat"
    assert rows["lane+layers", 200]["hit_share"] == 2 / 3
    assert rows["offloading", 100]["equal"] == 0.5, "its longer answer is another one"
    assert any("no engine today" in note and "it printed this" in note for note in result["notes"])
    assert any(note.startswith("Given up") and "memory ended" in note for note in result["notes"])
    assert result["counters"] == {"lane": {"loads": 3.0}, "lane+layers": {"loads": 3.0}}
    judged = {line["name"]: line["passed"] for line in result["gate"]}
    assert judged["/ offloading   lane, 200 tokens"] is False
    assert judged["hits           lane, 200 tokens"] is True
    assert [name for name in judged if name.startswith("measured")] == [
        "measured       tcp, 100 tokens", "measured       tcp, 200 tokens"
    ]  # fmt: skip
    assert judged["measured       tcp, 200 tokens"] is False, "an arm that was left out has held nothing"
    assert "none, 100 tokens" in steps
    openings = [json.loads(line) for line in told.read_text().splitlines()]
    assert [arm for arm, _, _ in openings] == [*arms[:4], "none", "offloading", "memory", "tcp"]
    assert len({opening["model"] for _, opening, _ in openings}) == len(openings), "no arm finds another's blocks"
    assert all(path.startswith(str(tmp_path)) for _, _, path in openings)
    assert openings[0][1]["options"]["attention_backend"] == "FLASH_ATTN"
    assert (tmp_path / "logs" / "vllm-lane.log").exists()


@pytest.mark.parametrize(("facts", "eager"), [(H200, False), (H200, True), (NO_GPU, False)])
def test_short_passes_are_graphs_on_a_gpu_which_break_off_where_layers_move(
    tmp_path: Path, facts: dict[str, Any], eager: bool
) -> None:
    where, told = fake(tmp_path, facts)
    result = run(small("none", "lane", "lane+layers", eager=eager), where, lambda _: None)
    opened = {arm: opening for arm, opening, _ in map(json.loads, told.read_text().splitlines())}
    has_graphs = facts is H200 and not eager
    assert result["options"]["graphs"] is has_graphs
    assert any(", short passes as CUDA graphs" in line for line in table_lines(result)) is has_graphs
    for arm, opening in opened.items():
        options = opening["options"]
        if not has_graphs:
            assert options["enforce_eager"] is True
            assert "compilation_config" not in options
            continue
        mode = options["compilation_config"]["cudagraph_mode"]
        assert "enforce_eager" not in options
        assert (mode, opening["breaks"]) == (("PIECEWISE", "1") if arm == "lane+layers" else ("FULL", None))


def test_lmcache_s_arms_have_their_servers_which_are_empty_before_each_prompt_and_ours_beside_each(
    tmp_path: Path,
) -> None:
    where, told = fake(tmp_path, H200)
    redis = ["lmcache+redis"] if shutil.which("redis-server") else []
    arms = ("lane", "lmcache", "lmcache+kvredis", *redis)
    result = run(small(*arms, prompt_tokens=(128, 200), together=2), where, lambda _: None)
    rows = {(row["arm"], row["tokens"]): row for row in result["rows"]}
    assert result["notes"][1:] == [], "each found its server, and found it empty"
    assert set(rows) == {(arm, tokens) for arm in arms for tokens in (128, 200)}
    assert rows["lmcache", 128]["can_hit"] == 127, "LMCache has the last token of a prompt computed"
    assert rows["lane", 128]["to_lmcache"] == {"lmcache": 25 / 40} | dict.fromkeys(sorted(arms[2:]), 1.0)
    judged = {line["name"]: line["passed"] for line in result["gate"]}
    assert judged["/ lmcache   lane, 128 tokens"] is True
    assert judged["/ lmcache+kvredis   lane, 200 tokens"] is False, "as fast is not ahead"
    assert not any("offloading" in name for name in judged), "nothing is compared with an arm that was not asked for"
    assert all(judged[f"hits           {arm}, 128 tokens"] for arm in arms)
    openings = [json.loads(line) for line in told.read_text().splitlines()]
    forgets = [arm for arm, opening, _ in openings if opening == "forgets"]
    assert forgets == ["lmcache"] * 6, "its own memory is emptied behind each prompt"
    environment = {arm: opening["environment"] for arm, opening, _ in openings if opening != "forgets"}
    assert environment["lane"] == {}
    assert environment["lmcache"]["LMCACHE_TRACK_USAGE"] == "false"
    assert result["options"]["lmcache"] == "0.5.3"
    assert any("LMCache 0.5.3" in line for line in table_lines(result))
    assert any("/ lmcache+kvredis" in line for line in table_lines(result))


@pytest.mark.parametrize(
    ("lmcache", "said"),
    [
        ({"lmcache_error": "ModuleNotFoundError: No module named 'lmcache'"}, "LMCache cannot be loaded .*No module"),
        (
            LMCACHE_THERE | {"lmcache_compiled": False},
            "LMCache 0.5.3 cannot load its compiled kernels beside torch 2.11",
        ),
    ],
)
def test_lmcache_s_arms_are_refused_where_it_cannot_serve_as_it_is_meant_to(
    tmp_path: Path, lmcache: dict[str, Any], said: str
) -> None:
    where, told = fake(tmp_path, H200, lmcache)
    with pytest.raises(BenchError, match=said):
        run(small("lane", "lmcache"), where, lambda _: None)
    assert not told.exists(), "before an engine is begun"
    run(small("none"), where, lambda _: None)


def test_nothing_is_begun_when_time_is_over(tmp_path: Path) -> None:
    where, told = fake(tmp_path, H200)
    with pytest.raises(BenchError, match="There was no time for none, memory"):
        run(small("none", "memory", limit_s=1e-9), where, lambda _: None)
    assert not told.exists()


def test_the_command_says_where_there_is_no_vllm(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho ModuleNotFoundError: vllm >&2\nexit 1\n")
    python.chmod(0o755)
    done = CliRunner().invoke(bench, ["vllm", "--python", str(python)])
    assert done.exit_code == 1
    assert "vLLM cannot be loaded (--python, --site): ['ModuleNotFoundError: vllm']" in done.output


def test_the_command_takes_its_options_and_draws(tmp_path: Path) -> None:
    where, told = fake(tmp_path, NO_GPU)
    path, drawn = tmp_path / "result.json", tmp_path / "result.png"
    options = ("--arms", "none,memory+layers", "--prompt-tokens", "100,200", "--chunk-tokens", "64", "--quick")
    more = ("--json", str(path), "--plot", str(drawn), "--gate")
    done = CliRunner().invoke(bench, ("vllm", "--python", where.python, *options, *more))
    assert done.exit_code == 1, "the fake's hits are fewer than they must be"
    result: VLLMResult = json.loads(path.read_text())
    assert {row["tokens"] for row in result["rows"]} == {200}
    assert result["options"]["repeats"] == 1
    assert drawn.stat().st_size > 10_000
    openings = [json.loads(line) for line in told.read_text().splitlines()]
    assert all(opening["options"]["dtype"] == "float32" for _, opening, _ in openings)
    assert "MISSED  hits" in done.output
    refused = CliRunner().invoke(bench, ("vllm", "--arms", "none,gpu"))
    assert refused.exit_code == 2
    assert "'gpu' is not one of" in refused.output


def test_bars_are_judged_for_long_prompts_of_the_8b_model_and_pairs_before_medians() -> None:
    def sample(repeat: int, cold: float, warm: float | None) -> Any:
        served = Served(
            cold_ms=cold, own_ms=1, warm_ms=warm, own_tokens=0, warm_tokens=15_360, own_bytes=0, warm_bytes=0,
            stored_bytes=0, answers=[],
        )  # fmt: skip
        return {**served, "repeat": repeat, "is_equal": True}

    rows = {arm: row_of(arm, 15_400, 15_360) for arm in ("none", "offloading", "lane", "lane+layers", "tcp")}
    for repeat in range(3):
        slow = repeat + 1  # the machine slows down for all alike
        rows["none"]["samples"].append(sample(repeat, 400 * slow, None))
        rows["offloading"]["samples"].append(sample(repeat, 400 * slow, 60 * slow))
        rows["lane"]["samples"].append(sample(repeat, 400 * slow, 62 * slow))
    rows["lane+layers"]["samples"].append(sample(9, 400, 101))  # of another round: medians
    rows["tcp"]["samples"].append(sample(2, 400, 600))
    conclude(list(rows.values()))
    assert rows["lane"]["ratio"] == pytest.approx(62 / 60)
    assert rows["lane"]["factor"] == pytest.approx(400 / 62)
    assert rows["lane+layers"]["factor"] == pytest.approx(800 / 101)
    assert rows["tcp"]["factor"] == 2.0
    options = setting_of(VLLMPlan(), H200).options(prompt_tokens=[1024, 8192, 15_400])
    result = VLLMResult(**new_result("", options), rows=list(rows.values()), counters={})
    judged = {line["name"]: line["passed"] for line in gate_of(result)}
    assert judged["/ offloading   lane, 15400 tokens"] is True
    assert judged["cold / warm    lane, 15400 tokens"] is False  # 6.45
    assert judged["cold / warm    lane+layers, 15400 tokens"] is True  # 7.9
    assert not any("tcp" in name for name in judged if name.startswith("cold"))
    assert any(f"{400 / 62:.2f}" in line for line in table_lines(result))
    assert ANSWER_TOKENS > 1
