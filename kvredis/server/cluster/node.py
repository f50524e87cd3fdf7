"""One node's view of its cluster: which slots are its own, whose all others are, and what a client is told of that.

A cluster is a file (topology.py) that every node reads. There is no gossip, no vote and no migration: the operator who
writes the file decides who joins, leaves or takes over. Nodes do not speak with one another at all, so PUBLISH reaches
the clients of this one; SPUBLISH is what a cluster is for, since its listeners are where its slot is. The commands of
plain clients pay one look into `ours`, a byte for each slot, which is changed in place when the file is read again; all
others are asked about in `redirection`.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from binascii import crc_hqx
from collections.abc import Callable
from typing import Final

from kvredis.server.client.client import Client
from kvredis.server.commands.registry import SPELLINGS, Command, keys_end, shown
from kvredis.server.net.tls import OPTION
from kvredis.server.options import ServerOptions
from kvredis.server.protocol.replies import error
from kvredis.storage.errors import ConfigError

from .topology import BRACE, SLOT_MASK, SLOTS, Node, Topology, head_of, read_topology, routing_keys, slot_of

log = logging.getLogger(__name__)

Serves = Callable[[list[bytes]], object]
"""Whether a command line may run here: true if all its keys are in one of our slots."""

CROSS_SLOT: Final = error("CROSSSLOT Keys in request don't hash to the same slot")
NOT_SERVED: Final = error("CLUSTERDOWN Hash slot not served")
TRY_AGAIN: Final = error("TRYAGAIN The slot has come to this node while a value for it was on its way")
REDIRECTIONS: Final = (b"-MOVED ", CROSS_SLOT, NOT_SERVED)
"""What `redirection` gives begins so."""

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
EVERYWHERE: Final = frozenset({"*", "::*", "0.0.0.0", "::"})  # compared with, not bound to


class Cluster:
    """The topology in force, and which of its nodes this server is."""

    def __init__(self, options: ServerOptions) -> None:
        """Read the file that `options` name. ConfigError if it cannot be used, or does not say which node we are."""
        self._options = options
        self.ours = bytearray(SLOTS)
        """1 for each slot that this node serves."""
        self.epoch = 0
        """How often a topology has come into force."""
        self.topology, self.myself = self.read()
        self.owners = self.topology.owners()
        self.adopt(self.topology, self.myself)
        self.checks = {
            name: _serves(command, self.ours)
            for name, command in SPELLINGS.items()
            if command.keys[0] and command.plain
        }
        """What the session's fast path asks before it runs a command, by the name of the command."""

    def read(self) -> tuple[Topology, Node]:
        """What the file says now, and which node of it we are. ConfigError as above; nothing has changed then."""
        assert self._options.cluster_topology is not None
        topology = read_topology(self._options.cluster_topology)
        return topology, find_self(topology, self._options)

    def adopt(self, topology: Topology, myself: Node) -> set[int]:
        """Bring a topology into force; returns the slots that were ours and are another's or no node's now."""
        mine = {slot for span in myself.ranges for slot in span}
        lost = {slot for slot, was_ours in enumerate(self.ours) if was_ours} - mine
        self.ours[:] = bytes(slot in mine for slot in range(SLOTS))
        self.topology, self.myself, self.owners = topology, myself, topology.owners()
        self.epoch += 1
        return lost

    def serves(self, key: bytes) -> bool:
        """Whether the slot of `key` is ours."""
        return bool(self.ours[slot_of(key)])

    def redirection(self, session: Client, command: Command, words: list[bytes]) -> bytes | None:
        """Why a command line is not for this node, in Redis' words; None when it is. EXEC is asked about with all that
        is queued."""
        lines = [(command, words)]
        if command.name == "exec":
            queue = session.transaction.commands if session.transaction is not None else []
            lines = [(queued, shown(args)) for queued, args in queue]
        found = -1
        for each, args in lines:
            for key in routing_keys(each, args):
                slot = slot_of(key)
                if found < 0:
                    found = slot
                    if self.owners[slot] is None:
                        return NOT_SERVED
                elif slot != found:
                    return CROSS_SLOT
        owner = self.owners[found] if found >= 0 else self.myself
        if owner is None or owner is self.myself:
            return None
        return error(f"MOVED {found} {owner.host}:{owner.port_for(encrypted=session.encrypted)}")


def find_self(topology: Topology, options: ServerOptions) -> Node:
    """The node that a server with these options is: the one that `cluster_node` calls by name, id or host:port, else
    the only one that has its port on one of its addresses, or its socket. ConfigError otherwise."""
    wanted = options.cluster_node
    if wanted is None:
        found = [node for node in topology.nodes if _is_here(node, options)]
        reason = "is not given, and {} of the nodes in the file is at the port and the addresses that we listen on"
    else:
        found = [node for node in topology.nodes if wanted in (node.name, node.id, *node.addresses)]
        reason = "{} of the nodes in the file is called so"
    if len(found) == 1:
        return found[0]
    candidates = [node.name for node in found or topology.nodes]
    few, more = ", ".join(candidates[:10]), ", ..." if len(candidates) > 10 else ""
    told = f"{reason.format('more than one' if found else 'none')}: choose from {few}{more}"
    raise ConfigError("cluster_node", wanted, OPTION, told)


def _is_here(node: Node, options: ServerOptions) -> bool:
    """Whether a server with these options listens where the file has this node. Asks no name server."""
    if node.unixsocket is not None and node.unixsocket == options.unixsocket:
        return True
    if not ((node.port and node.port == options.port) or (node.tls_port and node.tls_port == options.tls_port)):
        return False
    binds = {word.removeprefix("-") for word in options.bind}
    if node.host in binds or (node.host in LOOPBACK and not binds.isdisjoint(LOOPBACK)):
        return True
    return not binds.isdisjoint(EVERYWHERE) and (node.host in LOOPBACK or _is_this_machine(node.host))


def _is_this_machine(host: str) -> bool:
    """Whether a name or an address is this machine's, as far as it can tell by itself."""
    own = socket.gethostname()
    if host == own or host.startswith(f"{own}."):
        return True
    try:
        family = socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


def _serves(command: Command, ours: bytearray) -> Serves:
    """The check of one plain command, made for the way in which it names its keys."""
    first, last, step = command.keys
    options = command.behind_keys

    def one(args: list[bytes]) -> object:
        key = args[first]
        if BRACE in key:  # hashed_part, spelled out
            tag, closed, _ = key.partition(b"{")[2].partition(b"}")
            if closed and tag:
                key = tag
        return ours[crc_hqx(key, 0) & SLOT_MASK]

    def several(args: list[bytes]) -> object:
        return _all_served(args[first : last + 1 or None : step], ours)

    def several_before_options(args: list[bytes]) -> object:
        return _all_served(args[first : keys_end(options, args) : step], ours)

    if first == last:
        return one
    return several_before_options if options else several


def _all_served(keys: list[bytes], ours: bytearray) -> bool:
    """Whether all keys are in one slot, and that is ours."""
    slot = slot_of(keys[0])
    if not ours[slot]:
        return False
    head = head_of(keys[0])
    if head and min(keys).startswith(head) and max(keys).startswith(head):
        return True  # what is sorted between two that begin so begins so too: chunks of one prompt
    return all(slot_of(key) == slot for key in keys)
