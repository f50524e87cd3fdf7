"""`kvredis bench links` as a user calls it, and what `kvredis plan` makes of its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvredis.bench import links
from kvredis.cli.main import main
from tests.bench.test_links import some_links


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_run_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "obstacle", lambda: "no GPU")
    done = call("bench", "links", "--quick", "--json", str(tmp_path / "links.json"))
    assert done.exit_code == 0, done.output
    assert "no GPU" in done.output
    assert json.loads((tmp_path / "links.json").read_text())["notes"] == ["no GPU"]


def test_the_planner_reads_its_file(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(json.dumps(some_links()))
    planned = call("plan", "--shape", "7b", "--prefill-tokens-per-s", "9752", "--measured", str(path), "--json")
    assert planned.exit_code == 0, planned.output
    (tier,) = json.loads(planned.stdout)["tiers"]
    assert (tier["name"], tier["gb_per_s"], tier["store_gb_per_s"]) == ("gpu link", 55.0, 50.0)
    assert tier["source"] == "links.json: pinned, CPU to GPU 0"


@pytest.mark.parametrize("arguments", [("--repeats", "0"), ("--plot", "/nowhere/a.png")])
def test_a_word_that_means_nothing_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert call("bench", "links", *arguments).exit_code == 2
