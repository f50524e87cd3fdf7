"""CONFIG: what is reported is true, what is accepted is checked, and all of a CONFIG SET happens or nothing."""

import logging
from collections.abc import Iterator

import pytest

from kvredis.server.settings import SETTINGS, Effect, value_of
from tests.server.fake_session import ARENA_BYTES, FakeSession, make_server


@pytest.fixture
def session() -> Iterator[FakeSession]:
    server = make_server()
    yield FakeSession(server)
    server.store.close()


def test_maxmemory_is_the_arena_and_cannot_be_changed(session: FakeSession) -> None:
    assert session.ask("CONFIG GET maxmemory") == b"*2\r\n$9\r\nmaxmemory\r\n$7\r\n%d\r\n" % ARENA_BYTES
    assert session.ask("CONFIG SET maxmemory 1gb") == (
        b"-ERR CONFIG SET failed (possibly related to argument 'maxmemory') - can't set immutable config\r\n"
    )


def test_several_patterns_name_a_setting_once(session: FakeSession) -> None:
    session.speak(3)
    assert session.ask("CONFIG GET h* HZ hz").count(b"$2\r\nhz\r\n") == 1


def test_a_set_with_one_bad_pair_changes_nothing(session: FakeSession) -> None:
    assert session.ask("CONFIG SET hz 50 slowlog-max-len x").startswith(b"-ERR CONFIG SET failed")
    assert session.ask("CONFIG SET hz 50 nope 1") == (
        b"-ERR Unknown option or number of arguments for CONFIG SET - 'nope'\r\n"
    )
    assert session.ask("CONFIG SET hz 50 databases 1").startswith(b"-ERR CONFIG SET failed")
    assert value_of(session.server, "hz") == "10"


def test_a_password_set_at_run_time_is_asked_of_those_who_come_after(session: FakeSession) -> None:
    assert session.ask("CONFIG SET requirepass secret maxclients 7") == b"+OK\r\n"
    assert session.server.requirepass == b"secret"
    assert session.server.maxclients == 7
    assert session.ask("CONFIG GET requirepass") == b"*2\r\n$11\r\nrequirepass\r\n$6\r\nsecret\r\n"


def test_the_log_level_takes_effect(session: FakeSession) -> None:
    logger = logging.getLogger("kvredis")
    before = logger.level
    try:
        assert session.ask("CONFIG SET loglevel Warning") == b"+OK\r\n"
        assert logger.level == logging.WARNING
        assert session.ask("CONFIG GET loglevel") == b"*2\r\n$8\r\nloglevel\r\n$7\r\nwarning\r\n"
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize(
    ("written", "shown"),
    [("1gb", 2**30), ("1g", 10**9), ("10MB", 10 * 2**20), ("2000k", 2_000_000), ("5000000", 5_000_000)],
)
def test_memory_is_written_as_in_redis_conf(written: str, shown: int, session: FakeSession) -> None:
    assert session.ask(f"CONFIG SET client-query-buffer-limit {written}") == b"+OK\r\n"
    assert value_of(session.server, "client-query-buffer-limit") == str(shown)


@pytest.mark.parametrize(("given", "shown"), [("KEA", "AKE"), ("Elg", "glE"), ("AKEmn", "AKEmn"), ("", "")])
def test_event_classes_are_shown_in_redis_order(given: str, shown: str, session: FakeSession) -> None:
    assert session.ask([b"CONFIG", b"SET", b"notify-keyspace-events", given.encode()]) == b"+OK\r\n"
    assert value_of(session.server, "notify-keyspace-events") == shown


def test_every_default_passes_its_own_check(session: FakeSession) -> None:
    for name, setting in SETTINGS.items():
        assert setting.check(value_of(session.server, name)) == value_of(session.server, name), name
        assert (setting.apply is not None) == (setting.effect is Effect.LIVE), name


def test_resetstat_sets_the_counters_back(session: FakeSession) -> None:
    session.server.stats.commands_processed = 5
    session.ask("GET nope")
    assert session.ask("CONFIG RESETSTAT") == b"+OK\r\n"
    assert session.server.stats.commands_processed == 0
    assert session.store.stats.misses == 0
