"""A server's GPU memory in this process, as the GPU that this process computes with sees it.

The server hands its memory out by the driver's own descriptors (KV.ATTACH GPU; storage/memory/device_arena.py), and the
GPU of this process reads and writes it over the link between the two. No processor can. So its parts are places, which
a GPU's copies are given by their address, and reading their bytes in Python would end the process. A backend gives
such parts only when it was told to (RemoteBackend.use_gpu).
"""

from __future__ import annotations

import ctypes
import threading
import weakref

from kvredis.storage.errors import BackendError
from kvredis.storage.memory.device_arena import DeviceArena


class GpuMemory:
    """`nbytes` of a server's GPU memory, mapped. What is lent of it keeps the mapping in place, and so does this
    object; when the last of all these has gone it is unmapped."""

    def __init__(self, arena: DeviceArena) -> None:
        self.nbytes = arena.nbytes
        self.arena = arena
        whole = (ctypes.c_ubyte * arena.nbytes).from_address(arena.address)
        self._view = memoryview(whole)
        # At the interpreter's end the driver frees all itself, and may be gone already.
        weakref.finalize(self, arena.close).atexit = False

    def part(self, offset: int, length: int) -> memoryview:
        """Name `length` bytes from `offset` on. Raises BackendError when they are not all in it."""
        if not 0 <= offset <= offset + length <= self.nbytes:
            raise BackendError(f"{length} bytes at {offset} are not in a GPU memory of {self.nbytes}")
        return self._view[offset : offset + length]


_mapped: weakref.WeakValueDictionary[tuple[str, int], GpuMemory] = weakref.WeakValueDictionary()
_mapping = threading.Lock()


def gpu_memory(run_id: str, descriptor: int, nbytes: int, number: int) -> GpuMemory:
    """Give the memory of the server process `run_id` as our GPU `number` sees it, mapped once however many connections
    there are. The descriptor stays the caller's. Raises DeviceError when that GPU cannot map it."""
    with _mapping:
        memory = _mapped.get((run_id, number))
        if memory is None or memory.nbytes != nbytes:
            memory = _mapped[run_id, number] = GpuMemory(DeviceArena.attach(descriptor, nbytes, number))
        return memory
