"""DUMP and RESTORE: one value with version and checksum, to be carried to another server, Redis included.

A large value is lent to its DUMP as to a GET, between a head and a footer. A RESTORE receives the whole dump into the
arena; the value then moves a few bytes towards the front of its own extent and is published from there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Final

from kvredis.server.client.blocked import Answer, Pending, StepTimer
from kvredis.server.commands.keyspace_events import notify
from kvredis.server.commands.registry import COMMANDS, command
from kvredis.server.commands.values import DEL, give_back, look_up, publish
from kvredis.server.protocol.arguments import INT64_MAX, parse_integer
from kvredis.server.protocol.replies import CRLF, NOT_AN_INTEGER, OK, OUT_OF_MEMORY, SYNTAX_ERROR, Reply, bulk, error
from kvredis.storage.entry import INLINE_BYTES_MAX, Lease, Reservation

from .crc64 import crc64, crc64_in_steps
from .lzf import EXPANSION_MAX, decompress
from .rdb import Text, decode, encode_head, footer, is_whole_in_steps

if TYPE_CHECKING:
    from kvredis.server.client.session import Session

BUSY_KEY: Final = error("BUSYKEY Target key name already exists.")
INVALID_TTL: Final = error("ERR Invalid TTL value, must be >= 0")
INVALID_IDLE_TIME: Final = error("ERR Invalid IDLETIME value, must be >= 0")
INVALID_FREQUENCY: Final = error("ERR Invalid FREQ value, must be >= 0 and <= 255")
WRONG_CHECKSUM: Final = error("ERR DUMP payload version or checksum are wrong")
BAD_DATA: Final = error("ERR Bad data format")
PACKED_BYTES_MAX: Final = 8 * 1024 * 1024
"""The longest compressed string that is unpacked. A hostile one takes a third of a second for each MiB, in which nobody
else is served; a value that is worth storing here hardly compresses, and Redis then dumps it as it is."""
TOO_LONG: Final = error(f"ERR Bad data format: a compressed string may have {PACKED_BYTES_MAX} bytes")

LONG_BYTES: Final = 256 * 1024
"""A dump of so many bytes is looked at in steps: its checksum takes longer than another client is to wait."""
MOVED_BYTES: Final = 256 * 1024
"""What is moved of a long value between two looks at the clock."""

_RESTORE = {
    "arity": -4,
    "keys": (1, 1, 1),
    "acl": "keyspace write slow dangerous",
    "payload": (3, 0),
    "complexity": "O(N) in the length of the value.",
    "syntax": "key ttl serialized-value [REPLACE] [ABSTTL] [IDLETIME seconds] [FREQ frequency]",
    "access": "OW update",
}


@command(
    "dump",
    arity=2,
    flags="readonly",
    keys=(1, 1, 1),
    reads=(1, 1, 1),
    acl="keyspace read slow",
    since="2.6.0",
    summary="Returns a value in the form that RESTORE takes.",
    complexity="O(N) in the length of the value, for its checksum.",
    syntax="key",
    access="RO access",
    tips="nondeterministic_output",
)
def dump(session: Session, args: list[bytes]) -> Answer:
    """DUMP key: type, value, version and checksum; nil without a key."""
    value = look_up(session, args[1])
    if value is None:
        return session.nil
    if isinstance(value, bytes):
        head = encode_head(value, len(value))
        body = head if head[1] >= 0xC0 else head + value
        return bulk(body + footer(crc64(body)))
    dumped = _dumped(session, value)
    next(dumped)  # from here on the lease ends with it, also when no part of it is ever asked for
    return dumped


def _dumped(session: Session, value: Lease) -> Iterator[Reply | Pending]:
    """The dump of a large value, whose checksum is made in steps; before it an empty part, which is the caller's."""
    with ExitStack() as ends:
        ends.callback(value.release)
        yield b""
        head, timer = encode_head(None, value.length), StepTimer()
        steps = crc64_in_steps(value.view, crc64(head))
        while (crc := next(steps)) is None:
            if timer.is_over():
                yield from session.turns_for_others()
        tail = footer(crc)
        session.hold(value)
        ends.pop_all()  # the reply has it now
        yield [b"$%d\r\n%b" % (len(head) + value.length + len(tail), head), value.view, tail + CRLF]


@command(
    "restore",
    flags="write denyoom",
    since="2.6.0",
    summary="Makes a key of what DUMP has returned.",
    **_RESTORE,  # type: ignore[arg-type]
)
def restore(session: Session, args: list[bytes]) -> Answer:
    """RESTORE key ttl dump [REPLACE] [ABSTTL] [IDLETIME seconds | FREQ n]."""
    restored = _restored(session, args)
    reply = next(restored)
    return restored if reply == b"" else reply


@command(
    "restore-asking",
    flags="write denyoom asking",
    group="server",
    since="3.0.0",
    summary="RESTORE, as one node of a cluster says it to another.",
    **_RESTORE,  # type: ignore[arg-type]
)
def restore_asking(session: Session, args: list[bytes]) -> Answer:
    """As RESTORE."""
    return restore(session, args)


