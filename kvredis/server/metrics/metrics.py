"""Every figure that the server tells of itself, in one table: INFO `# Kv`, /metrics and the page all read it.

Nothing is counted here. A figure says where its number stands already and what it means; what would cost too much to
keep is worked out when a reader asks. Names and units are those of Prometheus: base units, `_total` for what only
grows, and labels whose values are known beforehand.

To add a figure: a Figure in the table of what it is about (SERVER, CLIENTS, BLOCKS, MEMORY, DISK, TIMES). INFO and the
page show it under its name, /metrics with `kvredis_` in front, and the reference in docs/ is made of the tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvredis.server.client.blocked import Reason
from kvredis.server.context import Context
from kvredis.server.http.health import trouble
from kvredis.storage.background import Priority
from kvredis.storage.stats import Times

PREFIX: Final = "kvredis_"


class Kind(Enum):
    """What may become of a figure's numbers."""

    COUNTER = "counter"
    """Grows, or begins anew: at a start or CONFIG RESETSTAT."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    """Its values are Times."""


Value = float | Times
Values = Mapping[str, Value]
"""By the value of the figure's label; by "" for a figure without one."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `name` is without the prefix and without what Prometheus appends; `read` gives no value for what this
    server does not have."""

    name: str
    kind: Kind
    help: str
    read: Callable[[Seen], Values]
    label: str = ""

    @property
    def full_name(self) -> str:
        """As Prometheus shows it; of a histogram what its series begin with."""
        return PREFIX + self.name + ("_total" if self.kind is Kind.COUNTER else "")


@dataclass(slots=True)
class Seen:
    """A server at one moment: what several figures need is looked up once."""

    server: Context
    tiers: Mapping[str, Mapping[str, int | str]] = field(init=False)
    memory: Mapping[str, int] = field(init=False)
    disk: Mapping[str, int] = field(init=False)
    """Empty without a disk tier, as is `tier`."""
    tier: Mapping[str, int] = field(init=False)
    gpu: Mapping[str, int] = field(init=False)
    """Figures and counters of the tier in GPU memory; empty without one."""

    def __post_init__(self) -> None:
        store = self.server.store
        self.tiers = store.tiers()
        self.memory = _numbers(self.tiers["memory"])
        self.disk = _numbers(self.tiers.get("disk", {}))
        self.tier = {} if store.tiering is None else store.tiering.stats.as_dict()
        self.gpu = {} if store.gpu is None else _numbers(self.tiers["gpu"]) | store.gpu.stats.as_dict()


def _numbers(figures: Mapping[str, int | str]) -> dict[str, int]:
    return {name: value for name, value in figures.items() if isinstance(value, int)}


def read_all(server: Context) -> list[tuple[Figure, Values]]:
    """Every figure that has a value now."""
    seen = Seen(server)
    return [(figure, values) for figure in FIGURES if (values := figure.read(seen))]


def fields(server: Context) -> Iterator[tuple[str, float]]:
    """The same for INFO: `name` or `name_label`; of times their count and sum. Commands have sections of their own."""
    for figure, values in read_all(server):
        if figure.label == "command":
            continue
        name = figure.full_name.removeprefix(PREFIX)
        for label, value in values.items():
            base = f"{name}_{label}" if label else name
            if isinstance(value, Times):
                yield f"{base}_count", sum(value.counts)
                yield f"{base}_sum", value.nanoseconds / 1e9
            else:
                yield base, value


def _one(read: Callable[[Seen], Value]) -> Callable[[Seen], Values]:
    return lambda seen: {"": read(seen)}


def _counter(name: str, help: str, read: Callable[[Seen], float]) -> Figure:
    return Figure(name, Kind.COUNTER, help, _one(read))


def _gauge(name: str, help: str, read: Callable[[Seen], float]) -> Figure:
    return Figure(name, Kind.GAUGE, help, _one(read))


def _of_memory(name: str, key: str, help: str) -> Figure:
    return _gauge(name, help, lambda seen: seen.memory[key])


def _of_disk(name: str, key: str, help: str, kind: Kind = Kind.GAUGE) -> Figure:
    """One number of the disk tier; none without one."""
    return Figure(name, kind, help, lambda seen: {"": seen.disk[key]} if seen.disk else {})


def _of_tier(name: str, key: str, help: str) -> Figure:
    """One counter of what goes between memory and disk; none without a disk."""
    return Figure(name, Kind.COUNTER, help, lambda seen: {"": seen.tier[key]} if seen.tier else {})


def _of_gpu(name: str, key: str, help: str, kind: Kind = Kind.GAUGE) -> Figure:
    """One number of the tier in GPU memory; none without one."""
    return Figure(f"gpu_memory_{name}", kind, help, lambda seen: {"": seen.gpu[key]} if seen.gpu else {})


# ---- the server itself -------------------------------------------------------------------------------------------


def _cluster(seen: Seen) -> Values:
    cluster = seen.server.cluster
    return {} if cluster is None else {"": cluster.myself.slots}


def _started(seen: Seen) -> float:
    return round(time.time() - seen.server.uptime_s)


SERVER: Final = (
    _gauge("uptime_seconds", "For how long the server has run.", lambda seen: seen.server.uptime_s),
    _gauge("start_time_seconds", "When it began, in Unix time.", _started),
    _gauge("healthy", "1 if /health says ok.", lambda seen: trouble(seen.server) is None),
    Figure("cluster_slots", Kind.GAUGE, "Hash slots that this node of a cluster serves.", _cluster),
    _counter("internal_errors", "Exceptions in commands: bugs.", lambda seen: seen.server.stats.handler_exceptions),
    _counter("error_replies", "Error replies.", lambda seen: seen.server.stats.error_replies),
)


# ---- clients and what they send ------------------------------------------------------------------------------------


def _clients(seen: Seen) -> Values:
    counts = {"tcp": 0, "tls": 0, "unix": 0, "http": 0 if seen.server.http is None else seen.server.http.connections}
    for session in seen.server.sessions.values():
        counts[session.kind] += 1
    return counts


def _waiting(seen: Seen) -> Values:
    server = seen.server
    return {
        "turn": len(server.admission.queue),
        "disk_room": len(server.admission.disk_room),
        "disk_read": server.blocked.count(Reason.DISK_READ),
        "gpu_room": server.blocked.count(Reason.GPU_ROOM),
        "copy": server.blocked.count(Reason.COPY),
        "keys": server.blocked.count(Reason.KEYS),
    }


def _closed(seen: Seen) -> Values:
    stats = seen.server.stats
    return {
        "query_buffer": stats.query_limit_disconnections,
        "output_buffer": stats.output_limit_disconnections,
        "stalled_value": seen.server.admission.given_up,
    }


def _received(seen: Seen) -> Values:
    traffic = seen.server.traffic()
    return {kind: each.input_bytes for kind, each in traffic.items()} | {"shared_memory": seen.server.stats.put_bytes}


def _sent(seen: Seen) -> Values:
    stats = seen.server.stats
    sent = {kind: each.output_bytes for kind, each in seen.server.traffic().items()}
    spliced = min(stats.spliced_bytes, sent["unix"])
    sent["unix"] -= spliced
    return sent | {"spliced": spliced, "shared_memory": seen.server.store.stats.leased_bytes}


CLIENTS: Final = (
    Figure("clients", Kind.GAUGE, "Connected clients.", _clients, "lane"),
    _gauge("clients_max", "Connections that are accepted at a time.", lambda seen: seen.server.maxclients),
    _counter("connections", "Connections that were accepted.", lambda seen: seen.server.stats.connections_received),
    _counter("connections_rejected", "Sent away at once.", lambda seen: seen.server.stats.connections_rejected),
    _counter("tls_handshakes_failed", "Clients lost in their handshake.",
             lambda seen: seen.server.listeners.handshakes_failed),
    Figure("clients_closed", Kind.COUNTER, "Clients that the server hung up on.", _closed, "reason"),
    Figure("clients_waiting", Kind.GAUGE, "Clients whose command waits, by what for.", _waiting, "what"),
    Figure("acl_denied", Kind.COUNTER, "Refusals by ACL rules and wrong passwords.",
           lambda seen: dict(seen.server.acl.log.denials), "reason"),
    Figure("received_bytes", Kind.COUNTER, "Bytes received; in shared memory those copied out of what a client lends.",
           _received, "lane"),
    Figure("sent_bytes", Kind.COUNTER, "Bytes sent; spliced ones without a copy; in shared memory those leased.",
           _sent, "lane"),
    _gauge("outgoing_bytes", "Replies that clients have not taken yet.",
           lambda seen: sum(each.unsent_bytes for each in seen.server.sessions.values())),
    _gauge("lane_clients", "Clients that read the arena by themselves.", lambda seen: len(seen.server.shm.clients)),
)  # fmt: skip


# ---- what is looked for and stored ---------------------------------------------------------------------------------


def _by_tier(seen: Seen, total: int, from_disk: str) -> Values:
    """Hits of both tiers, parted: the disk's are blocks that a client had to wait for. Such a block is counted when it
    has come, a moment before it is read; the memory's share must not shrink meanwhile, or it would look begun anew."""
    if not seen.tier:
        return {"memory": total}
    in_memory = seen.server.stats.floor(from_disk, total - seen.tier[from_disk])
    return {"memory": in_memory, "disk": seen.tier[from_disk]}


