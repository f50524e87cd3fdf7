"""What the door says of the store's policy: maxmemory-policy, OBJECT FREQ and IDLETIME, KV.TIERS."""

import pytest

from kvredis.server.config.settings import value_of
from kvredis.server.server import Server, ServerOptions
from kvredis.storage.eviction.base import POLICIES, REDIS_POLICIES, make_policy
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.fake_session import ARENA_BYTES, FakeSession
from tests.server.live import OOM, LiveServer

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


@pytest.mark.parametrize("name", REDIS_POLICIES)
def test_every_policy_can_be_set_while_the_server_runs(name: str) -> None:
    session = session_under("FIFO")
    session.ask("SET k v")
    assert session.ask("CONFIG SET maxmemory-policy noeviction") == b"+OK\r\n"
    assert not session.store.evicts
    assert session.ask(f"CONFIG SET maxmemory-policy {name.upper()}") == b"+OK\r\n"
    assert session.store.evicts
    assert session.ask("CONFIG GET maxmemory-policy").endswith(f"\r\n{name}\r\n".encode())
    assert f"maxmemory_policy:{name}\r\n".encode() in session.ask("INFO memory")
    session.store.check_integrity()


def test_what_is_no_policy_is_refused_with_the_names_of_those_that_there_are() -> None:
    refusal = session_under("LRU").ask("CONFIG SET maxmemory-policy foo")
    assert refusal == (
        b"-ERR CONFIG SET failed (possibly related to argument 'maxmemory-policy') - argument(s) must be one of the "
        b"following: volatile-lru, volatile-lfu, volatile-random, volatile-ttl, allkeys-lru, allkeys-lfu, "
        b"allkeys-random, noeviction\r\n"
    )


def test_a_server_is_started_with_noeviction_whatever_the_order() -> None:
    session = session_under("LFU", maxmemory_policy="noeviction")
    assert not session.store.evicts
    assert value_of(session.server, "maxmemory-policy") == "noeviction"


def test_a_policy_among_the_settings_of_the_start_takes_the_place_of_the_stores() -> None:
    session = session_under("FIFO", settings={"maxmemory-policy": "volatile-ttl"})  # type: ignore[arg-type]
    assert session.store.policy.name == "VOLATILE-TTL"


# ---- maxmemory -----------------------------------------------------------------------------------------------------


def used(session: FakeSession) -> int:
    return int(session.ask("INFO memory").split(b"used_memory:")[1].split(b"\r\n")[0])


def test_maxmemory_is_the_arena_until_it_is_set_lower() -> None:
    session = session_under("LRU")
    assert session.ask("CONFIG GET maxmemory") == b"*2\r\n$9\r\nmaxmemory\r\n$7\r\n%d\r\n" % ARENA_BYTES
    assert session.ask("CONFIG SET maxmemory 100kb") == b"+OK\r\n"
    assert session.ask("CONFIG GET maxmemory").endswith(b"\r\n102400\r\n")
    assert b"\r\nmaxmemory:102400\r\nmaxmemory_human:100.00K\r\n" in session.ask("INFO memory")
    for value in (0, ARENA_BYTES):
        assert session.ask(f"CONFIG SET maxmemory {value}") == b"+OK\r\n"
        assert session.ask("CONFIG GET maxmemory").endswith(b"\r\n%d\r\n" % ARENA_BYTES)


def test_maxmemory_above_the_arena_is_refused_and_changes_nothing() -> None:
    session = session_under("LRU")
    refusal = session.ask(f"CONFIG SET maxmemory-policy allkeys-lfu maxmemory {ARENA_BYTES + 1}")
    assert refusal == (
        b"-ERR CONFIG SET failed (possibly related to argument 'maxmemory') - "
        b"argument must be at most %d, the memory that was set aside at the start\r\n" % ARENA_BYTES
    )
    assert session.store.policy.name == "LRU"


@pytest.mark.parametrize("name", [name for name in REDIS_POLICIES if name.startswith("allkeys")])
def test_what_is_stored_stays_below_maxmemory_and_evicts_for_it(name: str) -> None:
    session = session_under("LRU")
    session.ask(f"CONFIG SET maxmemory-policy {name} maxmemory 100kb")
    for number in range(1000):
        assert session.ask(f"SETEX key:{number} 1000 {'x' * 100}") == b"+OK\r\n"
        assert used(session) <= 100 * 1024
    assert session.store.stats.evicted > 500


