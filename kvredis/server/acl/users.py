"""A user: who may log in with which passwords, and what this user may then do."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .access import touched_by
from .rules import SYNTAX, Denial, Reason, RuleError, Selector

if TYPE_CHECKING:
    from kvredis.server.commands.registry import Command

DEFAULT_USER = b"default"

NO_SUCH_PASSWORD = "The password you are trying to remove from the user does not exist"
BAD_HASH = "The password hash must be exactly 64 characters and contain only lowercase hexadecimal characters"

_HASH = re.compile(rb"[0-9a-f]{64}")
_NOBODYS_HASHES = (b"0" * 64,)


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
        self.skips_sanitizing = False  # kept and shown: payloads of RESTORE are checked for everybody
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
        """Whether anybody may be this user: of the default user it says that clients need not log in."""
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
    """Whether a password lets somebody in as `user`. An unknown user, a disabled one and a wrong password take the same
    time, and so does a right one whichever of the user's it is."""
    hashed = _hash(password)
    known = (user.passwords if user is not None else None) or _NOBODYS_HASHES
    matches = sum([hmac.compare_digest(hashed, each) for each in known])
    return user is not None and user.enabled and (user.nopass or (known is not _NOBODYS_HASHES and matches > 0))


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
