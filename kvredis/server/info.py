"""INFO: Redis' sections under Redis' field names, with this server's own figures in them, and `# Kv`.

Tools drop a whole scrape over one missing field, so what cannot happen here (forks, replicas, scripts) is reported as
Redis reports it when it has not happened. Everything else is measured: maxmemory is the arena, used_memory what values
hold in it and beside it, used_memory_rss the process.
"""

from __future__ import annotations

import os
import platform
import resource
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvredis import __version__

from .commands import command
from .connection import REDIS_VERSION
from .replies import Reply, verbatim
from .settings import value_of

if TYPE_CHECKING:
    from .server import Server
    from .session import Session

Fields = Iterable[tuple[str, object]]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STATM = Path("/proc/self/statm")

DEFAULT_SECTIONS = (
    "server", "clients", "memory", "persistence", "stats", "replication", "cpu", "modules", "errorstats", "cluster",
    "keyspace", "kv",
)  # fmt: skip
"""What INFO says when it is not asked for something else; `all` and `everything` add commandstats."""


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
def info(session: Session, args: list[bytes]) -> Reply:
    """INFO [section ...]: in any case and order, `default`, `all`, `everything`; unknown ones are empty."""
    asked = {arg.lower().decode("latin-1") for arg in args[1:]} or {"default"}
    if asked & {"all", "everything"}:
        asked |= set(SECTIONS)
    if "default" in asked:
        asked |= set(DEFAULT_SECTIONS)
    return verbatim(session, report(session.server, asked))


def report(server: Server, sections: Iterable[str]) -> str:
    """The text of the named sections, in INFO's order; each begins with its title, a blank line between two."""
    texts = []
    for name, (title, fields) in SECTIONS.items():
        if name in sections:
            lines = "".join(f"{field}:{value}\r\n" for field, value in fields(server))
            texts.append(f"# {title}\r\n{lines}")
    return "\r\n".join(texts)


