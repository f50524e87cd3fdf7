"""What a client says before and around its work: PING, ECHO, QUIT, RESET, HELLO, AUTH, SELECT.

Whether a client is let in is the session's business (it asks for the `no_auth` flag before it runs a command); here is
only how it identifies itself.
"""

from __future__ import annotations

from kvredis.server.acl.rules import DEFAULT_USER
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import (
    DB_OUT_OF_RANGE,
    EMPTY_ARRAY,
    NOT_AN_INTEGER,
    OK,
    PONG,
    SYNTAX_ERROR,
    WRONG_PASSWORD,
    Reply,
    bulk,
    bulks,
    error,
    integer,
    map_reply,
    payload,
    simple,
)
from kvredis.storage.index import SPACES

from .registry import command, wrong_arity
from .transactions import end_transaction

REDIS_VERSION = "7.4.0"
"""The version that clients are told: redis-py keeps no client-side cache with a server that says less."""

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

BAD_CLIENT_NAME = b"-ERR Client names cannot contain spaces, newlines or special characters.\r\n"
NO_PASSWORD_SET = error(
    "ERR AUTH <password> called without any password configured for the default user. "
    "Are you sure your configuration is correct?"
)
HELLO_NEEDS_AUTH = error(
    "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> "
    "option can be used to authenticate the client and select the RESP protocol version at the same time"
)

_BEFORE_AUTH = "noscript loading stale fast no_auth allow_busy"


@command(
    "ping",
    arity=-1,
    flags="fast",
    acl="fast connection",
    group="connection",
    tips="request_policy:all_shards response_policy:all_succeeded",
    syntax="[message]",
    summary="Answer PONG, or the message given.",
)
def ping(session: Caller, args: list[bytes]) -> Reply:
    """PING [message]."""
    if len(args) > 2:
        return wrong_arity("ping")
    if session.subscriptions and session.resp == 2:  # to such a client everything is a message
        return bulks([b"pong", *(args[1:] or [b""])])
    return PONG if len(args) == 1 else payload(args[1])


@command(
    "echo",
    arity=2,
    flags="loading stale fast",
    acl="fast connection",
    group="connection",
    syntax="message",
    summary="Answer the message given.",
)
def echo(session: Caller, args: list[bytes]) -> Reply:
    """ECHO message."""
    return payload(args[1])


@command(
    "quit",
    arity=-1,
    flags=_BEFORE_AUTH,
    acl="fast connection",
    group="connection",
    summary="Close the connection once everything before has been answered.",
)
def quit_(session: Caller, args: list[bytes]) -> Reply:
    """QUIT: nothing that the client sent after it is run."""
    session.close_after_reply = True
    return OK


@command(
    "reset",
    arity=1,
    flags=_BEFORE_AUTH,
    acl="fast connection",
    group="connection",
    since="6.2.0",
    summary="Bring the connection back to the state in which it was opened.",
)
def reset(session: Caller, args: list[bytes]) -> Reply:
    """RESET: protocol 2, database 0, no name, no transaction, nothing listened to, tracked, leased or announced, off
    the lane, and logged out where a password is set. The library's name stays."""
    server = session.server
    end_transaction(session)
    server.parts.end_all(session)
    server.shm.detach(session)
    server.pubsub.forget(session)
    server.tracking.forget(session)
    server.expected.withdraw(session.id)
    server.stop_monitoring(session)
    session.reply_mode = "on"
    session.speak(2)
    session.forget_authentication()
    session.space = 0
    session.name = b""
    session.no_evict = session.no_touch = False
    session.fetch = session.store.fetch
    return simple("RESET")


@command(
    "auth",
    arity=-2,
    flags=_BEFORE_AUTH,
    acl="fast connection",
    group="connection",
    complexity="O(1)",
    syntax="[username] password",
    summary="Log in.",
)
def auth(session: Caller, args: list[bytes]) -> Reply:
    """AUTH [username] password; a user without a password takes any."""
    if len(args) > 3:
        return SYNTAX_ERROR
    if len(args) == 2 and session.server.acl.default.nopass:
        return NO_PASSWORD_SET
    user = DEFAULT_USER if len(args) == 2 else args[1]
    return OK if log_in(session, args[0], user, args[-1]) else WRONG_PASSWORD