def _hits(seen: Seen) -> Values:
    on_gpu = {"gpu": seen.gpu["leased_blocks"]} if seen.gpu else {}
    return {**_by_tier(seen, seen.server.store.stats.hits - on_gpu.get("gpu", 0), "demanded"), **on_gpu}


def _stores(seen: Seen) -> Values:
    stored, counted = seen.server.store.stats, seen.server.stats
    return {
        "created": stored.created,
        "overwritten": stored.overwritten,
        "existed": counted.sets_existed,
        "refused": stored.refused,
        "aborted": stored.aborted,
    }


def _left(seen: Seen) -> Values:
    stats, floor = seen.server.store.stats, seen.server.stats.floor
    left = {
        "room": floor("room", stats.evicted - stats.evicted_away),
        "expired": stats.expired,
        "deleted": stats.deleted,
        "flushed": stats.flushed,
        "overwritten": stats.overwritten,
    }
    if not seen.tier:
        return left
    lost = seen.tier["lost"]
    return left | {
        "spilled": seen.tier["unloaded"],
        "lost": lost,
        "disk_room": floor("disk_room", stats.evicted_away - lost),
    }


BLOCKS: Final = (
    Figure("hits", Kind.COUNTER, "Reads that found a block, by where it was.",
           _hits, "tier"),
    _counter("misses", "Reads that found nothing.", lambda seen: seen.server.store.stats.misses),
    Figure("hit_tokens", Kind.COUNTER, "Tokens of blocks that were read whole, as far as they say how many they hold.",
           lambda seen: _by_tier(seen, seen.server.store.stats.hit_tokens, "demanded_tokens"), "tier"),
    Figure("stores", Kind.COUNTER, "Values that clients wanted stored, by what became of them.", _stores, "outcome"),
    Figure("evictions", Kind.COUNTER, "Blocks that left, by why; spilled: memory alone; disk_room, lost: the disk.",
           _left, "reason"),
    _counter("evicted_bytes", "Bytes that left all tiers for want of room.",
             lambda seen: seen.server.store.stats.evicted_bytes),
    _gauge("values_receiving", "Values on their way into the arena.", lambda seen: seen.server.admission.receiving),
    _gauge("reservations", "Values that are written in parts.", lambda seen: len(seen.server.parts)),
    _gauge("leases", "Holds of readers on blocks.", lambda seen: seen.memory["leases"]),
    _gauge("lane_leases", "Those of clients that read the arena by themselves.", lambda seen: seen.server.shm.leases),
    _counter("leases_revoked", "Leases ended by their limit.", lambda seen: seen.server.store.stats.leases_revoked),
)  # fmt: skip


