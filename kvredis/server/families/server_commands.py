"""The small commands about the server as a whole: the time, what role it plays, and what it does not do.

Values are not kept on disk and not copied to other servers. What Redis has for that answers as a Redis does that has
nothing to do: SAVE, BGSAVE and BGREWRITEAOF succeed (all that was promised to be on disk, which is nothing, is there),
and LASTSAVE moves on, so that a script which waits for it ends. WAIT finds no replicas; WAITAOF is refused where a
local copy is asked for. REPLICAOF NO ONE is what this server always is; any other master is refused.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kvredis.server.arguments import INT64_MAX, parse_integer
from kvredis.server.commands import command, container, subcommand
from kvredis.server.help import help_reply
from kvredis.server.pending import Answer
from kvredis.server.replies import (
    EMPTY_ARRAY,
    NOT_AN_INTEGER,
    OK,
    SYNTAX_ERROR,
    ZERO,
    Reply,
    array,
    bulk,
    bulks,
    error,
    integer,
    simple,
    verbatim,
)

from .connection import REDIS_VERSION

if TYPE_CHECKING:
    from kvredis.server.session import Session

TIMEOUT_NOT_AN_INTEGER = error("ERR timeout is not an integer or out of range")
NO_MODULES = error(
    'ERR MODULE command not allowed. If the enable-module-command option is set to "local", you can run it from a local'
    " connection, otherwise you need to set this option in the configuration file, and then restart the server."
)
NO_AOF = error("ERR WAITAOF cannot be used when numlocal is set but appendonly is disabled.")

_ADMIN = {"group": "server", "acl": "admin slow dangerous"}


@command(
    "time",
    arity=1,
    flags="loading stale fast",
    acl="fast",
    group="server",
    since="2.6.0",
    tips="nondeterministic_output",
    summary="The server's clock: Unix seconds and microseconds.",
)
def time_(session: Session, args: list[bytes]) -> Reply:
    """TIME."""
    seconds, microseconds = divmod(time.time_ns() // 1000, 1_000_000)
    return bulks([str(seconds), str(microseconds)])


@command(
    "lastsave",
    arity=1,
    flags="loading stale fast",
    acl="admin fast dangerous",
    group="server",
    tips="nondeterministic_output",
    summary="When SAVE or BGSAVE was last asked for, else the start.",
)
def lastsave(session: Session, args: list[bytes]) -> Reply:
    """LASTSAVE, in Unix seconds."""
    return integer(session.server.stats.last_save_s)


@command(
    "save",
    arity=1,
    flags="admin noscript no_async_loading no_multi",
    summary="Nothing: values are not kept on disk.",
    **_ADMIN,
)
def save(session: Session, args: list[bytes]) -> Reply:
    """SAVE."""
    session.server.stats.note_save()
    return OK


@command(
    "bgsave",
    arity=-1,
    flags="admin noscript no_async_loading",
    syntax="[SCHEDULE]",
    summary="Nothing: values are not kept on disk.",
    **_ADMIN,
)
def bgsave(session: Session, args: list[bytes]) -> Reply:
    """BGSAVE [SCHEDULE]."""
    if len(args) > 2 or (len(args) == 2 and args[1].upper() != b"SCHEDULE"):
        return SYNTAX_ERROR
    session.server.stats.note_save()
    return simple("Background saving started")


@command(
    "bgrewriteaof",
    arity=1,
    flags="admin noscript no_async_loading",
    summary="Nothing: there is no log of writes.",
    **_ADMIN,
)
def bgrewriteaof(session: Session, args: list[bytes]) -> Reply:
    """BGREWRITEAOF."""
    return simple("Background append only file rewriting started")


@command(
    "role",
    arity=1,
    flags="noscript loading stale fast",
    acl="admin fast dangerous",
    group="server",
    since="2.8.12",
    summary="A master without replicas.",
)
def role(session: Session, args: list[bytes]) -> Reply:
    """ROLE."""
    return array([bulk("master"), ZERO, EMPTY_ARRAY])


@command(
    "replicaof",
    arity=3,
    flags="admin noscript stale no_async_loading",
    since="5.0.0",
    syntax="host port | NO ONE",
    summary="NO ONE is all that this server can be a replica of.",
    **_ADMIN,
)
def replicaof(session: Session, args: list[bytes]) -> Reply:
    """REPLICAOF NO ONE."""
    if args[1].upper() == b"NO" and args[2].upper() == b"ONE":
        return OK
    port = parse_integer(args[2])
    if port is None or not 0 <= port <= 65535:
        return error("ERR Invalid master port")
    return error("ERR kvredis does not replicate: REPLICAOF takes NO ONE only")


@command(
    "slaveof",
    arity=3,
    flags="admin noscript stale no_async_loading",
    syntax="host port | NO ONE",
    summary="The older name of REPLICAOF.",
    **_ADMIN,
)
def slaveof(session: Session, args: list[bytes]) -> Reply:
    """SLAVEOF NO ONE."""
    return replicaof(session, args)


@command(
    "wait",
    arity=3,
    acl="slow connection",
    since="3.0.0",
    syntax="numreplicas timeout",
    tips="request_policy:all_shards response_policy:agg_min",
    group="generic",
    summary="Wait until that many replicas have all writes: there are none, so until the time is up.",
)
def wait(session: Session, args: list[bytes]) -> Answer:
    """WAIT replicas milliseconds; 0 ms is for ever, which CLIENT UNBLOCK ends."""
    replicas = parse_integer(args[1])
    if replicas is None:
        return NOT_AN_INTEGER
    wrong = _timeout_error(args[2])
    if wrong is not None:
        return wrong
    return ZERO if replicas <= 0 else _in_time(session, int(args[2]), ZERO)


@command(
    "waitaof",
    arity=4,
    flags="noscript",
    acl="slow connection",
    since="7.2.0",
    syntax="numlocal numreplicas timeout",
    tips="request_policy:all_shards response_policy:agg_min",
    group="generic",
    summary="Wait until all writes are in that many logs on disk, of which there are none.",
)
def waitaof(session: Session, args: list[bytes]) -> Answer:
    """WAITAOF local replicas milliseconds: [0, 0] when the time is up."""
    local, replicas = parse_integer(args[1]), parse_integer(args[2])
    if local is None:
        return NOT_AN_INTEGER
    if local not in (0, 1):
        return error("ERR value is out of range, must be between 0 and 1")
    if replicas is None:
        return NOT_AN_INTEGER
    if replicas < 0:
        return error("ERR value is out of range, must be positive")
    wrong = _timeout_error(args[3])
    if wrong is not None:
        return wrong
    if local:
        return NO_AOF
    none = array([ZERO, ZERO])
    return none if not replicas else _in_time(session, int(args[3]), none)


@command(
    "shutdown",
    arity=-1,
    flags="admin noscript loading stale no_multi allow_busy",
    syntax="[NOSAVE | SAVE] [NOW] [FORCE] [ABORT]",
    summary="Let transfers that are under way end, then end the process.",
    **_ADMIN,
)
def shutdown(session: Session, args: list[bytes]) -> Answer:
    """SHUTDOWN: what SIGTERM does, so NOW and FORCE change nothing and there is nothing to SAVE. It is not answered:
    the client sees its connection end."""
    asked = {arg.upper() for arg in args[1:]}
    if asked - {b"NOSAVE", b"SAVE", b"NOW", b"FORCE", b"ABORT"} or {b"SAVE", b"NOSAVE"} <= asked:
        return SYNTAX_ERROR
    if b"ABORT" in asked:
        return SYNTAX_ERROR if len(asked) > 1 else error("ERR No shutdown in progress.")
    session.server.request_shutdown()
    return session.wait()


@command(
    "lolwut",
    arity=-1,
    flags="readonly fast",
    acl="read fast",
    group="server",
    since="5.0.0",
    syntax="[VERSION version]",
    summary="What this is.",
)
def lolwut(session: Session, args: list[bytes]) -> Reply:
    """LOLWUT [VERSION n ...]."""
    if len(args) >= 3 and args[1].upper() == b"VERSION" and parse_integer(args[2]) is None:
        return NOT_AN_INTEGER
    return verbatim(session, f"Redis ver. {REDIS_VERSION}\n")


container("module", group="server", since="4.0.0", complexity="Depends on subcommand.", summary="There are no modules.")


@subcommand(
    "module|list",
    arity=2,
    flags="admin noscript",
    acl="admin slow dangerous",
    since="4.0.0",
    tips="nondeterministic_output_order",
    summary="The loaded modules: none.",
)
def module_list(session: Session, args: list[bytes]) -> Reply:
    """MODULE LIST."""
    return EMPTY_ARRAY


_MODULE = {"flags": "admin noscript no_async_loading", "acl": "admin slow dangerous", "summary": "Refused."}


@subcommand("module|load", arity=-3, since="4.0.0", syntax="path [arg [arg ...]]", **_MODULE)
@subcommand("module|loadex", arity=-3, since="7.0.0", syntax="path [CONFIG name value] [ARGS arg ...]", **_MODULE)
@subcommand("module|unload", arity=3, since="4.0.0", syntax="name", **_MODULE)
def module_refused(session: Session, args: list[bytes]) -> Reply:
    """MODULE LOAD, LOADEX and UNLOAD, as where enable-module-command is `no`."""
    return NO_MODULES


@subcommand("module|help", arity=2, flags="loading stale", acl="slow", since="5.0.0", summary="Print this help.")
def module_help(session: Session, args: list[bytes]) -> Reply:
    """MODULE HELP."""
    return help_reply("module")


def _timeout_error(arg: bytes) -> bytes | None:
    """What is wrong with a timeout in milliseconds."""
    milliseconds = parse_integer(arg)
    if milliseconds is None:
        return TIMEOUT_NOT_AN_INTEGER
    if milliseconds < 0:
        return error("ERR timeout is negative")
    if milliseconds > INT64_MAX - time.time_ns() // 1_000_000:
        return error("ERR timeout is out of range")
    return None


def _in_time(session: Session, milliseconds: int, reply: Reply) -> Answer:
    """`reply`, but only when the time is up; at once inside a transaction, where nothing waits."""
    if session.transaction is not None:
        return reply
    pending = session.wait()
    pending.timeout_reply = reply
    session.server.blocked[session.id] = pending
    if milliseconds:
        timer = asyncio.get_running_loop().call_later(milliseconds / 1000, pending.resolve, reply)
        pending.on_cancel = timer.cancel
    return pending
