"""Programs that a demo starts: a server, engines. All end with the block that they were started for."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click

STOP_TIMEOUT_S = 10
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def child(
    command: list[str],
    *,
    stdout: int | IO[str] | None,
    stderr: IO[str],
    variables: Mapping[str, str] | None = None,
    is_group: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process without our configuration's variables, ended when the block is left. One that `is_group` takes all
    those with it that it has started."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE_", "KVREDIS_"))}
    env |= variables or {}
    # A signal that comes while the child is made waits: else nothing would end the child.
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in STOP_SIGNALS}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env, start_new_session=is_group
    ) as process:
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if came:
                signal.raise_signal(came[0])
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if is_group:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def listening(command: list[str], log_path: Path) -> Iterator[str]:
    """A program of kvredis that says where it listens; yields that, HOST:PORT or a URL."""
    with log_path.open("w+") as log, child(command, stdout=subprocess.PIPE, stderr=log) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if ready := re.search(rb"Ready to accept connections on (\S+?:\d+)", line):
                yield ready[1].decode()
                return
        log.seek(0)
        raise click.ClickException(f"{command[3]} did not start:\n{log.read()}")


@contextmanager
def server(capacity_bytes: int, folder: Path) -> Iterator[str]:
    """A `kvredis serve` of the demo's own on a free port; yields HOST:PORT. Its memory was touched before."""
    size = f"{megabytes(capacity_bytes)}mb"
    command = [sys.executable, "-m", "kvredis", "serve", "--port", "0", "--max-local-cpu-size", size]
    with listening(command, folder / "server.log") as place:
        yield place


def free_port() -> int:
    """A port that is free now, for programs that take no port 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def megabytes(nbytes: int) -> int:
    """At least so many bytes, in the megabytes that a configuration has."""
    return -(-nbytes // (1024 * 1024))
