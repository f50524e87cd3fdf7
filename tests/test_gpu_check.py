"""scripts/gpu_check.py: a wrong token, an engine that ends and one that says nothing are each a failed row, and a model
that the connector refuses is left out by name. The engines are a process that keeps KV as text in the real server;
tests/compat has real ones."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fork_server import Lean

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"

FAKE = '''
import hashlib, json, os, random, sys
from kvredis.backends.config.url import Address
from kvredis.backends.resp.connection import Connection

CHUNK, TRICK = 64, os.environ["TRICK"]
if sys.argv[1:] == ["--facts"]:
    print(json.dumps({"devices": [], "driver": "", "vllm": "0.1", "torch": "2"}))
    sys.exit()
own, counters, asked = set(), {"loaded_chunks": 0, "failed_chunks": 0}, 0


def right(prompt, count):
    lot = random.Random(str(prompt))
    return [lot.randrange(1000) for _ in range(count)]


def blocks(prompt):
    names = ["kv:" + hashlib.sha256(str(prompt[: at + CHUNK]).encode()).hexdigest()
             for at in range(0, len(prompt) // CHUNK * CHUNK, CHUNK)]
    return [(name.encode(), (name[3:] * 40).encode()) for name in names]


def served(connection, prompt, count):
    """Computed, from its own cache, or loaded: damage is seen where the trick is not to look."""
    names, cached, is_right = blocks(prompt), 0, True
    for name, value in names:
        if name in own:
            cached += CHUNK
            continue
        found = connection.call(b"GET", name)
        if found is None:
            break
        if found != value and TRICK != "blind":
            counters["failed_chunks"] += 1
            break
        counters["failed_chunks"] += found != value
        is_right = is_right and found == value
        counters["loaded_chunks"] += 1
        cached += CHUNK
    for name, value in names:
        own.add(name)
        connection.call(b"SET", name, value)
    tokens = right(prompt, count)
    if not is_right or (TRICK == "warm" and counters["loaded_chunks"]):
        tokens[0] += 1
    if TRICK == "dull":
        tokens = [7] * count
    best = [{str(token): -0.1, str(token + 1): -0.5, str(token + 2): -3.0} for token in tokens]
    return {"tokens": tokens, "cached": cached, "finish": "length", "logprobs": best}


for line in sys.stdin:
    told = json.loads(line)
    do, answer = told["do"], {}
    if do == "open":
        if "Qwen3NextForCausalLM" in told["config"]["architectures"]:
            print("LayoutError: layer 0 is a MambaSpec", file=sys.stderr, flush=True)
            answer = {"error": "RuntimeError: the core has ended"}
        port = int(told["connector"]["kv_connector_extra_config"]["remote_url"].rpartition(":")[2])
    elif do == "generate":
        asked += 1
        if TRICK == "ends" and asked == 16:
            sys.exit(3)
        with Connection.open(Address(host="127.0.0.1", port=port)) as connection:
            answers = [served(connection, prompt, told["tokens"]) for prompt in told["prompts"]]
        answer = {"answers": answers, "seconds": 0.01, "preemptions": 0}
    elif do == "reset":
        own.clear()
    elif do == "counters":
        answer = counters
    print(json.dumps(answer), flush=True)
'''


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    fake = tmp_path / "engine.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(module, "ENGINE", fake)
    lean = SimpleNamespace(**vars(subprocess) | {"Popen": Lean})
    monkeypatch.setattr(sys.modules["gpu_check_scenarios"], "subprocess", lean)
    return module


def checked(script: ModuleType, tmp_path: Path, trick: str, monkeypatch: pytest.MonkeyPatch, *asked: str) -> Any:
    """The exit status, and the rows by their scenario."""
    monkeypatch.setenv("TRICK", trick)
    path = tmp_path / "result.json"
    chosen = ("--only", "dense whole", "--scenarios", "cold|own|warm|damaged|fresh process")
    status = script.main(("--on-cpu", "--json", str(path), *(asked or chosen)))
    result = json.loads(path.read_text())
    return status, {row["scenario"]: row for row in result["rows"]}


def test_an_engine_that_is_right_passes_every_row(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, rows = checked(script, tmp_path, "", monkeypatch)
    assert status == 0
    assert {row["verdict"] for row in rows.values()} == {"passed"}
    assert (rows["damaged: all blocks"]["outcome"], rows["damaged: all blocks"]["failed_chunks"]) == ("equal", 1)
    assert (rows["warm"]["loaded_chunks"], rows["warm"]["cached_tokens"]) == (20, 320)


@pytest.mark.parametrize(
    ("trick", "failed"),
    [
        ("warm", {"warm", "damaged: one block", "damaged: some blocks", "damaged: all blocks", "fresh process"}),
        ("blind", {"damaged: one block", "damaged: some blocks", "damaged: all blocks"}),
        ("dull", {"cold"}),
    ],
)
def test_a_wrong_token_is_a_failed_row_and_so_are_tokens_that_do_not_depend_on_the_prompt(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trick: str, failed: set[str]
) -> None:
    status, rows = checked(script, tmp_path, trick, monkeypatch)
    assert status == 1
    assert {name for name, row in rows.items() if row["verdict"] == "failed"} == failed


def test_when_an_engine_ends_the_row_fails_and_the_rest_of_its_case_is_left_out(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, rows = checked(script, tmp_path, "ends", monkeypatch)
    assert status == 1
    assert [row["verdict"] for row in rows.values()] == ["passed", "failed", *["skipped"] * 5]
    assert "ended with 3" in rows["own cache"]["reason"]
    assert rows["warm"]["reason"] == "the engine is gone since: own cache"


def test_a_model_that_the_connector_refuses_is_left_out_by_name(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, rows = checked(script, tmp_path, "", monkeypatch, "--only", "hybrid", "--scenarios", "warm")
    assert status == 1, "nothing was checked"
    assert rows["warm"]["verdict"] == "skipped"
    assert "LayoutError: layer 0 is a MambaSpec" in rows["warm"]["reason"]


def test_a_token_that_was_as_near_as_rounding_is_a_tie_and_no_other_one(script: ModuleType) -> None:
    def answer(tokens: list[int], logprobs: list[dict[str, float]]) -> Any:
        return {"tokens": tokens, "logprobs": logprobs}

    compare = sys.modules["gpu_check_scenarios"].compare
    cold = answer([5, 6], [{"5": -0.1, "6": -3.0}, {"6": -1.0, "7": -1.0005}])
    near = compare(cold, answer([5, 7], [{"5": -0.1, "6": -3.0}, {"7": -1.0, "6": -1.0005}]))
    assert (near.same, near.total, near.is_equal) == (1, 2, False)
    assert near.gap == pytest.approx(0.0005)
    far = compare(cold, answer([6, 7], [{"6": -0.1, "5": -3.0}, {"7": -1.0, "6": -1.5}]))
    assert (far.same, far.gap) == (0, pytest.approx(2.9))
    assert far.most == pytest.approx(2.9)
    assert compare(cold, cold).mean == 0
