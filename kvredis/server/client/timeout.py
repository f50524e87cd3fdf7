"""Who has been silent for `timeout` seconds: no command has ended and, as in Redis, no byte has come or gone.

WHY bytes count: over a slow line a value may take longer than that to come, and a reply to be taken. They are looked at
every second or so, and only while there is a timeout, so that no read has to note when it was.
"""

from __future__ import annotations

from collections.abc import Iterable

from .client import Client

Seen = tuple[float, int, int, int]
"""Of one client: when its last command ended, bytes that have come, bytes handed out, and those not taken yet."""


class Silence:
    """What was last seen of each client."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Seen, float]] = {}  # and when bytes were last seen to have moved

    def longer_than(self, limit_s: float, sessions: Iterable[Client], now_s: float) -> list[Client]:
        """Those of all `sessions` that have been silent for so long; to be asked every second or so."""
        before, self._seen = self._seen, {}
        silent: list[Client] = []
        for session in sessions:
            now = session.last_command_s, session.input_bytes, session.output_bytes, session.unsent_bytes
            then, moved_s = before.get(session.id, (now, session.last_command_s))
            if now != then and now[0] == then[0]:  # or it was a command, which says itself when that was
                moved_s = now_s
            self._seen[session.id] = now, moved_s
            if max(moved_s, session.last_command_s) < now_s - limit_s:
                silent.append(session)
        return silent
