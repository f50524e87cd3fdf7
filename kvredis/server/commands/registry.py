"""The command table: every command is one record, and whatever is said about commands is read from it.

Dispatch, arity errors, COMMAND, ACL's categories, INFO commandstats, the reference in docs/ and the parser's question
"may this argument be received straight into the arena?" all use the same `Command`.

To add a command: decorate its handler with `command` (or `subcommand`) in the file of its group. The handler takes the
client (`Caller`, context.py) and the arguments, and returns a reply (protocol/replies.py) or, when it must wait, a
Blocked (client/blocked.py). `Command` below explains the fields. The name of a new file goes into FAMILIES of
commands/__init__.py, which imports them all; this file alone leaves the table empty.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

from kvredis.server.client.blocked import Answer
from kvredis.server.protocol import _hot
from kvredis.server.protocol.replies import Reply, error
from kvredis.server.protocol.request import Argument

Handler: TypeAlias = Callable[[Any, list[bytes]], Answer]
"""The first argument is the client that calls. Each family says what it needs of one: Client, Caller or ClientOf."""

PLAIN_ARGS_MAX = _hot.PLAIN_ARGS_MAX
"""Of commands that change something; a lookup of thousands of keys still takes but a millisecond."""
QUICK = frozenset({"set", "setex", "psetex", "getrange", "mset"})
"""O(1) here, though Redis does not call them fast."""

NEVER_PLAIN = frozenset({"no_auth", "pubsub", "admin", "blocking"})
"""Flags of commands that change who the client is, speak to others, or wait."""

H = TypeVar("H", bound=Handler)

ECHO_BYTES_MAX = 128
"""How much of a client's own words an "unknown command" error repeats."""


@dataclass(frozen=True, slots=True)
class Command:
    """What one command is. `name` is lower case, `client|id` for a subcommand.

    arity: the number of arguments with the name itself; negative means at least that many.
    keys: first and last argument that is a key and the step between them, (0, 0, 0) for none; last -1 is the end.
    behind_keys: options that may stand behind keys which go on to the end, and how many words belong to each.
    reads: the keys whose values the handler looks at, in the same notation, () for none: they are brought into memory
        before it runs.
    waits: the handler itself waits for them.
    payload_args: (first, step) of the arguments that may be received straight into the arena (SET is (2, 0): just the
        one; MSET is (2, 2): every second one from there), () for none.
    access: what the command does with its keys, in the words of Redis' key specifications; `|` stands between what it
        does with the first and with the second; `notes`: what Redis says of it beside that.
    syntax: the arguments in the notation of Redis' help; COMMAND DOCS is made from it.
    plain: how many arguments a call may have that takes the session's fast path: short, O(1), without subcommand,
        and of no concern to the connection or other clients. All other calls go through process_command.
    """

    name: str
    arity: int
    handler: Handler
    flags: tuple[str, ...] = ()
    keys: tuple[int, int, int] = (0, 0, 0)
    categories: tuple[str, ...] = ()
    behind_keys: Mapping[bytes, int] = field(default_factory=dict)
    reads: tuple[int, int, int] | tuple[()] = ()
    waits: bool = False
    payload_args: tuple[int, int] | tuple[()] = ()
    group: str = "generic"
    since: str = "1.0.0"
    summary: str = ""
    complexity: str = "O(1)"
    syntax: str = ""
    access: tuple[str, ...] = ()
    notes: str = ""
    tips: tuple[str, ...] = ()
    subcommands: dict[str, Command] = field(default_factory=dict)
    plain: range = range(0)
    writes: bool = False
    """It may change values: one of its flags says so."""

    @property
    def held_up(self) -> bool:
        """Whether it is not run before what it reads is in memory."""
        return bool(self.reads) and not self.waits


COMMANDS: dict[bytes, Command] = {}
"""Every command once, by its name in upper case."""

SPELLINGS: dict[bytes, Command] = {}
"""The same by upper-case and by lower-case name: what the session's hot path asks before `lookup`."""


def command(name: str, *, arity: int, **facts: object) -> Callable[[H], H]:
    """Register the decorated function as `name`. `facts` are Command's fields; `flags`, `acl` (its categories),
    `access` and `tips` are given as words in one string, `payload` as payload_args."""

    def register(handler: H) -> H:
        _add(_describe(name, arity, handler, facts))
        return handler

    return register


def subcommand(full_name: str, *, arity: int, **facts: object) -> Callable[[H], H]:
    """The same for `container|name`; the container must have been registered before."""

    def register(handler: H) -> H:
        container, _, name = full_name.partition("|")
        parent = COMMANDS[container.upper().encode()]
        parent.subcommands[name] = _describe(full_name, arity, handler, {"group": parent.group, **facts})
        return handler

    return register


def container(name: str, **facts: object) -> None:
    """Register a command that consists of its subcommands only."""
    _add(_describe(name, -2, _never, {"acl": "slow", **facts}))


