"""What the clients of one server have in common: the store, the parts, the limits, and what is told of changes.

Commands see their server as a Context, by way of `Caller`; so do settings, metrics and pages. The Server (server.py)
adds to it what nothing but the program that runs it calls: binding, the clock, the end. The parts that
a Context is made of (pub/sub, tracking, admission ...) do not import it: each names in a protocol of its own what it
needs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Final, TypeAlias

from kvredis.storage.store import Store

from .acl.state import Acl
from .client.admission import Admission
from .client.blocked import BlockedClients
from .client.client import Client, ClientOf
from .client.disk_reads import DiskReads
from .client.expected import ExpectedKeys
from .client.memory import ClientMemory
from .client.pause import Pause
from .client.tracking import TrackingTable
from .cluster.node import Cluster
from .commands.keyspace_events import publish_event
from .commands.latency import LatencyMonitor
from .commands.pubsub import PubSub
from .commands.registry import Command
from .commands.slowlog import SlowLog
from .commands.transactions import mark_changed, mark_flushed, unwatch_all
from .http.server import HttpServer
from .metrics.stats import KINDS, NO_LIMIT, Exchanging, ServerStats, Traffic
from .multipart import Parts
from .net.io_threads import IoPool, Receivers, Senders
from .net.listeners import Listeners
from .net.zerocopy import Splicing
from .options import MIB, ServerOptions
from .protocol.parser import Scratches
from .protocol.request import READ_ON_BYTES_ALL, READ_ON_BYTES_MAX, Argument, ProtocolError, QueryBufferLimit
from .shm.attach import SharedMemory

log = logging.getLogger(__name__)

SLOW_NS_PLAIN: Final = 1_000_000
"""Plain commands never take this long by themselves, so only a lower threshold makes it necessary to time each."""

HTTP_TOLD_S: Final = 60.0
"""How often the log may tell of HTTP on a port that speaks RESP: Redis' bound."""

UNASKED: Final = {"expired": "x", "evicted": "e"}
"""Changes that no command has asked for, and their class in notify-keyspace-events."""

NOTHING: Final = Traffic()

MAX_CLIENTS_REACHED = b"-ERR max number of clients reached\r\n"

PROTECTED = (
    b"-DENIED Redis is running in protected mode because protected mode is enabled and no password is set for the "
    b"default user. In this mode connections are only accepted from the loopback interface. Set a password with "
    b"--requirepass to accept connections from other hosts.\r\n"
)


