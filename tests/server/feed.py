"""Drives a Parser as an event loop would: bytes go into the buffer that it offers, in pieces that the test chooses."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvredis.server.protocol.parser import Parser
from kvredis.server.protocol.request import REFUSED, Argument, ProtocolError, Refused
from kvredis.storage.entry import Reservation

Word = bytes | str
Seen = list[bytes | str]
"""A command as tests compare it: bytes, "refused" for a payload without room; a protocol error is ["error", text]."""


def request(*words: Word) -> bytes:
    """A command as an array of bulks."""
    raw = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)


def no_payload(args: list[Argument], length: int) -> Reservation | Refused | None:
    """An `open_payload` for which nothing is a payload."""
    return None


class CarefulParser(Parser):
    """The parser without its quick reader: the reference that the quick one is held to."""

    __slots__ = ()

    def _take_quickly(self) -> list[list[Argument]]:
        return []

    def _read_payload_head(self) -> None:
        return None


def seen(args: Sequence[Argument]) -> Seen:
    """A command with its payloads as bytes; Reservations end here."""
    words: Seen = []
    for arg in args:
        if isinstance(arg, Reservation):
            words.append(bytes(arg.view))
            arg.abort()
        else:
            words.append("refused" if arg is REFUSED else arg)  # type: ignore[arg-type]
    return words


def feed(parser: Parser, data: bytes, cuts: Iterable[int] = ()) -> list[Seen]:
    """What becomes of `data` that arrives in pieces which end at `cuts`; a protocol error is the last element."""
    found: list[Seen] = []
    edges = [0, *sorted(set(cuts)), len(data)]
    for at, end in pairwise(edges):
        while at < end:
            buffer = parser.buffer()
            assert len(buffer) > 0
            received = min(len(buffer), end - at)
            buffer[:received] = data[at : at + received]
            at += received
            try:
                commands = parser.take(received)
                while commands:
                    found += map(seen, commands)
                    commands = parser.take()
            except ProtocolError as broken:
                parser.abandon()
                return [*found, ["error", str(broken)]]
    return found
