"""Threads that copy in the background ask the kernel for long time slices, so that a thread that wakes goes before
them.

A copy of a block keeps a processor for a millisecond or two. A thread that wakes there meanwhile, an engine whose step
is over, say, waits by Linux' EEVDF scheduler until the copy's time slice is used up, although it has run far less: it
is let in at once only where it asks for shorter slices than the thread that runs (PREEMPT_SHORT). Shares of the
processor are the same, whatever the slice. Linux 6.12 and newer take a slice of 0.1 to 100 ms from sched_setattr(2), in
`sched_runtime` (Documentation/scheduler/sched-eevdf.rst); older ones ignore it.
"""

import ctypes
import os
import platform
import sys
import threading
from contextlib import suppress
from typing import Final

SLICE_NS: Final = 20_000_000
"""Several times the 2.8 ms that a slice has on many processors by default."""

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""The system call's number; C libraries do not have it all."""
_RESET_ON_FORK: Final = 0x40000000
_FLAG_RESET_ON_FORK: Final = 1

_asked = threading.local()


class SchedAttributes(ctypes.Structure):
    """struct sched_attr of <linux/sched/types.h>, as far as its first version goes."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def take_long_slices() -> None:
    """Ask for the calling thread, once; those that it begins have them too. Its policy and niceness stay; a thread of
    another than the default policy stays as it is, and a kernel that will not is not asked again."""
    if hasattr(_asked, "once"):
        return
    _asked.once = True
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return
    with suppress(OSError):  # a sandbox may forbid all of it
        policy = os.sched_getscheduler(0)
        if policy & ~_RESET_ON_FORK != os.SCHED_OTHER:
            return
        wanted = SchedAttributes(
            size=ctypes.sizeof(SchedAttributes),
            policy=os.SCHED_OTHER,
            flags=_FLAG_RESET_ON_FORK if policy & _RESET_ON_FORK else 0,
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            runtime=SLICE_NS,
        )
        ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0)
