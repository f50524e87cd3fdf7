"""The server: listening sockets, the clients that are connected, and the few things that happen by the clock.

It owns no loop, and no threads but net/io_threads.py's: it runs on whichever loop starts it (uvloop lends buffers to
the kernel, asyncio's own copies what a write leaves over, and the sessions ask `transport_lends` which of the two it
is).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from kvredis.storage.store import Store

from .client.blocked import ROOM, Reason, waits_for
from .client.client import Client
from .client.hang_ups import has_hung_up
from .client.session import Session
from .commands import load_families
from .config.reload import Reload
from .config.settings import begin
from .context import Context
from .http import health
from .http.auth import HttpAuth
from .http.page import page
from .http.server import HttpServer
from .metrics import prometheus
from .options import ServerOptions as ServerOptions

log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often expired blocks are collected and overdue leases revoked: Redis' default of 10 Hz."""

TURNS_IN_A_SECOND: Final = 10

ANSWERED: Final = ROOM | {Reason.DISK_READ}
"""What a client waits for that may send no more: what it has sent is to be answered all the same."""

SUMMED_IN_A_TICK: Final = 500
"""So many clients are asked in each tick what went over their connections, for the rates of INFO; of more the ticks are
fewer."""

DRAIN_S: Final = 10.0
"""How long a shutdown waits for transfers that are under way: Redis' shutdown-timeout."""


class Server(Context):
    """A Store behind the Redis protocol. `start` binds, `stop` hangs up; in between it lives on the running loop."""

    def __init__(self, store: Store, options: ServerOptions) -> None:
        load_families()
        super().__init__(store, options, lambda: Session(self))
        self.reload = None if self.cluster is None else Reload(self, self.cluster)
        """For SIGHUP; None, as `cluster`, for a server that stands alone."""
        if options.metrics_port != 0:
            routes = {**health.routes(self), **prometheus.routes(self), **page.routes(self)}
            self.http = HttpServer(options, routes, HttpAuth(self))
        self.drain_s = DRAIN_S
        self._idle = IdleClients()
        self._tick: asyncio.TimerHandle | None = None
        self._turns = 0
        begin(self)

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind every address; OSError when one cannot be had, ConfigError for TLS files, and then none is kept."""
        loop = asyncio.get_running_loop()
        self.transport_lends = type(loop).__module__.startswith("uvloop")
        self.listeners.open()
        if self.http is not None:
            try:
                self.http.open()
            except BaseException:
                self.listeners.close()
                raise
        self.admission.start()
        self.shm.gpu.start()
        self._tick = loop.call_later(TICK_S, self._on_tick)
        if self.reload is not None:
            self.reload.start()

    async def stop(self) -> None:
        """Close the listeners, let values that are coming in, replies that are going out and blocks that come off the
        disk for a client come to their end, hang up; may be called twice."""
        self.listeners.close()
        deadline_s = self.now_s() + self.drain_s
        while self.sessions and self.now_s() < deadline_s:
            for session in list(self.sessions.values()):
                if not (session.is_receiving or waits_for(session.waiting, (Reason.COPY, Reason.DISK_READ))):
                    session.finish()
            await asyncio.sleep(0.01)
        for session in list(self.sessions.values()):
            session.close()
        await asyncio.sleep(0)
        await self.io_pool.close()
        self.splicing.close()
        self.admission.close()
        if self.http is not None:
            await self.http.close()
        for later in (self._tick, self._expiry, self._shrinking, self._giving_back):
            if later is not None:
                later.cancel()

    def _on_tick(self) -> None:
        # First, so that a mistake in what follows is not the end of expiry and of time limits.
        self._tick = asyncio.get_running_loop().call_later(TICK_S, self._on_tick)
        store = self.store
        self._turns += 1
        store.turn += 1
        self.collect_expired()
        self.give_back()
        store.revoke_overdue()
        self.client_memory.tick()
        self.shrink()
        self.splicing.collect()
        if store.gpu is not None:
            store.gpu.tick()
            self.shm.gpu.tick()
        if store.below is not None:
            self.disk_reads.tick()
        if store.tiering is not None:
            store.tiering.tick()
            self.admission.disk_room.tick()
        self.drain_journal(None)
        self.expected.tick()
        self.admission.give_up_stalled()
        self.parts.give_up_stalled()
        self.admission.admit()
        turn = self._turns % TURNS_IN_A_SECOND
        for session in [each for number, each in self.sessions.items() if number % TURNS_IN_A_SECOND == turn]:
            if session in self.admission.queue:
                continue  # which looks after its own
            if session.waiting is not None and has_hung_up(session.fd, wholly=waits_for(session.waiting, ANSWERED)):
                session.close()
            else:
                session.rest()
        if turn == 0:
            self.client_memory.give_back()
            if self.idle_timeout_s:
                self._hang_up_idle()
        self.stats.note_used(store.used_bytes)
        self.stats.ticks += 1
        if self._turns % (1 + len(self.sessions) // SUMMED_IN_A_TICK) == 0:
            self.stats.sample(self.now_s(), *self.exchanged())

    def _hang_up_idle(self) -> None:
        """Close clients that have been silent for `timeout` seconds and wait for nothing."""
        for session in self._idle.longer_than(self.idle_timeout_s, self.sessions.values(), self.now_s()):
            if session.may_be_idle:
                log.info("client %s closed: idle", session.addr)
                session.close()


# ---- timeout ---------------------------------------------------------------------------------------------------------
#
# Who has been silent for `timeout` seconds: no command has ended and, as in Redis, no byte has come or gone.
#
# WHY bytes count: over a slow line a value may take longer than that to come, and a reply to be taken. They are looked
# at every second or so, and only while there is a timeout, so that no read has to note when it was.


Seen = tuple[float, int, int, int]
"""Of one client: when its last command ended, bytes that have come, bytes handed out, and those not taken yet."""


class IdleClients:
    """What was last seen of each client."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Seen, float]] = {}  # and when bytes were last seen to have moved

    def longer_than(self, limit_s: float, sessions: Iterable[Client], now_s: float) -> list[Client]:
        """Those of all `sessions` that have been silent for so long; to be asked every second or so."""
        before, self._seen = self._seen, {}
        silent: list[Client] = []
        for session in sessions:
            now = session.last_command_s, session.input_bytes, session.output_bytes, session.unsent_bytes
            then, moved_s = before.get(session.id, (now, session.last_command_s))
            if now != then and now[0] == then[0]:  # or it was a command, which says itself when that was
                moved_s = now_s
            self._seen[session.id] = now, moved_s
            if max(moved_s, session.last_command_s) < now_s - limit_s:
                silent.append(session)
        return silent
