"""INFO: Redis' sections under Redis' field names, with this server's own figures in them, and `# Kv`.

Tools drop a whole scrape over one missing field, so what cannot happen here (forks, replicas, scripts) is reported as
Redis reports it when it has not happened. Everything else is measured.

To add a field: into the function of its section (SECTIONS lists them). The fields of `# Kv` are the figures of
metrics/metrics.py, which /metrics and the page show too.
"""

from __future__ import annotations

import os
import platform
import resource
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from kvredis import __version__
from kvredis.server.client.blocked import Reason
from kvredis.server.config.settings import value_of
from kvredis.server.context import Caller, Context
from kvredis.server.metrics.metrics import fields
from kvredis.server.protocol.replies import Reply, verbatim
from kvredis.storage.memory.allocator import GRAIN_BYTES
from kvredis.storage.memory.copy import KIND

from .connection import REDIS_VERSION
from .memory import figures as memory_figures
from .memory import machine_bytes, resident_bytes, resident_peak_bytes
from .registry import command

# ---- sections --------------------------------------------------------------------------------------------------------
#
# The sections of INFO that say what the server is and holds.
#
# maxmemory is the arena, used_memory what values hold in it and beside it, used_memory_rss the process. Redis' figures
# of its allocator are those of the arena: commands/memory.py says how.


Field = tuple[str, object]
Fields = Iterable[Field]


