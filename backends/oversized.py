"""Blocks that memory will never hold: who stores them is told once, as nothing else would say why there are no hits."""

from __future__ import annotations

import logging

from kvredis.storage.entry import extent_length
from kvredis.storage.memory.arena import Arena

logger = logging.getLogger(__name__)


class Fitting:
    """What fits into `arena`. Any thread may ask; two that ask at once may both tell."""

    __slots__ = ("_nbytes", "_told")

    def __init__(self, arena: Arena) -> None:
        self._nbytes = arena.nbytes
        self._told = False

    def look_at(self, length: int) -> None:
        """Tell the log once if no value of `length` bytes can be stored."""
        if extent_length(length) > self._nbytes and not self._told:
            self._told = True
            text = "a block of %d bytes is longer than all of max_local_cpu_size (%d bytes): none of them is stored"
            logger.warning(text, length, self._nbytes)
