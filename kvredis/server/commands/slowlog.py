"""SLOWLOG: the last commands that took longer than `slowlog-log-slower-than` microseconds.

An entry keeps what Redis keeps of a command: 32 arguments of 128 bytes. It holds copies of those bytes and nothing
else, so neither a payload nor a client is kept alive by having been slow.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol, TypeVar

from kvredis.server.client.client import Client, ClientOf, Host
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import OK, Reply, array, bulk, bulks, error, integer
from kvredis.storage.entry import Reservation

from .command import help_reply
from .registry import container, subcommand

# ---- redaction -------------------------------------------------------------------------------------------------------
#
# What of a client's own words SLOWLOG and MONITOR may repeat: never a password, and never a whole payload.
#
# As in Redis, what is hidden is decided by the command's form alone: a password that was wrong, or an AUTH that failed,
# stays hidden as well.


T = TypeVar("T")

REDACTED = b"(redacted)"

SECRET_SETTINGS = frozenset(
    {b"requirepass", b"masterauth", b"masteruser", b"tls-key-file-pass", b"tls-client-key-file-pass"}
)
"""What CONFIG SET may be given that no other client may read."""


def redacted(args: Sequence[T]) -> list[T | bytes]:
    """`args` with REDACTED in the place of each secret; arguments that are not bytes are left as they are."""
    words: list[T | bytes] = list(args)
    for at in _secret_places(args):
        words[at] = REDACTED
    return words


def excerpt(arg: object, length_max: int) -> tuple[bytes, int]:
    """The first `length_max` bytes of an argument, and how long it is in all; (b"", 0) for a payload that was refused.

    A payload must be asked for before anything else may be given its memory: before its command runs or right after.
    """
    if isinstance(arg, bytes):
        return arg[:length_max], len(arg)
    if not isinstance(arg, Reservation):
        return b"", 0
    try:
        return bytes(arg.view[:length_max]), arg.length
    except ValueError:  # the hold has ended and its view with it
        return b"", arg.length


def _secret_places(args: Sequence[object]) -> Sequence[int]:
    """The places of the arguments that are secret."""
    name = _word(args, 0)
    if name == b"auth":
        return range(1, len(args))
    if name == b"hello":
        return _behind(args, b"auth", 2, first=2)
    if name == b"migrate":
        return [*_behind(args, b"auth", 1, first=6), *_behind(args, b"auth2", 2, first=6)]
    if name == b"acl" and _word(args, 1) in (b"setuser", b"deluser", b"getuser"):
        return range(2, len(args))
    if name == b"config" and _word(args, 1) == b"set":
        return [at + 1 for at in range(2, len(args) - 1, 2) if _word(args, at) in SECRET_SETTINGS]
    return ()


def _word(args: Sequence[object], at: int) -> bytes:
    """An argument in lower case; nothing if there is none or if it is a payload."""
    arg = args[at] if at < len(args) else b""
    return arg[:64].lower() if isinstance(arg, bytes) else b""


def _behind(args: Sequence[object], option: bytes, count: int, first: int) -> list[int]:
    """The places of the `count` arguments behind each `option`."""
    found: list[int] = []
    for at in range(first, len(args)):
        if _word(args, at) == option:
            found += range(at + 1, min(at + 1 + count, len(args)))
    return found


ARGS_MAX: Final = 32
ARG_BYTES_MAX: Final = 128
NEVER_NS: Final = 2**63
"""The threshold of a slow log that is switched off: nothing takes that long."""

ENTRIES_SHOWN: Final = 10
"""What SLOWLOG GET without a count returns at most."""


@dataclass(frozen=True, slots=True)
class SlowCommand:
    """One entry: when it ended (Unix seconds), how long it took, what it was and whose."""

    id: int
    unix_s: int
    microseconds: int
    args: tuple[bytes, ...]
    addr: bytes
    name: bytes


class SlowLog:
    """The newest `entries_max` slow commands. `threshold_ns` is what a command must reach to be one.

    The session compares with `threshold_ns` itself before it calls `note`, which compares once more.
    """

    def __init__(self, threshold_us: int = 10_000, entries_max: int = 128) -> None:
        self.threshold_ns = 0
        self.set_threshold(threshold_us)
        self.entries: deque[SlowCommand] = deque()  # newest first
        self.entries_max = entries_max
        self._next_id = 0

    def set_threshold(self, microseconds: int) -> None:
        """slowlog-log-slower-than: 0 logs everything, a negative number nothing."""
        self.threshold_ns = NEVER_NS if microseconds < 0 else microseconds * 1000

    @property
    def threshold_us(self) -> int:
        """The threshold as CONFIG GET shows it: -1 is off."""
        return -1 if self.threshold_ns == NEVER_NS else self.threshold_ns // 1000

    def note(self, session: Client, args: Sequence[object], nanoseconds: int) -> None:
        """Keep a command that has just run, if it was slow enough. `args` may hold Reservations: see `excerpt`."""
        if nanoseconds < self.threshold_ns or not self.entries_max:
            return
        self.entries.appendleft(
            SlowCommand(
                self._next_id,
                int(time.time()),
                nanoseconds // 1000,
                kept_args(args),
                session.addr.encode("utf-8", "surrogateescape"),
                session.name,
            )
        )
        self._next_id += 1
        self.trim()

    def trim(self) -> None:
        """Drop the oldest entries beyond `entries_max`."""
        while len(self.entries) > self.entries_max:
            self.entries.pop()

    def reset(self) -> None:
        """Drop all entries; ids go on."""
        self.entries.clear()


def kept_args(args: Sequence[object]) -> tuple[bytes, ...]:
    """A command's arguments as the slow log keeps them: redacted, cut, and no more than ARGS_MAX."""
    words = redacted(args[: ARGS_MAX + 1] if len(args) > ARGS_MAX else args)
    if len(args) <= ARGS_MAX:
        return tuple(map(_kept, words))
    more = b"... (%d more arguments)" % (len(args) - ARGS_MAX + 1)
    return (*map(_kept, words[: ARGS_MAX - 1]), more)


