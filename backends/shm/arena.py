"""A server's arena in this process: the pages in which the server on this host keeps its blocks, mapped to be read.

WHY a reader cannot be hurt: the memory is a memfd that is sealed against shrinking, which is looked at before anything
is mapped, so no page of the mapping ever lacks memory behind it, whatever the server does, and it lives as long as a
process maps it, also when the server was killed. And the reader cannot hurt: the descriptor came opened for reading,
and the seals forbid any process a new writable mapping.

WHY nothing is done about fork (MADV_DONTFORK): that advice keeps copy-on-write from moving pages under a device that
copies from them. A shared mapping is never copied on write, and a child that inherits it can only read it.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
import threading
import weakref
from contextlib import suppress
from typing import Any

from kvredis.storage.background import start_thread
from kvredis.storage.errors import BackendError
from kvredis.storage.memory.copy import address_of
from kvredis.storage.memory.cuda import cuda_driver
from kvredis.storage.memory.page_lock import CudaLock

logger = logging.getLogger(__name__)


class SharedArena:
    """`nbytes` of a server's memory, read-only. Slices of `view` keep the mapping in place, and so does this object;
    when the last of all these has gone it is unmapped.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Map what `descriptor`, which stays the caller's, stands for. Raises BackendError when that is not a memfd of
        `nbytes`, opened for reading alone, that can never shrink."""
        check_memory(descriptor, nbytes)
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            raise BackendError("the shared memory is not opened for reading alone")
        try:
            mapping = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise BackendError(f"the shared memory cannot be mapped: {error}") from error
        self.nbytes = nbytes
        self.view = memoryview(mapping)
        self.page_locked = "no"
        self.locking: threading.Thread | None = None
        """What registers it with a GPU's driver, or has."""

    def part(self, offset: int, length: int) -> memoryview:
        """View `length` bytes from `offset` on. Raises BackendError when they are not all in it."""
        if not 0 <= offset <= offset + length <= self.nbytes:
            raise BackendError(f"{length} bytes at {offset} are not in a shared memory of {self.nbytes}")
        return self.view[offset : offset + length]

    def lock(self, driver: Any = None) -> None:
        """Register the memory with the GPU's driver, so that copies to the GPU run at full speed; `page_locked` says
        whether that went well. Takes 20 to 120 ms/GiB. What cannot be registered can be read all the same."""
        driver = cuda_driver() if driver is None else driver
        taken = (
            "no CUDA driver"
            if driver is None
            else CudaLock.take(address_of(self.view), self.nbytes, driver, read_only=True)
        )
        if isinstance(taken, str):
            logger.warning("the server's memory is not registered with the GPU (%s): copies to it are slower", taken)
            return
        # Runs before the mapping can go. At the interpreter's end the driver may be gone already, and frees all itself.
        weakref.finalize(self, taken.release).atexit = False
        self.page_locked = taken.name


_mapped: weakref.WeakValueDictionary[tuple[str, int, int], SharedArena] = weakref.WeakValueDictionary()
_mapping = threading.Lock()


def shared_arena(run_id: str, descriptor: int, nbytes: int, *, page_lock: bool = False) -> SharedArena:
    """Give the arena of the server process `run_id`, mapped once however many connections there are to it.

    With `page_lock` a new mapping is registered with the GPU's driver, by a thread of its own. Raises as SharedArena.
    """
    found = os.fstat(descriptor)
    key = (run_id, found.st_dev, found.st_ino)
    with _mapping:
        arena = _mapped.get(key)
        if arena is not None and arena.nbytes == nbytes:
            return arena
        arena = _mapped[key] = SharedArena(descriptor, nbytes)
        if page_lock:
            with suppress(RuntimeError):  # the interpreter ends, or has no threads left
                arena.locking = start_thread(arena.lock, "kvredis page lock")
    return arena


def wait_locked() -> None:
    """Block until whatever is being registered with a GPU's driver has been, or could not be."""
    with _mapping:
        arenas = list(_mapped.values())
    for arena in arenas:
        if arena.locking is not None:
            arena.locking.join()


def check_memory(descriptor: int, nbytes: int) -> None:
    """Raises BackendError unless `descriptor` is memory of `nbytes` that no process can take away from one that maps
    it."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes or nbytes <= 0:
        raise BackendError(f"the shared memory is not a file of {nbytes} bytes")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BackendError(f"the shared memory is no memfd: {error.strerror}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise BackendError("the shared memory is not sealed against shrinking")
