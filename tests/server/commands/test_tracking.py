"""Client-side caching on sessions without connections: who is told that which copy is out of date."""

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
from tests.server.pushes import invalidation, message

FLUSHED = b">2\r\n$10\r\ninvalidate\r\n_\r\n"


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


def test_a_key_that_was_read_is_invalidated_once(reader: FakeSession, writer: FakeSession) -> None:
    run(reader, "CLIENT TRACKING ON")
    run(reader, "MGET a b a")
    touch(writer, b"a")
    assert told(reader) == [invalidation(b"a")]
    touch(writer, b"a")
    touch(writer, b"c")
    assert told(reader) == []
    touch(writer, b"b")
    assert told(reader) == [invalidation(b"b")]


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


def test_every_reader_of_a_key_is_told_and_no_other_client(reader: FakeSession, writer: FakeSession) -> None:
    writer.speak(3)
    for session in (reader, writer):
        run(session, "CLIENT TRACKING ON")
        run(session, "GET k")
    run(writer, "GET other")
    touch(writer, b"k")
    assert told(reader) == told(writer) == [invalidation(b"k")]


def test_a_client_hears_of_its_own_changes_unless_it_asked_not_to(reader: FakeSession, writer: FakeSession) -> None:
    run(reader, "CLIENT TRACKING ON")
    run(reader, "GET k")
    touch(reader, b"k")
    assert told(reader) == [invalidation(b"k")]
    run(reader, "CLIENT TRACKING ON NOLOOP")
    run(reader, "GET k")
    touch(reader, b"k")
    touch(writer, b"k")  # the pair was forgotten with the first change
    assert told(reader) == []
    run(reader, "GET k")
    reader.server.tracking.touched(b"k")  # expired or evicted: by no client
    assert told(reader) == [invalidation(b"k")]


def test_optin_tracks_only_the_command_after_caching_yes(reader: FakeSession, writer: FakeSession) -> None:
    run(reader, "CLIENT TRACKING ON OPTIN")
    run(reader, "GET a")
    run(reader, "CLIENT CACHING YES")
    run(reader, "CLIENT ID")  # commands of CLIENT do not count
    run(reader, "GET b")
    run(reader, "GET c")
    for key in (b"a", b"b", b"c"):
        touch(writer, key)
    assert told(reader) == [invalidation(b"b")]


def test_optout_spares_only_the_command_after_caching_no(reader: FakeSession, writer: FakeSession) -> None:
    run(reader, "CLIENT TRACKING ON OPTOUT")
    run(reader, "CLIENT CACHING NO")
    run(reader, "GET a")
    run(reader, "GET b")
    touch(writer, b"a")
    touch(writer, b"b")
    assert told(reader) == [invalidation(b"b")]


def test_caching_yes_speaks_of_a_whole_transaction(reader: FakeSession, writer: FakeSession) -> None:
    run(reader, "CLIENT TRACKING ON OPTIN")
    run(reader, "CLIENT CACHING YES")
    run(reader, "MULTI")
    run(reader, "GET a")
    run(reader, "GET b")
    run(reader, "DISCARD")
    run(reader, "GET c")
    for key in (b"a", b"b", b"c"):
        touch(writer, key)
    assert told(reader) == [invalidation(b"a"), invalidation(b"b")]


def test_a_flush_tells_all_clients_that_everything_is_gone(reader: FakeSession, writer: FakeSession) -> None:
    run(reader, "CLIENT TRACKING ON")
    run(reader, "GET k")
    reader.server.tracking.flushed()
    assert told(reader) == [FLUSHED]
    assert told(writer) == []
    touch(writer, b"k")
    assert told(reader) == []


def test_a_resp2_client_is_told_nothing_on_its_own_connection(writer: FakeSession) -> None:
    run(writer, "CLIENT TRACKING ON")
    run(writer, "SUBSCRIBE __redis__:invalidate")
    run(writer, "GET k")
    touch(writer, b"k")
    writer.server.tracking.flushed()
    assert told(writer) == []


