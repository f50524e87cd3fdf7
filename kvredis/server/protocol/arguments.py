"""What Redis accepts as a number or a cursor: stricter than int(), and its errors are told apart by clients."""

import re

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UINT64_MAX = 2**64 - 1

_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_CURSOR = re.compile(rb"(?:[+-]?[0-9]{1,32})?")


def parse_integer(arg: bytes) -> int | None:
    """A signed 64-bit integer in its one canonical spelling (no plus, no spaces, no leading zeros), else None."""
    if _INTEGER.fullmatch(arg) is None:
        return None
    n = int(arg)
    return n if INT64_MIN <= n <= INT64_MAX else None


def parse_cursor(arg: bytes) -> int | None:
    """An unsigned 64-bit cursor as C's strtoull reads it: up to a NUL, a sign and zeros may lead, nothing is 0. What is
    negative counts down from 2 ** 64."""
    arg = arg.split(b"\0", 1)[0]
    if _CURSOR.fullmatch(arg) is None:
        return None
    n = int(arg or b"0")
    return n & UINT64_MAX if abs(n) <= UINT64_MAX else None
