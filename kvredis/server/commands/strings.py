"""String commands that move payloads: SET, GET, MSET, MGET, GETRANGE, STRLEN and their variants.

A value argument is bytes when it was small and a Reservation when the parser received it into the arena; a value leaves
as bytes or as a view under a Lease that the session keeps until it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvredis.server.client.blocked import Answer, Blocked
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import INT64_MAX, parse_integer
from kvredis.server.protocol.replies import (
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
from kvredis.storage.entry import ENTRY_OVERHEAD_BYTES, INLINE_BYTES_MAX, Entry, Lease, Reservation

from .keyspace_events import notify
from .registry import command, wrong_arity

# ---- values ----------------------------------------------------------------------------------------------------------
#
# How a command makes a value visible and tells of it: the steps that every writing string command has in common.
#
# A value is bytes when it was small or had to be computed, and a Reservation when it lies in the arena already;
# whichever it is, it is published at once or not at all, and events go out after the change in Redis' order: `new` for
# a key that was not there, what the command has done, `expire` if it gave the key an end.


Event = tuple[str, str]
"""A class of `notify-keyspace-events` and the event's name."""

SET: Final = ("$", "set")
EXPIRE: Final = ("g", "expire")
DEL: Final = ("g", "del")

UNITS: Final = {b"EX": (1000, True), b"PX": (1, True), b"EXAT": (1000, False), b"PXAT": (1, False)}
"""What the options about time mean: milliseconds a unit, and whether from now on."""

EMBEDDED_BYTES_MAX: Final = 44
"""Redis keeps strings up to this length in one piece with their header and calls that `embstr`."""

INTEGER_BYTES_MAX: Final = 20
"""The longest text of a 64-bit integer."""

TOO_LONG: Final = error("ERR string exceeds maximum allowed size (proto-max-bulk-len)")

Hold = bytes | Lease
"""A value as `fetch` gives it: small ones as they are, the others lent."""


@dataclass(frozen=True, slots=True)
class SetOptions:
    """What SET's options ask for, and those of commands that store as it does."""

    flags: frozenset[bytes] = frozenset()
    """Of NX, XX, GET and KEEPTTL."""
    expire_at_ms: int = 0
    """When the value is gone, in Unix ms; 0 = no option about time."""


def set_options(session: Caller, words: Sequence[bytes], allowed: frozenset[bytes], name: str) -> SetOptions | bytes:
    """The options that stand behind a value, `allowed` of those without an argument; or Redis' error for them, which
    calls the command `name`."""
    flags: set[bytes] = set()
    expire: tuple[bytes, bytes] | None = None
    at = 0
    while at < len(words):
        option = words[at].upper() if isinstance(words[at], bytes) else b""
        if option in allowed:
            flags.add(option)
        elif option in UNITS and (expire is None or expire[0] == option) and at + 1 < len(words):
            expire = option, words[at + 1]
            at += 1
        else:
            return SYNTAX_ERROR
        at += 1
    if {b"NX", b"XX"} <= flags or (expire and b"KEEPTTL" in flags):
        return SYNTAX_ERROR
    when = 0 if expire is None else option_expiry_ms(session, expire, name)
    return when if isinstance(when, bytes) else SetOptions(frozenset(flags), when)


def publish_if(session: Caller, key: bytes, value: bytes | Reservation, options: SetOptions) -> bytes:
    """`publish` as SET does it: nil, with nothing changed, when NX or XX does not hold."""
    old = session.store.find(key, session.space if isinstance(value, bytes) else value.space)
    if (b"NX" in options.flags and old is not None) or (b"XX" in options.flags and old is None):
        session.server.stats.sets_existed += old is not None
        return session.nil
    when = options.expire_at_ms
    events = (SET, EXPIRE) if when else (SET,)
    if b"KEEPTTL" in options.flags and old is not None:
        when = old.expire_at_ms
    return publish(session, key, value, when, *events)


def publish(session: Caller, key: bytes, value: bytes | Reservation, expire_at_ms: int, *events: Event) -> bytes:
    """Make a value visible and tell of it; OK, or Redis' out-of-memory error with nothing changed. A Reservation goes
    to the database that it was made for."""
    space = session.space if isinstance(value, bytes) else value.space
    created = session.observed and session.store.find(key, space) is None
    if isinstance(value, bytes):
        stored = session.store.put(key, value, space, expire_at_ms)
    else:
        stored = value.commit(expire_at_ms)
    if not stored:
        return OUT_OF_MEMORY
    if session.observed:
        if created:
            notify(session, "n", "new", key, space)
        for letter, event in events:
            notify(session, letter, event, key, space)
    return OK


