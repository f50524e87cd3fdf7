"""The access control list: every user, and the one question that the session asks before a restricted user's command.

WHY users are changed in place: a session holds the User object, so a rule that is changed is changed for those who are
connected, and whoever loses a right loses it with the next command. What follows from a change for connections (those
of a deleted user are closed) is the business of the commands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvredis.server.commands.client import describe
from kvredis.server.protocol.replies import error
from kvredis.storage.errors import ConfigError

from .file import AclFileError, read_users, write_users
from .log import AclLog, Refusal
from .rules import Denial, Reason
from .users import DEFAULT_USER, User, proves

if TYPE_CHECKING:
    from kvredis.server.client.session import Session
    from kvredis.server.commands.registry import Command
    from kvredis.server.server import Server

__all__ = ["DEFAULT_USER", "Acl", "User", "refused"]

LOG_ENTRIES = 128
"""acllog-max-len until somebody sets it."""

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
        """Give the default user this one password, or with b"" let everybody be it."""
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

    # ---- what the door asks --------------------------------------------------------------------------------------

    def login(self, name: bytes, password: bytes) -> User | None:
        """The user, if the password is right; None takes as long and says no more."""
        user = self.users.get(name)
        return user if proves(password, user) else None

    def note_failed_login(self, session: Session, command: bytes, name: bytes) -> None:
        """Enter a wrong password, or a user that there is none of, into the log; `command` is what the client typed."""
        self._note(session, "auth", command, name, in_multi=session.transaction is not None)

    def refusal(self, session: Session, command: Command, args: list[bytes]) -> bytes | None:
        """The NOPERM that answers this line, entered into the log; None if the session's user may run it."""
        denial = session.user.denial(command, args)
        if denial is None:
            return None
        self._note_denial(session, command, args, denial, in_multi=session.transaction is not None)
        return error(b"NOPERM " + refused(session.user, command, denial))

    def exec_refusal(self, session: Session, command: Command, args: list[bytes]) -> bytes | None:
        """The same for a line that EXEC is about to run: rights may have changed since it was queued."""
        denial = session.user.denial(command, args)
        if denial is None:
            return None
        self._note_denial(session, command, args, denial, in_multi=True)
        return error(_CHANGED + _CHANGED_REASONS[denial.reason])

    def _note_denial(
        self, session: Session, command: Command, args: list[bytes], denial: Denial, *, in_multi: bool
    ) -> None:
        what = command.name.encode() if denial.reason is Reason.COMMAND else args[denial.at]
        self._note(session, REASONS[denial.reason], what, session.user.name, in_multi=in_multi)

    def _note(self, session: Session, reason: str, what: bytes, name: bytes, *, in_multi: bool) -> None:
        info = describe(session).rstrip(b"\n")
        self.note(session.server, Refusal(reason, "multi" if in_multi else "toplevel", what, name, info))

    def note(self, server: Server, refusal: Refusal) -> None:
        """Enter a refusal of any door into the log."""
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
