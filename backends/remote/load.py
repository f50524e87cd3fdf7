"""One load under way: bodies from one or several servers, each in the order of its own keys, handed out in the load's.

Over a unix socket, and from a server that sends by several threads, bodies come over several connections at once, each
into a thread of its own (receive.py), as long as they come so quickly that it is copying that takes the time, and there
is room for all of them before they come.

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
from .receive import Body, Receiver
from .routing import HOPS_MAX, Hop, Routes

OVER_S: Final = 0.001
"""Less than this is not worth a wait; timers are off by as much."""
TOGETHER_BYTES_MIN: Final = 512 * 1024
"""Bodies of 256 KiB came no sooner with more threads: these want the interpreter's lock for each."""
AHEAD_OF_READER: Final = 2
"""Bodies that each thread is given: one that comes while the reader is still at the one before it."""
AHEAD_OF_READER_BYTES: Final = 8 * 1024 * 1024
"""The same of short ones, of which a thread is given several at a time."""
TOGETHER_S: Final = 0.05
"""How long those take that are to come at once. Where a few take as long it is the network that is slow: more threads
would not make it quicker, and when the time is up all that have come halfway are lost."""
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
        """Those of its keys whose bodies are not `coming` yet, in their order."""
        self.coming: deque[Body] = deque()
        """What is on its way, or has come and is to be handed out."""
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
            return LeasePipeline(connection, keys, keep=self._keep, next_bytes=self.node.leased_bytes)
        return GetPipeline(connection, keys)

    def ask(self, ahead: int, patience: Patience) -> None:
        """Top up what is asked for on all pipelines, and wait no longer than is left for anything from now on."""
        self._was_fresh = patience.is_fresh
        for pipeline in self.pipelines:
            pipeline.connection.set_timeout(patience.left_s)
            pipeline.ask(ahead)

    def has_threads(self) -> bool:
        """Say whether there is a thread for each of several connections, and it makes bodies come sooner."""
        if len(self.pipelines) < 2 or not (
            self.pipelines[0].connection.is_local or self.pipelines[0].connection.io_threads > 1
        ):
            return False  # over TCP one thread of the server is what takes the time, and more of ours only wake it up
        if not self._receivers:
            borrowed = self.node.borrow_receivers(len(self.pipelines))
            if len(borrowed) < len(self.pipelines):
                self.node.bring_back_receivers(borrowed)
            else:
                self._receivers = borrowed
        return bool(self._receivers)

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

    def receive_here(self, body: Body) -> None:
        """Receive the next body in this thread, while none is under way."""
        self.coming.append(body)
        body.receive(self.pipelines[self._turn % len(self.pipelines)])
        self._turn += 1
        body.has_come = True

    def begin_beside(self, bodies: Sequence[Body], ahead: int, patience: Patience) -> None:
        """Have the next bodies received by threads, each on the connection over which it has been asked for."""
        self.coming.extend(bodies)
        count = len(self.pipelines)
        for body in bodies:
            body.beside = min(len(self.coming), count)
        first, self._turn = self._turn, self._turn + len(bodies)
        for place in range(min(count, len(bodies))):
            lane = (first + place) % count
            self._receivers[lane].begin(bodies[place::count], self.pipelines[lane], ahead, patience.left_s)

    def await_next(self, patience: Patience) -> None:
        """Wait until the next of those that are `coming` has come, or failed. When the time is up, all on the way
        have failed."""
        body = self.coming[0]
        if body.has_come:
            return
        self._was_fresh = patience.is_fresh
        lane = (self._turn - len(self.coming)) % len(self.pipelines)
        if not self._receivers[lane].wait_for(body, patience.left_s):
            self._stop()
            if body.error is not None or not body.has_come:
                body.error = BackendError("timed out waiting for a value")

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
                if isinstance(pipeline, LeasePipeline):
                    self.node.leased_bytes = pipeline.next_bytes
                pipeline.connection.set_timeout(self.node.link.timeout_s)
        except BaseException:
            self.give_up(None)
            raise
        finally:
            self.node.bring_back([pipeline.connection for pipeline in self.pipelines])
            receivers, self._receivers = self._receivers, []
            self.node.bring_back_receivers(receivers)

    def _drop_coming(self) -> None:
        """Give up what is on its way or has come."""
        self._stop()
        while self.coming:
            self.coming.popleft().drop()

    def _stop(self) -> None:
        """Let nothing come any more. What has come in part is in memory that is not ours again before its thread has
        stopped: a caller who is interrupted here comes here once more."""
        for receiver in self._receivers:
            receiver.forget()
        busy = [lane for lane in zip(self._receivers, self.pipelines, strict=False) if lane[0].is_busy]
        for _, pipeline in busy:
            pipeline.connection.interrupt()
        for receiver, pipeline in busy:
            receiver.wait()
            pipeline.connection.close()


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
        if not self._come(stream, key, hop):
            return None
        body = stream.coming.popleft()
        if body.error is not None:
            body.drop()  # its thread may not have begun with it
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
        stream.node.pace_s = body.took_s / body.beside
        self._ahead = ahead_for(got, sum(len(each.pipelines) for each in self._streams.values()))
        lease = LentLease if isinstance(body.room, LentRoom) else RemoteLease
        return lease(body.room.view, body.room.commit if self._keep else body.room.abort)

    def _come(self, stream: Stream, key: bytes, hop: Hop | None) -> bool:
        """Wait until the body of `key` has come, or failed, and have those behind it come beside it; False when there
        is nothing to wait for."""
        try:
            with self._patience:
                if not stream.coming:
                    self.is_given_up |= self._patience.is_over
                    if self._patience.is_over or not stream.is_usable:
                        return False
                    self._begin(stream, key, hop)
                elif stream.keys:
                    self._go_on(stream)
                stream.await_next(self._patience)
        except BaseException as error:
            self._fail(stream, error, is_hung=stream.is_hung(is_silent=True))
            return False
        return True

    def _begin(self, stream: Stream, key: bytes, hop: Hop | None) -> None:
        """Have the body of `key` come while none is under way: beside those behind it, or alone in this thread. Of
        several each has its room before, the first of them first: else those behind would take what it needs."""
        body = Body(key, self._rooms)
        if stream.keys:
            stream.keys.popleft()
        if stream.keys and self._together(stream) > 1 and stream.has_threads() and body.reserve_ahead(self._length):
            stream.begin_beside((body, *self._ahead_of_reader(stream, 1)), self._ahead, self._patience)
            return
        stream.ask(self._ahead, self._patience)
        if hop is not None:
            stream.pipelines[0].ask_aside(key, asking=hop.asking)
        stream.receive_here(body)

    def _go_on(self, stream: Stream) -> None:
        """Have more come behind those that are coming, once half of these have been handed out."""
        under_way = len(stream.coming)
        if under_way <= self._together(stream) // 2 and not self._patience.is_over:
            stream.begin_beside(self._ahead_of_reader(stream, under_way), self._ahead, self._patience)

    def _ahead_of_reader(self, stream: Stream, under_way: int) -> list[Body]:
        """Take the next keys of a stream for which there are time and room beside so many."""
        bodies: list[Body] = []
        for _ in range(min(self._together(stream) - under_way, len(stream.keys))):
            body = Body(stream.keys[0], self._rooms)
            if not body.reserve_ahead(self._length):
                break
            bodies.append(body)
            stream.keys.popleft()
        return bodies

    def _together(self, stream: Stream) -> int:
        """How many bodies like the last one may come at once: what there is time and memory for."""
        if self._length < TOGETHER_BYTES_MIN:
            return 1
        # Half of what is left: when the time is up all that are coming are lost.
        in_time = min(TOGETHER_S, self._patience.left_s / 2) / max(stream.node.pace_s, 1e-6)
        each = max(AHEAD_OF_READER, AHEAD_OF_READER_BYTES // self._length)
        return min(int(in_time), self._together_bytes // self._length, each * len(stream.pipelines))

    def _fail(self, stream: Stream, error: BaseException, *, is_hung: bool) -> None:
        """End the stream after an error. When that is only that the time is up, the server is lost if it had the usual
        time and has hung."""
        if not isinstance(error, BackendError):
            stream.give_up(None)
            raise error
        self.is_given_up |= self._patience.is_over
        is_slow = self._patience.is_over and (self._patience.is_cut or not is_hung)
        stream.give_up(None if is_slow else error)
