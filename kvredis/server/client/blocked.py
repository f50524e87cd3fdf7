"""Clients that wait: one state (`Client.waiting`, a Pending), five reasons, one unblock (`Pending.resolve`).

A reason is a class here, or a handler that calls `Client.wait`; each keeps its own clients and says when they go on:

    Pause      CLIENT PAUSE: until its end
    Away       blocks that are read and on disk: until they are in memory, WAIT_S at most
    DiskRoom   room that the disk is still to make: until a block has been written, `spill_wait` at most
    Claims     room that other clients' values have (admission.py): until they are stored or given up
    a handler  WAITAOF, SAVE, a copy out of lent memory: what it waits for calls `resolve`

To add a reason: make a Pending (`Client.wait` for a reply that comes later, `Client.postpone` for a command that has
done nothing yet and runs again), set `on_cancel` to forget a client that goes, and call `resolve` in the server's loop
(`tell_loop` from a thread). Bound the wait: in `tick`, which the server calls ten times a second, or by
`Pending.timer`. CLIENT UNBLOCK reaches only those in `server.blocked`. Silence finds clients that wait for nothing and
say nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from kvredis.server.commands.registry import Command, shown
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import Reply
from kvredis.server.protocol.request import LATER, Argument, Later
from kvredis.storage.entry import Lease, Reservation, extent_length
from kvredis.storage.index import SPACES
from kvredis.storage.tiering.manager import Bringing
from kvredis.storage.tiering.transfers import Transfer

from .client import Client

if TYPE_CHECKING:
    from kvredis.server.server import Server


log = logging.getLogger(__name__)

STEP_S: Final = 0.001
"""How long a handler works before others have their turn: as long as a client may have to wait for it."""

Answer: TypeAlias = "Reply | Pending | Iterator[Reply | Pending]"
"""What a handler returns: the reply, one that comes later, or one that is made while the client takes it, and that may
have to wait in between."""


class Pending:
    """The place of one reply in its session's pipeline. The session runs and reads nothing until `resolve`."""

    __slots__ = ("_session", "is_silent", "on_cancel", "runs_again", "timeout_reply", "timer")

    def __init__(self, session: Client) -> None:
        self._session: Client | None = session
        self.timeout_reply: Reply = b""
        """What CLIENT UNBLOCK answers in the name of a command whose time is over."""
        self.timer: asyncio.TimerHandle | None = None
        """When the time of this wait is over; it ends with the wait, or an hour's would be kept for an hour."""
        self.on_cancel: Callable[[], None] | None = None
        """Called when the client goes before it was answered."""
        self.runs_again = False
        """The command has done nothing yet and begins anew when this is resolved: Session.postpone."""
        self.is_silent = False
        """The client does not want the reply: CLIENT REPLY."""

    def resolve(self, reply: Reply) -> None:
        """Answer and let the session go on. A second call, or one after the client has gone, does nothing."""
        session = self._end()
        if session is not None:
            session.go_on(b"" if self.is_silent else reply)

    def guard(self, completion: Callable[..., object], *args: object) -> None:
        """Run what is to resolve this. If it raises, a mistake of ours, the client is told and sent away, as when a
        handler raises; it would wait for ever."""
        try:
            completion(*args)
        except BaseException:  # of the thread that has done the work too: SystemExit is not for the loop
            session = self._session
            if session is None:
                log.exception("what a client waited for that has gone has failed")
            else:
                self.resolve(session.apologize([session.last_command.encode()]))

    def cancel(self) -> None:
        """The client has gone."""
        if self._end() is not None and self.on_cancel is not None:
            self.on_cancel()

    def _end(self) -> Client | None:
        session, self._session = self._session, None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        return session


class StepTimer:
    """Tells a long handler when it has had the loop for STEP_S."""

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        self._until_s = perf_counter() + STEP_S

    def is_over(self) -> bool:
        """Whether a step has lasted long enough; the next one begins then."""
        now_s = perf_counter()
        if now_s < self._until_s:
            return False
        self._until_s = now_s + STEP_S
        return True


