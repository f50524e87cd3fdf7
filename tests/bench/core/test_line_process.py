"""A process that answers lines: in order, and whatever becomes of it, its user hears of that and it is gone."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvredis.bench.core import line_process
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.line_process import LineProcess
from tests.backends.nodes import wait_until

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def running(code: str, log: Path | None = None, folder: Path | None = None) -> LineProcess:
    command = [sys.executable, "-c", code]
    return LineProcess("the echo", command, {"PATH": os.environ["PATH"], "WORD": "said"}, folder=folder, log=log)


def is_there(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_answers_come_in_the_order_of_the_requests() -> None:
    with running(ECHO) as echo:
        pid = echo.pid
        for number in range(3):
            echo.tell({"number": number})
        assert [echo.answer(30) for _ in range(3)] == [{"number": number} for number in range(3)]
        assert not echo.has_ended
    assert not is_there(pid)
    with echo:  # it can be begun anew
        echo.tell({"again": True})
        assert echo.answer(30) == {"again": True}


def test_it_has_the_environment_the_folder_and_the_log_that_it_was_given(tmp_path: Path) -> None:
    code = (
        "import json, os, sys\nprint(os.environ['WORD'], file=sys.stderr, flush=True)\n"
        "print(json.dumps({'at': os.getcwd(), 'names': [n for n in os.environ if n.startswith('KV')]}), flush=True)"
    )
    with running(code, tmp_path / "deep" / "log", tmp_path) as told:
        assert told.answer(30) == {"at": str(tmp_path), "names": []}
    with running(code, tmp_path / "deep" / "log", tmp_path) as told:
        told.answer(30)
    assert (tmp_path / "deep" / "log").read_text() == "said\nsaid\n"


@pytest.mark.parametrize("has_log", [True, False])
def test_one_that_ends_is_an_error_with_what_it_said(tmp_path: Path, *, has_log: bool) -> None:
    code = "import sys; print('no room left', file=sys.stderr); sys.exit(3)"
    with running(code, tmp_path / "log" if has_log else None) as gone:
        with pytest.raises(BenchError, match="the echo ended with 3") as told:
            gone.answer(30)
        assert ("no room left" in str(told.value)) == has_log
        assert gone.has_ended

        def hears() -> bool:
            try:
                gone.tell({"are you": "there"})
            except BenchError as error:
                return "ended with 3" in str(error)
            return False

        wait_until(hears, "the pipe is known to be closed")


def test_one_that_is_silent_or_talks_nonsense_is_an_error(tmp_path: Path) -> None:
    with running(ECHO, tmp_path / "log") as echo, pytest.raises(BenchError, match="the echo does not answer"):
        echo.answer(0.01)
    with running("print('hello')", tmp_path / "log") as hello, pytest.raises(BenchError, match="no answer: 'hello"):
        hello.answer(30)


def test_one_that_does_not_end_with_its_input_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_process, "STOP_S", 0.01)
    with running("print('{}', flush=True)\nimport signal\nwhile True: signal.pause()") as deaf:
        assert deaf.answer(30) == {}
        pid = deaf.pid
    assert not is_there(pid)
