"""`kvredis bench alpha` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from kvredis.cli.main import main


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "alpha", *arguments])


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_run_without_a_gpu_says_so_and_judges_logits(tmp_path: Path) -> None:
    path = tmp_path / "alpha.json"
    done = call("--shares", "0,0.5", "--tokens", "32", "--repeats", "1", "--steps", "1", "--gate", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "There is no GPU" in done.output
    assert "1 of 1 lines hold" in done.output
    found = json.loads(path.read_text())
    assert (found["schema"], found["options"]["shares"]) == ("kvredis.bench.alpha/1", [0.0, 0.5])
    assert [row["share"] for row in found["rows"]] == [None, 0.0, 0.5]


@pytest.mark.parametrize(
    "arguments",
    [("--shares", "0.1,x"), ("--shares", "1.1"), ("--shares", "nan"), ("--tokens", "1"), ("--link", "radio")],
)
def test_a_word_that_means_nothing_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert call(*arguments).exit_code == 2
