"""Sessions of several clients with Debian's redis-server and with ours: what each client is sent must be equal byte for
byte, messages that nobody asked for included.

When is a client done reading? After each step every client asks for something whose answer cannot be taken for another:
what comes before it was sent because of the step. It is a subcommand of CLIENT, since those leave CLIENT CACHING alone.
"""

from collections.abc import Iterator
from itertools import count

import pytest

from tests.compat.conftest import RunningServer
from tests.compat.pubsub_scripts import (
    ALLOWED,
    EVENT_SCRIPTS,
    NO_EVENTS,
    PUBSUB_SCRIPTS,
    REORDERED,
    TRACKING_SCRIPTS,
    Step,
)
from tests.compat.wire import CommandLine, encode

SCRIPTS = {**PUBSUB_SCRIPTS, **EVENT_SCRIPTS, **TRACKING_SCRIPTS}
Heard = list[tuple[str, list[bytes]]]
"""Each client's name and what it was sent."""


class Conversation:
    """A script's clients at one server."""

    def __init__(self, server: RunningServer, resp: int, names: list[str]) -> None:
        self.wires = {name: server.connect() for name in names}
        self.ids = {name: int(wire.ask("CLIENT ID")[1:]) for name, wire in self.wires.items()}
        self._queueing: set[str] = set()
        self._numbers = count()
        if resp == 3:
            for wire in self.wires.values():
                wire.ask("HELLO 3")

    def take(self, step: Step) -> Heard:
        """Say what the step says; what every client has been sent."""
        name, lines = self._parsed(step)
        wire = self.wires[name]
        first = wire.exchange(b"".join(map(encode, lines)), len(lines))
        if lines == ["QUIT"]:
            assert wire.at_end()
            wire.close()
            del self.wires[name]
        self._note_queueing(name, lines)
        heard = [(name, first + self._rest(name))]
        heard += [(other, self._rest(other)) for other in self.wires if other != name]
        return [(who, [self._without_ids(lines, frame) for frame in frames]) for who, frames in heard]

    def _parsed(self, step: Step) -> tuple[str, list[CommandLine]]:
        """Who speaks, and the lines."""
        if isinstance(step, tuple):
            return step[0], [step[1]]
        name, _, said = step.partition(" ")
        return name, list(said.format(**self.ids).split(" ; "))

    def _note_queueing(self, name: str, lines: list[CommandLine]) -> None:
        if "MULTI" in lines:
            self._queueing.add(name)
        elif {"EXEC", "DISCARD"} & {line for line in lines if isinstance(line, str)}:
            self._queueing.discard(name)

    def _rest(self, name: str) -> list[bytes]:
        """What a client was sent besides; a client in MULTI is not asked, for that would be queued."""
        if name not in self.wires or name in self._queueing:
            return []
        token = b"nobody-%d" % next(self._numbers)
        frames = self.wires[name].exchange(encode([b"CLIENT", b"KILL", b"USER", token]))
        while token not in frames[-1] and b"'client|kill'" not in frames[-1]:
            frames.append(self.wires[name].read())
        return frames[:-1]

    def _without_ids(self, lines: list[CommandLine], frame: bytes) -> bytes:
        """A frame with names where it speaks of clients, whose numbers are each server's own."""
        for name, number in self.ids.items():
            if b"redir" in frame or "CLIENT GETREDIR" in lines:
                frame = frame.replace(b":%d\r\n" % number, b":{%b}\r\n" % name.encode())
        return frame

    def close(self) -> None:
        """Hang up."""
        for wire in self.wires.values():
            wire.close()


def converse(server: RunningServer, resp: int, script: list[Step]) -> Iterator[Heard]:
    """What every client was sent after each step of a script."""
    conversation = Conversation(server, resp, sorted({step[0] for step in script} | {"b"}))
    try:
        for step in script:
            yield conversation.take(step)
    finally:
        conversation.close()
        with server.connect() as wire:
            wire.ask(NO_EVENTS)


def in_any_order(heard: Heard) -> Heard:
    """What came, whatever came first; EXEC's reply is taken apart too."""
    return [(name, sorted(b"".join(frames).split(b"\r\n"))) for name, frames in heard]


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_both_servers_send_every_client_the_same_bytes(
    name: str, resp: int, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    script = SCRIPTS[name]
    theirs, ours = list(converse(redis_server, resp, script)), list(converse(kvredis, resp, script))
    for at, (step, their, our) in enumerate(zip(script, theirs, ours, strict=True)):
        place = (name, str(step))
        if place in REORDERED:
            assert in_any_order(our) == in_any_order(their), (at, step)
        elif place not in ALLOWED:
            assert our == their, (at, step)


@pytest.mark.parametrize("listed", [REORDERED, ALLOWED])
def test_every_exception_is_in_a_script(listed: dict[tuple[str, str], str]) -> None:
    assert set(listed) <= {(name, str(step)) for name, script in SCRIPTS.items() for step in script}


@pytest.mark.parametrize("resp", [2, 3])
def test_client_reply_off_silences_no_message(resp: int, redis_server: RunningServer, kvredis: RunningServer) -> None:
    lines: list[CommandLine] = ["CLIENT REPLY OFF", "GET k", "SUBSCRIBE x y", "UNSUBSCRIBE x y", "PUNSUBSCRIBE"]
    lines += ["CLIENT REPLY ON", "CLIENT REPLY SKIP", "SUBSCRIBE z", "PING"]
    heard = []
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            if resp == 3:
                wire.ask("HELLO 3")
            heard.append(wire.exchange(b"".join(map(encode, lines)), 5 + 1 + 1 + 1))
    assert heard[0] == heard[1]


def test_what_a_client_causes_itself_comes_after_the_reply_as_in_redis_7_2(kvredis: RunningServer) -> None:
    with kvredis.connect() as wire:
        wire.ask("HELLO 3")
        wire.ask("SUBSCRIBE y")
        pushed = b">3\r\n$7\r\nmessage\r\n$1\r\ny\r\n$3\r\n%b\r\n"
        assert wire.exchange(encode("PUBLISH y own"), 2) == [b":1\r\n", pushed % b"own"]
        request = b"".join(map(encode, ("PUBLISH y one", "PING", "PUBLISH y two", "PING")))
        assert wire.exchange(request, 6) == [
            b":1\r\n", pushed % b"one", b"+PONG\r\n", b":1\r\n", pushed % b"two", b"+PONG\r\n",
        ]  # fmt: skip
        wire.ask("MULTI")
        wire.ask("PUBLISH y own")
        wire.ask("PING")
        assert wire.exchange(encode("EXEC"), 2) == [b"*2\r\n:1\r\n+PONG\r\n", pushed % b"own"]


def test_a_resp2_client_gets_the_invalidation_of_a_resp3_client_in_its_own_protocol(kvredis: RunningServer) -> None:
    # Redis sends it the other one's nil, `_`, which no RESP2 parser knows.
    with kvredis.connect() as reader, kvredis.connect() as listener:
        number = listener.ask("CLIENT ID")[1:-2].decode()
        listener.ask("SUBSCRIBE __redis__:invalidate")
        reader.ask("HELLO 3")
        reader.ask(f"CLIENT TRACKING ON REDIRECT {number}")
        reader.ask("FLUSHALL")
        assert listener.read() == b"*3\r\n$7\r\nmessage\r\n$20\r\n__redis__:invalidate\r\n$-1\r\n"
