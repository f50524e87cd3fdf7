"""scripts/gpu_check.py with the real vLLM, on the CPU: the path that a GPU machine takes, with a part of its rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.engine_process import ROOT
from tests.compat.vllm_process import site

SCENARIOS = ("cold", "own cache", "warm", "damaged: one block", "fresh process", "killed before a load")
LIMIT_S = 500


@pytest.mark.nightly
def test_every_row_of_a_small_model_passes_and_the_result_says_what_was_checked(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    asked = ("--only", "dense layers", "--scenarios", "|".join(SCENARIOS), "--commit", "abc", "--json", str(path))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--on-cpu", "--site", str(site()), *asked],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert (result["schema"], result["commit"], result["vllm"]) == ("kvredis.gpu-check/1", "abc", "0.32.0")
    rows = {row["scenario"]: row for row in result["rows"]}
    assert tuple(rows) == SCENARIOS
    assert {row["verdict"] for row in rows.values()} == {"passed"}
    for scenario in SCENARIOS[1:]:
        assert rows[scenario]["tokens_equal"] is True
    assert rows["cold"]["details"]["control_same_tokens"] < 8, "the tokens depend on the prefix"
    assert rows["warm"]["loaded_chunks"] == 4 * 5
    damaged = rows["damaged: one block"]
    assert (damaged["failed_chunks"], damaged["outcome"]) in ((1, "equal"), (1, "error")) or damaged[
        "failed_chunks"
    ] > 1
    assert rows["fresh process"]["loaded_chunks"] > rows["warm"]["loaded_chunks"]
    assert rows["killed before a load"]["cached_tokens"] == 0
