"""MEMORY: what one value costs, and what the whole server holds. Looking does not count as use.

The figures are the store's own accounts: "allocated" is what values hold in the arena and beside it, "resident" is the
process. Nothing is ever moved and no allocator sits between the arena and its extents, so what Redis says of its
allocator's fragmentation is said here of the arena's holes.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from kvredis.server.client.memory import held_by_all
from kvredis.server.context import Caller, Context
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import NOT_AN_INTEGER, OK, SYNTAX_ERROR, Reply, bulk, integer, map_reply, verbatim
from kvredis.storage.entry import ENTRY_OVERHEAD_BYTES

from .command import help_reply
from .registry import container, subcommand

LITTLE_BYTES = 5 * 1024 * 1024
"""Below this nothing is said about the shape of memory: Redis' line as well."""

FULL_RATIO = 0.5
"""A largest hole below this share of what is free is worth a word."""

container(
    "memory",
    since="4.0.0",
    group="server",
    complexity="Depends on subcommand.",
    summary="What values cost.",
)


@subcommand(
    "memory|usage",
    arity=-3,
    flags="readonly",
    keys=(2, 2, 1),
    acl="read slow",
    access="RO",
    since="4.0.0",
    syntax="key [SAMPLES count]",
    summary="Bytes of memory that a key and its value take, rounding and bookkeeping included.",
)
def memory_usage(session: Caller, args: list[bytes]) -> Reply:
    """MEMORY USAGE key [SAMPLES n]; samples are checked and mean nothing for a string."""
    for at in range(3, len(args), 2):
        if args[at].upper() != b"SAMPLES" or at + 1 == len(args):
            return SYNTAX_ERROR
        samples = parse_integer(args[at + 1])
        if samples is None:
            return NOT_AN_INTEGER
        if samples < 0:
            return SYNTAX_ERROR
    entry = session.store.find(args[2], session.space)
    return session.nil if entry is None else integer(entry.memory_bytes)


@subcommand(
    "memory|stats",
    arity=2,
    acl="slow",
    since="4.0.0",
    tips="nondeterministic_output request_policy:all_shards response_policy:special",
    summary="What the server's memory is used for.",
)
def memory_stats(session: Caller, args: list[bytes]) -> Reply:
    """MEMORY STATS: Redis' names, in its order."""
    pairs: list[tuple[Reply, Reply]] = []
    for name, value in figures(session.server).items():
        if isinstance(value, dict):
            shown = map_reply(session, [(bulk(part), integer(count)) for part, count in value.items()])
        else:
            shown = integer(value) if isinstance(value, int) else double(session, value)
        pairs.append((bulk(name), shown))
    return map_reply(session, pairs)


@subcommand(
    "memory|doctor",
    arity=2,
    acl="slow",
    since="4.0.0",
    tips="nondeterministic_output request_policy:all_shards response_policy:special",
    summary="What there is to say about the server's memory, in words.",
)
def memory_doctor(session: Caller, args: list[bytes]) -> Reply:
    """MEMORY DOCTOR."""
    return verbatim(session, report(session.server))


@subcommand(
    "memory|purge",
    arity=2,
    acl="slow",
    since="4.0.0",
    tips="request_policy:all_shards response_policy:all_succeeded",
    summary="Give back what is not needed.",
)
def memory_purge(session: Caller, args: list[bytes]) -> Reply:
    """MEMORY PURGE: what the interpreter and the C library keep for reuse. The arena stays what it is: its pages were
    asked for at the start."""
    session.server.client_memory.trim()
    return OK


@subcommand(
    "memory|malloc-stats",
    arity=2,
    acl="slow",
    since="4.0.0",
    tips="nondeterministic_output request_policy:all_shards response_policy:special",
    summary="The arena's own account of its extents.",
)
def memory_malloc_stats(session: Caller, args: list[bytes]) -> Reply:
    """MEMORY MALLOC-STATS: a line for each figure of each tier."""
    lines = [f"{tier}.{name}: {value}" for tier, told in session.store.tiers().items() for name, value in told.items()]
    holes = sorted((hole.length for hole in session.store.allocator.holes()), reverse=True)
    lines.append(f"memory.holes: {len(holes)}")
    lines.append(f"memory.largest_holes: {' '.join(map(str, holes[:10]))}")
    return verbatim(session, "\n".join(lines) + "\n")


