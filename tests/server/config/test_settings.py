"""CONFIG: what is reported is true, what is accepted is checked, and all of a CONFIG SET happens or nothing."""

import logging
import resource

import pytest

from kvredis.server.config.settings import SETTINGS, Effect, value_of
from kvredis.server.server import Server, ServerOptions
from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.fake_session import ARENA_BYTES, FakeSession


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


def test_a_password_set_at_run_time_is_asked_of_clients_that_come_after(session: FakeSession) -> None:
    assert session.ask("CONFIG SET requirepass secret maxclients 7") == b"+OK\r\n"
    assert session.server.maxclients == 7
    assert session.ask("AUTH wrong").startswith(b"-WRONGPASS")
    assert session.ask("AUTH secret") == b"+OK\r\n"
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
        assert setting.apply is None or setting.effect is Effect.LIVE, name


def test_what_is_set_to_what_it_is_stays_what_it_was(session: FakeSession) -> None:
    server = session.server
    before = {name: value_of(server, name) for name in SETTINGS}
    for name, setting in SETTINGS.items():
        if setting.effect in (Effect.LIVE, Effect.IGNORED) and name != "loglevel":
            assert session.ask([b"CONFIG", b"SET", name.encode(), before[name].encode()]) == b"+OK\r\n", name
    assert {name: value_of(server, name) for name in SETTINGS} == before


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("proto-max-bulk-len 2gb", "bulk_bytes_max", 2 << 30),
        ("client-query-buffer-limit 1mb", "query_bytes_max", 1 << 20),
        ("timeout 7", "idle_timeout_s", 7),
        ("body-timeout 2.5", "body_timeout_s", 2.5),
        ("protected-mode no", "protected_mode", False),
        ("maxclients 12", "maxclients", 12),
        ("notify-keyspace-events KEA", "event_letters", "AKE"),
        ("slowlog-log-slower-than 3", "slow_ns", 3000),
        ("latency-monitor-threshold 2", "slow_ns", 2_000_000),
    ],
)
def test_a_live_setting_is_what_the_server_goes_by(line: str, name: str, value: object, session: FakeSession) -> None:
    before = session.reconsidered
    assert session.ask(f"CONFIG SET {line}") == b"+OK\r\n"
    assert getattr(session.server, name) == value
    if name in ("bulk_bytes_max", "query_bytes_max", "slow_ns"):
        assert session.reconsidered > before


def test_the_policy_decides_whether_anything_leaves(session: FakeSession) -> None:
    assert session.ask("CONFIG SET maxmemory-policy NoEviction") == b"+OK\r\n"
    assert not session.store.evicts
    assert session.ask("CONFIG GET maxmemory-policy").endswith(b"noeviction\r\n")
    assert b"one of the following" in session.ask("CONFIG SET maxmemory-policy foo")
    assert session.ask("CONFIG SET maxmemory-policy allkeys-lru") == b"+OK\r\n"
    assert session.store.evicts


def test_output_limits_that_are_not_named_stay(session: FakeSession) -> None:
    before = dict(session.server.output_limits)
    line = [b"CONFIG", b"SET", b"client-output-buffer-limit", b"Replica 1mb 1k 1 pubsub 2 1 3 PUBSUB 5gb 0 0"]
    assert session.ask(line) == b"+OK\r\n"
    limits = session.server.output_limits
    assert limits == before | {"replica": (1 << 20, 1000, 1), "pubsub": (5 << 30, 0, 0)}
    shown = b"normal 0 0 0 slave 1048576 1000 1 pubsub 5368709120 0 0"
    assert shown in session.ask("CONFIG GET client-output-buffer-limit")


@pytest.mark.parametrize(
    "text",
    ["normal 1 1", "other 1 1 1", "master 1 1 1", "normal x 1 1", "normal 1 1 -1", "normal 1 1 " + "9" * 5000],
    ids=lambda text: text[:20],
)
def test_bad_output_limits_are_refused(text: str, session: FakeSession) -> None:
    before = dict(session.server.output_limits)
    assert session.ask([b"CONFIG", b"SET", b"client-output-buffer-limit", text.encode()])[:1] == b"-"
    assert session.server.output_limits == before


def test_all_is_taken_back_when_the_last_of_several_cannot_be_had(session: FakeSession) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > 2**31:
        pytest.skip("this process may open any number of files")
    before = {name: value_of(session.server, name) for name in SETTINGS}
    kept = dict(session.server.settings)
    line = f"CONFIG SET timeout 5 hz 20 notify-keyspace-events KEA maxmemory-policy noeviction maxclients {hard}"
    assert session.ask(line) == (
        b"-ERR CONFIG SET failed (possibly related to argument 'maxclients') - The operating system is not able to "
        b"handle the specified number of clients, try with %d\r\n" % (hard - 32)
    )
    assert {name: value_of(session.server, name) for name in SETTINGS} == before
    assert session.server.settings == kept
    assert session.store.evicts
    assert session.server.event_letters == ""


def test_settings_of_the_start_are_in_effect_from_the_start() -> None:
    store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF))
    options = ServerOptions(
        settings={"slowlog-max-len": "3", "Latency-Tracking": "no"},
        notify_keyspace_events="Kx",
        maxmemory_policy="noeviction",
        client_output_buffer_limit="pubsub 1mb 0 0",
    )
    server = Server(store, options)
    assert server.slowlog.entries_max == 3
    assert value_of(server, "latency-tracking") == "no"
    assert (server.event_letters, store.evicts) == ("xK", False)
    assert server.output_limits["pubsub"] == (1 << 20, 0, 0)
    store.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"nope": "1"}, "nope.*no setting of this name"),
        ({"databases": "3"}, "databases.*immutable"),
        ({"slowlog-max-len": "x"}, "slowlog-max-len.*integer.*'x'"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_named(settings: dict[str, str], reason: str) -> None:
    store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF))
    with pytest.raises(ConfigError, match=reason):
        Server(store, ServerOptions(settings=settings))
    store.close()


def test_latency_tracking_begins_anew_when_it_is_switched_on(session: FakeSession) -> None:
    session.server.stats.command("get").observe(5, 5000)
    assert session.ask("CONFIG SET latency-tracking no") == b"+OK\r\n"
    assert session.ask("CONFIG SET latency-tracking yes") == b"+OK\r\n"
    assert session.ask("LATENCY HISTOGRAM get") == b"*0\r\n"


def test_the_log_of_denials_is_cut_when_it_may_be_shorter(session: FakeSession) -> None:
    session.ask("AUTH nobody x")
    session.ask("AUTH third x")
    assert len(session.server.acl.log.entries) == 2
    assert session.ask("CONFIG SET acllog-max-len 1") == b"+OK\r\n"
    assert [entry.username for entry in session.server.acl.log.entries] == [b"third"]


def test_resetstat_sets_the_counters_back(session: FakeSession) -> None:
    session.server.stats.commands_processed = 5
    session.ask("GET nope")
    assert session.ask("CONFIG RESETSTAT") == b"+OK\r\n"
    assert session.server.stats.commands_processed == 0
    assert session.store.stats.misses == 0
