"""CLIENT: the connected clients, their names and options, and disconnecting them."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvredis.server.client.client import Client, Tracking
from kvredis.server.client.tracking import PREFIXES_MAX
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import (
    NOT_AN_INTEGER,
    OK,
    ONE,
    SYNTAX_ERROR,
    ZERO,
    Reply,
    array,
    bulk,
    error,
    integer,
    map_reply,
    set_reply,
    verbatim,
)

from .command import help_reply
from .connection import BAD_CLIENT_NAME, is_plain_word
from .registry import container, subcommand, wrong_subcommand

CLIENT_TYPES = frozenset({b"NORMAL", b"MASTER", b"REPLICA", b"SLAVE", b"PUBSUB"})
"""The types that Redis knows; here are normal ones and, while they are subscribed to something, pubsub ones."""

BAD_CLIENT_ID = error("ERR client-id should be greater than 0")
NO_SUCH_CLIENT = error("ERR No such client")

_OWN = {"flags": "noscript loading stale", "acl": "slow connection"}
_ADMIN = {"flags": "admin noscript loading stale", "acl": "admin slow dangerous connection"}

container(
    "client",
    group="connection",
    since="2.4.0",
    complexity="Depends on subcommand.",
    summary="This connection and the others.",
)


@subcommand("client|id", arity=2, since="5.0.0", summary="This connection's number.", **_OWN)
def client_id(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT ID."""
    return integer(session.id)


