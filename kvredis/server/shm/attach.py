"""Memory shared with clients of the same host, which read blocks where they lie in the arena, and store out of theirs.

Each side lends its memory to the other read-only. A client that attaches over a unix socket is given the arena's memfd,
which is sealed (storage/memory/arena.py), so all it can do is to read; to store it lends us memory of its own, out of
which we copy (lent_memory.py). Neither can damage what is the other's, nor be killed by it.

WHY a client can trust what it has read: a lease keeps a block's bytes where they are. It ends when the client says so
(KV.RELEASE, RESET), when its time limit has passed, or with the connection. The client counts the limit from before it
has asked, so its own clock ends first. Of the last it learns from its socket, because the server shuts the socket
before it ends the leases: a client that finds it open after reading has read what was leased.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Final, Protocol

from kvredis.server.client.client import Client, Host
from kvredis.server.commands.registry import Command
from kvredis.server.net.listeners import Listeners, uid_of
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import Buffer, bulk, error, integer, joined, map_reply
from kvredis.storage.entry import PAYLOAD_OFFSET_BYTES, Entry, Found, LeaseRun, Place, extent_length
from kvredis.storage.errors import ArenaError, DeviceError
from kvredis.storage.store import Store
from kvredis.storage.tiering.gpu import GpuTier

from ._places import keep, take
from .gpu import GpuClient, SharedGpu
from .lent_memory import LentMemory

# ---- lease table -----------------------------------------------------------------------------------------------------
#
# Where a client's leases lie: the replies that say so, and the offsets that it gives back, a run at a time.
#
# AttachedClient says what is kept for a client and why; here is its commonest case, leases of blocks at places where
# the client has no other: `keep` and `take` of _places.pyx. All else stops `keep`, or makes `take` leave the whole
# command alone.


class Shared:
    """Leases at one place, where there are several of one client's, or were. They may be of several blocks: when a
    limit has passed, another block may have come to lie there.

    WHY the one whose limit comes first ends first, and those that ended long ago are still counted (`ended`): a client
    names a place, not a lease. To end another than it means might take from under it what it is reading now.
    """

    __slots__ = ("ended", "nbytes", "places")

    def __init__(self, place: Place) -> None:
        self.places = [place]
        """By when their limits come."""
        self.nbytes = place[2]
        """What they take of the client's share."""
        self.ended = 0


Held = dict[bytes, Place | Shared]
"""A client's leases by their offset, as commands spell it, so that no number need be read. Mostly there is one a place.
"""

Room = tuple[int, int]
"""How many bytes of the arena, and how many leases, may be kept."""

LEASE_MS_MAX: Final = 600_000
"""The longest time limit of a lease."""

LEASES_MAX: Final = 65_536
"""Leases of one client, and places where there were some of whose end it has not said that it knows."""

SHARE: Final = 2
"""One client may keep half of the arena leased."""

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

NO_LANE: Final = error("ERR there is no lane here")
NOT_UNIX: Final = error("ERR the lane is for connections over a unix socket")
ATTACHED_ALREADY: Final = error("ERR this connection is attached already")
NOT_ATTACHED: Final = error("ERR this connection is not attached to the lane: KV.ATTACH")
UNSENT: Final = error("ERR KV.ATTACH must be sent alone, when all replies before it have been read")
ANOTHER_USER: Final = error("NOPERM the lane is for the server's own user, and for users that have logged in")
NOT_EVERY_KEY: Final = error("NOPERM the lane shows every key, and this user may not read all of them")
SHARE_USED: Final = error("OOM this connection has leased its share of the arena")


