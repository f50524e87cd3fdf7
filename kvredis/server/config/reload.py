"""SIGHUP: the server reads the cluster topology again, and drops the keys of slots that it no longer serves.

A key of such a slot cannot be asked for any more, but it must be gone before the slot may come back, or its old value
would come back too. So a reload that is asked for while keys still leave begins when they have left. Clients are served
all the while: the file is read in a thread, and keys leave some at a time. At the start the same is done with keys that
a disk tier has kept from an earlier run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from kvredis.backends.config.parsers import is_secret
from kvredis.server.cluster.node import Cluster
from kvredis.server.cluster.topology import Node, Topology, slot_of
from kvredis.server.commands.keyspace_events import publish_event
from kvredis.server.commands.pubsub import confirmation
from kvredis.server.context import Context
from kvredis.server.net.tls import OPTION, make_context
from kvredis.server.options import ServerOptions
from kvredis.storage.errors import ConfigError

from .settings import SettingError, checked

# ---- startup ---------------------------------------------------------------------------------------------------------
#
# What can be wrong with a server's options, found out before there is an arena and a client can connect.
#
# CONFIG's table (settings.py) knows how a value is checked; it serves here too, so that a value in a file means what it
# means in CONFIG SET, and a wrong one stops the start instead of a client.


OWN_KEYS = frozenset(field.name for field in fields(ServerOptions))


def check_options(options: ServerOptions) -> None:
    """Try all that costs nothing to find out. Raises ConfigError, its source OPTION and its key that of an option, or
    "settings.NAME"."""
    check_settings(options.settings)
    if options.tls_port != 0:
        make_context(options)
    if options.cluster_topology is not None:
        Cluster(options)


def check_settings(settings: Mapping[str, str]) -> None:
    """Try further settings, by their names in CONFIG."""
    for name, text in settings.items():
        own = name.replace("-", "_")
        if own in OWN_KEYS:  # one value in two places; and it may be a password
            raise ConfigError(f"settings.{name}", "***", OPTION, f"has a key of its own: {own}")
        try:
            checked(name, text)
        except SettingError as wrong:
            shown = "***" if is_secret(name) or name == "masterauth" else text
            raise ConfigError(f"settings.{name}", shown, OPTION, wrong.reason) from None


log = logging.getLogger(__name__)

KEYS_A_STEP: Final = 500
"""How many keys are looked at before clients have their turn: less than a millisecond."""


class Reload:
    """The changes of one server's topology."""

    def __init__(self, server: Context, cluster: Cluster) -> None:
        self._server = server
        self._cluster = cluster
        self._wanted = False
        self._left = 0  # keys that have gone in the sweep under way
        self._reading = False
        self.is_sweeping = False
        """Whether keys of slots that are not ours are still here. SCAN may tell their names, no reply their values."""

    @property
    def is_busy(self) -> bool:
        """Whether what was asked for is not done yet."""
        return self._reading or self.is_sweeping

    def start(self) -> None:
        """Let go of keys that were recovered from disk and are not ours. To be called on the server's loop."""
        if self._server.store.count(0):
            self._begin_sweep()

    def ask(self) -> None:
        """Read the file and bring it into force, both soon; what is asked meanwhile is asked once more afterwards. A
        file that cannot be used is logged, and nothing changes. To be called on the server's loop; never blocks."""
        if self.is_busy:
            self._wanted = True
            return
        try:
            reading = asyncio.get_running_loop().run_in_executor(None, self._cluster.read)
        except RuntimeError as failed:  # there is no thread to be had
            log.error("the cluster's topology stays as it was: %s", failed)
            return
        self._reading = True
        reading.add_done_callback(self._have_read)

    def _have_read(self, reading: asyncio.Future[tuple[Topology, Node]]) -> None:
        self._reading = False
        try:
            self._adopt(*reading.result())
        except ConfigError as wrong:
            log.error("the cluster's topology stays as it was: %s", wrong)
        except BaseException:  # of the thread that has read it too: SystemExit is not for the loop
            log.exception("the cluster's topology could not be brought into force")
        if not self.is_sweeping:
            self._ask_again()

    def _adopt(self, topology: Topology, myself: Node) -> None:
        cluster = self._cluster
        before = cluster.myself.slots
        lost = cluster.adopt(topology, myself)
        came = myself.slots - before + len(lost)
        log.info("cluster topology %d: node %s, %d slots came and %d left", cluster.epoch, myself.name, came, len(lost))
        if lost:
            self._hush(lost)
            self._begin_sweep()

    def _hush(self, lost: set[int]) -> None:
        """Tell listeners to shard channels of these slots that there is nothing more to hear; they ask elsewhere."""
        pubsub = self._server.pubsub
        for channel in [each for each in pubsub.shard_channels if slot_of(each) in lost]:
            for session in list(pubsub.shard_channels[channel].values()):
                pubsub.sunsubscribe(session, channel)
                session.push(confirmation(session, b"sunsubscribe", channel, len(session.shard_channels)))

    def _begin_sweep(self) -> None:
        self.is_sweeping = True
        self._left = 0
        self._sweep(0)

    def _sweep(self, cursor: int) -> None:
        """Delete what is not ours of the next keys; the rest in the loop's next turns."""
        server, serves = self._server, self._cluster.serves
        cursor, keys = server.store.scan(cursor, KEYS_A_STEP, 0)
        gone = [key for key in keys if not serves(key)]
        if gone:
            self._left += server.store.delete(gone, 0)
            server.drain_journal(None)
            if server.event_letters:
                for key in gone:
                    publish_event(server, "g", "del", key, 0)
        if cursor:
            asyncio.get_running_loop().call_soon(self._sweep, cursor)
            return
        self.is_sweeping = False
        if self._left:
            log.info("cluster: %d keys have left with their slots", self._left)
        self._ask_again()

    def _ask_again(self) -> None:
        if self._wanted:
            self._wanted = False
            self.ask()
