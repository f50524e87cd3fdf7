"""A child process that answers requests: a line of JSON on its standard input is a request, a line on its standard
output the answer. The child ends with its parent. A child that ends before, or does not answer in time, is an error
that shows what it has printed.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Self

from .errors import BenchError

STOP_S: Final = 30.0
_LOG_BYTES_SHOWN: Final = 2500


class LineProcess:
    """A context manager; one user at a time. Errors are BenchError and name the process as `name`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        log: Path | None = None,
    ) -> None:
        """`command` is run in `folder` with nothing but `environment`; `log` is where its standard error is appended,
        None: to ours."""
        self.name = name
        self.log = log
        self._command, self._environment, self._folder = list(command), dict(environment), folder
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        errors = None
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            errors = self.log.open("ab")
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )
        finally:
            if errors is not None:
                errors.close()
        self._answers = queue.SimpleQueue()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout, self._answers), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdout is not None
        assert self._reader is not None
        self._end(process)
        self._reader.join()
        process.stdout.close()

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        """End it by closing its standard input, and after a while by force."""
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, with a line unread
            process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def pid(self) -> int:
        """Of the process, which runs."""
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, though this object has not ended it."""
        return self._process is not None and self._process.poll() is not None

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a request; `answer` waits for what it is."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def finish(self) -> None:
        """Send no more requests: the process ends its work, and may have something to say of it."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            self._process.stdin.close()

    def answer(self, within_s: float | None = None) -> dict[str, Any]:
        """Give the answer to the oldest request that has none yet, or what the process says without one."""
        try:
            line = self._answers.get(timeout=within_s)
        except queue.Empty:
            raise BenchError(f"{self.name} does not answer{self._said()}") from None
        if not line:
            raise self._ended()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self.failed(f"this is no answer: {line[:200]!r}") from None
        return answer

    def failed(self, error: str) -> BenchError:
        """The error of an answer that says so."""
        return BenchError(f"{self.name}: {error}{self._said()}")

    def _ended(self) -> BenchError:
        assert self._process is not None
        return BenchError(f"{self.name} ended with {self._process.wait()}{self._said()}")

    def _said(self) -> str:
        if self.log is None:
            return "; what it said is above"
        return ":\n" + self.log.read_text(errors="replace")[-_LOG_BYTES_SHOWN:].strip()

    @staticmethod
    def _read(lines: IO[str], answers: queue.SimpleQueue[str]) -> None:
        for line in lines:
            answers.put(line)
        answers.put("")  # it has ended
