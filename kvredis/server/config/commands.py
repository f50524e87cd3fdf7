"""CONFIG: reading the settings, changing several at once, and keeping in the configuration file what was changed."""

from __future__ import annotations

import logging

from kvredis.server.commands.command import help_reply
from kvredis.server.commands.registry import container, subcommand
from kvredis.server.context import Caller
from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.replies import OK, SYNTAX_ERROR, Reply, bulk, error, map_reply

from .rewrite import RewriteError, rewrite
from .settings import IMMUTABLE, PROTECTED, SETTINGS, Effect, SettingError, change, value_of

log = logging.getLogger(__name__)

_ADMIN = {"flags": "admin noscript loading stale", "acl": "admin slow dangerous"}

container(
    "config",
    group="server",
    since="2.0.0",
    complexity="Depends on subcommand.",
    summary="The server's settings.",
)


@subcommand(
    "config|get",
    arity=-3,
    since="2.0.0",
    complexity="O(N) in the number of settings",
    syntax="parameter [parameter ...]",
    summary="The settings whose names match one of the glob patterns.",
    **_ADMIN,
)
def config_get(session: Caller, args: list[bytes]) -> Reply:
    """CONFIG GET pattern [pattern ...]; each setting once, and under its name as it was asked for if that is exact."""
    shown: dict[str, bytes] = {}
    for arg in args[2:]:
        fits = matcher(arg.lower())
        exact = not set(arg) & set(b"*?[")
        for name in filter(lambda name: fits(name.encode()), SETTINGS):
            shown.setdefault(name, arg if exact else name.encode())
    values = {name: value_of(session.server, name).encode("utf-8", "surrogateescape") for name in shown}
    return map_reply(session, [(bulk(shown[name]), bulk(value)) for name, value in values.items()])


@subcommand(
    "config|set",
    arity=-4,
    since="2.0.0",
    tips="request_policy:all_nodes response_policy:all_succeeded",
    complexity="O(N) in the number of settings given",
    syntax="parameter value [parameter value ...]",
    summary="Change settings: all of those named, or none.",
    **_ADMIN,
)
def config_set(session: Caller, args: list[bytes]) -> Reply:
    """CONFIG SET name value [name value ...]."""
    if len(args) % 2:
        return SYNTAX_ERROR
    names = [(arg, arg.lower().decode("latin-1")) for arg in args[2::2]]
    for written, name in names:
        if name not in SETTINGS:
            return error(b"ERR Unknown option or number of arguments for CONFIG SET - '%b'" % written.split(b"\0")[0])
    wanted: dict[str, str] = {}
    for (written, name), value in zip(names, args[3::2], strict=True):
        effect = SETTINGS[name].effect
        if effect in (Effect.FIXED, Effect.PROTECTED):
            return _failed(written, IMMUTABLE if effect is Effect.FIXED else PROTECTED)
        if name in wanted:
            return _failed(written, "duplicate parameter")
        wanted[name] = value.decode("utf-8", "surrogateescape")
    try:
        change(session.server, wanted)
    except SettingError as wrong:
        return _failed(wrong.name.encode(), wrong.reason)
    return OK


@subcommand(
    "config|resetstat", arity=2, since="2.0.0", summary="Set the counters that INFO shows back to zero.", **_ADMIN
)
def config_resetstat(session: Caller, args: list[bytes]) -> Reply:
    """CONFIG RESETSTAT."""
    session.server.reset_stats()
    return OK


@subcommand("config|rewrite", arity=2, since="2.8.0", summary="Write the settings to the configuration file.", **_ADMIN)
def config_rewrite(session: Caller, args: list[bytes]) -> Reply:
    """CONFIG REWRITE: what CONFIG SET has changed goes into the file that the server was started with: rewrite.py."""
    server = session.server
    if server.options.config_file is None:
        return error("ERR The server is running without a config file")
    try:
        rewrite(server.options.config_file, {name: value_of(server, name) for name in server.settings})
    except (OSError, RewriteError) as wrong:
        log.warning("CONFIG REWRITE failed: %s", wrong)
        return error(f"ERR Rewriting config file: {wrong}")
    return OK


@subcommand("config|help", arity=2, flags="loading stale", acl="slow", since="5.0.0", summary="Print this help.")
def config_help(session: Caller, args: list[bytes]) -> Reply:
    """CONFIG HELP."""
    return help_reply("config")


def _failed(name: bytes, reason: str) -> bytes:
    return error(b"ERR CONFIG SET failed (possibly related to argument '%b') - %b" % (name, reason.encode()))
