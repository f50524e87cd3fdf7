"""The ACL family on sessions without a connection."""

from pathlib import Path

import pytest

from kvredis.server.acl.rules import CATEGORIES
from kvredis.server.commands.registry import every_command
from tests.server.fake_session import FakeSession

HASH = b"2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"


def become(session: FakeSession, name: bytes) -> None:
    """Be a user."""
    user = session.server.acl.user(name)
    assert user is not None
    session.authenticate(user)


def test_setuser_takes_all_rules_or_none(session: FakeSession) -> None:
    assert session.ask("ACL SETUSER u on >secret ~a* +get") == b"+OK\r\n"
    before = session.ask("ACL LIST")
    assert b"user u on sanitize-payload #%b ~a* resetchannels -@all +get\r\n" % HASH in before
    assert session.ask("ACL SETUSER u off resetpass +@all foo ~b") == (
        b"-ERR Error in ACL SETUSER modifier 'foo': Syntax error\r\n"
    )
    assert session.ask("ACL SETUSER new on foo").startswith(b"-ERR Error in ACL SETUSER modifier")
    assert session.ask("ACL SETUSER u off (~b") == b"-ERR Unmatched parenthesis in acl selector starting at '(~b'.\r\n"
    assert session.ask("ACL LIST") == before


def test_an_error_repeats_a_rule_without_breaking_its_line(session: FakeSession) -> None:
    reply = session.ask([b"ACL", b"SETUSER", b"u", b"a\r\nb"])
    assert reply == b"-ERR Error in ACL SETUSER modifier 'a  b': Syntax error\r\n"


def test_getuser_is_a_map_of_six_with_a_map_for_each_selector(session: FakeSession) -> None:
    session.ask("ACL SETUSER u on >secret %R~a &c +get (~b)")
    selector = b"$8\r\ncommands\r\n$5\r\n-@all\r\n$4\r\nkeys\r\n$2\r\n~b\r\n$8\r\nchannels\r\n$0\r\n\r\n"
    body = (
        b"$9\r\npasswords\r\n*1\r\n$64\r\n" + HASH + b"\r\n$8\r\ncommands\r\n$10\r\n-@all +get\r\n"
        b"$4\r\nkeys\r\n$4\r\n%R~a\r\n$8\r\nchannels\r\n$2\r\n&c\r\n$9\r\nselectors\r\n*1\r\n"
    )
    flags = b"$5\r\nflags\r\n%b2\r\n$2\r\non\r\n$16\r\nsanitize-payload\r\n"
    assert session.ask("ACL GETUSER u") == b"*12\r\n" + flags % b"*" + body + b"*6\r\n" + selector
    assert session.ask("ACL GETUSER nobody") == b"$-1\r\n"
    session.speak(3)
    assert session.ask("ACL GETUSER u") == b"%6\r\n" + flags % b"~" + body + b"%3\r\n" + selector
    assert session.ask("ACL GETUSER nobody") == b"_\r\n"


def test_users_are_listed_by_name(session: FakeSession) -> None:
    session.ask("ACL SETUSER b")
    session.ask("ACL SETUSER a")
    assert session.ask("ACL USERS") == b"*3\r\n$1\r\na\r\n$1\r\nb\r\n$7\r\ndefault\r\n"
    assert session.ask("ACL WHOAMI") == b"$7\r\ndefault\r\n"
    become(session, b"a")
    assert session.ask("ACL WHOAMI") == b"$1\r\na\r\n"


def test_a_deleted_user_is_sent_away_and_no_other(session: FakeSession) -> None:
    other, third = FakeSession(session.server, 2), FakeSession(session.server, 3)
    for name in ("u", "v"):
        session.ask(f"ACL SETUSER {name} on nopass")
    become(other, b"u")
    become(third, b"v")
    assert session.ask("ACL DELUSER nobody default") == b"-ERR The 'default' user cannot be removed\r\n"
    assert session.ask("ACL DELUSER u nobody u") == b":1\r\n"
    assert (session.closed, other.closed, third.closed) == (False, True, False)
    assert other.user is session.server.acl.default
    assert third.reconsidered
    become(session, b"v")
    assert session.ask("ACL DELUSER v") == b":1\r\n"
    assert (session.close_after_reply, session.closed, third.closed) == (True, False, True)


