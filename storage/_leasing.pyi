"""What storage/_leasing.c offers to lease_many.py."""

from collections.abc import Callable, Sequence

from .entry import Entry
from .lease_many import Found, Hit, Place

def hold(
    keys: Sequence[bytes],
    entries: dict[bytes, Entry],
    hit: Hit,
    touch: Callable[[Entry], None],
    now_s: float,
    /,
) -> tuple[list[Found], list[Entry | None], tuple[int, int, int, int]]: ...
def end(
    places: Sequence[Place], spaces: list[dict[bytes, Entry]] | None, unheld: Callable[[Entry], None], /
) -> int: ...
