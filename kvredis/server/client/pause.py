"""CLIENT PAUSE: a pause stops a client at the first command that it concerns, which runs when the pause ends. Until
then nothing more is read from that client. While one lasts no key expires, as in Redis: a replica would not see it
either. A command that looks for a key whose time has come does not find it.
"""

from __future__ import annotations

import asyncio

from kvredis.server.commands.registry import Command
from kvredis.server.protocol.request import Argument

from .blocked import Blocked, Reason
from .client import Client, Host


class Pause:
    """Whether clients are paused, and until when."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self.until_s = 0.0
        """0 = no pause."""
        self.writes_only = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, milliseconds: int, *, writes_only: bool) -> None:
        """Pause. Of two pauses at once the later end counts and the stricter kind."""
        now_s = self._server.now_s()
        if self.until_s > now_s:
            writes_only = writes_only and self.writes_only
        self.until_s = max(self.until_s, now_s + milliseconds / 1000)
        self.writes_only = writes_only
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self.until_s - now_s, self.end)
        self._server.store.keep_expired = True
        self._server.reconsider()

    def end(self) -> None:
        """Let all clients go on, in the order in which they were stopped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.until_s = 0.0
        self._server.store.keep_expired = False
        self._server.reconsider()
        self._server.blocked.unblock_all(Reason.PAUSE)

    def holds(self, session: Client, command: Command) -> bool:
        """Whether the command must wait for the end."""
        if not self.writes_only or "write" in command.flags or "may_replicate" in command.flags:
            return True
        return command.name == "exec" and session.transaction is not None and session.transaction.writes

    def postpone(self, session: Client, args: list[Argument]) -> Blocked:
        """Stop a client at this command."""
        return session.postpone(args, session.wait(Reason.PAUSE))
