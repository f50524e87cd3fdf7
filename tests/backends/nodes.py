"""Servers on loopback TCP ports that must be known before they start: a process each, which tests kill and start again.

A port that was free when we looked may be taken when the server binds it. So a node counts as started only when what
answers on its port says that it is our process, and the caller that starts nodes tries again with others
(`with_free_ports`).
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import redis

from tests.fork_server import Forked
from tests.server.certificates import Papers

ROOT: Final = Path(__file__).parents[2]
HOST: Final = "127.0.0.1"
WAIT_S: Final = 40
"""A bound on what takes a second or two on a machine with nothing else to do."""
POLL_S: Final = 0.02
TRIES_MAX: Final = 5
CLIENT_TIMEOUT_S: Final = 10


class PortTakenError(Exception):
    """Raised when a server has ended before it was ready; mostly because another process has its port."""


def wait_until(condition: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    """Return as soon as `condition` holds; AssertionError that names `what` when it does not in time. A server that
    does not answer the condition's question is one more reason to wait.
    """
    deadline_s, never = time.monotonic() + within_s, threading.Event()
    while True:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            if condition():
                return
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        never.wait(POLL_S)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as sockets:
        taken = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in taken]


class Node:
    """A server process that listens on `port` of loopback; `folder` is its own and has its log.

    `papers` are what it speaks TLS with. Nothing is started before `start`; its maker kills it in the end.
    """

    def __init__(
        self, command: Sequence[str], port: int, folder: Path, *, password: str = "", papers: Papers | None = None
    ) -> None:
        self.port = port
        self.folder = folder
        self.command = list(command)
        self._password = password
        self._papers = papers
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port."""
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """How a client reaches this one server."""
        secret = f":{self._password}@" if self._password else ""
        if self._papers is None:
            return f"redis://{secret}{self.address}"
        return f"rediss://{secret}{self.address}?ssl_ca_certs={self._papers.path('ca')}"

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed since."""
        return self._process is not None

    def start(self) -> None:
        """Start it, in the folder where it may have run before, and wait until it answers; PortTakenError if it ends
        instead.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = Forked(
                self.command,
                cwd=ROOT,
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._answers, f"an answer from {self.command}")

    def ask(self, *words: str | bytes | int) -> Any:
        """Send it one command on a connection of its own and give the reply; what redis-py raises escapes."""
        with self.client() as client:
            return client.execute_command(*words)

    def rows(self, *words: str) -> list[dict[str, str]]:
        """As `ask`, for a reply of lists whose items are field, value, field, value ..."""
        return [dict(zip(row[::2], row[1::2], strict=True)) for row in self.ask(*words)]

    def client(self) -> "redis.Redis":
        """A client of this one server that knows nothing of clusters; texts are str. The caller closes it."""
        return redis.Redis.from_url(
            self.url,
            decode_responses=True,
            socket_timeout=CLIENT_TIMEOUT_S,
            socket_connect_timeout=CLIENT_TIMEOUT_S,
            protocol=2,
        )

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal: SIGSTOP makes it one that accepts and never answers, SIGCONT ends that."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it without a goodbye; does nothing when it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(WAIT_S)

    def log(self) -> str:
        """The last of what it has logged."""
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            status, self._process = self._process.returncode, None
            raise PortTakenError(f"{self.command} ended with {status}: {self.log()}")
        with self.client() as client:
            return bool(client.info("server")["process_id"] == self._process.pid)


@contextlib.contextmanager
def with_free_ports(make: Callable[[list[int]], Sequence[Node]], count: int) -> Iterator[list[Node]]:
    """Start what `make` makes of `count` free ports, with others again when one was taken meanwhile; kill it at the
    end, whatever happens.
    """
    nodes: Sequence[Node] = ()
    try:
        for left in reversed(range(TRIES_MAX)):
            nodes = make(free_ports(count))
            try:
                for node in nodes:
                    node.start()
                break
            except PortTakenError:
                for node in nodes:
                    node.kill()
                if not left:
                    raise
        yield list(nodes)
    finally:
        for node in nodes:
            node.kill()
