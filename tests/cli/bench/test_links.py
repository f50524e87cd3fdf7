"""`kvredis bench links` as a user calls it, and what `kvredis plan` makes of its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvredis.cli.main import main


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_tiny_run_prints_matrices_and_the_planner_reads_its_file(tmp_path: Path) -> None:
    path, picture = tmp_path / "links.json", tmp_path / "links.png"
    asked = ("--quick", "--repeats", "1", "--parts", "memory,gpus", "--json", str(path), "--plot", str(picture))
    done = call("bench", "links", *asked)
    assert done.exit_code == 0, done.output
    assert "Memory to memory, one process: memmove, one way" in done.output
    assert picture.stat().st_size > 1000
    measured = json.loads(path.read_text())
    assert measured["schema"] == "kvredis.bench.links/1"
    assert measured["gpus"] or any(note.startswith("no GPU") for note in measured["notes"])
    planned = call("plan", "--shape", "7b", "--prefill-tokens-per-s", "9752", "--measured", str(path), "--json")
    assert planned.exit_code == 0, planned.output
    memory = json.loads(planned.stdout)["tiers"][0]
    rates = [
        row["gb_per_s"]
        for row in measured["copies"]
        if row["direction"] == "uni" and row["source"].startswith("arena") and row["target"].startswith("process")
    ]
    assert (memory["name"], memory["gb_per_s"]) == ("memory", max(rates))
    assert memory["source"].startswith("links.json: arena")


@pytest.mark.parametrize("arguments", [("--parts", "memory,moon"), ("--repeats", "0"), ("--plot", "/nowhere/a.png")])
def test_a_word_that_means_nothing_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert call("bench", "links", *arguments).exit_code == 2
