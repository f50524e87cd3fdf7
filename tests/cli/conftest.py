"""Real `kvredis serve` processes on free ports, ended with the test whatever happens in it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.fork_server import Forked

from .inspected import ROOT as ROOT
from .inspected import serving

EXIT_S = 30
"""A bound on what must end by itself; none of it takes a second."""


class ServeProcess:
    """A `kvredis serve` process and the lines it has printed so far; `program` is the module that is kvredis. A fresh
    one has imported all that it has imported itself."""

    def __init__(self, args: list[str], env: dict[str, str], program: str, fresh: bool = False) -> None:
        self.process = (subprocess.Popen if fresh else Forked)(
            [sys.executable, "-m", program, "serve", *args],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.stderr = ""

    def wait_ready(self) -> list[str]:
        """Read up to the line that says so and give the addresses in it; fails when the process ends instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("Ready to accept connections"):
                return [word.strip(",") for word in line.split(" on ")[1].split()]
        raise AssertionError(f"ended with {self.finish()} before it was ready: {self.stderr}")

    def wait_log(self, text: str) -> str:
        """Read the log up to the first line that holds `text`, and give that line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line
            if text in line:
                return line
        raise AssertionError(f"the log ended without {text!r}: {self.stderr}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def finish(self) -> int:
        """Wait for the process to end; keeps what it still printed, gives its exit status."""
        out, err = self.process.communicate(timeout=EXIT_S)
        self.lines += out.splitlines()
        self.stderr += err
        return self.process.returncode


Serve = Callable[..., ServeProcess]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Give a function that starts `kvredis serve ARGS` with only the environment that it is given."""
    started: list[ServeProcess] = []

    def start(*args: str, program: str = "kvredis", fresh: bool = False, **env: str) -> ServeProcess:
        base = {"PATH": os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1"}
        base |= {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
        started.append(ServeProcess(list(args), base | env, program, fresh))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        if one.process.stdout is not None and not one.process.stdout.closed:
            one.finish()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a file's own server listens: host:port."""
    with serving() as address:
        yield address
