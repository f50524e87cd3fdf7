"""COMMAND: what this server can do, told from the command table in the words that clients and redis-cli expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.replies import (
    SYNTAX_ERROR,
    Reply,
    array,
    bulk,
    bulks,
    error,
    integer,
    map_reply,
    set_reply,
    simple,
)

from .command_syntax import arguments_reply
from .help import help_reply
from .registry import COMMANDS, Command, command, every_command, subcommand

if TYPE_CHECKING:
    from kvredis.server.client.session import Session

_COMMON = {"flags": "loading stale", "acl": "slow connection"}


@command(
    "command",
    arity=-1,
    group="server",
    since="2.8.13",
    tips="nondeterministic_output_order",
    complexity="O(N) in the number of commands",
    summary="Every command with its arity, flags and keys.",
    **_COMMON,
)
def command_(session: Session, args: list[bytes]) -> Reply:
    """COMMAND without a subcommand."""
    return array([_info(session, each) for each in COMMANDS.values()])


@subcommand("command|count", arity=2, since="2.8.13", summary="How many commands there are.", **_COMMON)
def command_count(session: Session, args: list[bytes]) -> Reply:
    """COMMAND COUNT."""
    return integer(len(COMMANDS))


@subcommand(
    "command|info",
    arity=-2,
    since="2.8.13",
    tips="nondeterministic_output_order",
    complexity="O(N) in the number of commands",
    syntax="[command-name [command-name ...]]",
    summary="Arity, flags and keys of the commands named, or of all.",
    **_COMMON,
)
def command_info(session: Session, args: list[bytes]) -> Reply:
    """COMMAND INFO [name ...]; nil for each unknown one."""
    if len(args) == 2:
        return command_(session, args)
    found = map(find, args[2:])
    return array([session.nil if each is None else _info(session, each) for each in found])


@subcommand(
    "command|docs",
    arity=-2,
    since="7.0.0",
    tips="nondeterministic_output_order",
    complexity="O(N) in the number of commands",
    syntax="[command-name [command-name ...]]",
    summary="What the commands named do, or all; unknown ones are left out.",
    **_COMMON,
)
def command_docs(session: Session, args: list[bytes]) -> Reply:
    """COMMAND DOCS [name ...]."""
    found = list(COMMANDS.values()) if len(args) == 2 else [each for each in map(find, args[2:]) if each is not None]
    return map_reply(session, [(bulk(each.name), _docs(session, each)) for each in found])


@subcommand(
    "command|list",
    arity=-2,
    since="7.0.0",
    tips="nondeterministic_output_order",
    complexity="O(N) in the number of commands",
    syntax="[FILTERBY <MODULE module-name | ACLCAT category | PATTERN pattern>]",
    summary="The names of all commands and subcommands, or of some.",
    **_COMMON,
)
def command_list(session: Session, args: list[bytes]) -> Reply:
    """COMMAND LIST [FILTERBY MODULE|ACLCAT|PATTERN value]."""
    listed = every_command()
    if len(args) > 2:
        if len(args) != 5 or args[2].upper() != b"FILTERBY":
            return SYNTAX_ERROR
        by, value = args[3].upper(), args[4]
        if by == b"PATTERN":
            fits = matcher(value.lower())
            listed = [each for each in listed if fits(each.name.encode())]
        elif by == b"ACLCAT":
            category = value.lower().decode("latin-1")
            listed = [each for each in listed if category in each.categories]
        elif by == b"MODULE":
            listed = []
        else:
            return SYNTAX_ERROR
    return bulks([each.name for each in listed])


@subcommand(
    "command|getkeys",
    arity=-3,
    since="2.8.13",
    complexity="O(N) in the number of arguments",
    syntax="command [arg ...]",
    summary="Which arguments of a command line are keys.",
    **_COMMON,
)
def command_getkeys(session: Session, args: list[bytes]) -> Reply:
    """COMMAND GETKEYS command [arg ...]."""
    found = _command_with_keys(args[2:])
    return found if isinstance(found, bytes) else bulks(keys_of(found, args[2:]))


@subcommand(
    "command|getkeysandflags",
    arity=-3,
    since="7.0.0",
    complexity="O(N) in the number of arguments",
    syntax="command [arg ...]",
    summary="Which arguments of a command line are keys, and what happens to them.",
    **_COMMON,
)
def command_getkeysandflags(session: Session, args: list[bytes]) -> Reply:
    """COMMAND GETKEYSANDFLAGS command [arg ...]."""
    found = _command_with_keys(args[2:])
    if isinstance(found, bytes):
        return found
    accesses = accesses_of(found)
    if found.name == "set" and b"GET" not in map(bytes.upper, args[5:]):
        accesses = [["OW", "update"]]  # the one command whose access depends on its options
    flags = [set_reply(session, [simple(word) for word in words if word != "variable_flags"]) for words in accesses]
    keys = keys_of(found, args[2:])
    return array([array([bulk(key), flags[min(at, len(flags) - 1)]]) for at, key in enumerate(keys)])


@subcommand("command|help", arity=2, since="5.0.0", summary="Print this help.", **_COMMON)
def command_help(session: Session, args: list[bytes]) -> Reply:
    """COMMAND HELP."""
    return help_reply("command", alone=COMMANDS[b"COMMAND"].summary)


def find(name: bytes) -> Command | None:
    """A command by its name in any case, or a subcommand as `container|name`."""
    container, bar, part = name.partition(b"|")
    found = COMMANDS.get(container.upper())
    if found is None or not bar:
        return found
    return found.subcommands.get(part.lower().decode("latin-1"))


def keys_of(found: Command, args: list[bytes]) -> list[bytes]:
    """The keys in `args`, a command line of `found`; what is in their place but names a shard channel is none."""
    if not has_keys(found):
        return []
    first, last, step = found.keys
    return args[first : len(args) + last + 1 if last < 0 else last + 1 : step]


def accesses_of(found: Command) -> list[list[str]]:
    """What is done to the keys: one list of words for all of them, or, as in RENAME, one for each."""
    return [words.split() for words in " ".join(found.access).split("|")]


def has_keys(found: Command) -> bool:
    """Whether some arguments of `found` are keys."""
    return bool(found.keys[0]) and "not_key" not in found.access


def _command_with_keys(args: list[bytes]) -> Command | bytes:
    """The command that `args` call for, or the error if it is none, has no keys or wants other arguments."""
    found = find(args[0])
    if found is not None and found.subcommands and len(args) > 1:
        found = found.subcommands.get(args[1].lower().decode("latin-1"))
    if found is None:
        return error("ERR Invalid command specified")
    if not has_keys(found):
        return error("ERR The command has no key arguments")
    if len(args) != found.arity and (found.arity > 0 or len(args) < -found.arity):
        return error("ERR Invalid number of arguments specified for command")
    return found


def _info(session: Session, found: Command) -> Reply:
    """The ten fields of COMMAND INFO."""
    first, last, step = found.keys
    return array(
        [
            bulk(found.name),
            integer(found.arity),
            set_reply(session, [simple(flag) for flag in found.flags]),
            integer(first),
            integer(last),
            integer(step),
            set_reply(session, [simple("@" + category) for category in found.categories]),
            set_reply(session, [bulk(tip) for tip in found.tips]),
            set_reply(session, _key_specs(session, found) if first else []),
            array([_info(session, part) for part in found.subcommands.values()])
            if found.subcommands
            else set_reply(session, []),
        ]
    )


def _key_specs(session: Session, found: Command) -> list[Reply]:
    """One specification for all keys of a command, or one for each if it does different things to them."""
    first, last, step = found.keys
    accesses = accesses_of(found)
    if len(accesses) == 1:
        return [_key_spec(session, accesses[0], first, last, step, found.notes)]
    return [
        _key_spec(session, words, at, at, 1) for words, at in zip(accesses, range(first, last + 1, step), strict=True)
    ]


def _key_spec(session: Session, access: list[str], first: int, last: int, step: int, notes: str = "") -> Reply:
    """Where the keys begin and how far they go; `lastkey` counts from the first key, -1 is the end."""
    range_ = [
        (bulk("lastkey"), integer(last if last < 0 else last - first)),
        (bulk("keystep"), integer(step)),
        (bulk("limit"), integer(0)),
    ]
    begin = [(bulk("type"), bulk("index")), (bulk("spec"), map_reply(session, [(bulk("index"), integer(first))]))]
    end = [(bulk("type"), bulk("range")), (bulk("spec"), map_reply(session, range_))]
    noted: list[tuple[Reply, Reply]] = [(bulk("notes"), bulk(notes))] if notes else []
    return map_reply(
        session,
        [
            *noted,
            (bulk("flags"), set_reply(session, [simple(word) for word in access])),
            (bulk("begin_search"), map_reply(session, begin)),
            (bulk("find_keys"), map_reply(session, end)),
        ],
    )


def _docs(session: Session, found: Command) -> Reply:
    """What COMMAND DOCS says of one command."""
    pairs: list[tuple[Reply, Reply]] = [
        (bulk("summary"), bulk(found.summary)),
        (bulk("since"), bulk(found.since)),
        (bulk("group"), bulk(found.group)),
        (bulk("complexity"), bulk(found.complexity)),
    ]
    if found.syntax:
        pairs.append((bulk("arguments"), arguments_reply(session, found)))
    if found.subcommands:
        parts = found.subcommands.values()
        pairs.append((bulk("subcommands"), map_reply(session, [(bulk(p.name), _docs(session, p)) for p in parts])))
    return map_reply(session, pairs)
