"""Values that come in parts: room that a client has reserved, filled in any order, visible only when it is whole.

An engine has a chunk's layers one after the other. SET would make it wait for the last one and then send all of them;
here it reserves room for the chunk (KV.RESERVE), writes each layer to its place as soon as it is computed (KV.WRITE),
and KV.COMMIT makes all of it visible at once. A large piece is received by the kernel straight into its place, as a
SET's value is.

A reservation belongs to one connection and ends with it. It is given up when next to nothing comes for it during
`body_timeout`: only the reservation, since the connection may hold leases that others need.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import partial
from typing import Final, Protocol

from kvredis.storage.entry import NOWHERE, SLACK_BYTES, Reservation
from kvredis.storage.store import Store
from kvredis.storage.tiering.gpu import GpuReservation

from .client.client import Client, Host
from .client.pause import Pause
from .protocol.arguments import parse_integer
from .protocol.replies import NOT_AN_INTEGER, error
from .protocol.request import REFUSED, Argument, Refused

log = logging.getLogger(__name__)

RESERVATIONS_MAX: Final = 1024
"""What one connection may have at a time: a prompt of 256 thousand tokens in chunks of 256."""

RANGES_MAX: Final = 4096
"""Separate ranges of one reservation that may have been written: layers in any order need a few dozen."""

PROGRESS_BYTES_MIN: Final = 64 * 1024
"""What must be newly written within the time limit of a body, unless the reservation ends: client/admission.py's
figure."""

NO_SUCH_RESERVATION: Final = error(
    "ERR no such reservation: this connection never made it, it has ended, or it was given up since nothing came for it"
)
ON_GPU: Final = error("ERR this reservation lies on the GPU: the client writes to it by itself")
NOT_IN_A_TRANSACTION: Final = error("ERR Command not allowed inside a transaction")


class Part:
    """One reservation, and which of its bytes have been written. `view` is its memory, not to be used once it `ended`.

    A writer that works while other code runs (another thread, the kernel bit by bit) does so between `begin_fill` and
    `end_fill`: until then the memory stays what it is, even if the client goes.
    """

    __slots__ = (
        "_ends", "_fillers", "_starts", "ended", "id", "marked_bytes", "marked_s", "reservation", "written_bytes",
    )  # fmt: skip

    def __init__(self, number: int, reservation: Reservation, now_s: float) -> None:
        self.id = number
        self.reservation = reservation
        self._starts: list[int] = []  # of the ranges that are written: apart from one another, in order
        self._ends: list[int] = []
        self._fillers = 0
        self.ended = False
        self.written_bytes = reservation.length if isinstance(reservation, GpuReservation) else 0
        self.marked_bytes, self.marked_s = 0, now_s
        """How much was written when it was last found to make progress, and when that was."""

    @property
    def key(self) -> bytes:
        """Where it will be visible."""
        return self.reservation.key

    @property
    def length(self) -> int:
        """Bytes of the value."""
        return self.reservation.length

    @property
    def view(self) -> memoryview:
        """Exactly the value's bytes, to be written."""
        return self.reservation.view

    @property
    def is_whole(self) -> bool:
        """Whether every byte has been written."""
        return self.written_bytes == self.length

    @property
    def is_being_filled(self) -> bool:
        """Whether a writer is between `begin_fill` and `end_fill`."""
        return self._fillers > 0

    def refusal(self, offset: int, length: int) -> bytes | None:
        """The error for a write of `length` bytes to `offset`, None if it may be done."""
        if offset < 0 or offset + length > self.length:
            return error(f"ERR bytes {offset} to {offset + length} do not fit into a reservation of {self.length}")
        if len(self._starts) >= RANGES_MAX:
            first, past = self._touching(offset, offset + length)
            if first == past:
                return error(f"ERR more than {RANGES_MAX} separate ranges written: fill the gaps between them first")
        return None

    def wrote(self, offset: int, length: int) -> None:
        """Note that these bytes are in place; `refusal` has been asked."""
        if not length:
            return
        start, end = offset, offset + length
        first, past = self._touching(start, end)
        if first < past:
            start, end = min(start, self._starts[first]), max(end, self._ends[past - 1])
        self.written_bytes += end - start - sum(self._ends[first:past]) + sum(self._starts[first:past])
        self._starts[first:past], self._ends[first:past] = [start], [end]

    def lost(self, offset: int, length: int) -> None:
        """Note that these bytes are not known any more: a writer began to write them and did not come to the end."""
        start, end = offset, offset + length
        first, past = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if not length or first >= past:
            return
        left = [(self._starts[first], start)] if self._starts[first] < start else []
        right = [(end, self._ends[past - 1])] if self._ends[past - 1] > end else []
        kept = left + right
        self.written_bytes += sum(b - a for a, b in kept) - sum(self._ends[first:past]) + sum(self._starts[first:past])
        self._starts[first:past], self._ends[first:past] = [a for a, _ in kept], [b for _, b in kept]

    def begin_fill(self) -> None:
        """Note that one more writer writes into `view` from now on."""
        self._fillers += 1

    def end_fill(self) -> None:
        """Note that one of the writers does so no longer."""
        self._fillers -= 1
        if self.ended and not self._fillers:
            self.reservation.abort()

    @property
    def on_gpu(self) -> GpuReservation | None:
        """The reservation, if it is of room on the GPU, which its client writes to by itself; so it counts as written,
        and what KV.COMMIT means is that the client is done."""
        return self.reservation if isinstance(self.reservation, GpuReservation) else None

    def end(self, *, is_quiet: bool = False) -> None:
        """Give the room back, at the latest when no writer is left in it; not what was committed before. `is_quiet`:
        the client says that it writes no more."""
        self.ended = True
        if is_quiet and self.on_gpu is not None:
            self.on_gpu.is_quiet = True
        if not self._fillers:
            self.reservation.abort()

    def _touching(self, start: int, end: int) -> tuple[int, int]:
        """Which of the ranges overlap start..end or lie next to it: [first, past)."""
        return bisect_left(self._ends, start), bisect_right(self._starts, end)


