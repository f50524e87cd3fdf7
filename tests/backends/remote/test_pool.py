"""The connections to one server: which of them a loss ends, and what they may say afterwards."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.health import Link
from kvredis.backends.remote.pool import Node
from kvredis.backends.resp.connection import Connection
from kvredis.storage.errors import BackendError
from tests.backends.conftest import EXIT_S, ROOT, Clock, ServerProcess, start_server
from tests.backends.fake_server import FakeServer, Leave, polite
from tests.backends.verbs import content

PATIENT_S = 20.0


@pytest.fixture
def node(fake: FakeServer, clock: Clock) -> Iterator[Node]:
    """The node under test, of the fake server."""
    node = Node(Link(parse_url(fake.url), PATIENT_S, clock), 2)
    yield node
    node.close()


def opened(node: Node) -> Connection:
    connection = node.open()
    assert connection is not None
    return connection


def test_a_loss_ends_all_connections_and_is_one_loss_whichever_connection_tells_of_it(node: Node) -> None:
    several = [opened(node) for _ in range(3)]
    for connection in several:
        node.lose(connection, BackendError("cut"))
        with pytest.raises(BackendError):
            connection.call(b"PING")
    assert node.stats()["losses"] == node.stats()["errors"] == 1
    for connection in several:
        node.retire(connection)


def test_a_server_that_takes_no_more_connections_is_not_lost_and_asked_again_later(
    node: Node, fake: FakeServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (old,) = node.borrow(1)
    fake.answer = lambda args: Leave(b"-ERR max number of clients reached\r\n") if args[0] == b"HELLO" else polite(args)
    assert node.borrow(2) == []
    asked = len(fake.named(b"HELLO"))
    assert node.open() is None
    assert len(fake.named(b"HELLO")) == asked, "too early to ask again"
    clock.now_s += 2
    assert node.open() is None
    assert len(fake.named(b"HELLO")) == asked + 1
    assert old.call(b"PING") == "PONG"
    assert (node.stats()["losses"], node.link.waiting) == (0, False)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        f"{fake.url} takes no more connections"
    ]
    fake.answer = polite
    clock.now_s += 2
    node.retire(opened(node))
    node.bring_back([old])


def test_a_server_that_takes_none_but_the_connection_for_questions_is_lost(node: Node, fake: FakeServer) -> None:
    assert node.pipeline([(b"PING",)]) == ["PONG"]
    fake.answer = lambda args: Leave(b"-ERR max number of clients reached\r\n")
    assert node.borrow(1) == []
    assert node.stats()["losses"] == 1


def test_what_was_open_before_an_attempt_failed_ends_when_the_server_is_back_and_is_no_other_loss(
    node: Node, fake: FakeServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    old = opened(node)
    fake.answer = lambda args: Leave()
    assert node.open() is None
    fake.answer = polite
    assert old.call(b"PING") == "PONG", "the pool does not know yet of a better one"
    clock.now_s += 100
    new = opened(node)
    with pytest.raises(BackendError):
        old.call(b"PING")
    node.lose(old, BackendError("timed out"))
    assert new.call(b"PING") == "PONG"
    assert [message.split()[2] for message in caplog.messages] == ["lost", "back"]
    for connection in (old, new):
        node.retire(connection)


@pytest.mark.parametrize("last_words", [b"+PONG\r\n", b"+PONG\r\n+and\r\n"])
def test_a_server_that_hangs_up_after_its_greeting_holds_no_caller_up(
    node: Node, fake: FakeServer, last_words: bytes
) -> None:
    fake.answer = lambda args: Leave(last_words) if args[0] == b"PING" else polite(args)
    for connection in (lent := node.borrow(2)):
        replies = iter(lambda connection=connection: connection.call(b"GET", b"k"), None)  # type: ignore[misc]
        with pytest.raises(BackendError):
            list(replies)
    node.bring_back(lent)
    assert len(fake.named(b"PING")) <= 2
    assert node.stats()["connections"] == 0


def test_idle_connections_that_the_server_has_closed_are_replaced(node: Node, fake: FakeServer) -> None:
    node.bring_back(node.borrow(2))
    fake.hang_up()
    lent = node.borrow(2)
    assert [connection.call(b"PING") for connection in lent] == ["PONG", "PONG"]
    node.bring_back(lent)
    assert node.stats()["connections"] == 2
    assert node.stats()["losses"] == 0


def test_what_loads_and_stores_have_used_at_once_is_there_for_both_behind_a_pause(node: Node, fake: FakeServer) -> None:
    stores, load = node.borrow(2), node.borrow(2)
    node.bring_back(load)
    node.bring_back(stores)  # the thread that stores has lingered, and ended
    opened_by_then = len(fake.named(b"HELLO"))
    again = [*node.borrow(2), *node.borrow(2)]
    assert set(again) == {*stores, *load}
    assert len(fake.named(b"HELLO")) == opened_by_then
    node.bring_back(again)


def test_no_more_connections_stay_idle_than_a_load_and_what_is_stored_use(node: Node) -> None:
    several = [*node.borrow(2), *node.borrow(2), *node.borrow(2)]
    node.bring_back(several)
    assert node.stats()["connections"] == 4
    assert [connection.usable for connection in several] == [True] * 4 + [False] * 2


def test_a_load_behind_a_store_over_several_connections_opens_none(tmp_path: Path) -> None:
    server = start_server("kvredis", tmp_path, "--io-threads", "4")
    node = Node(Link(parse_url(server.url.replace("unix://", "kvredis://")), PATIENT_S))
    opened_by = []
    for _ in range(3):
        (first,) = node.borrow(1)
        stores = [first, *node.borrow(node.store_connections_with(first) - 1)]
        load = node.borrow(1)
        assert (len(stores), node.load_connections_with(load[0])) == (4, 1)
        node.bring_back(load)
        node.bring_back(stores)  # the thread that stores has lingered, and ended
        stats = node.pipeline([(b"INFO", b"stats")])[0]
        assert isinstance(stats, bytes)
        opened_by.append(stats.partition(b"total_connections_received:")[2].split()[0])
    assert opened_by == opened_by[:1] * 3
    node.close()
    server.kill()


# What a client needs to read many blocks one after the other: memory for fewer than two of them.

BLOCKS = 16


BLOCK_BYTES = 4 << 20


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_stream_of_blocks_takes_less_memory_than_two_of_them(way: str, kvredis_server: ServerProcess) -> None:
    url = kvredis_server.url if way == "unix" else kvredis_server.tcp_url
    values = [content(b"stream:%d" % n, BLOCK_BYTES) for n in range(BLOCKS)]
    with Connection.open(kvredis_server.url) as writer:
        for n, value in enumerate(values):
            writer.send_set(b"stream:%d" % n, value)
            assert writer.read() == "OK"
    command = [sys.executable, "-m", "tests.backends.remote.stream_client", url, str(BLOCKS), str(BLOCK_BYTES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=EXIT_S, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["digests"] == [hashlib.sha256(value).hexdigest() for value in values]
    assert BLOCK_BYTES <= told["arena_bytes"] <= 2 * BLOCK_BYTES
    assert BLOCK_BYTES // 2 < told["grown_bytes"] < 2 * BLOCK_BYTES
