"""INFO: the sections asked for, with figures that are those of the store and the server."""

import time

import pytest

from kvredis.server.commands.info import DEFAULT_SECTIONS, SECTIONS, _listeners, human_bytes, report
from kvredis.server.metrics.stats import CommandStats, Traffic
from tests.server.fake_session import ARENA_BYTES, FakeSession


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


def test_the_peak_is_the_most_that_values_ever_held(session: FakeSession) -> None:
    session.ask([b"SET", b"block", bytes(1 << 20)])
    high = facts(session)["used_memory"]
    session.ask("DEL block")
    found = facts(session)
    assert (found["used_memory"], found["used_memory_peak"]) == ("0", high)
    assert found["used_memory_peak_human"].startswith("1.0")
    assert found["used_memory_peak_perc"] == "0.00%"
    session.ask("CONFIG RESETSTAT")
    assert facts(session)["used_memory_peak"] == "0"


def test_the_arena_is_counted_in_blocks_of_which_every_one_is_full_or_free(session: FakeSession) -> None:
    empty = facts(session, "INFO kv")
    assert (empty["full"], empty["free"]) == ("0", empty["num_blocks"])
    assert int(empty["block_size"]) * int(empty["num_blocks"]) == ARENA_BYTES
    session.ask([b"SET", b"block", bytes(100_000)])
    used = facts(session, "INFO kv")
    assert int(used["full"]) * int(used["block_size"]) == session.store.live_bytes >= 100_000
    assert int(used["full"]) + int(used["free"]) == int(used["num_blocks"])


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
    session.server.stats.gone = {"tcp": Traffic(600, 1500), "unix": Traffic(400, 500)}
    session.input_bytes, session.output_bytes = 30, 40
    other = FakeSession(session.server, 2)
    other.input_bytes = 7
    found = facts(session, "INFO stats")
    assert (found["total_net_input_bytes"], found["total_net_output_bytes"]) == ("1037", "2040")


def test_command_and_error_counts_are_listed(session: FakeSession) -> None:
    stats = session.server.stats
    stats.commands["client|id"] = CommandStats(calls=4, nanoseconds=10_000, rejected_calls=1, failed_calls=2)
    stats.count_error(b"-ERR no\r\n")
    found = facts(session, "INFO commandstats errorstats")
    assert found["cmdstat_client|id"] == "calls=4,usec=10,usec_per_call=2.50,rejected_calls=1,failed_calls=2"
    assert found["errorstat_ERR"] == "count=1"


def test_percentiles_are_told_for_every_command_that_has_run(session: FakeSession) -> None:
    record = session.server.stats.command("get")
    record.observe(99, 99 * 1500)
    record.observe(1, 1_500_000)
    session.server.stats.command("never").rejected_calls = 1
    found = facts(session, "INFO latencystats")
    assert list(found) == ["latency_percentiles_usec_get"]
    shares = dict(part.split("=") for part in found["latency_percentiles_usec_get"].split(","))
    assert list(shares) == ["p50", "p99", "p99.9"]
    assert 1.0 < float(shares["p50"]) < 2.1
    assert 1000 < float(shares["p99.9"]) < 2100
    session.ask("CONFIG SET latency-tracking-info-percentiles 100")
    assert facts(session, "INFO latencystats")["latency_percentiles_usec_get"].startswith("p100=")
    session.ask("CONFIG SET latency-tracking no")
    assert session.ask("INFO latencystats") == b"$16\r\n# Latencystats\r\n\r\n"


def test_what_clients_wait_and_listen_for_is_counted(session: FakeSession) -> None:
    session.ask("WATCH a b")
    session.ask("SUBSCRIBE news")
    session.ask("PSUBSCRIBE n*")
    session.ask("SSUBSCRIBE shard")
    other = FakeSession(session.server, 2)
    other.speak(3)
    other.ask("CLIENT TRACKING ON BCAST PREFIX x PREFIX y")
    found = facts(session)
    counted = ("watching_clients", "total_watched_keys", "pubsub_clients", "tracking_clients", "blocked_clients")
    assert [found[name] for name in counted] == ["1", "2", "1", "1", "0"]
    summed = ("pubsub_channels", "pubsub_patterns", "pubsubshard_channels", "tracking_total_prefixes")
    assert [found[name] for name in summed] == ["1", "1", "1", "2"]


