"""Requests typed by hand: the words of one line, quoted as in redis-cli (sds.c, sdssplitargs)."""

from .request import ProtocolError

_ESCAPES = {ord("n"): 10, ord("r"): 13, ord("t"): 9, ord("b"): 8, ord("a"): 7}
_HEX = b"0123456789abcdefABCDEF"
_SPACE = b" \t\n\v\f\r\0"


def words_of(line: bytes) -> list[bytes]:
    """A line's words; ProtocolError when they cannot be told apart."""
    words = split_words(line)
    if words is None:
        raise ProtocolError("unbalanced quotes in request")
    return words


def split_words(line: bytes) -> list[bytes] | None:
    """Words of an inline request, "double" and 'single' quoted as in redis-cli; None when quotes do not balance."""
    words: list[bytes] = []
    at, end = 0, len(line)
    while True:
        while at < end and line[at] in _SPACE:
            at += 1
        if at == end:
            return words
        word = bytearray()
        quote = 0
        while at < end or quote:
            if at >= end:
                return None
            byte = line[at]
            if quote and byte == quote:
                if at + 1 < end and line[at + 1] not in _SPACE:
                    return None
                at += 1
                break
            if quote == 34 and byte == 92 and at + 1 < end:
                code = line[at + 2 : at + 4]
                if line[at + 1] == 120 and len(code) == 2 and code[0] in _HEX and code[1] in _HEX:
                    word.append(int(code, 16))
                    at += 4
                else:
                    word.append(_ESCAPES.get(line[at + 1], line[at + 1]))
                    at += 2
                continue
            if quote == 39 and line[at : at + 2] == b"\\'":
                word.append(39)
                at += 2
                continue
            if not quote and byte in _SPACE:
                break
            if not quote and byte in (34, 39):
                quote = byte
            else:
                word.append(byte)
            at += 1
        words.append(bytes(word))
