"""Large values moved by threads, where several clients send or take some at the same time: Redis' `io-threads`.

The kernel copies what is sent and received, on the processor of the thread that asks and outside of the interpreter's
lock. The loop is one thread, and so one processor's copying was the bound for all clients together: over TCP 4.6 GB/s
of 32 MiB values on 16 cores, where seven threads beside the loop bring 14.4 to four connections and 22.3 to eight
(2 MiB: 4.5, 11.1 and 10.2; bench/results/server-2026-11-28-16-cores-threads.json). So while a client is behind with a
large reply, the next one's goes to a thread; and while another client's large value moves, what is missing of a long
one is received by a thread. The first stays with the loop: alone it would gain nothing, and wait for two threads to
wake. Values of a megabyte may all lie in their sockets whole, so that the loop receives one after the other and no two
are under way at a time: another client's that has come within LATELY_S counts too.

What a thread may do: give the kernel the bytes of one reply, or have it put the rest of one value into its place in the
arena. All else of the session is the loop's. It rests while a thread sends, as if its transport held a rest
(client/session.py): it runs no command, and the loop sends it nothing. While a thread receives, the transport is paused
and the loop reads nothing of it. Leases end, and the room for a value is given back, in the loop and when the thread is
done, also behind a hang-up, which shuts the socket down and so ends the thread's work.

A client that takes nothing for IDLE_MS, or sends next to nothing, has its rest moved by the loop, and after CROWDED_MS
where others wait for a thread: however many slow ones there are, they do not keep the threads from the others. Where
there are several threads, what comes while all are at work waits for one rather than for the loop: a loop that copies
lets threads wait that are done. GETs of 1 MiB by eight clients with four threads cost the loop 66 to 84 us each so,
which were 206 to 226, and all threads together as much as before (2 busy cores).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import monotonic
from typing import Final, Protocol, TypeVar

from kvredis.server.metrics.stats import ServerStats
from kvredis.server.protocol import _hot
from kvredis.server.protocol.replies import Buffer
from kvredis.storage.background import start_worker
from kvredis.storage.entry import Reservation

from .rcvlowat import LOW_WATER_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T", bound="Transfer")

THREADS_AUTO_MAX: Final = 8
PROCESSORS_MIN: Final = 8
"""With fewer, a client on this host and the engine beside it have none to spare. Measured on 16 alone."""
REPLY_BYTES_MIN: Final = _hot.REPLY_BYTES_MIN
"""Shorter replies are sent before a thread would have woken up."""
REST_BYTES_MIN: Final = 512 * 1024
"""If less is missing of a value, it is received before a thread would have woken up. SETs of 1 MiB by eight clients
cost the loop 105 us each where threads receive, and 184 where it does itself; of 576 KiB 85 and 101 (2 busy cores). The
threads' own time comes on top: all processors together have 1.5 and 1.8 times as much to do."""
LATELY_S: Final = 0.005
"""Two values that come so soon after each other come at the same time."""
IOV_MAX: Final = 1024
"""Buffers in one sendmsg, on Linux."""
IDLE_MS: Final = 20
"""A client that reads on takes something sooner, however busy its machine is."""
CROWDED_MS: Final = 2
"""The same where others wait for a thread."""
QUEUE_THREADS_MIN: Final = 4
"""With fewer, the loop moves what comes while all threads are at work: it would leave a good part of the processors
that it may use unused."""
QUEUED_MAX: Final = 8
"""So many transfers may be under way for each thread."""
AT_ONCE: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


