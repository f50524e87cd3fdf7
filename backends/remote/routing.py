"""Which server a key belongs to: always the same one, or, in a cluster, the one that owns the key's slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from kvredis.storage.errors import BackendError

from .pool import Node

HOPS_MAX: Final = 5
"""How often what is asked or stored is sent on; whoever is sent in circles gives up."""


class Part(NamedTuple):
    """Keys of one command, and who is asked."""

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
        """As Routes.owner."""
        return self._node

    def parts(self, keys: Sequence[bytes], size: int) -> list[Part]:
        """As Routes.parts."""
        return [Part(self._node, part) for part in parts_of(keys, size)]

    def follow(self, node: Node, reply: BackendError) -> Hop | None:
        """As Routes.follow: whoever redirects us is a cluster, and was not given as one."""
        return None

    def nodes(self) -> Sequence[Node]:
        """As Routes.nodes."""
        return (self._node,)

    def stats(self) -> dict[str, int]:
        """As Routes.stats."""
        return self._node.stats()

    def close(self) -> None:
        """As Routes.close."""
        self._node.close()


def parts_of(keys: Sequence[bytes], size: int) -> list[Sequence[bytes]]:
    """Cut a long list of keys for several commands."""
    return [keys[start : start + size] for start in range(0, len(keys), size)]
