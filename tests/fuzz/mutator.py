"""Turns valid sessions into streams that no client would send, and a stream that did harm into the shortest that does.

Everything is drawn from one seeded generator, so that a seed and a case number are all that a failure needs. Damage is
done on three levels: to the commands (order, arguments), to their framing (counts, lengths, kinds), and to the bytes.
"""

import random
from collections.abc import Callable
from typing import Final

from tests.fuzz.corpus import Line, Session

COUNTS: Final = (
    *("0", "-1", "-10", "-0", "01", "+1", " 1", "1 ", "", "abc", "1.5", "3", "100", "1000000", "1048577"),
    *("2147483647", "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808", "1" * 30),
)
LENGTHS: Final = (
    *("0", "-1", "-2", "-0", "04", "+4", " 4", "", "abc", "1e3", "16383", "16384", "16385", "100000", "1048576"),
    *("536870912", "536870913", "2147483647", "4294967296", "9223372036854775807", "18446744073709551616"),
)
NOISE: Final = (
    *(b"*", b"$", b"+", b"-", b":", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(12\r\n", b"=5\r\ntxt:b\r\n", b"%1\r\n"),
    *(b"~1\r\n", b">1\r\n$4\r\nPING\r\n", b"|1\r\n", b"*0\r\n", b"*1\r\n", b"*-1\r\n", b"$-1\r\n", b"$0\r\n\r\n"),
    *(b"+OK\r\n", b"\r\n", b"\r", b"\n", b"\0", b"*1\r\n*1\r\n_\r\n", b"*2\r\n*1\r\n$1\r\na\r\n$1\r\nb\r\n"),
    *(b"'", b'"', b"PING\r\n", b"POST / HTTP/1.1\r\n", b"Host: x\r\n", b'SET f1 "a\\x00b"\r\n', b"\x16\x03\x01\x02\0"),
    *(b"SET f2 'unbalanced\r\n", b"\r\n" * 2000, b"GET f1\n" * 50, b"x" * 70_000, b"*1\r\n$4\r\nPING\r\n" * 40),
    *(
        b"*3\r\n$3\r\nSET\r\n$2\r\nf3\r\n$16384\r\n",
        b"*3\r\n$3\r\nSET\r\n$2\r\nf3\r\n$1000000\r\n",
        b"*1000000\r\n$0\r\n\r\n",
    ),
)
KINDS: Final = b"$*+-:_,#(=%~>|!. \0"


def encode(line: Line) -> bytes:
    """A command as it should be sent."""
    return b"*%d\r\n" % len(line) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in line)


def mutate(rng: random.Random, session: Session, other: Session) -> bytes:
    """The stream of a session after some damage, at times none; `other` gives what is spliced in."""
    damages = rng.choice([0, 1, 1, 1, 2, 2, 3, 5, 9])
    commands = [list(line) for line in session]
    by_level = [rng.randrange(3) for _ in range(damages)]
    for _ in range(by_level.count(0)):
        rng.choice(COMMAND_DAMAGES)(rng, commands, other)
    pieces = [encode(line) for line in commands]
    for _ in range(by_level.count(1)):
        at = rng.randrange(len(pieces))
        pieces[at] = rng.choice(FRAME_DAMAGES)(rng, commands[at] or [b""])
    stream = bytearray(b"".join(pieces))
    for _ in range(by_level.count(2)):
        rng.choice(BYTE_DAMAGES)(rng, stream)
    return bytes(stream)


def cuts(rng: random.Random, stream: bytes) -> list[int]:
    """Where the stream is cut into the pieces in which it is sent: seldom, often, or right behind a header."""
    found = [rng.randrange(len(stream) + 1) for _ in range(rng.choice([0, 0, 1, 3, 20]))]
    if rng.random() < 0.3:
        found += [stream.find(b"\n", at) + rng.choice([0, 1]) for at in found]
    return sorted({at for at in found if 0 < at < len(stream)})


# ---- commands --------------------------------------------------------------------------------------------------------


def _double(rng: random.Random, commands: Session, other: Session) -> None:
    at = rng.randrange(len(commands))
    commands[at:at] = [list(commands[at])] * rng.choice([1, 1, 2, 50])


def _reorder(rng: random.Random, commands: Session, other: Session) -> None:
    rng.shuffle(commands)


def _drop(rng: random.Random, commands: Session, other: Session) -> None:
    if len(commands) > 1:
        del commands[rng.randrange(len(commands))]


def _splice(rng: random.Random, commands: Session, other: Session) -> None:
    at = rng.randrange(len(commands) + 1)
    commands[at:at] = [list(line) for line in other[rng.randrange(len(other)) :]]


def _exchange_word(rng: random.Random, commands: Session, other: Session) -> None:
    line, source = rng.choice(commands), rng.choice(other)
    if line:
        line[rng.randrange(len(line))] = rng.choice(source)


def _exchange_number(rng: random.Random, commands: Session, other: Session) -> None:
    line = rng.choice(commands)
    if line:
        line[rng.randrange(len(line))] = rng.choice(COUNTS + LENGTHS).encode()


def _add_words(rng: random.Random, commands: Session, other: Session) -> None:
    line = rng.choice(commands)
    line += rng.choices(rng.choice(other), k=rng.choice([1, 1, 2, 7, 300]) if sum(map(len, line)) < 1000 else 1)


def _drop_word(rng: random.Random, commands: Session, other: Session) -> None:
    line = rng.choice(commands)
    if len(line) > 1:
        del line[rng.randrange(len(line))]


COMMAND_DAMAGES: Final[tuple[Callable[[random.Random, Session, Session], None], ...]] = (
    _double,
    _reorder,
    _drop,
    _splice,
    _exchange_word,
    _exchange_number,
    _add_words,
    _drop_word,
)


# ---- framing ---------------------------------------------------------------------------------------------------------


def _wrong_count(rng: random.Random, line: Line) -> bytes:
    count = rng.choice([str(len(line) + rng.choice([-1, 1, 2])), rng.choice(COUNTS)])
    return b"*%b\r\n" % count.encode() + encode(line).split(b"\n", 1)[1]


def _wrong_length(rng: random.Random, line: Line) -> bytes:
    victim = rng.randrange(len(line))
    near = str(max(0, len(line[victim]) + rng.choice([-2, -1, 1, 2, 30])))
    wrong = rng.choice([near, rng.choice(LENGTHS)]).encode()
    bulks = (b"$%b\r\n%b\r\n" % (wrong if at == victim else b"%d" % len(word), word) for at, word in enumerate(line))
    return b"*%d\r\n" % len(line) + b"".join(bulks)


def _other_kind(rng: random.Random, line: Line) -> bytes:
    data = bytearray(encode(line))
    heads = [at for at in range(len(data)) if data[at] in b"*$" and (at == 0 or data[at - 1] == 10)] or [0]
    data[rng.choice(heads)] = rng.choice(KINDS)
    return bytes(data)


def _nested(rng: random.Random, line: Line) -> bytes:
    depth = rng.choice([1, 1, 2, 1000])
    return b"*1\r\n" * depth + encode(line)


def _inline(rng: random.Random, line: Line) -> bytes:
    quote = rng.choice([b"", b"", b'"', b"'"])
    return b" ".join(quote + word[:2000] + quote for word in line) + rng.choice([b"\r\n", b"\n", b"\r", b""])


def _line_ends(rng: random.Random, line: Line) -> bytes:
    return encode([word[:2000] for word in line]).replace(
        b"\r\n", rng.choice([b"\n", b"\r", b"\r\r\n", b"\n\r", b"  "])
    )


def _cut_command(rng: random.Random, line: Line) -> bytes:
    data = encode(line)
    return data[: rng.randrange(len(data))]


FRAME_DAMAGES: Final[tuple[Callable[[random.Random, Line], bytes], ...]] = (
    _wrong_count,
    _wrong_count,
    _wrong_length,
    _wrong_length,
    _other_kind,
    _nested,
    _inline,
    _line_ends,
    _cut_command,
)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _place(rng: random.Random, stream: bytearray) -> int:
    """Somewhere, as often as not at the beginning of a line, where more depends on a byte."""
    at = rng.randrange(len(stream) + 1)
    return rng.choice([at, stream.find(b"\n", at) + 1])


def _flip(rng: random.Random, stream: bytearray) -> None:
    if stream:
        stream[min(_place(rng, stream), len(stream) - 1)] ^= 1 << rng.randrange(8)


def _overwrite(rng: random.Random, stream: bytearray) -> None:
    at = _place(rng, stream)
    stream[at : at + 1] = bytes([rng.randrange(256)])


def _delete(rng: random.Random, stream: bytearray) -> None:
    at = _place(rng, stream)
    del stream[at : at + rng.choice([1, 2, 12, 500])]


def _repeat(rng: random.Random, stream: bytearray) -> None:
    at = _place(rng, stream)
    stream[at:at] = stream[at : at + rng.randrange(1, 60)] * rng.choice([1, 1, 30])


def _insert(rng: random.Random, stream: bytearray) -> None:
    at = _place(rng, stream)
    stream[at : at + rng.choice([0, 0, 4])] = rng.choice(NOISE)


def _garbage(rng: random.Random, stream: bytearray) -> None:
    stream += rng.randbytes(rng.randrange(200))


def _truncate(rng: random.Random, stream: bytearray) -> None:
    del stream[_place(rng, stream) :]


BYTE_DAMAGES: Final[tuple[Callable[[random.Random, bytearray], None], ...]] = (
    _flip,
    _flip,
    _overwrite,
    _delete,
    _repeat,
    _insert,
    _garbage,
    _truncate,
)


# ---- the shortest that still fails -----------------------------------------------------------------------------------


def shrink(stream: bytes, fails: Callable[[bytes], bool], tries_max: int = 400) -> bytes:
    """The shortest stream found, by leaving out lines and then bytes, for which `fails` still holds."""
    tries = 0
    for pieces in (stream.splitlines(keepends=True), None):
        parts = [stream[at : at + 1] for at in range(min(len(stream), 4000))] if pieces is None else pieces
        if pieces is None and len(stream) > 4000:
            break
        size = max(1, len(parts) // 2)
        while tries < tries_max:
            at, shorter = 0, False
            while at < len(parts) and tries < tries_max:
                candidate = parts[:at] + parts[at + size :]
                tries += 1
                if candidate and fails(b"".join(candidate)):
                    parts, shorter = candidate, True
                else:
                    at += size
            if size == 1 and not shorter:
                break
            size = max(1, size // 2)
        stream = b"".join(parts)
    return stream