def threads_for(asked: int | str) -> int:
    """How many threads `io_threads` means, the loop's own among them: of "auto" half of the processors that this
    process may use, at most THREADS_AUTO_MAX, and where there are less than PROCESSORS_MIN the loop's alone."""
    if isinstance(asked, int):
        return asked
    processors = len(os.sched_getaffinity(0))
    return min(processors // 2, THREADS_AUTO_MAX) if processors >= PROCESSORS_MIN else 1


class Peer(Protocol):
    """A client, as what moves its values sees it."""

    id: int
    addr: str
    fd: int
    kind: str
    encrypted: bool
    sending: Sending | None
    receiving: Receiving | None

    @property
    def is_clear(self) -> bool:
        """Whether its transport has nothing left to send."""

    def pause_writing(self) -> None:
        """Take note that a rest is left over; the client runs no command until it has gone."""

    def sent(self, sending: Sending) -> None:
        """Go on, since the thread is done."""

    def received(self, receiving: Receiving) -> None:
        """Go on, since the thread is done."""


class Transfer:
    """What a thread moves for a client, which is told in the loop when that has ended."""

    what: str
    """What a log line calls it."""

    def __init__(self, client: Peer) -> None:
        """OSError when there is no descriptor left."""
        self.idle_ms: Callable[[], int] = lambda: IDLE_MS
        """How long a client may take or send nothing."""
        self._is_unix = client.kind == "unix"
        family = socket.AF_UNIX if self._is_unix else socket.AF_INET  # IPv6 too: nothing here asks, nor the kernel
        # Ours: the transport may close its own at any time.
        self._sock = socket.socket(family, socket.SOCK_STREAM, 0, os.dup(client.fd))
        self._loop = asyncio.get_running_loop()
        self.client = client
        self.has_failed = False
        """Whether the connection is of no use any more."""

    def run(self, done: Callable[[Transfer], None]) -> None:
        """Move it, in a thread, and have `done` called in the loop."""
        try:
            self._move()
        except OSError:  # the client has gone
            self.has_failed = True
        except BaseException:  # a mistake of ours: nothing that is understood can follow half a reply, or half a value
            log.exception("a thread failed in a %s; its client %s is closed", self.what, self.client.addr)
            self.has_failed = True
        self._let_go()
        with contextlib.suppress(RuntimeError):  # a loop that was closed meanwhile: no client waits any more
            self._loop.call_soon_threadsafe(done, self)

    def end(self) -> None:
        """Have the thread find out that the connection is gone."""
        with contextlib.suppress(OSError):  # it has been shut down already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor: the thread moves no more."""
        self._sock.close()

    def tell(self) -> None:
        """Tell the client, in the loop, that the thread is done."""
        raise NotImplementedError

    def _move(self) -> None:
        raise NotImplementedError

    def _let_go(self) -> None:
        """Let go of the memory, since the thread is done."""
        raise NotImplementedError


class Sending(Transfer):
    """One reply that a thread sends."""

    what = "reply"

    def __init__(self, client: Peer, buffers: Sequence[Buffer]) -> None:
        super().__init__(client)
        self._buffers: Sequence[Buffer] = buffers
        self.left_bytes = sum(map(len, buffers))
        """What the socket has not taken yet."""
        self.rest: Sequence[Buffer] = ()
        """What is left to others when it is over."""

    def tell(self) -> None:
        self.client.sent(self)

    def _move(self) -> None:
        self.rest = self._send()

    def _let_go(self) -> None:
        self._buffers = ()

    def _send(self) -> Sequence[Buffer]:
        """Send until all is sent, or the client takes nothing; what is left."""
        at, skip, room = 0, 0, select.poll()
        room.register(self._sock, select.POLLOUT)
        while at < len(self._buffers):
            window = [memoryview(self._buffers[at])[skip:], *self._buffers[at + 1 : at + IOV_MAX]]
            try:
                sent = self._sock.sendmsg(window, (), AT_ONCE)
            except BlockingIOError:
                if not room.poll(self.idle_ms()):
                    return [*window, *self._buffers[at + IOV_MAX :]]
                continue
            self.left_bytes -= sent
            skip += sent
            while at < len(self._buffers) and skip >= len(self._buffers[at]):
                skip -= len(self._buffers[at])
                at += 1
        return ()


class Receiving(Transfer):
    """The rest of one value that a thread receives, into room that `hold` keeps until the thread is done."""

    what = "value"

    def __init__(self, client: Peer, hold: Reservation, room: memoryview) -> None:
        super().__init__(client)
        self.hold = hold
        self._room = room
        self._counted_bytes = 0
        self.received_bytes = 0
        """What has come."""

    def uncounted(self) -> int:
        """What has come since this was asked last."""
        counted, self._counted_bytes = self._counted_bytes, self.received_bytes
        return self._counted_bytes - counted

    def tell(self) -> None:
        self.client.received(self)

    def _let_go(self) -> None:
        self._room = memoryview(b"")

    def _move(self) -> None:
        """Receive until all is there, or next to nothing comes, or the client has sent its last byte, which is left
        for the loop to find."""
        sock, room = self._sock, self._room
        more: select.poll | None = None
        mark = 1
        seen_bytes, seen_s = 0, monotonic()
        try:
            while missing := len(room) - self.received_bytes:
                try:
                    received = sock.recv_into(room[self.received_bytes :], 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    now_s, idle_ms = monotonic(), self.idle_ms()
                    if 1000 * (now_s - seen_s) >= idle_ms:
                        if self.received_bytes - seen_bytes < LOW_WATER_BYTES:
                            return
                        seen_bytes, seen_s = self.received_bytes, now_s
                    if not self._is_unix and mark != (mark := min(missing, LOW_WATER_BYTES)):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
                    if more is None:
                        more = select.poll()
                        more.register(sock, select.POLLIN)
                    more.poll(idle_ms)
                    continue
                if not received:
                    return
                self.received_bytes += received
        finally:
            if mark != 1:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


class IoPool:
    """The threads, which are started when they are first needed, and what they are at. All methods are the loop's."""

    def __init__(self, threads: int) -> None:
        """`threads` as `io-threads` counts them, with the loop's own."""
        self.threads = threads
        self._most = (threads - 1) * (QUEUED_MAX if threads >= QUEUE_THREADS_MIN else 1)
        self.under_way: set[Transfer] = set()
        self._started: list[threading.Thread] = []
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()

    @property
    def has_room(self) -> bool:
        """Whether a thread is free or soon will be, or can be started."""
        return len(self.under_way) < self._most

    def begin(self, make: Callable[[], T]) -> T | None:
        """Have a thread move what `make` gives; None when that is not possible now."""
        if not self.has_room:
            return None
        try:
            if len(self._started) < min(self.threads - 1, len(self.under_way) + 1):
                self._started.append(start_worker(self._turn, "kvredis io"))
            transfer = make()
        except (OSError, RuntimeError):  # no descriptor or no thread to be had
            return None
        transfer.idle_ms = self._idle_ms
        self.under_way.add(transfer)
        self._queue.put(transfer)
        return transfer

    async def close(self) -> None:
        """End what is under way, and the threads. Nothing may be begun afterwards."""
        for transfer in self.under_way:
            transfer.end()
        while self.under_way:
            await asyncio.sleep(0.001)
        for _ in self._started:
            self._queue.put(None)
        while self._started:
            self._started.pop().join()

    def _idle_ms(self) -> int:
        return IDLE_MS if self._queue.empty() else CROWDED_MS

    def _turn(self) -> bool:
        transfer = self._queue.get()
        if transfer is not None:
            transfer.run(self._done)
        return transfer is not None

    def _done(self, transfer: Transfer) -> None:
        self.under_way.discard(transfer)
        transfer.close()
        transfer.tell()


class Senders:
    """Who sends a large reply: a thread, or the loop."""

    def __init__(self, pool: IoPool, stats: ServerStats) -> None:
        self._pool = pool
        self._stats = stats
        self.behind: set[Peer] = set()
        """Clients that have not taken a reply yet which lends blocks."""

    def begin(self, client: Peer, buffers: Sequence[Buffer]) -> bool:
        """Have a thread send a reply; the client rests until it hears of its end. False when that is not possible now,
        or not worth it: no other client is behind."""
        if not (self.behind and self._pool.has_room) or client.encrypted or not client.is_clear:
            return False
        if sum(map(len, buffers)) < REPLY_BYTES_MIN:
            return False
        client.sending = self._pool.begin(lambda: Sending(client, buffers))
        if client.sending is None:
            return False
        self._stats.threaded_writes += 1
        client.pause_writing()
        return True


class Receivers:
    """Who receives the rest of a long value: a thread, or the loop."""

    def __init__(self, pool: IoPool, stats: ServerStats) -> None:
        self._pool = pool
        self._stats = stats
        self._last, self._last_s = 0, -math.inf  # whose long value has come last, by id, and when
        self._other_s = -math.inf  # when one of another client has

    def comes_beside(self, client: Peer) -> bool:
        """Note that a long value of this client comes, and say whether another client's has lately."""
        now_s = monotonic()
        if client.id != self._last:
            self._last, self._other_s = client.id, self._last_s
        self._last_s = now_s
        return now_s - self._other_s < LATELY_S

    def begin(self, client: Peer, hold: Reservation, room: memoryview) -> bool:
        """Have a thread receive what fills `room`, of the value that `hold` is for; the loop reads nothing of this
        client until it hears of the end. False when that is not possible now."""
        if client.encrypted:
            return False
        client.receiving = self._pool.begin(lambda: Receiving(client, hold, room))
        if client.receiving is None:
            return False
        self._stats.threaded_reads += 1
        return True
