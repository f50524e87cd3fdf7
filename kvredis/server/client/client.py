"""A client, as commands and the server's parts see it: what they may read, set and call.

The session (session.py) is the only implementation in the product. Commands, ACL, cluster, tracking and the rest are
written against this protocol and import no session, so that the session can import them. Attributes that are not named
here belong to the session alone: its parser, transport, gathered replies and leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from kvredis.server.protocol.replies import Reply
from kvredis.server.protocol.request import Argument, ProtocolError
from kvredis.storage.entry import Lease, Reservation
from kvredis.storage.store import Store

if TYPE_CHECKING:
    from kvredis.server.acl.rules import User
    from kvredis.server.commands.registry import Command
    from kvredis.server.commands.tracking import Tracking
    from kvredis.server.commands.transactions import Transaction
    from kvredis.server.server import Server

    from .blocked import Answer, Pending
    from .memory import Held

NO_NAMES: Final = cast("set[Any]", frozenset())
"""What a client watches or listens to that does neither, as most: who adds a name makes a set first."""


class Client(Protocol):
    """One connection and its state. Times are seconds of the monotonic clock."""

    # ---- who it is

    server: Server
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

    waiting: Pending | None
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
        """Find out anew whether this client's commands may take the plain way, and what its parser allows."""

    def speak(self, resp: int) -> None:
        """Switch to RESP2 or RESP3."""

    def authenticate(self, user: User) -> None:
        """The client has proved to be `user`."""

    def forget_authentication(self) -> None:
        """Back to a new connection's rights."""

    def refuse_payload(self, why: bytes) -> None:
        """A payload of the command that is being read is not taken."""

    def wait(self) -> Pending:
        """Take the place of a reply that comes later."""

    def turns_for_others(self) -> Iterator[Pending]:
        """Give what a long handler yields between two of its steps, so that other clients have their turn."""

    def go_on(self, reply: Reply) -> None:
        """A reply that was waited for is there."""

    def postpone(self, args: list[Argument], pending: Pending | None = None) -> Pending:
        """Run `args` again when the server resolves what this gives, with an empty reply."""

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

    def rest(self) -> None:
        """Called every second or so, and when the client has sent its last byte."""

    def account(self, command: Command | None, calls: int, began_ns: int) -> int:
        """Enter a run of calls into the statistics."""

    def count_failure(self, command: Command | None, reply: bytes) -> None:
        """Note that a handler has answered with an error."""

    @staticmethod
    def give_back(args: list[Argument]) -> None:
        """End the holds of a command that will not run."""

    def apologize(self, args: list[Argument]) -> bytes:
        """A handler has raised, which is a mistake of ours."""

    def fail(self, broken: ProtocolError) -> None:
        """The protocol is broken."""

    def hold(self, lease: Lease) -> None:
        """Keep a lease whose view is part of the reply being made until that reply has left the process."""

    def push(self, message: bytes) -> None:
        """Send an encoded message that answers no command."""

    def drop_lent(self, since: int) -> None:
        """End the holds taken since there were `since` of them."""

    @property
    def lent(self) -> int:
        """How many leases are behind what is not sent yet."""

    def begin_answer(self) -> None:
        """A command runs now."""

    def end_answer(self, reply: Answer) -> Answer:
        """The reply with what was pushed meanwhile."""

    def close(self) -> None:
        """Hang up now."""

    def finish(self) -> None:
        """Hang up once what is queued has been sent."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the client has not taken yet."""

    @property
    def is_caught_up(self) -> bool:
        """Whether every reply before the one being made has left the process."""

    @property
    def slow_since_s(self) -> float:
        """Since when this client has kept blocks leased by not reading; infinity if it does not."""

    def peer_pid(self) -> int:
        """The process that has connected, of a client on a unix socket."""