class AttachedClient:
    """What an attached connection holds: leases by the offset of their bytes, and the memory that it has lent us."""

    def __init__(self, peer: socket.socket, side: socket.socket, store: Store, lease_ms: int) -> None:
        self.side = side
        """Our end of the channel over which it sends its memory's descriptor."""
        self.lease_ms = lease_ms
        """The time limit of its leases when it names none: what it was told, whatever is set later."""
        self.is_own_user = uid_of(peer) == os.geteuid()
        """Whether it could do us harm anyhow."""
        self.memory: LentMemory | None = None
        self.gpu: GpuClient | None = None
        """What it holds on the GPU, of which it has the memory."""
        self.at_end: Callable[[], None] = lambda: None
        """What its session calls when that is over."""
        self._peer = peer  # the connection's socket once more, to shut it whatever the transport does
        self._store = store
        self._share_bytes = store.arena.nbytes // SHARE
        self._revoked = 0  # leases of whomever, when it was last looked which of ours have ended
        self._held: Held = {}
        self._held_bytes = self._count = 0

    @property
    def leases(self) -> int:
        """How many leases it holds; those whose limit has passed are none any more."""
        here = sum(run.entries[at] is not None for run, at, _ in self._places())
        return here if self.gpu is None else here + self.gpu.leases

    @property
    def lent_bytes(self) -> int:
        """How much memory it has lent us."""
        return 0 if self.memory is None else self.memory.nbytes

    def within_share(self, keys: Sequence[bytes], space: int) -> int:
        """How many of `keys`, from the first on, it may lease beside what it holds: others are not brought from disk
        for it, since they might not even all be in memory at once."""
        if not keys:
            return 0
        entries = [self._store.find(key, space) for key in keys]
        ends = list(accumulate(0 if entry is None else extent_length(entry.length) for entry in entries))
        if self._held_bytes + ends[-1] > self._share_bytes:
            self._forget_ended()
        return bisect_right(ends, self._share_bytes - self._held_bytes)

    def keep(self, found: Sequence[Found], run: LeaseRun, absent: Callable[[int], bytes]) -> bytes:
        """Keep the holds of a run for the client; the replies to all that was found, one behind the other. `absent`
        gives the one for a miss. What would be more than the client's share is not held any longer."""
        replies, at = [], 0
        while True:
            room_bytes = self._share_bytes - self._held_bytes
            text, past, nbytes = keep(found, at, run, self._held, (room_bytes, LEASES_MAX - self._counted))
            self._held_bytes += nbytes
            self._count += past - at
            replies.append(text)
            if past == len(found):
                return b"".join(replies)
            item = found[past]
            if item is None:
                replies.append(absent(past))
            elif isinstance(item, bytes):
                replies.append(bulk(item))
            else:
                replies.append(self._keep_one(item, (run, past, item.extent.length)))
            at = past + 1

    def release(self, words: Sequence[bytes]) -> int | None:
        """End the lease at each offset whose limit comes first; how many were still held. Those whose limit has passed
        are taken for ended in their turn, too. None, and nothing ends, when some are no numbers."""
        if self.gpu is None:
            return self._release(words)
        if any(parse_integer(word) is None for word in words):
            return None
        here, on_gpu = self.gpu.release(words)
        return (self._release(here) or 0) + on_gpu

    def _release(self, words: Sequence[bytes]) -> int | None:
        taken = take(words, self._held)
        if taken is None:
            if any(word not in self._held and parse_integer(word) is None for word in words):
                return None
            ending = [place for word in words if (place := self._take(word)) is not None]
        else:
            ending, nbytes = taken
            self._held_bytes -= nbytes
            self._count -= len(ending)
        return self._store.end_leases(ending)

    def end(self, *, hang_up: bool = True) -> None:
        """End the attachment with the connection, or alone (without `hang_up`), as the client itself has asked. The
        socket is shut first, so that a client that looks at it afterwards sees that, and only then the leases end,
        since others may write where they were."""
        if hang_up:
            with contextlib.suppress(OSError):  # the client has hung up itself
                self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()
        self.side.close()
        ending = list(self._places())
        self._held = {}
        self._held_bytes = self._count = 0
        self._store.end_leases(ending)
        if self.gpu is not None:
            self.gpu.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    @property
    def _counted(self) -> int:
        """What LEASES_MAX bounds."""
        return max(self._count, len(self._held))

    def _places(self) -> Iterator[Place]:
        for held in self._held.values():
            if isinstance(held, Shared):
                yield from held.places
            else:
                yield held

    def _keep_one(self, entry: Entry, place: Place) -> bytes:
        """The reply to a lease that `keep` has left: there is another where it lies, or no room for it."""
        nbytes = place[2]
        offset = entry.extent.offset + PAYLOAD_OFFSET_BYTES
        word = b"%d" % offset
        if not self._fits(word, nbytes):
            self._forget_ended()
            if not self._fits(word, nbytes):
                self._store.end_leases([place])
                return SHARE_USED
        held = self._held.get(word)
        if held is None:
            self._held[word] = place
            self._held_bytes += nbytes
        else:
            shared = self._shared(word, held)
            insort(shared.places, place, key=_limit_s)
            self._held_bytes += max(0, nbytes - shared.nbytes)
            shared.nbytes = max(shared.nbytes, nbytes)
        self._count += 1
        return b"*2\r\n:%d\r\n:%d\r\n" % (offset, entry.length)

    def _shared(self, word: bytes, held: Place | Shared) -> Shared:
        if not isinstance(held, Shared):
            self._held[word] = held = Shared(held)
        return held

    def _take(self, word: bytes) -> Place | None:
        """The lease at an offset that is to end; None when there is none, or when it has ended long ago."""
        held = self._held.get(word)
        if held is None:
            return None
        held, place = self._shared(word, held), None
        if held.ended:
            held.ended -= 1
        else:
            place = held.places.pop(0)
            self._count -= 1
        if not held.places:
            self._held_bytes -= held.nbytes
            held.nbytes = 0
            if not held.ended:
                del self._held[word]
        return place

    def _fits(self, word: bytes, nbytes: int) -> bool:
        """Whether one more lease of an extent of `nbytes` is within the share, and what is counted within its bound."""
        wanted = self._held_bytes + nbytes
        if wanted <= self._share_bytes and self._counted < LEASES_MAX:
            return True
        held = self._held.get(word)
        if held is None or self._count >= LEASES_MAX:
            return False
        return wanted - min(_nbytes(held), nbytes) <= self._share_bytes

    def _forget_ended(self) -> None:
        """Of leases whose limit has passed and of which the client says nothing keep only how many they were."""
        revoked = self._store.stats.leases_revoked
        if revoked == self._revoked:
            return  # a look costs a step a lease, and a client at its limit may name a thousand keys more
        self._revoked = revoked
        for word, held in self._held.items():
            if not isinstance(held, Shared) and held[0].entries[held[1]] is not None:
                continue
            shared = self._shared(word, held)
            alive = [(run, at, nbytes) for run, at, nbytes in shared.places if run.entries[at] is not None]
            shared.ended += len(shared.places) - len(alive)
            shared.places = alive
            shared.nbytes = max((nbytes for _, _, nbytes in alive), default=0)
        self._held_bytes = sum(map(_nbytes, self._held.values()))
        self._count = sum(1 for _ in self._places())