def tell_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Have `call` run on the server's loop; for other threads. A loop that is closed needs to be told nothing more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def has_hung_up(fd: int, *, wholly: bool) -> bool:
    """Whether the client behind a socket that is not read from, because it waits and much lies there, has gone.

    One that will send no more counts too, as it does with Redis; with `wholly` only one that takes nothing more either.
    """
    return any(not wholly or events & ~select.POLLRDHUP for _, events in events_of((fd,)))


def events_of(fds: Iterable[int]) -> list[tuple[int, int]]:
    """Give those of these sockets whose clients have gone, with what poll(2) says of them: POLLRDHUP alone of one that
    will send no more, but may still read."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLRDHUP)
    return poll.poll(0)


# ---- blocked on disk -------------------------------------------------------------------------------------------------
#
# Blocks that a command reads and that are on disk: its client waits for them here, in its place of the pipeline.
#
# Handlers know one memory. A command that reads values finds them there, because what the command names is brought in
# before it runs; who reads one value after the other and can wait in between (GET, MGET) asks here himself. A command
# that has waited runs again from its beginning, so that what has changed meanwhile is seen. The blocks are held until
# it has run.
#
# When there is no room for them, all of it being lent or written to, the client waits a bounded time. Then a command
# that only reads finds nothing, which is a miss, and one that would change a value is refused: it must not take what
# it cannot see for absent. No client waits for a block that is longer than all of memory, which was larger in an
# earlier run.


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


class Away:
    """The clients of one server that wait for blocks."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._store = server.store
        self._since: dict[Client, tuple[object, float]] = {}  # for which command, and when its wait began
        self._refused: list[Pending] = []  # who ask again at the next tick, since there was no room
        self._waits: set[Pending] = set()

    def tick(self) -> None:
        """Let those ask again for whom there was no room."""
        refused, self._refused = self._refused, []
        for pending in refused:
            self._resolve(pending)

    def hold(self, session: Client, command: Command, args: list[Argument]) -> list[Lease] | Pending | None:
        """Holds on what `command` reads, which the caller ends when it has run: until then the disk's threads take
        nothing of it away. Else the wait, after which it runs again; None when its client has waited long enough."""
        store = self._store
        if not store.away and store.keep and command.name != "exec":
            return []  # only this thread lets a block go
        names = values_read(session, command, shown(args))
        client = self._server.lane.of(session) if command.name == "kv.lease" else None
        if client is not None:
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

    def wait(self, session: Client, args: list[Argument], names: Sequence[Name]) -> Pending | None:
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

    def stream(self, session: Client, names: Sequence[Name]) -> Iterator[Pending | None]:
        """For each of `names` None as soon as the block is in memory or cannot be had, before that the wait for it."""
        if session.transaction is not None:  # its commands do not wait: all of it was brought before
            yield from [None] * len(names)
            return
        for at in range(len(names)):
            since_s = self._server.now_s()
            while self.any_away(self._fitting(names[at : at + 1])) and self._server.now_s() - since_s < WAIT_S:
                now, following = self._portions(names, at)
                pending = session.wait()
                self._bring(session, pending, now)
                self._send_for(following)
                yield pending
            yield None

    @property
    def waiting(self) -> int:
        """How many clients wait for a block."""
        return len(self._waits)

    def keeps_waiting(self, session: Client) -> bool:
        """Whether it is here that a client waits, so that an answer comes in any case."""
        return session.waiting in self._waits

    def forget(self, session: Client) -> None:
        """A client has gone."""
        self._since.pop(session, None)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _fitting(self, names: Iterable[Name]) -> list[Name]:
        """`names` without the blocks that memory could not hold if it were empty."""
        find, most_bytes = self._store.find, self._store.arena.nbytes
        return [name for name in names if (entry := find(*name)) is None or extent_length(entry.length) <= most_bytes]

    def _wait(self, session: Client, args: list[Argument], names: Sequence[Name]) -> Pending | None:
        """Have `args` run again when these blocks are there; None when that has taken long enough."""
        now_s = self._server.now_s()
        whose, since_s = self._since.get(session, (None, now_s))
        if whose is args and now_s - since_s >= WAIT_S:
            return None  # however often it is asked about this command
        self._since[session] = args, (since_s if whose is args else now_s)
        pending = session.postpone(args)
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
        tiering = self._store.tiering
        assert tiering is not None
        for name in names:
            tiering.promote(*name, _ignore)

    def _bring(self, session: Client, pending: Pending, names: Iterable[Name]) -> None:
        """Have `pending` resolved when these blocks are in memory."""
        tiering, loop = self._store.tiering, asyncio.get_running_loop()
        assert tiering is not None

        def brought(what: Bringing) -> None:  # in an I/O thread
            tell_loop(loop, pending.guard, self._come, session, pending, what)

        def give_up() -> None:
            self._waits.discard(pending)
            if bringing is not None:
                bringing.release()

        self._waits.add(pending)
        pending.on_cancel = give_up
        bringing = tiering.bring(names, brought)
        if bringing is None:
            loop.call_soon(self._resolve, pending)

    def _resolve(self, pending: Pending) -> None:
        self._waits.discard(pending)
        pending.resolve(b"")

    def _come(self, session: Client, pending: Pending, bringing: Bringing) -> None:
        if bringing.refused:
            bringing.release()  # or two who hold half of what they want wait for each other
            self._refused.append(pending)
            return
        try:
            self._resolve(pending)
        finally:
            # The client's command runs in the loop's next turn, which `resolve` has asked for, this right after it.
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


