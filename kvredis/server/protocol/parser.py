"""RESP requests from bytes, without I/O: it says where the next bytes shall be received and which commands they made.

A payload is the reason for its shape. As soon as a `$n` header announces a large value in a place where a command takes
one, the parser asks `open_payload` for a Reservation (client/admission.py grants it) and from then on offers the arena
itself as the receive buffer, so the kernel writes the value where it will live. Everything else passes through a small
scratch buffer. When the client goes before the last byte, the session calls `abandon`, which gives the room back.

Three readers share the work. _hot.pyx runs the commonest commands where they lie, and splits other small ones, many at
a time (Reader._take_plain). Whatever is not written as clients write it, or is long, is read by the parser below, which
is the one that knows every rule and error text of Redis 7.2 (networking.c, processMultibulkBuffer and
processInlineBuffer).
"""

import sys
from collections.abc import Callable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final

from kvredis.storage.entry import SLACK_BYTES, Reservation

from ._hot import NO_SCRATCH, NO_VIEW, Reader
from .arguments import parse_integer
from .inline import words_of
from .request import (
    ARGUMENT_BYTES,
    EVIDENCE_BYTES_MAX,
    EVIDENCE_FROM_BYTES,
    EVIDENCE_SHIFT,
    GATHER_ARGS_MIN,
    GATHER_BYTES_MAX,
    GATHER_TRIES,
    HEAD_BYTES,
    LINE_BYTES_MAX,
    MULTIBULK_MAX,
    PAYLOAD_BYTES_MIN,
    REFUSED,
    SCRATCH_BYTES,
    TAIL_BYTES,
    UNAUTHENTICATED_ARGS_MAX,
    UNAUTHENTICATED_BULK_BYTES_MAX,
    WIDE_BYTES,
    Argument,
    Later,
    OpenPayload,
    ProtocolError,
    QueryBufferLimit,
)

STAR, RETURN, NEWLINE = ord("*"), ord("\r"), ord("\n")

