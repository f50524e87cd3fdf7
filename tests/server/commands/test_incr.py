"""INCR and its kin, and the arithmetic of a long double behind INCRBYFLOAT."""

import random
from fractions import Fraction

import pytest

from kvredis.server.commands.compat.long_double import TEXT_BYTES_MAX, add, parse, printed, rounded
from tests.server.fake_session import FakeSession

NOT_AN_INTEGER = b"-ERR value is not an integer or out of range\r\n"
OVERFLOW = b"-ERR increment or decrement would overflow\r\n"


def test_a_counter_begins_at_nothing_and_keeps_its_end(session: FakeSession) -> None:
    assert session.ask("INCR k") == b":1\r\n"
    session.ask("EXPIRE k 1000")
    assert session.ask("INCRBY k 41") == b":42\r\n"
    assert session.ask("DECRBY k 50") == b":-8\r\n"
    assert session.ask("INCRBYFLOAT k 0.5") == b"$4\r\n-7.5\r\n"
    assert session.ask("TTL k") == b":1000\r\n"


def test_a_sum_beyond_64_bits_is_refused_and_changes_nothing(session: FakeSession) -> None:
    session.ask("SET high 9223372036854775807")
    session.ask("SET low -9223372036854775808")
    assert session.ask("INCR high") == session.ask("DECR low") == OVERFLOW
    assert session.ask("DECRBY low 1") == session.ask("INCRBY high 9223372036854775807") == OVERFLOW
    assert session.ask("DECRBY high -9223372036854775808") == b"-ERR decrement would overflow\r\n"
    assert session.ask("MGET high low") == b"*2\r\n$19\r\n9223372036854775807\r\n$20\r\n-9223372036854775808\r\n"


@pytest.mark.parametrize("value", [b"", b"x", b" 1", b"1 ", b"01", b"+1", b"-0", b"1.0", b"9" * 20, b"1" * 100_000])
def test_what_is_no_integer_is_left_alone(session: FakeSession, value: bytes) -> None:
    session.ask([b"SET", b"k", value])
    assert session.ask("INCR k") == NOT_AN_INTEGER
    assert session.ask("STRLEN k") == b":%d\r\n" % len(value)


@pytest.mark.parametrize(
    ("value", "amount", "total"),
    [
        (b"10.5", b"0.1", b"10.6"),
        (b"3.0e3", b"0", b"3000"),
        (b"5.0e3", b"2.0e2", b"5200"),
        (b"0.1", b"0.2", b"0.3"),
        (b"1", b"-1", b"0"),
        (b"-0", b"-0", b"0"),
        (b"-1e-30", b"0", b"0"),
        (b"1e-17", b"0", b"0.00000000000000001"),
        (b"9223372036854775807", b"1", b"9223372036854775808"),
        (b"18446744073709551616", b"1", b"18446744073709551616"),
        (b"0x10", b"0x.8", b"16.5"),
    ],
)
def test_decimal_sums_are_printed_as_people_write_them(value: bytes, amount: bytes, total: bytes) -> None:
    first, second = parse(value), parse(amount)
    assert first is not None
    assert second is not None
    result = add(first, second)
    assert result is not None
    assert printed(result) == total


@pytest.mark.parametrize(
    "text",
    [b"", b".", b"-", b"e5", b"1e", b"0x", b" 1", b"1 ", b"nan", b"1\0", b"1_0", b"1e4933", b"1e-5000",
    b"1e99999999999",
     b"-1e-99999999999", b"0x1p99999999999", b"1" * TEXT_BYTES_MAX, b"\xef\xbc\x91"],
)  # fmt: skip
def test_what_is_no_number_to_redis_is_none_here(text: bytes) -> None:
    assert parse(text) is None


def test_infinity_is_a_number_that_no_sum_may_become(session: FakeSession) -> None:
    infinite = b"-ERR increment would produce NaN or Infinity\r\n"
    assert session.ask("INCRBYFLOAT k inf") == infinite
    session.ask("SET k 1e4932")
    assert session.ask("INCRBYFLOAT k 1e4932") == infinite
    assert session.ask("INCRBYFLOAT k x") == b"-ERR value is not a valid float\r\n"
    assert session.ask("GET k") == b"$6\r\n1e4932\r\n"


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