# ---- broadcast ---------------------------------------------------------------------------------------------------


def test_broadcast_gathers_the_changes_of_a_turn_by_prefix(
    reader: FakeSession, writer: FakeSession, turns: list[Callable[[], None]]
) -> None:
    run(reader, "CLIENT TRACKING ON BCAST PREFIX y PREFIX x")
    for key in (b"x2", b"y1", b"x1", b"z", b"x2", b"x", b""):
        touch(writer, key)
    assert told(reader) == []
    assert len(turns) == 1
    turns.pop()()
    assert told(reader) == [invalidation(b"x", b"x1", b"x2"), invalidation(b"y1")]
    touch(writer, b"z")
    assert turns == []


def test_broadcast_without_a_prefix_tells_of_every_key(
    reader: FakeSession, writer: FakeSession, turns: list[Callable[[], None]]
) -> None:
    run(reader, "CLIENT TRACKING ON BCAST")
    run(reader, "GET a")
    assert reader.server.tracking.total_keys == 0
    touch(writer, b"a")
    touch(writer, b"")
    turns.pop()()
    assert told(reader) == [invalidation(b"", b"a")]


def test_broadcast_spares_a_client_the_keys_that_it_changed_last(
    reader: FakeSession, writer: FakeSession, turns: list[Callable[[], None]]
) -> None:
    run(reader, "CLIENT TRACKING ON BCAST NOLOOP")
    touch(reader, b"own")
    turns.pop()()
    assert told(reader) == []
    touch(writer, b"own")
    touch(reader, b"own")
    touch(reader, b"others")
    touch(writer, b"others")
    turns.pop()()
    assert told(reader) == [invalidation(b"others")]


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


def test_what_was_read_before_the_client_changed_to_broadcast_is_not_told(
    reader: FakeSession, writer: FakeSession
) -> None:
    run(reader, "CLIENT TRACKING ON")
    run(reader, "GET k")
    run(reader, "CLIENT TRACKING OFF")
    run(reader, "CLIENT TRACKING ON BCAST PREFIX x")
    touch(writer, b"k")
    assert told(reader) == []


# ---- redirection -------------------------------------------------------------------------------------------------


def test_invalidations_go_to_the_client_they_are_redirected_to(reader: FakeSession, writer: FakeSession) -> None:
    run(writer, "CLIENT TRACKING ON REDIRECT 1")
    assert writer.ask("CLIENT GETREDIR") == b":1\r\n"
    run(writer, "GET k")
    touch(writer, b"k")
    assert told(reader) == [invalidation(b"k")]
    assert told(writer) == []


def test_a_resp2_client_gets_redirected_invalidations_as_messages(reader: FakeSession, writer: FakeSession) -> None:
    run(reader, "CLIENT TRACKING ON REDIRECT 2")
    run(reader, "GET k")
    touch(reader, b"k")
    assert told(writer) == [], "it has not subscribed"
    run(writer, "SUBSCRIBE __redis__:invalidate")
    run(reader, "GET k")
    touch(reader, b"k")
    assert told(writer) == [b"*3\r\n$7\r\nmessage\r\n$20\r\n__redis__:invalidate\r\n*1\r\n$1\r\nk\r\n"]
    reader.server.tracking.flushed()
    assert told(writer) == [b"*3\r\n$7\r\nmessage\r\n$20\r\n__redis__:invalidate\r\n$-1\r\n"]
    assert told(reader) == []


def test_a_resp2_client_may_redirect_to_itself(server: Server, writer: FakeSession) -> None:
    run(writer, "CLIENT TRACKING ON REDIRECT 2")
    run(writer, "GET k")
    run(writer, "SUBSCRIBE __redis__:invalidate")
    touch(writer, b"k")
    assert told(writer) == [message("message", "__redis__:invalidate", "k").replace(b"$1\r\nk", b"*1\r\n$1\r\nk")]


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


# ---- bounds ------------------------------------------------------------------------------------------------------


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
