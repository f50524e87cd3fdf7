"""Large replies on unix sockets without a copy on our side: the arena's own pages are lent to the socket.

vmsplice puts references to the pages into a pipe, splice moves them on into the socket, and the kernel copies once:
when the client receives. For large values that halves the CPU of a send, whatever the pages are.

WHY it is safe for a client that receives (read, readv, recv, recvmsg, io_uring's like): until then the client would see
what lies in those pages at that time. So the Leases of a spliced reply are held on, which keeps the extents of blocks
that were overwritten, deleted or evicted meanwhile from being used again. How far the client is: what is sent on a unix
socket stays charged to its sender until the receiver has copied it all and it is freed, each buffer with at least its
length. TIOCOUTQ tells that sum, so that `sent - TIOCOUTQ` is a lower bound of what has been received, in order; a
lease ends when that bound has passed the end of its reply, and not before. This holds beyond the connection: what a
client has not read can still be read after we hung up. So we keep a duplicate of the socket, shut down, and ask it;
when the client closes its end, or dies, the kernel frees what is in there, and the sum is 0. All that clients keep in
this way is at most a SHARE of the arena; beyond it replies are sent with a copy, as on every other transport.

WHY it must be asked for: a client that does not receive but splices on (HAProxy, systemd-socket-proxyd: from the socket
into a pipe into another socket) holds pages that no account of ours shows, and would hand on what is written there
later. It cannot change a page, as spliced pages are never written in place. But it may read what was not meant for it,
and what is behind it would take wrong bytes for right ones. So KV.SPLICE asks for two things: the promise to receive,
by a user who may read every key anyhow; and the id of the process that speaks, which is compared with that of the
process that connected (SO_PEERCRED), so that no process between the two is taken for the client. `CONFIG SET
unix-splice yes` believes it of every client on a unix socket, `no` of none.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import socket
import struct
import termios
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple, Protocol

from kvredis.server.client.client import Host
from kvredis.server.protocol.replies import Buffer
from kvredis.storage.entry import Lease
from kvredis.storage.memory.copy import address_of

# ---- lent pages ------------------------------------------------------------------------------------------------------
#
# From the arena into a unix socket without a copy, by way of a pipe: what zerocopy.py asks the kernel for.
#
# Python has splice but no vmsplice, so that is called through ctypes, which gives up the GIL meanwhile.


PIPE_BYTES: Final = 1024 * 1024
PIPE_BYTES_MIN: Final = 256 * 1024
"""What a pipe is to hold, a page a slot (the most that an ordinary user may have), and what makes it worth while: who
has very many pipes is given tiny ones."""

_NONBLOCK: Final = 2  # SPLICE_F_NONBLOCK of <fcntl.h>
_PEERCRED: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_vmsplice = getattr(_libc, "vmsplice", None)
if _vmsplice is not None:
    _vmsplice.argtypes = (ctypes.c_int, ctypes.POINTER(_IoVec), ctypes.c_size_t, ctypes.c_uint)
    _vmsplice.restype = ctypes.c_ssize_t


def unread_bytes(sock: socket.socket) -> int:
    """At least what the peer has yet to receive of what was sent on a unix socket; 0 when that is nothing."""
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


CAN_LEND: Final = _vmsplice is not None
"""Whether this system can do it at all."""


class Pipe:
    """Where pages are on their way from an arena to a socket. OSError when there is none to be had."""

    def __init__(self) -> None:
        self._span = _IoVec()
        self._span_pointer = ctypes.pointer(self._span)
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with suppress(PermissionError):
                fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            if fcntl.fcntl(self.write_fd, fcntl.F_GETPIPE_SZ) < PIPE_BYTES_MIN:
                raise OSError(errno.EPERM, "the pipe is too short")
        except OSError:
            self.close()
            raise

    def put(self, piece: bytes | memoryview) -> int:
        """Copy the beginning of a piece in. Returns how many bytes; BlockingIOError when the pipe is full."""
        return os.write(self.write_fd, piece)

    def lend(self, address: int, nbytes: int) -> int:
        """Put in references to the pages of the beginning of a piece of memory, which must stay what it is. Returns how
        many bytes, 0 when the pipe is full; OSError when the kernel will not."""
        if _vmsplice is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        span = self._span
        span.base, span.length = address, nbytes
        lent = int(_vmsplice(self.write_fd, self._span_pointer, 1, _NONBLOCK))
        if lent < 0 and (code := ctypes.get_errno()) != errno.EAGAIN:
            raise OSError(code, os.strerror(code))
        return max(lent, 0)

    def move(self, sock: socket.socket, nbytes: int) -> int:
        """Move as much of `nbytes` into the socket as it takes; BlockingIOError when it is full, OSError when it is
        closed."""
        return os.splice(self.read_fd, sock.fileno(), nbytes, flags=_NONBLOCK)

    def close(self) -> None:
        """Close both ends; references to pages that are still inside end."""
        os.close(self.read_fd)
        os.close(self.write_fd)


def peer_pid(sock: socket.socket) -> int:
    """The process that has connected this unix socket, in our pid namespace; 0 for one outside of it."""
    return int(_PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))[0])


log = logging.getLogger(__name__)

VALUE_BYTES_MIN: Final = 512 * 1024
"""How long the values of a reply must be on average. Measured on 2 cores, with 4 KiB pages and with hugepages: from
here on the server needs half of the CPU and the client has its bytes as soon or sooner; at 256 KiB a copy is as cheap,
and sooner there, because splicing wakes the reader every 64 KiB."""

LEND_BYTES_MIN: Final = 16 * 1024
"""Shorter pieces are copied into the pipe: headers, line ends, small values."""

SHARE: Final = 4
"""A quarter of the arena may be held for clients that have not received yet what was lent to their sockets."""

PIPES_MAX: Final = 64
"""As many replies may be half in a pipe at a time; what comes then is copied. A few idle pipes wait for the next."""
IDLE_PIPES_MAX: Final = 4

LOOK_HOLDERS_MAX: Final = 16
"""How many clients are asked what they have received before room is looked for; all of them are ten times a second."""

TURN_BYTES: Final = 4 * 1024 * 1024
"""What one client is sent before others have their turn, should it read as fast as we splice."""


class _Span(NamedTuple):
    """Bytes of the arena, whose pages are to be lent."""

    address: int
    nbytes: int


class _Held(NamedTuple):
    """A reply that is in the socket: where in all that was spliced it ends, and what it has lent."""

    end: int
    leases: list[Lease]
    nbytes: int


class Splicer:
    """One client's way for spliced replies, and the leases of those that it has not received."""

    def __init__(self, splicing: Splicing, fd: int) -> None:
        self._splicing = splicing
        self._sock = socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM)  # a duplicate
        self._pieces: deque[bytes | memoryview | _Span] = deque()
        self._pipe: Pipe | None = None
        self._piped_bytes = 0
        self._sent_bytes = 0
        self._charged_bytes = 0  # of the reply that is under way
        self._held: deque[_Held] = deque()
        self.has_ended = False

    def fileno(self) -> int:
        """For the event loop: a descriptor of its own, as the transport lets no other code watch its own."""
        return self._sock.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether a reply is under way."""
        return self._pipe is not None

    @property
    def unsent_bytes(self) -> int:
        """What of the reply under way is not in the socket."""
        lengths = (each.nbytes if isinstance(each, _Span) else len(each) for each in self._pieces)
        return self._piped_bytes + sum(lengths)

    def begin(self, pieces: list[Buffer], leases: list[Lease]) -> bool:
        """Take a reply in; False when it cannot go this way now, and then nothing has happened. All before it must be
        in the socket."""
        self.collect()
        nbytes = sum(lease.entry.extent.length for lease in leases)
        self._pipe = self._splicing.take_pipe(nbytes)
        if self._pipe is None:
            return False
        self._charged_bytes = nbytes
        self._pieces.extend(map(self._splicing.as_piece, pieces))
        self._splicing.stats.spliced_bytes += sum(map(len, pieces))  # at once, as output_bytes: what is left only grows
        return True

    def advance(self) -> bool:
        """Move what the socket takes; True when all of it is there. OSError when the client has gone."""
        moved_bytes = 0
        while moved_bytes < TURN_BYTES:
            self._fill()
            if not self._piped_bytes:
                self._splicing.put_pipe(self._pipe)
                self._pipe = None
                return True
            assert self._pipe is not None
            try:
                moved = self._pipe.move(self._sock, self._piped_bytes)
            except BlockingIOError:
                return False
            self._piped_bytes -= moved
            self._sent_bytes += moved
            moved_bytes += moved
        return False

    def keep(self, leases: list[Lease]) -> None:
        """Hold what a reply has lent, which is in the socket, or as much of it as ever will be, until it is
        received."""
        self._held.append(_Held(self._sent_bytes, leases, self._charged_bytes))
        self._charged_bytes = 0
        self._splicing.holders.setdefault(self)

    def collect(self) -> None:
        """End the leases of what has been received."""
        if not self._held:
            return
        received = self._sent_bytes - unread_bytes(self._sock)
        while self._held and self._held[0].end <= received:
            self._let_go(self._held.popleft())
        if not self._held:
            self._splicing.holders.pop(self, None)
            if self.has_ended:
                self._sock.close()

    def end(self, leases: list[Lease]) -> None:
        """End with the connection; what of it is still to be read stays as it is, `leases` of half a reply too."""
        if self._pipe is not None:
            self._splicing.put_pipe(self._pipe, empty=False)
            self._pipe = None
            self._pieces.clear()
            self._piped_bytes = 0
        with suppress(OSError):  # it has been already
            self._sock.shutdown(socket.SHUT_RDWR)  # our duplicate would keep it open for the client
        self.has_ended = True
        if leases:
            self.keep(leases)
        if self._splicing.has_ended or not self._held:
            self.abandon()
        else:
            self.collect()

    def abandon(self) -> None:
        """Close what is ours. If something is held, then the server ends and does not write to the arena again."""
        while self._held:
            self._let_go(self._held.popleft())
        self._splicing.holders.pop(self, None)
        self._sock.close()

    def _fill(self) -> None:
        """Put into the pipe what fits."""
        pipe, pieces = self._pipe, self._pieces
        assert pipe is not None
        while pieces:
            piece = pieces[0]
            if isinstance(piece, _Span):
                try:
                    moved = pipe.lend(piece.address, piece.nbytes)
                except OSError as refused:
                    log.debug("pages cannot be lent, copying instead: %s", refused)
                    pieces[0] = self._splicing.view_of(piece)
                    continue
                rest: bytes | memoryview | _Span = _Span(piece.address + moved, piece.nbytes - moved)
                left = piece.nbytes - moved
            else:
                try:
                    moved = pipe.put(piece)
                except BlockingIOError:
                    return
                left = len(piece) - moved
                rest = memoryview(piece)[moved:]
            self._piped_bytes += moved
            if left:
                pieces[0] = rest
                return
            pieces.popleft()

    def _let_go(self, held: _Held) -> None:
        self._splicing.held_bytes -= held.nbytes
        for lease in held.leases:
            lease.release()


class LocalStream(Protocol):
    """What is asked of a client before its replies are spliced."""

    asked_to_splice: bool
    is_local_stream: bool


class Splicing:
    """Which clients' replies may be spliced, the pipes for it, and what is held until clients have received it."""

    def __init__(self, server: Host) -> None:
        self.stats = server.stats
        self._server = server
        arena = server.store.arena
        self._start, self._end = arena.address, arena.address + arena.nbytes
        self._bytes_max = arena.nbytes // SHARE
        self._idle: list[Pipe] = []
        self._pipes_in_use = 0
        self.has_ended = False
        self.value_bytes_min = VALUE_BYTES_MIN
        self.mode = "asked"
        """asked: clients that said KV.SPLICE; yes: all on unix sockets; no: none."""
        self.held_bytes = 0
        """Extents of the arena behind replies that were spliced and are not known to have been received."""
        self.holders: dict[Splicer, None] = {}
        """Clients, and those whose connection is gone, with replies that they have not received; who has for longest
        first."""
        server.store.end_holds, server.store.holders = self.collect_some, self.holders

    def set_mode(self, mode: str) -> None:
        """asked, yes or no, from the next reply on."""
        self.mode = mode
        for session in self._server.sessions.values():
            session.splices = self.wanted_by(session)

    def wanted_by(self, client: LocalStream) -> bool:
        """Whether this client's large replies shall be spliced, as far as its connection and its wishes go."""
        wanted = self.mode == "yes" or (self.mode == "asked" and client.asked_to_splice)
        return wanted and CAN_LEND and client.is_local_stream

    def splicer_for(self, fd: int) -> Splicer | None:
        """The way of a client; None when there is no descriptor left for it."""
        try:
            return Splicer(self, fd)
        except OSError:
            return None

    def collect(self) -> None:
        """End the leases of what has been received by now."""
        for holder in list(self.holders):
            holder.collect()

    def collect_some(self) -> None:
        """The same for a few, before room is looked for: however many they are, a SET does not wait for it."""
        for holder in list(islice(self.holders, LOOK_HOLDERS_MAX)):
            holder.collect()

    def close(self) -> None:
        """End with the server."""
        self.has_ended = True
        for holder in list(self.holders):
            if holder.has_ended:
                holder.abandon()
        while self._idle:
            self._idle.pop().close()
        self._server.store.end_holds, self._server.store.holders = lambda: None, ()

    def take_pipe(self, nbytes: int) -> Pipe | None:
        """A pipe for a reply that has lent so many bytes of extents, which are counted as held from now on; None when
        too much is held, or there is no pipe."""
        if self.held_bytes + nbytes > self._bytes_max or self._pipes_in_use >= PIPES_MAX:
            return None
        try:
            pipe = self._idle.pop() if self._idle else Pipe()
        except OSError as refused:
            log.debug("no pipe to splice with, copying instead: %s", refused)
            return None
        self._pipes_in_use += 1
        self.held_bytes += nbytes
        return pipe

    def as_piece(self, piece: Buffer) -> bytes | memoryview | _Span:
        """How a piece of a reply is to be sent: payloads in the arena by lending, all else by a copy, as nothing but a
        lease keeps memory from being used for something else."""
        if len(piece) >= LEND_BYTES_MIN:
            address = address_of(piece)
            if self._start <= address and address + len(piece) <= self._end:
                return _Span(address, len(piece))
        return piece

    def view_of(self, span: _Span) -> memoryview:
        """The bytes of a span."""
        first = span.address - self._start
        return self._server.store.arena.view[first : first + span.nbytes]

    def put_pipe(self, pipe: Pipe | None, *, empty: bool = True) -> None:
        """Give a pipe back; one with something in it is closed."""
        if pipe is None:
            return
        self._pipes_in_use -= 1
        if empty and len(self._idle) < IDLE_PIPES_MAX:
            self._idle.append(pipe)
        else:
            pipe.close()
