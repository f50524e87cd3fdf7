"""The sections of INFO that say what the server is and holds.

maxmemory is the arena, used_memory what values hold in it and beside it, used_memory_rss the process. Redis' figures of
its allocator are those of the arena: commands/memory.py says how.
"""

from __future__ import annotations

import os
import platform
import resource
import select
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvredis import __version__
from kvredis.server.commands.connection import REDIS_VERSION
from kvredis.server.commands.memory import figures as memory_figures
from kvredis.server.config.settings import value_of

from .process import machine_bytes, resident_bytes, resident_peak_bytes

if TYPE_CHECKING:
    from kvredis.server.server import Server

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


def nothing(server: Server) -> Fields:
    """A section that has only its title."""
    return ()


def server_facts(server: Server) -> Iterator[Field]:
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
    yield "io_threads_active", int(server.senders.is_active)
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


def clients(server: Server) -> Iterator[Field]:
    """Who is connected, and what for."""
    sessions = server.sessions.values()
    yield "connected_clients", len(server.sessions)
    yield "cluster_connections", 0
    yield "maxclients", server.maxclients
    yield "client_recent_max_input_buffer", max((each.pending_bytes for each in sessions), default=0)
    yield "client_recent_max_output_buffer", max((each.unsent_bytes for each in sessions), default=0)
    yield "blocked_clients", len(server.blocked) + len(server.pause.waiting)
    yield "tracking_clients", len(server.tracking.clients)
    yield "pubsub_clients", sum(each.subscriptions > 0 for each in sessions)
    yield "watching_clients", sum(bool(each.watching) for each in sessions)
    yield "clients_in_timeout_table", len(server.blocked)
    yield "total_watched_keys", len(server.watchers)
    yield "total_blocking_keys", 0
    yield "total_blocking_keys_on_nokey", 0


def memory(server: Server) -> Iterator[Field]:
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


def persistence(server: Server) -> Iterator[Field]:
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


def replication(server: Server) -> Fields:
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


def cpu(server: Server) -> Iterator[Field]:
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


def cluster(server: Server) -> Fields:
    """Whether this is a node of one; CLUSTER INFO says more."""
    return [("cluster_enabled", int(server.cluster is not None))]
