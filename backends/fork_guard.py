"""Whether this process has opened something itself, or was forked from the one that has.

A fork shares sockets, on which each would take the other's answers for its own, and the arena's pages, into which each
would write over the other's blocks. So a backend serves the process that opened it alone; in a forked one every lookup
is a miss.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


class Home:
    """The process that this was made in."""

    __slots__ = ("_pid", "_told")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._told = False

    def is_here(self) -> bool:
        """Say whether it is this one; if not, the log is told once."""
        if os.getpid() == self._pid:
            return True
        if not self._told:
            self._told = True
            logger.warning("this process was forked from the one that opened its cache: nothing is cached in here")
        return False