@pytest.mark.parametrize(
    ("rules", "closed"),
    [
        ("+get", False),
        ("resetchannels &news &s* &n*", False),
        ("resetchannels &news &s*", True),
        ("resetchannels &n*", True),
        ("resetchannels", True),
        ("resetchannels (&n* &s*)", False),
        ("allchannels", False),
    ],
)
def test_a_subscriber_that_may_no_longer_hear_is_sent_away(session: FakeSession, rules: str, closed: bool) -> None:
    session.ask("ACL SETUSER u on nopass &news &s* &n*")
    subscriber, bystander = FakeSession(session.server, 2), FakeSession(session.server, 3)
    become(subscriber, b"u")
    subscriber.channels, subscriber.patterns, subscriber.shard_channels = {b"news"}, {b"n*"}, {b"s1"}
    bystander.channels = {b"else"}
    assert session.ask(f"ACL SETUSER u {rules}") == b"+OK\r\n"
    assert subscriber.closed is closed
    assert not bystander.closed


def test_a_client_that_has_not_logged_in_is_let_in_once_no_login_is_needed(session: FakeSession) -> None:
    session.ask("ACL SETUSER default resetpass >secret")
    late = FakeSession(session.server, 2)
    assert not late.authenticated
    assert session.authenticated
    session.ask("ACL SETUSER default nopass")
    assert late.authenticated


def test_cat_names_every_category_and_every_command_of_one(session: FakeSession) -> None:
    assert session.ask("ACL CAT").startswith(b"*21\r\n$8\r\nkeyspace\r\n$4\r\nread\r\n")
    assert session.ask("ACL CAT nope") == b"-ERR Unknown category 'nope'\r\n"
    assert session.ask("ACL CAT HASH") == b"*0\r\n"
    reply = session.ask("ACL CAT fast")
    assert b"\r\nkv.match\r\n" in reply
    assert b"\r\nacl|list\r\n" in session.ask("ACL CAT admin")


def test_every_command_is_in_categories_that_there_are() -> None:
    for each in every_command():
        assert set(each.categories) <= set(CATEGORIES), each.name
        assert {"fast", "slow"} & set(each.categories), each.name


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("nobody get k", b"-ERR User 'nobody' not found\r\n"),
        ("u nope k", b"-ERR Command 'nope' not found\r\n"),
        ("u config nope", b"-ERR Command 'config' not found\r\n"),
        ("u get", b"-ERR wrong number of arguments for 'get' command\r\n"),
        ("u get a1", b"+OK\r\n"),
        ("u CONFIG GET x", b"$57\r\nUser u has no permissions to run the 'config|get' command\r\n"),
        ("u mget a1 b1", b"$48\r\nUser u has no permissions to access the 'b1' key\r\n"),
        ("u subscribe c d", b"$51\r\nUser u has no permissions to access the 'd' channel\r\n"),
    ],
)
def test_dryrun_tells_what_would_happen(session: FakeSession, line: str, reply: bytes) -> None:
    session.ask("ACL SETUSER u ~a* &c +@read +subscribe")
    assert session.ask("ACL DRYRUN " + line) == reply
    assert not session.server.acl.log.entries


@pytest.mark.parametrize(("bits", "letters"), [("", 64), (" 1", 1), (" 5", 2), (" 4096", 1024)])
def test_genpass_gives_a_letter_for_four_bits(session: FakeSession, bits: str, letters: int) -> None:
    first, second = (session.ask(f"ACL GENPASS{bits}").split(b"\r\n") for _ in range(2))
    assert first[0] == b"$%d" % letters == b"$%d" % len(first[1])
    assert set(first[1]) <= set(b"0123456789abcdef")
    assert letters < 64 or first != second


