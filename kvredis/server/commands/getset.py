"""String commands that do two things at once: set a value and its end, or read a value and change what becomes of it.

What was read leaves under its own hold, so it is the old value even if the new one is in place before the reply is.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import NOT_AN_INTEGER, OK, OUT_OF_MEMORY, SYNTAX_ERROR, ZERO, Reply, error, integer
from kvredis.storage.state import SPARE_PART
from kvredis.storage.store import zero

from .keyspace_events import notify
from .registry import command
from .strings import (
    DEL,
    EXPIRE,
    SET,
    TOO_LONG,
    UNITS,
    expiry_ms,
    give_back,
    look_up,
    note_encoding,
    option_expiry_ms,
    publish,
    reply_of,
)


@command(
    "setex",
    arity=4,
    flags="write denyoom",
    keys=(1, 1, 1),
    acl="write string slow",
    payload=(3, 0),
    group="string",
    since="2.0.0",
    summary="Sets a value that ends so many seconds from now.",
    syntax="key seconds value",
    access="OW update",
)
def setex(session: Caller, args: list[bytes]) -> Reply:
    """SETEX key seconds value."""
    return _set_with_end(session, args, 1000)


@command(
    "psetex",
    arity=4,
    flags="write denyoom",
    keys=(1, 1, 1),
    acl="write string slow",
    payload=(3, 0),
    group="string",
    since="2.6.0",
    summary="Sets a value that ends so many milliseconds from now.",
    syntax="key milliseconds value",
    access="OW update",
)
def psetex(session: Caller, args: list[bytes]) -> Reply:
    """PSETEX key milliseconds value."""
    return _set_with_end(session, args, 1)


def _set_with_end(session: Caller, args: list[bytes], unit_ms: int) -> Reply:
    key, value = args[1], args[3]
    when = expiry_ms(args[2], unit_ms, session.store.now_ms(), "setex" if unit_ms == 1000 else "psetex")
    if isinstance(when, bytes):
        give_back(args)
        return when
    return publish(session, key, value, when, SET, EXPIRE)


@command(
    "getset",
    arity=3,
    flags="write denyoom fast",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string fast",
    payload=(2, 0),
    group="string",
    summary="Sets a value and returns the one that was there.",
    syntax="key value",
    access="RW access update",
)
def getset(session: Caller, args: list[bytes]) -> Reply:
    """The old value or nil; an end that it had is gone with it."""
    old = look_up(session, args[1])
    reply = session.nil if old is None else reply_of(session, old)
    done = publish(session, args[1], args[2], 0, SET)
    return reply if done is OK else done


@command(
    "getdel",
    arity=2,
    flags="write fast",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string fast",
    group="string",
    since="6.2.0",
    summary="Returns a value and deletes its key.",
    syntax="key",
    access="RW access delete",
)
def getdel(session: Caller, args: list[bytes]) -> Reply:
    """The value, whole although its key is gone; nil if there was none."""
    value = look_up(session, args[1])
    if value is None:
        return session.nil
    _delete(session, args[1])
    return reply_of(session, value)


@command(
    "getex",
    arity=-2,
    flags="write fast",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string fast",
    group="string",
    since="6.2.0",
    summary="Returns a value and sets when it ends, or takes its end away.",
    syntax=("key [EX seconds | PX milliseconds | EXAT unix-time-seconds | PXAT unix-time-milliseconds | PERSIST]"),
    access="RW access update",
    notes="RW and UPDATE because it changes the TTL",
)
def getex(session: Caller, args: list[bytes]) -> Reply:
    """The value or nil. Words are checked before the key is looked for, and the time only once it was found."""
    expire: tuple[bytes, bytes] | None = None
    persist = False
    at = 2
    while at < len(args):
        option = args[at].upper()
        if option == b"PERSIST" and expire is None:
            persist = True
        elif option in UNITS and not persist and (expire is None or expire[0] == option) and at + 1 < len(args):
            expire = option, args[at + 1]
            at += 1
        else:
            return SYNTAX_ERROR
        at += 1
    key, store = args[1], session.store
    value = look_up(session, key)
    if value is None:
        return session.nil
    reply = reply_of(session, value)
    if expire is not None:
        when = option_expiry_ms(session, expire, "getex")
        if isinstance(when, bytes):
            return when
        if when <= store.now_ms():
            _delete(session, key)
        elif store.expire(key, when, session.space):
            notify(session, *EXPIRE, key)
    elif persist:
        entry = store.find(key, session.space)
        if entry is not None and entry.expire_at_ms and store.expire(key, 0, session.space):
            notify(session, "g", "persist", key)
    return reply


def _delete(session: Caller, key: bytes) -> None:
    """Delete a key that is there, and tell of it."""
    if session.store.delete((key,), session.space):
        notify(session, *DEL, key)


# ---- setrange --------------------------------------------------------------------------------------------------------
#
# APPEND and SETRANGE: a value made out of an older one.
#
# The store lays the new bytes over the value where it lies, as long as that is safe: no reader holds it, the disk does
# not have it, and there is room behind it. Else the new value is built beside the old one, whose bytes are copied into
# it, with a quarter more room than it needs: a value that is appended to time and again is copied a few times in all. A
# new value that finds no room leaves everything as it was. KV.RESERVE, KV.WRITE and KV.COMMIT (multipart.py) make a
# value part by part without a copy, and show no state of it before the last.


OFFSET_OUT_OF_RANGE: Final = error("ERR offset is out of range")


@command(
    "append",
    arity=3,
    flags="write denyoom fast",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string fast",
    group="string",
    since="2.0.0",
    summary="Puts bytes behind a value; without one they become it.",
    complexity="O(N) in the length of the value that comes out.",
    syntax="key value",
    access="RW insert",
)
def append(session: Caller, args: list[bytes]) -> Reply:
    """APPEND key value: the length of what is there now."""
    key, more = args[1], args[2]
    entry = session.store.find(key, session.space)
    length = 0 if entry is None else entry.length
    if entry is not None and length + len(more) > session.server.bulk_bytes_max:
        return TOO_LONG
    return _edit(session, key, None, more, "append")


@command(
    "setrange",
    arity=4,
    flags="write denyoom",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string slow",
    group="string",
    since="2.2.0",
    summary="Overwrites part of a value from an offset on; what lies between its end and there becomes zero bytes.",
    complexity="O(N) in the length of the value that comes out.",
    syntax="key offset value",
    access="RW update",
)
def setrange(session: Caller, args: list[bytes]) -> Reply:
    """SETRANGE key offset value: the length of what is there now. Nothing to write changes nothing."""
    key, patch = args[1], args[3]
    offset = parse_integer(args[2])
    if offset is None:
        return NOT_AN_INTEGER
    if offset < 0:
        return OFFSET_OUT_OF_RANGE
    entry = session.store.find(key, session.space)
    if not patch:
        return ZERO if entry is None else integer(entry.length)
    if offset + len(patch) > session.server.bulk_bytes_max:
        return TOO_LONG
    return _edit(session, key, offset, patch, "setrange")


def _edit(session: Caller, key: bytes, offset: int | None, patch: bytes, event: str) -> Reply:
    """Lay `patch` over the value under `key` at `offset`, None for behind its last byte; it expires when it would
    have."""
    store, space = session.store, session.space
    entry = store.find(key, space)
    if entry is None or not store.patch(key, entry.length if offset is None else offset, patch, space):
        return _make(session, key, offset, patch, event)
    if session.observed:
        notify(session, "$", event, key, space)
    return integer(entry.length)


def _make(session: Caller, key: bytes, offset: int | None, patch: bytes, event: str) -> Reply:
    """Make the new value beside the old one. Only what is there now counts: it may have expired since it was looked
    at."""
    old = session.store.peek(key, session.space)
    if offset is None:
        offset = 0 if old is None else old.length
    length = max(0 if old is None else old.length, offset + len(patch))
    with old or nullcontext():  # held, or making room for the new value might take the old one
        spare = 0 if old is None else length // SPARE_PART
        room = session.store.reserve(key, length, session.space, spare=spare)
        if room is None:
            return OUT_OF_MEMORY
        with room:
            held = 0
            if old is not None:
                held = old.length
                room.view[:held] = old.view  # the copy that the docstring above speaks of
            zero(room.view, held, offset)
            room.view[offset : offset + len(patch)] = patch
            done = publish(session, key, room, 0 if old is None else old.entry.expire_at_ms, ("$", event))
            if done is not OK:
                return done
    if old is not None or event == "setrange":
        note_encoding(session, (key, session.space), "raw")
    return integer(length)
