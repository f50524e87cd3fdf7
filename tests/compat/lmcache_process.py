"""LMCache itself in processes of its own: where it is installed, and how a test tells a process what to do.

What it needs would change the versions that everything else is tested with, so it lies in a folder outside the source
tree, made once, whole or not at all; torch and transformers are this environment's own. lmcache/program.py runs there.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from tests.compat.side_packages import COMPILED_ONCE, packages

HERE = Path(__file__).parent / "lmcache"
REQUIREMENTS = HERE / "requirements.txt"
ANSWER_S = 60
STAGING_GIB = "0.0625"

Answer = dict[str, Any]


def site() -> Path:
    """The folder with the packages of requirements.txt, made if it is not there."""
    return packages(REQUIREMENTS, "lmcache")


class LMCacheProcess:
    """One process with LMCache in it, which serves requests in their order; many workers may be opened in it."""

    def __init__(self, folder: Path, log: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE_", "KVREDIS_"))}
        # A seed, since without vLLM LMCache's keys are Python's own hashes; no GPU, since the program copies in memory.
        ours = {"PYTHONPATH": str(folder), "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "program.py")],
                env=clean | COMPILED_ONCE | ours | {"LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false"},
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

    def open(self, worker: str, url: str | None, *, environment: dict[str, str] | None = None, **rest: Any) -> Answer:
        """Make a worker whose LMCache has these LMCACHE_* variables; what it understood of them."""
        always = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
        if url is not None:
            always |= {"LMCACHE_REMOTE_URL": url, "LMCACHE_LOCAL_CPU": "false"}
            always |= {"LMCACHE_MAX_LOCAL_CPU_SIZE": STAGING_GIB, "LMCACHE_BLOCKING_TIMEOUT_SECS": "5"}
        asked = {"model": "org/model", "dtype": "bfloat16"} | rest
        return self.ask("open", worker, environment=always | (environment or {}), **asked)

    def ask(self, do: str, worker: str, **arguments: Any) -> Answer:
        """Have a worker do something, and wait for the answer."""
        self.tell(do, worker, **arguments)
        return self.answer()

    def tell(self, do: str, worker: str, **arguments: Any) -> None:
        """Have a worker do something; `answer` waits for it."""
        self._requests.write(json.dumps({"do": do, "worker": worker, **arguments}) + "\n")
        self._requests.flush()

    def answer(self) -> Answer:
        """The answer to the oldest request that has none yet."""
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            line = ""
        assert line, f"LMCache's process did not answer: {self._log.read_text()[-2000:]}"
        answer: Answer = json.loads(line)
        assert "raised" not in answer, f"{answer['raised']}: {self._log.read_text()[-2000:]}"
        return answer

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(5)
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