def lookup(args: list[bytes]) -> Command | bytes:
    """The command (or subcommand) that `args` call for, or the error that Redis would answer.

    The session may take `SPELLINGS.get(args[0])` itself and come here only for None, for a command with subcommands and
    for one whose arity does not fit.
    """
    found = SPELLINGS.get(args[0]) or COMMANDS.get(args[0].upper())
    if found is None:
        return unknown_command(args)
    argc = len(args)
    if found.subcommands and argc > 1:
        part = found.subcommands.get(args[1].lower().decode("latin-1"))
        if part is None:
            name = found.name.upper()
            return error(b"ERR unknown subcommand '%b'. Try %b HELP." % (_c_string(args[1]), name.encode()))
        found = part
    if argc != found.arity and (found.arity > 0 or argc < -found.arity):
        return wrong_arity(found.name)
    return found


def takes_payload(name: bytes) -> bool:
    """Whether a command's arguments may be received into the arena."""
    found = SPELLINGS.get(name) or SPELLINGS.get(name.upper())
    return found is not None and bool(found.payload_args)


def keys_end(options: Mapping[bytes, int], args: Sequence[object]) -> int:
    """Where the keys of a line end that has options behind them: what reads like one, from the end on, is one. The
    first key is a key whatever it reads like."""
    end = len(args)
    while end > 2:
        for words in (1, 2):
            option = args[end - words] if end - words >= 2 else b""
            if isinstance(option, bytes) and options.get(option.upper(), -1) == words - 1:
                end -= words
                break
        else:
            break
    return end


def shown(args: list[Argument]) -> list[bytes]:
    """A command's arguments for a caller that only decides: in place of a payload there is nothing."""
    if isinstance(args[0], bytes) and not takes_payload(args[0]):
        return cast("list[bytes]", args)
    return [arg if isinstance(arg, bytes) else b"" for arg in args]


def wrong_arity(name: str) -> bytes:
    """The error for a wrong number of arguments; `name` in full, as in `client|setinfo`."""
    return error(f"ERR wrong number of arguments for '{name}' command")


def wrong_subcommand(args: list[bytes]) -> bytes:
    """The error for a subcommand whose arguments are not as they must be, where Redis does not say more."""
    name = args[0].upper()
    return error(
        b"ERR unknown subcommand or wrong number of arguments for '%b'. Try %b HELP." % (_c_string(args[1]), name)
    )


def unknown_command(args: list[bytes]) -> bytes:
    """The error for a command that is not in the table: it repeats the client's words, 128 bytes of them, each only up
    to its first NUL, as C would print them."""
    echo = b""
    for arg in args[1:]:
        if len(echo) >= ECHO_BYTES_MAX:
            break
        echo += b"'%b' " % _c_string(arg, ECHO_BYTES_MAX - len(echo))
    return error(b"ERR unknown command '%b', with args beginning with: %b" % (_c_string(args[0]), echo))


def every_command() -> list[Command]:
    """Commands and subcommands, each container followed by its parts."""
    return [each for found in COMMANDS.values() for each in (found, *found.subcommands.values())]


def _add(found: Command) -> None:
    """Put a command into both dictionaries; one name twice is a mistake in the program."""
    upper = found.name.upper().encode()
    if upper in COMMANDS:
        raise ValueError(f"command {found.name} is registered twice")
    COMMANDS[upper] = SPELLINGS[upper] = SPELLINGS[upper.lower()] = found


def _describe(name: str, arity: int, handler: Handler, facts: dict[str, object]) -> Command:
    """A Command from the decorators' shorthand."""
    fields = dict(facts)
    for ours, words in (("flags", "flags"), ("categories", "acl"), ("access", "access"), ("tips", "tips")):
        fields[ours] = tuple(str(fields.pop(words, "")).split())
    fields["payload_args"] = fields.pop("payload", ())
    fields["writes"] = "write" in cast("tuple[str, ...]", fields["flags"])
    fields["plain"] = _plain(name, arity, cast("tuple[str, ...]", fields["flags"]))
    return Command(name=name, arity=arity, handler=handler, **fields)  # type: ignore[arg-type]


def _plain(name: str, arity: int, flags: tuple[str, ...]) -> range:
    """How many arguments a plain call may have."""
    if ("fast" not in flags and name not in QUICK) or not NEVER_PLAIN.isdisjoint(flags):
        return range(0)
    most = arity if arity > 0 else sys.maxsize - 1 if "readonly" in flags else PLAIN_ARGS_MAX
    return range(abs(arity), most + 1)


def _c_string(value: bytes, length_max: int = ECHO_BYTES_MAX) -> bytes:
    """What C's `%.*s` prints of `value`."""
    return value.split(b"\0", 1)[0][:length_max]


def _never(session: object, args: list[bytes]) -> Reply:
    """A container without a subcommand: `lookup` has refused it by its arity already."""
    return wrong_arity(args[0].lower().decode("latin-1"))
