"""Glob patterns as KEYS, SCAN MATCH and CONFIG GET take them: Redis' own dialect, not fnmatch's.

The dialect (util.c, stringmatchlen): `*`, `?`, `[abc]`, `[^abc]`, `[a-z]` in either direction, backslash takes the next
byte literally also inside a class, an unclosed class ends with the pattern. Between two stars the leftmost match is as
good as any other, so a key is walked once, and `*a*a*a*a*b` costs no more than it should. A pattern with a few stars
becomes one regular expression over bytes, each piece an atomic group. Of very many groups `re` takes seconds to make
one, so a pattern with more stars is walked piece by piece.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from re import escape

CACHED_PATTERNS_MAX = 128

PIECES_MAX = 64
"""Of how many pieces between stars one regular expression is made."""

_ANY, _NOTHING = b".", b"[^\\x00-\\xff]"
_STAR, _QUESTION, _BRACKET, _BACKSLASH = b"*?[\\"


def matcher(pattern: bytes) -> Callable[[bytes], bool]:
    """A function that tells whether a key matches. Like Redis', `**` does not match the empty key, `*` does."""
    if pattern == b"*":
        return lambda key: True
    fits = _compiled(pattern)
    return lambda key: bool(fits(key)) if key else not pattern


@lru_cache(CACHED_PATTERNS_MAX)
def _compiled(pattern: bytes) -> Callable[[bytes], object]:
    """The pattern as a function that gives something true for a key that is not empty and matches."""
    pieces = _pieces(pattern)
    if len(pieces) > PIECES_MAX:
        return _Walk(pieces).fits
    texts = [piece.text for piece in pieces]
    if len(texts) == 1:
        return re.compile(texts[0], re.DOTALL).fullmatch
    middle = b"".join(b"(?>.*?%b)" % text for text in texts[1:-1] if text)
    return re.compile(b"%b%b.*%b" % (texts[0], middle, texts[-1]), re.DOTALL).fullmatch


class _Piece:
    """What stands between two stars: `length` bytes, as a regular expression, and as they are if all are literal."""

    __slots__ = ("length", "literal", "text")

    def __init__(self, tokens: list[bytes], literal: bytes | None) -> None:
        self.length = len(tokens)
        self.literal = literal
        self.text = b"".join(
            token if count == 1 else b"%b{%d}" % (token, count)
            for token, run in groupby(tokens)
            for count in [sum(1 for _ in run)]
        )


class _Walk:
    """A pattern of many pieces: each is looked for behind the one before it."""

    def __init__(self, pieces: list[_Piece]) -> None:
        finders: dict[bytes, Callable[[bytes, int], int]] = {}  # most patterns repeat themselves
        for piece in pieces:
            if piece.text not in finders:
                finders[piece.text] = _finder(piece)
        self._first, self._last = (re.compile(pieces[end].text, re.DOTALL) for end in (0, -1))
        self._first_bytes, self._last_bytes = pieces[0].length, pieces[-1].length
        self._middle = [(finders[piece.text], piece.length) for piece in pieces[1:-1] if piece.length]

    def fits(self, key: bytes) -> bool:
        """Whether the key matches."""
        at, last = self._first_bytes, len(key) - self._last_bytes
        if at > last or not self._first.match(key) or not self._last.match(key, last):
            return False
        for find, length in self._middle:
            at = find(key, at)
            if at < 0:
                return False
            at += length
            if at > last:
                return False
        return True


def _finder(piece: _Piece) -> Callable[[bytes, int], int]:
    """A function that gives where in a key, from some byte on, the piece is found first; -1 for nowhere."""
    literal = piece.literal
    if literal is not None:
        return lambda key, at: key.find(literal, at)
    search = re.compile(piece.text, re.DOTALL).search

    def find(key: bytes, at: int) -> int:
        found = search(key, at)
        return -1 if found is None else found.start()

    return find


def _pieces(pattern: bytes) -> list[_Piece]:
    """What stands between the stars."""
    pieces: list[_Piece] = []
    tokens: list[bytes] = []
    literal: bytearray | None = bytearray()
    at = 0
    while at < len(pattern):
        byte = pattern[at]
        if byte == _STAR:
            pieces.append(_Piece(tokens, None if literal is None else bytes(literal)))
            tokens, literal = [], bytearray()
            while at < len(pattern) and pattern[at] == _STAR:
                at += 1
            continue
        if byte == _BRACKET:
            text, at = _class(pattern, at + 1)
            literal = None
        elif byte == _QUESTION:
            text, at = _ANY, at + 1
            literal = None
        else:
            at += byte == _BACKSLASH and at + 1 < len(pattern)
            text, at = escape(pattern[at : at + 1]), at + 1
            if literal is not None:
                literal.append(pattern[at - 1])
        tokens.append(text)
    pieces.append(_Piece(tokens, None if literal is None else bytes(literal)))
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
