"""The end of a load whose generator the caller did not close: at once, unless the garbage collector found it in a
cycle.

WHY not then: the collector runs whenever something is allocated, also while its thread holds a lock of the store, of
its disk or of a connection, and ending a load takes these locks. So the backend ends such a load with its next call.
Nor does a load end in a process that was forked meanwhile: its leases are the parent's.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable

from .fork_guard import Home


class _Here(threading.local):
    """What this thread is doing."""

    collects = False


_here = _Here()


def _note(phase: str, info: object) -> None:
    _here.collects = phase == "start"


class Endings:
    """What is done at the end of each load of one backend. Any thread may call anything."""

    def __init__(self) -> None:
        self._put_off: deque[Callable[[], object]] = deque()
        self._home = Home()
        if _note not in gc.callbacks:
            gc.callbacks.append(_note)

    def end(self, ending: Callable[[], object]) -> None:
        """Call `ending`: now, or at the next `catch_up` if this thread collects garbage."""
        if _here.collects:
            self._put_off.append(ending)
        elif self._home.is_here():
            ending()

    def catch_up(self) -> None:
        """Call what was put off. At the beginning of what a backend is asked for, where its thread holds no lock."""
        while self._put_off and self._home.is_here():
            try:
                ending = self._put_off.popleft()
            except IndexError:  # another thread was quicker
                return
            ending()
