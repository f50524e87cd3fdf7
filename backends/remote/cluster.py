"""The backend of an engine whose blocks live on a Redis Cluster, or on kvredis nodes that speak its protocol.

Each key has its slot, each slot its master. Chunks of one prompt carry a hash tag, so that a lookup is one question to
one node; keys without tags are asked for node by node, all of a node together.

A node that does not have a slot any more says who has it (MOVED), or who has a key of it already (ASK). What was asked
goes there at once, and so does a value under way, out of the same memory. Meanwhile the whole topology is learnt anew.
A node that is lost makes its blocks misses and leaves the others alone; when a replica takes its place, that is learnt.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kvredis.backends.config.url import Address, ClusterAddress
from kvredis.backends.resp.cluster_slots import SLOTS, SlotRange, by_slot, redirect_of, slot_of
from kvredis.backends.resp.cluster_topology import Place, Topology
from kvredis.backends.shm.buffers import Staging
from kvredis.storage.errors import BackendError

from .blocks import RemoteBlocks
from .health import Link
from .pool import Node
from .routing import Hop, Part, parts_of

NODES_MAX: Final = 1000
"""Beyond that Redis Cluster does not go, and a server that makes up redirections shall not either."""


class ClusterBackend(RemoteBlocks):
    """Blocks on the masters of the cluster at `address`; memory and bounds are shared, `connections` are a node's."""

    def __init__(
        self,
        address: ClusterAddress,
        staging: Staging,
        *,
        connections: int | None = None,
        timeout_s: float = 10.0,
        connect_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        keep: bool = False,
    ) -> None:
        """As RemoteBackend. Nothing is asked before the first verb: nodes that are not there yet are no error."""
        self.address = address

        def node_at(place: Place) -> Node:
            link = Link(address.server(*place), timeout_s, clock, connect_timeout_s=connect_timeout_s)
            return Node(link, connections)

        super().__init__(
            str(address),
            lambda outbox: ClusterRoutes(address, timeout_s, node_at, outbox.let_go),
            staging,
            timeout_s=timeout_s,
            keep=keep,
        )

    def stats(self) -> dict[str, int | float | str]:
        """As RemoteBlocks.stats, with `nodes` known now, `redirects` followed and `refreshes` of the topology."""
        return {"kind": "cluster", **super().stats()}


class ClusterRoutes:
    """Slots and their masters, as far as anybody has told; of a slot that nobody has named yet, any node may know."""

    def __init__(
        self,
        address: ClusterAddress,
        timeout_s: float,
        node_at: Callable[[Place], Node],
        let_go: Callable[[Node], None],
    ) -> None:
        """`let_go` hears of a node that has no slots any more."""
        self._seeds = address.nodes
        self._node_at = node_at
        self._let_go = let_go
        self._lock = threading.Lock()
        self._nodes: dict[Place, Node] = {place: node_at(place) for place in self._seeds}
        self._masters: list[Node | None] = [None] * SLOTS
        self._redirects = 0
        self._past: Counter[str] = Counter()  # what nodes that are no more have counted
        self._topology = Topology(address, timeout_s, self._who_may_know, self._adopt, self._doubt)

    def await_first(self) -> None:
        """As Routes.await_first: who comes first waits for what the nodes say of themselves."""
        self._topology.await_first()

    def owner(self, key: bytes) -> Node:
        """As Routes.owner."""
        return self._master(slot_of(key))

    def parts(self, keys: Sequence[bytes], size: int) -> list[Part]:
        """As Routes.parts: those of a slot together, in the order of their first keys."""
        return [Part(self._master(slot), part) for slot, mine in by_slot(keys).items() for part in parts_of(mine, size)]

    def follow(self, node: Node, reply: BackendError) -> Hop | None:
        """As Routes.follow; what is said is believed at once, and checked soon."""
        redirect, here = redirect_of(reply), node.link.address
        if redirect is None or not isinstance(here, Address):
            return None
        with self._lock:
            target = self._known((redirect.host or here.host, redirect.port))
            if target is None:
                return None
            self._redirects += 1
            if not redirect.is_ask:
                self._masters[redirect.slot] = target
        if not redirect.is_ask:
            self._topology.request()
        return Hop(target, redirect.is_ask)

    def nodes(self) -> Sequence[Node]:
        """As Routes.nodes."""
        with self._lock:
            return tuple(self._nodes.values())

    def stats(self) -> dict[str, int]:
        """As Routes.stats."""
        with self._lock:
            total = Counter(self._past)
            for node in self._nodes.values():
                total.update(node.stats())
            masters = len({node for node in self._masters if node is not None})
            own = {"nodes": masters, "redirects": self._redirects, "refreshes": self._topology.refreshes}
            return {**total, **own}

    def close(self) -> None:
        """As Routes.close."""
        self._topology.close()
        for node in self.nodes():
            node.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _master(self, slot: int) -> Node:
        node = self._masters[slot]
        if node is None:
            seeds = [self._nodes[place] for place in self._seeds]
            node = next((seed for seed in seeds if not seed.link.waiting), seeds[0])
        if node.link.waiting or self._topology.is_wanted:
            self._topology.request()  # somebody may have taken its place
        return node

    def _known(self, place: Place) -> Node | None:
        """The node at a place, made if need be; None when there are too many."""
        node = self._nodes.get(place)
        if node is None and len(self._nodes) < NODES_MAX:
            node = self._nodes[place] = self._node_at(place)
        return node

    def _who_may_know(self) -> list[Place]:
        with self._lock:
            up = [place for place, node in self._nodes.items() if not node.link.waiting]
        return list(dict.fromkeys((*up, *self._seeds)))

    def _doubt(self, silent: Sequence[Place]) -> None:
        """These have not answered: as long as nobody has ever told his cluster, do not try each, and say so, again."""
        with self._lock:
            is_known = any(node is not None for node in self._masters)
            doubted = [] if is_known else [self._nodes[place] for place in silent if place in self._nodes]
        for node in doubted:
            node.link.doubt()

    def _adopt(self, ranges: list[SlotRange]) -> None:
        masters: list[Node | None] = [None] * SLOTS
        with self._lock:
            for first, last, host, port in ranges:
                node = self._known((host, port))
                masters[first : last + 1] = [node] * (last + 1 - first)
            self._masters = masters
            stay = {*masters, *(self._nodes[place] for place in self._seeds)}
            gone = [node for node in self._nodes.values() if node not in stay]
            self._nodes = {place: node for place, node in self._nodes.items() if node in stay}
        for node in gone:
            self._let_go(node)
            node.close()
            with self._lock:
                self._past.update(node.stats())
                del self._past["connections"]
