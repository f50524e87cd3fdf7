"""scripts/gpu_check_sglang.py: a wrong token, a hit that is missing, one of other weights, and an engine that ends are
each a failed row. The engine is a process that keeps KV as text in the real server; real SGLang needs a GPU here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fork_server import Lean

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check_sglang.py"

FAKE = '''
import hashlib, json, os, random, sys
from kvredis.backends.config.url import Address
from kvredis.backends.resp.connection import Connection
from kvredis.storage.errors import KVRedisError

TRICK = os.environ["TRICK"]
if sys.argv[1:] == ["--facts"]:
    print(json.dumps({"devices": ["NVIDIA Fake 1"], "driver": "", "sglang": "0.1", "torch": "2"}))
    sys.exit()
own, asked = set(), 0


def kv_of(prompt):
    """Of each page its key and its value."""
    weights = "" if TRICK == "stale" else seed
    names = [hashlib.sha256(f"{weights} {prompt[: at + page]}".encode()).hexdigest()
             for at in range(0, (len(prompt) - 1) // page * page, page)]
    return [(f"kv:{name}".encode(), (name * 40).encode()) for name in names]


def generate(prompt, tokens):
    try:
        with Connection.open(Address(host="127.0.0.1", port=port)) as connection:
            device, stored, is_right = served(connection, kv_of(prompt))
    except KVRedisError:
        device, stored, is_right = 0, 0, True
    lot = random.Random(f"{seed} {prompt}")
    made = [lot.randrange(1000) for _ in range(tokens)]
    if not is_right or (TRICK == "wrong" and stored):
        made[0] += 1
    return {"tokens": made, "logprobs": [-0.5] * tokens, "cached": device + stored, "seconds": 0.01,
            "details": {"device": device, "host": 0, "storage": stored}}


def served(connection, pages):
    """Tokens that it has itself, and tokens that were loaded; damage is seen where the trick is not to look."""
    device = stored = 0
    is_right = True
    for name, value in pages:
        if name in own:
            device += page
            continue
        found = connection.call(b"GET", name)
        if found is None or TRICK == "misses" or (found != value and TRICK != "blind"):
            break
        is_right = is_right and found == value
        stored += page
    for name, value in pages:
        own.add(name)
        connection.call(b"SET", name, value)
    return device, stored, is_right


for line in sys.stdin:
    told = json.loads(line)
    do, answer = told["do"], {}
    if do == "open":
        seed, page = told["seed"], told["options"]["page_size"]
        extra = json.loads(told["options"]["hicache_storage_backend_extra_config"])
        port = extra["port"] if "port" in extra else int(extra["url"].rpartition(":")[2])
        answer = {"seconds": 0.5}
    elif do == "generate":
        asked += 1
        if TRICK == "ends" and asked == 3:
            print("Fatal: the scheduler is gone", file=sys.stderr, flush=True)
            sys.exit(3)
        answer = generate(told["prompt"], told["tokens"])
    elif do in ("flush", "update"):
        own.clear()
        seed = told.get("seed", seed)
    print(json.dumps(answer), flush=True)
'''


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("gpu_check_sglang", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fake = tmp_path / "engine.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(module, "ENGINE", fake)
    lean = SimpleNamespace(**vars(subprocess) | {"Popen": Lean})
    monkeypatch.setattr(sys.modules["gpu_check_scenarios"], "subprocess", lean)
    return module


def checked(script: ModuleType, tmp_path: Path, trick: str, monkeypatch: pytest.MonkeyPatch, *asked: str) -> Any:
    """The exit status, and the result."""
    monkeypatch.setenv("TRICK", trick)
    path = tmp_path / "result.json"
    status = script.main(("--pages", "64", "--commit", "abc", "--json", str(path), *asked))
    return status, json.loads(path.read_text())


def failed(result: Any) -> set[str]:
    return {row["row"] for row in result["rows"] if not row["passed"]}


def test_an_engine_that_is_right_passes_every_row_by_either_door(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = checked(script, tmp_path, "", monkeypatch, "--pages", "64,256", "--door", "url")
    assert (status, failed(result)) == (0, set())
    assert (result["schema"], result["commit"], result["sglang"]) == ("kvredis.gpu-check-sglang/1", "abc", "0.1")
    rows = {row["row"]: row for row in result["rows"] if row["page"] == 64}
    assert (rows["stored"]["keys"], rows["warm"]["details"]["storage"], rows["new weights"]["cached"]) == (32, 2048, 0)
    assert rows["damaged is right"]["damaged_pages"] == rows["repaired is right"]["repaired_pages"] == 8
    assert len(result["rows"]) == 2 * len(rows)
    assert f"{len(result['rows'])} passed, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("trick", "rows"),
    [
        ("wrong", {"warm", "old weights again", "fresh process", "damaged is right", "repaired is right"}),
        ("misses", {"warm", "old weights again", "fresh process", "repaired"}),
        ("blind", {"damaged", "damaged is right", "repaired"}),
        ("stale", {"new weights"}),
    ],
)
def test_a_wrong_token_fails_its_row_and_so_do_hits_that_are_missing_or_must_not_be(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trick: str, rows: set[str]
) -> None:
    status, result = checked(script, tmp_path, trick, monkeypatch)
    assert (status, failed(result)) == (1, rows)


def test_when_an_engine_ends_its_page_size_fails_with_what_it_said_and_the_next_one_is_still_checked(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, result = checked(script, tmp_path, "ends", monkeypatch, "--pages", "64,256")
    assert (status, failed(result)) == (1, {"ended"})
    assert [row["page"] for row in result["rows"] if row["row"] == "ended"] == [64, 256]
    error = next(row["error"] for row in result["rows"] if row["row"] == "ended")
    assert "SGLang ended with 3" in error
    assert "Fatal: the scheduler is gone" in error


def test_a_result_is_kept_beside_the_others_by_its_device_where_no_file_is_named(script: ModuleType) -> None:
    path = script.result_path({"devices": ["NVIDIA H100 80GB HBM3"]}, on_cpu=False, name="gpu-check-sglang")
    assert path.parent == SCRIPT.parents[1] / "bench" / "results"
    assert path.name.startswith("gpu-check-sglang-h100-80gb-hbm3-")