@subcommand("memory|help", arity=2, flags="loading stale", acl="slow", since="4.0.0", summary="Print this help.")
def memory_help(session: Caller, args: list[bytes]) -> Reply:
    """MEMORY HELP."""
    return help_reply("memory")


def double(session: Caller, value: float) -> bytes:
    """A number with a fraction: `,1.5` in RESP3, a bulk in RESP2; the shortest text that means just this number."""
    text = repr(value).removesuffix(".0")
    return f",{text}\r\n".encode() if session.resp == 3 else bulk(text)


Figures = dict[str, int | float | dict[str, int]]


def figures(server: Context) -> Figures:
    """The fields of MEMORY STATS, in Redis' order."""
    store = server.store
    clients, beside = held_by_all(server)
    used, rss = store.used_bytes + beside, resident_bytes()
    keys = len(store.index)
    dataset = store.live_bytes + store.inline_bytes - keys * ENTRY_OVERHEAD_BYTES
    free, largest = store.allocator.free_bytes, store.allocator.longest_bytes
    peak = server.stats.note_used(used)
    told: Figures = {
        "peak.allocated": peak,
        "total.allocated": used,
        "startup.allocated": 0,
        "replication.backlog": 0,
        "clients.slaves": 0,
        "clients.normal": clients,
        "cluster.links": 0,
        "aof.buffer": 0,
        "lua.caches": 0,
        "functions.caches": 0,
    }
    for space, entries in enumerate(store.index.spaces):
        if entries:
            told[f"db.{space}"] = {
                "overhead.hashtable.main": len(entries) * ENTRY_OVERHEAD_BYTES,
                "overhead.hashtable.expires": 0,
                "overhead.hashtable.slot-to-keys": 0,
            }
    return told | {
        "overhead.total": used - dataset,
        "keys.count": keys,
        "keys.bytes-per-key": used // keys if keys else 0,
        "dataset.bytes": dataset,
        "dataset.percentage": 100 * dataset / used if used else 0.0,
        "peak.percentage": 100 * used / peak if peak else 0.0,
        "allocator.allocated": used,
        "allocator.active": store.arena.nbytes,
        "allocator.resident": rss,
        "allocator-fragmentation.ratio": free / largest if largest else 1.0,
        "allocator-fragmentation.bytes": free - largest,
        "allocator-rss.ratio": rss / store.arena.nbytes,
        "allocator-rss.bytes": rss - store.arena.nbytes,
        "rss-overhead.ratio": 1.0,
        "rss-overhead.bytes": 0,
        "fragmentation": rss / used if used else 0.0,
        "fragmentation.bytes": rss - used,
    }


def report(server: Context) -> str:
    """The text of MEMORY DOCTOR."""
    store = server.store
    if store.used_bytes < LITTLE_BYTES:
        return "There is too little in memory to say anything about it: fill the cache and ask again.\n"
    free, largest = store.allocator.free_bytes, store.allocator.longest_bytes
    said: list[str] = []
    if store.arena.fallback is not None:
        said.append(f"The arena has small pages: {' '.join(store.arena.fallback.split())}")
    if free > store.arena.nbytes // 10 and largest < free * FULL_RATIO:
        said.append(
            f"{free} bytes are free, but no hole is longer than {largest}: values of one size would fit better."
        )
    if store.retired_bytes > store.arena.nbytes // 10:
        said.append(f"{store.retired_bytes} bytes are held by readers of values that are gone: look for slow readers.")
    clients, _ = held_by_all(server)
    if clients > store.arena.nbytes // 10:
        said.append(f"{clients} bytes are held by clients: look at tot-mem in CLIENT LIST.")
    if store.stats.refused:
        said.append(f"{store.stats.refused} values found no room: everything that could leave was being read.")
    return "".join(f"* {line}\n" for line in said) or "There is nothing to complain about.\n"


# ---- process ---------------------------------------------------------------------------------------------------------
#
# What the operating system says of this process: its size in memory.


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Memory that the process has now: the arena's touched small pages included, hugetlb pages not, as the kernel
    counts."""
    return int(STATM.read_text().split()[1]) * PAGE_BYTES


def resident_peak_bytes() -> int:
    """The most that it ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
