"""LCS: the longest common subsequence of two values, and where its pieces lie in them.

Redis fills a table of both lengths. Here a row of that table is one long integer: going from left to right its numbers
grow by 0 or 1 a step, so a bit a column says all, and a row follows from the one before by an addition (Hyyrö,
"Bit-Parallel LCS-length Computation Revisited", 2004). Walking back through the rows takes Redis' turns at each step,
because of several subsequences of that length the one that it answers must be found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kvredis.server.client.blocked import Answer, Blocked, StepTimer
from kvredis.server.commands.registry import command
from kvredis.server.commands.strings import look_up
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import NOT_AN_INTEGER, SYNTAX_ERROR, Reply, array, bulk, error, integer, map_reply
from kvredis.storage.entry import Lease

LENGTH_MAX: Final = 1024 * 1024
"""Of each value: the steps back are as many as the bytes of both, and the client waits for them (half a second)."""

CELL_BYTES: Final = 4  # of Redis' table, which is what its limit counts
TABLE_BYTES_MAX: Final = 512 * 1024 * 1024
"""Of Redis' table, however high proto-max-bulk-len is; ours takes a 32nd of it."""

BOTH_ASKED: Final = error("ERR If you want both the length and indexes, please just use IDX.")
TABLE_TOO_LARGE: Final = error("ERR Insufficient memory, transient memory for LCS exceeds proto-max-bulk-len")
NO_MEMORY: Final = error("ERR Insufficient memory, failed allocating transient memory for LCS")


class Match(NamedTuple):
    """A stretch of the subsequence that is contiguous in both values; first and last index, inclusive."""

    a: tuple[int, int]
    b: tuple[int, int]

    @property
    def length(self) -> int:
        """Bytes of it."""
        return self.a[1] - self.a[0] + 1


class Options(NamedTuple):
    """What LCS is asked for."""

    length: bool = False
    indexes: bool = False
    match_lengths: bool = False
    length_min: int = 0


@command(
    "lcs",
    arity=-3,
    flags="readonly",
    keys=(1, 2, 1),
    reads=(1, 2, 1),
    acl="read string slow",
    group="string",
    since="7.0.0",
    summary="The longest sequence of bytes that two values have in common, not necessarily in one piece.",
    complexity="O(N*M), 64 steps at a time, where N and M are the lengths of the values.",
    syntax="key1 key2 [LEN] [IDX] [MINMATCHLEN min-match-len] [WITHMATCHLEN]",
    access="RO access",
)
def lcs(session: Caller, args: list[bytes]) -> Answer:
    """LCS key key [LEN | IDX [MINMATCHLEN n] [WITHMATCHLEN]]: the bytes, their number, or a map of where they lie."""
    values = [look_up(session, key) for key in args[1:3]]
    try:
        options = _read_options(args)
        if isinstance(options, bytes):
            return options
        if options.indexes and options.length:
            return BOTH_ASKED
        texts = [value.view if isinstance(value, Lease) else memoryview(value or b"") for value in values]
        table_bytes = (len(texts[0]) + 1) * (len(texts[1]) + 1) * CELL_BYTES
        if table_bytes > session.server.bulk_bytes_max:
            return TABLE_TOO_LARGE
        if table_bytes > TABLE_BYTES_MAX or max(map(len, texts)) > LENGTH_MAX:
            return NO_MEMORY
        return _answer(session, bytes(texts[0]), bytes(texts[1]), options)
    finally:
        for value in values:
            if isinstance(value, Lease):
                value.release()


def _answer(session: Caller, a: bytes, b: bytes, options: Options) -> Iterator[Reply | Blocked]:
    timer = StepTimer()
    rows = []
    for row in table(a, b):
        rows.append(row)
        if timer.is_over():
            yield from session.turns_for_others()
    length = len(b) - rows[-1].bit_count()
    if options.length:
        yield integer(length)
        return
    steps = walk_back(a, b, rows)
    while (walked := next(steps)) is None:
        if timer.is_over():
            yield from session.turns_for_others()
    common, matches = walked
    if not options.indexes:
        yield bulk(common)
        return
    found = [match for match in matches if match.length >= options.length_min]
    yield map_reply(
        session,
        [
            (bulk("matches"), array([_match_reply(match, options.match_lengths) for match in found])),
            (bulk("len"), integer(length)),
        ],
    )


def _match_reply(match: Match, with_length: bool) -> Reply:
    ranges: list[Reply] = [array([integer(first), integer(last)]) for first, last in (match.a, match.b)]
    return array([*ranges, integer(match.length)] if with_length else ranges)


def table(a: bytes, b: bytes) -> Iterator[int]:
    """Give row 0 to len(a) of the table: bit j is 0 where with b[:j + 1] one more is common than with b[:j]."""
    full = (1 << len(b)) - 1
    places: dict[int, int] = {}
    row = full
    yield row
    for byte in a:
        if byte not in places:
            places[byte] = _places(b, byte)
        here = row & places[byte]
        row = (row + here | row - here) & full
        yield row


def _places(b: bytes, byte: int) -> int:
    """Where `byte` is in `b`, a bit each, the first being the lowest."""
    marks = b.translate(bytes(48 + (each == byte) for each in range(256)))
    return int(marks[::-1] or b"0", 2)


def walk_back(a: bytes, b: bytes, rows: list[int]) -> Iterator[tuple[bytes, list[Match]] | None]:
    """Give the subsequence that Redis would find, and its contiguous pieces, the last one first; before that a None for
    each step that is taken."""
    common = bytearray()
    matches: list[Match] = []
    i, j = len(a), len(b)
    row = _row_bytes(rows, i, len(b))
    end: tuple[int, int] | None = None  # of the piece that is being walked through
    while i and j:
        yield None
        if a[i - 1] == b[j - 1]:
            common.append(a[i - 1])
            end = end or (i - 1, j - 1)
            i, j = i - 1, j - 1
            row = _row_bytes(rows, i, len(b))
            continue
        if end is not None:
            matches.append(Match((i, end[0]), (j, end[1])))
            end = None
        if row[j - 1 >> 3] >> (j - 1 & 7) & 1:  # without this byte of b just as much is common
            j -= 1
        else:
            i -= 1
            row = _row_bytes(rows, i, len(b))
    if end is not None:
        matches.append(Match((i, end[0]), (j, end[1])))
    yield bytes(common[::-1]), matches


def _row_bytes(rows: list[int], i: int, length: int) -> bytes:
    return rows[i].to_bytes((length + 7) // 8, "little")


def _read_options(args: list[bytes]) -> Options | bytes:
    options = Options()
    at = 3
    while at < len(args):
        word = args[at].upper()
        if word == b"LEN":
            options = options._replace(length=True)
        elif word == b"IDX":
            options = options._replace(indexes=True)
        elif word == b"WITHMATCHLEN":
            options = options._replace(match_lengths=True)
        elif word == b"MINMATCHLEN" and at + 1 < len(args):
            number = parse_integer(args[at + 1])
            if number is None:
                return NOT_AN_INTEGER
            options = options._replace(length_min=number)
            at += 1
        else:
            return SYNTAX_ERROR
        at += 1
    return options
