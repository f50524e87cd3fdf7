"""INCR and its kin, and the arithmetic of a long double behind INCRBYFLOAT."""

import random
from fractions import Fraction

import pytest

from kvredis.server.commands.compat.long_double import TEXT_BYTES_MAX, parse, rounded
from tests.server.fake_session import FakeSession


@pytest.mark.parametrize(
    "text",
    [b"", b".", b"-", b"e5", b"1e", b"0x", b" 1", b"1 ", b"nan", b"1\0", b"1_0", b"1e4933", b"1e-5000",
    b"1e99999999999",
     b"-1e-99999999999", b"0x1p99999999999", b"1" * TEXT_BYTES_MAX, b"\xef\xbc\x91"],
)  # fmt: skip
def test_what_is_no_number_to_redis_is_none_here(text: bytes) -> None:
    assert parse(text) is None


def test_rounding_keeps_64_bits_and_takes_ties_to_even() -> None:
    rng = random.Random(5)
    for _ in range(300):
        value = Fraction(rng.getrandbits(200) | 1) * Fraction(2) ** rng.randint(-400, 400)
        nearest = rounded(value)
        assert nearest is not None
        assert abs(nearest - value) * 2**64 <= value
        significand = nearest.numerator // (nearest.numerator & -nearest.numerator)
        assert significand.bit_length() <= 64
        assert nearest.denominator & (nearest.denominator - 1) == 0
    one = Fraction(1)
    assert rounded(one + Fraction(1, 2**64)) == one
    assert rounded(one + Fraction(3, 2**64)) == one + Fraction(1, 2**62)


def test_the_longest_numbers_are_read_and_printed(session: FakeSession) -> None:
    session.ask([b"SET", b"k", b"0" * 5000 + b"1" + b"0" * 15])
    assert session.ask("INCRBYFLOAT k 1") == b"$16\r\n1000000000000001\r\n"
    session.ask("SET k 1e4930")
    assert session.ask("INCRBYFLOAT k 0")[:7] == b"$4931\r\n"