# ---- memory ----------------------------------------------------------------------------------------------------------


def _fragmentation(seen: Seen) -> float:
    free = seen.memory["free"]
    return 1 - seen.memory["largest_free"] / free if free else 0.0


MEMORY: Final = (
    _of_memory("arena_capacity_bytes", "capacity", "Size of the arena."),
    _of_memory("arena_free_bytes", "free", "Of the arena, what nothing lies in."),
    _of_memory("arena_largest_free_bytes", "largest_free", "The longest value that needs no block to leave."),
    _gauge("arena_fragmentation_ratio", "1 - largest free / free: 0 is one hole.", _fragmentation),
    _of_memory("arena_reserved_bytes", "reserved", "Of the arena, what is being written."),
    _of_memory("memory_used_bytes", "used", "What values hold, small ones beside the arena included."),
    _of_memory("inline_bytes", "inline", "Small values, which lie beside the arena."),
    _of_memory("memory_blocks", "entries", "Blocks in memory."),
    _of_memory("arena_pages", "pages", "Pages of the arena."),
    _of_memory("arena_page_size_bytes", "page_size", "Size of one page."),
    _gauge("arena_hugepages", "1 if the arena is of pages of 2 MiB.",
           lambda seen: seen.memory["page_size"] >= 2 * 1024**2),
    _gauge("arena_page_locked", "1 if its pages are locked in memory.",
           lambda seen: seen.tiers["memory"]["page_locked"] not in ("no", "pending")),
)  # fmt: skip


