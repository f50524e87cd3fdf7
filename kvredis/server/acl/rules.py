"""ACL rules: one set of permissions on commands, keys and channels, and the language in which it is written.

A user has one such Selector of its own and may have more; a command passes if any single one lets it pass. Which
commands a selector allows is kept as "all but these" or "none but these", so that `+@all` includes commands that are
yet to come; beside it stand the rules as they were given, because ACL LIST and the aclfile give them back in their
order (as Redis 7.2 does; 7.0 derives others that amount to the same).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from kvredis.server.commands.registry import COMMANDS, Command, keys_end
from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.inline import split_words

# ---- access ----------------------------------------------------------------------------------------------------------
#
# Which keys and channels a command line touches, and how: what an ACL's patterns are compared with.
#
# WHY beside the table: `Command.access` says what a command does with its keys in general, `|` between what it does
# with each of two. Only SET depends on its options: it reads when it is asked to GET, so a user who may only write is
# let through or not as in Redis.


READ, WRITE = 1, 2
"""Bits: the value of a key is seen; a key is made, changed or taken away. Asking whether a key exists needs neither."""

_BITS = {"access": READ, "insert": WRITE, "update": WRITE, "delete": WRITE}
_CHANNELS = {  # (channels run to the end of the line, a channel is a pattern)
    "publish": (False, False),
    "spublish": (False, False),
    "subscribe": (True, False),
    "ssubscribe": (True, False),
    "psubscribe": (True, True),
}
"""Unsubscribing needs no permission."""


class Touched(NamedTuple):
    """Positions in a command line. `keys`: runs of key arguments with the access each needs; `channels`: channels that
    are to be heard or spoken to, which are patterns themselves where `literal`."""

    keys: Sequence[tuple[range, int]]
    channels: range
    literal: bool


def touched_by(command: Command, args: Sequence[object]) -> Touched:
    """What the line `args`, which calls for `command` and has an arity that fits, touches."""
    argc = keys_end(command.behind_keys, args) if command.behind_keys else len(args)
    if command.name in _CHANNELS:
        to_the_end, literal = _CHANNELS[command.name]
        return Touched((), range(1, argc if to_the_end else min(argc, 2)), literal)
    first, last, step = command.keys
    if not first or "pubsub" in command.categories:  # a shard channel is given as a key to cluster clients only
        return Touched((), range(0), False)
    span = range(first, min(argc, argc + last + 1 if last < 0 else last + 1), step)
    accesses = _accesses(command, args)
    if len(accesses) == 1:
        return Touched(((span, accesses[0]),), range(0), False)
    each = [(range(at, at + 1), accesses[min(which, len(accesses) - 1)]) for which, at in enumerate(span)]
    return Touched(each, range(0), False)


def _accesses(command: Command, args: Sequence[object]) -> list[int]:
    """What is done to the keys: one answer for all of them, or one for each."""
    if command.name == "set" and not any(isinstance(arg, bytes) and arg.upper() == b"GET" for arg in args[3:]):
        return [WRITE]
    found = [0]
    for word in command.access:
        if word == "|":
            found.append(0)
        else:
            found[-1] |= _BITS.get(word, 0)
    return found


CATEGORIES = (
    "keyspace", "read", "write", "set", "sortedset", "list", "hash", "string", "bitmap", "hyperloglog", "geo", "stream",
    "pubsub", "admin", "fast", "slow", "blocking", "dangerous", "connection", "transaction", "scripting",
)  # fmt: skip
"""Redis' categories in its order; those of types that a block store does not have exist and are empty."""

SYNTAX = "Syntax error"
UNKNOWN = "Unknown command or category name in ACL"
KEY_AFTER_ALL = (
    "Adding a pattern after the * pattern (or the 'allkeys' flag) is not valid and does not have any effect. "
    "Try 'resetkeys' to start with an empty list of patterns"
)
CHANNEL_AFTER_ALL = (
    "Adding a pattern after the * pattern (or the 'allchannels' flag) is not valid and does not have any effect. "
    "Try 'resetchannels' to start with an empty list of channels"
)
FIRST_ARG_OF_SUBCOMMAND = "Allowing first-arg of a subcommand is not supported"


class RuleError(ValueError):
    """A rule that cannot be applied; the text is Redis'."""


class Reason(IntEnum):
    """What a command is refused for. Of several selectors' reasons the highest is told."""

    COMMAND = 1
    KEY = 2
    CHANNEL = 4


