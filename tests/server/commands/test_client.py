"""CLIENT on sessions without connections."""

import pytest

from kvredis.server.server import Server
from tests.server.fake_session import FakeSession


@pytest.fixture
def other(server: Server) -> FakeSession:
    return FakeSession(server, 2)


def test_a_library_introduces_itself_in_plain_words(session: FakeSession) -> None:
    assert session.ask("CLIENT SETINFO lib-NAME redis-py(x)") == b"+OK\r\n"
    assert session.ask("CLIENT SETINFO LIB-VER 8.1.0") == b"+OK\r\n"
    assert session.ask("CLIENT SETINFO LIB-FOO x") == b"-ERR Unrecognized option 'LIB-FOO'\r\n"
    assert session.ask([b"CLIENT", b"SETINFO", b"lib-ver", b"1 2"]) == (
        b"-ERR lib-ver cannot contain spaces, newlines or special characters.\r\n"
    )
    assert b" lib-name=redis-py(x) lib-ver=8.1.0 " in session.ask("CLIENT INFO")


def test_the_list_has_a_line_for_each_client_or_for_those_named(session: FakeSession, other: FakeSession) -> None:
    assert session.ask("CLIENT LIST").count(b"\n") == 2 + 2
    assert b"id=2 addr=127.0.0.1:5002 " in session.ask("CLIENT LIST ID 2 99")
    assert b"id=1 " not in session.ask("CLIENT LIST ID 2 99")
    assert b"id=1 " in session.ask("CLIENT LIST TYPE normal")
    assert session.ask("CLIENT LIST TYPE replica") == b"$0\r\n\r\n"
    session.speak(3)
    assert session.ask("CLIENT INFO").startswith(b"=")


def test_kill_closes_the_clients_that_fit_every_option(session: FakeSession, other: FakeSession) -> None:
    assert session.ask("CLIENT KILL ID 2 ADDR 127.0.0.1:1") == b":0\r\n"
    assert session.ask("CLIENT KILL ID 2 ADDR 127.0.0.1:5002 LADDR 127.0.0.1:6379 USER default") == b":1\r\n"
    assert other.closed
    assert not session.closed


def test_kill_spares_its_own_client_unless_told(session: FakeSession) -> None:
    assert session.ask("CLIENT KILL ID 1 TYPE normal") == b":0\r\n"
    assert session.ask("CLIENT KILL ID 1 SKIPME no") == b":1\r\n"
    assert session.close_after_reply
    assert not session.closed


def test_kill_by_address_tells_whether_there_was_one(session: FakeSession, other: FakeSession) -> None:
    assert session.ask("CLIENT KILL 127.0.0.1:5002") == b"+OK\r\n"
    assert other.closed
    assert session.ask("CLIENT KILL 127.0.0.1:9") == b"-ERR No such client\r\n"


def test_switches_are_shown_as_letters(session: FakeSession) -> None:
    session.addr = session.laddr = "/tmp/a.sock:0"
    assert b" flags=U " in session.ask("CLIENT INFO")
    session.ask("CLIENT NO-EVICT on")
    session.ask("CLIENT NO-TOUCH on")
    assert b" flags=UeT " in session.ask("CLIENT INFO")
    assert session.ask("CLIENT NO-TOUCH maybe") == b"-ERR syntax error\r\n"


def test_a_client_that_does_not_touch_leaves_a_block_as_old_as_it_was(session: FakeSession) -> None:
    session.ask("SET k v")
    entry = session.store.find(b"k")
    assert entry is not None
    entry.accessed_s -= 100
    session.ask("CLIENT NO-TOUCH on")
    assert session.ask("GET k") == b"$1\r\nv\r\n"
    assert session.ask("OBJECT IDLETIME k") == b":100\r\n"
    session.ask("CLIENT NO-TOUCH off")
    session.ask("GET k")
    assert session.ask("OBJECT IDLETIME k") == b":0\r\n"


def test_help_names_every_subcommand(session: FakeSession) -> None:
    text = session.ask("CLIENT HELP")
    for name in (b"ID", b"LIST", b"KILL", b"SETINFO", b"NO-TOUCH", b"HELP"):
        assert b"\r\n+" + name in text
