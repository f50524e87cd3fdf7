"""The report prints what the file holds; the file is refused when it is another kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import default_path, save
from kvredis.bench.server.run import table_lines
from tests.bench.fake_server import load

RECORDED = Path(__file__).parents[1] / "recorded_result.json"


def test_every_row_of_a_result_is_a_line_of_the_table() -> None:
    result = load(RECORDED)
    text = "\n".join(table_lines(result))
    rows = len(result["transfers"]) + len(result["small"]) + len(result["head_of_line"])
    lines = [
        line for line in text.partition("Gate (")[0].splitlines() if line.startswith("  ") and " server " not in line
    ]
    assert len(lines) == rows
    assert all(any(f" {name} " in line for name in result["servers"]) for line in lines)
    assert "tcp, 1 connection, client and server on one CPU" in text
    assert f"{result['verified']['values']} values" in text


def test_a_result_survives_the_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    save(load(RECORDED), first)  # rounds
    save(load(first), second)
    assert load(second) == load(first)
    kept, given = load(first)["transfers"][0], load(RECORDED)["transfers"][0]
    assert kept["gb_per_s"] == pytest.approx(given["gb_per_s"], rel=1e-5)


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"schema": "another/1"})])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"other\.json"):
        load(path)


def test_a_result_goes_under_bench_results_where_that_exists(tmp_path: Path) -> None:
    assert default_path(tmp_path, "server").parent == tmp_path
    (tmp_path / "bench" / "results").mkdir(parents=True)
    assert default_path(tmp_path, "server").parent == tmp_path / "bench" / "results"
