"""What an engine may hold: one contract of batched verbs, whether the blocks are in this process or behind a socket.

It is the Store's contract seen from an engine. A backend that is remote adds one rule: its trouble never escapes. A
server that is absent, lost, slow or hostile makes every verb answer as an empty cache would, says so once in the log,
and is tried again later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

from kvredis.storage.entry import extent_length
from kvredis.storage.memory.arena import Arena

Tier = Literal["memory", "disk", "remote"]
"""Where a block is, nearest first: in this process, on its disk, behind a socket."""


class Reservation(Protocol):
    """A writer's hold on room for one value: fill `view`, then `commit` or `abort`; leaving a with-block aborts.

    The view dies with the hold.
    """

    @property
    def view(self) -> memoryview:
        """Writable, of bytes, exactly as long as was asked for."""
        ...

    def filled(self, start: int, stop: int) -> None:
        """Note that bytes `start` to `stop` of the view are final: they may leave before the commit. Each is said once
        at most, and none needs to be."""
        ...

    def commit(self) -> object:
        """Store the value under its key. Whether a remote server took it is counted by the next Backend.flush(): what
        this gives means nothing."""
        ...

    def abort(self) -> None:
        """Give the room back; after a commit it does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


AnyReservation = TypeVar("AnyReservation", bound=Reservation)


