"""scripts/gpu_figures.py: its commands are ones that `kvredis bench` takes, and each ends, made or not."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from kvredis.cli.main import main as kvredis

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_figures.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_figures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_command_is_one_that_the_command_line_takes(script: ModuleType, tmp_path: Path) -> None:
    for name in script.FIGURES:
        words = script.command(name, tmp_path)[3:]
        assert words[-2:] == ["--json", str(tmp_path / f"{name}.json")]
        found: click.Command = kvredis
        context = click.Context(found)
        while isinstance(found, click.Group):
            word, *words = words
            inner = found.get_command(context, word)
            assert inner is not None, word
            found = inner
        found.make_context(name, list(words))  # raises for an option or a value that it does not take


def test_without_a_folder_the_commands_are_listed() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert "swap-prefill           kvredis bench swap --shape 8b" in done.stdout


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "new", "swop"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("no figure is called swop; there are swap, ")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("does", "limit_s", "status"),
    [("pass", 60, 0), ("raise SystemExit(3)", 60, 1), ("import threading; threading.Event().wait()", 1, 1)],
)
def test_one_that_fails_or_takes_too_long_is_told_and_the_next_is_made(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    does: str,
    limit_s: int,
    status: int,
) -> None:
    monkeypatch.setattr(script, "FIGURES", {"first": script.Figure(limit_s, ""), "second": script.Figure(60, "")})
    codes = {"first": does, "second": "pass"}
    monkeypatch.setattr(script, "command", lambda name, folder: [sys.executable, "-c", codes[name]])
    assert script.main([str(tmp_path)]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("==== first: exit 0") == (status == 0)
    assert lines[1].startswith("==== second: exit 0")
