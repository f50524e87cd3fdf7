"""A prefetch on a server, or on several: what KV.PREFETCH said, and KV.JOB to ask how far it has come.

A server that is lost, or has forgotten the job, cannot tell any more: then it is finished, because nobody shall wait
for it. A map is an array of names and values here, since we speak RESP2.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Final

from kvredis.backends.resp.connection import Reply, read_map

from .pool import Node

WAIT_SLICE_S: Final = 1.0
"""How long one KV.JOB WAIT takes at most, so that a server that answers late is not taken for one that hangs."""
ANSWER_S: Final = 0.5
"""How much longer than asked for a wait may take, as an answer has its way to come."""


class RemotePrefetch:
    """A base.Prefetch, empty until `add`. It asks where nobody waits behind it; a wait is cut into slices of
    `slice_s_max`."""

    def __init__(self, slice_s_max: float = WAIT_SLICE_S) -> None:
        self.queued = self.resident = self.missing = self.no_room = 0
        self.refused = ""
        self._slice_s = min(slice_s_max, WAIT_SLICE_S)
        self._jobs: list[tuple[Node, bytes]] = []  # those that may be under way

    def add(self, node: Node, reply: Reply) -> None:
        """Add what `node` has answered to KV.PREFETCH, or to PREFETCH, which tells how many are queued and no more;
        None: nothing."""
        if reply is None:
            return
        said = {"queued": reply} if isinstance(reply, int) else read_map(reply)
        counts = [said.get(name, 0) for name in ("queued", "resident", "missing", "no-room")]
        counted = [count for count in counts if isinstance(count, int) and count >= 0]
        if not said or len(counted) < len(counts):
            self.refused = str(reply)[:200]
            return
        self.queued += counted[0]
        self.resident += counted[1]
        self.missing += counted[2]
        self.no_room += counted[3]
        job = said.get("job")
        if isinstance(job, int | bytes):
            self._jobs.append((node, job if isinstance(job, bytes) else b"%d" % job))

    @property
    def is_finished(self) -> bool:
        """As Prefetch.is_finished; a round trip until it is."""
        return self._finish()

    def wait(self, timeout_s: float) -> bool:
        """As Prefetch.wait."""
        until_s = time.monotonic() + timeout_s
        with suppress(TimeoutError):  # a server that hangs, where one that is merely slow would still be asked
            while not self._finish(left_s := max(until_s - time.monotonic(), 0.0), left_s + ANSWER_S):
                if time.monotonic() >= until_s:
                    return False
            return True
        return False

    def cancel(self) -> None:
        """As Prefetch.cancel."""
        for node, job in self._jobs:
            node.ask_aside(b"KV.JOB", job, b"CANCEL")

    def _finish(self, timeout_s: float = 0.0, answer_s: float = math.inf) -> bool:
        """Cross off the jobs that are over, waiting a slice of `timeout_s` for the first that is not. TimeoutError when
        a server does not answer within `answer_s`."""
        wait_ms = int(min(timeout_s, self._slice_s) * 1000)
        wait = (b"WAIT", b"%d" % wait_ms) if wait_ms else ()
        for node, job in tuple(self._jobs):
            status = read_map(node.ask_aside(b"KV.JOB", job, *wait, within_s=answer_s)).get("status")
            if status in (b"running", "running"):
                return False
            with suppress(ValueError):  # another thread has asked as well
                self._jobs.remove((node, job))
        return True
