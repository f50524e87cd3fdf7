"""INFO: the sections asked for, with figures that are those of the store and the server."""

from collections.abc import Iterator

import pytest

from kvredis.server.info import DEFAULT_SECTIONS, SECTIONS, human_bytes, report
from tests.server.fake_session import ARENA_BYTES, FakeSession, make_server


@pytest.fixture
def session() -> Iterator[FakeSession]:
    server = make_server()
    yield FakeSession(server)
    server.store.close()


def facts(session: FakeSession, line: str = "INFO everything") -> dict[str, str]:
    """Fields of a reply by name."""
    lines = session.ask(line).decode().split("\r\n")
    return dict(each.split(":", 1) for each in lines if ":" in each and not each.startswith("#"))


def titles(session: FakeSession, line: str) -> list[str]:
    return [each[2:].lower() for each in session.ask(line).decode().split("\r\n") if each.startswith("# ")]


def test_memory_is_what_the_values_hold_out_of_the_arena(session: FakeSession) -> None:
    before = facts(session)
    assert (before["used_memory"], before["maxmemory"]) == ("0", str(ARENA_BYTES))
    session.ask([b"SET", b"block", bytes(100_000)])
    session.ask("SET small v")
    after = facts(session)
    assert int(after["used_memory"]) == session.store.used_bytes >= 100_000
    assert after["memory_used"] == after["used_memory"]
    assert after["used_memory_dataset"] == after["used_memory"]
    assert int(after["used_memory_rss"]) > 1 << 20


def test_the_arena_is_described_in_the_section_of_its_own(session: FakeSession) -> None:
    kv = facts(session, "INFO kv")
    assert kv["tiers"] == "memory"
    assert kv["memory_page_kind"] == session.store.arena.pages
    assert kv["memory_page_size"] == "4096"
    assert kv["memory_page_locked"] == "no"
    assert kv["memory_capacity"] == str(ARENA_BYTES)


def test_hits_misses_keys_and_ends_are_counted(session: FakeSession) -> None:
    session.ask("SET a 1 EX 1000")
    session.ask("SET b 1")
    session.ask("SELECT 3")
    session.ask("SET c 1")
    session.ask("GET c")
    session.ask("GET nope")
    found = facts(session)
    assert (found["keyspace_hits"], found["keyspace_misses"]) == ("1", "1")
    keys, expires, avg_ttl = (field.split("=")[1] for field in found["db0"].split(","))
    assert (keys, expires) == ("2", "1")
    assert 900_000 < int(avg_ttl) <= 1_000_000
    assert found["db3"] == "keys=1,expires=0,avg_ttl=0"


def test_traffic_is_that_of_the_clients_that_are_here_and_of_those_that_are_gone(session: FakeSession) -> None:
    session.server.stats.net_input_bytes, session.server.stats.net_output_bytes = 1000, 2000
    session.input_bytes, session.output_bytes = 30, 40
    other = FakeSession(session.server, 2)
    other.input_bytes = 7
    found = facts(session, "INFO stats")
    assert (found["total_net_input_bytes"], found["total_net_output_bytes"]) == ("1037", "2040")


def test_command_and_error_counts_are_listed(session: FakeSession) -> None:
    from kvredis.server.stats import CommandStats

    stats = session.server.stats
    stats.commands["client|id"] = CommandStats(calls=4, nanoseconds=10_000, rejected_calls=1, failed_calls=2)
    stats.count_error(b"-ERR no\r\n")
    found = facts(session, "INFO commandstats errorstats")
    assert found["cmdstat_client|id"] == "calls=4,usec=10,usec_per_call=2.50,rejected_calls=1,failed_calls=2"
    assert found["errorstat_ERR"] == "count=1"


def test_sections_are_given_once_in_their_order_whatever_is_asked(session: FakeSession) -> None:
    assert titles(session, "INFO KEYSPACE server Keyspace nope") == ["server", "keyspace"]
    assert titles(session, "INFO") == titles(session, "INFO default") == list(DEFAULT_SECTIONS)
    assert titles(session, "INFO all") == titles(session, "INFO everything") == list(SECTIONS)
    assert titles(session, "INFO commandstats default")[:2] == ["server", "clients"]
    assert session.ask("INFO nope") == b"$0\r\n\r\n"


def test_a_blank_line_stands_between_two_sections_only(session: FakeSession) -> None:
    assert report(session.server, ["cluster", "modules"]) == "# Modules\r\n\r\n# Cluster\r\ncluster_enabled:0\r\n"


def test_the_text_is_verbatim_in_the_newer_protocol(session: FakeSession) -> None:
    session.speak(3)
    assert session.ask("INFO cluster") == b"=34\r\ntxt:# Cluster\r\ncluster_enabled:0\r\n\r\n"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1.00K"), (1026048, "1002.00K"), (5 << 30, "5.00G"), (1 << 63, "8192.00P")],
)
def test_sizes_for_people_are_written_as_redis_writes_them(nbytes: int, text: str) -> None:
    assert human_bytes(nbytes) == text
