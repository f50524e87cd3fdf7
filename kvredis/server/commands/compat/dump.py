"""DUMP and RESTORE: one value with version and checksum, to be carried to another server, Redis included.

A large value is lent to its DUMP as to a GET, between a head and a footer. A RESTORE receives the whole dump into the
arena; the value then moves a few bytes towards the front of its own extent and is published from there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Final

from kvredis.server.client.blocked import Answer, Blocked, StepTimer
from kvredis.server.commands.keyspace_events import notify
from kvredis.server.commands.registry import COMMANDS, command
from kvredis.server.commands.strings import DEL, give_back, look_up, publish
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import INT64_MAX, parse_integer
from kvredis.server.protocol.replies import CRLF, NOT_AN_INTEGER, OK, OUT_OF_MEMORY, SYNTAX_ERROR, Reply, bulk, error
from kvredis.storage.entry import INLINE_BYTES_MAX, Lease, Reservation

# ---- crc64 -----------------------------------------------------------------------------------------------------------
#
# CRC-64/Jones, the checksum at the end of a DUMP: reflected, polynomial 0xad93d23594c935a9, nothing inverted.
#
# No C library has this polynomial, and a table walked byte by byte in Python makes 10 MB/s: a block of 32 MiB would
# hold up every client for seconds. So a long message is folded first. Modulo the polynomial P,
#
#     x^124107 = x^38996 + x^29947 + x^9931 + x^3789 + x^1781 + 1
#
# (a sparse multiple of P, found by a birthday search; the test divides it by P), hence a stretch at the front of the
# message may be struck out if it is added again at those six places further on. Long integers do that 10,000 bytes at a
# time with six shifts, and only what is left at the end goes through the table.


_POLYNOMIAL_REFLECTED: Final = 0x95AC9329AC4BC9B5

MULTIPLE: Final = (124107, 38996, 29947, 9931, 3789, 1781, 0)
"""Exponents of a polynomial that P divides."""

_FOLD_BYTES: Final = 10_000  # no more than the gap between the two highest exponents, 85,111 bits
_FOLD_BITS: Final = 8 * _FOLD_BYTES
_FOLD_MASK: Final = (1 << _FOLD_BITS) - 1
_SHIFTS: Final = tuple(MULTIPLE[0] - exponent - _FOLD_BITS for exponent in MULTIPLE[1:])
_CARRY_BYTES: Final = -(-MULTIPLE[0] // 8)  # how far ahead of a struck-out stretch's end its echoes may lie


def _make_table() -> tuple[int, ...]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL_REFLECTED if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE: Final = _make_table()


def crc64(data: bytes | memoryview, crc: int = 0) -> int:
    """The checksum of `data`; with `crc`, of what that one stands for followed by `data`. Some 400 MB/s."""
    return next(found for found in crc64_in_steps(data, crc) if found is not None)


def crc64_in_steps(data: bytes | memoryview, crc: int = 0) -> Iterator[int | None]:
    """The same, with a None after each stretch of _FOLD_BYTES, for a caller who has other things to do as well; the
    checksum comes last."""
    view = memoryview(data)
    at = 0
    if len(view) >= _FOLD_BYTES + _CARRY_BYTES:
        carry = crc  # the low bits are the earlier ones of the message
        while len(view) - at >= _FOLD_BYTES + _CARRY_BYTES:
            front = carry & _FOLD_MASK ^ int.from_bytes(view[at : at + _FOLD_BYTES], "little")
            carry >>= _FOLD_BITS
            for shift in _SHIFTS:
                carry ^= front << shift
            at += _FOLD_BYTES
            yield None
        rest = carry ^ int.from_bytes(view[at:], "little")
        yield crc64_by_table(rest.to_bytes(len(view) - at, "little"))
    else:
        yield crc64_by_table(view, crc)


def crc64_by_table(data: bytes | memoryview, crc: int = 0) -> int:
    """The same, byte by byte."""
    table = _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc


# ---- lzf -------------------------------------------------------------------------------------------------------------
#
# Reading LZF, the compression of strings in a DUMP of Redis. Nothing here writes it: KV blocks do not compress.
#
# The format (liblzf): a control byte below 32 is followed by that many bytes and one more, taken literally; any other
# says how long a piece of what came out before is repeated (its upper three bits, a further byte if they are all ones,
# plus 2) and how far back it begins (its lower five bits and the next byte, plus 1).


EXPANSION_MAX: Final = 88
"""A repetition takes three bytes and gives 264: nothing grows more than that."""


def decompress(data: memoryview, room: memoryview) -> bool:
    """Fill `room`, whose length must be that of the text, from `data`; False when they do not fit each other."""
    at, end = 0, 0
    data_end, room_end = len(data), len(room)
    while at < data_end:
        control = data[at]
        at += 1
        if control < 32:
            length = control + 1
            if at + length > data_end or end + length > room_end:
                return False
            room[end : end + length] = data[at : at + length]
            at += length
        else:
            length = control >> 5
            if length == 7:
                if at >= data_end:
                    return False
                length += data[at]
                at += 1
            if at >= data_end:
                return False
            distance = ((control & 31) << 8) + data[at] + 1
            at += 1
            length += 2
            start = end - distance
            if start < 0 or end + length > room_end:
                return False
            if distance >= length:
                room[end : end + length] = room[start : start + length]
            else:  # it repeats what it writes itself
                piece = bytes(room[start:end])
                room[end : end + length] = (piece * (length // distance + 1))[:length]
        end += length
    return end == room_end


# ---- rdb -------------------------------------------------------------------------------------------------------------
#
# A string as Redis' RDB format writes it, which is what a DUMP holds between its type byte and its footer.
#
# Short integers are kept as such and everything else as its length and its bytes; Redis also compresses, which is read
# here and not written. The format of strings has been the same through all versions that this reads.


VERSION_MAX: Final = 11
"""Of Redis 7.2: what claims to be newer is refused, as there."""

VERSION_WRITTEN: Final = 10
"""Of Redis 7.0: to strings it is the same as 11, and this way Redis from 7.0 on can restore what is dumped here."""

STRING_TYPE: Final = 0
FOOTER_BYTES: Final = 10  # two of version, eight of checksum

_INTEGER_TEXT_MAX: Final = 11  # no longer text is tried as an integer, as in Redis
_LZF: Final = 3


@dataclass(frozen=True, slots=True)
class Text:
    """Where in a dump a string's bytes stand, and how long it is; it is compressed when that is not the same."""

    start: int
    end: int
    length: int
    packed: bool


