"""What of a client's own words SLOWLOG and MONITOR may repeat: never a password, and never a whole payload.

As in Redis, what is hidden is decided by the command's form alone: a password that was wrong, or an AUTH that failed,
stays hidden as well.
"""

from collections.abc import Sequence
from typing import TypeVar

from kvredis.storage.entry import Reservation

T = TypeVar("T")

REDACTED = b"(redacted)"

SECRET_SETTINGS = frozenset(
    {b"requirepass", b"masterauth", b"masteruser", b"tls-key-file-pass", b"tls-client-key-file-pass"}
)
"""What CONFIG SET may be given that is nobody else's business."""


def redacted(args: Sequence[T]) -> list[T | bytes]:
    """`args` with REDACTED in the place of each secret; arguments that are not bytes are left as they are."""
    words: list[T | bytes] = list(args)
    for at in _secret_places(args):
        words[at] = REDACTED
    return words


def excerpt(arg: object, length_max: int) -> tuple[bytes, int]:
    """The first `length_max` bytes of an argument, and how long it is in all; (b"", 0) for a payload that was refused.

    A payload must be asked for before anything else may be given its memory: before its command runs or right after.
    """
    if isinstance(arg, bytes):
        return arg[:length_max], len(arg)
    if not isinstance(arg, Reservation):
        return b"", 0
    try:
        return bytes(arg.view[:length_max]), arg.length
    except ValueError:  # the hold has ended and its view with it
        return b"", arg.length


def _secret_places(args: Sequence[object]) -> Sequence[int]:
    """The places of the arguments that are secret."""
    name = _word(args, 0)
    if name == b"auth":
        return range(1, len(args))
    if name == b"hello":
        return _behind(args, b"auth", 2, first=2)
    if name == b"migrate":
        return [*_behind(args, b"auth", 1, first=6), *_behind(args, b"auth2", 2, first=6)]
    if name == b"acl" and _word(args, 1) in (b"setuser", b"deluser", b"getuser"):
        return range(2, len(args))
    if name == b"config" and _word(args, 1) == b"set":
        return [at + 1 for at in range(2, len(args) - 1, 2) if _word(args, at) in SECRET_SETTINGS]
    return ()


def _word(args: Sequence[object], at: int) -> bytes:
    """An argument in lower case; nothing if there is none or if it is a payload."""
    arg = args[at] if at < len(args) else b""
    return arg[:64].lower() if isinstance(arg, bytes) else b""


def _behind(args: Sequence[object], option: bytes, count: int, first: int) -> list[int]:
    """The places of the `count` arguments behind each `option`."""
    found: list[int] = []
    for at in range(first, len(args)):
        if _word(args, at) == option:
            found += range(at + 1, min(at + 1 + count, len(args)))
    return found