class Piece(Reservation):
    """What one KV.WRITE brings, on its way into its place: for the parser a value's room like every other.

    A payload's terminator falls into the SLACK_BYTES behind it, and behind a piece in the middle these are bytes of the
    value, perhaps written already. They are put by and put back when the hold ends.
    """

    __slots__ = ("_behind", "_offset", "_part")

    def __init__(self, store: Store, part: Part, offset: int, length: int) -> None:
        whole = part.reservation
        memory = whole.view_with_slack[offset : offset + length + SLACK_BYTES]
        super().__init__(store, whole.key, whole.space, memory, NOWHERE)
        self._part = part
        self._offset = offset
        self._behind = bytes(memory[length:])
        part.begin_fill()

    def commit(self, expire_at_ms: int = 0) -> bool:
        """All of it has come: it counts as written. A second call does nothing."""
        if self._end():
            self._part.wrote(self._offset, self.length)
        return True

    def abort(self) -> None:
        """Give up a piece that has not come, or was not to: what stood in its place has been damaged, so it counts as
        missing."""
        if self._end():
            self._part.lost(self._offset, self.length)

    def _end(self) -> bool:
        ended, self._store = self._store is None, None
        if ended:
            return False
        self.view_with_slack[self.length :] = self._behind
        self._part.end_fill()
        return True


