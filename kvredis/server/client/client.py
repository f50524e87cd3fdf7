"""A client as commands and the server's parts see it: its state, and what they may ask of it.

The session (session.py) is the only implementation in the product. ACL, cluster, tracking, admission and the rest are
written against Client, and against Host for the server that they are parts of; commands against `Caller` (context.py),
which is a client with its server. None of them imports the session or the server, which import them. Attributes that
are not named here belong to the session alone: its parser, transport, gathered replies and leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

from kvredis.server.acl.rules import User
from kvredis.server.commands.registry import Command
from kvredis.server.metrics.stats import ServerStats
from kvredis.server.options import ServerOptions
from kvredis.server.protocol.parser import Scratches
from kvredis.server.protocol.replies import Reply
from kvredis.server.protocol.request import ARGUMENT_BYTES, Argument, ProtocolError
from kvredis.storage.entry import Lease, Reservation
from kvredis.storage.store import Store

from .blocked import Answer, Blocked, BlockedClients, Reason

NO_NAMES: Final = cast("set[Any]", frozenset())
"""What a client watches or listens to that does neither, as most: code that adds a name makes a set first."""

OBJECTS_BYTES: Final = 8 * 1024
"""What a connection costs without its buffers: the session, its parser and the loop's transport."""

WATCHED_BYTES: Final = 128
"""What a watched key or a subscription costs beside its name: Redis does not count the name either."""


class Held(NamedTuple):
    """Bytes that one client holds, by the names of CLIENT LIST."""

    qbuf: int = 0
    """Received and not yet made into arguments."""
    qbuf_free: int = 0
    argv: int = 0
    """Arguments of the command being received, and of those that wait to be run."""
    multi: int = 0
    """Commands queued in a transaction, and what is watched."""
    rbs: int = 0
    """Replies that are gathered and not yet handed to the socket."""
    omem: int = 0
    """Replies and messages that the socket has not taken yet."""
    subscribed: int = 0
    reserved: int = 0
    """Room for values that come in parts (KV.RESERVE)."""
    arena: int = 0
    """What of all that lies in the arena, where it counts as a value that comes in or goes out."""

    @property
    def buffered(self) -> int:
        """All that grows with what the client does."""
        sent = self.rbs + self.omem
        return self.qbuf + self.argv + self.multi + sent + self.subscribed + self.reserved

    @property
    def total(self) -> int:
        """`tot-mem`: that, and what every connection costs."""
        return self.buffered + self.qbuf_free + OBJECTS_BYTES

    @property
    def beside(self) -> int:
        """What `used_memory` has for a client in addition to the values."""
        return max(0, self.buffered - self.arena)


class Transaction:
    """What a client has queued since MULTI."""

    __slots__ = ("arena_bytes", "broken", "commands", "held_bytes")

    def __init__(self) -> None:
        self.commands: list[tuple[Command, list[Argument]]] = []
        self.broken = False
        """A command was refused when it should have been queued, so EXEC will run none."""
        self.held_bytes = self.arena_bytes = 0
        """What the arguments take: `multi-mem` of CLIENT LIST; and how much of it lies in the arena."""

    def queue(self, queued: Command, args: list[Argument]) -> None:
        """Remember a command for EXEC, with all that it holds; nothing, as in Redis, when EXEC will run none."""
        if self.broken:
            for arg in args:
                if isinstance(arg, Reservation):
                    arg.abort()
            return
        self.commands.append((queued, args))
        for arg in args:
            if isinstance(arg, bytes):
                self.held_bytes += len(arg)
            elif isinstance(arg, Reservation):
                self.held_bytes += arg.length
                self.arena_bytes += 0 if arg.offset is None else arg.length
        self.held_bytes += ARGUMENT_BYTES * len(args)

    @property
    def reservations(self) -> list[Reservation]:
        """The room that queued values hold."""
        return [arg for _, args in self.commands for arg in args if isinstance(arg, Reservation)]

    @property
    def writes(self) -> bool:
        """Whether EXEC would change something: CLIENT PAUSE WRITE asks."""
        return any("write" in queued.flags or "may_replicate" in queued.flags for queued, _ in self.commands)

    def discard(self) -> None:
        """Give back what the queue holds."""
        for reservation in self.reservations:
            reservation.abort()
        self.commands.clear()


@dataclass(slots=True)
class Tracking:
    """How one client has its copies kept true: `session.tracking`."""

    redirect: int = 0
    """The client that invalidations go to, 0 for itself."""
    broadcast: bool = False
    optin: bool = False
    optout: bool = False
    noloop: bool = False
    caching: bool = False
    """CLIENT CACHING has been said and speaks of the next command."""
    broken: bool = False
    """The client that invalidations should go to was gone when there was one."""
    prefixes: set[bytes] = field(default_factory=set)


