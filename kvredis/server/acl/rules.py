"""ACL rules: one set of permissions on commands, keys and channels, and the language in which it is written.

A user has one such Selector of its own and may have more; a command passes if any single one lets it pass. Which
commands a selector allows is kept as "all but these" or "none but these", so that `+@all` includes commands that are
yet to come; beside it stand the rules as they were given, because ACL LIST and the aclfile give them back in their
order (as Redis 7.2 does; 7.0 derives others that amount to the same).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from kvredis.server.commands.registry import COMMANDS, Command
from kvredis.server.protocol.glob import matcher
from kvredis.server.protocol.inline import split_words

from .access import READ, WRITE, Touched

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
