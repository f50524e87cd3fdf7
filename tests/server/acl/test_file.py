"""The aclfile: read whole or not at all, and written so that neither a crash nor a stranger gets at it."""

import os
from pathlib import Path

import pytest

from kvredis.server.acl.rules import BAD_HASH, KEY_AFTER_ALL, User, merged
from kvredis.server.acl.state import FILE_BYTES_MAX, PROBLEMS_MAX, Acl, AclFileError, read_users, write_users
from kvredis.server.commands import load_families
from kvredis.storage.errors import ConfigError

load_families()

GOOD = b"user default on #" + b"a" * 64 + b" ~* &* +@all\n\n  user reader on nopass (%R~a* +@read) ( ~b +get )\r\n"


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file with two users."""
    found = tmp_path / "users.acl"
    found.write_bytes(GOOD)
    return str(found)


def test_a_file_gives_its_users(path: str) -> None:
    users = read_users(path)
    assert sorted(users) == [b"default", b"reader"]
    assert users[b"reader"].describe() == (
        b"user reader on nopass sanitize-payload resetchannels -@all "
        b"(%R~a* resetchannels -@all +@read) (~b resetchannels -@all +get)"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"# a remark", "{}:1 should start with user keyword followed by the username."),
        (b"\nuser", "{}:2 should start with user keyword followed by the username."),
        (b"User a on", "{}:1 should start with user keyword followed by the username."),
        (b"user a\tb on", "'{}:1: username 'a\tb' contains invalid characters."),
        (b"user a on\nuser a off", "WARNING: Duplicate user 'a' found on line 2."),
        (b"user a (~x", "{}:1: Unmatched parenthesis in selector definition."),
        (b"user a >secret foo bar", "{}:1: Syntax error."),
        (b"user a +nope -@no", "{0}:1: Error in applying operation '+nope': Unknown command or category name in ACL. "
                               "{0}:1: Error in applying operation '-@no': Unknown command or category name in ACL."),
        (b"user a #secret", "{}:1: " + BAD_HASH + "."),
        (b"user a foo\n\nuser b on\nuser c ~* ~x", "{0}:1: Syntax error. {0}:4: " + KEY_AFTER_ALL + "."),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_line_and_without_a_password(text: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.acl"
    path.write_bytes(text)
    with pytest.raises(AclFileError) as caught:
        read_users(str(path))
    assert str(caught.value) == reason.format(path)
    with pytest.raises(ConfigError, match="broken"):
        Acl(b"", str(path)).load_at_start()


def test_a_file_that_is_missing_or_endless_or_full_of_mistakes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AclFileError, match=r"^Error loading ACLs, opening file '.*none': No such file or directory$"):
        read_users(str(tmp_path / "none"))
    path = tmp_path / "long.acl"
    path.write_bytes(b"foo\n" * 1000)
    with pytest.raises(AclFileError) as caught:
        read_users(str(path))
    assert str(caught.value).count("should start") == PROBLEMS_MAX
    os.truncate(path, FILE_BYTES_MAX + 1)
    with pytest.raises(AclFileError, match="longer than"):
        read_users(str(path))


def test_a_broken_file_leaves_the_users_as_they_are(path: str) -> None:
    acl = Acl(b"", path)
    acl.load_at_start()
    before = [user.describe() for user in acl.in_order()]
    Path(path).write_bytes(b"user reader on\nuser broken foo\n")
    with pytest.raises(AclFileError):
        acl.load()
    assert [user.describe() for user in acl.in_order()] == before


def test_a_user_who_stays_keeps_its_object_and_one_who_goes_is_named(path: str) -> None:
    acl = Acl(b"", path)
    acl.load_at_start()
    default, reader = acl.default, acl.users[b"reader"]
    acl.users[b"other"] = other = User(b"other")
    Path(path).write_bytes(b"user reader on nopass +get ~x\nuser new on\n")
    assert acl.load() == [other]
    assert sorted(acl.users) == [b"default", b"new", b"reader"]
    assert acl.users[b"reader"] is reader
    assert reader.root.describe_keys() == b"~x"
    assert acl.default is default is acl.users[b"default"]
    assert default.needs_no_password


def test_a_file_without_the_default_user_leaves_it_its_password(tmp_path: Path) -> None:
    path = tmp_path / "users.acl"
    path.write_bytes(b"user a on\n")
    acl = Acl(b"secret", str(path))
    acl.load_at_start()
    assert acl.login(b"default", b"") is None
    assert acl.login(b"default", b"secret") is acl.default


def test_what_is_saved_is_loaded_again_as_it_was(path: str) -> None:
    acl = Acl(b"", path)
    acl.load_at_start()
    acl.users[b"reader"].apply_all([b">p", b"&c", b"+select|0", b"skip-sanitize-payload"])
    before = [user.describe() for user in acl.in_order()]
    acl.save()
    again = Acl(b"", path)
    again.load_at_start()
    assert [user.describe() for user in again.in_order()] == before


@pytest.mark.parametrize("rules", [b"%RW~* ~b", b"~b %R~* %W~*", b"(+get %R~* %W~* ~b)"])
def test_a_user_who_got_every_key_piece_by_piece_is_saved_so_that_it_loads(rules: bytes, tmp_path: Path) -> None:
    path = str(tmp_path / "users.acl")
    user = User(b"u")
    user.apply_all(merged(rules.split(b" ")))
    write_users(path, [user])
    again = read_users(path)[b"u"]
    assert again.describe() == user.describe()
    assert [each.reads_all_keys for each in (again.root, *again.selectors)].count(True) == 1


def test_saving_keeps_the_mode_and_the_link_and_leaves_nothing_behind(path: str, tmp_path: Path) -> None:
    os.chmod(path, 0o640)
    link = tmp_path / "link.acl"
    link.symlink_to(path)
    write_users(str(link), [User(b"a")])
    assert link.is_symlink()
    assert os.stat(path).st_mode & 0o777 == 0o640
    assert Path(path).read_bytes() == b"user a off sanitize-payload resetchannels -@all\n"
    new = tmp_path / "new.acl"
    write_users(str(new), [])
    assert os.stat(new).st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["link.acl", "new.acl", "users.acl"]


def test_a_save_that_fails_leaves_the_old_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = Path(path).read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_users(path, [])
    assert Path(path).read_bytes() == before
    assert os.listdir(os.path.dirname(path)) == ["users.acl"]
