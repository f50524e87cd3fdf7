"""The engine processes of `kvredis bench prefill`, `hit-sweep` and `long-prefill`, from outside.

One that ends takes its pass with it and nothing else: it can be begun anew for the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Self, cast

from .engine_tables_worker import Pass, Task
from .errors import BenchError, MissingHits, VerificationError
from .servers import child_environment, end_child

STOP_S = 30.0
_KINDS: dict[str, type[BenchError]] = {each.__name__: each for each in (MissingHits, VerificationError)}


class WorkerProcess:
    """One engine in a process of its own, a context manager; `begun` is what engine_tables_worker.first_line gives."""

    def __init__(self, begun: dict[str, Any]) -> None:
        self._begun = begun
        self._process: subprocess.Popen[str] | None = None
        self._has_ended = False
        self.device = ""

    def __enter__(self) -> Self:
        self._has_ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvredis.bench.engine_tables_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(os.environ),
            start_new_session=True,
        )
        self._tell(self._begun)
        return self

    def started(self) -> None:
        """Wait until it computes."""
        self.device = self._answer()["device"]

    def revive(self) -> None:
        """Begin anew if it has ended."""
        if self._has_ended:
            self.__exit__()
            self.__enter__()
            self.started()

    def ask(self, task: Task) -> Pass:
        """Have it run a pass. Raises what it raised."""
        self._tell(cast(dict[str, Any], task))
        return cast(Pass, self._answer())

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdout is not None
        end_child(process, STOP_S)
        process.stdout.close()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._has_ended = True
            raise BenchError("a bench's engine process ended; what it said is above") from None

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._has_ended = True
            raise BenchError(f"a bench's engine process ended with {self._process.wait()}; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _KINDS.get(answer["kind"], BenchError)(answer["error"])
        return answer
