"""GPU memory shared with clients of the same host: what they are given, the leases they hold there, and how they wait
when room is short.

KV.ATTACH GPU hands a client the memory itself, which it maps for its own GPU (storage/memory/device_arena.py), and from
then on KV.LEASE on its connection answers places there for the blocks that lie there. CUDA shares no memory that others
may read and not write, so the client is *trusted*: it must run as the server's own user, which could do the server harm
anyhow, and its ACL user must be allowed every key. What it holds ends as its leases of the arena do.

Addresses on a connection are one range: the arena's offsets come first, those of the GPU from `gpu-base` on, which is
the arena's size. So KV.RELEASE takes both.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from kvredis.server.client.blocked import Blocked, Reason, tell_loop
from kvredis.server.client.client import Client, Host
from kvredis.server.net.zerocopy import peer_pid
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import Reply, bulk, error, integer
from kvredis.storage.entry import Entry, Found
from kvredis.storage.store import Store
from kvredis.storage.tiering.gpu import SPILL_WAIT_S, GpuLease, GpuReservation, GpuTier, place_length

SHARE: Final = 2
"""One client may keep half of the GPU's memory leased, and half of it reserved."""

NO_GPU: Final = error("ERR there is no GPU memory here (--gpu-memory)")
NOT_TRUSTED: Final = error("NOPERM GPU memory is for the server's own user, who may write to all of it")
NOT_EVERY_KEY_TO_WRITE: Final = error("NOPERM GPU memory lies open to writing, and this user may not write every key")
NOT_ATTACHED_GPU: Final = error("ERR this connection is not attached to GPU memory: KV.ATTACH GPU")
GPU_SHARE_USED: Final = error("OOM this connection has leased its share of the GPU's memory")


