"""What kvredis/server/_plain.c offers to plain.py, runs.py and places.py."""

from collections.abc import Callable, Sequence

from kvredis.storage.entry import LeaseRun
from kvredis.storage.lease_many import Found, Place

from .places import Held, Room

def plain_commands(data: bytes, /) -> tuple[list[list[bytes]], int, bool]: ...
def answer_gets(
    commands: Sequence[object],
    entries: object,
    replies: Sequence[object],
    touch: Callable[..., object],
    now_s: Callable[[], float],
    /,
) -> int: ...
def keep(found: Sequence[Found], at: int, run: LeaseRun, held: Held, room: Room, /) -> tuple[bytes, int, int]: ...
def take(words: Sequence[bytes], held: Held, /) -> tuple[list[Place], int] | None: ...
