"""A string as Redis' RDB format writes it, which is what a DUMP holds between its type byte and its footer.

Short integers are kept as such and everything else as its length and its bytes; Redis also compresses, which is read
here and not written. The format of strings has been the same through all versions that this reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvredis.server.protocol.arguments import parse_integer

from .crc64 import crc64, crc64_in_steps

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