class Denial(NamedTuple):
    """Why a command line may not run, and which of its arguments is to blame (0 for the command itself)."""

    reason: Reason
    at: int


class Pattern(NamedTuple):
    """A pattern of keys with what may be done to those it fits, or one of channels (whose access says nothing)."""

    text: bytes
    access: int
    fits: Callable[[bytes], bool]

    @property
    def key_rule(self) -> bytes:
        """The rule that makes this pattern of keys; not ~*, behind which other patterns would be refused, while a user
        who came to every key by way of %RW~* may have some."""
        full = b"%RW~" if self.text == b"*" else b"~"
        return {READ: b"%R~", WRITE: b"%W~"}.get(self.access, full) + self.text


class Selector:
    """A set of permissions; a new one allows nothing. `keys` and `channels` are by pattern, in order of arrival."""

    def __init__(self) -> None:
        self.all_keys = False
        self.all_channels = False
        self.keys: dict[bytes, Pattern] = {}
        self.channels: dict[bytes, Pattern] = {}
        self.rules: list[bytes] = []
        self._all_but = False  # whether `_named` are the commands that may not run, or the only ones that may
        self._named: set[str] = set()
        self._first_args: dict[str, list[bytes]] = {}  # of commands that may run with these alone, in lower case

    def copy(self) -> Selector:
        """The same permissions, to be changed independently."""
        twin = Selector()
        twin.all_keys, twin.all_channels, twin._all_but = self.all_keys, self.all_channels, self._all_but
        twin.keys, twin.channels = dict(self.keys), dict(self.channels)
        twin.rules, twin._named = list(self.rules), set(self._named)
        twin._first_args = {name: list(allowed) for name, allowed in self._first_args.items()}
        return twin

    @classmethod
    def parse(cls, text: bytes) -> Selector:
        """From `(rule rule ...)`. RuleError, also for a word that could not be written back so that it is read again as
        one: quotes, and a bracket at its end."""
        words = split_words(text[1:-1])
        if words is None or any(set(word) & set(b"\"'") or word.endswith(b")") for word in words):
            raise RuleError(SYNTAX)
        made = cls()
        for word in words:
            made.apply(word)
        return made

    # ---- changing it ---------------------------------------------------------------------------------------------

    def apply(self, rule: bytes) -> None:
        """Take one rule in. RuleError changes nothing."""
        plain = rule.split(b"\0", 1)[0].lower()  # words and names are C strings in Redis
        change = _WORDS.get(plain)
        if change is not None:
            change(self)
        elif rule[:1] in (b"~", b"%"):
            self._add_keys(rule)
        elif rule[:1] == b"&":
            self._add_channels(rule[1:])
        elif plain[:2] in (b"+@", b"-@"):
            self._set_category(plain)
        elif plain[:1] == b"+":
            self._allow(plain[1:])
        elif plain[:1] == b"-":
            self._set_command(_named(plain[1:]), allow=False)
            self._note(plain)
        else:
            raise RuleError(SYNTAX)

    def allow_all_keys(self) -> None:
        """allkeys, ~*"""
        self.all_keys = True
        self.keys.clear()

    def reset_keys(self) -> None:
        """resetkeys"""
        self.all_keys = False
        self.keys.clear()

    def allow_all_channels(self) -> None:
        """allchannels, &*"""
        self.all_channels = True
        self.channels.clear()

    def reset_channels(self) -> None:
        """resetchannels"""
        self.all_channels = False
        self.channels.clear()

    def allow_all_commands(self) -> None:
        """allcommands, +@all"""
        self._forget_commands(all_but=True)

    def allow_no_commands(self) -> None:
        """nocommands, -@all"""
        self._forget_commands(all_but=False)

    def _forget_commands(self, all_but: bool) -> None:
        self._all_but = all_but
        self._named.clear()
        self._first_args.clear()
        self.rules.clear()

    def _add_keys(self, rule: bytes) -> None:
        if self.all_keys:
            raise RuleError(KEY_AFTER_ALL)
        letters, _, text = rule.partition(b"~")
        access = _ACCESS.get(letters.upper())
        if access is None or _has_spaces(text):
            raise RuleError(SYNTAX)
        known = self.keys.get(text)
        self.keys[text] = Pattern(text, access | (known.access if known else 0), matcher(text))

    def _add_channels(self, text: bytes) -> None:
        if self.all_channels:
            raise RuleError(CHANNEL_AFTER_ALL)
        if _has_spaces(text):
            raise RuleError(SYNTAX)
        self.channels.setdefault(text, Pattern(text, 0, matcher(text)))

    def _set_category(self, rule: bytes) -> None:
        category = rule[2:].decode("latin-1")
        if category not in CATEGORIES:
            raise RuleError(UNKNOWN)
        allow = rule[:1] == b"+"
        for command in COMMANDS.values():
            for each in (command, *command.subcommands.values()):
                if category in each.categories:
                    self._set_command(each, allow)
        self._note(rule)

    def _allow(self, name: bytes) -> None:
        """+command, +container|subcommand, or +command|first-argument."""
        container, bar, part = name.rpartition(b"|")
        command = _named(container if bar else name)
        if bar and "|" in command.name:
            raise RuleError(FIRST_ARG_OF_SUBCOMMAND)
        if bar and not part:
            raise RuleError(SYNTAX)
        if not bar:
            self._set_command(command, allow=True)
        elif command.subcommands:
            self._set_command(_named(name), allow=True)
        else:
            if _has_spaces(part) or set(part) & set(b"\"'"):
                raise RuleError(SYNTAX)  # it could not be written back
            allowed = self._first_args.setdefault(command.name, [])
            if part not in allowed:
                allowed.append(part)
        self._note(b"+" + name)

    def _set_command(self, command: Command, allow: bool) -> None:
        """Allow or forbid a command with all its subcommands."""
        self._first_args.pop(command.name, None)
        for each in (command, *command.subcommands.values()):
            if allow == self._all_but:
                self._named.discard(each.name)
            else:
                self._named.add(each.name)

    def _note(self, rule: bytes) -> None:
        """Remember a rule and forget those that it makes void: the same before, and rules on parts of the command."""
        body = rule[1:]
        self.rules = [old for old in self.rules if old[1:] != body and not old[1:].startswith(body + b"|")]
        self.rules.append(rule)

    # ---- asking it -----------------------------------------------------------------------------------------------

    @property
    def all_commands(self) -> bool:
        """Whether every command may run, those to come included."""
        return self._all_but and not self._named

    @property
    def reads_all_keys(self) -> bool:
        """Whether every key may be read."""
        return self.all_keys or any(each.text == b"*" and each.access & READ for each in self.keys.values())

    def denial(self, command: Command, args: Sequence[object], touched: Touched) -> Denial | None:
        """Why this selector alone would not let the line pass; None if it does. Keys and channels in it are bytes."""
        if not self._may_run(command, args):
            return Denial(Reason.COMMAND, 0)
        if not self.all_keys:
            for span, access in touched.keys:
                for at in span:
                    if not self._reaches(args[at], access):
                        return Denial(Reason.KEY, at)
        if not self.all_channels:
            for at in touched.channels:
                if not self.may_hear(args[at], touched.literal):
                    return Denial(Reason.CHANNEL, at)
        return None

    def may_read(self, key: bytes) -> bool:
        """Whether a key may be read."""
        return self.all_keys or self._reaches(key, READ)

    def may_hear(self, channel: object, literal: bool) -> bool:
        """Whether a channel may be used; a pattern (`literal`) only if it is allowed word for word."""
        assert isinstance(channel, bytes)
        if self.all_channels:
            return True
        return channel in self.channels if literal else any(each.fits(channel) for each in self.channels.values())

    def _may_run(self, command: Command, args: Sequence[object]) -> bool:
        if (command.name in self._named) != self._all_but or "no_auth" in command.flags:
            return True
        allowed = self._first_args.get(command.name)
        if not allowed or len(args) < 2:
            return False
        word = args[1]
        return isinstance(word, bytes) and word.split(b"\0", 1)[0].lower() in allowed

    def _reaches(self, key: object, access: int) -> bool:
        assert isinstance(key, bytes)
        return any(each.access & access == access and each.fits(key) for each in self.keys.values())

    # ---- writing it down -----------------------------------------------------------------------------------------

    def describe_commands(self) -> bytes:
        """The rules on commands, beginning with +@all or -@all."""
        return b" ".join([b"+@all" if self._all_but else b"-@all", *self.rules])

    def describe_keys(self) -> bytes:
        """The rules on keys."""
        return b"~*" if self.all_keys else b" ".join(each.key_rule for each in self.keys.values())

    def describe_channels(self) -> bytes:
        """The rules on channels."""
        return b"&*" if self.all_channels else b" ".join(b"&" + text for text in self.channels)

    def describe(self) -> bytes:
        """All of it, such that `apply` of each word makes the same out of a new selector."""
        channels = self.describe_channels()
        parts = [self.describe_keys(), channels if self.all_channels else (b"resetchannels " + channels).rstrip()]
        return b" ".join([part for part in parts if part] + [self.describe_commands()])


