"""Processes that an engine runs in, with packages that this environment must not have, and how a test talks to them.

A program reads requests, lines of JSON, from stdin, and writes answers to stdout. side_packages.py makes the folders
that its packages lie in.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvredis.bench.core.line_process import LineProcess
from tests.compat.side_packages import COMPILED_ONCE

ROOT = Path(__file__).parents[2]
ANSWER_S = 240
"""An engine starts within half a minute, on a machine that has nothing else to do."""

Answer = dict[str, Any]


class EngineProcess:
    """A program that answers requests in their order."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
        """`command` is run with what is in this environment, without LMCACHE_* and KVREDIS_*, and `environment`."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE_", "KVREDIS_"))}
        ours = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        self._log = log
        self._lines = LineProcess(
            "the engine's process", command, clean | COMPILED_ONCE | ours | dict(environment), log=log
        )
        self._lines.__enter__()

    @property
    def log(self) -> str:
        """What it has said on stderr."""
        return self._log.read_text(errors="replace")

    def ask(self, do: str, **arguments: Any) -> Answer:
        """Have it do something, and wait for the answer."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Have it do something; `answer` waits for it."""
        self._lines.tell({"do": do, **arguments})

    def answer(self) -> Answer:
        """The answer to the oldest request that has none yet."""
        answer = self._lines.answer(ANSWER_S)
        if "raised" in answer:
            raise self._lines.failed(answer["raised"])
        return answer

    def stop(self) -> None:
        """End the process."""
        self._lines.__exit__()