def human_bytes(nbytes: int) -> str:
    """A size as Redis prints it for people: 1002.00K, 5.00G."""
    if nbytes < 1024:
        return f"{nbytes}B"
    power = min((nbytes.bit_length() - 1) // 10, 5)
    return f"{nbytes / 1024**power:.2f}{' KMGTP'[power]}"


def zeros(*names: str) -> Fields:
    """Fields of what does not happen here."""
    return dict.fromkeys(names, 0).items()


def nothing(server: Context) -> Fields:
    """A section that has only its title."""
    return ()


def server_facts(server: Context) -> Iterator[Field]:
    """What runs, and where."""
    uptime_s = int(server.uptime_s)
    yield "redis_version", REDIS_VERSION
    yield "redis_git_sha1", "00000000"
    yield "redis_git_dirty", 0
    yield "redis_build_id", 0
    yield "redis_mode", "standalone" if server.cluster is None else "cluster"
    yield "server_name", "kvredis"
    yield "kvredis_version", __version__
    yield "os", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "arch_bits", 64 if sys.maxsize > 2**32 else 32
    yield "monotonic_clock", "POSIX clock_gettime"
    yield "multiplexing_api", "epoll" if hasattr(select, "epoll") else "select"
    yield "atomicvar_api", "none"
    yield "gcc_version", platform.python_compiler().removeprefix("GCC ")  # what Python was made with
    yield "python_version", platform.python_version()
    yield "event_loop", "uvloop" if server.transport_lends else "asyncio"
    yield "process_id", os.getpid()
    yield "process_supervised", "no"
    yield "run_id", server.run_id
    yield "tcp_port", server.tcp_port
    yield "server_time_usec", time.time_ns() // 1000
    yield "uptime_in_seconds", uptime_s
    yield "uptime_in_days", uptime_s // 86400
    yield "hz", value_of(server, "hz")
    yield "configured_hz", value_of(server, "hz")
    yield "lru_clock", int(time.time()) & 0xFFFFFF
    yield "executable", sys.executable
    yield "config_file", server.options.config_file or ""
    yield "io_threads_active", int(bool(server.io_pool.under_way))
    yield from _listeners(server.addresses)


def _listeners(addresses: list[str]) -> Iterator[Field]:
    """`listener0:name=tcp,bind=127.0.0.1,port=6379`: one line for each kind of socket."""
    kinds: dict[str, list[str]] = {}
    for address in addresses:
        kind, _, rest = address.partition(":")
        kind, rest = (kind, rest) if kind in ("tls", "unix") else ("tcp", address)
        kinds.setdefault(kind, []).append(rest)
    for number, (kind, places) in enumerate(kinds.items()):
        if kind == "unix":
            yield f"listener{number}", f"name=unix,bind={places[0]}"
            continue
        binds = "".join(f",bind={place.rpartition(':')[0].strip('[]')}" for place in places)
        yield f"listener{number}", f"name={kind}{binds},port={places[0].rpartition(':')[2]}"


def clients(server: Context) -> Iterator[Field]:
    """Who is connected, and what for."""
    sessions = server.sessions.values()
    yield "connected_clients", len(server.sessions)
    yield "cluster_connections", 0
    yield "maxclients", server.maxclients
    yield "client_recent_max_input_buffer", max((each.pending_bytes for each in sessions), default=0)
    yield "client_recent_max_output_buffer", max((each.unsent_bytes for each in sessions), default=0)
    yield "blocked_clients", len(server.blocked.timeouts) + server.blocked.count(Reason.PAUSE)
    yield "tracking_clients", len(server.tracking.clients)
    yield "pubsub_clients", sum(each.subscriptions > 0 for each in sessions)
    yield "watching_clients", sum(bool(each.watching) for each in sessions)
    yield "clients_in_timeout_table", len(server.blocked.timeouts)
    yield "total_watched_keys", len(server.watchers)
    yield "total_blocking_keys", server.expected.waited_for
    yield "total_blocking_keys_on_nokey", 0
    yield "expected_keys", len(server.expected)


def memory(server: Context) -> Iterator[Field]:
    """What values hold, what the process has, and how full the arena is."""
    store = server.store
    told = memory_figures(server)
    used, peak, capacity = told["total.allocated"], told["peak.allocated"], store.limit_bytes
    assert isinstance(used, int)
    assert isinstance(peak, int)
    dataset = store.live_bytes + store.inline_bytes
    rss, machine = resident_bytes(), machine_bytes()
    yield "used_memory", used
    yield "used_memory_human", human_bytes(used)
    yield "used_memory_rss", rss
    yield "used_memory_rss_human", human_bytes(rss)
    yield "used_memory_rss_peak", resident_peak_bytes()
    yield "used_memory_peak", peak
    yield "used_memory_peak_human", human_bytes(peak)
    yield "used_memory_peak_perc", f"{100 * used / peak if peak else 0:.2f}%"
    yield "used_memory_overhead", used - dataset
    yield "used_memory_startup", 0
    yield "used_memory_dataset", dataset
    yield "used_memory_dataset_perc", f"{100 * dataset / used if used else 0:.2f}%"
    for name in ("allocated", "active", "resident"):
        yield f"allocator_{name}", told[f"allocator.{name}"]
    yield "total_system_memory", machine
    yield "total_system_memory_human", human_bytes(machine)
    yield "used_memory_lua", 0
    yield "used_memory_vm_eval", 0
    yield "used_memory_lua_human", "0B"
    yield from zeros("used_memory_scripts_eval", "number_of_cached_scripts", "number_of_functions")
    yield from zeros("number_of_libraries", "used_memory_vm_functions", "used_memory_vm_total")
    yield "used_memory_vm_total_human", "0B"
    yield from zeros("used_memory_functions", "used_memory_scripts")
    yield "used_memory_scripts_human", "0B"
    yield "maxmemory", capacity
    yield "maxmemory_human", human_bytes(capacity)
    yield "maxmemory_policy", value_of(server, "maxmemory-policy")
    for field, name in (
        ("allocator_frag_ratio", "allocator-fragmentation.ratio"),
        ("allocator_frag_bytes", "allocator-fragmentation.bytes"),
        ("allocator_rss_ratio", "allocator-rss.ratio"),
        ("allocator_rss_bytes", "allocator-rss.bytes"),
        ("rss_overhead_ratio", "rss-overhead.ratio"),
        ("rss_overhead_bytes", "rss-overhead.bytes"),
        ("mem_fragmentation_ratio", "fragmentation"),
        ("mem_fragmentation_bytes", "fragmentation.bytes"),
    ):
        yield field, f"{told[name]:.2f}" if isinstance(told[name], float) else told[name]
    yield from zeros("mem_not_counted_for_evict", "mem_replication_backlog", "mem_total_replication_buffers")
    yield "mem_clients_slaves", 0
    yield "mem_clients_normal", told["clients.normal"]
    yield from zeros("mem_cluster_links", "mem_aof_buffer")
    yield "mem_allocator", store.arena.pages
    yield from zeros("active_defrag_running", "lazyfree_pending_objects", "lazyfreed_objects")


def persistence(server: Context) -> Iterator[Field]:
    """What was saved, where there is a disk tier; commands/persistence.py says what the words of Redis mean here."""
    tiering = server.store.tiering
    yield from zeros("loading", "async_loading", "current_cow_peak", "current_cow_size", "current_cow_size_age")
    yield "current_fork_perc", "0.00"
    yield from zeros("current_save_keys_processed", "current_save_keys_total")
    yield "rdb_changes_since_last_save", len(server.store.unsaved)
    yield "rdb_bgsave_in_progress", int(server.stats.saving)
    yield "rdb_last_save_time", server.stats.last_save_s
    yield "rdb_last_bgsave_status", "err" if server.stats.last_save_failed else "ok"
    yield "rdb_last_bgsave_time_sec", -1
    yield "rdb_current_bgsave_time_sec", -1
    yield "rdb_saves", server.stats.saves
    yield from zeros("rdb_last_cow_size", "rdb_last_load_keys_expired")
    yield "rdb_last_load_keys_loaded", 0 if tiering is None else tiering.disk.stats.recovered
    yield from zeros("aof_enabled", "aof_rewrite_in_progress", "aof_rewrite_scheduled")
    yield "aof_last_rewrite_time_sec", -1
    yield "aof_current_rewrite_time_sec", -1
    yield "aof_last_bgrewrite_status", "ok"
    yield from zeros("aof_rewrites", "aof_rewrites_consecutive_failures")
    yield "aof_last_write_status", "ok"
    yield from zeros("aof_last_cow_size", "module_fork_in_progress", "module_fork_last_cow_size")


def replication(server: Context) -> Fields:
    """A master without replicas."""
    return {
        "role": "master",
        "connected_slaves": 0,
        "master_failover_state": "no-failover",
        "master_replid": server.run_id,
        "master_replid2": "0" * 40,
        "master_repl_offset": 0,
        "second_repl_offset": -1,
        "repl_backlog_active": 0,
        "repl_backlog_size": value_of(server, "repl-backlog-size"),
        "repl_backlog_first_byte_offset": 0,
        "repl_backlog_histlen": 0,
    }.items()


def cpu(server: Context) -> Iterator[Field]:
    """Seconds of processor time, the kernel's account."""
    whose_suffix = (
        (resource.RUSAGE_SELF, ""),
        (resource.RUSAGE_CHILDREN, "_children"),
        (resource.RUSAGE_THREAD, "_main_thread"),
    )
    for whose, suffix in whose_suffix:
        usage = resource.getrusage(whose)
        yield f"used_cpu_sys{suffix}", f"{usage.ru_stime:.6f}"
        yield f"used_cpu_user{suffix}", f"{usage.ru_utime:.6f}"


def cluster(server: Context) -> Fields:
    """Whether this is a node of one; CLUSTER INFO says more."""
    return [("cluster_enabled", int(server.cluster is not None))]


# ---- counters --------------------------------------------------------------------------------------------------------
#
# The sections of INFO that count: what has happened since the start or CONFIG RESETSTAT, and what lies where.


def stats(server: Context) -> Iterator[Field]:
    """Redis' counters; `handler_exceptions` is our own and should be 0 for ever."""
    counted, store = server.stats, server.store.stats
    traffic = server.traffic().values()
    yield "total_connections_received", counted.connections_received
    yield "total_commands_processed", counted.commands_processed
    yield "instantaneous_ops_per_sec", round(counted.operations.per_second)
    yield "total_net_input_bytes", sum(each.input_bytes for each in traffic)
    yield "total_net_output_bytes", sum(each.output_bytes for each in traffic)
    yield from zeros("total_net_repl_input_bytes", "total_net_repl_output_bytes")
    yield "instantaneous_input_kbps", f"{counted.input_rate.per_second / 1024:.2f}"
    yield "instantaneous_output_kbps", f"{counted.output_rate.per_second / 1024:.2f}"
    yield "instantaneous_input_repl_kbps", "0.00"
    yield "instantaneous_output_repl_kbps", "0.00"
    yield "rejected_connections", counted.connections_rejected
    yield from zeros("sync_full", "sync_partial_ok", "sync_partial_err")
    yield "expired_keys", store.expired
    yield "expired_stale_perc", "0.00"
    yield from zeros("expired_time_cap_reached_count", "expire_cycle_cpu_milliseconds")
    yield "evicted_keys", store.evicted
    yield "evicted_clients", counted.evicted_clients
    yield from zeros("evicted_scripts", "total_eviction_exceeded_time", "current_eviction_exceeded_time")
    yield "keyspace_hits", store.hits
    yield "keyspace_misses", store.misses
    yield "pubsub_channels", len(server.pubsub.channels)
    yield "pubsub_patterns", len(server.pubsub.patterns)
    yield "pubsubshard_channels", len(server.pubsub.shard_channels)
    yield from zeros("latest_fork_usec", "total_forks", "migrate_cached_sockets", "slave_expires_tracked_keys")
    yield from zeros("active_defrag_hits", "active_defrag_misses", "active_defrag_key_hits")
    yield from zeros("active_defrag_key_misses", "total_active_defrag_time", "current_active_defrag_time")
    yield "tracking_total_keys", server.tracking.total_keys
    yield "tracking_total_items", server.tracking.total_items
    yield "tracking_total_prefixes", len(server.tracking.prefixes)
    yield "unexpected_error_replies", 0
    yield "total_error_replies", counted.error_replies
    yield "dump_payload_sanitizations", 0
    yield "total_reads_processed", sum(each.reads for each in traffic)
    yield "total_writes_processed", sum(each.writes for each in traffic)
    yield "io_threaded_reads_processed", counted.threaded_reads
    yield "io_threaded_writes_processed", counted.threaded_writes
    yield "client_query_buffer_limit_disconnections", counted.query_limit_disconnections
    yield "client_output_buffer_limit_disconnections", counted.output_limit_disconnections
    yield from zeros("reply_buffer_shrinks", "reply_buffer_expands")
    cycles, work = counted.loop_cycles.per_second, counted.loop_work.per_second
    yield "eventloop_cycles", counted.ticks + server.reads  # a turn of the loop that does nothing is not counted
    yield "eventloop_duration_sum", counted.loop_work_us
    yield "eventloop_duration_cmd_sum", sum(each.nanoseconds for each in counted.commands.values()) // 1000
    yield "instantaneous_eventloop_cycles_per_sec", round(cycles)
    yield "instantaneous_eventloop_duration_usec", round(work / cycles) if cycles else 0
    denials = server.acl.log.denials
    for field, reason in (("auth", "auth"), ("cmd", "command"), ("key", "key"), ("channel", "channel")):
        yield f"acl_access_denied_{field}", denials[reason]
    yield "handler_exceptions", counted.handler_exceptions


def commandstats(server: Context) -> Iterator[Field]:
    """A line for each command that was called or refused."""
    for name, record in list(server.stats.commands.items()):
        usec = record.nanoseconds // 1000
        each = usec / record.calls if record.calls else 0.0
        yield (
            f"cmdstat_{name}",
            f"calls={record.calls},usec={usec},usec_per_call={each:.2f},"
            f"rejected_calls={record.rejected_calls},failed_calls={record.failed_calls}",
        )


def errorstats(server: Context) -> Iterator[Field]:
    """Errors that were answered, by their first word."""
    for code, count in sorted(server.stats.errors.items()):
        yield f"errorstat_{code}", f"count={count}"


def latencystats(server: Context) -> Iterator[Field]:
    """Percentiles of each command's times in microseconds, from counts in powers of two: see metrics/stats.py."""
    if value_of(server, "latency-tracking") == "no":
        return
    asked = value_of(server, "latency-tracking-info-percentiles").split()
    for name, record in server.stats.timed():
        told = ",".join(f"p{percent}={record.percentile(float(percent)):.3f}" for percent in asked)
        yield f"latency_percentiles_usec_{name}", told


def keyspace(server: Context) -> Iterator[Field]:
    """avg_ttl is the mean of what keys with an end have left now; Redis' own figure is a moving estimate of that."""
    now_ms = server.store.now_ms()
    counts = server.store.ends()
    for space, entries in enumerate(server.store.index.spaces):
        if entries:
            expires, total_ms = counts[space]
            left_ms = max(0, total_ms // expires - now_ms) if expires else 0
            yield f"db{space}", f"keys={len(entries)},expires={expires},avg_ttl={left_ms}"


def kv(server: Context) -> Iterator[Field]:
    """The arena in blocks, each tier's figures as KV.TIERS has them, how payloads are copied (`native`, see
    storage/memory/copy.py), values on their way, the store's own counters; then every figure of /metrics
    (metrics/metrics.py).

    Values are of any length, so a block is what room is given in: `block_size` bytes, of which a value takes as many as
    it needs. `num_blocks` is all there are, and `full` + `free` is `num_blocks`; what is being written or still being
    read after its key has gone counts as full.
    """
    store = server.store
    blocks, free = store.arena.nbytes // GRAIN_BYTES, store.allocator.free_bytes // GRAIN_BYTES
    yield "block_size", GRAIN_BYTES
    yield "num_blocks", blocks
    yield "full", blocks - free
    yield "free", free
    tiers = store.tiers()
    yield "tiers", ",".join(tiers)
    for tier, figures in tiers.items():
        for name, value in figures.items():
            yield f"{tier}_{name}", value
    if store.arena.fallback is not None:
        yield "memory_fallback", " ".join(store.arena.fallback.split())
    yield "native", KIND
    yield "bodies_in_flight", server.admission.receiving
    yield "bodies_waiting", len(server.admission.queue)
    yield "bodies_given_up", server.admission.given_up
    yield "bodies_waiting_for_disk", len(server.admission.disk_room)
    yield "memory_lane_clients", len(server.shm.clients)
    yield "memory_lane_leases", server.shm.leases
    yield "reservations", len(server.parts)
    yield "reservations_bytes", server.parts.held_bytes
    yield "reservations_committed", server.parts.committed
    yield "reservations_aborted", server.parts.aborted
    yield "reservations_given_up", server.parts.given_up
    for name, value in store.stats.as_dict().items():
        yield f"store_{name}", value
    if store.tiering is not None:
        for name, value in store.tiering.stats.as_dict().items():
            yield f"tier_{name}", value
    if store.gpu is not None:
        for name, value in store.gpu.stats.as_dict().items():
            yield f"gpu_{name}", value
    yield from _sets(server)
    yield from ((name, f"{value:.6g}" if isinstance(value, float) else int(value)) for name, value in fields(server))


def _sets(server: Context) -> Iterator[Field]:
    """What became of every value that a client wanted stored: `set_total` is the sum of the others."""
    stored, counted = server.store.stats, server.stats
    outcomes = {
        "created": stored.created,
        "forced": stored.overwritten - counted.sets_duplicate,
        "duplicate": counted.sets_duplicate,
        "existed": counted.sets_existed,
        "error": stored.refused,
    }
    yield "set_total", sum(outcomes.values())
    for name, value in outcomes.items():
        yield f"set_{name}", value


# ---- the command ---------------------------------------------------------------------------------------------------

SECTIONS: dict[str, tuple[str, Callable[[Context], Fields]]] = {
    "server": ("Server", server_facts),
    "clients": ("Clients", clients),
    "memory": ("Memory", memory),
    "persistence": ("Persistence", persistence),
    "stats": ("Stats", stats),
    "replication": ("Replication", replication),
    "cpu": ("CPU", cpu),
    "modules": ("Modules", nothing),
    "commandstats": ("Commandstats", commandstats),
    "errorstats": ("Errorstats", errorstats),
    "latencystats": ("Latencystats", latencystats),
    "cluster": ("Cluster", cluster),
    "keyspace": ("Keyspace", keyspace),
    "kv": ("Kv", kv),
}
"""Every section by the name that INFO takes, in the order in which they are printed."""

DEFAULT_SECTIONS = tuple(name for name in SECTIONS if name not in ("commandstats", "latencystats"))
"""What INFO says when it is not asked for something else; `all` and `everything` leave nothing out."""


@command(
    "info",
    arity=-1,
    flags="loading stale",
    acl="slow dangerous",
    group="server",
    tips="nondeterministic_output request_policy:all_shards response_policy:special",
    complexity="O(1), and O(N) in the number of keys for those that expire",
    syntax="[section [section ...]]",
    summary="What the server is, holds and has done.",
)
def info(session: Caller, args: list[bytes]) -> Reply:
    """INFO [section ...]: in any case and order, `default`, `all`, `everything`; unknown ones are empty."""
    asked = {arg.lower().decode("latin-1") for arg in args[1:]} or {"default"}
    if asked & {"all", "everything"}:
        asked |= set(SECTIONS)
    if "default" in asked:
        asked |= set(DEFAULT_SECTIONS)
    return verbatim(session, report(session.server, asked))


def report(server: Context, sections: Iterable[str]) -> str:
    """The text of the named sections, in INFO's order; each begins with its title, a blank line between two."""
    texts = []
    for name, (title, section) in SECTIONS.items():
        if name in sections:
            lines = "".join(f"{field}:{value}\r\n" for field, value in section(server))
            texts.append(f"# {title}\r\n{lines}")
    return "\r\n".join(texts)
