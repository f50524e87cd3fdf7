"""The aclfile: one `user name rule ...` a line, read whole or not at all, and written so that a crash spares it."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable

from kvredis.storage.errors import KVRedisError

from .rules import UNKNOWN, RuleError
from .users import UnmatchedParenthesis, User, is_user_name, merged

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
