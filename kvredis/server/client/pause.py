"""CLIENT PAUSE, UNPAUSE, UNBLOCK and REPLY: commands that decide when, or whether, others are answered.

A pause stops a client at the first command that it concerns, which runs when the pause ends; until then nothing more is
read from that client. While one lasts no key expires, as in Redis: a replica would not see it either. Who looks for one
whose time has come does not find it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvredis.server.commands.registry import Command, subcommand, wrong_subcommand
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import OK, ONE, SYNTAX_ERROR, ZERO, Reply, error
from kvredis.server.protocol.request import Argument

from .blocked import Pending
from .client import Client

if TYPE_CHECKING:
    from kvredis.server.server import Server

UNBLOCKED = b"-UNBLOCKED client unblocked via CLIENT UNBLOCK\r\n"

_OWN = {"flags": "noscript loading stale", "acl": "slow connection"}
_ADMIN = {"flags": "admin noscript loading stale", "acl": "admin slow dangerous connection"}


class Pause:
    """Whether clients are paused, until when, and who is waiting for its end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.until_s = 0.0
        """0 = no pause."""
        self.writes_only = False
        self.waiting: list[Pending] = []
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
        """Let everybody go on, in the order in which they were stopped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.until_s = 0.0
        self._server.store.keep_expired = False
        self._server.reconsider()
        waiting, self.waiting = self.waiting, []
        for pending in waiting:
            pending.resolve(b"")

    def holds(self, session: Client, command: Command) -> bool:
        """Whether the command must wait for the end."""
        if not self.writes_only or "write" in command.flags or "may_replicate" in command.flags:
            return True
        return command.name == "exec" and session.transaction is not None and session.transaction.writes

    def postpone(self, session: Client, args: list[Argument]) -> Pending:
        """Stop a client at this command."""
        pending = session.postpone(args)
        self.waiting.append(pending)
        pending.on_cancel = lambda: self.waiting.remove(pending)
        return pending


@subcommand(
    "client|pause",
    arity=-3,
    since="3.0.0",
    syntax="timeout [WRITE | ALL]",
    summary="Let commands, or writes only, wait for that many milliseconds.",
    **_ADMIN,
)
def client_pause(session: Client, args: list[bytes]) -> Reply:
    """CLIENT PAUSE timeout [WRITE|ALL]."""
    if len(args) > 4:
        return wrong_subcommand(args)
    kind = args[3].upper() if len(args) == 4 else b"ALL"
    if kind not in (b"ALL", b"WRITE"):
        return error("ERR CLIENT PAUSE mode must be WRITE or ALL")
    milliseconds = parse_integer(args[2])
    if milliseconds is None:
        return error("ERR timeout is not an integer or out of range")
    if milliseconds < 0:
        return error("ERR timeout is negative")
    session.server.pause.begin(min(milliseconds, _MILLISECONDS_MAX), writes_only=kind == b"WRITE")
    return OK


_MILLISECONDS_MAX = 10**13
"""Three centuries: what a timer can be set to."""


@subcommand("client|unpause", arity=2, since="6.2.0", summary="End a pause.", **_ADMIN)
def client_unpause(session: Client, args: list[bytes]) -> Reply:
    """CLIENT UNPAUSE; OK also when there is none."""
    session.server.pause.end()
    return OK


@subcommand(
    "client|unblock",
    arity=-3,
    since="5.0.0",
    syntax="client-id [TIMEOUT | ERROR]",
    summary="End the wait of another client's command, as if its time were over or with an error.",
    **_ADMIN,
)
def client_unblock(session: Client, args: list[bytes]) -> Reply:
    """CLIENT UNBLOCK id [TIMEOUT|ERROR]: 1 if that client was waiting, else 0."""
    if len(args) > 4:
        return wrong_subcommand(args)
    how = args[3].upper() if len(args) == 4 else b"TIMEOUT"
    if how not in (b"TIMEOUT", b"ERROR"):
        return error("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR")
    number = parse_integer(args[2])
    if number is None:
        return error("ERR value is not an integer or out of range")
    pending = session.server.blocked.pop(number, None)
    if pending is None:
        return ZERO
    pending.resolve(UNBLOCKED if how == b"ERROR" else pending.timeout_reply)
    return ONE


@subcommand(
    "client|reply",
    arity=3,
    since="3.2.0",
    syntax="ON | OFF | SKIP",
    summary="Be answered, or not, or not the next time.",
    **_OWN,
)
def client_reply(session: Client, args: list[bytes]) -> Reply:
    """CLIENT REPLY ON|OFF|SKIP; only ON is answered."""
    mode = args[2].upper()
    if mode == b"ON":
        session.reply_mode = "on"
    elif mode == b"OFF":
        session.reply_mode = "off"
    elif mode == b"SKIP":
        if session.reply_mode == "on":
            session.reply_mode = "skip"
    else:
        return SYNTAX_ERROR
    session.reconsider()
    return OK
