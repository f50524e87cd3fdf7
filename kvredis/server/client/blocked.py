"""Clients that wait: one state a client (`Client.waiting`), a reason, one way to go on (`Blocked.unblock`).

The model is Valkey's blocked.c. A command's handler, or admission for a value that is announced, returns a Blocked in
place of a reply; the session then keeps it as `waiting`, and runs and reads nothing until it is unblocked. One table,
BlockedClients, has all of them. Reasons, and what bounds each wait:

    YIELD      a long command gives others their turn: until the loop's next turn
    COMMAND    WAITAOF, KV.JOB WAIT, SAVE: until what they name has happened, or the timeout that the client gave
    KEYS       KV.MATCH WAIT (expected.py): until keys that another client has announced are there, or its deadline
    COPY       a copy out of lent memory (shm/commands.py): until the thread is done
    PAUSE      CLIENT PAUSE (pause.py): until its end
    DISK_READ  blocks on disk that a command reads (disk_reads.py): WAIT_S at most
    DISK_ROOM  room that the disk is to make (admission.py): `spill_wait` at most
    GPU_ROOM   room on the GPU, whose blocks are being copied to memory (shm/gpu.py): SPILL_WAIT_S at most
    TURN       room that other clients' values take (admission.py): `body_timeout` after the client has stopped sending
    READER     the end of a client that does not read what is lent to it (admission.py): until it is gone

To add a reason: name it in Reason and here. Make the Blocked with `Client.wait` (a reply that comes later) or
`Client.postpone` (the command has done nothing yet and runs again), give it `on_cancel` if a client that goes leaves
something behind, and call `unblock` in the server's loop (`tell_loop` from a thread). Bound the wait: by
`Blocked.limit`, or for all of a reason in the server's tick. `BlockedClients.until` lets CLIENT UNBLOCK end it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Iterator
from enum import Enum
from time import perf_counter
from typing import Final, Protocol, TypeAlias

from kvredis.server.protocol.replies import Reply
from kvredis.server.protocol.request import Argument, Later

log = logging.getLogger(__name__)

STEP_S: Final = 0.001
"""How long a handler works before others have their turn: as long as a client may have to wait for it."""

Answer: TypeAlias = "Reply | Blocked | Iterator[Reply | Blocked]"
"""What a handler returns: the reply, one that comes later, or one that is made while the client takes it, and that may
have to wait in between."""


class Reason(Enum):
    """What a client waits for; the value is what metrics call it."""

    YIELD = "yield"
    COMMAND = "command"
    KEYS = "keys"
    COPY = "copy"
    PAUSE = "pause"
    DISK_READ = "disk_read"
    DISK_ROOM = "disk_room"
    GPU_ROOM = "gpu_room"
    TURN = "turn"
    READER = "reader"


ROOM: Final = frozenset({Reason.DISK_ROOM, Reason.GPU_ROOM, Reason.TURN, Reason.READER})
"""The client has a value to store and no room for it yet."""


class Waiter(Protocol):
    """What is asked of a client that waits."""

    id: int
    last_command: str

    def go_on(self, reply: Reply) -> None:
        """A reply that was waited for is there."""

    def apologize(self, args: list[Argument]) -> bytes:
        """What was waited for has failed, which is a mistake of ours: the error, with which the client is sent away."""


class Blocked(Later):
    """The wait of one client, in the place of one reply in its pipeline. `unblock` ends it."""

    __slots__ = (
        "_client",
        "_table",
        "_timer",
        "is_silent",
        "on_cancel",
        "on_end",
        "reason",
        "runs_again",
        "timeout_reply",
    )

    def __init__(self, client: Waiter, reason: Reason, table: BlockedClients) -> None:
        self._client: Waiter | None = client
        self._table = table
        self._timer: asyncio.TimerHandle | None = None
        self.reason = reason
        self.timeout_reply: Reply = b""
        """What CLIENT UNBLOCK answers in the name of a command whose time is over."""
        self.on_cancel: Callable[[], None] | None = None
        """Called when the client goes before it was answered."""
        self.on_end: Callable[[], None] | None = None
        """Called when the wait ends, whatever ends it."""
        self.runs_again = False
        """The command has done nothing yet and begins anew when this is unblocked: Client.postpone."""
        self.is_silent = False
        """The client does not want the reply: CLIENT REPLY."""

    def unblock(self, reply: Reply) -> None:
        """Answer and let the client go on. A second call, or one after the client has gone, does nothing."""
        client = self._end()
        if client is not None:
            client.go_on(b"" if self.is_silent else reply)

    def limit(self, seconds: float, at_end: Callable[[], None]) -> None:
        """Have `at_end` called when the wait has lasted so long, 0 = never; not when it has ended before."""
        if seconds:
            self._timer = asyncio.get_running_loop().call_later(seconds, at_end)

    def guard(self, completion: Callable[..., object], *args: object) -> None:
        """Run what is to unblock this. If it raises, a mistake of ours, the client is told and sent away, as when a
        handler raises; it would wait for ever."""
        try:
            completion(*args)
        except BaseException:  # of the thread that has done the work too: SystemExit is not for the loop
            client = self._client
            if client is None:
                log.exception("what a client waited for that has gone has failed")
            else:
                self.unblock(client.apologize([client.last_command.encode()]))

    def cancel(self) -> None:
        """End the wait of a client that has gone."""
        if self._end() is not None and self.on_cancel is not None:
            self.on_cancel()

    def _end(self) -> Waiter | None:
        client, self._client = self._client, None
        if client is not None:
            self._table.forget(self, client)
            if self.on_end is not None:
                self.on_end()
        if self._timer is not None:  # or an hour's would be kept for an hour
            self._timer.cancel()
            self._timer = None
        return client


class BlockedClients:
    """The clients of one server that wait, by reason and in the order in which they began."""

    def __init__(self) -> None:
        self._by_reason: dict[Reason, dict[Blocked, None]] = {reason: {} for reason in Reason}
        self.timeouts: dict[int, Blocked] = {}
        """By client id the waits that CLIENT UNBLOCK can end: those of commands that take a timeout."""

    def block(self, client: Waiter, reason: Reason) -> Blocked:
        """A wait of this client, which begins when its session is given it."""
        blocked = Blocked(client, reason, self)
        self._by_reason[reason][blocked] = None
        return blocked

    def until(self, blocked: Blocked, client: Waiter, seconds: float, reply: Reply) -> None:
        """End this wait with `reply` after so long, 0 = never, or when CLIENT UNBLOCK says so."""
        blocked.timeout_reply = reply
        self.timeouts[client.id] = blocked
        blocked.limit(seconds, lambda: blocked.unblock(blocked.timeout_reply))

    def count(self, reason: Reason) -> int:
        """How many clients wait for this."""
        return len(self._by_reason[reason])

    def unblock_all(self, reason: Reason) -> None:
        """Let all who wait for this run on, in their order."""
        for blocked in list(self._by_reason[reason]):
            blocked.unblock(b"")

    def forget(self, blocked: Blocked, client: Waiter) -> None:
        """Remove a wait that has ended: for Blocked alone."""
        self._by_reason[blocked.reason].pop(blocked, None)
        if self.timeouts.get(client.id) is blocked:
            del self.timeouts[client.id]


def waits_for(waiting: Blocked | None, reasons: Container[Reason]) -> bool:
    """Whether a client whose `waiting` this is waits for one of these."""
    return waiting is not None and waiting.reason in reasons


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
