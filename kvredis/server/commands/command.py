"""COMMAND: what this server can do, told from the command table in the words that clients and redis-cli expect."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache

from kvredis.server.client.client import Client
from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.replies import (
    SYNTAX_ERROR,
    Peer,
    Reply,
    array,
    bulk,
    bulks,
    error,
    integer,
    map_reply,
    set_reply,
    simple,
    statuses,
)

from .registry import COMMANDS, Command, command, every_command, subcommand

# ---- help ------------------------------------------------------------------------------------------------------------
#
# `X HELP`, made from the command table in the shape that Redis gives it.


INDENT = "    "


def help_reply(container: str, alone: str = "") -> bytes:
    """A line for each subcommand and an indented one on what it does; `alone` says what the bare command does."""
    found = COMMANDS[container.upper().encode()]
    lines = [f"{container.upper()} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"]
    if alone:
        lines += ["(no subcommand)", INDENT + alone]
    parts = sorted(found.subcommands.items(), key=lambda item: (item[0] == "help", item[0]))
    for name, part in parts:
        lines += [f"{name.upper()} {part.syntax}".rstrip(), INDENT + part.summary]
    return statuses(lines)


# ---- command syntax --------------------------------------------------------------------------------------------------
#
# From a command's syntax as Redis' manual writes it to the `arguments` of COMMAND DOCS, which redis-cli hints from.
#
# The notation: `name` an argument, `TOKEN` a word to be typed, `TOKEN name` a word with its argument, `[...]` optional,
# `<a | b>` or a bare `a | b` one of several, `name [name ...]` repeated.


_WORD = re.compile(r"\.\.\.|[\[\]<>|]|[^\s\[\]<>|]+")
_CLOSING = ("]", ">")
_TYPES = {
    **dict.fromkeys(("key", "key1", "key2", "newkey", "source", "destination"), "key"),
    "pattern": "pattern",
    **dict.fromkeys(
        ("seconds", "milliseconds", "count", "cursor", "index", "start", "end", "client-id", "protover"), "integer"
    ),
    **dict.fromkeys(("unix-time-seconds", "unix-time-milliseconds"), "unix-time"),
}
"""What an argument's name says of its type; every other one is a string."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One node of a command's arguments; `parts` are those of a block or the choices of a oneof."""

    name: str
    type: str
    token: str = ""
    flags: tuple[str, ...] = ()
    parts: tuple[Argument, ...] = field(default=())


@lru_cache(256)
def parse(syntax: str) -> tuple[Argument, ...]:
    """The arguments of a command; ValueError if the notation is not as above."""
    words = _WORD.findall(syntax)
    arguments, at = _sequence(words, 0, "")
    if at != len(words) or any(argument.name in _CLOSING for argument in arguments):
        raise ValueError(f"unbalanced syntax: {syntax}")
    return arguments


def arguments_reply(session: Peer, found: Command) -> Reply:
    """The `arguments` of one command in COMMAND DOCS."""
    return array([_reply(session, argument) for argument in parse(found.syntax)])


def _sequence(words: list[str], at: int, closing: str) -> tuple[tuple[Argument, ...], int]:
    """Arguments up to `closing`, or to the end of the words when that is empty; and where the next word is."""
    choices: list[list[Argument]] = [[]]
    while at < len(words) and words[at] != closing:
        word, at = words[at], at + 1
        if word == "|":
            choices.append([])
        elif word == "[":
            at = _optional(words, at, choices[-1])
        elif word == "<":
            inner, at = _sequence(words, at, ">")
            choices[-1].append(_single(inner))
            at += 1
        elif word.isupper():
            argument, at = _token(words, at, word)
            choices[-1].append(argument)
        else:
            choices[-1].append(Argument(word, _TYPES.get(word, "string")))
    if len(choices) == 1:
        return tuple(choices[0]), at
    parts = tuple(_single(tuple(choice)) for choice in choices)
    return (Argument(parts[0].name, "oneof", parts=parts),), at


def _optional(words: list[str], at: int, before: list[Argument]) -> int:
    """A bracket, `at` being the word behind it: a new argument, or the repetition of those just `before`."""
    end = _matching(words, at)
    if words[end - 1] == "...":
        inner, _ = _sequence([*words[at : end - 1], "]"], 0, "]")
        count = len(inner)
        if [replace(argument, token="") for argument in before[-count:]] == list(inner):
            before[-count:] = [replace(_single(tuple(before[-count:])), flags=("multiple",))]
        else:
            before.append(replace(_single(inner), flags=("optional", "multiple")))
        return end + 1
    inner, at = _sequence(words, at, "]")
    one = _single(inner)
    before.append(replace(one, flags=("optional", *one.flags)))
    return at + 1


def _matching(words: list[str], at: int) -> int:
    """Where the bracket before `at` is closed."""
    depth = 1
    for place in range(at, len(words)):
        depth += (words[place] == "[") - (words[place] == "]")
        if not depth:
            return place
    raise ValueError(f"unbalanced syntax: {' '.join(words)}")


def _token(words: list[str], at: int, token: str) -> tuple[Argument, int]:
    """A word to be typed and what goes with it: plain names, or one choice in angle brackets."""
    names: list[Argument] = []
    while at < len(words) and re.match(r"[a-z]", words[at]):
        names.append(Argument(words[at], _TYPES.get(words[at], "string")))
        at += 1
    if not names and at < len(words) and words[at] == "<":
        inner, at = _sequence(words, at + 1, ">")
        names, at = [_single(inner)], at + 1
    if not names:
        return Argument(token.lower(), "pure-token", token), at
    if len(names) == 1:
        return replace(names[0], token=token), at
    return Argument(token.lower(), "block", token, parts=tuple(names)), at


def _single(arguments: tuple[Argument, ...]) -> Argument:
    """One node for several: a block."""
    return arguments[0] if len(arguments) == 1 else Argument(arguments[0].name, "block", parts=arguments)


def _reply(session: Peer, argument: Argument) -> Reply:
    """One argument as COMMAND DOCS describes it."""
    pairs: list[tuple[Reply, Reply]] = [(bulk("name"), bulk(argument.name)), (bulk("type"), bulk(argument.type))]
    if argument.type == "key":
        pairs.append((bulk("key_spec_index"), integer(0)))
    if argument.token:
        pairs.append((bulk("token"), bulk(argument.token)))
    if argument.flags:
        pairs.append((bulk("flags"), array([simple(flag) for flag in argument.flags])))
    if argument.parts:
        pairs.append((bulk("arguments"), array([_reply(session, part) for part in argument.parts])))
    return map_reply(session, pairs)


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
def command_(session: Client, args: list[bytes]) -> Reply:
    """COMMAND without a subcommand."""
    return array([_info(session, each) for each in COMMANDS.values()])


@subcommand("command|count", arity=2, since="2.8.13", summary="How many commands there are.", **_COMMON)
def command_count(session: Client, args: list[bytes]) -> Reply:
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
def command_info(session: Client, args: list[bytes]) -> Reply:
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
def command_docs(session: Client, args: list[bytes]) -> Reply:
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
def command_list(session: Client, args: list[bytes]) -> Reply:
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
def command_getkeys(session: Client, args: list[bytes]) -> Reply:
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
def command_getkeysandflags(session: Client, args: list[bytes]) -> Reply:
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
def command_help(session: Client, args: list[bytes]) -> Reply:
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


def _info(session: Client, found: Command) -> Reply:
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


def _key_specs(session: Client, found: Command) -> list[Reply]:
    """One specification for all keys of a command, or one for each if it does different things to them."""
    first, last, step = found.keys
    accesses = accesses_of(found)
    if len(accesses) == 1:
        return [_key_spec(session, accesses[0], first, last, step, found.notes)]
    return [
        _key_spec(session, words, at, at, 1) for words, at in zip(accesses, range(first, last + 1, step), strict=True)
    ]


def _key_spec(session: Client, access: list[str], first: int, last: int, step: int, notes: str = "") -> Reply:
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


def _docs(session: Client, found: Command) -> Reply:
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
