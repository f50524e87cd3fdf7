"""Redis replies as bytes, in RESP2 and RESP3, and the one rule that payloads are never joined.

A reply is either finished bytes (everything small) or a list of buffers that the session hands to one gathering write
(anything that holds a view of the arena). `array` keeps that apart by itself: bytes alone are joined, one view makes
the whole array a list. The texts are Redis 7.2's, to the letter, because clients match on them.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

Buffer = bytes | memoryview
Reply = bytes | list[Buffer]

CRLF = b"\r\n"
OK = b"+OK\r\n"
PONG = b"+PONG\r\n"
ZERO = b":0\r\n"
ONE = b":1\r\n"
EMPTY_BULK = b"$0\r\n\r\n"
EMPTY_ARRAY = b"*0\r\n"
NULL_BULK = b"$-1\r\n"
NULL = b"_\r\n"

SYNTAX_ERROR = b"-ERR syntax error\r\n"
NOT_AN_INTEGER = b"-ERR value is not an integer or out of range\r\n"
INVALID_CURSOR = b"-ERR invalid cursor\r\n"
DB_OUT_OF_RANGE = b"-ERR DB index is out of range\r\n"
OUT_OF_MEMORY = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
NO_AUTH = b"-NOAUTH Authentication required.\r\n"
WRONG_PASSWORD = b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"

_SMALL_INTEGERS = tuple(b":%d\r\n" % n for n in range(1024))
_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")


class Peer(Protocol):
    """What an encoder must know of a session: the protocol that its client asked for."""

    @property
    def resp(self) -> int: ...


def integer(n: int) -> bytes:
    """`:n`."""
    return _SMALL_INTEGERS[n] if 0 <= n < 1024 else b":%d\r\n" % n


def bulk(value: bytes | str) -> bytes:
    """`$len value` in one piece: for small things only, since this copies `value`."""
    if isinstance(value, str):
        value = value.encode()
    return b"$%d\r\n%b\r\n" % (len(value), value)


def payload(view: Buffer) -> list[Buffer]:
    """`$len value` as three buffers: `view` itself goes out, uncopied. It must be a view of bytes (format B)."""
    return [b"$%d\r\n" % len(view), view, CRLF]


def simple(text: bytes | str) -> bytes:
    """`+text`; the text must not hold a line break."""
    if isinstance(text, str):
        text = text.encode()
    return b"+%b\r\n" % text


def error(text: bytes | str) -> bytes:
    """`-text`, with the code in it (`ERR ...`); line breaks become spaces, as they would end the reply."""
    if isinstance(text, str):
        text = text.encode()
    return b"-%b\r\n" % text.translate(_LINE_BREAKS)


def array(items: Sequence[Reply]) -> Reply:
    """`*n` of replies that are encoded already; bytes if all of them are, else a list of buffers."""
    return _aggregate(b"*%d\r\n" % len(items), items)


def bulks(values: Sequence[bytes | str]) -> bytes:
    """An array of small bulks: key names, options, help lines."""
    return b"*%d\r\n%b" % (len(values), b"".join(map(bulk, values)))


def statuses(lines: Sequence[str]) -> bytes:
    """An array of simple strings: what every HELP answers."""
    return b"*%d\r\n%b" % (len(lines), b"".join(map(simple, lines)))


def map_reply(session: Peer, pairs: Sequence[tuple[Reply, Reply]]) -> Reply:
    """`%n` in RESP3, in RESP2 a flat array of twice the length; keys and values are encoded already."""
    head = b"%%%d\r\n" % len(pairs) if session.resp == 3 else b"*%d\r\n" % (2 * len(pairs))
    return _aggregate(head, [part for pair in pairs for part in pair])


def set_reply(session: Peer, items: Sequence[Reply]) -> Reply:
    """`~n` in RESP3, an array in RESP2."""
    return _aggregate((b"~%d\r\n" if session.resp == 3 else b"*%d\r\n") % len(items), items)


def verbatim(session: Peer, text: bytes | str) -> bytes:
    """Text for people: `=len txt:...` in RESP3, a bulk in RESP2."""
    if isinstance(text, str):
        text = text.encode()
    return b"=%d\r\ntxt:%b\r\n" % (len(text) + 4, text) if session.resp == 3 else bulk(text)


def joined(reply: Reply) -> bytes:
    """One reply in one piece. For tests and logs: it copies payloads."""
    return reply if isinstance(reply, bytes) else b"".join(reply)


def _aggregate(head: bytes, items: Iterable[Reply]) -> Reply:
    """The head and its items, joined as far as they are plain bytes."""
    parts: list[Buffer] = []
    run = [head]
    for item in items:
        if isinstance(item, bytes):
            run.append(item)
            continue
        parts.append(b"".join(run))
        parts.extend(item)
        run = []
    if not parts:
        return b"".join(run)
    if run:
        parts.append(b"".join(run))
    return parts