def note_encoding(session: Caller, name: tuple[bytes, int], encoding: str) -> None:
    """What OBJECT ENCODING answers for a value just published, where Redis does not look for an integer in it."""
    entry = session.store.find(*name)
    if entry is not None and entry.value is not None and entry.length <= EMBEDDED_BYTES_MAX:
        entry.encoding = encoding


def encoding_of(entry: Entry) -> str:
    """What Redis would call the way in which the value is kept."""
    if entry.value is None or entry.length > EMBEDDED_BYTES_MAX:
        return "raw"
    if entry.encoding is not None:
        return entry.encoding
    return "int" if entry.length <= INTEGER_BYTES_MAX and parse_integer(entry.value) is not None else "embstr"


def placed(session: Caller, key: bytes, value: bytes | Reservation) -> bytes | Reservation | None:
    """A value that can no longer be refused; None when there is no room for it."""
    if not isinstance(value, bytes) or len(value) < INLINE_BYTES_MAX:
        return value
    reservation = session.store.reserve(key, len(value), session.space)
    if reservation is not None:
        reservation.view[:] = value  # came in an inline request, so it is at hand as bytes
    return reservation


def small_ones_fit(session: Caller, pairs: Sequence[tuple[bytes, object]]) -> bool:
    """Whether the values among `pairs` that are bytes can be stored together where not everything leaves for them. With
    a disk that is not known before: it is asked for each, and those before one that is refused stay."""
    store = session.store
    if not store.may_refuse or store.tiering is not None:
        return True
    growth = 0
    for key, value in pairs:
        if not isinstance(value, bytes):
            continue
        old = store.find(key, session.space)
        held = 0 if old is None or old.value is None else old.memory_bytes
        growth += max(
            0, ENTRY_OVERHEAD_BYTES + len(key) + len(value) - held
        )  # a shrinking one may follow a growing one
    return store.admits_inline(growth)


def give_back(args: list[bytes]) -> None:
    """End the holds that a command has brought and not used; those that were committed have ended already."""
    for arg in args:
        if isinstance(arg, Reservation):
            arg.abort()


def missing(session: Caller, key: bytes) -> bytes:
    """Nil, for a key that was looked for in vain, which a subscriber may want to know."""
    notify(session, "m", "keymiss", key)
    return session.nil


def look_up(session: Caller, key: bytes) -> Hold | None:
    """`fetch` for the commands that read a value to work with it; a miss is told of."""
    value = session.fetch(key, session.space)
    if value is None:
        notify(session, "m", "keymiss", key)
    return value


def reply_of(session: Caller, value: Hold) -> Reply:
    """A value's reply: small ones in one piece, the others lent, and held until they have left."""
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    session.hold(value)
    session.store.stats.hit_tokens += value.entry.tokens
    view = value.view
    return [b"$%d\r\n" % len(view), view, CRLF]


def expiry_ms(text: bytes, unit_ms: int, now_ms: int, name: str) -> int | bytes:
    """When a value is gone that has `text` units of `unit_ms` from `now_ms` on, as Unix ms, or Redis' error for it."""
    amount = parse_integer(text)
    if amount is None:
        return NOT_AN_INTEGER
    if amount <= 0 or amount > INT64_MAX // unit_ms:
        return invalid_expiry(name)
    when = amount * unit_ms + now_ms
    return when if when <= INT64_MAX else invalid_expiry(name)


def invalid_expiry(name: str) -> bytes:
    """The error for a time that cannot be."""
    return error(f"ERR invalid expire time in '{name}' command")


def option_expiry_ms(session: Caller, option: tuple[bytes, bytes], name: str) -> int | bytes:
    """`expiry_ms` of an option such as (b"EX", b"10")."""
    unit_ms, relative = UNITS[option[0]]
    return expiry_ms(option[1], unit_ms, session.store.now_ms() if relative else 0, name)


MGET_BYTES_HIGH = 1024 * 1024
"""Payload that MGET gathers before it begins to send."""

SET_FLAGS = frozenset({b"NX", b"XX", b"GET", b"KEEPTTL"})

_HEADS = tuple(b"$%d\r\n" % n for n in range(INLINE_BYTES_MAX))
"""Before every value that is bytes."""


