"""String commands: the ones that move payloads, SET and GET and their kin.

A value argument is bytes when it was small and a Reservation when the parser received it into the arena; a value leaves
as bytes or as a view under a Lease that the session keeps until it is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvredis.storage.entry import INLINE_BYTES_MAX, Lease, Reservation

from .arguments import INT64_MAX, parse_integer
from .commands import command, wrong_arity
from .replies import (
    CRLF,
    EMPTY_BULK,
    NOT_AN_INTEGER,
    OK,
    ONE,
    OUT_OF_MEMORY,
    SYNTAX_ERROR,
    ZERO,
    Buffer,
    Reply,
    error,
    integer,
)

if TYPE_CHECKING:
    from .session import Session

_HEADS = tuple(b"$%d\r\n" % n for n in range(INLINE_BYTES_MAX))
"""Before every value that is bytes."""

_EXPIRY_OPTIONS = {b"EX": (1000, True), b"PX": (1, True), b"EXAT": (1000, False), b"PXAT": (1, False)}


@command(
    "get",
    arity=2,
    flags="readonly fast",
    keys=(1, 1, 1),
    acl="read string fast",
    group="string",
    summary="Returns the string value of a key.",
    syntax="key",
    access="RO access",
)
def get(session: Session, args: list[bytes]) -> Reply:
    """The value, lent if it lies in the arena."""
    value = session.fetch(args[1], session.space)
    if type(value) is bytes:
        return _HEADS[len(value)] + value + CRLF
    return session.nil if value is None else _lent(session, value)  # type: ignore[arg-type]


@command(
    "set",
    arity=-3,
    flags="write denyoom",
    keys=(1, 1, 1),
    acl="write string slow",
    payload=(2, 0),
    group="string",
    summary="Sets the string value of a key, ignoring its type. The key is created if it doesn't exist.",
    syntax=(
        "key value [NX | XX] [GET] "
        "[EX seconds | PX milliseconds | EXAT unix-time-seconds | PXAT unix-time-milliseconds | KEEPTTL]"
    ),
    access="RW access update variable_flags",
)
def set_(session: Session, args: list[bytes]) -> Reply:
    """Publish a value; with options, decide first whether to."""
    value = args[2]
    if len(args) == 3:
        if type(value) is bytes:
            return OK if session.store.put(args[1], value, session.space) else OUT_OF_MEMORY
        return _store(session, args[1], value, 0)
    reply = _set_with_options(session, args)
    if isinstance(value, Reservation):
        value.abort()  # does nothing when it was committed
    return reply


def _set_with_options(session: Session, args: list[bytes]) -> Reply:
    key, value = args[1], args[2]
    flags: set[bytes] = set()
    expire: tuple[bytes, bytes] | None = None
    at = 3
    while at < len(args):
        option = args[at].upper() if isinstance(args[at], bytes) else b""
        if option in (b"NX", b"XX", b"GET", b"KEEPTTL"):
            flags.add(option)
        elif option in _EXPIRY_OPTIONS and expire is None and at + 1 < len(args):
            expire = option, args[at + 1]
            at += 1
        else:
            return SYNTAX_ERROR
        at += 1
    if {b"NX", b"XX"} <= flags or (expire and b"KEEPTTL" in flags):
        return SYNTAX_ERROR
    expire_at_ms = 0
    if expire is not None:
        unit_ms, relative = _EXPIRY_OPTIONS[expire[0]]
        when = expiry_ms(expire[1], unit_ms, session.store.now_ms() if relative else 0, "set")
        if isinstance(when, bytes):
            return when
        expire_at_ms = when
    old = session.store.find(key, session.space)
    answer: Reply = OK
    if b"GET" in flags:
        answer = _value(session, key)
    if (b"NX" in flags and old is not None) or (b"XX" in flags and old is None):
        return answer if b"GET" in flags else session.nil
    if b"KEEPTTL" in flags and old is not None:
        expire_at_ms = old.expire_at_ms
    done = _store(session, key, value, expire_at_ms)
    return done if done is not OK else answer


@command(
    "setnx",
    arity=3,
    flags="write denyoom fast",
    keys=(1, 1, 1),
    acl="write string fast",
    payload=(2, 0),
    group="string",
    summary="Set the string value of a key only when the key doesn't exist.",
    syntax="key value",
    access="OW insert",
)
def setnx(session: Session, args: list[bytes]) -> Reply:
    """1 when the key was free and holds the value now, else 0."""
    key, value = args[1], args[2]
    if session.store.find(key, session.space) is not None:
        if isinstance(value, Reservation):
            value.abort()
        return ZERO
    done = _store(session, key, value, 0)
    return ONE if done is OK else done


@command(
    "mget",
    arity=-2,
    flags="readonly fast",
    keys=(1, -1, 1),
    acl="read string fast",
    group="string",
    summary="Atomically returns the string values of one or more keys.",
    complexity="O(N) where N is the number of keys to retrieve.",
    syntax="key [key ...]",
    access="RO access",
    tips="request_policy:multi_shard",
)
def mget(session: Session, args: list[bytes]) -> Reply:
    """The values in order, each lent; missing ones are nil. The keys count as used at one instant, the head last."""
    parts: list[Buffer] = [b"*%d\r\n" % (len(args) - 1)]
    for key in args[1:]:
        value = _value(session, key)
        if isinstance(value, bytes):
            parts.append(value)
        else:
            parts += value
    if not session.no_touch:
        session.store.touch(args[1:], session.space)
    return parts


@command(
    "mset",
    arity=-3,
    flags="write denyoom",
    keys=(1, -1, 2),
    acl="write string slow",
    payload=(2, 2),
    group="string",
    since="1.0.1",
    summary="Atomically creates or modifies the string values of one or more keys.",
    complexity="O(N) where N is the number of keys to set.",
    syntax="key value [key value ...]",
    access="OW update",
    tips="request_policy:multi_shard response_policy:all_succeeded",
)
def mset(session: Session, args: list[bytes]) -> Reply:
    """All the pairs or none: room for every value is had before the first becomes visible."""
    if len(args) % 2 == 0:
        for arg in args:
            if isinstance(arg, Reservation):
                arg.abort()
        return wrong_arity("mset")
    values = [_placed(session, key, value) for key, value in zip(args[1::2], args[2::2], strict=True)]
    if None in values:
        for value in values:
            if isinstance(value, Reservation):
                value.abort()
        return OUT_OF_MEMORY
    for key, value in zip(args[1::2], values, strict=True):
        _store(session, key, value, 0)  # type: ignore[arg-type]
    return OK


@command(
    "getrange",
    arity=4,
    flags="readonly",
    keys=(1, 1, 1),
    acl="read string slow",
    group="string",
    since="2.4.0",
    summary="Returns a substring of the string stored at a key.",
    complexity="O(1): a range of a stored value is lent, not copied.",
    syntax="key start end",
    access="RO access",
)
def getrange(session: Session, args: list[bytes]) -> Reply:
    """Bytes start..end, both inclusive, negative ones counted from the end; empty when there are none."""
    start, end = parse_integer(args[2]), parse_integer(args[3])
    if start is None or end is None:
        return NOT_AN_INTEGER
    value = session.fetch(args[1], session.space)
    if value is None:
        return EMPTY_BULK
    length = len(value) if isinstance(value, bytes) else value.length
    if start < 0 and end < 0 and start > end:
        start, end = 1, 0
    start = max(0, start + length if start < 0 else start)
    end = min(length - 1, max(0, end + length) if end < 0 else end)
    if start > end or length == 0:
        if not isinstance(value, bytes):
            value.release()
        return EMPTY_BULK
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (end - start + 1, value[start : end + 1])
    session.hold(value)
    return [b"$%d\r\n" % (end - start + 1), value.view[start : end + 1], b"\r\n"]


@command(
    "strlen",
    arity=2,
    flags="readonly fast",
    keys=(1, 1, 1),
    acl="read string fast",
    group="string",
    since="2.2.0",
    summary="Returns the length of a string value.",
    syntax="key",
    access="RO",
)
def strlen(session: Session, args: list[bytes]) -> Reply:
    """Bytes of the value, 0 without one."""
    entry = session.store.find(args[1], session.space)
    return ZERO if entry is None else integer(entry.length)


def _value(session: Session, key: bytes) -> Reply:
    """A value's reply: small ones in one piece, the others lent."""
    value = session.fetch(key, session.space)
    if value is None:
        return session.nil
    return _lent(session, value) if isinstance(value, Lease) else _HEADS[len(value)] + value + CRLF


