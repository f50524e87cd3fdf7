"""`kvredis bench links` as a user calls it, and what `kvredis plan` makes of its result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvredis.cli.main import main
from tests.bench import cuda_double
from tests.bench.test_links import some_links


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_run_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvredis.cli.bench.links.open_cuda", lambda _limit: "no GPU")
    done = call("bench", "links", "--quick", "--json", str(tmp_path / "links.json"))
    assert done.exit_code == 0, done.output
    assert "no GPU" in done.output
    assert json.loads((tmp_path / "links.json").read_text())["notes"] == ["no GPU"]


def on_gpus(folder: Path, *arguments: str, **defines: int) -> subprocess.CompletedProcess[str]:
    """Run the bench as on a machine with two GPUs, whose driver is cuda_double.c."""
    cuda_double.build(folder, GPUS=2, **defines)
    command = [sys.executable, "-m", "kvredis", "bench", "links", "--quick", "--size", "64KiB", *arguments]
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.mark.skipif(cuda_double.MISSING, reason="no C compiler")
def test_the_drivers_gpus_are_measured_and_told(tmp_path: Path) -> None:
    done = on_gpus(tmp_path, "--repeats", "1", "--json", str(tmp_path / "links.json"))
    assert done.returncode == 0, done.stderr
    assert "between GPUs, peer access off, both ways at once, summed, GB/s" in done.stdout
    found = json.loads((tmp_path / "links.json").read_text())
    assert (found["gpus"], found["exit_status"]) == (["Double", "Double"], 0)


@pytest.mark.skipif(cuda_double.MISSING, reason="no C compiler")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_was_measured_until_then(tmp_path: Path, number: signal.Signals) -> None:
    done = on_gpus(tmp_path, "--json", str(tmp_path / "links.json"), END_AFTER=150, END_SIGNAL=int(number))
    assert done.returncode == 128 + number, done.stderr
    assert "interrupted: " in done.stdout
    found = json.loads((tmp_path / "links.json").read_text())
    assert found["exit_status"] == 128 + number
    assert found["copies"]
    assert len(found["copies"]) < 22  # as many as two GPUs have links


def test_the_planner_reads_its_file(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(json.dumps(some_links()))
    planned = call("plan", "--shape", "7b", "--prefill-tokens-per-s", "9752", "--measured", str(path), "--json")
    assert planned.exit_code == 0, planned.output
    (tier,) = json.loads(planned.stdout)["tiers"]
    assert (tier["name"], tier["gb_per_s"], tier["store_gb_per_s"]) == ("gpu link", 55.0, 50.0)
    assert tier["source"] == "links.json: pinned, CPU to GPU 0"


@pytest.mark.parametrize(
    "arguments", [("--repeats", "0"), ("--size", "12B"), ("--size", "x"), ("--plot", "/nowhere/a.png")]
)
def test_a_word_that_means_nothing_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert call("bench", "links", *arguments).exit_code == 2