def _nbytes(held: Place | Shared) -> int:
    """What is held at one place takes of the client's share."""
    return held.nbytes if isinstance(held, Shared) else held[2]


def _limit_s(place: Place) -> float:
    return place[0].until_s


class _Server(Host, Protocol):
    listeners: Listeners
    unixsocket: str | None


class SharedMemory:
    """The attached clients of one server, and which client may become one."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.lease_ms = server.options.lane_lease_ms
        """The time limit of a lease for which none was asked, for those who attach from now on."""
        self.clients: dict[int, AttachedClient] = {}
        """By the id of their connection."""
        self.gpu = SharedGpu(server)

    @property
    def socket_name(self) -> str | None:
        """Where a client of this host connects to: a path, or @name for an abstract socket; None if not offered."""
        if self._server.options.lane == "off" or not self._server.store.arena.sealed:
            return None
        path = self._server.unixsocket
        return self._server.listeners.abstract_name if path is None else os.path.abspath(path)

    @property
    def leases(self) -> int:
        """How many leases all clients hold."""
        return sum(client.leases for client in self.clients.values())

    def of(self, session: Client) -> AttachedClient | None:
        """What an attached connection holds; None for one that is not attached."""
        return self.clients.get(session.id)

    def attach(self, session: Client, command: Command, args: list[bytes]) -> list[Buffer] | bytes:
        """Give the arena to a client, with the reply that tells what it is: what of the reply has not been sent yet, or
        the error."""
        try:
            with ExitStack() as undo:
                peer = undo.enter_context(socket.socket(fileno=os.dup(session.fd)))
                problem = self._objection(session, peer, command, args)
                tier = self.gpu.tier if len(args) > 1 else None
                if problem is not None:
                    return problem
                arena_fd = self._server.store.arena.share()
                undo.callback(os.close, arena_fd)
                side, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.enter_context(theirs)
                undo.enter_context(side)
                side.setblocking(False)
                reply = self._facts(session, tier)
                descriptors = array.array("i", [arena_fd, theirs.fileno()])
                if tier is not None:
                    gpu_fd = tier.arena.share()
                    undo.callback(os.close, gpu_fd)
                    descriptors.append(gpu_fd)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                sent = peer.sendmsg([reply], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                client = AttachedClient(peer, side, self._server.store, self.lease_ms)
                if tier is not None:
                    client.gpu = self.gpu.attached(tier, peer)
                    os.close(gpu_fd)
                undo.pop_all()
        except BlockingIOError:
            return UNSENT  # the client does not read
        except (ArenaError, DeviceError, OSError) as failed:
            return error(f"ERR the arena cannot be lent: {getattr(failed, 'strerror', None) or failed}")
        os.close(arena_fd)
        theirs.close()
        self.clients[session.id] = client
        client.at_end = lambda: self.detach(session, hang_up=True)
        session.at_end.append(client.at_end)
        session.output_bytes += sent
        return reply[sent:]

    def detach(self, session: Client, *, hang_up: bool = False) -> None:
        """End all that a client holds here: its connection is over (`hang_up`), or it is to be as a new one."""
        client = self.clients.pop(session.id, None)
        if client is not None:
            if not hang_up:  # a connection may come and go here as often as it likes
                session.at_end.remove(client.at_end)
            client.end(hang_up=hang_up)

    def _objection(self, session: Client, peer: socket.socket, command: Command, args: list[bytes]) -> bytes | None:
        """Why a client may not be given the arena, or None."""
        if self.socket_name is None:
            return NO_LANE
        if peer.family != socket.AF_UNIX:
            return NOT_UNIX
        user = session.user
        if uid_of(peer) != os.geteuid() and (user.nopass or not session.authenticated):
            return ANOTHER_USER
        if not user.may_read_all(command, args):
            return NOT_EVERY_KEY
        if len(args) > 1:
            problem = self.gpu.objection(session, is_own_user=uid_of(peer) == os.geteuid())
            if problem is not None:
                return problem
        if session.id in self.clients:
            return ATTACHED_ALREADY
        return None if session.is_caught_up and session.reply_mode == "on" else UNSENT

    def _facts(self, session: Client, tier: GpuTier | None) -> bytes:
        arena = self._server.store.arena
        return joined(
            map_reply(
                session,
                [
                    (bulk("arena-bytes"), integer(arena.nbytes)),
                    (bulk("page-bytes"), integer(arena.page_bytes)),
                    (bulk("pages"), bulk(arena.pages)),
                    (bulk("lease-ms"), integer(self.lease_ms)),
                    (bulk("lease-ms-max"), integer(LEASE_MS_MAX)),
                    (bulk("disk"), integer(int(self._server.store.below is not None))),
                    *([] if tier is None else self.gpu.facts(tier)),
                ],
            )
        )


def boot_id() -> str | None:
    """What tells this boot of this machine from all others; the same in each of its containers."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return None
