"""The time slice that a thread has asked the kernel for, to look at."""

import ctypes
import os
import platform

from kvredis.storage.memory.sched import SchedAttributes

_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def attributes(thread_id: int) -> SchedAttributes:
    """What sched_getattr(2) says of a thread, 0 for the calling one, of any process."""
    found = SchedAttributes()
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SCHED_GETATTR[platform.machine()]
    if libc.syscall(number, thread_id, ctypes.byref(found), ctypes.sizeof(found), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def slice_ns(thread_id: int = 0) -> int:
    """Nanoseconds; 0 from a kernel before 6.12, which knows none."""
    return int(attributes(thread_id).runtime)


def has_slices() -> bool:
    """Whether this kernel knows them: it tells of every thread the one that it has by default."""
    return slice_ns() > 0