class Lease(Protocol):
    """A reader's hold on one value: `view` stays what it is until `release`, which leaving a with-block does.

    When the bytes are another process' they may cease to be that value before, if that process ends the hold: its own
    limit of time, a lost connection. The memory stays readable all the same. So a caller who uses the bytes asks `held`
    when he has done so, and forgets what he has read, or made of it, when they were not.
    """

    @property
    def view(self) -> memoryview:
        """Read-only, of bytes, exactly as long as the value."""
        ...

    @property
    def held(self) -> bool:
        """Whether the bytes have been that value all the time until now. False after `release`.

        It is asked after the last byte was read. For a copy that a device makes that is when the copy has ended, not
        when it was asked for: wait for its event or stream first.
        """
        ...

    def release(self) -> None:
        """End the hold; a second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Prefetch(Protocol):
    """Blocks on their way to be near. It holds no bytes: what has come may leave again like any other block.

    The counts are blocks, each in one of the four; a queued one for which there is no room after all moves to no_room,
    and one that is far, and proves not to be there, to missing.
    """

    @property
    def queued(self) -> int:
        """Are on their way, or have come."""
        ...

    @property
    def resident(self) -> int:
        """Were near already."""
        ...

    @property
    def missing(self) -> int:
        """Are in no tier."""
        ...

    @property
    def no_room(self) -> int:
        """Have no room where they should come."""
        ...

    @property
    def refused(self) -> str:
        """Why nothing is fetched at all; "" when it was not refused."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether nothing is on its way any more, or it cannot be told. May ask a server."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until it is finished, at most so long; say whether it is, as far as a server has told. Opening a
        connection to one, where that is needed first, has a bound of its own."""
        ...

    def cancel(self) -> None:
        """Want no more of it: what has not begun is not fetched."""
        ...


@dataclass(frozen=True, slots=True)
class NothingToFetch:
    """A Prefetch of which nothing is on its way."""

    resident: int = 0
    missing: int = 0
    refused: str = ""
    queued: int = 0
    no_room: int = 0
    is_finished: bool = True

    def wait(self, timeout_s: float) -> bool:
        return True

    def cancel(self) -> None:
        """As Prefetch.cancel."""


class Backend(Protocol):
    """Blocks under keys, in batches. Every method may be called from any thread."""

    def match(self, keys: Sequence[bytes]) -> int:
        """Count how many of `keys`, from the first on, are present without a gap; the run is touched."""
        ...

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether there is a block under it, whatever the others are; touches nothing."""
        ...

    def expect(self, keys: Sequence[bytes], within_s: float) -> int:
        """Announce that the caller computes what is missing of `keys`, and stores it within so long; count those that
        it has announced now, not those that others have. Where no other could hear of it, those are all."""
        ...

    def coming(self, keys: Sequence[bytes]) -> int:
        """Count how many of `keys`, from the first on, are present or announced by others; never fewer than `match`
        would, and as many where no other can announce any."""
        ...

    def wait_for(self, keys: Sequence[bytes], within_s: float) -> int:
        """Wait, so long at most, while others have announced the first of `keys` that is missing, and they are not all
        there. Count how many, from the first on, are known to be there then; that may be fewer than `match` would
        find, and touches nothing."""
        ...

    def tiers_of(self, keys: Sequence[bytes]) -> list[Tier]:
        """Say for each key where its block would come from if it is anywhere; asks no server and touches nothing."""
        ...

    def reserve(self, key: bytes, length: int) -> Reservation | None:
        """Get room for a value of `length` bytes, or None: there is none, or no tier would take it.

        May block for a moment, for a disk to make room.
        """
        ...

    def reserve_all(self, keys: Sequence[bytes], length: int) -> Sequence[Reservation]:
        """Get room as `reserve` does for a value of `length` bytes under each key, up to the first for which there is
        none: for those that are filled together, and may cost one question to a server."""
        ...

    def room(self, length: int, at_least: int = 1) -> int:
        """Count the values of `length` bytes that would be taken now; any number where others leave for them, and 0
        where it would be fewer than `at_least`.

        A caller who stores several that belong together asks before it reserves, and stores no more than that at a
        time.
        """
        ...

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[Lease | None, None, None]:
        """Yield a Lease, or None for a miss, for each key in order, as the bodies arrive, some way ahead of the reader.

        Blocks that have not come when `within_s` have been waited for, all waits of this load together, are misses;
        None stands for the backend's own bound. Opening a connection to a server, where that is needed first, has a
        bound of its own.

        The consumer releases each Lease. It may hold several, but each takes room that later ones may then lack, which
        makes those misses. Nothing is asked for before the first `next`; a caller that stops early closes the
        generator.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> int:
        """Note that `keys`, head of the prefix first, were used together, so that the tail goes first; count those
        that exist, of several tiers in the nearest.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Take keys away and count how many there were."""
        ...

    def prefetch(self, keys: Sequence[bytes]) -> Prefetch:
        """Ask for blocks, the most urgent first, to be brought near; answers at once."""
        ...

    def flush(self) -> int:
        """Wait until every commit so far is answered; count those since the last that the farthest tier refused."""
        ...

    def stats(self) -> dict[str, int | float | str]:
        """Give counters since the start, by name; for reading only."""
        ...

    def close(self) -> None:
        """Flush and let go of memory and connections; no hold may be used afterwards. A second call does nothing."""
        ...


def reserve_each(
    reserve: Callable[[bytes, int], AnyReservation | None], keys: Sequence[bytes], length: int
) -> list[AnyReservation]:
    """Backend.reserve_all by one `reserve` after the other. What one of them raises leaves no room taken."""
    with ExitStack() as undo:
        rooms = []
        for key in keys:
            room = reserve(key, length)
            if room is None:
                break
            undo.callback(room.abort)
            rooms.append(room)
        undo.pop_all()
        return rooms


logger = logging.getLogger(__name__)


class Fitting:
    """What fits into `arena`. Any thread may ask; two that ask at once may both tell."""

    __slots__ = ("_nbytes", "_told")

    def __init__(self, arena: Arena) -> None:
        self._nbytes = arena.nbytes
        self._told = False

    def look_at(self, length: int) -> None:
        """Tell the log once if no value of `length` bytes can be stored."""
        if extent_length(length) > self._nbytes and not self._told:
            self._told = True
            text = "a block of %d bytes is longer than all of max_local_cpu_size (%d bytes): none of them is stored"
            logger.warning(text, length, self._nbytes)
