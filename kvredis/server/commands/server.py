"""The small commands about the server as a whole: the time, what role it plays, and what it does not do.

Values are not copied to other servers. WAIT finds no replicas; REPLICAOF NO ONE is what this server always is, and any
other master is refused.
"""

from __future__ import annotations

import time

from kvredis.server.client.blocked import Answer
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import INT64_MAX, parse_integer
from kvredis.server.protocol.replies import (
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
    verbatim,
)

from .command import help_reply
from .connection import REDIS_VERSION
from .registry import command, container, subcommand

TIMEOUT_NOT_AN_INTEGER = error("ERR timeout is not an integer or out of range")
NO_MODULES = error(
    'ERR MODULE command not allowed. If the enable-module-command option is set to "local", you can run it from a local'
    " connection, otherwise you need to set this option in the configuration file, and then restart the server."
)

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
def time_(session: Caller, args: list[bytes]) -> Reply:
    """TIME."""
    seconds, microseconds = divmod(time.time_ns() // 1000, 1_000_000)
    return bulks([str(seconds), str(microseconds)])


@command(
    "role",
    arity=1,
    flags="noscript loading stale fast",
    acl="admin fast dangerous",
    group="server",
    since="2.8.12",
    summary="A master without replicas.",
)
def role(session: Caller, args: list[bytes]) -> Reply:
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
def replicaof(session: Caller, args: list[bytes]) -> Reply:
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
def slaveof(session: Caller, args: list[bytes]) -> Reply:
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
def wait(session: Caller, args: list[bytes]) -> Answer:
    """WAIT replicas milliseconds; 0 ms is for ever, which CLIENT UNBLOCK ends."""
    replicas = parse_integer(args[1])
    if replicas is None:
        return NOT_AN_INTEGER
    wrong = timeout_error(args[2])
    if wrong is not None:
        return wrong
    return ZERO if replicas <= 0 else in_time(session, int(args[2]), ZERO)


@command(
    "shutdown",
    arity=-1,
    flags="admin noscript loading stale no_multi allow_busy",
    syntax="[NOSAVE | SAVE] [NOW] [FORCE] [ABORT]",
    summary="Let transfers that are under way end, then end the process.",
    **_ADMIN,
)
def shutdown(session: Caller, args: list[bytes]) -> Answer:
    """SHUTDOWN: what SIGTERM does, so NOW, FORCE and SAVE change nothing; with NOSAVE what the disk has not yet is
    given up. It is not answered: the client sees its connection end."""
    asked = {arg.upper() for arg in args[1:]}
    if asked - {b"NOSAVE", b"SAVE", b"NOW", b"FORCE", b"ABORT"} or {b"SAVE", b"NOSAVE"} <= asked:
        return SYNTAX_ERROR
    if b"ABORT" in asked:
        return SYNTAX_ERROR if len(asked) > 1 else error("ERR No shutdown in progress.")
    session.server.save_on_exit = b"NOSAVE" not in asked
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
def lolwut(session: Caller, args: list[bytes]) -> Reply:
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
def module_list(session: Caller, args: list[bytes]) -> Reply:
    """MODULE LIST."""
    return EMPTY_ARRAY


_MODULE = {"flags": "admin noscript no_async_loading", "acl": "admin slow dangerous", "summary": "Refused."}


@subcommand("module|load", arity=-3, since="4.0.0", syntax="path [arg [arg ...]]", **_MODULE)
@subcommand("module|loadex", arity=-3, since="7.0.0", syntax="path [CONFIG name value] [ARGS arg ...]", **_MODULE)
@subcommand("module|unload", arity=3, since="4.0.0", syntax="name", **_MODULE)
def module_refused(session: Caller, args: list[bytes]) -> Reply:
    """MODULE LOAD, LOADEX and UNLOAD, as where enable-module-command is `no`."""
    return NO_MODULES


@subcommand("module|help", arity=2, flags="loading stale", acl="slow", since="5.0.0", summary="Print this help.")
def module_help(session: Caller, args: list[bytes]) -> Reply:
    """MODULE HELP."""
    return help_reply("module")


def timeout_error(arg: bytes) -> bytes | None:
    """What is wrong with a timeout in milliseconds."""
    milliseconds = parse_integer(arg)
    if milliseconds is None:
        return TIMEOUT_NOT_AN_INTEGER
    if milliseconds < 0:
        return error("ERR timeout is negative")
    if milliseconds > INT64_MAX - time.time_ns() // 1_000_000:
        return error("ERR timeout is out of range")
    return None


def in_time(session: Caller, milliseconds: int, reply: Reply) -> Answer:
    """`reply`, or what the pending answer's `timeout_reply` has become by then, but only when the time is up; at once
    inside a transaction, where nothing waits."""
    if session.transaction is not None:
        return reply
    pending = session.wait()
    session.server.blocked.until(pending, session, milliseconds / 1000, reply)
    return pending
