"""Everything a client may be in the middle of when it vanishes, and a client process that can be killed in it."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvredis.server.client.session import Session
from tests.server.feed import request
from tests.server.live import MIB, Client, LiveServer, pattern

KEY: Final = "kept"
OLD: Final = pattern(300_000, 1)
NEW: Final = pattern(2 * MIB, 2)
BIG: Final = pattern(32 * MIB, 3)
ARENA_BYTES: Final = 128 * MIB

SET_NEW: Final = request("SET", KEY, NEW)
BODY_AT: Final = SET_NEW.index(NEW[:100])
PART_NEW: Final = request("KV.RESERVE", KEY, str(len(NEW))) + request("KV.WRITE", "1", "0", NEW)
MSET_NEW: Final = request("MSET", "other", NEW, KEY, NEW)


@dataclass(frozen=True)
class State:
    """What the client has sent, and how one sees at the server that it got there. `fewer`: it does not read it all."""

    sent: bytes
    reached: Callable[[Session], object] = lambda session: True
    fewer: bool = False
    pause: bool = False


def _queued(session: Session) -> bool:
    return session.transaction is not None


STATES: Final[dict[str, State]] = {
    "idle": State(request("PING")),
    "before the name": State(b"*3\r\n$3\r\nS"),
    "half a header": State(SET_NEW[: BODY_AT - 4]),
    "header": State(SET_NEW[:BODY_AT]),
    "less than its evidence": State(SET_NEW[: BODY_AT + 10]),
    "half a body": State(SET_NEW[: BODY_AT + MIB], lambda session: session.store.reserved_bytes),
    "a body without its line end": State(SET_NEW[:-2], lambda session: session.store.reserved_bytes),
    "before the last LF": State(SET_NEW[:-1], lambda session: session.store.reserved_bytes),
    "an argument outside the arena": State(request("ECHO", NEW)[:-MIB]),
    "within MSET": State(MSET_NEW[:-MIB], lambda session: session.store.reserved_bytes > 3 * MIB),
    "many small arguments": State(b"*1000000\r\n" + b"$4\r\nDEL_\r\n" * 5000),
    "MULTI": State(request("WATCH", KEY) + request("MULTI") + SET_NEW + SET_NEW[:-MIB], _queued),
    "MULTI with MSET": State(request("MULTI") + MSET_NEW + MSET_NEW[:-MIB], _queued),
    "reading a reply of 32 MiB": State(request("GET", "big"), lambda session: session.store.leases),
    "reading a long MGET": State(request("MGET", *["big"] * 9), lambda session: session.store.leases),
    "pipelined reads": State(request("GET", "big") * 50, lambda session: session.store.leases, fewer=True),
    "subscribed": State(
        request("SUBSCRIBE", "a") + request("PSUBSCRIBE", "*"), lambda session: session.subscriptions > 1
    ),
    "monitoring": State(request("MONITOR"), lambda session: session.server.monitors),
    "tracking": State(
        request("HELLO", "3") + request("CLIENT", "TRACKING", "ON") + request("GET", KEY),
        lambda session: session.tracking is not None,
    ),
    "watching": State(request("WATCH", KEY, "big"), lambda session: session.watching),
    "blocked in WAIT": State(request("WAIT", "1", "0"), lambda session: session.waiting),
    "blocked with much behind it": State(
        request("WAIT", "1", "0") + request("PING") * 20_000, lambda session: session.waiting, fewer=True
    ),
    "paused": State(SET_NEW + request("GET", KEY), lambda session: session.waiting, fewer=True, pause=True),
    "reserved": State(request("KV.RESERVE", KEY, str(len(NEW))), lambda session: session.store.reserved_bytes),
    "within a part": State(PART_NEW[:-MIB], lambda session: session.store.reserved_bytes),
    "all parts written": State(PART_NEW, lambda session: session.store.reserved_bytes),
    "silent": State(request("CLIENT", "REPLY", "OFF") + SET_NEW[:-MIB]),
}


async def reach(live: LiveServer, session: Session, state: State) -> None:
    """Let the loop turn until the client of `session` is in that state."""
    while not (state.fewer or session.input_bytes == len(state.sent)) or not state.reached(session):
        await asyncio.sleep(0)


_CLIENT: Final = """
import socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
link.sendall(sys.stdin.buffer.read())
link.recv(1, socket.MSG_PEEK) if sys.argv[2] == "reads" else None
sys.stdout.write("sent"), sys.stdout.flush()
while True: __import__("signal").pause()
"""


class ClientProcess:
    """A client that sends what it is told and does nothing more, until it is killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, live: LiveServer, sent: bytes) -> "ClientProcess":
        """It runs; nothing is known yet of how far it is."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-ISc", _CLIENT, str(live.server.unixsocket), "only sends"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        assert process.stdin is not None
        process.stdin.write(sent)
        process.stdin.close()
        return cls(process)

    async def kill(self) -> None:
        """SIGKILL: the kernel closes its sockets, with a RST if something lies there unread."""
        self._process.kill()
        await self._process.wait()


async def plant(live: LiveServer, with_big: bool) -> Client:
    """The old values, and the client that looks after them."""
    keeper = await live.connect()
    assert await keeper.ask("SET", KEY, OLD) == b"+OK\r\n"
    if with_big:
        assert await keeper.ask("SET", "big", BIG) == b"+OK\r\n"
    return keeper
