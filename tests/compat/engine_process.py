"""Processes that an engine runs in, with packages that this environment must not have, and how a test talks to them.

A program reads requests, lines of JSON, from stdin, and writes answers to stdout. side_packages.py makes the folders
that its packages lie in.
"""

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

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
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                env=clean | ours | dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: IO[str] = self._process.stdin
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

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
        self._requests.write(json.dumps({"do": do, **arguments}) + "\n")
        self._requests.flush()

    def answer(self) -> Answer:
        """The answer to the oldest request that has none yet."""
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            line = ""
        assert line, f"the engine's process did not answer: {self.log[-3000:]}"
        answer: Answer = json.loads(line)
        assert "raised" not in answer, f"{answer['raised']}: {self.log[-3000:]}"
        return answer

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._answers.put(line)
        self._answers.put("")  # it ended
