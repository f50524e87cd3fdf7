"""What kvredis/server/protocol/_plain.c offers to fast_parser.py, client/get_run.py and shm/attach.py."""

from collections.abc import Callable, Sequence

from kvredis.server.shm.attach import Held, Room
from kvredis.storage.entry import Found, LeaseRun, Place

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