def test_denied_commands_and_wrong_passwords_are_counted_by_reason(session: FakeSession) -> None:
    session.ask("AUTH default wrong")
    session.ask("AUTH nobody wrong")
    assert facts(session)["acl_access_denied_auth"] == "1"  # the default user needs no password, so any is right
    session.ask("CONFIG RESETSTAT")
    assert facts(session)["acl_access_denied_auth"] == "0"


def test_rates_are_the_mean_of_the_last_samples(session: FakeSession) -> None:
    stats = session.server.stats
    for tick in range(17):
        stats.ticks += 1
        stats.commands_processed = tick * 100
        stats.sample(1 + tick / 10, tick * 1024 * 100, tick * 1024 * 200, reads=tick * 4)
    found = facts(session, "INFO stats")
    assert found["eventloop_cycles"] == "17"  # the session of this test reads nothing
    assert found["instantaneous_eventloop_cycles_per_sec"] == "50"
    assert found["instantaneous_ops_per_sec"] == "1000"
    assert (found["instantaneous_input_kbps"], found["instantaneous_output_kbps"]) == ("1000.00", "2000.00")
    session.ask("CONFIG RESETSTAT")
    assert facts(session, "INFO stats")["instantaneous_ops_per_sec"] == "0"


def test_the_event_loops_time_is_that_of_its_thread_and_of_the_commands_in_it(session: FakeSession) -> None:
    session.server.stats.command("get").observe(3, 7_000_000)
    before = int(facts(session, "INFO stats")["eventloop_duration_sum"])
    while time.thread_time_ns() < session.server.stats.loop_from_ns + 1000 * (before + 2000):
        pass
    found = facts(session, "INFO stats")
    assert int(found["eventloop_duration_sum"]) >= before + 2000
    assert found["eventloop_duration_cmd_sum"] == "7000"


def test_saves_are_counted_though_there_is_nothing_to_save(session: FakeSession) -> None:
    session.ask("SAVE")
    session.ask("BGSAVE")
    found = facts(session, "INFO persistence")
    assert (found["rdb_saves"], found["rdb_last_save_time"]) == ("2", session.ask("LASTSAVE")[1:-2].decode())


def test_keys_with_an_end_are_counted_whether_they_are_few_or_many(session: FakeSession) -> None:
    for number in range(100):
        session.ask(f"SET key{number} v")
    for number in range(3):
        session.ask(f"EXPIRE key{number} 1000")
        session.ask(f"EXPIRE key{number} 500")
    session.ask("PERSIST key0")
    assert ",expires=2,avg_ttl=" in facts(session)["db0"] + "="
    for number in range(90):
        session.ask(f"EXPIRE key{number} 500")
    found = facts(session)["db0"]
    assert found.startswith("keys=100,expires=90,avg_ttl=")
    assert 490_000 < int(found.rpartition("=")[2]) <= 500_000


def test_each_kind_of_socket_has_its_line(session: FakeSession) -> None:
    told = ["127.0.0.1:6379", "[::1]:6379", "tls:127.0.0.1:6380", "unix:/tmp/kv.sock"]
    assert [*_listeners(told)] == [
        ("listener0", "name=tcp,bind=127.0.0.1,bind=::1,port=6379"),
        ("listener1", "name=tls,bind=127.0.0.1,port=6380"),
        ("listener2", "name=unix,bind=/tmp/kv.sock"),
    ]


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


def test_what_became_of_every_set_adds_up(session: FakeSession) -> None:
    for line in ("SET a 1", "SET a 2", "SETNX a 3", "SETNX b 1", "SET b 2 NX", "MSET c 1 c 2 d 1", "MSETNX d 1 e 1"):
        session.ask(line)
    session.ask([b"SET", b"large", bytes(2 * session.store.arena.nbytes)])
    lines = [line for line in session.ask("INFO kv").split(b"\r\n") if line.startswith(b"set_")]
    figures = {name: int(value) for name, _, value in (line.partition(b":") for line in lines)}
    assert figures == {
        b"set_total": 11,
        b"set_created": 4,
        b"set_forced": 1,
        b"set_duplicate": 1,
        b"set_existed": 4,
        b"set_error": 1,
    }
