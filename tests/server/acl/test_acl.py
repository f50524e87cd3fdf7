"""The access control list as the session asks it: logins, refusals, and what is noted of them."""

from collections.abc import Iterator
from typing import cast

import pytest

from kvredis.server.acl.state import GROUPED_MS, WORD_BYTES_MAX, Acl, AclLog, Refusal
from kvredis.server.client.client import Transaction
from kvredis.server.client.session import Session
from kvredis.server.commands.registry import Command, lookup
from tests.server.fake_session import FakeSession, make_server


@pytest.fixture
def session() -> Iterator[FakeSession]:
    """A session of a user who may read a*, hear news and choose database 0."""
    server = make_server()
    found = FakeSession(server)
    found.ask("ACL SETUSER reader on >secret %R~a* &news +@read +subscribe +select|0")
    user = server.acl.user(b"reader")
    assert user is not None
    found.authenticate(user)
    yield found
    server.store.close()


def refusal(session: FakeSession, line: str) -> bytes | None:
    """What the session is told before it runs a line."""
    args = line.encode().split(b" ")
    found = lookup(args)
    assert isinstance(found, Command)
    return session.server.acl.refusal(cast(Session, session), found, args)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("get a1", None),
        ("select 0", None),
        ("set a1 v", b"-NOPERM User reader has no permissions to run the 'set' command\r\n"),
        ("client ID", b"-NOPERM User reader has no permissions to run the 'client|id' command\r\n"),
        ("mget a1 b1", b"-NOPERM No permissions to access a key\r\n"),
        ("subscribe news other", b"-NOPERM No permissions to access a channel\r\n"),
    ],
)
def test_a_refusal_says_what_is_missing_and_no_more(session: FakeSession, line: str, text: bytes | None) -> None:
    assert refusal(session, line) == text


def test_a_changed_rule_counts_with_the_next_command(session: FakeSession) -> None:
    assert refusal(session, "get a1") is None
    session.ask("ACL SETUSER reader -get")
    assert refusal(session, "get a1") is not None
    session.ask("ACL SETUSER reader +@all ~* &*")
    assert session.user.unrestricted


def test_a_queued_command_is_refused_in_other_words_when_its_time_has_come(session: FakeSession) -> None:
    beginning = b"-NOPERM ACLs rules changed between the moment the transaction was accumulated and the EXEC call. "
    for line, reason in (
        (b"SET a1 v", b"no permission to execute the command or subcommand"),
        (b"GET b1", b"no permission to touch the specified keys"),
        (b"SUBSCRIBE x", b"no permission to access one of the channels used as arguments to the command"),
    ):
        args = line.split(b" ")
        found = lookup(args)
        assert isinstance(found, Command)
        told = session.server.acl.exec_refusal(cast(Session, session), found, args)
        assert told is not None
        assert told == beginning + b"This command is no longer allowed for the following reason: " + reason + b"\r\n"
        assert session.server.acl.log.entries[0].context == "multi"


def test_whether_a_user_might_run_a_line_is_found_out_without_a_note(session: FakeSession) -> None:
    acl = session.server.acl
    found = lookup([b"SET", b"k", b"v"])
    assert isinstance(found, Command)
    assert session.user.denial(found, [b"SET", b"a1", b""]) is not None
    assert acl.default.denial(found, [b"SET", b"a1", b""]) is None
    assert not acl.log.entries


def test_refusals_are_noted_with_user_object_and_context(session: FakeSession) -> None:
    session.transaction = None
    refusal(session, "set a1 v")
    session.transaction = Transaction()
    refusal(session, "get b1")
    refusal(session, "subscribe other")
    session.transaction = None
    assert session.ask("AUTH reader wrong").startswith(b"-WRONGPASS")
    assert session.ask("hello 2 AUTH nobody x").startswith(b"-WRONGPASS")
    entries = session.server.acl.log.entries
    assert [(each.reason, each.context, each.object, each.username) for each in entries] == [
        ("auth", "toplevel", b"hello", b"nobody"),
        ("auth", "toplevel", b"AUTH", b"reader"),
        ("channel", "multi", b"other", b"reader"),
        ("key", "multi", b"b1", b"reader"),
        ("command", "toplevel", b"set", b"reader"),
    ]
    assert entries[0].client_info.startswith(b"id=1 addr=127.0.0.1:5001 ")
    assert session.server.acl.log.denials == {"auth": 2, "command": 1, "key": 1, "channel": 1}


def test_a_password_is_in_no_entry(session: FakeSession) -> None:
    session.ask("AUTH reader hunter2")
    session.ask("AUTH hunter2 hunter3")
    assert all(
        b"hunter3" not in each.client_info + each.object + each.username for each in session.server.acl.log.entries
    )


def test_the_log_is_as_long_as_acllog_max_len_says(session: FakeSession) -> None:
    session.server.settings["acllog-max-len"] = "3"
    for number in range(10):
        refusal(session, f"get b{number}")
    assert [each.object for each in session.server.acl.log.entries] == [b"b9", b"b8", b"b7"]


def note(log: AclLog, name: bytes, entries_max: int = 128) -> None:
    """A refusal of one key."""
    log.note(Refusal("key", "toplevel", name, b"u", b"client"), entries_max)


def test_equal_refusals_within_a_minute_are_one_entry_and_the_latest_first() -> None:
    now_ms = [1000]
    log = AclLog(lambda: now_ms[0])
    note(log, b"a")
    note(log, b"b")
    now_ms[0] += GROUPED_MS
    note(log, b"a")
    assert [(each.object, each.count, each.number) for each in log.entries] == [(b"a", 2, 0), (b"b", 1, 1)]
    assert (log.entries[0].created_ms, log.entries[0].updated_ms) == (1000, 1000 + GROUPED_MS)
    now_ms[0] += GROUPED_MS + 1
    note(log, b"a")
    assert [(each.object, each.count, each.number) for each in log.entries] == [
        (b"a", 1, 2),
        (b"a", 2, 0),
        (b"b", 1, 1),
    ]


def test_what_the_log_keeps_is_bounded_in_bytes() -> None:
    log = AclLog()
    note(log, b"k" * 1_000_000)
    note(log, b"k" * 2_000_000)
    (entry,) = log.entries
    assert (len(entry.object), entry.count) == (WORD_BYTES_MAX, 2)
    note(log, b"x", entries_max=0)
    assert not log.entries
    log.reset_counts()
    assert set(log.denials.values()) == {0}


def test_a_login_gives_the_user_or_nothing() -> None:
    acl = Acl(b"secret")
    assert acl.login(b"default", b"secret") is acl.default
    assert acl.login(b"default", b"") is None
    assert acl.login(b"nobody", b"secret") is None
    acl.default.apply(b"off")
    assert acl.login(b"default", b"secret") is None


def test_requirepass_is_the_default_users_one_password() -> None:
    acl = Acl()
    assert acl.default.needs_no_password
    assert acl.default.unrestricted
    acl.default.apply(b">other")
    acl.set_requirepass(b"secret")
    assert not acl.default.needs_no_password
    assert acl.login(b"default", b"other") is None
    assert acl.login(b"default", b"secret") is acl.default
    acl.set_requirepass(b"")
    assert acl.login(b"default", b"anything") is acl.default


def test_the_default_user_cannot_be_removed() -> None:
    acl = Acl()
    assert acl.remove([b"default", b"nobody"]) == []
    assert acl.user(b"default") is acl.default
