"""One client: bytes in, commands run in their order, replies out.

Commands go one of two ways. Most are plain (short, O(1), from a client with nothing special about it) and run in the
hot loop of `buffer_updated`, in one frame. Everything else takes the careful way (process_command.py), which asks all
the questions that Redis asks before and after a command; `reconsider` decides, whenever a reason comes or goes, which
of the two this client's commands take.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Final, cast

from kvredis.server.acl.rules import User
from kvredis.server.commands.registry import SPELLINGS, Command, Handler, takes_payload
from kvredis.server.commands.transactions import Transaction
from kvredis.server.net.listeners import address_of, unix_name
from kvredis.server.net.rcvlowat import LowWater
from kvredis.server.protocol.parser import Parser
from kvredis.server.protocol.replies import NULL, NULL_BULK, Reply, error
from kvredis.server.protocol.request import ARGUMENT_BYTES, Argument, ProtocolError
from kvredis.storage.entry import Lease, Reservation

from .blocked import Answer, Pending
from .client import NO_NAMES
from .get_run import answer_gets
from .memory import WATCHED_BYTES, Held
from .output import REPLY_BYTES_HIGH, Outgoing
from .process_command import run_with_care

if TYPE_CHECKING:
    from kvredis.server.commands.tracking import Tracking
    from kvredis.server.server import Server

log = logging.getLogger(__name__)

ERROR: Final = ord("-")

NO_COMMANDS: Final[Iterator[list[Argument]]] = iter(())


class Session(Outgoing):
    """The protocol object of one connection; its public attributes are what command handlers read and set."""

    def __init__(self, server: "Server") -> None:
        super().__init__(server)
        self.store = server.store
        self.id: int = server.next_session_id()
        self.space, self.resp, self.said_hello = 0, 2, False
        self.nil = NULL_BULK
        self.authenticated = self.user.needs_no_password
        self.name = self.lib_name = self.lib_ver = b""
        self.at_end: list[Callable[[], None]] = []
        """What others want done once the connection has gone and every byte of it has been dealt with."""
        self.no_evict = self.no_touch = False
        self.created_s = self.last_command_s = monotonic()
        self.laddr: str = ""
        self.last_command = "NULL"
        self.input_bytes = self.reads = 0
        self.fetch: Callable[[bytes, int], bytes | Lease | None] = server.store.fetch
        """How this client's reads find a value; CLIENT NO-TOUCH exchanges it."""
        self.transaction: Transaction | None = None
        self.watching: set[tuple[int, bytes]] = NO_NAMES
        self.watch_broken = False  # a watched key has changed: EXEC will answer nil
        self.watched_alive: set[tuple[int, bytes]] = NO_NAMES
        """Those of the watched keys that were there: one that is gone has changed, even if no command saw it go."""
        self.channels: set[bytes] = NO_NAMES
        self.patterns: set[bytes] = NO_NAMES
        self.shard_channels: set[bytes] = NO_NAMES
        self.tracking: Tracking | None = None
        self.reply_mode = "on"
        self.observed = False  # a client wants to know of changes: keyspace events or client-side caches
        self.refused = b""  # the error for the command being read, if a payload of it could not be taken
        self.unsaved_since = 0
        """Number of the store's write from which on this client may have written what is not known to be on disk; 0:
        it has written nothing."""
        self._writes_before = 0  # the store's, when what is being run began to be run
        self._tiered = server.store.tiering is not None
        self._checks = None if server.cluster is None else server.cluster.checks
        self._parser = Parser(
            partial(server.claims.open_payload, self), takes_payload=takes_payload, scratches=server.scratches
        )
        self.get_buffer = self._parser.buffer  # type: ignore[method-assign]  # asked for each read: no frame in between
        self._waiting_for_room = server.claims.queue
        self._low_water = LowWater()
        self._commands = NO_COMMANDS  # parsed and not yet run
        self._ended = self._may_run = False  # the client has sent its last byte; the plain way is open

    # ---- what handlers call --------------------------------------------------------------------------------------

    def reconsider(self) -> None:
        """Find out anew whether this client's commands may take the plain way, and what its parser allows."""
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
        """Switch to RESP2 or RESP3: HELLO."""
        self.resp = resp
        self.said_hello = True
        self.nil = NULL if resp == 3 else NULL_BULK
        self.reconsider()

    def authenticate(self, user: User) -> None:
        """The client has proved to be `user`."""
        self.user = user
        self.authenticated = True
        self.reconsider()

    def forget_authentication(self) -> None:
        """Back to a new connection's rights: RESET."""
        self.user = self.server.acl.default
        self.authenticated = self.user.needs_no_password
        self.reconsider()

    def refuse_payload(self, why: bytes) -> None:
        """A payload of the command that is being read is not taken: the error for it, should nothing else be wrong."""
        self.refused, self._may_run = why, False

    def wait(self) -> Pending:
        """Take the place of a reply that comes later; the handler returns what this gives."""
        return Pending(self)

    def turns_for_others(self) -> Iterator[Pending]:
        """Give what a long handler yields between two of its steps, so that other clients have their turn: a wait until
        the loop's next turn, or nothing in a transaction, whose commands run without a gap."""
        if self.transaction is None:
            pending = self.wait()
            asyncio.get_running_loop().call_soon(pending.resolve, b"")
            yield pending

    def go_on(self, reply: Reply) -> None:
        """A reply that was waited for is there: for Pending alone. What follows runs in a turn of its own, because
        the code that answers may be in the middle of another client's command."""
        self.server.blocked.pop(self.id, None)
        asyncio.get_running_loop().call_soon(self._go_on, reply)

    def postpone(self, args: list[Argument], pending: Pending | None = None) -> Pending:
        """Run `args` again when the server resolves what this gives, with an empty reply: CLIENT PAUSE."""
        pending = pending or Pending(self)
        self._commands, pending.runs_again = iter([args, *self._commands]), True
        return pending

    def upcoming(self) -> Iterator[list[Argument]]:
        """The commands that are parsed and not yet run, in their order."""
        waiting = list(self._commands)
        self._commands = iter(waiting)
        return iter(waiting)

    @property
    def pending_bytes(self) -> int:
        """Bytes received and not yet run."""
        return self._parser.pending_bytes

    def held(self) -> Held:
        """What this client holds beside values, by kind."""
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
        """Room in the arena that this client holds for values that come in one command and are not yet stored."""
        queued = [] if self.transaction is None else self.transaction.reservations
        return [*self._parser.reservations, *queued]

    @property
    def is_receiving(self) -> bool:
        """Whether a value is coming in, which a shutdown waits for as it does for replies that go out."""
        return bool(self._parser.reservations)

    @property
    def may_be_idle(self) -> bool:
        """Whether a client that says nothing for long may be taken for forgotten."""
        return not (self.subscriptions or self.waiting is not None or self.id in self.server.monitors)

    # ---- asyncio.BufferedProtocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected: take it in or turn it away."""
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

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived (or, with 0, the client has caught up): run what they complete and send the replies.

        The hot path of the server, in one frame: what is the same for a run of equal commands (which pipelines are) is
        looked up once, and a run is entered into the statistics as one.
        """
        self.input_bytes += nbytes
        self.reads += 1
        replies, checks, serves = self._replies, self._checks, None
        current: Command | None = None
        handler: Handler | None = None  # of `current`, unless its calls need care
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
                    reply = run_with_care(self, args)
                    current = handler = None  # both: an unknown command is None too, and must not find a handler here
                    began_ns = perf_counter_ns()
                if type(reply) is bytes:
                    replies.append(reply)
                    self._reply_bytes += len(reply)
                elif isinstance(reply, list):
                    replies += reply
                    self._reply_bytes += sum(map(len, reply))
                elif isinstance(reply, Pending):
                    self.waiting = reply
                    calls -= bool(calls)  # a plain command that waits runs again, and counts then
                    break
                else:
                    self._stream = cast("Iterator[Reply | Pending]", reply)
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
            if not calls and len(commands) > 1 and self._may_run and checks is None:
                began_ns = answer_gets(self, commands, replies, began_ns)
            self._commands = iter(commands)
        if calls:
            self.account(current, calls, began_ns)
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
            self.server.claims.admit()
        self._low_water.expect(self._parser.missing)

    def rest(self) -> None:
        """Called every second or so, and when the client has sent its last byte."""
        self._low_water.expect(0)
        if self._is_behind:
            self._check_output_limit()  # whose soft limit is one of time
        if self._parser.rest() and not self._paused:
            if self.waiting is None:
                self.buffer_updated(0)
            elif self.id in self.server.blocked and self._parser.put_by(0, self.server.room_behind_bytes):
                self._resume_reading()

    def eof_received(self) -> bool:
        """The client sends no more; what it has sent is still answered, but for what would still have to wait."""
        self._ended = True
        self.rest()
        if not self._is_behind and not self.server.away.keeps_waiting(self):
            self._hang_up()
        return not self.encrypted  # TLS knows no half-closed connection: it ends when what is written has gone

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: every hold ends here, whatever state it was in."""
        self._parser.abandon()  # with its callback, the cycle that would leave this to the collector
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
        if self._paused or (self._stream is not None and not self._pump()):
            return
        self.buffer_updated(0)
        if not self._paused and self.waiting is None:
            self._resume_reading()

    # ---- commands in, replies out --------------------------------------------------------------------------------

    def account(self, command: Command | None, calls: int, began_ns: int) -> int:
        """Enter a run of calls into the statistics; returns the time now, in ns."""
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
        """Note that a handler has answered with an error."""
        assert command is not None
        self.server.stats.count_error(reply)
        self.server.stats.command(command.name).failed_calls += 1

    @staticmethod
    def give_back(args: list[Argument]) -> None:
        """End the holds of a command that will not run."""
        for arg in args:
            if isinstance(arg, Reservation):
                arg.abort()

    def apologize(self, args: list[Argument]) -> bytes:
        """A handler has raised, which is a mistake of ours: nothing it brought may stay reserved, and the client, whose
        state the server does not know now, is sent away. The others are served on."""
        log.exception("command %r failed; its client %s is closed", args[0], self.addr)
        self.server.stats.handler_exceptions += 1
        self.give_back(args)
        self.close_after_reply = True
        return error("ERR internal error")

    def fail(self, broken: ProtocolError) -> None:
        """The protocol is broken: say so, if there is something to say, and hang up."""
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
