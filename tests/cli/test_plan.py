"""`kvredis plan` as a user calls it: a verdict for each tier, and for each bad word a line that names its option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvredis.cli.main import main
from tests.bench.disk.fake_disk_result import get, rate, result

RATE = ("--prefill-tokens-per-s", "9752")
BASE = ("--shape", "7b", *RATE)
QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
"""Qwen3-Next-80B-A3B's sizes: 36 of 48 layers keep 3 x 8192 inputs of a convolution and 32 x 128 x 128 elements."""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_table_says_what_to_do_with_each_tier() -> None:
    tiers = ("memory=12GB/s", "disk=500MB/s,latency=0.1ms", "far=0.1")
    done = call(*BASE, *(word for tier in tiers for word in ("--tier", tier)))
    assert done.exit_code == 0, done.output
    rows = {
        line.split()[0]: line for line in done.output.splitlines() if line.strip().startswith(("mem", "disk ", "far "))
    }
    assert " load " in rows["memory"]
    assert " prefetch only " in rows["disk"]
    assert " recompute " in rows["far"]
    assert "Break-even: 0.559 GB/s" in done.output
    assert "225 hugepages of 2 MiB" in done.output


def test_json_has_the_figures_in_the_units_of_the_schema() -> None:
    found = planned(*BASE, "--tier", "remote=40Gbit/s,latency=200us,store=2500MB/s", "--chunk", "512", "--prompts", "3")
    (tier,) = found["tiers"]
    assert found["schema"] == "kvredis.plan/1"
    assert (tier["gb_per_s"], tier["latency_ms"], tier["store_gb_per_s"]) == pytest.approx((5.0, 0.2, 2.5))
    assert tier["chunk_bytes_90"] == 9_000_000
    assert found["sizes"]["chunk_bytes"] == 28 * 1024**2
    assert found["workload"]["prompts"] == 3


@pytest.mark.parametrize(("link", "said"), [("600", "29.4 %"), ("274.5GB/s", "13.5 %")])
def test_the_layer_pipeline_rule_is_printed_with_its_terms(link: str, said: str) -> None:
    done = call(*BASE, "--hbm", "2040", "--link", link)
    assert done.exit_code == 0, done.output
    assert f"up to {said} of a step's KV" in done.output


def test_stores_behind_the_prefill_slow_it() -> None:
    beside = planned(*BASE, "--tier", "disk=2", "--store-overlap")
    behind = planned(*BASE, "--tier", "disk=2", "--no-store-overlap")
    assert beside["tiers"][0]["prefill_slowed"] == 1
    assert behind["tiers"][0]["prefill_slowed"] == pytest.approx(1.28, abs=0.005)


def test_a_models_own_configuration_gives_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {"num_hidden_layers": 28, "num_attention_heads": 28, "hidden_size": 3584} | {"num_key_value_heads": 4}
        )
    )
    own, known = planned("--config", str(path), *RATE), planned(*BASE)
    assert own["sizes"] == known["sizes"]


def test_a_measured_result_gives_tiers_and_says_which_row(tmp_path: Path) -> None:
    path = tmp_path / "disk.json"
    slow, fast = rate("read", device=1.0), rate("read", device=1.0)
    fast["gb_per_s"], fast["threads"] = 3.0, 8
    others = [rate("read", device=1.0, arm="loop"), rate("read", device=1.0, mode="buffered")]
    for row in others:
        row["gb_per_s"] = 50.0
    got = get(1.0)
    got["spilled_ms"] = 2.0
    path.write_text(json.dumps(result(rates=[slow, fast, *others, rate("write", device=1.0)], gets=[got])))
    (tier,) = planned(*BASE, "--measured", str(path))["tiers"]
    assert (tier["name"], tier["gb_per_s"], tier["store_gb_per_s"]) == ("disk", 3.0, 1.0)
    assert tier["latency_ms"] == pytest.approx(2.0 - 2 * 1024**2 / 3e9 * 1e3)
    assert tier["source"] == "disk.json: tier, cold read, direct, 8 threads"


def test_a_transport_result_gives_the_lane_and_the_sockets_and_a_memory_result_the_copy(tmp_path: Path) -> None:
    def arm(transport: str, name: str, rate: float, size: int = 2 * 1024**2) -> dict[str, Any]:
        return {"transport": transport, "arm": name, "block_bytes": size, "gb_per_s": rate}

    arms = [
        arm("tcp", "stream_get", 9.0, 589_824),
        arm("tcp", "stream_get", 3.0),
        arm("tcp", "SET pipelined", 2.0),
        arm("tcp", "pyzmq stream", 50.0),
        arm("lane", "lane, copied", 8.0),
        arm("lane", "lane, no copy", 400.0),
        arm("lane", "lane, put", 7.0),
    ]
    rows = [
        {"arm": "memmove", "threads": 1, "pages": "4 KiB", "block_bytes": 2 * 1024**2, "gb_per_s": 6.0},
        {"arm": "kvredis copy", "threads": 1, "pages": "hugetlb", "block_bytes": 2 * 1024**2, "gb_per_s": 18.0},
        {"arm": "torch naive", "threads": 1, "pages": "torch", "block_bytes": 2 * 1024**2, "gb_per_s": 90.0},
        {"arm": "memmove", "threads": 2, "pages": "4 KiB", "block_bytes": 2 * 1024**2, "gb_per_s": 70.0},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"schema": "kvredis.bench.transport/1", "arms": arms}))
    (tmp_path / "m.json").write_text(json.dumps({"schema": "kvredis.bench.memory/1", "rows": rows}))
    files = ("--measured", str(tmp_path / "t.json"), "--measured", str(tmp_path / "m.json"))
    tiers = planned(*BASE, *files)["tiers"]
    assert [(tier["name"], tier["gb_per_s"], tier["store_gb_per_s"]) for tier in tiers] == [
        ("remote", 3.0, 2.0),
        ("lane", 8.0, 7.0),
        ("memory", 18.0, 18.0),
    ]
    assert tiers[1]["source"] == "t.json: lane, copied of 2 MiB, lane"
    assert tiers[2]["source"] == "m.json: kvredis copy of 2 MiB, 1 thread"


