"""Glob patterns as KEYS, SCAN MATCH and CONFIG GET take them: Redis' own dialect, not fnmatch's.

The dialect (util.c, stringmatchlen): `*`, `?`, `[abc]`, `[^abc]`, `[a-z]` in either direction, backslash takes the next
byte literally also inside a class, an unclosed class ends with the pattern. A pattern becomes one regular expression
over bytes. Between two stars the leftmost match is as good as any other, so each such piece is an atomic group: a key
is walked once, and `*a*a*a*a*b` costs no more than it should.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from re import escape

CACHED_PATTERNS_MAX = 128

_ANY, _NOTHING = b"(?s:.)", b"(?!)"


def matcher(pattern: bytes) -> Callable[[bytes], bool]:
    """A function that tells whether a key matches. Like Redis', `**` does not match the empty key, `*` does."""
    if pattern == b"*":
        return lambda key: True
    fits = _compiled(pattern).fullmatch
    return lambda key: fits(key) is not None if key else not pattern


@lru_cache(CACHED_PATTERNS_MAX)
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    """The pattern as a regular expression for fullmatch."""
    pieces = _pieces(pattern)
    if len(pieces) == 1:
        return re.compile(pieces[0])
    middle = b"".join(b"(?>(?s:.*?)%b)" % piece for piece in pieces[1:-1] if piece)
    return re.compile(b"%b%b(?s:.*)%b" % (pieces[0], middle, pieces[-1]))


def _pieces(pattern: bytes) -> list[bytes]:
    """What stands between the stars, each as a regular expression."""
    pieces = [b""]
    at = 0
    while at < len(pattern):
        byte = pattern[at : at + 1]
        if byte == b"*":
            pieces.append(b"")
            at += len(pattern[at:]) - len(pattern[at:].lstrip(b"*"))
            continue
        if byte == b"[":
            text, at = _class(pattern, at + 1)
        elif byte == b"?":
            text, at = _ANY, at + 1
        else:
            at += byte == b"\\" and at + 1 < len(pattern)
            text, at = escape(pattern[at : at + 1]), at + 1
        pieces[-1] += text
    return pieces


def _class(pattern: bytes, at: int) -> tuple[bytes, int]:
    """A class, `at` being the byte after its bracket; the expression for it and where the pattern goes on."""
    negated = pattern[at : at + 1] == b"^"
    at += negated
    members: set[int] = set()
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        if pattern[at : at + 1] == b"\\" and at + 1 < len(pattern):
            members.add(pattern[at + 1])
            at += 2
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            low, high = sorted((pattern[at], pattern[at + 2]))
            members.update(range(low, high + 1))
            at += 3
        else:
            members.add(pattern[at])
            at += 1
    if not members:
        return (_ANY if negated else _NOTHING), at + 1
    listed = b"".join(b"\\x%02x" % member for member in sorted(members))
    return b"[%b%b]" % (b"^" if negated else b"", listed), at + 1
