"""A `kvredis serve` process over a disk tier, which a test starts time and again in one directory and ends at will."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.fork_server import Forked

ROOT: Final = Path(__file__).parents[2]
END_S: Final = 30
"""A bound on what must end by itself: to save a few MiB takes no second."""

_PROGRAM: Final = """
import sys
from kvredis.storage.disk import segment
segment.SEGMENT_BYTES = int(sys.argv.pop(1))
from kvredis.cli.main import main
main()
"""
"""The command line, with segments so short that a few MiB fill several."""

SMALL: Final = ("--port", "0", "--hugepages", "off", "--no-prefault", "--no-page-lock", "--loglevel", "warning")
ARENA: Final = "32MB"


class CrashServer:
    """In a with-block, at whose end the process is gone. `flags` come on top of those for a small server on a free
    port with its disk in `directory`; what it logs goes to a file beside that."""

    def __init__(self, directory: Path, flags: Sequence[str], *, segment_bytes: int = 1 << 28) -> None:
        self._log_path = directory.with_suffix(".log")
        self._log = self._log_path.open("ab")
        disk = ("--max-local-cpu-size", ARENA, "--local-disk", str(directory))
        self.process = Forked(
            [sys.executable, "-c", _PROGRAM, str(segment_bytes), "serve", *SMALL, *disk, *flags],
            cwd=ROOT,
            env={"PATH": os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.lines: list[str] = []
        self.port = 0

    def wait_ready(self) -> None:
        """Read up to the line that says so; fails with the log when the process ends instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("Ready to accept connections"):
                self.port = int(line.split(" on ")[1].split()[0].strip(",").rpartition(":")[2])
                return
        raise AssertionError(f"it ended with {self.process.wait(END_S)} before it was ready: {self.log()}")

    def kill_after(self, delay_s: float) -> None:
        """SIGKILL in so many seconds, unless it has ended by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(delay_s)
        self.close()

    def end(self) -> int:
        """SIGTERM; gives the exit status. AssertionError, with the stacks of its threads, when it does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(END_S)
            raise AssertionError(f"it has not ended in {END_S} s: {self.log()}") from None

    def log(self) -> str:
        """The last of what it, and those before it in this directory, have logged."""
        return self._log_path.read_text(errors="replace")[-8000:]

    def refusal(self) -> str:
        """What it says when it does not start at all, but ends as one does whose configuration is wrong."""
        try:
            assert self.process.wait(END_S) == 2, self.log()
            return self.log()
        finally:
            self.close()

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it, by SIGKILL where it is still there."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()
