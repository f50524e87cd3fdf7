"""From a command's syntax as Redis' manual writes it to the `arguments` of COMMAND DOCS, which redis-cli hints from.

The notation: `name` an argument, `TOKEN` a word to be typed, `TOKEN name` a word with its argument, `[...]` optional,
`<a | b>` or a bare `a | b` one of several, `name [name ...]` repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from kvredis.server.protocol.replies import Reply, array, bulk, integer, map_reply, simple

if TYPE_CHECKING:
    from kvredis.server.protocol.replies import Peer

    from .registry import Command

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
