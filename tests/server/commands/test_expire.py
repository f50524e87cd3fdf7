"""The commands about the end of a key, on a clock that the test moves, backwards too."""

from collections.abc import Iterator

import pytest

from kvredis.server.server import Server, ServerOptions
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.fake_session import ARENA_BYTES, FakeSession
from tests.server.handlers import LARGE, received, run

NOW_MS = 1_700_000_000_000


class Clock:
    """The wall clock."""

    def __init__(self) -> None:
        self.ms = NOW_MS


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def session(clock: Clock) -> Iterator[FakeSession]:
    store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF), clock_ms=lambda: clock.ms)
    yield FakeSession(Server(store, ServerOptions()))
    assert store.reserved_bytes == store.retired_bytes == store.leases == 0
    store.check_integrity()
    store.close()


@pytest.mark.parametrize(
    "line",
    ["SET k v EX 100", "SET k v PXAT 1700000100000", "SETEX k 100 v", "PSETEX k 100000 v", "GETEX k EXAT 1700000100",
     "GETEX k PX 100000", "EXPIRE k 100", "PEXPIRE k 100000", "EXPIREAT k 1700000100", "PEXPIREAT k 1700000100000"],
)  # fmt: skip
def test_every_way_to_set_an_end_sets_the_same_one(session: FakeSession, clock: Clock, line: str) -> None:
    session.ask("SET k v")
    session.ask(line)
    assert session.ask("TTL k") == b":100\r\n"
    assert session.ask("PTTL k") == b":100000\r\n"
    assert session.ask("EXPIRETIME k") == b":1700000100\r\n"
    assert session.ask("PEXPIRETIME k") == b":1700000100000\r\n"
    clock.ms += 99_999
    assert session.ask("EXISTS k") == b":1\r\n"
    clock.ms += 1
    assert session.ask("PTTL k") == session.ask("EXPIRETIME k") == b":-2\r\n"


def test_seconds_are_rounded_to_the_nearest(session: FakeSession, clock: Clock) -> None:
    session.ask("SET k v PX 1499")
    assert session.ask("TTL k") == b":1\r\n"
    session.ask("SET k v PX 1500")
    assert session.ask("TTL k") == b":2\r\n"
    assert session.ask("EXPIRETIME k") == b":1700000002\r\n"


def test_a_clock_that_is_set_back_lets_a_key_live_longer(session: FakeSession, clock: Clock) -> None:
    session.ask("SET k v EX 100")
    clock.ms -= 50_000
    assert session.ask("TTL k") == b":150\r\n"
    clock.ms += 149_999
    assert session.ask("EXISTS k") == b":1\r\n"
    clock.ms += 1
    assert session.ask("EXISTS k") == b":0\r\n"


@pytest.mark.parametrize("line", ["EXPIREAT k 1700000000", "PEXPIREAT k 1", "PEXPIREAT k 0", "GETEX k EXAT 1700000000"])
def test_an_end_that_is_past_deletes_at_once(session: FakeSession, line: str) -> None:
    session.ask([b"SET", b"k", b"x" * LARGE])
    session.ask(line)
    assert session.store.count() == 0
    assert session.store.live_bytes == 0


@pytest.mark.parametrize(
    ("line", "left"),
    [("SET k w", -1), ("SET k w KEEPTTL", 100), ("GETSET k w", -1), ("MSET k w", -1), ("APPEND k w", 100),
     ("SETRANGE k 0 w", 100), ("PERSIST k", -1), ("GETEX k", 100), ("GETEX k PERSIST", -1), ("COPY j k REPLACE", -1),
     ("COPY k j REPLACE", 100), ("RENAME j k", -1), ("MOVE k 1", -2), ("GETDEL k", -2)],
)  # fmt: skip
def test_what_becomes_of_an_end(session: FakeSession, line: str, left: int) -> None:
    session.ask("SET k v EX 100")
    session.ask("SET j v")
    session.ask(line)
    assert session.ask("TTL k") == b":%d\r\n" % left


def test_an_end_goes_with_a_key_to_its_new_place(session: FakeSession) -> None:
    session.ask([b"SET", b"k", b"x" * LARGE, b"EX", b"100"])
    session.ask("RENAME k l")
    assert session.ask("TTL l") == b":100\r\n"
    session.ask("COPY l m")
    assert session.ask("TTL m") == b":100\r\n"
    session.ask("MOVE m 4")
    session.ask("SWAPDB 4 5")
    session.ask("SELECT 5")
    assert session.ask("TTL m") == b":100\r\n"


@pytest.mark.parametrize("name", [b"SETEX", b"PSETEX"])
@pytest.mark.parametrize("life", [b"0", b"-5", b"x", b"9223372036854775807", b"9223372036854775808"])
def test_a_time_that_cannot_be_gives_the_payload_back(session: FakeSession, name: bytes, life: bytes) -> None:
    reply = run(session, name, b"k", life, received(session, b"k", b"x" * LARGE))
    assert reply[:5] == b"-ERR "
    assert session.store.live_bytes == session.store.reserved_bytes == 0
    assert run(session, name, b"k", b"100", received(session, b"k", b"x" * LARGE)) == b"+OK\r\n"
    assert session.ask("STRLEN k") == b":%d\r\n" % LARGE