@command(
    "get",
    arity=2,
    flags="readonly fast",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    waits=True,
    acl="read string fast",
    group="string",
    summary="Returns the string value of a key.",
    syntax="key",
    access="RO access",
)
def get(session: Caller, args: list[bytes]) -> Answer:
    """The value, lent if it lies in the arena."""
    value = session.fetch(args[1], session.space)
    if type(value) is bytes:
        return _HEADS[len(value)] + value + CRLF
    if value is not None:
        return _lent(session, value)  # type: ignore[arg-type]
    if session.store.below is not None and session.transaction is None:
        waiting = session.server.disk_reads.wait(session, args, ((args[1], session.space),))  # type: ignore[arg-type]
        if waiting is not None:
            return waiting
    return missing(session, args[1])


@command(
    "set",
    arity=-3,
    flags="write denyoom",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="write string slow",
    payload=(2, 0),
    group="string",
    summary="Sets the string value of a key, ignoring its type. The key is created if it doesn't exist.",
    syntax=(
        "key value [NX | XX] [GET] "
        "[EX seconds | PX milliseconds | EXAT unix-time-seconds | PXAT unix-time-milliseconds | KEEPTTL]"
    ),
    access="RW access update variable_flags",
    notes="RW and ACCESS due to the optional `GET` argument",
)
def set_(session: Caller, args: list[bytes]) -> Reply:
    """Publish a value; with options, decide first whether to."""
    value = args[2]
    if len(args) == 3 and not session.observed:
        if type(value) is bytes:
            return OK if session.store.put(args[1], value, session.space) else OUT_OF_MEMORY
        value.commit()  # type: ignore[attr-defined]
        return OK
    reply = _set_with_options(session, args)
    if isinstance(value, Reservation):
        value.abort()  # does nothing when it was committed
    return reply


def _set_with_options(session: Caller, args: list[bytes]) -> Reply:
    key = args[1]
    if not session.store.admits_inline(0):  # as Redis refuses all that may store, whether it would or not
        return OUT_OF_MEMORY
    options = set_options(session, args[3:], SET_FLAGS, "set")
    if isinstance(options, bytes):
        return options
    answer = _value(session, key) if b"GET" in options.flags else None
    done = publish_if(session, key, args[2], options)
    return done if answer is None or done is OUT_OF_MEMORY else answer


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
def setnx(session: Caller, args: list[bytes]) -> Reply:
    """1 when the key was free and holds the value now, else 0."""
    key, value = args[1], args[2]
    if not session.store.admits_inline(0):  # as Redis refuses all that may store, whether it would or not
        give_back(args)
        return OUT_OF_MEMORY
    if session.store.find(key, session.space) is not None:
        session.server.stats.sets_existed += 1
        give_back(args)
        return ZERO
    done = publish(session, key, value, 0, SET)
    return ONE if done is OK else done


@command(
    "mget",
    arity=-2,
    flags="readonly fast",
    keys=(1, -1, 1),
    reads=(1, -1, 1),
    waits=True,
    acl="read string fast",
    group="string",
    summary="Atomically returns the string values of one or more keys.",
    complexity="O(N) where N is the number of keys to retrieve.",
    syntax="key [key ...]",
    access="RO access",
    tips="request_policy:multi_shard",
)
def mget(session: Caller, args: list[bytes]) -> Answer:
    """The values in order, each lent; missing ones are nil. The keys count as used at one instant, the head last.

    From MGET_BYTES_HIGH of payload on the rest is looked up as the client takes it: the first value leaves before the
    last is found, and a client that does not read holds no more of the arena than that.
    """
    parts: list[Buffer] = [b"*%d\r\n" % (len(args) - 1)]
    left_bytes = MGET_BYTES_HIGH
    if session.store.below is not None:
        return _values_from(session, args, 1, parts)
    for at in range(1, len(args)):
        value = _value(session, args[at])
        if isinstance(value, bytes):
            parts.append(value)
            left_bytes -= len(value)
        else:
            parts += value
            left_bytes -= len(value[1])
        if left_bytes <= 0 and at + 1 < len(args):
            return _values_from(session, args, at + 1, parts)
    if not session.no_touch:
        session.store.touch(args[1:], session.space)
    return parts


