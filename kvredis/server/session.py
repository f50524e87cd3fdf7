"""One client: bytes in, commands run in their order, replies and lent payloads out.

WHY it holds leases: a reply that contains a view of the arena is written without a copy, and what the kernel does not
take at once stays *referenced* by the transport until the client has read far enough. So the Leases behind a batch of
replies are released when the transport's buffer is empty, never when the write was queued. The write buffer limit is 0:
the transport then says `pause_writing` for whatever is left over and `resume_writing` when the last byte has gone. In
between the session runs no further command and reads nothing, which also bounds what a slow reader can hold.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Final, cast

from kvredis.storage.entry import Lease, Reservation

from .commands import SPELLINGS, Command, Handler, lookup
from .parser import REFUSED, Argument, Parser, ProtocolError, Refused
from .replies import NO_AUTH, NULL, NULL_BULK, OUT_OF_MEMORY, Buffer, Reply, error

if TYPE_CHECKING:
    from .server import Server

log = logging.getLogger(__name__)

REPLY_BYTES_HIGH: Final = 1024 * 1024
"""Replies of a pipeline are gathered up to here before they are written: one system call, and one lease batch."""

SEND_BUFFER_BYTES: Final = 512 * 1024
"""SO_SNDBUF, which Linux doubles: measured best for pipelined reads, since bytes in flight then stay in the cache."""

SLICE_BYTES: Final = 256 * 1024
"""What a transport that copies the unsent rest of a write (asyncio's own) is given at a time."""

ERROR: Final = ord("-")


class Session(asyncio.BufferedProtocol):
    """The protocol object of one connection; its public attributes are what command handlers read and set."""

    def __init__(self, server: "Server") -> None:
        self.server = server
        self.store = server.store
        self.id = server.next_session_id()
        self.space = 0
        self.resp = 2
        self.nil = NULL_BULK
        self.name = b""
        self.user = b"default"
        self.lib_name = b""
        self.lib_ver = b""
        self.authenticated = not server.requirepass
        self.no_evict = False
        self.no_touch = False
        self.close_after_reply = False
        self.addr = ""
        self.laddr = ""
        self.created_s = self.last_command_s = monotonic()
        self.last_command = "NULL"
        self.input_bytes = 0
        self.output_bytes = 0
        self.fd = -1
        self.fetch: Callable[[bytes, int], bytes | Lease | None] = server.store.fetch
        """How this client's reads find a value; CLIENT NO-TOUCH exchanges it."""
        self._parser = Parser(self._open_payload, bulk_bytes_max=server.bulk_bytes_max)
        self._parser.authenticated = self.authenticated
        self.get_buffer = self._parser.buffer  # type: ignore[method-assign]  # asked for each read: no frame in between
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._refused = False  # the command being read brings a payload that there was no room for
        self._ended = False  # the client has sent its last byte
        self._commands: Iterator[list[Argument]] = iter(())  # parsed and not yet run
        self._may_run = self.authenticated  # no reason to look twice at a command before it runs
        self._replies: list[Buffer] = []
        self._reply_bytes = 0
        self._lent: list[Lease] = []
        self._backlog: deque[Buffer] = deque()  # only for transports that copy
        self._lends = server.transport_lends

    # ---- what handlers call --------------------------------------------------------------------------------------

    def hold(self, lease: Lease) -> None:
        """Keep a lease whose view is part of the reply being made until that reply has left the process."""
        self._lent.append(lease)

    def speak(self, resp: int) -> None:
        """Switch to RESP2 or RESP3: HELLO."""
        self.resp = resp
        self.nil = NULL if resp == 3 else NULL_BULK

    def authenticate(self, user: bytes) -> None:
        """The client has proved to be `user`."""
        self.user = user
        self.authenticated = self._parser.authenticated = self._may_run = True

    def forget_authentication(self) -> None:
        """Back to a new connection's rights: RESET."""
        self.user = b"default"
        self.authenticated = self._parser.authenticated = self._may_run = not self.server.requirepass

    def close(self) -> None:
        """Hang up now; what is not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """Hang up once what is queued has been sent."""
        self.close_after_reply = True
        if not self._paused and self._transport is not None:
            self._transport.close()

    @property
    def pending_bytes(self) -> int:
        """Bytes received and not yet run: `qbuf` of CLIENT LIST."""
        return self._parser.pending_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes of replies that the client has not taken yet: `omem` of CLIENT LIST."""
        waiting = sum(map(len, self._backlog))
        return waiting + (0 if self._transport is None else self._transport.get_write_buffer_size())

    # ---- asyncio.BufferedProtocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected: take it in or turn it away."""
        # Not an isinstance check: uvloop's transports do not inherit from asyncio's.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.fd = sock.fileno()
        if sock.family == socket.AF_UNIX:
            self.addr = self.laddr = f"{self.server.unixsocket}:0"
        else:
            self.addr = _address(transport.get_extra_info("peername"))
            self.laddr = _address(transport.get_extra_info("sockname"))
        refusal = self.server.admit(self)
        if refusal is not None:
            transport.write(refusal)
            transport.close()

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived (or, with 0, the client has caught up): run what they complete and send the replies.

        The hot path of the server, in one frame: what is the same for a run of equal commands (which pipelines are) is
        looked up once, and a run is entered into the statistics as one.
        """
        self.input_bytes += nbytes
        replies = self._replies
        current: Command | None = None
        handler: Handler | None = None  # of `current`, unless its calls need care
        argc = calls = 0
        began_ns = perf_counter_ns()
        while not self.close_after_reply:  # it is set when QUIT's own reply had to wait
            for args in self._commands:
                command = SPELLINGS.get(args[0])  # type: ignore[arg-type]
                if command is not current or len(args) != argc:
                    if calls:
                        began_ns = self._account(current, calls, began_ns)
                    current, argc, calls = command, len(args), 0
                    handler = None if command is None else command.plain_handler(argc)
                if handler is not None and self._may_run:
                    calls += 1
                    try:
                        reply = handler(self, args)  # type: ignore[arg-type]
                    except Exception:
                        reply = self._apologize(args)
                    if reply[0] == ERROR:
                        self._count_failure(current, reply)
                else:
                    reply = self._run_with_care(args)
                if type(reply) is bytes:
                    replies.append(reply)
                else:
                    replies += reply  # type: ignore[arg-type]
                    self._reply_bytes += sum(map(len, cast(list[Buffer], reply)))
                    if self._reply_bytes >= REPLY_BYTES_HIGH:
                        self._flush()
                        replies = self._replies
                        if self._paused:
                            break
                if self.close_after_reply:
                    break
            if self._paused or self.close_after_reply:
                break
            try:
                commands = self._parser.take(nbytes)
            except ProtocolError as broken:
                self._fail(str(broken))
                break
            if not commands:
                break
            nbytes = 0
            self._commands = iter(commands)
        if calls:
            self._account(current, calls, began_ns)
        if replies:
            if self._lent:
                self._flush()
            else:
                self._replies = []
                whole = replies[0] if len(replies) == 1 else b"".join(replies)
                self.output_bytes += len(whole)
                self._transport.write(whole)  # type: ignore[union-attr]
        if self._paused:
            if self._transport is not None and not self._transport.is_closing():
                self._transport.pause_reading()
        elif self.close_after_reply or self._ended:
            self._hang_up()

    def eof_received(self) -> bool:
        """The client sends no more; what it has sent is still answered."""
        self._ended = True
        if not self._paused:
            self._hang_up()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: every hold ends here, whatever state it was in."""
        self._parser.abandon()
        self._release()
        self._backlog.clear()
        self._paused = True
        self._transport = None  # with the parser's callback, the cycle that would leave this to the collector
        self.server.dismiss(self)

    def pause_writing(self) -> None:
        """The transport keeps a rest that the client is too slow to take."""
        self._paused = True

    def resume_writing(self) -> None:
        """Everything written has left the process."""
        self._paused = False
        if self._backlog:
            self._send_slices()
            if self._paused or self._backlog:
                return
        self._release()
        self.buffer_updated(0)
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # ---- commands in, replies out --------------------------------------------------------------------------------

    def _account(self, command: Command | None, calls: int, began_ns: int) -> int:
        """Enter a run of calls into the statistics; returns the time now, in ns."""
        assert command is not None
        now_ns = perf_counter_ns()
        stats = self.server.stats
        record = stats.commands.get(command.name) or stats.command(command.name)
        record.calls += calls
        record.nanoseconds += now_ns - began_ns
        stats.commands_processed += calls
        self.last_command = command.name
        self.last_command_s = now_ns / 1e9  # on Linux perf_counter and monotonic are one clock
        return now_ns

    def _count_failure(self, command: Command | None, reply: Reply) -> None:
        """Note that a handler has answered with an error."""
        assert command is not None
        assert isinstance(reply, bytes)
        self.server.stats.count_error(reply)
        self.server.stats.command(command.name).failed_calls += 1

    def _run_with_care(self, args: list[Argument]) -> Reply:
        """A command that is not plain: a subcommand, an odd spelling, one that may not run, or none at all."""
        refused = self._refused and REFUSED in args
        if refused:  # whatever the answer is, the next command starts afresh
            self._refused, self._may_run = False, self.authenticated
        words = [arg if isinstance(arg, bytes) else b"" for arg in args]
        command = lookup(words)
        if not isinstance(command, Command):
            known = SPELLINGS.get(words[0]) or SPELLINGS.get(words[0].upper())
            return self._reject(command, args, None if known is None or known.subcommands else known)
        if not self.authenticated and "no_auth" not in command.flags:
            return self._reject(NO_AUTH, args, command)
        if refused:
            return self._reject(OUT_OF_MEMORY, args, command)
        began_ns = perf_counter_ns()
        self.last_command = command.name
        try:
            reply = command.handler(self, args)  # type: ignore[arg-type]  # payloads are the handler's own business
        except Exception:
            reply = self._apologize(args)
        self._account(command, 1, began_ns)
        if reply[0] == ERROR:
            self._count_failure(command, reply)
        return reply

    def _reject(self, reply: bytes, args: list[Argument], command: Command | None = None) -> bytes:
        """Answer with an error instead of running the command; payloads it brought are given back."""
        self._give_back(args)
        self.server.stats.count_error(reply)
        if command is not None:
            self.server.stats.command(command.name).rejected_calls += 1
        return reply

    @staticmethod
    def _give_back(args: list[Argument]) -> None:
        for arg in args:
            if isinstance(arg, Reservation):
                arg.abort()

    def _apologize(self, args: list[Argument]) -> bytes:
        """A handler has raised, which is a mistake of ours: nothing it brought may stay reserved."""
        log.exception("command %r failed", args[0])
        self._give_back(args)
        return error("ERR internal error")

    def _open_payload(self, args: list[Argument], length: int) -> Reservation | Refused | None:
        """Whether argument number len(args) of the command being read goes into the arena, and where."""
        name = args[0] if args else None
        command = SPELLINGS.get(name) or SPELLINGS.get(name.upper()) if isinstance(name, bytes) else None
        if command is None or not command.payload_args or not self.authenticated:
            return None
        first, step = command.payload_args
        at = len(args)
        if at != first and not (step and at > first and (at - first) % step == 0):
            return None
        key = args[at - 1] if step else args[1]
        if not isinstance(key, bytes):
            return None
        reservation = self.store.reserve(key, length, self.space)
        if reservation is None:
            self._refused, self._may_run = True, False
            return REFUSED
        return reservation

    def _fail(self, text: str) -> None:
        """The protocol is broken: say so, if there is something to say, and hang up."""
        self._parser.abandon()
        self.close_after_reply = True
        if text:
            reply = error(f"ERR Protocol error: {text}")
            self._replies.append(reply)
            self.server.stats.count_error(reply)

    def _hang_up(self) -> None:
        """Close once everything written is out. Not at once: closed within resume_writing, asyncio's own transport
        reports its end twice."""
        if self._transport is not None and not self._transport.is_closing():
            asyncio.get_running_loop().call_soon(self._transport.close)

    def _flush(self) -> None:
        """Hand the gathered replies to the transport; what it lent is released when it says that they are gone."""
        assert self._transport is not None
        replies, self._replies = self._replies, []
        sent_bytes = self._reply_bytes
        self._reply_bytes = 0
        if self._lends or not self._lent:
            self._transport.writelines(replies)
        else:
            self._backlog.extend(replies)
            self._send_slices()
        self.output_bytes += sent_bytes
        if self._lent and not self._paused and not self._backlog:
            self._release()

    def _send_slices(self) -> None:
        """Give a copying transport no more than it can send soon, so that no payload is ever copied whole."""
        assert self._transport is not None
        while self._backlog and not self._paused:
            piece = self._backlog.popleft()
            if len(piece) > SLICE_BYTES:
                view = memoryview(piece)
                self._backlog.appendleft(view[SLICE_BYTES:])
                piece = view[:SLICE_BYTES]
            self._transport.write(piece)

    def _release(self) -> None:
        lent, self._lent = self._lent, []
        for lease in lent:
            lease.release()


def _address(name: tuple[object, ...]) -> str:
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