@pytest.mark.parametrize("name", [name for name in REDIS_POLICIES if name.startswith("volatile")])
def test_under_a_volatile_policy_keys_without_an_end_are_all_there_and_then_writes_are_refused(name: str) -> None:
    session = session_under("LRU")
    session.ask(f"CONFIG SET maxmemory-policy {name} maxmemory 100kb")
    for number in range(150):
        session.ask(f"SETEX ending:{number} 1000 {'x' * 100}")
        assert session.ask(f"SET lasting:{number} {'x' * 100}") == b"+OK\r\n"
    assert session.ask(" ".join(["EXISTS", *(f"lasting:{number}" for number in range(150))])) == b":150\r\n"
    answers = [session.ask(f"SET lasting:{number} {'x' * 100}") for number in range(150, 350)]
    assert answers[-1] == b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
    assert session.ask("EXISTS lasting:0 lasting:149") == b":2\r\n"
    assert session.ask("DEL lasting:0 lasting:1") == b":2\r\n"
    assert session.ask("SET lasting:0 x") == b"+OK\r\n"


@pytest.mark.parametrize(
    "line", ["SET k v NX", "SET k v XX", "SET nope v XX", "SET k v GET", "SETNX k v", "SETNX nope v"]
)
def test_beyond_maxmemory_a_set_is_refused_whether_it_would_store_or_not(line: str) -> None:
    """As Redis, which looks at nothing but the command."""
    session = session_under("LRU")
    session.ask("SET k old")
    session.ask(f"SET large {'x' * 2000}")
    session.ask("CONFIG SET maxmemory-policy noeviction maxmemory 1kb")
    assert session.ask(line) == b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
    session.ask("CONFIG SET maxmemory-policy allkeys-lru")
    assert not session.ask(line).startswith(b"-"), "where others may leave for it"


def test_mset_is_refused_as_a_whole_where_only_a_part_of_it_fits() -> None:
    session = session_under("LRU")
    session.ask("CONFIG SET maxmemory-policy volatile-lru maxmemory 2kb")
    assert session.ask(f"MSET a {'x' * 700} b {'x' * 700} c {'x' * 700}").startswith(b"-OOM")
    assert session.ask("EXISTS a b c") == b":0\r\n"
    session.ask(f"SETEX ending 100 {'x' * 700}")
    assert session.ask(f"MSET a {'x' * 300} b {'x' * 300}") == b"+OK\r\n"
    assert session.ask("EXISTS a b ending") == b":2\r\n"


async def test_beyond_maxmemory_a_transaction_is_neither_queued_nor_run(live: LiveServer) -> None:
    client, other = await live.connect(), await live.connect()
    await client.say_hello()
    await client.ask("SET", "k", "1")
    await client.ask("MULTI")
    await client.ask("SET", "k", "2")
    assert await other.ask("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1") == b"+OK\r\n"
    assert await client.ask("EXEC") == b"-EXECABORT Transaction discarded because of: %b" % OOM.removeprefix(b"-")
    assert await client.ask("SET", "k", "2") == OOM, "also where the value is no longer than the old one"
    await client.ask("MULTI")
    assert await client.ask("GET", "k") == OOM
    assert (await client.ask("EXEC")).startswith(b"-EXECABORT")
    assert await client.get("k") == b"1"
    assert await client.ask("EXPIRE", "k", "100") == b":1\r\n"
    assert await client.ask("DEL", "k") == b":1\r\n"


# ---- OBJECT --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["small", "x" * 20_000])
def test_under_lfu_uses_are_counted_and_idle_times_are_not(value: str) -> None:
    session = session_under("LFU")
    session.ask(f"SET k {value}")
    for frequency in (5, 6, 7):  # Redis begins with 5
        assert session.ask("OBJECT FREQ k") == b":%d\r\n" % frequency
        session.ask("GET k")
    assert session.ask("OBJECT IDLETIME k") == NO_IDLE_TIME
    session.ask(f"SET k {value}")
    assert session.ask("OBJECT FREQ k") == b":9\r\n"  # who writes over it uses it
    session.ask("EXPIRE k 100")
    session.ask("CONFIG SET maxmemory-policy volatile-lfu")
    assert session.ask("OBJECT FREQ k") == b":9\r\n"
    session.ask("PERSIST k")
    assert session.ask("OBJECT FREQ k") == b":9\r\n"
    for _ in range(300):
        session.ask("GET k")
    assert session.ask("OBJECT FREQ k") == b":255\r\n"


def test_what_is_on_disk_alone_has_the_frequency_of_a_new_value() -> None:
    session = session_under("LFU")
    session.ask("SET k v")
    entry = session.store.find(b"k")
    assert entry is not None
    session.store.inline_policy.forget(entry)  # as when it leaves memory
    assert session.ask("OBJECT FREQ k") == b":5\r\n"


def test_which_of_the_two_is_an_error_changes_with_the_policy() -> None:
    session = session_under("LRU")
    session.ask("SET k v")
    for policy, counts in (("volatile-lfu", True), ("volatile-ttl", False), ("allkeys-lfu", True)):
        session.ask(f"CONFIG SET maxmemory-policy {policy}")
        assert (session.ask("OBJECT IDLETIME k") == NO_IDLE_TIME) is counts
        assert (session.ask("OBJECT FREQ k") == NO_FREQUENCY) is not counts


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