def _restored(session: Session, args: list[bytes]) -> Iterator[Reply | Pending]:
    """The reply to a RESTORE. Before that to one of a long dump, whose checksum is looked at in steps, comes an empty
    part, which is the caller's: from there on what the command brought ends with this."""
    body = args[3].view if isinstance(args[3], Reservation) else memoryview(args[3])
    is_long = len(body) >= LONG_BYTES
    with ExitStack() as ends:
        ends.callback(give_back, args)
        if is_long:
            yield b""
        reply = yield from _restore(session, args, body, in_steps=is_long)
        if is_long and isinstance(reply, bytes) and reply.startswith(b"-"):
            session.count_failure(COMMANDS[args[0].upper()], reply)
    yield reply


def _restore(
    session: Session, args: list[bytes], body: memoryview, *, in_steps: bool
) -> Generator[Pending, None, Reply]:
    """The command without the end of what it brought. Its checks come in Redis' order."""
    key, store = args[1], session.store
    options = _read_options(args)
    if isinstance(options, bytes):
        return options
    words, idle_s = options
    there = store.find(key, session.space) is not None
    if there and b"REPLACE" not in words:
        return BUSY_KEY
    ttl_ms = parse_integer(args[2])
    if ttl_ms is None:
        return NOT_AN_INTEGER
    if ttl_ms < 0:
        return INVALID_TTL
    timer, looks = StepTimer(), is_whole_in_steps(body)
    while (whole := next(looks)) is None:
        if in_steps and timer.is_over():
            yield from session.turns_for_others()
    if not whole:
        return WRONG_CHECKSUM
    found = decode(body)
    if isinstance(found, Text):
        value, refusal = yield from _value(session, args, body, found, timer)
    else:
        value, refusal = found, BAD_DATA
    if value is None:
        return refusal
    there = store.find(key, session.space) is not None  # others have had their turn
    if there and b"REPLACE" not in words:
        return BUSY_KEY
    expire_at_ms = min(ttl_ms + (0 if b"ABSTTL" in words else store.now_ms()), INT64_MAX) if ttl_ms else 0
    with value if isinstance(value, Reservation) else nullcontext():
        if ttl_ms and expire_at_ms <= store.now_ms():
            if store.delete((key,), session.space):
                notify(session, *DEL, key)
            return OK
        renewed = (("n", "new"),) if there else ()  # to Redis a replaced key is a new one here
        done = publish(session, key, value, expire_at_ms, *renewed, ("g", "restore"))
    entry = store.find(key, session.space)
    if done is OK and entry is not None:
        entry.accessed_s -= idle_s
    return done


def _read_options(args: list[bytes]) -> tuple[set[bytes], int] | bytes:
    """The words REPLACE and ABSTTL as far as they are there and the idle time in seconds, or an error.

    FREQ is checked and means nothing: what is restored begins without uses.
    """
    words: set[bytes] = set()
    idle_s = 0
    at = 4
    while at < len(args):
        option = args[at].upper()
        if option in (b"REPLACE", b"ABSTTL"):
            words.add(option)
        elif option in (b"IDLETIME", b"FREQ") and at + 1 < len(args) and not {b"IDLETIME", b"FREQ"} - {option} & words:
            number = parse_integer(args[at + 1])
            if number is None:
                return NOT_AN_INTEGER
            if option == b"IDLETIME" and number < 0:
                return INVALID_IDLE_TIME
            if option == b"FREQ" and not 0 <= number <= 255:
                return INVALID_FREQUENCY
            idle_s = number if option == b"IDLETIME" else idle_s
            words.add(option)
            at += 1
        else:
            return SYNTAX_ERROR
        at += 1
    return words, idle_s


def _value(
    session: Session, args: list[bytes], body: memoryview, text: Text, timer: StepTimer
) -> Generator[Pending, None, tuple[bytes | Reservation | None, bytes]]:
    """The string that `text` points out in `body`, where it can be published; None and an error if it cannot be had."""
    packed = body[text.start : text.end]
    if not text.packed:
        received = args[3]
        if not isinstance(received, Reservation) or text.length < INLINE_BYTES_MAX:
            return bytes(packed), BAD_DATA
        for at in range(0, text.length, MOVED_BYTES):  # some ten bytes forward, within the extent that is published
            part = packed[at : at + MOVED_BYTES]
            received.view[at : at + len(part)] = part
            if text.length >= LONG_BYTES and timer.is_over():
                yield from session.turns_for_others()
        received.shorten(text.length)
        return received, BAD_DATA
    if len(packed) > PACKED_BYTES_MAX:
        return None, TOO_LONG
    if text.length > min(EXPANSION_MAX * len(packed), session.server.bulk_bytes_max):
        return None, BAD_DATA  # not to be believed, so no room is made for it
    if text.length < INLINE_BYTES_MAX:
        room = bytearray(text.length)
        return (bytes(room) if decompress(packed, memoryview(room)) else None), BAD_DATA
    reservation = session.store.reserve(args[1], text.length, session.space)
    if reservation is None:
        return None, OUT_OF_MEMORY
    if decompress(packed, reservation.view):
        return reservation, BAD_DATA
    reservation.abort()
    return None, BAD_DATA