def test_the_results_in_this_repository_are_read() -> None:
    results = Path(__file__).parents[2] / "bench" / "results"
    files = ("server-2026-11-30.json", "disk-2026-11-22-16-cores.json")
    found = planned(*BASE, *(word for file in files for word in ("--measured", str(results / file))))
    assert [tier["name"] for tier in found["tiers"]] == ["remote", "host", "disk"]
    assert all(tier["verdict"] == "load" for tier in found["tiers"])
    assert "GETP of 32 MiB, tcp" in found["tiers"][0]["source"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--prefill-tokens-per-s"),
        (RATE, "--shape"),
        ((*BASE, "--config", __file__), "--config"),
        (("--shape", "9z", *RATE), "--shape"),
        (("--config", "nowhere.json", *RATE), "--config"),
        (("--shape", "7b", "--prefill-tokens-per-s", "0"), "--prefill-tokens-per-s"),
        (("--shape", "7b", "--prefill-tokens-per-s", "nan"), "--prefill-tokens-per-s"),
        ((*BASE, "--tier", "disk"), "--tier"),
        ((*BASE, "--tier", "=2"), "--tier"),
        ((*BASE, "--tier", "disk=0"), "--tier"),
        ((*BASE, "--tier", "disk=-1"), "--tier"),
        ((*BASE, "--tier", "disk=2 parsecs"), "--tier"),
        ((*BASE, "--tier", "disk=2,latency=0.1"), "--tier"),
        ((*BASE, "--tier", "disk=2,colour=red"), "--tier"),
        ((*BASE, "--tier", "disk=2,latency"), "--tier"),
        ((*BASE, "--tier", "disk=2,latency=1ms,latency=2ms"), "--tier"),
        ((*BASE, "--link", "1", "--hbm", "1", "--other-ms", "nan"), "--other-ms"),
        ((*BASE, "--link", "1", "--hbm", "1", "--overhead-ms", "inf"), "--overhead-ms"),
        ((*BASE, "--link", "1", "--hbm", "1", "--overhead-ms", "-1"), "--overhead-ms"),
        ((*BASE, "--tier", "disk=2", "--tier", "disk=3"), "--tier"),
        ((*BASE, "--measured", __file__), "--measured"),
        ((*BASE, "--measured", "nowhere.json"), "--measured"),
        ((*BASE, "--chunk", "0"), "--chunk"),
        ((*BASE, "--prompt", "255"), "--prompt"),
        ((*BASE, "--output", "16"), "--decode-tokens-per-s"),
        ((*BASE, "--queue", "-1"), "--queue"),
        ((*BASE, "--hbm", "2040"), "--link"),
        ((*BASE, "--link", "inf", "--hbm", "1"), "--link"),
        ((*BASE, "--kv-gb", "1"), "--kv-gb"),
        ((*BASE, "--hbm", "fast", "--link", "1"), "--hbm"),
    ],
)
def test_a_bad_word_ends_with_2_and_names_its_option(arguments: tuple[str, ...], named: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert named in done.output


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"schema": "kvredis.bench.disk/1"}', '{"schema": "kvredis.bench.disk/1", "rates": []}']
)
def test_a_file_that_is_no_result_of_a_tier_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    done = call(*BASE, "--measured", str(path))
    assert done.exit_code == 2
    assert "odd.json" in done.output.replace("\n", "")


def test_the_command_is_listed_and_has_an_example() -> None:
    assert "plan" in CliRunner().invoke(main, ["--help"]).output
    assert "Example: kvredis plan" in call("--help").output


def test_a_hybrid_model_is_planned_with_a_snapshot_of_its_states(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    arguments = ("--config", str(tmp_path), *RATE, "--tier", "memory=50GB/s")
    found = planned(*arguments)
    snapshot = 36 * 2 * (3 * 8192 + 32 * 128 * 128)
    assert (found["shape"]["states"], found["shape"]["snapshot_bytes"]) == (36, snapshot)
    assert found["sizes"]["bytes_per_token"] == 12 * 2 * 2 * 256 * 2
    assert found["tiers"][0]["load_ms"] == pytest.approx((8192 * 24576 + snapshot) / 50e9 * 1e3)
    assert "37.69 MiB, 36 states, as much as the KV of 1608 tokens" in call(*arguments).output
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT | {"linear_value_head_dim": None}))
    assert "unknown, 36 states" in call(*arguments).output


def test_a_latent_is_planned_as_one_plane(tmp_path: Path) -> None:
    told = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(told))
    found = planned("--config", str(tmp_path / "config.json"), *RATE)
    assert found["shape"]["planes"] == 1
    assert found["sizes"]["bytes_per_token"] == 61 * 576 * 2
    assert "61 layers x a latent of 576 x 2 bytes" in call("--config", str(tmp_path), *RATE).output
