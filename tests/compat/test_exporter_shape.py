"""What Prometheus' redis_exporter and RedisInsight ask, command by command, and the shapes that they parse.

A field that is missing or no number is a hole in a dashboard, and some exporters drop everything for one wrong answer.
"""

import re
from collections.abc import Iterator
from typing import Any

import hiredis
import pytest

from tests.compat.conftest import RunningServer
from tests.compat.wire import CommandLine, Wire

NUMBERS = """
    uptime_in_seconds process_id connected_clients blocked_clients tracking_clients maxclients pubsub_clients
    client_recent_max_output_buffer client_recent_max_input_buffer clients_in_timeout_table total_blocking_keys
    allocator_active allocator_allocated allocator_resident allocator_frag_ratio allocator_frag_bytes
    allocator_rss_ratio allocator_rss_bytes used_memory used_memory_rss used_memory_peak used_memory_lua
    used_memory_vm_total used_memory_overhead used_memory_startup used_memory_dataset used_memory_scripts
    number_of_cached_scripts maxmemory mem_fragmentation_ratio mem_fragmentation_bytes mem_clients_slaves
    mem_clients_normal mem_cluster_links mem_aof_buffer mem_replication_backlog mem_total_replication_buffers
    expired_stale_perc mem_not_counted_for_evict lazyfree_pending_objects lazyfreed_objects active_defrag_running
    migrate_cached_sockets active_defrag_hits active_defrag_misses active_defrag_key_hits active_defrag_key_misses
    expired_time_cap_reached_count loading async_loading rdb_changes_since_last_save rdb_bgsave_in_progress
    rdb_last_save_time rdb_last_bgsave_time_sec rdb_current_bgsave_time_sec rdb_saves rdb_last_cow_size
    rdb_last_load_keys_expired rdb_last_load_keys_loaded aof_enabled aof_rewrite_in_progress aof_rewrite_scheduled
    aof_last_rewrite_time_sec aof_current_rewrite_time_sec aof_last_cow_size module_fork_in_progress
    module_fork_last_cow_size current_cow_peak current_cow_size current_fork_perc current_save_keys_processed
    current_save_keys_total pubsub_channels pubsub_patterns pubsubshard_channels latest_fork_usec
    tracking_total_keys tracking_total_items tracking_total_prefixes connected_slaves repl_backlog_size
    repl_backlog_active repl_backlog_first_byte_offset repl_backlog_histlen master_repl_offset second_repl_offset
    slave_expires_tracked_keys sync_full sync_partial_ok sync_partial_err total_connections_received
    total_commands_processed rejected_connections total_net_input_bytes total_net_output_bytes
    instantaneous_ops_per_sec instantaneous_input_kbps instantaneous_output_kbps expired_keys evicted_keys
    evicted_clients total_eviction_exceeded_time current_eviction_exceeded_time expire_cycle_cpu_milliseconds
    keyspace_hits keyspace_misses unexpected_error_replies total_error_replies total_reads_processed
    total_writes_processed io_threaded_reads_processed io_threaded_writes_processed acl_access_denied_auth
    acl_access_denied_cmd acl_access_denied_key acl_access_denied_channel used_cpu_sys used_cpu_user
    used_cpu_sys_children used_cpu_user_children total_system_memory cluster_enabled io_threads_active tcp_port
"""
"""Fields of INFO that become numbers in a dashboard."""

WORDS = {
    "role": "master",
    "redis_mode": "standalone",
    "maxmemory_policy": "allkeys-lru",
    "rdb_last_bgsave_status": "ok",
    "aof_last_bgrewrite_status": "ok",
    "aof_last_write_status": "ok",
}
SECTIONS = """
    Server Clients Memory Persistence Stats Replication CPU Modules Commandstats Errorstats Latencystats Cluster
    Keyspace
"""


