"""`kvredis bench vllm` with the real vLLM, on the CPU: it finds what it has stored, and generates the same tokens."""

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvredis.bench.vllm.apart import WAYS, PdResult
from kvredis.bench.vllm.concurrency import KINDS, ConcurrencyResult
from kvredis.bench.vllm.run import SCHEMA, VLLMResult
from kvredis.cli.bench.command import bench
from tests.compat import lmcache_process
from tests.compat.side_packages import packages
from tests.compat.vllm_process import HERE, PATIENT, site

pytestmark = pytest.mark.nightly


def test_a_real_engine_finds_every_prompt_again_by_each_way_and_generates_the_same_tokens(tmp_path: Path) -> None:
    path, arms = tmp_path / "result.json", ("none", "lane+layers")
    options = ("--arms", ",".join(arms), "--prompt-tokens", "200,640", "--repeats", "1", "--together", "1")
    done = CliRunner().invoke(bench, ("vllm", "--site", str(site()), *options, "--json", str(path), "--gate"))
    assert done.exit_code == 0, done.output
    result: VLLMResult = json.loads(path.read_text())
    assert (result["schema"], result["options"]["vllm"], result["options"]["device"]) == (SCHEMA, "0.32.0", "cpu")
    rows = {(row["arm"], row["tokens"]): row for row in result["rows"]}
    assert set(rows) == {(arm, tokens) for arm in arms for tokens in (200, 640)}
    for (arm, tokens), row in rows.items():
        assert row["equal"] == 1
        (sample,) = row["samples"]
        assert sample["own_bytes"] == 0, "what vLLM has itself is not loaded"
        hit = 0 if arm == "none" else tokens // 64 * 64
        if tokens == 640:  # vLLM computes the last block of a prompt that it has whole
            assert sample["own_tokens"] == 608
        assert (sample["warm_tokens"], sample["warm_bytes"]) == (hit, hit * result["options"]["bytes_per_token"])
        assert sample["stored_bytes"] == (0 if arm == "none" else tokens // 64 * 64 * 4096)
    assert result["counters"]["lane+layers"]["failed_chunks"] == 0


def test_real_lmcache_finds_every_prompt_again_in_its_memory_and_on_both_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = ["lmcache+redis"] if shutil.which("redis-server") else []
    path, arms = tmp_path / "result.json", ("none", "lmcache", "lmcache+kvredis", *redis)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(map(str, (lmcache_process.HERE / "host_pages", lmcache_process.site())))
    )
    options = ("--arms", ",".join(arms), "--prompt-tokens", "256,600", "--repeats", "1", "--together", "1")
    written = ("--logs", str(tmp_path), "--json", str(path))
    done = CliRunner().invoke(bench, ("vllm", "--site", str(site()), *options, *written, "--gate"))
    assert done.exit_code == 0, done.output
    result: VLLMResult = json.loads(path.read_text())
    assert result["options"]["lmcache"].startswith("0.5.6")
    rows = {(row["arm"], row["tokens"]): row for row in result["rows"]}
    assert set(rows) == {(arm, tokens) for arm in arms for tokens in (256, 600)}
    for (arm, tokens), row in rows.items():
        assert row["equal"] == 1
        (sample,) = row["samples"]
        whole = {256: 255, 600: 576}[tokens]  # vLLM computes the last token of a prompt that is stored whole
        assert sample["warm_tokens"] == (0 if arm == "none" else whole)
    assert result["counters"] == {}, "LMCache's are not ours"


def test_real_engines_serve_many_prompts_at_once_and_find_what_is_stored_of_them(tmp_path: Path) -> None:
    path, arms = tmp_path / "result.json", ("none", "lane+layers")
    options = ("--concurrency", "3", "--arms", ",".join(arms), "--prompt-tokens", "256", "--quick", "--together", "1")
    done = CliRunner().invoke(bench, ("vllm", "--site", str(site()), *options, "--json", str(path), "--gate"))
    assert done.exit_code == 0, done.output
    result: ConcurrencyResult = json.loads(path.read_text())
    rows = {(row["arm"], row["kind"]): row for row in result["rows"]}
    assert set(rows) == {(arm, kind) for arm in (*arms, "none+layers") for kind in KINDS}
    assert all(row["equal"] == 1 for row in rows.values())
    assert rows["none", "cold"]["cached_share"] == 0
    assert rows["none", "half"]["cached_share"] > 0.2, "within a round vLLM's own cache has the shared half"
    ours = {kind: rows["lane+layers", kind] for kind in KINDS}
    assert ours["stored"]["cached_share"] > 0.7
    assert ours["half"]["cached_share"] > rows["none", "half"]["cached_share"]
    assert ours["stored"]["loaded_gb"] > ours["half"]["loaded_gb"] > 0
    assert ours["cold"]["loaded_gb"] == ours["step"]["loaded_gb"] == 0


@pytest.mark.parametrize(("arms", "ranks"), [(("chunked", "layers"), "1"), (("layers",), "2")])
def test_what_one_real_engine_computes_another_decodes_with_the_same_tokens_whenever_it_is_asked(
    arms: tuple[str, ...], ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PATIENT.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "result.json"
    options = ("--arms", ",".join(arms), "--prompt-tokens", "640", "--tensor-parallel", ranks, "--quick")
    done = CliRunner().invoke(bench, ("pd", "--site", str(site()), *options, "--json", str(path), "--gate"))
    assert done.exit_code == 0, done.output
    result: PdResult = json.loads(path.read_text())
    assert {(row["arm"], row["way"]) for row in result["rows"]} == {(arm, way) for arm in arms for way in WAYS}
    assert all(row["hit_share"] == row["equal"] == 1 for row in result["rows"])
    assert {row["what"]: row["hit_share"] for row in result["stalls"]} == {"computed": 0, "loaded": 1, "none": 0}


def test_vllm_s_own_nixl_connector_hands_prompts_over_between_engines_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(packages(HERE / "nixl.txt", "vllm")))
    path = tmp_path / "result.json"
    options = ("--arms", "chunked,nixl", "--prompt-tokens", "330", "--quick")
    done = CliRunner().invoke(bench, ("pd", "--site", str(site()), *options, "--json", str(path), "--gate"))
    assert done.exit_code == 0, done.output
    result: PdResult = json.loads(path.read_text())
    assert not any("Given up" in note for note in result["notes"]), result["notes"]
    (row,) = (row for row in result["rows"] if row["arm"] == "nixl")
    assert (row["way"], row["equal"], row["hit_share"]) == ("behind", 1, 1)
    assert row["samples"][0]["hit_tokens"] >= 329, "all but the last token, where kvredis has whole chunks"