# ---- disk ------------------------------------------------------------------------------------------------------------


def _errors(seen: Seen) -> Values:
    return {what: seen.disk[f"{what}_errors"] for what in ("read", "write", "index", "sync")} if seen.disk else {}


def _queues(seen: Seen) -> Values:
    tiering = seen.server.store.tiering
    if tiering is None:
        return {}
    jobs = tiering.io.figures()
    names = {"promote": Priority.DEMAND, "prefetch": Priority.PREFETCH, "spill": Priority.SPILL}
    return {name: jobs[priority].queued for name, priority in names.items()}


def _prefetches(seen: Seen) -> Values:
    tiering = seen.server.store.tiering
    return {} if tiering is None else {"": tiering.jobs.under_way}


def _promoted(seen: Seen) -> Values:
    tier = seen.tier
    if not tier:
        return {}
    ahead = seen.server.stats.floor("prefetched", tier["promoted"] - tier["demanded"])
    return {"demand": tier["demanded"], "prefetch": ahead}


def _unsaved(seen: Seen) -> Values:
    return {"": seen.memory["unsaved"]} if "unsaved" in seen.memory else {}


DISK: Final = (
    _of_disk("disk_capacity_bytes", "capacity", "What the disk tier may take."),
    _of_disk("disk_used_bytes", "used", "Records, superseded ones included."),
    _of_disk("disk_superseded_bytes", "superseded", "Records that are kept for a crash until their keys' newer values "
             "are on disk."),
    _of_disk("disk_file_bytes", "files", "Files of the disk tier."),
    _of_disk("disk_blocks", "entries", "Blocks on disk."),
    _of_disk("disk_read_bytes", "read_bytes", "Read from the device.", Kind.COUNTER),
    _of_disk("disk_written_bytes", "written_bytes", "Written to the device.", Kind.COUNTER),
    Figure("disk_errors", Kind.COUNTER, "What the device refused.", _errors, "operation"),
    _of_disk("disk_quarantined", "quarantined", "Records that were not what had been written, by their checksum.",
             Kind.COUNTER),
    _of_disk("disk_evictions", "evicted", "Blocks that left the disk for want of room.", Kind.COUNTER),
    Figure("disk_queue_jobs", Kind.GAUGE, "Jobs that wait for a thread of the disk.", _queues, "queue"),
    Figure("prefetch_jobs", Kind.GAUGE, "Prefetches that are not over.", _prefetches),
    Figure("unsaved_blocks", Kind.GAUGE, "Blocks that are in memory alone.", _unsaved),
    _of_tier("spilled_blocks", "spilled", "Blocks written to disk."),
    _of_tier("spilled_bytes", "spilled_bytes", "Of those."),
    Figure("promoted_blocks", Kind.COUNTER, "Blocks brought back, for a client that waited or ahead of need.",
           _promoted, "cause"),
    _of_tier("promoted_bytes", "promoted_bytes", "Of those."),
    _of_tier("spill_dropped_blocks", "spill_dropped", "Left unwritten: the disk was too slow, full or broken."),
    _of_tier("spill_failed_blocks", "spill_failed", "Writes that came to nothing."),
    _of_tier("spill_waits", "spill_waits", "Values that waited for the disk to make room."),
    _of_tier("lost_blocks", "lost", "Blocks on disk that could not be read back as they were: misses."),
)  # fmt: skip


