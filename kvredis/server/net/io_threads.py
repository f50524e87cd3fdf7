"""Large replies sent by threads, where several clients take some at the same time: Redis' `io-threads`.

The kernel copies what is sent, on the processor of the sending thread and outside of the interpreter's lock. The loop
is one thread, and so one processor's copying was the bound for all clients together: over TCP 4.6 GB/s of 32 MiB values
on 16 cores, where seven threads beside the loop bring 14.4 to four connections and 22.3 to eight (2 MiB: 4.5, 11.1 and
10.2; bench/results/server-2026-11-28-16-cores-threads.json). So while a client is behind with a large reply, the next
one's goes to a thread. The first stays with the loop: alone it would gain nothing, and wait for two threads to wake.

What a thread may do: give the kernel the bytes of one reply. All else of the session is the loop's, and the session
rests meanwhile, as if its transport held a rest (client/session.py): it runs no command, and the loop sends it nothing.
Leases end in the loop when the thread is done, also behind a hang-up, which shuts the socket down and so ends the
thread's work. A client that takes nothing for IDLE_MS has its rest sent by the loop: however many slow ones there are,
they do not keep the threads from the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, Protocol

from kvredis.server.metrics.stats import ServerStats
from kvredis.server.protocol.replies import Buffer
from kvredis.storage.background import start_worker

log = logging.getLogger(__name__)

THREADS_AUTO_MAX: Final = 8
PROCESSORS_MIN: Final = 8
"""With fewer, a client on this host and the engine beside it have none to spare. Measured on 16 alone."""
REPLY_BYTES_MIN: Final = 512 * 1024
"""Shorter replies are sent before a thread would have woken up."""
IOV_MAX: Final = 1024
"""Buffers in one sendmsg, on Linux."""
IDLE_MS: Final = 20
"""A client that reads on takes something sooner, however busy its machine is."""
AT_ONCE: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


def threads_for(asked: int | str) -> int:
    """How many threads `io_threads` means, the loop's own among them: of "auto" half of the processors that this
    process may use, at most THREADS_AUTO_MAX, and where there are less than PROCESSORS_MIN the loop's alone."""
    if isinstance(asked, int):
        return asked
    processors = len(os.sched_getaffinity(0))
    return min(processors // 2, THREADS_AUTO_MAX) if processors >= PROCESSORS_MIN else 1


class Receiver(Protocol):
    """A client, as what sends to it sees it."""

    addr: str
    fd: int
    encrypted: bool
    sending: Sending | None

    @property
    def is_clear(self) -> bool:
        """Whether its transport has nothing left to send."""

    def pause_writing(self) -> None:
        """Take note that a rest is left over; the client runs no command until it has gone."""

    def sent(self, sending: Sending) -> None:
        """Go on, since the thread is done."""


class Sending:
    """One reply that a thread sends to a client, which is told in the loop when that has ended."""

    def __init__(self, client: Receiver, buffers: Sequence[Buffer]) -> None:
        """OSError when there is no descriptor left."""
        self._sock = socket.socket(fileno=os.dup(client.fd))  # ours: the transport may close its own at any time
        self._buffers: Sequence[Buffer] = buffers
        self._loop = asyncio.get_running_loop()
        self.client = client
        self.left_bytes = sum(map(len, buffers))
        """What the socket has not taken yet."""
        self.rest: Sequence[Buffer] = ()
        """What is left to others when it is over."""
        self.has_failed = False
        """Whether the connection is of no use any more."""

    def run(self, done: Callable[[Sending], None]) -> None:
        """Send it, in a thread, and have `done` called in the loop."""
        try:
            self.rest = self._send()
        except OSError:  # the client has gone
            self.has_failed = True
        except BaseException:  # a mistake of ours: nothing that is understood can follow half a reply
            log.exception("a thread failed in a reply; its client %s is closed", self.client.addr)
            self.has_failed = True
        self._buffers = ()
        with contextlib.suppress(RuntimeError):  # a loop that was closed meanwhile: no client waits any more
            self._loop.call_soon_threadsafe(done, self)

    def _send(self) -> Sequence[Buffer]:
        """Send until all is sent, or the client takes nothing; what is left."""
        at, skip, room = 0, 0, select.poll()
        room.register(self._sock, select.POLLOUT)
        while at < len(self._buffers):
            window = [memoryview(self._buffers[at])[skip:], *self._buffers[at + 1 : at + IOV_MAX]]
            try:
                sent = self._sock.sendmsg(window, (), AT_ONCE)
            except BlockingIOError:
                if not room.poll(IDLE_MS):
                    return [*window, *self._buffers[at + IOV_MAX :]]
                continue
            self.left_bytes -= sent
            skip += sent
            while at < len(self._buffers) and skip >= len(self._buffers[at]):
                skip -= len(self._buffers[at])
                at += 1
        return ()

    def end(self) -> None:
        """Have the thread find out that the connection is gone."""
        with contextlib.suppress(OSError):  # it has been shut down already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor: the thread sends no more."""
        self._sock.close()


class Senders:
    """The threads, which are started when they are first needed, and what they are at. All methods are the loop's."""

    def __init__(self, threads: int, stats: ServerStats) -> None:
        """`threads` as `io-threads` counts them, with the loop's own."""
        self.threads = threads
        self._stats = stats
        self.behind: set[Receiver] = set()
        """Clients that have not taken a reply yet which lends blocks."""
        self._under_way: set[Sending] = set()
        self._started: list[threading.Thread] = []
        self._queue: SimpleQueue[Sending | None] = SimpleQueue()

    @property
    def is_active(self) -> bool:
        """Whether a thread sends just now."""
        return bool(self._under_way)

    def begin(self, client: Receiver, buffers: Sequence[Buffer]) -> bool:
        """Have a thread send a reply; the client rests until it hears of its end. False when that is not possible now,
        or not worth it: no other client is behind."""
        if not self.behind or len(self._under_way) >= self.threads - 1 or client.encrypted or not client.is_clear:
            return False
        if sum(map(len, buffers)) < REPLY_BYTES_MIN:
            return False
        try:
            if len(self._started) <= len(self._under_way):
                self._started.append(start_worker(self._turn, "kvredis sends"))
            sending = Sending(client, buffers)
        except (OSError, RuntimeError):  # no descriptor or no thread to be had
            return False
        self._under_way.add(sending)
        self._stats.threaded_writes += 1
        client.sending = sending
        client.pause_writing()
        self._queue.put(sending)
        return True

    async def close(self) -> None:
        """End what is under way, and the threads. Nothing may be begun afterwards."""
        for sending in self._under_way:
            sending.end()
        while self._under_way:
            await asyncio.sleep(0.001)
        for _ in self._started:
            self._queue.put(None)
        while self._started:
            self._started.pop().join()

    def _turn(self) -> bool:
        sending = self._queue.get()
        if sending is not None:
            sending.run(self._done)
        return sending is not None

    def _done(self, sending: Sending) -> None:
        self._under_way.discard(sending)
        sending.close()
        sending.client.sent(sending)