class GpuClient:
    """What one attached connection holds on the GPU. `base` is where its addresses begin."""

    def __init__(self, store: Store, tier: GpuTier, pid: int) -> None:
        self.base = store.arena.nbytes
        self._tier = tier
        self._store = store
        self._share_bytes = tier.arena.nbytes // SHARE
        self._held: dict[int, list[GpuLease]] = {}  # by offset; those at one place by when their limits come
        self._held_bytes = self._count = 0
        self._pidfd = -1
        if pid > 0:
            with suppress(OSError):  # a kernel before 5.3, or a process of another namespace
                self._pidfd = os.pidfd_open(pid)

    @property
    def leases(self) -> int:
        """How many leases it holds on the GPU."""
        return sum(lease.held for leases in self._held.values() for lease in leases)

    def elsewhere(self, names: Sequence[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
        """Those of `names` that are not on the GPU."""
        return [name for name in names if (entry := self._store.find(*name)) is None or not self._tier.has(entry)]

    def lease(self, key: bytes, space: int, limit_s: float, leases_max: int) -> bytes | None:
        """Lease a block on the GPU: the reply that says where, or an error; None when it is not there."""
        lease = self._tier.lease(key, space, limit_s)
        if lease is None:
            return None
        if not self._fits(lease, leases_max):
            self._forget_ended()
            if not self._fits(lease, leases_max):
                lease.release()
                return GPU_SHARE_USED
        held = self._held.setdefault(lease.offset, [])
        self._held_bytes += max(0, lease.nbytes - _nbytes(held))
        self._count += 1
        held.append(lease)
        held.sort(key=_limit_s)
        return b"*3\r\n:%d\r\n:%d\r\n$3\r\ngpu\r\n" % (self.base + lease.offset, lease.length)

    def used_in_memory(self, found: Sequence[Found]) -> None:
        """Note what the client was given in memory, since it was not on the GPU: it may come there."""
        self._tier.lift(entry for entry in found if isinstance(entry, Entry))

    def release(self, words: Sequence[bytes]) -> tuple[list[bytes], int]:
        """End the lease at each address that is on the GPU, as AttachedClient.release: the words that mean none there,
        and how many were still held."""
        others, ended = [], 0
        for word in words:
            address = parse_integer(word)
            if address is None or address < self.base:
                others.append(word)
                continue
            held = self._held.get(address - self.base)
            if held:
                before = _nbytes(held)
                ended += held.pop(0).release()
                self._held_bytes -= before - _nbytes(held)
                self._count -= 1
                if not held:
                    del self._held[address - self.base]
        return others, ended

    def has_ended(self) -> bool:
        """Whether the client's process is known to have ended, and what its GPU did for it with it."""
        if self._pidfd < 0:
            return False
        look = select.poll()  # select(2) knows no descriptor above 1023
        look.register(self._pidfd, select.POLLIN)
        return bool(look.poll(0))

    def close(self) -> None:
        """End all of it with the connection. `has_ended` can be asked while room is kept from others for its sake."""
        held, self._held = self._held, {}
        self._held_bytes = self._count = 0
        for leases in held.values():
            for lease in leases:
                lease.release()

    def _forget_ended(self) -> None:
        """Count leases whose limit has passed no more; a KV.RELEASE of one finds nothing to end either way."""
        for leases in self._held.values():
            leases[:] = [lease for lease in leases if lease.held]
        self._held = {offset: leases for offset, leases in self._held.items() if leases}
        self._held_bytes = sum(map(_nbytes, self._held.values()))
        self._count = sum(map(len, self._held.values()))

    def _fits(self, lease: GpuLease, leases_max: int) -> bool:
        more = max(0, lease.nbytes - _nbytes(self._held.get(lease.offset, ())))
        return self._held_bytes + more <= self._share_bytes and self._count < leases_max

    def __del__(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


def _nbytes(leases: Sequence[GpuLease]) -> int:
    """What leases at one place take of the client's share."""
    return max((lease.nbytes for lease in leases), default=0)


def _limit_s(lease: GpuLease) -> float:
    return lease.until_s


class _Server(Host, Protocol):
    pass


class SharedGpu:
    """The GPU memory of one server, as its clients see it, and those who wait for room there."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._waiting: dict[Client, float] = {}  # since when
        self._refused: dict[Client, float] = {}  # when last, behind a wait

    @property
    def tier(self) -> GpuTier | None:
        """The store's tier on the GPU; None without one, and when the GPU has been lost."""
        tier = self._server.store.gpu
        return None if tier is None or tier.is_lost else tier

    def start(self) -> None:
        """The loop runs: let the tier say when it has made room."""
        loop = asyncio.get_running_loop()
        if self._server.store.gpu is not None:
            self._server.store.gpu.call_on_room(lambda: tell_loop(loop, self.tick))

    def tick(self) -> None:
        """Let those ask again who wait for room."""
        if self._waiting:
            self._server.blocked.unblock_all(Reason.GPU_ROOM)

    def forget(self, session: Client) -> None:
        """Forget a client that has gone."""
        self._waiting.pop(session, None)
        self._refused.pop(session, None)

    def objection(self, session: Client, *, is_own_user: bool) -> bytes | None:
        """Why a client may not be given the memory, or None."""
        if self.tier is None:
            return NO_GPU
        if not is_own_user:
            return NOT_TRUSTED
        return None if session.user.root.all_keys else NOT_EVERY_KEY_TO_WRITE

    def facts(self, tier: GpuTier) -> list[tuple[Reply, Reply]]:
        """What KV.ATTACH GPU tells beside what KV.ATTACH does."""
        arena = tier.arena
        return [
            (bulk("gpu-bytes"), integer(arena.nbytes)),
            (bulk("gpu-base"), integer(self._server.store.arena.nbytes)),
            (bulk("gpu-uuid"), bulk(arena.device.uuid)),
            (bulk("gpu-granularity"), integer(arena.device.granularity_bytes)),
        ]

    def attached(self, tier: GpuTier, peer: socket.socket) -> GpuClient:
        """What a connection holds that has been given the memory."""
        return GpuClient(self._server.store, tier, peer_pid(peer))

    def reserve(
        self, session: Client, client: GpuClient, key: bytes, length: int, reserved_bytes: int
    ) -> GpuReservation | Blocked | None:
        """Room for a value on the GPU beside what the client has reserved there; Blocked: the command is to run again
        when that is unblocked; None: there is none."""
        tier = self.tier
        if tier is None or (reserved_bytes and reserved_bytes + place_length(length) > tier.arena.nbytes // SHARE):
            return None
        now_s = self._server.now_s()
        since_s = self._waiting.get(session, now_s)
        # What is asked for behind a wait that was for nothing, or with it, does not wait as long again.
        patient = now_s - since_s < SPILL_WAIT_S <= now_s - self._refused.get(session, -math.inf)
        room = tier.reserve(key, length, session.space, drop=not patient)
        if room is None and patient and place_length(length) <= tier.arena.nbytes:
            tier.stats.spill_waits += session not in self._waiting
            self._waiting[session] = since_s
            return session.wait(Reason.GPU_ROOM)
        self._waiting.pop(session, None)
        if room is None and not patient:
            self._refused[session] = now_s
        elif room is not None:
            room.is_gone = client.has_ended
        return room