_WORDS: dict[bytes, Callable[[Selector], None]] = {
    b"allkeys": Selector.allow_all_keys,
    b"~*": Selector.allow_all_keys,
    b"resetkeys": Selector.reset_keys,
    b"allchannels": Selector.allow_all_channels,
    b"&*": Selector.allow_all_channels,
    b"resetchannels": Selector.reset_channels,
    b"allcommands": Selector.allow_all_commands,
    b"+@all": Selector.allow_all_commands,
    b"nocommands": Selector.allow_no_commands,
    b"-@all": Selector.allow_no_commands,
}
_ACCESS = {b"": READ | WRITE, b"%R": READ, b"%W": WRITE, b"%RW": READ | WRITE, b"%WR": READ | WRITE}


def _named(name: bytes) -> Command:
    """A command or `container|subcommand`; RuleError if there is none."""
    container, bar, part = name.partition(b"|")
    found = COMMANDS.get(container.upper())
    if found is not None and bar:
        found = found.subcommands.get(part.lower().decode("latin-1"))
    if found is None:
        raise RuleError(UNKNOWN)
    return found


def _has_spaces(text: bytes) -> bool:
    """Whether a text holds what separates rules, or a NUL."""
    return any(byte in b" \t\n\v\f\r\0" for byte in text)


