"""Holds on a value on its way to a server, and on one that was received: on room in the engine's staging arena, or in
memory that the engine lends, which the value leaves, or comes to, without passing through the arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from kvredis.backends import base
from kvredis.backends.resp.wire import Scattered
from kvredis.storage.memory.arena import Arena


class Room(base.Reservation, Protocol):
    """Room in the staging memory."""

    @property
    def offset(self) -> int | None:
        """Where in the arena the value begins; None for a short one, which is not there."""
        ...


class Staging(Protocol):
    """What a remote backend needs of a Store: room, which it commits only to let what has passed through stay there."""

    @property
    def arena(self) -> Arena:
        """The memory that there is."""
        ...

    def reserve(self, key: bytes, length: int) -> Room | None:
        """Get room for `length` bytes, None when there is none."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Rooms(Protocol):
    """Where the bodies of one load come to be. For several threads, as several bodies come at once."""

    def reserve(self, key: bytes, length: int) -> base.Reservation | None:
        """Get room for a body that has come, None when there is none: then it is dropped. May wait for a moment."""
        ...

    def reserve_ahead(self, key: bytes, length: int) -> base.Reservation | None:
        """Get room for a body that is most likely as long. Never waits, and None does no harm: it is asked for again
        when the body has come."""
        ...


class AnyRooms:
    """Rooms in staging memory that keeps nothing of a load."""

    __slots__ = ("_staging",)

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def reserve(self, key: bytes, length: int) -> base.Reservation | None:
        return self._staging.reserve(key, length)

    reserve_ahead = reserve


class LentRoom:
    """A Room that is the engine's own memory. `view`, of what is ours, is empty."""

    __slots__ = ("memory",)
    view = memoryview(bytearray())
    offset = None

    def __init__(self, memory: Scattered) -> None:
        self.memory = memory

    def commit(self) -> None:
        """Do nothing: the memory is the engine's, before and after."""

    abort = commit

    def filled(self, start: int, stop: int) -> None:
        """Do nothing, as for commit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LentRooms:
    """Rooms of a load whose reader lends the `memory` for each key; a value of another length comes to `otherwise`."""

    __slots__ = ("_memory", "_otherwise")

    def __init__(self, memory: Mapping[bytes, Scattered], otherwise: Rooms) -> None:
        self._memory = memory
        self._otherwise = otherwise

    def reserve(self, key: bytes, length: int) -> base.Reservation | None:
        return self._lent(key, length) or self._otherwise.reserve(key, length)

    def reserve_ahead(self, key: bytes, length: int) -> base.Reservation | None:
        return self._lent(key, length) or self._otherwise.reserve_ahead(key, length)

    def _lent(self, key: bytes, length: int) -> LentRoom | None:
        memory = self._memory.get(key)
        return None if memory is None or len(memory) != length else LentRoom(memory)


def memory_of(room: base.Reservation) -> memoryview | Scattered:
    """Where the value of a room is."""
    return room.memory if isinstance(room, LentRoom) else room.view


class RemoteReservation:
    """A value on its way out. To the caller who fills it a base.Reservation, of a LentRoom with an empty `view`; once
    committed it is the write queue's,
    which counts in `holds` itself and those who read the value meanwhile, and frees the room when the last of them is
    done. The queue notes in `taken` that the server has it; in `hops` how often servers have sent it on, in `asking`
    that the last one did so by ASK.
    """

    __slots__ = (
        "_abort",
        "_commit",
        "_ended",
        "_filled",
        "_keep",
        "_room",
        "asking",
        "has_parts",
        "holds",
        "hops",
        "is_lent",
        "key",
        "nbytes",
        "offset",
        "pieces",
        "taken",
        "view",
    )

    def __init__(
        self,
        key: bytes,
        room: Room,
        commit: Callable[[RemoteReservation], None],
        abort: Callable[[RemoteReservation], None],
        keep: bool = False,
        filled: Callable[[RemoteReservation, int, int], None] | None = None,
    ) -> None:
        self.key = key
        self.view = room.view
        self.offset = room.offset
        self.is_lent = isinstance(room, LentRoom)
        memory = memory_of(room)
        self.nbytes = len(memory)
        self.pieces: Sequence[memoryview] = memory.views if isinstance(memory, Scattered) else (memory,)
        """What is sent."""
        self.holds = 1
        self._room = room
        self._keep = keep
        self._commit = commit
        self._abort = abort
        self._filled = filled
        self._ended = False
        self.has_parts = False
        """Whether some of it has been said to be filled."""
        self.taken = False
        self.hops = 0
        self.asking = False

    @property
    def keys(self) -> tuple[bytes]:
        """The key, as a Touch has several."""
        return (self.key,)

    def filled(self, start: int, stop: int) -> None:
        """As Reservation.filled, for a server that copies out of our memory."""
        if not self._ended and self._filled is not None:
            self._filled(self, start, stop)

    def commit(self) -> None:
        """Put the value into the queue, as it is now; it does not wait for the network here."""
        if not self._ended:
            self._ended = True
            self._commit(self)

    def abort(self) -> None:
        """Give the room back; after a commit it does nothing."""
        if not self._ended:
            self._ended = True
            self._abort(self)

    def free(self) -> None:
        """End the hold on the memory; for the write queue. With `keep` staging learns by commit that the server has
        it."""
        if self._keep and self.taken:
            self._room.commit()
        else:
            self._room.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class RemoteLease:
    """A value that has arrived, or has not left yet; a base.Lease. `end` is called once."""

    __slots__ = ("_end", "view")

    def __init__(self, view: memoryview, end: Callable[[], object]) -> None:
        self.view = view.toreadonly()
        self._end: Callable[[], object] | None = end

    @property
    def length(self) -> int:
        """Bytes of payload."""
        return len(self.view)

    @property
    def held(self) -> bool:
        """As Lease.held: until it is released, as the memory is ours."""
        return self._end is not None

    def release(self) -> None:
        """End the hold; a second call does nothing."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class LentLease(RemoteLease):
    """A value that has come to the memory that its reader lends; `view` is empty."""

    __slots__ = ()
