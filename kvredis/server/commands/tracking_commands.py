"""CLIENT TRACKING, CACHING, GETREDIR and TRACKINGINFO: how a client asks for client-side caching.

The order in which TRACKING's options are checked is Redis', because of two mistakes in one line it names the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import (
    NOT_AN_INTEGER,
    OK,
    SYNTAX_ERROR,
    Reply,
    array,
    bulk,
    error,
    integer,
    map_reply,
    set_reply,
)

from .registry import subcommand
from .tracking import PREFIXES_MAX, Tracking, redirection_of

if TYPE_CHECKING:
    from kvredis.server.client.session import Session

REDIRECTED_TWICE = error("ERR A client can only redirect to a single other client")
NOBODY_THERE = error("ERR The client ID you want redirect to does not exist")
PREFIX_NEEDS_BCAST = error("ERR PREFIX option requires BCAST mode to be enabled")
BCAST_STAYS = error(
    "ERR You can't switch BCAST mode on/off before disabling tracking for this client, "
    "and then re-enabling it with a different mode."
)
BCAST_TAKES_ALL = error("ERR OPTIN and OPTOUT are not compatible with BCAST")
IN_OR_OUT = error("ERR You can't specify both OPTIN mode and OPTOUT mode")
OPTIN_STAYS = error(
    "ERR You can't switch OPTIN/OPTOUT mode before disabling tracking for this client, "
    "and then re-enabling it with a different mode."
)
TOO_MANY_PREFIXES = error(f"ERR a client may track {PREFIXES_MAX} prefixes at most")
NOTHING_TO_CHOOSE = error(
    "ERR CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or OPTOUT mode enabled"
)
YES_IS_FOR_OPTIN = error("ERR CLIENT CACHING YES is only valid when tracking is enabled in OPTIN mode.")
NO_IS_FOR_OPTOUT = error("ERR CLIENT CACHING NO is only valid when tracking is enabled in OPTOUT mode.")

_OWN = {"flags": "noscript loading stale", "acl": "slow connection", "since": "6.0.0"}


@subcommand(
    "client|tracking",
    arity=-3,
    syntax="<ON | OFF> [REDIRECT client-id] [PREFIX prefix [PREFIX prefix ...]] [BCAST] [OPTIN] [OPTOUT] [NOLOOP]",
    summary="Be told when something that was read has changed.",
    **_OWN,
)
def client_tracking(session: Session, args: list[bytes]) -> Reply:
    """CLIENT TRACKING ON|OFF [option ...]; the options are read before the switch, and before OFF too."""
    wanted = _parse(session, args)
    if isinstance(wanted, bytes):
        return wanted
    switch = args[2].upper()
    if switch == b"OFF":
        session.server.tracking.disable(session)
        return OK
    if switch != b"ON":
        return SYNTAX_ERROR
    tracking, prefixes = wanted
    refusal = _conflict(tracking, prefixes, session.tracking)
    if refusal is None and tracking.broadcast:
        refusal = _overlap(prefixes, session.tracking)
        tracking.prefixes = set(prefixes or [b""])
    if refusal is not None:
        return refusal
    session.server.tracking.enable(session, tracking)
    return OK


@subcommand(
    "client|caching",
    arity=3,
    syntax="<YES | NO>",
    summary="Say whether what the next command reads is to be tracked.",
    **_OWN,
)
def client_caching(session: Session, args: list[bytes]) -> Reply:
    """CLIENT CACHING YES|NO."""
    tracking = session.tracking
    if tracking is None:
        return NOTHING_TO_CHOOSE
    choice = args[2].upper()
    if choice == b"YES":
        if not tracking.optin:
            return YES_IS_FOR_OPTIN
    elif choice == b"NO":
        if not tracking.optout:
            return NO_IS_FOR_OPTOUT
    else:
        return SYNTAX_ERROR
    tracking.caching = True
    return OK


@subcommand("client|getredir", arity=2, summary="The client that invalidations are redirected to.", **_OWN)
def client_getredir(session: Session, args: list[bytes]) -> Reply:
    """CLIENT GETREDIR: its number, 0 without redirection, -1 without tracking."""
    return integer(redirection_of(session))


@subcommand("client|trackinginfo", arity=2, summary="How this connection tracks.", **{**_OWN, "since": "6.2.0"})
def client_trackinginfo(session: Session, args: list[bytes]) -> Reply:
    """CLIENT TRACKINGINFO."""
    tracking = session.tracking
    flags = ["off"]
    if tracking is not None:
        switched = {
            "on": True,
            "bcast": tracking.broadcast,
            "optin": tracking.optin,
            "caching-yes": tracking.optin and tracking.caching,
            "optout": tracking.optout,
            "caching-no": tracking.optout and tracking.caching,
            "noloop": tracking.noloop,
            "broken_redirect": tracking.broken,
        }
        flags = [name for name, on in switched.items() if on]
    prefixes = [] if tracking is None else sorted(tracking.prefixes)
    return map_reply(
        session,
        [
            (bulk("flags"), set_reply(session, [bulk(flag) for flag in flags])),
            (bulk("redirect"), integer(redirection_of(session))),
            (bulk("prefixes"), array([bulk(prefix) for prefix in prefixes])),
        ],
    )


def _parse(session: Session, args: list[bytes]) -> tuple[Tracking, list[bytes]] | bytes:
    """The options of CLIENT TRACKING and its prefixes in their order, or the error for the first that is wrong."""
    tracking = Tracking()
    prefixes: list[bytes] = []
    words = iter(args[3:])
    for word in words:
        option = word.upper()
        if option in (b"REDIRECT", b"PREFIX"):
            value = next(words, None)
            if value is None:
                return SYNTAX_ERROR
            if option == b"PREFIX":
                prefixes.append(value)
                continue
            if tracking.redirect:
                return REDIRECTED_TWICE
            number = parse_integer(value)
            if number is None:
                return NOT_AN_INTEGER
            if number not in session.server.sessions:
                return NOBODY_THERE
            tracking.redirect = number
        elif option == b"BCAST":
            tracking.broadcast = True
        elif option == b"OPTIN":
            tracking.optin = True
        elif option == b"OPTOUT":
            tracking.optout = True
        elif option == b"NOLOOP":
            tracking.noloop = True
        else:
            return SYNTAX_ERROR
    return tracking, prefixes


def _conflict(wanted: Tracking, prefixes: list[bytes], now: Tracking | None) -> bytes | None:
    """What is wrong with options that do not go together, or not with how the client tracks `now`."""
    if prefixes and not wanted.broadcast:
        return PREFIX_NEEDS_BCAST
    if now is not None and now.broadcast != wanted.broadcast:
        return BCAST_STAYS
    if wanted.broadcast and (wanted.optin or wanted.optout):
        return BCAST_TAKES_ALL
    if wanted.optin and wanted.optout:
        return IN_OR_OUT
    if now is not None and ((wanted.optin and now.optout) or (wanted.optout and now.optin)):
        return OPTIN_STAYS
    return None


def _overlap(prefixes: list[bytes], now: Tracking | None) -> bytes | None:
    """The error if two prefixes would tell of the same key. Redis goes on after it where the first of `prefixes` is not
    one of the two, and answers OK as well; a reply more than there were commands would put every client out of step."""
    existing = sorted(now.prefixes) if now is not None else []
    if len(existing) + len(prefixes) > PREFIXES_MAX:
        return TOO_MANY_PREFIXES
    for at, prefix in enumerate(prefixes):
        for other in existing:
            if prefix.startswith(other) or other.startswith(prefix):
                return _overlaps(prefix, b"an existing prefix", other)
        for other in prefixes[at + 1 :]:
            if prefix.startswith(other) or other.startswith(prefix):
                return _overlaps(prefix, b"another provided prefix", other)
    return None


def _overlaps(prefix: bytes, whose: bytes, other: bytes) -> bytes:
    return error(
        b"ERR Prefix '%b' overlaps with %b '%b'. Prefixes for a single client must not overlap."
        % (prefix.split(b"\0")[0], whose, other.split(b"\0")[0])
    )
