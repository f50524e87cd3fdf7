"""Commands that give a value another name or a second one: RENAME, RENAMENX, MOVE and COPY.

A renamed value stays where it lies, so its size costs nothing and a client that reads it goes on doing so. Only COPY
copies: afterwards there are two keys, and each must be able to leave without the other.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import (
    DB_OUT_OF_RANGE,
    NOT_AN_INTEGER,
    OK,
    ONE,
    OUT_OF_MEMORY,
    SYNTAX_ERROR,
    ZERO,
    Reply,
    error,
)
from kvredis.storage.entry import Lease
from kvredis.storage.index import SPACES
from kvredis.storage.memory.copy import copy as copy_payload

from .keyspace_events import notify
from .registry import command
from .strings import encoding_of, look_up, note_encoding

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

NO_SUCH_KEY: Final = error("ERR no such key")
SAME_OBJECT: Final = error("ERR source and destination objects are the same")
OUT_OF_INT_RANGE: Final = error(f"ERR value is out of range, value must between {INT32_MIN} and {INT32_MAX}")


@command(
    "rename",
    arity=3,
    flags="write",
    keys=(1, 2, 1),
    acl="keyspace write slow",
    access="RW access delete | OW update",
    syntax="key newkey",
    summary="Gives a key another name, in place of a key that has that name already.",
)
def rename(session: Caller, args: list[bytes]) -> Reply:
    """RENAME key newkey."""
    return _rename(session, args, True)


@command(
    "renamenx",
    arity=3,
    flags="write fast",
    keys=(1, 2, 1),
    acl="keyspace write fast",
    access="RW access delete | OW insert",
    syntax="key newkey",
    summary="Gives a key another name, unless there is a key of that name.",
)
def renamenx(session: Caller, args: list[bytes]) -> Reply:
    """RENAMENX key newkey."""
    return _rename(session, args, False)


def _rename(session: Caller, args: list[bytes], replace: bool) -> Reply:
    key, new, space, store = args[1], args[2], session.space, session.store
    if store.find(key, space) is None:
        return NO_SUCH_KEY
    if not replace and store.find(new, space) is not None:
        return ZERO
    store.move((key, space), (new, space))
    if key != new:
        notify(session, "n", "new", new)
        notify(session, "g", "rename_from", key)
        notify(session, "g", "rename_to", new)
    return OK if replace else ONE


@command(
    "move",
    arity=3,
    flags="write fast",
    keys=(1, 1, 1),
    acl="keyspace write fast",
    access="RW access update",
    syntax="key db",
    summary="Puts a key into another database, unless that has one of the same name.",
)
def move(session: Caller, args: list[bytes]) -> Reply:
    """MOVE key db."""
    if session.server.cluster is not None:
        return error("ERR MOVE is not allowed in cluster mode")
    key, source, store = args[1], session.space, session.store
    target = _database(args[2])
    if isinstance(target, bytes):
        return target
    if target == source:
        return SAME_OBJECT
    if store.find(key, source) is None or store.find(key, target) is not None:
        return ZERO
    store.move((key, source), (key, target))
    notify(session, "n", "new", key, target)
    notify(session, "g", "move_from", key, source)
    notify(session, "g", "move_to", key, target)
    return ONE


@command(
    "copy",
    arity=-3,
    flags="write denyoom",
    keys=(1, 2, 1),
    reads=(1, 1, 1),
    acl="keyspace write slow",
    access="RO access | OW update",
    since="6.2.0",
    complexity="O(N) in the length of the value.",
    syntax="source destination [DB destination-db] [REPLACE]",
    summary="Stores a value a second time under another key, with the same end.",
)
def copy(session: Caller, args: list[bytes]) -> Reply:
    """COPY source destination [DB n] [REPLACE]."""
    target, replace = session.space, False
    at = 3
    while at < len(args):
        word = args[at].upper()
        if word == b"REPLACE":
            replace = True
        elif word == b"DB" and at + 1 < len(args):
            number = _database(args[at + 1])
            if isinstance(number, bytes):
                return number
            target = number
            at += 1
        else:
            return SYNTAX_ERROR
        at += 1
    if target and session.server.cluster is not None:
        return error("ERR Copying to another database is not allowed in cluster mode")
    key, new, store = args[1], args[2], session.store
    if key == new and target == session.space:
        return SAME_OBJECT
    entry = store.find(key, session.space)
    value = look_up(session, key)
    if entry is None or value is None:
        return ZERO
    with value if isinstance(value, Lease) else nullcontext():
        if store.find(new, target) is not None and not replace:
            return ZERO
        done = _copied(session, value, (new, target), entry.expire_at_ms)
    if done is ONE:
        note_encoding(session, (new, target), encoding_of(entry))
        notify(session, "n", "new", new, target)
        notify(session, "g", "copy_to", new, target)
    return done


def _copied(session: Caller, value: bytes | Lease, name: tuple[bytes, int], expire_at_ms: int) -> bytes:
    """Store a value under another name: 1, or the error when there is no room for it."""
    key, space = name
    if isinstance(value, bytes):
        return ONE if session.store.put(key, value, space, expire_at_ms) else OUT_OF_MEMORY
    reservation = session.store.reserve(key, value.length, space)
    if reservation is None:
        return OUT_OF_MEMORY
    with reservation:
        copy_payload(reservation.view, value.view)  # each key owns its bytes, as the docstring above says
        reservation.commit(expire_at_ms)
    return ONE


def _database(text: bytes) -> int | bytes:
    """The number of a database, or the error that Redis has for such a number."""
    number = parse_integer(text)
    if number is None:
        return NOT_AN_INTEGER
    if not INT32_MIN <= number <= INT32_MAX:
        return OUT_OF_INT_RANGE
    return number if 0 <= number < SPACES else DB_OUT_OF_RANGE
