"""The scripts of session_scripts.py said to Debian's redis-server and to ours: replies must be equal byte for byte."""

import contextlib
import re
import socket
import time

import pytest

from tests.compat.conftest import RunningServer
from tests.compat.session_scripts import (
    ALLOWED,
    ALLOWED_STREAMS,
    BLOCKED,
    CONVERSATIONS,
    GONE,
    MASKS,
    SESSION_SCRIPTS,
    STREAMS,
    Step,
)
from tests.compat.wire import CommandLine, Wire, encode

TIMEOUT_S = 10

BOTH = pytest.mark.parametrize("resp", [2, 3])


def connect(server: RunningServer, resp: int) -> Wire:
    """A connection in that protocol."""
    wire = server.connect()
    if resp == 3:
        wire.ask("HELLO 3")
    return wire


def masked(reply: bytes) -> bytes:
    """A reply without what cannot be equal."""
    for pattern, _ in MASKS.values():
        reply = re.sub(pattern, b"?", reply)
    return reply


def spoken(server: RunningServer, resp: int, script: list[CommandLine]) -> list[bytes]:
    """All the replies to a script on one connection."""
    with connect(server, resp) as wire:
        return [masked(wire.ask(line)) for line in script]


@BOTH
@pytest.mark.parametrize("name", SESSION_SCRIPTS)
def test_both_servers_answer_a_session_with_the_same_bytes(
    name: str, resp: int, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    script = SESSION_SCRIPTS[name]
    theirs, ours = spoken(redis_server, resp, script), spoken(kvredis, resp, script)
    different = [
        (at, line, f"Redis: {their[:300]!r}", f"ours: {our[:300]!r}")
        for at, (line, their, our) in enumerate(zip(script, theirs, ours, strict=True))
        if (their != our) != (line in ALLOWED if isinstance(line, str) else False)
    ]
    assert not different, "\n".join(map(str, different))


class Company:
    """Several connections to one server, made when they first speak."""

    def __init__(self, server: RunningServer, resp: int) -> None:
        self._server = server
        self._resp = resp
        self._wires: dict[int, Wire] = {}
        self._numbers: dict[int, str] = {}

    def take(self, step: Step) -> list[bytes]:
        """Send a step's line and read its replies."""
        wire = self._wires.get(step.client) or self._join(step.client)
        if step.replies == GONE:
            return [b"gone" if wire.at_end() else b"still there"]
        if step.replies == BLOCKED:
            wire.exchange(self._encoded(step.line), 0)
            self._wait_until_blocked(step.client)
            return []
        return [masked(reply) for reply in wire.exchange(self._encoded(step.line), step.replies)]

    def _join(self, client: int) -> Wire:
        wire = self._wires[client] = connect(self._server, self._resp)
        self._numbers[client] = wire.ask("CLIENT ID").decode().strip(":\r\n")  # or an error, before a login
        return wire

    def _wait_until_blocked(self, client: int) -> None:
        ends_s = time.monotonic() + TIMEOUT_S
        with self._server.connect() as observer:
            while not re.search(rb" flags=\w*b", line := observer.ask(f"CLIENT LIST ID {self._numbers[client]}")):
                assert time.monotonic() < ends_s, f"client {client} is not kept waiting: {line!r}"

    def _encoded(self, line: CommandLine) -> bytes:
        if isinstance(line, str):
            line = re.sub(r"{(\d)}", lambda found: self._numbers[int(found[1])], line)
        return encode(line) if line else b""

    def close(self) -> None:
        """Hang up."""
        for wire in self._wires.values():
            wire.close()


def conversation(server: RunningServer, resp: int, steps: list[Step]) -> list[list[bytes]]:
    """What each step of a conversation was answered; the server is left as it was found."""
    company = Company(server, resp)
    try:
        return [company.take(step) for step in steps]
    finally:
        company.close()


@BOTH
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_both_servers_answer_several_clients_with_the_same_bytes(
    name: str, resp: int, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    steps = CONVERSATIONS[name]
    theirs, ours = conversation(redis_server, resp, steps), conversation(kvredis, resp, steps)
    different = [
        (at, *step, f"Redis: {their!r}", f"ours: {our!r}")
        for at, (step, their, our) in enumerate(zip(steps, theirs, ours, strict=True))
        if their != our
    ]
    assert not different, "\n".join(map(str, different))


def streamed(server: RunningServer, stream: bytes) -> bytes:
    """Everything that comes back for these bytes, behind which nothing more is sent."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(server.unixsocket)
        answer = b""
        with contextlib.suppress(ConnectionError):  # hung up on before all of it was sent, or read
            sock.sendall(stream)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(1 << 20):
                answer += piece
    return masked(answer)


@pytest.mark.parametrize("name", STREAMS)
def test_both_servers_answer_raw_bytes_with_the_same_bytes(
    name: str, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    different = []
    for stream in STREAMS[name]:
        their, our = streamed(redis_server, stream), streamed(kvredis, stream)
        if (their != our) != (stream in ALLOWED_STREAMS):
            different.append((stream[:100], f"Redis: {their[:300]!r}", f"ours: {our[:300]!r}"))
    assert not different, "\n".join(map(str, different))


def test_every_allowed_difference_is_in_a_script() -> None:
    lines = {line for script in SESSION_SCRIPTS.values() for line in script if isinstance(line, str)}
    assert set(ALLOWED) <= lines
    assert set(ALLOWED_STREAMS) <= {stream for streams in STREAMS.values() for stream in streams}
