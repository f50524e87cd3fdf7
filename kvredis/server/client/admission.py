"""Which client may receive a value into the arena, and when: a header is a claim, not bytes.

Room for a value is contiguous, so it must be had before the value comes, and what is announced may never come. Three
bounds keep that from hurting those whose blocks are cached. The parser asks only when some of the value has arrived.
All values on their way together get a share of the arena, and a client that comes too late for it waits its turn
unread, which TCP turns into back-pressure. And a value whose bytes stop coming is given up after a time from when they
stop, also while the value waits for its turn: many writers that stall cost the others one such time, not one each.

A client that waits is silent for one of two reasons: it has stopped, or the kernel takes no more of it while the server
does not read. Signs tells them apart as far as the kernel does. One that has stopped lets the others go first.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import sys
import termios
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol, TypeAlias

from kvredis.server.cluster.node import TRY_AGAIN, Cluster
from kvredis.server.commands.registry import SPELLINGS
from kvredis.server.multipart import Parts
from kvredis.server.protocol import _hot
from kvredis.server.protocol.replies import OUT_OF_MEMORY
from kvredis.server.protocol.request import REFUSED, Argument, Refused
from kvredis.storage.entry import INLINE_BYTES_MAX, Reservation, extent_length

from .blocked import Blocked, Reason, tell_loop
from .client import Client, Host
from .hang_ups import HangUps

log = logging.getLogger(__name__)

Room: TypeAlias = Reservation | Refused | Blocked
"""What admission answers; of Blocked, the session sets that it waits."""

SHARE: Final = _hot.SHARE
"""Values on their way may hold a quarter of the arena; a single one may be larger when it is alone."""

CLIENT_SHARE: Final = 2
"""One client's unfinished MSET, transaction or values in parts may hold half of the arena while others' values are
coming in."""

PROGRESS_BYTES_MIN: Final = 64 * 1024
"""What must arrive within the time limit of a body, unless the body ends."""

UNREAD_BYTES_MIN: Final = 16 * 1024
"""What a client that waits for its turn must have sent of its value, unless less is missing: about as much as the
smallest socket buffer in use takes while the server does not read."""

UNREAD_BYTES_FULL: Final = 96 * 1024
"""With so much unread, a sender over a unix socket may be unable to send on: half of what Linux takes by default."""

TLS_BYTES_MAX: Final = 512 * 1024
"""What of a client may lie in the buffers of TLS, where it is not seen."""

TURN_S: Final = 1.0
"""How long a client that waits may be silent before others go first; and once it is its turn, what a client has at
least for sending on."""

_SEGMENTS_AT: Final = 140  # where struct tcp_info of linux/tcp.h has tcpi_segs_in

LOOKED_AT_ONCE: Final = 100
"""How many clients that wait for their turn are looked at in a tenth of a second: a thousand in a second."""

SLOW_READER_S: Final = 5.0
"""A client that has not read for so long loses the blocks lent to it when they are all that could make room."""


# ---- blocked on spill ------------------------------------------------------------------------------------------------
#
# Values that find the arena full of blocks which the disk is still to be given: whose turn it is when it has some.
#
# A client that stores waits, unread, until blocks have been written and can leave, in the order in which clients came,
# and for a bounded time each. Then the coldest leave unwritten for its value, and are counted. A disk that writes
# nothing at all keeps no client waiting a second time.


class DiskRoom:
    """The clients that wait for the disk of one server."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._store = server.store
        self._waiting: OrderedDict[Client, float] = OrderedDict()  # since when, in the order in which they came
        self._called: Client | None = None  # whose turn it is
        self._told = False  # the loop will hear of it that there is room

    def start(self) -> None:
        """The loop runs: let the disk say when it has made room."""
        loop = asyncio.get_running_loop()
        if self._store.tiering is not None:
            self._store.tiering.call_on_room(lambda: self._tell(loop))

    def reserve(self, session: Client, key: bytes, length: int) -> Reservation | Blocked | None:
        """Room for a value, Blocked when the client waits, or None: there is none, however long one waits."""
        tiering = self._store.tiering
        if tiering is None or extent_length(length) > self._store.limit_bytes:
            return self._store.reserve(key, length, session.space)
        now_s = self._server.now_s()
        since_s = self._waiting.get(session, now_s)
        overdue = session in self._waiting and now_s - since_s >= tiering.spill_wait_s
        if overdue and self._store.unsaved:  # else it is not the disk that keeps the room
            tiering.waited_in_vain(since_s)
        patient = tiering.makes_room and tiering.spill_wait_s > 0 and not overdue
        room = None
        if not (patient and self._waiting and session not in (self._called, next(iter(self._waiting)))):
            room = self._store.reserve(key, length, session.space, drop=not patient)
        if room is None and patient:
            return self._wait(session, since_s)
        self._waiting.pop(session, None)
        self._called = None
        if self._waiting:  # there may be more
            self._tell(asyncio.get_running_loop())
        return room

    def forget(self, session: Client) -> None:
        """Forget a client that has gone, or what it wanted to store."""
        if self._waiting.pop(session, None) is not None:
            self._next()

    def tick(self) -> None:
        """Let the first ask again, whose time may be over."""
        self._next()

    def __len__(self) -> int:
        return len(self._waiting)

    def _wait(self, session: Client, since_s: float) -> Blocked:
        tiering = self._store.tiering
        assert tiering is not None
        tiering.stats.spill_waits += session not in self._waiting
        if self._called is session:
            self._called = None
        self._waiting[session] = since_s  # one that has waited keeps its place
        return session.wait(Reason.DISK_ROOM)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look again at the waiting clients, since there may be room; called by I/O threads too."""
        if self._waiting and not self._told:
            self._told = True
            tell_loop(loop, self._next)

    def _next(self) -> None:
        self._told = False
        while self._waiting:
            session = next(iter(self._waiting))
            if session.waiting is not None and session.waiting.reason is Reason.DISK_ROOM:
                self._called = session
                session.waiting.unblock(b"")
                return
            del self._waiting[session]  # it was called and did not come


# ---- claims ----------------------------------------------------------------------------------------------------------


class Signs:
    """What tells of a client that waits for its turn, unread, whether it sends on.

    Bytes that arrive in its socket do. When that is full none can; then a sender over TCP that has more asks again and
    again whether there is room (zero-window probes, RFC 9293, 3.8.6.1), each time after twice the time, which counts as
    segments received. Over a unix socket nothing tells, and a full one is given the benefit of the doubt.
    """

    __slots__ = ("_segments", "_sent_bytes", "_session", "_sign_s", "_unread_bytes", "heard_s")

    def __init__(self, session: Client, now_s: float) -> None:
        self._session = session
        self.heard_s = self._sign_s = now_s
        """When bytes were last seen to arrive; when anything was."""
        self._unread_bytes, self._segments = unread_bytes(session.fd), self._segments_in()
        self._sent_bytes = session.input_bytes + self._unread_bytes

    def look(self, now_s: float) -> None:
        """See what has arrived since the last time."""
        self._unread_bytes = unread_bytes(self._session.fd)
        sent_bytes, segments = self._session.input_bytes + self._unread_bytes, self._segments_in()
        if sent_bytes != self._sent_bytes:
            self.heard_s = self._sign_s = now_s
        elif segments != self._segments and self._is_blocked(UNREAD_BYTES_MIN):  # else it has answered a keepalive
            self._sign_s = now_s
        self._sent_bytes, self._segments = sent_bytes, segments

    def silent_s(self, now_s: float) -> float:
        """How long ago the next sign was due of a client that has more to send."""
        return now_s - self._sign_s - (self._sign_s - self.heard_s)

    def is_whole(self, length: int) -> bool:
        """Whether all of a value of this length may have been sent."""
        hidden = TLS_BYTES_MAX if self._session.encrypted else 0
        return self._session.held().qbuf + self._unread_bytes + hidden >= length

    def is_lagging(self, length: int, now_s: float) -> bool:
        """Whether the client most likely has stopped in the middle of a value of this length."""
        if self.silent_s(now_s) <= TURN_S or self.is_whole(length):
            return False
        return self._segments is not None or not self._is_blocked(UNREAD_BYTES_FULL)

    def is_gone(self, length: int, now_s: float, limit_s: float) -> bool:
        """Whether it certainly has, and been silent for `limit_s`."""
        if self.silent_s(now_s) <= limit_s or self.is_whole(length):
            return False
        return self._segments is not None or not self._is_blocked(UNREAD_BYTES_MIN)

    def _is_blocked(self, enough_bytes: int) -> bool:
        return self._session.encrypted or self._unread_bytes >= enough_bytes

    def _segments_in(self) -> int | None:
        return None if self._session.kind == "unix" else segments_received(self._session.fd)


@dataclass(slots=True)
class _Receiving:
    """A client that has been given room for a value."""

    received_bytes: int
    """Received by `since_s`."""
    since_s: float
    trial_until_s: float = 0.0
    """The client was silent when its turn came: what lay in socket buffers arrives at once then and proves nothing, but
    bytes after this time do; 0 = it was not, or has proved it."""


class _Server(Host, Protocol):
    parts: Parts

    @property
    def cluster(self) -> Cluster | None: ...


class Admission:
    """The values that are on their way into the arena."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._store = server.store
        self.queue: OrderedDict[Client, int] = OrderedDict()
        """Clients whose value waits for its turn, with its length."""
        self._signs: dict[Client, Signs] = {}  # of those in the queue whose value comes over their connection
        self._lagging: set[Client] = set()  # of the queue, who let others go first
        self._next: Client | None = None  # of the queue; None when it is to be found
        self._newest_first = False  # the last whose turn it was has stalled
        self._round: Iterator[Client] = iter(())  # of the queue
        self._called: set[Client] = set()  # whose turn it is
        self._receiving: dict[Client, _Receiving] = {}
        self.disk_room = DiskRoom(server)
        self._hang_ups = HangUps(self._let_go)  # of those in the queue
        self.given_up = 0
        """Values whose bytes stopped coming."""

    def start(self) -> None:
        """The loop runs."""
        self.disk_room.start()
        self._hang_ups.start()

    def close(self) -> None:
        """Clients are told of no more."""
        self._hang_ups.close()

    @property
    def share_bytes(self) -> int:
        """What all values on their way may hold of the arena."""
        return self._store.limit_bytes // SHARE

    @property
    def receiving(self) -> int:
        """How many clients hold room for values that are not complete."""
        return sum(bool(session.reservations) for session in self._receiving)

    def is_busy_beside(self, session: Client) -> bool:
        """Whether other values are coming in than this client's."""
        own = sum(reservation.extent.length for reservation in session.reservations)
        return self._store.reserved_bytes > own + self._server.parts.held_by(session)

    def tables(self) -> tuple[Collection[Client], ...]:
        """Who waits for its turn, whose turn it is, whose connection is listened to for signs, and who receives: while
        the first three are empty, a value may come in that is within the share of all."""
        return self.queue, self._called, self._signs, self._receiving

    def begin_receiving(self, session: Client) -> None:
        """Note that a client, which has not waited, has been given room for a value that is not complete."""
        self._begin_receiving(session, None)

    def open_payload(self, session: Client, args: list[Argument], length: int) -> Room | None:
        """Whether argument number len(args) of the command being read goes into the arena, and where: REFUSED when
        there is no room, Blocked when others must finish first."""
        name = args[0] if args else None
        command = SPELLINGS.get(name) or SPELLINGS.get(name.upper()) if isinstance(name, bytes) else None
        if command is None or not command.payload_args or not session.authenticated:
            return None
        first, step = command.payload_args
        at = len(args)
        if at != first and not (step and at > first and (at - first) % step == 0):
            return None
        key = args[at - 1] if step else args[1]
        if not isinstance(key, bytes):
            return None
        if not session.user.unrestricted and session.user.denial(command, args) is not None:
            return None  # it will be refused: no block leaves the arena for it
        room: Room
        if not command.keys[0]:  # KV.WRITE: there is room already, for the whole of it
            room = self._server.parts.open_payload(session, args, length)
        else:
            cluster = self._server.cluster
            if cluster is not None and not cluster.serves(key):
                session.refuse_payload(TRY_AGAIN)  # it will be told where the slot is, unless that is here by then
                return REFUSED
            room = self._room(session, key, length)
            if room is REFUSED:
                session.refuse_payload(OUT_OF_MEMORY)
        if isinstance(room, Blocked):
            if session not in self._signs:
                self._signs[session] = Signs(session, self._server.now_s())
        else:
            signs = self._signs.pop(session, None)
            if isinstance(room, Reservation) and session not in self._receiving:
                self._begin_receiving(session, signs)
        return room

    def reserve(self, session: Client, key: bytes, length: int) -> Room:
        """Room for a value that comes in parts, by the rules for one that comes at once. Blocked: the
        command is to run again when that is unblocked. Alone, too, a client is given half of the arena at most, or one
        larger value: what it announces here need not be on its way."""
        if length < INLINE_BYTES_MAX:
            return self._store.reserve(key, length, session.space) or REFUSED
        held = self._server.parts.of(session).held_bytes
        if held and held + extent_length(length) > self._store.limit_bytes // CLIENT_SHARE:
            return REFUSED
        return self._room(session, key, length)

    def _room(self, session: Client, key: bytes, length: int) -> Room:
        room: Refused | Blocked | None = None
        if self._store.reserved_bytes:  # else no other client's value is coming in
            room = self._out_of_turn(session, length)
        if room is not None:
            return room
        if self._called:
            self._called.discard(session)
        return self.disk_room.reserve(session, key, length) or self._wait_for_reader(session, length)

    def _begin_receiving(self, session: Client, signs: Signs | None) -> None:
        now_s = self._server.now_s()
        entry = self._receiving[session] = _Receiving(session.input_bytes, now_s)
        if signs is not None and now_s - signs.heard_s > TURN_S:
            entry.trial_until_s = now_s + TURN_S

    def _out_of_turn(self, session: Client, length: int) -> Refused | Blocked | None:
        """What a client is told whose value of `length` bytes may not come in beside the others that do; None when it
        may."""
        wanted = extent_length(length)
        held, arena_bytes = self._store.reserved_bytes, self._store.limit_bytes
        if held + wanted > self.share_bytes or (self.queue and session not in self._called):
            if wanted > arena_bytes:
                return REFUSED
            own = sum(reservation.extent.length for reservation in session.reservations)
            own += self._server.parts.of(session).held_bytes
            if not own:
                return self._wait_for_turn(session, length)
            if held > own and own + wanted > arena_bytes // CLIENT_SHARE:
                return REFUSED  # to wait with room in hand is how two clients come to wait for each other
        return None

    def admit(self) -> None:
        """Let those ask again whose turn has come, in their order."""
        held = self._store.reserved_bytes
        while self.queue:
            session = self._next or self._find_next()
            wanted = extent_length(self.queue[session])
            if held and held + wanted > self.share_bytes:
                return
            self._leave_queue(session)
            self._newest_first = False
            self._called.add(session)
            held += wanted
            if session.waiting is not None:
                session.waiting.unblock(b"")

    def _find_next(self) -> Client:
        """Find whose turn is next: the first of those that are not lagging, if there is one. When a client has stalled
        in its turn it is the last: those that have stalled with it came before, and each would cost its own time."""
        in_order = reversed(self.queue) if self._newest_first else iter(self.queue)
        keen = (session for session in in_order if session not in self._lagging)
        self._next = next(keen, None) or next(iter(self.queue))
        return self._next

    def _leave_queue(self, session: Client) -> None:
        if self.queue.pop(session, None) is not None:
            self._hang_ups.forget(session)
        self._lagging.discard(session)
        if self._next is session:
            self._next = None

    def forget(self, session: Client) -> None:
        """Forget a client that has gone, or what it wanted to store."""
        self._receiving.pop(session, None)
        self._called.discard(session)
        self._signs.pop(session, None)
        self.disk_room.forget(session)
        self._leave_queue(session)
        self._server.blocked.unblock_all(Reason.READER)
        self.admit()

    def give_up_stalled(self) -> None:
        """Close clients that hold room, or wait for it, and have sent next to nothing for the time limit of a body;
        find those that wait and have most likely stopped, before which others go."""
        now_s = self._server.now_s()
        for session, entry in list(self._receiving.items()):
            if not session.reservations:
                del self._receiving[session]
            else:
                self._judge(session, entry, now_s)
        for session in self._some_of_queue():
            signs, length = self._signs.get(session), self.queue[session]
            if signs is None:
                continue
            signs.look(now_s)
            if signs.is_gone(length, now_s, self._server.body_timeout_s):
                self._give_up(session, now_s - signs.heard_s)
            if signs.is_lagging(length, now_s):
                self._lagging.add(session)
            else:
                self._lagging.discard(session)
        self._next = None

    def _judge(self, session: Client, entry: _Receiving, now_s: float) -> None:
        """Note what a client that has room has sent, or close it."""
        session.count_received()
        sent_bytes = session.input_bytes - entry.received_bytes
        on_trial = bool(entry.trial_until_s and self.queue)
        limit_s = self._server.body_timeout_s
        if sent_bytes >= (1 if on_trial else PROGRESS_BYTES_MIN):
            entry.received_bytes, entry.since_s = session.input_bytes, now_s
            if now_s > entry.trial_until_s:
                entry.trial_until_s = 0.0
        elif now_s - entry.since_s > (min(TURN_S, limit_s) if on_trial else limit_s):
            self._newest_first = True
            self._give_up(session, now_s - entry.since_s)

    def _some_of_queue(self) -> list[Client]:
        """Give some of the clients that wait for their turn, and others the next time."""
        some = [session for session in islice(self._round, LOOKED_AT_ONCE) if session in self.queue]
        if not some:
            self._round = iter(tuple(self.queue))
            some = list(islice(self._round, LOOKED_AT_ONCE))
        return some

    def _let_go(self, session: Client, wholly: bool) -> None:
        """Close a client that waits for its turn, unread, and has gone: its socket, and what this holds, would wait
        with it. One that only sends no more counts when what it has sent is not all of its value."""
        if not wholly:
            if session.encrypted or session not in self._signs:  # what came over TLS may be in its own buffers
                return
            if session.held().qbuf + unread_bytes(session.fd) >= self.queue[session]:
                return
        session.close()

    def _give_up(self, session: Client, silent_s: float) -> None:
        log.warning("client %s closed: its value stopped coming %.0f s ago", session.addr, silent_s)
        self.given_up += 1
        self._receiving.pop(session, None)  # or it would be judged again before the loop tells of its end
        self._signs.pop(session, None)
        session.close()

    def _wait_for_turn(self, session: Client, length: int) -> Blocked:
        self.disk_room.forget(session)  # or it would be called there while it waits here
        self.queue[session] = length
        self._hang_ups.watch(session)
        if self._newest_first or self._next in self._lagging:
            self._next = None
        if session in self._called:  # others were quicker: it stays the next
            self._called.discard(session)
            self.queue.move_to_end(session, last=False)
            self._next = None
        return session.wait(Reason.TURN)

    def _wait_for_reader(self, session: Client, length: int) -> Refused | Blocked:
        """All room is leased. Close the client that has kept lent blocks longest without reading, if that is long, and
        let `session` ask again when it is gone; not before, as the transport may still be sending what was lent."""
        if extent_length(length) > self._store.limit_bytes:
            return REFUSED
        slow = min(self._server.sessions.values(), key=lambda each: each.slow_since_s, default=None)
        if slow is None or not self._store.evicts or self._server.now_s() - slow.slow_since_s < SLOW_READER_S:
            return REFUSED
        log.warning("client %s closed: it does not read, and what is lent to it is needed", slow.addr)
        slow.close()
        return session.wait(Reason.READER)


def unread_bytes(fd: int) -> int:
    """Give how many bytes of a client wait in its socket, as FIONREAD of tcp(7) and unix(7) counts them."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def segments_received(fd: int) -> int | None:
    """Give how many TCP segments a socket has received (`tcpi_segs_in` of Linux), or None where the kernel does not
    count them."""
    # The three are not looked at, but are asked of the kernel unless they are given.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SEGMENTS_AT + 4)
    except OSError:
        return None
    finally:
        sock.detach()
    if len(told) < _SEGMENTS_AT + 4:
        return None
    return int.from_bytes(told[_SEGMENTS_AT:], sys.byteorder) or None  # a connection has received one at least
