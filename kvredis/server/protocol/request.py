"""What the parser hands on: a request's arguments, and what may become of one that brings a payload."""

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
    """Says that a payload must wait for its turn: `take` gives nothing until it is called again."""


LATER: Final = Later()

Argument: TypeAlias = bytes | Reservation | Refused
OpenPayload: TypeAlias = "Callable[[list[Argument], int], Reservation | Refused | Later | None]"
