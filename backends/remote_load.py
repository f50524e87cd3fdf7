"""One load under way: bodies from one or several servers, each in the order of its own keys, handed out in the load's.

All waits of a load together are bounded (Patience). A server that lets the time pass without a body is lost; one that
was merely too slow, or was given less time than usual, is not: what has not come from it is a miss, and nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from kvredis.storage.errors import BackendError

from . import base
from .attached import AttachedConnection
from .connection import Allocate, Connection
from .lanes import AHEAD_MIN, GetLane, ahead_for
from .lease_lane import LeaseLane
from .remote_holds import RemoteLease, Staging
from .remote_node import Node
from .remote_routes import HOPS_MAX, Hop, Routes

OVER_S: Final = 0.001
"""Less than this is not worth a wait; timers are off by as much."""


class Patience:
    """How long a load may still wait: `timeout_s` in all, or `within_s` if that is less; a with-block is a wait."""

    __slots__ = ("_began_s", "_whole_s", "is_cut", "left_s")

    def __init__(self, timeout_s: float, within_s: float | None) -> None:
        self.is_cut = within_s is not None and within_s < timeout_s
        self.left_s = self._whole_s = timeout_s if within_s is None else min(timeout_s, within_s)
        self._began_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether all of it is used up."""
        return self.left_s < OVER_S

    @property
    def is_fresh(self) -> bool:
        """Whether at least half of it is left."""
        return 2 * self.left_s >= self._whole_s

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.left_s -= time.monotonic() - self._began_s


class Stream:
    """The share of a load that one server has, striped over connections that it borrows from `node`."""

    __slots__ = ("_keep", "bodies", "lanes", "node", "turn")

    def __init__(self, node: Node, *, keep: bool) -> None:
        self.node = node
        self._keep = keep
        self.lanes: list[GetLane] = []
        self.turn = 0
        self.bodies = 0

    @property
    def is_usable(self) -> bool:
        """Whether there are connections; they are good, or given up, together."""
        return bool(self.lanes) and self.lanes[0].connection.usable

    @property
    def bytes_in(self) -> int:
        """All that has been received on them."""
        return sum(lane.connection.bytes_in for lane in self.lanes)

    def open(self, keys: Sequence[bytes], lanes_max: int) -> None:
        """Borrow connections and deal `keys` out over them; none when the server is lost. One is enough where it does
        not carry the bodies."""
        connections = self.node.borrow(1)
        try:
            if lanes_max > 1 and connections and not isinstance(connections[0], AttachedConnection):
                connections += self.node.borrow(lanes_max - 1)
        finally:
            for first, connection in enumerate(connections):
                self.lanes.append(self._lane(connection, keys[first :: len(connections)]))

    def _lane(self, connection: Connection, keys: Sequence[bytes]) -> GetLane:
        if keys and isinstance(connection, AttachedConnection):
            return LeaseLane(connection, keys, keep=self._keep)
        return GetLane(connection, keys)

    def ask(self, ahead: int, left_s: float) -> None:
        """Top up what is asked for on all lanes, and wait no longer than `left_s` for anything from now on."""
        for lane in self.lanes:
            lane.connection.set_timeout(left_s)
            lane.ask(ahead)

    def take(self, allocate: Allocate) -> int | base.Lease | BackendError | None:
        """Receive the next body; as GetLane.take."""
        lane = self.lanes[self.turn % len(self.lanes)]
        self.turn += 1
        return lane.take(allocate)

    def give_up(self, error: BackendError | None) -> None:
        """Close the connections, as nobody knows which bodies are still to come; with an error the server is lost."""
        broken = next((lane.connection for lane in self.lanes if not lane.connection.usable), None)
        for lane in self.lanes:
            lane.connection.close()
        if error is not None and broken is not None:
            self.node.lose(broken, error)

    def close(self, left_s: float) -> None:
        """Give the connections back."""
        try:
            for lane in self.lanes:
                lane.settle(left_s)
                lane.connection.set_timeout(self.node.link.timeout_s)
        except BaseException:
            self.give_up(None)
            raise
        finally:
            self.node.bring_back([lane.connection for lane in self.lanes])


