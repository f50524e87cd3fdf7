"""Values on their way to servers: a bounded queue, so that an engine that stores never waits.

A server takes what it can. When more is stored than that, the queue fills, and what comes next is not taken: it is
dropped and counted, because an engine that waits for its cache is slower than one without. The bounds hold for all
servers of a backend together. One thread for each server (Sender) sends SETs, and the touches between them, over a few
connections; its queue is kept under the lock of the whole (WriteQueue), what is under way on its connections is its
own.

WHY a value keeps its room until its SET is answered: until then it is not on the server, or not surely. A reader
of it is served from here meanwhile, and need not wait for a queue that may be seconds long.

A server that copies out of our memory begins with a value that is not whole yet, where its writer tells which bytes are
final (FilledRange): room is kept for it on one connection, and its commit there is what makes it visible.

Values and touches leave in the order in which they came: that an engine stores a prompt tail first, and touches its
head in between, is what keeps a full server from evicting the head before the tail.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Literal

from kvredis.backends.base import Fitting
from kvredis.backends.resp.connection import Reply
from kvredis.backends.resp.wire import Scattered
from kvredis.backends.shm.buffers import LentRoom, RemoteLease, RemoteReservation, Staging
from kvredis.storage.errors import BackendError
from kvredis.storage.memory.arena import Arena

from .pipeline import SETS_UNANSWERED_BYTES, SETS_UNANSWERED_MAX, OpenValue, SetPipeline, Touch
from .pool import Node
from .routing import HOPS_MAX, Hop, Routes

logger = logging.getLogger(__name__)


class FilledRange:
    """Bytes of a value that are final before it is committed; none (`stop` 0): the value is given up."""

    __slots__ = ("keys", "start", "stop", "value")

    def __init__(self, value: RemoteReservation, start: int = 0, stop: int = 0) -> None:
        self.value = value
        self.keys = value.keys
        self.start = start
        self.stop = stop


Item = RemoteReservation | Touch
Queued = Item | FilledRange
Outcome = Literal["stored", "refused", "dropped"]

LEAVING_S: Final = 1.0
"""How long a sender waits at a time for one that ends; whatever that one does wakes it sooner."""
LINGER_S: Final = 1.0
"""How long the thread waits for more before it ends; chunks of one prompt come milliseconds apart."""


QUEUE_PART: Final = 2
"""Half of the staging memory may wait to be sent; the rest is for loads, which an engine does wait for."""
VALUES_MAX: Final = 4096
"""Values on their way; a bound for small ones, which take no room in the arena."""
TOUCHES_MAX: Final = 64
"""Touches that wait for their turn; a later one is dropped, as it is advice only."""
DRAIN_PART: Final = 0.75
"""The share of the timeout in which close() lets the queue drain; the rest is for ending what is under way."""


class Sender:
    """The way to `node`: a queue, a thread that runs while something is in it, and up to node.connections pipelines.
    Its queue is a part of `write_queue`, whose `changed` is held around every call of that but `forget`."""

    def __init__(self, node: Node, write_queue: WriteQueue, follow: Callable[[BackendError], Hop | None]) -> None:
        self._node = node
        self._write_queue = write_queue
        self._follow = follow
        self._changed = write_queue.changed
        self._queue: deque[Queued] = deque()
        self._held: dict[Queued, None] = {}  # queued or unanswered here, oldest first
        self._leaving = False
        self._thread: threading.Thread | None = None
        # From here on the thread's own.
        self._pipelines: list[SetPipeline] = []
        self._turn = 0
        self._flying: set[bytes] = set()  # keys whose SET may be unanswered
        self._begun: dict[RemoteReservation, OpenValue | None] = {}  # not committed; None: they go as a whole

    # ---- called by the write queue, under its lock -------------------------------------------------------------------

    @property
    def is_leaving(self) -> bool:
        """Whether it ends when what it has is sent."""
        return self._leaving

    def has(self, keys: set[bytes]) -> bool:
        """Say whether something of these keys is queued or unanswered here."""
        return any(not keys.isdisjoint(item.keys) for item in self._held)

    def take(self, item: Queued) -> None:
        """Queue it, and see to it that the thread sends it."""
        self._held[item] = None
        self._queue.append(item)
        self._changed.notify_all()
        if self._thread is None:
            name = f"kvredis stores to {self._node.link.address}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter ends, or has no threads left
                self._thread = None
                self._settle_all()

    # ---- the end, without the lock ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """End when all that is held has been sent: no key is this server's any more."""
        with self._changed:
            self._leaving = True
            is_idle = self._thread is None
            self._changed.notify_all()
        if is_idle:
            self._hang_up()
            self._write_queue.forget(self._node)

    def end(self) -> None:
        """Give up what is left, and wait for the thread; the write queue is over."""
        with self._changed:
            thread = self._thread
        if thread is not None:
            for pipeline in tuple(self._pipelines):
                pipeline.connection.interrupt()
            thread.join()
        self._hang_up()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._has_work():
                try:
                    self._work()
                except BaseException as error:  # of our own making too: a caller of flush() would wait for ever
                    self._lose(error if isinstance(error, BackendError) else BackendError(repr(error)))
        except BaseException:  # nor for a thread that is no more
            logger.exception("the thread that stores to %s ended wildly", self._node.link.address)
            with self._changed:
                self._settle_all()
                self._thread = None
        if self._leaving:
            self.leave()

    def _has_work(self) -> bool:
        with self._changed:
            linger_s = LINGER_S if self._begun or not self._node.link.is_full else 0.0
            self._changed.wait_for(lambda: self._held or self._write_queue.closed or self._leaving, linger_s)
            if self._write_queue.closed or self._leaving:
                self._begun.clear()  # no more is committed, or not here
            is_idle = not self._held and not self._begun
        if is_idle:  # others may have them meanwhile: a server may take no more
            self._node.bring_back([pipeline.connection for pipeline in self._pipelines])
            self._pipelines.clear()
        with self._changed:
            if not self._held and not self._begun:
                self._thread = None
            return self._thread is not None

    def _work(self) -> None:
        """Send what is next, or read the answers when there is nothing to send."""
        with self._changed:
            item = self._queue[0] if self._queue else None
            if item is not None and not self._leaving and self._write_queue.is_leaving(item):
                # Its server was let go and named anew: what an earlier sender of it has would overtake this.
                self._changed.wait(LEAVING_S)
                return
            if item is not None:
                self._queue.popleft()
            if isinstance(item, FilledRange):
                del self._held[item]
            elif item is not None and self._write_queue.is_superseded(item):
                self._settle(item)
                item = FilledRange(item) if isinstance(item, RemoteReservation) else None
        if isinstance(item, FilledRange):
            self._send_range(item)
            return
        parts = self._begun.pop(item, None) if isinstance(item, RemoteReservation) else None
        if item is None or not self._flying.isdisjoint(item.keys):
            # A value must not be overtaken by an older one on another connection, nor by what touches it.
            for pipeline in self._pipelines:
                self._read_answers(pipeline, 0, 0)
        if item is not None:
            free = self._next_pipeline() if parts is None else parts.pipeline
            if free is None:
                self._settle_all()
                self._hang_up()
                return
            if isinstance(item, RemoteReservation):
                self._flying.add(item.key)
            if parts is not None and isinstance(item, RemoteReservation):
                free.send_rest(parts, item)
            else:
                free.send(item)
            if free.is_full:
                self._read_answers(free, SETS_UNANSWERED_MAX // 2, SETS_UNANSWERED_BYTES // 2)

    def _send_range(self, part: FilledRange) -> None:
        """Send bytes of a value that is not committed yet. What cannot be sent so is sent with the whole."""
        value = part.value
        if not part.stop:
            if (parts := self._begun.pop(value, None)) is not None:
                parts.pipeline.give_up(parts)
            return
        if value not in self._begun:
            free = self._next_pipeline()
            if free is not None:
                self._read_answers(free, 0, 0)
            self._begun[value] = None if free is None else free.open_value(value)
        parts = self._begun[value]
        if parts is not None:
            parts.pipeline.send_range(parts, value, part.start, part.stop)
            if parts.pipeline.is_full:
                self._read_answers(parts.pipeline, SETS_UNANSWERED_MAX // 2, SETS_UNANSWERED_BYTES // 2)

    def _next_pipeline(self) -> SetPipeline | None:
        """The pipelines in turn; a new one as long as there are less than may be. None: the server takes nothing."""
        for pipeline in [each for each in self._pipelines if not each.unanswered and each.connection.stale()]:
            self._pipelines.remove(pipeline)
            self._node.retire(pipeline.connection)
        most = self._node.connections
        if self._pipelines:
            most = self._node.store_connections_with(self._pipelines[0].connection)
        if len(self._pipelines) < most:
            for connection in self._node.borrow(1, for_sender=True):
                self._pipelines.append(SetPipeline(connection))
                refusal = self._pipelines[-1].lend(self._write_queue.arena)
                if refusal is not None:
                    self._node.complain(refusal, connection)
        self._turn += 1
        if not self._pipelines or self._write_queue.over:
            return None
        return self._pipelines[self._turn % len(self._pipelines)]

    def _read_answers(self, pipeline: SetPipeline, keep: int, keep_bytes: int) -> None:
        for item, reply in pipeline.answers(keep, keep_bytes):
            hop = self._follow(reply) if isinstance(reply, BackendError) else None
            if isinstance(item, RemoteReservation):
                self._flying.discard(item.key)
            if item is not None:
                self._answered(item, reply, hop)
            is_right = not isinstance(reply, BackendError) if item is None or isinstance(item, Touch) else reply == "OK"
            if hop is None and not is_right:
                self._node.complain(reply, pipeline.connection)

    def _answered(self, item: Item, reply: Reply, hop: Hop | None) -> None:
        with self._changed:
            if hop is None or isinstance(item, Touch) or item.hops >= HOPS_MAX or self._write_queue.over:
                self._settle(item, "stored" if reply == "OK" else "refused")
                return
            item.hops += 1
            item.asking = hop.asking
            del self._held[item]
            self._write_queue.pass_on(item, hop.node)

    def _settle(self, item: Item, outcome: Outcome | None = None) -> None:
        del self._held[item]
        self._write_queue.settle(item, outcome)

    # ---- losing the server -----------------------------------------------------------------------------------------

    def _lose(self, error: BackendError) -> None:
        if not self._write_queue.over:
            for pipeline in [each for each in self._pipelines if not each.connection.usable] or self._pipelines:
                self._node.lose(pipeline.connection, error)
        self._settle_all()
        self._hang_up()

    def _settle_all(self) -> None:
        """Give up all that is on its way: what was sent, even in part, counts as refused, the rest as dropped.

        The connections end first. A server that takes values out of our memory must know before that memory is another
        value's, and publishes none of a client that has hung up.
        """
        for pipeline in self._pipelines:
            pipeline.connection.interrupt()
        with self._changed:
            sent = {item for pipeline in self._pipelines for item in pipeline.unanswered}
            self._queue.clear()
            for item in tuple(self._held):
                if isinstance(item, FilledRange):
                    del self._held[item]
                else:
                    self._settle(item, "refused" if item in sent else "dropped")

    def _hang_up(self) -> None:
        """Without the lock: nodes have one of their own, and a collected generator may want both in any order."""
        for pipeline in self._pipelines:
            self._node.retire(pipeline.connection)
        self._pipelines.clear()
        self._flying.clear()
        self._begun = dict.fromkeys(self._begun)  # their rooms have ended with the connections


class WriteQueue:
    """The SETs of one backend. Any thread may call any public method; none waits for the network, but for those that
    say so.
    """

    def __init__(self, routes: Callable[[], Routes], staging: Staging, *, keep: bool = False) -> None:
        """With `keep` a value stays in `staging` when it has left."""
        self._routes = routes
        self._staging = staging
        self._keep = keep
        self._fitting = Fitting(staging.arena)
        self._bytes_max = staging.arena.nbytes // QUEUE_PART
        self.changed = threading.Condition()  # its lock is reentrant: a collected generator may end a hold anywhere
        self._bytes = 0  # reserved, queued or unanswered
        self._outstanding: dict[Item, int] = {}  # queued or unanswered, numbered, oldest first
        self._newest: dict[bytes, RemoteReservation] = {}  # of these the last under each key
        self._senders: dict[Node, Sender] = {}
        self._number = 0
        self._touches = 0
        self._counts: dict[Outcome, int] = {"stored": 0, "refused": 0, "dropped": 0}
        self._refused_unflushed = 0
        self.closed = self.over = False

    # ---- storing -------------------------------------------------------------------------------------------------

    def room(self, length: int) -> int:
        """Count the values of `length` bytes that would be taken now, if their server takes any."""
        with self.changed:
            if self.closed:
                return 0
            free = (self._bytes_max - self._bytes) // max(length, 1)
            return max(min(free, VALUES_MAX - len(self._outstanding)), 0 if self._bytes else 1)

    def reserve(self, key: bytes, length: int) -> RemoteReservation | None:
        """Get room for a value; None, counted as dropped, when the queue or the memory is full or its server lost."""
        self._fitting.look_at(length)
        node = self._routes().owner(key)
        with self.changed:
            taken = not node.link.waiting and self.room(length) > 0
            self._bytes += length if taken else 0
        room = self._staging.reserve(key, length) if taken else None
        if room is not None:
            return RemoteReservation(key, room, self._take, self._give_up, self._keep, self._take_range)
        with self.changed:
            self._bytes -= length if taken else 0
            self._counts["dropped"] += not self.closed
        return None

    def lend(self, key: bytes, memory: Scattered) -> RemoteReservation | None:
        """Have a value sent from where it lies, if it goes over a socket: to a server that takes values out of our
        memory itself the staging memory is the way. The memory is lent until the next flush. No reader is served from
        it meanwhile."""
        node = self._routes().owner(key)
        with self.changed:
            is_taken = not self.closed and not node.link.waiting and len(self._outstanding) < VALUES_MAX
        if is_taken and node.carries_bodies:
            return RemoteReservation(key, LentRoom(memory), self._take, self._give_up)
        return None

    def touch(self, keys: Sequence[bytes], touches: Mapping[Node, Touch], *, always: bool = False) -> int | None:
        """Have `keys` touched behind all that is on its way, and count those of them that are; None: nothing is, and
        unless `always` that is all."""
        with self.changed:
            if not self._outstanding and not always:
                return None
            for node, touch in touches.items():
                if self._touches < TOUCHES_MAX and not self.closed:
                    self._touches += 1
                    self._append(touch, node)
            return sum(key in self._newest for key in keys)

    def flush(self) -> int:
        """Wait until every commit so far is answered; count those that came to nothing since the last flush."""
        with self.changed:
            last = self._number
            self.changed.wait_for(lambda: next(iter(self._outstanding.values()), last + 1) > last)
            refused, self._refused_unflushed = self._refused_unflushed, 0
            return refused

    def _take(self, value: RemoteReservation) -> None:
        node = self._routes().owner(value.key)
        with self.changed:
            if not value.is_lent:
                self._newest[value.key] = value
            self._append(value, node)

    def _take_range(self, value: RemoteReservation, start: int, stop: int) -> None:
        node = self._routes().owner(value.key)
        if node.lends_memory:
            with self.changed:
                if not self.closed:
                    value.has_parts = True
                    self.pass_on(FilledRange(value, start, stop), node)

    def _give_up(self, value: RemoteReservation) -> None:
        with self.changed:
            if value.has_parts and not self.closed:
                self.pass_on(FilledRange(value), self._routes().owner(value.key))
            self._bytes -= len(value.view)
            self._end_hold(value)

    def _append(self, item: Item, node: Node) -> None:
        self._number += 1
        self._outstanding[item] = self._number
        if self.closed:
            self.settle(item, "dropped")
        else:
            self.pass_on(item, node)

    # ---- reading what has not left -------------------------------------------------------------------------------

    def without(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Leave out the keys whose value is on its way."""
        with self.changed:
            return [key for key in keys if key not in self._newest] if self._newest else keys

    def hold(self, keys: Iterable[bytes]) -> list[RemoteLease | None]:
        """Lease each value that is on its way, as it was committed last; None for the others."""
        with self.changed:
            return [None if (value := self._newest.get(key)) is None else self._lease(value) for key in keys]

    def wait_for(self, keys: Sequence[bytes]) -> None:
        """Wait until none of `keys` is on its way."""
        with self.changed:
            self.changed.wait_for(lambda: self._newest.keys().isdisjoint(keys))

    def _lease(self, value: RemoteReservation) -> RemoteLease:
        value.holds += 1
        return RemoteLease(value.view, partial(self._end_hold, value))

    def _end_hold(self, value: RemoteReservation) -> None:
        with self.changed:
            value.holds -= 1
            if not value.holds:
                value.free()

    # ---- for the senders, which hold the lock ----------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        """The memory that values are in until they are answered."""
        return self._staging.arena

    def is_superseded(self, item: Queued) -> bool:
        """Say whether a newer value of the same key follows, or has been answered already."""
        if not isinstance(item, RemoteReservation):
            return False
        return self._newest.get(item.key, item if item.is_lent else None) is not item

    def is_leaving(self, item: Queued) -> bool:
        """Say whether a sender that ends has something older of the same keys."""
        leaving = [sender for sender in self._senders.values() if sender.is_leaving]
        return any(sender.has(set(item.keys)) for sender in leaving)

    def pass_on(self, item: Queued, node: Node) -> None:
        """Let the sender of `node` have it; it is outstanding already, and keeps its room."""
        if node not in self._senders:
            self._senders[node] = Sender(node, self, lambda reply: self._routes().follow(node, reply))
        self._senders[node].take(item)

    def settle(self, item: Item, outcome: Outcome | None = None) -> None:
        """Enter the outcome of an item, which ends what is outstanding of it."""
        del self._outstanding[item]
        if isinstance(item, RemoteReservation):
            if self._newest.get(item.key) is item:
                del self._newest[item.key]
            item.taken = outcome == "stored"
            if outcome:
                self._counts[outcome] += 1
                self._refused_unflushed += outcome != "stored"
            self._bytes -= len(item.view)
            self._end_hold(item)
        else:
            self._touches -= 1
        self.changed.notify_all()

    # ---- the end -------------------------------------------------------------------------------------------------

    def let_go(self, node: Node) -> None:
        """No key is that server's any more: what is on its way there goes there still, and nothing else."""
        with self.changed:
            sender = self._senders.get(node)
        if sender is not None:
            sender.leave()

    def forget(self, node: Node) -> None:
        """Forget the sender of a node, which has left; that sender calls it, without the lock."""
        with self.changed:
            self._senders.pop(node, None)

    def close(self, name: str, timeout_s: float) -> None:
        """Take nothing more, wait within the timeout for the answers to what was taken, and end the threads."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._outstanding, timeout_s * DRAIN_PART)
            if self._outstanding:
                count = len(self._outstanding) - self._touches
                logger.warning("%s has not taken %d blocks in time; they are dropped", name, count)
            self.over = True
            senders = tuple(self._senders.values())
        for sender in senders:
            sender.end()

    def stats(self) -> dict[str, int]:
        """Give counters since the start, and what is on its way: values, and bytes with those that are reserved."""
        with self.changed:
            queued = len(self._outstanding) - self._touches
            counts = {str(outcome): count for outcome, count in self._counts.items()}
            return {**counts, "queued": queued, "queued_bytes": self._bytes}
