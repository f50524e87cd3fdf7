"""INCR, DECR, INCRBY, INCRBYFLOAT: numbers are kept as the text that clients set, and each change publishes a new text.

The end of a key stays what it was: a counter in a time window is what these commands are mostly used for.
"""

from __future__ import annotations

from typing import Final

from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import INT64_MAX, INT64_MIN, parse_integer
from kvredis.server.protocol.replies import NOT_AN_INTEGER, OK, Reply, bulk, error, integer
from kvredis.storage.entry import Entry

from .compat.long_double import TEXT_BYTES_MAX, add, parse, printed
from .registry import command
from .strings import INTEGER_BYTES_MAX, note_encoding, publish

WOULD_OVERFLOW: Final = error("ERR increment or decrement would overflow")
DECREMENT_WOULD_OVERFLOW: Final = error("ERR decrement would overflow")
NOT_A_FLOAT: Final = error("ERR value is not a valid float")
WOULD_BE_INFINITE: Final = error("ERR increment would produce NaN or Infinity")


@command(
    "incr",
    arity=2,
    flags="write denyoom fast",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string fast",
    group="string",
    summary="Adds one to the integer under a key; without one it is 0 before.",
    syntax="key",
    access="RW access update",
)
def incr(session: Caller, args: list[bytes]) -> Reply:
    """INCR key."""
    return _add(session, args[1], 1)


@command(
    "decr",
    arity=2,
    flags="write denyoom fast",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string fast",
    group="string",
    summary="Takes one from the integer under a key; without one it is 0 before.",
    syntax="key",
    access="RW access update",
)
def decr(session: Caller, args: list[bytes]) -> Reply:
    """DECR key."""
    return _add(session, args[1], -1)


@command(
    "incrby",
    arity=3,
    flags="write denyoom fast",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string fast",
    group="string",
    summary="Adds to the integer under a key; without one it is 0 before.",
    syntax="key increment",
    access="RW access update",
)
def incrby(session: Caller, args: list[bytes]) -> Reply:
    """INCRBY key increment."""
    amount = parse_integer(args[2])
    return NOT_AN_INTEGER if amount is None else _add(session, args[1], amount)


@command(
    "decrby",
    arity=3,
    flags="write denyoom fast",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string fast",
    group="string",
    summary="Takes from the integer under a key; without one it is 0 before.",
    syntax="key decrement",
    access="RW access update",
)
def decrby(session: Caller, args: list[bytes]) -> Reply:
    """DECRBY key decrement; the smallest integer has no opposite, which Redis says in other words."""
    amount = parse_integer(args[2])
    if amount is None:
        return NOT_AN_INTEGER
    return DECREMENT_WOULD_OVERFLOW if amount == INT64_MIN else _add(session, args[1], -amount)


@command(
    "incrbyfloat",
    arity=3,
    flags="write denyoom fast",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string fast",
    group="string",
    since="2.6.0",
    summary="Adds to the decimal number under a key; without one it is 0 before.",
    syntax="key increment",
    access="RW access update",
)
def incrbyfloat(session: Caller, args: list[bytes]) -> Reply:
    """INCRBYFLOAT key increment: the sum, as it is stored."""
    key = args[1]
    entry = session.store.find(key, session.space)
    text = b"0" if entry is None else _text(entry, TEXT_BYTES_MAX - 1)
    value, amount = parse(text), parse(args[2])
    if value is None or amount is None:
        return NOT_A_FLOAT
    total = add(value, amount)
    if total is None:
        return WOULD_BE_INFINITE
    done = publish(session, key, printed(total), 0 if entry is None else entry.expire_at_ms, ("$", "incrbyfloat"))
    note_encoding(session, (key, session.space), "embstr")
    return bulk(printed(total)) if done is OK else done


def _add(session: Caller, key: bytes, amount: int) -> Reply:
    """Add to the integer under `key`."""
    entry = session.store.find(key, session.space)
    before = 0 if entry is None else parse_integer(_text(entry, INTEGER_BYTES_MAX))
    if before is None:
        return NOT_AN_INTEGER
    after = before + amount
    if not INT64_MIN <= after <= INT64_MAX:
        return WOULD_OVERFLOW
    done = publish(session, key, b"%d" % after, 0 if entry is None else entry.expire_at_ms, ("$", "incrby"))
    return integer(after) if done is OK else done


def _text(entry: Entry, length_max: int) -> bytes:
    """The value, if it is short enough to be a number; else nothing, which is none either."""
    return entry.value if entry.value is not None and entry.length <= length_max else b""