# ---- GPU memory ------------------------------------------------------------------------------------------------------


GPU: Final = (
    _of_gpu("capacity_bytes", "capacity", "GPU memory that the server has taken."),
    _of_gpu("used_bytes", "used", "Of it, what values hold, half-written ones included."),
    _of_gpu("reserved_bytes", "reserved", "Of it, what is being written."),
    _of_gpu("blocks", "entries", "Blocks on the GPU."),
    _of_gpu("leases", "leases", "Holds on blocks on the GPU."),
    _of_gpu("lost", "lost", "1 if the GPU answers nothing any more and was given up."),
    _of_gpu("stored_blocks", "stored", "Blocks that clients wrote on the GPU.", Kind.COUNTER),
    _of_gpu("stored_bytes", "stored_bytes", "Of those.", Kind.COUNTER),
    _of_gpu("leased_blocks", "leased_blocks", "Blocks that clients read on the GPU.", Kind.COUNTER),
    _of_gpu("leased_bytes", "leased_bytes", "Of those.", Kind.COUNTER),
    _of_gpu("spilled_blocks", "spilled", "Blocks copied to memory, for a reader or to make room.", Kind.COUNTER),
    _of_gpu("spilled_bytes", "spilled_bytes", "Of those.", Kind.COUNTER),
    _of_gpu("promoted_blocks", "promoted", "Blocks copied to the GPU, leased again by clients there.", Kind.COUNTER),
    _of_gpu("promoted_bytes", "promoted_bytes", "Of those.", Kind.COUNTER),
    _of_gpu("spill_dropped_blocks", "spill_dropped", "Left uncopied: room was wanted sooner.", Kind.COUNTER),
    _of_gpu("spill_waits", "spill_waits", "Values that waited for room on the GPU.", Kind.COUNTER),
    _of_gpu("refused_blocks", "refused", "Values for which there was no room on the GPU.", Kind.COUNTER),
    _of_gpu("lost_blocks", "lost_blocks", "Blocks that the GPU alone had and did not give: misses.", Kind.COUNTER),
)  # fmt: skip


# ---- times -----------------------------------------------------------------------------------------------------------


def _copies(seen: Seen) -> Values:
    stats, store = seen.server.stats, seen.server.store
    times = {"receive": store.stats.receiving, "send": stats.sending, "put": stats.putting}
    tiering = store.tiering
    if store.gpu is not None:
        times["gpu"] = store.gpu.stats.spilling
    return times if tiering is None else times | {"spill": tiering.stats.spilling, "promote": tiering.stats.promoting}


TIMES: Final = (
    Figure("copy_seconds", Kind.HISTOGRAM, "Time in each copy: receive (values of 256 KiB and more, from there being "
           "room to being stored), send (what was not taken at once), put (out of lent memory), spill, promote, "
           "gpu (to memory).",
           _copies, "copy"),
    Figure("command_seconds", Kind.HISTOGRAM, "Time in each command; those of a run of equal ones count as their mean.",
           lambda seen: dict(seen.server.stats.timed()), "command"),
    Figure("commands_rejected", Kind.COUNTER, "Commands refused before they ran.",
           lambda seen: {name: each.rejected_calls for name, each in list(seen.server.stats.commands.items())},
           "command"),
    Figure("commands_failed", Kind.COUNTER, "Commands that answered with an error.",
           lambda seen: {name: each.failed_calls for name, each in list(seen.server.stats.commands.items())},
           "command"),
)  # fmt: skip

FIGURES: Final[tuple[Figure, ...]] = (*SERVER, *CLIENTS, *BLOCKS, *MEMORY, *DISK, *GPU, *TIMES)
"""The table."""