# ---- users -----------------------------------------------------------------------------------------------------------
#
# A user: who may log in with which passwords, and what this user may then do.


DEFAULT_USER = b"default"

NO_SUCH_PASSWORD = "The password you are trying to remove from the user does not exist"
BAD_HASH = "The password hash must be exactly 64 characters and contain only lowercase hexadecimal characters"

_HASH = re.compile(rb"[0-9a-f]{64}")
_NO_USERS_HASHES = (b"0" * 64,)


class UnmatchedParenthesis(ValueError):
    """Rules in which a selector is opened and not closed; the text names the word that opens it."""


class User:
    """One user. A new one is off, has no password and may do nothing.

    A session holds the object itself, so `become` and `apply` reach it at once. `unrestricted` says that no command of
    this user need ever be looked at.
    """

    __slots__ = ("enabled", "name", "nopass", "passwords", "root", "selectors", "skips_sanitizing", "unrestricted")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.enabled = False
        self.nopass = False
        self.skips_sanitizing = False  # kept and shown: payloads of RESTORE are checked for every user
        self.passwords: list[bytes] = []
        """Their sha256 in hex."""
        self.root = Selector()
        self.selectors: list[Selector] = []
        self.unrestricted = False

    @classmethod
    def all_powerful(cls, name: bytes) -> User:
        """One that may do everything and needs no password: the default user of a new server."""
        made = cls(name)
        made.apply_all([b"+@all", b"~*", b"&*", b"on", b"nopass"])
        return made

    def copy(self) -> User:
        """The same user once more, to try rules on."""
        twin = User(self.name)
        twin.become(self)
        return twin

    def become(self, other: User) -> None:
        """Take over everything but the name."""
        self.enabled, self.nopass, self.skips_sanitizing = other.enabled, other.nopass, other.skips_sanitizing
        self.passwords = list(other.passwords)
        self.root = other.root.copy()
        self.selectors = [each.copy() for each in other.selectors]
        self._derive()

    # ---- rules ---------------------------------------------------------------------------------------------------

    def apply_all(self, rules: Iterable[bytes]) -> None:
        """Apply rules in their order; RuleError by the first that cannot be, and those before it stay applied."""
        for rule in rules:
            self.apply(rule)

    def apply(self, rule: bytes) -> None:
        """Apply one rule; a selector must be one word in brackets (`merged`). RuleError changes nothing."""
        word = rule.split(b"\0", 1)[0].lower()
        sign, rest = rule[:1], rule[1:]
        if word == b"reset":
            self.become(User(self.name))
        elif word in (b"on", b"off"):
            self.enabled = word == b"on"
        elif word in (b"sanitize-payload", b"skip-sanitize-payload"):
            self.skips_sanitizing = word != b"sanitize-payload"
        elif word in (b"nopass", b"resetpass"):
            self.nopass = word == b"nopass"
            self.passwords.clear()
        elif sign in (b">", b"#"):
            self._add_password(_hash(rest) if sign == b">" else _checked(rest))
        elif sign in (b"<", b"!"):
            hashed = _hash(rest) if sign == b"<" else _checked(rest)
            if hashed not in self.passwords:
                raise RuleError(NO_SUCH_PASSWORD)
            self.passwords.remove(hashed)
        elif sign == b"(":
            if not rule.endswith(b")"):
                raise RuleError(SYNTAX)
            self.selectors.append(Selector.parse(rule))
        elif word == b"clearselectors":
            self.selectors.clear()
        elif rule:
            self.root.apply(rule)
        self._derive()

    def _add_password(self, hashed: bytes) -> None:
        if hashed not in self.passwords:
            self.passwords.append(hashed)
        self.nopass = False

    def _derive(self) -> None:
        root = self.root
        self.unrestricted = self.enabled and root.all_keys and root.all_channels and root.all_commands

    # ---- questions -----------------------------------------------------------------------------------------------

    @property
    def needs_no_password(self) -> bool:
        """Whether every client may be this user: of the default user it says that clients need not log in."""
        return self.enabled and self.nopass

    def denial(self, command: Command, args: Sequence[object]) -> Denial | None:
        """Why a line that calls for `command` may not run, None if it may."""
        touched = touched_by(command, args)
        worst = Denial(Reason.COMMAND, 0)
        for each in (self.root, *self.selectors):
            found = each.denial(command, args, touched)
            if found is None:
                return None
            worst = max(worst, found)
        return worst

    def may_read_all(self, command: Command, args: Sequence[object]) -> bool:
        """Whether the same permissions that let this line pass let every key be read."""
        touched = touched_by(command, args)
        selectors = (self.root, *self.selectors)
        return any(each.reads_all_keys and each.denial(command, args, touched) is None for each in selectors)

    def may_read(self, key: bytes) -> bool:
        """Whether this user may read a key, by whichever command."""
        return self.unrestricted or any(each.may_read(key) for each in (self.root, *self.selectors))

    def may_hear(self, channel: bytes, literal: bool) -> bool:
        """Whether a subscription to a channel, or to a pattern of channels (`literal`), is this user's right."""
        return any(each.may_hear(channel, literal) for each in (self.root, *self.selectors))

    # ---- writing it down -----------------------------------------------------------------------------------------

    @property
    def flags(self) -> list[bytes]:
        """What is neither a password nor a permission."""
        return [
            b"on" if self.enabled else b"off",
            *([b"nopass"] if self.nopass else []),
            b"skip-sanitize-payload" if self.skips_sanitizing else b"sanitize-payload",
        ]

    def describe(self) -> bytes:
        """The line of ACL LIST and of the aclfile, without its line break."""
        words = [b"user", self.name, *self.flags, *(b"#" + each for each in self.passwords), self.root.describe()]
        return b" ".join(words + [b"(%b)" % each.describe() for each in self.selectors])


