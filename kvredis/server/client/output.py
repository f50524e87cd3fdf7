"""The half of a session that sends: replies in their order, payloads lent to the transport, messages out of turn.

WHY it holds leases: a reply that contains a view of the arena is written without a copy, and what the kernel does not
take at once stays *referenced* by the transport until the client has read far enough. So the Leases behind a batch of
replies are released when the transport's buffer is empty, never when the write was queued. The write buffer limit is 0:
the transport then says `pause_writing` for whatever is left over and `resume_writing` when the last byte has gone.

In between the client is behind. While what it has not taken is small and lends nothing, its commands run on and their
replies gather here, to leave in one write: a client that first writes a whole pipeline and reads afterwards would else
wait for the server, and the server for it. A unix socket makes that likely, because it counts hundreds of bytes for
each write of five. A client with blocks lent to it, or with UNSENT_BYTES_MAX gathered, is paused: the session runs no
further command and reads nothing, which bounds what a slow reader can hold. Only messages that others send to it
(pub/sub, invalidations, MONITOR) gather then, up to client-output-buffer-limit.

On unix sockets a large reply may go around the transport (net/zerocopy.py), whose buffer is empty then; a rest that the
socket does not take pauses the session in the same way, and its leases outlast even the socket's taking. On all but TLS
a thread may send it (net/io_threads.py) while another client is behind with its own; that pauses the session as well.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvredis.server.acl.rules import User
from kvredis.server.net.io_threads import Sending
from kvredis.server.net.zerocopy import Splicer, peer_pid
from kvredis.server.protocol.replies import Buffer, Reply
from kvredis.storage.entry import Lease

from .blocked import Answer, Pending

if TYPE_CHECKING:
    from kvredis.server.server import Server

log = logging.getLogger(__name__)

REPLY_BYTES_HIGH: Final = 1024 * 1024
"""Replies of a pipeline are gathered up to here before they are written: one system call, and one lease batch."""

UNSENT_BYTES_MAX: Final = 1024 * 1024
"""Replies gathered for a client that is behind, before it is paused: 200,000 times +OK."""

SEND_BUFFER_BYTES: Final = 512 * 1024
"""SO_SNDBUF, which Linux doubles: measured best for pipelined reads, since bytes in flight then stay in the cache."""

SLICE_BYTES: Final = 256 * 1024
"""What a transport that copies the unsent rest of a write (asyncio's own, and TLS) is given at a time."""

NO_LIMIT: Final = (0, 0, 0)
"""No bound in client-output-buffer-limit: hard, soft, seconds above the soft one."""

PUSH_BYTES_MAX: Final = 32 * 1024 * 1024
"""What may wait for a client that is sent messages and does not read, if client-output-buffer-limit sets no bound."""


NO_BACKLOG: Final[deque[Buffer]] = deque(maxlen=0)
"""Of transports that lend, and before there is one."""

KINDS: Final = ("tcp", "tls", "unix")
"""Of connections."""


class Outgoing(asyncio.BufferedProtocol):
    """What leaves for one client."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.output_bytes = 0
        self.writes = 0
        self.subscriptions = 0
        """Channels, patterns and shard channels that this client listens to."""
        self.addr, self.fd = "", -1
        self.user: User = server.acl.default
        self.encrypted = False
        self.kind = "tcp"
        """One of KINDS."""
        self.is_local_stream = False
        """Whether this is a unix socket on a loop that lends."""
        self.asked_to_splice = False
        self.splices = False
        """Whether large replies lend their pages to the socket."""
        self._splicer: Splicer | None = None
        self.sending: Sending | None = None
        """What a thread sends for this client."""
        self._transport: asyncio.Transport | None = None
        self._lends = server.transport_lends
        self._is_behind = False
        """The transport keeps a rest that the client has not taken."""
        self._unsent = bytearray()
        """What goes out behind that rest, in one write."""
        self._paused = False
        """Nothing is run or read for this client until the rest has gone."""
        self._paused_since_s = 0.0
        self._behind_since_s: float | None = None  # since when there has been a rest, whatever was taken of it since
        self._replies: list[Buffer] = []
        self._reply_bytes = 0
        self._lent: list[Lease] = []
        self._backlog = NO_BACKLOG  # only for transports that copy
        self._stream: Iterator[Reply | Pending] | None = None  # the rest of a reply that is made as the client takes it
        self._pushes: list[bytes] = []
        self._push_bytes = 0
        self._answering = False  # a command is running whose reply goes before what is pushed meanwhile
        self._over_soft_limit_s: float | None = None
        self.close_after_reply = False
        self.waiting: Pending | None = None
        """What this client waits for; until then nothing of it is run."""

    def hold(self, lease: Lease) -> None:
        """Keep a lease whose view is part of the reply being made until that reply has left the process."""
        self._lent.append(lease)

    def push(self, message: bytes) -> None:
        """Send an encoded message that answers no command; after the replies before it, at once to an idle client."""
        if self._transport is None or self._transport.is_closing():
            return
        self._pushes.append(message)
        self._push_bytes += len(message)
        if not self._paused and not self._answering and self._stream is None:
            self._send_pushes()
        elif self._is_behind:
            self._check_output_limit()

    def drop_lent(self, since: int) -> None:
        """End the holds taken since there were `since` of them: a reply that will not be sent."""
        dropped, self._lent[since:] = self._lent[since:], []
        for lease in dropped:
            lease.release()

    @property
    def lent(self) -> int:
        """How many leases are behind what is not sent yet."""
        return len(self._lent)

    def begin_answer(self) -> None:
        """A command runs now: what is pushed to this client meanwhile goes behind its reply."""
        self._answering = True

    def end_answer(self, reply: Answer) -> Answer:
        """The reply with what was pushed meanwhile; of one that comes later, or in parts, it goes by itself."""
        self._answering = False
        if not self._pushes or not isinstance(reply, bytes | list):
            return reply
        return reply + self._take_pushes() if isinstance(reply, bytes) else [*reply, self._take_pushes()]

    def close(self) -> None:
        """Hang up now; what is not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """Hang up once what is queued has been sent."""
        self.close_after_reply = True
        if not self._is_behind and self._transport is not None:
            self._transport.close()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the client has not taken yet: `omem` of CLIENT LIST."""
        waiting = sum(map(len, self._backlog)) + len(self._unsent) + self._push_bytes
        if self._splicer is not None:
            waiting += self._splicer.unsent_bytes
        waiting += 0 if self.sending is None else self.sending.left_bytes
        return waiting + (0 if self._transport is None else self._transport.get_write_buffer_size())

    @property
    def is_caught_up(self) -> bool:
        """Whether every reply before the one being made has left the process."""
        return not (self._replies or self._pushes or self._is_behind or self.unsent_bytes)

    @property
    def slow_since_s(self) -> float:
        """Since when this client has kept blocks of the arena leased by not reading that hanging up on it would free;
        infinity if it does not. What was spliced outlasts the connection."""
        splices = self._splicer is not None and self._splicer.is_busy
        return self._paused_since_s if self._paused and self._lent and not splices else float("inf")

    def pause_writing(self) -> None:
        """The transport keeps a rest that the client is too slow to take."""
        self._is_behind = True
        if self._behind_since_s is None:
            self._behind_since_s = monotonic()
        if self._lent or self._backlog or self._stream is not None:
            self._pause()
        if self.server.output_limits["normal"] != NO_LIMIT:
            self._check_output_limit()

    def _pause(self) -> None:
        """Run and read nothing until the client has taken the rest."""
        self._paused = True
        self._paused_since_s = monotonic()
        if self._lent:
            self.server.senders.behind.add(self)

    # ---- replies -------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Hand the gathered replies to the transport; what it lent is released when it says that they are gone."""
        assert self._transport is not None
        replies, self._replies = self._replies, []
        self._reply_bytes = 0
        nbytes = sum(map(len, replies))
        self.output_bytes += nbytes
        self.writes += 1
        if self._is_behind:
            if self._unsent:
                replies.insert(0, memoryview(self._unsent))
                self._unsent = bytearray()
            self._pause()
        if self.splices and self._lent and self._begin_splice(replies, nbytes):
            self._splice()
        elif not (self._lent and self.server.senders.begin(self, replies)):
            self._write(replies)

    def _send(self, message: Buffer) -> None:
        """Hand bytes that lend nothing to the transport, or keep them until the rest before them has gone."""
        self.output_bytes += len(message)
        if not self._is_behind:
            self.writes += 1
            self._transport.write(message)  # type: ignore[union-attr]
            return
        self._unsent += message
        if len(self._unsent) >= UNSENT_BYTES_MAX:
            self._pause()
        self._check_output_limit()

    def _write(self, replies: Sequence[Buffer]) -> None:
        """Hand replies to the transport."""
        assert self._transport is not None
        if self._lends or not self._lent:
            self._transport.writelines(replies)
        else:
            self._backlog.extend(replies)
            self._send_slices()
        if self._lent and not self._paused and not self._backlog:
            self._release()

    @property
    def is_clear(self) -> bool:
        """Whether a reply may go around the transport, which has nothing left to send before it."""
        transport = self._transport
        busy = transport is None or self._is_behind or transport.is_closing() or transport.get_write_buffer_size()
        return not busy

    def sent(self, sending: Sending) -> None:
        """The thread is done."""
        self.sending = None
        if self._transport is None:  # the connection has gone before it
            self._release()
        elif sending.has_failed:
            self.close()
        elif not self._transport.is_closing():
            self._paused = self._is_behind = False
            if sending.rest:
                self._write(sending.rest)
            if not self._is_behind:
                self.resume_writing()

    def _begin_splice(self, replies: list[Buffer], nbytes: int) -> bool:
        """Whether these replies can go around the transport, and if so, have them go."""
        is_long = nbytes >= self.server.splicing.value_bytes_min * len(self._lent)
        if not (is_long and self.is_clear and self.user.root.reads_all_keys):
            return False
        if self._splicer is None:
            self._splicer = self.server.splicing.splicer_for(self.fd)
        return self._splicer is not None and self._splicer.begin(replies, self._lent)

    def _splice(self) -> None:
        """Splice what the socket takes: now, and whenever it takes more."""
        splicer = self._splicer
        assert splicer is not None
        loop = asyncio.get_running_loop()
        try:
            complete = splicer.advance()
            if complete:
                splicer.keep(self._lent)
        except BaseException as error:  # or the loop, for which the socket takes more, would call this without end
            loop.remove_writer(splicer.fileno())
            self._paused = True
            self.close()
            if isinstance(error, OSError):  # the client has gone
                return
            log.exception("a reply failed half way; its client %s is closed", self.addr)
            self.server.stats.handler_exceptions += 1
            if not isinstance(error, Exception):
                raise
            return
        if complete:
            self._lent = []
            if self._paused:
                loop.remove_writer(splicer.fileno())
                self.resume_writing()
        elif not self._paused:
            loop.add_writer(splicer.fileno(), self._splice)
            self.pause_writing()

    def _pump(self) -> bool:
        """Go on with a streamed reply until the client is full; True when it is complete."""
        assert self._stream is not None
        try:
            for part in self._stream:
                if isinstance(part, Pending):
                    if self._replies:
                        self._flush()
                    self.waiting = part
                    return False
                if isinstance(part, bytes):
                    self._replies.append(part)
                    self._reply_bytes += len(part)
                else:
                    self._replies += part
                    self._reply_bytes += sum(map(len, part))
                if self._reply_bytes >= REPLY_BYTES_HIGH:
                    self._flush()
                    if self._paused:
                        return False
        except Exception:  # a mistake of ours in the middle of a reply: nothing that is understood can follow it
            log.exception("a reply failed half way; its client %s is closed", self.addr)
            self.server.stats.handler_exceptions += 1
            self._stream = None
            self.close()
            return False
        self._stream = None
        return True

    def _send_slices(self) -> None:
        """Give a copying transport no more than it can send soon, so that no payload is ever copied whole."""
        assert self._transport is not None
        while self._backlog and not self._paused and not self._transport.is_closing():
            piece = self._backlog.popleft()
            if len(piece) > SLICE_BYTES:
                view = memoryview(piece)
                self._backlog.appendleft(view[SLICE_BYTES:])
                piece = view[:SLICE_BYTES]
            self._transport.write(piece)

    def _all_sent(self) -> bool:
        """Go on where `pause_writing` had stopped; True when nothing is left over and the leases have ended."""
        self._paused = self._is_behind = False
        self.server.senders.behind.discard(self)
        self._over_soft_limit_s = None
        if self._backlog:
            self._send_slices()
            if self._paused or self._backlog:
                return False
        if self._behind_since_s is not None:
            self.server.stats.sending.add(monotonic() - self._behind_since_s)
            self._behind_since_s = None
        self._release()
        if self._unsent:
            unsent, self._unsent = self._unsent, bytearray()
            self.writes += 1
            self._transport.write(unsent)  # type: ignore[union-attr]
        if self._pushes and self._stream is None:
            self._send_pushes()
        return not self._paused

    def _release(self) -> None:
        lent, self._lent = self._lent, []
        for lease in lent:
            lease.release()

    # ---- messages ------------------------------------------------------------------------------------------------

    def _take_pushes(self) -> bytes:
        """What was pushed and not yet sent."""
        pushes, self._pushes = self._pushes, []
        self._push_bytes = 0
        return b"".join(pushes)

    def _send_pushes(self) -> None:
        self._send(self._take_pushes())

    def _check_output_limit(self) -> None:
        """Close a client for which more waits than client-output-buffer-limit allows, as Redis does."""
        hard, soft, soft_s = self.server.output_limits["pubsub" if self.subscriptions else "normal"]
        unsent, now_s = self.unsent_bytes, monotonic()
        if not soft or unsent < soft:
            self._over_soft_limit_s = None
        elif self._over_soft_limit_s is None:
            self._over_soft_limit_s = now_s
        over_soft = self._over_soft_limit_s is not None and now_s - self._over_soft_limit_s > soft_s
        is_closed = self._transport is None or self._transport.is_closing()
        if not is_closed and ((hard and unsent >= hard) or over_soft or self._push_bytes >= max(hard, PUSH_BYTES_MAX)):
            log.warning("client %s closed: %d bytes wait for it (client-output-buffer-limit)", self.addr, unsent)
            self.server.stats.output_limit_disconnections += 1
            self._pushes.clear()
            self._push_bytes = 0
            self.close()

    def _hang_up(self) -> None:
        """Close once everything written is out. Not at once: closed within resume_writing, asyncio's own transport
        reports its end twice."""
        if self._transport is not None and not self._transport.is_closing():
            asyncio.get_running_loop().call_soon(self._transport.close)

    def _open_outgoing(self, transport: asyncio.Transport) -> None:
        """The connection is there."""
        self._transport = transport
        self.encrypted = encrypted = transport.get_extra_info("sslcontext") is not None
        self._lends = self._lends and not encrypted
        if not self._lends:
            self._backlog = deque()
        # TLS transports pause at a buffer of `high` bytes, the others above it: with 0 they would never rest.
        transport.set_write_buffer_limits(high=1 if encrypted else 0)
        sock = transport.get_extra_info("socket")
        self.fd = sock.fileno()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        is_unix = sock.family == socket.AF_UNIX
        self.kind = "tls" if encrypted else "unix" if is_unix else "tcp"
        self.is_local_stream = self._lends and is_unix
        self.splices = self.server.splicing.wanted_by(self)

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def peer_pid(self) -> int:
        """The process that has connected, of a client on a unix socket."""
        assert self._transport is not None
        return peer_pid(self._transport.get_extra_info("socket"))

    def _close_outgoing(self) -> None:
        """The connection is gone: every hold ends here."""
        if self._splicer is not None:
            half_sent: list[Lease] = []
            if self._splicer.is_busy:
                asyncio.get_running_loop().remove_writer(self._splicer.fileno())
                half_sent, self._lent = self._lent, []
            self._splicer.end(half_sent)
            self._splicer = None
        self.server.senders.behind.discard(self)
        if self.sending is None:
            self._release()
        else:
            self.sending.end()  # its leases end with it
        self._backlog = NO_BACKLOG
        self._unsent.clear()
        self._pushes.clear()
        self._push_bytes = 0
        self._stream = None
        self._paused = True
        self._transport = None
