"""How long keys live: the commands that set, tell and take away the time at which one ends.

Times are Unix milliseconds on the wall clock, so a clock that is set back lets keys live longer by as much. None of
this counts as a use.
"""

from __future__ import annotations

from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import INT64_MAX, parse_integer
from kvredis.server.protocol.replies import NOT_AN_INTEGER, ONE, ZERO, Reply, error, integer

from .keyspace_events import notify
from .registry import command
from .strings import DEL, EXPIRE, invalid_expiry


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
def expire(session: Caller, args: list[bytes]) -> Reply:
    """EXPIRE key seconds [NX|XX|GT|LT]."""
    return _expire(session, args, 1000, session.store.now_ms())


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
def pexpire(session: Caller, args: list[bytes]) -> Reply:
    """PEXPIRE key milliseconds [NX|XX|GT|LT]."""
    return _expire(session, args, 1, session.store.now_ms())


@command(
    "expireat",
    arity=-3,
    flags="write fast",
    keys=(1, 1, 1),
    acl="keyspace write fast",
    access="RW update",
    since="1.2.0",
    syntax="key unix-time-seconds [NX | XX | GT | LT]",
    summary="Let a key end at a time given in seconds since 1970.",
)
def expireat(session: Caller, args: list[bytes]) -> Reply:
    """EXPIREAT key unix-seconds [NX|XX|GT|LT]."""
    return _expire(session, args, 1000, 0)


@command(
    "pexpireat",
    arity=-3,
    flags="write fast",
    keys=(1, 1, 1),
    acl="keyspace write fast",
    access="RW update",
    since="2.6.0",
    syntax="key unix-time-milliseconds [NX | XX | GT | LT]",
    summary="Let a key end at a time given in milliseconds since 1970.",
)
def pexpireat(session: Caller, args: list[bytes]) -> Reply:
    """PEXPIREAT key unix-milliseconds [NX|XX|GT|LT]."""
    return _expire(session, args, 1, 0)


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
def ttl(session: Caller, args: list[bytes]) -> Reply:
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
def pttl(session: Caller, args: list[bytes]) -> Reply:
    """PTTL key."""
    return integer(_left_ms(session, args[1]))


@command(
    "expiretime",
    arity=2,
    flags="readonly fast",
    keys=(1, 1, 1),
    acl="keyspace read fast",
    access="RO access",
    since="7.0.0",
    syntax="key",
    summary="When a key ends, in seconds since 1970; -1 without an end, -2 without a key.",
)
def expiretime(session: Caller, args: list[bytes]) -> Reply:
    """EXPIRETIME key, rounded to the nearest second."""
    at_ms = _end_ms(session, args[1])
    return integer(at_ms if at_ms < 0 else (at_ms + 500) // 1000)


@command(
    "pexpiretime",
    arity=2,
    flags="readonly fast",
    keys=(1, 1, 1),
    acl="keyspace read fast",
    access="RO access",
    since="7.0.0",
    syntax="key",
    summary="When a key ends, in milliseconds since 1970; -1 without an end, -2 without a key.",
)
def pexpiretime(session: Caller, args: list[bytes]) -> Reply:
    """PEXPIRETIME key."""
    return integer(_end_ms(session, args[1]))


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
def persist(session: Caller, args: list[bytes]) -> Reply:
    """PERSIST key."""
    entry = session.store.find(args[1], session.space)
    if entry is None or not entry.expire_at_ms:
        return ZERO
    if not session.store.expire(args[1], 0, session.space):
        return ZERO
    notify(session, "g", "persist", args[1])
    return ONE


def _end_ms(session: Caller, key: bytes) -> int:
    """When `key` ends, as Unix ms; -1 if it does not, -2 if there is none."""
    entry = session.store.find(key, session.space)
    if entry is None:
        notify(session, "m", "keymiss", key)
        return -2
    return entry.expire_at_ms or -1


def _left_ms(session: Caller, key: bytes) -> int:
    """Milliseconds until `key` ends; -1 if it does not, -2 if there is none."""
    at_ms = _end_ms(session, key)
    return at_ms if at_ms < 0 else max(0, at_ms - session.store.now_ms())


def _expire(session: Caller, args: list[bytes], unit_ms: int, base_ms: int) -> Reply:
    """The four that set an end, `args[2]` units from `base_ms` on.

    Words are checked before the number and the number before the key, as Redis does.
    """
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
    at_ms = amount * unit_ms + base_ms
    if at_ms > INT64_MAX or amount * unit_ms < -INT64_MAX - 1:
        return invalid_expiry(args[0].lower().decode())
    entry = session.store.find(args[1], session.space)
    if entry is None or not _wanted(conditions, entry.expire_at_ms, at_ms):
        return ZERO
    past = at_ms <= session.store.now_ms()
    # 0 means "never" to the store; a time that far back is long past either way.
    if not session.store.expire(args[1], max(at_ms, 1), session.space):
        return ZERO
    notify(session, *(DEL if past else EXPIRE), args[1])
    return ONE


def _wanted(conditions: set[bytes], current_ms: int, at_ms: int) -> bool:
    """Whether a new end passes NX, XX, GT and LT; a key without an end counts as endless."""
    if b"NX" in conditions and current_ms:
        return False
    if b"XX" in conditions and not current_ms:
        return False
    if b"GT" in conditions and (not current_ms or at_ms <= current_ms):
        return False
    return not (b"LT" in conditions and current_ms and at_ms >= current_ms)
