"""The access control list: every user, and the one question that the session asks before a restricted user's command.

WHY users are changed in place: a session holds the User object, so a rule that is changed is changed for those who are
connected, and a client that loses a right loses it with its next command. What follows from a change for connections
(those of a deleted user are closed) is the business of the commands.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from kvredis.server.client.client import ClientOf, Host
from kvredis.server.commands.registry import Command
from kvredis.server.protocol.replies import error
from kvredis.storage.errors import ConfigError, KVRedisError

from .rules import (
    DEFAULT_USER,
    UNKNOWN,
    Denial,
    Reason,
    RuleError,
    UnmatchedParenthesis,
    User,
    is_user_name,
    merged,
    proves,
)

# ---- log -------------------------------------------------------------------------------------------------------------
#
# ACL LOG: who was refused what, so that an operator sees a wrong rule, a wrong password or an intruder.
#
# Equal refusals within a minute are one entry with a count, and the log is bounded in entries and in bytes an entry: it
# is filled by the clients that it is meant to catch.


GROUPED_MS = 60_000
GROUP_SEARCH = 10
"""How many of the latest entries are compared with a new one."""

WORD_BYTES_MAX = 1024
"""How much of a key, channel or user name is kept."""


@dataclass(slots=True)
class Refusal:
    """One entry. `reason`: command, key, channel or auth; `context`: toplevel or multi; `object`: what was refused."""

    reason: str
    context: str
    object: bytes
    username: bytes
    client_info: bytes
    number: int = 0
    count: int = 1
    created_ms: int = 0
    updated_ms: int = 0

    def is_like(self, other: Refusal) -> bool:
        """Whether both are one thing that happened twice; when they did is not asked."""
        return (self.reason, self.context, self.object, self.username) == (
            other.reason,
            other.context,
            other.object,
            other.username,
        )


def wall_clock_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class AclLog:
    """The latest first. `denials` counts by reason since the start or `reset_counts`: acl_access_denied_* of INFO."""

    def __init__(self, clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        self.entries: deque[Refusal] = deque()
        self.denials: dict[str, int] = {}
        self.reset_counts()
        self.clock_ms = clock_ms
        self._numbers = 0

    def note(self, refusal: Refusal, entries_max: int) -> None:
        """Enter a refusal that has just happened, and forget what is beyond `entries_max`."""
        self.denials[refusal.reason] += 1
        now_ms = self.clock_ms()
        refusal.object, refusal.username = refusal.object[:WORD_BYTES_MAX], refusal.username[:WORD_BYTES_MAX]
        for known in islice(self.entries, GROUP_SEARCH):
            if known.is_like(refusal) and abs(now_ms - known.updated_ms) <= GROUPED_MS:
                known.count += 1
                known.updated_ms, known.client_info = now_ms, refusal.client_info
                self.entries.remove(known)
                self.entries.appendleft(known)
                return
        refusal.number, refusal.created_ms, refusal.updated_ms = self._numbers, now_ms, now_ms
        self._numbers += 1
        self.entries.appendleft(refusal)
        while len(self.entries) > entries_max:
            self.entries.pop()

    def reset_counts(self) -> None:
        """CONFIG RESETSTAT."""
        self.denials.update(dict.fromkeys(("auth", "command", "key", "channel"), 0))


# ---- file ------------------------------------------------------------------------------------------------------------
#
# The aclfile: one `user name rule ...` a line, read whole or not at all, and written so that a crash spares it.


FILE_BYTES_MAX = 16 * 1024 * 1024
PROBLEMS_MAX = 32
"""How many mistakes of a file are told."""


class AclFileError(KVRedisError):
    """An aclfile that cannot be used; the text is Redis', `path:line: reason` for each mistake."""