class Client(Protocol):
    """One connection and its state. Times are seconds of the monotonic clock."""

    # ---- who it is

    store: Store
    id: int
    name: bytes
    lib_name: bytes
    lib_ver: bytes
    addr: str
    laddr: str
    fd: int
    kind: str
    encrypted: bool
    is_local_stream: bool
    user: User
    authenticated: bool
    said_hello: bool

    # ---- what it has chosen

    space: int
    """Number of the database."""
    resp: int
    nil: bytes
    reply_mode: str
    no_evict: bool
    no_touch: bool
    fetch: Callable[[bytes, int], bytes | Lease | None]
    asked_to_splice: bool
    splices: bool

    # ---- transactions, subscriptions, tracking

    transaction: Transaction | None
    watching: set[tuple[int, bytes]]
    watch_broken: bool
    watched_alive: set[tuple[int, bytes]]
    channels: set[bytes]
    patterns: set[bytes]
    shard_channels: set[bytes]
    subscriptions: int
    tracking: Tracking | None
    observed: bool

    # ---- what it does

    waiting: Blocked | None
    refused: bytes
    unsaved_since: int
    close_after_reply: bool
    at_end: list[Callable[[], None]]
    created_s: float
    last_command_s: float
    last_command: str
    input_bytes: int
    output_bytes: int
    reads: int
    writes: int

    # ---- what it can be asked

    def reconsider(self) -> None:
        """Find out anew whether this client's commands may take the fast path, and what its parser allows."""

    def speak(self, resp: int) -> None:
        """Switch to RESP2 or RESP3: HELLO."""

    def authenticate(self, user: User) -> None:
        """Make the client `user`, which it has proved to be."""

    def forget_authentication(self) -> None:
        """Give back a new connection's rights: RESET."""

    def refuse_payload(self, why: bytes) -> None:
        """Take no payload of the command that is being read; `why` is its error, should nothing else be wrong."""

    def wait(self, reason: Reason = Reason.COMMAND) -> Blocked:
        """Make what takes the place of a reply that comes later; the caller returns it."""

    def turns_for_others(self) -> Iterator[Blocked]:
        """Give what a long handler yields between two of its steps, so that other clients have their turn: a wait until
        the loop's next turn, or nothing in a transaction, whose commands run without a gap."""

    def go_on(self, reply: Reply) -> None:
        """Take a reply that was waited for: Blocked alone calls it. What follows runs in a turn of its own, because the
        code that answers may be in the middle of another client's command."""

    def postpone(self, args: list[Argument], pending: Blocked) -> Blocked:
        """Run `args` again when `pending` is unblocked, with an empty reply; the caller returns it."""

    def upcoming(self) -> Iterator[list[Argument]]:
        """The commands that are parsed and not yet run, in their order."""

    @property
    def pending_bytes(self) -> int:
        """Bytes received and not yet run."""

    def held(self) -> Held:
        """What this client holds beside values, by kind."""

    @property
    def reservations(self) -> list[Reservation]:
        """Room in the arena that this client holds for values that come in one command and are not yet stored."""

    @property
    def is_receiving(self) -> bool:
        """Whether a value is coming in, which a shutdown waits for as it does for replies that go out."""

    @property
    def may_be_idle(self) -> bool:
        """Whether a client that says nothing for long may be taken for forgotten."""

    def count_received(self) -> None:
        """Count in `input_bytes` what a thread has received by now, if one does."""

    def rest(self) -> None:
        """Take what lies unread below the low water mark: called about once a second, and when the client has sent its
        last byte."""

    def describe(self) -> bytes:
        """One line of CLIENT LIST."""

    def call(self, command: Command, args: list[Argument]) -> Answer:
        """Run a command that may run, and tell of it: EXEC, for each that was queued."""

    def account(self, command: Command | None, calls: int, began_ns: int) -> int:
        """Enter a run of calls into the statistics; returns the time now, in ns."""

    def count_failure(self, command: Command | None, reply: bytes) -> None:
        """Note that a handler has answered with an error."""

    @staticmethod
    def give_back(args: list[Argument]) -> None:
        """End the holds of a command that will not run."""

    def apologize(self, args: list[Argument]) -> bytes:
        """Answer for a handler that has raised, which is a mistake of ours: nothing that it brought may stay reserved,
        and the client, whose state the server does not know now, is disconnected. The others are served on."""

    def fail(self, broken: ProtocolError) -> None:
        """Answer a client that has broken the protocol, if there is something to say, and hang up."""

    def hold(self, lease: Lease) -> None:
        """Keep a lease whose view is part of the reply being made until that reply has left the process."""

    def push(self, message: bytes) -> None:
        """Send an encoded message that answers no command: after the replies before it, at once to an idle client."""

    def drop_lent(self, since: int) -> None:
        """End the leases taken since there were `since` of them: those of a reply that will not be sent."""

    @property
    def lent(self) -> int:
        """How many leases are behind what is not sent yet."""

    def begin_answer(self) -> None:
        """Note that a command runs now: what is pushed to this client meanwhile goes behind its reply."""

    def end_answer(self, reply: Answer) -> Answer:
        """Give the reply with what was pushed meanwhile; of one that comes later, or in parts, it goes by itself."""

    def close(self) -> None:
        """Hang up now; what is not sent is lost."""

    def finish(self) -> None:
        """Hang up once what is queued has been sent."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the client has not taken yet: `omem` of CLIENT LIST."""

    @property
    def is_caught_up(self) -> bool:
        """Whether every reply before the one being made has left the process."""

    @property
    def slow_since_s(self) -> float:
        """Since when this client has kept blocks of the arena leased by not reading that hanging up on it would free;
        infinity if it does not. What was spliced outlasts the connection."""

    def peer_pid(self) -> int:
        """The process that has connected, of a client on a unix socket."""


class Host(Protocol):
    """What any part of a server may ask of it: the store, the clock, the clients. What else a part needs it names in a
    protocol of its own."""

    store: Store
    options: ServerOptions
    stats: ServerStats
    sessions: dict[int, Client]
    blocked: BlockedClients
    scratches: Scratches
    settings: dict[str, str]
    now_s: Callable[[], float]
    body_timeout_s: float

    def reconsider(self) -> None:
        """Let each client find out anew whether its commands may take the fast path."""


S_co = TypeVar("S_co", covariant=True)


class ClientOf(Client, Protocol[S_co]):
    """A client with its server, of which S names what the code that asks needs."""

    @property
    def server(self) -> S_co:
        """The server that the client is connected to."""
