"""String commands that do two things at once: set a value and its end, or read a value and change what becomes of it.

What was read leaves under its own hold, so it is the old value even if the new one is in place before the reply is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvredis.server.protocol.replies import OK, SYNTAX_ERROR, Reply

from .keyspace_events import notify
from .registry import command
from .values import DEL, EXPIRE, SET, UNITS, expiry_ms, give_back, look_up, option_expiry_ms, publish, reply_of

if TYPE_CHECKING:
    from kvredis.server.client.session import Session


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
def setex(session: Session, args: list[bytes]) -> Reply:
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
def psetex(session: Session, args: list[bytes]) -> Reply:
    """PSETEX key milliseconds value."""
    return _set_with_end(session, args, 1)


def _set_with_end(session: Session, args: list[bytes], unit_ms: int) -> Reply:
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
def getset(session: Session, args: list[bytes]) -> Reply:
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
def getdel(session: Session, args: list[bytes]) -> Reply:
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
def getex(session: Session, args: list[bytes]) -> Reply:
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


def _delete(session: Session, key: bytes) -> None:
    """Delete a key that is there, and tell of it."""
    if session.store.delete((key,), session.space):
        notify(session, *DEL, key)
