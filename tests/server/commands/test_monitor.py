"""MONITOR: the line that is told, what it hides, and who is told when."""

from typing import cast

from kvredis.server.client.session import Session
from kvredis.server.commands.monitor import ARG_BYTES_MAX, ARGS_MAX, feed, monitor_line
from tests.server.fake_session import FakeSession
from tests.server.live import LiveServer, pattern


def line_of(session: FakeSession, *words: object, at: float = 1700000000.123456) -> bytes:
    return monitor_line(cast(Session, session), words, at)


def test_a_line_has_time_database_address_and_quoted_words(session: FakeSession) -> None:
    session.space = 9
    assert line_of(session, b"SET", b"k", b'a"b\r\n\x00') == (
        b'+1700000000.123456 [9 127.0.0.1:5001] "SET" "k" "a\\"b\\r\\n\\x00"\r\n'
    )


def test_bytes_are_escaped_as_redis_escapes_them(session: FakeSession) -> None:
    assert line_of(session, b"\\\x7f\xff\t\a\b\v ~") == (
        b'+1700000000.123456 [0 127.0.0.1:5001] "\\\\\\x7f\\xff\\t\\a\\b\\x0b ~"\r\n'
    )


def test_every_byte_leaves_one_line(session: FakeSession) -> None:
    line = line_of(session, bytes(range(256)))
    assert line.count(b"\n") == line.count(b"\r") == 1
    assert all(32 <= byte < 127 for byte in line[:-2])


def test_a_client_on_the_unix_socket_is_named_by_its_path(session: FakeSession) -> None:
    session.addr = "/tmp/kv.sock:0"
    session.server.unixsocket = "/tmp/kv.sock"
    assert b"[0 unix:/tmp/kv.sock] " in line_of(session, b"PING")
    session.addr = "[::1]:80"
    assert b"[0 [::1]:80] " in line_of(session, b"PING")


def test_secrets_are_not_told(session: FakeSession) -> None:
    assert line_of(session, b"AUTH", b"pw").endswith(b'] "AUTH" "(redacted)"\r\n')
    assert line_of(session, b"HELLO", b"3", b"AUTH", b"u", b"pw").endswith(b'"AUTH" "(redacted)" "(redacted)"\r\n')


def test_long_words_and_long_commands_are_cut_and_say_so(session: FakeSession) -> None:
    line = line_of(session, b"SET", b"k", b"x" * (ARG_BYTES_MAX + 3))
    assert line.endswith(b'"' + b"x" * ARG_BYTES_MAX + b'"... (3 more bytes)\r\n')
    line = line_of(session, *[b"k"] * (ARGS_MAX + 2))
    assert line.endswith(b'"k" ... (2 more arguments)\r\n')
    assert line.count(b'"k"') == ARGS_MAX


def test_a_payload_is_shown_by_its_first_bytes(session: FakeSession) -> None:
    reservation = session.store.reserve(b"k", 100_000)
    assert reservation is not None
    with reservation:
        reservation.view[:] = pattern(100_000)
        line = line_of(session, b"SET", b"k", reservation)
    shown = line_of(session, b"SET", b"k", pattern(100_000))
    assert line == shown
    assert line.endswith(b'"... (99488 more bytes)\r\n')


def test_monitors_are_told_once_each_and_a_second_monitor_is_not_answered(session: FakeSession) -> None:
    server = session.server
    assert session.ask("MONITOR") == b"+OK\r\n"
    assert session.ask("MONITOR") == b""
    assert server.watches_every_command
    other = FakeSession(server, 2)
    feed(server, cast(Session, other), [b"GET", b"k"])
    assert len(session.pushed) == 1
    assert session.pushed[0].endswith(b' [0 127.0.0.1:5002] "GET" "k"\r\n')
    assert not other.pushed


def test_monitor_is_refused_inside_a_transaction(session: FakeSession) -> None:
    session.ask("MULTI")
    assert session.ask("MONITOR") == b"-ERR MONITOR isn't allowed for DENY BLOCKING client\r\n"


async def test_a_monitor_sees_what_others_run_and_no_administration(loop: str, live: LiveServer) -> None:
    monitor, client = await live.connect("tcp"), await live.connect("tcp")
    assert await monitor.ask("MONITOR") == b"+OK\r\n"
    await client.ask("CONFIG", "SET", "hz", "10")
    await client.ask("NOPE")
    await client.ask("GET")
    await client.ask("SELECT", "3")
    await client.ask("SET", "large", pattern(100_000))
    await client.ask("AUTH", "default", "secret")
    await client.ask("MULTI")
    await client.ask("DEL", "a", "b")
    await client.send("EXEC")
    assert await client.read(8) == b"*1\r\n:0\r\n"
    told = [await monitor.read_line() for _ in range(6)]
    words = [line.split(b"] ", 1)[1].rstrip() for line in told]
    assert words[0] == b'"SELECT" "3"'
    assert words[1].startswith(b'"SET" "large" "\\x00\\x01')
    assert words[1].endswith(b"(99488 more bytes)")
    assert words[2] == b'"AUTH" "(redacted)" "(redacted)"'
    assert words[3:] == [b'"MULTI"', b'"DEL" "a" "b"', b'"EXEC"']
    assert all(line.split(b" ")[1] == b"[3" for line in told)


async def test_a_monitor_that_goes_lets_the_others_run_the_plain_way_again(loop: str, live: LiveServer) -> None:
    monitor = await live.connect()
    assert await monitor.ask("MONITOR") == b"+OK\r\n"
    assert live.server.watches_every_command
    assert await monitor.ask("RESET") == b"+RESET\r\n"
    assert not live.server.monitors
    assert not live.server.watches_every_command
