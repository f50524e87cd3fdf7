"""How a bench begins and ends for its caller: errors in a line, the result where it was asked for, the gate."""

import json
import signal
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvredis.bench.core.errors import BenchError
from kvredis.cli.bench.options import Telling, measuring
from kvredis.cli.main import main

RESULT = {"schema": "made up/1", "rows": [{"seconds": 1.5}], "gate": [{"passed": True}]}
MISSED = RESULT | {"gate": [{"passed": True}, {"passed": False}]}


def test_a_result_is_saved_and_told_with_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.json"
    Telling("made-up", str(path)).tell(RESULT, iter(["a table", "a gate"]))
    assert capsys.readouterr().out.splitlines() == ["a table", "a gate", "", f"Result: {path}"]
    assert json.loads(path.read_text()) == RESULT


def test_without_a_name_a_result_is_saved_under_the_benchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Telling("made-up", None).tell(RESULT, [])
    (path,) = tmp_path.iterdir()
    assert path.match("made-up-*.json")


def test_standard_output_gets_the_result_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Telling("made-up", "-").tell(RESULT, ["a table"])
    assert json.loads(capsys.readouterr().out) == RESULT


def test_a_gate_that_is_asked_for_ends_with_1_when_a_line_of_it_or_of_another_does_not_hold() -> None:
    Telling("made-up", "-").tell(MISSED, [])
    Telling("made-up", "-", judge=True).tell(RESULT, [])
    for result, held in ((MISSED, True), (RESULT, False)):
        with pytest.raises(SystemExit) as ended:
            Telling("made-up", "-", judge=True).tell(result, [], held=held)
        assert ended.value.code == 1


def test_what_a_bench_cannot_do_is_one_line_for_its_caller() -> None:
    with pytest.raises(click.ClickException, match="no such peer"), measuring(1, "starting"):
        raise BenchError("no such peer")


@pytest.mark.parametrize(("name", "why"), [("nowhere/x.json", "there is no folder"), ("", "is a folder")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, name: str, why: str
) -> None:
    done = CliRunner().invoke(main, ["bench", "links", "--json", str(tmp_path / name)])  # as all that take --json
    assert done.exit_code == 2
    assert why in done.output


def test_a_folder_that_takes_no_result_is_refused_too_when_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    unfit = ("swap", "--chunk-tokens", "17")  # which is found out later, when the bench begins
    done = CliRunner().invoke(main, ["bench", *unfit])
    assert done.exit_code == 2
    assert "may not be written" in done.output
    assert CliRunner().invoke(main, ["bench", *unfit, "--json", "-"]).exit_code == 1


def test_what_was_measured_is_told_when_it_can_no_longer_be_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(click.ClickException, match="cannot write the result: No such file"):
        Telling("made-up", str(tmp_path / "gone" / "x.json")).tell(RESULT, ["a table"])
    assert capsys.readouterr().out.splitlines() == ["a table", ""]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_bench_unwinds_it_and_is_what_it_was_afterwards(number: signal.Signals) -> None:
    def unheard(_number: int, _frame: object) -> None:
        pass

    former = signal.signal(number, unheard)
    try:
        with pytest.raises(SystemExit) as ended, measuring(1, "starting"):
            signal.raise_signal(number)
        assert ended.value.code == 128 + number
        assert signal.getsignal(number) is unheard
    finally:
        signal.signal(number, former)


def test_a_bench_under_nohup_goes_on_when_its_terminal_is_closed() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with measuring(1, "starting"):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "--timeout", "nan"),
        ("top", "--once", "--interval", "nan"),
        ("bench", "slow-remote", "--quick", "--link-mb-per-s", "nan"),
        ("bench", "slow-remote", "--quick", "--prefill-tokens-per-s", "inf"),
    ],
)
def test_a_number_that_is_none_is_refused_with_the_usage(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, words[-1] in done.stderr) == (2, True), done.output