def human_bytes(nbytes: int) -> str:
    """A size as Redis prints it for people: 1002.00K, 5.00G."""
    if nbytes < 1024:
        return f"{nbytes}B"
    power = min((nbytes.bit_length() - 1) // 10, 5)
    return f"{nbytes / 1024**power:.2f}{' KMGTP'[power]}"


def _server(server: Server) -> Iterator[tuple[str, object]]:
    uptime_s = int(time.monotonic() - server.started_s)
    yield "redis_version", REDIS_VERSION
    yield "redis_git_sha1", "00000000"
    yield "redis_git_dirty", 0
    yield "redis_build_id", 0
    yield "redis_mode", "standalone"
    yield "server_name", "kvredis"
    yield "kvredis_version", __version__
    yield "os", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "arch_bits", 64 if sys.maxsize > 2**32 else 32
    yield "monotonic_clock", "POSIX clock_gettime"
    yield "multiplexing_api", "epoll" if hasattr(select, "epoll") else "select"
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
    yield "config_file", ""
    yield "io_threads_active", 0


def _clients(server: Server) -> Iterator[tuple[str, object]]:
    sessions = server.sessions.values()
    yield "connected_clients", len(server.sessions)
    yield "cluster_connections", 0
    yield "maxclients", server.maxclients
    yield "client_recent_max_input_buffer", max((each.pending_bytes for each in sessions), default=0)
    yield "client_recent_max_output_buffer", max((each.unsent_bytes for each in sessions), default=0)
    yield "blocked_clients", 0
    yield "tracking_clients", 0
    yield "pubsub_clients", 0
    yield "clients_in_timeout_table", 0
    yield "total_blocking_keys", 0


def _memory(server: Server) -> Iterator[tuple[str, object]]:
    store = server.store
    used, capacity = store.used_bytes, store.arena.nbytes
    dataset = store.live_bytes + store.inline_bytes
    rss = int(STATM.read_text().split()[1]) * PAGE_BYTES
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    machine = os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    yield "used_memory", used
    yield "used_memory_human", human_bytes(used)
    yield "used_memory_rss", rss
    yield "used_memory_rss_human", human_bytes(rss)
    yield "used_memory_rss_peak", peak_rss
    yield "used_memory_overhead", used - dataset
    yield "used_memory_startup", 0
    yield "used_memory_dataset", dataset
    yield "used_memory_dataset_perc", f"{100 * dataset / used if used else 0:.2f}%"
    yield "total_system_memory", machine
    yield "total_system_memory_human", human_bytes(machine)
    yield "used_memory_lua", 0
    yield "used_memory_scripts", 0
    yield "number_of_cached_scripts", 0
    yield "maxmemory", capacity
    yield "maxmemory_human", human_bytes(capacity)
    yield "maxmemory_policy", value_of(server, "maxmemory-policy")
    yield "mem_fragmentation_ratio", f"{rss / used if used else 0:.2f}"
    yield "mem_fragmentation_bytes", rss - used
    yield "mem_not_counted_for_evict", 0
    yield "mem_clients_slaves", 0
    yield "mem_clients_normal", sum(each.pending_bytes + each.unsent_bytes for each in server.sessions.values())
    yield "mem_aof_buffer", 0
    yield "mem_allocator", store.arena.pages
    yield "active_defrag_running", 0
    yield "lazyfree_pending_objects", 0
    yield "lazyfreed_objects", 0


def _persistence(server: Server) -> Fields:
    return {
        "loading": 0,
        "async_loading": 0,
        "current_cow_size": 0,
        "rdb_changes_since_last_save": 0,
        "rdb_bgsave_in_progress": 0,
        "rdb_last_save_time": 0,
        "rdb_last_bgsave_status": "ok",
        "rdb_last_bgsave_time_sec": -1,
        "rdb_current_bgsave_time_sec": -1,
        "rdb_saves": 0,
        "rdb_last_cow_size": 0,
        "aof_enabled": 0,
        "aof_rewrite_in_progress": 0,
        "aof_rewrite_scheduled": 0,
        "aof_last_rewrite_time_sec": -1,
        "aof_current_rewrite_time_sec": -1,
        "aof_last_bgrewrite_status": "ok",
        "aof_last_write_status": "ok",
        "aof_last_cow_size": 0,
        "module_fork_in_progress": 0,
    }.items()


def _stats(server: Server) -> Iterator[tuple[str, object]]:
    stats, store = server.stats, server.store.stats
    yield "total_connections_received", stats.connections_received
    yield "total_commands_processed", stats.commands_processed
    received_bytes, sent_bytes = server.traffic()
    yield "total_net_input_bytes", received_bytes
    yield "total_net_output_bytes", sent_bytes
    yield "rejected_connections", stats.connections_rejected
    yield from dict.fromkeys(("sync_full", "sync_partial_ok", "sync_partial_err"), 0).items()
    yield "expired_keys", store.expired
    yield "evicted_keys", store.evicted
    yield "evicted_clients", 0
    yield "keyspace_hits", store.hits
    yield "keyspace_misses", store.misses
    nothing = (
        "pubsub_channels", "pubsub_patterns", "pubsubshard_channels", "latest_fork_usec", "total_forks",
        "migrate_cached_sockets", "slave_expires_tracked_keys", "active_defrag_hits", "active_defrag_misses",
        "active_defrag_key_hits", "active_defrag_key_misses", "tracking_total_keys", "tracking_total_items",
        "tracking_total_prefixes",
    )  # fmt: skip
    yield from dict.fromkeys(nothing, 0).items()
    yield "total_error_replies", stats.error_replies


def _replication(server: Server) -> Fields:
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


def _cpu(server: Server) -> Iterator[tuple[str, object]]:
    for whose, suffix in ((resource.RUSAGE_SELF, ""), (resource.RUSAGE_CHILDREN, "_children")):
        usage = resource.getrusage(whose)
        yield f"used_cpu_sys{suffix}", f"{usage.ru_stime:.6f}"
        yield f"used_cpu_user{suffix}", f"{usage.ru_utime:.6f}"


def _nothing(server: Server) -> Fields:
    return ()


def _commandstats(server: Server) -> Iterator[tuple[str, object]]:
    for name, stats in list(server.stats.commands.items()):
        usec = stats.nanoseconds // 1000
        each = usec / stats.calls if stats.calls else 0.0
        yield (
            f"cmdstat_{name}",
            f"calls={stats.calls},usec={usec},usec_per_call={each:.2f},"
            f"rejected_calls={stats.rejected_calls},failed_calls={stats.failed_calls}",
        )


def _errorstats(server: Server) -> Iterator[tuple[str, object]]:
    for code, count in list(server.stats.errors.items()):
        yield f"errorstat_{code}", f"count={count}"


def _cluster(server: Server) -> Fields:
    return [("cluster_enabled", 0)]


def _keyspace(server: Server) -> Iterator[tuple[str, object]]:
    """avg_ttl is the mean of what keys with an end have left now; Redis' own figure is a moving estimate of that."""
    now_ms = time.time_ns() // 1_000_000
    for space, entries in enumerate(server.store.index.spaces):
        if entries:
            ends = [entry.expire_at_ms for entry in list(entries.values()) if entry.expire_at_ms]
            left_ms = sum(max(0, end - now_ms) for end in ends) // len(ends) if ends else 0
            yield f"db{space}", f"keys={len(entries)},expires={len(ends)},avg_ttl={left_ms}"


def _kv(server: Server) -> Iterator[tuple[str, object]]:
    """Each tier's figures as KV.TIERS has them, then the store's own counters."""
    tiers = server.store.tiers()
    yield "tiers", ",".join(tiers)
    for tier, figures in tiers.items():
        for name, value in figures.items():
            yield f"{tier}_{name}", value
    if server.store.arena.fallback is not None:
        yield "memory_fallback", " ".join(server.store.arena.fallback.split())
    for name, value in server.store.stats.as_dict().items():
        yield f"store_{name}", value


SECTIONS: dict[str, tuple[str, Callable[[Server], Fields]]] = {
    "server": ("Server", _server),
    "clients": ("Clients", _clients),
    "memory": ("Memory", _memory),
    "persistence": ("Persistence", _persistence),
    "stats": ("Stats", _stats),
    "replication": ("Replication", _replication),
    "cpu": ("CPU", _cpu),
    "modules": ("Modules", _nothing),
    "commandstats": ("Commandstats", _commandstats),
    "errorstats": ("Errorstats", _errorstats),
    "cluster": ("Cluster", _cluster),
    "keyspace": ("Keyspace", _keyspace),
    "kv": ("Kv", _kv),
}
"""Every section by the name that INFO takes, in the order in which they are printed."""
