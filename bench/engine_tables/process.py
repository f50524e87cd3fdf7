"""The engine processes of `kvredis bench prefill`, `hit-sweep` and `long-prefill`, from outside.

One that ends takes its pass with it and nothing else: it can be begun anew for the next.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Self, cast

from kvredis.bench.core.errors import BenchError, MissingHits, VerificationError
from kvredis.bench.core.line_process import LineProcess
from kvredis.bench.core.servers import child_environment

from .worker import Pass, Task

_KINDS: dict[str, type[BenchError]] = {each.__name__: each for each in (MissingHits, VerificationError)}


class WorkerProcess(LineProcess):
    """One engine in a process of its own, a context manager; `begun` is what engine_tables_worker.first_line gives."""

    def __init__(self, begun: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "kvredis.bench.engine_tables.worker"]
        super().__init__("a bench's engine process", command, child_environment(os.environ))
        self._begun = begun
        self.device = ""

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.tell(self._begun)
        except BaseException:
            self.__exit__()
            raise
        return self

    def started(self) -> None:
        """Wait until it computes."""
        self.device = self._answered()["device"]

    def revive(self) -> None:
        """Begin anew if it has ended."""
        if self.has_ended:
            self.__exit__()
            self.__enter__()
            self.started()

    def ask(self, task: Task) -> Pass:
        """Have it run a pass. Raises what it raised."""
        self.tell(cast(dict[str, Any], task))
        return cast(Pass, self._answered())

    def _answered(self) -> dict[str, Any]:
        answer = self.answer()
        if "error" in answer:
            raise _KINDS.get(answer["kind"], BenchError)(answer["error"])
        return answer