def _values_from(session: Caller, args: list[bytes], at: int, parts: list[Buffer]) -> Iterator[Reply | Blocked]:
    """What MGET has found so far, then the values from argument `at` on as they are asked for, each waited for if it
    is on disk."""
    yield parts
    keys = args[at:]
    if session.store.below is None:
        yield from (_value(session, key) for key in keys)
    else:
        arrivals = session.server.disk_reads.stream(session, [(key, session.space) for key in keys])
        for key in keys:
            while (waiting := next(arrivals)) is not None:
                yield waiting
            yield _value(session, key)
    if not session.no_touch:
        session.store.touch(args[1:], session.space)


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
def mset(session: Caller, args: list[bytes]) -> Reply:
    """All the pairs or none: room for every value is had before the first becomes visible."""
    if len(args) % 2 == 0:
        give_back(args)
        return wrong_arity("mset")
    return _set_pairs(session, args)


@command(
    "msetnx",
    arity=-3,
    flags="write denyoom",
    keys=(1, -1, 2),
    acl="write string slow",
    payload=(2, 2),
    group="string",
    since="1.0.1",
    summary="Sets several keys at once, provided that none of them is there.",
    complexity="O(N) where N is the number of keys to set.",
    syntax="key value [key value ...]",
    access="OW insert",
    tips="request_policy:multi_shard response_policy:agg_min",
)
def msetnx(session: Caller, args: list[bytes]) -> Reply:
    """1 when every key was free and holds its value now, else 0 with nothing changed."""
    if len(args) % 2 == 0:
        give_back(args)
        return wrong_arity("msetnx")
    if any(session.store.find(key, session.space) is not None for key in args[1::2]):
        session.server.stats.sets_existed += len(args) // 2
        give_back(args)
        return ZERO
    done = _set_pairs(session, args)
    return ONE if done is OK else done


def _set_pairs(session: Caller, args: list[bytes]) -> bytes:
    """Place every value, then publish them in their order; a key named twice keeps the last one."""
    values = [placed(session, key, value) for key, value in zip(args[1::2], args[2::2], strict=True)]
    pairs = list(zip(args[1::2], values, strict=True))
    done = OK if None not in values and small_ones_fit(session, pairs) else OUT_OF_MEMORY
    for key, value in pairs:
        if done is OK:
            done = publish(session, key, value, 0, SET)  # type: ignore[arg-type]  # none is None
        elif isinstance(value, Reservation):
            value.abort()
    if done is OK:
        session.server.stats.sets_duplicate += len(pairs) - len({*args[1::2]})
    return done


@command(
    "getrange",
    arity=4,
    flags="readonly",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="read string slow",
    group="string",
    since="2.4.0",
    summary="Returns a substring of the string stored at a key.",
    complexity="O(1): a range of a stored value is lent, not copied.",
    syntax="key start end",
    access="RO access",
)
def getrange(session: Caller, args: list[bytes]) -> Reply:
    """Bytes start..end, both inclusive, negative ones counted from the end; empty when there are none."""
    start, end = parse_integer(args[2]), parse_integer(args[3])
    if start is None or end is None:
        return NOT_AN_INTEGER
    value = look_up(session, args[1])
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
    if end == length - 1:  # a client that reads a block in parts has then read it
        session.store.stats.hit_tokens += value.entry.tokens
    return [b"$%d\r\n" % (end - start + 1), value.view[start : end + 1], b"\r\n"]


@command(
    "substr",
    arity=4,
    flags="readonly",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="read string slow",
    group="string",
    summary="The old name of GETRANGE.",
    complexity="O(1): a range of a stored value is lent, not copied.",
    syntax="key start end",
    access="RO access",
)
def substr(session: Caller, args: list[bytes]) -> Reply:
    """As GETRANGE."""
    return getrange(session, args)


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
def strlen(session: Caller, args: list[bytes]) -> Reply:
    """Bytes of the value, 0 without one."""
    entry = session.store.find(args[1], session.space)
    if entry is None:
        notify(session, "m", "keymiss", args[1])
        return ZERO
    return integer(entry.length)


def _value(session: Caller, key: bytes) -> Reply:
    """A value's reply: small ones in one piece, the others lent."""
    value = session.fetch(key, session.space)
    if value is None:
        return missing(session, key)
    return _lent(session, value) if isinstance(value, Lease) else _HEADS[len(value)] + value + CRLF


def _lent(session: Caller, lease: Lease) -> Reply:
    """The reply that goes out of the arena as it is."""
    session.hold(lease)
    session.store.stats.hit_tokens += lease.entry.tokens
    view = lease.view
    return [b"$%d\r\n" % len(view), view, b"\r\n"]
