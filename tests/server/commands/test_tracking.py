"""Client-side caching on sessions without connections: what is remembered, its bounds, and clients that go.

tests/compat holds who is told of which key next to a real redis-server.
"""

from collections.abc import Callable
from typing import cast

import pytest

from kvredis.server.client import tracking as tracking
from kvredis.server.client.session import Session
from kvredis.server.client.tracking import TrackingTable
from kvredis.server.commands.client import letters_of, redirection_of
from kvredis.server.commands.registry import Command, lookup
from kvredis.server.server import Server
from tests.server.fake_session import FakeSession
from tests.server.pushes import invalidation


@pytest.fixture
def turns(server: Server) -> list[Callable[[], None]]:
    """What is to run on the next turn of the loop."""
    turns: list[Callable[[], None]] = []
    server.tracking = TrackingTable(server, turns.append)
    return turns


@pytest.fixture
def reader(server: Server, turns: list[Callable[[], None]]) -> FakeSession:
    """A RESP3 client."""
    session = FakeSession(server, 1)
    session.speak(3)
    return session


@pytest.fixture
def writer(server: Server) -> FakeSession:
    return FakeSession(server, 2)


def run(session: FakeSession, line: str) -> bytes:
    """A command as the careful way runs it: afterwards the table is told what it was."""
    reply = session.ask(line)
    args = line.encode().split(b" ")
    command = lookup(args)
    assert isinstance(command, Command)
    session.server.tracking.remember(cast(Session, session), command, args)
    return reply


def touch(session: FakeSession, key: bytes) -> None:
    """`session` has changed `key`."""
    session.server.tracking.touched(key, cast(Session, session))


def told(session: FakeSession) -> list[bytes]:
    """What a client was sent since this was last asked."""
    pushed, session.pushed = session.pushed, []
    return pushed


def test_what_only_writes_or_has_no_keys_is_not_remembered(reader: FakeSession, server: Server) -> None:
    run(reader, "CLIENT TRACKING ON")
    run(reader, "SET k v")
    run(reader, "SCAN 0")
    run(reader, "PING")
    assert server.tracking.total_keys == 0
    run(reader, "EXISTS k l")
    run(reader, "OBJECT ENCODING k")
    assert server.tracking.total_keys == 2
    assert server.tracking.total_items == 2


def test_a_resp2_client_is_told_nothing_on_its_own_connection(writer: FakeSession) -> None:
    run(writer, "CLIENT TRACKING ON")
    run(writer, "SUBSCRIBE __redis__:invalidate")
    run(writer, "GET k")
    touch(writer, b"k")
    writer.server.tracking.flushed()
    assert told(writer) == []


def test_a_client_that_goes_before_the_turn_ends_is_sent_nothing(
    server: Server, reader: FakeSession, writer: FakeSession, turns: list[Callable[[], None]]
) -> None:
    run(reader, "CLIENT TRACKING ON BCAST PREFIX a")
    touch(writer, b"a")
    server.tracking.forget(cast(Session, reader))
    turns.pop()()
    assert told(reader) == []
    assert not server.tracking.prefixes
    touch(writer, b"a")
    assert not turns


def test_a_client_is_told_that_its_redirection_is_broken(
    server: Server, reader: FakeSession, writer: FakeSession
) -> None:
    run(reader, "CLIENT TRACKING ON REDIRECT 2")
    run(reader, "GET k")
    del server.sessions[2]
    touch(reader, b"k")
    assert told(reader) == [b">2\r\n$21\r\ntracking-redir-broken\r\n:2\r\n"]
    assert letters_of(cast(Session, reader)) == "tR"
    assert b"$15\r\nbroken_redirect\r\n" in reader.ask("CLIENT TRACKINGINFO")
    run(reader, "CLIENT TRACKING ON")
    assert letters_of(cast(Session, reader)) == "t"
    assert redirection_of(cast(Session, reader)) == 0


def test_a_full_table_lets_the_oldest_keys_go_and_says_so(reader: FakeSession, writer: FakeSession) -> None:
    assert reader.ask("CONFIG SET tracking-table-max-keys 2") == b"+OK\r\n"
    run(reader, "CLIENT TRACKING ON")
    for key in "abc":
        run(reader, f"GET {key}")
    assert told(reader) == [invalidation(b"a")]
    touch(writer, b"a")
    assert told(reader) == []
    assert reader.server.tracking.total_keys == 2
    reader.ask("CONFIG SET tracking-table-max-keys 1")
    assert told(reader) == [invalidation(b"b")]
    reader.ask("CONFIG SET tracking-table-max-keys 0")
    for key in "defgh":
        run(reader, f"GET {key}")
    assert told(reader) == []


def test_the_table_is_bounded_in_bytes_too(
    monkeypatch: pytest.MonkeyPatch, reader: FakeSession, writer: FakeSession
) -> None:
    run(reader, "CLIENT TRACKING ON")
    monkeypatch.setattr(tracking, "TABLE_BYTES_MAX", 2 * (1000 + tracking.KEY_BYTES + tracking.READER_BYTES))
    keys = [letter * 1000 for letter in "abc"]
    for key in keys:
        run(reader, f"GET {key}")
    assert told(reader) == [invalidation(keys[0].encode())]
    for key in keys:
        touch(writer, key.encode())
    assert reader.server.tracking.total_items == 0
    assert reader.server.tracking.total_keys == 0


def test_a_client_that_has_gone_is_skipped_and_the_last_one_empties_the_table(
    server: Server, reader: FakeSession, writer: FakeSession
) -> None:
    writer.speak(3)
    broadcast = FakeSession(server, 3)
    run(broadcast, "CLIENT TRACKING ON BCAST PREFIX a PREFIX bc")
    for session in (reader, writer):
        run(session, "CLIENT TRACKING ON")
        run(session, "GET k")
    server.tracking.forget(cast(Session, writer))
    server.tracking.forget(cast(Session, broadcast))
    assert server.tracking.total_items == 2
    touch(reader, b"k")
    assert told(writer) == []
    assert told(reader) == [invalidation(b"k")]
    run(reader, "GET k")
    server.tracking.forget(cast(Session, reader))
    assert server.tracking.total_keys == server.tracking.total_items == 0
    kept = {name for name, part in vars(server.tracking).items() if part and not name.endswith(("server", "call_soon"))}
    assert kept == {"keys_max"}