class Asker:
    """A connection whose replies are Python objects."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._reader = hiredis.Reader(encoding="utf-8")

    def __call__(self, line: CommandLine) -> Any:
        """The reply to one command."""
        self._reader.feed(self._wire.ask(line))
        return self._reader.gets()


@pytest.fixture
def ask(kvredis: RunningServer) -> Iterator[Asker]:
    """A connection to a server with a little in it and a little done."""
    with kvredis.connect() as wire:
        asker = Asker(wire)
        asker("CONFIG SET slowlog-log-slower-than 0")
        asker("SET k value EX 1000")
        asker("SET l 1")
        asker("GET k")
        asker("GET nope")
        asker("LPUSH l x")
        asker("SELECT 9")
        asker("SET m 1")
        asker("SELECT 0")
        yield asker
        asker("CONFIG SET slowlog-log-slower-than 10000")


def fields_of(text: str) -> dict[str, str]:
    """The fields of an INFO text."""
    return dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line and not line.startswith("#"))


@pytest.mark.parametrize("line", ["INFO ALL", "INFO all", "INFO everything"])
def test_info_has_every_section_and_every_number(line: str, ask: Asker) -> None:
    text = ask(line)
    titles = re.findall(r"(?m)^# (\w+)\r$", text)
    assert [title for title in titles if title in SECTIONS.split()] == SECTIONS.split()
    fields = fields_of(text)
    missing = [name for name in NUMBERS.split() if name not in fields]
    assert not missing
    for name in NUMBERS.split():
        float(fields[name].rstrip("%"))
    assert {name: fields.get(name) for name in WORDS} == WORDS
    assert re.fullmatch(r"\d+\.\d+\.\d+", fields["redis_version"])
    assert re.fullmatch(r"[0-9a-f]{40}", fields["run_id"])
    assert fields["os"]
    assert int(fields["keyspace_hits"]) >= 1
    assert int(fields["keyspace_misses"]) >= 1


def test_lines_with_several_figures_have_the_exporters_form(ask: Asker) -> None:
    fields = fields_of(ask("INFO ALL"))
    keyspace = re.compile(r"keys=(\d+),expires=(\d+),avg_ttl=(\d+)")
    first, ninth = (keyspace.match(fields[name]) for name in ("db0", "db9"))
    assert first is not None
    assert ninth is not None
    assert first.groups()[:2] == ("2", "1")
    assert ninth.groups() == ("1", "0", "0")
    stats = r"calls=(\d+),usec=(\d+),usec_per_call=(\d+\.\d\d),rejected_calls=(\d+),failed_calls=(\d+)"
    for name in ("cmdstat_get", "cmdstat_set", "cmdstat_config|set"):
        assert re.fullmatch(stats, fields[name]), fields[name]
    assert re.fullmatch(r"count=\d+", fields["errorstat_ERR"])
    percentiles = r"p50=\d+\.\d+,p99=\d+\.\d+,p99\.9=\d+\.\d+"
    assert re.fullmatch(percentiles, fields["latency_percentiles_usec_get"])


def test_configuration_is_read_as_a_whole(ask: Asker) -> None:
    flat = ask("CONFIG GET *")
    settings = dict(zip(flat[::2], flat[1::2], strict=True))
    assert settings["databases"] == "16"  # anything but a number, and the whole scrape is dropped
    for name in ("maxmemory", "maxclients", "timeout", "slowlog-max-len", "latency-monitor-threshold", "hz"):
        int(settings[name])
    limits = settings["client-output-buffer-limit"].split(" ")
    assert [limits[at] for at in (0, 4, 8)] == ["normal", "slave", "pubsub"]
    assert all(limit.isdigit() for at, limit in enumerate(limits) if at % 4)
    assert settings["appendonly"] == "no"
    assert settings["save"] == ""


def test_slow_log_and_latencies_have_their_shapes(ask: Asker) -> None:
    assert ask("SLOWLOG LEN") > 0
    ((number, at_s, duration_us, words, address, name),) = ask("SLOWLOG GET 1")
    assert min(number, duration_us) >= 0
    assert at_s > 1_600_000_000
    assert words == ["SLOWLOG", "LEN"]
    assert address
    assert name == ""
    assert isinstance(ask("LATENCY LATEST"), list)
    histograms = ask("LATENCY HISTOGRAM")
    told = dict(zip(histograms[::2], histograms[1::2], strict=True))
    calls_word, calls, buckets_word, buckets = told["get"]
    assert (calls_word, buckets_word) == ("calls", "histogram_usec")
    assert calls >= 2
    assert buckets[::2] == sorted(buckets[::2])
    assert buckets[1::2] == sorted(buckets[1::2])
    assert buckets[-1] == calls


def test_each_client_is_a_line_of_fields(ask: Asker) -> None:
    for line in ask("CLIENT LIST").rstrip("\n").split("\n"):
        fields = dict(word.split("=", 1) for word in line.split(" "))
        assert ":" in fields["addr"]
        for name in ("id", "age", "idle", "db", "sub", "psub", "multi", "qbuf", "omem", "tot-mem", "resp"):
            int(fields[name])
        assert fields["flags"]
        assert fields["cmd"]
        assert fields["user"] == "default"


def test_the_exporter_looks_at_single_keys(ask: Asker) -> None:
    assert ask("SELECT 0") == "OK"
    cursor, keys = ask("SCAN 0 MATCH k COUNT 1000")
    assert (cursor, keys) == ("0", ["k"])
    assert ask("TYPE k") == "string"
    assert isinstance(ask("PFCOUNT k"), hiredis.ReplyError)  # so it is no HyperLogLog, and STRLEN is asked
    assert ask("STRLEN k") == 5
    assert ask("GET k") == "value"
    assert ask("MEMORY USAGE k") > 0
    assert ask("DBSIZE") == 2


def test_what_does_not_exist_is_an_error_that_is_understood(ask: Asker) -> None:
    for line in ("CLUSTER INFO", "CLUSTER NODES", "SENTINEL MASTERS"):
        assert isinstance(ask(line), hiredis.ReplyError)
    assert "cluster support disabled" in str(ask("CLUSTER INFO"))
    assert ask("MODULE LIST") == []
    assert ask("COMMAND INFO FT._LIST JSON.GET TS.ADD BF.ADD GRAPH.QUERY") == [None] * 5


def test_redisinsight_browses_the_keys(ask: Asker) -> None:
    assert ask("CONFIG GET databases") == ["databases", "16"]
    assert "redis_version" in fields_of(ask("INFO server"))
    assert "db0" in fields_of(ask("INFO keyspace"))
    cursor, keys = ask("SCAN 0 MATCH * COUNT 10000 TYPE string")
    assert (cursor, sorted(keys)) == ("0", ["k", "l"])
    assert ask("SCAN 0 MATCH * COUNT 10000 TYPE hash") == ["0", []]
    assert ask("TTL k") == 1000
    assert ask("TTL l") == -1
    assert ask("MEMORY USAGE k SAMPLES 0") > 0
    assert ask("GETRANGE k 0 4999") == "value"
    assert ask("OBJECT ENCODING k") == "embstr"
    assert len(ask("SLOWLOG GET 50")) > 5
    assert ask("CONFIG GET slowlog*") == ["slowlog-log-slower-than", "0", "slowlog-max-len", "128"]
    assert ask("PUBSUB CHANNELS *") == []
    assert ask("PUBSUB SHARDCHANNELS") == []
    assert ask("ACL WHOAMI") == "default"


def test_a_user_who_may_not_is_told_so_with_the_prefix_that_tools_look_for(kvredis: RunningServer, ask: Asker) -> None:
    try:
        assert ask("ACL SETUSER viewer on >secret ~k* +@read -@dangerous") == "OK"
        with kvredis.connect() as wire:
            viewer = Asker(wire)
            assert viewer("AUTH viewer secret") == "OK"
            assert viewer("GET k") == "value"
            for line in ("SET k x", "GET l", "INFO", "CONFIG GET *", "CLIENT LIST", "SLOWLOG GET", "KEYS *"):
                refusal = viewer(line)
                assert isinstance(refusal, hiredis.ReplyError), line
                assert str(refusal).startswith("NOPERM "), line
    finally:
        ask("ACL DELUSER viewer")
