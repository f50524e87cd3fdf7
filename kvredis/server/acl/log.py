"""ACL LOG: who was refused what, so that an operator sees a wrong rule, a wrong password or an intruder.

Equal refusals within a minute are one entry with a count, and the log is bounded in entries and in bytes an entry: it
is filled by whom it is meant to catch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

GROUPED_MS = 60_000
GROUP_SEARCH = 10
"""How many of the latest entries are compared with a new one."""

WORD_BYTES_MAX = 1024
"""How much of a key, channel or user name is kept."""


@dataclass(slots=True)
class Refusal:
    """One entry. `reason`: command, key, channel or auth; `context`: toplevel or multi; `object`: what was refused."""

    reason: str
    context: str
    object: bytes
    username: bytes
    client_info: bytes
    number: int = 0
    count: int = 1
    created_ms: int = 0
    updated_ms: int = 0

    def is_like(self, other: Refusal) -> bool:
        """Whether both are one thing that happened twice; when they did is not asked."""
        return (self.reason, self.context, self.object, self.username) == (
            other.reason,
            other.context,
            other.object,
            other.username,
        )


def wall_clock_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class AclLog:
    """The latest first. `denials` counts by reason since the start or `reset_counts`: acl_access_denied_* of INFO."""

    def __init__(self, clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        self.entries: deque[Refusal] = deque()
        self.denials: dict[str, int] = {}
        self.reset_counts()
        self.clock_ms = clock_ms
        self._numbers = 0

    def note(self, refusal: Refusal, entries_max: int) -> None:
        """Enter a refusal that has just happened, and forget what is beyond `entries_max`."""
        self.denials[refusal.reason] += 1
        now_ms = self.clock_ms()
        refusal.object, refusal.username = refusal.object[:WORD_BYTES_MAX], refusal.username[:WORD_BYTES_MAX]
        for known in islice(self.entries, GROUP_SEARCH):
            if known.is_like(refusal) and abs(now_ms - known.updated_ms) <= GROUPED_MS:
                known.count += 1
                known.updated_ms, known.client_info = now_ms, refusal.client_info
                self.entries.remove(known)
                self.entries.appendleft(known)
                return
        refusal.number, refusal.created_ms, refusal.updated_ms = self._numbers, now_ms, now_ms
        self._numbers += 1
        self.entries.appendleft(refusal)
        while len(self.entries) > entries_max:
            self.entries.pop()

    def reset_counts(self) -> None:
        """CONFIG RESETSTAT."""
        self.denials.update(dict.fromkeys(("auth", "command", "key", "channel"), 0))
