"""The sections of INFO that count: what has happened since the start or CONFIG RESETSTAT, and what lies where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvredis.server.config.settings import value_of
from kvredis.server.metrics.metrics import fields
from kvredis.storage.memory.allocator import GRAIN_BYTES
from kvredis.storage.memory.copy import KIND

from .sections import Field, zeros

if TYPE_CHECKING:
    from kvredis.server.server import Server


def stats(server: Server) -> Iterator[Field]:
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
    yield "io_threaded_reads_processed", 0
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


def commandstats(server: Server) -> Iterator[Field]:
    """A line for each command that was called or refused."""
    for name, record in list(server.stats.commands.items()):
        usec = record.nanoseconds // 1000
        each = usec / record.calls if record.calls else 0.0
        yield (
            f"cmdstat_{name}",
            f"calls={record.calls},usec={usec},usec_per_call={each:.2f},"
            f"rejected_calls={record.rejected_calls},failed_calls={record.failed_calls}",
        )


def errorstats(server: Server) -> Iterator[Field]:
    """Errors that were answered, by their first word."""
    for code, count in sorted(server.stats.errors.items()):
        yield f"errorstat_{code}", f"count={count}"


def latencystats(server: Server) -> Iterator[Field]:
    """Percentiles of each command's times in microseconds, from counts in powers of two: see metrics/stats.py."""
    if value_of(server, "latency-tracking") == "no":
        return
    asked = value_of(server, "latency-tracking-info-percentiles").split()
    for name, record in server.stats.timed():
        told = ",".join(f"p{percent}={record.percentile(float(percent)):.3f}" for percent in asked)
        yield f"latency_percentiles_usec_{name}", told


def keyspace(server: Server) -> Iterator[Field]:
    """avg_ttl is the mean of what keys with an end have left now; Redis' own figure is a moving estimate of that."""
    now_ms = server.store.now_ms()
    counts = server.store.ends()
    for space, entries in enumerate(server.store.index.spaces):
        if entries:
            expires, total_ms = counts[space]
            left_ms = max(0, total_ms // expires - now_ms) if expires else 0
            yield f"db{space}", f"keys={len(entries)},expires={expires},avg_ttl={left_ms}"


def kv(server: Server) -> Iterator[Field]:
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
    yield "bodies_in_flight", server.claims.receiving
    yield "bodies_waiting", len(server.claims.queue)
    yield "bodies_given_up", server.claims.given_up
    yield "bodies_waiting_for_disk", len(server.claims.disk_room)
    yield "memory_lane_clients", len(server.lane.clients)
    yield "memory_lane_leases", server.lane.leases
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
    yield from _sets(server)
    yield from ((name, f"{value:.6g}" if isinstance(value, float) else int(value)) for name, value in fields(server))


def _sets(server: Server) -> Iterator[Field]:
    """What became of every value that somebody wanted stored: `set_total` is the sum of the others."""
    stored, door = server.store.stats, server.stats
    outcomes = {
        "created": stored.created,
        "forced": stored.overwritten - door.sets_duplicate,
        "duplicate": door.sets_duplicate,
        "existed": door.sets_existed,
        "error": stored.refused,
    }
    yield "set_total", sum(outcomes.values())
    for name, value in outcomes.items():
        yield f"set_{name}", value
