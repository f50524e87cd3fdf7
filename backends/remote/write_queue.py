"""Values on their way to servers: a bounded queue, so that an engine that stores never waits.

A server takes what it can. When more is stored than that, the queue fills, and what comes next is not taken: it is
dropped and counted, because an engine that waits for its cache is slower than one without. The bounds hold for all
servers of a backend together. A thread for each server (Sender) sends SETs, and the touches between them. Its queue is
kept under the lock of the whole (WriteQueue), what is under way on its connections is its own.

What is sent is copied by the kernel, outside the interpreter's lock, and one thread does that at the speed of one core.
So while long values wait for a server that receives by several threads, others send beside the first, a connection
each: each takes what is next in the queue, so that none waits for another, and ends a while after the last. Several
only where they are quick: over a slow network they would gain nothing, and each would wait longer for its answer.

WHY a value keeps its room until its SET is answered: until then it is not on the server, or not surely. A reader
of it is served from here meanwhile, and need not wait for a queue that may be seconds long.

A server that copies out of our memory begins with a value that is not whole yet, where its writer tells which bytes are
final (FilledRange): room is kept for it on one connection, and its commit there is what makes it visible.

Values and touches leave in the order in which they came: that an engine stores a prompt tail first, and touches its
head in between, is what keeps a full server from evicting the head before the tail. On several connections a server may
take what is next to each other in another order; nothing of a key is sent while an older value of it is under way.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, Literal

from kvredis.backends.base import Fitting
from kvredis.backends.resp.connection import Reply
from kvredis.backends.resp.wire import Scattered
from kvredis.backends.shm.buffers import LentRoom, RemoteLease, RemoteReservation, Staging
from kvredis.storage.background import start_thread
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

WAIT_S: Final = 1.0
"""How long a thread waits at a time for another one; whatever that one does wakes it sooner."""
LINGER_S: Final = 1.0
"""How long the thread waits for more before it ends; chunks of one prompt come milliseconds apart."""
LONG_BYTES_MIN: Final = 512 * 1024
"""Of a shorter value nothing is received by another thread of the server's, and it is sent before one of ours wakes."""
TOGETHER_S: Final = 0.05
"""How long those may take that are sent at once, as for a load."""


QUEUE_PART: Final = 2
"""Half of the staging memory may wait to be sent; the rest is for loads, which an engine does wait for."""
VALUES_MAX: Final = 4096
"""Values on their way; a bound for small ones, which take no room in the arena."""
TOUCHES_MAX: Final = 64
"""Touches that wait for their turn; a later one is dropped, as it is advice only."""
DRAIN_PART: Final = 0.75
"""The share of the timeout in which close() lets the queue drain; the rest is for ending what is under way."""


class SendThread:
    """What one thread of a Sender has: its connections, and what is on them."""

    __slots__ = ("pipelines", "taken", "thread", "turn")

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.taken: dict[Item, None] = {}
        """Out of the queue and not settled, oldest first; kept under the write queue's lock."""
        self.pipelines: list[SetPipeline] = []
        self.turn = 0

    @property
    def is_owed(self) -> bool:
        """Whether it has answers to read; for itself."""
        return any(pipeline.unanswered for pipeline in self.pipelines)


