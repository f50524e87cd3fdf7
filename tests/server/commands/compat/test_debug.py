"""DEBUG: shut unless it was opened at the start, and without anything that could break a server."""

import logging
from collections.abc import Iterator

import pytest

from kvredis.server.commands.compat.debug import is_local
from kvredis.server.server import Server, ServerOptions
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.fake_session import ARENA_BYTES, FakeSession

NOT_ALLOWED = b"-ERR DEBUG command not allowed. If the enable-debug-command option is set to "


def session_of(allowed: str) -> FakeSession:
    store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF))
    return FakeSession(Server(store, ServerOptions(enable_debug_command=allowed)))


@pytest.fixture
def session() -> Iterator[FakeSession]:
    made = session_of("yes")
    yield made
    made.store.close()


@pytest.mark.parametrize(
    ("allowed", "addr", "runs"),
    [
        ("no", "127.0.0.1:5", False),
        ("local", "127.0.0.1:5", True),
        ("local", "[::1]:5", True),
        ("local", "/tmp/kv.sock:0", True),
        ("local", "10.0.0.1:5", False),
        ("yes", "10.0.0.1:5", True),
    ],
)
def test_it_is_decided_at_the_start_which_clients_may_debug(allowed: str, addr: str, runs: bool) -> None:
    session = session_of(allowed)
    session.addr = addr
    assert session.ask("DEBUG LOG x").startswith(b"+OK" if runs else NOT_ALLOWED)
    assert b"can't set immutable config" in session.ask("CONFIG SET enable-debug-command yes")
    session.store.close()


def test_a_port_of_zero_is_no_tcp_client() -> None:
    assert not is_local("10.0.0.1:80")
    assert is_local("[::ffff:127.0.0.1]:80")


@pytest.mark.parametrize(
    "name",
    [
        "SEGFAULT", "PANIC", "ASSERT", "OOM", "RESTART", "CRASH-AND-RECOVER", "LEAK", "RELOAD", "LOADAOF", "JMAP",
        "MALLCTL", "POPULATE", "FOO",
    ],
)  # fmt: skip
def test_what_could_break_a_server_is_unknown(name: str, session: FakeSession) -> None:
    assert session.ask(f"DEBUG {name}") == (
        b"-ERR unknown subcommand or wrong number of arguments for '%b'. Try DEBUG HELP.\r\n" % name.encode()
    )


def test_sleep_halts_the_server_for_as_long_as_a_minute_at_most(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    for text in ("0.25", "1000", "x", "-5", "3abc", ".5"):
        assert session.ask(f"DEBUG SLEEP {text}") == b"+OK\r\n"
    assert slept == [0.25, 60.0, 0.0, 0.0, 3.0, 0.5]
    assert session.ask("DEBUG SLEEP").startswith(b"-ERR unknown subcommand or wrong number")


def test_active_expiry_can_be_switched_off_and_on(session: FakeSession) -> None:
    assert session.ask("DEBUG SET-ACTIVE-EXPIRE 0") == b"+OK\r\n"
    assert not session.server.expires_actively
    assert session.ask("DEBUG SET-ACTIVE-EXPIRE 1") == b"+OK\r\n"
    assert session.server.expires_actively


def test_object_tells_how_a_value_is_kept(session: FakeSession) -> None:
    session.ask("SET k v")
    session.ask([b"SET", b"large", bytes(100_000)])
    assert session.ask("DEBUG OBJECT k").startswith(b"+Value at:0x0 refcount:1 encoding:embstr serializedlength:2 lru:")
    assert b"encoding:raw serializedlength:100005 " in session.ask("DEBUG OBJECT large")
    assert session.ask("DEBUG OBJECT nope") == b"-ERR no such key\r\n"


def test_log_and_error_say_what_they_were_told(session: FakeSession, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        session.ask([b"DEBUG", b"LOG", b"hello\xff\n"])
    assert "DEBUG LOG: hello\\xff" in caplog.text
    assert session.ask([b"DEBUG", b"ERROR", b"CODE a\r\nb"]) == b"-CODE a  b\r\n"


@pytest.mark.parametrize(
    ("name", "in_resp2", "in_resp3"),
    [
        ("double", b"$5\r\n3.141\r\n", b",3.141\r\n"),
        ("bignum", b"$37\r\n1234567999999999999999999999999999999\r\n", b"(1234567999999999999999999999999999999\r\n"),
        ("null", b"$-1\r\n", b"_\r\n"),
        ("set", b"*3\r\n:0\r\n:1\r\n:2\r\n", b"~3\r\n:0\r\n:1\r\n:2\r\n"),
        ("map", b"*6\r\n:0\r\n:0\r\n:1\r\n:1\r\n:2\r\n:0\r\n", b"%3\r\n:0\r\n#f\r\n:1\r\n#t\r\n:2\r\n#f\r\n"),
        ("true", b":1\r\n", b"#t\r\n"),
        ("VERBATIM", b"$25\r\nThis is a verbatim\nstring\r\n", b"=29\r\ntxt:This is a verbatim\nstring\r\n"),
        (
            "push",
            b"-ERR RESP2 is not supported by this command\r\n",
            b">2\r\n$16\r\nserver-cpu-usage\r\n:42\r\n$40\r\nSome real reply following the push reply\r\n",
        ),
        (
            "attrib",
            b"$39\r\nSome real reply following the attribute\r\n",
            b"|1\r\n$14\r\nkey-popularity\r\n*2\r\n$7\r\nkey:123\r\n:90\r\n"
            b"$39\r\nSome real reply following the attribute\r\n",
        ),
    ],
)
def test_protocol_answers_with_redis_own_samples(
    name: str, in_resp2: bytes, in_resp3: bytes, session: FakeSession
) -> None:
    assert session.ask(f"DEBUG PROTOCOL {name}") == in_resp2
    session.speak(3)
    assert session.ask(f"DEBUG PROTOCOL {name}") == in_resp3
