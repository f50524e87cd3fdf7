"""Commands about keys rather than values: whether they exist, how long they live, which there are.

Only TOUCH counts as a use: EXISTS, TYPE, TTL, OBJECT and MEMORY look without moving a block in the eviction order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arguments import INT64_MAX, parse_cursor, parse_integer
from .commands import command
from .patterns import matcher
from .replies import (
    INVALID_CURSOR,
    NOT_AN_INTEGER,
    OK,
    ONE,
    SYNTAX_ERROR,
    ZERO,
    Reply,
    array,
    bulk,
    bulks,
    error,
    integer,
    simple,
)

if TYPE_CHECKING:
    from .session import Session

SCAN_COUNT = 10
"""How many keys SCAN aims at when it is not told."""

TYPE_NAME = b"string"
"""The one type there is."""


@command(
    "exists",
    arity=-2,
    flags="readonly fast",
    keys=(1, -1, 1),
    acl="keyspace read fast",
    access="RO",
    tips="request_policy:multi_shard response_policy:agg_sum",
    complexity="O(N) in the number of keys",
    syntax="key [key ...]",
    summary="How many of the keys there are; one named twice counts twice.",
)
def exists(session: Session, args: list[bytes]) -> Reply:
    """EXISTS key [key ...]."""
    find, space = session.store.find, session.space
    if len(args) == 2:
        return ZERO if find(args[1], space) is None else ONE
    return integer(sum(find(key, space) is not None for key in args[1:]))


@command(
    "del",
    arity=-2,
    flags="write",
    keys=(1, -1, 1),
    acl="keyspace write slow",
    access="RM delete",
    tips="request_policy:multi_shard response_policy:agg_sum",
    complexity="O(N) in the number of keys",
    syntax="key [key ...]",
    summary="Delete keys; what is being read stays whole for its reader.",
)
def del_(session: Session, args: list[bytes]) -> Reply:
    """DEL key [key ...]."""
    return integer(session.store.delete(args[1:], session.space))


@command(
    "unlink",
    arity=-2,
    flags="write fast",
    keys=(1, -1, 1),
    acl="keyspace write fast",
    access="RM delete",
    tips="request_policy:multi_shard response_policy:agg_sum",
    since="4.0.0",
    complexity="O(N) in the number of keys",
    syntax="key [key ...]",
    summary="The same as DEL: freeing an extent costs no time that could be put off.",
)
def unlink(session: Session, args: list[bytes]) -> Reply:
    """UNLINK key [key ...]."""
    return integer(session.store.delete(args[1:], session.space))


@command(
    "touch",
    arity=-2,
    flags="readonly fast",
    keys=(1, -1, 1),
    acl="keyspace read fast",
    access="RO",
    tips="request_policy:multi_shard response_policy:agg_sum",
    since="3.2.1",
    complexity="O(N) in the number of keys",
    syntax="key [key ...]",
    summary="Note that keys were used, and count those that exist. The first one named is evicted last.",
)
def touch(session: Session, args: list[bytes]) -> Reply:
    """TOUCH key [key ...]."""
    return integer(session.store.touch(args[1:], session.space))


@command(
    "type",
    arity=2,
    flags="readonly fast",
    keys=(1, 1, 1),
    acl="keyspace read fast",
    access="RO",
    syntax="key",
    summary="The type of a value: string, or none where there is no key.",
)
def type_(session: Session, args: list[bytes]) -> Reply:
    """TYPE key."""
    return simple(b"none" if session.store.find(args[1], session.space) is None else TYPE_NAME)


@command(
    "ttl",
    arity=2,
    flags="readonly fast",
    keys=(1, 1, 1),
    acl="keyspace read fast",
    access="RO access",
    tips="nondeterministic_output",
    syntax="key",
    summary="Seconds that a key has left; -1 without an end, -2 without a key.",
)
def ttl(session: Session, args: list[bytes]) -> Reply:
    """TTL key, rounded to the nearest second."""
    left_ms = _left_ms(session, args[1])
    return integer(left_ms if left_ms < 0 else (left_ms + 500) // 1000)


@command(
    "pttl",
    arity=2,
    flags="readonly fast",
    keys=(1, 1, 1),
    acl="keyspace read fast",
    access="RO access",
    tips="nondeterministic_output",
    since="2.6.0",
    syntax="key",
    summary="Milliseconds that a key has left; -1 without an end, -2 without a key.",
)
def pttl(session: Session, args: list[bytes]) -> Reply:
    """PTTL key."""
    return integer(_left_ms(session, args[1]))


@command(
    "expire",
    arity=-3,
    flags="write fast",
    keys=(1, 1, 1),
    acl="keyspace write fast",
    access="RW update",
    syntax="key seconds [NX | XX | GT | LT]",
    summary="Let a key end that many seconds from now.",
)
def expire(session: Session, args: list[bytes]) -> Reply:
    """EXPIRE key seconds [NX|XX|GT|LT]."""
    return _expire(session, args, 1000)


@command(
    "pexpire",
    arity=-3,
    flags="write fast",
    keys=(1, 1, 1),
    acl="keyspace write fast",
    access="RW update",
    since="2.6.0",
    syntax="key milliseconds [NX | XX | GT | LT]",
    summary="Let a key end that many milliseconds from now.",
)
def pexpire(session: Session, args: list[bytes]) -> Reply:
    """PEXPIRE key milliseconds [NX|XX|GT|LT]."""
    return _expire(session, args, 1)


@command(
    "persist",
    arity=2,
    flags="write fast",
    keys=(1, 1, 1),
    acl="keyspace write fast",
    access="RW update",
    since="2.2.0",
    syntax="key",
    summary="Take a key's end away.",
)
def persist(session: Session, args: list[bytes]) -> Reply:
    """PERSIST key."""
    entry = session.store.find(args[1], session.space)
    if entry is None or not entry.expire_at_ms:
        return ZERO
    return ONE if session.store.expire(args[1], 0, session.space) else ZERO


@command(
    "scan",
    arity=-2,
    flags="readonly",
    acl="keyspace read slow",
    tips="nondeterministic_output request_policy:special",
    since="2.8.0",
    complexity="O(1) a call, O(N) for the whole walk",
    syntax="cursor [MATCH pattern] [COUNT count] [TYPE type]",
    summary="Walk the keys step by step; a key that is there all the while is found.",
)
def scan(session: Session, args: list[bytes]) -> Reply:
    """SCAN cursor [MATCH pattern] [COUNT n] [TYPE name]: next cursor and keys, filtered after they were drawn."""
    cursor = parse_cursor(args[1])
    if cursor is None:
        return INVALID_CURSOR
    count, pattern, wanted = SCAN_COUNT, b"*", TYPE_NAME
    for at in range(2, len(args), 2):
        option = args[at].upper()
        if at + 1 == len(args) or option not in (b"COUNT", b"MATCH", b"TYPE"):
            return SYNTAX_ERROR
        if option == b"MATCH":
            pattern = args[at + 1]
        elif option == b"TYPE":
            wanted = args[at + 1].lower()
        else:
            number = parse_integer(args[at + 1])
            if number is None:
                return NOT_AN_INTEGER
            if number < 1:
                return SYNTAX_ERROR
            count = number
    following, keys = session.store.scan(cursor, count, session.space)
    fits = matcher(pattern)
    found = [key for key in keys if fits(key)] if wanted == TYPE_NAME else []
    return array([bulk(b"%d" % following), bulks(found)])


@command(
    "keys",
    arity=2,
    flags="readonly",
    acl="keyspace read slow dangerous",
    tips="request_policy:all_shards nondeterministic_output_order",
    complexity="O(N) in the number of keys of the database",
    syntax="pattern",
    summary="Every key that matches a glob pattern. It holds up everybody else while it looks: prefer SCAN.",
)
def keys(session: Session, args: list[bytes]) -> Reply:
    """KEYS pattern."""
    fits = matcher(args[1])
    return bulks([key for key in session.store.keys_in(session.space) if fits(key)])


@command(
    "dbsize",
    arity=1,
    flags="readonly fast",
    acl="keyspace read fast",
    group="server",
    tips="request_policy:all_shards response_policy:agg_sum",
    summary="How many keys the database holds.",
)
def dbsize(session: Session, args: list[bytes]) -> Reply:
    """DBSIZE."""
    return integer(session.store.count(session.space))


@command(
    "randomkey",
    arity=1,
    flags="readonly",
    acl="keyspace read slow",
    tips="request_policy:all_shards nondeterministic_output",
    summary="Any key of the database.",
)
def randomkey(session: Session, args: list[bytes]) -> Reply:
    """RANDOMKEY."""
    key = session.store.random_key(session.space)
    return session.nil if key is None else bulk(key)


@command(
    "flushdb",
    arity=-1,
    flags="write",
    acl="keyspace write slow dangerous",
    group="server",
    tips="request_policy:all_shards response_policy:all_succeeded",
    complexity="O(N) in the number of keys of the database",
    syntax="[ASYNC | SYNC]",
    summary="Delete every key of the database.",
)
def flushdb(session: Session, args: list[bytes]) -> Reply:
    """FLUSHDB [ASYNC|SYNC]."""
    return _flush(session, args, session.space)


@command(
    "flushall",
    arity=-1,
    flags="write",
    acl="keyspace write slow dangerous",
    group="server",
    tips="request_policy:all_shards response_policy:all_succeeded",
    complexity="O(N) in the number of keys of all databases",
    syntax="[ASYNC | SYNC]",
    summary="Delete every key of every database.",
)
def flushall(session: Session, args: list[bytes]) -> Reply:
    """FLUSHALL [ASYNC|SYNC]."""
    return _flush(session, args, None)


def _flush(session: Session, args: list[bytes], space: int | None) -> Reply:
    """Both FLUSH commands; ASYNC is taken and done at once, because there is nothing that would be worth deferring."""
    if len(args) > 2 or (len(args) == 2 and args[1].upper() not in (b"ASYNC", b"SYNC")):
        return SYNTAX_ERROR
    session.store.flush(space)
    return OK


def _left_ms(session: Session, key: bytes) -> int:
    """Milliseconds until `key` ends; -1 if it does not, -2 if there is none."""
    entry = session.store.find(key, session.space)
    if entry is None:
        return -2
    return max(0, entry.expire_at_ms - session.store.now_ms()) if entry.expire_at_ms else -1


def _expire(session: Session, args: list[bytes], unit_ms: int) -> Reply:
    """EXPIRE and PEXPIRE. Words are checked before the number and the number before the key, as Redis does."""
    conditions = {option.upper() for option in args[3:]}
    for option in args[3:]:
        if option.upper() not in (b"NX", b"XX", b"GT", b"LT"):
            return error(b"ERR Unsupported option %b" % option.split(b"\0")[0])
    if b"NX" in conditions and len(conditions) > 1:
        return error("ERR NX and XX, GT or LT options at the same time are not compatible")
    if {b"GT", b"LT"} <= conditions:
        return error("ERR GT and LT options at the same time are not compatible")
    amount = parse_integer(args[2])
    if amount is None:
        return NOT_AN_INTEGER
    at_ms = amount * unit_ms + session.store.now_ms()
    if at_ms > INT64_MAX or amount * unit_ms < -INT64_MAX - 1:
        return error(b"ERR invalid expire time in '%b' command" % args[0].lower())
    entry = session.store.find(args[1], session.space)
    if entry is None or not _wanted(conditions, entry.expire_at_ms, at_ms):
        return ZERO
    # 0 means "never" to the store; a time that far back is long past either way.
    return ONE if session.store.expire(args[1], max(at_ms, 1), session.space) else ZERO


def _wanted(conditions: set[bytes], current_ms: int, at_ms: int) -> bool:
    """Whether a new end passes NX, XX, GT and LT; a key without an end counts as endless."""
    if b"NX" in conditions and current_ms:
        return False
    if b"XX" in conditions and not current_ms:
        return False
    if b"GT" in conditions and (not current_ms or at_ms <= current_ms):
        return False
    return not (b"LT" in conditions and current_ms and at_ms >= current_ms)
