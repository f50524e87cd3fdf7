"""One client: bytes in, commands run in their order, replies out.

Commands go one of three ways. The commonest of a client with nothing special about it are read and run by HotSession
(protocol/_hot.pyx), the part of a session that is compiled: `buffer_updated` is there, and leaves to `_run` all else.
Other plain commands (short, O(1)) run in the loop of `_run`, in one frame. Everything else goes through
process_command.py, whose head tells the whole path; `reconsider` decides, whenever a reason comes or goes, whether this
client's commands may take the first two.

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

What plain commands answer goes to the socket itself where the transport holds nothing back, and what has come of a
value is received from there (protocol/_hot.pyx): the transport is given what the socket does not take.

On unix sockets a large reply may go around the transport (net/zerocopy.py), whose buffer is empty then; a rest that the
socket does not take pauses the session in the same way, and its leases outlast even the socket's taking. On all but TLS
a thread may send it (net/io_threads.py) while another client is behind with its own; that pauses the session as well. A
thread may also receive the rest of a long value; then the transport reads nothing until the thread is done.

More than 800 lines: receiving, running and sending are one state machine. Each step looks at what the others have left
(a reply that waits, a client that is behind, a lease that goes out), and `_run` goes through all in one frame.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from time import monotonic, perf_counter_ns
from typing import Final, cast

from kvredis.server.acl.rules import User
from kvredis.server.commands.client import describe
from kvredis.server.commands.registry import SPELLINGS, Command, Handler, takes_payload
from kvredis.server.context import Context
from kvredis.server.metrics.stats import NO_LIMIT
from kvredis.server.net.io_threads import REST_BYTES_MIN, Receiving, Sending
from kvredis.server.net.listeners import address_of, unix_name
from kvredis.server.net.rcvlowat import LONG_BYTES, LowWater
from kvredis.server.net.zerocopy import Splicer, peer_pid
from kvredis.server.protocol import _hot
from kvredis.server.protocol._hot import HotSession
from kvredis.server.protocol.parser import Parser
from kvredis.server.protocol.replies import NULL, NULL_BULK, Buffer, Reply, error
from kvredis.server.protocol.request import ARGUMENT_BYTES, Argument, ProtocolError
from kvredis.storage.entry import Lease, Reservation

from .admission import Room
from .blocked import Answer, Blocked, Reason, waits_for
from .client import NO_NAMES, WATCHED_BYTES, Held, Tracking, Transaction
from .process_command import call, process_command

log = logging.getLogger(__name__)

ERROR: Final = ord("-")

REPLY_BYTES_HIGH: Final = _hot.REPLY_BYTES_HIGH
"""Replies of a pipeline are gathered up to here before they are written: one system call, and one lease batch."""

UNSENT_BYTES_MAX: Final = 1024 * 1024
"""Replies gathered for a client that is behind, before it is paused: 200,000 times +OK."""

SEND_BUFFER_BYTES: Final = 512 * 1024
"""SO_SNDBUF, which Linux doubles: measured best for pipelined reads, since bytes in flight then stay in the cache."""

SLICE_BYTES: Final = 256 * 1024
"""What a transport that copies the unsent rest of a write (asyncio's own, and TLS) is given at a time."""

PUSH_BYTES_MAX: Final = 32 * 1024 * 1024
"""What may wait for a client that is sent messages and does not read, if client-output-buffer-limit sets no bound."""

NO_BACKLOG: Final[deque[Buffer]] = deque(maxlen=0)
"""Of transports that lend, and before there is one."""


class Session(HotSession, asyncio.BufferedProtocol):
    """The protocol object of one connection. Client (client.py) says what its public methods and attributes are, and
    _hot.pyi of those that plain commands need."""

    _parser: Parser

    # How each connection begins; what each has of its own, and what every read looks at, is in __init__.
    name = lib_name = lib_ver = b""
    addr, laddr, fd = "", "", -1
    kind = "tcp"  # one of KINDS
    encrypted = is_local_stream = False  # the latter: a unix socket on a loop that lends
    resp, said_hello = 2, False
    reply_mode = "on"
    no_evict = asked_to_splice = False
    subscriptions = 0  # channels, patterns and shard channels that this client listens to
    tracking: Tracking | None = None
    transaction: Transaction | None = None
    watch_broken = False  # a watched key has changed: EXEC will answer nil
    refused = b""  # the error for the command being read, if a payload of it could not be taken
    sending: Sending | None = None
    """What a thread sends for this client."""
    receiving: Receiving | None = None
    """What a thread receives for this client."""
    _left_bytes = 0  # with less missing, the value is one that a thread has left to the loop
    _splicer: Splicer | None = None
    _paused_since_s = 0.0
    _behind_since_s: float | None = None  # since when there has been a rest, whatever was taken of it since
    _over_soft_limit_s: float | None = None
    _answering = False  # a command is running whose reply goes before what is pushed meanwhile
    _push_bytes = 0

    def __init__(self, server: Context) -> None:
        parser = Parser(self._open_payload, takes_payload=takes_payload, scratches=server.scratches)
        self._take_part(server, parser)
        self.id: int = server.next_session_id()
        self.user: User = server.acl.default
        self.authenticated = self.user.needs_no_password
        self.created_s = self.last_command_s = monotonic()
        self.fetch: Callable[[bytes, int], bytes | Lease | None] = server.store.fetch
        """How this client's reads find a value; CLIENT NO-TOUCH exchanges it."""
        self.at_end: list[Callable[[], None]] = []
        """What others want done once the connection has gone and every byte of it has been dealt with."""
        self.watching: set[tuple[int, bytes]] = NO_NAMES
        self.watched_alive: set[tuple[int, bytes]] = NO_NAMES
        """Those of the watched keys that were there: one that is gone has changed, even if no command saw it go."""
        self.channels: set[bytes] = NO_NAMES
        self.patterns: set[bytes] = NO_NAMES
        self.shard_channels: set[bytes] = NO_NAMES
        self.get_buffer = self._parser.buffer  # type: ignore[method-assign]  # asked for each read: no frame in between
        self._low_water = LowWater()
        self._unsent = bytearray()  # what goes out behind the rest that the transport keeps, in one write
        self._backlog = NO_BACKLOG  # only for transports that copy
        self._lends = server.transport_lends
        self._tiered = server.store.below is not None

    # ---- what handlers call --------------------------------------------------------------------------------------

    def reconsider(self) -> None:
        server, parser = self.server, self._parser
        parser.authenticated = self.authenticated
        parser.bulk_bytes_max = server.bulk_bytes_max
        parser.query_bytes_max = server.query_bytes_max
        self.observed = server.observed
        self._may_run = (
            self.authenticated
            and self.user.unrestricted
            and self.transaction is None
            and self.reply_mode == "on"
            and not (self.subscriptions and self.resp == 2)
            and not self.refused
            and not server.watches_every_command
        )

    def speak(self, resp: int) -> None:
        self.resp = resp
        self.said_hello = True
        self.nil = NULL if resp == 3 else NULL_BULK
        self.reconsider()

    def authenticate(self, user: User) -> None:
        self.user = user
        self.authenticated = True
        self.reconsider()

    def forget_authentication(self) -> None:
        self.user = self.server.acl.default
        self.authenticated = self.user.needs_no_password
        self.reconsider()

    def refuse_payload(self, why: bytes) -> None:
        self.refused, self._may_run = why, False

    def wait(self, reason: Reason = Reason.COMMAND) -> Blocked:
        return self.server.blocked.block(self, reason)

    def turns_for_others(self) -> Iterator[Blocked]:
        if self.transaction is None:
            pending = self.wait(Reason.YIELD)
            asyncio.get_running_loop().call_soon(pending.unblock, b"")
            yield pending

    def go_on(self, reply: Reply) -> None:
        asyncio.get_running_loop().call_soon(self._go_on, reply)

    def postpone(self, args: list[Argument], pending: Blocked) -> Blocked:
        self._commands, pending.runs_again = iter([args, *self._commands]), True
        return pending

    def upcoming(self) -> Iterator[list[Argument]]:
        waiting = list(self._commands)
        self._commands = iter(waiting)
        return iter(waiting)

    @property
    def pending_bytes(self) -> int:
        self.count_received()
        return self._parser.pending_bytes

    def held(self) -> Held:
        self.count_received()
        parser, queued = self._parser, self.transaction
        unread, free, argv, in_arena = parser.memory()
        if self._paused or self.waiting is not None:
            for args in copy(self._commands):  # it goes on from where it is
                argv += sum(ARGUMENT_BYTES + len(arg) for arg in args if isinstance(arg, bytes))
        reserved = self.server.parts.held_by(self)
        lent = sum([lease.length for lease in self._lent if lease.offset is not None]) if self._lent else 0
        unsent = self.unsent_bytes
        in_queue = 0 if queued is None else queued.arena_bytes
        return Held(
            qbuf=unread,
            qbuf_free=free,
            argv=argv,
            multi=(0 if queued is None else queued.held_bytes) + WATCHED_BYTES * len(self.watching),
            rbs=self._reply_bytes,
            omem=unsent,
            subscribed=WATCHED_BYTES * self.subscriptions,
            reserved=reserved,
            arena=in_arena + in_queue + reserved + min(lent, unsent + self._reply_bytes),
        )

    @property
    def reservations(self) -> list[Reservation]:
        queued = [] if self.transaction is None else self.transaction.reservations
        return [*self._parser.reservations, *queued]

    @property
    def is_receiving(self) -> bool:
        return bool(self._parser.reservations)

    @property
    def may_be_idle(self) -> bool:
        return not (self.subscriptions or self.waiting is not None or self.id in self.server.monitors)

    def hold(self, lease: Lease) -> None:
        self._lent.append(lease)

    def push(self, message: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._pushes.append(message)
        self._push_bytes += len(message)
        if not self._paused and not self._answering and self._stream is None:
            self._send_pushes()
        elif self._is_behind:
            self._check_output_limit()

    def drop_lent(self, since: int) -> None:
        dropped, self._lent[since:] = self._lent[since:], []
        for lease in dropped:
            lease.release()

    @property
    def lent(self) -> int:
        return len(self._lent)

    def begin_answer(self) -> None:
        self._answering = True

    def end_answer(self, reply: Answer) -> Answer:
        self._answering = False
        if not self._pushes or not isinstance(reply, bytes | list):
            return reply
        return reply + self._take_pushes() if isinstance(reply, bytes) else [*reply, self._take_pushes()]

    def close(self) -> None:
        if self._transport is not None:
            self._fd = -1
            self._transport.abort()

    def finish(self) -> None:
        self.close_after_reply = True
        if self._holds_back:
            self._send_held_back()
        if not self._is_behind and self._transport is not None:
            self._fd = -1
            self._transport.close()

    @property
    def unsent_bytes(self) -> int:
        waiting = sum(map(len, self._backlog)) + len(self._unsent) + self._push_bytes
        if self._splicer is not None:
            waiting += self._splicer.unsent_bytes
        waiting += 0 if self.sending is None else self.sending.left_bytes
        return waiting + (0 if self._transport is None else self._transport.get_write_buffer_size())

    @property
    def is_caught_up(self) -> bool:
        return not (self._replies or self._pushes or self._is_behind or self.unsent_bytes)

    @property
    def slow_since_s(self) -> float:
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

    # ---- asyncio.BufferedProtocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take in a client that has connected, or turn it away."""
        # Not an isinstance check: uvloop's transports do not inherit from asyncio's.
        transport = cast(asyncio.Transport, transport)
        self._open_outgoing(transport)
        sock = transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            self.addr = self.laddr = f"{unix_name(transport.get_extra_info('sockname'))}:0"
        else:
            self.addr = address_of(transport.get_extra_info("peername"))
            self.laddr = address_of(transport.get_extra_info("sockname"))
            self._low_water = LowWater(None if self.encrypted else transport)
        if (refusal := self.server.admit(self)) is not None:
            self.close_after_reply = True  # and nothing is run of what it may have sent already
            transport.write(refusal)
            transport.close()

    def _run(self, nbytes: int) -> None:
        """Run what `nbytes` that have arrived complete and send the replies: all that `buffer_updated` leaves, which is
        in _hot.pyx.

        In one frame: what is the same for a run of equal commands (which pipelines are) is looked up once, and a run is
        entered into the statistics as one.
        """
        replies, checks, serves = self._replies, self._checks, None
        current: Command | None = None
        handler: Handler | None = None  # of `current`, unless its calls go through process_command
        argc = calls = 0
        self._writes_before = self.store.writes
        began_ns = perf_counter_ns()
        if self._paused or self.waiting is not None:
            # While it waits a client is read a little on, or it could go without being noticed; and TLS may bring bytes
            # that it had read before reading was paused.
            if not self._parser.put_by(nbytes):
                self._transport.pause_reading()  # type: ignore[union-attr]
            return
        while not self.close_after_reply:  # it is set when QUIT's own reply had to wait
            for args in self._commands:
                command = SPELLINGS.get(args[0])  # type: ignore[arg-type]
                if command is not current or len(args) != argc:
                    if calls:
                        began_ns = self.account(current, calls, began_ns)
                    current, argc, calls = command, len(args), 0
                    handler = command.handler if command is not None and argc in command.plain else None
                    if self._tiered and command is not None and command.held_up and (argc, command.name) != (3, "set"):
                        handler = None
                    serves = None if checks is None else checks.get(args[0])  # type: ignore[arg-type]
                if handler is not None and self._may_run and (serves is None or serves(args)):  # type: ignore[arg-type]
                    calls += 1
                    try:
                        reply: Answer = handler(self, args)  # type: ignore[arg-type]
                    except Exception:
                        replies.append(self.apologize(args))
                        break
                    if type(reply) is bytes:
                        if reply[0] == ERROR:
                            self.count_failure(current, reply)
                        replies.append(reply)
                        continue
                else:
                    if calls:
                        self.account(current, calls, began_ns)
                        calls = 0
                    reply = process_command(self, args)
                    current = handler = None  # both: an unknown command is None too, and must not find a handler here
                    began_ns = perf_counter_ns()
                if type(reply) is bytes:
                    replies.append(reply)
                    self._reply_bytes += len(reply)
                elif isinstance(reply, list):
                    replies += reply
                    self._reply_bytes += sum(map(len, reply))
                elif isinstance(reply, Blocked):
                    self.waiting = reply
                    calls -= bool(calls) and reply.runs_again  # it counts when it runs again
                    break
                else:
                    self._stream = cast("Iterator[Reply | Blocked]", reply)
                    complete = self._pump()
                    replies = self._replies
                    if not complete:
                        break
                if self._reply_bytes >= REPLY_BYTES_HIGH:  # a slow reader must not gather COMMAND a thousand times
                    self._flush()
                    replies = self._replies
                    if self._paused:
                        break
                if self.close_after_reply:
                    break
            if self._paused or self.waiting is not None or self.close_after_reply:
                break
            try:
                commands = self._parser.take(nbytes)
            except ProtocolError as broken:
                self.fail(broken)
                break
            if not commands:
                break
            nbytes = 0
            self._commands = iter(commands)
        if calls:
            self.account(current, calls, began_ns)
        self._end_turn()

    def note_slow(self, args: list[bytes], took_ns: int) -> None:
        """Tell of a plain command that took longer than the slow log or LATENCY allows."""
        self.server.note_slow(self, SPELLINGS[args[0]], cast("list[Argument]", args), took_ns)

    def _end_turn(self) -> None:
        """Send what was gathered, and see what is next."""
        if self.observed and self.server.tracking.changed and not self._paused:
            self.begin_answer()  # caches in broadcast mode are told before the client that wrote hears that it has
            self.server.tracking.deliver()
            self._replies.append(cast(bytes, self.end_answer(b"")))
        if replies := self._replies:
            if self._lent:
                self._flush()
            else:
                self._replies, self._reply_bytes = [], 0
                whole = replies[0] if len(replies) == 1 else b"".join(replies)
                if self._is_behind:
                    self._send(whole)
                else:  # the same without a frame
                    self.output_bytes += len(whole)
                    self.writes += 1
                    self._transport.write(whole)  # type: ignore[union-attr]
        if self._pushes and not self._paused and self._stream is None:
            self._send_pushes()
        if self._is_behind and self.close_after_reply:
            self._pause()
        if self._paused:
            if self._transport is not None and not self._transport.is_closing():
                self._transport.pause_reading()
        elif (self.close_after_reply or self._ended) and not self._is_behind and self.waiting is None:
            self._hang_up()
        if self._waiting_for_room:
            self.server.admission.admit()
        self._mind_body()

    def _mind_body(self) -> None:
        """See to it that what is missing of a value is received as its length asks for."""
        missing = self._parser.missing
        if missing < REST_BYTES_MIN or not self._receive_elsewhere(missing):
            self._low_water.expect(missing)

    def rest(self) -> None:
        if self.receiving is None:  # else the mark is the thread's
            self._low_water.expect(0)
        if self._is_behind:
            self._check_output_limit()  # whose soft limit is one of time
        if self._parser.rest() and not self._paused:
            if self.waiting is None:
                self.buffer_updated(0)
            elif self.id in self.server.blocked.timeouts and self._parser.put_by(0, self.server.room_behind_bytes):
                self._resume_reading()

    def eof_received(self) -> bool:
        """The client sends no more; what it has sent is still answered, but for what would still have to wait."""
        self._ended = True
        self.rest()
        if not self._is_behind and not waits_for(self.waiting, (Reason.DISK_READ,)):
            self._hang_up()
        return not self.encrypted  # TLS knows no half-closed connection: it ends when what is written has gone

    def connection_lost(self, exc: Exception | None) -> None:
        """End every hold of a connection that is gone, whatever state it was in."""
        # With its callback, the cycle that would leave this to the collector.
        self._parser.abandon(keep=None if self.receiving is None else self.receiving.hold)
        self.give_back([arg for args in self._commands for arg in args])
        if self.transaction is not None:
            self.transaction.discard()
        if self.waiting is not None:
            self.waiting.cancel()
        self._close_outgoing()
        while self.at_end:  # emptied, since what is called may know the session: a cycle for the collector
            self.at_end.pop(0)()
        self.server.dismiss(self)

    def resume_writing(self) -> None:
        """Everything written has left the process."""
        if self._all_sent() and self.waiting is None:
            self._go_on(b"")

    def _go_on(self, reply: Reply) -> None:
        """Run on after a halt, with the reply that was waited for: until now nothing may overtake it."""
        self.waiting = None
        if self._transport is None:
            return
        if reply:
            self._replies += [reply] if isinstance(reply, bytes) else reply
        if self._paused or self.receiving is not None or (self._stream is not None and not self._pump()):
            return
        self._run_on(0)

    def _run_on(self, received: int) -> None:
        """Run what is there with so many bytes more, and read on, unless the client has to wait."""
        self.buffer_updated(received)
        if not self._paused and self.waiting is None and self.receiving is None:
            self._resume_reading()

    def _open_payload(self, args: list[Argument], length: int) -> Room | None:
        """Where a payload of the command being read is received; a client that must wait for room waits from now on."""
        room = self.server.admission.open_payload(self, args, length)
        if isinstance(room, Blocked):
            self.waiting = room
        return room

    def _receive_elsewhere(self, missing: int) -> bool:
        """Have a thread receive what is missing of a value, if that is possible and worth it: another client's value
        moves too."""
        if self.receiving is not None:
            return True
        if missing < self._left_bytes:  # the same value's as last time
            self._left_bytes = missing + 1
            return False
        self._left_bytes = 0
        server, transport, unfilled = self.server, self._transport, self._parser.unfilled
        if not server.io_pool.has_room or unfilled is None or transport is None or transport.is_closing():
            return False
        if self._paused or self.waiting is not None or self.close_after_reply:
            return False
        if not (server.receivers.comes_beside(self) or server.senders.behind or server.admission.is_busy_beside(self)):
            return False
        self._low_water.expect(0)
        if not server.receivers.begin(self, *unfilled):
            return False
        transport.pause_reading()
        return True

    def count_received(self) -> None:
        if self.receiving is not None:
            nbytes = self.receiving.uncounted()
            self.input_bytes += nbytes
            self._parser.put_by(nbytes)

    def received(self, receiving: Receiving) -> None:
        """The thread is done."""
        self.receiving = None
        if self._transport is None:  # the connection has gone before it
            receiving.hold.abort()
            self.server.admission.admit()
        elif receiving.has_failed:
            self.close()
        elif not self._transport.is_closing():
            nbytes = receiving.uncounted()
            self._left_bytes = self._parser.missing - nbytes + 1  # if the thread has left a rest, that is the loop's
            self._run_on(nbytes)

    # ---- commands in, replies out --------------------------------------------------------------------------------

    def describe(self) -> bytes:
        return describe(self)

    def call(self, command: Command, args: list[Argument]) -> Answer:
        return call(self, command, args)

    def account(self, command: Command | None, calls: int, began_ns: int) -> int:
        assert command is not None
        now_ns = perf_counter_ns()
        stats = self.server.stats
        record = stats.commands.get(command.name) or stats.command(command.name)
        record.observe(calls, now_ns - began_ns)
        if command.writes and not self.unsaved_since:
            self.unsaved_since = self._writes_before + 1
        stats.commands_processed += calls
        self.last_command = command.name
        self.last_command_s = now_ns / 1e9  # on Linux perf_counter and monotonic are one clock
        return now_ns

    def count_failure(self, command: Command | None, reply: bytes) -> None:
        assert command is not None
        self.server.stats.count_error(reply)
        self.server.stats.command(command.name).failed_calls += 1

    @staticmethod
    def give_back(args: list[Argument]) -> None:
        for arg in args:
            if isinstance(arg, Reservation):
                arg.abort()

    def apologize(self, args: list[Argument]) -> bytes:
        log.exception("command %r failed; its client %s is closed", args[0], self.addr)
        self.server.stats.handler_exceptions += 1
        self.give_back(args)
        self.close_after_reply = True
        return error("ERR internal error")

    def fail(self, broken: ProtocolError) -> None:
        self._parser.abandon()
        self.close_after_reply = True
        self.server.note_broken(self, broken)
        if not str(broken):  # hung up on at once, as by Redis: what was not sent by now is not sent
            self.drop_lent(0)
            self._replies, self._reply_bytes = [], 0
        if str(broken):
            reply = error(f"ERR Protocol error: {broken}".encode("latin-1"))  # it may quote any byte
            if self.reply_mode == "on":
                self._replies.append(reply)
            self.server.stats.count_error(reply)

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
                if isinstance(part, Blocked):
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
        if self._holds_back:
            self._send_held_back()
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
        """Set up how replies leave by this connection."""
        self._transport, self._loop = transport, asyncio.get_running_loop()
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
        if self._lends:
            self._fd = self.fd
        self._threaded_bytes_min = sys.maxsize if encrypted or self.server.io_pool.threads == 1 else REST_BYTES_MIN
        self._marked_bytes_min = LONG_BYTES if self.kind == "tcp" else sys.maxsize

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def peer_pid(self) -> int:
        assert self._transport is not None
        return peer_pid(self._transport.get_extra_info("socket"))

    def _close_outgoing(self) -> None:
        """End every hold behind replies that were to leave."""
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
        if self.receiving is not None:
            self.receiving.end()  # its room is given back then
        self._backlog = NO_BACKLOG
        self._unsent.clear()
        self._pushes.clear()
        self._push_bytes = 0
        self._stream = None
        self._paused = True
        self._transport, self._fd = None, -1