class ClientParts:
    """The reservations of one connection, by their ids."""

    def __init__(self) -> None:
        self._by_id: dict[int, Part] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Part]:
        return iter(list(self._by_id.values()))

    @property
    def held_bytes(self) -> int:
        """What they take of the arena."""
        return sum(part.reservation.extent.length for part in self._by_id.values())

    def find(self, number: int) -> Part | None:
        """The reservation with that id, if it is this connection's."""
        return self._by_id.get(number)

    def named(self, word: bytes) -> Part | bytes:
        """The reservation that a command's argument means, or the error for it."""
        number = parse_integer(word)
        if number is None:
            return NOT_AN_INTEGER
        return self._by_id.get(number) or NO_SUCH_RESERVATION

    def place(self, word: bytes, offset_word: bytes, length: int) -> tuple[Part, int] | bytes:
        """Reservation and offset that the arguments of a command mean which writes `length` bytes, or the error."""
        part = self.named(word)
        if isinstance(part, bytes):
            return part
        if part.on_gpu is not None:
            return ON_GPU
        offset = parse_integer(offset_word)
        if offset is None:
            return NOT_AN_INTEGER
        return part.refusal(offset, length) or (part, offset)

    def add(self, part: Part) -> None:
        """One more."""
        self._by_id[part.id] = part

    @property
    def gpu_bytes(self) -> int:
        """What they take of the GPU's memory."""
        return sum(part.on_gpu.place.length for part in self._by_id.values() if part.on_gpu is not None)

    def end(self, part: Part, *, is_quiet: bool = False) -> None:
        """Give one back; the rest of one that was committed is only forgotten."""
        del self._by_id[part.id]
        part.end(is_quiet=is_quiet)

    def end_all(self) -> int:
        """Give all of them back; returns how many there were."""
        ended = len(self._by_id)
        for part in self:
            self.end(part)
        return ended


class _Server(Host, Protocol):
    pause: Pause


class Parts:
    """All reservations of a server's clients."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._clients: dict[int, ClientParts] = {}  # of those that have ever reserved, by session id
        self._ids = 0
        self.committed = 0
        self.aborted = 0
        """By KV.ABORT, by a condition of KV.COMMIT that did not hold, or because the client went."""
        self.given_up = 0

    def of(self, session: Client) -> ClientParts:
        """A client's reservations."""
        found = self._clients.get(session.id)
        return ClientParts() if found is None else found

    def held_by(self, session: Client) -> int:
        """What a client's reservations take of the arena."""
        found = self._clients.get(session.id)
        return 0 if found is None else found.held_bytes

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    @property
    def held_bytes(self) -> int:
        """What all of them take of the arena."""
        return sum(client.held_bytes for client in self._clients.values())

    def open(self, session: Client, reservation: Reservation) -> Part:
        """Make a client's reservation of the room that was found for it. Ids are never used twice, so that one which
        comes over a wrong connection names nothing."""
        client = self._clients.get(session.id)
        if client is None:
            client = self._clients[session.id] = ClientParts()
            session.at_end.append(partial(self._forget, session.id))
        self._ids += 1
        part = Part(self._ids, reservation, self._server.now_s())
        client.add(part)
        return part

    def end_all(self, session: Client) -> None:
        """End all reservations of a client: RESET."""
        self.aborted += self.of(session).end_all()

    def open_payload(self, session: Client, args: list[Argument], length: int) -> Piece | Refused:
        """Where a large piece is received whose KV.WRITE has told id and offset; REFUSED, with the error for it, if it
        cannot be: its bytes are then dropped as they come."""
        place: tuple[Part, int] | bytes = NOT_IN_A_TRANSACTION
        if session.transaction is None and isinstance(args[1], bytes) and isinstance(args[2], bytes):
            place = self.of(session).place(args[1], args[2], length)
        if isinstance(place, bytes):
            session.refuse_payload(place)
            return REFUSED
        return Piece(session.store, *place, length)

    def give_up_stalled(self) -> None:
        """End reservations for which next to nothing has come during the time limit of a body."""
        now_s, limit_s = self._server.now_s(), self._server.body_timeout_s
        paused = bool(self._server.pause.until_s)  # then it is we who keep what comes waiting
        for client in self._clients.values():
            for part in client:
                written = part.written_bytes - part.marked_bytes
                if paused or part.is_being_filled or written >= PROGRESS_BYTES_MIN:
                    part.marked_bytes, part.marked_s = part.written_bytes, now_s
                elif now_s - part.marked_s > limit_s:
                    log.warning("reservation %d given up: next to nothing came for %.0f s", part.id, limit_s)
                    self.given_up += 1
                    client.end(part)

    def _forget(self, session_id: int) -> None:
        self.aborted += self._clients.pop(session_id).end_all()
