"""Mutated sessions at the socket: several strangers at once, and what must be true while they are there and after.

A case is one connection: a stream, the pieces in which it comes, and the way in which its client leaves. A batch is
eight of them at once. Meanwhile PING is answered and the canaries keep their bytes; afterwards the store agrees with
itself, nothing is held, nothing was logged, and each client's replies were well-formed to the last byte.
"""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import hiredis

from tests.fuzz.corpus import SWEEPING, session
from tests.fuzz.mutator import cuts, mutate
from tests.fuzz.served import KEPT_PREFIX, KEPT_SPACES, ServedProcess, State, is_own_doing, state_of, sweep
from tests.server.feed import Word
from tests.server.live import Client, LiveServer, pattern

ARENA_MIB: Final = 64
BATCH: Final = 8
DEAF_TURNS: Final = 60
PATIENCE_S: Final = 15
"""How long anything may take before it counts as a failure; nothing takes a second."""

ENDINGS: Final = ("half-close", "half-close", "half-close", "half-close", "reset", "close", "linger", "linger")
CANARY_BYTES: Final = (0, 1, 500, 16_383, 16_384, 400_000)
HELD: Final = ("leases", "reserved", "retired", "exceptions")
GIVEN_BACK_S: Final = 5.0
KEEPER: Final = ("keeper", "a password that no stream holds")


@dataclass(frozen=True)
class Profile:
    """Who the strangers are. `restricted`: an ACL user who may not touch a canary; `sweeping`: their sessions hold
    FLUSHALL and the like; `observed`: a client monitors and keyspace events are on, so each command is looked at."""

    restricted: bool = False
    sweeping: bool = False
    observed: bool = False


PROFILES: Final = {
    "open": Profile(),
    "restricted": Profile(restricted=True, sweeping=True),
    "sweeping": Profile(sweeping=True),
    "observed": Profile(observed=True),
}


@dataclass(frozen=True)
class Case:
    """One stranger."""

    stream: bytes
    cuts: tuple[int, ...] = ()
    ending: str = "half-close"
    kind: str = "unix"


class Door(Protocol):
    """A server as the strangers' host sees it, in this process or in another."""

    unixsocket: str
    tcp_port: int

    def state(self) -> State:
        """Its accounts, after check_integrity()."""
        ...

    def sweep(self) -> State:
        """The accounts once every key but the canaries is gone."""
        ...

    def complaints(self) -> list[str]:
        """What it has logged as a warning or worse, but for what a stranger's own words bring about."""
        ...


class LiveDoor:
    """A LiveServer on this very loop."""

    def __init__(self, live: LiveServer) -> None:
        self._live = live
        self.unixsocket = str(live.server.unixsocket)
        self.tcp_port = live.server.tcp_port

    def state(self) -> State:
        return state_of(self._live.server)

    def sweep(self) -> State:
        sweep(self._live.store)
        return self.state()

    def complaints(self) -> list[str]:
        told = self._live.complaints
        told[:] = [each for each in told if not is_own_doing(each)]  # in place: LiveServer looks at them in the end
        return told


class ProcessDoor:
    """A server process."""

    def __init__(self, served: ServedProcess) -> None:
        self._served = served
        self.unixsocket = served.unixsocket
        self.tcp_port = served.tcp_port

    def state(self) -> State:
        return self._served.ask()

    def sweep(self) -> State:
        return self._served.ask("sweep")

    def complaints(self) -> list[str]:
        return list(self._served.ask()["complaints"])


def make_case(seed: int, number: int, profile: str) -> Case:
    """Case `number` of a seed, always the same."""
    rng = random.Random(f"socket {seed} {number} {profile}")
    extra = SWEEPING if PROFILES[profile].sweeping and rng.random() < 0.2 else ()
    stream = mutate(rng, session(rng, extra), session(rng))
    return Case(stream, tuple(cuts(rng, stream)), rng.choice(ENDINGS), rng.choice(["unix", "tcp"]))


# ---- one stranger ----------------------------------------------------------------------------------------------------


class Guest(Client):
    """A Client that tells what comes as it comes."""

    async def read_some(self) -> bytes:
        """What is there, b"" at the end of the stream."""
        return await self._loop.sock_recv(self._socket, 256 * 1024)


async def enter(door: Door, kind: str = "unix") -> Guest:
    """A new connection."""
    sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    sock.setblocking(False)
    address = door.unixsocket if kind == "unix" else ("127.0.0.1", door.tcp_port)
    await asyncio.get_running_loop().sock_connect(sock, address)
    return Guest(sock)


