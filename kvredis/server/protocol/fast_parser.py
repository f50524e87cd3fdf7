"""The quick way through what clients mostly send: small commands as arrays of bulks, complete and without a trick.

Split at its line breaks, which C code does, a plain command is its count, then a length and a text for each argument. A
command is taken only if each length line is exactly the one that Redis' own clients would have written for its text;
everything else is left for the parser that knows the rules, so nothing passes here that it would refuse.

Where the extension was built, _plain.c does the same in a fifth of the time, and with the same result for every buffer.

hiredis would be the obvious tool, but it reads replies: it takes `+PING`, maps and nested arrays, which afterwards look
like bulks, and for `*2147483648` it makes a list of that length before it asks for the first argument.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Final

from kvredis.storage.memory.copy import NATIVE_WANTED

# ---- columns ---------------------------------------------------------------------------------------------------------
#
# The quickest way through a lookup: one command with many words of one length, as a prefix's keys are.
#
# Words of one length stand at equal distances, so their length lines and line breaks can be compared as columns, and
# the words themselves be cut out by `struct`, which makes a thousand keys in 25 microseconds where splitting takes 60
# to 120.


ARGS_MIN: Final = 64
"""Fewer are not worth the set-up."""

_BLOCK: Final = 250


def equal_words(data: bytes, count: int, name: bytes, start: int) -> list[bytes] | None:
    """The `count` words of the command that fills `data`, if those behind its first, `name`, are of one length, which
    is told by the line at `start`, and each is written as Redis' clients write it; None if anything is otherwise."""
    head = data[start : data.find(b"\n", start) + 1]
    digits = head[1:-2]
    if head[:1] != b"$" or head[-2:] != b"\r\n" or not digits.isdigit() or len(digits) > 5:
        return None
    length, rows = int(digits), count - 1
    if b"$%d\r\n" % length != head:
        return None
    stride = len(head) + length + 2
    if start + rows * stride != len(data):
        return None
    end = start + stride - 2
    if data[end::stride] != b"\r" * rows or data[end + 1 :: stride] != b"\n" * rows:
        return None
    for at, byte in enumerate(head, start):
        if data[at::stride] != bytes((byte,)) * rows:
            return None
    words = [name]
    blocks, rest = divmod(rows, _BLOCK)
    cutter = _cutter(len(head), length, _BLOCK)
    for at in range(start, start + blocks * cutter.size, cutter.size):
        words += cutter.unpack_from(data, at)
    if rest:
        words += _cutter(len(head), length, rest).unpack_from(data, len(data) - rest * stride)
    return words


@lru_cache(maxsize=256)
def _cutter(head: int, length: int, rows: int) -> struct.Struct:
    """Cuts `rows` words of `length` bytes out of what stands between them."""
    return struct.Struct(f"{head}x{length}s2x" * rows)


HEAD_BYTES: Final = 128
"""What the count of a command and its name stand in, if the name is no trick."""

LONG_BYTES: Final = 2048
"""From here on it is worth to ask first whether it is one command of equally long words."""

TEXT_BYTES_MAX: Final = 16 * 1024
"""The longest argument of a plain command: it bounds the table of length lines."""

_COUNTS = {b"*%d" % n: n for n in range(1, 16385)}
"""Arguments by the line that a command begins with; longer commands are not plain."""

_HEADS = tuple(b"$%d" % n for n in range(TEXT_BYTES_MAX + 1))
_LENGTHS = {head: n for n, head in enumerate(_HEADS)}


def plain_commands_in_python(data: bytes) -> tuple[list[list[bytes]], int, bool]:
    """The commands that `data` begins with, how many bytes are left behind them, and whether those may be plain too:
    False if they cannot be, True if there are none or what is there has not ended."""
    if len(data) >= LONG_BYTES and (found := _long_command(data)) is not None:
        return found
    parts = data.split(b"\r\n")
    last = len(parts) - 1  # what stands behind the last line break: mostly nothing
    stride = 2 * _COUNTS.get(parts[0], 0) + 1
    if last == stride:  # one command
        words = parts[2:last:2]
        if words and parts[1:last:2] == [_HEADS[len(word)] for word in words]:
            return [words], len(parts[last]), True
    elif stride > 1 and last > stride:  # commands of one length, as pipelines mostly are: argument by argument
        past = last - last % stride
        if parts[:past:stride].count(parts[0]) * stride == past:
            columns = []
            for at in range(2, stride, 2):
                words = parts[at:past:stride]
                if parts[at - 1 : past : stride] != [_HEADS[len(word)] for word in words]:
                    break
                columns.append(words)
            else:
                commands = [*map(list, zip(*columns, strict=True))]
                if past == last:
                    return commands, len(parts[last]), True
                more, left_bytes, plain = _one_by_one(parts[past:])
                return commands + more, left_bytes, plain
    return _one_by_one(parts)


def _long_command(data: bytes) -> tuple[list[list[bytes]], int, bool] | None:
    """One long command that fills `data`, or what is too long for this reader; None for all else."""
    start = data.find(b"\r\n")
    count = _COUNTS.get(data[:start], 0)
    if count >= ARGS_MIN:
        head = data[start + 2 : start + HEAD_BYTES].split(b"\r\n", 2)
        if len(head) == 3 and head[0] == _HEADS[len(head[1])]:
            words = equal_words(data, count, head[1], start + len(head[0]) + len(head[1]) + 6)
            if words is not None:
                return [words], 0, True
    if len(data) > TEXT_BYTES_MAX and max(map(len, data.split(b"\r\n"))) > TEXT_BYTES_MAX:
        return [], len(data), False
    return None


def _one_by_one(parts: list[bytes]) -> tuple[list[list[bytes]], int, bool]:
    """`plain_commands_in_python` for what is not all alike."""
    commands: list[list[bytes]] = []
    last = len(parts) - 1
    at = 0
    plain = True
    while at < last:
        count = _COUNTS.get(parts[at])
        if count is None:
            plain = False
            break
        past = at + 1 + 2 * count
        if past > last:
            break
        words = parts[at + 2 : past : 2]
        if parts[at + 1 : past : 2] != [_HEADS[len(word)] for word in words]:
            words, past = _with_line_breaks(parts, at + 1, count)
            if past <= 0:
                plain = past == 0
                break
        commands.append(words)
        at = past
    return commands, _length(parts, at), plain


def _with_line_breaks(parts: list[bytes], at: int, count: int) -> tuple[list[bytes], int]:
    """The `count` arguments from part `at` on when some hold line breaks, and the part behind them: 0 when the last of
    them is not complete, -1 when they are not plain."""
    words: list[bytes] = []
    last = len(parts) - 1
    for _ in range(count):
        if at >= last:
            return words, 0
        length = _LENGTHS.get(parts[at], -1)
        if length < 0:
            return words, -1
        at = first = at + 1
        here = len(parts[at])
        while here < length and at < last:
            at += 1
            here += 2 + len(parts[at])
        if at == last:
            return words, 0
        if here != length:
            return words, -1
        at += 1
        words.append(b"\r\n".join(parts[first:at]))
    return words, at


def _length(parts: list[bytes], at: int) -> int:
    """Bytes of the parts from `at` on and the line breaks between them."""
    return sum(map(len, parts[at:])) + 2 * (len(parts) - 1 - at)


def _quickest() -> Callable[[bytes], tuple[list[list[bytes]], int, bool]]:
    """The native reader, if it is there and wanted."""
    if NATIVE_WANTED:
        with suppress(ImportError):
            from ._plain import plain_commands

            return plain_commands
    return plain_commands_in_python


plain_commands: Final = _quickest()
