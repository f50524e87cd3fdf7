"""SAVE, BGSAVE, LASTSAVE, BGREWRITEAOF and WAITAOF: when what was written is on disk.

With a disk tier SAVE writes every block that the disk has not yet, and WAITAOF those that its own client may have
written; both wait for the device. Without one they answer as a Redis does that has nothing to do: SAVE, BGSAVE and
BGREWRITEAOF succeed, since all that was promised to be on disk, which is nothing, is there, LASTSAVE moves on, so that
a script which waits for it ends, and WAITAOF is refused where a local copy is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from kvredis.server.client.blocked import Answer, Blocked, tell_loop
from kvredis.server.context import Caller, Context
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import (
    NOT_AN_INTEGER,
    OK,
    ONE,
    SYNTAX_ERROR,
    ZERO,
    Reply,
    array,
    error,
    integer,
    simple,
)

from .registry import command
from .server import in_time, timeout_error

NO_AOF = error("ERR WAITAOF cannot be used when numlocal is set but appendonly is disabled.")
NOT_SAVED = error("ERR the disk does not take it")
SAVING_ALREADY = error("ERR Background save already in progress")

_ADMIN = {"group": "server", "acl": "admin slow dangerous"}


@command(
    "lastsave",
    arity=1,
    flags="loading stale fast",
    acl="admin fast dangerous",
    group="server",
    tips="nondeterministic_output",
    summary="When SAVE or BGSAVE has last succeeded, else the start.",
)
def lastsave(session: Caller, args: list[bytes]) -> Reply:
    """LASTSAVE, in Unix seconds."""
    return integer(session.server.stats.last_save_s)


@command(
    "save",
    arity=1,
    flags="admin noscript no_async_loading no_multi",
    summary="Have every block on disk.",
    **_ADMIN,
)
def save(session: Caller, args: list[bytes]) -> Answer:
    """SAVE: this client waits for it, others are served."""
    server = session.server
    if server.stats.saving:
        return SAVING_ALREADY
    if server.store.tiering is None:
        server.stats.note_save(saved=True)
        return OK
    pending = session.wait()
    _save_all(server, partial(pending.guard, lambda saved: pending.unblock(OK if saved else NOT_SAVED)))
    return pending


@command(
    "bgsave",
    arity=-1,
    flags="admin noscript no_async_loading",
    syntax="[SCHEDULE]",
    summary="Have every block on disk, and do not wait for it.",
    **_ADMIN,
)
def bgsave(session: Caller, args: list[bytes]) -> Reply:
    """BGSAVE [SCHEDULE]."""
    if len(args) > 2 or (len(args) == 2 and args[1].upper() != b"SCHEDULE"):
        return SYNTAX_ERROR
    if session.server.stats.saving:
        return SAVING_ALREADY
    if session.server.store.tiering is None:
        session.server.stats.note_save(saved=True)
    else:
        _save_all(session.server, lambda _: None)
    return simple("Background saving started")


@command(
    "bgrewriteaof",
    arity=1,
    flags="admin noscript no_async_loading",
    summary="Nothing: there is no log of writes.",
    **_ADMIN,
)
def bgrewriteaof(session: Caller, args: list[bytes]) -> Reply:
    """BGREWRITEAOF."""
    return simple("Background append only file rewriting started")


@command(
    "waitaof",
    arity=4,
    flags="noscript",
    acl="slow connection",
    since="7.2.0",
    syntax="numlocal numreplicas timeout",
    tips="request_policy:all_shards response_policy:agg_min",
    group="generic",
    summary="Wait until all that this client has written is on disk here, and on that many replicas: there are none.",
)
def waitaof(session: Caller, args: list[bytes]) -> Answer:
    """WAITAOF local replicas milliseconds: [1, 0] once the device has it, [0, 0] when the time is up or it cannot."""
    local, replicas = parse_integer(args[1]), parse_integer(args[2])
    if local is None:
        return NOT_AN_INTEGER
    if local not in (0, 1):
        return error("ERR value is out of range, must be between 0 and 1")
    if replicas is None:
        return NOT_AN_INTEGER
    if replicas < 0:
        return error("ERR value is out of range, must be positive")
    wrong = timeout_error(args[3])
    if wrong is not None:
        return wrong
    tiering = session.store.tiering
    if local and tiering is None:
        return NO_AOF
    if session.transaction is not None or (not replicas and (not local or not session.unsaved_since)):
        return _reached(session)
    pending = in_time(session, int(args[3]), _reached(session))
    assert isinstance(pending, Blocked)
    if tiering is not None and session.unsaved_since:

        def saved(safe: bool) -> None:
            if safe and session.waiting is pending:  # else its time was up, and it may have written more
                session.unsaved_since = 0
            if not replicas:
                pending.unblock(_reached(session))
            else:
                pending.timeout_reply = _reached(session)

        _save(session.server, session.unsaved_since, partial(pending.guard, saved))
    return pending


def _reached(session: Caller) -> Reply:
    """How many logs have everything that this client has written: here, and on replicas."""
    here = session.store.tiering is not None and not session.unsaved_since
    return array([ONE if here else ZERO, ZERO])


def _save_all(server: Context, done: Callable[[bool], None]) -> None:
    def saved(safe: bool) -> None:
        server.stats.note_save(saved=safe)
        done(safe)

    server.stats.saving = True
    _save(server, 0, saved)


def _save(server: Context, since: int, done: Callable[[bool], None]) -> None:
    """Have on disk what was written from write number `since` on; `done` runs on this loop, with whether it is."""
    loop, tiering = asyncio.get_running_loop(), server.store.tiering
    assert tiering is not None

    def saved(safe: bool) -> None:  # in an I/O thread, as a rule
        tell_loop(loop, done, safe)

    tiering.saving.save(since, saved)
