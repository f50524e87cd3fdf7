"""Blocks that a command reads and that are on disk, or on the GPU alone: its client waits for them here, in its place
of the pipeline.

Handlers know one memory. A command that reads values finds them there, because what the command names is brought in
before it runs; a handler that reads value after value and can wait in between (GET, MGET) asks here itself. A command
that has waited runs again from its beginning, so that what has changed meanwhile is seen. The blocks are held until it
has run.

When there is no room for them, all of it being lent or written to, the client waits a bounded time. Then a command
that only reads finds nothing, which is a miss, and one that would change a value is refused: it must not take what
it cannot see for absent. No client waits for a block that is longer than all of memory, which was larger in an
earlier run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, Protocol, cast

from kvredis.server.commands.registry import Command, shown
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.request import Argument
from kvredis.server.shm.attach import SharedMemory
from kvredis.storage.entry import Lease, extent_length
from kvredis.storage.index import SPACES
from kvredis.storage.tiering.manager import Bringing
from kvredis.storage.tiering.transfers import Transfer

from .blocked import Blocked, Reason, tell_loop
from .client import Client, Host

Name = tuple[bytes, int]
"""A key and its database."""

WAIT_S: Final = 5.0
"""How long a client waits for room in memory for what it wants to read."""

AHEAD_COMMANDS: Final = 16
"""How many of a pipeline's next GETs are sent for together with the one that waits: the disk is quicker so."""

AHEAD_PART: Final = 8
"""MGET brings an eighth of the arena at a time, and has the next eighth on its way meanwhile."""

RENAMING: Final = frozenset({"rename", "renamenx", "move"})
"""What gives a block another name without reading it."""


class _Server(Host, Protocol):
    shm: SharedMemory


