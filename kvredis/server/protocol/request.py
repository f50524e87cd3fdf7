"""What the parser hands on: a request's arguments, and what may become of one that brings a payload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from kvredis.storage.entry import Reservation

MULTIBULK_MAX: Final = 2**31 - 1
UNAUTHENTICATED_ARGS_MAX: Final = 10
UNAUTHENTICATED_BULK_BYTES_MAX: Final = 16384


class ProtocolError(Exception):
    """The client broke the protocol. The text goes into `-ERR Protocol error: ...`; empty = hang up without a word."""


class QueryBufferLimit(ProtocolError):
    """One command has more bytes in its arguments than `query_bytes_max` allows."""


class Refused:
    """Stands in a command's arguments for a payload that there was no room for; its bytes were thrown away."""


REFUSED: Final = Refused()


class Later:
    """Says that a payload must wait: `take` gives nothing until it is called again. The base of client/blocked.py's
    Blocked."""

    __slots__ = ()


Argument: TypeAlias = bytes | Reservation | Refused
OpenPayload: TypeAlias = "Callable[[list[Argument], int], Reservation | Refused | Later | None]"


# ---- limits ----------------------------------------------------------------------------------------------------------
#
# How much the parser takes in at a time, and what it wants to see first: its bounds, each with its reason.


SCRATCH_BYTES: Final = 20 * 1024
"""Size of the receive buffer for commands: what it holds of a payload must be copied out, so it is kept small. A SET of
16 KiB comes in one receive, which costs more than copying it does."""

WIDE_BYTES: Final = 256 * 1024
"""Size of the one that clients share for a turn each, where more than that has come and it brings short values for the
arena. It stays in a processor's cache, so they are copied out of it for little."""

HEAD_BYTES: Final = 512
"""What is offered instead to a client whose last command brought a payload that is longer than that: room for the next
one's header and little of its bytes. More is offered again as soon as something else comes."""

LINE_BYTES_MAX: Final = 64 * 1024
"""Redis' PROTO_INLINE_MAX_SIZE: the longest line without a newline."""

PAYLOAD_BYTES_MIN: Final = 16 * 1024
"""Values from this length on may be received into the arena."""

EVIDENCE_FROM_BYTES: Final = 1024 * 1024
EVIDENCE_SHIFT: Final = 13
EVIDENCE_BYTES_MAX: Final = 8 * 1024
"""A header is a claim: room for a value of EVIDENCE_FROM_BYTES or more is asked for when length >> EVIDENCE_SHIFT of
its bytes have come, at most EVIDENCE_BYTES_MAX. So a client that announces 512 MiB and sends a kilobyte takes nothing,
and up to 4 MiB it costs a client that sends no further receive."""

GATHER_ARGS_MIN: Final = 17
GATHER_BYTES_MAX: Final = 1024 * 1024
GATHER_TRIES: Final = 4
"""A command of many small arguments (EXISTS with a thousand keys) is gathered whole, up to here, in a scratch that
grows, and then split in one step; longer ones, and those that looked complete so often and were not, are read argument
by argument."""

ARGUMENT_BYTES: Final = 64
"""What an argument takes beside its own bytes, as an object and in a list: of an empty one it is everything."""

TAIL_BYTES: Final = 256
"""Where a pipeline of small commands that was cut shows the start of one of them."""

READ_ON_BYTES_MAX: Final = 4 * 1024 * 1024
READ_ON_BYTES_ALL: Final = 64 * 1024 * 1024
"""What is put by of what a client sends behind a WAIT, and of all of them together: the end of a connection comes
behind everything that was sent, and Linux keeps up to 4 MiB for a client that has died (tcp_wmem)."""
