"""Clients that wait: one state (`Client.waiting`, a Pending), five reasons, one unblock (`Pending.resolve`).

A reason is a class here, or a handler that calls `Client.wait`; each keeps its own clients and says when they go on:

    Pause      CLIENT PAUSE: until its end
    Away       blocks that are read and on disk: until they are in memory, WAIT_S at most
    DiskRoom   room that the disk is still to make: until a block has been written, `spill_wait` at most
    Claims     room that other clients' values have (admission.py): until they are stored or given up
    a handler  WAITAOF, SAVE, a copy out of lent memory: what it waits for calls `resolve`

To add a reason: make a Pending (`Client.wait` for a reply that comes later, `Client.postpone` for a command that has
done nothing yet and runs again), set `on_cancel` to forget a client that goes, and call `resolve` in the server's loop
(`tell_loop` from a thread). Bound the wait: in `tick`, which the server calls ten times a second, or by
`Pending.timer`. CLIENT UNBLOCK reaches only those in `server.blocked`. Silence finds clients that wait for nothing and
say nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Final, Protocol, TypeAlias

from kvredis.server.protocol.replies import Reply
from kvredis.server.protocol.request import Argument

log = logging.getLogger(__name__)

STEP_S: Final = 0.001
"""How long a handler works before others have their turn: as long as a client may have to wait for it."""

Answer: TypeAlias = "Reply | Pending | Iterator[Reply | Pending]"
"""What a handler returns: the reply, one that comes later, or one that is made while the client takes it, and that may
have to wait in between."""


class Waiter(Protocol):
    """What is asked of a client that waits."""

    last_command: str

    def go_on(self, reply: Reply) -> None:
        """A reply that was waited for is there."""

    def apologize(self, args: list[Argument]) -> bytes:
        """What was waited for has failed, which is a mistake of ours: the error, with which the client is sent away."""


class Pending:
    """The place of one reply in its session's pipeline. The session runs and reads nothing until `resolve`."""

    __slots__ = ("_session", "is_silent", "on_cancel", "runs_again", "timeout_reply", "timer")

    def __init__(self, session: Waiter) -> None:
        self._session: Waiter | None = session
        self.timeout_reply: Reply = b""
        """What CLIENT UNBLOCK answers in the name of a command whose time is over."""
        self.timer: asyncio.TimerHandle | None = None
        """When the time of this wait is over; it ends with the wait, or an hour's would be kept for an hour."""
        self.on_cancel: Callable[[], None] | None = None
        """Called when the client goes before it was answered."""
        self.runs_again = False
        """The command has done nothing yet and begins anew when this is resolved: Session.postpone."""
        self.is_silent = False
        """The client does not want the reply: CLIENT REPLY."""

    def resolve(self, reply: Reply) -> None:
        """Answer and let the session go on. A second call, or one after the client has gone, does nothing."""
        session = self._end()
        if session is not None:
            session.go_on(b"" if self.is_silent else reply)

    def guard(self, completion: Callable[..., object], *args: object) -> None:
        """Run what is to resolve this. If it raises, a mistake of ours, the client is told and sent away, as when a
        handler raises; it would wait for ever."""
        try:
            completion(*args)
        except BaseException:  # of the thread that has done the work too: SystemExit is not for the loop
            session = self._session
            if session is None:
                log.exception("what a client waited for that has gone has failed")
            else:
                self.resolve(session.apologize([session.last_command.encode()]))

    def cancel(self) -> None:
        """The client has gone."""
        if self._end() is not None and self.on_cancel is not None:
            self.on_cancel()

    def _end(self) -> Waiter | None:
        session, self._session = self._session, None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        return session


class StepTimer:
    """Tells a long handler when it has had the loop for STEP_S."""

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        self._until_s = perf_counter() + STEP_S

    def is_over(self) -> bool:
        """Whether a step has lasted long enough; the next one begins then."""
        now_s = perf_counter()
        if now_s < self._until_s:
            return False
        self._until_s = now_s + STEP_S
        return True


def tell_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Have `call` run on the server's loop; for other threads. A loop that is closed needs to be told nothing more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def has_hung_up(fd: int, *, wholly: bool) -> bool:
    """Whether the client behind a socket that is not read from, because it waits and much lies there, has gone.

    One that will send no more counts too, as it does with Redis; with `wholly` only one that takes nothing more either.
    """
    poll = select.poll()
    poll.register(fd, 0 if wholly else select.POLLRDHUP)
    return bool(poll.poll(0))
