"""Leases on blocks that lie in a server's own memory, or in its GPU's: they end with the connection they came by."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from kvredis.storage.memory.copy import View

from .arena import SharedArena
from .gpu_memory import GpuMemory


class Holder(Protocol):
    """The connection of some leases, which end with it."""

    @property
    def is_open(self) -> bool:
        """Whether neither side has hung up."""
        ...

    def end_lease(self, address: int, length: int) -> None:
        """Let the server have the room again, soon."""
        ...


class SharedLease:
    """A value in the server's own memory; a base.Lease. Its bytes are sure as long as `held` says so."""

    __slots__ = ("_address", "_connection", "_memory", "_until_s", "length", "view")

    def __init__(
        self,
        connection: Holder,
        memory: SharedArena | GpuMemory,
        address: int,
        length: int,
        until_s: float,
        base: int = 0,
    ) -> None:
        """`base` is what the server calls the beginning of `memory`. It promises the bytes until `until_s` of
        time.monotonic(), and while the connection is open. Raises BackendError for a place that is not there."""
        # Held here too: a thread that copies to a GPU just now does so from page-locked memory even if the connection
        # breaks.
        self._memory = memory
        self.view = memory.part(address - base, length)
        self.length = length
        """Bytes of payload."""
        self._connection: Holder | None = connection
        self._address = address
        self._until_s = until_s

    @property
    def held(self) -> bool:
        """As Lease.held: not released, the limit not passed, and the server has not hung up, nor have we. It closes a
        connection before it ends that one's leases, so that looking afterwards is soon enough."""
        connection = self._connection
        return connection is not None and time.monotonic() < self._until_s and connection.is_open

    @property
    def lasts(self) -> bool:
        """Whether it may be `held`: not released, and the limit not passed. Costs no system call."""
        return self._connection is not None and time.monotonic() < self._until_s

    def release(self) -> None:
        """End the hold; a second call does nothing. Never waits: the server hears of it soon."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end_lease(self._address, self.length)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class GpuLease(SharedLease):
    """A block in the server's GPU memory. `view` is a place for a GPU's copies: no processor may read it."""

    __slots__ = ("_offset", "_on_gpu")

    def __init__(
        self, connection: Holder, memory: GpuMemory, address: int, length: int, until_s: float, base: int
    ) -> None:
        super().__init__(connection, memory, address, length, until_s, base)
        self._on_gpu = memory
        self._offset = address - base

    def read_into(self, room: View) -> None:
        """Copy the first bytes to host memory, as many as there is room for. Raises DeviceError when the GPU does not
        give them."""
        self._on_gpu.arena.read(self._offset, room)

    def begin_read(self, room: View) -> None:
        """The same, but they have come when this thread has called `settle`; into page-locked memory it does not
        wait."""
        self._on_gpu.arena.begin_read(self._offset, room)

    def settle(self) -> None:
        """Wait for what this thread has begun to read of this GPU's memory. Raises DeviceError."""
        self._on_gpu.arena.settle()