class Stranger:
    """One case being played. `flaw` is what was wrong with its replies."""

    def __init__(self, guest: Guest, case: Case) -> None:
        self._guest = guest
        self._case = case
        self._reader = hiredis.Reader()
        self.flaw = ""

    async def visit(self) -> None:
        """Send everything and leave, or stay if the case says so. Who will not stay to the end reads nothing."""
        if self._case.ending == "half-close":
            reading = asyncio.ensure_future(self._read())
            with contextlib.suppress(OSError):  # the server has hung up in the middle, as it should on a broken stream
                await self._send()
                self._guest.half_close()
            await reading
        else:
            sending = asyncio.ensure_future(self._send())
            for _ in range(DEAF_TURNS):  # then the server has stopped listening to who does not listen to it
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if self._case.ending != "linger":
            self.leave()

    async def _send(self) -> None:
        case = self._case
        for at, end in zip([0, *case.cuts], [*case.cuts, len(case.stream)], strict=True):
            await self._guest.send_raw(case.stream[at:end])

    def leave(self) -> None:
        """Close the connection, if that has not been done."""
        if self._case.ending == "reset":
            with contextlib.suppress(OSError):  # it is closed already
                self._guest.reset()
        self._guest.close()

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := await self._guest.read_some():
                self._check(data)
            if self._reader.has_data():
                self.flaw = self.flaw or "the last reply is not whole"

    def _check(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while self._reader.gets() is not False:
                pass
        except hiredis.ProtocolError as broken:
            self.flaw = self.flaw or f"no reply begins so: {broken} in {data[:300]!r}"


# ---- the host --------------------------------------------------------------------------------------------------------


class Host:
    """Prepares a server for strangers and looks after it: `async with Host(door, profile) as host`."""

    def __init__(self, door: Door, profile: Profile) -> None:
        self._door = door
        self._profile = profile
        self._canaries = {
            (space, b"%b:%d" % (KEPT_PREFIX, n)): pattern(length, n + space)
            for space in KEPT_SPACES
            for n, length in enumerate(CANARY_BYTES)
        }
        self._guests: list[Guest] = []
        self._before: State = {}

    async def __aenter__(self) -> "Host":
        self._keeper = await self._enter_as_keeper(set_up=True)
        if self._profile.observed:
            assert await self._say("CONFIG", "SET", "notify-keyspace-events", "KEA") == b"+OK\r\n"
        if self._profile.restricted:
            rules = ["resetkeys", "~f*", "%R~nope*", "resetchannels", "&news*", "-@dangerous", "+client|list", "+info"]
            assert await self._say("ACL", "SETUSER", "default", *rules) == b"+OK\r\n"
        for space, key in self._canaries:
            await self._plant(space, key)
        self._before = self._door.sweep()
        return self

    async def __aexit__(self, *_: object) -> None:
        for guest in self._guests:
            guest.close()

    async def receive(self, cases: Sequence[Case]) -> None:
        """Let a batch of strangers in at once; AssertionError when one of them did harm."""
        monitor = await self._watch() if self._profile.observed else None
        strangers = [Stranger(await enter(self._door, case.kind), case) for case in cases]
        async with asyncio.timeout(PATIENCE_S):
            crowd = asyncio.gather(*(stranger.visit() for stranger in strangers))
            assert await self._say("PING") == b"+PONG\r\n"
            await crowd
        async with asyncio.timeout(PATIENCE_S):
            await self._look_at_canaries()
            assert await self._say("PING") == b"+PONG\r\n"
        for stranger in strangers:
            stranger.leave()
        if monitor is not None:
            monitor.close()
        state = await self._until_alone()
        held = {name: state[name] for name in HELD if state[name]}
        assert not held, f"still there: {held}"
        assert not self._door.complaints(), self._door.complaints()
        flaws = [stranger.flaw for stranger in strangers if stranger.flaw]
        assert not flaws, flaws

    async def part(self) -> None:
        """At the end of a run: without the strangers' keys the accounts are what they were."""
        state = self._door.sweep()
        for name in ("used", "keys"):
            assert state[name] == self._before[name], (name, state[name], self._before[name])

    async def _until_alone(self) -> State:
        """The accounts as soon as only the keeper is connected, and a thread that was receiving has given its room
        back, which takes it a moment behind the client's end."""
        async with asyncio.timeout(PATIENCE_S):
            while (state := self._door.state())["sessions"] > 1:
                await asyncio.sleep(0)
        until_s = time.monotonic() + GIVEN_BACK_S
        while any(state[name] for name in HELD) and time.monotonic() < until_s:
            await asyncio.sleep(0)
            state = self._door.state()
        return state

    async def _look_at_canaries(self) -> None:
        """Each is there with its bytes; where the strangers may take keys it may be missing, and is set again."""
        for (space, key), value in self._canaries.items():
            assert await self._say("SELECT", str(space)) == b"+OK\r\n"
            found = await self._keeper.get(key)
            if found != value and self._profile.sweeping and not self._profile.restricted:
                # Gone, or exchanged with the other database; other bytes are still a fault.
                swapped = [self._canaries[other, key] for other in KEPT_SPACES]
                assert found is None or found in swapped, f"canary {key!r} of database {space} is {found[:100]!r}"
                await self._plant(space, key)
            else:
                assert found == value, f"canary {key!r} of database {space} is {found and found[:100]!r}"

    async def _plant(self, space: int, key: bytes) -> None:
        assert await self._say("SELECT", str(space)) == b"+OK\r\n"
        assert await self._say("SET", key, self._canaries[space, key]) == b"+OK\r\n"

    async def _say(self, *words: Word) -> bytes:
        """What the keeper's one-line command is answered; a keeper that a session has killed connects again."""
        return await self._keeper.ask(*words)

    async def _enter_as_keeper(self, set_up: bool = False) -> Guest:
        keeper = await enter(self._door)
        self._guests.append(keeper)
        if self._profile.restricted:
            name, password = KEEPER
            if set_up:
                rules = ["on", f">{password}", "~*", "&*", "+@all"]
                assert await keeper.ask("ACL", "SETUSER", name, *rules) == b"+OK\r\n"
            assert await keeper.ask("AUTH", name, password) == b"+OK\r\n"
        return keeper

    async def _watch(self) -> Guest:
        """A client that monitors and does not read."""
        monitor = await enter(self._door)
        assert await monitor.ask("MONITOR") == b"+OK\r\n"
        return monitor
