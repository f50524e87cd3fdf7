"""What kvredis/server/_plain.c offers to plain.py and runs.py."""

from collections.abc import Callable, Sequence

def plain_commands(data: bytes, /) -> tuple[list[list[bytes]], int, bool]: ...
def answer_gets(
    commands: Sequence[object],
    entries: object,
    replies: Sequence[object],
    touch: Callable[..., object],
    now_s: Callable[[], float],
    /,
) -> int: ...