class DiskReads:
    """The clients of one server that wait for blocks."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._store = server.store
        self._since: dict[Client, tuple[object, float]] = {}  # for which command, and when its wait began
        self._refused: list[Blocked] = []  # they ask again at the next tick, since there was no room

    def tick(self) -> None:
        """Let the clients ask again for which there was no room."""
        refused, self._refused = self._refused, []
        for pending in refused:
            pending.unblock(b"")

    def hold(self, session: Client, command: Command, args: list[Argument]) -> list[Lease] | Blocked | None:
        """Holds on what `command` reads, which the caller ends when it has run: until then the disk's threads take
        nothing of it away. Else the wait, after which it runs again; None when its client has waited long enough."""
        store = self._store
        if not store.away and store.keep and command.name != "exec":
            return []  # only this thread lets a block go
        names = values_read(session, command, shown(args))
        client = self._server.shm.of(session) if command.name == "kv.lease" else None
        if client is not None:
            if client.gpu is not None:
                names = client.gpu.elsewhere(names)
            names = names[: client.within_share([key for key, _ in names], session.space)]
        leases = [lease for name in names if (lease := store.peek(*name)) is not None]
        if len(leases) == len(names):
            return leases
        fitting = self._fitting(names)
        awaited = self.any_away(fitting)
        if not awaited and len(fitting) == len(names):
            return leases
        for lease in leases:
            lease.release()
        return self._wait(session, args, fitting) if awaited else None

    def wait(self, session: Client, args: list[Argument], names: Sequence[Name]) -> Blocked | None:
        """The wait of a command that has looked for `names` in vain. None when they are nowhere or longer than memory,
        when the client has waited long enough, and within a transaction, whose commands do not wait."""
        names = self._fitting(names)
        if session.transaction is not None or all(self._store.find(*name) is None for name in names):
            return None
        return self._wait(session, args, names)  # also for one that has come since it was looked for

    def any_away(self, names: Iterable[Name]) -> bool:
        """Whether one of these blocks is there, but not in memory."""
        find = self._store.find
        return any((entry := find(*name)) is not None and not entry.is_resident for name in names)

    def stream(self, session: Client, names: Sequence[Name]) -> Iterator[Blocked | None]:
        """For each of `names` None as soon as the block is in memory or cannot be had, before that the wait for it."""
        if session.transaction is not None:  # its commands do not wait: all of it was brought before
            yield from [None] * len(names)
            return
        for at in range(len(names)):
            since_s = self._server.now_s()
            while self.any_away(self._fitting(names[at : at + 1])) and self._server.now_s() - since_s < WAIT_S:
                now, following = self._portions(names, at)
                pending = session.wait(Reason.DISK_READ)
                self._bring(session, pending, now)
                self._send_for(following)
                yield pending
            yield None

    def forget(self, session: Client) -> None:
        """Forget a client that has gone."""
        self._since.pop(session, None)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _fitting(self, names: Iterable[Name]) -> list[Name]:
        """`names` without the blocks that memory could not hold if it were empty."""
        find, most_bytes = self._store.find, self._store.arena.nbytes
        return [name for name in names if (entry := find(*name)) is None or extent_length(entry.length) <= most_bytes]

    def _wait(self, session: Client, args: list[Argument], names: Sequence[Name]) -> Blocked | None:
        """Have `args` run again when these blocks are there; None when that has taken long enough."""
        now_s = self._server.now_s()
        whose, since_s = self._since.get(session, (None, now_s))
        if whose is args and now_s - since_s >= WAIT_S:
            return None  # however often it is asked about this command
        self._since[session] = args, (since_s if whose is args else now_s)
        pending = session.postpone(args, session.wait(Reason.DISK_READ))
        self._bring(session, pending, names)
        for upcoming in islice(session.upcoming(), 1, AHEAD_COMMANDS):
            if upcoming[0] in (b"GET", b"get") and len(upcoming) == 2:
                self._send_for([(cast(bytes, upcoming[1]), session.space)])
        return pending

    def _portions(self, names: Sequence[Name], at: int) -> tuple[list[Name], list[Name]]:
        """From place `at` on what is to be brought at once, at least one block, and as much again."""
        portion_bytes = self._store.arena.nbytes // AHEAD_PART
        now: list[Name] = []
        following: list[Name] = []
        taken_bytes = 0
        for name in names[at:]:
            entry = self._store.find(*name)
            taken_bytes += 0 if entry is None else extent_length(entry.length)
            if not now or taken_bytes <= portion_bytes:
                now.append(name)
            elif taken_bytes <= 2 * portion_bytes:
                following.append(name)
            else:
                break
        return now, following

    def _send_for(self, names: Iterable[Name]) -> None:
        """Have blocks brought in, without waiting for them."""
        below = self._store.below
        assert below is not None
        for name in names:
            below.promote(*name, _ignore)

    def _bring(self, session: Client, pending: Blocked, names: Iterable[Name]) -> None:
        """Have `pending` resolved when these blocks are in memory."""
        below, loop = self._store.below, asyncio.get_running_loop()
        assert below is not None

        def brought(what: Bringing) -> None:  # in an I/O thread
            tell_loop(loop, pending.guard, self._come, session, pending, what)

        def give_up() -> None:
            if bringing is not None:
                bringing.release()

        pending.on_cancel = give_up
        bringing = below.bring(names, brought)
        if bringing is None:
            loop.call_soon(pending.unblock, b"")

    def _come(self, session: Client, pending: Blocked, bringing: Bringing) -> None:
        if bringing.refused:
            bringing.release()  # or two clients that hold half of what they want wait for each other
            self._refused.append(pending)
            return
        try:
            pending.unblock(b"")
        finally:
            # The client's command runs in the loop's next turn, which `unblock` has asked for, this right after it.
            asyncio.get_running_loop().call_soon(self._release, session, bringing)

    def _release(self, session: Client, bringing: Bringing) -> None:
        bringing.release()
        if session.waiting is None:
            self._since.pop(session, None)


def _ignore(transfer: Transfer[None]) -> None:
    """What is called when a block has come that was sent for in advance."""


def values_read(session: Client, command: Command, words: list[bytes]) -> list[Name]:
    """The blocks whose bytes a command's handler will look at."""
    if command.name == "exec":
        return list(_read_in_transaction(session))
    if command.name == "mget":  # which waits between two values
        return []
    return [(key, session.space) for key in _keys_read(command, words)]


def _read_in_transaction(session: Client) -> Iterator[Name]:
    """What is read between MULTI and EXEC, by the names that the blocks have before."""
    transaction, space = session.transaction, session.space
    if transaction is None or transaction.broken:
        return
    was = list(range(SPACES))  # which database each number stands for: SWAPDB
    renamed: dict[Name, Name] = {}  # the block that will have a name by the one that it has
    for queued, args in transaction.commands:
        words = shown(args)
        if queued.name == "select":
            space = _database(words[1], space)
        elif queued.name == "swapdb":
            one, other = (_database(word, -1) for word in words[1:])
            if one >= 0 and other >= 0:
                was[one], was[other] = was[other], was[one]
        elif queued.name in RENAMING:
            old = words[1], was[space]
            new = (words[1], was[_database(words[2], space)]) if queued.name == "move" else (words[2], was[space])
            renamed[new] = renamed.get(old, old)
        for key in _keys_read(queued, words):
            name = key, was[space]
            yield name
            if name in renamed:
                yield renamed[name]


def _database(word: bytes, otherwise: int) -> int:
    number = parse_integer(word)
    return number if number is not None and 0 <= number < SPACES else otherwise


def _keys_read(command: Command, words: list[bytes]) -> list[bytes]:
    if not command.reads or (command.name == "set" and b"GET" not in [word.upper() for word in words[3:]]):
        return []
    first, last, step = command.reads
    return words[first : len(words) if last < 0 else last + 1 : step]