class Context:
    """What all clients of a server share."""

    _expiry: asyncio.Handle | None = None
    _shrinking: asyncio.Handle | None = None
    _giving_back: asyncio.Handle | None = None

    def __init__(self, store: Store, options: ServerOptions, new_session: Callable[[], asyncio.BaseProtocol]) -> None:
        self.store: Store = store
        self.options = options
        self.stats: ServerStats = ServerStats()
        self.sessions: dict[int, Client] = {}
        self.scratches = Scratches()
        self.settings: dict[str, str] = {}
        self.acl: Acl = Acl(options.requirepass.encode(), options.aclfile or "")
        self.acl.load_at_start()
        self.cluster = None if options.cluster_topology is None else Cluster(options)
        self.pubsub = PubSub()
        self.tracking = TrackingTable(self)
        self.slowlog = SlowLog()
        self.latency = LatencyMonitor()
        self.admission: Admission = Admission(self)
        self.parts: Parts = Parts(self)
        self.splicing = Splicing(self)
        self.io_pool = IoPool(options.io_threads)
        self.senders = Senders(self.io_pool, self.stats)
        self.receivers = Receivers(self.io_pool, self.stats)
        self.disk_reads = DiskReads(self)
        self.pause = Pause(self)
        self.client_memory = ClientMemory(self)
        self.monitors: dict[int, Client] = {}
        self.watchers: dict[tuple[int, bytes], set[Client]] = {}
        """The clients that watch a key, by key and database."""
        self.blocked = BlockedClients()
        self.expected = ExpectedKeys(self)
        self.event_letters = ""
        self.maxclients: int = options.maxclients
        self.protected_mode = options.protected_mode
        self.bulk_bytes_max = options.proto_max_bulk_len
        self.query_bytes_max = options.client_query_buffer_limit
        self.output_limits: dict[str, tuple[int, int, int]] = {
            "normal": NO_LIMIT,
            "replica": (256 * MIB, 64 * MIB, 60),
            "pubsub": (32 * MIB, 8 * MIB, 60),
        }
        """By class of client: hard limit, soft limit (bytes, 0 = none), seconds above the soft one."""
        self.idle_timeout_s = options.timeout
        self.body_timeout_s = options.body_timeout
        self.run_id = secrets.token_hex(20)
        self.started_s = time.monotonic()
        self.now_s = time.monotonic
        self.unixsocket = options.unixsocket
        self.transport_lends = False
        self.slow_ns = 0
        """A command that takes so long is worth a note in the slow log or for LATENCY."""
        self.expires_actively = True
        """False: keys go only when a command looks at them (DEBUG SET-ACTIVE-EXPIRE)."""
        self.observed = False
        """A client wants to know of every change: keyspace events or client-side caches."""
        self.watches_every_command = False
        """No command may take the fast path."""
        self.shutdown_wanted = asyncio.Event()
        self.save_on_exit = True
        """What memory holds shall be on disk when the process has ended (SHUTDOWN NOSAVE)."""
        self._session_ids = 0
        self.listeners: Listeners = Listeners(
            options, new_session, lambda: self.maxclients - len(self.sessions), self.run_id
        )
        self.shm = SharedMemory(self)
        self.http: HttpServer | None = None
        """The listener for monitoring systems and browsers, if there is one."""
        self._runs = False  # between `start` and `stop`
        self._http_told_s = -HTTP_TOLD_S
        self.reconsider()

    def reconsider(self) -> None:
        """Find out anew whether commands may take the fast path, and tell every session. To be called when a reason has
        come or gone: monitors, keyspace events, tracking clients, a pause, a threshold, a limit, a user's rights."""
        slow_ns = [self.slowlog.threshold_ns]
        if self.latency.threshold_ms:
            slow_ns.append(self.latency.threshold_ms * 1_000_000)
        self.slow_ns = min(slow_ns)
        self.observed = bool(self.event_letters or self.tracking.clients)
        self.watches_every_command = bool(
            self.observed
            or self.monitors
            or self.pause.until_s
            or self.slow_ns < SLOW_NS_PLAIN
            or self.expected.waited_for
        )
        self.keep_journal()
        for session in self.sessions.values():
            session.reconsider()

    def request_shutdown(self) -> None:
        """Drain and end, as SIGTERM does: the program that runs this server waits for `shutdown_wanted`."""
        self.shutdown_wanted.set()

    @property
    def addresses(self) -> list[str]:
        """Where clients find us: host:port, tls:host:port, unix:path."""
        return self.listeners.addresses

    @property
    def uptime_s(self) -> float:
        """For how long it has been there."""
        return time.monotonic() - self.started_s

    @property
    def room_behind_bytes(self) -> int:
        """How much is put by of what a blocked client has sent behind its command; for each of those there are."""
        return min(READ_ON_BYTES_MAX, READ_ON_BYTES_ALL // max(1, len(self.blocked.timeouts)))

    @property
    def tcp_port(self) -> int:
        """The plain port, once it is open."""
        return self.listeners.tcp_port

    # ---- what is done in slices, one in each of the loop's turns ------------------------------------------------

    def collect_expired(self) -> None:
        """Remove what has come to its end: some now, and while there is more, some in each of the loop's next turns."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self.expires_actively and not self.pause.until_s:
            began_s = self.now_s()
            if self.store.collect_expired():
                self._expiry = asyncio.get_running_loop().call_soon(self.collect_expired)
            self.latency.note("expire-cycle", 1000 * (self.now_s() - began_s))
            self.drain_journal(None)

    def give_back(self) -> None:
        """Give back what flushed keys hold: some now, while there is more some in each of the loop's next turns."""
        if self._giving_back is not None:
            self._giving_back.cancel()
            self._giving_back = None
        if self.store.give_back() and self._runs:
            self._giving_back = asyncio.get_running_loop().call_soon(self.give_back)

    def shrink(self) -> None:
        """Let the coldest leave while more is held than maxmemory: some now, some in each of the loop's next turns."""
        if self._shrinking is not None:
            self._shrinking.cancel()
            self._shrinking = None
        if self.store.shrink() and self._runs:
            self._shrinking = asyncio.get_running_loop().call_soon(self.shrink)

    # ---- changes -------------------------------------------------------------------------------------------------

    def keep_journal(self) -> None:
        """Have the store list what changes while a client wants to know."""
        self.store.keep_journal(bool(self.observed or self.watchers or self.expected))

    def drain_journal(self, by: Client | None) -> None:
        """Tell of everything that has changed since the last time; `by` is the client whose command did it."""
        if not self.store.journal:
            if self.store.journal is not None:
                self.keep_journal()
            return
        for what, key, space in self.store.take_journal():
            mark_changed(self, key, space)
            self.expected.changed(key, space)
            if self.tracking.clients:
                self.tracking.touched(key, None if what in UNASKED else by)
            if self.event_letters and what in UNASKED:
                publish_event(self, UNASKED[what], what, key, space)

    def flushed(self, space: int | None) -> None:
        """A database (None = all of them) is about to be emptied or exchanged."""
        self.drain_journal(None)
        mark_flushed(self, space)
        self.expected.look_again()
        if self.tracking.clients:
            self.tracking.flushed()

    def note_slow(self, session: Client, command: Command, args: list[Argument], took_ns: int) -> None:
        """A command took longer than the slow log or LATENCY allows."""
        if "skip_slowlog" not in command.flags:
            self.slowlog.note(session, args, took_ns)
        self.latency.note("fast-command" if "fast" in command.flags else "command", took_ns / 1e6)

    def note_broken(self, session: Client, broken: ProtocolError) -> None:
        """Count and log a client that has broken the protocol. That a browser was talked into speaking to us is told,
        but once a minute: a page that does that does it often."""
        if isinstance(broken, QueryBufferLimit):
            self.stats.query_limit_disconnections += 1
            return
        now_s = self.now_s()
        if not str(broken) and now_s - self._http_told_s >= HTTP_TOLD_S:
            self._http_told_s = now_s
            log.warning("client %s closed: it speaks HTTP (POST or Host:), which an attacker may abuse", session.addr)

    def reset_stats(self) -> None:
        """Count anew: CONFIG RESETSTAT. Sessions go on from what they have counted, which is taken off the sums."""
        self.stats.reset()
        self.store.stats.reset()
        if self.store.tiering is not None:
            self.store.tiering.stats.reset()
        if self.store.gpu is not None:
            self.store.gpu.stats.reset()
        self.acl.log.reset_counts()
        self.stats.gone = {kind: each.negated() for kind, each in self.traffic().items()}

    # ---- clients -------------------------------------------------------------------------------------------------

    def next_session_id(self) -> int:
        """Client ids grow and are never used again."""
        self._session_ids += 1
        return self._session_ids

    def admit(self, session: Client) -> bytes | None:
        """Take a client in, or return the error with which it is sent away."""
        self.stats.connections_received += 1
        if len(self.sessions) >= self.maxclients:
            self.stats.connections_rejected += 1
            return MAX_CLIENTS_REACHED
        if self.protected_mode and self.acl.default.needs_no_password and not _is_local(session.addr):
            self.stats.connections_rejected += 1
            return PROTECTED
        self.sessions[session.id] = session
        session.reconsider()  # from here on it is told; what has changed since it was made, it must ask
        return None

    def dismiss(self, session: Client) -> None:
        """Forget a client whose connection is gone."""
        self.pubsub.forget(session)
        self.tracking.forget(session)
        self.admission.forget(session)
        self.disk_reads.forget(session)
        self.shm.gpu.forget(session)
        self.client_memory.forget(session)
        self.stop_monitoring(session)
        unwatch_all(self, session)
        if self.sessions.pop(session.id, None) is not None:
            self.stats.gone.setdefault(session.kind, Traffic()).add(session)

    def stop_monitoring(self, session: Client) -> None:
        """End the feed of a monitor that goes, or RESETs."""
        if self.monitors.pop(session.id, None) is not None:
            self.reconsider()

    def net_bytes(self) -> tuple[int, int]:
        """Bytes received and sent over all connections so far."""
        return self.exchanged()[:2]

    @property
    def reads(self) -> int:
        """Times that bytes were received over all connections so far."""
        return self.exchanged()[2]

    def exchanged(self) -> tuple[int, int, int]:
        """Bytes received and sent, and times that bytes were received: one pass, as each client costs a cache miss."""
        received = sent = reads = 0
        every: Iterable[Exchanging] = chain(self.stats.gone.values(), self.sessions.values())
        for each in every:
            received += each.input_bytes
            sent += each.output_bytes
            reads += each.reads
        return received, sent, reads

    def traffic(self) -> dict[str, Traffic]:
        """What went over each kind of connection (tcp, tls, unix), those that are gone included."""
        found = {kind: replace(self.stats.gone.get(kind, NOTHING)) for kind in KINDS}
        for session in self.sessions.values():
            found[session.kind].add(session)
        return found


Caller: TypeAlias = ClientOf[Context]
"""A client as the handler of a command sees it."""


def _is_local(addr: str) -> bool:
    """Whether a client speaks from this machine: loopback or a unix socket."""
    return addr.startswith(("127.", "[::1]", "[::ffff:127.")) or addr.endswith(":0")  # no TCP client has port 0
