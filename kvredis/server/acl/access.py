"""Which keys and channels a command line touches, and how: what an ACL's patterns are compared with.

WHY beside the table: `Command.access` says what a command does with its keys in general, `|` between what it does with
each of two. Only SET depends on its options: it reads when it is asked to GET, so a user who may only write is let
through or not as in Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvredis.server.commands.registry import Command, keys_end

READ, WRITE = 1, 2
"""Bits: the value of a key is seen; a key is made, changed or taken away. Asking whether a key exists needs neither."""

_BITS = {"access": READ, "insert": WRITE, "update": WRITE, "delete": WRITE}
_CHANNELS = {  # (channels run to the end of the line, a channel is a pattern)
    "publish": (False, False),
    "spublish": (False, False),
    "subscribe": (True, False),
    "ssubscribe": (True, False),
    "psubscribe": (True, True),
}
"""Unsubscribing needs no permission."""


class Touched(NamedTuple):
    """Positions in a command line. `keys`: runs of key arguments with the access each needs; `channels`: channels that
    are to be heard or spoken to, which are patterns themselves where `literal`."""

    keys: Sequence[tuple[range, int]]
    channels: range
    literal: bool


def touched_by(command: Command, args: Sequence[object]) -> Touched:
    """What the line `args`, which calls for `command` and has an arity that fits, touches."""
    argc = keys_end(command.behind_keys, args) if command.behind_keys else len(args)
    if command.name in _CHANNELS:
        to_the_end, literal = _CHANNELS[command.name]
        return Touched((), range(1, argc if to_the_end else min(argc, 2)), literal)
    first, last, step = command.keys
    if not first or "pubsub" in command.categories:  # a shard channel is given as a key to cluster clients only
        return Touched((), range(0), False)
    span = range(first, min(argc, argc + last + 1 if last < 0 else last + 1), step)
    accesses = _accesses(command, args)
    if len(accesses) == 1:
        return Touched(((span, accesses[0]),), range(0), False)
    each = [(range(at, at + 1), accesses[min(which, len(accesses) - 1)]) for which, at in enumerate(span)]
    return Touched(each, range(0), False)


def _accesses(command: Command, args: Sequence[object]) -> list[int]:
    """What is done to the keys: one answer for all of them, or one for each."""
    if command.name == "set" and not any(isinstance(arg, bytes) and arg.upper() == b"GET" for arg in args[3:]):
        return [WRITE]
    found = [0]
    for word in command.access:
        if word == "|":
            found.append(0)
        else:
            found[-1] |= _BITS.get(word, 0)
    return found
