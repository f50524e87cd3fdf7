"""One load under way: bodies from one or several servers, each in the order of its own keys, handed out in the load's.

Over a unix socket, and from a server that sends by several threads, bodies come over several connections at once
(receive.py), as long as they come so quickly that it is copying that takes the time, and there is room for all
of them before they come.

All waits of a load together are bounded (Patience). A server that lets the time pass without a body is lost; one that
was merely too slow, or was given less time than usual, is not: what has not come from it is a miss, and nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final

from kvredis.backends import base
from kvredis.backends.resp.connection import Connection
from kvredis.backends.resp.wire import Scattered
from kvredis.backends.shm.buffers import AnyRooms, LentLease, LentRoom, LentRooms, RemoteLease, Rooms, Staging
from kvredis.backends.shm.connection import AttachedConnection
from kvredis.backends.shm.reader import LeasePipeline
from kvredis.storage.errors import BackendError

from .pipeline import AHEAD_MIN, DRAIN_S, GetPipeline, ahead_for
from .pool import Node
from .receive import Body, Receiver, receive
from .routing import HOPS_MAX, Hop, Routes

OVER_S: Final = 0.001
"""Less than this is not worth a wait; timers are off by as much."""
TOGETHER_BYTES_MIN: Final = 512 * 1024
"""Bodies of 256 KiB came no sooner with more threads: these want the interpreter's lock for each."""
TURN_BYTES: Final = 8 * 1024 * 1024
"""What a thread receives before the others are waited for: several bodies if they are shorter."""
TOGETHER_S: Final = 0.02
"""How long bodies that come at once may take: the first of them waits for the last. Where each takes as long it is the
network that is slow, and more threads would not make it quicker."""
TOGETHER_SHARE: Final = 8
"""They may take an eighth of the memory, as readers and other loads need some too."""


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

    __slots__ = ("_keep", "_receivers", "_turn", "_was_fresh", "bodies", "coming", "keys", "node", "pipelines")

    def __init__(self, node: Node, *, keep: bool) -> None:
        self.node = node
        self.pipelines: list[GetPipeline] = []
        self.keys: deque[bytes] = deque()
        """Those of its keys that have not been received, in their order."""
        self.coming: deque[Body] = deque()
        """What is received next, or has been and is to be handed out."""
        self.bodies = 0
        self._keep = keep
        self._receivers: list[Receiver] = []
        self._turn = 0
        self._was_fresh = True

    @property
    def is_usable(self) -> bool:
        """Whether there are connections; they are good, or given up, together."""
        return bool(self.pipelines) and self.pipelines[0].connection.usable

    def is_hung(self, *, is_silent: bool) -> bool:
        """Whether a wait that took all the time was no sign of life: of no byte in it, a long wait and no body before,
        two have to hold."""
        return [is_silent, self._was_fresh, not self.bodies].count(True) >= 2

    def open(self, keys: Sequence[bytes]) -> None:
        """Borrow connections and deal `keys` out over them; none when the server is lost."""
        self.keys.extend(keys)
        connections = self.node.borrow(1)
        try:
            if connections:
                connections += self.node.borrow(min(self.node.load_connections_with(connections[0]), len(keys)) - 1)
        finally:
            for first, connection in enumerate(connections):
                self.pipelines.append(self._pipeline_on(connection, keys[first :: len(connections)]))

    def _pipeline_on(self, connection: Connection, keys: Sequence[bytes]) -> GetPipeline:
        if keys and isinstance(connection, AttachedConnection):
            return LeasePipeline(connection, keys, keep=self._keep)
        return GetPipeline(connection, keys)

    def ask(self, ahead: int, patience: Patience) -> None:
        """Top up what is asked for on all pipelines, and wait no longer than is left for anything from now on."""
        self._was_fresh = patience.is_fresh
        for pipeline in self.pipelines:
            pipeline.connection.set_timeout(patience.left_s)
            pipeline.ask(ahead)

    def at_once(self, most: int, each: int) -> int:
        """How many bodies, `most` at most, can be received together: there is a connection and a thread for each, or
        for up to `each` that have been asked for."""
        pipelines = len(self.pipelines)
        if pipelines < 2 or not (self.pipelines[0].connection.is_local or self.pipelines[0].connection.io_threads > 1):
            return 1  # over TCP one thread of the server is what takes the time, and more of ours only wake it up
        most = min(
            most, len(self.keys), pipelines * max(1, min(each, *(pipeline.asked for pipeline in self.pipelines)))
        )
        wanted = min(most, pipelines) - 1
        if wanted > len(self._receivers):
            self._receivers += self.node.borrow_receivers(wanted - len(self._receivers))
        return max(1, most if wanted <= len(self._receivers) else 1 + len(self._receivers))

    def at_hand(self, key: bytes) -> base.Lease | None:
        """A lease on the value of `key`, the stream's next, if one has come already."""
        pipeline = self.pipelines[0] if len(self.pipelines) == 1 else None
        if self.coming or not isinstance(pipeline, LeasePipeline):
            return None
        lease = pipeline.at_hand(key)
        if lease is not None:
            self.keys.popleft()
            self.bodies += 1
        return lease

    def receive(self) -> None:
        """Receive all that are `coming`, no more than at_once has allowed: the first here, the others beside it."""
        began_s = time.monotonic()
        if len(self.coming) == 1:
            self.coming[0].receive(self.pipelines[self._turn % len(self.pipelines)])
            self._turn += 1
        else:
            self._receive_beside(tuple(self.coming))
        self.node.pace_s = (time.monotonic() - began_s) / len(self.coming)

    def _receive_beside(self, bodies: Sequence[Body]) -> None:
        count = len(self.pipelines)
        pipelines = [self.pipelines[(self._turn + place) % count] for place in range(min(count, len(bodies)))]
        shares = [bodies[place::count] for place in range(len(pipelines))]
        self._turn += len(bodies)
        beside = self._receivers[: len(pipelines) - 1]
        for receiver, share, pipeline in zip(beside, shares[1:], pipelines[1:], strict=True):
            receiver.begin(share, pipeline)
        receive(shares[0], pipelines[0])
        for body in shares[0]:
            if body.error is not None and not isinstance(body.error, Exception):
                raise body.error
        for receiver in beside:
            receiver.wait()

    def give_up(self, error: BackendError | None) -> None:
        """Close the connections, as it is not known which bodies are still to come; with an error the server is
        lost."""
        self._drop_coming()
        broken = next((pipeline.connection for pipeline in self.pipelines if not pipeline.connection.usable), None)
        for pipeline in self.pipelines:
            pipeline.connection.close()
        if error is not None and broken is not None:
            self.node.lose(broken, error)

    def close(self, left_s: float) -> None:
        """Give connections and threads back; the server may keep us waiting for DRAIN_S, however many there are."""
        until_s = time.monotonic() + min(left_s, DRAIN_S)
        try:
            self._drop_coming()
            for pipeline in self.pipelines:
                pipeline.settle(max(until_s - time.monotonic(), 0.0))
                pipeline.connection.set_timeout(self.node.link.timeout_s)
        except BaseException:
            self.give_up(None)
            raise
        finally:
            self.node.bring_back([pipeline.connection for pipeline in self.pipelines])
            receivers, self._receivers = self._receivers, []
            self.node.bring_back_receivers(receivers)

    def _drop_coming(self) -> None:
        """Give up what has been received. Where we were interrupted some is on its way still, and its memory is not
        ours again before that has stopped: a caller who is interrupted here as well comes here once more."""
        if any(receiver.is_busy for receiver in self._receivers):
            for pipeline in self.pipelines:
                pipeline.connection.interrupt()
            for receiver in self._receivers:
                receiver.wait()
        while self.coming:
            self.coming.popleft().drop()