@command(
    "select",
    arity=2,
    flags="loading stale fast",
    acl="fast connection",
    group="connection",
    syntax="index",
    summary="Use another database.",
)
def select(session: Caller, args: list[bytes]) -> Reply:
    """SELECT index."""
    index = parse_integer(args[1])
    if index is None:
        return NOT_AN_INTEGER
    if not INT32_MIN <= index <= INT32_MAX:
        return error(f"ERR value is out of range, value must between {INT32_MIN} and {INT32_MAX}")
    if index and session.server.cluster is not None:
        return error("ERR SELECT is not allowed in cluster mode")
    if not 0 <= index < SPACES:
        return DB_OUT_OF_RANGE
    session.space = index
    return OK


@command(
    "hello",
    arity=-1,
    flags=_BEFORE_AUTH,
    acl="fast connection",
    group="connection",
    since="6.0.0",
    syntax="[protover [AUTH username password] [SETNAME clientname]]",
    summary="Agree on the protocol, log in and name the connection in one step; tells what this server is.",
)
def hello(session: Caller, args: list[bytes]) -> Reply:
    """HELLO [2|3 [AUTH user password] [SETNAME name]]: all of it takes effect, or nothing does."""
    protocol = parse_integer(args[1]) if len(args) > 1 else session.resp
    if protocol is None:
        return error("ERR Protocol version is not an integer or out of range")
    if protocol not in (2, 3):
        return error("NOPROTO unsupported protocol version")
    credentials: tuple[bytes, bytes] | None = None
    name: bytes | None = None
    at = 2
    while at < len(args):
        option, left = args[at].upper(), len(args) - at - 1
        if option == b"AUTH" and left >= 2:
            credentials = args[at + 1], args[at + 2]
            at += 3
        elif option == b"SETNAME" and left:
            name = args[at + 1]
            if not is_plain_word(name):
                return BAD_CLIENT_NAME
            at += 2
        else:
            return error(b"ERR Syntax error in HELLO option '%b'" % args[at].split(b"\0")[0])
    if credentials is not None and not log_in(session, args[0], *credentials):
        return WRONG_PASSWORD
    if not session.authenticated:
        return HELLO_NEEDS_AUTH
    if name is not None:
        session.name = name
    session.said_hello = True
    session.speak(protocol)
    return _introduction(session)


def log_in(session: Caller, command: bytes, name: bytes, password: bytes) -> bool:
    """Check credentials and note who it is; a wrong try, with `command` as it was typed, is noted in ACL LOG and leaves
    the session as it was."""
    acl = session.server.acl
    user = acl.login(name, password)
    if user is None:
        acl.note_failed_login(session, command, name)
        return False
    session.authenticate(user)
    return True


def is_plain_word(text: bytes) -> bool:
    """Whether a client may call itself that: printable ASCII without spaces, since CLIENT LIST is split at them."""
    return all(33 <= byte <= 126 for byte in text)


def _introduction(session: Caller) -> Reply:
    """What HELLO tells: clients check `proto`, some `server` and `version` too. What Redis does not tell is how many
    threads send to this client and others like it: our own load over more connections where there are several."""
    facts = [
        (bulk("server"), bulk("redis")),
        (bulk("version"), bulk(REDIS_VERSION)),
        (bulk("proto"), integer(session.resp)),
        (bulk("id"), integer(session.id)),
        (bulk("mode"), bulk("standalone" if session.server.cluster is None else "cluster")),
        (bulk("role"), bulk("master")),
        (bulk("modules"), EMPTY_ARRAY),
    ]
    if (threads := session.server.io_pool.threads) > 1 and not session.encrypted:
        facts.append((bulk("io-threads"), integer(threads)))
    return map_reply(session, facts)