def test_the_log_is_a_map_of_ten_for_each_entry(session: FakeSession) -> None:
    log = session.server.acl.log
    now_ms = [1_700_000_000_000]
    log.clock_ms = lambda: now_ms[0]
    session.ask("AUTH nobody x")
    now_ms[0] += 1250
    session.ask("AUTH nobody y")
    now_ms[0] += 2500
    session.speak(3)
    reply = session.ask("ACL LOG")
    assert reply.startswith(b"*1\r\n%10\r\n$5\r\ncount\r\n:2\r\n$6\r\nreason\r\n$4\r\nauth\r\n$7\r\ncontext\r\n")
    assert b"$6\r\nobject\r\n$4\r\nAUTH\r\n$8\r\nusername\r\n$6\r\nnobody\r\n$11\r\nage-seconds\r\n,2.5\r\n" in reply
    assert reply.endswith(
        b"$8\r\nentry-id\r\n:0\r\n$17\r\ntimestamp-created\r\n:1700000000000\r\n"
        b"$22\r\ntimestamp-last-updated\r\n:1700000001250\r\n"
    )
    session.speak(2)
    reply = session.ask("ACL LOG 1")
    assert reply.startswith(b"*1\r\n*20\r\n")
    assert b"\r\n$3\r\n2.5\r\n" in reply
    assert session.ask("ACL LOG 0") == session.ask("ACL LOG -3") == b"*0\r\n"
    assert session.ask("ACL LOG reset") == b"+OK\r\n"
    assert session.ask("ACL LOG") == b"*0\r\n"


def test_load_takes_the_file_in_and_tells_what_is_wrong_with_it(session: FakeSession, tmp_path: Path) -> None:
    path = tmp_path / "users.acl"
    session.server.acl.path = str(path)
    opened = b"-ERR Error loading ACLs, opening file '%b': No such file or directory\r\n" % str(path).encode()
    assert session.ask("ACL LOAD") == opened
    assert session.ask("ACL SETUSER u on nopass +get ~*") == b"+OK\r\n"
    assert session.ask("ACL SAVE") == b"+OK\r\n"
    other = FakeSession(session.server, 2)
    become(other, b"u")
    path.write_bytes(path.read_bytes() + b"user v foo\n")
    assert session.ask("ACL LOAD") == (
        b"-ERR %b:3: Syntax error. WARNING: ACL errors detected, no change to the previously active ACL rules was "
        b"performed\r\n" % str(path).encode()
    )
    path.write_bytes(b"user u on nopass +set ~*\n")
    assert session.ask("ACL LOAD") == b"+OK\r\n"
    assert not other.closed
    assert other.user.root.describe_commands() == b"-@all +set"
    path.write_bytes(b"")
    assert session.ask("ACL LOAD") == b"+OK\r\n"
    assert other.closed
    assert session.ask("ACL LIST") == b"*1\r\n$51\r\nuser default on nopass sanitize-payload ~* &* +@all\r\n"


def test_a_save_that_fails_says_so(session: FakeSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session.server.acl.path = str(tmp_path / "no such folder" / "users.acl")
    assert session.ask("ACL SAVE").startswith(
        b"-ERR There was an error trying to save the ACLs. Please check the server"
    )
    assert "could not be written" in caplog.text


def test_help_tells_of_every_subcommand(session: FakeSession) -> None:
    reply = session.ask("ACL HELP")
    for name in (b"CAT", b"DELUSER", b"DRYRUN", b"GENPASS", b"GETUSER", b"LIST", b"LOAD", b"LOG", b"SAVE", b"SETUSER"):
        assert b"\r\n+" + name in reply
