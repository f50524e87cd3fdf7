"""The backend of an engine whose blocks live on a server: kvredis, or any other that speaks Redis' protocol.

Connections are opened when first needed: one for questions, up to `connections` for what is stored, and as many or more
for each load under way, borrowed for as long as it lasts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvredis.backends.config.url import Address, SentinelAddress
from kvredis.backends.shm.buffers import Staging

from .blocks import RemoteBlocks
from .health import Link
from .pool import Node
from .routing import OneServer


class RemoteBackend(RemoteBlocks):
    """Blocks on the server at `address`, or on the master of those days where Sentinels know it."""

    def __init__(
        self,
        address: Address | SentinelAddress,
        staging: Staging,
        *,
        connections: int | None = None,
        timeout_s: float = 10.0,
        connect_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        keep: bool = False,
    ) -> None:
        """With `keep` `staging` is a nearer tier, and hears by a commit of each value that the server has taken."""
        self.address = address
        # Whose own memory the GPU knows wants the server's known to it as well.
        page_lock = staging.arena.page_locked == "cuda"
        link = Link(address, timeout_s, clock, connect_timeout_s=connect_timeout_s, page_lock=page_lock)
        node = Node(link, connections)
        super().__init__(str(address), lambda outbox: OneServer(node), staging, timeout_s=timeout_s, keep=keep)

    def stats(self) -> dict[str, int | float | str]:
        """As RemoteBlocks.stats."""
        return {"kind": "remote", **super().stats()}
