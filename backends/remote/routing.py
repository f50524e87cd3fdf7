"""Which server a key belongs to: always the same one, or, in a cluster, the one that owns the key's slot.

Each key has its slot, each slot its master. Chunks of one prompt carry a hash tag, so that a lookup is one question to
one node; keys without tags are asked for node by node, all of a node together.

A node that does not have a slot any more says who has it (MOVED), or who has a key of it already (ASK). What was asked
goes there at once, and so does a value under way, out of the same memory. Meanwhile the whole topology is learnt anew.
A node that is lost makes its blocks misses and leaves the others alone; when a replica takes its place, that is learnt.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from kvredis.backends.config.url import Address, ClusterAddress
from kvredis.backends.resp.cluster import SLOTS, Place, SlotRange, Topology, by_slot, redirect_of, slot_of
from kvredis.storage.errors import BackendError

from .pool import Node

HOPS_MAX: Final = 5
"""How often what is asked or stored is sent on; a command that is sent in circles is given up."""
NODES_MAX: Final = 1000
"""Beyond that Redis Cluster does not go, and a server that makes up redirections shall not either."""


class Part(NamedTuple):
    """Keys of one command, and the node that is asked."""

    node: Node
    keys: Sequence[bytes]


class Hop(NamedTuple):
    """Where a server has sent us: to another, which with `asking` has the key though not yet the slot."""

    node: Node
    asking: bool


class Routes(Protocol):
    """The servers of one backend. Any thread may call anything; only `await_first` waits."""

    def await_first(self) -> None:
        """Wait, for a bounded time, while it is not known yet at all which servers there are."""
        ...

    def owner(self, key: bytes) -> Node:
        """Give the server of a key, or one that knows it."""
        ...

    def parts(self, keys: Sequence[bytes], size: int) -> list[Part]:
        """Cut keys for commands of several keys, of `size` at most; the order within a part is theirs."""
        ...

    def follow(self, node: Node, reply: BackendError) -> Hop | None:
        """Say where to go with what `node` has answered so; None: nowhere, it is an error like others."""
        ...

    def nodes(self) -> Sequence[Node]:
        """List the servers known now."""
        ...

    def stats(self) -> dict[str, int]:
        """Give the nodes' counters, added up, and its own."""
        ...

    def close(self) -> None:
        """Close the nodes."""
        ...


class OneServer:
    """Routes to the only server."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def await_first(self) -> None:
        """As Routes.await_first: it is known."""

    def owner(self, key: bytes) -> Node:
        return self._node

    def parts(self, keys: Sequence[bytes], size: int) -> list[Part]:
        return [Part(self._node, part) for part in parts_of(keys, size)]

    def follow(self, node: Node, reply: BackendError) -> Hop | None:
        """As Routes.follow: a server that redirects us is a cluster, and was not given as one."""
        return None

    def nodes(self) -> Sequence[Node]:
        return (self._node,)

    def stats(self) -> dict[str, int]:
        return self._node.stats()

    def close(self) -> None:
        self._node.close()


class ClusterRoutes:
    """Slots and their masters, as far as they were told; of a slot that was not named yet, any node may know."""

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
        """As Routes.await_first: the first caller waits for what the nodes say of themselves."""
        self._topology.await_first()

    def owner(self, key: bytes) -> Node:
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
        with self._lock:
            return tuple(self._nodes.values())

    def stats(self) -> dict[str, int]:
        with self._lock:
            total = Counter(self._past)
            for node in self._nodes.values():
                total.update(node.stats())
            masters = len({node for node in self._masters if node is not None})
            own = {"nodes": masters, "redirects": self._redirects, "refreshes": self._topology.refreshes}
            return {**total, **own}

    def close(self) -> None:
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
            self._topology.request()  # another may have taken its place
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
        """These have not answered: as long as no node has ever told its cluster, do not try each, and say so, again."""
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


def parts_of(keys: Sequence[bytes], size: int) -> list[Sequence[bytes]]:
    """Cut a long list of keys for several commands."""
    return [keys[start : start + size] for start in range(0, len(keys), size)]
