"""PING to HELLO on a session without a connection."""

from collections.abc import Iterator

import pytest

from tests.server.fake_session import FakeSession, make_server


@pytest.fixture
def guarded() -> Iterator[FakeSession]:
    """A session of a server with a password."""
    server = make_server(requirepass="secret")
    yield FakeSession(server)
    server.store.close()


def test_ping_and_echo_give_the_words_back(session: FakeSession) -> None:
    assert session.ask("PING") == b"+PONG\r\n"
    assert session.ask([b"PING", b"\0\r\n"]) == b"$3\r\n\0\r\n\r\n"
    assert session.ask("ECHO hello") == b"$5\r\nhello\r\n"


def test_quit_asks_the_session_to_hang_up_after_the_reply(session: FakeSession) -> None:
    assert session.ask("QUIT") == b"+OK\r\n"
    assert session.close_after_reply


def test_select_moves_only_to_a_database_that_exists(session: FakeSession) -> None:
    assert session.ask("SELECT 15") == b"+OK\r\n"
    assert session.ask("SELECT 16") == b"-ERR DB index is out of range\r\n"
    assert session.space == 15


def test_hello_changes_the_protocol_of_its_own_reply(session: FakeSession) -> None:
    assert session.ask("HELLO 3").startswith(b"%7\r\n")
    assert session.nil == b"_\r\n"
    assert session.ask("HELLO").startswith(b"%7\r\n")
    assert session.ask("HELLO 2").startswith(b"*14\r\n")
    assert session.nil == b"$-1\r\n"


def test_a_hello_that_fails_changes_nothing(session: FakeSession) -> None:
    assert session.ask("HELLO 3 SETNAME me BOO") == b"-ERR Syntax error in HELLO option 'BOO'\r\n"
    assert session.ask("HELLO 3 SETNAME me AUTH nobody x").startswith(b"-WRONGPASS")
    assert (session.resp, session.name) == (2, b"")


def test_without_a_password_auth_with_one_argument_is_a_mistake(session: FakeSession) -> None:
    assert session.ask("AUTH x").startswith(b"-ERR AUTH <password> called without any password configured")
    assert session.ask("AUTH default anything") == b"+OK\r\n"


def test_a_login_needs_the_password_and_the_default_user(guarded: FakeSession) -> None:
    assert guarded.ask("AUTH wrong").startswith(b"-WRONGPASS")
    assert guarded.ask("AUTH nobody secret").startswith(b"-WRONGPASS")
    assert not guarded.authenticated
    assert guarded.ask("AUTH secret") == b"+OK\r\n"
    assert guarded.authenticated


def test_hello_before_login_says_how_to_log_in_and_does_nothing(guarded: FakeSession) -> None:
    assert guarded.ask("HELLO 3 SETNAME me").startswith(b"-NOAUTH HELLO must be called")
    assert (guarded.resp, guarded.name) == (2, b"")
    assert guarded.ask("HELLO 3 AUTH default secret SETNAME me").startswith(b"%7\r\n")
    assert (guarded.authenticated, guarded.name) == (True, b"me")


def test_reset_logs_out_where_a_password_is_set(guarded: FakeSession) -> None:
    guarded.ask("HELLO 3 AUTH default secret SETNAME me")
    guarded.ask("SELECT 3")
    guarded.ask("CLIENT SETINFO LIB-NAME lib")
    assert guarded.ask("RESET") == b"+RESET\r\n"
    assert (guarded.resp, guarded.space, guarded.name, guarded.authenticated) == (2, 0, b"", False)
    assert guarded.lib_name == b"lib"


def test_reset_makes_reads_count_as_use_again(session: FakeSession) -> None:
    session.ask("CLIENT NO-TOUCH ON")
    session.ask("RESET")
    assert session.fetch == session.store.fetch