# ---- blocked on spill ------------------------------------------------------------------------------------------------
#
# Values that find the arena full of blocks which the disk is still to be given: whose turn it is when it has some.
#
# A client that stores waits, unread, until blocks have been written and can leave, in the order in which clients came,
# and for a bounded time each. Then the coldest leave unwritten for its value, and are counted. A disk that writes
# nothing at all keeps no client waiting a second time.


class DiskRoom:
    """Who waits for the disk of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._store = server.store
        self._waiting: OrderedDict[Client, tuple[float, Pending]] = OrderedDict()  # since when
        self._called: Client | None = None  # whose turn it is
        self._told = False  # the loop will hear of it that there is room

    def start(self) -> None:
        """The loop runs: let the disk say when it has made room."""
        loop = asyncio.get_running_loop()
        if self._store.tiering is not None:
            self._store.tiering.call_on_room(lambda: self._tell(loop))

    def reserve(self, session: Client, key: bytes, length: int) -> Reservation | Later | None:
        """Room for a value, LATER when the client waits, or None: there is none, however long one waits."""
        tiering = self._store.tiering
        if tiering is None or extent_length(length) > self._store.limit_bytes:
            return self._store.reserve(key, length, session.space)
        now_s = self._server.now_s()
        since_s, _ = self._waiting.get(session, (now_s, None))
        overdue = session in self._waiting and now_s - since_s >= tiering.spill_wait_s
        if overdue and self._store.unsaved:  # else it is not the disk that keeps the room
            tiering.waited_in_vain(since_s)
        patient = tiering.makes_room and tiering.spill_wait_s > 0 and not overdue
        room = None
        if not (patient and self._waiting and session not in (self._called, next(iter(self._waiting)))):
            room = self._store.reserve(key, length, session.space, drop=not patient)
        if room is None and patient:
            return self._wait(session, since_s)
        self._waiting.pop(session, None)
        self._called = None
        if self._waiting:  # there may be more
            self._tell(asyncio.get_running_loop())
        return room

    def keeps_waiting(self, session: Client) -> bool:
        """Whether it is here that a client waits."""
        return session in self._waiting

    def forget(self, session: Client) -> None:
        """A client has gone, or what it wanted to store."""
        if self._waiting.pop(session, None) is not None:
            self._next()

    def tick(self) -> None:
        """Let the first ask again, whose time may be over."""
        self._next()

    def __len__(self) -> int:
        return len(self._waiting)

    def _wait(self, session: Client, since_s: float) -> Later:
        tiering = self._store.tiering
        assert tiering is not None
        tiering.stats.spill_waits += session not in self._waiting
        if self._called is session:
            self._called = None
        session.waiting = pending = Pending(session)
        self._waiting[session] = since_s, pending  # one that has waited keeps its place
        return LATER

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        """There may be room; called by I/O threads too."""
        if self._waiting and not self._told:
            self._told = True
            tell_loop(loop, self._next)

    def _next(self) -> None:
        self._told = False
        while self._waiting:
            session, (_, pending) = next(iter(self._waiting.items()))
            if session.waiting is pending:
                self._called = session
                pending.resolve(b"")
                return
            del self._waiting[session]  # it was called and did not come


# ---- pause -----------------------------------------------------------------------------------------------------------
#
# CLIENT PAUSE: a pause stops a client at the first command that it concerns, which runs when the pause ends; until then
# nothing more is read from that client. While one lasts no key expires, as in Redis: a replica would not see it either.
# A command that looks for a key whose time has come does not find it.


class Pause:
    """Whether clients are paused, until when, and who is waiting for its end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.until_s = 0.0
        """0 = no pause."""
        self.writes_only = False
        self.waiting: list[Pending] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, milliseconds: int, *, writes_only: bool) -> None:
        """Pause. Of two pauses at once the later end counts and the stricter kind."""
        now_s = self._server.now_s()
        if self.until_s > now_s:
            writes_only = writes_only and self.writes_only
        self.until_s = max(self.until_s, now_s + milliseconds / 1000)
        self.writes_only = writes_only
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self.until_s - now_s, self.end)
        self._server.store.keep_expired = True
        self._server.reconsider()

    def end(self) -> None:
        """Let everybody go on, in the order in which they were stopped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.until_s = 0.0
        self._server.store.keep_expired = False
        self._server.reconsider()
        waiting, self.waiting = self.waiting, []
        for pending in waiting:
            pending.resolve(b"")

    def holds(self, session: Client, command: Command) -> bool:
        """Whether the command must wait for the end."""
        if not self.writes_only or "write" in command.flags or "may_replicate" in command.flags:
            return True
        return command.name == "exec" and session.transaction is not None and session.transaction.writes

    def postpone(self, session: Client, args: list[Argument]) -> Pending:
        """Stop a client at this command."""
        pending = session.postpone(args)
        self.waiting.append(pending)
        pending.on_cancel = lambda: self.waiting.remove(pending)
        return pending


# ---- timeout ---------------------------------------------------------------------------------------------------------
#
# Who has been silent for `timeout` seconds: no command has ended and, as in Redis, no byte has come or gone.
#
# WHY bytes count: over a slow line a value may take longer than that to come, and a reply to be taken. They are looked
# at every second or so, and only while there is a timeout, so that no read has to note when it was.


Seen = tuple[float, int, int, int]
"""Of one client: when its last command ended, bytes that have come, bytes handed out, and those not taken yet."""


class Silence:
    """What was last seen of each client."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Seen, float]] = {}  # and when bytes were last seen to have moved

    def longer_than(self, limit_s: float, sessions: Iterable[Client], now_s: float) -> list[Client]:
        """Those of all `sessions` that have been silent for so long; to be asked every second or so."""
        before, self._seen = self._seen, {}
        silent: list[Client] = []
        for session in sessions:
            now = session.last_command_s, session.input_bytes, session.output_bytes, session.unsent_bytes
            then, moved_s = before.get(session.id, (now, session.last_command_s))
            if now != then and now[0] == then[0]:  # or it was a command, which says itself when that was
                moved_s = now_s
            self._seen[session.id] = now, moved_s
            if max(moved_s, session.last_command_s) < now_s - limit_s:
                silent.append(session)
        return silent
