"""Processes that an engine runs in, with packages that this environment must not have, and how a test talks to them.

A program reads requests, lines of JSON, from stdin, and writes answers to stdout. Packages that the programs need and
.venv does not have lie in a folder outside the source tree, made once, whole or not at all.
"""

import contextlib
import hashlib
import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[2]
PIP_INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-compile",
               "--only-binary", ":all:", "--retries", "1")  # fmt: skip
UNREACHABLE = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError")
INSTALL_S = 600
ANSWER_S = 240
"""An engine starts within half a minute, on a machine that has nothing else to do."""

Answer = dict[str, Any]


def packages(name: str, requirements: Path) -> Path:
    """The folder with the packages of `requirements`, for PYTHONPATH before .venv's own.

    Without PyPI the tests are skipped, unless CI is set in the environment: there they fail.
    """
    kind = f"{sys.version_info[:2]} {platform.machine()}".encode()
    digest = hashlib.sha256(requirements.read_bytes() + kind).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / f"kvredis-{name}"
    folder = cache / digest
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=cache))
    try:
        command = [sys.executable, *PIP_INSTALL, "--target", str(scratch), "--requirement", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if any(sign in done.stderr for sign in UNREACHABLE) and not os.environ.get("CI"):
            pytest.skip(f"{name} cannot be installed, PyPI cannot be reached: {done.stderr.strip()[-200:]}")
        assert done.returncode == 0, f"pip could not install {name}: {done.stderr}"
        with contextlib.suppress(OSError):  # another run was quicker
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


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