def proves(password: bytes, user: User | None) -> bool:
    """Whether a password lets a client in as `user`. An unknown user, a disabled one and a wrong password take the same
    time, and so does a right one whichever of the user's it is."""
    hashed = _hash(password)
    known = (user.passwords if user is not None else None) or _NO_USERS_HASHES
    matches = sum([hmac.compare_digest(hashed, each) for each in known])
    return user is not None and user.enabled and (user.nopass or (known is not _NO_USERS_HASHES and matches > 0))


def merged(words: Sequence[bytes]) -> list[bytes]:
    """The rules in a user's description, a selector spread over several words as one. UnmatchedParenthesis."""
    rules: list[bytes] = []
    opened: list[bytes] = []
    for word in words:
        if opened or (word[:1] == b"(" and word[-1:] != b")"):
            opened.append(word)
            if word[-1:] == b")":
                rules.append(b" ".join(opened))
                opened = []
        else:
            rules.append(word)
    if opened:
        where = opened[0].split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
        raise UnmatchedParenthesis(f"Unmatched parenthesis in acl selector starting at '{where}'.")
    return rules


def is_user_name(name: bytes) -> bool:
    """Whether a user may be called so: anything that stays one word in the aclfile."""
    return not any(byte in b" \t\n\v\f\r\0" for byte in name)


def _hash(password: bytes) -> bytes:
    return hashlib.sha256(password).hexdigest().encode()


def _checked(hashed: bytes) -> bytes:
    if _HASH.fullmatch(hashed) is None:
        raise RuleError(BAD_HASH)
    return hashed