@subcommand("client|getname", arity=2, since="2.6.9", summary="This connection's name.", **_OWN)
def client_getname(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT GETNAME; nil without one."""
    return bulk(session.name) if session.name else session.nil


@subcommand("client|setname", arity=3, since="2.6.9", syntax="connection-name", summary="Name this connection.", **_OWN)
def client_setname(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT SETNAME name; an empty one takes it away."""
    if not is_plain_word(args[2]):
        return BAD_CLIENT_NAME
    session.name = args[2]
    return OK


@subcommand(
    "client|setinfo",
    arity=4,
    since="7.2.0",
    syntax="LIB-NAME libname | LIB-VER libver",
    summary="Say which library this client uses.",
    **_OWN,
)
def client_setinfo(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT SETINFO LIB-NAME|LIB-VER value."""
    attribute = args[2].upper()
    if attribute not in (b"LIB-NAME", b"LIB-VER"):
        return error(b"ERR Unrecognized option '%b'" % args[2].split(b"\0")[0])
    if not is_plain_word(args[3]):
        return error(b"ERR %b cannot contain spaces, newlines or special characters." % args[2])
    if attribute == b"LIB-NAME":
        session.lib_name = args[3]
    else:
        session.lib_ver = args[3]
    return OK


@subcommand(
    "client|info", arity=2, since="6.2.0", tips="nondeterministic_output", summary="This connection's line.", **_OWN
)
def client_info(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT INFO."""
    return verbatim(session, describe(session))


@subcommand(
    "client|list",
    arity=-2,
    since="2.4.0",
    tips="nondeterministic_output",
    complexity="O(N) in the number of connections",
    syntax="[TYPE <NORMAL | MASTER | REPLICA | PUBSUB>] [ID client-id [client-id ...]]",
    summary="A line for each connection.",
    **_ADMIN,
)
def client_list(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT LIST [TYPE type | ID id ...]."""
    sessions = session.server.sessions
    option = args[2].upper() if len(args) > 3 else b""
    if option == b"TYPE" and len(args) == 4:
        if args[3].upper() not in CLIENT_TYPES:
            return _unknown_type(args[3])
        listed = [each for each in sessions.values() if type_of(each) == args[3].upper()]
    elif option == b"ID":
        numbers = [parse_integer(arg) for arg in args[3:]]
        if None in numbers:
            return error("ERR Invalid client ID")
        listed = [sessions[number] for number in numbers if number in sessions]
    elif len(args) == 2:
        listed = list(sessions.values())
    else:
        return SYNTAX_ERROR
    return verbatim(session, b"".join(each.describe() for each in listed))


@subcommand(
    "client|kill",
    arity=-3,
    since="2.4.0",
    complexity="O(N) in the number of connections",
    syntax="ip:port | [ID client-id] [TYPE type] [USER username] [ADDR ip:port] [LADDR ip:port] [SKIPME <YES | NO>]",
    summary="Close connections.",
    **_ADMIN,
)
def client_kill(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT KILL addr: OK or an error. CLIENT KILL option value ...: how many were closed."""
    if len(args) == 3:
        found = [each for each in session.server.sessions.values() if each.addr.encode() == args[2]]
        for each in found[:1]:
            _close(session, each)
        return OK if found else NO_SUCH_CLIENT
    filters = _kill_filters(session, args)
    if isinstance(filters, bytes):
        return filters
    skip_me = filters.pop(b"SKIPME", b"YES").upper() == b"YES"
    doomed = [
        each for each in session.server.sessions.values() if all(_FITS[name](each, filters[name]) for name in filters)
    ]
    doomed = [each for each in doomed if not (skip_me and each is session)]
    for each in doomed:
        _close(session, each)
    return integer(len(doomed))


@subcommand(
    "client|no-evict",
    arity=3,
    since="7.0.0",
    syntax="ON | OFF",
    summary="Exempt this connection from being closed for its buffers; none is closed for that yet.",
    **_ADMIN,
)
def client_no_evict(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT NO-EVICT ON|OFF."""
    switch = _SWITCH.get(args[2].upper())
    if switch is None:
        return SYNTAX_ERROR
    session.no_evict = switch
    return OK


@subcommand(
    "client|no-touch",
    arity=3,
    since="7.2.0",
    syntax="ON | OFF",
    summary="Ask that this connection's reads leave the eviction order alone.",
    **_OWN,
)
def client_no_touch(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT NO-TOUCH ON|OFF."""
    switch = _SWITCH.get(args[2].upper())
    if switch is None:
        return SYNTAX_ERROR
    session.no_touch = switch
    session.fetch = session.store.fetch_untouched if switch else session.store.fetch
    return OK


@subcommand(
    "client|help", arity=2, flags="loading stale", acl="slow connection", since="5.0.0", summary="Print this help."
)
def client_help(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT HELP."""
    return help_reply("client")


def letters_of(session: Client) -> str:
    """A client's tracking in the letters of CLIENT LIST: t tracks, R cannot redirect, B broadcast."""
    tracking = session.tracking
    if tracking is None:
        return ""
    return "t" + ("R" if tracking.broken else "") + ("B" if tracking.broadcast else "")


def redirection_of(session: Client) -> int:
    """The client that a client redirects to: 0 for none, -1 without tracking."""
    return -1 if session.tracking is None else session.tracking.redirect


def type_of(session: Client) -> bytes:
    """What kind of client it is, for the filters of LIST and KILL."""
    return b"PUBSUB" if session.subscriptions else b"NORMAL"


def describe(session: Caller) -> bytes:
    """One line of CLIENT LIST: the 30 fields of Redis 7.2 in its order, then our own, with a line break."""
    now_s = time.monotonic()
    held = session.held()
    unix_socket = not session.addr.startswith("[") and session.addr.endswith(":0")
    queued, attached = session.transaction, session.server.shm.of(session)
    letters = "".join(
        letter
        for letter, is_so in (
            ("O", session.id in session.server.monitors),
            ("P", session.subscriptions > 0),
            ("x", queued is not None),
            ("b", session.waiting is not None),
            (letters_of(session), True),
            ("d", session.watch_broken),
            ("c", session.close_after_reply),
            ("U", unix_socket),
            ("e", session.no_evict),
            ("T", session.no_touch),
        )
        if is_so
    )
    fields: list[tuple[str, object]] = [
        ("id", session.id),
        ("addr", session.addr),
        ("laddr", session.laddr),
        ("fd", session.fd),
        ("name", session.name.decode("latin-1")),
        ("age", int(now_s - session.created_s)),
        ("idle", int(now_s - session.last_command_s)),
        ("flags", letters or "N"),
        ("db", session.space),
        ("sub", len(session.channels)),
        ("psub", len(session.patterns)),
        ("ssub", len(session.shard_channels)),
        ("multi", -1 if queued is None else len(queued.commands)),
        ("qbuf", held.qbuf),
        ("qbuf-free", held.qbuf_free),
        ("argv-mem", held.argv),
        ("multi-mem", held.multi),
        ("rbs", held.rbs),
        ("rbp", held.rbs),
        ("obl", held.rbs),
        ("oll", int(held.omem > 0)),
        ("omem", held.omem),
        ("tot-mem", held.total),
        ("events", "r"),
        ("cmd", session.last_command),
        ("user", session.user.name.decode("latin-1")),
        ("redir", redirection_of(session)),
        ("resp", session.resp),
        ("lib-name", session.lib_name.decode("latin-1")),
        ("lib-ver", session.lib_ver.decode("latin-1")),
        ("lane", "none" if attached is None else "attached"),
        ("leases", 0 if attached is None else attached.leases),
        ("lent", 0 if attached is None else attached.lent_bytes),
        ("resv", len(session.server.parts.of(session))),
        ("expects", session.server.expected.of(session)),
    ]
    return " ".join(f"{name}={value}" for name, value in fields).encode("latin-1", "replace") + b"\n"


_SWITCH = {b"ON": True, b"OFF": False}

_FITS: dict[bytes, Callable[[Client, bytes], bool]] = {
    b"ID": lambda each, value: each.id == int(value),
    b"ADDR": lambda each, value: each.addr.encode() == value,
    b"LADDR": lambda each, value: each.laddr.encode() == value,
    b"USER": lambda each, value: each.user.name == value,
    b"TYPE": lambda each, value: value.upper() == type_of(each),
}


def _kill_filters(session: Caller, args: list[bytes]) -> dict[bytes, bytes] | bytes:
    """The options of CLIENT KILL's new form, checked, or the error for them."""
    filters: dict[bytes, bytes] = {}
    for at in range(2, len(args), 2):
        option = args[at].upper()
        if at + 1 == len(args) or (option != b"SKIPME" and option not in _FITS):
            return SYNTAX_ERROR
        value = args[at + 1]
        if option == b"ID" and (parse_integer(value) or 0) < 1:
            return BAD_CLIENT_ID
        if option == b"TYPE" and value.upper() not in CLIENT_TYPES:
            return _unknown_type(value)
        if option == b"USER" and session.server.acl.user(value) is None:
            return error(b"ERR No such user '%b'" % value.split(b"\0")[0])
        if option == b"SKIPME" and value.upper() not in (b"YES", b"NO"):
            return SYNTAX_ERROR
        filters[option] = value
    return filters


def _unknown_type(name: bytes) -> bytes:
    return error(b"ERR Unknown client type '%b'" % name.split(b"\0")[0])


def _close(session: Client, other: Client) -> None:
    """Close `other` at once, or oneself once the reply is out."""
    if other is session:
        session.close_after_reply = True
    else:
        other.close()


# ---- pause and unblock ---------------------------------------------------------------------------------------------

UNBLOCKED = b"-UNBLOCKED client unblocked via CLIENT UNBLOCK\r\n"


@subcommand(
    "client|pause",
    arity=-3,
    since="3.0.0",
    syntax="timeout [WRITE | ALL]",
    summary="Let commands, or writes only, wait for that many milliseconds.",
    flags="admin noscript loading stale",
    acl="admin slow dangerous connection",
)
def client_pause(session: Caller, args: list[bytes]) -> Reply:
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


@subcommand(
    "client|unpause",
    arity=2,
    since="6.2.0",
    summary="End a pause.",
    flags="admin noscript loading stale",
    acl="admin slow dangerous connection",
)
def client_unpause(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT UNPAUSE; OK also when there is none."""
    session.server.pause.end()
    return OK


@subcommand(
    "client|unblock",
    arity=-3,
    since="5.0.0",
    syntax="client-id [TIMEOUT | ERROR]",
    summary="End the wait of another client's command, as if its time were over or with an error.",
    flags="admin noscript loading stale",
    acl="admin slow dangerous connection",
)
def client_unblock(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT UNBLOCK id [TIMEOUT|ERROR]: 1 if that client was waiting, else 0."""
    if len(args) > 4:
        return wrong_subcommand(args)
    how = args[3].upper() if len(args) == 4 else b"TIMEOUT"
    if how not in (b"TIMEOUT", b"ERROR"):
        return error("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR")
    number = parse_integer(args[2])
    if number is None:
        return error("ERR value is not an integer or out of range")
    pending = session.server.blocked.timeouts.get(number)
    if pending is None:
        return ZERO
    pending.unblock(UNBLOCKED if how == b"ERROR" else pending.timeout_reply)
    return ONE


@subcommand(
    "client|reply",
    arity=3,
    since="3.2.0",
    syntax="ON | OFF | SKIP",
    summary="Be answered, or not, or not the next time.",
    flags="noscript loading stale",
    acl="slow connection",
)
def client_reply(session: Caller, args: list[bytes]) -> Reply:
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


# ---- tracking commands -----------------------------------------------------------------------------------------------
#
# CLIENT TRACKING, CACHING, GETREDIR and TRACKINGINFO: how a client asks for client-side caching.
#
# The order in which TRACKING's options are checked is Redis', because of two mistakes in one line it names the first.


REDIRECTED_TWICE = error("ERR A client can only redirect to a single other client")
NO_SUCH_REDIRECT = error("ERR The client ID you want redirect to does not exist")
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

_CACHING = {"flags": "noscript loading stale", "acl": "slow connection", "since": "6.0.0"}


@subcommand(
    "client|tracking",
    arity=-3,
    syntax="<ON | OFF> [REDIRECT client-id] [PREFIX prefix [PREFIX prefix ...]] [BCAST] [OPTIN] [OPTOUT] [NOLOOP]",
    summary="Be told when something that was read has changed.",
    **_CACHING,
)
def client_tracking(session: Caller, args: list[bytes]) -> Reply:
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
    **_CACHING,
)
def client_caching(session: Caller, args: list[bytes]) -> Reply:
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


@subcommand("client|getredir", arity=2, summary="The client that invalidations are redirected to.", **_CACHING)
def client_getredir(session: Caller, args: list[bytes]) -> Reply:
    """CLIENT GETREDIR: its number, 0 without redirection, -1 without tracking."""
    return integer(redirection_of(session))


@subcommand("client|trackinginfo", arity=2, summary="How this connection tracks.", **{**_CACHING, "since": "6.2.0"})
def client_trackinginfo(session: Caller, args: list[bytes]) -> Reply:
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


def _parse(session: Caller, args: list[bytes]) -> tuple[Tracking, list[bytes]] | bytes:
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
                return NO_SUCH_REDIRECT
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
