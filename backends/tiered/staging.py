"""Near memory as the far backend's staging: values go out of it and come into it, and nothing is copied.

A value is near from its commit on, and held there until the far side has answered: eviction cannot take it meanwhile, a
delete takes it at once, and order of use near is that of the engine, whatever the network does. When the far side did
not take it, that is noted, so that it can be sent when it is wanted again.

What comes from far stays near, unless it is old news: a key that was deleted, or stored anew, since the load began.
"""

from __future__ import annotations

import math
import sys
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from kvredis.backends.local import LocalBackend
from kvredis.backends.readahead import ROOM_LOOK_S
from kvredis.storage.entry import Lease, Reservation, extent_length
from kvredis.storage.memory.arena import Arena

UNSENT_KEYS_MAX: Final = 65_536
"""Keys noted as near and not far; beyond it the oldest are forgotten, which costs hits and no more."""
UNSENT_PAUSE_S: Final = 1.0
"""How long nothing is sent again after the far side has failed to take something. What was kept from it does not count:
an engine that is never idle would go on keeping what follows from it, and never catch up."""
ROOM_WAIT_S: Final = 0.5
ROOM_WAIT_PART: Final = 4
"""What a load waits for room in all, for the disk to make some or a reader to let go of it; and no more than a quarter
of the time that the server has for its bodies, lest it is taken for lost."""


class Filling:
    """The Rooms of one load from far, in near memory. Its blocks stay unless a delete comes in between."""

    __slots__ = ("_staging", "bytes_left", "deletes", "is_wanted", "no_room", "room_wait_s")

    def __init__(self, staging: NearStaging, *, is_wanted: bool, room_wait_s: float, bytes_left: int) -> None:
        self._staging = staging
        self.deletes = staging.deletes
        """How many deletes there had been when it began."""
        self.is_wanted = is_wanted
        """Whether a caller waits for its blocks, so that others leave for them even if the disk has not got these."""
        self.room_wait_s = room_wait_s
        """What it may still wait for memory."""
        self.bytes_left = bytes_left
        """What all of its blocks may take of memory."""
        self.no_room = 0
        """Blocks that came and were dropped."""

    def reserve(self, key: bytes, length: int) -> Arriving | None:
        """As Rooms.reserve: waits for others to make room as long as may be."""
        return self._staging.receive(self, key, length)

    def reserve_ahead(self, key: bytes, length: int) -> Arriving | None:
        """As Rooms.reserve_ahead: no block that shall go to disk leaves unwritten for it."""
        return self._staging.receive(self, key, length, ahead=True)


