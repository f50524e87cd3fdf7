"""Leases of many blocks at a time: `lease_run` and `end_leases`, for clients that read the arena by themselves.

Such a client reads without a copy, so most of what a block still costs is the bookkeeping of its lease. A run is leased
under one lock and one time limit, and ended under one lock. Where the extension was built, _leasing.c does for each
block what the Python here does, with the same result for every run.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from .entry import Entry, LeaseRun
from .memory.copy import NATIVE_WANTED

Found = Entry | bytes | None
"""A block that is held now; a small value, which needs no hold; None for a miss, or what is on disk alone."""

Place = tuple[LeaseRun, int, int]
"""One hold: its run, which of the run's it is, and how many bytes of the arena it keeps from others."""

Hit = Callable[[bytes], Entry | None]
Holding = Callable[
    [Sequence[bytes], dict[bytes, Entry], Hit, Callable[[Entry], None], float],
    tuple[list[Found], list[Entry | None], tuple[int, int, int, int]],
]
Ending = Callable[[Sequence[Place], list[dict[bytes, Entry]] | None, Callable[[Entry], None]], int]


def hold_in_python(
    keys: Sequence[bytes], entries: dict[bytes, Entry], hit: Hit, touch: Callable[[Entry], None], now_s: float
) -> tuple[list[Found], list[Entry | None], tuple[int, int, int, int]]:
    """What there is under `keys`; which of it is held now; and as sums how many blocks were used without asking `hit`,
    the holds, and the bytes and tokens of what is held. `hit` (StoreState._hit) is asked about each key here; in C
    about all but blocks that are in the database `entries` and in the arena without an end, whose use `touch` and
    `now_s` are for."""
    found: list[Found] = []
    held: list[Entry | None] = []
    leases = nbytes = tokens = 0
    for key in keys:
        entry = hit(key)
        if entry is None or entry.value is not None:
            found.append(None if entry is None else entry.value)
            held.append(None)
            continue
        entry.leases += 1
        leases += 1
        nbytes += entry.length
        tokens += entry.tokens
        found.append(entry)
        held.append(entry)
    return found, held, (0, leases, nbytes, tokens)


def end_in_python(
    places: Sequence[Place], spaces: list[dict[bytes, Entry]] | None, unheld: Callable[[Entry], None]
) -> int:
    """End holds; returns how many went on until now. `unheld` is told of each entry that is not held any more, but
    not of one that is visible in `spaces`."""
    ended = 0
    for run, at, _ in places:
        entry = run.entries[at]
        if entry is None:
            continue
        run.entries[at] = None
        entry.leases -= 1
        ended += 1
        if not entry.leases and (spaces is None or spaces[entry.space].get(entry.key) is not entry):
            unheld(entry)
    return ended


def _quickest() -> tuple[Holding, Ending]:
    """The native ways, if they are there and wanted."""
    if NATIVE_WANTED:
        with suppress(ImportError):
            from ._leasing import end, hold

            return hold, end
    return hold_in_python, end_in_python


hold, end = _quickest()