def _lent(session: Session, lease: Lease) -> Reply:
    """The reply that goes out of the arena as it is."""
    session.hold(lease)
    view = lease.view
    return [b"$%d\r\n" % len(view), view, b"\r\n"]


def _placed(session: Session, key: bytes, value: bytes | Reservation) -> bytes | Reservation | None:
    """A value that can no longer be refused; None when there is no room for it."""
    if not isinstance(value, bytes) or len(value) < INLINE_BYTES_MAX:
        return value
    reservation = session.store.reserve(key, len(value), session.space)
    if reservation is not None:
        reservation.view[:] = value  # came in an inline request, so it is at hand as bytes
    return reservation


def _store(session: Session, key: bytes, value: bytes | Reservation, expire_at_ms: int) -> bytes:
    """Make a value visible; OK, or Redis' out-of-memory error with nothing changed."""
    if type(value) is bytes:
        return OK if session.store.put(key, value, session.space, expire_at_ms) else OUT_OF_MEMORY
    value.commit(expire_at_ms)  # type: ignore[union-attr]
    return OK


def expiry_ms(text: bytes, unit_ms: int, now_ms: int, name: str) -> int | bytes:
    """When a value is gone that has `text` units of `unit_ms` from `now_ms` on, as Unix ms, or Redis' error for it."""
    amount = parse_integer(text)
    if amount is None:
        return NOT_AN_INTEGER
    if amount <= 0 or amount > INT64_MAX // unit_ms:
        return error(f"ERR invalid expire time in '{name}' command")
    when = amount * unit_ms + now_ms
    return when if when <= INT64_MAX else error(f"ERR invalid expire time in '{name}' command")
