"""What the door says of the store's policy: maxmemory-policy, OBJECT FREQ and IDLETIME, KV.TIERS."""

import pytest

from kvredis.server.server import Server, ServerOptions
from kvredis.server.settings import value_of
from kvredis.storage.arena import Arena, HugepageMode
from kvredis.storage.errors import ConfigError
from kvredis.storage.policy import POLICIES, make_policy
from kvredis.storage.store import Store

from .fake_session import ARENA_BYTES, FakeSession

ADJUST = b"Please note that when switching between policies at runtime LRU and LFU data will take some time to adjust."
NO_FREQUENCY = b"-ERR An LFU maxmemory policy is not selected, access frequency not tracked. " + ADJUST + b"\r\n"
NO_IDLE_TIME = b"-ERR An LFU maxmemory policy is selected, idle time not tracked. " + ADJUST + b"\r\n"


def session_under(policy: str, **options: str) -> FakeSession:
    store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF), policy=make_policy(policy))
    return FakeSession(Server(store, ServerOptions(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_told_by_its_name(name: str) -> None:
    session = session_under(name)
    shown = f"allkeys-{name.lower()}".encode()
    assert session.ask("CONFIG GET maxmemory-policy").endswith(b"\r\n%b\r\n" % shown)
    assert b"maxmemory_policy:%b\r\n" % shown in session.ask("INFO memory")
    assert name.encode() in session.ask("KV.TIERS")


@pytest.mark.parametrize("name", POLICIES)
def test_the_policy_in_force_can_be_named_and_no_other(name: str) -> None:
    session = session_under(name)
    own = f"allkeys-{name.lower()}"
    assert session.ask("CONFIG SET maxmemory-policy noeviction") == b"+OK\r\n"
    assert not session.store.evicts
    assert session.ask(f"CONFIG SET maxmemory-policy {own.upper()}") == b"+OK\r\n"
    assert session.store.evicts
    for other in ("allkeys-random", "volatile-lru", *(f"allkeys-{each.lower()}" for each in POLICIES if each != name)):
        refusal = session.ask(f"CONFIG SET maxmemory-policy {other}")
        assert f"of the policies there are {own} and noeviction here".encode() in refusal
        assert session.store.evicts


def test_a_server_is_started_with_noeviction_whatever_the_order() -> None:
    session = session_under("LFU", maxmemory_policy="noeviction")
    assert not session.store.evicts
    assert value_of(session.server, "maxmemory-policy") == "noeviction"


def test_a_policy_that_the_store_does_not_have_stops_the_start_when_it_is_set() -> None:
    with pytest.raises(ConfigError, match="there are allkeys-fifo and noeviction here"):
        session_under("FIFO", settings={"maxmemory-policy": "allkeys-lfu"})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["small", "x" * 20_000])
def test_under_lfu_uses_are_counted_and_idle_times_are_not(value: str) -> None:
    session = session_under("LFU")
    session.ask(f"SET k {value}")
    for uses in (1, 2, 3):
        assert session.ask("OBJECT FREQ k") == b":%d\r\n" % uses
        session.ask("GET k")
    assert session.ask("OBJECT IDLETIME k") == NO_IDLE_TIME
    session.ask(f"SET k {value}")
    assert session.ask("OBJECT FREQ k") == b":5\r\n"  # who writes over it uses it


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "LFU"])
def test_under_any_other_it_is_the_other_way_round(name: str) -> None:
    session = session_under(name)
    session.ask("SET k v")
    assert session.ask("OBJECT IDLETIME k") in (b":0\r\n", b":1\r\n"), "a second may have begun"
    assert session.ask("OBJECT FREQ k") == NO_FREQUENCY


def test_when_nothing_is_evicted_no_lfu_policy_is_selected() -> None:
    session = session_under("LFU", maxmemory_policy="noeviction")
    session.ask("SET k v")
    assert session.ask("OBJECT IDLETIME k") in (b":0\r\n", b":1\r\n"), "a second may have begun"
    assert session.ask("OBJECT FREQ k") == NO_FREQUENCY


@pytest.mark.parametrize("name", ["LRU", "LFU"])
def test_without_a_key_there_is_neither(name: str) -> None:
    session = session_under(name)
    assert session.ask("OBJECT FREQ k") == session.ask("OBJECT IDLETIME k") == b"$-1\r\n"
