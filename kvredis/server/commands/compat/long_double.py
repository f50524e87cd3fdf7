"""Numbers as INCRBYFLOAT has them: x86's 80-bit long double, read, added and printed without one.

Redis reads with strtold, adds, and prints with %.17Lf less the zeros at its end. Which digits come out depends on the
64 bits of the significand, so a Python float (53 bits) would print others. Here a number is an exact Fraction, and
`rounded` is the one place where precision is lost: to the nearest, ties to even, as the processor does it.
"""

import math
import re
from fractions import Fraction
from typing import Final

TEXT_BYTES_MAX: Final = 5 * 1024
"""A text this long is no number to Redis."""

_PRECISION: Final = 64
_EXPONENT_MAX: Final = 16384  # values are below 2 ** this
_EXPONENT_MIN: Final = -16445  # of the smallest subnormal
_DIGITS: Final = 17
_CHUNK: Final = 4000
_CHUNK_UNIT: Final[int] = 10**_CHUNK
_TENS_MAX: Final = 20_000  # far beyond what any exponent may be that the text's own digits cannot make up for

_DECIMAL = re.compile(rb"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]+))?")
_HEXADECIMAL = re.compile(rb"([+-]?)0[xX]([0-9a-fA-F]*)(?:\.([0-9a-fA-F]*))?(?:[pP]([+-]?[0-9]+))?")
_INFINITE = re.compile(rb"[+-]?(?:inf|infinity)", re.IGNORECASE)


def parse(text: bytes) -> Fraction | float | None:
    """The number in `text` as a long double holds it, None for what Redis does not take.

    Too large and too small to be held are not taken either; an infinity is when it is spelled out, and is a float here.
    """
    if len(text) >= TEXT_BYTES_MAX:
        return None
    found, base, scale = _DECIMAL.fullmatch(text), 10, 10
    if found is None:
        found, base, scale = _HEXADECIMAL.fullmatch(text), 16, 2
    if found is None:
        return math.inf if _INFINITE.fullmatch(text) else None
    sign, whole, part, exponent = found.groups()
    digits = whole + (part or b"")
    if not digits:
        return None
    significand = int(digits, 16) if base == 16 else _from_decimal(digits)
    if not significand:
        return Fraction(0)
    tens = int(exponent or b"0") if len(exponent or b"") < 8 else (-1 if exponent[:1] == b"-" else 1) * 10**8
    places = len(part or b"") * (4 if base == 16 else 1)
    if abs(tens - places) > _TENS_MAX * (4 if base == 16 else 1):
        return None
    value = rounded(Fraction(significand) * Fraction(scale) ** (tens - places))
    if value is None or not value:
        return None
    return -value if sign == b"-" else value


def add(value: Fraction | float, amount: Fraction | float) -> Fraction | None:
    """The sum of two parsed numbers; None when it would be no number or infinite."""
    if isinstance(value, Fraction) and isinstance(amount, Fraction):
        return rounded(value + amount)
    return None


def rounded(value: Fraction) -> Fraction | None:
    """The nearest long double; None when that would be an infinity."""
    if not value:
        return value
    top, bottom = abs(value.numerator), value.denominator
    exponent = top.bit_length() - bottom.bit_length()
    scaled, unit = _scaled(top, bottom, exponent)
    if scaled < unit:
        exponent -= 1  # now 2 ** exponent <= abs(value) < 2 ** (exponent + 1)
    last = max(exponent - _PRECISION + 1, _EXPONENT_MIN)  # the exponent of the significand's last bit
    scaled, unit = _scaled(top, bottom, last)
    significand, rest = divmod(scaled, unit)
    if 2 * rest > unit or (2 * rest == unit and significand & 1):
        significand += 1
    if significand.bit_length() + last > _EXPONENT_MAX:
        return None
    nearest = Fraction(significand << last) if last >= 0 else Fraction(significand, 1 << -last)
    return -nearest if value < 0 else nearest


def _scaled(top: int, bottom: int, exponent: int) -> tuple[int, int]:
    """Numerator and denominator of top / bottom / 2 ** exponent."""
    return (top, bottom << exponent) if exponent >= 0 else (top << -exponent, bottom)


def printed(value: Fraction) -> bytes:
    """At most 17 digits behind the point, none of them a zero at the end; exact in front of it."""
    units = round(abs(value) * 10**_DIGITS)
    whole, part = divmod(units, 10**_DIGITS)
    text = (b"%b.%017d" % (_to_decimal(whole), part)).rstrip(b"0").rstrip(b".")
    return b"-" + text if value < 0 and units else text


def _from_decimal(digits: bytes) -> int:
    """int(), which refuses more than 4300 digits at once as a denial of service; here there are 5119 at most."""
    head, tail = digits[:-_CHUNK], digits[-_CHUNK:]
    return int(head or b"0") * _CHUNK_UNIT + int(tail)


def _to_decimal(n: int) -> bytes:
    """The digits of a number that may have up to 4933 of them."""
    head, tail = divmod(n, _CHUNK_UNIT)
    return b"%d%0*d" % (head, _CHUNK, tail) if head else b"%d" % tail
