"""Holds on room in a staging arena: a value on its way to a server, and one that has come from there."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from . import base


class Staging(Protocol):
    """What a remote backend needs of a Store: room, which it never commits."""

    def reserve(self, key: bytes, length: int) -> base.Reservation | None:
        """Get room for `length` bytes, None when there is none."""

    def close(self) -> None:
        """Give the memory back."""


class _Hold:
    """Room that is given back once."""

    __slots__ = ("_room", "key", "view")

    def __init__(self, key: bytes, room: base.Reservation, view: memoryview) -> None:
        self._room: base.Reservation | None = room
        self.key = key
        self.view = view

    def _give_back(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()


class RemoteReservation(_Hold):
    """A value on its way out; a base.Reservation. `send` gets the key and the bytes, and may fail in silence."""

    __slots__ = ("_send",)

    def __init__(self, key: bytes, room: base.Reservation, send: Callable[[bytes, memoryview], None]) -> None:
        super().__init__(key, room, room.view)
        self._send = send

    def commit(self) -> None:
        """Send the value and give the room back, which the kernel has copied by then."""
        if self._room is not None:
            try:
                self._send(self.key, self.view)
            finally:
                self._give_back()

    def abort(self) -> None:
        """Give the room back; after a commit it does nothing."""
        self._give_back()


class RemoteLease(_Hold):
    """A value that has arrived; a base.Lease."""

    __slots__ = ()

    def __init__(self, key: bytes, room: base.Reservation) -> None:
        super().__init__(key, room, room.view.toreadonly())

    @property
    def length(self) -> int:
        """Bytes of payload."""
        return len(self.view)

    def release(self) -> None:
        """Give the room back; a second call does nothing."""
        self._give_back()