class Load:
    """Bodies to be taken one after the other, between `begin` and `close`. For one thread at a time."""

    def __init__(
        self,
        routes: Routes,
        staging: Staging,
        patience: Patience,
        rooms: Rooms | None = None,
        into: Mapping[bytes, Scattered] | None = None,
    ) -> None:
        """Bodies come into `rooms` and stay there when they have been read, or without any pass through `staging`,
        unless their reader lends the memory for them: `into`."""
        self.no_room = 0
        self.is_given_up = False
        self._routes = routes
        self._rooms = AnyRooms(staging) if rooms is None else rooms
        if into:
            self._rooms = LentRooms(into, self._rooms)
        self._together_bytes = staging.arena.nbytes // TOGETHER_SHARE
        self._patience = patience
        self._keep = rooms is not None
        self._turns: deque[Stream] = deque()
        self._streams: dict[Node, Stream] = {}
        self._asides: dict[Node, Stream] = {}  # to where servers have sent us
        self._ahead = AHEAD_MIN
        self._length = 0  # of the last body, of the load before at first: most likely of the next as well

    def begin(self, keys: Sequence[bytes]) -> None:
        """Ask for the first of `keys` at every server that has some."""
        with self._patience:
            self._routes.await_first()
        shares: dict[Node, list[bytes]] = {}
        for key in keys:
            node = self._routes.owner(key)
            shares.setdefault(node, []).append(key)
            if node not in self._streams:
                self._streams[node] = Stream(node, keep=self._keep)
            self._turns.append(self._streams[node])
        for node, share in shares.items():
            self._open(self._streams[node], share)
            self._length = max(self._length, node.body_bytes)

    def take(self, key: bytes) -> base.Lease | None:
        """Receive the body of `key`, the next of those given to `begin`, from wherever it is now; None: a miss."""
        stream = self._turns.popleft()
        lease = stream.at_hand(key)
        if lease is not None:
            return lease
        got = self._receive(stream, key, None)
        for _ in range(HOPS_MAX):
            if not isinstance(got, Hop):
                break
            if got.node not in self._asides:
                self._asides[got.node] = Stream(got.node, keep=self._keep)
                self._open(self._asides[got.node], ())
            got = self._receive(self._asides[got.node], key, got)
        return None if isinstance(got, Hop) else got

    def close(self) -> None:
        """Give all connections back; what is owed on them is read if that is cheap."""
        with ExitStack() as every:  # if one is interrupted the others still give back what they have borrowed
            for stream in (*self._streams.values(), *self._asides.values()):
                every.callback(self._end, stream)

    def _end(self, stream: Stream) -> None:
        with self._patience:
            stream.close(self._patience.left_s)

    def _open(self, stream: Stream, keys: Sequence[bytes]) -> None:
        if self._patience.is_over:
            self.is_given_up = True
            return
        try:
            with self._patience:
                stream.open(keys)
                stream.ask(self._ahead, self._patience)
        except BaseException as error:
            self._fail(stream, error, is_hung=True)

    def _receive(self, stream: Stream, key: bytes, hop: Hop | None) -> base.Lease | Hop | None:
        if not stream.coming and not self._fetch(stream, key, hop):
            return None
        body = stream.coming.popleft()
        if body.error is not None:
            self._fail(stream, body.error, is_hung=stream.is_hung(is_silent=body.is_silent))
            return None
        got, self.no_room = body.got, self.no_room + body.has_no_room
        if isinstance(got, BackendError):
            hop = self._routes.follow(stream.node, got)
            if hop is None:
                stream.node.complain(got, stream.pipelines[0].connection)
            return hop
        if got is None or body.has_no_room:
            return None
        stream.bodies += 1
        if not isinstance(got, int):
            return got  # the value where it lies, on the server
        assert body.room is not None
        self._length = stream.node.body_bytes = got
        self._ahead = ahead_for(got, sum(len(each.pipelines) for each in self._streams.values()))
        lease = LentLease if isinstance(body.room, LentRoom) else RemoteLease
        return lease(body.room.view, body.room.commit if self._keep else body.room.abort)

    def _fetch(self, stream: Stream, key: bytes, hop: Hop | None) -> bool:
        """Receive the body of `key`, and those behind it that come at once; False when there is nothing to wait for."""
        self.is_given_up |= self._patience.is_over
        if self._patience.is_over or not stream.is_usable:
            return False
        try:
            with self._patience:
                stream.ask(self._ahead, self._patience)
                if hop is not None:
                    stream.pipelines[0].ask_aside(key, asking=hop.asking)
                self._plan(stream, key)
                stream.receive()
        except BaseException as error:
            self._fail(stream, error, is_hung=stream.is_hung(is_silent=True))
            return False
        return True

    def _plan(self, stream: Stream, key: bytes) -> None:
        """Say which bodies come next. Of several each has its room before, the first of them first: else those behind
        would take what it needs."""
        stream.coming.append(Body(key, self._rooms))
        at_once = 1
        if self._length >= TOGETHER_BYTES_MIN and stream.keys:
            at_once = stream.at_once(self._together(stream.node.pace_s), TURN_BYTES // self._length)
        if stream.keys:
            stream.keys.popleft()
        if at_once < 2 or not stream.coming[0].reserve_ahead(self._length):
            return
        while len(stream.coming) < at_once:
            body = Body(stream.keys[0], self._rooms)
            if not body.reserve_ahead(self._length):
                break
            stream.coming.append(body)
            stream.keys.popleft()

    def _together(self, pace_s: float) -> int:
        """How many bodies like the last one may come at once: what there is time and memory for."""
        # Half of what is left: when the time is up all that are coming are lost.
        in_time = min(TOGETHER_S, self._patience.left_s / 2) / max(pace_s, 1e-6)
        return min(int(in_time), self._together_bytes // self._length)

    def _fail(self, stream: Stream, error: BaseException, *, is_hung: bool) -> None:
        """End the stream after an error. When that is only that the time is up, the server is lost if it had the usual
        time and has hung."""
        if not isinstance(error, BackendError):
            stream.give_up(None)
            raise error
        self.is_given_up |= self._patience.is_over
        is_slow = self._patience.is_over and (self._patience.is_cut or not is_hung)
        stream.give_up(None if is_slow else error)
