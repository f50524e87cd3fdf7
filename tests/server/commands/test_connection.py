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


def test_quit_asks_the_session_to_hang_up_after_the_reply(session: FakeSession) -> None:
    assert session.ask("QUIT") == b"+OK\r\n"
    assert session.close_after_reply


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
