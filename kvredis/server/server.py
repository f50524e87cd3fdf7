"""The server: listening sockets, the clients that are connected, and the few things that happen by the clock.

It owns no threads and no loop: it runs on whichever loop starts it (uvloop lends buffers to the kernel, asyncio's own
copies what a write leaves over, and the sessions ask `transport_lends` which of the two they are on).
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import stat
import time
from dataclasses import dataclass

from kvredis.storage.store import Store

from .families import load_families
from .session import Session
from .stats import ServerStats

log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often expired blocks are collected and overdue leases revoked: Redis' default of 10 Hz."""

BACKLOG = 511
"""Redis' tcp-backlog."""

MAX_CLIENTS_REACHED = b"-ERR max number of clients reached\r\n"

PROTECTED = (
    b"-DENIED Redis is running in protected mode because protected mode is enabled and no password is set for the "
    b"default user. In this mode connections are only accepted from the loopback interface. Set a password with "
    b"--requirepass to accept connections from other hosts.\r\n"
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens and whom it lets in. `port` 0 takes a free one, -1 opens no TCP port."""

    bind: tuple[str, ...] = ("127.0.0.1",)
    port: int = 6379
    unixsocket: str | None = None
    requirepass: str = ""
    maxclients: int = 10_000
    loglevel: str = "notice"


class Server:
    """A Store behind the Redis protocol. `start` binds, `stop` hangs up; in between it lives on the running loop."""

    def __init__(self, store: Store, options: ServerOptions) -> None:
        self.store = store
        self.options = options
        self.stats = ServerStats()
        self.sessions: dict[int, Session] = {}
        self.settings: dict[str, str] = {}
        self.requirepass = options.requirepass.encode()
        self.maxclients = options.maxclients
        self.bulk_bytes_max = 512 * 1024 * 1024
        self.run_id = secrets.token_hex(20)
        self.started_s = time.monotonic()
        self.tcp_port = 0
        self.unixsocket = options.unixsocket
        self.addresses: list[str] = []
        self.transport_lends = False
        self._session_ids = 0
        self._listeners: list[asyncio.Server] = []
        self._tick: asyncio.TimerHandle | None = None
        self._socket_inode = 0  # of the socket file that this server has made, 0 = none
        self._stopped = asyncio.Event()
        load_families()

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind every address; OSError when one cannot be had, and then none is kept."""
        loop = asyncio.get_running_loop()
        self.transport_lends = type(loop).__module__.startswith("uvloop")
        try:
            if self.options.port >= 0:
                port = self.options.port
                for host in self.options.bind:
                    listener = await loop.create_server(self._accept, host, port, backlog=BACKLOG)
                    self._listeners.append(listener)
                    port = listener.sockets[0].getsockname()[1]  # with port 0 every address gets the same free one
                    self.addresses.append(f"{host}:{port}")
                self.tcp_port = port
            if self.unixsocket is not None:
                remove_stale_socket(self.unixsocket)
                self._listeners.append(await loop.create_unix_server(self._accept, self.unixsocket, backlog=BACKLOG))
                self._socket_inode = os.stat(self.unixsocket).st_ino
                self.addresses.append(f"unix:{self.unixsocket}")
        except BaseException:
            await self.stop()
            raise
        self._tick = loop.call_later(TICK_S, self._on_tick)

    async def serve_forever(self) -> None:
        """Return when `stop` has been called."""
        await self._stopped.wait()

    async def stop(self) -> None:
        """Close the listeners, let replies that are under way go out for a moment, hang up; may be called twice."""
        if self._tick is not None:
            self._tick.cancel()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        for session in list(self.sessions.values()):
            session.finish()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 1.0
        while self.sessions and loop.time() < deadline:
            await asyncio.sleep(0.01)
        for session in list(self.sessions.values()):
            session.close()
        await asyncio.sleep(0)
        if self._socket_inode and self.unixsocket is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.unixsocket).st_ino == self._socket_inode:  # else it is another server's by now
                    os.unlink(self.unixsocket)
            self._socket_inode = 0
        self._stopped.set()

    def _accept(self) -> Session:
        return Session(self)

    def _on_tick(self) -> None:
        self.store.collect_expired()
        self.store.revoke_overdue()
        self._tick = asyncio.get_running_loop().call_later(TICK_S, self._on_tick)

    # ---- clients -------------------------------------------------------------------------------------------------

    def next_session_id(self) -> int:
        """Client ids grow and are never used again."""
        self._session_ids += 1
        return self._session_ids

    def admit(self, session: Session) -> bytes | None:
        """Take a client in, or return the error with which it is sent away."""
        self.stats.connections_received += 1
        if len(self.sessions) >= self.maxclients:
            self.stats.connections_rejected += 1
            return MAX_CLIENTS_REACHED
        if not self.requirepass and not _is_local(session.addr):
            self.stats.connections_rejected += 1
            return PROTECTED
        self.sessions[session.id] = session
        return None

    def dismiss(self, session: Session) -> None:
        """A client's connection is gone."""
        if self.sessions.pop(session.id, None) is not None:
            self.stats.net_input_bytes += session.input_bytes
            self.stats.net_output_bytes += session.output_bytes

    def traffic(self) -> tuple[int, int]:
        """Bytes received from and sent to all clients, those that are gone included."""
        sessions = self.sessions.values()
        received = self.stats.net_input_bytes + sum(session.input_bytes for session in sessions)
        return received, self.stats.net_output_bytes + sum(session.output_bytes for session in sessions)


def remove_stale_socket(path: str) -> None:
    """Unlink a socket file that no server answers on any more. OSError (EADDRINUSE) when one does, or it is a file."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(f"{path} exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            os.unlink(path)
            return
    raise OSError(f"{path} is in use by another server")


def _is_local(addr: str) -> bool:
    """Whether a client speaks from this machine: loopback or a unix socket."""
    return addr.startswith(("127.", "[::1]", "[::ffff:127.")) or addr.endswith(":0")  # no TCP client has port 0