def _kept(arg: object) -> bytes:
    """The first bytes of an argument and how many more there were."""
    head, length = excerpt(arg, ARG_BYTES_MAX)
    return head if length <= ARG_BYTES_MAX else b"%b... (%d more bytes)" % (head, length - ARG_BYTES_MAX)


container(
    "slowlog",
    group="server",
    since="2.2.12",
    complexity="Depends on subcommand.",
    summary="Commands that were slow.",
)


class _Server(Host, Protocol):
    slowlog: SlowLog


Caller = ClientOf[_Server]

_ADMIN = {"flags": "admin loading stale", "acl": "admin slow dangerous"}


@subcommand(
    "slowlog|get",
    arity=-2,
    since="2.2.12",
    tips="request_policy:all_nodes nondeterministic_output",
    complexity="O(N) where N is the number of entries returned",
    syntax="[count]",
    summary="The newest slow commands: id, time, microseconds, arguments, address and name of the client.",
    **_ADMIN,
)
def slowlog_get(session: Caller, args: list[bytes]) -> Reply:
    """SLOWLOG GET [count]; -1 is all of them."""
    if len(args) > 3:
        return error("ERR unknown subcommand or wrong number of arguments for 'GET'. Try SLOWLOG HELP.")
    count = parse_integer(args[2]) if len(args) == 3 else ENTRIES_SHOWN
    if count is None or count < -1:
        return error("ERR count should be greater than or equal to -1")
    entries = session.server.slowlog.entries
    return array(
        [
            array(
                [
                    integer(entry.id),
                    integer(entry.unix_s),
                    integer(entry.microseconds),
                    bulks(entry.args),
                    bulk(entry.addr),
                    bulk(entry.name),
                ]
            )
            for entry in islice(entries, len(entries) if count == -1 else min(count, len(entries)))
        ]
    )


@subcommand(
    "slowlog|len",
    arity=2,
    since="2.2.12",
    tips="request_policy:all_nodes response_policy:agg_sum nondeterministic_output",
    summary="How many slow commands are kept.",
    **_ADMIN,
)
def slowlog_len(session: Caller, args: list[bytes]) -> Reply:
    """SLOWLOG LEN."""
    return integer(len(session.server.slowlog.entries))


@subcommand(
    "slowlog|reset",
    arity=2,
    since="2.2.12",
    tips="request_policy:all_nodes response_policy:all_succeeded",
    complexity="O(N) where N is the number of entries",
    summary="Forget the slow commands.",
    **_ADMIN,
)
def slowlog_reset(session: Caller, args: list[bytes]) -> Reply:
    """SLOWLOG RESET."""
    session.server.slowlog.reset()
    return OK


@subcommand("slowlog|help", arity=2, flags="loading stale", acl="slow", since="6.2.0", summary="Print this help.")
def slowlog_help(session: Caller, args: list[bytes]) -> Reply:
    """SLOWLOG HELP."""
    return help_reply("slowlog")
