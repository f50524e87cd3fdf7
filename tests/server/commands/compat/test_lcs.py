"""LCS against the plain table that its bits stand for, and its bounds."""

import random

import pytest

from kvredis.server.commands.compat.lcs import LENGTH_MAX, table, walk_back
from tests.server.fake_session import FakeSession
from tests.server.handlers import LARGE


def plain_table(a: bytes, b: bytes) -> list[list[int]]:
    """Length of the longest common subsequence of a[:i] and b[:j], for all i and j."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, first in enumerate(a):
        for j, second in enumerate(b):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if first == second else max(lengths[i][j + 1], lengths[i + 1][j])
    return lengths


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_bits_say_what_the_table_says(seed: int) -> None:
    rng = random.Random(seed)
    a, b = (bytes(rng.choices(b"abcd"[: rng.randint(1, 4)], k=rng.randint(0, 70))) for _ in range(2))
    lengths = plain_table(a, b)
    rows = list(table(a, b))
    for row, wanted in zip(rows, lengths, strict=True):
        assert [j - (row & (1 << j) - 1).bit_count() for j in range(len(b) + 1)] == wanted
    walked = list(walk_back(a, b, rows))[-1]
    assert walked is not None
    common, matches = walked
    assert len(common) == lengths[-1][-1] == sum(match.length for match in matches)
    assert b"".join(a[match.a[0] : match.a[1] + 1] for match in reversed(matches)) == common
    assert b"".join(b[match.b[0] : match.b[1] + 1] for match in reversed(matches)) == common


def test_large_values_are_read_where_they_lie_and_let_go(session: FakeSession) -> None:
    session.ask([b"SET", b"a", b"x" * LARGE])
    session.ask([b"SET", b"b", b"yxz"])
    assert session.ask("LCS a b") == b"$1\r\nx\r\n"
    assert session.ask("LCS b a LEN") == b":1\r\n"
    assert session.ask("LCS a b FOO") == b"-ERR syntax error\r\n"
    assert session.store.leases == 0


def test_what_would_take_too_long_is_refused(session: FakeSession) -> None:
    session.ask([b"SET", b"a", b"x" * (LENGTH_MAX + 1)])
    session.ask("SET b y")
    memory = b"-ERR Insufficient memory, "
    assert session.ask("LCS a b") == memory + b"failed allocating transient memory for LCS\r\n"
    session.ask([b"SET", b"b", b"x" * LARGE])
    too_large = memory + b"transient memory for LCS exceeds proto-max-bulk-len\r\n"
    assert session.ask("LCS b b") == too_large
    session.server.bulk_bytes_max = 1 << 62
    assert session.ask("LCS b b") == memory + b"failed allocating transient memory for LCS\r\n"
