"""How a command makes a value visible and tells of it: the steps that every writing string command has in common.

A value is bytes when it was small or had to be computed, and a Reservation when it lies in the arena already; whichever
it is, it is published at once or not at all, and events go out after the change in Redis' order: `new` for a key that
was not there, what the command has done, `expire` if it gave the key an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvredis.server.protocol.arguments import INT64_MAX, parse_integer
from kvredis.server.protocol.replies import CRLF, NOT_AN_INTEGER, OK, OUT_OF_MEMORY, SYNTAX_ERROR, Reply, error
from kvredis.storage.entry import ENTRY_OVERHEAD_BYTES, INLINE_BYTES_MAX, Lease, Reservation

from .keyspace_events import notify

if TYPE_CHECKING:
    from kvredis.server.client.session import Session
    from kvredis.storage.entry import Entry

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


def set_options(session: Session, words: Sequence[bytes], allowed: frozenset[bytes], name: str) -> SetOptions | bytes:
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


def publish_if(session: Session, key: bytes, value: bytes | Reservation, options: SetOptions) -> bytes:
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


def publish(session: Session, key: bytes, value: bytes | Reservation, expire_at_ms: int, *events: Event) -> bytes:
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


def note_encoding(session: Session, name: tuple[bytes, int], encoding: str) -> None:
    """What OBJECT ENCODING answers for a value just published, where Redis does not look for an integer in it."""
    entry = session.store.find(*name)
    if entry is not None and entry.value is not None and entry.length <= EMBEDDED_BYTES_MAX:
        entry.encoding = entry.value, encoding


def encoding_of(entry: Entry) -> str:
    """What Redis would call the way in which the value is kept."""
    if entry.value is None or entry.length > EMBEDDED_BYTES_MAX:
        return "raw"
    if entry.encoding is not None and entry.encoding[0] is entry.value:
        return entry.encoding[1]
    return "int" if entry.length <= INTEGER_BYTES_MAX and parse_integer(entry.value) is not None else "embstr"


def placed(session: Session, key: bytes, value: bytes | Reservation) -> bytes | Reservation | None:
    """A value that can no longer be refused; None when there is no room for it."""
    if not isinstance(value, bytes) or len(value) < INLINE_BYTES_MAX:
        return value
    reservation = session.store.reserve(key, len(value), session.space)
    if reservation is not None:
        reservation.view[:] = value  # came in an inline request, so it is at hand as bytes
    return reservation


def small_ones_fit(session: Session, pairs: Sequence[tuple[bytes, object]]) -> bool:
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
        growth += max(0, ENTRY_OVERHEAD_BYTES + len(key) + len(value) - held)  # who shrinks may come after who grows
    return store.admits_inline(growth)


def give_back(args: list[bytes]) -> None:
    """End the holds that a command has brought and not used; those that were committed have ended already."""
    for arg in args:
        if isinstance(arg, Reservation):
            arg.abort()


def missing(session: Session, key: bytes) -> bytes:
    """Nil, for a key that was looked for in vain, which somebody may want to know."""
    notify(session, "m", "keymiss", key)
    return session.nil


def look_up(session: Session, key: bytes) -> Hold | None:
    """`fetch` for the commands that read a value to work with it; a miss is told of."""
    value = session.fetch(key, session.space)
    if value is None:
        notify(session, "m", "keymiss", key)
    return value


def reply_of(session: Session, value: Hold) -> Reply:
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


def option_expiry_ms(session: Session, option: tuple[bytes, bytes], name: str) -> int | bytes:
    """`expiry_ms` of an option such as (b"EX", b"10")."""
    unit_ms, relative = UNITS[option[0]]
    return expiry_ms(option[1], unit_ms, session.store.now_ms() if relative else 0, name)