class Sender:
    """The way to `node`: a queue, a thread that runs while something is in it, and others that help it with long
    values. What they share is a part of `write_queue`, whose `changed` is held around every call of that but `forget`.

    The first thread alone has several connections, where one thread is enough for them, and what is sent in ranges."""

    def __init__(self, node: Node, write_queue: WriteQueue, follow: Callable[[BackendError], Hop | None]) -> None:
        self._node = node
        self._write_queue = write_queue
        self._follow = follow
        self._changed = write_queue.changed
        self._long_waits = threading.Condition(write_queue.lock)  # for helpers: short values wake none of them
        self._queue: deque[Queued] = deque()
        self._long = 0  # values in the queue that are worth a thread
        self._flying: dict[bytes, Item] = {}  # whose SET may be unanswered
        self._leaving = False
        self._first = SendThread()
        self._helpers: list[SendThread] = []
        self._threads_max = self._pipelines_max = 1  # of the first: what the server is good for
        self._pace_s = math.inf  # what a long value took, and would have taken alone
        self._begun: dict[RemoteReservation, OpenValue | None] = {}  # not committed; None: they go as a whole

    # ---- called by the write queue, under its lock -------------------------------------------------------------------

    @property
    def is_leaving(self) -> bool:
        """Whether it ends when what it has is sent."""
        return self._leaving

    def has(self, keys: set[bytes]) -> bool:
        """Say whether something of these keys is queued or unanswered here."""
        held = chain(self._queue, self._first.taken, *(helper.taken for helper in self._helpers))
        return any(not keys.isdisjoint(item.keys) for item in held)

    def take(self, item: Queued) -> None:
        """Queue it, and see to it that a thread sends it."""
        self._queue.append(item)
        self._long += _is_long(item)
        self._changed.notify_all()
        self._wake_helper()
        if self._first.thread is None:
            name = f"kvredis stores to {self._node.link.address}"
            self._first.thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                self._first.thread.start()
            except RuntimeError:  # the interpreter ends, or has no threads left
                self._first.thread = None
                self._give_up(self._first)

    @property
    def _holds(self) -> bool:
        """Whether something is queued or unanswered here."""
        return bool(self._queue or self._first.taken) or any(helper.taken for helper in self._helpers)

    # ---- the end, without the lock ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """End when all that is held has been sent: no key is this server's any more."""
        with self._changed:
            self._leaving = True
            is_idle = self._first.thread is None
            self._changed.notify_all()
            self._long_waits.notify_all()
        if is_idle:
            self._hang_up(self._first)
            self._write_queue.forget(self._node)

    def end(self) -> None:
        """Give up what is left, and wait for the threads; the write queue is over."""
        with self._changed:
            self._long_waits.notify_all()
            every = (self._first, *self._helpers)
            threads = [each.thread for each in every if each.thread is not None]
        if threads:
            for each in every:
                for pipeline in tuple(each.pipelines):
                    pipeline.connection.interrupt()
            for thread in threads:
                thread.join()
        self._hang_up(self._first)

    # ---- the first thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._has_work():
                try:
                    self._work()
                except BaseException as error:  # of our own making too: a caller of flush() would wait for ever
                    self._lose(self._first, error)
        except BaseException:  # nor for a thread that is no more
            logger.exception("the thread that stores to %s ended wildly", self._node.link.address)
            with self._changed:
                self._give_up(self._first)
                self._first.thread = None
        if self._leaving:
            self.leave()

    def _has_work(self) -> bool:
        if self._queue:
            return True
        with self._changed:
            linger_s = LINGER_S if self._begun or not self._node.link.is_full else 0.0
            self._changed.wait_for(lambda: self._holds or self._write_queue.closed or self._leaving, linger_s)
            if self._write_queue.closed or self._leaving:
                self._begun.clear()  # no more is committed, or not here
            is_idle = not self._holds and not self._begun
        if is_idle:  # others may have them meanwhile: a server may take no more
            self._bring_back(self._first)
        with self._changed:
            if not self._holds and not self._begun:
                self._first.thread = None
            return self._first.thread is not None

    def _work(self) -> None:
        """Send what is next, or read the answers when there is nothing to send."""
        with self._changed:
            item = self._next(self._first)
            if item is None and not self._first.is_owed:
                # What is next waits for what helpers have under way, or for another sender.
                self._changed.wait(WAIT_S)
                return
        if item is None:
            self._read_all(self._first)
        elif isinstance(item, FilledRange):
            self._send_range(item)
        else:
            self._send(self._first, item)

    def _send_range(self, part: FilledRange) -> None:
        """Send bytes of a value that is not committed yet. What cannot be sent so is sent with the whole."""
        value = part.value
        if not part.stop:
            if (parts := self._begun.pop(value, None)) is not None:
                parts.pipeline.give_up(parts)
            return
        if value not in self._begun:
            free = self._next_pipeline(self._first)
            if free is not None:
                self._read_answers(self._first, free, 0, 0)
            self._begun[value] = None if free is None else free.open_value(value)
        parts = self._begun[value]
        if parts is not None:
            parts.pipeline.send_range(parts, value, part.start, part.stop)
            if parts.pipeline.is_full:
                self._read_some(self._first, parts.pipeline)

    # ---- the others ------------------------------------------------------------------------------------------------

    def _call_help(self) -> None:
        """See to it that a helper waits for the next long value, if it would leave sooner by one; under the lock.

        WHY ahead of that value: who sends cannot start one meanwhile, and who stores shall not wait for a thread.
        """
        self._helpers = [each for each in self._helpers if each.thread is not None and each.thread.is_alive()]
        is_enough = len(self._helpers) >= self._beside() or not all(each.taken for each in self._helpers)
        if is_enough or self._write_queue.over or self._node.link.is_full:
            return
        helper = SendThread()
        self._helpers.append(helper)
        try:
            name = f"kvredis stores to {self._node.link.address}, beside another"
            helper.thread = start_thread(partial(self._help, helper), name)
        except RuntimeError:  # the interpreter ends, or has no threads left
            self._helpers.remove(helper)

    def _beside(self) -> int:
        """Give how many helpers there may be: what the server is good for, and there is time for."""
        return min(self._threads_max, int(TOGETHER_S / max(self._pace_s, 1e-6))) - 1

    def _wake_helper(self) -> None:
        """Have a helper that waits look at the queue, if there are long values in it; under the lock."""
        if self._long:
            self._long_waits.notify()

    def _help(self, mine: SendThread) -> None:
        """Send beside the first thread while there are long values."""
        try:
            while True:
                # A connection first: what is taken shall not wait until one is open.
                item = self._next_beside(mine) if self._next_pipeline(mine) is not None else None
                if item is not None:
                    self._send(mine, item)
                elif mine.is_owed:
                    self._read_all(mine)
                else:
                    break
        except BaseException as error:
            self._lose(mine, error)
        finally:
            with self._changed:
                if mine.taken:  # what should have given it up has failed
                    self._give_up(mine)
            self._bring_back(mine)

    def _next_beside(self, mine: SendThread) -> Item | None:
        """Take the next item; wait for it where no answer is owed. None: there is nothing more to take now."""
        with self._changed:
            while not self._write_queue.over:
                item: Item | None = None
                if self._long and self._helpers.index(mine) < self._beside():
                    found = self._next(mine)
                    assert not isinstance(found, FilledRange), "the first thread's alone"
                    item = found
                is_last = self._write_queue.closed or self._leaving or self._node.link.is_full
                if item is not None or mine.is_owed or is_last or not self._long_waits.wait(LINGER_S):
                    return item
        return None

    # ---- any of them -----------------------------------------------------------------------------------------------

    def _next(self, mine: SendThread) -> Queued | None:
        """Take what is next off the queue, under the lock; None where there is nothing, or that has to wait, or is the
        first thread's to send."""
        while self._queue:
            item = self._queue[0]
            if not self._leaving and self._write_queue.is_leaving(item):
                # Its server was let go and named anew: what an earlier sender of it has would overtake this.
                return None
            has_parts = isinstance(item, FilledRange) or (isinstance(item, RemoteReservation) and item.has_parts)
            if has_parts and mine is not self._first:
                return None
            if isinstance(item, FilledRange):
                return self._queue.popleft()
            is_superseded = self._write_queue.is_superseded(item)
            if not is_superseded and not self._flying.keys().isdisjoint(item.keys):
                # A value must not be overtaken by an older one on another connection, nor by what touches it.
                return None
            mine.taken[item] = None  # before it leaves the queue: it is settled, whatever interrupts us
            self._queue.popleft()
            if self._long:
                self._long -= _is_long(item)
                self._wake_helper()
            if not is_superseded:
                if isinstance(item, RemoteReservation):
                    self._flying[item.key] = item
                return item
            self._settle(mine, item)
            if isinstance(item, RemoteReservation) and has_parts:
                return FilledRange(item)
        return None

    def _send(self, mine: SendThread, item: Item) -> None:
        parts = self._begun.pop(item, None) if isinstance(item, RemoteReservation) else None
        pipeline = self._next_pipeline(mine) if parts is None else parts.pipeline
        if pipeline is None:
            if not self._leave_to_first(mine, item):
                self._give_up(mine)
            self._hang_up(mine)
            return
        beside, is_long = 1, _is_long(item)
        if is_long:
            with self._changed:
                self._call_help()
                beside += sum(bool(each.taken) for each in (self._first, *self._helpers) if each is not mine)
        began_s = time.monotonic()
        if parts is not None and isinstance(item, RemoteReservation):
            pipeline.send_rest(parts, item)
        else:
            pipeline.send(item)
        if pipeline.is_full:
            self._read_some(mine, pipeline)
        if is_long:
            self._pace_s = (time.monotonic() - began_s) / beside

    def _leave_to_first(self, mine: SendThread, item: Item) -> bool:
        """Put back an item for which a helper has no connection any more, as the server takes no more of them. False:
        the server is lost, or it is the first thread that has none."""
        with self._changed:
            if mine is self._first or self._first.thread is None or self._write_queue.over or self._node.link.waiting:
                return False
            self._queue.appendleft(item)
            self._long += _is_long(item)
            self._let_go(mine, item)
            self._changed.notify_all()
            return True

    def _next_pipeline(self, mine: SendThread) -> SetPipeline | None:
        """A thread's pipelines in turn; a new one as long as there are less than may be. None: the server takes
        nothing."""
        for pipeline in [each for each in mine.pipelines if not each.unanswered and each.connection.stale()]:
            mine.pipelines.remove(pipeline)
            if mine is self._first:
                on_it = [value for value, parts in self._begun.items() if parts and parts.pipeline is pipeline]
                self._begun |= dict.fromkeys(on_it)  # their rooms have ended with the connection
            self._node.retire(pipeline.connection)
        most = self._pipelines_max if mine is self._first else 1
        if len(mine.pipelines) < (most if mine.pipelines else 1) and not self._write_queue.over:
            for connection in self._node.borrow(1, for_sender=True):
                if mine is self._first and not mine.pipelines:
                    self._threads_max = self._node.store_threads_with(connection)
                    self._pipelines_max = self._node.store_connections_with(connection)
                mine.pipelines.append(SetPipeline(connection))
                refusal = mine.pipelines[-1].lend(self._write_queue.arena)
                if refusal is not None:
                    self._node.complain(refusal, connection)
        mine.turn += 1
        if not mine.pipelines or self._write_queue.over:
            return None
        return mine.pipelines[mine.turn % len(mine.pipelines)]

    def _read_all(self, mine: SendThread) -> None:
        for pipeline in mine.pipelines:
            self._read_answers(mine, pipeline, 0, 0)

    def _read_some(self, mine: SendThread, pipeline: SetPipeline) -> None:
        self._read_answers(mine, pipeline, SETS_UNANSWERED_MAX // 2, SETS_UNANSWERED_BYTES // 2)

    def _read_answers(self, mine: SendThread, pipeline: SetPipeline, keep: int, keep_bytes: int) -> None:
        for item, reply in pipeline.answers(keep, keep_bytes):
            hop = self._follow(reply) if isinstance(reply, BackendError) else None
            if item is not None:
                self._answered(mine, item, reply, hop)
            is_right = not isinstance(reply, BackendError) if item is None or isinstance(item, Touch) else reply == "OK"
            if hop is None and not is_right:
                self._node.complain(reply, pipeline.connection)

    def _answered(self, mine: SendThread, item: Item, reply: Reply, hop: Hop | None) -> None:
        with self._changed:
            if hop is None or isinstance(item, Touch) or item.hops >= HOPS_MAX or self._write_queue.over:
                self._settle(mine, item, "stored" if reply == "OK" else "refused")
                return
            item.hops += 1
            item.asking = hop.asking
            self._let_go(mine, item)
            self._write_queue.pass_on(item, hop.node)

    def _settle(self, mine: SendThread, item: Item, outcome: Outcome | None = None) -> None:
        self._let_go(mine, item)
        self._write_queue.settle(item, outcome)

    def _let_go(self, mine: SendThread, item: Item) -> None:
        del mine.taken[item]
        if isinstance(item, RemoteReservation) and self._flying.get(item.key) is item:
            del self._flying[item.key]
            self._wake_helper()

    # ---- losing the server -----------------------------------------------------------------------------------------

    def _lose(self, mine: SendThread, error: BaseException) -> None:
        """Give up the server, which ends what other threads have under way as well, and what waits for it."""
        if not self._write_queue.over:
            reason = error if isinstance(error, BackendError) else BackendError(repr(error))
            for pipeline in [each for each in mine.pipelines if not each.connection.usable] or mine.pipelines:
                self._node.lose(pipeline.connection, reason)
        self._give_up(mine)
        self._hang_up(mine)

    def _give_up(self, mine: SendThread) -> None:
        """Give up what waits, and what a thread has on its way: what was sent, even in part, counts as refused, the
        rest as dropped. What others have on their way is theirs: the kernel may be copying it just now.

        The connections end first. A server that takes values out of our memory must know before that memory is another
        value's, and publishes none of a client that has hung up.
        """
        for pipeline in mine.pipelines:
            pipeline.connection.interrupt()
        with self._changed:
            sent = {item for pipeline in mine.pipelines for item in pipeline.unanswered}
            queued = tuple(self._queue)
            mine.taken.update((item, None) for item in queued if not isinstance(item, FilledRange))
            self._queue.clear()
            self._long = 0
            # What has begun and has ended by now the first thread is to forget.
            ended = (item.value if isinstance(item, FilledRange) and not item.stop else item for item in queued)
            self._queue.extend(FilledRange(item) for item in ended if item in self._begun)
            for item in tuple(mine.taken):
                self._settle(mine, item, "refused" if item in sent else "dropped")

    def _hang_up(self, mine: SendThread) -> None:
        """Without the lock: nodes have one of their own, and a collected generator may want both in any order."""
        for pipeline in mine.pipelines:
            self._node.retire(pipeline.connection)
        mine.pipelines.clear()
        if mine is self._first:
            self._begun = dict.fromkeys(self._begun)  # their rooms have ended with the connections

    def _bring_back(self, mine: SendThread) -> None:
        """Give the connections of a thread back, on which nothing is under way. Without the lock, as `_hang_up`."""
        self._node.bring_back([pipeline.connection for pipeline in mine.pipelines])
        mine.pipelines.clear()


def _is_long(item: Queued) -> bool:
    """Say whether an item is worth a thread."""
    return isinstance(item, RemoteReservation) and item.nbytes >= LONG_BYTES_MIN


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
        self.lock = threading.RLock()  # reentrant: a collected generator may end a hold anywhere
        self.changed = threading.Condition(self.lock)
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
