"""A real terminal for tests: a private tmux server with one window in which a shell waits for what is typed.

What is typed comes as a person's keys, and what is read is what a person would see. Everything is waited for by
looking, until it is there or a bound has passed.
"""

import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest

from .conftest import ROOT

PROMPT = "READY>"
WAIT_S = 60
LOOK_S = 0.05


class Terminal:
    """One window of `columns` times `lines`, closed with all that runs in it at the end of the block."""

    def __init__(self, columns: int = 80, lines: int = 24, program: str = "kvredis", **env: str) -> None:
        tmux = shutil.which("tmux")
        if tmux is None:
            if os.environ.get("CI"):
                pytest.fail("tmux is not installed, and CI tries every command in a terminal (apt install tmux)")
            pytest.skip("tmux is not installed (apt install tmux)")
        self._folder = tempfile.TemporaryDirectory(prefix="kvredis-tmux-")
        self._tmux = [tmux, "-S", f"{self._folder.name}/socket", "-f", "/dev/null"]
        clean = {
            "PATH": f"{Path(self._folder.name)}:{os.environ['PATH']}",
            "HOME": self._folder.name,
            "LC_ALL": "C.UTF-8",
        }
        self._env = {**clean, "PS1": f"{PROMPT} ", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **env}
        script = Path(self._folder.name) / "kvredis"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {program} "$@"\n')
        script.chmod(0o755)
        # tmux sets TERM for what runs in it, so another one is set behind it
        shell = ["env", *(f"{name}={value}" for name, value in self._env.items()), "bash", "--norc", "--noprofile"]
        size = ["-x", str(columns), "-y", str(lines)]
        self._saves = 0
        self._call("new-session", "-d", *size, *shell)
        self._shell = int(self._call("display-message", "-p", "#{pane_pid}"))
        self._shell_ends = os.pidfd_open(self._shell)

    def _call(self, *words: str) -> str:
        return subprocess.run(
            [*self._tmux, *words],
            env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_S,
        ).stdout

    def enter(self, line: str) -> None:
        """Type a line for the shell, once it waits for one."""
        self.wait_prompt()
        self._call("send-keys", "-l", line)
        self._call("send-keys", "Enter")

    def press(self, *keys: str) -> None:
        """Press keys by tmux' names: q, C-c, Up, Tab, Enter."""
        self._call("send-keys", *keys)

    def see(self, *, colours: bool = False) -> str:
        """What is on the screen now."""
        return self._call("capture-pane", "-p", *(["-e"] if colours else []))

    def wait(self, seen: str | Callable[[str], object]) -> str:
        """Look until the text is on the screen, or until what was given says yes to it; what was seen then."""
        until = seen if callable(seen) else lambda screen: seen in screen
        deadline_s = time.monotonic() + WAIT_S
        while not until(screen := self.see()):
            assert time.monotonic() < deadline_s, f"did not come: {seen}; the screen is\n{screen}"
            time.sleep(LOOK_S)  # between two looks: a terminal does not tell that it has changed
        return screen

    def wait_prompt(self) -> str:
        """Wait until the shell waits: the last line is the bare prompt."""
        return self.wait(lambda screen: screen.rstrip().splitlines()[-1:] == [PROMPT])

    def resize(self, columns: int, lines: int) -> None:
        """Make the window another size, as a user who pulls at its corner."""
        self._call("resize-window", "-x", str(columns), "-y", str(lines))

    def settings(self) -> str:
        """All that `stty` says of the terminal, which a program must leave as it found it."""
        self._saves += 1
        path = Path(self._folder.name) / f"stty-{self._saves}"
        # Neither the line as it is typed nor what the last one has left on the screen looks like this answer.
        self.enter(f"clear; stty -a > {path}; echo saved $(({self._saves}))")
        self.wait(f"saved {self._saves}\n")
        self.wait_prompt()
        return path.read_text()

    def child(self) -> int:
        """The process that the shell is waiting for."""
        (child,) = Path(f"/proc/{self._shell}/task/{self._shell}/children").read_text().split()
        return int(child)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exit: object) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False, timeout=WAIT_S)
        ended, *_ = select.select([self._shell_ends], [], [], WAIT_S)
        os.close(self._shell_ends)
        assert ended, "the shell goes on without its terminal"
        self._folder.cleanup()  # not before: as its last the shell writes its history there


@contextmanager
def terminal(columns: int = 80, lines: int = 24, program: str = "kvredis", **env: str) -> Iterator[Terminal]:
    """A terminal whose shell has said that it is ready; `program` is the module that `kvredis` runs there."""
    with Terminal(columns, lines, program, **env) as one:
        one.wait_prompt()
        yield one
