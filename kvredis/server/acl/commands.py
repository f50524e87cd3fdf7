"""ACL: the users, their rules, and what follows for those who are connected when rules change."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection

from kvredis.server.client.client import Client
from kvredis.server.commands.command import help_reply
from kvredis.server.commands.registry import Command, container, every_command, lookup, subcommand
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import (
    NOT_AN_INTEGER,
    OK,
    Reply,
    array,
    bulk,
    bulks,
    error,
    integer,
    map_reply,
    set_reply,
)

from .rules import CATEGORIES, DEFAULT_USER, RuleError, Selector, UnmatchedParenthesis, User, is_user_name, merged
from .state import Acl, AclFileError, Refusal, refused

log = logging.getLogger(__name__)

GENPASS_BITS = 256
GENPASS_BITS_MAX = 4096
LOG_ENTRIES_SHOWN = 10

NO_ACL_FILE = error(
    "ERR This Redis instance is not configured to use an ACL file. You may want to specify users via the ACL SETUSER "
    "command and then issue a CONFIG REWRITE (assuming you have a Redis configuration file set) in order to store "
    "users in the Redis configuration."
)
NOT_SAVED = error("ERR There was an error trying to save the ACLs. Please check the server logs for more information")
NOTHING_LOADED = " WARNING: ACL errors detected, no change to the previously active ACL rules was performed"
BAD_USER_NAME = error("ERR Usernames can't contain spaces or null characters")
DEFAULT_STAYS = error("ERR The 'default' user cannot be removed")
BAD_BITS = error(
    "ERR ACL GENPASS argument must be the number of bits for the output password, a positive number up to "
    f"{GENPASS_BITS_MAX}"
)

_OWN = {"flags": "noscript loading stale", "acl": "slow", "since": "6.0.0"}
_ADMIN = {"flags": "admin noscript loading stale", "acl": "admin slow dangerous", "since": "6.0.0"}

container("acl", group="server", since="6.0.0", complexity="Depends on subcommand.", summary="Who may do what.")


@subcommand(
    "acl|cat",
    arity=-2,
    complexity="O(N) in the number of commands",
    syntax="[category]",
    summary="The categories of commands, or the commands of one.",
    **_OWN,
)
def acl_cat(session: Caller, args: list[bytes]) -> Reply:
    """ACL CAT [category]."""
    if len(args) == 2:
        return bulks(CATEGORIES)
    if len(args) > 3:
        return _bad_subcommand(args)
    category = args[2].lower().decode("latin-1")
    if category not in CATEGORIES:
        return error(b"ERR Unknown category '%b'" % args[2].split(b"\0")[0][:128])
    return bulks([each.name for each in every_command() if category in each.categories])


@subcommand("acl|whoami", arity=2, summary="The user that this connection is.", **_OWN)
def acl_whoami(session: Caller, args: list[bytes]) -> Reply:
    """ACL WHOAMI."""
    return bulk(session.user.name)


@subcommand("acl|users", arity=2, complexity="O(N) in the number of users", summary="The names of all users.", **_ADMIN)
def acl_users(session: Caller, args: list[bytes]) -> Reply:
    """ACL USERS."""
    return bulks([user.name for user in session.server.acl.in_order()])


@subcommand(
    "acl|list", arity=2, complexity="O(N) in the number of users", summary="All users, as in the aclfile.", **_ADMIN
)
def acl_list(session: Caller, args: list[bytes]) -> Reply:
    """ACL LIST."""
    return bulks([user.describe() for user in session.server.acl.in_order()])


@subcommand(
    "acl|getuser",
    arity=3,
    complexity="O(N) in the length of the user's rules",
    syntax="username",
    summary="A user's rules, one by one.",
    **_ADMIN,
)
def acl_getuser(session: Caller, args: list[bytes]) -> Reply:
    """ACL GETUSER name; nil without such a user."""
    user = session.server.acl.user(args[2])
    if user is None:
        return session.nil
    pairs: list[tuple[Reply, Reply]] = [
        (bulk("flags"), set_reply(session, [bulk(flag) for flag in user.flags])),
        (bulk("passwords"), bulks(user.passwords)),
        *_permissions(user.root),
        (bulk("selectors"), array([map_reply(session, _permissions(each)) for each in user.selectors])),
    ]
    return map_reply(session, pairs)


def _permissions(selector: Selector) -> list[tuple[Reply, Reply]]:
    return [
        (bulk("commands"), bulk(selector.describe_commands())),
        (bulk("keys"), bulk(selector.describe_keys())),
        (bulk("channels"), bulk(selector.describe_channels())),
    ]


@subcommand(
    "acl|setuser",
    arity=-3,
    tips="request_policy:all_nodes response_policy:all_succeeded",
    complexity="O(N) in the number of rules",
    syntax="username [rule [rule ...]]",
    summary="Change a user, or make a new one.",
    **_ADMIN,
)
def acl_setuser(session: Caller, args: list[bytes]) -> Reply:
    """ACL SETUSER name [rule ...]: all of the rules take effect, or none."""
    name, acl = args[2], session.server.acl
    if not is_user_name(name):
        return BAD_USER_NAME
    known = acl.user(name)
    changed = known.copy() if known is not None else User(name)
    try:
        rules = merged(args[3:])
    except UnmatchedParenthesis as wrong:
        return error(f"ERR {wrong}".encode("utf-8", "surrogateescape"))
    for rule in rules:
        try:
            changed.apply(rule)
        except RuleError as wrong:
            shown = rule.split(b"\0", 1)[0]
            return error(b"ERR Error in ACL SETUSER modifier '%b': %b" % (shown, str(wrong).encode()))
    acl.users.setdefault(name, changed).become(changed)
    _follow(session, [acl.users[name]])
    return OK


@subcommand(
    "acl|deluser",
    arity=-3,
    tips="request_policy:all_nodes response_policy:all_succeeded",
    complexity="O(N) in the number of connections",
    syntax="username [username ...]",
    summary="Delete users and close their connections.",
    **_ADMIN,
)
def acl_deluser(session: Caller, args: list[bytes]) -> Reply:
    """ACL DELUSER name ...: how many there were."""
    if DEFAULT_USER in args[2:]:
        return DEFAULT_STAYS
    gone = session.server.acl.remove(args[2:])
    _follow(session, gone)
    return integer(len(gone))


@subcommand(
    "acl|dryrun",
    arity=-4,
    since="7.0.0",
    complexity="O(1)",
    syntax="username command [arg [arg ...]]",
    summary="Whether a user might run a command, without running it.",
    flags="admin noscript loading stale",
    acl="admin slow dangerous",
)
def acl_dryrun(session: Caller, args: list[bytes]) -> Reply:
    """ACL DRYRUN name command ...: OK, or why not (which is no error)."""
    user = session.server.acl.user(args[2])
    if user is None:
        return error(b"ERR User '%b' not found" % args[2].split(b"\0")[0])
    line = args[3:]
    found = lookup(line)
    if not isinstance(found, Command):
        arity = found.startswith(b"-ERR wrong number of arguments")
        return found if arity else error(b"ERR Command '%b' not found" % line[0].split(b"\0")[0])
    denial = user.denial(found, line)
    return OK if denial is None else bulk(refused(user, found, denial, line[denial.at]))


@subcommand(
    "acl|genpass", arity=-2, complexity="O(1)", syntax="[bits]", summary="A password that no client can guess.", **_OWN
)
def acl_genpass(session: Caller, args: list[bytes]) -> Reply:
    """ACL GENPASS [bits]: four bits a letter."""
    if len(args) > 3:
        return _bad_subcommand(args)
    bits = parse_integer(args[2]) if len(args) == 3 else GENPASS_BITS
    if bits is None:
        return NOT_AN_INTEGER
    if not 0 < bits <= GENPASS_BITS_MAX:
        return BAD_BITS
    letters = (bits + 3) // 4
    return bulk(secrets.token_hex((letters + 1) // 2)[:letters])


@subcommand(
    "acl|log",
    arity=-2,
    complexity="O(N) in the number of entries shown",
    syntax="[count | RESET]",
    summary="The latest logins and commands that were refused.",
    **_ADMIN,
)
def acl_log(session: Caller, args: list[bytes]) -> Reply:
    """ACL LOG [count | RESET]."""
    refusals = session.server.acl.log
    if len(args) > 3:
        return _bad_subcommand(args)
    if len(args) == 3 and args[2].upper() == b"RESET":
        refusals.entries.clear()
        return OK
    count = parse_integer(args[2]) if len(args) == 3 else LOG_ENTRIES_SHOWN
    if count is None:
        return NOT_AN_INTEGER
    now_ms = refusals.clock_ms()
    shown = list(refusals.entries)[: max(0, count)]
    return array([_log_entry(session, each, now_ms) for each in shown])


def _log_entry(session: Caller, refusal: Refusal, now_ms: int) -> Reply:
    age = f"{(now_ms - refusal.updated_ms) / 1000:.3f}".rstrip("0").rstrip(".").encode()
    return map_reply(
        session,
        [
            (bulk("count"), integer(refusal.count)),
            (bulk("reason"), bulk(refusal.reason)),
            (bulk("context"), bulk(refusal.context)),
            (bulk("object"), bulk(refusal.object)),
            (bulk("username"), bulk(refusal.username)),
            (bulk("age-seconds"), b",%b\r\n" % age if session.resp == 3 else bulk(age)),
            (bulk("client-info"), bulk(refusal.client_info)),
            (bulk("entry-id"), integer(refusal.number)),
            (bulk("timestamp-created"), integer(refusal.created_ms)),
            (bulk("timestamp-last-updated"), integer(refusal.updated_ms)),
        ],
    )


@subcommand("acl|load", arity=2, complexity="O(N) in the number of users", summary="Read the aclfile again.", **_ADMIN)
def acl_load(session: Caller, args: list[bytes]) -> Reply:
    """ACL LOAD: the file's users and no others, or no change at all. Clients of a user that stays are kept, with its
    new rights, as from Redis 7.4 on; 7.2 closes them."""
    acl = session.server.acl
    if not acl.path:
        return NO_ACL_FILE
    try:
        gone = acl.load()
    except AclFileError as wrong:
        opened = not str(wrong).startswith("Error loading ACLs, ")
        return error(f"ERR {wrong}{NOTHING_LOADED if opened else ''}".encode("utf-8", "surrogateescape"))
    _follow(session, [*acl.in_order(), *gone])
    return OK


@subcommand("acl|save", arity=2, complexity="O(N) in the number of users", summary="Write the aclfile.", **_ADMIN)
def acl_save(session: Caller, args: list[bytes]) -> Reply:
    """ACL SAVE."""
    acl = session.server.acl
    if not acl.path:
        return NO_ACL_FILE
    try:
        acl.save()
    except OSError as failed:
        log.warning("the aclfile %s could not be written: %s", acl.path, failed)
        return NOT_SAVED
    return OK


@subcommand("acl|help", arity=2, flags="loading stale", acl="slow", since="6.0.0", summary="Print this help.")
def acl_help(session: Caller, args: list[bytes]) -> Reply:
    """ACL HELP."""
    return help_reply("acl")


def _follow(session: Caller, changed: Collection[User]) -> None:
    """After users have changed or gone: close the connections of those that are no more, and subscribers to what their
    user may no longer hear; let in clients that wait to log in once the default user needs no password; ask every
    session what it may do now."""
    server = session.server
    for each in list(server.sessions.values()):
        if each.user in changed and not _may_stay(each, server.acl):
            each.forget_authentication()
            if each is session:
                each.close_after_reply = True
            else:
                each.close()
        elif not each.authenticated and server.acl.default.needs_no_password:
            each.forget_authentication()
    server.reconsider()


def _may_stay(session: Client, acl: Acl) -> bool:
    user = session.user
    if acl.user(user.name) is not user:
        return False
    return all(user.may_hear(pattern, literal=True) for pattern in session.patterns) and all(
        user.may_hear(channel, literal=False) for channel in (*session.channels, *session.shard_channels)
    )


def _bad_subcommand(args: list[bytes]) -> bytes:
    shown = args[1].split(b"\0")[0][:128]
    return error(b"ERR unknown subcommand or wrong number of arguments for '%b'. Try ACL HELP." % shown)