def read_users(path: str) -> dict[bytes, User]:
    """The users that a file describes, by name. AclFileError."""
    try:
        with open(path, "rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as failed:
        raise AclFileError(f"Error loading ACLs, opening file '{path}': {failed.strerror}") from failed
    if len(text) > FILE_BYTES_MAX:
        raise AclFileError(f"Error loading ACLs, file '{path}' is longer than {FILE_BYTES_MAX} bytes")
    users: dict[bytes, User] = {}
    problems: list[str] = []
    for number, line in enumerate(text.split(b"\n"), 1):
        words = line.strip(b" \t\r").split(b" ")
        if words != [b""] and len(problems) < PROBLEMS_MAX:
            problems += _read_line(f"{path}:{number}", number, words, users)
    if problems:
        raise AclFileError(" ".join(problems))
    return users


def _read_line(where: str, number: int, words: list[bytes], users: dict[bytes, User]) -> list[str]:
    """Add the user of one line to `users`, or say what is wrong with it. Only rules that are unknown commands are told
    word for word: others may hold a password."""
    if words[0] != b"user" or len(words) < 2:
        return [f"{where} should start with user keyword followed by the username."]
    name = words[1]
    shown = name.decode("utf-8", "surrogateescape")
    if not is_user_name(name):
        return [f"'{where}: username '{shown}' contains invalid characters."]
    if name in users:
        return [f"WARNING: Duplicate user '{shown}' found on line {number}."]
    user = users[name] = User(name)
    try:
        rules = merged(words[2:])
    except UnmatchedParenthesis:
        return [f"{where}: Unmatched parenthesis in selector definition."]
    problems: list[str] = []
    told = False
    for rule in rules:
        try:
            user.apply(rule.strip(b"\t\r"))
        except RuleError as wrong:
            if str(wrong) == UNKNOWN:
                shown = rule.decode("utf-8", "surrogateescape")
                problems.append(f"{where}: Error in applying operation '{shown}': {wrong}.")
            elif not told:
                problems.append(f"{where}: {wrong}.")
                told = True
    return problems


def write_users(path: str, users: Iterable[User]) -> None:
    """Replace the file in one step. It keeps its mode, a new one is for its owner only, as it holds password hashes;
    a link stays one. OSError, and then the old file is untouched."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    try:
        mode = stat.S_IMODE(os.stat(target).st_mode)
    except FileNotFoundError:
        mode = 0o600
    descriptor, temporary = tempfile.mkstemp(prefix=f"{os.path.basename(target)}.tmp-", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.writelines(user.describe() + b"\n" for user in users)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


__all__ = ["DEFAULT_USER", "Acl", "User", "refused"]

LOG_ENTRIES = 128
"""acllog-max-len until an operator sets it."""

REASONS = {Reason.COMMAND: "command", Reason.KEY: "key", Reason.CHANNEL: "channel"}

_CHANGED = (
    "NOPERM ACLs rules changed between the moment the transaction was accumulated and the EXEC call. "
    "This command is no longer allowed for the following reason: "
)
_CHANGED_REASONS = {
    Reason.COMMAND: "no permission to execute the command or subcommand",
    Reason.KEY: "no permission to touch the specified keys",
    Reason.CHANNEL: "no permission to access one of the channels used as arguments to the command",
}


class Acl:
    """All users by name; the default user is always there. `path` is the aclfile, "" without one.

    Unlike in Redis, an aclfile that does not mention the default user leaves it the password of `requirepass`.
    """

    def __init__(self, requirepass: bytes = b"", path: str = "") -> None:
        self.path = path
        self.log: AclLog = AclLog()
        self.users: dict[bytes, User] = {}
        self._requirepass = requirepass
        self.default = self.users[DEFAULT_USER] = self._new_default()

    def load_at_start(self) -> None:
        """Read the aclfile, if there is one, before the first client; the command table must be filled. ConfigError."""
        if not self.path:
            return
        try:
            self.adopt(read_users(self.path))
        except AclFileError as wrong:
            raise ConfigError("aclfile", self.path, "configuration", str(wrong)) from wrong

    def load(self) -> list[User]:
        """Read the aclfile again; returns users that are no more. AclFileError, and then nothing has changed."""
        return self.adopt(read_users(self.path))

    def save(self) -> None:
        """Write the aclfile. OSError, and then the old one is untouched."""
        write_users(self.path, self.in_order())

    def adopt(self, users: dict[bytes, User]) -> list[User]:
        """Have these users and the default user, and no others; returns those that are no more. Who stays keeps its
        object, and with it its connections."""
        wanted = {DEFAULT_USER: users.get(DEFAULT_USER) or self._new_default(), **users}
        gone = self.remove(name for name in list(self.users) if name not in wanted)
        for name, user in wanted.items():
            self.users.setdefault(name, user).become(user)
        return gone

    def set_requirepass(self, password: bytes) -> None:
        """Give the default user this one password, or with b"" let every client be it."""
        self._requirepass = password
        self.default.apply_all(_password_rules(password))

    def user(self, name: bytes) -> User | None:
        """A user by its name."""
        return self.users.get(name)

    def in_order(self) -> list[User]:
        """Every user, by name as bytes sort."""
        return [self.users[name] for name in sorted(self.users)]

    def remove(self, names: Iterable[bytes]) -> list[User]:
        """Delete users, not the default one; returns those that there were."""
        found = [self.users.pop(name, None) for name in names if name != DEFAULT_USER]
        return [user for user in found if user is not None]

    # ---- logging in and refusing ---------------------------------------------------------------------------------

    def login(self, name: bytes, password: bytes) -> User | None:
        """The user, if the password is right; None takes as long and says no more."""
        user = self.users.get(name)
        return user if proves(password, user) else None

    def note_failed_login(self, session: ClientOf[Host], command: bytes, name: bytes) -> None:
        """Enter a wrong password, or a user that there is none of, into the log; `command` is what the client typed."""
        self._note(session, "auth", command, name, in_multi=session.transaction is not None)

    def refusal(self, session: ClientOf[Host], command: Command, args: list[bytes]) -> bytes | None:
        """The NOPERM that answers this line, entered into the log; None if the session's user may run it."""
        denial = session.user.denial(command, args)
        if denial is None:
            return None
        self._note_denial(session, command, args, denial, in_multi=session.transaction is not None)
        return error(b"NOPERM " + refused(session.user, command, denial))

    def exec_refusal(self, session: ClientOf[Host], command: Command, args: list[bytes]) -> bytes | None:
        """The same for a line that EXEC is about to run: rights may have changed since it was queued."""
        denial = session.user.denial(command, args)
        if denial is None:
            return None
        self._note_denial(session, command, args, denial, in_multi=True)
        return error(_CHANGED + _CHANGED_REASONS[denial.reason])

    def _note_denial(
        self, session: ClientOf[Host], command: Command, args: list[bytes], denial: Denial, *, in_multi: bool
    ) -> None:
        what = command.name.encode() if denial.reason is Reason.COMMAND else args[denial.at]
        self._note(session, REASONS[denial.reason], what, session.user.name, in_multi=in_multi)

    def _note(self, session: ClientOf[Host], reason: str, what: bytes, name: bytes, *, in_multi: bool) -> None:
        info = session.describe().rstrip(b"\n")
        self.note(session.server, Refusal(reason, "multi" if in_multi else "toplevel", what, name, info))

    def note(self, server: Host, refusal: Refusal) -> None:
        """Enter a refusal, by RESP or HTTP, into the log."""
        self.log.note(refusal, int(server.settings.get("acllog-max-len", LOG_ENTRIES)))

    def _new_default(self) -> User:
        made = User.all_powerful(DEFAULT_USER)
        made.apply_all(_password_rules(self._requirepass))
        return made


def refused(user: User, command: Command, denial: Denial, shown: bytes | None = None) -> bytes:
    """Why a command may not run, in Redis' words; a key or channel is named only as `shown`, for an administrator."""
    if denial.reason is Reason.COMMAND:
        return b"User %b has no permissions to run the '%b' command" % (user.name, command.name.encode())
    thing = REASONS[denial.reason].encode()
    if shown is None:
        return b"No permissions to access a %b" % thing
    return b"User %b has no permissions to access the '%b' %b" % (user.name, shown, thing)


def _password_rules(password: bytes) -> list[bytes]:
    return [b"resetpass", b">" + password if password else b"nopass"]