class _Hold(ABC):
    """What the far backend has of near's memory for one value. It ends in `commit` when all went well, else `abort`."""

    __slots__ = ("key", "offset", "staging", "view")

    def __init__(self, staging: NearStaging, key: bytes, of: Reservation | Lease) -> None:
        self.staging = staging
        self.key = key
        self.view = of.view
        self.offset = of.offset

    @abstractmethod
    def commit(self) -> None:
        """End the hold of a value that has passed whole."""

    @abstractmethod
    def abort(self) -> None:
        """End the hold of a value that has not passed, or not whole."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Arriving(_Hold):
    """Room for a value that comes from far."""

    __slots__ = ("_filling", "_has_ended", "_room")

    def __init__(self, staging: NearStaging, room: Reservation, filling: Filling) -> None:
        super().__init__(staging, room.key, room)
        self._room = room
        self._filling = filling
        self._has_ended = False

    def filled(self, start: int, stop: int) -> None:
        """Do nothing: the bytes are where they stay."""

    def commit(self) -> None:
        """Keep a value that has come, and with which its reader is done."""
        if not self._has_ended:
            self._has_ended = True
            self.staging.keep(self._room, self._filling.deletes)

    def abort(self) -> None:
        """Give the room back of a value that has not come."""
        if not self._has_ended:
            self._has_ended = True
            self._room.abort()
            self.staging.give_back(self._filling, len(self.view))


class Leaving(_Hold):
    """A value that is near, or will be when it is published, on its way to far."""

    __slots__ = ("_hold", "_room", "is_offered")

    def __init__(self, staging: NearStaging, key: bytes, of: Reservation | Lease) -> None:
        super().__init__(staging, key, of)
        self.is_offered = False
        """Whether the far side's queue has had room for it."""
        self._room = of if isinstance(of, Reservation) else None
        self._hold = of if isinstance(of, Lease) else None

    def filled(self, start: int, stop: int) -> None:
        """Do nothing: the bytes are near."""

    def publish(self) -> bool:
        """Make the value visible near, and hold it there; False when it has left again a moment later."""
        if self._room is not None:
            self._hold = self.staging.publish(self._room)
        return self._hold is not None

    def commit(self) -> None:
        """End the hold of a value that the far side has."""
        self.staging.note_sent(self.key)
        self._end()

    def abort(self) -> None:
        """End the hold of a value that the far side does not have; one that was not published is given up
        altogether."""
        if self._hold is not None:
            self.staging.note_unsent(self.key, failed=self.is_offered)
        elif self._room is not None:
            self._room.abort()
        self._end()

    def _end(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.release()


class _Here(threading.local):
    """What the far backend is being given in this thread."""

    leaving: Leaving | None = None


class NearStaging:
    """The Staging of a far backend over `near`. A backend asks its staging for room in the thread that stores, where
    `sending` says of what; each load has rooms of its own (Filling). Thread-safe; `close` ends waits and leaves near
    open.
    """

    def __init__(self, near: LocalBackend, timeout_s: float) -> None:
        """`timeout_s` is what the far backend gives a server for one load."""
        self._near = near
        self._timeout_s = timeout_s
        self._here = _Here()
        self._lock = threading.RLock()  # reentrant: a collected generator may end a hold anywhere
        self.deletes = 0
        self._unsent: OrderedDict[bytes, None] = OrderedDict()  # each step is one that the interpreter does whole
        self._failed_s = -math.inf
        self._closed = threading.Event()

    @property
    def arena(self) -> Arena:
        """The memory that there is: near's."""
        return self._near.store.arena

    def reserve(self, key: bytes, length: int) -> Leaving | None:
        """Give the room of the value that is being sent in this thread; None when none is."""
        return self._here.leaving

    def close(self) -> None:
        """End all waits."""
        self._closed.set()

    # ---- from near to far --------------------------------------------------------------------------------------------

    @contextmanager
    def sending(self, leaving: Leaving) -> Iterator[None]:
        """What the far backend reserves in here is for this value."""
        self._here.leaving = leaving
        try:
            yield
        finally:
            self._here.leaving = None

    def publish(self, room: Reservation) -> Lease | None:
        """Commit a value near, and hold it; None when others have taken its place at once."""
        with self._lock:
            room.commit()
            hold = self._near.store.peek(room.key)
        if hold is None or hold.entry.extent is room.extent:
            return hold
        hold.release()
        return None

    def note_unsent(self, key: bytes, *, failed: bool) -> None:
        """Remember that a value is near, and that the far side has not got it: it `failed` to take it, else it was not
        given it. Takes no lock: others' are held."""
        self._unsent[key] = None
        if len(self._unsent) > UNSENT_KEYS_MAX:
            self._unsent.popitem(last=False)
        if failed:
            self._failed_s = self._near.store.now_s()

    def note_sent(self, key: bytes) -> None:
        """Remember no longer that the far side has not got it."""
        self._unsent.pop(key, None)

    def unsent_of(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that the far side lacks, as far as we know."""
        return [key for key in keys if key in self._unsent] if self._unsent else []

    @property
    def may_send(self) -> bool:
        """Whether it is worth offering the far side again what it has not got."""
        return self._near.store.now_s() >= self._failed_s + UNSENT_PAUSE_S

    def take_unsent(self, key: bytes) -> Leaving | None:
        """Hold a value that is to be sent again, and note it no longer; None: it is not in memory."""
        store = self._near.store
        hold = store.peek(key)
        if hold is not None or store.find(key) is None:
            self.note_sent(key)
        return None if hold is None else Leaving(self, key, hold)

    # ---- from far to near --------------------------------------------------------------------------------------------

    def new_load(self, within_s: float | None = None) -> Filling:
        """Begin a load that may take so long: from now on a delete is news."""
        patience_s = self._timeout_s if within_s is None else min(within_s, self._timeout_s)
        wait_s = min(ROOM_WAIT_S, patience_s / ROOM_WAIT_PART)
        return Filling(self, is_wanted=True, room_wait_s=wait_s, bytes_left=sys.maxsize)

    def new_prefetch(self, bytes_max: int) -> Filling:
        """Begin a load that no caller waits for, of so many bytes: from now on a delete is news."""
        return Filling(self, is_wanted=False, room_wait_s=0.0, bytes_left=bytes_max)

    def receive(self, filling: Filling, key: bytes, length: int, *, ahead: bool = False) -> Arriving | None:
        """Get room for a value of that load, in any thread; None when there is none, which counts unless it is
        reserved `ahead`, and is never waited for then."""
        needed = extent_length(length)
        with self._lock:
            fits = needed <= min(filling.bytes_left, self.arena.nbytes)
            filling.bytes_left -= needed * fits
        room = None
        if fits:
            store = self._near.store
            room = store.reserve(key, length, drop=False) if ahead else self._find_room(key, length, filling)
        if room is None:
            with self._lock:
                filling.bytes_left += needed * fits
                filling.no_room += not ahead
            return None
        return Arriving(self, room, filling)

    def give_back(self, filling: Filling, length: int) -> None:
        """A value of that load has not come: others of it may have its room."""
        with self._lock:
            filling.bytes_left += extent_length(length)

    def _find_room(self, key: bytes, length: int, filling: Filling) -> Reservation | None:
        """Room for a body whose sender waits: no block that shall go to disk leaves unwritten while there is time."""
        store = self._near.store
        room = store.reserve(key, length, drop=False)
        while room is None and filling.room_wait_s > 0 and not self._closed.is_set():
            began_s = store.now_s()
            if store.tiering is not None and store.tiering.makes_room:
                store.tiering.wait_for_room(min(filling.room_wait_s, ROOM_LOOK_S))
            else:
                self._closed.wait(min(filling.room_wait_s, ROOM_LOOK_S))
            filling.room_wait_s -= store.now_s() - began_s
            room = store.reserve(key, length, drop=False)
        return store.reserve(key, length) if room is None and filling.is_wanted else room

    def keep(self, room: Reservation, deletes: int) -> None:
        """Commit what has come, unless something has happened to its key since."""
        with self._lock:
            if self.deletes == deletes and self._near.store.find(room.key) is None:
                room.commit()
                return
        room.abort()

    def delete(self, keys: Sequence[bytes]) -> int:
        """Take keys away near; what is on its way from far under any key is not kept."""
        with self._lock:
            self.deletes += 1
            for key in keys:
                self.note_sent(key)
            return self._near.delete(keys)