def encode_head(value: bytes | None, length: int) -> bytes:
    """What a dump holds up to the string's bytes; all of it for an integer. `value` may be None if it is long."""
    number = parse_integer(value) if value is not None and length <= _INTEGER_TEXT_MAX else None
    if number is not None:
        for code, size in enumerate((1, 2, 4)):
            if -(1 << 8 * size - 1) <= number < 1 << 8 * size - 1:
                return bytes((STRING_TYPE, 0xC0 | code)) + number.to_bytes(size, "little", signed=True)
    if length < 1 << 6:
        return bytes((STRING_TYPE, length))
    if length < 1 << 14:
        return bytes((STRING_TYPE, 0x40 | length >> 8, length & 255))
    if length < 1 << 32:
        return b"%c\x80%b" % (STRING_TYPE, length.to_bytes(4, "big"))
    return b"%c\x81%b" % (STRING_TYPE, length.to_bytes(8, "big"))


def footer(crc: int) -> bytes:
    """What ends a dump, given the checksum of all that stands before."""
    version = VERSION_WRITTEN.to_bytes(2, "little")
    return version + crc64(version, crc).to_bytes(8, "little")


def is_whole_in_steps(dump: memoryview) -> Iterator[bool | None]:
    """Whether version and checksum are those of a dump that can be read: said last, after a None for each stretch of it
    that was looked at, for a caller who has other things to do as well."""
    if len(dump) < FOOTER_BYTES or int.from_bytes(dump[-10:-8], "little") > VERSION_MAX:
        yield False
        return
    for crc in crc64_in_steps(dump[:-8]):
        yield None if crc is None else crc == int.from_bytes(dump[-8:], "little")


def decode(dump: memoryview) -> bytes | Text | None:
    """The string in a whole dump: an integer's text, or where its bytes are; None when it is no string or damaged."""
    end = len(dump) - FOOTER_BYTES
    if end < 2 or dump[0] != STRING_TYPE:
        return None
    first = dump[1]
    if first < 0xC0:
        length, start = _length(dump, 1)
        return Text(start, start + length, length, False) if length <= end - start else None
    code = first & 0x3F
    if code < _LZF:
        size = 1 << code
        return b"%d" % int.from_bytes(dump[2 : 2 + size], "little", signed=True) if 2 + size <= end else None
    if code > _LZF:
        return None
    packed, start = _length(dump, 2)
    length, start = _length(dump, start)
    return Text(start, start + packed, length, True) if packed <= end - start else None


def _length(dump: memoryview, at: int) -> tuple[int, int]:
    """The length that is written at `at`, and where it ends; beyond all bounds if there is none. The footer behind it
    keeps this from reading past the end."""
    first = dump[at]
    if first < 0x40:
        return first, at + 1
    if first < 0x80:
        return (first & 0x3F) << 8 | dump[at + 1], at + 2
    size = {0x80: 4, 0x81: 8}.get(first)
    if size is None:
        return len(dump), at + 1
    return int.from_bytes(dump[at + 1 : at + 1 + size], "big"), at + 1 + size


BUSY_KEY: Final = error("BUSYKEY Target key name already exists.")
INVALID_TTL: Final = error("ERR Invalid TTL value, must be >= 0")
INVALID_IDLE_TIME: Final = error("ERR Invalid IDLETIME value, must be >= 0")
INVALID_FREQUENCY: Final = error("ERR Invalid FREQ value, must be >= 0 and <= 255")
WRONG_CHECKSUM: Final = error("ERR DUMP payload version or checksum are wrong")
BAD_DATA: Final = error("ERR Bad data format")
PACKED_BYTES_MAX: Final = 8 * 1024 * 1024
"""The longest compressed string that is unpacked. A hostile one takes a third of a second for each MiB, in which no
other client is served; a value that is worth storing here hardly compresses, and Redis then dumps it as it is."""
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
def dump(session: Caller, args: list[bytes]) -> Answer:
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


def _dumped(session: Caller, value: Lease) -> Iterator[Reply | Blocked]:
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
def restore(session: Caller, args: list[bytes]) -> Answer:
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
def restore_asking(session: Caller, args: list[bytes]) -> Answer:
    """As RESTORE."""
    return restore(session, args)


def _restored(session: Caller, args: list[bytes]) -> Iterator[Reply | Blocked]:
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
    session: Caller, args: list[bytes], body: memoryview, *, in_steps: bool
) -> Generator[Blocked, None, Reply]:
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
    session: Caller, args: list[bytes], body: memoryview, text: Text, timer: StepTimer
) -> Generator[Blocked, None, tuple[bytes | Reservation | None, bytes]]:
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