class Load:
    """Bodies to be taken one after the other, between `begin` and `close`. For one thread at a time."""

    def __init__(self, routes: Routes, staging: Staging, patience: Patience, *, keep: bool) -> None:
        """With `keep` what has been read stays in `staging`."""
        self.no_room = 0
        self.is_given_up = False
        self._routes = routes
        self._staging = staging
        self._patience = patience
        self._keep = keep
        self._turns: deque[Stream] = deque()
        self._streams: dict[Node, Stream] = {}
        self._asides: dict[Node, Stream] = {}  # to where servers have sent us
        self._ahead = AHEAD_MIN

    def begin(self, keys: Sequence[bytes]) -> None:
        """Ask for the first of `keys` at every server that has some."""
        with self._patience:
            self._routes.await_first()
        shares: dict[Node, list[bytes]] = {}
        for key in keys:
            node = self._routes.owner(key)
            shares.setdefault(node, []).append(key)
            stream = self._streams.setdefault(node, Stream(node, keep=self._keep))
            self._turns.append(stream)
        for node, share in shares.items():
            self._open(self._streams[node], share, min(node.connections, len(share)))

    def take(self, key: bytes) -> base.Lease | None:
        """Receive the body of `key`, the next of those given to `begin`, from wherever it is now; None: a miss."""
        got = self._receive(self._turns.popleft(), key, None)
        for _ in range(HOPS_MAX):
            if not isinstance(got, Hop):
                break
            if got.node not in self._asides:
                self._asides[got.node] = Stream(got.node, keep=self._keep)
                self._open(self._asides[got.node], (), 1)
            got = self._receive(self._asides[got.node], key, got)
        return None if isinstance(got, Hop) else got

    def close(self) -> None:
        """Give all connections back; what is owed on them is read if that is cheap."""
        for stream in (*self._streams.values(), *self._asides.values()):
            stream.close(self._patience.left_s)

    def _open(self, stream: Stream, keys: Sequence[bytes], lanes_max: int) -> None:
        if self._patience.is_over:
            self.is_given_up = True
            return
        try:
            with self._patience:
                stream.open(keys, lanes_max)
                stream.ask(self._ahead, self._patience.left_s)
        except BaseException as error:
            self._fail(stream, error, True)

    def _receive(self, stream: Stream, key: bytes, hop: Hop | None) -> base.Lease | Hop | None:
        room: base.Reservation | None = None

        def allocate(length: int) -> memoryview | None:
            nonlocal room
            room = self._staging.reserve(key, length)
            self.no_room += room is None
            return None if room is None else room.view

        self.is_given_up |= self._patience.is_over
        if self._patience.is_over or not stream.is_usable:
            return None
        got: int | base.Lease | BackendError | None = None
        before, was_fresh = stream.bytes_in, self._patience.is_fresh
        try:
            with self._patience:
                stream.ask(self._ahead, self._patience.left_s)
                if hop is not None:
                    stream.lanes[0].ask_aside(key, asking=hop.asking)
                got = stream.take(allocate)
        except BaseException as error:
            got = None
            is_hung = [stream.bytes_in == before, was_fresh, not stream.bodies].count(True) >= 2
            self._fail(stream, error, is_hung)
        finally:
            if room is not None and not isinstance(got, int):
                room.abort()
        if isinstance(got, BackendError):
            hop = self._routes.follow(stream.node, got)
            if hop is None:
                stream.node.complain(got, stream.lanes[0].connection)
            return hop
        if got is None or (isinstance(got, int) and room is None):
            return None
        stream.bodies += 1
        if not isinstance(got, int):
            return got  # the value where it lies, on the server
        assert room is not None
        self._ahead = ahead_for(got, sum(len(each.lanes) for each in self._streams.values()))
        return RemoteLease(room.view, room.commit if self._keep else room.abort)

    def _fail(self, stream: Stream, error: BaseException, is_hung: bool) -> None:
        """End the stream after an error. When that is only that the time is up, the server is lost if it had the usual
        time and did too little with it: of no byte in this wait, a long wait and no body before, two have to hold."""
        if not isinstance(error, BackendError):
            stream.give_up(None)
            raise error
        self.is_given_up |= self._patience.is_over
        is_slow = self._patience.is_over and (self._patience.is_cut or not is_hung)
        stream.give_up(None if is_slow else error)