SHORTEST_HEAD_BYTES: Final = len(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$16384\r\n")
"""Before every payload."""

_BULK_HEADS = tuple(b"$%d" % n for n in range(HEAD_BYTES + 1))
_PAYLOAD_ARRAYS = frozenset(b"*%d" % n for n in range(3, 10))

NOTHING: Final[list[list["Argument"]]] = []  # what `take` gives when more bytes are needed; no caller changes it

SPARE_MAX: Final = 16
"""Scratches kept for the next clients: to make one may cost more than to read a command."""


class Scratches:
    """The scratches of all clients of one loop. A client needs one only from the first byte of a command to its last,
    so it lends the one that it has to the next client that receives, unless bytes are left in it: a thousand clients
    whose commands came whole have one between them. Not for two threads."""

    __slots__ = ("holder", "spare", "wide", "wide_holder", "wide_view")

    def __init__(self) -> None:
        self.holder: Parser | None = None
        """The client that has received last."""
        self.spare: list[bytearray] = []
        self.wide = bytearray(WIDE_BYTES)
        """For a turn, of a client that sends short values faster than they are taken: more of them in a receive."""
        self.wide_view = memoryview(self.wide)
        self.wide_holder: Parser | None = None

    def keep(self, scratch: bytearray) -> None:
        """Take back one that no client needs, if it has the usual size."""
        if len(scratch) == SCRATCH_BYTES and len(self.spare) < SPARE_MAX:
            self.spare.append(scratch)

    def get(self) -> tuple[bytearray, memoryview]:
        """Give one, and a view of it."""
        scratch = self.spare.pop() if self.spare else bytearray(SCRATCH_BYTES)
        return scratch, memoryview(scratch)


class Parser(Reader):
    """One client's requests: receive into `buffer`, tell `take` how much, and `take` on until it gives nothing.

    `open_payload(args so far, length)` is asked for each bulk of PAYLOAD_BYTES_MIN or more: a Reservation takes the
    bytes, REFUSED drops them, Later lets them wait, None means that this argument is no payload and becomes bytes like
    any other. `takes_payload(name)` says whether a command may have such an argument at all. `scratches` are those of
    the loop's other clients.
    """

    __slots__ = ("_open_payload", "_takes_payload")

    def __init__(
        self,
        open_payload: OpenPayload,
        *,
        takes_payload: Callable[[bytes], bool] = lambda name: True,
        bulk_bytes_max: int = 512 * 1024 * 1024,
        query_bytes_max: int = 1024 * 1024 * 1024,
        scratches: Scratches | None = None,
    ) -> None:
        self._open_payload = open_payload
        self._takes_payload = takes_payload
        self.bulk_bytes_max = bulk_bytes_max
        self.query_bytes_max = query_bytes_max
        """What the arguments of one command may take, in the arena or not: client-query-buffer-limit."""
        self.authenticated = True
        """While False, counts and lengths are held to what an AUTH needs, as Redis does."""
        self._scratches = scratches or Scratches()

    def put_by(self, received: int, room_bytes: int = 0) -> bool:
        """Keep what has been received for the next `take`; whether there is more room, which grows to `room_bytes`."""
        if self._body is not None:
            self._filled += received
            return self._filled < len(self._body)
        self._end += received
        if self._end - self._start == len(self._scratch) < room_bytes:
            self._grow(4, room_bytes)
        return self._end - self._start < len(self._scratch)

    def take(self, received: int = 0) -> list[list[Argument]]:
        """The complete commands that are at hand, now that `received` bytes have been put into the last `buffer`, each
        with its name first: all of a buffer that the quick reader understands, else one; none when more bytes are
        needed. Raises ProtocolError."""
        if self._body is not None:
            self._filled += received
            if not self._finish_body():
                return NOTHING
        else:
            self._end += received
            if self._start == self._end:
                return NOTHING
            if not self._remaining:
                commands = self._take_quickly()
                if commands:
                    self._after_payload = False
                    return commands
                if self._end - self._start >= SHORTEST_HEAD_BYTES and self._scratch[self._start + 2] == RETURN:
                    self._read_payload_head()  # one digit: few arguments
                elif self._gathers():
                    return NOTHING
        command = self._next()
        return NOTHING if command is None else [command]

    def abandon(self, keep: Reservation | None = None) -> None:
        """Give back what a half-received command of a client that is gone holds, and let go of `open_payload`. Into the
        room of `keep` a thread still receives, and it is given back by others."""
        for arg in [*self._args, self._body_hold]:
            if isinstance(arg, Reservation) and arg is not keep:
                arg.abort()
        self._args, self._body, self._body_hold, self._remaining = [], None, None, 0
        self._start = self._end = self._held_bytes = self._arena_bytes = 0
        self._let_scratch_go()
        self._open_payload = lambda args, length: None

    def rest(self) -> bool:
        """Give up a scratch that had to grow and is empty, since the client has been silent for a while, or for good.
        Says whether `take` should look again: a long command that was to be gathered is now read as far as it has come,
        since it may be broken."""
        if self._start == self._end:
            if len(self._scratch) > SCRATCH_BYTES and self._body is None:
                self._start = self._end = 0
                self._renew()
            if self._scratches.holder is not self:
                self._let_scratch_go()
            return False
        self._gather_tries = GATHER_TRIES
        return not self._remaining

    def memory(self) -> tuple[int, int, int, int]:
        """Bytes received and not yet made into arguments, and room for more of them; what the arguments take of a
        command that is not complete; and how much of all that lies in the arena. `qbuf`, `qbuf-free` and `argv-mem` of
        CLIENT LIST."""
        read, count, nbytes = self._read_so_far()
        unread = self._end - self._start - read
        arguments = self._complete_bytes + nbytes + ARGUMENT_BYTES * (len(self._args) + count)
        coming = max(0, self._length - self._filled) if isinstance(self._body_hold, Reservation) else 0
        return unread + self._filled, len(self._scratch) - unread, arguments, self._arena_bytes - coming

    @property
    def _complete_bytes(self) -> int:
        """Of `_held_bytes`, those of complete arguments."""
        return self._held_bytes - (self._length if self._body is not None and self._body_hold is not REFUSED else 0)

    @property
    def pending_bytes(self) -> int:
        """Bytes received and not yet part of an executed command."""
        return self._end - self._start + self._filled + self._complete_bytes

    @property
    def missing(self) -> int:
        """Bytes still to come of what is received into a place of its own, most likely the arena; 0 for nothing."""
        is_received = self._body is not None and self._body_hold is not REFUSED
        return max(0, self._length + SLACK_BYTES - self._filled) if is_received else 0

    @property
    def unfilled(self) -> tuple[Reservation, memoryview] | None:
        """The room in the arena that is being received into, and what of it is still to be filled."""
        if self._body is None or not isinstance(self._body_hold, Reservation):
            return None
        return self._body_hold, self._body[self._filled : self._length + SLACK_BYTES]

    @property
    def reservations(self) -> list[Reservation]:
        """What the command being read holds of the arena."""
        return [arg for arg in (*self._args, self._body_hold) if isinstance(arg, Reservation)]

    # ---- the scratch -------------------------------------------------------------------------------------------------

    def _let_scratch_go(self) -> None:
        """Lend the scratch, in which nothing is left, to whichever client receives next."""
        if self._scratches.holder is self:
            self._scratches.holder = None
        if self._scratches.wide_holder is self:
            self._scratches.wide_holder = None
        self._scratches.keep(self._scratch)
        self._scratch, self._view = NO_SCRATCH, NO_VIEW

    # ---- the quick reader ----------------------------------------------------------------------------------------

    def _take_quickly(self) -> list[list[Argument]]:
        """The plain commands at the front of the scratch, perhaps none.

        Once something else was met, the rest of the buffer is the full parser's: or each command of a buffer could
        be made to cost a look at all of it.
        """
        start, end = self._start, self._end
        scratch = self._scratch
        if scratch[start] != STAR or not self._plain or not self.authenticated:
            return NOTHING
        if scratch[end - 1] != NEWLINE and scratch.find(b"\r\n*", max(start, end - TAIL_BYTES), end) < 0:
            return NOTHING  # the beginning of one large command, most likely with a payload: not worth a try
        commands = self._take_plain()
        self._gather_tries = 0 if commands else self._gather_tries + 1
        self._gathered = end - start > SCRATCH_BYTES and (not commands or len(commands[-1]) >= GATHER_ARGS_MIN)
        return commands

    def _gathers(self) -> bool:
        """Whether the command at the front of the scratch is long, made of small arguments and not complete yet: then
        the scratch has room for more of it from here on."""
        if not self._plain or not self.authenticated or self._gather_tries >= GATHER_TRIES:
            return False
        if self._scratch[self._start] != STAR:
            return False
        head = bytes(self._view[self._start : min(self._end, self._start + HEAD_BYTES)]).split(b"\r\n", 3)
        if len(head) < 4 or (parse_integer(head[0][1:]) or 0) < GATHER_ARGS_MIN or self._takes_payload(head[2]):
            return False
        if head[1] != b"$%d" % len(head[2]):
            return False  # broken already, and the full parser says how
        unread = self._end - self._start
        if unread >= GATHER_BYTES_MAX:
            return False
        if unread == len(self._scratch):
            self._grow(4)
        return True

    def _read_payload_head(self) -> None:
        """Read the first two arguments and the third one's length in one step, if they are there and look as in SET.

        What does not is left to the full parser, which would have come to the same result four lines later.
        """
        parts = bytes(self._view[self._start : min(self._end, self._start + HEAD_BYTES)]).split(b"\r\n", 6)
        if len(parts) < 7:
            return
        array, name_length, name, key_length, key, length, _ = parts
        if (
            array in _PAYLOAD_ARRAYS
            and name_length == _BULK_HEADS[len(name)]
            and key_length == _BULK_HEADS[len(key)]
            and length[:1] == b"$"
            and PAYLOAD_BYTES_MIN <= (parse_integer(length[1:]) or 0) <= self.bulk_bytes_max
            and self.authenticated
        ):
            self._start += sum(map(len, parts[:6])) + 12
            self._args = [name, key]
            self._remaining = int(array[1:]) - 2
            self._length = int(length[1:])

    # ---- the one that knows the rules ----------------------------------------------------------------------------

    def _next(self) -> list[Argument] | None:
        while True:
            if not self._remaining:
                if self._args:
                    args, self._args, self._held_bytes, self._arena_bytes = self._args, [], 0, 0
                    return args
                if self._start == self._end:
                    return None
                if self._scratch[self._start] != STAR:
                    words = self._inline()
                    if words is None or words:
                        return words
                elif not self._read_count():
                    return None
                continue
            if self._length < 0 and not self._read_length():
                return None
            if not self._read_bulk():
                return None

    def _line(self, what: str) -> bytes | None:
        """The line at _start without its CR LF, which is then behind us; None when it is not complete."""
        at = self._scratch.find(b"\r", self._start, self._end)
        if at < 0 or at + 1 >= self._end:
            if self._end - self._start > LINE_BYTES_MAX:
                raise ProtocolError(f"too big {what} string")
            return None
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _read_count(self) -> bool:
        line = self._line("mbulk count")
        if line is None:
            return False
        count = parse_integer(line[1:])
        if count is None or count > MULTIBULK_MAX:
            raise ProtocolError("invalid multibulk length")
        if count > UNAUTHENTICATED_ARGS_MAX and not self.authenticated:
            raise ProtocolError("unauthenticated multibulk length")
        self._remaining = max(0, count)
        return True

    def _read_length(self) -> bool:
        line = self._line("bulk count")
        if line is None:
            return False
        if line[:1] != b"$":
            got = line[:1].decode("latin-1") if line else " "
            raise ProtocolError(f"expected '$', got '{got}'")
        length = parse_integer(line[1:])
        if length is None or not 0 <= length <= self.bulk_bytes_max:
            raise ProtocolError("invalid bulk length")
        if length > UNAUTHENTICATED_BULK_BYTES_MAX and not self.authenticated:
            raise ProtocolError("unauthenticated bulk length")
        self._length = length
        return True

    def _read_bulk(self) -> bool:
        """Take the bulk of _length bytes from the scratch, or give it a place of its own. False = more bytes needed."""
        length = self._length
        if length < PAYLOAD_BYTES_MIN - SLACK_BYTES:
            past = self._start + length + 2
            if past > self._end:
                return False
            self._hold(length)
            self._args.append(bytes(self._view[self._start : past - 2]))
            self._start = past
            self._remaining -= 1
            self._length = -1
            return True
        if length >= EVIDENCE_FROM_BYTES and self._end - self._start < min(
            length >> EVIDENCE_SHIFT, EVIDENCE_BYTES_MAX
        ):
            return False
        hold = self._open_payload(self._args, length) if length >= PAYLOAD_BYTES_MIN else None
        if isinstance(hold, Later):
            return False
        self._body_hold = hold
        if isinstance(hold, Reservation):
            self._body = hold.view_with_slack
            self._arena_bytes += length
            self._hold(length)
        else:
            if hold is None:
                self._hold(length)
            # Mapped, since a bytearray would touch all that is only claimed so far, up to 512 MiB.
            claimed = 1 if hold is REFUSED else length + SLACK_BYTES
            self._body = memoryview(mmap(-1, claimed, MAP_PRIVATE | MAP_ANONYMOUS))
        # What the scratch has already received of it: the one copy of payload bytes, at most SCRATCH_BYTES.
        here = min(self._end - self._start, length + SLACK_BYTES)
        if hold is not REFUSED:
            self._body[:here] = self._view[self._start : self._start + here]
        self._start += here
        self._filled = here
        return self._finish_body()

    def _hold(self, length: int) -> None:
        """Count what an argument takes; too much of it ends the connection without a word, as it does with Redis."""
        self._held_bytes += length
        if self._held_bytes + ARGUMENT_BYTES * len(self._args) > self.query_bytes_max:
            raise QueryBufferLimit("")

    def _finish_body(self) -> bool:
        """The bulk that has its own place becomes an argument once it is complete."""
        if self._filled < self._length + SLACK_BYTES:
            return False
        assert self._body is not None
        self._take_overflow()
        # No payload of the arena, so it becomes bytes like every other argument: a copy, of what is large but rare.
        self._args.append(bytes(self._body[: self._length]) if self._body_hold is None else self._body_hold)
        self._after_payload = self._body_hold is not None and self._length > SCRATCH_BYTES
        self._gathered = False
        self._body, self._body_hold, self._filled = None, None, 0
        self._remaining -= 1
        self._length = -1
        return True

    def _inline(self) -> list[Argument] | None:
        """A request typed by hand: one line, words split as sdssplitargs does, none in an empty one."""
        at = self._scratch.find(b"\n", self._start, self._end)
        if at < 0:
            if self._end - self._start > LINE_BYTES_MAX:
                raise ProtocolError("too big inline request")
            return None
        line = bytes(self._view[self._start : at])
        self._start = at + 1
        return list(words_of(line.removesuffix(b"\r")))

    def _grow(self, factor: int, bytes_max: int = sys.maxsize) -> None:
        """A line longer than the scratch, of which Redis allows 64 KiB, a gathered command, or what is put by."""
        unread = bytes(self._view[self._start : self._end])
        self._scratch = bytearray(min(len(self._scratch) * factor, bytes_max))
        self._scratch[: len(unread)] = unread
        self._view = memoryview(self._scratch)
        self._start, self._end = 0, len(unread)

    def _renew(self) -> None:
        """Everything is read: the next bytes may be plain again, and a scratch that had to grow is given up."""
        self._plain = True
        if len(self._scratch) > SCRATCH_BYTES:
            self._scratch, self._view = self._scratches.get()
